"""The kinds of drivers: entry-point group, contract, and how their packages are named.

A package can bring a kind of its own: an entry point of group `modulm.kinds` whose name is the
kind's and whose object is a `Kind`. It is imported when its contract is needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

from attrs import frozen

from modulm.errors import PluginBroken, PluginNotFound

__all__ = ["HOOKS_GROUP", "KINDS", "KINDS_GROUP", "Kind", "find_kind", "kind_names", "kind_of"]

#: Entry-point group of hook plugins: modules or objects with `modulm_*` functions.
HOOKS_GROUP = "modulm"
#: Entry-point group of kinds that packages bring.
KINDS_GROUP = "modulm.kinds"

_FAMILY = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


@frozen
class Kind:
    """One kind of driver.

    `contract` is the path of the abstract class that a driver implements, or None where a driver
    is a plain object of another library (a command, a router) or a value. `hook` declares
    drivers of this kind; `short` is how the kind is called in the names of distributions.
    """

    name: str
    noun: str
    short: str
    contract: str | None = None
    hook: str | None = None

    @property
    def group(self) -> str:
        """The entry-point group."""
        return f"modulm.{self.name}"

    @property
    def api(self) -> int | None:
        """The version of the contract that this core has; None where there is no contract."""
        if self.contract is None:
            return None
        version: int = import_module(self.contract.partition(":")[0]).API
        return version

    def contract_class(self) -> type | None:
        """The abstract class, imported; None where there is no contract."""
        if self.contract is None:
            return None
        module, _, name = self.contract.partition(":")
        contract: type = getattr(import_module(module), name)
        return contract

    def distribution(self, name: str) -> str:
        """What a package that offers `name` is called by our rule (it need not exist)."""
        if self.short:
            return f"modulm-{self.short}-{name.lower().replace('_', '-')}"
        found = _FAMILY.match(name)
        return f"modulm-{(found.group() if found else name).lower()}"


def _table(*kinds: Kind) -> Mapping[str, Kind]:
    return MappingProxyType({kind.name: kind for kind in kinds})


_CONTRACTS = "modulm.contracts"

KINDS: Mapping[str, Kind] = _table(
    Kind("models", "model architecture", "", f"{_CONTRACTS}.model:Model", "modulm_models"),
    Kind(
        "attention",
        "attention backend",
        "attention",
        f"{_CONTRACTS}.attention:AttentionBackend",
        "modulm_attention",
    ),
    Kind(
        "quantization",
        "quantization method",
        "quant",
        f"{_CONTRACTS}.quantization:QuantizationMethod",
        "modulm_quantization",
    ),
    Kind(
        "platforms", "platform", "platform", f"{_CONTRACTS}.platform:Platform", "modulm_platforms"
    ),
    Kind(
        "tool_parsers",
        "tool parser",
        "parser",
        f"{_CONTRACTS}.parser:ToolParser",
        "modulm_parsers",
    ),
    Kind(
        "reasoning_parsers",
        "reasoning parser",
        "parser",
        f"{_CONTRACTS}.parser:ReasoningParser",
        "modulm_parsers",
    ),
    Kind("kernels", "kernel provider", "kernels", f"{_CONTRACTS}.kernels:KernelProvider"),
    Kind("adapters", "adapter bank", "adapter", f"{_CONTRACTS}.adapter:AdapterBank"),
    Kind("loaders", "weight loader", "loader", f"{_CONTRACTS}.loader:WeightLoader"),
    Kind("executors", "executor", "executor", f"{_CONTRACTS}.executor:Executor"),
    Kind("schedulers", "scheduling policy", "scheduler", f"{_CONTRACTS}.policy:Policy"),
    Kind("poolers", "pooler", "pooler", f"{_CONTRACTS}.pooler:Pooler"),
    Kind("grammars", "grammar backend", "grammar", f"{_CONTRACTS}.grammar:GrammarBackend"),
    Kind("speculators", "speculator", "speculator", f"{_CONTRACTS}.drafter:Drafter"),
    Kind("kv_connectors", "KV connector", "connector", f"{_CONTRACTS}.connector:KVConnector"),
    Kind(
        "logits_processors",
        "logits processor",
        "logits",
        f"{_CONTRACTS}.sampling:LogitsProcessor",
    ),
    Kind(
        "checkpoints", "named checkpoint", "checkpoint", f"{_CONTRACTS}.checkpoint:NamedCheckpoint"
    ),
    Kind("commands", "command", "command"),
    Kind("flags", "group of flags", "flags"),
)


@cache
def _brought() -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=KINDS_GROUP)}


def kind_names() -> tuple[str, ...]:
    """The names of all kinds, the core's first; imports none."""
    return (*KINDS, *(name for name in _brought() if name not in KINDS))


def kind_of(group: str) -> str | None:
    """The kind whose drivers an entry-point group holds, or None for a group of other things."""
    if group == HOOKS_GROUP:
        return "hooks"
    prefix, _, name = group.partition(".")
    return name if prefix == HOOKS_GROUP and group != KINDS_GROUP else None


@cache
def find_kind(name: str) -> Kind:
    """The kind called `name`. Raises PluginNotFound with the names there are, or PluginBroken."""
    if name in KINDS:
        return KINDS[name]
    point = _brought().get(name)
    if point is None:
        raise PluginNotFound(f"there is no kind {name!r}; kinds are {', '.join(kind_names())}")
    try:
        kind = point.load()
    except Exception as error:
        raise PluginBroken(f"kind {name} cannot be imported: {error}") from error
    if not isinstance(kind, Kind) or kind.name != name:
        raise PluginBroken(f"{point.value} is not a Kind called {name!r}")
    return kind
