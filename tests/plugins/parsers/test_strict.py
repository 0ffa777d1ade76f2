"""Calls that a grammar guarantees in a format's own spelling: what it lets through reads back."""

from __future__ import annotations

import json

import pytest
from attrs import evolve
from jsonschema import Draft202012Validator
from samples import parametrize_sample

from modulm.contracts.parser import ParseContext
from modulm.contracts.sampling import StructuredOutputs
from modulm.errors import RequestError
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tokenizer
from modulm.testing.grammars import allowed, wander
from modulm_parsing import MessageParser, assemble
from modulm_parsing.examples import TOOLS, WEATHER
from modulm_tokenizers.tokenizer import load_tokenizer

VOCABULARY = 512
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "name": {"enum": ["n"]}},
    "required": ["x", "name"],
    "additionalProperties": False,
}
#: A bounded schema with all types, so that a random text soon comes to an end.
PARAMETERS = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["celsius", "kelvin"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
        "exact": {"type": "boolean"},
        "code": {"type": "string", "minLength": 1, "maxLength": 4},
        "zone": {"type": "string", "pattern": "^[A-Z]{2}[0-9]$"},
        "note": {"anyOf": [{"type": "null"}, {"enum": ["a b", "c"]}]},
        "size": {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
        "place": {"$ref": "#/$defs/point"},
        "hours": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["days", "unit", "place"],
    "additionalProperties": False,
    "$defs": {"point": POINT},
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get_weather": PARAMETERS, "now": EMPTY}


def tool(name: str) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMAS[name]}}


BOTH = (tool("get_weather"), tool("now"))
NAMED = {"type": "function", "function": {"name": "get_weather"}}
PLUGINS = manager.current()
NAMES = [d.name for d in PLUGINS.names("tool_parsers")]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokens"), vocab=VOCABULARY))


@pytest.fixture(scope="module")
def backends(tokenizer):
    return {
        name: PLUGINS.load("grammars", name)(tokenizer, VOCABULARY, tokenizer.stop_ids)
        for name in ("xgrammar", "llguidance")
    }


def tag_of(name: str, context: ParseContext) -> StructuredOutputs | None:
    tag = PLUGINS.load("tool_parsers", name)(context).structural_tag()
    return None if tag is None else StructuredOutputs(structural_tag=json.dumps(tag))


def read(name: str, context: ParseContext, text: str):
    parser = MessageParser(PLUGINS.load("tool_parsers", name)(context), None)
    return assemble([*parser.feed(text), *parser.finish()])


def takes(tokenizer, grammar, text: str, vocabulary: int) -> bool:
    """Whether the masks let a model say the text and stop."""
    matcher = grammar.matcher()
    for token in [*tokenizer.encode(text, add_special_tokens=False), tokenizer.stop_ids[0]]:
        if token not in allowed(matcher, vocabulary):
            return False
        assert matcher.accept(token)
    return True


def compiled(backend, constraint: StructuredOutputs):
    reason = backend.rejects(constraint)
    assert reason is None, reason
    return backend.compile(constraint)


@parametrize_sample("name", NAMES, every=9)
@parametrize_sample("backend", ["xgrammar", "llguidance"], every=2)
def test_what_the_grammar_lets_through_reads_back(name, backend, backends, tokenizer) -> None:
    for choice, most in (("required", 1), ("required", 2), (NAMED, None)):
        context = ParseContext(
            tools=BOTH, tool_choice=choice, max_calls=most, grammar_enforced=True
        )
        constraint = tag_of(name, context)
        assert constraint is not None
        grammar = compiled(backends[backend], constraint)
        for seed in range(3):
            text = wander(tokenizer, grammar, seed, VOCABULARY, most=2000)
            assert text is not None, "a bounded schema comes to an end"
            message = read(name, context, text)
            assert message.content is None, (text, message.content)
            assert 1 <= len(message.tool_calls) <= (most or 1), text
            for call in message.tool_calls:
                assert call.complete, text
                assert choice != NAMED or call.name == "get_weather"
                Draft202012Validator(SCHEMAS[call.name]).validate(json.loads(call.arguments))


