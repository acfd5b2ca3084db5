"""From a JAX function's annotated signature to a torch schema, and from a call to flat tensors.

`OpSignature.of(fn)` reads the signature once. `bind(args, kwargs)` then turns a call into a `Call`:
the tensors as a flat list, the *structure* (which optional tensors are there, how long each list
is) and the canonical static values. `arguments(arrays, ...)` is its inverse on the JAX side.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from jax.core import Tracer

from bridge.statics import (
    Maybe,
    Static,
    key_of,
    sequence_element,
    split_optional,
    static_kind,
    unwrap_annotated,
)

_EMPTY = inspect.Parameter.empty
TENSOR_ANNOTATIONS = (jax.Array, torch.Tensor)

Structure = tuple[int | None, ...]
"""One entry per tensor parameter: -1 a tensor, None an absent optional, n >= 0 a list of n tensors."""
ONE = -1


@dataclass(frozen=True)
class Parameter:
    """One parameter of the op: a tensor (`static` is None), or a static argument."""

    name: str
    index: int
    keyword_only: bool
    by_keyword: bool
    optional: bool = False
    sequence: bool = False
    static: Static | None = None
    default: Any = _EMPTY
    none_means_default: bool = False
    """The default has no spelling in a torch schema (inf, a list of strings): None stands for it there."""

    @property
    def schema(self) -> str:
        """The parameter in a torch schema, default included."""
        if self.static is not None:
            kind = self.static.schema
        else:
            kind = "Tensor[]" if self.sequence else "Tensor"
            if self.optional:
                kind += "?"
        if self.default is _EMPTY:
            return f"{kind} {self.name}"
        if self.none_means_default and not kind.endswith("?"):
            kind += "?"
        return f"{kind} {self.name}={_spelled(self.static, self.default) or 'None'}"


def _spelled(kind: Static | None, default: Any) -> str | None:
    """A default as the parser of torch schemas reads it, or None if it can't be written there."""
    if kind is None or default is None:
        return "None"
    value = kind.to_torch(default)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return json.dumps(str(value))
    if isinstance(value, list):
        if isinstance(kind, Maybe):
            return None
        types_inside = {type(v) for v in value}
        parts = [_spelled_scalar(v) for v in value]
        if len(types_inside) > 1 or not types_inside <= {bool, int, float} or None in parts:
            return None
        return f"[{', '.join(map(str, parts))}]"
    return _spelled_scalar(value)


def _spelled_scalar(value: Any) -> str | None:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False) if value.isprintable() else None
    return repr(value) if isinstance(value, bool | int) or math.isfinite(value) else None


@dataclass(frozen=True)
class Returns:
    """What the op returns: "tensor", "tuple" (of `count`), "list" or "none"."""

    kind: str
    count: int | None

    @property
    def schema(self) -> str:
        if self.kind == "tuple" and not self.wraps:
            return "(" + ", ".join(["Tensor"] * (self.count or 0)) + ")"
        return {"tensor": "Tensor", "tuple": "Tensor", "list": "Tensor[]", "none": "()"}[self.kind]

    @property
    def wraps(self) -> bool:
        """Whether the op returns a tuple of one, which in torch's dispatcher is a bare tensor."""
        return self.kind == "tuple" and self.count == 1

    def pack(self, outputs: Sequence[Any]) -> Any:
        """Flat outputs in the shape that torch's dispatcher expects for this schema."""
        if self.kind == "tensor" or self.wraps:
            return outputs[0]
        if self.kind == "list":
            return list(outputs)
        return tuple(outputs) if outputs else None


class Call(NamedTuple):
    """A bound call."""

    tensors: list[torch.Tensor]
    structure: Structure
    statics: tuple[Any, ...]
    key: Any
    """Hashable; equal keys mean the same structure and static values, by type and value."""


