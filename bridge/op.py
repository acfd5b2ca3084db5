"""`jax_op`: register a JAX or Pallas function as a torch op.

This module holds the decorator and the op object. The parts do the work: `schema` reads the
signature, `program` and `execute` run a call, `autodiff` and `batching` derive gradients and
vmap, `fake` gives shapes to torch.compile and export.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack, overload

import torch
from torch.library import CustomOpDef  # pyright: ignore[reportPrivateImportUsage]

import bridge.graph  # noqa: F401  registers bridge::run
from bridge import autodiff, batching, donation, execute, fake
from bridge.arrays import PLAIN
from bridge.interpretation import prepare_process
from bridge.program import Definition, NotDifferentiable, Program, ProgramTable
from bridge.ranks.dtensors import call_with_dtensors, has_dtensors
from bridge.ranks.specs import read_sharding
from bridge.roots import Rule
from bridge.schema import Call, OpSignature, Returns

prepare_process()  # sets what JAX's CPU backend must know before something starts it


class Options(TypedDict, total=False):
    """The keyword arguments of `jax_op`."""

    donate_argnums: Sequence[int] | None
    mesh: Any
    input_partition_specs: Any
    output_partition_specs: Any
    reference: Callable[..., Any] | None
    vjp: Rule | None
    mutates: Sequence[str]
    x64: bool | None
    autocast: bool | torch.dtype | None
    overwrite: bool
    fake: Callable[..., Any] | None


@overload
def jax_op(
    name: str, fn: None = None, /, **options: Unpack[Options]
) -> Callable[[Callable[..., Any]], JaxOp]: ...


@overload
def jax_op(name: str, fn: Callable[..., Any], /, **options: Unpack[Options]) -> JaxOp: ...


def jax_op(
    name: str,
    fn: Callable[..., Any] | None = None,
    /,
    *,
    donate_argnums: Sequence[int] | None = None,
    mesh: Any = None,
    input_partition_specs: Any = None,
    output_partition_specs: Any = None,
    reference: Callable[..., Any] | None = None,
    vjp: Rule | None = None,
    mutates: Sequence[str] = (),
    x64: bool | None = None,
    autocast: bool | torch.dtype | None = None,
    overwrite: bool = False,
    fake: Callable[..., Any] | None = None,
) -> Any:
    """Register a JAX function, typically one that launches a Pallas kernel, as the torch op `name`.

    The op runs on `cpu` and `tpu` tensors, without a copy where memory can be shared; under
    autograd (also twice), `torch.compile`, `torch.export`, `torch.vmap` and `torch.func`. Kernels
    need no `interpret=`: where no TPU is, the bridge interprets them (see `bridge.interpret`).

        @jax_op("mylib::scale")
        def scale(x: jax.Array, factor: float) -> jax.Array:
            return x * factor

        scale(torch.ones(3), 2.0)

    Args:
        name: "namespace::op".
        fn: the function; without it, a decorator is returned. Its signature must be annotated. Tensors:
            `jax.Array`, `jax.Array | None`, `Sequence[jax.Array]`. Static arguments, seen as Python values
            when the function is traced, each new value a new compilation: `str`, `int`, `float`,
            `bool`, a dtype, `torch.device`, an Enum, `Literal`, an Optional or Sequence of these, or a
            frozen dataclass of them. Returns: `jax.Array`, a tuple or list of them, or None.
        donate_argnums: indices of arguments (in the signature) whose tensors the call uses up. Using such a
            tensor afterwards raises.
        mesh: of the ranks that call the op together, from `get_pallas_mesh`, a `jax.sharding.Mesh`, or a
            DeviceMesh. Each rank calls with its part of every array, and gets its part of the results; the
            function sees whole arrays, and `jax.shard_map` in it gives each rank its own. A gradient is
            one of whole arrays, too: cotangents of a result that all ranks have must be equal on all.
        input_partition_specs: how each tensor argument lies on the mesh: a PartitionSpec for each, or one for
            all; None for one that every rank has whole.
        output_partition_specs: the same for results. None if they come from a shard_map, which says so.
        reference: a plain `jnp` function of the same signature. It gives the gradient where the function
            has none (a bare `pallas_call`), and replaces the function in mode "reference".
        vjp: `(fwd, bwd)` as for `jax.custom_vjp`: `fwd(*args) -> (out, residuals)`,
            `bwd(residuals, cotangents) -> one gradient per tensor argument` (None for zero).
        mutates: names of tensor arguments that the op writes to. The function returns their new values
            first, then its other results; the op returns those others.
        x64: whether JAX keeps 64 bits while tracing this function. None: if an operand or a static
            dtype is 64 bits wide. False: 64-bit integers are narrowed, with a check that every value fits.
        autocast: True to cast float32, float16 and bfloat16 operands to the autocast dtype inside
            `torch.autocast`, as torch does for matmul; or the dtype to cast to.
        overwrite: replace an op of the same name instead of raising.
        fake: a function of the op's (fake) tensors that returns empty results, instead of the
            derived one.

    Returns:
        A `JaxOp`, which is a `torch.library` CustomOpDef: `register_autograd`, `register_fake`,
        `register_kernel`, `register_vmap` and `torch.library.opcheck` work on it.

    Raises:
        ValueError: a bad name or signature (the message lists the index of each bad argument), or
            a name that is taken.
    """
    if not isinstance(name, str):
        raise TypeError(f"jax_op: the name must be a str, 'namespace::op', got {type(name).__name__}")
    namespace, _, base = name.partition("::")
    if not (namespace.isidentifier() and base.isidentifier()):
        raise ValueError(f"jax_op: the name must be 'namespace::op', both Python identifiers, got {name!r}")

    def register(function: Callable[..., Any]) -> JaxOp:
        if isinstance(function, JaxOp):
            raise TypeError(f"jax_op {name}: expected a JAX function, got the op {function._qualname}")
        signature = OpSignature.of(name, function)
        written = (mutates,) if isinstance(mutates, str) else tuple(mutates)
        if vjp is not None and not (isinstance(vjp, tuple | list) and len(vjp) == 2):
            raise TypeError(f"jax_op {name}: vjp must be a pair (fwd, bwd), got {vjp!r}")
        sharding = read_sharding(signature, mesh, input_partition_specs, output_partition_specs)
        definition = Definition(name, signature, function, reference, vjp, x64, sharding)
        with _registering:
            previous, run = _ops.get(name), _current_run()
            again = previous is not None and previous._is_made_again(run, definition)
            if again and previous is not None and previous._run is run:
                return previous
            if previous is not None and not (overwrite or again):
                raise ValueError(
                    f"the op {name} is registered already (by {previous._init_fn.__module__}."
                    f"{getattr(previous._init_fn, '__qualname__', previous._init_fn)}); choose another name, "
                    f"or pass overwrite=True to replace it"
                )
            if previous is None and hasattr(getattr(torch.ops, namespace), base):
                raise ValueError(
                    f"the op {name} is registered already, by another library; choose another name"
                )
            op = JaxOp(definition, donate_argnums or (), written, autocast, previous)
            op._run = run
            _ops[name] = op
        if fake is not None:
            op.register_fake(fake)
        return op

    return register if fn is None else register(fn)


_ops: dict[str, JaxOp] = {}
_registering = threading.RLock()


def _current_run() -> Any:
    """Of a rank that is a thread, what it has in common with the run's other ranks; else None."""
    threads = sys.modules.get("bridge.ranks.thread_rank")
    rank = threads.current() if threads is not None else None
    return None if rank is None else rank.baton


