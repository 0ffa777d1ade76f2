"""The compiler's bounds and the gate that waits for the end of the reasoning."""

from __future__ import annotations

import json
import threading
from concurrent.futures import wait

import numpy as np
import pytest

from modulm.config import EngineConfig
from modulm.contracts.grammar import Grammar, GrammarBackend, Matcher
from modulm.contracts.parser import ParseContext
from modulm.contracts.sampling import StructuredOutputs
from modulm.errors import QueueFull, RequestError, UnsupportedError
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny
from modulm_structured_output.compiler import GrammarCompiler, open_compiler
from modulm_structured_output.reasoning import AfterReasoning, breaks_of, openers_of
from modulm_tokenizers.tokenizer import load_tokenizer

V = 64


class Anything(Grammar):
    """Lets every token through; `slow` steps burn CPU."""

    nbytes = 0

    def __init__(self, slow=False, only=None) -> None:
        self.slow, self.only = slow, only

    def matcher(self) -> Matcher:
        return _Anything(self)


class _Anything(Matcher):
    def __init__(self, grammar: Anything) -> None:
        self.grammar, self.taken = grammar, []

    def accept(self, token: int) -> bool:
        if self.grammar.only is not None and token != self.grammar.only:
            return False
        self.taken.append(token)
        return True

    def fill(self, mask: np.ndarray) -> None:
        if self.grammar.slow:
            sum(range(20_000_000))
        mask.fill(-1 if self.grammar.only is None else 0)
        if self.grammar.only is not None:
            mask[self.grammar.only // 32] = 1 << self.grammar.only % 32

    def rollback(self, tokens: int) -> None:
        del self.taken[len(self.taken) - tokens :]

    @property
    def finished(self) -> bool:
        return False


class Backend(GrammarBackend):
    """Regex "wait" compiles until `go` is set; "slow", "boom" and "reject" do what they say."""

    name = "fake"
    api = 1

    def __init__(self) -> None:
        super().__init__(None, V, (0,))
        self.go = threading.Event()
        self.compiled: list[str] = []

    def rejects(self, constraint: StructuredOutputs) -> str | None:
        return "cannot do that" if constraint.regex == "reject" else None

    def compile(self, constraint: StructuredOutputs) -> Grammar:
        self.compiled.append(constraint.regex)
        if constraint.regex.startswith("wait"):
            self.go.wait()
        if constraint.regex == "boom":
            raise ZeroDivisionError("boom")
        return Anything(slow=constraint.regex == "slow")


@pytest.fixture
def backend():
    made = Backend()
    yield made
    made.go.set()


def ask(compiler, regex):
    return compiler(StructuredOutputs(regex=regex))


def test_equal_constraints_share_one_grammar(backend) -> None:
    compiler = GrammarCompiler([backend])
    first, second = ask(compiler, "waiting"), ask(compiler, "waiting")
    assert not first.done()
    backend.go.set()
    assert first.result(300) is second.result(300) is ask(compiler, "waiting").result(300)
    assert backend.compiled == ["waiting"]


def test_what_is_kept_is_bounded_and_least_recently_used_goes(backend) -> None:
    compiler = GrammarCompiler([backend], entries=2)
    for regex in ("a", "b", "a", "c", "a", "b"):
        ask(compiler, regex).result(300)
    assert backend.compiled == ["a", "b", "c", "b"]


@pytest.mark.parametrize(
    ("regex", "words"),
    [("reject", "fake: cannot do that"), ("boom", "boom"), ("slow", "too ambiguous")],
)
def test_errors_are_the_requests(backend, regex, words) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        ask(GrammarCompiler([backend]), regex).result(300)
    assert caught.value.param == "structured_outputs"


def test_an_error_that_is_kept_does_not_grow_with_each_request_that_meets_it(backend) -> None:
    """A traceback holds the frames of everybody who raised the error, and what these know."""
    compiler = GrammarCompiler([backend])
    depths = []
    for _ in range(20):
        with pytest.raises(RequestError, match="boom") as caught:
            ask(compiler, "boom").result(300)
        depths.append(len(caught.traceback))
    assert set(depths[1:]) == {depths[1]}
    assert backend.compiled == ["boom"]


def test_a_second_backend_takes_what_the_first_rejects(backend) -> None:
    other = Backend()
    other.rejects = lambda constraint: None
    ask(GrammarCompiler([backend, other]), "reject").result(300)
    assert (backend.compiled, other.compiled) == ([], ["reject"])


def test_only_so_many_may_wait(backend) -> None:
    compiler = GrammarCompiler([backend], waiting=3, workers=1, seconds=60)
    futures = [ask(compiler, f"wait{i}") for i in range(3)]
    with pytest.raises(QueueFull):
        ask(compiler, "a")
    backend.go.set()
    wait(futures, 300)
    assert ask(compiler, "a").result(300)


def test_one_that_waited_too_long_may_be_asked_again(backend) -> None:
    compiler = GrammarCompiler([backend], workers=1, seconds=0.0)
    assert isinstance(ask(compiler, "a").exception(30), QueueFull)
    assert isinstance(ask(compiler, "a").exception(30), QueueFull)
    assert backend.compiled == []


def test_the_bytes_of_what_is_kept_are_bounded(backend, monkeypatch) -> None:
    monkeypatch.setattr(Anything, "nbytes", 40)
    compiler = GrammarCompiler([backend], size=100)
    for regex in ("a", "b", "c", "b", "a"):
        ask(compiler, regex).result(300)
    assert backend.compiled == ["a", "b", "c", "a"]


ORDINARY = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/a"}},
    "required": ["a"],
    "$defs": {"a": {"type": ["string", "null"], "enum": ["x", None], "title": "A"}},
}
DOUBLING = {
    "$defs": {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(20)},
    "$ref": "#/$defs/a0",
}


