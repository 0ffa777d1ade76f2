"""The API key that commands send to a server."""

from __future__ import annotations

from modulm.config.environ import variables

__all__ = ["client_key"]


def client_key() -> str | None:
    """Return the first key of MODULM_API_KEY, else OPENAI_API_KEY; None if neither is set."""
    first = variables().get("MODULM_API_KEY", "").split(",")[0].strip()
    return first or variables().get("OPENAI_API_KEY") or None
