"""generate: where its jobs come from."""

from __future__ import annotations

from io import StringIO

import click
import pytest

from modulm_command_generate.command import read_jobs


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
