"""Translates vLLM's environment variables to modulm's flags."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from modulm.config.environ import variables

__all__ = ["VARIABLES", "from_environment", "rewritten"]


def _gibibytes(text: str) -> int:
    return int(float(text) * (1 << 30))


def _profiler(text: str) -> str:
    return json.dumps({"profiler": "torch", "torch_profiler_dir": text})


#: Variable -> flag, how its value is parsed, whether it applies only to servers.
VARIABLES: dict[str, tuple[str, Callable[[str], Any], bool]] = {
    "VLLM_API_KEY": ("api_key", str, True),
    "VLLM_CPU_KVCACHE_SPACE": ("kv_cache_memory_bytes", _gibibytes, False),
    "VLLM_LOGGING_LEVEL": ("log_level", str.lower, False),
    "VLLM_TORCH_PROFILER_DIR": ("profiler_config", _profiler, False),
    "VLLM_LOGGING_CONFIG_PATH": ("log_config_file", str, False),
}


def from_environment() -> dict[str, Any]:
    """Return the flags that variables set, for an offline engine. MODULM_* variables take
    precedence.
    """
    return {
        flag: read(variables()[name])
        for name, (flag, read, server) in VARIABLES.items()
        if not server and variables().get(name) and not _own(flag)
    }


def rewritten() -> dict[str, str]:
    """Return the set variables of vLLM under the names that modulm's commands read.

    Metrics get vLLM's names as well, unless a variable sets their prefix.
    """
    prefix = {} if _own("metrics_prefix") else {"MODULM_METRICS_PREFIX": "modulm,vllm"}
    return prefix | {
        f"MODULM_{flag.upper()}": str(read(variables()[name]))
        for name, (flag, read, _) in VARIABLES.items()
        if variables().get(name) and not _own(flag)
    }


def _own(flag: str) -> bool:
    return bool(variables().get(f"MODULM_{flag.upper()}"))
