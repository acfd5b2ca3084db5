"""Messages of JAX and of the TPU compiler, and what they mean.

A rule is a pattern, what it means, and what to do. Both texts may use the pattern's groups: `{0}`, `{1}`. The
first rule whose pattern is found holds.
"""

from __future__ import annotations

import re

Rule = tuple[str, str, str]


def in_plain_words(text: str, rules: tuple[Rule, ...]) -> tuple[str, str]:
    """What the message means and what to do, by the first rule that knows it; empty texts if none does."""
    for pattern, what, advice in rules:
        found = re.search(pattern, text, re.S)
        if found:
            words = [_tidy(group or "") for group in found.groups()]
            return what.format(*words), advice.format(*words)
    return "", ""


def _tidy(text: str) -> str:
    return re.sub(r"Blocked\(block_size=(\d+)\)", r"\1", text)


_ALIGNED = (
    "If it always is one, say so: pl.multiple_of(index, {1}). If it is not, load the aligned block around it "
    "and select in registers (pltpu.roll, jnp.where), or index a dimension before the last two"
)
_WIDE = "Use 32-bit types in the kernel, and cast outside of it: vector registers have 32-bit lanes"

COMPILER_RULES: tuple[Rule, ...] = (
    (
        r"cannot statically prove that index in dimension (\d+) is a multiple of (\d+)",
        "the index into dimension {0} of a load or store must be a multiple of {1}, "
        "and the compiler can't see that it is",
        _ALIGNED,
    ),
    (
        r"index at dimension (\d+) is divisible by the tile dimension (\d+)",
        "a slice must start at a multiple of {1} in dimension {0}, and the compiler can't see that it does",
        _ALIGNED,
    ),
    (
        r"Slice shape along dimension (\d+) must be aligned to tiling \((\d+)\)",
        "a slice must be a multiple of {1} long in dimension {0}",
        "Copy whole tiles and ignore what is too much, or pad the array",
    ),
    (r"^[su]64 operand", "a kernel can't take 64-bit integers", _WIDE),
    (r"^f64 operand", "a kernel can't take float64", _WIDE),
    (r"^c\d+ operand", "a kernel can't take complex numbers", "Pass the real and the imaginary part"),
    (
        r"Unsupported matmul (RHS|LHS|ACC)\w* type on target: vector<\S*x(\w+)>",
        "its matrix units can't multiply {1} operands",
        "Cast to bfloat16 before the product (int8 on chips that have it)",
    ),
    (
        r"Bad lhs/rhs type: '?vector<[\dx]*(\w+)>|float acc with (int) lhs",
        "its matrix units can't multiply these operands ({0}{1})",
        "Multiply int8, bfloat16 or float32; sums of int8 products are int32, those of floats float32",
    ),
    (
        r"Invalid vector type for (?:load|store).*?x[fF]16",
        "this chip has no float16 in kernels",
        "Use bfloat16 or float32 in the kernel, and cast outside of it",
    ),
    (
        r"unsupported shape cast",
        "this reshape would move elements between vector registers",
        "In a kernel, reshape only dimensions before the last two, or split and merge whole multiples of 128 "
        "of the last; else reshape outside of it",
    ),
    (
        r"[Ss]tride on last dim is not 1",
        "a load with a stride in the last dimension",
        "Stride over rows (the dimension before the last), or split the array in its last dimension outside",
    ),
    (
        r"Unsupported TPU generation|not supported on this hardware|[Uu]nsupported target",
        "this chip can't do this operation",
        "Compute it in another way, or in a wider dtype",
    ),
)

_BLOCK = r"Block spec for (\S+) in .*? has block shape (\(.*?\)), array shape (\([^)]*\))"

LOWERING_RULES: tuple[Rule, ...] = (
    (
        r"divisible by 8 and 128.*?" + _BLOCK,
        "block {1} of {0}, an array {2}: its last two sizes must be multiples of 8 and 128, or the array's",
        "Choose such sizes for the BlockSpec, or pad the array",
    ),
    (
        r"rank 1 block shapes.*?" + _BLOCK,
        "block {1} of {0}, an array {2}: its size must be the array's, a multiple of 1024, or a power of two "
        "that is at least 128 (256 for 16-bit types, 512 for 8-bit types)",
        "Choose such a size, or make the array 2-D: (1, n) with blocks (1, size)",
    ),
    (
        r"Unimplemented primitive in Pallas TPU lowering for (?:tc|\w+): ([\w\-]+)",
        "Pallas has no `{0}` for TPU kernels",
        "Compute it outside of the kernel, or write it with what there is (arithmetic, reductions, matmul, "
        "pltpu.roll, masks)",
    ),
    (
        r"captures constants (\[.*?\])\.",
        "the kernel uses arrays from outside: {0}",
        "Pass them as inputs of pallas_call, or make them in the kernel (jax.lax.broadcasted_iota, jnp.full)",
    ),
    (
        r"Cannot store scalars to VMEM",
        "a scalar is stored to VMEM, which takes vectors",
        "Store a vector: ref[...] = jnp.where(mask, value, ref[...]); or keep scalars in SMEM",
    ),
    (
        r"(Loads|Stores) are only allowed on VMEM and SMEM references",
        "{0} of an array that stays in HBM",
        "Copy a part of it to VMEM first (pltpu.make_async_copy, or pltpu.emit_pipeline over blocks)",
    ),
    (
        r"DMA source and target shape mismatch",
        "a copy between refs of different shapes",
        "Slice both refs to the same shape: ref.at[pl.ds(start, size), :]",
    ),
    (
        r"'tpu.iota' op result .*?must be vector of integer",
        "a range of floating-point numbers",
        "Make integers and cast them: jax.lax.broadcasted_iota(jnp.int32, shape, dim).astype(jnp.float32)",
    ),
    (
        r"VectorElementTypeInterface",
        "a value has a dtype that a kernel can't hold, such as a complex one",
        "Use real 32-, 16- or 8-bit types; pass the real and the imaginary part of complex numbers",
    ),
    (
        r"contracting dims must be of size 1",
        "a product that sums over more than one dimension",
        "Contract one dimension: reshape or loop over the others, and add",
    ),
    (
        r"expected strides to be confined to \[1, 2\)",
        "a slice with a step",
        "Load rows with a stride: ref[pl.ds(start, size, stride), :]. The last dimension takes none",
    ),
    (
        r"must be 32-bit integers when using placeholders",
        "pl.debug_print formats 32-bit integers only",
        "Drop the placeholder, pl.debug_print('x:', x), or cast to int32",
    ),
    (
        r"collective_id has to be (?:unspecified|specified)",
        "collective_id does not fit the kernel",
        "Give one exactly if the kernel uses pltpu.get_barrier_semaphore()",
    ),
    (
        r"SparseCore is not available on the current device|does not have SparseCores",
        "this chip has no SparseCore",
        "Choose a chip that has one, or write the kernel for the TensorCore",
    ),
    (
        r"Mosaic kernels cannot be automatically partitioned",
        "a kernel in a program over several devices must say how it is split",
        "Wrap the function that calls it in jax.shard_map",
    ),
)
