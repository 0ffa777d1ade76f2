"""Adapters of an LLM: what a caller names them by, and what the engine is told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve, field, frozen
from attrs.validators import ge, min_len

from modulm.errors import CheckpointError, UnsupportedError
from modulm_frontend.input_processor import PendingRequest

if TYPE_CHECKING:
    from modulm.contracts.requests import Request
    from modulm.engine.core.engine_core import EngineCore

__all__ = ["LoRARequest", "OfflineAdapters", "active_from", "files_of", "invocation_tokens"]


@frozen
class LoRARequest:
    """An adapter for a prompt: a name, a number of its own from 1, and the folder of its files.

    The files are read when the name first comes, and again when its number or folder is another.
    """

    lora_name: str = field(validator=min_len(1))
    lora_int_id: int = field(validator=ge(1))
    lora_path: str = field(converter=str, validator=min_len(1))


class OfflineAdapters:
    """The adapters that an engine in this thread has read."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        #: Name -> what it stands for, its key in the engine, and the tokens that activate it.
        self._read: dict[str, tuple[LoRARequest, str, tuple[int, ...]]] = {}

    def apply(self, pending: PendingRequest, lora: LoRARequest | None) -> PendingRequest:
        """The prompt's requests with its adapter, which is read where it was not.

        Raises CheckpointError for files that do not fit, UnsupportedError without --enable-lora.
        """
        if lora is None:
            return pending
        key, invocation = self._key(lora)
        told = tuple(_with(request, key, invocation) for request in pending.requests)
        return evolve(pending, requests=told)

    def _key(self, lora: LoRARequest) -> tuple[str, tuple[int, ...]]:
        executor = self._core.executor
        if not self._core.info.limit("adapters", "slots"):
            raise UnsupportedError("the engine runs without adapters: give enable_lora=True")
        known = self._read.get(lora.lora_name)
        if known is not None and known[0] == lora:
            executor.prepare_adapter(known[1])
            return known[1:]
        path = Path(lora.lora_path).expanduser()
        invocation = invocation_tokens(path)
        key = f"{lora.lora_name}@{lora.lora_int_id}:{path}"
        executor.add_adapter(key, path)
        if known is not None:
            executor.remove_adapter(known[1])
        self._read[lora.lora_name] = lora, key, invocation
        return key, invocation


def _with(request: Request, key: str, invocation: tuple[int, ...]) -> Request:
    first = active_from(request.prompt.tolist(), invocation)
    return evolve(request, adapter=None if first is None else key, adapter_from=first or 0)


def files_of(path: Path) -> Path:
    """The folder with the files of the adapter at `path`: of one among several, the one above."""
    several = not path.is_dir() and (path.parent / "adapter_config.json").is_file()
    return path.parent if several else path


def invocation_tokens(path: Path) -> tuple[int, ...]:
    """The tokens that activate an adapter (aLoRA, arXiv 2504.12397), () for one that always is.

    Raises CheckpointError for a folder without a configuration.
    """
    file = files_of(path) / "adapter_config.json"
    try:
        given = json.loads(file.read_bytes()).get("alora_invocation_tokens") or ()
        return tuple(map(int, given))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error


def active_from(prompt: Sequence[int], invocation: Sequence[int]) -> int | None:
    """From which token on a prompt has an adapter: where `invocation` stands for the last time;
    None if it does not, and the prompt is the base model's, as in PEFT.
    """
    size, wanted = len(invocation), list(invocation)
    if not size:
        return 0
    places = range(len(prompt) - size, -1, -1)
    return next((n for n in places if list(prompt[n : n + size]) == wanted), None)
