"""What is answered: files and batches as OpenAI's API has them."""

from __future__ import annotations

from typing import Literal, TypedDict

__all__ = ["BatchCard", "BatchError", "Counts", "Deleted", "FileCard"]


class FileCard(TypedDict):
    """What is known of a file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]


class Deleted(TypedDict):
    """It is gone."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchError(TypedDict):
    """What is wrong with a batch, and in which line of it."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(TypedDict):
    """What is wrong with a batch."""

    object: Literal["list"]
    data: list[BatchError]


class Counts(TypedDict):
    """Lines of a batch."""

    total: int
    completed: int
    failed: int


class BatchCard(TypedDict):
    """A batch and how far it is; times are seconds of Unix time."""

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
