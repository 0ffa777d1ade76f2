"""Steps that are compiled before they are recorded."""

from __future__ import annotations

import pytest
import torch

from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny
from modulm.testing.paged_attention import ReferenceAttention
from modulm.testing.session import Session
from modulm_gpu.graphs import GraphRecorder, Graphs
from modulm_gpu.pieces import Breaks
from modulm_gpu.shapes import RecordedShapes


class NoGraphs(Graphs):
    """Captures nothing: what is launched meanwhile is done."""

    def begin(self) -> None:
        pass

    def end(self, failed=False):
        return lambda: None

    def unowned(self, tensor):
        return tensor

    def clear(self) -> None:
        pass


@pytest.fixture
def session(tmp_path):
    plugins = manager.PluginManager()
    plugins.register("attention", "reference", ReferenceAttention)
    with manager.using(plugins):
        yield Session(
            make_tiny(tmp_path, "LlamaForCausalLM"), device="cpu", max_model_len=64,
            attention_backend="reference", kernels="none",
        )  # fmt: skip


@pytest.mark.exhaustive
def test_what_is_recorded_was_compiled(session) -> None:
    """The compiler sees the model, in pieces between attention, and the numbers stay."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    forward, batches = session.model.forward, []
    session.model.forward = lambda batch: batches.append(batch) or forward(batch)
    session.step({0: [5, 6, 7], 1: [8, 9]})
    expected = session.step({0: [10], 1: [11]})
    batch = batches[-1]
    shapes = RecordedShapes(sizes=(2,), rows=2, decode=True, pieces=True)
    recorder = GraphRecorder(forward, shapes, NoGraphs(), Breaks(), compiled=backend)
    recorder.record(batch)
    assert recorder.reasons == {}
    assert compiled
    (recording,) = recorder._recordings.values()
    actual = session.model.logits(recording.result).log_softmax(-1)
    assert torch.allclose(actual, torch.cat([expected[0], expected[1]]), atol=1e-5)
