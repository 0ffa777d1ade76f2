"""The bridge: architectures that run with transformers' code on our memory, and those refused.

`bridged.toml` says how each architecture of transformers' mappings for generation runs, or why it
is refused. docs/transformers.md lists the same.
"""

from __future__ import annotations

import logging
import re
import tomllib
from pathlib import Path

import pytest
import torch
import transformers
from tests.plugins.models.bridged_sizes import (
    OWN,
    UNBOUNDED,
    causal,
    check_crossed,
    crossed,
    write,
)

from modulm import LLM, SamplingParams
from modulm.config import EngineConfig
from modulm.errors import CheckpointError, ModulmError, UnsupportedError
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny
from modulm.testing.models import check_equals_transformers, check_steps
from modulm.testing.session import Session
from modulm_command_explain import text as explain
from modulm_memory.estimate import estimate
from modulm_transformers.attention import _attend
from modulm_transformers.unsupported import reasons

PAGE = Path(__file__).resolve().parents[3] / "docs/transformers.md"
BRIDGED = tomllib.loads(Path(__file__).with_name("bridged.toml").read_text(encoding="utf-8"))
ATTENTION, ROWS, TEXTS = (frozenset(BRIDGED[key]) for key in ("attention", "rows", "texts"))
CROSSED, MEDIA, REFUSED = frozenset(BRIDGED["crossed"]), BRIDGED["media"], BRIDGED["refused"]
#: Whose rounding in fp32 is more than 1e-4, in transformers, too: its own numbers differ by 1.8e-4
#: from those that it computes in float64, and ours by 2.1e-4.
ROUNDED = {"ZambaForCausalLM": 3e-4}
#: What `make test` compares: one of each kind of attention, block and cache.
SAMPLE = {
    "DeepseekV3ForCausalLM",
    "DogeForCausalLM",
    "GPT2LMHeadModel",
    "Gemma2ForCausalLM",
    "GptOssForCausalLM",
    "Lfm2ForCausalLM",
    "MixtralForCausalLM",
    "NanoChatForCausalLM",
    "OpenAIGPTLMHeadModel",
    "RobertaForCausalLM",
    "CpmAntForCausalLM",
}


def pytest_generate_tests(metafunc):
    if "architecture" in metafunc.fixturenames:
        everything = metafunc.config.getoption("everything")
        names = sorted({*causal(), *crossed()} - set(MEDIA)) if everything else sorted(SAMPLE)
        metafunc.parametrize("architecture", names)


def way(messages):
    """How a model runs, by the log."""
    if any("computes each row's whole text" in message for message in messages):
        return "texts"
    return "rows" if any("runs row by row" in message for message in messages) else "attention"


