"""Texts and pairs cut to a limit: the ids are those of transformers' own truncation."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Core
from tokenizers import processors

from modulm.contracts.tokenizer import Tokenizer
from modulm.plugins import manager
from modulm.testing import kit
from modulm.testing.checkpoints import make_tokenizer
from modulm_tokenizers.tokenizer import load_tokenizer

WORDS = st.lists(
    st.sampled_from(["the", "capital", "of", "France", "Paris", "yes", "12"]),
    min_size=1,
    max_size=12,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that puts special tokens around a text, and between two."""
    folder = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    core = Core.from_file(str(folder / "tokenizer.json"))
    core.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        pair="<|im_start|> $A <|im_end|> $B:1 <|im_end|>:1",
        special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)],
    )
    core.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def ours(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> transformers.PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))


@settings(deadline=None, max_examples=60)
@given(words=WORDS, limit=st.integers(3, 20), side=st.sampled_from(["left", "right"]))
def test_one_text(ours, theirs, words, limit, side) -> None:
    text = " ".join(words)
    theirs.truncation_side = side
    expected = theirs(text, truncation=True, max_length=limit)["input_ids"]
    assert ours.fit(text, limit=limit, side=side) == (expected, None)
    bare = theirs(text, truncation=True, max_length=limit, add_special_tokens=False)["input_ids"]
    ids, _ = ours.fit(text, limit=limit, side=side, add_special_tokens=False)
    assert ids == bare


@settings(deadline=None, max_examples=60)
@given(first=WORDS, second=WORDS, limit=st.integers(6, 24))
def test_the_longer_of_two_is_cut_first(ours, theirs, first, second, limit) -> None:
    pair = " ".join(first), " ".join(second)
    theirs.truncation_side = "right"
    ids, start = ours.fit(*pair, limit=limit)
    whole, _ = ours.fit(*pair)
    encoding = theirs(*pair, truncation="longest_first", max_length=limit)
    lengths = [len(theirs(text, add_special_tokens=False)["input_ids"]) for text in pair]
    if sum(lengths) + 3 <= limit or min(lengths) * 2 + 3 <= limit:
        assert ids == encoding["input_ids"]
    assert len(ids) == min(len(whole), limit)
    assert ids.count(1) == 1
    assert ids.count(2) == 2
    assert start == ids.index(2) + 1


def test_a_tokenizer_written_in_python() -> None:
    from modulm_tokenizer_slow import PythonCodec

    theirs = transformers.ByT5Tokenizer()
    codec = PythonCodec(theirs)
    for texts in (["abcdefgh"], ["abcdefgh", "xy"]):
        expected = theirs(*texts, truncation=True, max_length=7)["input_ids"]
        assert codec.fit(texts, True, 7, "right")[0] == expected
        assert codec.fit(texts, True, None, "right")[0] == theirs(*texts)["input_ids"]
    ids, _ = codec.fit(["abcdefgh"], True, 4, "left")
    assert theirs.decode(ids, skip_special_tokens=True) == "fgh"


def test_mode_slow_cuts_a_tokenizer_that_transformers_has_only_in_rust(folder, ours) -> None:
    slow = load_tokenizer(folder, "slow")
    text = "the capital of France"
    assert slow.fit(text, limit=4) == ours.fit(text, limit=4)
    kit.check("tokenizers", manager.current().load("tokenizers", "slow"))
