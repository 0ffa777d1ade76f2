"""Each family with the drafts that are on by default: the tokens and bits of plain decoding.

A family whose kernels do not keep the bits of a token, or that has recurrent states, drafts nothing
by default, and says so. Requests are asked three times, so that earlier answers are drafted from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from drafted import accepted, any_counts, outcome
from samples import parametrize_sample
from tests.plugins.models.test_contract import ARCHITECTURES
from tests.plugins.models.test_images import FAMILIES, OTHERS, Omni

from modulm import LLM, SamplingParams
from modulm.plugins import manager
from modulm.testing.models import tiny_folder
from modulm.testing.offering import offering
from modulm.testing.oracles import oracle_of
from modulm_towers.testing import ImageFamily, processor_of, prompts_of, write_family

#: Room for these prompts and answers, in every tiny model.
FLAGS: dict[str, Any] = {"max_model_len": 64, "num_gpu_blocks_override": 40}
PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 99, 7, 30], [7, 9, 11, 13] * 9, [17])]
GREEDY = SamplingParams(temperature=0, max_tokens=16, logprobs=2, ignore_eos=True)
PARAMS = [
    GREEDY, SamplingParams(temperature=0.9, seed=5, max_tokens=14, logprobs=0, ignore_eos=True),
    GREEDY.with_(repetition_penalty=1.3, presence_penalty=0.4),
]  # fmt: skip
GENERATING = [
    name
    for name in ARCHITECTURES
    if "generate" in (driver := manager.current().load("models", name)).tasks
    and not getattr(driver, "kit_not_run", "")
]
EVERYTHING = pytest.param("bfloat16", marks=pytest.mark.exhaustive)


@pytest.fixture(autouse=True)
def drafts_of_small_models(monkeypatch) -> None:
    """Models of any size draft by default, and chance decides how much is verified."""
    monkeypatch.setattr("modulm_speculation.automatic.LEAST", 1)
    any_counts(monkeypatch)


def check(folder: Path, prompts: Any, params: Any, caplog: Any, **flags: Any) -> None:
    """Compare an engine with the default drafts with one without."""
    caplog.set_level("INFO", "modulm.engine")
    found = []
    for more in ({}, {"speculative": "off"}):
        with LLM(str(folder), max_num_batched_tokens=48, **flags, **more) as llm:
            if "method" not in llm._core.info.parts.get("drafts", {}) and not more:
                assert "speculative decoding: none (the default on cpu" in caplog.text
                return
            asked = [llm.generate(prompts, params, use_tqdm=False) for _ in range(3)]
            found.append([output for outputs in asked for output in outputs])
    for drafted, plain in zip(*found, strict=True):
        assert outcome(drafted) == outcome(plain)
    assert accepted(found[0])


@pytest.mark.parametrize("dtype", ["float32", EVERYTHING])
@parametrize_sample("architecture", GENERATING, every=20)
def test_families(architecture, dtype, tmp_path, caplog) -> None:
    driver = manager.current().load("models", architecture)
    with offering(driver):
        folder = tiny_folder(driver, tmp_path / "tiny", oracle=oracle_of(driver))
        check(folder, PROMPTS, PARAMS, caplog, dtype=dtype, **FLAGS)


@parametrize_sample("architecture", FAMILIES, every=50)
def test_families_with_images(architecture, tmp_path, caplog) -> None:
    tokens, processor, more = FAMILIES[architecture]
    driver = manager.current().load("models", architecture)
    family = OTHERS.get(architecture, ImageFamily)(driver, tokens, processor, **more)
    folder = write_family(family, tmp_path)
    given = prompts_of(family, processor_of(architecture, folder, driver.media_family))
    flags = {"mm_processor_kwargs": family.options()} if isinstance(family, Omni) else {}
    prompts = [prompt.request(family.kind) for prompt in given]
    check(folder, prompts, GREEDY, caplog, kv_cache_memory_bytes=1 << 24, **flags)