def test_every_architecture_runs_or_is_refused(architecture, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("modulm.testing.models.TOLERANCE", ROUNDED.get(architecture, 1e-4))
    caplog.set_level(logging.WARNING, "modulm.models")
    if architecture in reasons():
        driver = manager.current().load("models", "transformers")
        with pytest.raises(UnsupportedError, match=re.escape(REFUSED[architecture])):
            driver.config_type.from_table({"architectures": [architecture]}, "config.json")
        return
    folder = write(tmp_path, architecture)
    if architecture in REFUSED:
        with pytest.raises(ModulmError, match=re.escape(REFUSED[architecture])):
            Session(folder, model_impl="transformers", device="cpu")
    elif architecture in crossed():
        check_crossed(folder, architecture)
        assert architecture in CROSSED
    else:
        check_equals_transformers(folder, steps=8, model_impl="transformers")
        assert architecture in BRIDGED[way(caplog.messages)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(name for name, own in OWN.items() if own is UNBOUNDED))
def test_transformers_bounds_the_time_steps_of_several_tokens_alone(name, tmp_path):
    """Why these are tried without the bound: with it, transformers differs from itself."""
    prompt = torch.tensor([list(range(20, 57))])
    apart = {}
    for bound in (1e-9, 0.5):
        folder = make_tiny(tmp_path / str(bound), name, time_step_min=bound)
        model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()
        with torch.inference_mode():
            whole = model(prompt).logits[0]
            begun = model(prompt[:, :-1], use_cache=True)
            last = model(prompt[:, -1:], past_key_values=begun.past_key_values).logits[0]
        apart[bound] = (last[0] - whole[-1]).abs().max().item()
    assert apart[1e-9] < 1e-4
    assert apart[0.5] > 1e-2


def test_the_table_has_each_architecture_once():
    groups = [ATTENTION, ROWS, TEXTS, CROSSED, set(MEDIA), set(REFUSED)]
    listed = [name for group in groups for name in group]
    assert sorted(listed) == sorted({*causal(), *crossed()})


@pytest.mark.parametrize(
    "architecture_of_kit",
    ["Qwen3ForCausalLM", "DogeForCausalLM", "Lfm2ForCausalLM"],
    ids=["attention", "rows", "states"],
)
@pytest.mark.exhaustive
def test_chunks_prefixes_and_preemption_change_nothing(architecture_of_kit, tmp_path):
    folder = write(tmp_path, architecture_of_kit)
    check_steps(folder, model_impl="transformers")
    flags = {"model_impl": "transformers", "dtype": "float32", "device": "cpu", "block_size": 16,
             "max_model_len": 128, "use_tqdm_on_load": False}  # fmt: skip
    shared = list(range(20, 60))
    prompts = [{"prompt_token_ids": [*shared, 100 + i]} for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

    def answers(**more):
        with LLM(str(folder), **flags, **more) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs]

    expected = answers(num_gpu_blocks_override=128, enable_prefix_caching=False)
    assert answers(num_gpu_blocks_override=128, max_num_batched_tokens=16) == expected
    assert answers(num_gpu_blocks_override=14) == expected


def test_it_stands_in_where_no_plugin_offers_the_architecture(tmp_path):
    folder = write(tmp_path, "NanoChatForCausalLM")
    session = Session(folder, device="cpu", attention_backend="sdpa")
    decision = next(d for d in session.loaded.decisions if d.subject == "model")
    assert decision.winner == "transformers"
    assert "no plugin provides NanoChatForCausalLM" in explain.render([decision])


def test_a_native_plugin_comes_first(tmp_path):
    folder = make_tiny(tmp_path, "LlamaForCausalLM")
    session = Session(folder, device="cpu", attention_backend="sdpa")
    assert session.loaded.decisions[0].winner == "LlamaForCausalLM"


def test_the_page_lists_what_runs_and_what_is_refused():
    text = PAGE.read_text(encoding="utf-8").partition("## Pooling")[0]
    listed = set(re.findall(r"`(\w+)`", text))
    assert listed >= {*causal(), *crossed()}
    refused = text.partition("## Refused")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+)`:?", refused)) >= set(REFUSED)


def test_the_name_of_the_driver_is_a_value_of_the_flag():
    config = EngineConfig.from_keywords(model_impl="transformers")
    assert manager.current().find("models", config.model.model_impl).distribution == (
        "modulm-transformers"
    )


class Attends(torch.nn.Module):
    is_causal = True


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"indices": torch.zeros(1, 1)}, "attention argument indices"),
        ({"position_bias": torch.zeros(1, 1)}, "attention argument position_bias"),
        ({"is_causal": False}, "uses bidirectional attention"),
    ],
)
def test_what_attention_is_handed_and_cannot_obey_is_refused(more, message):
    state = torch.zeros(1, 1, 2, 4)
    with pytest.raises(UnsupportedError, match=message):
        _attend(Attends(), state, state, state, None, modulm=object(), **more)


def test_an_error_of_the_library_s_own_code_is_told_as_what_it_is(tmp_path, monkeypatch):
    folder = make_tiny(tmp_path, "LlamaForCausalLM")

    def fail(self, *args, **keywords):
        raise IndexError("tuple index out of range")

    monkeypatch.setattr("transformers.LlamaModel.forward", fail)
    with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM: .* IndexError: tuple index"):
        Session(folder, model_impl="transformers", attention_backend="sdpa")


@pytest.mark.exhaustive
def test_weights_that_the_library_loads_are_counted_without_a_file(tmp_path):
    folder = write(tmp_path, "OpenAIGPTLMHeadModel")
    model = transformers.OpenAIGPTLMHeadModel.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    config = EngineConfig.from_keywords(model=str(folder), load_format="dummy", device="cpu")
    (rank,) = estimate(config, manager.current()).ranks
    assert rank.parameters == model.num_parameters()


def test_a_decoder_that_is_told_to_see_both_ways_is_refused(tmp_path):
    """`is_causal: false` is what decoders that were made embedders have; transformers obeys."""
    folder = make_tiny(tmp_path, "LlamaForCausalLM", is_causal=False)
    for implementation in ("transformers", "auto"):
        with pytest.raises((CheckpointError, UnsupportedError), match="is_causal: "):
            Session(folder, model_impl=implementation, attention_backend="sdpa")
