"""Constraints that take too much are refused, and what they do ends with their process."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from samples import parametrize_sample

from modulm.config import EngineConfig
from modulm.contracts.sampling import StructuredOutputs
from modulm.contracts.tokenizer import Tokenizer
from modulm.errors import RequestError
from modulm.plugins import manager
from modulm.plugins.manager import PluginManager
from modulm.testing.checkpoints import make_tokenizer
from modulm_structured_output.compiler import ConstraintCompiler, open_compiler
from modulm_tokenizers.tokenizer import load_tokenizer

#: A backend that does what the expression says; "pid" tells which process compiles.
BACKEND = """
import os, signal, time
from modulm.contracts.grammar import Grammar, GrammarBackend, Matcher
from modulm.errors import RequestError

class Open(Grammar):
    def matcher(self):
        return Anything()

class Anything(Matcher):
    finished = False
    def accept(self, token):
        return True
    def fill(self, mask):
        mask.fill(-1)
    def rollback(self, tokens):
        pass

class Trial(GrammarBackend):
    name = "trial"
    api = 1

    def rejects(self, constraint):
        return None

    def compile(self, constraint):
        match constraint.regex:
            case "for ever":
                while True:
                    time.sleep(60)
            case "memory":
                bytearray(1 << 30)
            case str(once) if once.startswith("killed once "):
                flag = once.removeprefix("killed once ")
                if not os.path.exists(flag):
                    open(flag, "w").close()
                    os.kill(os.getpid(), signal.SIGKILL)
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "pid":
                raise RequestError(f"compiled by {os.getpid()}", "structured_outputs")
        return Open()
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab=300))


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PluginManager]:
    """Plugins among which is the backend, in a module that other processes find too."""
    (tmp_path / "modulm_trial_backend.py").write_text(BACKEND)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with manager.using(PluginManager()) as made:
        made.register("grammars", "trial", "modulm_trial_backend:Trial")
        yield made


@pytest.fixture
def compiler(
    request: pytest.FixtureRequest, tokenizer: Tokenizer, plugins: PluginManager
) -> Iterator[ConstraintCompiler]:
    """Its parameter: seconds that a constraint may take."""
    seconds = getattr(request, "param", 60.0)
    settings = {"backend": "trial", "compile_timeout": seconds, "compile_memory": 256 << 20}
    config = EngineConfig.from_keywords(structured_outputs_config=settings)
    made = open_compiler(config, tokenizer, len(tokenizer), tokenizer.stop_ids, plugins)
    yield made
    made.processes.close()


def refused(compiler: ConstraintCompiler, regex: str) -> str:
    with pytest.raises(RequestError) as caught:
        compiler.compile(StructuredOutputs(regex=regex)).result(600)
    assert caught.value.param == "structured_outputs"
    return caught.value.message


def process(compiler: ConstraintCompiler, flag: bool = False) -> int:
    """The process that compiles; `flag` makes the constraint another one."""
    constraint = StructuredOutputs(regex="pid", disable_any_whitespace=flag)
    error = compiler.compile(constraint).exception(600)
    return int(re.sub(r"\D", "", str(error)))


@parametrize_sample(
    ("compiler", "regex", "words"),
    [
        (2.0, "for ever", "more than 2 s"),
        (60.0, "memory", "memory"),
        (60.0, "crash", "compiling takes more"),
    ],
    every=3,
    indirect=["compiler"],
)
def test_what_takes_too_much_is_refused_and_ends(
    compiler: ConstraintCompiler, regex: str, words: str
) -> None:
    first = process(compiler)
    assert first != os.getpid()
    assert words in refused(compiler, regex)
    second = process(compiler, flag=True)
    survives = regex == "memory"  # Python says so before the limit ends the process
    assert (first == second) is survives
    if not survives:
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
    assert compiler.compile(StructuredOutputs(regex="a")).result(600) is not None


def test_ordinary_constraints_start_no_process(compiler: ConstraintCompiler) -> None:
    compiler.compile(StructuredOutputs(choice=["a", "b"])).result(600)
    compiler.compile(StructuredOutputs(json={"type": "object"})).result(600)
    assert compiler.processes._idle == []


def test_signals_of_the_terminal_are_for_the_server(compiler: ConstraintCompiler) -> None:
    """While it drains, it still compiles for requests that it has accepted."""
    first = pid_of(compiler)
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(first, number)
        assert pid_of(compiler) == first


def test_where_no_process_can_have_the_plugins(
    tokenizer: Tokenizer, plugins: PluginManager, caplog: pytest.LogCaptureFixture
) -> None:
    here: Callable[..., object] = type("Here", (plugins.load("grammars", "trial"),), {})
    plugins.register("grammars", "here", here)
    config = EngineConfig.from_keywords(structured_outputs_config={"backend": "here"})
    made = open_compiler(config, tokenizer, len(tokenizer), tokenizer.stop_ids, plugins)
    assert made.compile(StructuredOutputs(regex="a")).result(600) is not None
    assert "without limits" in caplog.text


def pid_of(compiler: ConstraintCompiler) -> int:
    with pytest.raises(RequestError, match="compiled by") as caught:
        compiler.processes.check(StructuredOutputs(regex="pid"))
    return int(str(caught.value).split()[-1])


@pytest.mark.exhaustive
def test_a_process_that_was_killed_is_replaced(
    compiler: ConstraintCompiler, tmp_path: Path
) -> None:
    """While it waits or while it compiles: nobody's constraint is refused for it, but one that
    has its process killed again and again.
    """
    first = pid_of(compiler)
    assert pid_of(compiler) == first
    os.kill(first, signal.SIGKILL)
    second = pid_of(compiler)
    assert second != first
    compiler.compile(StructuredOutputs(regex=f"killed once {tmp_path / 'flag'}")).result(300)
    third = pid_of(compiler)
    assert third not in (first, second)
    assert "more memory than is allowed" in refused(compiler, "killed")
    assert pid_of(compiler) != third
