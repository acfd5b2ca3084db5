"""Static arguments of an op: values that JAX sees at trace time, and torch's dispatcher carries.

A static argument exists in three forms:

- *canonical*: what the JAX function gets, by its declared type (an Enum member, a `numpy.dtype`, a
  tuple, a frozen dataclass, ...). `Static.check` makes it from whatever the caller or the dispatcher passed.
- *torch*: what the op's schema can carry (`Static.to_torch`): a dataclass travels as text.
- *text*: JSON in the name of a compiled program (`Static.dump`, `Static.load`), so that a program can
  be built again from its name in another process.
"""

from __future__ import annotations

import ast
import collections.abc
import dataclasses
import enum
import operator
import types
import typing
from typing import Any, Literal, Union

import jax
import numpy as np
import torch

from bridge.dtypes import NAMES, jax_dtype, torch_dtype


class Static(typing.Protocol):
    """One kind of static argument."""

    @property
    def schema(self) -> str:
        """The type in a torch schema ("SymInt", "str", "ScalarType", ...)."""
        ...

    @property
    def expected(self) -> str:
        """What a caller may pass, in words."""
        ...

    def check(self, value: Any) -> Any:
        """The canonical form. Raises TypeError or ValueError; the message is completed by the caller."""
        ...

    def to_torch(self, value: Any) -> Any: ...

    def dump(self, value: Any) -> Any: ...

    def load(self, text: Any) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Plain:
    """str, bool, int and float; numbers of the declared type and no other."""

    kind: type

    @property
    def schema(self) -> str:
        return "SymInt" if self.kind is int else self.kind.__name__

    @property
    def expected(self) -> str:
        return self.kind.__name__

    def check(self, value: Any) -> Any:
        if self.kind is str:
            if isinstance(value, str):
                return str(value.value) if isinstance(value, enum.Enum) else str(value)
        elif self.kind is bool:
            if isinstance(value, bool | np.bool_):
                return bool(value)
        elif self.kind is int:
            if isinstance(value, int | np.integer | torch.SymInt):
                number = int(operator.index(value))  # index: torch.compile makes a number of a symbolic size
                if -(2**63) <= number < 2**63:
                    return number
                raise ValueError("torch's dispatcher carries integers of 64 bits")
        elif isinstance(value, int | float | np.integer | np.floating | torch.SymFloat | torch.SymInt):
            return float(value)
        raise TypeError(self.expected)

    def to_torch(self, value: Any) -> Any:
        return value

    def dump(self, value: Any) -> Any:
        return {"float": value.hex()} if self.kind is float else value

    def load(self, text: Any) -> Any:
        return float.fromhex(text["float"]) if self.kind is float else self.kind(text)


@dataclasses.dataclass(frozen=True)
class Number:
    """int | float | bool: the type is part of the value."""

    schema = "Scalar"
    expected = "int, float or bool"

    def check(self, value: Any) -> Any:
        for kind in (bool, int, float):
            try:
                if kind is not float or isinstance(value, float | np.floating | torch.SymFloat):
                    return Plain(kind).check(value)
            except TypeError:
                continue
        raise TypeError(self.expected)

    def to_torch(self, value: Any) -> Any:
        return value

    def dump(self, value: Any) -> Any:
        return Plain(type(value)).dump(value)

    def load(self, text: Any) -> Any:
        return float.fromhex(text["float"]) if isinstance(text, dict) else text


@dataclasses.dataclass(frozen=True)
class DType:
    """torch, NumPy or JAX dtypes; the JAX function gets a `numpy.dtype`."""

    schema = "ScalarType"
    expected = "a torch, NumPy or JAX dtype"

    def check(self, value: Any) -> Any:
        if isinstance(value, bool | int | float | str):
            raise TypeError(self.expected)
        return jax_dtype(value if isinstance(value, torch.dtype) else torch_dtype(value))

    def to_torch(self, value: Any) -> Any:
        return NAMES[str(value)]

    def dump(self, value: Any) -> Any:
        return {"dtype": str(value)}

    def load(self, text: Any) -> Any:
        return jax_dtype(NAMES[text["dtype"]])


