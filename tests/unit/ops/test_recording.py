"""Recorded steps over fixed buffers: whole batches, with a model and its caches."""

from __future__ import annotations

import pytest
import torch

from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny
from modulm.testing.paged_attention import ReferenceAttention
from modulm.testing.recording import Repeater
from modulm.testing.session import Session

#: Full and windowed attention in groups of their own; a state beside attention.
ARCHITECTURES = ("Gemma3ForCausalLM", "BambaForCausalLM")


@pytest.fixture
def session(tmp_path, request):
    folder = make_tiny(tmp_path, request.param)
    plugins = manager.PluginManager()
    plugins.register("attention", "reference", ReferenceAttention)
    with manager.using(plugins):
        yield Session(folder, device="cpu", max_model_len=64, attention_backend="reference")


@pytest.mark.parametrize("session", ARCHITECTURES, indirect=True)
def test_steps_repeated_over_the_first_ones_batch_give_the_same_bits(session):
    forward = session.model.forward
    repeater = Repeater(forward)

    def texts(with_):
        for row in range(3):
            session.release(row)
        session.model.forward = with_
        results = [session.step({0: [5, 6, 7, 8], 1: [9, 10], 2: [7]})]
        results += [session.step({0: [9 + i], 1: [3], 2: [4 + i]}) for i in range(20)]
        return [*results, session.step({2: [1], 0: [2]})]

    for one, other in zip(texts(forward), texts(repeater), strict=True):
        assert all(torch.equal(one[row], other[row]) for row in one)
    assert (repeater.recorded, repeater.repeated, repeater.passed) == (3, 19, 0)
