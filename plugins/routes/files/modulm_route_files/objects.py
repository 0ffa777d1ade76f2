"""OpenAI's file and batch objects."""

from __future__ import annotations

from typing import Literal, TypedDict

__all__ = ["BatchCard", "BatchError", "Counts", "Deleted", "FileCard"]


class FileCard(TypedDict):
    """A stored file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]


class Deleted(TypedDict):
    """The response to a deletion."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchError(TypedDict):
    """An error of a batch, with its line if any."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(TypedDict):
    """The errors of a batch."""

    object: Literal["list"]
    data: list[BatchError]


class Counts(TypedDict):
    """The number of lines of a batch."""

    total: int
    completed: int
    failed: int


class BatchCard(TypedDict):
    """A batch and its progress. Times are seconds of Unix time."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int | None
    expired_at: int | None
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: Counts
    metadata: dict[str, str] | None
