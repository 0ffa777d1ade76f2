"""The executor "mp": workers that are processes, what they answer, and what becomes of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from modulm import LLM, SamplingParams, StructuredOutputs
from modulm.config import EngineConfig
from modulm.config.environ import isolated
from modulm.errors import EngineDead, RequestError
from modulm.testing.checkpoints import make_tiny
from modulm_executor_mp import executor as mp_executor
from modulm_server.engine.heartbeat import interval_of

FLAGS = {"num_gpu_blocks_override": 64, "max_num_batched_tokens": 16, "dtype": "float32"}
#: What no ring has room for, so that the plan goes another way.
LONG = {"text": "x" * 300_000}
PROMPTS = [{"prompt_token_ids": [5, 9, 40 + i] * 7} for i in range(4)]
#: One whose scores no ring has room for.
LONGER = {"prompt_token_ids": [5, 9, 40, 41] * 50}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_tiny(tmp_path_factory.mktemp("mp") / "tiny"))


def children(llm):
    return [process.pid for process in llm._core.executor._processes]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_two_ranks_answer_as_one_process(folder, tmp_path, monkeypatch):
    """Nothing is left of them when the engine is shut down."""
    params = [
        SamplingParams(temperature=0, max_tokens=9, logprobs=2),
        SamplingParams(temperature=1.0, seed=4, max_tokens=9, repetition_penalty=1.3),
        SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1, extra_args=LONG),
        SamplingParams(
            temperature=0, max_tokens=9, structured_outputs=StructuredOutputs(regex="[a-c]{3}")
        ),
    ]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found, pids = [], []
    more = FLAGS | {"max_logprobs": -1, "max_num_batched_tokens": 256}
    for size in (1, 2):
        with LLM(folder, tensor_parallel_size=size, async_scheduling=size == 2, **more) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            found.append([list(output.outputs[0].token_ids) for output in outputs])
            all_of_them = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=-1)
            (whole,) = llm.generate([LONGER], all_of_them, use_tqdm=False)
            assert sum(map(len, whole.prompt_logprobs[1:])) > 1 << 14
            found[-1].append(list(whole.outputs[0].token_ids))
            broken = SamplingParams(structured_outputs=StructuredOutputs(regex="(["))
            with pytest.raises(RequestError):
                llm.generate(PROMPTS[:1], broken, use_tqdm=False)
            if size == 2:
                pids = children(llm)
                assert all(map(alive, pids))
    assert found[0] == found[1]
    assert len(pids) == 2
    assert not any(map(alive, pids))
    assert not list(tmp_path.iterdir())


def test_a_killed_rank_ends_the_engine_and_its_processes(folder):
    with LLM(folder, tensor_parallel_size=2, **FLAGS) as llm:
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=2), use_tqdm=False)
        one, other = children(llm)
        os.kill(one, signal.SIGKILL)
        until = time.monotonic() + 300
        while alive(other) and time.monotonic() < until:
            time.sleep(0.01)
        assert not alive(other)
        # The first to ask may be told as one whose step failed, or that the engine has ended.
        with suppress(EngineDead):
            (failed,) = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=2), use_tqdm=False)
            assert failed.outputs[0].finish_reason == "error"
            assert "killed by SIGKILL" in failed.outputs[0].stop_reason
        with pytest.raises(EngineDead, match="killed by SIGKILL"):
            llm.generate(PROMPTS[:1], SamplingParams(max_tokens=2), use_tqdm=False)


def test_a_stopped_rank_is_told_within_five_seconds_of_looks(monkeypatch):
    """The engine looks at every heartbeat: three of these see a rank that stays stopped. One that
    is stopped for a moment, as by a debugger that attaches, is not told.
    """
    seconds = [0.0]
    interval = interval_of(EngineConfig())
    monkeypatch.setattr(mp_executor, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    executor = mp_executor.MpExecutor()
    executor._processes = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]

    def looks_until_told(number):
        for look in range(1, number + 1):
            seconds[0] += interval
            told = executor.trouble()
            if told is not None:
                assert told == "the process of worker 1 is stopped (SIGSTOP)"
                return look
        return None

    def send(number):
        os.kill(executor._processes[1].pid, number)
        os.waitpid(executor._processes[1].pid, os.WUNTRACED | os.WCONTINUED)

    try:
        assert looks_until_told(20) is None
        send(signal.SIGSTOP)
        assert looks_until_told(1) is None
        send(signal.SIGCONT)
        assert looks_until_told(20) is None
        send(signal.SIGSTOP)
        looks = looks_until_told(20)
        assert looks is not None
        assert looks <= 3
        assert looks * interval <= 5
    finally:
        for process in executor._processes:
            process.kill()
            process.wait()


def test_a_dead_rank_ends_the_engine_without_a_look(monkeypatch):
    """Its connection ends with it, and its exit code is asked for one second at most."""
    start = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda _, **options: start(["sleep", "600"], **options)
    )
    executor = mp_executor.MpExecutor()
    stream = executor._spawn()
    executor._processes[0].kill()
    assert stream.receive() is None
    assert executor.ending(0) == "its process was killed by SIGKILL"
    stream.close()


def test_what_does_not_load_is_the_workers_error(tmp_path):
    folder = make_tiny(tmp_path / "broken")
    (folder / "model.safetensors").write_bytes(b"no")
    with pytest.raises(Exception, match=r"model\.safetensors"):
        LLM(str(folder), tensor_parallel_size=2, **FLAGS)


def test_a_rank_that_hangs_ends_the_engine(folder):
    with LLM(folder, tensor_parallel_size=2, worker_timeout=600, **FLAGS) as llm:
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=2), use_tqdm=False)
        os.kill(children(llm)[1], signal.SIGSTOP)
        assert llm._core.executor._seconds == 600  # which a busy machine does not reach
        llm._core.executor._seconds = 1.0
        (failed,) = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=2), use_tqdm=False)
        assert "took longer than --worker-timeout, 1 s" in failed.outputs[0].stop_reason
        assert not any(map(alive, children(llm)))


def test_a_worker_whose_executor_was_killed_removes_their_folder(tmp_path: Path) -> None:
    """`kill -9` of an engine leaves nothing behind (issue 36)."""
    (folder := tmp_path / "ranks").mkdir()
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "modulm_distributed.worker_process"]
        worker = subprocess.Popen(
            [*command, str(theirs.fileno()), str(folder)],
            pass_fds=[theirs.fileno()],
            env=isolated(),
        )
    ours.close()  # as the kernel does when a process is killed
    assert worker.wait(300) == 0
    assert not folder.exists()
