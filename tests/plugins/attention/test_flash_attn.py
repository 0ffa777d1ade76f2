"""FlashAttention's functions as documented, by stand-ins: nothing here ran on hardware."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from tests.plugins.attention.fake_flash import Flash2, Flash3, Flash25

from modulm.errors import ConfigError
from modulm.ops import bind
from modulm.plugins import manager
from modulm.testing.attention import SPECS, check_attention
from modulm_attention_flash_attn.backend import FlashAttention
from modulm_attention_flash_attn.library import of_module

_Cpu = manager.current().load("platforms", "cpu")
NONE = "FlashAttention is not installed"


class Chip(_Cpu):
    """Poses as a Hopper."""

    capabilities = frozenset({"sm90"})
    dtypes = ("bfloat16", "float16")


class Older(Chip):
    capabilities = frozenset({"sm80"})


def backend(two=None, three=None):
    libraries = {
        2: NONE if two is None else of_module(two, 2),
        3: NONE if three is None else of_module(three, 3),
    }
    return type("Backend", (FlashAttention,), {"libraries": libraries})


@pytest.mark.parametrize("given", [{"two": Flash2}, {"three": Flash3}], ids=["2", "3"])
def test_contract(given) -> None:
    (library,) = given.values()
    library.calls.clear()
    only = ["grouped heads", "window", "softcap", "alibi", "both directions", "heads of 80"]
    check_attention(backend(**given), Chip(), only=only, quick=True)
    assert set(library.calls) == {"varlen", "with_kvcache"}


def refusal(driver, platform=Chip, what="grouped heads", **changes):
    spec = evolve(SPECS[what], **{"dtype": "bfloat16", "kv_dtype": "bfloat16", **changes})
    return driver.refuses(spec, platform(), bind())


def test_what_cannot_be_done_has_a_reason() -> None:
    two, three, both = backend(Flash2), backend(three=Flash3), backend(Flash2, Flash3)
    assert refusal(both) is None
    assert "no kernels for the chip of platform cpu" in refusal(both, platform=_Cpu)
    assert "no kernels for the chip" in refusal(three, platform=Older)
    assert refusal(two, platform=Older) is None
    assert "not float32" in refusal(two, dtype="float32", kv_dtype="float32")
    assert "KV cache in float8_e4m3fn" in refusal(two, kv_dtype="float8_e4m3fn")
    assert "multiples of 8 up to 256, not 320" in refusal(two, head_dim=320)
    assert "multiples of 8 up to 256, not 44" in refusal(two, head_dim=44)
    assert "as wide as keys" in refusal(two, what="smaller values")
    assert refusal(two, what="alibi") is None
    assert "3 does not support ALiBi" in refusal(three, what="alibi")
    assert refusal(both, what="alibi") is None  # version 2 does it
    assert "the order of ALiBi and a softcap" in refusal(two, what="alibi", softcap=3.0)
    assert "needs version 2.6 or later" in refusal(backend(Flash25), what="softcap")
    for feature in ("sinks", "latent", "spans", "cross", "scales", "picks", "selected runs"):
        assert "does not do" in refusal(both, what=feature)
    assert refusal(backend()) == NONE


def test_without_the_library_the_reason_names_it() -> None:
    if FlashAttention.libraries is None and not torch.version.cuda:
        assert "FlashAttention 3 is not installed" in refusal(FlashAttention)
        assert "FlashAttention 2 is not installed" in refusal(FlashAttention)


def test_the_version_can_be_chosen() -> None:
    spec = evolve(SPECS["grouped heads"], dtype="float16", kv_dtype="float16")
    both = backend(Flash2, Flash3)

    def make(block_size=256, **options):
        return both(spec, Chip(), bind(), block_size, options)

    assert make().library.version == 3
    assert make(flash_attn_version=2).library.version == 2
    with pytest.raises(
        ConfigError, match=r"block_size.*multiple of 256 for FlashAttention 2, not 16"
    ):
        make(16, flash_attn_version=2)
    assert make(16).library.version == 3
    for wrong in ({"flash_attn_version": 4}, {"surprise": 1}):
        with pytest.raises(ConfigError, match=r"attention\.flash_attn"):
            make(**wrong)


def test_decode_steps_can_be_recorded_and_others_cannot() -> None:
    import numpy as np

    from modulm.contracts.attention import StepLayout

    spec = evolve(SPECS["grouped heads"], dtype="float16", kv_dtype="float16")
    flash = backend(Flash2)(spec, Chip(), bind(), 256, {})

    def plan(counts):
        counts = np.array(counts, np.int32)
        starts = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
        slots = np.arange(counts.sum(), dtype=np.int64)
        return flash.plan(
            StepLayout(256, np.zeros((len(counts), 1), np.int32), starts, counts, slots)
        )

    assert plan([1, 1, 1]).key() == ()
    assert plan([1, 2]).key() is None
    assert plan([1, 0]).key() is None
