"""Families over several ranks, in real processes, against one process."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
from attrs import evolve, field, frozen
from tests.media.checkpoint import write_llava

from modulm import LLM, LoRARequest, SamplingParams
from modulm.contracts.media import MediaItem
from modulm.errors import ModulmError
from modulm.testing.adapters import write_lora
from modulm.testing.checkpoints import make_tiny
from modulm.testing.models import tiny_folder
from modulm.testing.oracles import oracle_of
from modulm.testing.session import Session
from modulm_towers.spread import owners
from modulm_towers.testing import images

PROMPTS = [{"prompt_token_ids": [5, 9, 40 + i] * (7 - 3 * i)} for i in range(3)]
PARAMS = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=0, ignore_eos=True)
FLAGS = {
    "dtype": "float32", "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 64, "block_size": 16, "use_tqdm_on_load": False,
}  # fmt: skip
ONE, TWO = {"num_key_value_heads": 1}, {"num_key_value_heads": 2}
BRIDGE = {"model_impl": "transformers"}
WIDE, INT4 = {"hidden_size": 128, "intermediate_size": 256}, {"quantization": "int4"}


@frozen
class Family:
    """A tiny model, and the ranks that it is cut for: words such as "tp2 pp2"."""

    driver: str
    layouts: tuple[str, ...]
    changes: dict[str, Any] = field(factory=dict)
    flags: dict[str, Any] = field(factory=dict)
    lora: bool = False


#: "dcp" needs ranks that would hold the same keys: fewer heads of keys than ranks, or latents.
FAMILIES = {
    "dense": Family(
        "Qwen3ForCausalLM",
        ("tp2", "tp4", "pp3", "tp2 pp2", "tp2 dcp2", "tp4 dcp4", "tp2 pp2 dcp2"),
        {"num_hidden_layers": 3, "num_key_value_heads": 1},
    ),
    "dense, two heads of keys": Family("LlamaForCausalLM", ("tp4 dcp2",), TWO),
    "sinks, windows and experts": Family("GptOssForCausalLM", ("tp2", "tp2 ep", "pp2")),
    "sinks, one head of keys": Family("GptOssForCausalLM", ("tp2 ep dcp2",), ONE),
    "experts": Family("MixtralForCausalLM", ("tp2 ep", "tp2 pp2")),
    "latent": Family(
        "DeepseekV3ForCausalLM",
        ("tp2", "pp2", "tp2 dcp2", "tp4 dcp2", "tp2 pp2 ep dcp2"),
    ),
    "recurrent": Family("Mamba2ForCausalLM", ("tp2", "tp2 pp2")),
    "recurrent, the first": Family("MambaForCausalLM", ("tp2",)),
    "hybrid": Family("Qwen3NextForCausalLM", ("tp2 pp2",)),
    "hybrid, one head of keys": Family("Qwen3NextForCausalLM", ("tp2 dcp2",), ONE),
    "hybrid in each layer": Family("FalconH1ForCausalLM", ("tp2",)),
    "norms over all heads": Family("Olmo2ForCausalLM", ("tp2",)),
    "norms of each head": Family("CohereForCausalLM", ("tp2",)),
    "chunks": Family("Llama4ForCausalLM", ("tp2",)),
    "windows": Family("Gemma2ForCausalLM", ("pp2", "tp2 dcp2"), ONE),
    "windows of several kinds": Family("Gemma3ForCausalLM", ("pp3",)),
    "encoder": Family("BertModel", ("tp2", "tp4")),
    "quantized": Family("LlamaForCausalLM", ("tp2", "tp2 pp2"), WIDE, INT4),
    "bridge": Family("Qwen3ForCausalLM", ("tp2 pp2", "tp2", "pp2", "tp4"), ONE, BRIDGE),
    "bridge, experts": Family("MixtralForCausalLM", ("tp2", "tp2 ep", "tp2 pp2"), {}, BRIDGE),
    "bridge, routed experts": Family("DeepseekV3ForCausalLM", ("tp2", "pp2"), {}, BRIDGE),
    "bridge, fused layers": Family("Phi3ForCausalLM", ("tp2",), {}, BRIDGE),
    "bridge, sandwiched norms": Family("Gemma2ForCausalLM", ("tp2 pp2",), ONE, BRIDGE),
    "bridge, quantized": Family("LlamaForCausalLM", ("tp2",), WIDE, {**BRIDGE, **INT4}),
    "bridge, LoRA": Family(
        "LlamaForCausalLM",
        ("tp2 pp2",),
        ONE,
        {"enable_lora": True, "max_lora_rank": 8, **BRIDGE},
        True,
    ),
    "LoRA": Family(
        "LlamaForCausalLM",
        ("tp2 pp2", "tp2 dcp2"),
        ONE,
        {"enable_lora": True, "max_lora_rank": 8},
        True,
    ),
}


#: What `make test` tries: each way of cutting a model, and each mechanism that ranks have to share.
#: Stages, parts of layers, of contexts and of experts are together in the first.
SAMPLE = {
    ("latent", "tp2 pp2 ep dcp2"), ("sinks, windows and experts", "tp2 ep"),
    ("hybrid", "tp2 pp2"), ("windows", "tp2 dcp2"), ("encoder", "tp2"), ("LoRA", "tp2 dcp2"),
}  # fmt: skip


def pytest_generate_tests(metafunc):
    if "layout" in metafunc.fixturenames:
        everything = metafunc.config.getoption("everything")
        grid = [
            (name, layout)
            for name, family in FAMILIES.items()
            for layout in family.layouts
            if everything or (name, layout) in SAMPLE
        ]
        assert len(grid) >= len(SAMPLE)
        metafunc.parametrize(("name", "layout"), grid)


def answers(folder, lora=None, prompts=PROMPTS, **flags):
    """Per prompt: its tokens, and the log probabilities of every position."""
    with LLM(str(folder), **{**FLAGS, **flags}) as llm:
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=lora)
    return [positions(output) for output in outputs]


def positions(output):
    """Its tokens, and the log probabilities of every position."""
    rows = (*output.prompt_logprobs[1:], *output.outputs[0].logprobs)
    found = [{token: entry.logprob for token, entry in entries.items()} for entries in rows]
    return list(output.outputs[0].token_ids), found


def ranks(tensor, pipeline=1):
    return {
        "distributed_executor_backend": "pool",
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
    }


def check_same(found, expected):
    for (tokens, positions), (wanted, others) in zip(found, expected, strict=True):
        assert tokens == wanted
        for here, there in zip(positions, others, strict=True):
            assert here.keys() == there.keys()
            for token, value in here.items():
                assert value == pytest.approx(there[token], abs=1e-4)


def laid_out(layout):
    """The flags that a word such as "tp2 pp2 ep" stands for."""
    names = {"tp": "tensor", "pp": "pipeline", "dcp": "decode_context"}
    flags = {
        "distributed_executor_backend": "pool",
        "enable_expert_parallel": "ep" in layout.split(),
    }
    for word in layout.split():
        if word[-1].isdigit():
            flags[f"{names[word[:-1]]}_parallel_size"] = int(word[-1])
    return flags


def adapter(folder):
    shapes = {"self_attn.q_proj": (64, 64), "self_attn.v_proj": (16, 64), "mlp.down_proj": (64, 96)}
    modules = {
        f"model.layers.{i}.{name}": (inputs, outputs)
        for i in range(2)
        for name, (outputs, inputs) in shapes.items()
    }
    return LoRARequest("a", 1, write_lora(folder, modules, 4, 0))


class Made:
    """A family's checkpoint, and what one rank answers: made once."""

    def __init__(self, plugins, folder, family):
        driver = plugins.load("models", family.driver)
        oracle = oracle_of(driver)
        self.folder = tiny_folder(driver, folder / "model", oracle=oracle, **family.changes)
        self.family = family
        self.lora = adapter(folder / "adapter") if family.lora else None
        self.expected = self.answers()
        if self.lora is not None:
            assert self.expected != answers(self.folder, **family.flags)

    def answers(self, **flags):
        flags = {**self.family.flags, **flags}
        if self.family.driver != "BertModel":
            return answers(self.folder, self.lora, **flags)
        with LLM(str(self.folder), dtype="float32", use_tqdm_on_load=False, **flags) as llm:
            outputs = llm.embed(PROMPTS[:2], use_tqdm=False)
        return [([], [dict(enumerate(output.outputs.embedding))]) for output in outputs]


