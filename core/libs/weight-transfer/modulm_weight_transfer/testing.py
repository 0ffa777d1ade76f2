"""The contract kit for weight-transfer backends.

from modulm_weight_transfer.testing import check_weight_transfer

def test_contract():
    check_weight_transfer(MyBackend)

The sample is a function of a folder that returns a `Transfer`: what a trainer would send. By
default it is the driver's `kit_sample`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from modulm.contracts.loader import StoredTensor
from modulm.errors import EngineError, RequestError
from modulm.testing.kit import sample_of
from modulm_weight_transfer.contract import TensorSource, WeightTransferBackend

__all__ = ["Transfer", "check_weight_transfer"]

_RANKS = 2
#: Values that no field of an update should accept; None leaves the field out.
_WRONG: tuple[Any, ...] = (None, 7, "../../etc", [], {"no": "such"}, [[[]]])


@frozen(eq=False)
class Transfer:
    """One update as a trainer would send it.

    fields: of the backend's Config. init_info, update_info: of the two calls. tensors: what the
    update has, in order.
    """

    tensors: Mapping[str, Tensor]
    update_info: Mapping[str, Any]
    fields: Mapping[str, Any] = field(factory=dict)
    init_info: Mapping[str, Any] = field(factory=dict)


def check_weight_transfer(
    driver: type[WeightTransferBackend], *, sample: Callable[[Path], Transfer] | None = None
) -> None:
    """Run the kit: each rank reads an update; malformed ones are refused.

    Raises AssertionError with what was expected, KitNotRun without a sample.
    """
    write = sample_of(driver, sample, "a function of a folder that returns a Transfer")
    with tempfile.TemporaryDirectory() as folder:
        transfer = write(Path(folder).resolve())
        for rank in range(_RANKS):
            with _connected(driver, transfer, rank) as backend:
                _check_update(backend, transfer)
        with _connected(driver, transfer, 0) as backend:
            _check_refusals(backend, transfer)
            if not driver.streams:
                _check_update(backend, transfer)


@contextmanager
def _connected(
    driver: type[WeightTransferBackend], transfer: Transfer, rank: int
) -> Iterator[WeightTransferBackend]:
    backend = driver(driver.Config(**transfer.fields), rank, _RANKS)
    try:
        backend.connect(dict(transfer.init_info))
        yield backend
    finally:
        backend.close()
        backend.close()


def _check_update(backend: WeightTransferBackend, transfer: Transfer) -> None:
    info = dict(transfer.update_info)
    source = backend.open(info)
    try:
        assert info == dict(transfer.update_info), "open() changes update_info"
        index = source.index()
        _check_index(index, transfer.tensors)
        for _ in range(1 if backend.streams else 2):
            read = dict(source.read())
            assert list(read) == list(index), "read() gives other tensors than the index, or order"
            for name, tensor in transfer.tensors.items():
                _check_tensor(name, read[name], tensor)
    finally:
        source.close()


def _check_index(index: Mapping[str, StoredTensor], tensors: Mapping[str, Tensor]) -> None:
    assert list(index) == list(tensors), f"index() gives {list(index)}, not {list(tensors)}"
    for name, tensor in tensors.items():
        stated = index[name]
        assert isinstance(stated, StoredTensor), f"index(): {name} is {stated!r}"
        shape, dtype = tuple(stated.shape), str(tensor.dtype).removeprefix("torch.")
        assert shape == tuple(tensor.shape), f"index(): {name} has shape {shape}"
        assert str(stated.dtype).removeprefix("torch.") == dtype, f"index(): {name}: {stated.dtype}"


def _check_tensor(name: str, read: Any, tensor: Tensor) -> None:
    assert isinstance(read, Tensor), f"read(): {name} is {read!r}, not a tensor"
    same = read.dtype == tensor.dtype and read.shape == tensor.shape
    assert same, f"read(): {name} is {read.dtype} {list(read.shape)}"
    assert torch.equal(read.cpu(), tensor), f"read(): {name} has other numbers"


def _check_refusals(backend: WeightTransferBackend, transfer: Transfer) -> None:
    """Check that wrong fields are a RequestError before any tensor is read."""
    for key in transfer.update_info:
        for value in _WRONG:
            info = {**transfer.update_info, key: value}
            if value is None:
                del info[key]
            what = f"update_info without {key}" if value is None else f"{key}={value!r}"
            _check_refused(backend, info, what)


def _check_refused(backend: WeightTransferBackend, info: Mapping[str, Any], what: str) -> None:
    source: TensorSource | None = None
    try:
        source = backend.open(info)
        source.index()
        for _ in () if backend.streams else source.read():
            pass
    except RequestError as error:
        if not error.param:
            raise AssertionError(f"{what}: the RequestError names no field") from error
        return
    except EngineError:
        return
    except Exception as error:
        raise AssertionError(
            f"{what} raises {type(error).__name__}, not RequestError: {error}"
        ) from error
    finally:
        if source is not None:
            source.close()
    raise AssertionError(f"{what} is accepted")
