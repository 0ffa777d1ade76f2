"""The llguidance backend, in particular where it goes further than others."""

from __future__ import annotations

import json

import pytest

from modulm.contracts.sampling import StructuredOutputs
from modulm.errors import RequestError
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny
from modulm.testing.grammars import allowed, takes, wander
from modulm_structured_output.compiler import GrammarCompiler
from modulm_tokenizers.tokenizer import load_tokenizer

VOCABULARY = 520


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(make_tiny(tmp_path_factory.mktemp("llguidance") / "tiny"))


@pytest.fixture(scope="module")
def backends(tokenizer):
    plugins = manager.current()
    return {
        name: plugins.load("grammars", name)(tokenizer, VOCABULARY, tokenizer.stop_ids)
        for name in ("xgrammar", "llguidance")
    }


@pytest.fixture(scope="module")
def compiler(backends):
    return GrammarCompiler([backends["llguidance"]], seconds=300.0, workers=1)


EVEN = {"allOf": [{"type": "integer", "multipleOf": 2}, {"minimum": 5}, {"maximum": 30}]}
TAG = {
    "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f>"],
}
CLOSED = {"type": "object", "properties": {"a": {"type": "integer"}}}
CASES = [
    (StructuredOutputs(json=EVEN), ["6", "30"], ["4", "7", "32", "x"]),
    (StructuredOutputs(json={"type": "string", "pattern": "^a+$", "maxLength": 3}),
     ['"aaa"'], ['"aaaa"', '"b"']),
    (StructuredOutputs(json=json.dumps(CLOSED)), ['{"a": 1}', '{"b": 1}'], ['{"a": "x"}', "[]"]),
    (StructuredOutputs(json=CLOSED, disable_additional_properties=True),
     ['{"a": 1}', "{}"], ['{"b": 1}']),
    (StructuredOutputs(json=CLOSED),
     ['{\n' + 21 * " " + '"a": 1}'], ['{\n' + 22 * " " + '"a": 1}']),
    (StructuredOutputs(json=CLOSED, disable_any_whitespace=True), ['{"a":1}'], ['{ "a":1}']),
    (StructuredOutputs(json=CLOSED, whitespace_pattern=r" {2}"), ['{  "a"  :  1  }'], ['{\n}']),
    (StructuredOutputs(json_object=True), ["{}", '{"a": [null]}'], ["[]"]),
    (StructuredOutputs(regex=r"\d{3}-[a-z]+"), ["123-abc"], ["12-abc", "123-"]),
    (StructuredOutputs(choice=["yes", "no", 'a "q"\n\\']), ["yes", 'a "q"\n\\'], ["y", "maybe"]),
    (StructuredOutputs(grammar='root ::= "a" root | "b"'), ["b", "aab"], ["a", "ba"]),
    (StructuredOutputs(grammar='start: "a"+ "b"'), ["aab"], ["b"]),
    (StructuredOutputs(structural_tag=json.dumps(TAG)), ["x <f>12</f> y", "no"], ["<f>x</f>"]),
]  # fmt: skip


@pytest.mark.parametrize(("constraint", "right", "wrong"), CASES, ids=range(len(CASES)))
def test_right_texts_pass_and_wrong_ones_do_not(
    tokenizer, compiler, constraint, right, wrong
) -> None:
    grammar = compiler(constraint).result(300)
    for text, expected in [(t, True) for t in right] + [(t, False) for t in wrong]:
        assert takes(tokenizer, grammar, text, VOCABULARY) is expected, text


def test_random_walks_are_valid(tokenizer, compiler) -> None:
    schema = {"type": "array", "items": {"enum": [1, "two", None]}, "minItems": 1, "maxItems": 3}
    grammar = compiler(StructuredOutputs(json=schema)).result(300)
    texts = [wander(tokenizer, grammar, seed, VOCABULARY) for seed in range(10)]
    values = [json.loads(text) for text in texts if text]
    assert len(values) > 5
    assert all(1 <= len(value) <= 3 and set(value) <= {1, "two", None} for value in values)


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "["}, {"regex": r"(a)\1"}, {"json": {"type": "strng"}},
        {"json": {"not": {"type": "string"}}}, {"grammar": 'root ::= "'}, {"grammar": "start: x"},
        {"json": {"type": "array", "items": {"uniqueItems": True}}}, {"structural_tag": "{"},
        {"structural_tag": '{"type": "structural_tag", "format": {"type": "token"}}'},
        {"structural_tag": '{"structures": [{"begin": "x"}], "triggers": []}'},
        {"grammar": "start: start"}, {"regex": r"[^\s\S]"}, {"json": {"$ref": "#"}},
        {"json": {"$ref": "https://example.com/s.json"}}, {"json": {"extends": {"type": "object"}}},
        {"json": {"items": {"contentEncoding": "base64"}}},
        {"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}},
    ],
    ids=range(17),
)  # fmt: skip
def test_bad_constraints_are_refused(compiler, fields) -> None:
    with pytest.raises(RequestError) as caught:
        compiler(StructuredOutputs(**fields)).result(300)
    assert caught.value.param == "structured_outputs"
    assert len(caught.value.message) < 500


def test_matchers_are_independent_and_roll_back(tokenizer, compiler) -> None:
    grammar = compiler(StructuredOutputs(choice=["abc", "abd"])).result(300)
    one, other = grammar.matcher(), grammar.matcher()
    before = allowed(one, VOCABULARY)
    ids = tokenizer.encode("abc", add_special_tokens=False)
    assert all(one.accept(token) for token in ids)
    assert one.finished
    assert not other.finished
    end = tokenizer.stop_ids[0]
    assert one.accept(end)
    assert one.accept(end)
    assert not one.accept(ids[0])
    assert set(allowed(one, VOCABULARY)) == set(tokenizer.stop_ids)
    one.rollback(len(ids) + 2)
    assert allowed(one, VOCABULARY) == allowed(other, VOCABULARY) == before


def test_it_takes_what_the_preferred_backend_rejects(tokenizer, backends) -> None:
    ordered = sorted(backends.values(), key=lambda backend: -backend.preference)
    assert ordered[0] is backends["xgrammar"]
    grammar = GrammarCompiler(ordered, workers=1)(StructuredOutputs(json=EVEN)).result(300)
    assert takes(tokenizer, grammar, "6", VOCABULARY)
    assert not takes(tokenizer, grammar, "7", VOCABULARY)


@pytest.mark.parametrize("name", ["xgrammar", "llguidance"])
def test_text_that_is_determined_is_known_ahead(tokenizer, backends, name) -> None:
    grammar = backends[name].compile(StructuredOutputs(choice=["yes, always", "yes, never"]))
    matcher = grammar.matcher()
    before = allowed(matcher, VOCABULARY)
    forced = list(matcher.forced())
    assert "yes, always".startswith(tokenizer.decode(forced))
    assert len(tokenizer.decode(forced)) >= 4
    assert matcher.count_allowed([*forced, tokenizer.stop_ids[0]]) == len(forced)
    assert allowed(matcher, VOCABULARY) == before
    for token in tokenizer.encode("yes, never", add_special_tokens=False):
        assert matcher.accept(token)
    assert matcher.accept(tokenizer.stop_ids[0])
    assert list(matcher.forced()) == []
