"""The contract kit for platforms.

    from modulm.testing.platform import check_platform

    def test_contract():
        check_platform(MyPlatform)

Checks that need the device run only if `probe` finds it. Without it, the class is still checked,
and what an object of it says without touching the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from modulm.contracts.platform import Memory, Platform, Probe, StepSizes
from modulm.errors import ModulmError
from modulm.plugins import manager

if TYPE_CHECKING:
    import torch

__all__ = ["check_platform", "usable_platforms"]


def usable_platforms() -> list[Platform]:
    """Return the installed platforms whose devices this machine has."""
    plugins, usable = manager.current(), []
    for declaration in plugins.names("platforms"):
        with suppress(ModulmError):
            driver = plugins.load_declared(declaration)
            if driver.probe().score > 0:
                usable.append(driver())
    return usable


def check_platform(platform: type[Platform]) -> str:
    """Run the kit; return what was left out and why, or "".

    Raises AssertionError with what was expected.
    """
    _check_class(platform)
    probe = platform.probe()
    if probe.score > 0:
        _check_device(platform())
        _check_sizes(platform())
        return ""
    unanswered = _check_absent(platform)
    return f"without the device ({probe.reason}): memory, tensors{unanswered} were not tried"


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
    for field in ("attention", "kernels", "collectives"):
        assert all(isinstance(name, str) and name for name in getattr(platform, field)), (
            f"{field} has something other than names: {getattr(platform, field)}"
        )
    assert isinstance(probe.score, int), f"probe score {probe.score!r} is not an integer"


def _check_absent(platform: type[Platform]) -> str:
    """Check what a platform answers without its device; return what it does not answer."""
    import torch

    try:
        device = platform()
    except Exception:
        return " and what an object says"
    answers: dict[str, object] = {}
    questions = ("device", "dtypes", "describe", "choose_dtype")
    for name in questions:
        try:
            answer = getattr(device, name)
            answers[name] = answer("float32") if name == "choose_dtype" else answer
            if name == "describe":
                answers[name] = device.describe()
        except Exception:  # noqa: S112 - it asks the device
            continue
    if "device" in answers:
        assert isinstance(answers["device"], torch.device), f"device is {answers['device']!r}"
    if "describe" in answers:
        assert str(answers["describe"]).strip(), "describe() says nothing"
    if "dtypes" in answers:
        names = answers["dtypes"]
        assert isinstance(names, tuple), f"dtypes is {names!r}, not a tuple of names"
        assert names, "dtypes is empty"
        for name in names:
            dtype = getattr(torch, str(name), None)
            assert isinstance(dtype, torch.dtype), f"{name!r} in dtypes is not a torch dtype"
        if "choose_dtype" in answers:
            chosen = answers["choose_dtype"]
            assert chosen in names, f"choose_dtype('float32') gave {chosen!r}"
    _check_sizes(device)
    return "".join(f", {name}" for name in questions if name not in answers)


def _check_sizes(platform: Platform) -> None:
    """Check that steps of every size can be padded, if they are padded."""
    sizes = platform.step_sizes(16, 256)
    if sizes is None:
        return
    assert isinstance(sizes, StepSizes), f"step_sizes() gave {sizes!r}"
    for name, most in (("rows", 16), ("tokens", 256), ("samples", 16)):
        steps = getattr(sizes, name)
        assert list(steps) == sorted(set(steps)), f"step_sizes().{name} {steps} does not ascend"
        assert steps, f"step_sizes().{name} is empty"
        assert steps[-1] >= most, f"step_sizes().{name} ends at {steps[-1]}, below {most}"


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
