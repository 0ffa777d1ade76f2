"""Contract kits of several kinds run over this project's own drivers."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from modulm.plugins import current
from modulm.plugins.index import is_first_party
from modulm.testing import kit


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        ("flags", {"server", "watchdog"}),
        ("chat_templates", {"chatml", "alpaca"}),
        ("commands", {"plugins", "serve"}),
    ],
)
def test_our_own_drivers_pass_their_kit(kind: str, known: set[str]) -> None:
    names = [d.name for d in current().names(kind) if is_first_party(d.distribution)]
    wrong = {}
    for name in names:
        try:
            kit.check(kind, current().load(kind, name))
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"
    assert wrong == {}
    assert known <= set(names)


def adapter_below(folder: Path) -> tuple[dict[str, str], str]:
    """Write an adapter into a folder of adapters."""
    adapter = folder / "poets" / "keats"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    return {"lora_resolver_folder": str(folder)}, "poets/keats"


def test_the_filesystem_resolver_passes_its_kit() -> None:
    resolver = current().load("adapter_resolvers", "filesystem")
    kit.check("adapter_resolvers", resolver, sample=adapter_below)


def test_the_log_line_passes_its_kit(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="modulm_server.stats")
    logger = current().load("stat_loggers", "log")
    kit.check("stat_loggers", logger, sample=lambda folder: ({}, lambda: len(caplog.records)))


@pytest.mark.exhaustive
def test_the_executor_of_processes_passes_its_kit() -> None:
    kit.check("executors", current().load("executors", "mp"))
