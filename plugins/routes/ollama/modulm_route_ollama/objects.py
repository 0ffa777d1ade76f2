"""Ollama's response objects, as described in /openapi.json. Durations are nanoseconds."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

__all__ = [
    "Answer",
    "ChatAnswer",
    "Details",
    "Embedding",
    "Embeddings",
    "Failure",
    "Function",
    "GenerateAnswer",
    "Logprob",
    "Message",
    "Model",
    "ModelShown",
    "Models",
    "Running",
    "RunningModels",
    "Status",
    "TokenLogprob",
    "ToolCall",
    "Version",
]


class Failure(TypedDict):
    error: str


class Status(TypedDict):
    status: str
    digest: NotRequired[str]
    total: NotRequired[int]
    completed: NotRequired[int]


class Version(TypedDict):
    version: str
    modulm: str


class Function(TypedDict):
    name: str
    arguments: dict[str, Any]


class ToolCall(TypedDict):
    function: Function


class Message(TypedDict):
    role: str
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class TokenLogprob(TypedDict):
    token: str
    logprob: float


class Logprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class Answer(TypedDict):
    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[str]
    logprobs: NotRequired[list[Logprob]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class ChatAnswer(Answer):
    message: Message


class GenerateAnswer(Answer):
    response: str
    thinking: NotRequired[str]
    context: NotRequired[list[int]]


class Embeddings(TypedDict):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class Embedding(TypedDict):
    embedding: list[float]


class Details(TypedDict):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Model(TypedDict):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details
    state: NotRequired[str]


class Models(TypedDict):
    models: list[Model]


class Running(Model):
    expires_at: str
    size_vram: int
    context_length: int
    last_used_at: str | None
    pinned: bool


class RunningModels(TypedDict):
    models: list[Running]


class ModelShown(TypedDict):
    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    system: NotRequired[str]
    license: NotRequired[str]
