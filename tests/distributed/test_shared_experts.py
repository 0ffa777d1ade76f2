"""Experts that the ranks of several replicas hold between them: each replica answers as one process
does, whatever the others do, and none lives without the others.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from samples import parametrize_sample

from modulm import LLM, AsyncLLM, SamplingParams
from modulm.contracts.sampling import OutputKind
from modulm.errors import ModulmError
from modulm.testing.checkpoints import make_tiny
from modulm.testing.models import tiny_folder
from modulm_distributed.rounds import Rounds

FLAGS = {
    "dtype": "float32", "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 64, "block_size": 16,
}  # fmt: skip
PROMPTS = [{"prompt_token_ids": [5, 9, 40 + i] * (1 + 3 * i % 7)} for i in range(8)]
#: Answers of other lengths, so that replicas run out of work at other times.
PARAMS = [SamplingParams(temperature=0, max_tokens=3 + 2 * i, ignore_eos=True) for i in range(8)]
#: Families whose experts are applied in other ways, and the ranks of each of two replicas.
LAYOUTS = [
    ("MixtralForCausalLM", 1, 2),
    ("DeepseekV3ForCausalLM", 2, 1),
    ("Llama4ForCausalLM", 1, 1),
]


def answers(llm, places):
    outputs = llm.generate(
        [PROMPTS[i] for i in places], [PARAMS[i] for i in places], use_tqdm=False
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


@parametrize_sample(("model", "tensor", "pipeline"), LAYOUTS, every=3)
def test_replicas_answer_as_one_process(plugins, tmp_path, model, tensor, pipeline):
    folder = str(tiny_folder(plugins.load("models", model), tmp_path / "model"))
    with LLM(folder, use_tqdm_on_load=False, **FLAGS) as llm:
        expected = answers(llm, range(8))
    group = tmp_path / "group"
    group.mkdir()

    def replica(place):
        return LLM(
            folder, distributed_executor_backend="pool", use_tqdm_on_load=False,
            tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, data_parallel_size=2,
            enable_expert_parallel=True, data_parallel_rank_local=place,
            data_parallel_size_local=2, data_parallel_group=str(group), **FLAGS,
        )  # fmt: skip

    with ThreadPoolExecutor(2) as both, ExitStack() as ending:
        replicas = [ending.enter_context(llm) for llm in both.map(replica, range(2))]
        # One alone, then the other, then both with work for other times.
        assert answers(replicas[0], [3, 4]) == expected[3:5]
        assert answers(replicas[1], [0, 7]) == [expected[0], expected[7]]
        for mine in ([[0, 1, 2, 3, 4, 5, 6], [7]], [[1], [6, 2, 5]]):
            found = both.map(answers, replicas, mine)
            assert [*found] == [[expected[i] for i in places] for places in mine]
        # Whoever had work, each has begun as many passes as the other, and nobody is at one.
        rounds = [llm._core.executor._rounds for llm in replicas]
        begun = [int(one._passes[place]) for place, one in enumerate(rounds)]
        assert begun[0] == begun[1] > 0


def test_who_has_begun_less_is_woken(tmp_path):
    one, other = (Rounds(str(tmp_path), place, 2) for place in range(2))
    one.begin()
    assert (one.behind, other.behind) == (False, True)
    assert other.wait()
    other.begin()
    assert not other.behind
    assert not other._poll.poll(0), "nothing is left that would wake it"
    assert not one._poll.poll(0), "it was not behind"
    other.end()
    assert not other.wait()
    for rounds in (one, other):
        rounds.close()


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ({"enable_sleep_mode": True}, "enable_sleep_mode: not supported yet .*--enable-expert"),
        (
            {"batch_invariant": True},
            "batch_invariant: not supported yet .*--enable-expert-parallel",
        ),
        ({"data_parallel_size_local": 1}, "data_parallel_size_local: --enable-expert-parallel"),
        ({"data_parallel_rank": 1}, "data_parallel_rank: --enable-expert-parallel"),
        ({"data_parallel_hybrid_lb": True}, "data_parallel_hybrid_lb: --enable-expert-parallel"),
        ({"nnodes": 2}, "nnodes: --enable-expert-parallel"),
        ({"distributed_executor_backend": "uni"}, "distributed_executor_backend: --enable-expert"),
    ],
)
def test_what_cannot_be_together_is_named(flags, names):
    with pytest.raises(ModulmError, match=names):
        AsyncLLM("none", data_parallel_size=2, enable_expert_parallel=True, **flags)


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        ("LlamaForCausalLM", {}, "enable_expert_parallel: this model has no experts"),
        (
            "MixtralForCausalLM",
            {"num_local_experts": 3},
            "data_parallel_size with enable_expert_parallel: .*experts: 3 cannot be split across 2",
        ),
    ],
)
def test_models_whose_experts_cannot_be_shared(plugins, tmp_path, model, changes, words):
    folder = str(tiny_folder(plugins.load("models", model), tmp_path / "model", **changes))

    def replica(place):
        with pytest.raises(ModulmError, match=words):
            LLM(
                folder, distributed_executor_backend="pool", data_parallel_size=2,
                enable_expert_parallel=True, data_parallel_rank_local=place,
                data_parallel_group=str(tmp_path), use_tqdm_on_load=False, **FLAGS,
            )  # fmt: skip

    with ThreadPoolExecutor(2) as both:
        [*both.map(replica, range(2))]


def ranks():
    """The processes of workers that this process's engines have started."""
    found = []
    for engine in _children(os.getpid()):
        found += [pid for pid in _children(engine) if b"worker_process" in _command(pid)]
    return sorted(found)


