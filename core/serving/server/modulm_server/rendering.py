"""`.../render`: shows a request as the engine gets it, without generating."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import attrs

if TYPE_CHECKING:
    from modulm.contracts.sampling import SamplingParams
    from modulm.contracts.tokenizer import Tokenizer
    from modulm_frontend.beam_search import BeamSearchParams
    from modulm_server.prompts import Prompt

__all__ = ["Rendered", "rendered", "token_offsets"]


class Rendered(TypedDict):
    """A request in the engine's form. token_offsets: if they were requested."""

    request_id: str
    model: str
    prompt: str
    token_ids: list[int]
    features: None
    sampling_params: dict[str, Any]
    stream: bool
    cache_salt: str | None
    priority: int
    token_offsets: NotRequired[list[list[int]] | None]


def token_offsets(prompt: Prompt, tokenizer: Tokenizer) -> list[list[int]] | None:
    """Return where each token is in the prompt's text: its first character and its end; 0 and 0 for
    tokens that the tokenizer adds.

    None for prompts that are not the tokens of a whole text, and for tokenizers in Python.
    """
    if prompt.text is None or prompt.embeds or prompt.media or tokenizer.core is None:
        return None
    ids = list(prompt.ids)
    for special in (False, True):
        encoding = tokenizer.core.encode(prompt.text, add_special_tokens=special)
        if encoding.ids == ids:
            return [list(offsets) for offsets in encoding.offsets]
    return None


def rendered(
    name: str,
    model: str,
    prompt: Prompt,
    params: SamplingParams | BeamSearchParams,
    tokenizer: Tokenizer,
    *,
    stream: bool | None = None,
    cache_salt: str | None = None,
    priority: int | None = None,
) -> Rendered:
    """Render one prompt in vLLM's form, with token ids and text. Ids of embeddings are 0."""
    ids = list(prompt.ids)
    text = tokenizer.decode(ids, skip_special_tokens=False) if prompt.text is None else prompt.text
    return {
        "request_id": name,
        "model": model,
        "prompt": text,
        "token_ids": ids,
        "features": None,
        "sampling_params": _written(params),
        "stream": bool(stream),
        "cache_salt": cache_salt,
        "priority": priority or 0,
    }


def _written(params: SamplingParams | BeamSearchParams) -> dict[str, Any]:
    """The parameters that are set, without the output kind."""
    return attrs.asdict(
        params,
        filter=lambda field, value: value not in (None, ()) and field.name != "output_kind",
        value_serializer=lambda _, __, value: value.value if isinstance(value, Enum) else value,
    )
