"""The contract kit for tokenizer loaders.

    from modulm.testing.tokenizer_loaders import check_tokenizer_loader

    def test_contract():
        check_tokenizer_loader(MyLoader, sample=write_mine)

`sample(folder)` writes a folder that the loader claims. Without it, and without the static method
`kit_sample` on the class, a folder with a tokenizer.json is tried.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from modulm.contracts.tokenizer import Tokenizer
from modulm.contracts.tokenizer_loader import TokenizerLoader
from modulm.errors import CheckpointError, ModulmError
from modulm.testing.checkpoints import make_tokenizer
from modulm.testing.kit import KitNotRun

__all__ = ["check_tokenizer_loader"]

_TEXTS = ("Hello, world", "two  spaces\n\tand a tab", "Grüße, 世界 🙂", "", "1234567890 " * 20)


def check_tokenizer_loader(
    driver: type[TokenizerLoader], *, sample: Callable[[Path], object] | None = None
) -> None:
    """Run the kit. Raises AssertionError with what was expected, KitNotRun without a sample."""
    assert isinstance(driver.files, tuple), f"files is {driver.files!r}, not a tuple of patterns"
    writer = sample or getattr(driver, "kit_sample", None)
    with tempfile.TemporaryDirectory() as name:
        empty, folder = Path(name, "empty"), Path(name, "sample")
        empty.mkdir()
        folder.mkdir()
        assert driver.claims(empty) is None, "claims() claims an empty folder"
        claimed: str | None
        if writer is None:
            make_tokenizer(folder)
            claimed = "opened" if _opens(driver, folder) else None
        else:
            writer(folder)
            claimed = driver.claims(folder)
            assert claimed, f"claims() gave {claimed!r} for a folder in its format"
            assert isinstance(claimed, str), f"claims() gave {claimed!r}, not a reason"
        if not claimed:
            raise KitNotRun("it opens no tokenizer.json: pass sample=, which writes its format")
        _check_missing(driver, empty)
        first, second = (driver.open(str(folder), None, False) for _ in range(2))
        assert isinstance(first, Tokenizer), f"open() gave {first!r}, not a Tokenizer"
        _check_tokenizer(first, second)


def _opens(driver: type[TokenizerLoader], folder: Path) -> bool:
    try:
        driver.open(str(folder), None, False)
    except ModulmError:
        return False
    return True


def _check_missing(driver: type[TokenizerLoader], empty: Path) -> None:
    try:
        driver.open(str(empty), None, False)
    except CheckpointError:
        return
    except Exception as error:
        raise AssertionError(
            f"open() of an empty folder raises {type(error).__name__}, not CheckpointError"
        ) from error
    raise AssertionError("open() opens an empty folder; CheckpointError was expected")


def _check_tokenizer(tokenizer: Tokenizer, second: Tokenizer) -> None:
    size = len(tokenizer)
    assert size > 0, "the tokenizer has no tokens"
    for name in ("stop_ids", "special_ids"):
        named = sorted(getattr(tokenizer, name))
        assert all(0 <= i < size for i in named), f"{name} {named} are not all below {size}"
    assert tokenizer.stop_ids, "the tokenizer has no stop_ids: nothing would end a turn"
    for text in _TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert all(isinstance(i, int) and 0 <= i < size for i in ids), f"ids of {text!r}: {ids}"
        back = tokenizer.decode(ids)
        assert back == text, f"{text!r} becomes {back!r} when it is encoded and decoded"
        again = second.encode(text, add_special_tokens=False)
        assert ids == again, f"{text!r} is encoded differently by a second tokenizer"
        whole, _ = tokenizer.fit(text, add_special_tokens=False)
        assert whole == ids, f"fit() without a limit gives other ids for {text!r} than encode()"
        cut, _ = tokenizer.fit(text, add_special_tokens=False, limit=2)
        assert cut == ids[:2], f"fit() with a limit of 2 gives {cut} for {text!r}, not {ids[:2]}"
        cut, _ = tokenizer.fit(text, add_special_tokens=False, limit=2, side="left")
        assert cut == ids[-2:], f"fit() from the left gives {cut} for {text!r}, not {ids[-2:]}"
    for index in range(0, size, max(1, size // 64)):
        token = tokenizer.id_to_token(index)
        same = token is None or tokenizer.token_to_id(token) == index
        assert same, f"token {index} is spelt {token!r}, which is another token's id"
    assert tokenizer.id_to_token(size + 10) is None, "ids past the vocabulary have a token"
