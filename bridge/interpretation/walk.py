"""A walk over a program that replaces some of its equations."""

from __future__ import annotations

import abc
from typing import Any

from jax._src import core


class Walk(abc.ABC):
    """Rewrites jaxprs, those nested in them too. An unchanged jaxpr comes back as the same object, a repeated
    one as one."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[core.Jaxpr, core.Jaxpr]] = {}

    @abc.abstractmethod
    def eqn(self, eqn: core.JaxprEqn) -> core.JaxprEqn:
        """What takes the place of an equation: it itself, or `self.nested(eqn)`, or another one."""

    def value(self, value: Any) -> Any:
        """A parameter's value with the jaxprs in it rewritten; the same object if nothing changes."""
        if isinstance(value, core.ClosedJaxpr):
            new = self.jaxpr(value.jaxpr)
            return value if new is value.jaxpr else core.ClosedJaxpr(new, value.consts)
        if isinstance(value, core.Jaxpr):
            return self.jaxpr(value)
        if type(value) in (tuple, list):
            items = [self.value(item) for item in value]
            same = all(new is old for new, old in zip(items, value, strict=True))
            return value if same else type(value)(items)
        return value

    def jaxpr(self, jaxpr: core.Jaxpr) -> core.Jaxpr:
        """A jaxpr with its equations rewritten."""
        known = self._done.get(id(jaxpr))
        if known is not None:
            return known[1]
        eqns = [self.eqn(eqn) for eqn in jaxpr.eqns]
        pairs = list(zip(eqns, jaxpr.eqns, strict=True))
        if all(new is old for new, old in pairs):
            new = jaxpr
        else:
            added = set().union(*(new.effects - old.effects for new, old in pairs))
            new = jaxpr.replace(eqns=eqns, effects=jaxpr.effects | added)
        self._done[id(jaxpr)] = (jaxpr, new)  # the jaxpr is kept, so that its id stays its own
        return new

    def nested(self, eqn: core.JaxprEqn) -> core.JaxprEqn:
        """An equation with the jaxprs in its parameters rewritten."""
        params = {name: self.value(value) for name, value in eqn.params.items()}
        if all(params[name] is value for name, value in eqn.params.items()):
            return eqn
        if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
            # Their rules for derivatives are Python functions: they can't be rewritten, and aren't needed.
            return eqn.replace(primitive=core.closed_call_p, params={"call_jaxpr": params["call_jaxpr"]})
        return eqn.replace(params=params)
