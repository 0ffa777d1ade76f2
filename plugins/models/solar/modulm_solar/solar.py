"""Solar Pro (Upstage, 2024): Llama's block, with weighted connections across blocks of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen
from torch import Tensor

from modulm.contracts.model import Batch
from modulm.errors import UnsupportedError
from modulm.nn import Builder
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    PreNormLayer,
    standard_attention,
    standard_mlp,
    tiny_config,
)

__all__ = ["SolarConfig", "SolarForCausalLM", "SolarLayer"]


@frozen(kw_only=True)
class SolarConfig(DecoderConfig):
    """config.json of Solar Pro.

    The stream before the layers `bskcn_3` is mixed with that before the last of `bskcn_1`, in
    proportion `bskcn_tv`[1] (the first is for training); likewise `bskcn_4` with `bskcn_2`.
    """

    rms_norm_eps: float = 1e-5
    bskcn_1: tuple[int, ...] = ()
    bskcn_2: tuple[int, ...] = ()
    bskcn_3: tuple[int, ...] = ()
    bskcn_4: tuple[int, ...] = ()
    bskcn_tv: tuple[float, ...] = (0.9, 0.8)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if len(self.bskcn_tv) != 2:
            raise ValueError(f"bskcn_tv: two numbers are needed, got {self.bskcn_tv}")
        for sources, sinks in self.connections:
            early = [i for i in sinks if not any(j < i for j in sources)]
            if early:
                raise ValueError(f"bskcn_3, bskcn_4: layer {early[0]} has no layer to mix in")

    @property
    def connections(self) -> tuple[tuple[Sequence[int], Sequence[int]], ...]:
        """Layers whose inputs are kept, and those whose inputs they are mixed into."""
        return (self.bskcn_1, self.bskcn_3), (self.bskcn_2, self.bskcn_4)


class SolarLayer(PreNormLayer):
    """The pre-norm block."""

    def __init__(self, c: SolarConfig, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_attention(c, b, index),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b),
        )


class SolarForCausalLM(DecoderForCausalLM):
    """Solar Pro with a language-model head."""

    api = 1
    config_type = SolarConfig
    layer = SolarLayer
    oracle = "modulm_solar.oracle:AsLlama"

    def __init__(self, config: SolarConfig, build: Builder) -> None:
        if build.shared.mesh.pipeline.size > 1:
            raise UnsupportedError(
                "pipeline parallelism: not supported yet: SolarForCausalLM, whose layers read "
                "those of earlier stages; use --tensor-parallel-size"
            )
        super().__init__(config, build)

    def _run(
        self,
        batch: Batch,
        captured: dict[int, Tensor] | None = None,
        selected: frozenset[int] = frozenset(),
    ) -> tuple[Tensor, Tensor | None]:
        config, add, scale = self.config, self.norm.ops.add, self.norm.ops.scale
        share, saved = config.bskcn_tv[1], [batch.tokens] * 2
        x: Tensor = self.embed(batch)
        residual: Tensor | None = None
        for index, layer in enumerate(self.layers):
            for way, (sources, sinks) in enumerate(config.connections):
                if index in sources or index in sinks:
                    stream = x if residual is None else add(x, residual)
                    if index in sinks:
                        stream = add(saved[way], scale(stream, 1 - share))
                    else:  # a copy: layers write into the stream
                        saved[way] = scale(stream, share)
                    x, residual = stream, None
            x, residual = layer(x, residual, batch)
            if index in selected and captured is not None:
                captured[index] = x if residual is None else add(x, residual)
        return x, residual

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "solar",
            "SolarForCausalLM",
            num_hidden_layers=5,
            bskcn_1=[1],
            bskcn_2=[2],
            bskcn_3=[3],
            bskcn_4=[4],
            bskcn_tv=[0.9, 0.8],
        )