def _children(pid):
    try:
        tasks = [*Path(f"/proc/{pid}/task").iterdir()]
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until(condition, what):
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < 300, what
        await asyncio.sleep(0.02)


@pytest.mark.exhaustive
def test_a_rank_that_dies_ends_all_replicas_which_begin_again(tmp_path, monkeypatch):
    folder = str(make_tiny(tmp_path / "model", "MixtralForCausalLM"))
    (scratch := tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    llm = AsyncLLM(folder, data_parallel_size=2, enable_expert_parallel=True, **FLAGS)

    async def ask(name, tokens):
        params = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, output_kind=OutputKind.CUMULATIVE
        )
        outputs = [one async for one in llm.generate(PROMPTS[len(name) % 8], params, name)]
        return outputs[-1].outputs[0]

    async def main():
        before = [list((await ask(name, 9)).token_ids) for name in ("a", "ab")]
        old, states = ranks(), [replica.status for replica in llm.replicas]
        assert (len(old), states) == (2, ["ok", "ok"])
        running = [asyncio.create_task(ask("x" * n, 50)) for n in range(3, 40)]
        await asyncio.sleep(0.05)
        os.kill(old[1], signal.SIGKILL)
        await until(lambda: {r.status for r in llm.replicas} == {"dead"}, "they live")
        with pytest.raises(ModulmError, match="no replica accepts requests .*killed by SIGKILL"):
            await llm.check_health()
        ended = await asyncio.gather(*running, return_exceptions=True)
        said = [str(e) if isinstance(e, Exception) else e.stop_reason or "" for e in ended]
        lost = [words for words in said if words]
        assert lost
        assert all("worker 0: its process was killed by SIGKILL" in w for w in lost)
        await until(lambda: all(r.status == "ok" for r in llm.replicas), "they did not come back")
        assert [replica.restarts for replica in llm.replicas] == [1, 1]
        await until(lambda: not any(map(_alive, old)), "ranks were left behind")
        assert [list((await ask(name, 9)).token_ids) for name in ("a", "ab")] == before

    try:
        asyncio.run(main())
        new = ranks()
    finally:
        llm.shutdown()
    assert len(new) == 2
    assert not any(map(_alive, new))
    assert not [*scratch.iterdir()]
