"""Environment variables for bug reports."""

from __future__ import annotations

from modulm.config.environ import variables

__all__ = ["reported_environment"]

_REPORTED = ("MODULM_", "HF_", "OMP_", "KMP_", "MKL_", "TORCH_", "PYTORCH_", "PYTHON", "LD_PRELOAD")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def reported_environment() -> dict[str, str]:
    """Return the variables for a bug report, with secrets masked."""
    values = variables()
    names = sorted(name for name in values if name.startswith(_REPORTED))
    return {name: _masked(name, values[name]) for name in names}


def _masked(name: str, value: str) -> str:
    return "***" if value and any(word in name for word in _SECRET) else value
