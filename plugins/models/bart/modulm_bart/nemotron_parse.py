"""Nemotron Parse 1.1 and 1.2: C-RADIO reads a page, mBART's decoder without positions writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.media import MediaItem
from modulm.contracts.model import Batch
from modulm.errors import CheckpointError, UnsupportedError
from modulm.nn import Builder, Embedding, Head, Norm, WeightNames, read_config
from modulm_layers import CrossedLayer, DecoderForCausalLM, size
from modulm_towers.convolution import Convolution
from modulm_towers.pieces import Pieces, whole
from modulm_towers.radio import RadioConfig, RadioTower

__all__ = ["NemotronParseConfig", "NemotronParseForConditionalGeneration"]

_EPS, _NECK_EPS = 1e-5, 1e-6
#: Columns of patches that are one token.
_COLUMNS = 4


@frozen(kw_only=True)
class _DecoderConfig:
    """`decoder` of config.json."""

    vocab_size: int = size()
    d_model: int = size(1024)
    decoder_layers: int = size(10)
    decoder_attention_heads: int = size(16)
    decoder_ffn_dim: int = size(4096)
    activation_function: str = "gelu"
    scale_embedding: bool = True
    tie_word_embeddings: bool = False

    def __attrs_post_init__(self) -> None:
        if self.d_model % self.decoder_attention_heads:
            raise ValueError("decoder_attention_heads: does not divide d_model")


@frozen(eq=False, kw_only=True)
class NemotronParseConfig:
    """config.json of Nemotron Parse. image_size: (height, width) of a page in pixels."""

    decoder: _DecoderConfig
    vision: RadioConfig
    image_size: tuple[int, int]
    max_length: int
    tie_word_embeddings: bool

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError."""
        parts = {key: table.get(key) for key in ("encoder", "decoder")}
        for key, part in parts.items():
            if not isinstance(part, Mapping):
                raise CheckpointError(f"{file}: {key}: must be a table")
        decoder = read_config(parts["decoder"] or {}, _DecoderConfig, file)
        vision = RadioConfig.from_files(parts["encoder"] or {}, file)
        sides = table.get("image_size", (2048, 1664))
        step = vision.patch_size
        if (
            not isinstance(sides, list | tuple)
            or len(sides) != 2
            or not all(type(side) is int and side >= step for side in sides)
            or sides[0] % step
            or sides[1] % (step * _COLUMNS)
        ):
            raise CheckpointError(
                f"{file}: image_size: {sides!r}: must be multiples of {step} and {step * _COLUMNS}"
            )
        length = table.get("max_sequence_length", 9000)
        if type(length) is not int or length < 1:
            raise CheckpointError(f"{file}: max_sequence_length: {length!r}")
        tied = bool(table.get("tie_word_embeddings", False)) or decoder.tie_word_embeddings
        return cls(
            decoder=decoder, vision=vision, image_size=(sides[0], sides[1]), max_length=length,
            tie_word_embeddings=tied,
        )  # fmt: skip

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary."""
        return self.decoder.vocab_size

    @property
    def hidden_size(self) -> int:
        """The decoder's width."""
        return self.decoder.d_model

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the decoder."""
        return self.decoder.decoder_layers

    @property
    def sliding_window(self) -> None:
        """None: no window limits the length of a row."""
        return

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of patches of a page."""
        step = self.vision.patch_size
        return self.image_size[0] // step, self.image_size[1] // step

    @property
    def tokens(self) -> int:
        """Encoder outputs of a page: those of its patches, and a summary."""
        return self.grid[0] * (self.grid[1] // _COLUMNS) + 1


class _Embedded(Module):
    """Token embeddings, normed."""

    def __init__(self, tokens: Embedding, norm: Norm) -> None:
        super().__init__()
        self.tokens, self.norm = tokens, norm

    def forward(self, batch: Batch) -> Tensor:
        """[tokens, hidden] for the batch's tokens."""
        return self.norm(self.tokens(batch))


class NemotronParseForConditionalGeneration(DecoderForCausalLM):
    """Nemotron Parse: norms precede the branches, follow the embedding and end the model."""

    api = 1
    config_type: ClassVar[type] = NemotronParseConfig
    root = "decoder"
    media = ("image",)
    takes_embeds = False
    names = WeightNames(
        rename=((r"^encoder\.model_encoder\.radio_model\.", "encoder.radio."),),
        ignore=(
            r"^encoder\.radio\.(summary_idxs$|input_conditioner\.)",
            r"^decoder\.(embed_positions|extra_heads|extra_proj)\.",
        ),
    )

    def __init__(self, config: Any, build: Builder) -> None:
        if build.shared.mesh.pipeline.size > 1:
            raise UnsupportedError(
                "pipeline_parallel_size: not supported yet for encoder-decoder models"
            )
        super().__init__(config, build)
        self.device, self.dtype = build.shared.device, build.shared.dtype
        b, width, vision = build.at("encoder"), config.hidden_size, config.vision
        self.tower = RadioTower(vision, b.at("radio"))
        self.first = Convolution(b, "conv1", vision.hidden_size, width, (1,))
        self.merge = Convolution(
            b, "conv2", width, width, (1, _COLUMNS), stride=(1, _COLUMNS), bias=False
        )
        inputs = vision.hidden_size * len(vision.summary or range(vision.num_cls_tokens))
        self.summary = b.linear("sum_proj", inputs, width, bias=True, split=False)
        self.norm1, self.norm2, self.norm3 = (
            b.layer_norm(f"layer_norm{number}", width, _NECK_EPS) for number in (1, 2, 3)
        )

    def layer(self, c: Any, b: Builder, index: int) -> CrossedLayer:
        """A layer of the decoder."""
        return CrossedLayer(
            b, hidden=c.hidden_size, heads=c.decoder.decoder_attention_heads,
            inner=c.decoder.decoder_ffn_dim, act=c.decoder.activation_function, longest=c.tokens,
            eps=_EPS,
        )  # fmt: skip

    def make_embedding(self, config: Any, b: Builder) -> Any:
        width = config.hidden_size
        scale = width**0.5 if config.decoder.scale_embedding else 1.0
        tokens = b.embedding("embed_tokens", config.vocab_size, width, scale=scale)
        return _Embedded(tokens, b.layer_norm("layernorm_embedding", width, _EPS))

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.layer_norm("layer_norm", config.hidden_size, _EPS)

    def make_head(self, config: Any, b: Builder) -> Head:
        embedded: Any = self.embed
        tied = embedded.tokens if config.tie_word_embeddings else None
        return b.head("lm_head", config.hidden_size, config.vocab_size, tied=tied)

    def encode(self, items: Sequence[MediaItem]) -> Sequence[Tensor]:
        return whole(self.encode_in_pieces(items))

    def encode_in_pieces(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        """Encode pages: [tokens, hidden] of each."""
        stored = [torch.from_numpy(item.tensors["pixel_values"]) for item in items]
        pixels = torch.cat(stored).to(self.device, self.dtype)
        grid = self.config.grid
        states, summaries = yield from self.tower.run(pixels, [grid] * len(items))
        x = states.view(len(items), grid[0] * grid[1], -1).transpose(1, 2)
        x = self.norm1(self.first(x.contiguous()).transpose(1, 2).contiguous())
        x = self.merge(x.transpose(1, 2).unflatten(2, grid).contiguous())
        x = self.norm2(x.flatten(2).transpose(1, 2).contiguous())
        ends = self.norm3(self.summary(summaries))
        return list(torch.cat([x, ends[:, None]], dim=1).unbind())

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["NemotronParseForConditionalGeneration"],
            "model_type": "nemotron_parse",
            "image_size": [16, 32],
            "max_sequence_length": 128,
            "decoder_start_token_id": 2,
            "encoder": {
                "hidden_size": 32,
                "mlp_ratio": 1.5,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_cls_tokens": 3,
                "num_registers": 1,
                "patch_size": 4,
                "max_img_size": 32,
                "summary_idxs": [0, 1],
            },
            "decoder": {
                "model_type": "mbart",
                "vocab_size": 512,
                "d_model": 64,
                "decoder_layers": 2,
                "decoder_attention_heads": 4,
                "decoder_ffn_dim": 96,
                "scale_embedding": True,
                "tie_word_embeddings": False,
            },
        }
