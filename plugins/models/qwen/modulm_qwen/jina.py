"""Jina Embeddings v4 (arXiv 2506.18902): Qwen2.5-VL with a vector per prompt or per token.

Its adapters for tasks are LoRA adapters in one file (`adapters/NAME` of its folder).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor

from modulm.contracts.model import Batch
from modulm.errors import CheckpointError
from modulm.nn import Builder
from modulm_qwen.vl import Qwen25VLForConditionalGeneration, QwenVLConfig

__all__ = ["JinaEmbeddingsV4Config", "JinaEmbeddingsV4Model"]

_LIKE: Mapping[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "tie_word_embeddings": True,
}


@frozen(eq=False, kw_only=True)
class JinaEmbeddingsV4Config(QwenVLConfig):
    """config.json of Jina v4. width: of token vectors."""

    width: int = 128

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        width = table.get("multi_vector_projector_dim", 128)
        if type(width) is not int or width < 1:
            raise CheckpointError(f"{file}: multi_vector_projector_dim: {width!r}")
        return evolve(super().from_table({**table, **_LIKE}, file), width=width)


class JinaEmbeddingsV4Model(Qwen25VLForConditionalGeneration):
    """Jina v4: served for one of its tasks, "embed" if `--pooler-config` names none."""

    prunes_videos = False
    config_type: ClassVar[type] = JinaEmbeddingsV4Config
    media = ("image",)
    tasks = ("embed", "token_embed")

    def __init__(self, config: Any, build: Builder) -> None:
        engine = build.shared.config
        pooler_settings = {} if engine is None else engine.model.pooler_config or {}
        task = "token_embed" if pooler_settings.get("task") == "token_embed" else "embed"
        self.tasks = (task,)  # type: ignore[misc]
        super().__init__(config, build)

    def make_encoders(self, config: Any, b: Builder) -> None:
        super().make_encoders(config, b)
        name, hidden = "multi_vector_projector", config.hidden_size
        self.out = b.linear(name, hidden, config.width, bias=True, split=False)

    def forward(self, batch: Batch) -> Tensor:
        """[tokens, hidden], or [tokens, width] of length 1."""
        hidden = super().forward(batch)
        return hidden if self.tasks == ("embed",) else F.normalize(self.out(hidden), dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            **super().tiny(),
            "architectures": ["JinaEmbeddingsV4Model"],
            "multi_vector_projector_dim": 24,
            "matryoshka_dims": [16, 32],
            "task_names": ["retrieval", "text-matching", "code"],
        }
