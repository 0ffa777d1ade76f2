"""API keys with names, models, weights and limits (`--api-key`, `--api-keys-file`)."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from modulm.errors import ConfigError
from modulm.structure import Problem, structure_table

if TYPE_CHECKING:
    from modulm_server.flags import ServerConfig

__all__ = ["ApiKey", "KeyFile", "Keys", "allows", "digest", "read_keys"]

log = logging.getLogger("modulm_server")

_DIGEST = 64
#: Seconds between two looks at the time stamp of the file.
_LOOK = 1.0
#: Weights beyond this range say that a unit was mistaken.
_LIGHTEST, _HEAVIEST = 0.01, 100.0


def digest(key: bytes) -> bytes:
    """The SHA-256 digest of a key."""
    return hashlib.sha256(key).digest()


@frozen(kw_only=True)
class _Entry:
    """An entry of the file. `key` and `sha256` may be one value or a list."""

    name: str
    key: Any = ()
    sha256: Any = ()
    models: list[str] | None = None
    weight: float = 1.0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    connections: int | None = None
    streams: int | None = None


@frozen(kw_only=True)
class ApiKey:
    """One tenant: its keys, as digests, and what it may use.

    owner: identifies it in stored data, not secret. models: patterns of model names; None: all.
    weight: of its share of the engine. requests_per_minute, tokens_per_minute: rates. connections,
    streams: requests, and streamed ones, at once. None: no limit.
    """

    name: str
    owner: str
    digests: tuple[bytes, ...] = field(repr=False)
    models: tuple[str, ...] | None = None
    weight: float = 1.0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    connections: int | None = None
    streams: int | None = None


def allows(key: ApiKey | None, model: str) -> bool:
    """Whether a key may use a model or adapter, by its served name; None: a server without keys."""
    return (
        key is None
        or key.models is None
        or any(fnmatchcase(model, pattern) for pattern in key.models)
    )


class KeyFile:
    """`--api-keys-file`: read at the start, and again when it changes.

    A file that cannot be used is logged once, and the last usable one stays in force.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._stamp = self._stat()
        self._next = 0.0
        self.keys = _read_file(self._path)

    def refresh(self) -> tuple[ApiKey, ...]:
        """The current keys; looks at the file at most once per second."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _LOOK
            stamp = self._stat()
            if stamp != self._stamp:
                self._stamp = stamp
                self._reload()
        return self.keys

    def _reload(self) -> None:
        try:
            self.keys = _read_file(self._path)
        except ConfigError as error:
            log.error("The API keys stay as they were: %s", error)
        else:
            log.info("Read %d API keys again", len(self.keys))

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


class Keys:
    """All API keys of a server. Without keys, all requests are allowed."""

    def __init__(self, keys: Iterable[str] = (), file: KeyFile | None = None) -> None:
        self._plain = tuple(_plain(key) for key in dict.fromkeys(keys))
        self._file = file
        self._seen: tuple[ApiKey, ...] | None = None
        self._by_owner: dict[str, ApiKey] = {}

    def all(self) -> tuple[ApiKey, ...]:
        """The keys that are valid now."""
        return self._plain + (() if self._file is None else self._file.refresh())

    def __len__(self) -> int:
        return len(self.all())

    @property
    def many(self) -> bool:
        """Whether there are several keys, or may be once the file changes."""
        return self._file is not None or len(self._plain) > 1

    def find(self, key: bytes) -> ApiKey | None:
        """The entry of a key that a client sent, compared in constant time."""
        sent = digest(key)
        found = None
        for entry in self.all():
            for known in entry.digests:
                if hmac.compare_digest(sent, known):
                    found = entry
        return found

    def knows(self, key: bytes) -> bool:
        """Whether the key is valid, compared in constant time."""
        return self.find(key) is not None

    def of_owner(self, owner: str) -> ApiKey | None:
        """The entry whose requests and files have this owner."""
        keys = self.all()
        if keys is not self._seen:
            self._seen, self._by_owner = keys, {key.owner: key for key in keys}
        return self._by_owner.get(owner)


def _plain(key: str) -> ApiKey:
    """A key without an entry, named by the first digits of its digest."""
    hashed = digest(key.encode())
    return ApiKey(name=hashed.hex()[:8], owner=hashed.hex(), digests=(hashed,))


def read_keys(config: ServerConfig) -> Keys:
    """The keys of the configuration. Raises ConfigError for a file without a key, or with a wrong
    entry.
    """
    keys = list(config.api_key or ())
    if config.api_key_file is not None:
        text = _read_text(Path(config.api_key_file), "api_key_file")
        lines = [line.strip() for line in text.splitlines() if not line.startswith("#")]
        if not any(lines):
            raise ConfigError("api_key_file", f"{config.api_key_file} contains no key")
        keys += filter(None, lines)
    if any(not key.strip() for key in keys):
        raise ConfigError("api_key", "a key is empty")
    file = None if config.api_keys_file is None else KeyFile(config.api_keys_file)
    return Keys(keys, file)


def _read_text(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(flag, f"{path} cannot be read: {reason}") from error


def _read_file(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a file. Raises ConfigError with the line and the field, never with a key."""
    import yaml

    text = _read_text(path, "api_keys_file")
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        table = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}"
        reason = getattr(error, "problem", None) or "it is not YAML"
        raise ConfigError("api_keys_file", f"{path}{where}: {reason}") from error
    entries = table.get("keys") if isinstance(table, Mapping) and set(table) == {"keys"} else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError("api_keys_file", f"{path}: the file has one field, keys: a list of keys")
    pairs: Any = node.value if node is not None else ()
    nodes = next(value for name, value in pairs if name.value == "keys").value
    keys: list[ApiKey] = []
    names: set[str] = set()
    digests: set[bytes] = set()
    for entry, place in zip(entries, nodes, strict=True):
        try:
            key = _checked(entry)
            if key.name in names:
                raise Problem([("name", f"{key.name!r} is the name of another entry")])
            if digests & {*key.digests} or len({*key.digests}) < len(key.digests):
                raise Problem([("key", "it is listed twice")])
        except Problem as problem:
            name, message = problem.faults[0]
            where = f"{path}, line {_line(place, name)}: {name or 'an entry'}: {message}"
            raise ConfigError("api_keys_file", where) from None
        names.add(key.name)
        digests.update(key.digests)
        keys.append(key)
    return tuple(keys)


