"""Where `install()` and `overrides()` hold, and that nothing of them stays."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as taken_earlier

import bridge
from tpu_kernels.dropins import attention
from tpu_kernels.dropins.install import install, is_installed, overrides, uninstall


class Spy:
    """Ours, which says so by a result that attention can't have."""

    def __init__(self) -> None:
        self.compute = attention.splash_attention

    def __call__(self, *args: object, **kwargs: object) -> torch.Tensor:
        return self.compute(*args, **kwargs) + 1000  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _marked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(attention, "splash_attention", Spy())
    with bridge.interpret("reference"):
        yield
    uninstall()


def is_ours(result: torch.Tensor) -> bool:
    return bool((result > 500).all())


def qkv(device: str = "cpu") -> Any:
    return [torch.randn(1, 2, 5, 8, device=device) for _ in range(3)]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


# overrides() -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_overrides_holds_inside_whatever_name_a_function_has(device: str) -> None:
    tensors = qkv(device)
    before = taken_earlier(*tensors)
    with overrides():
        for function in (
            taken_earlier,
            F.scaled_dot_product_attention,
            torch._C._nn.scaled_dot_product_attention,
        ):
            assert is_ours(function(*tensors))
    assert torch.equal(taken_earlier(*tensors), before) and not is_ours(before)
    assert F.scaled_dot_product_attention is taken_earlier


def test_overrides_nests_and_ends_with_an_exception() -> None:
    tensors = qkv()
    context = overrides()
    with pytest.raises(ZeroDivisionError):
        with context:
            with context, overrides():
                assert is_ours(attend(*tensors))
            assert is_ours(attend(*tensors))
            raise ZeroDivisionError
    assert not is_ours(attend(*tensors))
    with context:
        assert is_ours(attend(*tensors))
        with torch.device("cpu"):  # another mode of the same kind
            assert is_ours(attend(*tensors))


def test_overrides_decorates() -> None:
    decorated = overrides()(attend)
    assert is_ours(decorated(*qkv())) and decorated.__name__ == "attend"
    assert not is_ours(attend(*qkv()))


def test_overrides_is_of_one_thread() -> None:
    tensors = qkv()
    inside, finished = threading.Event(), threading.Event()
    found: dict[str, bool] = {}

    def other() -> None:
        inside.wait()
        found["other"] = is_ours(attend(*tensors))
        with bridge.interpret("reference"), overrides():
            found["other inside"] = is_ours(attend(*tensors))
        finished.set()

    thread = threading.Thread(target=other)
    thread.start()
    with overrides():
        inside.set()
        finished.wait()
        found["this"] = is_ours(attend(*tensors))
    thread.join()
    assert found == {"other": False, "other inside": True, "this": True}


def test_compiled_functions_have_a_graph_for_inside_and_one_for_outside() -> None:
    tensors = qkv()
    first_outside = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.compiler.reset()
    assert not is_ours(first_outside(*tensors))
    with overrides():
        assert is_ours(first_outside(*tensors))
    assert not is_ours(first_outside(*tensors))

    torch.compiler.reset()
    with overrides():
        first_inside = torch.compile(attend, fullgraph=True, backend="aot_eager")
        assert is_ours(first_inside(*tensors))
    assert not is_ours(first_inside(*tensors))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with overrides():
            ours = attend(q, k, v)
        return ours, attend(q, k, v)

    ours, torchs = both(*tensors)
    assert is_ours(ours) and not is_ours(torchs)


def test_overrides_decorates_no_function_that_runs_later() -> None:
    def generator() -> Any:
        yield attend(*qkv())

    async def coroutine() -> torch.Tensor:
        return attend(*qkv())

    async def generator_of_coroutines() -> Any:
        yield attend(*qkv())

    for function in (generator, coroutine, generator_of_coroutines):
        with pytest.raises(TypeError, match=f"{function.__name__}; write `with overrides"):
            overrides()(function)


# install() ---------------------------------------------------------------------------------------------


def test_install_is_of_the_process_and_of_the_device() -> None:
    on_cpu, on_tpu = qkv(), qkv("tpu")
    before = taken_earlier(*on_tpu)
    install()
    install()
    assert is_installed() and is_ours(taken_earlier(*on_tpu)) and not is_ours(taken_earlier(*on_cpu))
    found: list[bool] = []

    def elsewhere() -> None:
        with bridge.interpret("reference"):
            found.append(is_ours(attend(*on_tpu)))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [True]
    with torch.inference_mode():
        assert is_ours(attend(*qkv("tpu")))
    uninstall()
    assert not is_installed() and torch.equal(taken_earlier(*on_tpu), before)
    uninstall()


def test_install_leaves_the_dispatcher_as_it_was() -> None:
    def table() -> list[str]:
        dump = torch._C._dispatch_dump_table("aten::scaled_dot_product_attention")
        return [line for line in dump.splitlines() if "dropins" in line]

    assert not table()
    install()
    assert len(table()) == 3
    uninstall()
    assert not table()


def test_compiled_functions_notice_install_and_uninstall() -> None:
    tensors = qkv("tpu")
    compiled = torch.compile(attend, fullgraph=True)
    assert not is_ours(compiled(*tensors))
    install()
    assert is_ours(compiled(*tensors))
    uninstall()
    assert not is_ours(compiled(*tensors))


def test_exported_programs_ask_when_they_run() -> None:
    class Module(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attend(q, k, v)

    tensors = tuple(qkv("tpu"))
    program = torch.export.export(Module(), tensors).module()
    assert not is_ours(program(*tensors))
    install()
    assert is_ours(program(*tensors))
    again = torch.export.export(Module(), tensors).module()
    assert is_ours(again(*tensors))
    uninstall()
    assert not is_ours(program(*tensors)) and not is_ours(again(*tensors))
    for module in (program, again):
        with overrides():
            assert is_ours(module(*tensors))


def test_a_failing_install_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpu_kernels.dropins import install as module
    from tpu_kernels.dropins.dropin import DropIn

    def fail() -> None:
        raise ZeroDivisionError

    bad = DropIn("bad", fail, lambda: None, lambda add: None)
    monkeypatch.setattr(module, "DROP_INS", (*module.DROP_INS, bad))
    with pytest.raises(ZeroDivisionError):
        install()
    assert not is_installed() and not is_ours(attend(*qkv("tpu")))


def test_importing_changes_nothing_and_imports_no_compiler() -> None:
    """In a fresh process: torch's results bit for bit, on both devices, and no slow import."""
    script = """
import sys, bridge, torch
from torch.nn.functional import scaled_dot_product_attention as attend
before = sys.modules.keys() | set()
results = []
for _ in range(2):
    torch.manual_seed(0)
    for device in ("cpu", "tpu"):
        q = torch.randn(1, 2, 5, 8).to(device)
        results.append(attend(q, q, q, is_causal=True).cpu())
    import tpu_kernels
assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
assert not tpu_kernels.is_installed()
tpu_kernels.install(), tpu_kernels.uninstall()
assert "torch._dynamo" not in sys.modules, "the compiler"
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
