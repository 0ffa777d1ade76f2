"""Response objects of llama.cpp's API."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

__all__ = [
    "Adapter",
    "Chunk",
    "Completion",
    "Embedding",
    "Failure",
    "FailureObject",
    "Piece",
    "Progress",
    "Properties",
    "Slot",
    "Timings",
    "TokenProbability",
    "Tokens",
]


class FailureObject(TypedDict):
    """An error; `code` is the status of the answer. `param`: the field that is to blame."""

    code: int
    message: str
    type: str
    param: str | None


class Failure(TypedDict):
    error: FailureObject


class TokenProbability(TypedDict):
    """A token and its log probability, the chosen one with the best ones."""

    id: int
    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: NotRequired[list[Any]]


class Timings(TypedDict):
    """Tokens and milliseconds. cache_n: of the prompt, found in the cache."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class Progress(TypedDict):
    """How much of a prompt was read."""

    total: int
    cache: int
    processed: int
    time_ms: float


class Piece(TypedDict):
    """What all parts of an answer have, and the whole."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    id_slot: int
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: NotRequired[list[TokenProbability]]


class Chunk(Piece):
    """A part of an answer that goes on."""

    timings: NotRequired[Timings]
    prompt_progress: NotRequired[Progress]


class Completion(Piece):
    """A whole answer, or the end of a streamed one."""

    model: str
    generation_settings: dict[str, Any]
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: str
    stopping_word: str
    tokens_cached: int
    timings: Timings


class Slot(TypedDict):
    """One of the sequences that may run at once."""

    id: int
    id_task: int
    n_ctx: int
    speculative: bool
    is_processing: bool


class Properties(TypedDict):
    """What the server is."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    chat_template_caps: dict[str, bool]
    modalities: dict[str, bool]
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool


class Tokens(TypedDict):
    """A conversation in the model's chat template."""

    prompt: str


class Embedding(TypedDict):
    index: int
    embedding: list[list[float]]


class Adapter(TypedDict):
    """An adapter. scale: 0, as only requests that name one have it."""

    id: int
    path: str
    scale: float
