"""BGE-M3 (arXiv 2402.03216): the pooling of its three answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modulm.contracts.pooling import PoolingRecipe

if TYPE_CHECKING:
    import torch

    from modulm.contracts.checkpoint import Checkpoint

__all__ = ["BGE_M3", "read_bge_m3"]

BGE_M3 = "BgeM3EmbeddingModel"


def read_bge_m3(checkpoint: Checkpoint) -> PoolingRecipe:
    """Return the recipe: the first token's vector; token vectors without the first one, through
    colbert_linear.pt; token weights of at least 0, without the first and the last token.
    """

    def layers(device: torch.device) -> tuple[Any, ...]:
        from modulm_hooks_pooling_recipes.layers import read_pickled

        return (read_pickled(checkpoint.path / "colbert_linear.pt", device),)

    table = checkpoint.config
    first, last = table.get("bos_token_id", 0), table.get("eos_token_id", 2)
    settings = {
        "pooling_type": "CLS",
        "normalize": True,
        "activation": "relu",
        "layers_task": "token_embed",
        "skipped_token_ids": {"token_embed": [first], "token_classify": [first, last]},
    }
    return PoolingRecipe(settings=settings, layers=layers)
