"""`.../render`: shows a request as the engine gets it, without generating."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, TypedDict

import attrs

if TYPE_CHECKING:
    from modulm.contracts.sampling import SamplingParams
    from modulm.contracts.tokenizer import Tokenizer
    from modulm_frontend.beam_search import BeamSearchParams
    from modulm_server.prompts import Prompt

__all__ = ["Rendered", "rendered"]


class Rendered(TypedDict):
    """A request in the engine's form."""

    request_id: str
    model: str
    prompt: str
    token_ids: list[int]
    features: None
    sampling_params: dict[str, Any]
    stream: bool
    cache_salt: str | None
    priority: int


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
