"""The contract kit for platforms.

    from modulm.testing.platform import check_platform

    def test_contract():
        check_platform(MyPlatform)

Checks that need the device run only if `probe` finds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from modulm.contracts.platform import Memory, Platform, Probe

if TYPE_CHECKING:
    import torch

__all__ = ["check_platform"]


def check_platform(platform: type[Platform]) -> None:
    """Run the kit. Raises AssertionError with what was expected."""
    _check_class(platform)
    if platform.probe().score > 0:
        _check_device(platform())


def _check_class(platform: type[Platform]) -> None:
    probe = platform.probe()
    assert isinstance(probe, Probe), f"probe() gave {probe!r}, not a Probe"
    assert probe.score >= 0, f"probe score {probe.score} is negative"
    assert probe.reason, "probe() gives no reason"
    assert platform.probe() == probe, "probe() gives different results on the same machine"
    assert platform.name, "the platform has no name"
    for field in ("attention", "kernels"):
        names = getattr(platform, field)
        assert isinstance(names, tuple), f"{field} is {names!r}, not a tuple of names"
        assert len(set(names)) == len(names), f"{field} names a driver twice: {names}"
    assert platform.attention, "the platform names no attention backend"
    assert isinstance(platform.capabilities, frozenset), "capabilities is not a frozenset"
    assert isinstance(platform.no_effect, Mapping), "no_effect is not a mapping"
    for field in ("batched_tokens", "sequences"):
        offline, server = getattr(platform, field)
        assert offline > 0, f"{field} for offline use is {offline}"
        assert server > 0, f"{field} for the server is {server}"
    assert platform.block_size > 0, f"block_size is {platform.block_size}"


def _check_device(platform: Platform) -> None:
    import torch

    platform.start()
    memory = platform.memory()
    assert isinstance(memory, Memory), f"memory() gave {memory!r}"
    assert 0 <= memory.free <= memory.total, f"memory() is inconsistent: {memory}"
    assert isinstance(platform.device, torch.device), f"device is {platform.device!r}"
    assert platform.dtypes, "dtypes is empty"
    for name in platform.dtypes:
        _check_dtype(platform, name)
    for stored in ("float32", "float16", "bfloat16", "unheard_of"):
        chosen = platform.choose_dtype(stored)
        assert chosen in platform.dtypes, f"choose_dtype({stored!r}) gave {chosen!r}"
    platform.synchronize()
    platform.empty_cache()
    assert platform.describe().strip(), "describe() says nothing"


def _check_dtype(platform: Platform, name: str) -> None:
    """Multiply two small matrices in the dtype; the result is exact in every dtype."""
    import torch

    dtype = getattr(torch, name, None)
    assert isinstance(dtype, torch.dtype), f"{name!r} in dtypes is not a torch dtype"
    left = torch.eye(8, dtype=dtype, device=platform.device)
    right = torch.full((8, 8), 2.0, dtype=dtype, device=platform.device)
    product: torch.Tensor = left @ right
    platform.synchronize()
    assert product.cpu().float().eq(2.0).all(), f"a product in {name} is wrong"
