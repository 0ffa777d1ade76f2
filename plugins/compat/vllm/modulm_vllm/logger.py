"""vLLM's `init_logger`."""

from __future__ import annotations

import logging

__all__ = ["init_logger"]


def init_logger(name: str) -> logging.Logger:
    """Return a logger; if logging is not configured, it prints messages from INFO on."""
    logger = logging.getLogger(name)
    if not logging.getLogger().handlers and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [%(name)s] %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger
