"""The flags of a server of several models: `config.group(ModelsConfig)`."""

from __future__ import annotations

import math
import re
from typing import Any

from modulm.contracts.flags import FlagGroup, flag, flag_group
from modulm.errors import ConfigError

__all__ = ["ModelsConfig", "parse_duration", "parse_size"]

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def parse_duration(value: Any) -> float | None:
    """A duration in seconds: a number, or text such as 90, 10m and 1h30m. Negative ones are None,
    for ever. Raises ValueError.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r:.40} is not a duration such as 90, 10m or -1")
    seconds = float(value) if isinstance(value, int | float) else _seconds(value.strip())
    if not math.isfinite(seconds):
        raise ValueError(f"{value!r:.40} is not a finite duration")
    return None if seconds < 0 else seconds


def _seconds(text: str) -> float:
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text)
    parts = _DURATION.findall(digits)
    if parts and "".join(number + unit for number, unit in parts) == digits:
        return sign * sum(float(number) * _UNITS[unit] for number, unit in parts)
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text[:40]!r} is not a duration such as 90, 10m or -1") from None


def parse_size(value: Any) -> int | None:
    """A number of bytes: a number, or text such as 8GiB and 500MB; None stays None.

    Raises ValueError.
    """
    if value is None or (isinstance(value, str) and value.lower() == "none"):
        return None
    match = None if isinstance(value, bool) else _SIZE.fullmatch(str(value))
    if match is None:
        raise ValueError(f"{value!r:.40} is not a size such as 8GiB or 500MB")
    number, unit, binary = match.groups()
    size = int(float(number) * (1024 if binary else 1000) ** _POWERS[unit.lower()])
    if size < 1:
        raise ValueError("must be at least one byte")
    return size


def _keep_alive(value: Any) -> str:
    parse_duration(value)
    return str(value)


@flag_group
class ModelsConfig(FlagGroup):
    """Several models in one server."""

    title = "Several models"
    server = True

    models_config: str | None = flag(
        None, "YAML file with models, each with flags of its own.", unit="path"
    )
    models_dir: str | None = flag(
        None, "Folder whose checkpoints are served, each by its name.", unit="path"
    )
    models_dir_writable: bool = flag(
        False,
        "Let clients create, copy, delete, pull and push models of --models-dir (Ollama's API).",
    )
    memory_budget: int | None = flag(
        None,
        "Maximum memory of all models together, such as 8GiB. When it is full, the models that "
        "were not used for longest are unloaded.",
        parse=parse_size,
    )
    keep_alive: str = flag(
        "-1",
        "Time that a model stays loaded after its last request, such as 10m; -1: until its memory "
        "is needed.",
        parse=_keep_alive,
    )
    max_load_queue: int = flag(
        256, "Maximum requests that wait for one model to load; more are refused.", least=1
    )
    load_comment_interval: float = flag(
        5.0, "Time between two comments on a stream that waits for its model.", unit="s", least=0.01
    )

    def __attrs_post_init__(self) -> None:
        if self.models_dir_writable and self.models_dir is None:
            raise ConfigError("models_dir_writable", "must be set together with models_dir")
