"""`modulm render`: the prompt as the server makes it, and its tokens one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from modulm.testing.checkpoints import make_tokenizer
from modulm_chat import encode_chat
from modulm_command_render.command import command
from modulm_tokenizers.tokenizer import load_tokenizer

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hé 你!"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_tokenizer(tmp_path_factory.mktemp("model"))
    (made / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return made


def run(*arguments: object, **more: Any) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments], **more)


def test_the_prompt_of_messages(folder: Path) -> None:
    ids, text = encode_chat(MESSAGES, tokenizer=load_tokenizer(folder))
    written = run(folder, "-m", "Hé 你!", "--system-prompt", "Be kind.")
    assert written.output == f"{text}\n"
    read = run(folder, "-i", "-", "--json", input=json.dumps(MESSAGES))
    shown = json.loads(read.output)
    assert (shown["prompt"], shown["token_ids"]) == (text, ids)
    assert "".join(shown["tokens"]) == text
    assert len(shown["tokens"]) == len(ids)


def test_tokens_have_a_line_each(folder: Path) -> None:
    ids, text = encode_chat(MESSAGES, tokenizer=load_tokenizer(folder))
    lines = run(
        folder, "-m", "Hé 你!", "--system-prompt", "Be kind.", "--tokens"
    ).output.splitlines()
    parts = [line.split(maxsplit=2) for line in lines]
    assert [int(part[0]) for part in parts] == list(range(len(ids)))
    assert [int(part[1]) for part in parts] == ids
    assert "".join(json.loads(part[2]) for part in parts) == text


def test_a_request_is_rendered_as_the_server_would(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder)
    body = {
        "messages": [*MESSAGES, {"role": "assistant", "content": "Go"}],
        "tools": [TOOL], "continue_final_message": True, "model": "M", "temperature": 1,
    }  # fmt: skip
    file = tmp_path / "request.json"
    file.write_text(json.dumps(body))
    options: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    _, expected = encode_chat(body["messages"], tokenizer=tokenizer, tools=[TOOL], **options)
    assert run(folder, "-i", file).output == f"{expected}\n"
    (tmp_path / "tools.json").write_text(json.dumps([TOOL]))
    shown = run(folder, "-m", "a", "--tools", tmp_path / "tools.json", "--no-generation-prompt")
    _, expected = encode_chat(
        [{"role": "user", "content": "a"}],
        tokenizer=tokenizer, tools=[TOOL], add_generation_prompt=False,
    )  # fmt: skip
    assert shown.output == f"{expected}\n"


def test_flags_and_variables_reach_the_template(folder: Path) -> None:
    template = "{{ a }}{{ b }}{% for d in documents %}{{ d.t }}{% endfor %}"
    shown = run(
        folder, "-m", "x", "--chat-template", template, "--documents", '[{"t": "D"}]',
        "--default-chat-template-kwargs", '{"a": 1, "b": 2}', "--chat-template-kwargs", '{"b": 3}',
    )  # fmt: skip
    assert shown.output == "13D\n"
    assert "[INST] x[/INST]" in run(folder, "-m", "x", "--chat-template", "mistral").output


def test_a_prompt_without_messages(folder: Path) -> None:
    shown = json.loads(run(folder, "-p", "a<|im_end|>", "--json").output)
    assert shown["token_ids"] == load_tokenizer(folder).encode("a<|im_end|>")
    assert shown["prompt"] == "a<|im_end|>"
    assert json.loads(run(folder, "-i", "-", "--json", input='{"prompt": "b"}').output) == (
        json.loads(run(folder, "-p", "b", "--json").output)
    )


@pytest.mark.parametrize(
    ("arguments", "given", "word"),
    [
        ((), "", "not valid JSON"),
        ((), "[]", "no messages"),
        (("-p", "a", "-m", "b"), None, "combined with messages"),
        (("-m", "a"), None, None),
        (("-i", "-"), '{"messages": 3}', "a list of messages"),
        (("-m", "a", "--tools", "/no/such"), None, "cannot be read"),
        (("-m", "a", "--chat-template", "hermess"), None, "hermes"),
        (("-m", "a", "--tokenizer-mode", "telepathy"), None, "telepathy"),
        (("-m", "a", "--skip-tokenizer-init"), None, "skip-tokenizer-init"),
        (("-m", "a", "--chat-template-kwargs", '{"messages": 1}'), None, "not a variable"),
    ],
)
def test_what_is_wrong_is_said(
    folder: Path, arguments: tuple[str, ...], given: str | None, word: str | None
) -> None:
    result = run(folder, *arguments, input=given)
    if word is None:
        assert result.exit_code == 0
        return
    assert result.exit_code != 0
    assert word in result.output + str(result.exception)
