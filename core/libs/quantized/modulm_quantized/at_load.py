"""A method that rounds plain weights while they load, by schemes that may differ from layer to
layer."""

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
    LinearSpec,
    ParamSpec,
    QuantizationMethod,
)
from modulm.errors import ConfigError
from modulm_quantized.codes import Codes
from modulm_quantized.method import ACTIVATIONS, CodedMethod
from modulm_quantized.names import matches
from modulm_quantized.rounding import SCHEMES, Scheme, round_weight
from modulm_quantized.stored import StoredAs

__all__ = ["AtLoad", "AtLoadConfig", "ReadOrRound", "ReadOrRoundConfig"]

#: What vLLM's names of formats of weights end with where they say when scales are found.
_ENDINGS = ("_static", "_dynamic", "_sym")


@frozen
class AtLoadConfig:
    """Which layers are rounded to what; without any of it, as the name of the method says.

    `linear` and `moe`: for linear layers and for stacks of experts, the name of a scheme, or a
    table of `weight` (None: not rounded) and `activation`. `targets`: patterns of names -> schemes
    that such layers have instead (None: not rounded). `ignore`: patterns of layers that stay as
    they are. A pattern is a path, its end, or a regular expression behind "re:", of the names that
    the checkpoint has. `activations`: what kernels round them to before a product, "int8" (a scale
    per token and 256 inputs) or "bf16" (not at all).
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
        for told in (self.global_scheme, self.linear_scheme_override, self.moe_scheme_override):
            if told is not None:
                _scheme_of(told)


def _scheme_of(name: str) -> Scheme:
    """The scheme of a name. Raises ValueError for one that there is not."""
    short = name
    for ending in _ENDINGS:
        short = short.removesuffix(ending)
    if short not in SCHEMES:
        raise ValueError(f"no scheme {name!r}; there are {', '.join(SCHEMES)}")
    return SCHEMES[short]


def _check(layers: Any) -> None:
    if layers is None:
        return
    if isinstance(layers, str):
        _scheme_of(layers)
        return
    if not isinstance(layers, Mapping):
        raise ValueError(f"the name of a scheme or a table is needed, not {layers!r}")
    unknown = sorted(set(layers) - {"weight", "activation"})
    if unknown:
        raise ValueError(f"weight and activation are known, not {', '.join(unknown)}")
    if layers.get("weight") is not None:
        _scheme_of(str(layers["weight"]))
    activation = layers.get("activation")
    if activation not in (None, *ACTIVATIONS):
        raise ValueError(
            f"activation: {activation!r}; here they are rounded to int8 or, with bf16, not at all"
        )


class AtLoad(CodedMethod):
    """Rounds layers of a plain checkpoint; its subclasses have names and usual schemes."""

    Config: ClassVar[type] = AtLoadConfig
    config: AtLoadConfig
    #: What linear layers, the head and experts are rounded to where settings do not say; "": not.
    LINEAR: ClassVar[str] = ""
    HEAD: ClassVar[str] = ""
    EXPERT: ClassVar[str] = ""
    #: What activations are rounded to where settings do not say.
    ROUNDED: ClassVar[str] = "bf16"

    @classmethod
    def claims(cls, checkpoint: CheckpointInfo) -> str | None:
        return None

    @classmethod
    def rejects(cls, spec: LinearSpec, platform: Platform) -> str | None:
        if spec.kind not in cls.HELD:
            return f"{cls.name} at load holds linear layers and experts, not {spec.kind}"
        return None if spec.dtype in platform.dtypes else f"{platform.name} has no {spec.dtype}"

    def skips(self, name: str) -> bool:
        return matches(name, self.config.ignore)

    def declines(self, spec: LinearSpec) -> str | None:
        scheme = self._asked(spec)
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
        return self.told(spec, form.text, fits=form.fits(spec))

    def create(self, spec: LinearSpec) -> Mapping[str, ParamSpec]:
        return {"weight": ParamSpec((OUTPUTS, INPUTS), spec.dtype)}

    def codes(self, stored: Mapping[str, Tensor], spec: LinearSpec) -> tuple[Codes, ...]:
        scheme = self.rounded_to(spec)
        if scheme is None:
            raise ConfigError("quantization", f"{spec.name}: {self.declines(spec)}")
        kernel = getattr(self.ops, "round_groups", None)
        return (round_weight(stored["weight"], scheme, spec.parts, kernel),)

    def activations(self, spec: LinearSpec) -> str:
        given = self.config.moe if spec.kind == "expert" else self.config.linear
        own = given.get("activation") if isinstance(given, Mapping) else None
        return own or self.config.activations or self.ROUNDED

    def rounded_to(self, spec: LinearSpec) -> Scheme | None:
        """What a layer is rounded to, None if not at all."""
        asked = self._asked(spec)
        return None if asked is None or asked.unfit(spec.inputs) else asked

    def _asked(self, spec: LinearSpec) -> Scheme | None:
        """What settings ask for. Raises ConfigError where fused parts differ."""
        found = {self._of(name, spec.kind) for name in spec.part_names or (spec.name,)}
        if len(found) > 1:
            names = ", ".join(spec.part_names)
            raise ConfigError("quantization_config.targets", f"{names}: not alike, and fused")
        return found.pop()

    def _of(self, name: str, kind: str) -> Scheme | None:
        for pattern, wanted in self.config.targets.items():
            if matches(name, (pattern,)):
                return None if wanted is None else self._scheme(wanted)
        return self._usual(kind)

    def _usual(self, kind: str) -> Scheme | None:
        """Of layers that no pattern means."""
        given = self.config
        if kind == "lm_head":
            return self._scheme(self.HEAD)
        layers, told, own = given.linear, given.linear_scheme_override, self.LINEAR
        if kind == "expert":
            layers, told, own = given.moe, given.moe_scheme_override, self.EXPERT
        if isinstance(layers, Mapping):
            layers = layers.get("weight", own) or ""
        for name in (layers, told, given.global_scheme):
            if name is not None:
                return self._scheme(name)
        return self._scheme(own)

    def _scheme(self, name: str) -> Scheme | None:
        return self._sized(_scheme_of(name)) if name else None

    def _sized(self, scheme: Scheme) -> Scheme:
        """The scheme with what else settings say of it."""
        size = getattr(self.config, "group_size", None)
        return evolve(scheme, columns=size) if size and scheme.values == "int4" else scheme


_NOUNS = {"linear": "linear layers", "lm_head": "heads", "expert": "experts"}


@frozen
class ReadOrRoundConfig(AtLoadConfig):
    """`quantization_config` of config.json; without `quant_method`, what is rounded."""

    quant_method: str = ""


class ReadOrRound(QuantizationMethod):
    """A format that has checkpoints of its own, and to which plain ones are rounded: a
    configuration without `quant_method` makes an object that rounds."""

    #: What a plain checkpoint's layers are rounded to, see `AtLoad.LINEAR`.
    ROUNDS_TO: ClassVar[str]

    def __new__(cls, config: ReadOrRoundConfig, platform: Platform, ops: Ops) -> Self:
        reads = config.quant_method or issubclass(cls, AtLoad)
        made: Self = super().__new__(cls if reads else _rounding(cls))
        return made


@cache
def _rounding(reader: type[ReadOrRound]) -> Any:
    """The class that rounds in place of reading."""
    usual = {"LINEAR": reader.ROUNDS_TO, "EXPERT": reader.ROUNDS_TO}
    told = {"__doc__": "Rounds a plain checkpoint.", "__module__": reader.__module__}
    return type(f"{reader.__name__}AtLoad", (AtLoad, reader), {**usual, **told})
