"""Adapters through the whole engine: offline, recorded, activated, changed, and gone."""

from __future__ import annotations

import json

import numpy as np
import pytest

import modulm
from modulm.errors import CheckpointError, UnsupportedError
from modulm.testing.adapters import write_lora
from modulm.testing.checkpoints import make_tiny

PARAMS = modulm.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
PROMPTS = [{"prompt_token_ids": list(range(first, first + 20))} for first in (5, 100, 200, 300)]
FLAGS = {
    "dtype": "float32", "max_model_len": 128, "max_num_seqs": 8, "num_gpu_blocks_override": 65,
}  # fmt: skip
SHAPES = {"self_attn.q_proj": (64, 64), "self_attn.v_proj": (64, 32), "mlp.down_proj": (96, 64)}


def write(path, seed, rank=4, **config):
    modules = {f"model.layers.{i}.{name}": size for i in range(2) for name, size in SHAPES.items()}
    return write_lora(path, modules, rank, seed, **config)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("lora")
    make_tiny(place / "model")
    for seed, name in enumerate("abc"):
        write(place / name, seed)
    return place


@pytest.fixture(scope="module")
def adapters(place):
    return [modulm.LoRARequest(name, n, place / name) for n, name in enumerate("abc", 1)]


@pytest.fixture(scope="module")
def llm(place):
    flags = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with modulm.LLM(str(place / "model"), **FLAGS, **flags) as llm:
        yield llm


def answers(llm, prompts, **more):
    found = llm.generate(prompts, PARAMS, use_tqdm=False, **more)
    return [(list(o.outputs[0].token_ids), o.outputs[0].cumulative_logprob) for o in found]


def test_each_prompt_has_its_adapter_more_than_there_are_slots(llm, adapters):
    same = [PROMPTS[0]] * 4
    chosen = [*adapters, None]
    mixed = answers(llm, same, lora_request=chosen)
    alone = [answers(llm, [same[0]], lora_request=lora)[0] for lora in chosen]
    assert mixed == alone
    assert len({tuple(tokens) for tokens, _ in mixed}) == 4


def test_recorded_steps_are_those_that_run_call_by_call(place, llm, adapters):
    """The bits of decode steps with adapters that come, leave and share slots between records."""
    flags = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "enforce_eager": True}
    runner = llm._core.executor._worker.runner
    with modulm.LLM(str(place / "model"), **FLAGS, **flags) as eager:
        for chosen in ([0, 0, 1, None], [2, 1, 1, 0], [None, 2, None, 2]):
            loras = [None if n is None else adapters[n] for n in chosen]
            assert answers(llm, PROMPTS, lora_request=loras) == answers(
                eager, PROMPTS, lora_request=loras
            )
    adapted = runner._recordings["adapters"]
    assert adapted is not runner._forward
    if runner.platform.device.type == "cpu" and hasattr(adapted, "_programs"):
        assert adapted._programs
        assert adapted.reason is None


def test_an_activated_adapter_is_the_models_own_before_its_tokens(place, llm):
    """Against the model with the adapter's slot on these tokens alone, and without one."""
    invocation = [400, 401]
    write(place / "active", 0, alora_invocation_tokens=invocation)
    lora = modulm.LoRARequest("active", 4, place / "active")
    long = list(range(5, 69))
    with_it = {"prompt_token_ids": [*long, 400, 401, 7, 8]}
    without = {"prompt_token_ids": [*long, 400, 402, 7, 8]}
    plain = answers(llm, [with_it, without])
    found = answers(llm, [with_it, without], lora_request=lora)
    assert found[1] == plain[1]
    assert found[0] != plain[0]
    shown = modulm.SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    before, after = (
        llm.generate([with_it], shown, use_tqdm=False, lora_request=chosen)[0].prompt_logprobs
        for chosen in (None, lora)
    )
    values = [[next(iter(entry.values())).logprob for entry in x[1:]] for x in (before, after)]
    # The logits of a token before the invocation say the next one.
    assert values[0][: len(long) - 1] == values[1][: len(long) - 1]
    assert values[0][len(long) + 1 :] != values[1][len(long) + 1 :]


def test_a_name_with_other_files_is_the_other_adapter(place, llm, adapters):
    first, second = (
        answers(llm, PROMPTS[:1], lora_request=modulm.LoRARequest("same", 9, place / folder))
        for folder in "ab"
    )
    assert first == answers(llm, PROMPTS[:1], lora_request=adapters[0])
    assert second == answers(llm, PROMPTS[:1], lora_request=adapters[1])