def _line(entry: Any, name: str) -> int:
    """The line of a field of an entry, or of the entry. entry: its YAML node."""
    pairs = entry.value if isinstance(entry.value, list) else ()
    for pair in pairs:
        if isinstance(pair, tuple) and pair[0].value == name.partition("[")[0]:
            return int(pair[0].start_mark.line) + 1
    return int(entry.start_mark.line) + 1


def _checked(entry: Any) -> ApiKey:
    """The key of an entry. Raises Problem, whose message contains no key."""
    if not isinstance(entry, Mapping):
        raise Problem([("", "it must have fields, at least name and key")])
    hashes = [digest(key.encode()) for key in _texts(entry, "key")]
    hashes += [_hash(text) for text in _texts(entry, "sha256")]
    values = {str(name): value for name, value in entry.items()}
    parsed = structure_table({**values, "key": (), "sha256": ()}, _Entry)
    if not parsed.name.strip() or not parsed.name.isprintable() or len(parsed.name) > _DIGEST:
        raise Problem([("name", f"must be printable text of 1 to {_DIGEST} characters")])
    if not hashes:
        raise Problem([("key", "is required: key, or its digest as sha256")])
    if not _LIGHTEST <= parsed.weight <= _HEAVIEST:
        raise Problem([("weight", f"must be from {_LIGHTEST} to {_HEAVIEST:g}")])
    for limit in ("requests_per_minute", "tokens_per_minute", "connections", "streams"):
        value = getattr(parsed, limit)
        if value is not None and value < 1:
            raise Problem([(limit, "must be at least 1")])
    return ApiKey(
        name=parsed.name,
        owner=digest(b"modulm key name " + parsed.name.encode()).hex(),
        digests=tuple(hashes),
        models=None if parsed.models is None else tuple(parsed.models),
        weight=parsed.weight,
        requests_per_minute=parsed.requests_per_minute,
        tokens_per_minute=parsed.tokens_per_minute,
        connections=parsed.connections,
        streams=parsed.streams,
    )


def _texts(entry: Mapping[Any, Any], name: str) -> list[str]:
    """The texts of a field that holds one or several. Raises Problem without showing them."""
    value = entry.get(name, [])
    texts = value if isinstance(value, list) else [value]
    if any(not isinstance(text, str) or not text.strip() for text in texts):
        raise Problem([(name, "must be text that is not empty; put it in quotes")])
    return texts


def _hash(text: str) -> bytes:
    try:
        hashed = bytes.fromhex(text)
    except ValueError:
        hashed = b""
    if len(text) != _DIGEST or not hashed:
        raise Problem([("sha256", f"must be {_DIGEST} hexadecimal digits")])
    return hashed
