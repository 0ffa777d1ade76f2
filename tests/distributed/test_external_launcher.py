"""The executor "external_launcher": torchrun starts the ranks, each runs the same script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

from modulm import LLM, SamplingParams, StructuredOutputs
from modulm.config import EngineConfig
from modulm.config.sources import keywords
from modulm.engine.core.engine_core import EngineCore
from modulm.errors import ConfigError
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny
from modulm_executor_external_launcher.executor import LaunchedExecutor
from modulm_executor_external_launcher.launched import Launched

FLAGS = {
    "num_gpu_blocks_override": 64, "max_num_batched_tokens": 16, "dtype": "float32",
    "max_logprobs": -1,
}  # fmt: skip
PROMPTS = [{"prompt_token_ids": [5, 9, 40 + i] * 7} for i in range(3)]
HERE = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
#: What every rank runs; but for what it should not.
SCRIPT = """
    import json, os, signal, sys
    from modulm import LLM, SamplingParams, StructuredOutputs
    from modulm.errors import ModulmError

    folder, said, flags, prompts, everything = json.loads(sys.argv[1])
    rank = int(os.environ["RANK"])
    # torchrun ends the others when one has: this one is to say what it saw
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    found = {}

    def params():
        return [
            SamplingParams(temperature=0, max_tokens=9, logprobs=-1),
            SamplingParams(temperature=1.0, seed=4, max_tokens=7),
            SamplingParams(
                temperature=0, max_tokens=9, structured_outputs=StructuredOutputs(regex="[a-c]{3}")
            ),
        ]

    def ask(llm, *given):
        return [list(answer.outputs[0].token_ids)
                for answer in llm.generate(prompts[:len(given)], list(given), use_tqdm=False)]

    def save():
        with open(f"{said}/{rank}", "w") as file:
            json.dump(found, file)

    if everything:
        with LLM(folder, pipeline_parallel_size=2, distributed_executor_backend="external_launcher",
                 enable_sleep_mode=True, **flags) as llm:
            found["stages"] = ask(llm, *params())
            found["slept"] = []
            for level, tags in (0, None), (1, None), (2, None), (1, 1), (2, 1):
                llm.sleep(level)
                if tags is None:
                    llm.wake_up()
                else:
                    llm.wake_up(["weights"])
                    llm.wake_up(["kv_cache"])
                found["slept"].append(ask(llm, *params()))
    llm = LLM(folder, tensor_parallel_size=2, distributed_executor_backend="external_launcher",
              async_scheduling=True, **flags)
    found["layers"] = ask(llm, *params())
    def answer(worker, failing):
        if worker.rank == failing:
            raise ValueError("on purpose")
        return [worker.rank] * 2000  # more than the first broadcast has room for

    found["called"] = [values[0] for values in llm.collective_rpc(answer, args=[None])]
    try:
        llm.collective_rpc(answer, args=[1])
    except ModulmError as error:
        found["failed"] = str(error)
    found["by chance"] = ask(llm, SamplingParams(temperature=1.0, max_tokens=9))
    found["bytes"] = llm.info.description.weight_bytes
    try:
        ask(llm, SamplingParams(structured_outputs=StructuredOutputs(regex="([")))
    except ModulmError as error:
        found["refused"] = str(error)

    def fail(llm, prompt):
        try:
            (answer,) = llm.generate([prompt], SamplingParams(max_tokens=2), use_tqdm=False)
            yield answer.outputs[0].stop_reason
            ask(llm, SamplingParams(max_tokens=2))
        except ModulmError as error:
            yield f"{type(error).__name__}: {error}"

    found["differs"] = list(fail(llm, {"prompt_token_ids": [5, 9, rank]}))
    save()
    llm = LLM(folder, tensor_parallel_size=2, distributed_executor_backend="external_launcher",
              **flags)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    found["killed"] = list(fail(llm, prompts[0]))
    save()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_tiny(tmp_path_factory.mktemp("launched") / "tiny"))