@pytest.fixture(scope="module")
def made():
    return {}


def test_ranks_give_what_one_gives(plugins, made, tmp_path_factory, name, layout):
    if name not in made:
        made[name] = Made(plugins, tmp_path_factory.mktemp("family"), FAMILIES[name])
    check_same(made[name].answers(**laid_out(layout)), made[name].expected)


def test_a_head_that_is_the_embedding(plugins, tmp_path):
    """Each rank multiplies its rows of the table."""
    folder = make_tiny(tmp_path / "model", tie_word_embeddings=True)
    check_same(answers(folder, **ranks(2)), answers(folder))


def test_weights_quantized_at_load(plugins, tmp_path):
    """Each rank rounds its part of a layer, with scales of its own.

    The scale of one output is the largest of its n weights / 127. Of n normal values that is about
    sqrt(2 ln 2n) standard deviations, so rounding errs by r = sqrt(2 ln 2n) / (127 sqrt(12)) of a
    weight, and a product by the same part of its value. Only products that are cut along their
    inputs have other scales than in one process: attention's output and the MLP's `down`, in each
    of two layers, in both runs. Eight independent errors make r * sqrt(8) of the spread of the
    logits.
    """
    width, layers = 128, 2
    folder = make_tiny(tmp_path / "model", hidden_size=width, intermediate_size=2 * width)
    found = answers(folder, quantization="int8", **ranks(2))
    expected = answers(folder, quantization="int8")
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    differences = [
        here[token] - there[token]
        for (_, rows), (_, others) in zip(found, expected, strict=True)
        for here, there in zip(rows, others, strict=True)
        for token in here.keys() & there.keys()
    ]
    assert len(differences) >= 3 * 4
    error = math.sqrt(statistics.fmean(one * one for one in differences))
    rounding = math.sqrt(2 * math.log(2 * width)) / (127 * math.sqrt(12))
    prompt = {0: PROMPTS[0]["prompt_token_ids"]}
    spread = Session(folder, device="cpu", dtype="float32").step(prompt)[0].std().item()
    assert 0 < error < rounding * math.sqrt(2 * layers * 2) * spread


