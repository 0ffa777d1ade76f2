"""`modulm serve` without flags: the chat template says how calls and thoughts are read.

The model has learnt one answer by heart: each token is followed by the next one of the answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tests.e2e.server.test_serve import Process, started
from tokenizers import AddedToken, Tokenizer

from modulm.cli.main import cli
from modulm.testing.checkpoints import make_tiny

TEMPLATES = Path(__file__).parents[2] / "plugins/parsers/templates"
#: The tokens of the answer, behind a prompt that opens the thought.
ANSWER = (
    "Rain, perhaps.", "</think>", "<minimax:tool_call>",
    '\n<invoke name="get_weather">\n<parameter name="city">Oslo</parameter>\n</invoke>\n',
    "</minimax:tool_call>",
)  # fmt: skip
WIDTH = 576
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
ASKED: Any = [{"role": "user", "content": "Weather?"}]


def write_answer(folder: Path) -> None:
    """A checkpoint that answers so, whatever is asked."""
    make_tiny(
        folder, vocab_size=WIDTH, hidden_size=WIDTH, num_hidden_layers=1, tie_word_embeddings=False
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ANSWER])
    tokenizer.save(str(folder / "tokenizer.json"))
    (before,) = set(tokenizer.encode("\n").ids)
    tokens = [before, *(tokenizer.token_to_id(text) for text in ANSWER), 2]
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        weight.fill_(1 if "norm" in name else 0)
    weights["model.embed_tokens.weight"].copy_(torch.eye(WIDTH))
    for token, following in pairwise(tokens):
        weights["lm_head.weight"][following, token] = 10
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    template = (TEMPLATES / "minimax_m2.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learnt") / "answer"
    write_answer(folder)
    return folder


@pytest.fixture(scope="module")
def process(folder: Path) -> Iterator[Process]:
    with started(folder) as process:
        yield process


def test_a_call_and_a_thought_without_a_flag(process: Process) -> None:
    with openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0) as client:
        options: Any = {"model": "M", "messages": ASKED, "tools": TOOLS, "temperature": 0}
        (choice,) = client.chat.completions.create(**options).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert choice.message.reasoning == "Rain, perhaps."  # type: ignore[attr-defined]
        (call,) = choice.message.tool_calls or ()
        assert isinstance(call, openai.types.chat.ChatCompletionMessageFunctionToolCall)
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == {"city": "Oslo"}
        thought, name, arguments = "", "", ""
        for chunk in client.chat.completions.create(**options, stream=True):
            delta: Any = chunk.choices[0].delta
            thought += getattr(delta, "reasoning", None) or ""
            assert not delta.content
            for piece in delta.tool_calls or ():
                name += piece.function.name or ""
                arguments += piece.function.arguments or ""
        assert (thought, name) == ("Rain, perhaps.", "get_weather")
        assert json.loads(arguments) == {"city": "Oslo"}


def test_the_banner_says_what_was_chosen(process: Process) -> None:
    banner = process.log.read_text()
    wanted = "tool parser: minimax_m2 (the chat template writes <minimax:tool_call>)"
    assert wanted in banner
    assert "reasoning parser: minimax_m2 (the chat template writes" in banner


def test_explain_says_why_and_what_else_there_was(folder: Path) -> None:
    result = CliRunner().invoke(cli, ["explain", str(folder), "--all"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert "tool parser: minimax_m2 (the chat template writes <minimax:tool_call>)" in lines
    assert any(line.startswith("  deepseek_r1") and "fits less" in line for line in lines)
    result = CliRunner().invoke(cli, ["explain", str(folder), "--tool-call-parser", "none"])
    assert "tool parser: nothing (disabled by flag)" in result.output.splitlines()
