"""Encoder-decoders of transformers, for texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from modulm.contracts.media import MediaItem
from modulm.contracts.model import Batch
from modulm.errors import UnsupportedError
from modulm_transformers.bridge import BridgedForCausalLM, logits_of
from modulm_transformers.load import explained
from modulm_transformers.rows import RowRunner
from modulm_transformers.text_family import TEXT

__all__ = ["TransformersEncoderDecoder"]

_PROBE = 4


class TransformersEncoderDecoder(BridgedForCausalLM):
    """The library's encoder runs once per prompt. The decoder runs row by row, and the encoder's
    output lies in blocks.
    """

    media = ("text",)
    media_family = TEXT
    takes_embeds = False
    slotted: ClassVar[bool] = False

    def _take_decoder(self, prefix: str) -> None:
        self.base = self.whole
        self.encoder = self.whole.get_encoder()

    @torch.inference_mode()
    def _row_runner(self) -> RowRunner:
        self.joined = True
        name = self.config.model.__name__
        if self.encoder is None or self.encoder is self.whole:
            raise UnsupportedError(f"{name}: transformers has no encoder of its own for it")
        tokens = torch.arange(1, 1 + _PROBE, device=self.build.shared.device)
        with explained(f"{name}: transformers' code for its encoder does not run"):
            output = self.encoder(input_ids=tokens[None])
        kind, width, size = type(output), output[0].shape[-1], self.config.vocab_size

        def wrap(hidden: Tensor) -> Any:
            return kind(last_hidden_state=hidden)

        return RowRunner(self.whole, self.build, logits_of, size, encoded=width, wrap=wrap)

    def _encoded(self, tokens: Tensor) -> Tensor:
        """[tokens, width]: the encoder's output for one text."""
        output: Tensor = self.encoder(input_ids=tokens[None])[0][0]
        return output

    @torch.inference_mode()
    def encode(self, items: Sequence[MediaItem]) -> Sequence[Tensor]:
        device = self.build.shared.device
        texts = (torch.from_numpy(item.tensors["input_ids"]).to(device) for item in items)
        return [self._encoded(text) for text in texts]

    def _inputs(self, batch: Batch) -> Mapping[str, Any]:
        return {}

    def _finish(self, checkpoint: Path) -> None:
        raise UnsupportedError("an encoder-decoder runs row by row")

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["PegasusForConditionalGeneration"],
            "model_type": "pegasus",
            "vocab_size": 512,
            "d_model": 64,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "decoder_layers": 2,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 96,
            "max_position_embeddings": 128,
            "decoder_start_token_id": 1,
            "forced_eos_token_id": None,
            "eos_token_id": 2,
            "bos_token_id": 0,
            "pad_token_id": 0,
        }
