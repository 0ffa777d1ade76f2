"""generate's input, parse, config, collect-env and logging."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

from modulm.cli.collect_env import command as collect_env
from modulm.cli.completion import command as completion
from modulm.cli.config import command as config
from modulm.cli.generate import read_jobs
from modulm.cli.logs import configure_logging
from modulm.cli.main import cli
from modulm.cli.parse import command as parse
from modulm.config import EngineConfig
from modulm.errors import ConfigError

# generate


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


# parse


HERMES = 'Sure.<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
TOOLS = json.dumps([{"type": "function", "function": {"name": "look"}}])


@pytest.mark.parametrize("chunk", [[], ["--chunk", "1"], ["--chunk", "7"]])
def test_parse_prints_the_message(chunk: list[str]) -> None:
    result = CliRunner().invoke(
        parse,
        ["--reasoning-parser", "qwen3", "--tool-call-parser", "hermes", "--tools", TOOLS, *chunk],
        input=f"<think>hm</think>{HERMES}",
    )
    assert result.exit_code == 0, result.output
    message = json.loads(result.output)
    assert message["reasoning"].strip() == "hm"
    assert message["content"].strip() == "Sure."
    (call,) = message["tool_calls"]
    assert (call["name"], json.loads(call["arguments"])) == ("look", {"at": "sky"})


def test_parse_prints_events(tmp_path: Path) -> None:
    file, tools = tmp_path / "text", tmp_path / "tools.json"
    file.write_text(HERMES)
    tools.write_text(TOOLS)
    result = CliRunner().invoke(
        parse, [str(file), "--tool-call-parser", "hermes", "--tools", str(tools), "--deltas"]
    )
    events = [json.loads(line)["event"] for line in result.output.splitlines()]
    assert events[0] == "Content"
    assert {"ToolStart", "ToolArguments", "ToolEnd"} <= set(events)


def test_parse_refuses_wrong_tools() -> None:
    result = CliRunner().invoke(parse, ["--tools", "{"], input="x")
    assert result.exit_code == 2
    assert "--tools" in result.output


# config


def test_show_writes_a_file_that_says_the_same(tmp_path: Path) -> None:
    flags = [
        "show", "some/model", "--max-model-len", "8k", "--served-model-name", "a", "b",
        "--structured-outputs-config.disable_any_whitespace=true", "--api-key", "hunter2",
        "--hf-overrides.x=1",
    ]  # fmt: skip
    shown = CliRunner().invoke(config, flags).stdout
    assert "hunter2" not in shown
    path = tmp_path / "flags.yaml"
    path.write_text(shown.replace("***", "hunter2"))
    again = CliRunner().invoke(config, ["show", "--config", str(path)]).stdout
    assert again == shown
    table = yaml.safe_load(shown)
    assert table["structured_outputs_config"] == {"disable_any_whitespace": True}
    as_json = CliRunner().invoke(config, [*flags, "--json"]).stdout
    assert json.loads(as_json) == table


def test_show_everything() -> None:
    shown = yaml.safe_load(CliRunner().invoke(config, ["show", "--all"]).stdout)
    assert shown["port"] == 8000
    assert shown["attention_config"]["backend_per_kind"] == {}
    nothing = CliRunner().invoke(config, ["show"]).stdout
    assert yaml.safe_load(nothing) is None


def test_diff(tmp_path: Path) -> None:
    one, other = tmp_path / "1.yaml", tmp_path / "2.yaml"
    one.write_text("port: 1\nseed: 5\n")
    other.write_text("port: 2\nseed: 5\n")
    result = CliRunner().invoke(config, ["diff", str(one), str(other)])
    assert (result.exit_code, result.output) == (1, "port: 1 -> 2\n")
    assert CliRunner().invoke(config, ["diff", str(one), str(one)]).exit_code == 0
    assert "seed: 5 -> 0" in CliRunner().invoke(config, ["diff", str(one)]).output


# collect-env


def test_the_report_masks_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODULM_API_KEY", "hunter2")
    result = CliRunner().invoke(collect_env, ["--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["environment"]["MODULM_API_KEY"] == "***"
    assert "hunter2" not in result.output
    assert report["packages"]["torch"]
    assert any("commands/serve" in names for names in report["plugins"].values())
    assert "cpu" in report["platforms"]
    assert "packages" in CliRunner().invoke(collect_env, []).output


# logging


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    found = logging.getLogger()
    handlers, level = found.handlers[:], found.level
    yield found
    found.handlers[:] = handlers
    found.setLevel(level)


def test_log_lines_cannot_be_forged(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging(EngineConfig.from_keywords(log_level="warning"))
    log = logging.getLogger("modulm.test")
    log.info("not shown")
    log.warning("%s", "name\nWARNING forged \x1b[31m")
    try:
        raise ValueError("inside")
    except ValueError:
        log.exception("failed")
    lines = capsys.readouterr().err.splitlines()
    assert "name\\nWARNING forged \\x1b[31m" in lines[0]
    assert lines[2].startswith("Traceback")


def test_some_paths_get_no_access_line(root: logging.Logger) -> None:
    configure_logging(EngineConfig.from_keywords(disable_access_log_for_endpoints=["/health"]))
    access = logging.getLogger("uvicorn.access")
    try:
        for path, shown in (("/health", False), ("/health?x=1", False), ("/v1/models", True)):
            line = ("1.2.3.4:5", "GET", path, "1.1", 200)
            record = logging.LogRecord("uvicorn.access", 20, "", 0, '%s - "%s %s"', line, None)
            assert bool(access.filter(record)) is shown
    finally:
        access.filters.clear()


def test_an_own_logging_configuration(root: logging.Logger, tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    path.write_text('{"version": 1, "root": {"level": "ERROR"}}')
    configure_logging(EngineConfig.from_keywords(log_config_file=str(path)))
    assert root.level == logging.ERROR
    configure_logging(EngineConfig.from_keywords(logging_config={"root": {"level": "DEBUG"}}))
    assert root.level == logging.DEBUG


@pytest.mark.parametrize("text", [None, "{", "[]", '{"version": 7}'])
def test_a_wrong_logging_configuration_is_named(
    root: logging.Logger, tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "log.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        configure_logging(EngineConfig.from_keywords(log_config_file=str(path)))
    assert caught.value.field == "log_config_file"


# completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    result = CliRunner().invoke(completion, [shell])
    assert result.exit_code == 0
    assert "_MODULM_COMPLETE" in result.output


def test_the_shell_is_given_flags_and_names() -> None:
    asked = {"COMP_WORDS": "modulm serve --dtype bf", "COMP_CWORD": "3"}
    result = CliRunner().invoke(
        cli, prog_name="modulm", env={**asked, "_MODULM_COMPLETE": "bash_complete"}
    )
    assert result.output == "plain,bfloat16\n"
