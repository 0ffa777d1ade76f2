"""Tokenizers of checkpoints behind one interface.

If tokenizer.json is sufficient, it is opened with the `tokenizers` package, about half a second
faster than importing transformers. Others are opened with AutoTokenizer.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from modulm.contracts.tokenizer import Codec, Tokenizer
from modulm.errors import CheckpointError, ConfigError, RequestError
from modulm.plugins import manager
from modulm.plugins.defaults import choose_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import tokenizers

    from modulm.contracts.config import EngineConfig
    from modulm.contracts.loader import TokenizerFiles

__all__ = [
    "RustCodec", "Tokenizer", "build_tokenizer", "chat_templates", "load_tokenizer",
    "open_tokenizer", "open_transformers", "refuse_code", "stop_ids", "token_shares",
    "tokenizer_settings", "wrap_tokenizer",
]  # fmt: skip

#: Tokenizer classes that add nothing to tokenizer.json.
_PLAIN = frozenset({None, "PreTrainedTokenizerFast", "TokenizersBackend"})
#: Characters or tokens up to which the GIL is held: releasing it costs more.
_SHORT = 1_000
#: Maximum bytes of a tokenizer.json, several times the largest published one; names of vocabulary
#: files.
_LARGEST = 128 << 20
_VOCABULARIES = ("tokenizer.json", "*.model*", "vocab*", "*.tiktoken", "tekken.json", "merges.txt")
#: transformers tokenizers that were wrapped.
_WRAPPED: WeakKeyDictionary[Any, Tokenizer] = WeakKeyDictionary()
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


@contextmanager
def _no_panic() -> Iterator[None]:
    """Convert a panic of the Rust library, which is not an Exception, to a RequestError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RequestError(
            f"the tokenizer cannot encode the text: {error}"[:200], "prompt"
        ) from None


class RustCodec(Codec):
    """A tokenizer of the `tokenizers` package. Turns off its truncation and padding."""

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        core.no_truncation()
        core.no_padding()
        self.core: tokenizers.Tokenizer = core

    def encode(self, text: str, special: bool) -> list[int]:
        with _no_panic():
            if len(text) <= _SHORT:
                encoding = self.core.encode(text, add_special_tokens=special)
            else:
                (encoding,) = self.core.encode_batch_fast([text], add_special_tokens=special)
        ids: list[int] = encoding.ids
        return ids

    def fit(
        self, texts: Sequence[str], special: bool, limit: int | None, side: str
    ) -> tuple[list[int], list[int]]:
        second = texts[1] if len(texts) > 1 else None
        with _no_panic():
            if sum(map(len, texts)) <= _SHORT:
                encoding = self.core.encode(texts[0], second, add_special_tokens=special)
            else:
                pair = texts[0] if second is None else (texts[0], second)
                (encoding,) = self.core.encode_batch([pair], add_special_tokens=special)
        if limit is not None and len(encoding.ids) > limit:
            added = self.core.num_special_tokens_to_add(second is not None) if special else 0
            parts = self.core.encode_batch(list(texts), add_special_tokens=False)
            shares = token_shares([len(part.ids) for part in parts], limit - added)
            for part, share in zip(parts, shares, strict=True):
                part.truncate(share, direction=side)
            cut = parts[1] if second is not None else None
            encoding = self.core.post_process(parts[0], cut, special)
        return encoding.ids, encoding.type_ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        if len(ids) <= _SHORT:
            return self.core.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return self.core.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]

    def token(self, index: int) -> str | None:
        return self.core.id_to_token(index)

    def index(self, token: str) -> int | None:
        return self.core.token_to_id(token)

    def size(self) -> int:
        known = self.core.get_added_tokens_decoder()
        return max(self.core.get_vocab_size(), *(i + 1 for i in known), 0)

    def special_ids(self) -> frozenset[int]:
        added = self.core.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    def added(self) -> Mapping[str, int]:
        return {t.content: index for index, t in self.core.get_added_tokens_decoder().items()}


