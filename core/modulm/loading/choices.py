"""Choose the drivers of a model, recording candidates and reasons."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import evolve, field, frozen

from modulm.contracts.attention import AttentionBackend, AttentionSpec
from modulm.contracts.decision import Decision, Verdict
from modulm.contracts.quantization import LinearSpec, QuantizationMethod
from modulm.errors import ArchitectureNotFound, ConfigError, UnsupportedError
from modulm.loading.checkpoint import open_loader, pooling_recipe
from modulm.loading.pooling import may_convert, open_pooler, pooling_settings
from modulm.ops import bind
from modulm.plugins import defaults

if TYPE_CHECKING:
    from modulm.contracts.adapter import AdapterBank
    from modulm.contracts.checkpoint import Checkpoint
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.kernels import KernelProvider
    from modulm.contracts.loader import WeightLoader
    from modulm.contracts.model import Model
    from modulm.contracts.ops import Ops
    from modulm.contracts.platform import Platform
    from modulm.contracts.pooling import PoolingRecipe
    from modulm.parallel import Mesh
    from modulm.plugins.manager import PluginManager

__all__ = ["Choices", "Methods"]

log = logging.getLogger("modulm.loading")

T = TypeVar("T")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")

#: Method for layers that no other method handles.
PLAIN = "none"

#: Values of --model-impl for the architecture's own driver; others name a driver.
_OWN = ("auto", "modulm", "vllm")


@frozen(eq=False, slots=False)
class Choices:
    """Chooses drivers for one load and records the reasons in `decisions`."""

    config: EngineConfig
    checkpoint: Checkpoint
    platform: Platform
    plugins: PluginManager
    decisions: list[Decision] = field(factory=list)
    backends: dict[AttentionSpec, AttentionBackend] = field(factory=dict)

    @cached_property
    def recipe(self) -> PoolingRecipe:
        """The pooling settings of the checkpoint's files."""
        return pooling_recipe(self.config, self.checkpoint, self.plugins)

    def model(self) -> type[Model]:
        """Return the driver class of the checkpoint's architecture.

        Raises ArchitectureNotFound if no installed plugin provides it.
        """
        names = self.checkpoint.architectures
        implementation = self.config.model.model_impl
        if implementation not in _OWN:
            self.decisions.append(
                Decision("model", (Verdict(implementation),), implementation, "set by --model-impl")
            )
            return self._require_trust(self.plugins.load("models", implementation))
        overrides = self.config.model.model_class_overrides
        for name in names:
            if name in overrides:
                self.plugins.register("models", name, overrides[name])
                reason = "set by --model-class-overrides"
                self.decisions.append(Decision("model", (Verdict(name),), name, reason))
                driver: type[Model] = self.plugins.load("models", name)
                return driver
        if not may_convert(self.config, names, self.plugins, self.recipe):
            return self._require_trust(self._keep(self._choose_model(names)))
        installed = {d.name for d in self.plugins.names("models")}
        pooler = open_pooler(self.config, self.plugins)
        conversion = pooler.conversion(self.config, names, installed, self.recipe)
        if conversion is not None:
            base, kind = conversion
            chosen = self._require_trust(self._keep(self._choose_model((base,))))
            reason = "converted for pooling, by flags, files or architecture"
            self.decisions.append(Decision("pooling", (Verdict(kind),), kind, reason))
            settings = pooling_settings(self.config, self.recipe)
            return pooler.convert(chosen, kind, self.checkpoint.config, settings)
        return self._require_trust(self._keep(self._choose_model(names)))

    def _choose_model(self, names: Sequence[str]) -> defaults.Chosen[type[Model]]:
        try:
            return defaults.choose_model(self.plugins, names, self.checkpoint.config)
        except ArchitectureNotFound as error:
            kind = self.plugins.hook.modulm_explain_model(config=self.checkpoint.config)
            if kind is None:
                raise
            raise UnsupportedError(f"{names[0]} is {kind}") from error

    def _require_trust(self, driver: type[Model]) -> type[Model]:
        """Return the driver if its code may run. Raises ConfigError."""
        if driver.remote_code and not self.config.model.trust_remote_code:
            code = self.checkpoint.config.get("auto_map")
            raise ConfigError(
                "trust_remote_code",
                f"{self.checkpoint.architecture} is code in the checkpoint "
                f"({self.checkpoint.config_file}: auto_map: {code}); pass --trust-remote-code "
                "if you have read that code",
            )
        return driver

    def ops(self, dtype: str) -> Ops:
        """Return the op table of the available kernel providers, bound for `dtype`."""
        names = self.config.attention.kernels
        if names is not None:
            names = tuple(takewhile(lambda name: name != PLAIN, names))
        chosen = defaults.choose_kernels(self.plugins, self.platform, names)
        for verdict in chosen.decision.candidates:
            if names is None and verdict.reason and verdict.name in self.platform.kernels[:1]:
                log.warning("slow: no %s kernels (%s)", verdict.name, verdict.reason)
        providers = [self._provider(driver.name, driver) for driver in chosen.driver]
        table = bind(providers, partial(self.platform.recorded, config=self.config), dtype=dtype)
        bound = sum(provider != "torch" for provider in table.providers.values())
        reason = f"{bound} of {len(table.providers)} ops; {chosen.decision.reason}"
        options = self.config.device.plugin_config.get("kernels")
        reason += f"; with {dict(options)}" if options else ""
        self.decisions.append(evolve(chosen.decision, reason=reason))
        return table

    def _provider(self, name: str, driver: Callable[..., KernelProvider]) -> KernelProvider:
        """Create a provider, with options if there are any; the contract describes providers
        without.
        """
        options = self.plugins.options("kernels", name, self.config.device.options("kernels", name))
        return driver() if options is None else driver(options)

    def _keep(self, chosen: defaults.Chosen[T]) -> T:
        self.decisions.append(chosen.decision)
        return chosen.driver

    def method(self, ops: Ops) -> Methods:
        """Return the quantization method of the checkpoint or of --quantization, and the plain
        one.
        """
        plain = self._method(PLAIN, {}, ops)
        info = self.checkpoint.info
        chosen = defaults.choose_quantization(
            self.plugins, info, self.platform, self.config.model.quantization, plain=PLAIN
        )
        name = chosen.decision.winner
        self._keep(chosen)
        if name is None or name == PLAIN:
            return Methods(plain, plain, self.platform)
        overrides = self.config.model.quantization_config or {}
        table = {**chosen.driver.settings(info), **overrides}
        return Methods(self._method(name, table, ops), plain, self.platform)

    def _method(self, name: str, table: Mapping[str, Any], ops: Ops) -> QuantizationMethod:
        driver: type[QuantizationMethod] = self.plugins.load("quantization", name)
        options = {**table, **self.config.device.options("quantization", name)}
        method = driver(self.plugins.options("quantization", name, options), self.platform, ops)
        method.flags = self.config
        return method

    def loader(self) -> WeightLoader:
        """Return the loader of --load-format, or the one that opens the checkpoint.

        Raises CheckpointError if no installed loader opens it.
        """
        return self._keep(open_loader(self.config, self.checkpoint.path, self.plugins))

    def adapters(self, ops: Ops) -> AdapterBank | None:
        """Return the adapter bank that is configured, or that a plugin creates."""
        configured = self.plugins.configured("adapters", self.config.device.plugin_config)
        bank: AdapterBank | None
        if configured is None:
            bank = self.plugins.hook.modulm_adapter_bank(
                config=self.config, platform=self.platform, ops=ops
            )
        else:
            bank = configured[0](configured[1], self.platform, ops)
        if bank is None:
            return None
        verdicts = (Verdict(bank.name),)
        self.decisions.append(Decision("adapters", verdicts, bank.name, "has a configuration"))
        return bank

    def backend(self, spec: AttentionSpec, ops: Ops, mesh: Mesh) -> AttentionBackend:
        """Return the attention backend of a spec; layers with equal specs share one."""
        if spec not in self.backends:
            self.backends[spec] = mesh.attention(spec, partial(self._choose_backend, ops=ops))
        return self.backends[spec]

    def _choose_backend(self, spec: AttentionSpec, ops: Ops) -> AttentionBackend:
        requested = self.config.attention.attention_backend
        subject = f"attention ({_describe(spec)})"
        try:
            chosen = defaults.choose_attention(
                self.plugins, spec, self.platform, ops, requested, subject=subject
            )
        except UnsupportedError as error:
            if spec.kv_dtype == spec.dtype:
                raise
            raise UnsupportedError(f"kv_cache_dtype: {error}") from None
        driver = self._keep(chosen)
        size = self._block_size(driver.block_sizes(spec))
        plugin_options = self.config.device.options("attention", str(chosen.decision.winner))
        options = {**self.config.attention.attention_options, **plugin_options}
        return self.platform.attending(driver(spec, self.platform, ops, size, options))

    def _block_size(self, sizes: Sequence[int]) -> int:
        """Return --block-size if the backend supports it, else the backend's preferred size."""
        size = self.config.cache.block_size or self.platform.block_size
        return size if not sizes or size in sizes else sizes[0]


