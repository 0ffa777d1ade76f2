"""Each block of a page is run by tests, or followed.toml says who followed it, and when.

A block that changed has to be followed again: `bench/follow_pages.py PAGE` runs what it can and
writes the record.
"""

from __future__ import annotations

import re
import tomllib
from datetime import date
from pathlib import Path

from page_blocks import ROOT, pages, shown_blocks

RECORD = Path(__file__).with_name("followed.toml")
#: "2026-11-28, how", "test: tests/file.py::name", or "not run: why".
_STATE = re.compile(r"(?P<day>\d{4}-\d\d-\d\d), \w.+|test: (?P<test>[\w/.]+)(::\w+)?|not run: \w.+")


def test_each_block_is_followed() -> None:
    record = tomllib.loads(RECORD.read_text(encoding="utf-8"))
    problems = [f"{page}: there is no such page" for page in set(record) - set(pages())]
    for page, path in pages().items():
        states = record.get(page, {})
        if "page" in states:  # a generated page, as a whole
            continue
        hashes = {block.hash: block.text for block in shown_blocks(page, path)}
        problems += [
            f"{page}: bench/follow_pages.py {page} has not followed:\n{hashes[name]}"
            for name in hashes.keys() - states.keys()
        ]
        problems += [f"{page}: no block is {name}" for name in states.keys() - hashes.keys()]
    assert problems == []


def test_states_say_how() -> None:
    record = tomllib.loads(RECORD.read_text(encoding="utf-8"))
    for page, states in record.items():
        for name, state in states.items():
            match = _STATE.fullmatch(state)
            assert match, f"{page} {name}: {state}"
            if match["day"]:
                assert date.fromisoformat(match["day"])
            if match["test"]:
                assert (ROOT / match["test"]).is_file(), f"{page} {name}: {state}"
