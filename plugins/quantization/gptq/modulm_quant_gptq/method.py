"""GPTQ checkpoints (Frantar et al., arXiv 2210.17323) of AutoGPTQ, GPTQModel and AutoRound.

`qweight` [K * bits / 32, N] holds codes in words along inputs. `qzeros` [groups, N * bits / 32]
holds zero points in words along outputs, minus one in all formats but "gptq_v2". `scales` are
[groups, N] and `g_idx` is the group of each input (arbitrary with `desc_act`). Codes are stored
without gaps, from the lowest bits up. Sources: QuantLinear of AutoGPTQ 0.7, FORMAT of GPTQModel 5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from attrs import field, frozen, validators
from torch import Tensor

from modulm.contracts.quantization import (
    INPUTS,
    OUTPUTS,
    PARTS,
    CheckpointInfo,
    LinearSpec,
    ParamSpec,
    fixed,
)
from modulm.errors import ConfigError
from modulm_quantized import (
    ACTIVATIONS,
    CodedMethod,
    Codes,
    StoredAs,
    matches,
    native_patterns,
    packed_axis,
    renamed_layers,
    sorted_by_group,
    unpack_words,
)

__all__ = ["AutoGPTQ", "GPTQ", "GPTQConfig", "GPTQMarlin", "INC"]

_BITS = (2, 3, 4, 8)
_METHODS = ("gptq", "auto-round", "auto_round", "intel/auto-round", "inc")


@frozen
class _Settings:
    """Settings of one layer: bits per code, and inputs per scale (-1: all)."""

    bits: int
    group_size: int


@frozen
class GPTQConfig:
    """`quantization_config` of config.json, or quantize_config.json.

    `dynamic`: regular expressions of layer names -> settings that override the defaults; a "-:"
    prefix excludes layers from quantization. `sym`: the zero points are in the middle of the codes,
    which estimates of memory use. `activations`: what kernels round activations to,
    "bf16" (no rounding) or "int8". Other keys describe how the weights were computed.
    """

    OPEN_ENDED: ClassVar[bool] = True

    quant_method: str = "gptq"
    bits: int = field(default=4, validator=validators.in_(_BITS))
    group_size: int = 128
    checkpoint_format: str = "gptq"
    packing_format: str = ""
    desc_act: bool = False
    sym: bool = False
    lm_head: bool = False
    dynamic: dict[str, dict[str, Any]] | None = None
    extra_config: dict[str, dict[str, Any]] | None = None
    modules_in_block_to_quantize: tuple[Any, ...] | None = None
    modules_to_not_convert: tuple[str, ...] | None = None
    activations: str = field(default="bf16", validator=validators.in_(ACTIVATIONS))

    def __attrs_post_init__(self) -> None:
        if self.form not in ("gptq", "gptq_v2"):
            key = "packing_format" if self.packing_format else "checkpoint_format"
            raise ValueError(
                f"{key}: {self.form!r}; supported: gptq, gptq_v2 (for awq use --quantization awq)"
            )

    @property
    def form(self) -> str:
        """How zero points are stored; AutoRound writes it as "auto_round:auto_gptq"."""
        packing = self.packing_format.rpartition(":")[2].replace("auto_gptq", "gptq")
        return packing or self.checkpoint_format


class GPTQ(CodedMethod):
    """Codes of 2, 3, 4 or 8 bits with a scale and a zero point per group of inputs."""

    name = "gptq"
    Config: ClassVar[type] = GPTQConfig
    config: GPTQConfig
    LISTS: ClassVar = {"modules_to_not_convert": matches}

    @classmethod
    def claims(cls, checkpoint: CheckpointInfo) -> str | None:
        table = checkpoint.quantization or {}
        method = table.get("quant_method")
        packed = str(table.get("packing_format", "gptq"))
        if method not in _METHODS or (method != cls.name and "awq" in packed):
            return None
        return f"config.json says quant_method {method}"

    @classmethod
    def settings(cls, checkpoint: CheckpointInfo) -> Mapping[str, object]:
        table = dict(super().settings(checkpoint))
        rules, extra = table.get("dynamic"), table.get("extra_config")
        if isinstance(rules, Mapping) or isinstance(extra, Mapping):
            layers = renamed_layers(checkpoint)
            if isinstance(rules, Mapping):
                table["dynamic"] = _native_rules(rules, layers)
            if isinstance(extra, Mapping):
                named = {name: extra[path] for name, path in layers.items() if path in extra}
                table["extra_config"] = {**named, **extra}
        return table

    def activations(self, spec: LinearSpec) -> str:
        return self.config.activations

    def skips(self, name: str) -> bool:
        chosen = _flat(self.config.modules_in_block_to_quantize or ())
        unlisted = bool(chosen) and "lm_head" not in name and not matches(name, chosen)
        return unlisted or self.skips_fused(name)

    def skips_fused(self, name: str) -> bool:
        config = self.config
        if name.rpartition(".")[2] == "lm_head" and not config.lm_head:
            return True
        if matches(name, config.modules_to_not_convert or ()):
            return True
        rule = self._rule(name)
        return rule is None or int(rule.get("bits", config.bits)) >= 16

    def scheme(self, spec: LinearSpec) -> StoredAs:
        settings = self._settings(spec)
        return StoredAs.integers(
            settings.bits, settings.group_size, zeros=True, ordered=self.config.desc_act
        )

    def create(self, spec: LinearSpec) -> Mapping[str, ParamSpec]:
        bits, group = self._settings(spec).bits, self._group(spec)
        groups = fixed(1) if group == spec.input_shard.total else INPUTS.blocks(group)
        return {
            "qweight": ParamSpec((packed_axis(INPUTS, bits), OUTPUTS), "int32"),
            "qzeros": ParamSpec((groups, packed_axis(OUTPUTS, bits)), "int32"),
            "scales": ParamSpec((groups, OUTPUTS), "float16"),
            "g_idx": ParamSpec((PARTS, INPUTS), "int32", optional=True),
        }

    def example(self, spec: LinearSpec, name: str) -> Tensor | None:
        settings = self._settings(spec)
        if name == "g_idx":
            groups = torch.arange(spec.inputs) // self._group(spec)
            return groups.flip(0) if self.config.desc_act else groups
        if name != "qzeros" or not self.config.sym or settings.bits not in (2, 4, 8):
            return None
        zero = 2 ** (settings.bits - 1) - (self.config.form == "gptq")
        word = sum(zero << at for at in range(0, 32, settings.bits))
        return torch.tensor(word, dtype=torch.int64).to(torch.int32)

    def codes(self, stored: Mapping[str, Tensor], spec: LinearSpec) -> tuple[Codes, ...]:
        bits = self._settings(spec).bits
        values = unpack_words(stored["qweight"], bits, 0).T.contiguous()
        zeros = unpack_words(stored["qzeros"], bits, 1).T.to(torch.int16).contiguous()
        if self.config.form == "gptq":
            zeros += 1
        whole = Codes(values, stored["scales"].T.contiguous(), zeros)
        return sorted_by_group(whole, stored.get("g_idx"), spec)

    def _settings(self, spec: LinearSpec) -> _Settings:
        """Return the settings of a layer. Raises ConfigError if fused parts differ."""
        settings = {self._of(name) for name in spec.part_names or (spec.name,)}
        if len(settings) > 1:
            names = ", ".join(spec.part_names)
            raise ConfigError(
                "quantization_config.dynamic", f"{names}: fused layers have different settings"
            )
        return settings.pop()

    def _of(self, name: str) -> _Settings:
        rule = self._rule(name) or {}
        bits = int(rule.get("bits", self.config.bits))
        if bits not in _BITS:
            raise ConfigError(
                "quantization_config.dynamic", f"{name}: bits must be one of {_BITS}, not {bits}"
            )
        return _Settings(bits, int(rule.get("group_size", self.config.group_size)))

    def _rule(self, name: str) -> Mapping[str, Any] | None:
        """Return the settings for this layer in particular, or None if it is not quantized."""
        for pattern, rule in (self.config.dynamic or {}).items():
            if pattern.startswith("-:"):
                if re.match(pattern[2:], name):
                    return None
            elif re.match(pattern.removeprefix("+:"), name):
                return rule
        return (self.config.extra_config or {}).get(name, {})

    def _group(self, spec: LinearSpec) -> int:
        """Return the group size. Raises ConfigError if the inputs are not a multiple of it."""
        total, group_size = spec.input_shard.total, self._settings(spec).group_size
        size = group_size if group_size > 0 else total
        if total % size or spec.inputs % size:
            raise ConfigError(
                "quantization_config.group_size",
                f"{spec.name} has {spec.inputs} inputs, not a multiple of the group size {size}",
            )
        return size


def _native_rules(rules: Mapping[str, Any], layers: Mapping[str, str]) -> dict[str, Any]:
    """Add rules for the model's names, each after that for names in files."""
    native: dict[str, Any] = {}
    for pattern, rule in rules.items():
        sign = pattern[:2] if pattern[:2] in ("-:", "+:") else ""
        names = native_patterns([f"re:{pattern.removeprefix(sign)}"], matches, layers)
        more = [sign + name.removeprefix("re:") for name in names if name.startswith("re:")]
        native |= dict.fromkeys([pattern, *more], rule)
    return native


def _flat(names: tuple[Any, ...]) -> list[str]:
    """Flatten nested lists of names."""
    return [
        name
        for entry in names
        for name in (_flat(tuple(entry)) if isinstance(entry, list | tuple) else [entry])
    ]


class AutoGPTQ(GPTQ):
    """vLLM's name for the same method."""

    name = "auto_gptq"

    @classmethod
    def claims(cls, checkpoint: CheckpointInfo) -> str | None:
        return None


class GPTQMarlin(GPTQ):
    """vLLM's name for the same method."""

    name = "gptq_marlin"

    @classmethod
    def claims(cls, checkpoint: CheckpointInfo) -> str | None:
        return None


class INC(GPTQ):
    """vLLM's name for checkpoints of Intel Neural Compressor and AutoRound."""

    name = "inc"

    @classmethod
    def claims(cls, checkpoint: CheckpointInfo) -> str | None:
        return None
