"""The xgrammar backend: what it lets through is valid, what is valid it lets through."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modulm.config import EngineConfig
from modulm.contracts.sampling import StructuredOutputs
from modulm.errors import RequestError
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny
from modulm.testing.grammars import allowed, takes, wander
from modulm_structured_output.compiler import GrammarCompiler, open_compiler
from modulm_tokenizers.tokenizer import load_tokenizer

VOCABULARY = 520  # wider than the tokenizer, as padded checkpoints are


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(make_tiny(tmp_path_factory.mktemp("xgrammar") / "tiny"))


@pytest.fixture(scope="module")
def backend(tokenizer):
    driver = manager.current().load("grammars", "xgrammar")
    return driver(tokenizer, VOCABULARY, tokenizer.stop_ids)


@pytest.fixture(scope="module")
def compiler(backend):
    return GrammarCompiler([backend], seconds=300.0, workers=1)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
}
CASES = [
    (StructuredOutputs(json=PERSON),
     ['{"name": "Al", "age": 3}', '{"name":"","age":99,"tags":["a"]}'],
     ['{"name": "Al"}', '{"name": "Al", "age": 3.5}', '{"name": "Al", "age": 3} ', "[]", ""]),
    (StructuredOutputs(json=json.dumps(PERSON)), ['{"name": "é€", "age": 3}'], ["{}"]),
    (StructuredOutputs(json_object=True), ['{\n' + 21 * " " + "}"], ['{\n' + 22 * " " + "}"]),
    (StructuredOutputs(json=PERSON, disable_any_whitespace=True),
     ['{"name": "Al", "age": 3}'], ['{"name":  "Al", "age": 3}']),
    (StructuredOutputs(json_object=True), ['{"a": [1, {"b": null}]}', "{}"], ["[]", "1", '{"a":}']),
    (StructuredOutputs(regex=r"\d{3}-[a-z]+"), ["123-abc"], ["12-abc", "123-", "x123-abc"]),
    (StructuredOutputs(choice=["yes", "no", 'a "quoted"\n\\', "yes"]),
     ["yes", "no", 'a "quoted"\n\\'], ["y", "yesno", "maybe", "a quoted"]),
    (StructuredOutputs(grammar='root ::= "a" root | "b"'), ["b", "aab"], ["a", "ba"]),
    (StructuredOutputs(structural_tag=json.dumps({
        "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
        "triggers": ["<f>"]})),
     ["text <f>12</f> more", "no tag"], ["<f>x</f>"]),
    (StructuredOutputs(structural_tag=json.dumps({"type": "structural_tag", "format": {
        "type": "const_string", "value": "ab"}})), ["ab"], ["a"]),
]  # fmt: skip


@pytest.mark.parametrize(("constraint", "right", "wrong"), CASES, ids=lambda x: repr(x)[:50])
def test_right_texts_pass_and_wrong_ones_do_not(
    tokenizer, compiler, constraint, right, wrong
) -> None:
    grammar = compiler(constraint).result(300)
    assert [takes(tokenizer, grammar, text, VOCABULARY) for text in right] == [True] * len(right)
    assert [takes(tokenizer, grammar, text, VOCABULARY) for text in wrong] == [False] * len(wrong)


def test_random_walks_are_valid(tokenizer, compiler) -> None:
    grammar = compiler(StructuredOutputs(json=PERSON, disable_any_whitespace=True)).result(300)
    texts = [
        text
        for text in (wander(tokenizer, grammar, seed, VOCABULARY) for seed in range(20))
        if text
    ]
    assert len(texts) > 5
    for text in texts:
        value = json.loads(text)
        assert set(value) <= set(PERSON["properties"])
        assert 0 <= value["age"] <= 99
        assert len(value["name"]) <= 4


def test_special_tokens_are_no_text(tokenizer, compiler) -> None:
    grammar = compiler(StructuredOutputs(regex=".*")).result(300)
    specials = tokenizer.special_ids - set(tokenizer.stop_ids)
    assert specials
    assert not specials & set(allowed(grammar.matcher(), VOCABULARY))
    assert max(allowed(grammar.matcher(), VOCABULARY)) < len(tokenizer)


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


def test_a_complete_text_that_may_go_on_is_not_finished(tokenizer, compiler) -> None:
    matcher = compiler(StructuredOutputs(regex="a+")).result(300).matcher()
    matcher.accept(tokenizer.encode("a", add_special_tokens=False)[0])
    assert not matcher.finished


def nested(depth: int):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


BAD = [
    *({"regex": r} for r in ("[", "(?<=a)b", r"(a)\1", "a{2,1}", r"\p{X}", "(.{1,1000}){1,1000}",
                             r"[^\s\S]",
                             "a{1,1000000}", "((a{1,100}){1,100}){1,100}", "(a{0,50}){0,50}b")),
    *({"json": s} for s in (
        {"type": "object", "properties": {"a": {"type": "strng"}}}, {"properties": []},
        {"type": "object", "required": "a", "uniqueItems": True}, {"enum": []}, {"type": 5},
        {"type": "string", "pattern": "["}, {"type": "string", "pattern": 5},
        {"type": ["string", {"x": 1}]}, {"$ref": "#/nowhere"}, nested(300), nested(2000),
        {"type": "string", "pattern": "(.{1,1000}){1,1000}"}, {"not": {"type": "string"}},
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}},
        {"allOf": [{"type": "object"}, {"type": "object"}]},
        {"$defs": {"p": {"type": "integer"}}, "$ref": "#/$defs/p", "minimum": 5},
        {"type": "array", "items": {"type": "array", "contains": {"const": 1}}},
        {"type": "string", "pattern": "a+", "maxLength": 3},
        {"$ref": "https://example.com/s.json"}, {"$ref": "#name"}, {"$dynamicRef": "#"},
        {"$ref": "#"}, {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"type": "object", "required": ["z"]}, {"minimum": 5}, {"disallow": "string"},
        {"type": "number", "multipleOf": 0.5}, {"type": "string", "format": "regex"},
        {"type": "string", "format": "date", "maxLength": 2}, {"type": "string", "enum": ["a", 1]},
        {"type": "string", "contentEncoding": "base64"}, {"enum": [1, 5], "minimum": 3},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"type": "string", "format": {}}, {"type": "integer", "minimum": 10**30},
    )),
    *({"grammar": g} for g in ('root ::= "', "root ::= undefined", 'a ::= "x"', "(" * 5000,
                               "root ::= root",
                               "root ::= " + "(" * 9000 + '"a"' + ")" * 9000)),
    *({"structural_tag": t} for t in ("{}", "{", "[]", '{"structures": [{}], "triggers": []}',
                                      '{"type": "structural_tag", "format": {"type": "zz"}}')),
    *({"structural_tag": json.dumps(tag)} for tag in (
        {"structures": [{"begin": "<", "schema": {"$ref": "x"}, "end": ">"}], "triggers": ["<"]},
        {"type": "structural_tag",
         "format": {"type": "json_schema", "json_schema": {"$ref": "#"}}},
    )),
    {"json": {}, "whitespace_pattern": " *"},
]  # fmt: skip


@pytest.mark.parametrize("fields", BAD, ids=range(len(BAD)))
def test_bad_constraints_are_refused(compiler, fields) -> None:
    with pytest.raises(RequestError) as caught:
        compiler(StructuredOutputs(**fields)).result(300)
    assert caught.value.param == "structured_outputs"
    assert ".cc:" not in caught.value.message
    assert len(caught.value.message) < 700


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"title": "T", "$defs": {"P": {"type": "integer"}}, "type": "object",
         "properties": {"not": {"$ref": "#/$defs/P", "description": "a property called not"},
                        "if": {"type": "string", "default": "x"}}, "required": ["not"]},
        {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "T"},
        {"type": "object", "properties": {"a": {"const": {"uniqueItems": True}}}},
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": False},
        {"oneOf": [{"type": "integer"}, {"type": "string"}, {"const": None}]},
        {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {
            name: {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}
            for name in ("a", "b")}},
        {"type": "object", "propertyNames": {"maxLength": 3}},
        {"type": ["string", "null"], "enum": ["a", None]},
    ],
    ids=lambda schema: repr(schema)[:50],
)  # fmt: skip
def test_schemas_that_only_look_unsupported(backend, compiler, schema) -> None:
    constraint = StructuredOutputs(json=json.dumps(schema))
    assert backend.rejects(constraint) is None
    compiler(constraint).result(300)


@pytest.mark.usefixtures("own_interpreters")
def test_the_process_that_tries_constraints_has_no_torch(tokenizer) -> None:
    config = EngineConfig.from_keywords(structured_outputs_config={"backend": "xgrammar"})
    plugins = manager.current()
    compiler = open_compiler(config, tokenizer, len(tokenizer), tokenizer.stop_ids, plugins)
    try:
        compiler.processes.check(StructuredOutputs(regex="(a|b){3,8}"))
        (process,) = compiler.processes._idle
        maps = Path(f"/proc/{process._process.pid}/maps").read_text()
    finally:
        compiler.processes.close()
    assert "libxgrammar" in maps
    assert "libtorch" not in maps


def test_a_schema_that_is_no_json_is_refused_with_the_reason(backend):
    reason = backend.rejects(StructuredOutputs(json='{"type": "object"'))
    assert reason is not None
    assert reason.startswith("the schema is not JSON: Expecting ',' delimiter")
