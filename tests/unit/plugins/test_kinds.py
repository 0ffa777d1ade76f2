"""Kinds that packages bring, and what the command line says without one of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest

from modulm.errors import PluginBroken, PluginNotFound
from modulm.plugins import kinds
from modulm.plugins.kinds import KINDS_GROUP, Kind, find_kind, kind_names, kind_of

WORD = Kind("words", "word", "word")
MISNAMED = Kind("letters", "letter", "letter")


@pytest.fixture
def brought(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three kinds by entry point: a good one, one that is missing, one of another name."""
    targets = {"words": f"{__name__}:WORD", "gone": "no_such:KIND", "names": f"{__name__}:MISNAMED"}
    points = [EntryPoint(name, target, KINDS_GROUP) for name, target in targets.items()]
    monkeypatch.setattr(kinds, "entry_points", lambda group: points)
    caches = (kinds._brought, find_kind)
    for cache in caches:
        cache.cache_clear()
    yield
    monkeypatch.undo()
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("brought")
def test_a_package_brings_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)("words_of_a_test")
    module.WORD, module.MISNAMED = WORD, MISNAMED
    monkeypatch.setitem(sys.modules, __name__, module)
    assert kind_names()[-3:] == ("words", "gone", "names")
    assert find_kind("words") is WORD
    assert find_kind("words").group == "modulm.words"
    with pytest.raises(PluginBroken, match="kind gone cannot be imported"):
        find_kind("gone")
    with pytest.raises(PluginBroken, match="is not a Kind called 'names'"):
        find_kind("names")
    with pytest.raises(PluginNotFound, match="there is no kind 'routes'.*words"):
        find_kind("routes")


def test_groups() -> None:
    kinds = [kind_of(group) for group in ("modulm", "modulm.models", KINDS_GROUP, "pytest11")]
    assert kinds == ["hooks", "models", None, None]


def test_the_server_brings_routes() -> None:
    kind = find_kind("routes")
    assert kind.api == 2
    assert kind.contract_class().__name__ == "RouteFamily"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ("-modulm-server", "'serve' is disabled by --plugins=-modulm-server"),
        (None, "'serve' is not installed: pip install modulm-server"),
    ],
)
def test_serve_without_the_server(selection: str | None, message: str) -> None:
    hide = """
import modulm.plugins.drivers as drivers
import modulm.plugins.manager as manager
found = drivers.installed
manager.installed = lambda: (d for d in found() if d.distribution != "modulm-server")
"""
    code = "from modulm.cli.main import main\n" + ("" if selection else hide)
    arguments = ["--plugins", selection, "serve"] if selection else ["serve"]
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nmain({arguments!r})"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert message in done.stderr
