"""One compute thread per test process: tests run side by side, and two threads that wait for each
other on a busy core are many times slower than one."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MODULM_CPU_THREADS", "1")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Commands under test set logging up for the whole process: the next test gets it back."""
    loggers = [logging.getLogger(), logging.getLogger("modulm"), logging.getLogger("uvicorn")]
    before = [(log.level, log.propagate, log.disabled, log.handlers[:]) for log in loggers]
    yield
    for log, (level, propagate, disabled, handlers) in zip(loggers, before, strict=True):
        log.level, log.propagate, log.disabled, log.handlers = level, propagate, disabled, handlers
