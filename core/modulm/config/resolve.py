"""Resolve a draft configuration: decide every `auto`, and record by whom and why.

Order of precedence: the user's flags, proposals of plugins, then the platform and the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from attrs import evolve, field, frozen

from modulm.config.schema.catalog import catalog
from modulm.contracts.config import EngineConfig, Notice
from modulm.contracts.decision import Decision, Verdict
from modulm.contracts.flags import Flag, suggest
from modulm.contracts.platform import Platform
from modulm.errors import ConfigError, PluginConflict, PluginError
from modulm.plugins import defaults
from modulm.plugins.files import load_file
from modulm.plugins.kinds import kind_names
from modulm.plugins.manager import PluginManager
from modulm.plugins.selection import Selection

__all__ = [
    "DTYPE_ALIASES",
    "Resolved",
    "Use",
    "check_names",
    "check_plugin_config",
    "choose_platform",
    "resolve",
]

Use = Literal["offline", "server"]

_LENGTH_KEYS = (
    "max_position_embeddings",
    "max_target_positions",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
    "model_max_length",
)
#: Aliases of `--dtype` values.
DTYPE_ALIASES = {"half": "float16", "float": "float32"}
#: used if a checkpoint states no length
_FALLBACK_LENGTH = 2048


@frozen
class Resolved:
    """The final configuration, the reasons for its values, and notices for the user."""

    config: EngineConfig
    decisions: tuple[Decision, ...]
    notices: tuple[Notice, ...] = ()


@frozen
class _Open:
    """The configuration and decisions while values are being resolved."""

    config: EngineConfig
    explicit: frozenset[str]
    decisions: tuple[Decision, ...] = field(default=())

    def is_open(self, name: str) -> bool:
        """Whether the user left the flag open."""
        value = self.config.value(name)
        return value == "auto" or (name not in self.explicit and value is None)

    def decide(self, name: str, value: Any, reason: str) -> _Open:
        """Set a flag and record the reason."""
        decision = Decision(name, (Verdict(str(value)),), str(value), reason)
        return _Open(
            self.config.with_parts({name: value}), self.explicit, (*self.decisions, decision)
        )

    def settle(self, name: str, value: Any, reason: str) -> _Open:
        """Set a flag if it is open."""
        return self.decide(name, value, reason) if self.is_open(name) else self


def choose_platform(config: EngineConfig, plugins: PluginManager) -> tuple[Platform, Decision]:
    """Return the platform of `--device`, or the installed one with the best score on this machine.

    Raises UnsupportedError if it does not fit the machine, or if no installed platform does.
    """
    device = config.device.device
    chosen = defaults.choose_platform(plugins, None if device == "auto" else device)
    name = str(chosen.decision.winner)
    table = {**config.device.additional_config, **config.device.options("platforms", name)}
    options = plugins.options("platforms", name, table)
    # A driver with options is created with them; the contract describes drivers without.
    driver: Callable[..., Platform] = chosen.driver
    return driver() if options is None else driver(options), chosen.decision


def check_names(
    config: EngineConfig, plugins: PluginManager, only: Iterable[str] | None = None
) -> None:
    """Raise ConfigError for a flag that names a driver which no installed plugin provides.

    Flags of a plugin kind also accept `pkg.mod:Class`, which is loaded when it is used. only: flags
    to check; None for all.
    """
    chosen = None if only is None else frozenset(only)
    for spec, value in config.values():
        if spec.kind is None or (chosen is not None and spec.name not in chosen):
            continue
        for name in value if isinstance(value, tuple) else (value,):
            if isinstance(name, str) and name and name not in spec.choices and ":" not in name:
                _check_name(spec, name, plugins)


#: Most names that a message lists.
_LISTED = 50


def _check_name(spec: Flag, name: str, plugins: PluginManager) -> None:
    try:
        plugins.find(str(spec.kind), name)
    except PluginError as error:
        known = [*spec.choices, *(declared.name for declared in plugins.names(str(spec.kind)))]
        has_hint = isinstance(error, PluginConflict) or "did you mean" in str(error)
        hint = "" if has_hint else suggest(name, known)
        if not (hint or has_hint or "; installed: " in str(error)) and len(known) <= _LISTED:
            hint = f"; available: {', '.join(sorted(known))}"
        raise ConfigError(spec.name, f"{error}{hint}") from error


#: Kinds whose drivers validate their own options, when created or configured.
_SELF_CHECKED = frozenset({"adapters", "attention", "hooks", "loaders", "quantization"})


def _check_selection(config: EngineConfig, plugins: PluginManager) -> None:
    """Raise ConfigError if `--plugins` differs from this process's selection.

    Plugins are selected once per process, so an engine cannot change the selection.
    """
    terms = ",".join(config.device.plugins or ())
    if terms and Selection.parse(terms) != evolve(plugins.selection, isolate=()):
        raise ConfigError(
            "plugins",
            f"is fixed for the process, which uses {str(plugins.selection) or 'all'}; call "
            f"modulm.plugins.configure({terms!r}) first, or set MODULM_PLUGINS",
        )


def check_plugin_config(config: EngineConfig, plugins: PluginManager) -> None:
    """Raise ConfigError for options in `--plugin-config` that no installed driver accepts.

    Imports the drivers that are named there.
    """
    for kind, drivers in config.device.plugin_config.items():
        for name, table in drivers.items():
            try:
                _check_options(kind, name, table, plugins)
            except PluginError as error:
                raise ConfigError("plugin_config", str(error)) from error
            except ConfigError as error:
                raise ConfigError("plugin_config", f"{error.field}: {error.message}") from error


def _check_options(kind: str, name: str, table: Mapping[str, Any], plugins: PluginManager) -> None:
    if kind == "hooks":
        known = [entry.name for entry in plugins.everything() if entry.kind == kind]
        if name not in known:
            raise ConfigError(kind, f"no hook plugin {name!r} is installed{suggest(name, known)}")
    elif kind not in kind_names():
        raise ConfigError(kind, f"unknown kind{suggest(kind, [*kind_names(), 'hooks'])}")
    else:
        plugins.find(kind, name)
    if kind not in _SELF_CHECKED:
        plugins.options(kind, name, table)


def resolve(
    config: EngineConfig,
    *,
    platform: Platform,
    hf_config: Mapping[str, Any],
    plugins: PluginManager,
    use: Use = "offline",
    explicit: Iterable[str] | None = None,
    stored_dtype: str | None = None,
    trained_length: int | None = None,
) -> Resolved:
    """Decide everything that the user left open.

    hf_config: the checkpoint's config.json. stored_dtype: dtype of its tensors, if config.json
    states none. trained_length: maximum length of texts to pool, from other files. explicit: flags
    that the user set; by default those that differ from their defaults. Raises ConfigError for
    values that the checkpoint or the platform does not support.
    """
    for spec, value in config.values():
        if spec.registers and value:
            load_file(spec.name, value)
    check_names(config, plugins)
    _check_selection(config, plugins)
    check_plugin_config(config, plugins)
    state = _Open(config, frozenset(config.changed() if explicit is None else explicit))
    state = _proposals(state, plugins)
    state = _dtype(state, platform, hf_config, stored_dtype)
    state = _length(state, hf_config, trained_length)
    state = _steps(state, platform, use)
    state = _rest(state, platform, plugins)
    return Resolved(state.config, state.decisions, _platform_notices(state.config, platform))


def _proposals(state: _Open, plugins: PluginManager) -> _Open:
    """Apply plugins' proposals for open flags. Raises ConfigError if two proposals differ."""
    answers = plugins.hook.modulm_config_proposals(config=state.config)
    proposals: dict[str, Any] = {}
    for proposal in (one for answer in answers for one in answer or ()):
        if proposal.field not in catalog().specs:
            raise ConfigError(
                proposal.field, f"was proposed by a plugin but is not a flag ({proposal.reason})"
            )
        before = proposals.setdefault(proposal.field, proposal)
        if before.value != proposal.value:
            raise ConfigError(
                proposal.field,
                f"plugins propose different values: {before.value!r} ({before.reason}) and "
                f"{proposal.value!r} ({proposal.reason}); set the flag to decide",
            )
    for name, proposal in proposals.items():
        state = state.settle(name, proposal.value, f"proposed: {proposal.reason}")
    return state


