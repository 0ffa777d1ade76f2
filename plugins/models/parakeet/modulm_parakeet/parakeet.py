"""NVIDIA's Parakeet: a fast conformer whose frames say tokens (CTC, RNN-T, arXiv 2304.06795).

No text model goes on: the encoder hears a sound, and a small network reads tokens off its frames. A
prompt has a token per frame, and the result is a vector of it, whose columns are EMISSIONS:
1 + the number of tokens said there, then the token and its duration in frames for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.media import MediaItem
from modulm.contracts.model import Batch, CacheSpec, Model
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames, read_config
from modulm_layers import activation, size
from modulm_towers.parakeet import ParakeetConfig as EncoderConfig
from modulm_towers.parakeet import ParakeetTower
from modulm_towers.pieces import Pieces, whole

__all__ = ["ParakeetForCTC", "ParakeetForRNNT", "ParakeetForTDT"]

#: (token, frame where it begins, duration in frames)
Emission = tuple[int, int, int]


@frozen(kw_only=True)
class _Head:
    """The keys outside of `encoder_config`. blank_token_id: `pad_token_id` of CTC."""

    vocab_size: int = size(1025)
    pad_token_id: int | None = None
    blank_token_id: int | None = None
    decoder_hidden_size: int = size(640)
    num_decoder_layers: int = size(2)
    hidden_act: str = "relu"
    max_symbols_per_step: int = size(10)
    durations: tuple[int, ...] = (0, 1, 2, 3, 4)


@frozen(eq=False, kw_only=True)
class ParakeetConfig(_Head):
    """config.json of Parakeet."""

    encoder: EncoderConfig

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError."""
        encoder = table.get("encoder_config")
        if not isinstance(encoder, Mapping):
            raise CheckpointError(f"{file}: encoder_config: must be a table")
        head = read_config(table, _Head, file)
        fields = {field: getattr(head, field) for field in _Head.__annotations__}
        return cls(**fields, encoder=read_config(encoder, EncoderConfig, file))

    @property
    def blank(self) -> int:
        """The token that stands for none."""
        given = self.pad_token_id if self.blank_token_id is None else self.blank_token_id
        return self.vocab_size - 1 if given is None else given

    @property
    def max_length(self) -> int:
        """The most frames of a sound."""
        return self.encoder.max_position_embeddings

    @property
    def sliding_window(self) -> None:
        """None: no window limits the length of a row."""
        return


class ParakeetForCTC(Module, Model):
    """Each frame says a token; repeated ones are one."""

    api = 1
    config_type: ClassVar[type] = ParakeetConfig
    tasks: ClassVar[tuple[str, ...]] = ("token_embed",)
    media: ClassVar[tuple[str, ...]] = ("audio",)
    names: ClassVar[WeightNames] = WeightNames(ignore=(r"\.num_batches_tracked$",))

    def __init__(self, config: ParakeetConfig, build: Builder) -> None:
        super().__init__()
        self.config, self.device = config, build.shared.device
        self.dtype = build.shared.dtype
        self.encoder = ParakeetTower(config.encoder, build.at("encoder"))
        self.make_head(config, build)

    def make_head(self, config: ParakeetConfig, b: Builder) -> None:
        """Create what reads tokens off frames."""
        shape = (config.vocab_size, config.encoder.hidden_size, 1)
        b.parameter("ctc_head.weight", self, "weight", shape)
        b.parameter("ctc_head.bias", self, "bias", shape[:1])

    @property
    def slots(self) -> int:
        """The most tokens of a frame."""
        return 1

    def emissions(self, frames: Tensor) -> list[Emission]:
        """Read the tokens off a sound's frames, [frames, hidden]."""
        weight, bias = self.get_parameter("weight"), self.get_parameter("bias")
        tokens = torch.nn.functional.linear(frames, weight[..., 0], bias).argmax(-1).tolist()
        said: list[Emission] = []
        for frame, token in enumerate(tokens):
            if frame and token == tokens[frame - 1]:
                if token != self.config.blank:
                    last, first, length = said[-1]
                    said[-1] = (last, first, length + 1)
            elif token != self.config.blank:
                said.append((token, frame, 1))
        return said

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        return cls.names

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        return ()

    @property
    def pooling(self) -> str:
        return "MEDIA"

    def encode(self, items: Sequence[MediaItem]) -> Sequence[Tensor]:
        return whole(self.encode_in_pieces(items))

    def encode_in_pieces(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        """[frames, 1 + 2 * slots] float32 of each sound: see the module."""
        rows = []
        for item in items:
            mel = torch.from_numpy(item.tensors["mel"].copy()).to(self.device)
            frames = yield from self.encoder.run(mel)
            rows.append(self._written(self.emissions(frames), len(frames)))
        return rows

    def _written(self, said: Sequence[Emission], frames: int) -> Tensor:
        rows = torch.zeros(frames, 1 + 2 * self.slots)
        rows[:, 0] = 1
        for token, frame, duration in said:
            slot = int(rows[frame, 0])
            rows[frame, 0] += 1
            rows[frame, 2 * slot - 1], rows[frame, 2 * slot] = token, duration
        return rows.to(self.device)

    def forward(self, batch: Batch) -> Tensor:
        if batch.embeds is None:
            return torch.zeros(len(batch.tokens), 1 + 2 * self.slots, device=self.device)
        return batch.embeds

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": [cls.__name__],
            "model_type": "parakeet_ctc",
            "vocab_size": 65,
            "pad_token_id": 64,
            "encoder_config": _ENCODER,
        }


