"""Steps that are repeated as graphs, on the test device: the same tokens, and what it refuses."""

from __future__ import annotations

import gc
import weakref
from functools import cache

import pytest
import torch
from samples import parametrize_sample

from modulm import LLM, SamplingParams
from modulm.config import EngineConfig
from modulm.contracts.platform import Memory
from modulm.engine.worker.worker import Worker
from modulm.plugins import manager
from modulm.plugins.manager import PluginManager
from modulm.testing.checkpoints import make_tiny
from modulm.testing.queued import HostRead
from modulm_gpu.testing import GatherAttention, GraphError, GraphPlatform, TapeGraphs
from modulm_weight_offload.testing import QueuedCopies

PROMPTS = [[5, 99, 7, 300], [17], [8] * 40, [7, 9, 11], list(range(100, 118))]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=5, logprobs=3, ignore_eos=True),
    SamplingParams(temperature=1.1, seed=5, max_tokens=6, logprobs=0, top_p=0.8),
    SamplingParams(temperature=0, max_tokens=4, repetition_penalty=1.2),
    SamplingParams(temperature=0, max_tokens=3, logprobs=1, prompt_logprobs=2),
]
FLAGS = {
    "num_gpu_blocks_override": 60, "max_num_batched_tokens": 32, "block_size": 16,
    "max_num_seqs": 4, "max_model_len": 80, "dtype": "float32", "device": "graphs",
    "attention_backend": "gather", "kernels": "none", "cudagraph_capture_sizes": (2, 4, 16, 32),
}  # fmt: skip
#: Mode -> recordings of sizes 2, 4, 16 and 32: in pieces or whole, and of decode steps.
RECORDED = {"PIECEWISE": 4, "FULL": 6, "FULL_DECODE_ONLY": 2, "FULL_AND_PIECEWISE": 6}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Full attention; windows beside it; states beside it."""
    home = tmp_path_factory.mktemp("graphs")
    names = ("Qwen3ForCausalLM", "Gemma3ForCausalLM", "BambaForCausalLM")
    return {name: str(make_tiny(home / name, name)) for name in names}


def engine(folder, **flags):
    return LLM(folder, **{**FLAGS, **flags})


def answers(folder, platform=GraphPlatform, **flags):
    with using(platform), engine(folder, **flags) as llm:
        requests = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(requests, PARAMS, use_tqdm=False)
        outputs += llm.generate(requests[:1], PARAMS[:1], use_tqdm=False)
    return [
        (o.outputs[0].token_ids, o.outputs[0].finish_reason, o.outputs[0].logprobs is None)
        for o in outputs
    ]


def using(platform=GraphPlatform):
    plugins = PluginManager()
    plugins.register("platforms", "graphs", platform)
    plugins.register("attention", "gather", GatherAttention)
    return manager.using(plugins)


@pytest.fixture(scope="module")
def expected(folders):
    """The answers of a model's eager steps."""
    return cache(lambda name: answers(folders[name], enforce_eager=True))


