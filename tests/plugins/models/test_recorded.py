"""Which models' decode steps the CPU kernels record, and that recorded steps give the same bits."""

from __future__ import annotations

import importlib

import pytest
import torch
from samples import parametrize_sample

from modulm.plugins import manager
from modulm.testing.models import tiny_folder
from modulm.testing.oracles import oracle_of
from modulm.testing.session import Session

kernels = pytest.importorskip(
    "modulm_kernels_cpu", reason="no compiled CPU kernels: make setup says why"
)
replay = importlib.import_module("modulm_kernels_cpu.replay")

#: Why a model's steps run call by call; docs/performance.md says the same.
CALL_BY_CALL = {
    "AliceAIForCausalLM": "sums over the outputs of earlier blocks",
    "BailingMoeV2_5ForCausalLM": "norms over parts of lightning attention's output",
    "DiffLlamaForCausalLM": "values of two heads at once",
    "DoryForCausalLM": "vectors of length 1",
    "Gemma3nForCausalLM": "vectors of a layer's own, an average of several streams",
    "Gemma4ForCausalLM": "vectors of a layer's own",
    "Gemma4UnifiedForCausalLM": "vectors of a layer's own",
    "IQuestLoopCoderForCausalLM": "gates between two attentions",
    "K2HorizonForCausalLM": "norms over parts of the stream, experts for values",
    "KimiLinearForCausalLM": "a delta rule whose rows fade at speeds of their own",
    "Llama4ForCausalLM": "attention in chunks, queries that grow",
    "Ministral3ForCausalLM": "queries that grow",
    "HYV4ForCausalLM": "experts with bounded activations, several streams",
    "HrmTextForCausalLM": "sums of two states",
    "Step3p5ForCausalLM": "gates per head",
    "LongcatFlashForCausalLM": "experts that return their input",
    "LongcatFlashNgramForCausalLM": "hashes of tokens",
    "Mistral4ForCausalLM": "queries that grow",
    "BailingHybridForCausalLM": "a delta rule whose rows fade at speeds of their own",
    "MiMoV2FlashForCausalLM": "values that are scaled",
    "MotifForCausalLM": "values of two heads at once, polynomials",
    "MllamaForCausalLM": "layers behind gates, which find out who looks at nothing",
    "NemotronHForCausalLM": "experts without a gate",
    "NemotronHPuzzleForCausalLM": "experts without a gate",
    "Step3TextForCausalLM": "queries beside keys that are shared",
    "PhimoeForCausalLM": "a router that masks as it chooses",
    "Zamba2ForCausalLM": "blocks that many layers share",
}
#: Whose attention runs on the portable backend, which plans nothing that could be recorded.
PORTABLE = {"Step1ForCausalLM"}
#: Drivers that say nothing of a tiny checkpoint of their own.
_OTHERS = {
    "transformers", "IQuestCoderForCausalLM", "InternLM3ForCausalLM", "InternLMForCausalLM",
    "TeleChat3ForCausalLM",
}  # fmt: skip


def decoders():
    plugins = manager.current()
    # Where a driver has several names, that of its class.
    named = sorted(plugins.names("models"), key=lambda d: d.target.endswith(f":{d.name}"))
    names = sorted({declared.target: declared.name for declared in named}.values())
    # Models around other models do without media what those do.
    # Those that speak leave the other codes of a frame to torch.
    kinds = ("media_families", "speakers")
    apart = {*_OTHERS, *(declared.name for kind in kinds for declared in plugins.names(kind))}
    apart.remove("Qwen3VLForConditionalGeneration")
    return [
        name
        for name in names
        if name not in apart and "generate" in plugins.load("models", name).tasks
    ]


@parametrize_sample("name", decoders(), every=14)
def test_recorded_steps_give_the_bits_of_the_step(tmp_path, name):
    driver = manager.current().load("models", name)
    folder = tiny_folder(driver, tmp_path, oracle=oracle_of(driver))
    session = Session(folder, device="cpu", dtype="bfloat16", max_model_len=64)
    forward = session.model.forward
    recorded = replay.Replay(kernels.load(), forward)

    def steps(with_):
        for row in range(3):
            session.release(row)
        session.model.forward = forward
        session.step({0: [5, 6, 7, 8], 1: [9, 10], 2: [7]})
        session.model.forward = with_
        return [session.step({0: [9 + i], 1: [3], 2: [4 + i]}) for i in range(3)]

    expected, actual = steps(forward), steps(recorded)
    for one, other in zip(actual, expected, strict=True):
        assert all(torch.equal(one[row], other[row]) for row in one)
    if name in CALL_BY_CALL:
        assert "torch computes" in recorded.reason
    elif name in PORTABLE:
        assert not recorded._programs
    else:
        assert recorded.reason is None
        assert len(recorded._programs) == 1