@pytest.mark.parametrize(
    ("fields", "ordinary"),
    [
        ({"json": ORDINARY}, True), ({"json": json.dumps(ORDINARY)}, True), ({"json": True}, True),
        ({"json_object": True}, True), ({"choice": ["yes", "no"]}, True),
        ({"json": {"type": "string", "maxLength": 10**6}}, False),
        ({"json": {"properties": {"maxLength": {"type": "string"}}}}, True),
        ({"json": {"type": "string", "pattern": "(a+)+"}}, False), ({"json": {"$ref": "#"}}, False),
        ({"json": DOUBLING}, False), ({"json": {"enum": ["x" * 5000]}}, False),
        ({"choice": ["x" * 5000]}, False), ({"regex": "a"}, False), ({"grammar": "x"}, False),
        ({"structural_tag": "{}"}, False),
        ({"structural_tag": json.dumps({"type": "structural_tag", "format": {
            "type": "sequence", "elements": [
                {"type": "const_string", "value": "<f>"},
                {"type": "repeat", "min": 1, "max": 2,
                 "content": {"type": "json_schema", "json_schema": {"type": "integer"}}},
            ]}})}, True),
        ({"structural_tag": json.dumps({"type": "structural_tag", "format": {
            "type": "regex", "pattern": "(a{0,50}){0,50}"}})}, False),
        ({"json_object": True, "whitespace_pattern": "a"}, False),
    ],
)  # fmt: skip
def test_ordinary_constraints_need_no_process(backend, fields, ordinary) -> None:
    asked = []
    backend.compile = lambda constraint: Anything()
    constraint = StructuredOutputs(**fields)
    GrammarCompiler([backend], check=asked.append)(constraint).result(300)
    assert asked == ([] if ordinary else [constraint])


def test_the_flag_must_name_an_installed_backend(backend) -> None:
    class NoPlugins:
        def names(self, kind):
            return ()

    with pytest.raises(UnsupportedError, match="pip install"):
        open_compiler(EngineConfig(), None, V, (0,), NoPlugins())


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(make_tiny(tmp_path_factory.mktemp("grammars") / "tiny"))


@pytest.fixture(scope="module")
def gate(tokenizer):
    make = manager.current().load("reasoning_parsers", "qwen3")
    openers = openers_of(make, tokenizer, len(tokenizer))
    only = tokenizer.encode("{", add_special_tokens=False)[0]

    def build(prompt: str) -> Matcher:
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        return AfterReasoning(Anything(only=only), make, tokenizer, ids, openers).matcher()

    return build, only, openers