def _text_config(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the language model, in files that nest it."""
    for name in ("thinker", "vlm", "text", "llm", "language", "decoder"):
        nested = hf_config.get(f"{name}_config")
        hf_config = nested if isinstance(nested, Mapping) else hf_config
    return hf_config


def _dtype(
    state: _Open, platform: Platform, hf_config: Mapping[str, Any], stored_dtype: str | None
) -> _Open:
    requested = state.config.model.dtype
    if requested in DTYPE_ALIASES:
        return state.decide("dtype", DTYPE_ALIASES[requested], f"{requested} is an alias of it")
    if requested != "auto":
        return state
    text = _text_config(hf_config)
    stated = text.get("dtype") or text.get("torch_dtype") or hf_config.get("torch_dtype")
    stored = str(stated or stored_dtype or "float32").removeprefix("torch.")
    chosen = platform.choose_dtype(stored)
    reason = f"the checkpoint is stored in {stored}"
    if chosen != stored:
        reason += f", which is not the best dtype on {platform.name}"
    return state.decide("dtype", chosen, reason)


def _length(state: _Open, hf_config: Mapping[str, Any], trained: int | None) -> _Open:
    longest, reason = _longest(_text_config(hf_config))
    if state.config.model.disable_sliding_window:
        window = _text_config(hf_config).get("sliding_window")
        if isinstance(window, int) and 0 < window < longest:
            longest, reason = window, "the sliding window's length (--disable-sliding-window)"
    length = state.config.model.max_model_len
    if length is None and trained is not None and trained < longest:
        reason = "the checkpoint's pooling configuration; --max-model-len allows more"
        return state.decide("max_model_len", trained, reason)
    if length is None:
        return state.decide("max_model_len", longest, reason)
    if length > longest:
        raise ConfigError(
            "max_model_len",
            f"{length} is more than {longest} ({reason}); reduce it, or change the checkpoint's "
            "limit with --hf-overrides",
        )
    return state


def _longest(text: Mapping[str, Any]) -> tuple[int, str]:
    """Return the maximum length that a checkpoint states, and where it states it."""
    stated = {key: n for key in _LENGTH_KEYS if type(n := text.get(key)) is int and n > 0}
    if not stated:
        return _FALLBACK_LENGTH, "config.json states no length"
    key = min(stated, key=lambda name: stated[name])
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    factor = _scaling_factor(scaling) if isinstance(scaling, Mapping) else 1.0
    if factor == 1.0:
        return stated[key], f"{key} in config.json"
    base = scaling.get("original_max_position_embeddings", stated[key])
    return int(base * factor), f"{key} in config.json, with its rope scaling of {factor:g}"


def _scaling_factor(scaling: Mapping[str, Any]) -> float:
    """Return the factor by which positions are extended beyond the stated length.

    It is 1 for scaling kinds whose stated length already includes the extension.
    """
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("linear", "dynamic", "yarn"):
        return 1.0
    factor = scaling.get("factor", 1.0)
    return float(factor) if isinstance(factor, int | float) and factor > 0 else 1.0


def _steps(state: _Open, platform: Platform, use: Use) -> _Open:
    """Decide the maximum number of sequences and tokens per step, and whether steps overlap."""
    if platform.queued:
        reason = (
            f"work on {platform.name} is queued: the next step is planned behind the one before"
        )
        state = state.settle("async_scheduling", True, reason)
    chunked = state.config.scheduler.enable_chunked_prefill
    if chunked is None:
        state = state.decide("enable_chunked_prefill", True, "any prompt may be split across steps")
    use_index = 0 if use == "offline" else 1
    tokens, rows = platform.batched_tokens[use_index], platform.sequences[use_index]
    budget = state.config.scheduler.max_num_batched_tokens
    if budget is not None and budget < rows:
        rows = budget
    state = state.settle("max_num_seqs", rows, f"{platform.name}'s default for {use} use")
    rows = state.config.scheduler.max_num_seqs or rows
    longest = state.config.model.max_model_len or 0
    reason = f"{platform.name}'s default for {use} use"
    if tokens < rows:
        tokens, reason = rows, "one token for each of --max-num-seqs"
    if chunked is False and tokens < longest:
        tokens, reason = longest, "a whole prompt, because of --no-enable-chunked-prefill"
    return state.settle("max_num_batched_tokens", tokens, reason)


def _rest(state: _Open, platform: Platform, plugins: PluginManager) -> _Open:
    state = state.settle("block_size", platform.block_size, f"{platform.name}'s default")
    state = state.settle("enable_prefix_caching", True, "prompts with a common prefix share blocks")
    if state.is_open("device"):
        state = state.decide("device", platform.name, "the platform in use")
    parallel = state.config.parallel
    if parallel.tensor_parallel_size % parallel.decode_context_parallel_size:
        message = f"must divide --tensor-parallel-size {parallel.tensor_parallel_size}"
        raise ConfigError("decode_context_parallel_size", message)
    if state.config.parallel.distributed_executor_backend is None:
        ranks = parallel.ranks * (parallel.data_parallel_size if parallel.shared_experts else 1)
        name, reason = ("uni", "a single device") if ranks == 1 else ("mp", f"{ranks} ranks")
        _check_executor(plugins, name)
        state = state.decide("distributed_executor_backend", name, reason)
    if state.config.model.served_model_name is None:
        state = state.decide("served_model_name", (state.config.model.model,), "--model")
    return state


def _check_executor(plugins: PluginManager, name: str) -> None:
    try:
        plugins.find("executors", name)
    except PluginError as error:
        raise ConfigError("distributed_executor_backend", str(error)) from error


def _platform_notices(config: EngineConfig, platform: Platform) -> tuple[Notice, ...]:
    """Return notices about flags that were set but have no effect on this platform."""
    changed = config.changed()
    return tuple(
        Notice("--" + name.replace("_", "-"), f"no effect on {platform.name}: {reason}")
        for name, reason in platform.no_effect.items()
        if name in changed
    )
