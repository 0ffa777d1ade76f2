"""CSM, the Conversational Speech Model of Sesame: text to speech.

A Llama decoder samples the first of the codes of each frame. A small decoder over the codes of one
frame gives the others. Mimi's decoder turns frames into sound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import attrs
import numpy as np
import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch
from modulm.contracts.weight_names import WeightNames
from modulm.errors import CheckpointError
from modulm.nn import Builder, read_config
from modulm.nn.embedding import Embedding, Head
from modulm_csm.depth import DepthConfig, DepthDecoder
from modulm_csm.mimi import MimiConfig, MimiDecoder
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    PreNormLayer,
    size,
    standard_attention,
    standard_mlp,
    tiny_config,
)
from modulm_speakers.model import CODES, Choose, SpeakingModel

__all__ = ["CsmConfig", "CsmForConditionalGeneration"]

_TABLE = "depth_decoder.model.embed_tokens"
_OWN_TABLE = "backbone_model.embed_tokens.embed_audio_tokens"


@frozen(kw_only=True)
class _Keys(DecoderConfig):
    """vocab_size: `text_vocab_size` in config.json."""

    rope_theta: float = 500000.0
    rms_norm_eps: float = 1e-5
    num_codebooks: int = size(32, least=2)
    codebook_eos_token_id: int = size(0, least=0)
    tie_codebooks_embeddings: bool = True


@frozen(kw_only=True)
class CsmConfig(_Keys):
    """config.json of CSM: the backbone's keys, and the tables of depth decoder and codec.

    codebook_size: `vocab_size` in config.json.
    """

    codebook_size: int = size()
    depth: DepthConfig
    codec: MimiConfig

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError naming the file and the key."""
        text_size = table.get("text_vocab_size", 128256)
        changed = {**table, "vocab_size": text_size, "tie_word_embeddings": False}
        keys = read_config(changed, _Keys, file)
        depth = read_config(dict(table.get("depth_decoder_config") or {}), DepthConfig, file)
        codec = read_config(dict(table.get("codec_config") or {}), MimiConfig, file)
        wanted = (keys.num_codebooks, table.get("vocab_size", depth.vocab_size), keys.hidden_size)
        inner = (depth.num_codebooks, depth.vocab_size, depth.backbone_hidden_size)
        if inner != wanted:
            raise CheckpointError(
                f"{file}: depth_decoder_config: num_codebooks, vocab_size and backbone_hidden_size "
                f"are {inner}, those of the backbone {wanted}"
            )
        return cls(
            **attrs.asdict(keys, recurse=False),
            codebook_size=depth.vocab_size,
            depth=depth,
            codec=codec,
        )


class _Layer(PreNormLayer):
    """The layer of Llama."""

    def __init__(self, c: DecoderConfig, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_attention(c, b, index),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b),
        )


class _Inputs(Module):
    """Embeds text tokens, and frames as the sum of their codes' embeddings."""

    def __init__(self, text: Embedding, codes: Embedding, config: CsmConfig) -> None:
        super().__init__()
        self.text, self.codes = text, codes
        self.count, self.size = config.num_codebooks, config.codebook_size

    def forward(self, batch: Batch) -> Tensor:
        """Embed the batch's tokens: [tokens, hidden]."""
        x = self.text.lookup(batch.tokens)
        frames = batch.extras.get(CODES)
        if frames is None:
            return x
        offsets = torch.arange(self.count, device=frames.device) * self.size
        ids = (frames.clamp(min=0) + offsets).flatten()
        sums = self.codes.lookup(ids).view(len(frames), self.count, -1).sum(1)
        return torch.where(frames[:, :1] >= 0, sums, x)


def _without_adapters(b: Builder) -> Builder:
    """The builder for parts that run apart from rows: adapters are of the backbone."""
    return evolve(b, shared=evolve(b.shared, adapters=None))