def free(matcher, tokenizer) -> set[int]:
    mask = np.zeros(-(-len(tokenizer) // 32), dtype=np.int32)
    matcher.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), count=len(tokenizer), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def feed(matcher, tokenizer, text) -> bool:
    return all(matcher.accept(t) for t in tokenizer.encode(text, add_special_tokens=False))


def test_openers_are_found_by_asking_the_parser(tokenizer, gate) -> None:
    assert gate[2] == (tokenizer.token_to_id("<think>"),)
    context = ParseContext(prompt_tail="", tokenizer=tokenizer)
    assert not manager.current().load("reasoning_parsers", "qwen3")(context).reasoning


@pytest.mark.parametrize("prompt", ["<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"])
def test_the_grammar_waits_for_the_end_of_a_thought(tokenizer, gate, prompt) -> None:
    build, only, openers = gate
    matcher = build(prompt)
    if prompt.endswith("assistant\n"):
        assert free(matcher, tokenizer) == {only, *openers}
        assert feed(matcher, tokenizer, "<think>")
    for text in ("\n", "Hm { 5", " </thin", "k2>"):
        assert len(free(matcher, tokenizer)) == len(tokenizer)
        assert feed(matcher, tokenizer, text)
        assert not matcher.finished
    assert feed(matcher, tokenizer, "</think>")
    assert free(matcher, tokenizer) == {only}
    assert feed(matcher, tokenizer, "{")
    assert not feed(matcher, tokenizer, "x")


@pytest.mark.parametrize("prompt", ["assistant\n<think>\n\n</think>\n\n", "assistant\n"])
def test_without_a_thought_the_grammar_holds_from_the_first_token(tokenizer, gate, prompt) -> None:
    build, only, _ = gate
    matcher = build(prompt)
    assert feed(matcher, tokenizer, "{")
    assert free(matcher, tokenizer) == {only}
    assert not feed(matcher, tokenizer, "<think>")


def test_the_gate_rolls_back_into_the_thought(tokenizer, gate) -> None:
    build, only, _ = gate
    matcher = build("assistant\n<think>\n")
    assert feed(matcher, tokenizer, "ab</think>{{")
    matcher.rollback(2)
    assert free(matcher, tokenizer) == {only}
    matcher.rollback(1)
    assert len(free(matcher, tokenizer)) == len(tokenizer)
    assert feed(matcher, tokenizer, "</think>{")
    assert not feed(matcher, tokenizer, "x")


@pytest.fixture(scope="module")
def calling(tokenizer):
    """What makes the gate of Qwen 3's thoughts, which calls may end."""
    make = manager.current().load("reasoning_parsers", "qwen3")
    openers = openers_of(make, tokenizer, len(tokenizer))
    return tokenizer, make, openers, breaks_of(make, tokenizer, len(tokenizer), openers)


def gated(calling, only: str) -> Matcher:
    tokenizer, make, openers, breaks = calling
    prompt = tokenizer.encode("assistant\n<think>\n", add_special_tokens=False)
    (token,) = tokenizer.encode(only, add_special_tokens=False)
    grammar = Anything(only=token)
    return AfterReasoning(grammar, make, tokenizer, prompt, openers, breaks).matcher()


def test_a_call_ends_a_thought_only_where_the_grammar_begins_with_it(calling) -> None:
    """Else its marker was left in front of the answer, where the grammar did not see it."""
    tokenizer, *_, breaks = calling
    assert breaks == (tokenizer.token_to_id("<tool_call>"),)
    every = set(range(len(tokenizer)))
    matcher = gated(calling, "{")
    assert feed(matcher, tokenizer, "Hm")
    assert free(matcher, tokenizer) == every - {*breaks}
    assert not matcher.accept(breaks[0])
    assert feed(matcher, tokenizer, " so</think>{")
    calls = gated(calling, "<tool_call>")
    assert feed(calls, tokenizer, "Hm")
    assert free(calls, tokenizer) == every
    assert calls.accept(breaks[0])
    assert free(calls, tokenizer) == {*breaks}
    assert not feed(calls, tokenizer, "x")
    calls.rollback(1)
    assert free(calls, tokenizer) == every
    assert feed(calls, tokenizer, "x</think><tool_call>")