@pytest.fixture(scope="module")
def launched(folder, tmp_path_factory, request):
    """torchrun's exit code, and what each of two ranks says."""
    at = tmp_path_factory.mktemp("script")
    script = at / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    everything = request.config.getoption("--everything")
    told = json.dumps([folder, str(at), FLAGS, PROMPTS, everything])
    command = "-m torch.distributed.run --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint"
    done = subprocess.run(
        [sys.executable, *command.split(), "localhost:0", str(script), told],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    try:
        return done.returncode, [json.loads((at / rank).read_text()) for rank in "01"]
    except FileNotFoundError:
        pytest.fail(done.stderr[:4000])


@pytest.mark.exhaustive
def test_each_rank_has_the_answers_of_one_process(folder, launched):
    params = [
        SamplingParams(temperature=0, max_tokens=9),
        SamplingParams(temperature=1.0, seed=4, max_tokens=7),
        SamplingParams(
            temperature=0, max_tokens=9, structured_outputs=StructuredOutputs(regex="[a-c]{3}")
        ),
    ]
    with LLM(folder, **FLAGS) as llm:
        answers = llm.generate(PROMPTS, params, use_tqdm=False)
        expected = [list(answer.outputs[0].token_ids) for answer in answers]
        weight_bytes = llm.info.description.weight_bytes
    for found in launched[1]:
        assert found["stages"] == found["layers"] == expected
        assert found["slept"] == [expected] * 5
        assert found["bytes"] >= weight_bytes
        assert "regex" in found["refused"]


@pytest.mark.exhaustive
def test_calls_are_answered_by_all_ranks(launched):
    for found in launched[1]:
        assert found["called"] == [0, 1]
        assert found["failed"] == "worker 1: answer raised ValueError: on purpose"


def test_what_is_drawn_is_the_same_on_each_rank(launched):
    first, second = (found["by chance"] for found in launched[1])
    assert first == second
    assert len(first[0]) == 9


def test_other_requests_on_another_rank_end_the_engines(launched):
    for found in launched[1]:
        step, engine = found["differs"]
        assert "is not the same on all ranks" in step
        assert engine.startswith("EngineDead")


def test_a_rank_that_is_killed_ends_the_engines_of_the_others(launched):
    code, (first, second) = launched
    assert code != 0
    step, engine = first["killed"]
    assert "another rank has ended, or does not answer" in step
    assert engine.startswith("EngineDead")
    assert "killed" not in second


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"RANK": None, "MASTER_ADDR": None}, "torchrun starts: RANK, MASTER_ADDR are not set"),
        ({"LOCAL_RANK": None}, "torchrun starts: LOCAL_RANK is not set"),
        ({"RANK": "first"}, "torchrun's invalid literal"),
        ({}, "torchrun has started 4 ranks, and tensor_parallel_size 2 x"),
        ({"WORLD_SIZE": "2"}, "worker_timeout: external_launcher does not end ranks"),
    ],
)
def test_what_torchrun_has_not_started_is_refused(changed, words, monkeypatch):
    for name, value in {**HERE, **changed}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    config = EngineConfig().with_parts({"tensor_parallel_size": 2, "worker_timeout": 9})
    with pytest.raises(ConfigError, match=words):
        LaunchedExecutor().start(config)


def test_servers_are_refused(folder):
    config = keywords(model=folder, distributed_executor_backend="external_launcher").config
    with pytest.raises(ConfigError, match="external_launcher is for LLM, not servers"):
        EngineCore(config, manager.current(), None, "server")


def test_where_a_rank_is():
    assert Launched.of(HERE) == Launched(3, 4, 1, 4)
    elsewhere = Launched.of({**HERE, "LOCAL_WORLD_SIZE": "2"})
    assert elsewhere == Launched(3, 4, 1, 2)  # the loopback's address is none to others
    script = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # what TRL sets by itself
    assert Launched.of({**script, "MASTER_ADDR": "x", "MASTER_PORT": "1"}) == Launched(0, 1, 0, 1)
