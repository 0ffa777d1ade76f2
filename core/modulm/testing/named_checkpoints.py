"""The contract kit for named checkpoints.

from modulm.testing.named_checkpoints import check_named_checkpoint

def test_contract():
    check_named_checkpoint(MyCheckpoint)
"""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

from modulm.contracts.checkpoint import NamedCheckpoint

__all__ = ["check_named_checkpoint"]

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
#: Sample texts that are read, of as many as there are.
_TEXTS = 8


def check_named_checkpoint(driver: type[NamedCheckpoint]) -> None:
    """Run the kit: the name, where the files are, the sample texts. Downloads nothing.

    Raises AssertionError with what was expected.
    """
    name = getattr(driver, "name", None)
    assert isinstance(name, str), f"the name is {name!r}, not a text"
    usable = name and not set("/\\") & set(name) and not name.startswith((".", "~"))
    assert usable, f"the name {name!r} reads as a path or a hub id, so --model would not find it"
    source = driver.source()
    if isinstance(source, Path):
        _check_folder(source)
    else:
        assert isinstance(source, str), f"source() gave {source!r}, not a folder or a hub id"
        valid = _HUB_ID.fullmatch(source)
        assert valid, f"source() gave {source!r}, which is no hub id such as owner/model"
    assert driver.source() == source, "source() gives another place the second time"
    _check_texts(driver)


def _check_folder(folder: Path) -> None:
    assert folder.is_absolute(), f"source() gave {folder}, which depends on the working directory"
    assert folder.exists(), f"source() gave {folder}, which does not exist"
    described = folder.is_file() or (folder / "config.json").is_file()
    assert described, f"source() gave {folder}, a folder without config.json"


def _check_texts(driver: type[NamedCheckpoint]) -> None:
    texts = driver.texts()
    assert not isinstance(texts, str | bytes), "texts() gave one text, not several"
    try:
        first = list(islice(iter(texts), _TEXTS))
    except ImportError:
        return  # it needs a package that serving does not
    for text in first:
        written = isinstance(text, str) and text.strip()
        assert written, f"texts() gave {text!r}, not a text"
    again = list(islice(iter(driver.texts()), _TEXTS))
    assert again == first, "texts() gives other texts the second time, so no figure can be repeated"
