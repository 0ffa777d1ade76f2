"""parse(): what the server does with a model's output."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modulm.contracts.parser import ParseContext, ToolEnd
from modulm.errors import ConfigError, PluginNotFound, RequestError
from modulm.testing.checkpoints import make_tiny
from modulm_parsing import Cursor, merge, message_parser, parse
from modulm_tokenizers.tokenizer import load_tokenizer, wrap_tokenizer

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def test_reasoning_then_content_then_calls():
    text = f"<think>\nLet me see.\n</think>\n\nSure:\n{CALL}\n{CALL}"
    message = parse(text, tool_parser="hermes", reasoning_parser="qwen3", tools=TOOLS)
    assert message.reasoning == "Let me see."
    assert message.content == "Sure:"
    assert [(c.name, c.arguments, c.complete) for c in message.tool_calls] == [
        ("f", '{"x": 1}', True)
    ] * 2
    assert len({call.id for call in message.tool_calls}) == 2


def test_tokenizers_of_transformers_are_taken_too(tmp_path):
    from transformers import AutoTokenizer

    path = make_tiny(tmp_path / "model")
    theirs, ours = AutoTokenizer.from_pretrained(path), load_tokenizer(path)
    options = {"tool_parser": "hermes", "reasoning_parser": "qwen3", "tools": TOOLS}
    text = f"<think>Hm.</think>{CALL}"
    (call,) = parse(text, tokenizer=theirs, **options).tool_calls
    assert [call.name] == [c.name for c in parse(text, tokenizer=ours, **options).tool_calls]
    assert wrap_tokenizer(theirs) is wrap_tokenizer(theirs)
    assert wrap_tokenizer(theirs).added_tokens == ours.added_tokens
    with pytest.raises(ConfigError, match="tokenizer: must be a tokenizer of .*, not str"):
        parse(text, tokenizer="hermes")


def test_a_call_ends_the_reasoning():
    message = parse(f"<think>Hm. {CALL}", tool_parser="hermes", reasoning_parser="qwen3")
    assert message.reasoning == "Hm."
    assert message.tool_calls[0].complete


def test_without_tools_a_call_is_text():
    assert parse(CALL, tool_parser="hermes", tools=[]).content == CALL
    assert parse(CALL, tool_parser="hermes", tools=TOOLS, tool_choice="none").content == CALL


def test_a_cut_call_is_not_complete():
    message = parse(CALL[:40], tool_parser="hermes", tools=TOOLS)
    (call,) = message.tool_calls
    assert not call.complete
    assert CALL[:40].endswith(call.arguments)


@pytest.mark.parametrize(
    "arguments",
    ['"{\\"x\\": 1}"', '{"x": 1}', "null", "{\"x\": \"__import__('os').system('true')\"}"],
)
def test_arguments_come_out_as_an_object(arguments):
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    (call,) = parse(text, tool_parser="hermes").tool_calls
    assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("body", ["[1]", '{"name": 3}', "{'name': 'f'}", "hello", "{}"])
def test_what_is_no_call_stays_text(body):
    text = f"<tool_call>{body}</tool_call>"
    message = parse(text, tool_parser="hermes")
    assert message.content == text
    assert message.tool_calls == ()


def test_forced_choices_are_read_as_json():
    tool_choice_ = {"type": "function", "function": {"name": "f"}}
    (call,) = parse('{"x": [1, 2]}', tools=TOOLS, tool_choice=tool_choice_).tool_calls
    assert (call.name, call.arguments, call.complete) == ("f", '{"x": [1, 2]}', True)
    text = '[{"name": "f", "parameters": {"x": 1}}, {"name": "f", "parameters": {}}]'
    calls = parse(text, tools=TOOLS, tool_choice="required").tool_calls
    assert [json.loads(call.arguments) for call in calls] == [{"x": 1}, {}]
    laid_out = '[{\n "name": "f",\n "parameters": {"x": 1}\n}]'
    (call,) = parse(laid_out, tools=TOOLS, tool_choice="required").tool_calls
    assert call.arguments == '{"x": 1}'
    with pytest.raises(RequestError) as error:
        parse("{}", tools=TOOLS, tool_choice={"type": "function"})
    assert error.value.param == "tool_choice"


def test_an_unknown_parser_is_named():
    with pytest.raises(PluginNotFound, match="hermess"):
        parse("x", tool_parser="hermess")


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<think>", "</think>", "<tool", "`", '"', "{", "}", "\n", " ",
     '{"name": "f", "arguments": {}}', '{"name": "f"', ', "arguments": {"a": "}"}', "text", "é"]
)  # fmt: skip


PROMPTS = st.sampled_from(["assistant\n", "<think>\n", None])
PARSERS = st.sampled_from([("hermes", "qwen3"), ("hermes", None), (None, "qwen3")])
CHOICES = st.sampled_from(["auto", "required", {"function": {"name": "f"}}])


def events(chunks, context, parsers=("hermes", "qwen3")):
    parser = message_parser(context, *parsers)
    parsed = [event for chunk in chunks for event in parser.feed(chunk)]
    return merge(parsed + parser.finish())


@settings(max_examples=100, deadline=None)
@given(st.lists(PIECES, max_size=12), PROMPTS, PARSERS, CHOICES, st.data())
def test_every_way_of_cutting_gives_the_same(parts, prompt, parsers, choice, data):
    text = "".join(parts)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    context = ParseContext(prompt_tail=prompt, tool_choice=choice)
    whole = events([text], context, parsers)
    assert events(pieces, context, parsers) == whole
    assert events(list(text), context, parsers) == whole


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{<tool_call><tool_call>{"name": "f", "arguments": {}}',
        '<tool_call>{  x<tool_call>{"name": "f", "arguments": {}}',
        '<tool_call>{"name": 3, "a": "<tool_call>"}{"name": "f", "arguments": {}}',
        '<tool_call>{`<tool_call>`{"name": "f", "arguments": {}}',
    ],
)
def test_where_an_object_breaks_does_not_depend_on_the_cut(text):
    context = ParseContext(prompt_tail="assistant\n")
    whole = events([text], context)
    for cut_at in range(len(text)):
        assert events([text[:cut_at], text[cut_at:]], context) == whole
    assert events(list(text), context) == whole


def test_a_call_behind_a_broken_object_is_read():
    text = '<tool_call>{<tool_call>{"name": "f", "arguments": {}}'
    message = parse(text, tool_parser="hermes")
    assert message.content == "<tool_call>{"
    assert [call.name for call in message.tool_calls] == ["f"]


@given(st.text("ab<", max_size=12), st.data())
def test_markers_that_begin_or_hold_one_another_are_found_in_any_pieces(text, data):
    markers = ("<ab", "<", "ab<b", "b<")
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))

    def tokens_of(pieces):
        cursor, seen = Cursor(), []
        for piece in pieces:
            cursor.push(piece)
            while (step := cursor.until(markers))[1]:
                seen += step
            seen.append(step[0])
        while (step := cursor.until(markers, final=True))[1]:
            seen += step
        parts = "\0".join([*seen, step[0]]).split("\0")
        return [part for part in parts if part in markers], "".join(parts)

    cut = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert tokens_of(cut) == tokens_of([text])


HOSTILE = (
    "[A(A=" * 10_000,
    "<tool_call>" * 6_000,
    '<tool_call>{"a":' * 4_000,
    "<" * 60_000,
    "<tool_call>{" * 5_000,
    "<think>" * 9_000,
    '{"a":' * 12_000,
)


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:12])
def test_hostile_repetition_ends_and_invents_no_call(text):
    message = parse("", tool_parser="hermes", reasoning_parser="qwen3", prompt="", chunks=text)
    assert not any(isinstance(event, ToolEnd) for event in message.deltas)
    assert message.content == text or message.reasoning
