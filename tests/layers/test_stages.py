"""Layers that are split by bytes."""

from __future__ import annotations

import itertools

import pytest

from modulm.parallel import Mesh, ProcessGroup
from modulm.testing.checkpoints import make_tiny
from modulm.testing.session import Session
from modulm_layers.stages import even_stages


def cost(counts, layers, first, last):
    """Squares of what stages weigh."""
    left = iter(layers)
    sizes = [sum(itertools.islice(left, count)) for count in counts]
    sizes[0] += first
    sizes[-1] += last
    return sum(size * size for size in sizes)


@pytest.mark.parametrize(
    ("layers", "stages", "first", "last"),
    [
        ([10] * 5, 2, 0, 0),
        ([10, 10, 10, 70], 2, 0, 0),
        ([10] * 6, 3, 25, 0),
        ([10] * 6, 3, 0, 31),
        ([3, 40, 2, 2, 9, 1, 30], 4, 7, 11),
        ([5, 5, 5], 3, 99, 99),
    ],
)
def test_no_other_split_is_more_even(layers, stages, first, last):
    split = even_stages(layers, stages, first=first, last=last)
    ways = itertools.product(range(1, len(layers) + 1), repeat=stages)
    others = [way for way in ways if sum(way) == len(layers)]
    assert split in others
    assert cost(split, layers, first, last) == min(cost(way, layers, first, last) for way in others)


def test_of_equal_ways_the_first_stages_have_more():
    assert even_stages([10] * 5, 2) == (3, 2)
    assert even_stages([10] * 4, 2, last=25) == (3, 1)
    assert even_stages([10] * 28, 4, first=100, last=100) == (2, 12, 12, 2)


#: The last layer has experts, which weigh more than the layers before.
UNEQUAL = {"num_hidden_layers": 4, "first_k_dense_replace": 3, "moe_intermediate_size": 256}


@pytest.mark.parametrize(
    ("architecture", "changes", "counts"),
    [
        ("LlamaForCausalLM", {"num_hidden_layers": 3}, [2, 1]),
        ("DeepseekV3ForCausalLM", UNEQUAL, [3, 1]),
    ],
)
def test_stages_of_a_model(tmp_path, monkeypatch, architecture, changes, counts):
    folder = make_tiny(tmp_path / "model", architecture, **changes)
    layer_counts = []
    for rank in range(2):
        mesh = Mesh(pipeline=ProcessGroup(rank, 2))
        monkeypatch.setattr("modulm.loading.model.Mesh", lambda mesh=mesh: mesh)
        session = Session(folder, device="cpu", dtype="float32", kernels=["none"])
        layer_counts.append(len(session.model.layers))
    assert layer_counts == counts
