"""config, completion and logging."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from modulm.cli.main import cli
from modulm.config import EngineConfig
from modulm.errors import ConfigError
from modulm.plugins import calls
from modulm.plugins.declaration import Declaration
from modulm_command_completion.command import command as completion
from modulm_command_config.command import command as config
from modulm_server.command import _Termination
from modulm_server.logs import configure_logging

# config


def test_show_writes_a_file_that_says_the_same(tmp_path: Path) -> None:
    flags = [
        "show", "some/model", "--max-model-len", "8k", "--served-model-name", "a", "b",
        "--structured-outputs-config.disable_any_whitespace=true", "--api-key", "hunter2",
        "--hf-overrides.x=1", "--swap-space", "8", "--attention-config.flash_attn_version", "3",
    ]  # fmt: skip
    output = CliRunner().invoke(config, flags).stdout
    assert "hunter2" not in output
    path = tmp_path / "flags.yaml"
    path.write_text(output.replace("***", "hunter2"))
    again = CliRunner().invoke(config, ["show", "--config", str(path)]).stdout
    assert again == output
    table = yaml.safe_load(output)
    assert table["structured_outputs_config"] == {"disable_any_whitespace": True}
    as_json = CliRunner().invoke(config, [*flags, "--json"]).stdout
    assert json.loads(as_json) == table


def test_show_everything() -> None:
    values = yaml.safe_load(CliRunner().invoke(config, ["show", "--all"]).stdout)
    assert values["port"] == 8000
    assert values["structured_outputs_config"]["backend"] == "auto"
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


# logging


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


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
    configure_logging(EngineConfig(), ["/health"])
    access = logging.getLogger("uvicorn.access")
    try:
        for path, is_logged in (("/health", False), ("/health?x=1", False), ("/v1/models", True)):
            line = ("1.2.3.4:5", "GET", path, "1.1", 200)
            record = logging.LogRecord("uvicorn.access", 20, "", 0, '%s - "%s %s"', line, None)
            assert bool(access.filter(record)) is is_logged
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
    environment = {"COMP_WORDS": "modulm serve --dtype bf", "COMP_CWORD": "3"}
    result = CliRunner().invoke(
        cli, prog_name="modulm", env={**environment, "_MODULM_COMPLETE": "bash_complete"}
    )
    assert result.output == "plain,bfloat16\n"


@pytest.fixture
def termination() -> Iterator[_Termination]:
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
    handlers, hook = [signal.getsignal(number) for number in numbers], sys.unraisablehook
    yield _Termination()
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)
    sys.unraisablehook = hook


def test_sigterm_during_a_start_is_not_taken_for_a_plugin_that_exits(
    termination: _Termination,
) -> None:
    declaration = Declaration("slow", "", kind="platforms", distribution="modulm-slow")

    class Slow:
        def probe(self) -> bool:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        calls.ask(declaration, Slow(), "probe", bool)


@pytest.mark.usefixtures("termination")
def test_sigterm_that_a_destructor_swallows_comes_again() -> None:
    class Dies:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def start() -> None:
        Dies()
        threading.Event().wait(60)

    with pytest.raises(KeyboardInterrupt):
        start()


def test_sigterm_that_code_keeps_to_itself_ends_the_server_that_is_ready(
    termination: _Termination, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(BaseException):
        signal.raise_signal(signal.SIGTERM)
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    termination.ready("served at ...")
    assert came == [signal.SIGTERM]
    assert capsys.readouterr().out == "served at ...\n"


# start-up


def test_help_imports_nothing_heavy() -> None:
    """A list of all commands imports all of them; each imports what it needs when it runs."""
    code = (
        "import sys; from click.testing import CliRunner; from modulm.cli.main import cli\n"
        "assert CliRunner().invoke(cli, ['--help']).exit_code == 0\n"
        "print(*{'torch', 'numpy', 'transformers', 'pydantic', 'httpx'} & {*sys.modules})"
    )
    run = [sys.executable, "-I", "-X", "utf8", "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
