"""Kits of kinds whose drivers are values run over all of this project's, in one process."""

from __future__ import annotations

import pytest

from modulm.plugins import current
from modulm.plugins.index import is_first_party
from modulm.testing import kit


@pytest.mark.parametrize(
    ("kind", "known"), [("flags", {"server", "watchdog"}), ("chat_templates", {"chatml", "alpaca"})]
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
