"""What to change when a configuration does not fit, as commands."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen

from modulm.contracts.decision import Decision, Verdict
from modulm.errors import ModulmError
from modulm_memory.estimate import estimate
from modulm_memory.sizes import size

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.platform import Memory
    from modulm.plugins.manager import PluginManager
    from modulm_memory.estimate import Estimate

__all__ = ["Change", "at_load", "changes_for", "memory_decision"]

#: Cache formats with half and a quarter of the bytes.
_CACHES = ("fp8", "int8", "int4")
_SHORTER = "the longest context that fits"


@frozen
class Change:
    """A change that makes the model fit: flags, why, and the command."""

    flags: Mapping[str, Any]
    reason: str
    command: str


def changes_for(
    found: Estimate,
    plugins: PluginManager,
    explicit: Iterable[str],
    config: EngineConfig,
    memory: Memory | None = None,
    *,
    name: str = "",
) -> list[Change]:
    """Return changes that make the requested length fit, one of each kind; [] if it fits.

    config: before it was resolved. explicit: flags that the user set. memory: as in `estimate`.
    name: of the model in commands, by default `--model`.
    """
    if found.fits:
        return []
    names, model = frozenset(explicit), name or config.model.model
    changes: list[Change] = []
    if found.context:
        changes.append(_change(config, names, model, {"max_model_len": found.context}, _SHORTER))
    for kind in (_caches(config), _formats(config, plugins)):
        for flags, reason in kind:
            other = _tried(config, plugins, names, flags, memory)
            if other is not None and other.fits:
                changes.append(_change(config, names, model, flags, reason))
                break
    if not changes:
        for flags, reason in _formats(config, plugins):
            other = _tried(config, plugins, names, flags, memory)
            if other is not None and other.context:
                more = {**flags, "max_model_len": other.context}
                changes.append(
                    _change(config, names, model, more, f"{reason}, and a shorter context")
                )
                break
    return changes


def at_load(config: EngineConfig, plugins: PluginManager) -> tuple[str, ...]:
    """Return methods that may quantize a plain checkpoint while it loads, largest result first.

    They are declared by their packages, see `QuantizationMethod.at_load_bits`.
    """
    if config.model.quantization is not None:
        return ()
    bits: dict[str, float] = {}
    for declared in plugins.names("quantization"):
        try:
            driver = plugins.load("quantization", declared.name)
        except ModulmError:
            continue
        if driver.at_load_bits:
            bits[declared.name] = driver.at_load_bits
    return tuple(sorted(bits, key=lambda name: -bits[name]))


def _caches(config: EngineConfig) -> Iterator[tuple[Mapping[str, Any], str]]:
    if config.cache.kv_cache_dtype == "auto":
        for dtype in _CACHES:
            yield {"kv_cache_dtype": dtype}, f"a KV cache in {dtype}"


def _formats(
    config: EngineConfig, plugins: PluginManager
) -> Iterator[tuple[Mapping[str, Any], str]]:
    for name in at_load(config, plugins):
        yield {"quantization": name}, f"weights in {name}, rounded while they load"


def _tried(
    config: EngineConfig,
    plugins: PluginManager,
    names: frozenset[str],
    flags: Mapping[str, Any],
    memory: Memory | None,
) -> Estimate | None:
    """Estimate a changed configuration; None if the model or platform does not support it."""
    try:
        return estimate(config.with_parts(dict(flags)), plugins, names | set(flags), memory)
    except ModulmError:
        return None


def _change(
    config: EngineConfig, names: frozenset[str], model: str, flags: Mapping[str, Any], reason: str
) -> Change:
    """Build the command: the user's own flags, with these in place of theirs."""
    own = {spec.name: value for spec, value in config.values() if spec.name in names}
    own.pop("model", None)
    words = ["modulm", "serve", model]
    for name, value in {**own, **flags}.items():
        option = "--" + name.replace("_", "-")
        if value is True or value is False:
            words.append(option if value else option.replace("--", "--no-", 1))
        elif isinstance(value, str | int | float):
            words += [option, str(value)]
    return Change(dict(flags), f"to fit it: {reason}", shlex.join(words))


def memory_decision(found: Estimate) -> Decision:
    """Return what fits as a decision, for `modulm explain`."""
    rank = found.tightest
    growing = sum(use.per_1k for use in rank.caches)
    reason = (
        f"{size(rank.weights.bytes)} of weights, {size(growing)} of caches per 1k tokens, "
        f"{size(rank.memory.free)} free; modulm fit shows the parts"
    )
    if found.problem:
        return Decision("memory", (), None, f"{found.problem}: {reason}")
    sequences = found.sequences(found.context)
    winner = f"{sequences} requests of {found.context} tokens at once"
    return Decision("memory", (Verdict(winner),), winner, reason)