@dataclass(frozen=True)
class OpSignature:
    """The signature of an op, read from its JAX function."""

    op: str
    parameters: tuple[Parameter, ...]
    returns: Returns

    # ------------------------------------------------------------------ reading

    @classmethod
    def of(cls, op: str, fn: Callable[..., Any]) -> OpSignature:
        """Read the annotated signature of `fn`, through jax.jit, functools.partial and wrappers.

        Raises:
            ValueError: an annotation is missing or is no type an op can carry; the message lists the
                index of each bad argument.
        """
        signature, bound = _read_signature(op, fn)
        parameters: list[Parameter] = []
        wrong: list[str] = []
        by_keyword = False
        for index, parameter in enumerate(signature.parameters.values()):
            if parameter.name in bound:
                by_keyword = True  # what follows a bound argument can't be given by position
                continue
            if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
                wrong.append(f"index {index} (*{parameter.name}): an op has a fixed number of arguments")
                continue
            try:
                parameters.append(_parameter(parameter, index, by_keyword))
            except TypeError as error:
                wrong.append(f"index {index} ({parameter.name}): {error}")
        try:
            returns = _returns(signature.return_annotation)
        except TypeError as error:
            wrong.append(f"return annotation: {error}")
            returns = Returns("none", 0)
        if wrong:
            raise ValueError(
                f"{op}: invalid signature {_shown(signature)}. "
                + "; ".join(wrong)
                + ". Tensors are annotated "
                "jax.Array, jax.Array | None or Sequence[jax.Array]; static arguments str, int, float, bool, "
                "a dtype, torch.device, Enum, Literal, an Optional or Sequence of these, or a frozen "
                "dataclass."
            )
        return cls(op, tuple(parameters), returns)

    @functools.cached_property
    def tensor_parameters(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if p.static is None)

    @functools.cached_property
    def static_parameters(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if p.static is not None)

    @functools.cached_property
    def _plain_tensors(self) -> bool:
        return all(p.static is None and not p.optional and not p.sequence for p in self.parameters)

    @functools.cached_property
    def _plain_call(self) -> tuple[Structure, Any]:
        structure = (ONE,) * len(self.parameters)
        return structure, (structure, ())

    def schema(self, mutates: Sequence[str] = (), returns: Returns | None = None) -> str:
        """The torch schema, "(Tensor x, float eps=1e-05) -> Tensor"."""
        parts: list[str] = []
        keyword_only = False
        for p in self.parameters:
            if p.keyword_only and not keyword_only:
                parts.append("*")
                keyword_only = True
            text = p.schema
            if p.name in mutates:
                letter = "abcdefghijklmnopqrstuvwxyz"[list(mutates).index(p.name)]
                text = text.replace("Tensor", f"Tensor({letter}!)", 1)
            parts.append(text)
        return f"({', '.join(parts)}) -> {(returns or self.returns).schema}"

    # ------------------------------------------------------------------ a call

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
        """Check a call and split it into tensors, structure and static values.

        Raises:
            TypeError, ValueError: naming the op, the argument, what was expected and what was got.
        """
        if self._plain_tensors and not kwargs and len(args) == len(self.parameters):
            for value in args:
                if not isinstance(value, torch.Tensor):
                    break
            else:
                structure, key = self._plain_call
                return Call(list(args), structure, (), key)
        return self._bind(self.complete(args, kwargs))

    def complete(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """One value per parameter, defaults filled in."""
        positional = [p for p in self.parameters if not p.keyword_only]
        if len(args) > len(positional):
            raise TypeError(
                f"{self.op} takes {len(positional)} positional arguments "
                f"({', '.join(p.name for p in positional)}), got {len(args)}"
            )
        values = []
        used = 0
        for p in self.parameters:
            if not p.keyword_only and len(values) < len(args):
                if p.name in kwargs:
                    raise TypeError(f"{self.op}: argument {p.name!r} was given by position and by name")
                value = args[len(values)]
            elif p.name in kwargs:
                value = kwargs[p.name]
                used += 1
            elif p.default is not _EMPTY:
                value = p.default
            else:
                raise TypeError(f"{self.op}: argument {p.name!r} (index {p.index}) is missing")
            values.append(value)
        if used < len(kwargs):
            known = [p.name for p in self.parameters]
            unknown = [name for name in kwargs if name not in known]
            raise TypeError(f"{self.op} has no argument {unknown[0]!r}; it has {', '.join(known)}")
        return values

    def _bind(self, values: list[Any]) -> Call:
        tensors: list[torch.Tensor] = []
        structure: list[int | None] = []
        statics: list[Any] = []
        for p, value in zip(self.parameters, values, strict=True):
            if p.static is not None:
                statics.append(self._static(p, p.static, value))
            elif p.sequence and value is not None:
                if isinstance(value, torch.Tensor) or not isinstance(value, Sequence):
                    raise self._wrong(p, "a list or tuple of tensors", value)
                for item in value:
                    if not isinstance(item, torch.Tensor):
                        raise self._wrong(p, "a list or tuple of tensors", item)
                tensors.extend(value)
                structure.append(len(value))
            elif isinstance(value, torch.Tensor):
                tensors.append(value)
                structure.append(ONE)
            elif value is None and p.optional:
                structure.append(None)
            else:
                raise self._wrong(p, "a torch.Tensor" + (" or None" if p.optional else ""), value)
        shape = tuple(structure)
        return Call(tensors, shape, tuple(statics), (shape, tuple(map(key_of, statics))))

    def _static(self, p: Parameter, kind: Static, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            raise TypeError(
                f"{self.op}: argument {p.name!r} (index {p.index}) is static, expected {kind.expected}, "
                f"got a tensor; pass {p.name}.item(), or annotate it jax.Array to make it an operand"
            )
        if value is None and p.none_means_default:
            value = p.default
        try:
            return kind.check(value)
        except (TypeError, ValueError, OverflowError) as error:
            message = str(error) if str(error) != kind.expected else ""
            wrong = self._wrong(p, kind.expected, value, message)
            raise (ValueError(str(wrong)) if isinstance(error, ValueError) else wrong) from None

    def _wrong(self, p: Parameter, expected: str, got: Any, detail: str = "") -> TypeError:
        shown = repr(got) if isinstance(got, str | int | float | bool | types.NoneType) else ""
        described = f"{type(got).__name__} {shown}".strip()
        text = f"{self.op}: argument {p.name!r} (index {p.index}): expected {expected}, got {described}"
        if isinstance(got, Tracer):
            detail = f"inside a JAX function, call the JAX function of the op, {self.op}'s .fn"
        elif isinstance(got, jax.Array):
            detail = "convert it with bridge.to_torch"
        elif isinstance(got, np.ndarray) and p.static is None:
            detail = "convert it with torch.from_numpy"
        elif isinstance(got, int | float | list) and p.static is None:
            detail = "convert it with torch.tensor"
        return TypeError(text + (f" ({detail})" if detail else ""))

    def torch_arguments(self, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Completed caller values as the dispatcher takes them: (args, kwargs)."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for p, value in zip(self.parameters, values, strict=True):
            if p.static is not None and not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
                value = p.static.to_torch(self._static(p, p.static, value))
            if p.keyword_only:
                kwargs[p.name] = value
            else:
                args.append(value)
        return args, kwargs

    # ------------------------------------------------------------------ the JAX side

    def arguments(
        self, arrays: Sequence[Any], structure: Structure, statics: Sequence[Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """(args, kwargs) for the JAX function from flat arrays; the inverse of `bind`."""
        flat, fixed, shape = iter(arrays), iter(statics), iter(structure)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for p in self.parameters:
            if p.static is not None:
                value = next(fixed)
            else:
                count = next(shape)
                if count is None:
                    value = None
                elif count == ONE:
                    value = next(flat)
                else:
                    value = [next(flat) for _ in range(count)]
            if p.keyword_only or p.by_keyword:
                kwargs[p.name] = value
            else:
                args.append(value)
        return args, kwargs

    def flatten_result(self, result: Any) -> tuple[Any, ...]:
        """The JAX function's result as a flat tuple of arrays, checked against the return annotation."""
        kind, count = self.returns.kind, self.returns.count
        if kind == "none":
            if result is not None and not (isinstance(result, tuple) and not result):
                raise TypeError(f"{self.op}: annotated to return None, but returned {type(result).__name__}")
            return ()
        if kind == "tensor":
            if isinstance(result, tuple | list | dict) or result is None:
                raise TypeError(
                    f"{self.op}: annotated to return one array, but returned {type(result).__name__}"
                )
            return (result,)
        if not isinstance(result, tuple | list):
            raise TypeError(
                f"{self.op}: annotated to return a {kind} of arrays, but returned {type(result).__name__}"
            )
        if kind == "tuple" and len(result) != count:
            raise TypeError(f"{self.op}: annotated to return {count} arrays, but returned {len(result)}")
        if any(isinstance(item, tuple | list | dict) or item is None for item in result):
            raise TypeError(
                f"{self.op}: an op returns a flat {kind} of arrays, but an element is not an array"
            )
        return tuple(result)

    # ------------------------------------------------------------------ text

    def dump(self, structure: Structure, statics: Sequence[Any]) -> str:
        """Structure and static values as text, for the name of a program."""
        fixed = [p.static.dump(v) for p, v in zip(self.static_parameters, statics, strict=True) if p.static]
        return json.dumps([list(structure), fixed], separators=(",", ":"))

    def load(self, text: str) -> tuple[Structure, tuple[Any, ...]]:
        """The inverse of `dump`."""
        structure, fixed = json.loads(text)
        statics = (p.static.load(v) for p, v in zip(self.static_parameters, fixed, strict=True) if p.static)
        return tuple(structure), tuple(statics)


def _shown(signature: inspect.Signature) -> str:
    return (
        str(signature).replace("jax.jaxlib._jax.Array", "jax.Array").replace("jaxlib._jax.Array", "jax.Array")
    )


def _read_signature(op: str, fn: Callable[..., Any]) -> tuple[inspect.Signature, set[str]]:
    """The innermost function's signature without the arguments partials gave by position, and the
    names they gave by keyword."""
    bound: set[str] = set()
    positional = 0
    inner: Any = fn
    while True:
        if isinstance(inner, functools.partial):
            bound |= set(inner.keywords)
            positional += len(inner.args)
            inner = inner.func
        elif hasattr(inner, "__wrapped__"):
            inner = inner.__wrapped__
        else:
            break
    try:
        signature = inspect.signature(inner, eval_str=True)
    except NameError as error:
        raise ValueError(
            f"{op}: an annotation names something that can't be looked up ({error}); define it at the top "
            f"of the module, and import it outside of `if TYPE_CHECKING:`"
        ) from error
    except Exception as error:
        raise ValueError(f"{op}: {inner!r} has no signature that can be read ({error})") from error
    rest = list(signature.parameters.values())[positional:]
    return signature.replace(parameters=rest), bound


def _parameter(parameter: inspect.Parameter, index: int, by_keyword: bool) -> Parameter:
    annotation = parameter.annotation
    if annotation is _EMPTY:
        raise TypeError("the type annotation is missing")
    keyword_only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
    inner, optional = split_optional(annotation)
    sequence = sequence_element(inner)
    element = unwrap_annotated(sequence[0] if sequence is not None else inner)
    common = {
        "name": parameter.name,
        "index": index,
        "keyword_only": keyword_only,
        "by_keyword": by_keyword and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY,
    }
    if element in TENSOR_ANNOTATIONS:
        if keyword_only:
            raise TypeError("torch ops take tensors by position; move it before the `*`")
        given = parameter.default is not _EMPTY
        if given and (parameter.default is not None or not optional):
            raise TypeError("a tensor's default can only be None, with the annotation jax.Array | None")
        return Parameter(
            **common, optional=optional, sequence=sequence is not None, default=parameter.default
        )
    kind = static_kind(annotation)
    default = parameter.default
    if default is not _EMPTY:
        try:
            default = kind.check(default)
        except (TypeError, ValueError):
            raise TypeError(f"the default {default!r} is not {kind.expected}") from None
    unspelled = default is not _EMPTY and _spelled(kind, default) is None
    if optional and unspelled:
        raise TypeError(
            f"the default {default!r} of an Optional argument can't be told from None in a torch schema; "
            f"make None the default, and let it mean {default!r} in the function"
        )
    return Parameter(**common, static=kind, default=default, none_means_default=unspelled)


def _returns(annotation: Any) -> Returns:
    if annotation is inspect.Signature.empty:
        raise TypeError("the return annotation is missing")
    annotation = unwrap_annotated(annotation)
    if annotation is None or annotation is types.NoneType:
        return Returns("none", 0)
    if annotation in TENSOR_ANNOTATIONS:
        return Returns("tensor", 1)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is tuple or (origin is tuple and not arguments):
        return Returns("none", 0) if origin is tuple else _bad_return(annotation)
    element = sequence_element(annotation)
    if element is not None and unwrap_annotated(element[0]) in TENSOR_ANNOTATIONS:
        return Returns("list", None) if element[1] is None else Returns("tuple", element[1])
    return _bad_return(annotation)


def _bad_return(annotation: Any) -> Returns:
    raise TypeError(
        f"{annotation} is not jax.Array, a tuple or list of jax.Array, or None"
        + (" (nested results: return them as one flat tuple)" if typing.get_args(annotation) else "")
    )
