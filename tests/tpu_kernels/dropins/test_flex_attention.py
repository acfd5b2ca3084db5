"""`torch.nn.attention.flex_attention` computed by our kernel, on both devices."""

from __future__ import annotations

# Tests call with unpacked tensors and wrong types on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOptionalMemberAccess=false
# pyright: reportOptionalSubscript=false, reportUnusedExpression=false
import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import bridge  # isort: skip
import pytest
import torch

from tpu_kernels import masks
from tpu_kernels.dropins import flex_attention as drop_in
from tpu_kernels.dropins import flex_blocks
from tpu_kernels.dropins.install import install, overrides, uninstall

# Taken before anything is installed, as programs do.
from torch.nn.attention.flex_attention import (  # isort: skip
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
    or_masks,
)
from .flex_oracle import Exact, Example, check, exact

B, HQ, HKV, L, S, D, DV = 2, 4, 2, 37, 53, 16, 8
N = L + S


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
ON_CPU = {"nothing", "documents", "table of distances", "nothing is seen by some"}
"""Those that run on the CPU too."""


@pytest.fixture
def ours(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Our kernel stands in on the device of the test. A list that gets longer with each of its calls."""
    calls: list[str] = []
    compute = drop_in.splash_attention

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append("")
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


@pytest.mark.parametrize(
    ("name", "device"),
    [(name, "tpu") for name in BY_NAME] + [(name, "cpu") for name in BY_NAME if name in ON_CPU],
    indirect=["device"],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch.compile
def test_examples(name: str, device: torch.device, ours: list[str]) -> None:
    actual, _ = run(BY_NAME[name], device)
    assert ours
    check(actual, expected(BY_NAME[name]))


@pytest.mark.parametrize(
    ("name", "device"), [("documents", "tpu"), ("table of distances", "cpu")], indirect=["device"]
)
def test_examples_in_the_kernel(name: str, device: torch.device, ours: list[str]) -> None:
    with bridge.interpret("fast"):
        actual, _ = run(BY_NAME[name], device)
    check(actual, expected(BY_NAME[name]))


@pytest.mark.parametrize("name", ["documents", "table of distances", "nothing"])
def test_compiled(name: str, device: torch.device, ours: list[str]) -> None:
    compiled = compiled_for(device)(flex_attention)
    actual, _ = run(BY_NAME[name], device, compiled)
    assert ours
    check(actual, expected(BY_NAME[name]))


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
        ("tpu", True, causal, False),
        ("tpu", True, causal, True),
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


def test_without_install_nothing_changes(tpu: torch.device) -> None:
    q, k, v, *_ = inputs()
    with overrides():
        pass
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(q.requires_grad_(), k, v, enable_gqa=True)
    with pytest.raises(ValueError, match="only supported on"):
        flex_attention(*(t.detach().to(tpu) for t in (q, k, v)), enable_gqa=True)