def test_what_cannot_be_cut_is_said_once(plugins, tmp_path, capfd):
    folder = make_tiny(
        tmp_path / "model", hidden_size=96, num_attention_heads=6, num_key_value_heads=2
    )
    with pytest.raises(
        ModulmError,
        match="tensor_parallel_size: attention heads of .*: 6 cannot be split across 4 ranks",
    ):
        answers(folder, **ranks(4))
    assert "Traceback" not in capfd.readouterr().err


def test_experts_that_cannot_be_spread(plugins, tmp_path):
    folder = make_tiny(tmp_path / "model", "MixtralForCausalLM", num_local_experts=3)
    check_same(answers(folder, **ranks(2)), answers(folder))
    with pytest.raises(ModulmError, match="experts: 3 cannot be split across 2 ranks"):
        answers(folder, enable_expert_parallel=True, **ranks(2))


def test_a_split_that_is_given(plugins, tmp_path):
    folder = make_tiny(tmp_path / "model", num_hidden_layers=4, tie_word_embeddings=True)
    split = ranks(1, 2) | {"pipeline_layer_partition": [1, 3]}
    check_same(answers(folder, **split), answers(folder))
    wrong = ranks(1, 2) | {"pipeline_layer_partition": [1, 2]}
    with pytest.raises(ModulmError, match="pipeline_layer_partition: 4 layers for 2 stages"):
        answers(folder, **wrong)


def test_a_worker_of_ones_own(plugins, tmp_path):
    folder = str(make_tiny(tmp_path / "model"))
    for flags in ({}, ranks(2)):
        own = {"worker_cls": "modulm_distributed.testing:MarkedWorker", **flags}
        with LLM(folder, **FLAGS, **own) as llm:
            assert llm._core.info.description.device == "marked"
    with pytest.raises(ModulmError, match=r"worker_cls.* is not a modulm.engine.worker.*Worker"):
        LLM(folder, worker_cls="modulm_distributed.testing:RankPool", **FLAGS)


def test_ranks_see_what_one_sees(plugins, tmp_path, request):
    """Encoders with parts of the weights, and with parts of the items; images come while text
    decodes, so that all ranks stop at the same layers of their encoders.
    """
    folder, pictures = write_llava(tmp_path / "llava"), images(((56, 42), (30, 60), (44, 44)))
    asked = [
        (2, "Hello"),
        (16, "Once upon a time"),
        (3, {"prompt": "<image> is", "multi_modal_data": {"image": pictures[0]}}),
        (3, {"prompt": "A <image><image> of", "multi_modal_data": {"image": pictures[1:]}}),
    ]
    prompts = [prompt for _, prompt in asked]
    params = [evolve(PARAMS, max_tokens=count) for count, _ in asked]
    data = {**ranks(2), "mm_encoder_tp_mode": "data"}
    ways = ({}, ranks(2), data)
    if request.config.getoption("--everything"):
        ways += ({**data, "mm_encoder_chunk": 0, "max_num_seqs": 4},)
    found, sizes = [], []
    for way in ways:
        flags = {**FLAGS, "max_num_batched_tokens": 64, "max_num_seqs": 2, "mm_encoder_chunk": 1}
        with LLM(str(folder), **{**flags, **way}) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            sizes.append(llm.info.description.weight_bytes)
        found.append([positions(output) for output in outputs])
    for others in found[1:]:
        check_same(others, found[0])
    assert sizes[1] < sizes[2] < 2 * sizes[0], "of both ranks; encoders are whole on each"


def test_items_go_to_the_rank_that_has_least():
    items = [MediaItem("image", b"", 0, length) for length in (3, 9, 4, 4)]
    assert owners(items, 2) == [1, 0, 1, 1]
    assert owners(items, 1) == [0] * 4
    assert owners(items[:1], 2) == [0]