def test_a_bad_adapter_ends_the_call_and_nothing_else(place, llm, adapters):
    before = answers(llm, PROMPTS[:2], lora_request=adapters[:2])
    write(place / "large", 3, rank=9)
    with pytest.raises(CheckpointError, match="rank 9 is more than max_lora_rank 8"):
        answers(llm, PROMPTS[:1], lora_request=modulm.LoRARequest("large", 5, place / "large"))
    with pytest.raises(CheckpointError, match=r"nowhere/adapter_config\.json: cannot be read"):
        answers(llm, PROMPTS[:1], lora_request=modulm.LoRARequest("gone", 6, place / "nowhere"))
    with pytest.raises(ValueError, match="lora_int_id"):
        modulm.LoRARequest("zero", 0, place / "a")
    assert answers(llm, PROMPTS[:2], lora_request=adapters[:2]) == before


def test_an_adapter_whose_files_are_gone_fails_its_rows_alone(place, llm, adapters):
    """What left host memory cannot be read again when its row starts."""
    executor = llm._core.executor
    write(place / "brief", 5)
    executor.add_adapter("brief", place / "brief")
    bank = executor._worker.loaded.adapters
    bank._added["brief"].held = None
    (place / "brief" / "adapter_config.json").write_text(json.dumps({"r": 4, "peft_type": "IA3"}))
    made = [llm._input_processor.process(p, PARAMS, f"x{n}") for n, p in enumerate(PROMPTS[:2])]
    made[0] = naming(made[0], "brief")
    found = llm._run(made, False)
    assert found[0].outputs[0].finish_reason == "error"
    assert "files have changed since they were read" in str(found[0].outputs[0].stop_reason)
    assert list(found[1].outputs[0].token_ids) == answers(llm, PROMPTS[1:2])[0][0]
    executor.remove_adapter("brief")


def naming(pending, adapter):
    from attrs import evolve

    requests = tuple(evolve(request, adapter=adapter) for request in pending.requests)
    return evolve(pending, requests=requests)


def test_without_the_flag_it_says_which_one(place, adapters):
    llm = modulm.LLM(str(place / "model"), **FLAGS)
    with llm, pytest.raises(UnsupportedError, match="enable_lora"):
        answers(llm, PROMPTS[:1], lora_request=adapters[0])


def test_steps_without_an_adapter_make_the_calls_of_the_plain_engine(place, llm, monkeypatch):
    """What is enabled and not used costs nothing: the recorded steps are as long.

    Engines with adapters compute logits apart from them (ADR 0342), so the plain one does here.
    """
    kernels = pytest.importorskip("modulm_kernels_cpu.replay", reason="no compiled CPU kernels")
    monkeypatch.setattr(kernels.Replay, "append_logits", lambda *_: None)
    before = answers(llm, PROMPTS)
    with modulm.LLM(str(place / "model"), **FLAGS) as plain:
        assert answers(plain, PROMPTS) == before
        recorded = [one._core.executor._worker.runner._forward for one in (plain, llm)]
        programs = [forward._programs for forward in recorded]
        assert all(programs)
        rows = [
            {key[1][0][0]: len(program.slots) for key, program in found.items()}
            for found in programs
        ]
        assert rows[0][len(PROMPTS)] == rows[1][len(PROMPTS)]


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_change_nothing_that_adapters_say(place, llm, adapters, method):
    """A draft knows no adapters; what it says is verified by the target with its own."""
    chosen = [adapters[0], None, adapters[1], adapters[0]]
    expected = answers(llm, PROMPTS, lora_request=chosen)
    table = {"method": method, "adaptive": False, "num_speculative_tokens": 3}
    table |= {"model": str(place / "model")} if method == "draft_model" else {}
    flags = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "speculative_config": table}
    with modulm.LLM(str(place / "model"), **FLAGS, **flags) as drafting:
        assert answers(drafting, PROMPTS, lora_request=chosen) == expected


def test_pooled_answers_have_their_adapter_also_those_of_pairs(place, adapters):
    flags = {"enable_lora": True, "max_lora_rank": 8, "runner": "pooling"}
    texts, lora = ["one two", "three four five"], adapters[0]
    with modulm.LLM(str(place / "model"), **FLAGS, **flags) as llm:
        plain = llm.embed(texts, use_tqdm=False)
        left, right = (
            np.array(o.outputs.embedding)
            for o in llm.embed(texts, use_tqdm=False, lora_request=lora)
        )
        assert not np.allclose(left, plain[0].outputs.embedding)
        (scored,) = llm.score(*texts, use_tqdm=False, lora_request=lora)
        (other,) = llm.score(*texts, use_tqdm=False)
    assert scored.outputs.score == pytest.approx(left @ right, abs=1e-5)
    assert other.outputs.score != pytest.approx(scored.outputs.score, abs=1e-4)
