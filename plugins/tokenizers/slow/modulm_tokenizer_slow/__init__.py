"""Tokenizers that exist only as Python code in transformers, and `--tokenizer-mode slow`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modulm.contracts.tokenizer import Codec
from modulm.contracts.tokenizer_loader import TokenizerLoader
from modulm_tokenizers.tokenizer import (
    RustCodec,
    build_tokenizer,
    open_transformers,
    refuse_code,
    token_shares,
    tokenizer_settings,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from modulm.contracts.tokenizer import Tokenizer

__all__ = ["PythonCodec", "SlowTokenizer"]


class SlowTokenizer(TokenizerLoader):
    """Loads a Python tokenizer of transformers. Also used if there is no fast tokenizer."""

    name = "slow"
    api = 1

    @classmethod
    def claims(cls, folder: Path) -> str | None:
        return None

    @classmethod
    def open(cls, path: str, revision: str | None, trust_remote_code: bool) -> Tokenizer:
        folder = Path(path)
        settings = tokenizer_settings(folder) if folder.is_dir() else {}
        for table in (settings, _table(folder / "config.json")):
            refuse_code(path, table, trust_remote_code)
        backend = open_transformers(path, revision, trust_remote_code, fast=False)
        settings = {**settings, **backend.special_tokens_map}
        settings["chat_template"] = backend.chat_template
        # transformers opens tokenizers that have no Python code in Rust, also for use_fast=False
        fast = getattr(backend, "is_fast", False)
        codec = RustCodec(backend.backend_tokenizer) if fast else PythonCodec(backend)
        return build_tokenizer(codec, settings, folder, path, lambda: backend)


def _table(file: Path) -> Mapping[str, Any]:
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # a broken file is reported where the model is read
    return table if isinstance(table, dict) else {}


class PythonCodec(Codec):
    """A tokenizer that exists only as Python code in transformers."""

    def __init__(self, hf: Any) -> None:
        self._hf = hf

    def encode(self, text: str, special: bool) -> list[int]:
        return list(self._hf.encode(text, add_special_tokens=special))

    def fit(
        self, texts: Sequence[str], special: bool, limit: int | None, side: str
    ) -> tuple[list[int], list[int]]:
        options = {"add_special_tokens": special, "return_token_type_ids": True}
        encoded = self._hf(*texts, **options)
        if limit is not None and len(encoded["input_ids"]) > limit:
            added = self._hf.num_special_tokens_to_add(len(texts) > 1) if special else 0
            parts = [self.encode(text, False) for text in texts]
            shares = token_shares([len(part) for part in parts], limit - added)
            cuts = zip(parts, shares, strict=True)
            truncated = [p[:n] if side == "right" else p[max(len(p) - n, 0) :] for p, n in cuts]
            encoded = self._hf.prepare_for_model(*truncated, **options)
        return list(encoded["input_ids"]), list(encoded["token_type_ids"])

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(
            self._hf.decode(
                list(ids),
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )

    def token(self, index: int) -> str | None:
        if not 0 <= index < len(self._hf):
            return None
        token = self._hf.convert_ids_to_tokens(index)
        return None if token is None else str(token)

    def index(self, token: str) -> int | None:
        number = self._hf.get_vocab().get(token)
        return None if number is None else int(number)

    def size(self) -> int:
        return len(self._hf)

    def special_ids(self) -> frozenset[int]:
        return frozenset(self._hf.all_special_ids)

    def added(self) -> Mapping[str, int]:
        return dict(self._hf.get_added_vocab())
