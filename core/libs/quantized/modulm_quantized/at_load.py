"""Quantize plain weights while they load, with a scheme per layer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Self

from attrs import evolve, field, frozen, validators
from torch import Tensor

from modulm.contracts.ops import Ops
from modulm.contracts.platform import Platform
from modulm.contracts.quantization import (
    INPUTS,
    OUTPUTS,
    CheckpointInfo,
    LinearKind,
    LinearSpec,
    ParamSpec,
    QuantizationMethod,
)
from modulm.errors import ConfigError
from modulm_quantized.activations import ACTIVATION_FORMATS
from modulm_quantized.codes import Codes
from modulm_quantized.method import ACTIVATIONS, CodedMethod
from modulm_quantized.names import matches
from modulm_quantized.rounding import SCHEMES, Scheme, round_weight
from modulm_quantized.stored import StoredAs

__all__ = ["AtLoad", "AtLoadConfig", "ReadOrRound", "ReadOrRoundConfig"]

#: Suffixes of vLLM's format names that describe activation scales.
_ENDINGS = ("_static", "_dynamic", "_sym")


@frozen
class AtLoadConfig:
    """Which layers are quantized, and how. The default scheme is that of the method's name.

    `linear`, `moe`: scheme of linear layers and of expert stacks: a name, or a table of `weight`
    (None: not quantized) and `activation`. `targets`: name patterns -> scheme of these layers
    (None: not quantized). `ignore`: patterns of layers that stay unquantized. A pattern is a path,
    the end of a path, or a regular expression after "re:", matched against the checkpoint's names.
    `activations`: format of activations in products, "int8" (one scale per token and 256 inputs) or
    "bf16" (unrounded).
    """

    linear: Any = None
    moe: Any = None
    targets: dict[str, str | None] = field(factory=dict)
    ignore: tuple[str, ...] = ()
    activations: str | None = field(
        default=None, validator=validators.optional(validators.in_(ACTIVATIONS))
    )
    global_scheme: str | None = None
    linear_scheme_override: str | None = None
    moe_scheme_override: str | None = None

    def __attrs_post_init__(self) -> None:
        for name in self.targets.values():
            if name is not None:
                _scheme_of(name)
        for layers in (self.linear, self.moe):
            _check(layers)
        for scheme in (self.global_scheme, self.linear_scheme_override, self.moe_scheme_override):
            if scheme is not None:
                _scheme_of(scheme)


def _scheme_of(name: str) -> Scheme:
    """Look up a scheme by name. Raises ValueError if it does not exist."""
    short = name
    for ending in _ENDINGS:
        short = short.removesuffix(ending)
    if short not in SCHEMES:
        raise ValueError(f"unknown scheme {name!r}; known: {', '.join(SCHEMES)}")
    return SCHEMES[short]


def _check(layers: Any) -> None:
    if layers is None:
        return
    if isinstance(layers, str):
        _scheme_of(layers)
        return
    if not isinstance(layers, Mapping):
        raise ValueError(f"must be the name of a scheme or a table, not {layers!r}")
    unknown = sorted(set(layers) - {"weight", "activation"})
    if unknown:
        raise ValueError(f"unknown keys: {', '.join(unknown)}; known: weight, activation")
    if layers.get("weight") is not None:
        _scheme_of(str(layers["weight"]))
    activation = layers.get("activation")
    if activation not in (None, *ACTIVATIONS):
        raise ValueError(f"activation: unknown {activation!r}; known: int8, bf16 (unrounded)")


class AtLoad(CodedMethod):
    """Quantizes the layers of a plain checkpoint; subclasses define names and default schemes."""

    Config: ClassVar[type] = AtLoadConfig
    config: AtLoadConfig
    #: Default schemes of linear layers, the head and experts; "" means not quantized.
    LINEAR: ClassVar[str] = ""
    HEAD: ClassVar[str] = ""
    EXPERT: ClassVar[str] = ""
    #: Default format of activations.
    ROUNDED: ClassVar[str] = "bf16"

    @classmethod
    def claims(cls, checkpoint: CheckpointInfo) -> str | None:
        return None

    @classmethod
    def rejects(cls, spec: LinearSpec, platform: Platform) -> str | None:
        if spec.kind not in cls.HELD:
            return f"{cls.name} at load supports linear layers and experts, not {spec.kind}"
        return (
            None
            if spec.dtype in platform.dtypes
            else f"{platform.name} does not support {spec.dtype}"
        )

    def skips(self, name: str) -> bool:
        return matches(name, self.config.ignore)

    def declines(self, spec: LinearSpec) -> str | None:
        scheme = self._requested_scheme(spec)
        if scheme is None:
            return f"{self.name} leaves {_NOUNS[spec.kind]} as they are"
        return scheme.unfit(spec.inputs) if self.rounded_to(spec) is None else None

    def note(self, spec: LinearSpec) -> str | None:
        scheme = self.rounded_to(spec)
        if scheme is None:
            return None
        kind = scheme.values if scheme.values in ("fp8", "e2m1") else "int"
        bits, zeros = (4, True) if scheme.values == "int4" else (8, False)
        form = StoredAs(
            str(scheme), kind, bits, scheme.columns, zeros=zeros, powers=scheme.exponents
        )
        text = self.note_text(spec, form.text, fits=form.fits(spec))
        inputs = ACTIVATION_FORMATS.get(self.activations(spec))
        if inputs is None or self._packer(spec) is None or not form.fits(spec):
            return text
        return f"{text}; inputs quantized to {inputs}"

    def create(self, spec: LinearSpec) -> Mapping[str, ParamSpec]:
        return {"weight": ParamSpec((OUTPUTS, INPUTS), spec.dtype)}

    def codes(self, stored: Mapping[str, Tensor], spec: LinearSpec) -> tuple[Codes, ...]:
        scheme = self.rounded_to(spec)
        if scheme is None:
            raise ConfigError("quantization", f"{spec.name}: {self.declines(spec)}")
        kernel = self.ops.find("round_groups")
        return (round_weight(stored["weight"], scheme, spec.parts, kernel),)

    def activations(self, spec: LinearSpec) -> str:
        settings = self.config.moe if spec.kind is LinearKind.EXPERT else self.config.linear
        requested = settings.get("activation") if isinstance(settings, Mapping) else None
        if (named := requested or self.config.activations) is not None:
            return str(named)
        off = self.low_precision_flags.activation_quantization == "off"
        return "bf16" if off else self.ROUNDED

    def rounded_to(self, spec: LinearSpec) -> Scheme | None:
        """Return the scheme that a layer is quantized with, None if it stays plain."""
        scheme = self._requested_scheme(spec)
        return None if scheme is None or scheme.unfit(spec.inputs) else scheme

    def _requested_scheme(self, spec: LinearSpec) -> Scheme | None:
        """Return the scheme that the settings request. Raises ConfigError if fused parts differ."""
        schemes = {self._of(name, spec.kind) for name in spec.part_names or (spec.name,)}
        if len(schemes) > 1:
            names = ", ".join(spec.part_names)
            raise ConfigError(
                "quantization_config.targets", f"{names}: fused layers need the same scheme"
            )
        return schemes.pop()

    def _of(self, name: str, kind: str) -> Scheme | None:
        for pattern, scheme in self.config.targets.items():
            if matches(name, (pattern,)):
                return None if scheme is None else self._scheme(scheme)
        return self._default_scheme(kind)

    def _default_scheme(self, kind: str) -> Scheme | None:
        """Return the scheme of layers that no pattern matches."""
        config = self.config
        if kind == "lm_head":
            return self._scheme(self.HEAD)
        layers, override, default = config.linear, config.linear_scheme_override, self.LINEAR
        if kind == "expert":
            layers, override, default = config.moe, config.moe_scheme_override, self.EXPERT
        if isinstance(layers, Mapping):
            layers = layers.get("weight", default) or ""
        for name in (layers, override, config.global_scheme):
            if name is not None:
                return self._scheme(name)
        return self._scheme(default)

    def _scheme(self, name: str) -> Scheme | None:
        return self._sized(_scheme_of(name)) if name else None

    def _sized(self, scheme: Scheme) -> Scheme:
        """Adjust the scheme by the remaining settings."""
        size = getattr(self.config, "group_size", None)
        return evolve(scheme, columns=size) if size and scheme.values == "int4" else scheme


_NOUNS = {"linear": "linear layers", "lm_head": "heads", "expert": "experts"}


@frozen
class ReadOrRoundConfig(AtLoadConfig):
    """`quantization_config` of config.json; without `quant_method`, settings for use at load."""

    quant_method: str = ""


class ReadOrRound(QuantizationMethod):
    """A format that checkpoints are stored in and that plain checkpoints can be quantized to.

    Without `quant_method` in the configuration, the created object quantizes at load.
    """

    #: Default scheme for plain checkpoints, see `AtLoad.LINEAR`.
    ROUNDS_TO: ClassVar[str]

    def __new__(cls, config: ReadOrRoundConfig, platform: Platform, ops: Ops) -> Self:
        reads = config.quant_method or issubclass(cls, AtLoad)
        method: Self = super().__new__(cls if reads else _rounding(cls))
        return method


@cache
def _rounding(reader: type[ReadOrRound]) -> Any:
    """Create the class that quantizes instead of reading."""
    defaults = {"LINEAR": reader.ROUNDS_TO, "EXPERT": reader.ROUNDS_TO}
    namespace = {"__doc__": "Rounds a plain checkpoint.", "__module__": reader.__module__}
    return type(f"{reader.__name__}AtLoad", (AtLoad, reader), {**defaults, **namespace})
