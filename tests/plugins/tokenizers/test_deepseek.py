"""DeepSeek's encodings of messages: the prompts of V3.2, V4 and V4.1, chosen by the model type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modulm.contracts.parser import ParseContext
from modulm.errors import RequestError
from modulm.testing import kit
from modulm.testing.checkpoints import make_tokenizer
from modulm_chat import render
from modulm_parser_deepseek.encodings import (
    DeepseekV4Tokenizer,
    DeepseekV32Tokenizer,
    DeepseekV41Tokenizer,
)
from modulm_parsing import parse
from modulm_tokenizers.tokenizer import load_tokenizer

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
LOADERS = (DeepseekV32Tokenizer, DeepseekV4Tokenizer, DeepseekV41Tokenizer)
PARSERS = {
    "deepseek_v32": ("deepseek_v32", "deepseek_v3"),
    "deepseek_v4": ("deepseek_v4", "deepseek_v4"),
    "deepseek_v41": ("deepseek_v41", "deepseek_v41"),
}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {}}}},
}
ARGUMENTS = {"x": 3, "s": "a <b>", "l": [1, "é"], "n": None}


def call(identity: str = "1", arguments: Any = None) -> dict[str, Any]:
    encoded = json.dumps({"x": 3} if arguments is None else arguments)
    return {"id": identity, "type": "function", "function": {"name": "f", "arguments": encoded}}


def tool_call_message(
    *calls: dict[str, Any], content: str = "", reasoning: str = "R1"
) -> dict[str, Any]:
    return {
        "role": "assistant", "content": content, "reasoning": reasoning, "tool_calls": list(calls),
    }  # fmt: skip


def result(text: str, identity: str = "1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": identity, "content": text}


TALK = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U1"},
    tool_call_message(call()),
    result("r"),
    {"role": "assistant", "content": "A1", "reasoning": "R2"},
    {"role": "user", "content": "U2"},
]
#: The call in the words of V3.2; later ones differ in the group's name and in a space.
CALL = (
    '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="x" '
    'string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>' + EOS
)
CALLS = {
    "deepseek_v32": CALL,
    "deepseek_v4": CALL.replace("function_calls", "tool_calls"),
    "deepseek_v41": CALL.replace("function_calls", "calls").replace("DSML｜", "DSML｜ "),
}


def make(folder: Path, model_type: str) -> Path:
    """A checkpoint's tokenizer as DeepSeek ships it: without a chat template."""
    make_tokenizer(folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def prompt(folder: Path, messages: list[dict[str, Any]], mode: str = "auto", **options: Any) -> str:
    variables = {k: options.pop(k) for k in ("thinking", "reasoning_effort") if k in options}
    return render(messages, tokenizer=load_tokenizer(folder, mode), kwargs=variables, **options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make(tmp_path_factory.mktemp(name), name) for name in PARSERS}


@pytest.mark.parametrize("loader", LOADERS)
def test_contract(loader: Any) -> None:
    kit.check("tokenizers", loader)


def test_the_model_type_chooses(folders: dict[str, Path], tmp_path: Path) -> None:
    for name, folder in folders.items():
        assert load_tokenizer(folder).chat_template == load_tokenizer(folder, name).chat_template
        assert load_tokenizer(folder, "hf").chat_template is None
    checkpoint = make(tmp_path, "deepseek_v32")
    (checkpoint / "chat_template.jinja").write_text("its own")
    assert load_tokenizer(checkpoint).chat_template == "its own"
    assert "DSML" in str(load_tokenizer(checkpoint, "deepseek_v32").chat_template)
    (checkpoint / "chat_template.jinja").unlink()
    (checkpoint / "config.json").write_text('{"model_type": "llama"}')
    assert load_tokenizer(checkpoint).chat_template is None


def test_v32(folders: dict[str, Path]) -> None:
    folder, calls = folders["deepseek_v32"], CALLS["deepseek_v32"]
    results = "\n\n<function_results>\n<result>r</result>\n</function_results>\n\n"
    start = f"{BOS}S<｜User｜>U1<｜Assistant｜>"
    assert prompt(folder, TALK[:2]) == f"{start}</think>"
    assert prompt(folder, TALK[:2], thinking=True) == f"{start}<think>"
    assert (
        prompt(folder, TALK[:4], thinking=True)
        == f"{start}<think>R1</think>{calls}{results}<think>"
    )
    assert prompt(folder, TALK[:4]) == f"{start}</think>{calls}{results}</think>"
    ended = f"{start}</think>{calls}{results}</think>A1{EOS}<｜User｜>U2"
    assert prompt(folder, TALK, thinking=True) == f"{ended}<｜Assistant｜><think>"
    assert prompt(folder, TALK, add_generation_prompt=False) == ended
    rendered = prompt(folder, TALK[:2], tools=[TOOL])
    assert rendered.startswith(f"{BOS}S\n\n## Tools\n\n")
    assert json.dumps(TOOL["function"]) in rendered
    assert prompt(folder, TALK[1:2], tools=[TOOL]).startswith(f"{BOS}\n\n## Tools\n\n")
    two = [TALK[1], tool_call_message(call(), call("2")), result("a"), result("b", "2")]
    assert "<result>a</result>\n<result>b</result>\n</function_results>" in prompt(folder, two)
    with pytest.raises(RequestError, match="follows the call"):
        prompt(folder, [result("r")])


def test_v4(folders: dict[str, Path]) -> None:
    folder, calls = folders["deepseek_v4"], CALLS["deepseek_v4"]
    start, results = f"{BOS}S<｜User｜>U1<｜Assistant｜>", "<｜User｜><tool_result>r</tool_result>"
    assert prompt(folder, TALK[:2]) == f"{start}<think>"
    assert prompt(folder, TALK[:2], thinking=False) == f"{start}</think>"
    assert prompt(folder, TALK, thinking=False) == (
        f"{start}</think>{calls}{results}<｜Assistant｜></think>A1{EOS}<｜User｜>U2<｜Assistant｜></think>"
    )
    # Without tools, thoughts before the last question are dropped; with tools they stay.
    assert prompt(folder, TALK) == (
        f"{start}</think>{calls}{results}<｜Assistant｜></think>A1{EOS}<｜User｜>U2<｜Assistant｜><think>"
    )
    rendered = prompt(folder, TALK, tools=[TOOL])
    assert rendered.endswith(
        f"<｜User｜>U1<｜Assistant｜><think>R1</think>{calls}{results}<｜Assistant｜><think>R2</think>A1"
        f"{EOS}<｜User｜>U2<｜Assistant｜><think>"
    )
    effort = prompt(folder, TALK[:2], reasoning_effort="max")
    assert effort.endswith("\n\nS<｜User｜>U1<｜Assistant｜><think>")
    assert effort != prompt(folder, TALK[:2], reasoning_effort="high") == f"{start}<think>"
    assert prompt(folder, TALK[:2], reasoning_effort="max", thinking=False) == f"{start}</think>"
    # Results of one turn come in the order of the calls, questions stay in their places.
    turned = [
        TALK[1], tool_call_message(call("1"), call("2")), result("b", "2"),
        {"role": "user", "content": "And?"},
        result("a", "1"),
    ]  # fmt: skip
    assert prompt(folder, turned, thinking=False).endswith(
        "<｜User｜><tool_result>a</tool_result>\n\nAnd?\n\n<tool_result>b</tool_result>"
        "<｜Assistant｜></think>"
    )


def test_v41(folders: dict[str, Path]) -> None:
    folder, calls = folders["deepseek_v41"], CALLS["deepseek_v41"]
    system = "<｜System｜>"
    assert prompt(folder, TALK[:2], thinking=False) == (
        f"{BOS}{system}S<｜User｜>U1<｜Assistant｜></think>"
    )
    assert prompt(folder, TALK[1:2], thinking=False) == f"{BOS}<｜User｜>U1<｜Assistant｜></think>"
    assert prompt(folder, TALK[:2]) == (
        f"{BOS}{system}Reasoning Effort: 75 of 100\n\nS<｜User｜>U1<｜Assistant｜><think>"
    )
    assert f"{system}Reasoning Effort: 12 " in prompt(folder, TALK[1:2], reasoning_effort=12)
    assert f"R1</think>{calls}" in prompt(folder, TALK[:4], tools=[TOOL])
    late = [*TALK[:2], {"role": "assistant", "content": "A"}, {"role": "system", "content": "Now."}]
    assert prompt(folder, late, thinking=False).endswith(
        f"A{EOS}{system}Now.<｜Assistant｜></think>"
    )


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("thinking", [True, False])
def test_what_the_encoding_writes_the_parsers_read(
    folders: dict[str, Path], name: str, thinking: bool
) -> None:
    tools = [TOOL]
    conversation = [
        TALK[1],
        tool_call_message(call("1", ARGUMENTS), call("2", {}), content="Well."),
    ]
    options: dict[str, Any] = {"tools": tools, "thinking": thinking}
    rendered = prompt(folders[name], conversation[:1], **options)
    whole = prompt(folders[name], conversation, add_generation_prompt=False, **options)
    text = whole.removeprefix(rendered).removesuffix(EOS)
    assert whole == rendered + text + EOS
    tool_parser, reasoning_parser = PARSERS[name]
    message = parse(
        text,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        tools=tools,
        chat_template_kwargs={"thinking": thinking},
        prompt=rendered,
    )
    read = [(one.name, json.loads(one.arguments)) for one in message.tool_calls]
    assert read == [("f", ARGUMENTS), ("f", {})]
    assert message.reasoning == ("R1" if thinking else None) or (
        not thinking and not message.reasoning
    )
    assert (message.content or "").strip() == "Well."
    assert ParseContext().prompt_tail is None


def test_a_checkpoints_own_words_are_read_and_not_run(tmp_path: Path) -> None:
    folder = make(tmp_path / "v4", "deepseek_v4")
    (folder / "encoding").mkdir()
    (folder / "encoding/encoding_x.py").write_text(
        'import sys\nraise SystemExit("it was run")\n'
        'TOOLS_TEMPLATE = """# Own {{x}} of <{dsml_token}tool_calls>\n{tool_schemas}\nEnd."""\n'
        'REASONING_EFFORT_MAX: str = ("Think " "hard.\\n\\n")\nOTHER = sys.argv\n'
    )
    text = prompt(folder, TALK[:2], tools=[TOOL], reasoning_effort="max")
    tool = json.dumps(TOOL["function"])
    assert text == (
        f"{BOS}Think hard.\n\nS\n\n# Own {{{{x}}}} of <｜DSML｜tool_calls>\n{tool}\nEnd."
        "<｜User｜>U1<｜Assistant｜><think>"
    )
    (folder / "encoding/encoding_x.py").write_text("def broken(:")
    assert "## Tools" in prompt(folder, TALK[:2], tools=[TOOL])
    last = make(tmp_path / "v41", "deepseek_v41")
    (last / "encoding").mkdir()
    (last / "encoding/encoding.py").write_text(
        'REASONING_EFFORT_TEMPLATE = ("Effort {budget}.\\n\\n")\n'
        'REASONING_EFFORT_MAPPINGS: dict = {"low": 1, "high": 2}\n'
        'DEFAULT_REASONING_EFFORT = "low"\n'
    )
    assert prompt(last, TALK[1:2]).startswith(f"{BOS}<｜System｜>Effort 1.\n\n<｜User｜>")
    assert "Effort 2.\n\n" in prompt(last, TALK[1:2], reasoning_effort="high")
    assert "Effort 7.\n\n" in prompt(last, TALK[1:2], reasoning_effort=7)
