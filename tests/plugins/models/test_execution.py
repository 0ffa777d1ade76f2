"""Text families in the ways that an engine executes them, with `--everything`.

Prompts in chunks, after cached prefixes, preempted and over two ranks give what they give whole; an
adapter, int8 and stored fp8 give what merged, near and decoded weights give. The checks are those
of models that read images (`modulm_towers.testing`); test_contract.py compares the numbers with
transformers or an oracle.
"""

from __future__ import annotations

import pytest
from tests.plugins.models.test_contract import ARCHITECTURES

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
WHOLE = {"DiffLlamaForCausalLM": "heads in pairs", "MotifForCausalLM": "heads in pairs"}
#: Why no prefix is reused, besides states.
UNCACHED = {"MllamaForCausalLM": "the tiny model has an encoder's cache beside the decoder's"}
#: Without caches of attention there are no blocks to take from rows: their weights alone.
STATES = {"FalconMambaForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM"}
#: Weights of layers whose names are not the usual ones; see `check_weights`.
LINEAR = {
    "ChatGLMModel": r"layers\.\d+\.self_attention\.(query_key_value|dense)\.weight$",
    "DbrxForCausalLM": r"blocks\.\d+\.norm_attn_norm\.attn\.(Wqkv|out_proj)\.weight$",
    "ExaoneForCausalLM": r"h\.\d+\.attn\.attention\.\w+_proj\.weight$",
    "GPTBigCodeForCausalLM": r"h\.\d+\.(attn|mlp)\.c_(proj|fc)\.weight$",
    "GPTNeoForCausalLM": r"h\.\d+\.attn\.attention\.\w+_proj\.weight$",
    "LongcatFlashForCausalLM": r"layers\.\d+\.(self_attn|mlps)\.\d+\.(o|down)_proj\.weight$",
    "LongcatFlashNgramForCausalLM": r"layers\.\d+\.(self_attn|mlps)\.\d+\.(o|down)_proj\.weight$",
    "Zamba2ForCausalLM": r"layers\.\d+\.linear\.weight$",
}  # fmt: skip
#: Why a family's weights are not tried here.
OTHERWISE = {
    "GPT2LMHeadModel": "stored input by output; test_lora.py has its adapters",
    "HYV4ForCausalLM": "adapters are refused by name",
    "JAISLMHeadModel": "stored input by output, as GPT-2's",
}


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


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - STATES))
def test_chunks_prefixes_preemption_and_ranks(architecture, tmp_path):
    folder = write(architecture, tmp_path)
    ranks = architecture not in WHOLE
    reuses = architecture not in UNCACHED and not recurrent(folder)
    check_execution(folder, REQUESTS, reuses=reuses, ranks=ranks)


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - OTHERWISE.keys()))
def test_an_adapter_int8_and_stored_fp8(architecture, tmp_path):
    check_weights(write(architecture, tmp_path), REQUESTS, linear=LINEAR.get(architecture))