def token_shares(lengths: Sequence[int], room: int) -> list[int]:
    """Return how many tokens of each text to keep; the longer of two is truncated first."""
    room = max(room, 0)
    if len(lengths) == 1 or sum(lengths) <= room:
        return [min(length, room) for length in lengths]
    short = min(*lengths, room // 2)
    first = short if lengths[0] <= lengths[1] else room - short
    return [first, room - first]


def open_tokenizer(config: EngineConfig, path: str) -> Tokenizer | None:
    """Open the tokenizer of an engine configuration without torch, which front ends may lack.

    path: of the checkpoint, unless `--tokenizer` names another. None with --skip-tokenizer-init.
    Raises as `load_tokenizer` does.
    """
    from modulm.loading.checkpoint import stored_tokenizer
    from modulm.loading.sources import tokenizer_path

    model = config.model
    if model.skip_tokenizer_init:
        return None
    return load_tokenizer(
        tokenizer_path(config, path),
        model.tokenizer_mode,
        model.tokenizer_revision if model.tokenizer else None,
        model.trust_remote_code,
        None if model.tokenizer else stored_tokenizer(config, Path(path)),
    )


def load_tokenizer(
    path: str | Path,
    mode: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    stored: TokenizerFiles | None = None,
) -> Tokenizer:
    """Load the tokenizer of a checkpoint folder or Hugging Face id, or the `stored` one.

    mode: `hf` selects the Rust implementation if there is one, another name selects an installed
    loader; `auto` is `hf` unless a loader claims a folder without tokenizer.json or without a chat
    template. Raises CheckpointError if files are missing or broken, PluginNotFound for an unknown
    mode, and ConfigError if the tokenizer needs code from the checkpoint and `trust_remote_code` is
    off.
    """
    folder = Path(path)
    if stored is not None:
        return _open_stored(stored, folder)
    settings = tokenizer_settings(folder) if folder.is_dir() else {}
    complete = settings.get("chat_template") and (folder / "tokenizer.json").is_file()
    if mode not in ("auto", "hf") or (mode == "auto" and folder.is_dir() and not complete):
        loader = choose_tokenizer(manager.current(), folder, mode).driver
        if loader is not None:
            opened: Tokenizer = loader.open(str(path), revision, trust_remote_code)
            return opened
    refuse_code(path, settings, trust_remote_code)
    _check_size(folder / "tokenizer.json")

    def open_backend() -> Any:
        return open_transformers(path, revision, trust_remote_code)

    try:
        core = _plain_core(folder, settings)
        if core is not None:
            return build_tokenizer(RustCodec(core), settings, folder, str(path), open_backend)
    except (TypeError, KeyError) as error:
        raise CheckpointError(f"{folder}/tokenizer_config.json: a key is wrong: {error}") from error
    refuse_code(path, _json(folder / "config.json"), trust_remote_code)
    backend = open_backend()
    if not getattr(backend, "is_fast", False):
        return load_tokenizer(path, "slow", revision, trust_remote_code)
    codec = RustCodec(backend.backend_tokenizer)
    settings = {**settings, **backend.special_tokens_map}
    settings["chat_template"] = backend.chat_template
    return build_tokenizer(codec, settings, folder, str(path), lambda: backend)


def wrap_tokenizer(tokenizer: Any) -> Tokenizer:
    """Wrap a transformers tokenizer; tokenizers of modulm are returned unchanged.

    Raises ConfigError for anything else.
    """
    if isinstance(tokenizer, Tokenizer) or hasattr(tokenizer, "added_tokens"):
        return cast("Tokenizer", tokenizer)
    if not hasattr(tokenizer, "special_tokens_map") or not hasattr(tokenizer, "name_or_path"):
        raise ConfigError(
            "tokenizer",
            f"must be a tokenizer of modulm or transformers, not {type(tokenizer).__name__}",
        )
    wrapped = _WRAPPED.get(tokenizer)
    if wrapped is None:
        wrapped = _WRAPPED[tokenizer] = _wrap(tokenizer)
    return wrapped


def _wrap(backend: Any) -> Tokenizer:
    path = str(backend.name_or_path)
    if not getattr(backend, "is_fast", False):
        return load_tokenizer(path, "slow")
    from tokenizers import Tokenizer as Core

    # A copy: the codec changes truncation and padding.
    codec = RustCodec(Core.from_str(backend.backend_tokenizer.to_str()))
    templates = {"chat_template": backend.chat_template}
    templates["response_template"] = getattr(backend, "response_template", None)
    settings = {**backend.special_tokens_map, **templates}
    return build_tokenizer(codec, settings, Path(path), path, weakref.ref(backend))


def _open_stored(stored: TokenizerFiles, file: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Core

    try:
        core = Core.from_str(stored.tokenizer)
    except Exception as error:
        raise CheckpointError(f"{file}: not a tokenizer: {error}") from error

    def open_backend() -> Any:
        from transformers import PreTrainedTokenizerFast

        special = {key: stored.settings[key] for key in _SPECIAL if stored.settings.get(key)}
        return PreTrainedTokenizerFast(tokenizer_object=core, **special)

    return build_tokenizer(RustCodec(core), stored.settings, file, str(file), open_backend)


def build_tokenizer(
    codec: Codec, settings: Mapping[str, Any], folder: Path, name: str, opens: Callable[[], Any]
) -> Tokenizer:
    """Build a tokenizer around a vocabulary.

    settings: as in tokenizer_config.json. opens: creates the `backend`.
    """
    special = {key: _text(settings[key]) for key in _SPECIAL if settings.get(key)}
    return Tokenizer(
        codec=codec,
        special=special,
        stop_ids=stop_ids(codec, special, folder),
        chat_template=chat_templates(settings.get("chat_template")),
        name=name,
        open=opens,
        response_template=settings.get("response_template"),
    )


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, merged with the additional files of older and newer layouts."""
    settings = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
    single = folder / "chat_template.jinja"
    if single.is_file():
        settings["chat_template"] = _read(single)
    extra = folder / "additional_chat_templates"
    if extra.is_dir():
        templates = {"default": settings.get("chat_template") or ""}
        templates |= {file.stem: _read(file) for file in sorted(extra.glob("*.jinja"))}
        settings["chat_template"] = templates
    return settings


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: not UTF-8 text: {error}") from error


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read(file))
    except ValueError as error:
        raise CheckpointError(f"{file}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: must be an object, not {type(value).__name__}")
    return value


def refuse_code(path: str | Path, settings: Mapping[str, Any], trusted: bool) -> None:
    """Raise ConfigError if the settings name code for the tokenizer and code is not trusted."""
    auto = settings.get("auto_map")
    if not trusted and isinstance(auto, dict) and "AutoTokenizer" in auto:
        raise _untrusted(path)


def _untrusted(path: str | Path) -> ConfigError:
    return ConfigError(
        "trust_remote_code",
        f"the tokenizer of {path} runs code from the checkpoint; pass --trust-remote-code "
        "if you have read that code",
    )


def _check_size(file: Path) -> None:
    """Raise CheckpointError for files that would take minutes to read."""
    try:
        size = file.stat().st_size if file.is_file() else 0
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    if size > _LARGEST:
        raise CheckpointError(
            f"{file}: has {size >> 20} MiB; at most {_LARGEST >> 20} MiB are supported"
        )


def _plain_core(folder: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer | None:
    """Return the Rust tokenizer, if tokenizer.json alone gives the same result as transformers."""
    file = folder / "tokenizer.json"
    overrides = any(settings.get(key) is not None for key in ("add_bos_token", "add_eos_token"))
    plain = (
        settings.get("tokenizer_class") in _PLAIN and not overrides and not settings.get("auto_map")
    )
    if not plain or not file.is_file():
        return None
    from tokenizers import Tokenizer as Core

    try:
        core = Core.from_file(str(file))
    except Exception as error:
        raise CheckpointError(f"{file}: not a tokenizer: {error}") from error
    expected = {_text(token) for token in settings.get("additional_special_tokens") or ()}
    expected |= {_text(settings[key]) for key in _SPECIAL if settings.get(key)}
    special = {token.content for token in core.get_added_tokens_decoder().values() if token.special}
    return core if expected <= special else None


def open_transformers(
    path: str | Path, revision: str | None, trust_remote_code: bool, fast: bool = True
) -> Any:
    """Open a tokenizer with transformers.

    Raises CheckpointError, or ConfigError for a checkpoint's code.
    """
    from transformers import AutoTokenizer

    folder = Path(path)
    has_files = not folder.is_dir() or any(any(folder.glob(name)) for name in _VOCABULARIES)
    none = CheckpointError(
        f"{path}: no tokenizer found (tokenizer.json is missing): use --tokenizer to name "
        "another folder, or --skip-tokenizer-init to run without one"
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(path), revision=revision, trust_remote_code=trust_remote_code, use_fast=fast
        )
        if has_files or tokenizer.vocab_size:  # of bytes, without a file
            return tokenizer
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise _untrusted(path) from error
        if not has_files:
            raise none from error
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{path}: no tokenizer could be loaded: {reason}") from error
    raise none


def _text(token: Any) -> str:
    """Return the text of a token, which is a string or an added-token object."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def chat_templates(value: Any) -> str | Mapping[str, str] | None:
    if isinstance(value, list):
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    if isinstance(value, dict):
        return {str(name): str(template) for name, template in value.items()}
    return str(value) if value else None


def stop_ids(codec: Codec, special: Mapping[str, str], folder: Path) -> tuple[int, ...]:
    """Return the ids that end a turn: the EOS token, and those in generation_config.json."""
    eos = codec.index(special["eos_token"]) if "eos_token" in special else None
    ids = [] if eos is None else [eos]
    more = _json(folder / "generation_config.json").get("eos_token_id")
    listed = more if isinstance(more, list) else [more]
    ids += [index for index in listed if isinstance(index, int) and 0 <= index < codec.size()]
    return tuple(dict.fromkeys(ids))
