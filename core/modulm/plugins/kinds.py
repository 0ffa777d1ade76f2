"""Kinds of drivers: their entry-point groups, contracts, and package names.

A package can add a kind with an entry point of group `modulm.kinds`: its name is the kind's, its
object a `Kind`. It is imported when its contract is needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

from attrs import frozen

from modulm.errors import PluginBroken, PluginNotFound
from modulm.plugins.calls import broken, importing
from modulm.plugins.declaration import Declaration

__all__ = ["HOOKS_GROUP", "KINDS", "KINDS_GROUP", "Kind", "find_kind", "kind_names", "kind_of"]

#: Entry-point group of hook plugins: modules or objects with `modulm_*` functions.
HOOKS_GROUP = "modulm"
#: Entry-point group of kinds that packages add.
KINDS_GROUP = "modulm.kinds"


@frozen
class Kind:
    """One kind of driver.

    contract: path of the abstract class that drivers implement; None if a driver is a value or an
    object of another library (a command, a router). hook: declares drivers of this kind. short:
    name of the kind in distribution names. part: the step part that configured drivers need, if
    any. kit: path of its contract kit, if its package has one (`modulm.testing.kit`).
    """

    name: str
    noun: str
    short: str
    contract: str | None = None
    hook: str | None = None
    part: str = ""
    kit: str = ""

    @property
    def group(self) -> str:
        """The entry-point group."""
        return f"modulm.{self.name}"

    @property
    def api(self) -> int | None:
        """The core's version of the contract; None without a contract."""
        if self.contract is None:
            return None
        version: int = import_module(self.contract.partition(":")[0]).API
        return version

    def contract_class(self) -> type | None:
        """Import and return the abstract class; None without a contract."""
        if self.contract is None:
            return None
        module, _, name = self.contract.partition(":")
        contract: type = getattr(import_module(module), name)
        return contract


def _core(
    name: str, noun: str, short: str, contract: str = "", hook: str | bool = "", part: str = ""
) -> Kind:
    """Create a kind of the core, whose contract is in `modulm.contracts`.

    hook: name of its declaring hook without the prefix; True: the kind's name.
    """
    path = f"modulm.contracts.{contract}" if contract else None
    declaring = f"modulm_{name if hook is True else hook}" if hook else None
    return Kind(name, noun, short, path, declaring, part)


_KINDS = (
    _core("models", "model architecture", "", "model:Model", True),
    _core("attention", "attention backend", "attention", "attention:AttentionBackend", True),
    _core("quantization", "quantization method", "quant", "quantization:QuantizationMethod", True),
    _core("platforms", "platform", "platform", "platform:Platform", True),
    _core("tool_parsers", "tool parser", "parser", "parser:ToolParser", "parsers"),
    _core("reasoning_parsers", "reasoning parser", "parser", "parser:ReasoningParser", "parsers"),
    _core("kernels", "kernel provider", "kernels", "kernels:KernelProvider"),
    _core("ops", "op", "op"),
    _core("adapters", "adapter bank", "adapter", "adapter:AdapterBank", part="adapters"),
    _core("loaders", "weight loader", "loader", "loader:WeightLoader"),
    _core("tokenizers", "tokenizer", "tokenizer", "tokenizer_loader:TokenizerLoader"),
    _core("executors", "executor", "executor", "executor:Executor"),
    _core("schedulers", "scheduling policy", "scheduler", "policy:Policy"),
    _core("poolers", "pooler", "pooler", "pooler:Pooler"),
    _core("grammars", "grammar backend", "grammar", "grammar:GrammarBackend"),
    _core("speculators", "speculator", "speculator", "drafter:Drafter", part="drafts"),
    _core("kv_connectors", "KV connector", "kv", "connector:KVConnector", part="transfers"),
    _core("step_parts", "step part", "part", "step_part:StepPart"),
    _core("worker_functions", "worker function", "function"),
    _core("logits_processors", "logits processor", "logits", "sampling:LogitsProcessor"),
    _core("checkpoints", "named checkpoint", "checkpoint", "checkpoint:NamedCheckpoint"),
    _core("commands", "command", "command"),
    _core("flags", "group of flags", "flags"),
)

KINDS: Mapping[str, Kind] = MappingProxyType({kind.name: kind for kind in _KINDS})


@cache
def _brought() -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=KINDS_GROUP)}


def kind_names() -> tuple[str, ...]:
    """Return the names of all kinds, the core's first, without imports."""
    return (*KINDS, *(name for name in _brought() if name not in KINDS))


def kind_of(group: str) -> str | None:
    """Return the kind of an entry-point group, or None if it is not a group of drivers.

    The kind may not exist, so that misspelled groups are reported.
    """
    if group == HOOKS_GROUP:
        return "hooks"
    named = group != KINDS_GROUP and re.match("modulm[._-]", group)
    return group.removeprefix(f"{HOOKS_GROUP}.") if named else None


@cache
def find_kind(name: str) -> Kind:
    """Return the kind `name`. Raises PluginNotFound, with the existing names, or PluginBroken."""
    if name in KINDS:
        return KINDS[name]
    point = _brought().get(name)
    if point is None:
        close = get_close_matches(name.removeprefix(f"{HOOKS_GROUP}_"), kind_names(), n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        known = ", ".join(kind_names())
        raise PluginNotFound(f"there is no kind {name!r}{hint}; kinds are {known}")
    declaration = Declaration(name, point.value, kind="kinds", source="entry point")
    try:
        with importing(declaration):
            kind = point.load()
    except (Exception, SystemExit) as error:
        raise broken(f"kind {name} cannot be imported", error) from error
    if not isinstance(kind, Kind) or kind.name != name:
        raise PluginBroken(f"{point.value} is not a Kind called {name!r}")
    return kind
