"""FlashInfer's wrappers as documented, by a stand-in: nothing here ran on hardware."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from attrs import evolve
from tests.plugins.attention.fake_flash import _rows

from modulm.errors import ConfigError
from modulm.ops import bind
from modulm.plugins import manager
from modulm.testing.attention import SPECS, check_attention
from modulm_attention_flashinfer import backend as module
from modulm_attention_flashinfer.backend import FlashInferAttention

_Cpu = manager.current().load("platforms", "cpu")


class Chip(_Cpu):
    capabilities = frozenset({"sm90"})
    dtypes = ("bfloat16", "float16")


class Wrapper:
    """What both wrappers have in common, strict about what they are given."""

    calls: ClassVar[set[str]] = set()

    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"

    def _plan(
        self, starts, indptr, indices, last_page_len, heads, kv_heads, head_dim, page_size, *,
        window_left=-1, logits_soft_cap=None, sm_scale=None, q_data_type="float16",
        kv_data_type=None, causal=True,
    ):  # fmt: skip
        assert starts.dtype == indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert len(indptr) == len(starts) == len(last_page_len) + 1
        assert int(indptr[-1]) == len(indices)
        assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
        assert head_dim in (64, 128, 256)
        pages = indptr.diff()
        table = torch.zeros(len(pages), int(pages.max()), dtype=torch.int32)
        for row, count in enumerate(pages.tolist()):
            table[row, :count] = indices[indptr[row] : indptr[row + 1]]
        lengths = ((pages - 1) * page_size + last_page_len).int()
        self.planned = (
            starts, table, lengths, sm_scale, causal, (window_left, -1), logits_soft_cap or 0.0,
            (heads, kv_heads, head_dim, page_size), q_data_type,
        )  # fmt: skip

    def run(self, q, paged_kv_cache):
        starts, table, lengths, scale, causal, window, softcap, shape, dtype = self.planned
        heads, kv_heads, head_dim, page_size = shape
        assert paged_kv_cache.shape[1:] == (2, page_size, kv_heads, head_dim)
        assert q.shape == (int(starts[-1]), heads, head_dim)
        assert q.dtype == paged_kv_cache.dtype == dtype
        self.calls.add(type(self).__name__)
        keys, values = paged_kv_cache.unbind(1)
        return _rows(q, starts, keys, values, table, lengths, scale, causal, window, softcap, None)


class Library:
    class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
        def plan(self, indptr, indices, last_page_len, *shape, **settings):
            assert "causal" not in settings
            self._plan(
                torch.arange(len(indptr)).int(), indptr, indices, last_page_len, *shape, **settings
            )

    class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
        def plan(self, qo_indptr, indptr, indices, last_page_len, *shape, causal=False, **settings):
            self._plan(qo_indptr, indptr, indices, last_page_len, *shape, causal=causal, **settings)


class Backend(FlashInferAttention):
    library = Library


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(module, "_WORKSPACE", 1024)


def test_contract() -> None:
    Wrapper.calls.clear()
    only = ["grouped heads", "window", "softcap", "both directions", "a scale of its own"]
    check_attention(Backend, Chip(), only=only, quick=True)
    assert len(Wrapper.calls) == 2


def test_what_cannot_be_done_has_a_reason() -> None:
    def refusal(what="grouped heads", platform=Chip, driver=Backend, **changes):
        spec = evolve(SPECS[what], **{"dtype": "bfloat16", "kv_dtype": "bfloat16", **changes})
        return driver.refuses(spec, platform(), bind())

    assert refusal() is None
    assert "no kernels for the chip" in refusal(platform=_Cpu)
    assert "not float32" in refusal(dtype="float32", kv_dtype="float32")
    assert "KV cache in float8_e5m2" in refusal(kv_dtype="float8_e5m2")
    assert "supports head sizes 64, 128, 256, not 80" in refusal("heads of 80")
    assert "as wide as keys" in refusal("smaller values")
    assert "window without a causal mask" in refusal("window", causal=False)
    for feature in ("alibi", "sinks", "latent", "spans", "cross", "scales"):
        assert "does not do" in refusal(feature)
    missing = type("Missing", (Backend,), {"library": "FlashInfer is not installed (no)"})
    assert refusal(driver=missing) == "FlashInfer is not installed (no)"
    spec = evolve(SPECS["grouped heads"], dtype="float16", kv_dtype="float16")
    with pytest.raises(ConfigError, match="takes no options"):
        Backend(spec, Chip(), bind(), 16, {"a": 1})