class CsmForConditionalGeneration(DecoderForCausalLM, SpeakingModel):
    """CSM. The engine's tokens are the first codes of frames."""

    api = 1
    config_type = CsmConfig
    layer = _Layer
    root: ClassVar[str] = "backbone_model"
    takes_embeds = False

    def __init__(self, config: CsmConfig, build: Builder) -> None:
        super().__init__(config, build)
        plain = _without_adapters(build)
        self.codebooks, self.codebook_size = config.num_codebooks, config.codebook_size
        self.rate, self.frame_samples = config.codec.sampling_rate, config.codec.frame_samples
        self.depth = DepthDecoder(config.depth, plain.at("depth_decoder"), self.tables)
        self.codec = MimiDecoder(config.codec, plain.at("codec_model"))

    def make_embedding(self, config: CsmConfig, b: Builder) -> Any:
        top = _without_adapters(evolve(b, prefix=""))
        rows = config.num_codebooks * config.codebook_size
        text = top.embedding("embed_text_tokens", config.vocab_size, config.hidden_size)
        self.tables = top.embedding(_TABLE, rows, config.hidden_size)
        tied = config.tie_codebooks_embeddings
        codes = self.tables if tied else top.embedding(_OWN_TABLE, rows, config.hidden_size)
        return _Inputs(text, codes, config)

    def make_head(self, config: CsmConfig, b: Builder) -> Head:
        return b.head("lm_head", config.hidden_size, config.codebook_size)

    @classmethod
    def weights(cls, config: CsmConfig) -> WeightNames:
        tied = ((f"^{_OWN_TABLE}\\.", f"{_TABLE}."),) if config.tie_codebooks_embeddings else ()
        return WeightNames(
            rename=(
                *tied,
                (r"^codec_model\.decoder\.(upsample|decoder_transformer)\.", r"codec_model.\1."),
                (r"^codec_model\.decoder\.decoder_seanet\.", "codec_model.decoder."),
            ),
            ignore=(
                r"^codec_model\.(encoder|encoder_transformer|downsample)\.",
                r"\.input_proj\.weight$", r"\.codebook\.initialized$",
            ),
        )  # fmt: skip

    def embeddings(self, tokens: Tensor) -> Tensor:
        inputs: Any = self.embed
        embedded: Tensor = inputs.text.lookup(tokens)
        return embedded

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits of first codes: [n, hidden] -> [n, vocabulary], -inf for text tokens."""
        logits: Tensor = self.head(hidden)
        more = self.config.vocab_size - logits.shape[1]
        return F.pad(logits, (0, more), value=-torch.inf)

    def complete(self, hidden: Tensor, first: Tensor, choose: Choose) -> Tensor:
        frames: Tensor = self.depth(hidden, first, choose)
        return frames

    def ends(self, frames: np.ndarray) -> np.ndarray:
        """Return which frames are all zeros. The last code does not count, as in transformers."""
        whole: np.ndarray = (frames[:, :-1] == self.config.codebook_eos_token_id).all(1)
        return whole

    def is_heard(self, frames: np.ndarray) -> np.ndarray:
        heard: np.ndarray = (frames != self.config.codebook_eos_token_id).any(1)
        return heard

    def decode(
        self, frames: Tensor, states: Sequence[Any]
    ) -> tuple[Sequence[Tensor], Sequence[Any]]:
        sound: tuple[Sequence[Tensor], Sequence[Any]] = self.codec(frames, states)
        return sound

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        common = {"num_codebooks": 3, "vocab_size": 64, "rms_norm_eps": 1e-5}
        rope = {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0,
            "high_freq_factor": 0.5, "low_freq_factor": 0.125,
            "original_max_position_embeddings": 64,
        }  # fmt: skip
        depth = {
            **common, "backbone_hidden_size": 64, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 33, "rope_parameters": rope,
        }  # fmt: skip
        codec = {
            "model_type": "mimi", "hidden_size": 32, "num_filters": 4, "codebook_size": 64,
            "codebook_dim": 16, "vector_quantization_hidden_dimension": 16, "num_quantizers": 3,
            "upsample_groups": 32, "num_hidden_layers": 2, "intermediate_size": 48,
            "num_attention_heads": 4, "num_key_value_heads": 4, "sliding_window": 6,
            "upsampling_ratios": [4, 3],
        }  # fmt: skip
        return {
            **tiny_config("csm", "CsmForConditionalGeneration", rope_parameters=rope),
            **common,
            "text_vocab_size": 512,
            "pad_token_id": 60,
            "audio_token_id": 61,
            "audio_eos_token_id": 62,
            "codebook_pad_token_id": 63,
            "codebook_eos_token_id": 0,
            "bos_token_id": 1,
            "depth_decoder_config": depth,
            "codec_config": codec,
        }
