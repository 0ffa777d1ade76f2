"""Prompts that callers give as embeddings, checked and made items of the prompt."""

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

#: Bytes of embeddings that the sequences of one request may have together.
_MOST = 1 << 28
_DTYPES = ("float16", "bfloat16", "float32")


def embedded_prompt(
    prompt: Mapping[str, Any], info: EngineInfo
) -> tuple[Sequence[int], tuple[MediaItem, ...]]:
    """(token ids, items) of a table with `prompt_embeds`; 0 stands where an embedding does.

    The embeddings are one tensor, of all tokens, or items that `embeds_item` made. Raises
    RequestError.
    """
    if not info.config.model.enable_prompt_embeds:
        raise _wrong("prompts of embeddings need --enable-prompt-embeds")
    given, ids, mask = (
        prompt.get(key) for key in ("prompt_embeds", "prompt_token_ids", "prompt_is_token_ids")
    )
    if prompt.get("prompt") is not None and ids is None:
        raise _wrong("a prompt is text or embeddings, not both")
    items = given if isinstance(given, tuple) else ()
    if ids is not None and items and all(isinstance(item, MediaItem) for item in items):
        return ids, items
    array = _array(given, info)
    if ids is None and mask is None:
        return [0] * len(array), (embeds_item(array, 0, info),)
    if ids is None or mask is None or not len(ids) == len(mask) == len(array):
        raise _wrong("prompt_token_ids, prompt_is_token_ids and prompt_embeds go together")
    words = np.asarray(mask)
    if words.dtype != bool:
        raise _wrong("prompt_is_token_ids must be booleans")
    edges = np.flatnonzero(np.diff(np.concatenate([[True], words, [True]])))
    pairs = edges.reshape(-1, 2).tolist()
    items = tuple(embeds_item(array[first:end], first, info) for first, end in pairs)
    shown = [word if keep else 0 for word, keep in zip(ids, words.tolist(), strict=True)]
    return shown, items


def embeds_item(given: Any, start: int, info: EngineInfo) -> MediaItem:
    """Embeddings [tokens, hidden], a tensor or an array, as an item that begins at token `start`.

    Raises RequestError for another shape or number format, and for numbers that are none.
    """
    array = _array(given, info)
    if not np.isfinite(array).all():
        raise _wrong("the embeddings hold NaN or infinity")
    digests = b"".join(blake2b(row, digest_size=DIGEST).digest() for row in array)
    return MediaItem(EMBEDS, digests, start, len(array), {"embeds": array})


def check_embeds(media: Sequence[MediaItem], params: SamplingParams | PoolingParams) -> None:
    """Raise RequestError for what cannot be asked of embeddings; items of encoders are no such."""
    media = [item for item in media if not item.encoded]
    if not media:
        return
    if not isinstance(params, SamplingParams):
        raise _wrong("prompts of embeddings are not pooled")
    if params.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs: embeddings have no tokens", "prompt_logprobs")
    if params.truncate_prompt_tokens is not None:
        raise RequestError("embeddings cannot be truncated", "truncate_prompt_tokens")
    size = sum(array.nbytes for item in media for array in item.tensors.values())
    count = params.best_of or params.n
    if count > 1 and count * size > _MOST:
        raise RequestError(f"n: {count} sequences of these embeddings take too much room", "n")


def _array(given: Any, info: EngineInfo) -> np.ndarray:
    """[tokens, hidden] float32; the shape is checked before anything is computed."""
    shape, dtype = getattr(given, "shape", None), str(getattr(given, "dtype", ""))
    dtype = dtype.removeprefix("torch.")
    if shape is None or dtype not in _DTYPES:
        raise _wrong(f"a tensor of {', '.join(_DTYPES)} is expected")
    if len(shape) == 3 and shape[0] == 1:
        given, shape = given[0], shape[1:]
    if len(shape) != 2 or shape[1] != info.hidden or not 0 < shape[0] <= info.max_model_len:
        raise _wrong(
            f"a tensor of 1 to {info.max_model_len} tokens by {info.hidden} is expected, not "
            f"{list(shape)}"
        )
    if isinstance(given, np.ndarray):
        return np.ascontiguousarray(given, dtype=np.float32)
    import torch

    if not isinstance(given, torch.Tensor) or given.layout is not torch.strided:
        raise _wrong("a dense tensor is expected")
    array: np.ndarray = given.detach().to("cpu", torch.float32).contiguous().numpy()
    return array


def _wrong(message: str) -> RequestError:
    return RequestError(f"prompt_embeds: {message}", "prompt_embeds")