@parametrize_sample("mode", RECORDED, every=4)
def test_the_same_tokens_as_without_graphs(folders, expected, mode) -> None:
    name = "Qwen3ForCausalLM"
    assert answers(folders[name], cudagraph_mode=mode, async_scheduling=True) == expected(name)
    recorder, graphs = GraphPlatform.recorder, GraphPlatform.graphs
    assert recorder.recordings == RECORDED[mode]
    assert recorder.reasons == {}
    # Four steps of the fifteen compute tokens of a prompt.
    assert recorder.passed == (4 if mode == "FULL_DECODE_ONLY" else 0)
    assert recorder.repeated + recorder.passed > 12
    assert graphs.replayed > recorder.repeated or mode.startswith("FULL")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`make test` tries steps ahead with states, and steps in order with windows."""
    if "ahead" in metafunc.fixturenames:
        grid = [("BambaForCausalLM", True)]
        if metafunc.config.getoption("--everything"):
            grid += [(name, not ahead) for name, ahead in grid]
        metafunc.parametrize(("name", "ahead"), grid)


def test_windows_and_states(folders, expected, name, ahead) -> None:
    assert answers(folders[name], async_scheduling=ahead) == expected(name)
    recorder = GraphPlatform.recorder
    assert recorder.repeated > 8, recorder.reasons
    # Layers that keep states ask for the rows: their steps are recorded whole, or not at all.
    states = name.startswith("Bamba")
    assert ("pieces" in recorder.reasons) == states
    assert recorder.recordings == (2 if states else 6)


class RecordedCopies(QueuedCopies):
    """Copies that are part of a graph while one is captured, and may not leave it.

    They run as late as they can: when something waits for them.
    """

    def _tape(self):
        return None if GraphPlatform.graphs is None else GraphPlatform.graphs._tape

    def start(self, target, source):
        tape = self._tape()
        return super().start(target, source) if tape is None else [tape, target, source]

    def wait(self, copy):
        if not isinstance(copy, list):
            super().wait(copy)
            return
        tape, target, source = copy
        if tape is not self._tape():
            raise GraphError("waits for a copy of another graph")
        tape.steps.append(lambda: target.copy_(source))


class OffloadingGraphs(GraphPlatform):
    def host_copies(self):
        return RecordedCopies(self._work, maps=False)


@parametrize_sample(
    "flags",
    [
        {"offload_group_size": 1, "offload_prefetch_step": 2},
        {"offload_group_size": 3, "offload_num_in_group": 2},
    ],
    every=2,
)
def test_layers_in_host_memory(folders, expected, flags) -> None:
    """A recorded step copies them; in pieces only where no copy lasts longer than a piece."""
    name = "Qwen3ForCausalLM"
    assert answers(folders[name], OffloadingGraphs, **flags) == expected(name)
    recorder = GraphPlatform.recorder
    assert recorder.repeated > 8
    assert recorder.reasons == {"pieces": "GraphError: waits for a copy of another graph"}


@pytest.mark.exhaustive
def test_eager_steps_record_nothing(folders) -> None:
    GraphPlatform.recorder = None
    with using(), engine(folders["Qwen3ForCausalLM"], cudagraph_mode="NONE"):
        pass
    assert GraphPlatform.recorder is None
    with using(), engine(folders["Qwen3ForCausalLM"], optimization_level=0):
        pass
    assert GraphPlatform.recorder is None


@pytest.mark.exhaustive
def test_attention_that_cannot_be_recorded_is_left_out(folders, expected) -> None:
    name = "Qwen3ForCausalLM"
    results = answers(folders[name], attention_backend="sdpa")
    assert [tokens for tokens, *_ in results] == [tokens for tokens, *_ in expected(name)]
    recorder = GraphPlatform.recorder
    assert "cannot be recorded" in recorder.reasons["whole"]
    assert recorder.recordings == 4  # in pieces, decode steps as well
    assert recorder.repeated > 12


def worker(folder, **flags):
    config = EngineConfig.from_keywords(model=folder, **{**FLAGS, **flags})
    return Worker(config, manager.current())


@pytest.mark.exhaustive
def test_what_lies_in_the_null_block_changes_no_other_row(folders) -> None:
    """Three rows in a recorded step of four, bit for bit, whatever the fourth one sees."""
    outputs = []
    for value in (0.0, 1e30, torch.nan):
        with using():
            built = worker(folders["Qwen3ForCausalLM"])
            runner = built.runner
            for cache in runner.builder.caches:
                cache[0] = value
            outputs.append(decoded(runner))
            assert runner._forward.repeated == 1
            built.close()
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def decoded(runner):
    """Logits of a step of three rows, after prompts of two tokens."""
    import numpy as np
    from attrs import evolve

    from modulm.engine.worker.profiling import null_plan

    def step(start, count):
        plan = null_plan(np.full(3, count, np.int32), [16])
        tokens = np.arange(3 * count, dtype=np.int64) + 40
        tables = (np.array([[1], [2], [3]], np.int32),)
        return evolve(plan, starts=np.full(3, start, np.int32), tokens=tokens, tables=tables)

    with torch.inference_mode(), runner.platform.queue():
        runner._direct(runner.builder.build(step(0, 2), np.array([1, 3, 5])))
        hidden, _ = runner._together(step(2, 1), np.arange(3))
        got = runner.platform.fetch((runner.model.logits(hidden),))
    return torch.from_numpy(got.wait()[0].copy())


@pytest.mark.exhaustive
def test_sleep_gives_memory_back_and_waking_records_again(folders) -> None:
    alive = {}

    class Watched(GraphPlatform):
        def empty_cache(self):
            alive.update({name: ref() is not None for name, ref in self.refs.items()})

    with using(Watched):
        built = worker(folders["Qwen3ForCausalLM"])
        first = decoded(built.runner)
        weight = next(built.runner.model.parameters())

        def watch():
            recorder = built.runner._forward
            recording = next(iter(recorder._recordings.values()))
            Watched.refs = {
                "cache": weakref.ref(built.runner.builder.caches[0]),
                "recorder": weakref.ref(recorder),
                "input": weakref.ref(recording.inputs._tensors[0]),
            }

        watch()
        Watched.refs["weight"] = weakref.ref(weight)
        GraphPlatform.recorder = GraphPlatform.graphs = None
        built.sleep(1)
        assert alive == {"cache": False, "recorder": False, "input": False, "weight": True}
        built.wake_up()
        assert torch.equal(decoded(built.runner), first)
        watch()
        Watched.refs["weight"] = weakref.ref(weight)
        del weight
        GraphPlatform.recorder = GraphPlatform.graphs = None
        built.sleep(2)
        assert not any(alive.values())
        built.wake_up()
        assert torch.equal(decoded(built.runner), first)
        assert built.runner._forward.recordings == 6
        watch()
        Watched.refs["weight"] = weakref.ref(next(built.runner.model.parameters()))
        GraphPlatform.recorder = GraphPlatform.graphs = None
        built.close()
        assert not any(alive.values())


@pytest.mark.exhaustive
def test_recordings_are_counted_before_the_caches_get_the_rest(folders) -> None:
    blocks_by_size = {}

    class Counting(GraphPlatform):
        def memory(self):
            return Memory(4 << 20, 4 << 20)

        def reset_peak_memory(self):
            return 0

        def peak_memory(self):
            return 0

    with using(Counting):
        for size in (0, 100_000):
            TapeGraphs.each = size
            flags = {"num_gpu_blocks_override": None, "max_num_seqs": 999}
            flags["max_num_batched_tokens"] = 999
            flags |= {"cudagraph_capture_sizes": (2, 4), "cudagraph_mode": "FULL_DECODE_ONLY"}
            built = worker(folders["Qwen3ForCausalLM"], **flags)
            (group,) = built.capacity.groups
            blocks_by_size[size] = group.blocks, built.runner._forward.recordings
            block = built.runner.builder.caches[0][0].nbytes * len(built.runner.builder.caches)
            built.close()
        TapeGraphs.each = 0
    # One graph for each recording, and they take as much each.
    assert blocks_by_size[0][1] == blocks_by_size[100_000][1] == 2
    assert 0 <= blocks_by_size[0][0] - blocks_by_size[100_000][0] - 2 * 100_000 // block <= 1


REFUSED = {
    "a value is read": lambda x: x.sum().item(),
    "a shape depends on values": lambda x: x.nonzero(),
    "the host brings numbers": lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_capture_fails_on_what_a_device_would_not_capture(what) -> None:
    platform = GraphPlatform()
    graphs = TapeGraphs(platform.work)
    x = torch.ones(3)
    with platform.queue():
        graphs.begin()
        with pytest.raises((HostRead, GraphError)):
            REFUSED[what](x)
        graphs.end(failed=True)
        y = x + 1  # goes on outside
        assert platform.fetch((y,)).wait()[0].tolist() == [2, 2, 2]


def test_a_capture_fails_when_the_host_waits() -> None:
    platform = GraphPlatform()
    graphs = TapeGraphs(platform.work)
    array = torch.zeros(2).numpy()
    with platform.queue():
        before = platform.fetch((torch.ones(1),))
        graphs.begin()
        for wait in (before.wait, platform.synchronize):
            with pytest.raises(HostRead, match="while a graph is captured"):
                wait()
        with pytest.raises(HostRead, match="sends something while a graph"):
            platform.staging().send((array,))
        graphs.end(failed=True)


def test_a_graph_does_again_what_was_captured_and_nothing_at_the_capture() -> None:
    platform = GraphPlatform()
    graphs = TapeGraphs(platform.work)
    x, total = torch.ones(3), torch.zeros(3)
    with platform.queue():
        graphs.begin()
        fresh = torch.zeros(3)
        fresh += x
        total.add_(fresh * 2)
        replay = graphs.end()
        assert platform.fetch((total,)).wait()[0].tolist() == [0, 0, 0]
        for turn in range(1, 4):
            replay()
            assert platform.fetch((total,)).wait()[0].tolist() == 3 * [2 * turn]


def test_a_graph_that_reads_what_was_freed_is_found() -> None:
    platform = GraphPlatform()
    graphs = TapeGraphs(platform.work)
    x, out = torch.ones(3), torch.zeros(3)
    with platform.queue():
        graphs.begin()
        inner = x * 2
        out.copy_(inner)
        replay = graphs.end()
        del inner  # the pool's, which the graph has
        replay()
        assert platform.fetch((out,)).wait()[0].tolist() == [2, 2, 2]
        del x
        gc.collect()
        replay()
        with pytest.raises(GraphError, match="freed"):
            platform.synchronize()