class ParakeetForRNNT(ParakeetForCTC):
    """A transducer: a recurrent network reads what was said, and a joint network the next token."""

    def make_head(self, config: ParakeetConfig, b: Builder) -> None:
        width = config.decoder_hidden_size
        self.projector = b.linear(
            "encoder_projector", config.encoder.hidden_size, width, bias=True, split=False
        )
        self.said = _Said(config, b.at("decoder"))
        self.act = activation(config.hidden_act, b.ops)
        outputs = config.vocab_size + self.durations(config)
        self.joint = b.linear("joint.head", width, outputs, bias=True, split=False)

    @classmethod
    def durations(cls, config: ParakeetConfig) -> int:
        """Outputs of the joint network after those of tokens."""
        return 0

    @property
    def slots(self) -> int:
        return self.config.max_symbols_per_step

    def emissions(self, frames: Tensor) -> list[Emission]:
        config, states = self.config, self.projector(frames)
        said: list[Emission] = []
        spoken, memory = self.said(config.blank, None)
        frame = here = 0
        while frame < len(states):
            logits: Tensor = self.joint(self.act((states[frame] + spoken)[None]))[0]
            token = int(logits[: config.vocab_size].argmax())
            steps = self.steps(token, logits)
            if token != config.blank:
                said.append((token, frame, self.span(steps)))
                spoken, memory = self.said(token, memory)
                here += 1
                steps = max(steps, int(here >= config.max_symbols_per_step))
            here = 0 if steps else here
            frame += steps
        return said

    def steps(self, token: int, logits: Tensor) -> int:
        """Frames to go on by after a token."""
        return int(token == self.config.blank)

    def span(self, steps: int) -> int:
        """Frames of a token, after which `steps` follow."""
        return 1

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": [cls.__name__],
            "model_type": "parakeet_rnnt",
            "vocab_size": 65,
            "pad_token_id": 2,
            "blank_token_id": 64,
            "decoder_hidden_size": 24,
            "num_decoder_layers": 2,
            "max_symbols_per_step": 10,
            "encoder_config": _ENCODER,
        }


class ParakeetForTDT(ParakeetForRNNT):
    """A transducer whose joint network also says how many frames a token takes."""

    @classmethod
    def durations(cls, config: ParakeetConfig) -> int:
        return len(config.durations)

    def steps(self, token: int, logits: Tensor) -> int:
        index = int(logits[self.config.vocab_size :].argmax())
        return max(self.config.durations[index], int(token == self.config.blank))

    def span(self, steps: int) -> int:
        return steps

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {**super().tiny(), "model_type": "parakeet_tdt", "durations": [0, 1, 2, 3, 4]}


class _Said(Module):
    """Reads the tokens that were said: an LSTM and a projection."""

    def __init__(self, c: ParakeetConfig, b: Builder) -> None:
        super().__init__()
        width, self.layers = c.decoder_hidden_size, c.num_decoder_layers
        b.parameter("embedding.weight", self, "embedding", (c.vocab_size, width))
        for layer in range(self.layers):
            for name in ("ih", "hh"):
                shape = (4 * width, width)
                b.parameter(f"lstm.weight_{name}_l{layer}", self, f"weight_{name}_{layer}", shape)
                b.parameter(f"lstm.bias_{name}_l{layer}", self, f"bias_{name}_{layer}", shape[:1])
        self.out = b.linear("decoder_projector", width, width, bias=True, split=False)

    def forward(
        self, token: int, memory: list[tuple[Tensor, Tensor]] | None
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """[width] of all tokens up to this one, and the layers' states after it."""
        x = self.get_parameter("embedding")[token][None]
        before = memory or [(torch.zeros_like(x), torch.zeros_like(x))] * self.layers
        after = []
        for layer, state in enumerate(before):
            parameters = [
                self.get_parameter(f"{kind}_{name}_{layer}")
                for kind in ("weight", "bias")
                for name in ("ih", "hh")
            ]
            x, cell = torch.lstm_cell(x, state, *parameters)
            after.append((x, cell))
        spoken: Tensor = self.out(x)
        return spoken[0], after


_ENCODER: Mapping[str, Any] = {
    "model_type": "parakeet_encoder",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "conv_kernel_size": 5,
    "subsampling_factor": 4,
    "subsampling_conv_channels": 8,
    "num_mel_bins": 16,
    "max_position_embeddings": 2048,
    "scale_input": True,
}
