"""Which drivers a model runs on, each choice with its candidates and reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

from modulm.contracts.attention import AttentionBackend, AttentionSpec
from modulm.contracts.quantization import LinearSpec, QuantizationMethod
from modulm.errors import (
    ArchitectureNotFound,
    CheckpointError,
    ConfigError,
    PluginError,
    UnsupportedError,
)
from modulm.ops import OpTable, bind
from modulm.plugins.explain import Decision, Verdict

if TYPE_CHECKING:
    from modulm.config import EngineConfig
    from modulm.contracts.kernels import KernelProvider
    from modulm.contracts.platform import Platform
    from modulm.loading.checkpoint import Checkpoint
    from modulm.plugins.manager import PluginManager

__all__ = ["Choices", "choose_loader"]

#: The method of layers that no other method holds.
PLAIN = "none"


@frozen(eq=False)
class Choices:
    """Chooses drivers for one load and remembers why (`decisions`)."""

    config: EngineConfig
    checkpoint: Checkpoint
    platform: Platform
    plugins: PluginManager
    decisions: list[Decision] = field(factory=list)
    backends: dict[AttentionSpec, AttentionBackend] = field(factory=dict)

    def model(self) -> Any:
        """The driver class of the checkpoint's architecture.

        Raises ArchitectureNotFound if no installed plugin offers one of its names.
        """
        names = self.checkpoint.architectures
        overrides = self.config.model.model_class_overrides
        chosen = self.plugins.hook.modulm_choose_model(
            architectures=names, config=self.checkpoint.config
        )
        installed = {d.name for d in self.plugins.names("models")}
        found = [name for name in names if name in installed]
        for name in names:
            if name in overrides:
                self.plugins.register("models", name, overrides[name])
                return self._decide_model(name, "given by --model-class-overrides")
        if chosen is not None:
            return self._decide_model(chosen.name, chosen.reason)
        if found:
            return self._decide_model(found[0], "the architecture in config.json")
        self.plugins.find("models", names[0])
        raise ArchitectureNotFound(f"no installed plugin provides {names[0]!r}")

    def _decide_model(self, name: str, reason: str) -> Any:
        driver = self.plugins.load("models", name)
        self.decisions.append(Decision("model", (Verdict(name),), name, reason))
        return driver

    def ops(self, dtype: str) -> OpTable:
        """The op table of the kernel providers that run here, bound for `dtype`."""
        wanted = self.config.attention.kernels
        names = self.platform.kernels if wanted is None else wanted
        installed = {d.name for d in self.plugins.names("kernels")}
        providers: list[KernelProvider] = []
        verdicts: list[Verdict] = []
        for name in names:
            if name == "none":
                break
            known = name in installed
            verdicts.append(
                Verdict(name, self._provide(name, providers) if known else "not installed")
            )
        table = bind(providers, dtype=dtype)
        winner = ", ".join(p.name for p in providers) or "torch"
        bound = sum(provider != "torch" for provider in table.providers.values())
        self.decisions.append(
            Decision("kernels", tuple(verdicts), winner, f"{bound} of {len(table.providers)} ops")
        )
        return table

    def _provide(self, name: str, providers: list[KernelProvider]) -> str | None:
        """Add a provider; or why not."""
        try:
            driver = self.plugins.load("kernels", name)
        except PluginError as error:
            return str(error)
        probe = driver.probe(self.platform)
        if probe.score <= 0:
            return str(probe.reason)
        providers.append(driver())
        return None

    def method(self, ops: OpTable) -> Methods:
        """The quantization method of the checkpoint or of --quantization, and the plain one."""
        plain = self._method(PLAIN, {}, ops)
        name, reason, verdicts = self._method_name()
        self.decisions.append(Decision("quantization", verdicts, name, reason))
        if name == PLAIN:
            return Methods(plain, plain, self.platform)
        table = self.config.model.quantization_config or self.checkpoint.info.quantization or {}
        return Methods(self._method(name, table, ops), plain, self.platform)

    def _method(self, name: str, table: Mapping[str, Any], ops: OpTable) -> QuantizationMethod:
        driver = self.plugins.load("quantization", name)
        options = self.plugins.options("quantization", name, dict(table))
        method: QuantizationMethod = driver(options, self.platform, ops)
        return method

    def _method_name(self) -> tuple[str, str, tuple[Verdict, ...]]:
        given, info = self.config.model.quantization, self.checkpoint.info
        if given is not None:
            return given, "given by --quantization", (Verdict(given),)
        chosen = self.plugins.hook.modulm_choose_quantization(
            checkpoint=info, platform=self.platform
        )
        if chosen is not None:
            return chosen.name, chosen.reason, (Verdict(chosen.name),)
        verdicts: list[Verdict] = []
        claims: dict[str, str] = {}
        for declared in self.plugins.names("quantization"):
            claim = self.plugins.load("quantization", declared.name).claims(info)
            verdicts.append(Verdict(declared.name, None if claim else "does not claim it"))
            if claim and declared.name != PLAIN:
                claims[declared.name] = claim
        if len(claims) > 1:
            raise ConfigError(
                "quantization", f"{' and '.join(claims)} claim the checkpoint; give one"
            )
        for name, claim in claims.items():
            return name, claim, tuple(verdicts)
        if info.quantization is not None:
            kind = info.quantization.get("quant_method", "an unnamed method")
            raise UnsupportedError(
                f"the checkpoint is quantized with {kind!r} (config.json: quantization_config) and "
                f"no installed method reads it; pip install modulm-quant-{kind}"
            )
        return PLAIN, "the checkpoint is not quantized", tuple(verdicts)

    def backend(self, spec: AttentionSpec, ops: OpTable) -> AttentionBackend:
        """The attention backend of a spec; layers with equal specs share one."""
        if spec not in self.backends:
            self.backends[spec] = self._choose_backend(spec, ops)
        return self.backends[spec]

    def _choose_backend(self, spec: AttentionSpec, ops: OpTable) -> AttentionBackend:
        given = self.config.attention.attention_backend
        names: Sequence[str] = self.platform.attention
        reason = f"the first of {self.platform.name}'s order that takes the layer"
        if given is not None:
            names, reason = (given,), "given by --attention-backend"
        else:
            chosen = self.plugins.hook.modulm_choose_attention(spec=spec, platform=self.platform)
            if chosen is not None:
                names, reason = (chosen.name,), chosen.reason
        verdicts: list[Verdict] = []
        winner: Any = None
        for name in names:
            driver, refusal = self._try_backend(name, spec)
            verdicts.append(Verdict(name, refusal))
            if refusal is None and winner is None:
                winner = driver
        subject = f"attention ({_describe(spec)})"
        if winner is None:
            tried = "; ".join(f"{v.name}: {v.reason}" for v in verdicts)
            raise UnsupportedError(f"no attention backend accepts {_describe(spec)} ({tried})")
        self.decisions.append(Decision(subject, tuple(verdicts), winner.name, reason))
        size = self._block_size(winner.block_sizes(spec))
        options = self.config.attention.attention_options
        backend: AttentionBackend = winner(spec, self.platform, ops, size, options)
        return backend

    def _try_backend(self, name: str, spec: AttentionSpec) -> tuple[Any, str | None]:
        try:
            driver = self.plugins.load("attention", name)
        except PluginError as error:
            return None, str(error)
        return driver, driver.rejects(spec, self.platform)

    def _block_size(self, sizes: Sequence[int]) -> int:
        """--block-size where the backend can do it, else the backend's own best."""
        wanted = self.config.cache.block_size or self.platform.block_size
        return wanted if not sizes or wanted in sizes else sizes[0]


