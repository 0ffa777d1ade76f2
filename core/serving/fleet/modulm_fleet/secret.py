"""The secret that replicas share; see `modulm_distributed.secret`."""

from __future__ import annotations

from modulm_distributed.secret import keep_alive, read_secret, secret_file

__all__ = ["keep_alive", "read_secret", "secret_file"]
