"""Flags from a YAML file, as `--config` takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modulm.config.schema.catalog import catalog
from modulm.config.sources import Source
from modulm.errors import ConfigError

__all__ = ["read_yaml", "yaml_file"]


def yaml_file(path: str | Path) -> Source:
    """Read flags from a YAML file: one key per flag, with dashes or underscores, `no-` before
    switches.

    Raises ConfigError if the file cannot be read or is not a table, and for unknown keys.
    """
    table = read_yaml(path)
    return Source(f"file {path}", dict(table))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the file's keys with underscores; keys with `no-` become False switches."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("config", f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError("config", f"{path} is not valid YAML: {reason}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError("config", f"{path} is not a table of flags")
    return dict(_unnegated(str(key).replace("-", "_"), value) for key, value in content.items())


def _unnegated(name: str, value: Any) -> tuple[str, Any]:
    positive = name.removeprefix("no_")
    if positive == name or not isinstance(value, bool):
        return name, value
    spec = catalog().spec(positive)
    return (positive, not value) if spec is not None and spec.is_switch else (name, value)
