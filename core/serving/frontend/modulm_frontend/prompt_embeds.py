"""Validates embedding prompts and turns them into prompt items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from modulm.contracts.media import DIGEST, EMBEDS, MediaItem
from modulm.contracts.sampling import PoolingParams, SamplingParams
from modulm.errors import RequestError

if TYPE_CHECKING:
    from modulm.contracts.engine_info import EngineInfo

__all__ = ["check_embeds", "embedded_prompt", "embeds_item"]

#: Maximum bytes of embeddings over all sequences of one request.
_MOST = 1 << 28
_DTYPES = ("float16", "bfloat16", "float32")


def embedded_prompt(
    prompt: Mapping[str, Any], info: EngineInfo
) -> tuple[Sequence[int], tuple[MediaItem, ...]]:
    """Read a prompt with `prompt_embeds` into (token ids, items).

    The embeddings are one tensor for all tokens, or items from `embeds_item`. The token id at an
    embedding's position is 0. Raises RequestError.
    """
    if not info.config.model.enable_prompt_embeds:
        raise _invalid("embedding prompts need --enable-prompt-embeds")
    embeds, ids, mask = (
        prompt.get(key) for key in ("prompt_embeds", "prompt_token_ids", "prompt_is_token_ids")
    )
    if prompt.get("prompt") is not None and ids is None:
        raise _invalid("a prompt is either text or embeddings, not both")
    items = embeds if isinstance(embeds, tuple) else ()
    if ids is not None and items and all(isinstance(item, MediaItem) for item in items):
        return ids, items
    array = _array(embeds, info)
    if ids is None and mask is None:
        return [0] * len(array), (embeds_item(array, 0, info),)
    if ids is None or mask is None or not len(ids) == len(mask) == len(array):
        raise _invalid("prompt_token_ids, prompt_is_token_ids and prompt_embeds go together")
    is_token = np.asarray(mask)
    if is_token.dtype != bool:
        raise _invalid("prompt_is_token_ids must be booleans")
    edges = np.flatnonzero(np.diff(np.concatenate([[True], is_token, [True]])))
    pairs = edges.reshape(-1, 2).tolist()
    items = tuple(embeds_item(array[first:end], first, info) for first, end in pairs)
    prompt_ids = [word if keep else 0 for word, keep in zip(ids, is_token.tolist(), strict=True)]
    return prompt_ids, items


def embeds_item(embeds: Any, start: int, info: EngineInfo) -> MediaItem:
    """Make an item of embeddings [tokens, hidden], a tensor or array, at token `start`.

    Raises RequestError for another shape or dtype, and for NaN or infinity.
    """
    array = _array(embeds, info)
    if not np.isfinite(array).all():
        raise _invalid("the embeddings contain NaN or infinity")
    digests = b"".join(blake2b(row, digest_size=DIGEST).digest() for row in array)
    return MediaItem(EMBEDS, digests, start, len(array), {"embeds": array})


def check_embeds(media: Sequence[MediaItem], params: SamplingParams | PoolingParams) -> None:
    """Raise RequestError for parameters that embedding prompts do not support."""
    media = [item for item in media if not item.encoded]
    if not media:
        return
    if not isinstance(params, SamplingParams):
        raise _invalid("embedding prompts cannot be pooled")
    if params.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs is not supported for embedding prompts", "prompt_logprobs"
        )
    if params.truncate_prompt_tokens is not None:
        raise RequestError("embedding prompts cannot be truncated", "truncate_prompt_tokens")
    size = sum(array.nbytes for item in media for array in item.tensors.values())
    count = params.best_of or params.n
    if count > 1 and count * size > _MOST:
        raise RequestError(f"n={count} copies of these embeddings take too much memory", "n")


def _array(embeds: Any, info: EngineInfo) -> np.ndarray:
    """Convert embeddings to [tokens, hidden] float32. Checks the shape before computing."""
    shape, dtype = getattr(embeds, "shape", None), str(getattr(embeds, "dtype", ""))
    dtype = dtype.removeprefix("torch.")
    if shape is None or dtype not in _DTYPES:
        raise _invalid(f"a tensor of {', '.join(_DTYPES)} is expected")
    if len(shape) == 3 and shape[0] == 1:
        embeds, shape = embeds[0], shape[1:]
    if len(shape) != 2 or shape[1] != info.hidden or not 0 < shape[0] <= info.max_model_len:
        raise _invalid(
            f"a tensor of 1 to {info.max_model_len} tokens by {info.hidden} is expected, not "
            f"{list(shape)}"
        )
    if isinstance(embeds, np.ndarray):
        return np.ascontiguousarray(embeds, dtype=np.float32)
    import torch

    if not isinstance(embeds, torch.Tensor) or embeds.layout is not torch.strided:
        raise _invalid("a dense tensor is expected")
    array: np.ndarray = embeds.detach().to("cpu", torch.float32).contiguous().numpy()
    return array


def _invalid(message: str) -> RequestError:
    return RequestError(f"prompt_embeds: {message}", "prompt_embeds")
