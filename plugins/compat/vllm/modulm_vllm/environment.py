"""Translates vLLM's environment variables to modulm's flags, and explains the others."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from attrs import frozen

from modulm.config.environ import variables
from modulm.config.schema.catalog import catalog
from modulm.errors import ConfigError
from modulm_vllm.logger import init_logger

__all__ = [
    "VARIABLES",
    "Variable",
    "from_environment",
    "log_notes",
    "notes",
    "reasons",
    "rewritten",
]

_PREFIX = "VLLM_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "none")


def _number(text: str) -> float:
    return float(text)


def _gibibytes(text: str) -> int:
    return int(float(text) * (1 << 30))


def _switch(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError
    return text.lower() in _TRUE


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _layers(text: str) -> list[int]:
    return [int(part) for part in _list(text)]


def _cores(text: str) -> list[str] | None:
    """Cores by rank: "0-7|8-15". Returns None for auto and nobind, which name none."""
    return None if text in ("auto", "nobind", "all") else [part for part in text.split("|") if part]


def _device(text: str) -> str | None:
    return None if text == "empty" else text


def _profiler(text: str) -> dict[str, str]:
    return {"profiler": "torch", "torch_profiler_dir": text}


@frozen
class Variable:
    """A variable that is read. `read` raises ValueError for invalid text and returns None for
    text that sets nothing; `server`: the flag is one of servers only.
    """

    flag: str
    read: Callable[[str], Any] = str
    server: bool = False


#: vLLM's variable -> the flag that it sets.
VARIABLES: dict[str, Variable] = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": Variable("allow_runtime_lora_updating", _switch, True),
    "VLLM_API_KEY": Variable("api_key", server=True),
    "VLLM_ATTENTION_BACKEND": Variable("attention_backend"),
    "VLLM_AUDIO_FETCH_TIMEOUT": Variable("audio_fetch_timeout", _number),
    "VLLM_BATCH_INVARIANT": Variable("batch_invariant", _switch),
    "VLLM_CPU_KVCACHE_SPACE": Variable("kv_cache_memory_bytes", _gibibytes),
    "VLLM_CPU_OMP_THREADS_BIND": Variable("numa_bind_cpus", _cores),
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": Variable("worker_timeout", int),
    "VLLM_HTTP_MAX_REQUEST_BODY_SIZE": Variable("max_request_bytes", int, True),
    "VLLM_IMAGE_FETCH_TIMEOUT": Variable("image_fetch_timeout", _number),
    "VLLM_LOGGING_CONFIG_PATH": Variable("log_config_file"),
    "VLLM_LOGGING_LEVEL": Variable("log_level", str.lower),
    "VLLM_LORA_RESOLVER_CACHE_DIR": Variable("lora_resolver_folder", server=True),
    "VLLM_LORA_RESOLVER_HF_REPO_LIST": Variable("lora_resolver_repos", _list, True),
    "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB": Variable("max_audio_clip_filesize_mb", int, True),
    "VLLM_MAX_AUDIO_DECODE_DURATION_S": Variable("max_audio_decode_duration_s", _number),
    "VLLM_MAX_IMAGE_PIXELS": Variable("max_image_pixels", int),
    "VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB": Variable("max_media_download_size_mb", int),
    "VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB": Variable("max_media_request_download_size_mb", int),
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": Variable("media_url_allow_redirects", _switch),
    "VLLM_PP_LAYER_PARTITION": Variable("pipeline_layer_partition", _layers),
    "VLLM_SERVER_DEV_MODE": Variable("server_dev_mode", _switch, True),
    "VLLM_TARGET_DEVICE": Variable("device", _device),
    "VLLM_TORCH_PROFILER_DIR": Variable("profiler_config", _profiler),
    "VLLM_USE_MODELSCOPE": Variable("use_modelscope", _switch),
    "VLLM_VIDEO_FETCH_TIMEOUT": Variable("video_fetch_timeout", _number),
}


def from_environment() -> dict[str, Any]:
    """Return the flags that variables set, for an offline engine. MODULM_* variables take
    precedence.

    Raises ConfigError that names the variable.
    """
    return {variable.flag: value for variable, value in _values() if not variable.server}


def rewritten() -> dict[str, str]:
    """Return the set variables of vLLM under the names that modulm's commands read.

    Metrics get vLLM's names as well, unless a variable sets their prefix. Raises ConfigError that
    names the variable.
    """
    prefix = {} if _own("metrics_prefix") else {"MODULM_METRICS_PREFIX": "modulm,vllm"}
    return prefix | {
        f"MODULM_{variable.flag.upper()}": value if isinstance(value, str) else json.dumps(value)
        for variable, value in _values()
    }


def _values() -> Iterator[tuple[Variable, Any]]:
    for name, variable in VARIABLES.items():
        text = variables().get(name)
        if not text or _own(variable.flag):
            continue
        try:
            value = variable.read(text)
        except ValueError:
            flag = "--" + variable.flag.replace("_", "-")
            raise ConfigError(name, f"{text!r} is no value of {flag}, which it sets") from None
        if value is not None:
            yield variable, value


def _own(flag: str) -> bool:
    return bool(variables().get(f"MODULM_{flag.upper()}"))


@cache
def reasons() -> dict[str, list[str]]:
    """Return vLLM's variables that are not read, by the reason."""
    text = files("modulm_vllm").joinpath("variables.toml").read_text(encoding="utf-8")
    by_reason: dict[str, list[str]] = tomllib.loads(text)["reasons"]
    return by_reason


def notes(*, server: bool = False) -> list[str]:
    """Return a note for each set variable of vLLM that is not read.

    server: omit those that a command's configuration names by itself.
    """
    known = {name: reason for reason, names in reasons().items() for name in names}
    lines = []
    for name in sorted(variables()):
        if not name.startswith(_PREFIX) or name in VARIABLES:
            continue
        if server and catalog().canonical(name.removeprefix(_PREFIX).lower()):
            continue
        reason = known.get(name, "it is no variable of vLLM 0.33")
        lines.append(f"{name} is not read: {reason[0].lower()}{reason[1:]}".replace("`", ""))
    return lines


@cache
def log_notes() -> None:
    """Log the notes, once in a process."""
    for line in notes():
        init_logger(__name__).warning(line)