@parametrize_sample("name", NAMES, every=9)
@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
def test_the_models_own_spelling_is_let_through(name, backend, backends, tokenizer) -> None:
    example = PLUGINS.load("tool_parsers", name).examples[0]
    context = ParseContext(tools=TOOLS, tool_choice="required", grammar_enforced=True)
    constraint = tag_of(name, context)
    assert constraint is not None
    grammar = compiled(backends[backend], constraint)
    other = example.text.replace("get_weather", "get_wind")
    assert takes(tokenizer, grammar, example.text, VOCABULARY), example.text
    assert not takes(tokenizer, grammar, "Oslo is cold.", VOCABULARY)
    assert not takes(tokenizer, grammar, other, VOCABULARY)
    message = read(name, context, example.text)
    assert [(c.name, json.loads(c.arguments)) for c in message.tool_calls] == list(WEATHER)
    free = tag_of(name, evolve(context, tool_choice="auto"))
    assert free is not None
    auto = compiled(backends[backend], free)
    assert takes(tokenizer, auto, example.text, VOCABULARY)
    assert takes(tokenizer, auto, "Oslo is cold.", VOCABULARY)
    assert not takes(tokenizer, auto, other, VOCABULARY)


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
@pytest.mark.parametrize("name", ["muse", "muse_glimmer", "beam"])
def test_messages_before_calls(name, backend, backends, tokenizer) -> None:
    """Messages have recipients, whether they are shown or calls: others are nobody's."""
    example = PLUGINS.load("tool_parsers", name).examples[0].text
    if name == "beam":
        thought, visible, wrong = (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
            "<|channel|>final<|message|>Hi.", " to=stranger<|message|>",
        )  # fmt: skip
    else:
        thought, visible, wrong = (
            " to=self<|message|>Hm.<|eom|><|start|>assistant", " to=user<|message|>Hi.",
            " to=stranger<|message|>Hi.",
        )  # fmt: skip
    context = ParseContext(tools=TOOLS, tool_choice="auto", grammar_enforced=True)
    auto = compiled(backends[backend], tag_of(name, context))
    for text in (visible, thought + visible, thought + example, thought + thought + example):
        assert takes(tokenizer, auto, text, VOCABULARY), text
    for text in (wrong, thought + wrong, thought + example.replace("weather", "wind")):
        assert not takes(tokenizer, auto, text, VOCABULARY), text
    message = read(name, context, thought + example)
    assert [call.name for call in message.tool_calls] == ["get_weather"]


def described(tokenizer, **tool_calls):
    """A tokenizer whose checkpoint says how its messages are read."""
    fields = {
        "reasoning_content": {"open": "<hm>", "close": "</hm>"},
        "tool_calls": {"repeats": True, **tool_calls},
        "content": {},
    }
    template = {"start_anchor": "<|im_start|>assistant\n", "fields": fields}
    return evolve(tokenizer, response_template=template)


def test_a_checkpoint_that_describes_its_calls(tokenizer, backends) -> None:
    """JSON between two tags is held to the checkpoint's own tags."""
    tokenizer_described = described(
        tokenizer, open_pattern=r"\s*<\|do\|>", close="<|done|>", content="json",
        transform={"type": "function", "function": "{content}"},
    )  # fmt: skip
    call = '<|do|>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n<|done|>'
    context = ParseContext(
        tools=TOOLS, tool_choice="required", tokenizer=tokenizer_described, grammar_enforced=True
    )
    for backend in backends.values():
        assert takes(tokenizer, compiled(backend, tag_of("hf", context)), call, VOCABULARY)
        assert not takes(tokenizer, compiled(backend, tag_of("hf", context)), "No.", VOCABULARY)
    thinking = PLUGINS.load("reasoning_parsers", "hf")(context)
    parser = MessageParser(PLUGINS.load("tool_parsers", "hf")(context), thinking)
    message = assemble([*parser.feed(f"<hm>So.</hm>{call}"), *parser.finish()])
    assert (message.reasoning, message.content) == ("So.", None)
    assert [(c.name, json.loads(c.arguments)) for c in message.tool_calls] == list(WEATHER)


@pytest.mark.parametrize(
    "calls",
    [
        {"open": "<do>", "close": "</do>", "content": "kv-lines"},
        {"open_pattern": "<do (?P<name>[a-z]+)>", "close": "</do>", "content": "json",
         "transform": {"function": {"name": "{name}", "arguments": "{content}"}}},
        {"open": ["<do>", "<make>"], "close": "</do>", "content": "json"},
    ],
)  # fmt: skip
def test_calls_that_cannot_be_turned_round_are_not_held(calls, tokenizer) -> None:
    tokenizer_described = described(tokenizer, **calls)
    for choice in ("required", "auto"):
        assert (
            tag_of(
                "hf", ParseContext(tools=TOOLS, tool_choice=choice, tokenizer=tokenizer_described)
            )
            is None
        )


def test_what_cannot_be_written_is_named() -> None:
    """A pattern that may match a marker, or members that depend on each other."""
    pattern = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^.*$"}}}
    either = {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    for schema, message in ((pattern, "pattern of 'a'"), (either, "'anyOf'")):
        function = {"name": "f", "parameters": schema}
        context = ParseContext(tools=({"function": function},), tool_choice="required")
        with pytest.raises(RequestError, match=message) as caught:
            tag_of("qwen3_coder", context)
        assert caught.value.param == "tools"
        assert tag_of("hermes", context) is not None, "JSON goes to the backend as it is"


def test_values_are_of_their_types(tokenizer, backends) -> None:
    """Text may stand before a call; a value is what the schema says."""
    number = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    function = {"name": "f", "parameters": number}
    context = ParseContext(
        tools=({"function": function},), tool_choice="auto", grammar_enforced=True
    )
    for name, right, wrong in (
        ("qwen3_coder", "\n3\n", "\nthree\n"),
        ("mimo", "3", "three"),
    ):
        call = (
            "Hm.<tool_call>\n<function=f>\n<parameter=n>{}</parameter>\n</function>\n</tool_call>"
        )
        for backend in backends.values():
            grammar = compiled(backend, tag_of(name, context))
            assert takes(tokenizer, grammar, call.format(right), VOCABULARY)
            assert not takes(tokenizer, grammar, call.format(wrong), VOCABULARY)
            assert takes(tokenizer, grammar, "No call.", VOCABULARY)