@dataclasses.dataclass(frozen=True)
class Device:
    """torch.device, or a string naming one; JAX devices become the `tpu` or `cpu` they stand for."""

    schema = "Device"
    expected = "a torch.device"

    def check(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return value
        if isinstance(value, str):
            try:
                return torch.device(value)
            except RuntimeError:
                raise ValueError(self.expected) from None
        if isinstance(value, jax.Device):
            return torch.device("cpu" if value.platform == "cpu" else "tpu")
        raise TypeError(self.expected)

    def to_torch(self, value: Any) -> Any:
        return value

    def dump(self, value: Any) -> Any:
        return {"device": str(value)}

    def load(self, text: Any) -> Any:
        return torch.device(text["device"])


@dataclasses.dataclass(frozen=True)
class EnumOf:
    """A member of an Enum class, or its value or name.

    The dispatcher carries the value where all values are int, float, bool or str, else the name.
    """

    cls: type[enum.Enum]

    @property
    def schema(self) -> str:
        return {int: "SymInt", float: "float", bool: "bool"}.get(self._kind, "str")  # type: ignore[arg-type]

    @property
    def _kind(self) -> type | None:
        """The type of all values, if it is one."""
        kinds = {type(member.value) for member in self.cls}
        return kinds.pop() if len(kinds) == 1 else None

    @property
    def expected(self) -> str:
        return f"a {self.cls.__name__}: " + ", ".join(repr(member.value) for member in self.cls)

    def check(self, value: Any) -> Any:
        if isinstance(value, self.cls):
            return value
        if isinstance(value, str) and value in self.cls.__members__:
            if self._kind is not str or value not in [member.value for member in self.cls]:
                return self.cls[str(value)]
        try:
            return self.cls(operator.index(value) if isinstance(value, torch.SymInt) else value)
        except ValueError:
            raise ValueError(self.expected) from None

    def to_torch(self, value: Any) -> Any:
        return value.value if self._kind in (int, float, bool, str) else value.name

    def dump(self, value: Any) -> Any:
        return value.value if isinstance(value, enum.Flag) else value.name  # combined flags have no one name

    def load(self, text: Any) -> Any:
        return self.cls(text) if issubclass(self.cls, enum.Flag) else self.cls[text]


@dataclasses.dataclass(frozen=True)
class OneOf:
    """typing.Literal: one of the listed values."""

    values: tuple[Any, ...]

    @property
    def schema(self) -> str:
        kinds = {type(v) for v in self.values}
        return Plain(kinds.pop()).schema if len(kinds) == 1 and kinds <= {bool, int, str} else "str"

    @property
    def expected(self) -> str:
        return "one of " + ", ".join(repr(v) for v in self.values)

    def check(self, value: Any) -> Any:
        for allowed in self.values:
            if type(allowed) is type(value) and allowed == value:
                return allowed
        for allowed in self.values:  # the dispatcher's form of a mixed Literal, and SymInt
            if (self.schema == "str" and self.to_torch(allowed) == value) or (
                isinstance(value, torch.SymInt) and type(allowed) is int and allowed == int(value)
            ):
                return allowed
        raise ValueError(self.expected)

    def to_torch(self, value: Any) -> Any:
        if self.schema != "str" or all(isinstance(v, str) for v in self.values):
            return value
        return f"{type(value).__name__}: {value!r}"  # tells "1", 1 and True apart

    def dump(self, value: Any) -> Any:
        return [type(v) is type(value) and v == value for v in self.values].index(True)

    def load(self, text: Any) -> Any:
        return self.values[text]


@dataclasses.dataclass(frozen=True)
class SequenceOf:
    """A list or tuple of one kind; the JAX function gets a tuple."""

    element: Static
    length: int | None = None

    @property
    def schema(self) -> str:
        return f"{self.element.schema}[]"

    @property
    def expected(self) -> str:
        count = "" if self.length is None else f"{self.length} "
        return f"a sequence of {count}{self.element.expected}"

    def check(self, value: Any) -> Any:
        if isinstance(value, str) or not isinstance(value, collections.abc.Sequence):
            raise TypeError(self.expected)
        if self.length is not None and len(value) != self.length:
            raise ValueError(self.expected)
        return tuple([self._element(i, v) for i, v in enumerate(value)])

    def _element(self, index: int, value: Any) -> Any:
        try:
            return self.element.check(value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"element {index} is {value!r}") from None

    def to_torch(self, value: Any) -> Any:
        return [self.element.to_torch(v) for v in value]

    def dump(self, value: Any) -> Any:
        return [self.element.dump(v) for v in value]

    def load(self, text: Any) -> Any:
        return tuple(self.element.load(v) for v in text)


@dataclasses.dataclass(frozen=True)
class Config:
    """A frozen dataclass of static fields; the dispatcher carries it as the text of a Python literal.

    torch.compile traces `check` and `to_torch` as Python, so they keep to what it can follow (it can't
    follow `json`, and so guards on the values of the fields, not on the identity of the dataclass).
    """

    cls: type
    fields: tuple[tuple[str, Static], ...]
    schema = "str"

    @property
    def expected(self) -> str:
        return f"a {self.cls.__name__}"

    def check(self, value: Any) -> Any:
        if type(value) is self.cls:
            # torch.compile goes on to `to_torch`, which needs no canonical fields and which it can follow.
            return value if torch.compiler.is_compiling() else self._canonical(value)
        if isinstance(value, str):
            return self.load(ast.literal_eval(value))
        raise TypeError(self.expected)

    def _canonical(self, value: Any) -> Any:
        """The same with every field canonical: a list as a tuple, a torch.dtype as numpy's."""
        changed = {}
        for name, kind in self.fields:
            given = getattr(value, name)
            field = self._field(name, kind, given)
            if key_of(field) != key_of(given):
                changed[name] = field
        return dataclasses.replace(value, **changed) if changed else value

    def _field(self, name: str, kind: Static, given: Any) -> Any:
        try:
            return kind.check(given)
        except (TypeError, ValueError) as error:
            raise type(error)(f"field {name!r}: expected {kind.expected}, got {given!r}") from None

    def to_torch(self, value: Any) -> Any:
        return repr(self.dump(value))

    def dump(self, value: Any) -> Any:
        return [kind.dump(self._field(name, kind, getattr(value, name))) for name, kind in self.fields]

    def load(self, text: Any) -> Any:
        values = zip(self.fields, text, strict=True)
        return self.cls(**{name: kind.load(value) for (name, kind), value in values})


@dataclasses.dataclass(frozen=True)
class Maybe:
    """Optional: None, or the inner kind."""

    inner: Static

    @property
    def schema(self) -> str:
        return f"{self.inner.schema}?"

    @property
    def expected(self) -> str:
        return f"{self.inner.expected} or None"

    def check(self, value: Any) -> Any:
        return None if value is None else self.inner.check(value)

    def to_torch(self, value: Any) -> Any:
        return None if value is None else self.inner.to_torch(value)

    def dump(self, value: Any) -> Any:
        return None if value is None else self.inner.dump(value)

    def load(self, text: Any) -> Any:
        return None if text is None else self.inner.load(text)


def key_of(value: Any) -> Any:
    """A hashable key that tells canonical values apart by type and value (True, 1 and 1.0; 0.0 and -0.0)."""
    kind = type(value)
    if kind is float:
        return (float, value.hex())
    if kind is tuple:
        return (tuple, tuple(key_of(v) for v in value))
    if dataclasses.is_dataclass(kind):
        return (kind, tuple(key_of(getattr(value, f.name)) for f in dataclasses.fields(kind) if f.init))
    return (kind, value)


# ---------------------------------------------------------------------------------- annotations


def static_kind(annotation: Any) -> Static:
    """The kind of static argument an annotation declares.

    Raises:
        TypeError: the annotation is no kind an op can carry.
    """
    annotation = unwrap_annotated(annotation)
    inner, optional = split_optional(annotation)
    if optional:
        return Maybe(static_kind(inner))
    sequence = sequence_element(annotation)
    if sequence is not None:
        element, length = sequence
        kind = static_kind(element)
        if not isinstance(kind, Plain | Number):
            raise TypeError(f"sequences of {element} can't be carried by a torch op")
        return SequenceOf(kind, length)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        if None in arguments:
            return Maybe(static_kind(Literal[tuple(a for a in arguments if a is not None)]))
        if not all(isinstance(a, int | float | bool | str | enum.Enum) for a in arguments):
            raise TypeError(f"{annotation} may list only int, float, bool, str and Enum values")
        return OneOf(arguments)
    if origin in (Union, types.UnionType):
        return _union_kind(annotation, arguments)
    if annotation == torch.types.Number:
        return Number()
    if annotation in (np.dtype, torch.dtype) or _is_subclass(annotation, (np.dtype, np.generic)):
        return DType()
    if annotation in (torch.device, jax.Device):
        return Device()
    if _is_subclass(annotation, enum.Enum):
        return EnumOf(annotation)
    for plain in (bool, int, float, str):
        if _is_subclass(annotation, plain):
            return Plain(plain)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return _config_kind(annotation)
    raise TypeError(f"{annotation!r} is not a tensor or a static type")


def _union_kind(annotation: Any, arguments: tuple[Any, ...]) -> Static:
    if set(arguments) <= {int, float, bool}:
        return Number()
    kinds = {static_kind(a) for a in arguments}
    if len(kinds) == 1:
        return kinds.pop()
    raise TypeError(f"{annotation} mixes types that a torch op can't carry in one argument")


def _config_kind(cls: type) -> Static:
    if not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise TypeError(
            f"{cls.__name__} must be a frozen dataclass (@dataclass(frozen=True)) to be a static argument"
        )
    hints = typing.get_type_hints(cls)
    given = [f.name for f in dataclasses.fields(cls) if f.init]  # the others are made of these
    return Config(cls, tuple((name, static_kind(hints[name])) for name in given))


def _is_subclass(annotation: Any, classes: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, classes)


def unwrap_annotated(annotation: Any) -> Any:
    """The type inside typing.Annotated."""
    while typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    return annotation


def split_optional(annotation: Any) -> tuple[Any, bool]:
    """(the type without None, whether None was in the union)."""
    annotation = unwrap_annotated(annotation)
    if typing.get_origin(annotation) not in (Union, types.UnionType):
        return annotation, False
    members = typing.get_args(annotation)
    concrete = tuple(m for m in members if m is not types.NoneType)
    if len(concrete) == len(members):
        return annotation, False
    return (concrete[0] if len(concrete) == 1 else Union[concrete]), True  # noqa: UP007


def sequence_element(annotation: Any) -> tuple[Any, int | None] | None:
    """(element type, fixed length or None) of a list, tuple or Sequence annotation of one element type."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (list, collections.abc.Sequence) and len(arguments) == 1:
        return arguments[0], None
    if origin is tuple and arguments:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return arguments[0], None
        if all(a == arguments[0] for a in arguments):
            return arguments[0], len(arguments)
    return None
