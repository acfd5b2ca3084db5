"""`torch.nn.attention.flex_attention` computed by our kernel, on both devices."""

from __future__ import annotations

# Tests call with unpacked tensors and wrong types on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOptionalMemberAccess=false
# pyright: reportOptionalSubscript=false, reportUnusedExpression=false
import contextlib
import functools
import itertools
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import bridge  # isort: skip
import pytest
import torch

from tpu_kernels import masks
from tpu_kernels.dropins import flex_attention as drop_in
from tpu_kernels.dropins import flex_blocks, flex_exact
from tpu_kernels.dropins.install import install, overrides, uninstall

# Taken before anything is installed, as programs do.
from torch.nn.attention.flex_attention import (  # isort: skip
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
    or_masks,
)
from .flex_oracle import Exact, Example, check, exact

B, HQ, HKV, L, S, D, DV = 2, 4, 2, 37, 53, 16, 8
N = L + S

# For tensors on the CPU with `overrides()`, where `install()` for tpu changes nothing.
on_cpu = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("tpu", marks=pytest.mark.slow)], indirect=True
)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator())


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def documents(length: int) -> torch.Tensor:
    return torch.randint(0, 4, (B, length), generator=generator()).sort(-1).values


def soft_cap(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return 2.0 * torch.tanh(score / 2.0)


def neighbourhood(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Neighbours on a grid 8 wide."""
    return ((q % 8 - kv % 8).abs() <= 2) & ((q // 8 - kv // 8).abs() <= 1)


def dilated(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return ((q - kv).abs() <= 16) & ((q - kv) % 4 == 0)


EXAMPLES = [
    Example("nothing"),
    Example("relative position", lambda t: lambda s, b, h, q, kv: s + (q - kv)),
    Example(
        "learned ALiBi",
        lambda t: lambda s, b, h, q, kv: s - t["slopes"][h] * (q - kv).abs(),
        tables={"slopes": random(HQ).abs()},  # its gradient is a sum of one sign's multiples
    ),
    Example("soft cap and causal", lambda t: soft_cap, lambda t: causal),
    Example("causal by score", lambda t: lambda s, b, h, q, kv: torch.where(q >= kv, s, -float("inf"))),
    Example("sliding window", None, lambda t: lambda b, h, q, kv: (q >= kv) & (q - kv <= 7)),
    Example("dilated window", None, lambda t: dilated),
    Example(
        "prefix",
        None,
        lambda t: or_masks(lambda b, h, q, kv: kv < t["prefix"][b], causal),
        {"prefix": torch.tensor([3, 20])},
    ),
    Example(
        "documents",
        None,
        lambda t: and_masks(lambda b, h, q, kv: t["q_ids"][b, q] == t["kv_ids"][b, kv], causal),
        {"q_ids": documents(L), "kv_ids": documents(S)},
    ),
    Example("grid", None, lambda t: neighbourhood),
    Example(
        "table of distances",
        lambda t: lambda s, b, h, q, kv: s * 0.5 + t["table"][h, q - kv + S],
        lambda t: causal,
        {"table": random(HQ, N)},
    ),
    Example(
        "bias for each batch entry and head",
        lambda t: lambda s, b, h, q, kv: s + t["bias"][b, h, q, kv],
        tables={"bias": random(B, HQ, L, S)},
    ),
    Example(
        "a table that is computed before",
        lambda t: (lambda doubled: lambda s, b, h, q, kv: s + doubled[h, q])(t["table"] * 2),
        tables={"table": random(HQ, L)},
    ),
    Example("one head sees all", None, lambda t: lambda b, h, q, kv: (h == 1) | (q >= kv)),
    Example("nothing is seen by some", None, lambda t: lambda b, h, q, kv: (q > 4) & (kv > 3) & (kv <= q)),
]
BY_NAME = {example.name: example for example in EXAMPLES}
ON_ONE_DEVICE = [
    pytest.param(name, device, marks=() if device == quick else pytest.mark.slow)
    for name, quick in zip(BY_NAME, itertools.cycle(["tpu", "cpu"]), strict=False)
    for device in ("tpu", "cpu")
]
"""Each example on both devices, of which one is quick: the devices in turn."""


@pytest.fixture
def ours(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Our kernel stands in on the device of the test. A list that gets longer with each of its calls, by
    "shapes" if torch only asks for the result's shape."""
    calls: list[str] = []
    compute = drop_in.splash_attention

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append("shapes" if flex_exact.only_shapes() else "")
        return compute(*args, **kwargs)

    monkeypatch.setattr(drop_in, "splash_attention", counted)
    if device.type == "tpu":
        install()
    try:
        with bridge.interpret("reference"):
            yield calls
    finally:
        uninstall()


def standing_in(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return overrides() if device.type == "cpu" else contextlib.nullcontext()


def compiled_for(device: torch.device) -> Any:
    """torch.compile; on the CPU without inductor, whose work begins after ours is done."""
    return functools.partial(
        torch.compile, fullgraph=True, backend="aot_eager" if device.type == "cpu" else "tpu"
    )


def inputs(batch: int = B) -> list[torch.Tensor]:
    """query, key, value and the cotangents of output and lse."""
    shapes = ((batch, HQ, L, D), (batch, HKV, S, D), (batch, HKV, S, DV), (batch, HQ, L, DV), (batch, HQ, L))
    source = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=source) for shape in shapes]


def run(
    example: Example,
    device: torch.device,
    function: Any = flex_attention,
    make: Any = create_block_mask,
    block: int = 16,
) -> tuple[dict[str, torch.Tensor], Any]:
    """Results and gradients, and the mask."""
    q, k, v, g, g_lse = inputs()
    leaves = {n: t.to(device).requires_grad_() for n, t in {"q": q, "k": k, "v": v}.items()}
    tables = {n: t.clone().to(device) for n, t in example.tables.items()}
    leaves |= {n: t.requires_grad_() for n, t in tables.items() if t.is_floating_point()}
    score_mod, mask_mod = example.functions(tables)
    mask = None
    if mask_mod is not None:
        mask = make(mask_mod, B, HQ, L, S, device=device, BLOCK_SIZE=block)
    with standing_in(device):
        o, aux = function(
            *(leaves[n] for n in "qkv"), score_mod, mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
        )
    gradients = torch.autograd.grad([o, aux.lse], list(leaves.values()), [g.to(device), g_lse.to(device)])
    return {"o": o, "lse": aux.lse, **dict(zip(leaves, gradients, strict=True))}, mask


def expected(example: Example, visible: torch.Tensor | None = None) -> Exact:
    """What `run` must give for it."""
    q, k, v, g, g_lse = inputs()
    return exact(example, q, k, v, g, g_lse, visible)


@pytest.mark.parametrize(("name", "device"), ON_ONE_DEVICE, indirect=["device"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch.compile
def test_examples(name: str, device: torch.device, ours: list[str]) -> None:
    actual, _ = run(BY_NAME[name], device)
    assert ours
    check(actual, expected(BY_NAME[name]))


@pytest.mark.parametrize(
    ("name", "device"),
    [pytest.param("documents", "tpu", marks=pytest.mark.slow), ("table of distances", "cpu")],
    indirect=["device"],
)
def test_examples_in_the_kernel(name: str, device: torch.device, ours: list[str]) -> None:
    with bridge.interpret("fast"):
        actual, _ = run(BY_NAME[name], device)
    check(actual, expected(BY_NAME[name]))


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("documents", "cpu"),
        ("table of distances", "tpu"),
        pytest.param("documents", "tpu", marks=pytest.mark.slow),
        pytest.param("table of distances", "cpu", marks=pytest.mark.slow),
        pytest.param("nothing", "cpu", marks=pytest.mark.slow),
        pytest.param("nothing", "tpu", marks=pytest.mark.slow),
    ],
    indirect=["device"],
)
def test_compiled(name: str, device: torch.device, ours: list[str]) -> None:
    compiled = compiled_for(device)(flex_attention)
    actual, _ = run(BY_NAME[name], device, compiled)
    assert ours
    check(actual, expected(BY_NAME[name]))


@pytest.mark.parametrize("device", ["tpu", pytest.param("cpu", marks=pytest.mark.slow)], indirect=True)
def test_mask_made_in_the_compiled_function(device: torch.device, ours: list[str]) -> None:
    q, k, v, *_ = (t.to(device) for t in inputs())

    @compiled_for(device)
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> Any:
        def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
            return (q - kv).abs() < window

        mask = create_block_mask(mask_mod, None, None, L, S, device=device, BLOCK_SIZE=16)
        return flex_attention(q * 2, k, v, block_mask=mask, enable_gqa=True)

    with standing_in(device):
        results = [attend(q, k, v, window) for window in (5, 9)]
    assert ours
    q, k, v, g, g_lse = inputs()
    for result, window in zip(results, (5, 9), strict=True):
        seen = (torch.arange(L)[:, None] - torch.arange(S)).abs() < window
        check({"o": result}, only("o", exact(Example("window"), q * 2, k, v, g, g_lse, seen)))


def only(name: str, want: Exact) -> Exact:
    return Exact({name: want.values[name]}, want.allowed)


def test_the_oracle_is_torchs_function() -> None:
    """On the CPU and without our kernels, in float64."""
    q, k, v, g, g_lse = inputs()
    for name in ("learned ALiBi", "documents", "nothing is seen by some"):
        example = BY_NAME[name]
        wide = {n: t.double() if t.is_floating_point() else t for n, t in example.tables.items()}
        score_mod, mask_mod = example.functions(wide)
        mask = None if mask_mod is None else create_block_mask(mask_mod, B, HQ, L, S, device="cpu")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="flex_attention called without")
            o, aux = flex_attention(
                q.double(), k.double(), v.double(), score_mod, mask,
                enable_gqa=True, return_aux=AuxRequest(lse=True),
            )  # fmt: skip
        want = exact(example, q, k, v, g, g_lse)
        torch.testing.assert_close(o, want.values["o"], atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(aux.lse, want.values["lse"], atol=1e-12, rtol=1e-12)


# Block lists -------------------------------------------------------------------------------------------


def lists(device: torch.device, *, full: bool, mask_mod: Any = None) -> tuple[BlockMask, torch.Tensor]:
    """Random lists for blocks of 16, and what is seen by them."""
    rows, columns = -(-L // 16), -(-S // 16)
    kind = torch.randint(0, 3 if full else 2, (B, 1, rows, columns), generator=generator())
    kind[0, 0, 1] = 0  # sees nothing

    def ordered(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return table.sum(-1).int(), torch.argsort(table.int(), dim=-1, descending=True, stable=True).int()

    given = [*ordered(kind == 1), *(ordered(kind == 2) if full else ())]
    mask = BlockMask.from_kv_blocks(
        *(t.to(device) for t in given), BLOCK_SIZE=16, mask_mod=mask_mod, seq_lengths=(L, S)
    )
    elements = kind.repeat_interleave(16, 2)[:, :, :L].repeat_interleave(16, 3)[..., :S]
    by_function: Any = True
    if mask_mod is not None:
        by_function = mask_mod(None, None, torch.arange(L)[:, None], torch.arange(S))
    return mask, (elements == 2) | ((elements == 1) & by_function)


@pytest.mark.parametrize(
    ("device", "full", "mask_mod", "compiled"),
    [
        ("tpu", False, None, False),
        pytest.param("tpu", True, causal, False, marks=pytest.mark.slow),
        pytest.param("tpu", True, causal, True, marks=pytest.mark.slow),
        ("cpu", True, None, True),
        ("cpu", True, causal, False),
    ],
    indirect=["device"],
)
def test_lists_are_honoured(
    full: bool, mask_mod: Any, compiled: bool, device: torch.device, ours: list[str]
) -> None:
    mask, visible = lists(device, full=full, mask_mod=mask_mod)
    example = Example("lists", None, lambda t: causal)
    function = compiled_for(device)(flex_attention) if compiled else flex_attention
    actual, _ = run(example, device, function, lambda *args, **kwargs: mask)
    check(actual, expected(example, visible))


def sizes(length: int = S) -> flex_blocks.Sizes:
    return flex_blocks.Sizes(B, HQ, length, length)


def as_lists(mask: BlockMask) -> flex_blocks.Lists:
    return flex_blocks.Lists(
        *mask.BLOCK_SIZE, mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    )


def test_lists_that_say_what_the_function_says_are_left_out() -> None:
    formula = masks.function(causal)
    made = create_block_mask(causal, None, None, S, S, device="cpu", BLOCK_SIZE=16)
    assert flex_blocks.visible(formula, as_lists(made), sizes()) is formula
    made.kv_num_blocks[0, 0, 2] = 0  # hides more
    changed = flex_blocks.visible(formula, as_lists(made), sizes())
    assert changed is not None and len(changed.captures) > 0


def test_memory_of_lists_grows_with_blocks() -> None:
    """128k positions: a table of all pairs would be 16 GiB."""
    length = 2**17
    blocks = length // 128
    count = torch.full((1, 1, blocks), 3, dtype=torch.int32)
    place = (torch.arange(blocks)[:, None] + torch.arange(blocks)) % blocks
    mask = BlockMask.from_kv_blocks(count, place[None, None].int(), compute_q_blocks=False)
    seen = flex_blocks.visible(masks.full(), as_lists(mask), sizes(length))
    assert seen is not None
    assert sum(t.numel() * t.element_size() for t in seen.captures) < 2**19


# torch's rules -----------------------------------------------------------------------------------------


def test_scale_strides_and_lse(device: torch.device, ours: list[str]) -> None:
    q, k, v, g, g_lse = inputs()
    transposed = q.to(device).transpose(1, 2).contiguous().transpose(1, 2)
    with standing_in(device):
        o, lse = _with_lse(transposed, k.to(device), v.to(device))
    assert ours and o.stride() == transposed[..., :DV].transpose(1, 2).contiguous().transpose(1, 2).stride()
    # Twice the default scale is twice the query.
    want = exact(Example(""), 2 * q, k, v, g, g_lse)
    check({"o": o, "lse": lse}, Exact({n: want.values[n] for n in ("o", "lse")}, want.allowed))


def _with_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="return_lse is deprecated", category=FutureWarning)
        return flex_attention(q, k, v, scale=2 * D**-0.5, enable_gqa=True, return_lse=True)


def test_highest_scores(tpu: torch.device) -> None:
    q, k, v, *_ = inputs()
    install()
    try:
        mask = create_block_mask(lambda b, h, q, kv: (kv < q) | (q == 3), B, HQ, L, S, device=tpu)
        o, aux = flex_attention(
            *(t.to(tpu) for t in (q, k, v)), soft_cap, mask,
            enable_gqa=True, return_aux=AuxRequest(lse=True, max_scores=True),
        )  # fmt: skip
    finally:
        uninstall()
    s = 2 * torch.tanh(q.double() @ k.double().repeat_interleave(2, 1).mT * D**-0.5 / 2)
    rows, columns = torch.arange(L)[:, None], torch.arange(S)
    s = torch.where((columns < rows) | (rows == 3), s, -torch.inf)
    want = s.amax(-1)
    assert torch.equal(aux.max_scores.cpu() == -torch.inf, want == -torch.inf)
    seen = want > -torch.inf
    # The scores are at most 2, and the products before are sums of D products.
    torch.testing.assert_close(
        aux.max_scores.cpu().double()[seen], want[seen], rtol=0, atol=(D + 32) * 2.0**-24 * 4
    )


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16(autocast: bool, device: torch.device, ours: list[str]) -> None:
    q, k, v, *_ = (t.to(device) for t in inputs())
    rounded = [t.bfloat16() for t in (q, k, v)]
    given = [q, k, v] if autocast else rounded
    with standing_in(device), torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        o = flex_attention(given[0], given[1], given[2], soft_cap, enable_gqa=True)
    assert o.dtype == torch.bfloat16 and ours
    wide = [t.cpu().double() for t in rounded]
    s = 2 * torch.tanh(wide[0] @ wide[1].repeat_interleave(2, 1).mT * D**-0.5 / 2)
    want = s.softmax(-1) @ wide[2].repeat_interleave(2, 1)
    # Each value is a mean of values of v: probabilities, v's products and the result are rounded to bfloat16.
    bound = 3 * 2.0**-9 * (s.softmax(-1) @ wide[2].repeat_interleave(2, 1).abs()) + 1e-6
    assert bool(((o.cpu().double() - want).abs() <= bound).all())


def other_lengths(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return flex_attention(q, k, v, block_mask=made_for(q, L + 1, S), enable_gqa=True)


def made_for(q: torch.Tensor, rows: int, columns: int) -> BlockMask:
    return create_block_mask(causal, None, None, rows, columns, device=q.device, BLOCK_SIZE=16)


WRONG = {
    "heads": lambda q, k, v: flex_attention(q, k, v),
    "heads that don't divide": lambda q, k, v: flex_attention(q[:, :3], k, v, enable_gqa=True),
    "rank": lambda q, k, v: flex_attention(q[0], k[0], v[0]),
    "head dimension": lambda q, k, v: flex_attention(q[..., 1:], k, v, enable_gqa=True),
    "batch": lambda q, k, v: flex_attention(q, k[:1], v[:1], enable_gqa=True),
    "longer mask": other_lengths,
    "shorter mask": lambda q, k, v: flex_attention(
        q, k, v, block_mask=made_for(q, L, S - 1), enable_gqa=True
    ),
    "a sliced mask": lambda q, k, v: flex_attention(
        q, k, v, block_mask=made_for(q, L, S)[0], enable_gqa=True
    ),
    "both ways to ask for lse": lambda q, k, v: flex_attention(
        q, k, v, enable_gqa=True, return_lse=True, return_aux=AuxRequest(lse=True)
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_are_torchs(wrong: str, device: torch.device, ours: list[str]) -> None:
    q, k, v, *_ = inputs()
    with pytest.raises(Exception) as torchs:  # noqa: B017
        WRONG[wrong](q, k, v)
    with standing_in(device), pytest.raises(type(torchs.value)) as raised:
        WRONG[wrong](q.to(device), k.to(device), v.to(device))
    assert str(raised.value) == str(torchs.value)


def test_a_function_that_is_not_elementwise_is_left_to_torch(device: torch.device, ours: list[str]) -> None:
    q, k, v, *_ = (t.to(device) for t in inputs())
    rows, columns = random(L, 3).to(device), random(S, 3).to(device)

    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + (rows[q] * columns[kv]).sum()

    with standing_in(device), pytest.warns(UserWarning, match="computed by torch"):
        o = flex_attention(q, k, v, score_mod, enable_gqa=True)
    assert not ours
    s = q.cpu().double() @ k.cpu().double().repeat_interleave(2, 1).mT * D**-0.5
    s = s + rows.cpu().double() @ columns.cpu().double().T
    want = s.softmax(-1) @ v.cpu().double().repeat_interleave(2, 1)
    torch.testing.assert_close(o.cpu().double(), want, atol=1e-5, rtol=1e-5)


# Tables made in the function ----------------------------------------------------------------------------

MADE_INSIDE = {
    "numbers": lambda s, b, h, q, kv: s + torch.tensor([0.1, 0.2, 0.3, 0.4])[h],
    "a range": lambda s, b, h, q, kv: s + torch.arange(HQ)[h],
    "a number": lambda s, b, h, q, kv: s * torch.tensor(0.5),
    "a matrix": lambda s, b, h, q, kv: s + torch.tensor([[1.0, 2.0], [3.0, 4.0]])[h % 2, q % 2],
}


@pytest.mark.parametrize(
    ("made", "device", "compiled"),
    [
        pytest.param("numbers", "cpu", False, marks=pytest.mark.slow),
        pytest.param("numbers", "cpu", True, marks=pytest.mark.slow),
        pytest.param("numbers", "tpu", False, marks=pytest.mark.slow),
        ("numbers", "tpu", True),
        ("a range", "cpu", False),
        pytest.param("a range", "tpu", False, marks=pytest.mark.slow),
        ("a number", "cpu", True),
        ("a matrix", "cpu", False),
    ],
    indirect=["device"],
)
def test_a_table_made_in_the_function(
    made: str, compiled: bool, device: torch.device, ours: list[str]
) -> None:
    example = Example("made", lambda t: MADE_INSIDE[made])
    actual, _ = run(example, device, compiled_for(device)(flex_attention) if compiled else flex_attention)
    assert ours
    check(actual, expected(example))


# 64 bits -----------------------------------------------------------------------------------------------

SECONDS = 1.7e9 + 3 * torch.arange(N, dtype=torch.float64)
IDS = 2**40 + torch.arange(N) // 8


def big_steps(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return ((q * 100003 + kv) * 70001) % 97 > 20


WIDE = {
    "float64 times": lambda t: lambda b, h, q, kv: (t[0][q] - t[0][kv]).abs() < 10,
    "ids above int32": lambda t: lambda b, h, q, kv: t[1][q] == t[1][kv],
    "positions that leave int32": lambda t: big_steps,
    "what is computed of ids leaves int32": lambda t: lambda b, h, q, kv: (t[2][q] * 300_000_000) % 7 > 1,
    "shifted out": lambda t: lambda b, h, q, kv: ((q + 1) << 29) > (kv << 29),
    "rounded": lambda t: lambda b, h, q, kv: (q.float() * 2.0**27).long() >= (kv.float() * 2.0**27).long(),
    "float64 by conversion": lambda t: lambda b, h, q, kv: (q.double() + 1e9) > (kv.double() + 1e9),
    "a table of int64": lambda t: lambda b, h, q, kv: torch.tensor([2**40, 2**41])[h % 2] + q > 2**40 + kv,
}


@pytest.mark.parametrize(
    ("wide", "device"),
    [(name, "cpu") for name in WIDE] + [(name, "tpu") for name in list(WIDE)[:3]],
    indirect=["device"],
)
def test_what_needs_64_bits_is_left_to_torch(wide: str, device: torch.device, ours: list[str]) -> None:
    q, k, v, *_ = inputs()
    tables = [SECONDS, IDS, torch.arange(N) // 4]
    seen = create_mask(WIDE[wide](tables), 1, HQ, L, S, device="cpu")
    assert 0 < int(seen.sum()) < seen.numel()
    function = WIDE[wide]([t.to(device) for t in tables])
    mask = without_lists(function, device)
    with standing_in(device), pytest.warns(UserWarning, match="computed by torch.*(int32|float32)"):
        o = flex_attention(*(t.to(device) for t in (q, k, v)), block_mask=mask, enable_gqa=True)
    assert "" not in ours
    rows = seen.any(-1)[..., None]  # torch's numbers for a row that sees nothing are its own
    torch.testing.assert_close(
        (o.cpu() * rows).double(), attention_of(seen, q, k, v) * rows, atol=1e-5, rtol=1e-5
    )


def without_lists(function: Any, device: torch.device) -> BlockMask:
    """A mask of one block, which is partial: the function alone decides."""
    count = torch.ones((1, 1, 1), dtype=torch.int32, device=device)
    return BlockMask.from_kv_blocks(
        count, torch.zeros_like(count)[..., None], BLOCK_SIZE=128, mask_mod=function, seq_lengths=(L, S)
    )


def attention_of(seen: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    s = q.double() @ k.double().repeat_interleave(2, 1).mT * D**-0.5
    s = torch.where(seen, s, -torch.inf)
    return s.softmax(-1).nan_to_num() @ v.double().repeat_interleave(2, 1)


@pytest.mark.parametrize("wide", ["float64 times", "positions that leave int32"])
def test_what_needs_64_bits_in_a_compiled_function(wide: str, device: torch.device, ours: list[str]) -> None:
    q, k, v, *_ = inputs()
    tables = [SECONDS, IDS, torch.arange(N) // 4]
    seen = create_mask(WIDE[wide](tables), 1, HQ, L, S, device="cpu")
    mask = without_lists(WIDE[wide]([t.to(device) for t in tables]), device)
    compiled = compiled_for(device)(flex_attention)
    with standing_in(device), pytest.warns(UserWarning, match="computed by torch.*(int32|float32)"):
        o = compiled(*(t.to(device) for t in (q, k, v)), block_mask=mask, enable_gqa=True)
    assert "" not in ours
    rows = seen.any(-1)[..., None]
    torch.testing.assert_close(
        (o.cpu() * rows).double(), attention_of(seen, q, k, v) * rows, atol=1e-5, rtol=1e-5
    )


NARROW = {
    "float64 that float32 holds": lambda t: lambda b, h, q, kv: t["half"][q] >= t["half"][kv],
    "int64 that int32 holds": lambda t: lambda b, h, q, kv: (t["ids"][q] - t["ids"][kv]) * 1000 >= 0,
    "large, and in int32": lambda t: lambda b, h, q, kv: (q * 30_000_000) // 5 >= kv * 6_000_000,
    "divided by what may be zero": lambda t: lambda b, h, q, kv: (q % t["ids"][kv].clamp(min=1)) + 1 < 9,
}


@on_cpu
@pytest.mark.parametrize("narrow", NARROW)
def test_what_32_bits_hold_is_ours(narrow: str, ours: list[str], recwarn: pytest.WarningsRecorder) -> None:
    tables = {"half": torch.arange(N, dtype=torch.float64) * 0.5, "ids": torch.arange(N)}
    q, k, v, g, g_lse = inputs()
    seen = create_mask(NARROW[narrow](tables), 1, HQ, L, S, device="cpu")
    with overrides():
        mask = without_lists(NARROW[narrow](tables), torch.device("cpu"))
        o = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    assert "" in ours and not [w for w in recwarn if "computed by torch" in str(w.message)]
    check({"o": o}, only("o", exact(Example("narrow"), q, k, v, g, g_lse, seen)))


@on_cpu
def test_float64_queries_keep_float64_captures(ours: list[str]) -> None:
    q, k, v, *_ = (t.double() for t in inputs())
    mask = without_lists(lambda b, h, q, kv: (SECONDS[q] - SECONDS[kv]).abs() < 10, torch.device("cpu"))
    with overrides():
        o = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    assert ours
    seen = (SECONDS[:L, None] - SECONDS[:S]).abs() < 10
    torch.testing.assert_close(o, attention_of(seen, q, k, v), atol=1e-12, rtol=1e-12)


@on_cpu
def test_lengths_of_a_dynamic_graph_are_bounded(ours: list[str]) -> None:
    """What fits at the first length may not fit at a later one."""
    q, k, v, *_ = inputs()

    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + (q * 40_000_000) % 7

    compiled = torch.compile(flex_attention, fullgraph=True, backend="aot_eager", dynamic=True)
    with overrides():
        first = compiled(q[:, :, :20], k, v, score_mod, enable_gqa=True)
        assert ours
        with pytest.warns(UserWarning, match="int32"):
            compiled(torch.cat([q, q], 2), k, v, score_mod, enable_gqa=True)
    s = q.double()[:, :, :20] @ k.double().repeat_interleave(2, 1).mT * D**-0.5
    want = s.softmax(-1) @ v.double().repeat_interleave(2, 1)  # the same is added to all of a row
    torch.testing.assert_close(first.double(), want, atol=1e-5, rtol=1e-5)


# Where it holds ----------------------------------------------------------------------------------------

CHANGED = """
import sys, bridge, torch
early = sys.argv[1] == "early"
import torch.nn.attention.flex_attention as module
def state():
    names = {f"{m.__name__}.{n}": v for m in [module, torch._higher_order_ops.flex_attention]
             for n, v in vars(m).items() if callable(v)}
    hop = module.flex_attention_hop
    return names, dict(hop.py_kernels), hop.non_fallthrough_keys, type(hop), dict(vars(type(hop)))
if early: before = state()
import tpu_kernels
after = state()
if not early: before = {**after[0]}, *after[1:]
def same(a, b):
    assert a[0].keys() == b[0].keys() and all(a[0][n] is b[0][n] for n in a[0]), "names"
    assert a[1] == b[1] and a[2] == b[2] and a[3:] == b[3:], "the op"
same(before, after)
assert not [n for n, v in after[0].items() if str(getattr(v, "__module__", "")).startswith("tpu_kernels")]
assert not [f for f in after[1].values() if f.__module__.startswith("tpu_kernels")]
tpu_kernels.install()
changed = state()
assert changed[0]["torch.nn.attention.flex_attention._validate_device"].__module__.startswith("tpu_kernels")
tpu_kernels.uninstall()
same(before, state())
if sys.argv[2] == "without compiling": sys.exit()
q = torch.randn(2, 4, 33, 8)
f = torch.compile(module.flex_attention, backend="eager", fullgraph=True)
f(q, q, q, return_lse=True)
with tpu_kernels.overrides():
    f(q, q, q, return_lse=True)
f(q, q, q, return_lse=True)
"""


# Compiling takes as long as all the rest, and looks at what the rest has found to be the same.
@pytest.mark.parametrize(
    ("order", "then"),
    [
        ("early", "compiling"),
        ("late", "without compiling"),
        pytest.param("late", "compiling", marks=pytest.mark.slow),
    ],
)
def test_importing_leaves_torchs_module_as_it_is(order: str, then: str) -> None:
    """`late` imports torch's module after ours."""
    script = CHANGED
    if order == "late":
        script = script.replace("import sys, bridge, torch", "import sys, bridge, torch, tpu_kernels")
    subprocess.run([sys.executable, "-c", script, order, then], check=True, timeout=300)


@pytest.mark.parametrize(
    ("dynamic", "device"),
    [
        (False, "tpu"),
        (True, "cpu"),
        pytest.param(False, "cpu", marks=pytest.mark.slow),
        pytest.param(True, "tpu", marks=pytest.mark.slow),
    ],
    indirect=["device"],
)
@pytest.mark.filterwarnings("ignore:return_lse is deprecated")
def test_a_compiled_function_that_asks_for_the_lse(
    dynamic: bool, device: torch.device, ours: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch has a warning for it, once in a process, which is a part of the graph."""
    import torch.nn.attention.flex_attention as module

    monkeypatch.setattr(module, "_WARNINGS_SHOWN", set())
    q, k, v, *_ = inputs()
    compiled = compiled_for(device)(flex_attention, dynamic=dynamic)
    with standing_in(device):
        o, lse = compiled(*(t.to(device) for t in (q, k, v)), enable_gqa=True, return_lse=True)
    assert ours
    want = expected(Example("nothing"))
    check({"o": o, "lse": lse}, Exact({n: want.values[n] for n in ("o", "lse")}, want.allowed))


@on_cpu
def test_overrides_inside_a_compiled_function(ours: list[str]) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        with overrides():
            return flex_attention(q, k, v, enable_gqa=True)

    q, k, v, *_ = inputs()
    o = attend(q.requires_grad_(), k, v)
    assert ours
    check({"o": o}, only("o", expected(Example("nothing"))))


def test_without_install_nothing_changes(tpu: torch.device) -> None:
    q, k, v, *_ = inputs()
    with overrides():
        pass
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(q.requires_grad_(), k, v, enable_gqa=True)
    with pytest.raises(ValueError, match="only supported on"):
        flex_attention(*(t.detach().to(tpu) for t in (q, k, v)), enable_gqa=True)
