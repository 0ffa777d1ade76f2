"""Response objects: lists of vectors, classes, scores and ranks."""

from __future__ import annotations

from typing import Any, Generic, Literal, NotRequired, TypedDict, TypeVar

__all__ = [
    "ClassList",
    "Classified",
    "CohereEmbeddings",
    "Embedding",
    "EmbeddingList",
    "Head",
    "PoolingList",
    "Processed",
    "RankList",
    "Ranked",
    "ScoreList",
    "Scored",
    "SparseVector",
    "Usage",
]

_Item = TypeVar("_Item")


class Usage(TypedDict):
    """What was read, in tokens."""

    prompt_tokens: int
    total_tokens: int


class Head(TypedDict):
    """The common fields of all lists."""

    id: str
    object: Literal["list"]
    created: int
    model: str


class _List(Head, Generic[_Item]):
    data: list[_Item]
    usage: Usage


class SparseVector(TypedDict):
    """The numbers of a vector that are not 0, and their indices."""

    indices: list[int]
    values: list[float]


class Embedding(TypedDict):
    """A vector: its numbers, those that are not 0, or the base64 of its bytes."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | list[list[float]] | SparseVector | list[SparseVector] | str


class Pooled(TypedDict):
    """A model's output for a text: numbers (all, or not 0), rows of them per token, or base64."""

    object: Literal["pooling"]
    index: int
    data: list[float] | list[list[float]] | SparseVector | list[SparseVector] | str


class Processed(TypedDict):
    """The answer of the server's IO processor. created_at: Unix time in seconds."""

    request_id: str
    created_at: int
    data: Any


class Classified(TypedDict):
    """The class probabilities, and the label of the most likely class."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class Scored(TypedDict):
    """The score of a pair of texts."""

    index: int
    object: Literal["score"]
    score: float


class Document(TypedDict):
    """A document that was ranked."""

    text: str
    multi_modal: NotRequired[list[Any]]


class Ranked(TypedDict):
    """A document's index in the request, and its relevance to the query."""

    index: int
    relevance_score: float
    document: NotRequired[Document]


class RankList(Head):
    """The ranked documents, best first."""

    results: list[Ranked]
    usage: Usage


EmbeddingList = _List[Embedding]
PoolingList = _List[Pooled]
ClassList = _List[Classified]
ScoreList = _List[Scored]


class Version(TypedDict):
    """The version of Cohere's API."""

    version: Literal["2"]


class Billed(TypedDict):
    """What was read, in tokens."""

    input_tokens: int


class Meta(TypedDict):
    """The metadata of Cohere's response."""

    api_version: Version
    billed_units: Billed


class CohereEmbeddings(TypedDict):
    """Vectors by the type of their numbers."""

    id: str
    response_type: Literal["embeddings_by_type"]
    embeddings: dict[Literal["float", "base64", "binary", "ubinary"], list[Any]]
    texts: list[str]
    meta: Meta
