"""The segment of an update stays mapped for the next one; its writer has checked the values."""

from __future__ import annotations

import threading

import pytest
import torch

from modulm.errors import RequestError
from modulm_weight_transfer.finite import is_finite
from modulm_weights_shared_memory import SharedWeights, segment
from modulm_weights_shared_memory.backend import SharedMemoryBackend, SharedMemoryConfig


@pytest.fixture
def backend():
    backend = SharedMemoryBackend(SharedMemoryConfig(), 0, 1)
    yield backend
    backend.close()


def read(backend, info):
    source = backend.open(info)
    tensors = dict(source.read())
    source.close()
    return tensors


def test_the_mapping_stays(backend):
    """Later values are seen, and memory that a reader has written to is not used again."""
    with SharedWeights({"a": torch.zeros(5000)}) as shared:
        first = read(backend, shared.info)["a"]
        shared.write({"a": torch.ones(5000)})
        second = read(backend, shared.info)["a"]
        assert second.data_ptr() == first.data_ptr()
        assert bool(second.eq(1).all())
        source = backend.open(shared.info)
        next(iter(source.read()))[1].add_(5)
        source.close()
        shared.write({"a": torch.full((5000,), 2.0)})
        assert bool(read(backend, shared.info)["a"].eq(2).all())


def test_the_mapping_ends_with_its_trainer(backend, monkeypatch):
    monkeypatch.setattr(segment, "_LOOK", 0.01)
    before = set(threading.enumerate())
    with SharedWeights({"a": torch.zeros(5000)}) as shared:
        read(backend, shared.info)
        (watch,) = set(threading.enumerate()) - before
    watch.join(300)
    assert not watch.is_alive()
    assert backend._kept._memory is None
    with pytest.raises(RequestError, match="segment"):
        backend.open(shared.info)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_writer_marks_finite_tensors(backend, value, dtype):
    """Each write marks what it has written; another description of the memory has no marks."""
    weight = torch.zeros(3, 100_000, dtype=dtype)
    with SharedWeights({"a": weight, "b": weight[:, :2], "ids": torch.arange(4)}) as shared:
        assert backend.checked(backend.open(shared.info)) == {"a", "b", "ids"}
        bad = weight.clone()
        bad[2, 99_999] = value
        assert not is_finite(bad)
        shared.write({"a": bad, "b": weight[:, 2:4]})
        assert backend.checked(backend.open(shared.info)) == {"b", "ids"}
        shared.write({"a": weight, "b": bad[:, -2:]})
        assert backend.checked(backend.open(shared.info)) == {"a", "ids"}
        fewer = {
            **shared.info,
            **{k: shared.info[k][:1] for k in ("names", "dtype_names", "shapes")},
        }
        assert backend.checked(backend.open(fewer)) == frozenset()
