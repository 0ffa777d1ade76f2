"""Encoders, classifiers and bare decoders of the transformers library, for pooling.

They have no KV cache, so prompts run whole, and rows of equal length run together in the library's
own code, without padding or masks. Positions, token types and relative distances therefore need no
support here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Identity, Module

from modulm.contracts.model import Batch, CacheSpec, Model
from modulm.errors import UnsupportedError
from modulm.nn import Builder, WeightNames
from modulm_layers import segments
from modulm_transformers.config import TransformersConfig
from modulm_transformers.load import replace_linears, whole_model

__all__ = ["TransformersForPooling"]

#: Task of an architecture, by the suffix of its name.
_TASKS = {
    "ForSequenceClassification": ("classify",),
    "ForTokenClassification": ("token_classify",),
}
_EMBED = ("embed", "token_embed")
#: Number of tokens in the text that detects a head's input, and tolerance for equal classes.
_PROBE = 5
_CLOSE = 1e-2


class TransformersForPooling(Module, Model):
    """A model of transformers that returns vectors or classes."""

    api = 1
    config_type = TransformersConfig

    def __init__(self, config: TransformersConfig, build: Builder) -> None:
        super().__init__()
        if build.ranks > 1:
            raise UnsupportedError(
                "tensor parallelism: not supported yet for models run by transformers"
            )
        self.config, self.build = config, build
        name = config.model.__name__
        ends = (tasks for ending, tasks in _TASKS.items() if name.endswith(ending))
        self.tasks = next(ends, _EMBED)
        self._pooling = "CLS"

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        return WeightNames()

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["ElectraForSequenceClassification"],
            "model_type": "electra",
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
            "vocab_size": 512,
        }

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        return ()

    @property
    def pooling(self) -> str:
        return self._pooling

    def load(self, checkpoint: Path) -> bool:
        optional = self.tasks == _EMBED
        self.whole = whole_model(self.config, checkpoint, self.build.shared, headless=optional)
        replace_linears(self.whole, self.build)
        prefix = self.whole.base_model_prefix
        self.base = getattr(self.whole, prefix, self.whole)
        causal = any(getattr(module, "is_causal", False) for module in self.base.modules())
        self._pooling = "LAST" if causal else "CLS"
        parameters = inspect.signature(self.base.forward).parameters
        self.typed = "token_type_ids" in parameters
        if self.tasks != _EMBED:
            self._split_head(prefix)
        return True

    @torch.inference_mode()
    def _split_head(self, prefix: str) -> None:
        """Separate the head from the encoder, and detect its input by running a few tokens."""
        tokens = torch.arange(1, _PROBE + 1, device=self.build.shared.device)
        tokens = (tokens % self.config.vocab_size)[None]
        expected = self.whole(input_ids=tokens).logits
        states = self.base(input_ids=tokens)[0][0]
        setattr(
            self.whole, prefix, _FixedEmbeddings(getattr(self.base, "pooler", None) or Identity())
        )
        if self.tasks == ("token_classify",):
            ways = {self._pooling: states}
        else:
            mean = states.mean(0, keepdim=True)
            ways = {"CLS": states[:1], "LAST": states[-1:], "MEAN": mean}
        for way, features in ways.items():
            result = self.logits(features)
            if torch.allclose(result.view(expected.shape), expected, rtol=_CLOSE, atol=_CLOSE):
                self._pooling = way
                return
        raise UnsupportedError(
            f"{type(self.whole).__name__}: not supported yet: a head that reads anything "
            "but the first, the last or the mean of the hidden states"
        )

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states of the last layer: [tokens, hidden]."""
        types = batch.extras.get("token_types")
        outputs = None
        for rows in segments(batch):
            shape = (rows.rows, rows.length)
            inputs = {"input_ids": batch.tokens[rows.indices].view(shape)}
            if self.typed and types is not None:
                inputs["token_type_ids"] = types[rows.indices].view(shape)
            states: Tensor = self.base(**inputs)[0]
            if outputs is None:
                outputs = states.new_empty(len(batch.tokens), states.shape[-1])
            outputs[rows.indices] = states.flatten(0, 1)
        if outputs is None:
            raise UnsupportedError("a step without tokens")
        return outputs

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, classes] by the model's head; vectors if it has none."""
        if self.tasks == _EMBED:
            return hidden
        texts = hidden[None] if self.tasks == ("token_classify",) else hidden[:, None]
        logits = [self.whole(inputs_embeds=text[None]).logits for text in texts]
        return torch.cat(logits).flatten(0, -2)


class _FixedEmbeddings(Module):
    """Stands in for the encoder when only the head runs: returns its input."""

    def __init__(self, pooler: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.pooler = pooler

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _States:
        return _States(inputs_embeds, self.pooler(inputs_embeds))


class _States:
    """An encoder's output: hidden states and the pooler's result."""

    def __init__(self, hidden: Tensor, pooled: Tensor) -> None:
        self.last_hidden_state, self.pooler_output = hidden, pooled

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state, self.pooler_output)[index]
