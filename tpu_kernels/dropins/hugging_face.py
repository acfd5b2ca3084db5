"""`install()` makes `attn_implementation="tpu_splash"` known to transformers, if a program imports it."""

from __future__ import annotations

from types import ModuleType

from bridge.device.imports import after_import
from tpu_kernels import huggingface
from tpu_kernels.dropins.dropin import Add, DropIn

_MODULE = "transformers.modeling_utils"

_modules: list[ModuleType] = []
"""transformers' module, once it has been imported."""
_enabled = False


def _enable() -> None:
    global _enabled
    _enabled = True
    _register()


def _disable() -> None:
    global _enabled
    _enabled = False
    if not huggingface.asked_for:
        for module in _modules:
            huggingface.unregister_in(module)


def _imported(module: ModuleType) -> None:
    _modules.append(module)
    _register()


def _register() -> None:
    if _enabled:
        for module in _modules:
            if huggingface.can_register_in(module):
                huggingface.register_in(module)


def _overridden(add: Add) -> None:
    """Nothing: a model says by its configuration that its attention is ours."""


after_import(_MODULE, _imported)
DROP_IN = DropIn("attention of Hugging Face transformers", _enable, _disable, _overridden)
