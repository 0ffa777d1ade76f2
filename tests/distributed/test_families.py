"""Families over several ranks, in real processes, against one process."""

from __future__ import annotations

import pytest

from modulm import LLM, LoRARequest, SamplingParams
from modulm.errors import ModulmError
from modulm.testing.adapters import write_lora
from modulm.testing.checkpoints import make_tiny
from modulm.testing.models import tiny_folder
from modulm.testing.oracles import oracle_of

PROMPTS = [{"prompt_token_ids": [5, 9, 40 + i] * (7 - 3 * i)} for i in range(3)]
PARAMS = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=0, ignore_eos=True)
FLAGS = {
    "dtype": "float32", "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 64, "block_size": 16, "use_tqdm_on_load": False,
}  # fmt: skip
#: Dense, sinks and experts, latent, recurrent, hybrid, norms over all heads and of each.
DRIVERS = (
    "Qwen3ForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM", "Mamba2ForCausalLM",
    "MambaForCausalLM", "Qwen3NextForCausalLM", "Olmo2ForCausalLM", "CohereForCausalLM",
    "Llama4ForCausalLM", "FalconH1ForCausalLM",
)  # fmt: skip
SIZES = [
    *((name, 2, 1) for name in DRIVERS),
    ("Qwen3ForCausalLM", 4, 1),
    ("DeepseekV3ForCausalLM", 1, 2),
    ("Mamba2ForCausalLM", 1, 2),
    ("MixtralForCausalLM", 2, 2),
]


def answers(folder, lora=None, prompts=PROMPTS, **flags):
    """Per prompt: its tokens, and the log probabilities of every position."""
    with LLM(str(folder), **{**FLAGS, **flags}) as llm:
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=lora)
    return [
        (
            list(output.outputs[0].token_ids),
            [
                {token: entry.logprob for token, entry in entries.items()}
                for entries in (*output.prompt_logprobs[1:], *output.outputs[0].logprobs)
            ],
        )
        for output in outputs
    ]


def ranks(tensor, pipeline=1):
    return {
        "distributed_executor_backend": "pool",
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
    }


def check_same(found, expected, bound=1e-4):
    for (tokens, positions), (wanted, others) in zip(found, expected, strict=True):
        assert tokens == wanted
        for here, there in zip(positions, others, strict=True):
            assert here.keys() == there.keys()
            for token, value in here.items():
                assert value == pytest.approx(there[token], abs=bound)


@pytest.mark.parametrize(("name", "tensor", "pipeline"), SIZES)
def test_ranks_give_what_one_gives(plugins, tmp_path, name, tensor, pipeline):
    driver = plugins.load("models", name)
    folder = tiny_folder(driver, tmp_path / "model", oracle=oracle_of(driver))
    check_same(answers(folder, **ranks(tensor, pipeline)), answers(folder))


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_weights_quantized_at_load(plugins, tmp_path, method):
    """Each rank rounds its part of a layer, in the groups that the whole has."""
    folder = make_tiny(tmp_path / "model", hidden_size=128, intermediate_size=256)
    found = answers(folder, quantization=method, **ranks(2))
    check_same(found, answers(folder, quantization=method), bound=0.2)


def test_an_adapter(plugins, tmp_path):
    """Its pieces lie on the ranks that hold the layers' pieces."""
    folder = make_tiny(tmp_path / "model")
    shapes = {"self_attn.q_proj": (64, 64), "self_attn.v_proj": (64, 32), "mlp.down_proj": (96, 64)}
    modules = {f"model.layers.{i}.{name}": size for i in range(2) for name, size in shapes.items()}
    lora = LoRARequest("a", 1, write_lora(tmp_path / "a", modules, 4, 0))
    flags = {"enable_lora": True, "max_lora_rank": 8}
    expected = answers(folder, lora, **flags)
    check_same(answers(folder, lora, **flags, **ranks(2)), expected)
    assert expected != answers(folder)


def test_an_encoder(plugins, tmp_path):
    driver = plugins.load("models", "BertModel")
    folder = tiny_folder(driver, tmp_path / "model")
    found = []
    for flags in ({}, ranks(2)):
        with LLM(str(folder), dtype="float32", **flags) as llm:
            outputs = llm.embed([{"prompt_token_ids": [5, 9, 40]}], use_tqdm=False)
            found.append(outputs[0].outputs.embedding)
    assert found[1] == pytest.approx(found[0], abs=1e-5)


def test_what_cannot_be_cut_says_what_can(plugins, tmp_path):
    folder = make_tiny(
        tmp_path / "model", hidden_size=96, num_attention_heads=6, num_key_value_heads=2
    )
    with pytest.raises(ModulmError, match="tensor_parallel_size: .*6 cannot be cut for 4 ranks"):
        answers(folder, **ranks(4))


def test_stages_with_other_caches_are_refused(plugins, tmp_path):
    driver = plugins.load("models", "Gemma2ForCausalLM")
    folder = tiny_folder(driver, tmp_path / "model")
    with pytest.raises(ModulmError, match="pipeline_parallel_size: its stages"):
        answers(folder, **ranks(1, 2))
