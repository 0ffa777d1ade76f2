"""generate: where its jobs come from."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import click
import pytest

from modulm_command_generate.command import check_first, read_jobs


def test_jobs_from_arguments_and_lines() -> None:
    lines = 'plain\n\n{"prompt": [1, 2], "id": 7}\n{"messages": []}\n'
    assert read_jobs(["a"], StringIO(lines)) == [
        {"prompt": "a"},
        {"prompt": "plain"},
        {"prompt": [1, 2], "id": 7},
        {"messages": []},
    ]


@pytest.mark.parametrize("line", ['{"id": 1}', '{"prompt": "a", "messages": []}', '{"prompt"'])
def test_a_wrong_job_names_its_line(line: str) -> None:
    with pytest.raises(click.UsageError, match="line 2"):
        read_jobs([], StringIO(f"fine\n{line}\n"))


def test_a_model_where_a_prompt_belongs_says_what_to_type(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for prompts in (["demo", "hi there"], [str(tmp_path)], ["Qwen/Qwen3-0.6B", "hi there"]):
        with pytest.raises(click.UsageError, match=f"generate --model {prompts[0]} ('hi|PROMPT)"):
            check_first(prompts)
    for prompts in (["and/or"], ["demo"], ["Say hi/bye to all", "b"]):
        check_first(prompts)
