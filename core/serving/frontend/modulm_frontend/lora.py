"""LoRA adapters of an `LLM`: maps the caller's requests to the engine's adapter keys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve, field, frozen
from attrs.validators import ge, min_len

from modulm.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from modulm.contracts.requests import Request
    from modulm.engine.core.engine_core import EngineCore
    from modulm_frontend.input_processor import PendingRequest

__all__ = ["LoRARequest", "OfflineAdapters", "active_from", "files_of", "invocation_tokens"]


@frozen
class LoRARequest:
    """An adapter for a prompt: its name, a unique number from 1 up, and its folder.

    The files are read on first use of the name, and again if the number or folder changes.
    """

    lora_name: str = field(validator=min_len(1))
    lora_int_id: int = field(validator=ge(1))
    lora_path: str = field(converter=str, validator=min_len(1))


class OfflineAdapters:
    """The adapters loaded into an engine that runs in this thread."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        #: Name -> (request, key in the engine, activation tokens).
        self._read: dict[str, tuple[LoRARequest, str, tuple[int, ...]]] = {}

    def apply(self, pending: PendingRequest, lora: LoRARequest | None) -> PendingRequest:
        """Set the adapter of a prompt's requests, loading it if needed.

        Raises CheckpointError for invalid adapter files, UnsupportedError without --enable-lora.
        """
        if lora is None:
            return pending
        key, invocation = self._key(lora)
        requests = tuple(_with(request, key, invocation) for request in pending.requests)
        return evolve(pending, requests=requests)

    def _key(self, lora: LoRARequest) -> tuple[str, tuple[int, ...]]:
        executor = self._core.executor
        if not self._core.info.limit("adapters", "slots"):
            raise UnsupportedError("the engine runs without LoRA: pass enable_lora=True")
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
    """The folder with the files of the adapter at `path`; for one of several, its parent."""
    several = not path.is_dir() and (path.parent / "adapter_config.json").is_file()
    return path.parent if several else path


def invocation_tokens(path: Path) -> tuple[int, ...]:
    """The tokens that activate an adapter (aLoRA, arXiv 2504.12397); () if it is always active.

    Raises CheckpointError if the folder has no adapter_config.json.
    """
    file = files_of(path) / "adapter_config.json"
    try:
        tokens = json.loads(file.read_bytes()).get("alora_invocation_tokens") or ()
        return tuple(map(int, tokens))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error


def active_from(prompt: Sequence[int], invocation: Sequence[int]) -> int | None:
    """The prompt position from which an adapter is active: the last one of `invocation`.

    None if the prompt does not contain it; as in PEFT, the base model then answers.
    """
    size, activation = len(invocation), list(invocation)
    if not size:
        return 0
    starts = range(len(prompt) - size, -1, -1)
    return next(
        (start for start in starts if list(prompt[start : start + size]) == activation), None
    )