@frozen(eq=False)
class Methods:
    """The checkpoint's method, and the plain one for layers that it skips or does not support."""

    main: QuantizationMethod
    plain: QuantizationMethod
    platform: Platform
    #: Decision -> names of the layers that it applies to.
    layers: dict[Decision, list[str]] = field(factory=dict)

    def of(self, spec: LinearSpec) -> QuantizationMethod:
        """Return the method for a layer, recording the decision and its reason."""
        if self.main is self.plain:
            return self.plain
        skipped = "excluded by its settings" if self._skipped(spec) else None
        reason = skipped or self.main.rejects(spec, self.platform) or self.main.declines(spec)
        method = self.main if reason is None else self.plain
        because = f"{self.main.name} does not support it" if reason else self.main.note(spec) or ""
        rejected = (Verdict(self.main.name, reason),) if reason else ()
        decision = Decision(f"quantization ({spec.kind})", rejected, method.name, because)
        self.layers.setdefault(decision, []).append(spec.name)
        return method

    def decisions(self) -> Iterator[Decision]:
        """Yield the decision for each kind of layer, with the layers' names."""
        # Layers are requested twice when pipeline stages are balanced.
        layers = {decision: [*dict.fromkeys(names)] for decision, names in self.layers.items()}
        every = [name for names in layers.values() for name in names]
        for decision, names in layers.items():
            reason = f"{decision.reason}; {_in_short(names, every)}".removeprefix("; ")
            yield evolve(decision, reason=reason)

    def _skipped(self, spec: LinearSpec) -> bool:
        """Whether a layer is excluded. Raises UnsupportedError if only some parts of a fused layer
        are quantized.
        """
        parts = [self.main.skips(name) for name in spec.part_names] or [False]
        whole = self.main.skips_fused if len(spec.part_names) > 1 else self.main.skips
        if whole(spec.name) or all(parts):
            return True
        if any(parts):
            names = ", ".join(spec.part_names)
            raise UnsupportedError(
                f"{names}: not supported yet: {self.main.name} for some parts of a fused layer"
            )
        return False


