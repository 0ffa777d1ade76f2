"""What goes wrong while blocks move: answers are the same bits, and nothing is left behind."""

from __future__ import annotations

import json
import logging
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from samples import parametrize_sample
from tests.plugins.kv_connectors.test_peer import PARAMS as PEER_PARAMS
from tests.plugins.kv_connectors.test_peer import ask, engine, free_port, prefill, results
from tests.plugins.kv_connectors.test_tiers import (
    FLAGS,
    PARAMS,
    STORED,
    TIERS,
    disk,
    drain,
    drain_transfers,
    generate,
)

from modulm import LLM
from modulm.engine.scheduling.scheduler import BudgetScheduler
from modulm.testing.checkpoints import make_tiny
from modulm_kv_transfer.copies import BlockCopier

KILLED = Path(__file__).with_name("killed_engine.py")
#: A process is killed at each of these shares of all lines that move blocks.
MOMENTS = [0.3, 0.05, 0.1, 0.15, 0.2, 0.25, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("model"), "Qwen3ForCausalLM"))


@pytest.fixture(scope="module")
def expected(model: str) -> list[Any]:
    with LLM(model, **FLAGS) as llm:
        return generate(llm)[0]


@parametrize_sample("tier", TIERS, every=2)
def test_a_row_is_preempted_while_its_blocks_are_saved(
    tier: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies wait until a request has lost its row; its blocks must not be reused before."""
    preempted = threading.Event()
    preempt, save, waited = BudgetScheduler._preempt, BlockCopier.save, []

    def note(self: Any, waiting: Any = None) -> None:
        preempt(self, waiting)
        preempted.set()

    def wait(self: Any, blocks: Any, into: Any) -> None:
        waited.append(preempted.wait(300))
        save(self, blocks, into)

    monkeypatch.setattr(BudgetScheduler, "_preempt", note)
    monkeypatch.setattr(BlockCopier, "save", wait)
    few = FLAGS | {"num_gpu_blocks_override": 8}
    prompts = [{"prompt_token_ids": [5 + i, 9, 40, 7] * 10} for i in range(4)]
    params = PARAMS.with_(max_tokens=40)
    with LLM(model, **few, **TIERS[tier](tmp_path)) as llm:
        moved = results(llm.generate(prompts, params, use_tqdm=False))
        drain(llm)
        assert waited
        assert all(waited)
        monkeypatch.undo()
        llm.reset_prefix_cache()
        again = llm.generate(prompts, params, use_tqdm=False)
        assert [output.num_cached_tokens for output in again] == [32] * 4
        drain(llm)
    with LLM(model, **FLAGS) as llm:
        expected = results(llm.generate(prompts, params, use_tqdm=False))
    assert moved == results(again) == expected


def test_a_full_disk(
    model: str, expected: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Files cannot grow to the size of a block, and later they can."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with LLM(model, **FLAGS, **disk(tmp_path)) as llm:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, hard))  # half a block
            computed = generate(llm)
            llm.reset_prefix_cache()
            again = generate(llm)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, before)
        assert computed == again == (expected, [0] * 4)
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
        assert "blocks could not be saved" in caplog.text
        assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []
        llm.reset_prefix_cache()
        generate(llm)
        llm.reset_prefix_cache()
        assert generate(llm) == (expected, [STORED] * 4)


def run_killed(model: str, folder: Path, moment: int) -> subprocess.CompletedProcess[str]:
    flags = json.dumps(FLAGS | disk(folder))
    command = [sys.executable, str(KILLED), model, flags, str(moment)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def lines(model: str, tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many lines move blocks if nothing kills the process."""
    whole = run_killed(model, tmp_path_factory.mktemp("whole"), 0)
    assert whole.returncode == 0, whole.stderr
    return int(whole.stdout.split()[-1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_engine_that_is_killed_leaves_whole_files(
    moment: float, lines: int, model: str, expected: list[Any], tmp_path: Path
) -> None:
    killed = run_killed(model, tmp_path, int(moment * lines))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with LLM(model, **FLAGS, **disk(tmp_path)) as llm:
        assert not [path for path in tmp_path.rglob(".*") if path.is_file()]
        answers, cached = generate(llm)
        assert answers == expected
        assert moment < 0.6 or cached == [STORED] * 4  # it was killed while it loaded
        llm.reset_prefix_cache()
        assert generate(llm) == (expected, [STORED] * 4)


class Relay:
    """A connection that stops after so many bytes from the producer: it stalls, or it ends."""

    def __init__(self, port: int, most: int, *, stalls: bool) -> None:
        self._port, self._left, self._stalls = port, most, stalls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.stopped = False
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._open += near, far
                self._start(self._forward, near, far, False)
                self._start(self._forward, far, near, True)

    def _forward(self, source: socket.socket, target: socket.socket, limited: bool) -> None:
        with suppress(OSError):
            while data := source.recv(4096):
                if limited:
                    data, self._left = data[: self._left], self._left - len(data)
                target.sendall(data)
                if limited and self._left <= 0:
                    self.stopped = True
                    if self._stalls:
                        return
                    break
            for one in (source, target):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for one in (self._listener, *self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join()


@contextmanager
def relay(port: int, most: int, *, stalls: bool) -> Iterator[Relay]:
    opened = Relay(port, most, stalls=stalls)
    try:
        yield opened
    finally:
        opened.close()


@parametrize_sample(
    ("most", "stalls"),
    [(20_000, True), (50, True), (1_000, True), (20_000, False), (50, False), (1_000, False)],
    every=6,
)
def test_a_peer_that_stalls_or_dies_after_some_bytes(
    most: int, stalls: bool, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In the handshake, in the answer, between blocks: the prompt is computed in the end."""
    options = {"timeout": 0.4, "shared_memory": False}
    port = free_port()
    with (
        engine(model, "kv_producer", port, options) as first,
        engine(model, "kv_consumer", 1, options) as second,
    ):
        (table,) = prefill(first, 1)
        with relay(port, most, stalls=stalls) as between:
            outputs = ask(second, PEER_PARAMS, [{**table, "remote_port": between.port}])
            assert between.stopped
        assert outputs[0].num_cached_tokens == 0
        assert "could not be loaded and are computed" in caplog.text
        # The same prompt comes over a connection that works.
        second.reset_prefix_cache()
        whole = ask(second, PEER_PARAMS, [table])
        assert whole[0].num_cached_tokens == 64
        assert results(outputs) == results(whole)
        store = first._core.loop.executor._worker._runner.parts["transfers"]._mover.store
        drain_transfers(first)
    assert not store._held
