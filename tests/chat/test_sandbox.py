"""The processes that render templates of checkpoints and of clients: limits, deaths, forks."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from attrs import evolve
from samples import parametrize_sample

from modulm.contracts.tokenizer import Tokenizer
from modulm.errors import QueueFull
from modulm.testing.checkpoints import make_tokenizer
from modulm_chat.conversation import encode_chat
from modulm_chat.sandbox import RenderLimits, SandboxedRenderer, checkpoint_renderer
from modulm_chat.templates import TemplateFailed
from modulm_tokenizers.tokenizer import load_tokenizer

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def renderer() -> Iterator[SandboxedRenderer]:
    renderer = SandboxedRenderer()
    yield renderer
    renderer.close()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab=512))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[SandboxedRenderer]:
    """The renderer of checkpoints' templates, with little time: a fresh one for each test."""
    limits = RenderLimits(0.1, 512 << 20, 64 << 20, 99, None)
    renderer = SandboxedRenderer(limits)
    monkeypatch.setattr("modulm_chat.conversation.checkpoint_renderer", lambda: renderer)
    yield renderer
    renderer.close()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process must not read templates."""

    def never(*args: Any, **keywords: Any) -> Any:
        raise AssertionError("a checkpoint's template was parsed by this process")

    monkeypatch.setattr("modulm_chat.templates.parse_template", never)


#: What no clock in loops ends: one expression, or few, that take minutes or gigabytes.
BOMBS = {
    "power": "{{ (9**(9**8)) % 7 }}",
    "power of a variable": "{% set n = messages | length + 8 %}{{ (n**(n**8)) % 7 }}",
    "many words": "{{ lipsum(n=2000, html=false, min=99999, max=100000) | length }}",
    "wrapping": "{% set s = 'a b ' * 9999999 %}{{ s | wordwrap(1) | length }}",
    "doubling": "{% set s = 'a' * 999999 %}" + "{% set s = s + s %}" * 14 + "{{ s | length }}",
}


@parametrize_sample("name", BOMBS, every=6)
def test_a_checkpoints_template_has_limits(
    tokenizer: Tokenizer, short: SandboxedRenderer, elsewhere: None, name: str
) -> None:
    """It costs this process no time and no memory; the next conversation is rendered."""
    short.render("{{ 1 }}", {})
    first = short._worker
    with pytest.raises(TemplateFailed, match="too long or too much memory|cannot render"):
        encode_chat(HELLO, tokenizer=evolve(tokenizer, chat_template=BOMBS[name]))
    assert first is not None
    assert first.poll() is not None, "ended"
    _, text = encode_chat(
        HELLO, tokenizer=evolve(tokenizer, chat_template="{{ messages[0].role }}")
    )
    assert text == "user"


def test_checkpoints_templates_are_rendered_and_read_elsewhere(
    tokenizer: Tokenizer, elsewhere: None
) -> None:
    several = {"default": "{% for p in messages[0].content %}[{{ p.text }}]{% endfor %}",
               "tool_use": "{{ tools | length }} {{ messages[0].content }}"}  # fmt: skip
    named = evolve(tokenizer, chat_template=several)
    assert encode_chat(HELLO, tokenizer=named)[1] == "[hello]"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert encode_chat(HELLO, tokenizer=named, tools=[tool])[1] == "1 hello"


def test_text_arrives_as_it_was(renderer: SandboxedRenderer) -> None:
    texts = ["wörld 你好 🎈", "a\nb\r\n\x00\u2028", "\ud83d alone", "x" * 300_000, "\ue002\ue003"]
    assert [renderer.render("{{ t }}", {"t": text}) for text in texts] == texts
    with pytest.raises(TemplateFailed, match="must be JSON values"):
        renderer.render("{{ t }}", {"t": object()})


def test_the_worker_has_this_process_time_zone(
    renderer: SandboxedRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "XYZ+7")
    text = renderer.render("{{ strftime_now('%Y-%m-%dT%H:%M:%S+00:00') }}", {})
    behind = datetime.now(UTC) - datetime.fromisoformat(text)
    assert round(behind / timedelta(hours=1)) == 7


def test_a_fork_has_a_worker_of_its_own(renderer: SandboxedRenderer) -> None:
    assert renderer.render("{{ 1 }}", {}) == "1"
    worker = renderer._worker
    pid = os.fork()
    if pid == 0:
        same = renderer.render("{{ 2 }}", {}) == "2" and renderer._worker is not worker
        renderer.close()
        os._exit(0 if same else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert renderer.render("{{ 3 }}", {}) == "3"
    assert renderer._worker is worker


def test_the_process_of_checkpoints_lasts() -> None:
    renderer = checkpoint_renderer()
    renderer.render("{{ 1 }}", {})
    worker = renderer._worker
    for index in range(600):
        assert renderer.render("{{ n }}", {"n": index}) == str(index)
    assert renderer._worker is worker


def test_signals_of_the_terminal_are_for_the_server(renderer: SandboxedRenderer) -> None:
    """While it drains, it still renders what it has accepted."""
    renderer.render("{{ 1 }}", {})
    worker = renderer._worker
    for number in (signal.SIGINT, signal.SIGHUP):
        worker.send_signal(number)  # type: ignore[union-attr]
        assert renderer.render("{{ 2 }}", {}) == "2"
    assert renderer._worker is worker


def test_the_worker_imports_only_what_it_renders_with() -> None:
    code = "import sys, modulm_chat.sandbox_worker; print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-P", "-c", code], text=True).split()
    heavy = {"attr", "numpy", "torch", "tokenizers", "modulm.plugins", "subprocess", "asyncio"}
    assert not heavy & set(modules)


def test_one_template_does_not_use_up_what_the_next_one_needs(renderer: SandboxedRenderer) -> None:
    """A worker that is full is replaced, not an error of whoever comes next."""
    assert renderer.render("{{ x }}", {"x": "fine"}) == "fine"
    first = renderer._worker
    with pytest.raises(TemplateFailed, match="too much memory"):
        renderer.render("{{ x * 10 ** 9 }}", {"x": "y"})
    assert first is not None
    assert first.poll() is not None, "killed"
    assert renderer.render("{{ x }}", {"x": ""}) == ""
    renderer._worker.kill()  # type: ignore[union-attr]
    renderer._worker.wait()  # type: ignore[union-attr]
    assert renderer.render("{{ x }}", {"x": "again"}) == "again"
    # One that can say nothing any more: this one gives back what it was asked.
    full = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    renderer.close()
    renderer._worker, renderer._questions = full, 1
    assert renderer.render("{{ x }}", {"x": "asked anew"}) == "asked anew"
    assert full.poll() is not None


def test_a_renderer_asks_fresh_workers_from_time_to_time() -> None:
    renderer = SandboxedRenderer(RenderLimits(questions=2))
    workers = set()
    for index in range(5):
        assert renderer.render("{{ n }}", {"n": index}) == str(index)
        workers.add(renderer._worker.pid)  # type: ignore[union-attr]
    renderer.close()
    assert len(workers) == 3


def test_f65_many_templates_wait_only_so_long() -> None:
    renderer = SandboxedRenderer(RenderLimits(seconds=0.1))
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    outcomes: list[type[Exception]] = []

    def one() -> None:
        try:
            renderer.render(endless, {})
        except Exception as error:
            outcomes.append(type(error))

    renderer.render("ready", {})
    threads = [threading.Thread(target=one) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    renderer.close()
    assert set(outcomes) == {TemplateFailed, QueueFull}
    assert outcomes.count(QueueFull) >= 4


def test_descriptors_beyond_a_thousand(renderer: SandboxedRenderer) -> None:
    """A server has that many connections; `select` would take none of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert renderer.render("{{ 1 }}", {}) == "1"
    finally:
        for one in opened:
            os.close(one)
        renderer.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
