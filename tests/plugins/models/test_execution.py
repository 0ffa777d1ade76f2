"""Text families in the ways that an engine executes them, with `--everything`.

Prompts in chunks, after cached prefixes, preempted and over two ranks give what they give whole; an
adapter, int8 and stored fp8 give what merged, near and decoded weights give. The checks are those
of models that read images (`modulm_towers.testing`); test_contract.py compares the numbers with
transformers or an oracle.
"""

from __future__ import annotations

import pytest

from modulm.contracts.state import StateSpec
from modulm.plugins import manager
from modulm.testing.models import tiny_folder
from modulm.testing.oracles import oracle_of
from modulm.testing.session import Session
from modulm_towers.testing import check_execution, check_weights

pytestmark = pytest.mark.exhaustive

REQUESTS = [
    {"prompt_token_ids": [5 + i, 9, 40, 7, 21, 33, 8] * (3 - i) + [60 + i, 4]} for i in range(3)
]
#: Why two ranks cannot share a tiny model.
WHOLE = {"DiffLlamaForCausalLM": "heads in pairs"}
#: Why no prefix is reused, besides states.
UNCACHED = {"MllamaForCausalLM": "the tiny model has an encoder's cache beside the decoder's"}
#: Families that have been run so far; the others of test_contract.py follow as they are run.
TRIED = [
    "BloomForCausalLM", "DiffLlamaForCausalLM", "Fairseq2LlamaForCausalLM", "Gemma2ForCausalLM",
    "LlamaForCausalLM", "MllamaForCausalLM",
]  # fmt: skip
#: Without caches of attention there are no blocks to take from rows: their weights alone.
STATES = ["FalconMambaForCausalLM", "MambaForCausalLM"]


def write(architecture, folder):
    """A tiny checkpoint; skips models that generate no text."""
    driver = manager.current().load("models", architecture)
    if "generate" not in driver.tasks:
        pytest.skip("generates no text")
    return tiny_folder(driver, folder / "tiny", oracle=oracle_of(driver))


def recurrent(folder):
    """Whether the model has states, of which such short prefixes keep none."""
    caches = Session(folder, device="cpu", dtype="float32").model.caches
    return any(isinstance(cache.spec, StateSpec) for cache in caches)


@pytest.mark.parametrize("architecture", TRIED)
def test_chunks_prefixes_preemption_and_ranks(architecture, tmp_path):
    folder = write(architecture, tmp_path)
    ranks = architecture not in WHOLE
    reuses = architecture not in UNCACHED and not recurrent(folder)
    check_execution(folder, REQUESTS, reuses=reuses, ranks=ranks)


@pytest.mark.parametrize("architecture", [*TRIED, *STATES])
def test_an_adapter_int8_and_stored_fp8(architecture, tmp_path):
    check_weights(write(architecture, tmp_path), REQUESTS)
