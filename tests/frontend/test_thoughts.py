"""Thoughts of a chat are beside the text, with the parser that fits the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from modulm import LLM, SamplingParams
from modulm.cli.main import cli

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=60)


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM("demo", num_gpu_blocks_override=64) as llm:
        yield llm


def test_a_chat_answers_without_tags(demo: LLM) -> None:
    (output,) = demo.chat(QUESTION, GREEDY, use_tqdm=False)
    assert output.outputs[0].text == "The capital of France is Paris."
    assert "<think>" in demo.get_tokenizer().decode(output.outputs[0].token_ids)


def test_thoughts_are_beside_the_text(demo: LLM) -> None:
    two = [QUESTION, [{"role": "user", "content": "What is the capital of Italy?"}]]
    outputs = demo.chat(two, GREEDY, use_tqdm=False, chat_template_kwargs={"enable_thinking": True})
    for output in outputs:
        (answer,) = output.outputs
        written = demo.get_tokenizer().decode(answer.token_ids)
        assert (answer.reasoning or "") in written
        assert answer.text in written
        assert "think>" not in answer.text + (answer.reasoning or "")


def test_generate_asks_in_the_models_own_template(tmp_path: Path) -> None:
    """Without it the embedded model answered with an empty line, three times of three."""
    run = CliRunner().invoke
    command = ["generate", "--no-progress", "--temperature", "0", "--num-gpu-blocks-override", "64"]
    done = run(cli, [*command, "What is the capital of France?"])
    assert done.output.splitlines()[-1] == "The capital of France is Paris."
    plain = run(cli, [*command, "--no-chat", "--max-tokens", "4", "The capital of France is"])
    assert "Paris" in plain.output or plain.output.strip() == ""
    refused = run(cli, [*command, "--no-chat", "--system-prompt", "Be brief.", "Hello"])
    assert refused.exit_code == 2
    assert "--no-chat" in refused.output