@frozen(eq=False)
class Methods:
    """The method of a checkpoint, and the plain one for layers that it skips or cannot hold."""

    main: QuantizationMethod
    plain: QuantizationMethod
    platform: Platform

    def of(self, spec: LinearSpec) -> QuantizationMethod:
        """The method that holds a layer."""
        if self.main is self.plain:
            return self.plain
        if self.main.skips(spec.name) or self.main.rejects(spec, self.platform) is not None:
            return self.plain
        return self.main


def choose_loader(config: EngineConfig, checkpoint: Checkpoint, plugins: PluginManager) -> Any:
    """The loader of --load-format, or the one that opens the folder.

    Raises CheckpointError if no installed loader does.
    """
    name = config.load.load_format
    if name == "auto":
        offered = [declared.name for declared in plugins.names("loaders")]
        claims = [n for n in offered if plugins.load("loaders", n).opens(checkpoint.path)]
        if not claims:
            formats = ", ".join(offered)
            raise CheckpointError(
                f"{checkpoint.path}: no weights that an installed loader reads ({formats})"
            )
        name = claims[0]
    options = dict(config.load.model_loader_extra_config)
    return plugins.load("loaders", name)(checkpoint.path, options)


def _describe(spec: AttentionSpec) -> str:
    """A spec in words: the sizes, and what is not ordinary about it."""
    words = [f"{spec.heads}/{spec.kv_heads} heads of {spec.head_dim}", spec.kv_dtype]
    plain = evolve(spec, window=None, softcap=0.0, sinks=False, alibi=False, latent=0)
    words += [f"window {spec.window}"] if spec.window else []
    words += [f"softcap {spec.softcap:g}"] if spec.softcap else []
    words += [f"latent {spec.latent}"] if spec.latent else []
    words += [name for name in ("sinks", "alibi") if getattr(spec, name)]
    words += [] if plain.causal else ["both directions"]
    return ", ".join(words)
