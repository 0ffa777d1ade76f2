"""The op table: each op is bound once, to the best provider that has it or to its twin."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from modulm.errors import PluginError
from modulm.ops import sampling_twins, twins
from modulm.plugins import manager

if TYPE_CHECKING:
    from modulm.contracts.kernels import Forward, KernelProvider, Op, Ops

__all__ = ["BUNDLES", "TWIN", "OpTable", "bind", "twin_ops"]

log = logging.getLogger("modulm")

#: Ops that exchange values in a private format of their provider.
BUNDLES = (("linear", "pack_linear", "unpack_linear"), ("fused_experts", "pack_experts"))

#: Provider name of twins.
TWIN = "torch"


class OpTable:
    """Ops by attribute: `ops.rms_norm(x, weight, eps)` calls the implementation bound at startup.

    providers: op -> its provider. refusals: op -> why a better provider was not used.
    `modulm.contracts.ops.Ops` declares the ops.
    """

    providers: Mapping[str, str]
    refusals: Mapping[str, str]

    def __init__(
        self,
        ops: Mapping[str, Op],
        providers: Mapping[str, str],
        refusals: Mapping[str, str],
        recorders: Sequence[Callable[[Forward], Forward]] = (),
    ) -> None:
        self.__dict__.update(ops)
        self._ops = MappingProxyType(dict(ops))
        self._recorders = tuple(recorders)
        self.providers = MappingProxyType(dict(providers))
        self.refusals = MappingProxyType(dict(refusals))

    def supports(self, name: str) -> bool:
        """Whether an op of this name is bound."""
        return name in self._ops

    def find(self, name: str) -> Op | None:
        """Return the op of this name, or None if no provider has it."""
        return self._ops.get(name)

    def recorded(self, forward: Forward) -> Forward:
        """Wrap `forward` so that steps are recorded and replayed, if a provider or platform can."""
        for recorder in self._recorders:
            recording = recorder(forward)
            if recording is not forward:
                return recording
        return forward

    def __getattr__(self, name: str) -> Op:
        raise AttributeError(
            f"no op is called {name!r}; ops are {', '.join(sorted(self.providers))}"
        )


def twin_ops() -> Mapping[str, Op]:
    """Return the twins of all ops by name: the core's, and those of group `modulm.ops`."""
    modules = (twins, sampling_twins)
    own = {name: getattr(module, name) for module in modules for name in module.__all__}
    plugins, added = manager.current(), {}
    for name in sorted({declared.name for declared in plugins.names("ops")} - own.keys()):
        try:
            added[name] = plugins.load("ops", name)
        except PluginError as error:
            log.warning("%s", error)
    return {**own, **added}


def bind(
    providers: Sequence[KernelProvider] = (),
    recorder: Callable[[Forward], Forward] | None = None,
    **facts: Any,
) -> Ops:
    """Bind every op to the first provider that has it and does not reject `facts`.

    providers: best first; all run on the platform. facts: properties of the whole model
    (dtype="bfloat16"). Ops without a twin are bound as well, for attention and quantization drivers
    that look them up by name. Ops of a bundle share a private format and come from one provider.
    recorder: the platform's, used if no provider records steps.
    """
    ops = dict(twin_ops())
    chosen = dict.fromkeys(ops, TWIN)
    refusals: dict[str, str] = {}
    for provider in reversed(providers):
        offered = provider.ops()
        reasons = {name: provider.rejects(name, **facts) for name in offered}
        for bundle in BUNDLES:
            lacking = [name for name in bundle if name not in offered or reasons[name]]
            for name in bundle if lacking else ():
                reasons[name] = reasons.get(name) or f"has no {', '.join(lacking)} beside it"
        for name, op in offered.items():
            reason = reasons[name]
            if reason is None:
                ops[name], chosen[name] = op, provider.name
            else:
                refusals[name] = f"{provider.name}: {reason}"
    candidates = (*(provider.recorded for provider in providers), recorder)
    recorders = [each for each in candidates if each is not None]
    return cast("Ops", OpTable(ops, chosen, refusals, recorders))
