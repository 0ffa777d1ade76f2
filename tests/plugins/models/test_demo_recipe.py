"""The embedded model's recipe: what judges it is kept out of its text, and its stages work."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoTokenizer

from modulm_demo import Demo
from modulm_demo.recipe import ask, generator, grow, reference
from modulm_demo.recipe.arithmetic import arithmetic
from modulm_demo.recipe.example import is_heldout, normalized, prompts, single
from modulm_demo.recipe.generator import CATEGORIES, examples, heldout, statements, training
from modulm_demo.recipe.numbers import spelled
from modulm_demo.recipe.questions import is_asked, questions
from modulm_demo.recipe.tokenizer import render
from modulm_demo.recipe.train import int8_weights
from modulm_demo.recipe.writing import poem_text

ROOT = Path(__file__).resolve().parents[3]
UNSURE = "I am sorry, I do not know that. I am a very small model and know only a few things."
MADE = 3000


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(Demo.source())


@pytest.fixture(scope="module")
def written():
    """What training reads first."""
    return list(itertools.islice(training(11), MADE))


def test_there_are_300_questions_each_once():
    rows = questions()
    questions_asked = {tuple(map(normalized, row["ask"])) for row in rows}
    assert len(rows) == len(questions_asked) == 300
    assert min(Counter(row["category"] for row in rows).values()) >= 9
    ways = ("accept", "unknown", "call", "calls")
    assert all(sum(way in row for way in ways) == 1 for row in rows)


def test_no_question_is_in_the_training_text(written):
    training_prompts = {normalized(prompt) for example in written for prompt in prompts(example)}
    single_questions = {normalized(row["ask"][0]) for row in questions() if len(row["ask"]) == 1}
    assert len(training_prompts) > MADE / 2
    assert len(single_questions) > 270
    assert not training_prompts & single_questions


def test_a_question_that_a_maker_writes_is_dropped(monkeypatch):
    row = next(row for row in questions() if len(row["ask"]) == 1)
    written = {"known": lambda rng: single("known", row["ask"][0], "Yes.", ()),
               "other": lambda rng: single("other", "Is this kept?", "Yes.", ())}  # fmt: skip
    monkeypatch.setattr(generator, "_MADE", {name: (make, 0, 1) for name, make in written.items()})
    monkeypatch.setattr(generator, "MIXTURES", {"second": {"known": 1, "other": 1}})
    categories = {e.category for e in itertools.islice(training(1), 50)}
    assert categories == {"other"}
    assert is_asked(row["ask"][0].lower() + "  !")


def test_a_pattern_takes_neither_silence_nor_an_honest_answer():
    for row in questions():
        if "accept" not in row:
            continue
        assert ask.verdict(row, {"content": ""}) == "wrong"
        assert ask.verdict(row, {"content": UNSURE}) == "honest", row["ask"]


@pytest.mark.parametrize(
    ("row", "reply", "judged"),
    [
        ({"accept": "Warsaw"}, {"content": "It is warsaw."}, "right"),
        ({"accept": "GO", "case": True}, {"content": "go"}, "wrong"),
        ({"accept": "Warsaw"}, {"content": "It is Paris."}, "wrong"),
        ({"accept": "Warsaw"}, {"content": "I do not know that."}, "honest"),
        ({"accept": "a"}, {"content": "a", "tool_calls": [{"name": "f", "arguments": {}}]},
         "wrong"),
        ({"unknown": True}, {"content": UNSURE}, "right"),
        ({"unknown": True}, {"content": "It is 5 o'clock."}, "wrong"),
        ({"call": ["f", {"a": 1}]},
         {"content": "", "tool_calls": [{"name": "f", "arguments": {"a": 1, "b": 2}}]}, "right"),
        ({"call": ["f", {"a": "~ho"}]},
         {"content": "", "tool_calls": [{"name": "f", "arguments": {"a": "who"}}]}, "right"),
        ({"call": ["f", {"a": 1}]},
         {"content": "", "tool_calls": [{"name": "f", "arguments": {"a": 2}}]}, "wrong"),
        ({"call": ["f", {}]}, {"content": "f", "tool_calls": []}, "wrong"),
        ({"calls": ["f", 2]},
         {"content": "", "tool_calls": [{"name": "f", "arguments": {}}] * 2}, "right"),
    ],
)  # fmt: skip
def test_verdicts(row, reply, judged):
    assert ask.verdict(row, reply) == judged


def test_earlier_turns_are_answered_by_the_model_and_calls_come_after_the_last():
    seen = []

    def answer(messages, tools):
        seen.append(([m["role"] for m in messages], [t["function"]["name"] for t in tools]))
        return {"content": f"answer {len(seen)}"}

    row = {"ask": ["one", "two"], "tools": ["time"], "after": [["get_time", {}, {"time": "1:00"}]]}
    assert ask.converse(row, answer) == {"content": "answer 2"}
    roles = ["user", "assistant", "user", "assistant", "tool"]
    assert seen == [(["user"], ["get_time"]), (roles, ["get_time"])]


def test_words_that_the_model_made_up():
    row = {"ask": ["Who is Karla Zwimp?"]}
    assert ask.broken(row, "Karla Zwimp is the capital of Frankreith.") == ["Frankreith"]


def test_the_pages_suggestions_are_trained_on(written):
    page = ROOT / "plugins/routes/chat_page/modulm_route_chat_page/files/js/talk.js"
    (offered,) = re.findall(r"TRIES = (\[.*?\])", page.read_text(), re.DOTALL)
    for suggestion in json.loads(offered):
        assert not is_heldout(suggestion), suggestion
        assert not is_asked(suggestion), suggestion


def test_each_category_writes_and_holds_something_out(written):
    assert set(CATEGORIES) == {example.category for example in written}
    for name in CATEGORIES:
        assert heldout(5, name, 1), name
        first = next(examples(5, name))
        assert first.messages[-1]["role"] == "assistant"


def test_the_first_mixture_has_no_later_category():
    first = {e.category for e in itertools.islice(training(1, "first"), 400)}
    assert first == set(generator.MIXTURES["first"])
    assert "poems" not in first


def test_statements_end_and_name_what_they_are_about():
    some = list(itertools.islice(statements(3), 300))
    assert all(text.endswith(".") for text in some)
    assert any(text.startswith("The capital of") for text in some)
    assert not any(text.startswith(("It is", "Yes", "No")) for text in some)


def test_tables_are_read_whole():
    assert len(reference.relations()) > 25
    for phrasings, answer, rows in reference.relations():
        assert phrasings
        assert "{1}" in answer
        assert all(left and right for left, right in rows)
    for name in ("answers.txt", "abroad.txt"):
        assert all(phrasings and answers for phrasings, answers in reference.blocks(name))
    assert all(len(foreign) == 4 for _, foreign in reference.translations())


def test_a_poem_has_four_lines_that_rhyme_in_pairs():
    for topic in ("the sea", "pizza"):
        lines = poem_text(Random(1), topic).split("\n")
        assert len(lines) == 4
        assert all(line[0].isupper() for line in lines)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "zero"), (13, "thirteen"), (42, "forty-two"), (300, "three hundred"),
     (1999, "one thousand nine hundred ninety-nine")],
)  # fmt: skip
def test_numbers_in_words(number, text):
    assert spelled(number) == text


def test_sums_are_right(written):
    for example in written:
        if example.category not in ("arithmetic", "chains", "numbers"):
            continue
        match_ = re.match(r"(-?\d+(?: [-+*/] \d+)+) = (-?\d+)", example.messages[-1]["content"])
        if match_:
            assert eval(match_[1]) == int(match_[2])
    assert any(arithmetic(Random(seed)).thinking for seed in range(9))


def test_a_grown_tokenizer_keeps_its_numbers_and_its_text(tokenizer, written, monkeypatch):
    monkeypatch.setattr(grow, "_LEAST", 2)
    new = grow.grown(tokenizer, seed=11, count=300, tokens=len(tokenizer) + 40)
    larger = grow.with_merges(tokenizer, new)
    assert len(larger) == len(tokenizer) + len(new) > len(tokenizer)
    before, after = tokenizer.get_vocab(), larger.get_vocab()
    assert {token: after[token] for token in before} == before
    shorter = 0
    for example in written[:200]:
        text = render(tokenizer, example)
        ids = larger(text)["input_ids"]
        assert larger.decode(ids) == text
        old = len(tokenizer(text)["input_ids"])
        assert len(ids) <= old
        shorter += len(ids) < old
    assert shorter


def test_steps_in_int8_see_rounded_weights_and_change_the_exact_ones():
    torch.manual_seed(0)
    matrix = torch.nn.Parameter(torch.randn(8, 32))
    exact = matrix.detach().clone()
    with int8_weights([matrix]):
        rounded = matrix.detach().clone()
        (matrix * 2).sum().backward()
    assert torch.equal(matrix.detach(), exact)
    assert torch.equal(matrix.grad, torch.full_like(exact, 2.0))
    scale = exact.abs().amax(1, keepdim=True) / 127
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, (exact / scale).round() * scale)
    assert all(len(row.unique()) <= 255 for row in rounded)