def _registered(name: str) -> JaxOp:
    """The op of this name, for unpickling."""
    op = _ops.get(name)
    if op is None:
        raise RuntimeError(
            f"the op {name} is not registered in this process; import the module that defines it"
        )
    return op


class JaxOp(CustomOpDef):
    """A torch op whose implementation is a JAX function. Made by `jax_op`; call it with tensors."""

    def __init__(
        self,
        definition: Definition,
        donate_argnums: Sequence[int],
        mutates: tuple[str, ...],
        autocast: bool | torch.dtype | None,
        previous: JaxOp | None = None,
    ) -> None:
        signature = definition.signature
        namespace, _, name = definition.name.partition("::")
        self._definition = definition
        self._signature = signature
        self._mutated = _mutated_indices(signature, mutates)
        self._donated = donation.donated_indices(signature, donate_argnums)
        self._returns = _visible_returns(signature, len(mutates))
        self._wraps = self._returns.wraps
        schema = signature.schema(mutates, self._returns)
        torch._C.parse_schema(f"{namespace}::{name}{schema}")
        if previous is not None:
            previous.replace()  # from here on nothing is refused
        self._table = ProgramTable(definition)
        self._autocast = autocast
        self._direct = not (self._mutated or self._donated)
        self._replaced = False
        self._run: Any = None
        super().__init__(namespace, name, schema, definition.fn)
        self._abstract_fn = self._fake
        batching.given_rules.pop(definition.name, None)
        self._kernels = torch.library.Library(namespace, "FRAGMENT")
        self._kernels.impl(name, self._kernel, "CompositeExplicitAutograd")
        self._transforms = torch.library.Library(namespace, "FRAGMENT")
        if signature.tensor_parameters:
            self._transforms.impl(name, self._under_transforms, "FuncTorchDynamicLayerFrontMode")
        if autocast:
            self._register_autocast()
        self.__doc__ = definition.fn.__doc__
        self.__name__ = name

    def __repr__(self) -> str:
        return f"<JaxOp {self._qualname}{self._schema}>"

    def _is_made_again(self, run: Any, definition: Definition) -> bool:
        """Whether each rank of a run, which are threads, makes this op by the same lines of its program."""
        if run is None or self._run is None:
            return False
        own, other = (getattr(fn, "__code__", None) for fn in (self._definition.fn, definition.fn))
        return own is not None and own is other

    @property
    def fn(self) -> Callable[..., Any]:
        """The JAX function, to call inside other JAX functions."""
        return self._definition.fn

    def __reduce__(self) -> Any:
        """Copies and pickles of a module that holds an op refer to the op by its name."""
        return _registered, (self._qualname,)

    def replace(self) -> None:
        """Give the name up for another op; this object refuses calls from then on."""
        self._replaced, self._direct = True, False
        self._kernels._destroy()
        self._transforms._destroy()

    # ------------------------------------------------------------------ calling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not self._direct or execute.is_watched() or self._casts():
            return self._dispatch(args, kwargs)
        try:
            bound = self._signature.bind(args, kwargs)
        except TypeError:
            if any(
                isinstance(a, torch.fx.Proxy) for a in (*args, *kwargs.values())
            ):  # torch.fx.symbolic_trace
                return self._dispatch(args, kwargs)
            raise
        if self._definition.sharding is not None and has_dtensors(bound.tensors):
            program = self._program(bound)
            packed = self._returns.pack(call_with_dtensors(program, bound.tensors, autodiff.call))
            return (packed,) if self._wraps else packed
        for index, tensor in enumerate(bound.tensors):
            if type(tensor) not in PLAIN:
                if tensor.is_nested:
                    raise TypeError(
                        f"{self._program(bound).place(index)}: expected a dense tensor, got a nested one; "
                        f"use torch.nested.to_padded_tensor, or call the op on its parts"
                    )
                return self._dispatch(args, kwargs)
        program = self._table.get(bound.key, bound.structure, bound.statics)
        packed = self._returns.pack(autodiff.call(program, bound.tensors, execute.execute))
        return (packed,) if self._wraps else packed

    def _dispatch(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self._replaced:
            raise RuntimeError(
                f"{self._qualname} was replaced by a later jax_op(..., overwrite=True); use that one"
            )
        args, kwargs = self._signature.torch_arguments(self._signature.complete(args, kwargs))
        packed = self._opoverload(*args, **kwargs)
        return (packed,) if self._wraps else packed

    def _casts(self) -> bool:
        return bool(self._autocast) and any(
            torch.is_autocast_enabled(d) for d in ("cpu", "tpu") if torch.amp.is_autocast_available(d)
        )

    def _program(self, bound: Call) -> Program:
        return self._table.get(bound.key, bound.structure, bound.statics)

    # ------------------------------------------------------------------ under the dispatcher

    def _kernel(self, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(args, kwargs)
        if not self._donated and not self._mutated:
            return self._returns.pack(execute.execute(self._program(bound), bound.tensors))
        given = donation.tensors_of(bound, self._donated)
        donation.check(self._qualname, given, bound.tensors)
        outs = execute.execute(self._program(bound), bound.tensors)
        self._write([args[index] for index in self._mutated], outs)
        donation.invalidate(self._qualname, given)
        return self._returns.pack(outs[len(self._mutated) :])

    def _write(self, tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """The new values into the mutated arguments: all of them, or none."""
        names = [self._signature.parameters[index].name for index in self._mutated]
        for name, tensor, new in zip(names, tensors, values, strict=False):
            if new.shape != tensor.shape or new.dtype != tensor.dtype:
                raise RuntimeError(
                    f"{self._qualname}: the new value of {name!r} must be {tensor.dtype} "
                    f"{tuple(tensor.shape)} as the argument is, the function returned {new.dtype} "
                    f"{tuple(new.shape)}"
                )
        if len({t.untyped_storage()._cdata for t in tensors}) < len(tensors):
            raise ValueError(
                f"{self._qualname} writes to {' and '.join(names)}, which must not share memory; pass a "
                f"clone()"
            )
        for tensor, new in zip(tensors, values, strict=False):
            tensor.copy_(new)

    def _fake(self, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(args, kwargs)
        return self._returns.pack(fake.outputs(self._program(bound), bound.tensors)[len(self._mutated) :])

    def _under_transforms(self, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(args, kwargs)
        if self._mutated or self._donated:
            raise NotImplementedError(
                f"{self._qualname} writes to or uses up its arguments, which torch.func "
                f"transforms can't follow"
            )
        return self._returns.pack(autodiff.call(self._program(bound), bound.tensors))

    def _register_autograd_dispatcher_impl(self) -> None:
        from torch._library import autograd

        given = autograd.make_autograd_impl(self._opoverload, self)  # pyright: ignore[reportArgumentType]

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            bound = self._signature.bind(args, kwargs)
            if self._backward_fn is not None:
                if autodiff.forward_ad_active():
                    raise NotDifferentiable(
                        f"{self._qualname} has no forward-mode derivative (jvp): register_autograd gave it a "
                        f"gradient, which works in reverse mode alone"
                    )
                return given(keyset, *args, **kwargs)
            recorded = torch.is_grad_enabled() and any(t.requires_grad for t in bound.tensors)
            if recorded or autodiff.forward_ad_active():
                if self._mutated or self._donated:
                    raise RuntimeError(
                        f"{self._qualname} writes to or uses up its arguments, so it has no gradient, and an "
                        f"argument requires grad; call it under torch.no_grad() or detach the arguments"
                    )
                return self._returns.pack(autodiff.call(self._program(bound), bound.tensors))
            return self._opoverload.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

        if self._signature.tensor_parameters:
            self._lib.impl(self._name, kernel, "Autograd", with_keyset=True)

    def _register_autocast(self) -> None:
        wanted = self._autocast if isinstance(self._autocast, torch.dtype) else None
        lower = (torch.float32, torch.float16, torch.bfloat16)

        def kernel_for(device_type: str, key: torch._C.DispatchKey) -> Callable[..., Any]:
            def kernel(*args: Any, **kwargs: Any) -> Any:
                dtype = wanted or torch.get_autocast_dtype(device_type)

                def cast(value: Any) -> Any:
                    if isinstance(value, torch.Tensor):
                        return value.to(dtype) if value.dtype in lower else value
                    if isinstance(value, list | tuple):
                        return [cast(v) for v in value]
                    return value

                with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
                    return self._opoverload(*map(cast, args), **kwargs)

            return kernel

        for device_type, name in (("cpu", "AutocastCPU"), ("tpu", "AutocastPrivateUse1")):
            key = getattr(torch._C.DispatchKey, name)
            self._kernels.impl(self._name, kernel_for(device_type, key), name)

    # ------------------------------------------------------------------ what a user may register instead

    def register_kernel(self, device_types: Any, fn: Any = None, /) -> Any:
        """Another implementation for a device type; see `torch.library.register_kernel`."""
        self._direct = False
        if device_types is None:
            self._kernels._destroy()
        return super().register_kernel(device_types, fn)

    def register_autograd(self, backward: Any, /, *, setup_context: Any = None) -> None:
        """Another gradient than the derived one; see `torch.library.register_autograd`."""
        self._direct = False
        self._transforms._destroy()
        super().register_autograd(backward, setup_context=setup_context)

    def register_vmap(self, func: Any = None) -> Any:
        """Another vmap rule than the derived one; see `torch.library.register_vmap`."""

        def register(rule: Any) -> Any:
            batching.given_rules[self._qualname] = rule
            return CustomOpDef.register_vmap(self, rule)

        return register if func is None else register(func)

    def register_autocast(self, device_type: str, cast_inputs: torch.dtype) -> Any:
        """An autocast rule; see `torch.library.register_autocast`, and `jax_op(autocast=True)`."""
        self._autocast = cast_inputs
        return super().register_autocast(device_type, cast_inputs)


def _mutated_indices(signature: OpSignature, mutates: Sequence[str]) -> tuple[int, ...]:
    found = []
    for name in mutates:
        index = next((i for i, p in enumerate(signature.parameters) if p.name == name), None)
        if index is None or signature.parameters[index] not in signature.tensor_parameters:
            raise ValueError(f"{signature.op}: mutates names {name!r}, which is not a tensor argument")
        parameter = signature.parameters[index]
        if parameter.optional or parameter.sequence:
            raise ValueError(
                f"{signature.op}: mutates takes plain tensor arguments, {name!r} is optional or a list"
            )
        found.append(index)
    return tuple(found)


def _visible_returns(signature: OpSignature, hidden: int) -> Returns:
    """What the op returns when the first `hidden` results are new values of mutated arguments."""
    returns = signature.returns
    if not hidden:
        return returns
    if returns.count is None or returns.count < hidden:
        raise ValueError(
            f"{signature.op}: mutates names {hidden} arguments, so the function must return their new values "
            f"first, as a tuple of fixed length; and its return annotation has {returns.count or 'no'} "
            f"arrays{' of fixed number' if returns.count is None else ''}"
        )
    rest = returns.count - hidden
    return Returns("none", 0) if rest == 0 else Returns("tensor", 1) if rest == 1 else Returns("tuple", rest)