def _in_short(names: Sequence[str], every: Sequence[str]) -> str:
    """Return layer names with * for numbers, and the numbers if not all layers are included."""
    here, all_of = _numbers(names), _numbers(every)
    return ", ".join(
        path if some == all_of[path] else f"{path} of {', '.join(some)}"
        for path, some in here.items()
    )


def _numbers(names: Sequence[str]) -> dict[str, list[str]]:
    """Return names with * for numbers -> the numbers of each, in order."""
    numbers: dict[str, list[str]] = {}
    for name in names:
        numbers.setdefault(_NUMBER.sub("*", name), []).append(".".join(_NUMBER.findall(name)))
    return numbers


def _describe(spec: AttentionSpec) -> str:
    """Describe a spec: its sizes, and its unusual features."""
    parts = [f"{spec.heads}/{spec.kv_heads} heads of {spec.head_dim}", spec.kv_dtype]
    parts += [f"window {spec.window}"] if spec.window else []
    parts += [f"softcap {spec.softcap:g}"] if spec.softcap else []
    parts += [f"latent {spec.latent}"] if spec.latent else []
    parts += [name for name in ("sinks", "alibi", "biases", "masks") if getattr(spec, name)]
    parts += [] if spec.causal else ["both directions"]
    return ", ".join(parts)
