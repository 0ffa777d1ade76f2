"""Configures logging of modulm's processes: one line per record on stderr by default.

Call `output.unblock` first, because handlers use the standard streams that it replaces.
"""

from __future__ import annotations

import json
import logging
import logging.config
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modulm.errors import ConfigError

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig

__all__ = ["configure_logging"]

_FORMAT = "%(levelname)-7s %(asctime)s %(name)s: %(message)s"
_TRACE = 5


class _OneLine(logging.Formatter):
    """Escapes control characters in messages, so that clients cannot forge log lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return "".join(_visible(letter) for letter in super().formatMessage(record))


class _Json(logging.Formatter):
    """One JSON object per line: time in UTC, level, logger, message, and the traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        table = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            table["exception"] = self.formatException(record.exc_info)
        return json.dumps(table, ensure_ascii=False)


class _Silent(logging.Filter):
    """Drops access log lines of some paths (`--disable-access-log-for-endpoints`).

    A path that ends in `/*` means all paths below it.
    """

    def __init__(self, paths: frozenset[str]) -> None:
        super().__init__()
        self._paths = paths
        self._below = tuple(path[:-1] for path in paths if path.endswith("/*"))

    def filter(self, record: logging.LogRecord) -> bool:
        # uvicorn's arguments: client, method, path with query, HTTP version, status
        path = record.args[2] if isinstance(record.args, tuple) and len(record.args) > 2 else ""
        plain = str(path).partition("?")[0]
        return plain not in self._paths and not plain.startswith(self._below)


def _visible(letter: str) -> str:
    return letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")


def configure_logging(config: EngineConfig, silent: Iterable[str] = ()) -> None:
    """Configure logging by `--log-level`, `--log-format`, `--logging-config` and
    `--log-config-file`.

    silent: paths without lines in the access log. Raises ConfigError for a logging configuration
    that cannot be read or used.
    """
    flags = config.observability
    if silent:
        logging.getLogger("uvicorn.access").addFilter(_Silent(frozenset(silent)))
    logging.addLevelName(_TRACE, "TRACE")
    table = flags.logging_config
    field = "logging_config"
    if flags.log_config_file is not None:
        table, field = _read(flags.log_config_file), "log_config_file"
    if table is not None:
        try:
            logging.config.dictConfig({"version": 1, **table})
        except (ValueError, TypeError, AttributeError, ImportError) as error:
            raise ConfigError(field, f"logging cannot be set up: {error}") from error
        return
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if flags.log_format == "json" else _OneLine(_FORMAT))
    level = _TRACE if flags.log_level == "trace" else flags.log_level.upper()
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for chatty in ("httpx", "httpcore", "filelock", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def _read(path: str) -> dict[str, Any]:
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("log_config_file", f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError("log_config_file", f"{path} is not valid JSON: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError("log_config_file", f"{path} is not a JSON object")
    return table
