"""What single families do beyond the contract."""

import json

import pytest

from modulm.contracts.parser import ParseContext, ToolArguments, ToolStart
from modulm.plugins import manager
from modulm_parsing import message_parser, parse
from modulm_parsing.examples import TOOLS, WEATHER

TOOL_PARSERS = [declaration.name for declaration in manager.current().names("tool_parsers")]
#: A call is told when it is whole: its text is parsed at once, or parameters may be missing.
WHOLE = {"hf", "minicpm5"}


@pytest.mark.parametrize("name", sorted(set(TOOL_PARSERS) - WHOLE))
def test_arguments_are_handed_on_as_they_come(name):
    parser = manager.current().load("tool_parsers", name)
    (example, *_) = (e for e in parser.examples if e.calls == WEATHER and "Oslo" in e.text)
    before = example.text.partition("Oslo")[0] + "x" * 200
    reader = parser(ParseContext(tools=TOOLS))
    events = [event for letter in before for event in reader.feed(letter)]
    arguments = "".join(event.delta for event in events if isinstance(event, ToolArguments))
    assert arguments.endswith("x" * 150)


def calls(text, tool, reasoning=None, **more):
    return parse(text, tool_parser=tool, reasoning_parser=reasoning, **more).tool_calls


def test_mistral_makes_identifiers_of_nine_letters():
    reader = message_parser(ParseContext(prompt_tail="a"), "mistral", None)
    starts = [e for e in reader.feed("[TOOL_CALLS]f{}[TOOL_CALLS]g{}") if isinstance(e, ToolStart)]
    assert len({e.id for e in starts}) == 2
    assert all(len(e.id) == 9 and e.id.isalnum() for e in starts)
    (other,) = calls("[TOOL_CALLS]f{}", "mistral", prompt="b")
    assert other.id not in {e.id for e in starts}


def test_thoughts_may_stand_between_calls():
    call = "<tool_call>f</tool_call>"
    message = parse(f"a</think>{call}<think>b</think>{call}c <think> d", tool_parser="glm47",
                    reasoning_parser="glm47")  # fmt: skip
    assert (message.reasoning, len(message.tool_calls)) == ("ab", 2)
    assert message.content == "c <think> d"


@pytest.mark.parametrize(
    ("tool", "reasoning", "call"),
    [
        ("hermes", "qwen3", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
        ("qwen3_coder", "step3p5", "<tool_call><function=f></function></tool_call>"),
        ("deepseek_v4", "deepseek_v4",
         '<｜DSML｜tool_calls><｜DSML｜invoke name="f"></｜DSML｜invoke></｜DSML｜tool_calls>'),
        ("kimi_k2", "kimi_k2", ("<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
         "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>")),
    ],
)  # fmt: skip
def test_a_call_ends_a_thought_and_a_late_tag_is_dropped(tool, reasoning, call):
    message = parse(f"Hm.{call}</think>Hi", tool_parser=tool, reasoning_parser=reasoning)
    assert (message.reasoning, message.content) == ("Hm.", "Hi")
    assert [c.complete for c in message.tool_calls] == [True]
    opener = call.partition(">")[0] + ">"
    message = parse(f"No {opener} yet.</think>Hi", tool_parser=tool, reasoning_parser=reasoning)
    assert (message.reasoning, message.content) == (f"No {opener} yet.", "Hi")


SCHEMA = {
    "a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": "number"},
    "d": {"type": "boolean"}, "e": {"type": ["string", "null"]}, "f": {"type": "object"},
    "g": {"anyOf": [{"type": "array"}, {"type": "null"}]}, "h": {"enum": ["x", 1]},
    "i": {"$ref": "#/$defs/size"},
}  # fmt: skip
TYPED = [{"type": "function", "function": {"name": "t", "parameters": {
    "type": "object", "properties": SCHEMA, "$defs": {"size": {"type": "integer"}}}}}]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("a", "12", "12"), ("a", "true", "true"), ("a", "None", "None"), ("a", "{}", "{}"),
        ("b", "12", 12), ("b", "12.0", 12), ("b", " 12 ", 12), ("b", "many", "many"),
        ("b", "9" * 30, int("9" * 30)), ("c", "1e3", 1000.0), ("c", "-0.5", -0.5), ("c", "3", 3),
        ("d", "true", True), ("d", "False", False), ("d", "yes", "yes"),
        ("e", "None", None), ("e", "null", None), ("e", "Oslo", "Oslo"), ("e", "12", "12"),
        ("f", '{"x": [1]}', {"x": [1]}), ("f", "{'x': True}", {"x": True}), ("f", "{x}", "{x}"),
        ("g", "[1, 2]", [1, 2]), ("g", "null", None), ("h", "x", "x"), ("h", "1", 1),
        ("i", "7", 7), ("j", "7", 7), ("j", "seven", "seven"), ("j", "[1", "[1"),
        ("f", "__import__('os').system('true')", "__import__('os').system('true')"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("tool", ["qwen3_coder", "glm45", "minimax_m2"])
def test_values_take_the_types_of_the_schema(tool, key, text, value):
    written = {
        "qwen3_coder": f"<tool_call><function=t><parameter={key}>{text}</parameter></function>",
        "glm45": f"<tool_call>t<arg_key>{key}</arg_key><arg_value>{text}</arg_value></tool_call>",
        "minimax_m2": f'<minimax:tool_call><invoke name="t"><parameter name="{key}">{text}'
        "</parameter></invoke></minimax:tool_call>",
    }[tool]
    for pieces in ([written], list(written)):
        (call,) = calls("", tool, tools=TYPED, pieces=pieces)
        assert json.loads(call.arguments) == {key: value}


@pytest.mark.parametrize("tail", ["</tool_call>", "\n</tool_call>\nDone.", "", "\n"])
def test_a_call_without_all_its_ends_is_read(tail):
    text = "<tool_call>\n<function=t>\n<parameter=a>\nx\n<parameter=b>\n1\n</function>"
    (call,) = calls(text + tail, "qwen3_coder", tools=TYPED)
    assert json.loads(call.arguments) == {"a": "x", "b": 1}
    assert call.complete


def test_harmony_without_the_token_that_ended_the_turn():
    text = '<|channel|>commentary to=functions.f<|message|>{"a": 1'
    assert [c.complete for c in calls(text, "openai")] == [False]
    assert [c.complete for c in calls(text + "}", "openai")] == [True]


def test_a_message_for_a_parser_of_another_kind_goes_on_as_text():
    message = parse("Hm.</think>[f(a=1)]", tool_parser="pythonic", reasoning_parser="deepseek_r1")
    assert (message.reasoning, message.content) == ("Hm.", None)
    assert [c.name for c in message.tool_calls] == ["f"]
    text = "<|channel|>analysis<|message|>Hm.<|end|><|channel|>final<|message|>[f(a=1)]"
    message = parse(text, tool_parser="pythonic", reasoning_parser="openai_gptoss")
    assert [c.name for c in message.tool_calls] == ["f"]
