"""LLM on a real tiny checkpoint, against transformers."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from samples import parametrize_sample
from transformers import AutoModelForCausalLM

from modulm import LLM, BeamSearchParams, SamplingParams, StructuredOutputs
from modulm.contracts.policy import Scheduler
from modulm.engine.scheduling.scheduler import BudgetScheduler
from modulm.errors import ConfigError, ContextLengthExceeded, EngineDead, EngineError, RequestError
from modulm.plugins import PluginManager
from modulm.plugins.manager import using
from modulm.testing.checkpoints import make_tiny
from modulm.testing.engines import check_empty
from modulm.testing.fakes import FakeExecutor
from modulm_frontend.statistics import Statistics

PROMPTS = [
    "Hello there",
    "The capital of France is",
    "one two three four",
    "a b c",
    "What is modulm?",
]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(model=str(checkpoint), kv_cache_memory_bytes=1 << 24, cpu_threads=1) as made:
        yield made
        check_empty(made._core.loop)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def continued(reference: Any, ids: list[int], **options: Any) -> list[list[int]]:
    """What transformers appends to the prompt, per returned sequence."""
    options = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False} | options
    found = reference.generate(torch.tensor([ids]), **options)
    return [row[len(ids) :].tolist() for row in found]


def test_greedy_equals_transformers_alone_and_in_a_crowd(llm: LLM, reference: Any) -> None:
    crowd = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for prompt, output in zip(PROMPTS, crowd, strict=True):
        (expected,) = continued(reference, output.prompt_token_ids, max_new_tokens=24)
        assert output.outputs[0].token_ids == expected
        assert output.prompt == prompt
        (alone,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert alone.outputs[0].token_ids == expected
        assert alone.outputs[0].text == llm.get_tokenizer().decode(expected)


def test_prompts_in_all_forms(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    forms: list[Any] = [
        PROMPTS[0],
        ids,
        {"prompt_token_ids": ids},
        {"prompt": PROMPTS[0], "cache_salt": "x"},
    ]
    found = llm.generate(forms, GREEDY, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in found}) == 1
    assert found[1].prompt is None
    assert llm.generate(ids, GREEDY, use_tqdm=False)[0].prompt_token_ids == ids


@parametrize_sample(
    ("width", "penalty", "stopping"),
    [
        (2, 1.0, False), (4, 1.0, False), (4, 0.0, "never"), (2, 0.0, "never"),
        (4, -1.0, True), (2, -1.0, True), (2, 2.0, "never"), (4, 2.0, "never"),
    ],
    every=2,
)  # fmt: skip
def test_beams_equal_transformers(
    llm: LLM, reference: Any, width: int, penalty: float, stopping: bool | str
) -> None:
    eos = list(llm._input_processor.eos)
    for prompt in PROMPTS[:2]:
        ids = llm.get_tokenizer().encode(prompt)
        expected = continued(
            reference,
            ids,
            max_new_tokens=10,
            num_beams=width,
            num_return_sequences=width,
            eos_token_id=eos,
            length_penalty=penalty,
            early_stopping=stopping,
        )
        (found,) = llm.beam_search(
            prompt,
            BeamSearchParams(width, 10, length_penalty=penalty, early_stopping=stopping),
        )
        for beam, tokens in zip(found.sequences, expected, strict=True):
            own = beam.tokens[len(ids) :]
            assert own == tokens[: len(own)]
            padding = tokens[len(own) :]
            assert not padding or (own[-1] in eos and len(set(padding)) == 1)


def test_a_prefix_hit_changes_nothing(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prompt = {"prompt_token_ids": [7 + (i * 37) % 400 for i in range(100)]}
    (miss,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    (hit,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert (miss.num_cached_tokens, hit.num_cached_tokens) == (0, 96)
    assert hit.outputs[0].token_ids == miss.outputs[0].token_ids
    (salted,) = llm.generate(prompt, GREEDY, use_tqdm=False, cache_salt="other")
    assert salted.num_cached_tokens == 0


def test_choices_have_seeds_of_their_own_and_repeat(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=8)
    first, again = (llm.generate("Hello", params, use_tqdm=False)[0] for _ in range(2))
    texts = [output.text for output in first.outputs]
    assert texts == [output.text for output in again.outputs]
    assert len(set(texts)) == 3
    assert [output.index for output in first.outputs] == [0, 1, 2]
    unseeded = params.with_(seed=None, n=1)
    found = {llm.generate("Hello", unseeded, use_tqdm=False)[0].outputs[0].text for _ in range(3)}
    assert len(found) > 1


def test_logprobs_sum_to_one_and_prompts_have_them(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=0)
    (output,) = llm.generate(PROMPTS[1], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    for token, position in zip(
        output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
    ):
        assert list(position) == [token]
    for token, position in zip(
        output.outputs[0].token_ids, output.outputs[0].logprobs or [], strict=True
    ):
        assert next(iter(position)) == token
        assert position[token].rank == 1


def test_a_broken_constraint_is_raised_before_anything_runs(llm: LLM) -> None:
    wrong = SamplingParams(structured_outputs=StructuredOutputs(regex="("), max_tokens=4)
    steps = llm._core.loop.scheduler.gauges().step
    with pytest.raises(RequestError, match="regex"):
        llm.generate(["Hello", "Hello"], [GREEDY, wrong], use_tqdm=False)
    assert llm._core.loop.scheduler.gauges().step == steps
    check_empty(llm._core.loop)


def test_nothing_can_be_asked_after_a_shutdown(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint))
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineDead, match="shut down: create a new one"):
        llm.generate("x", GREEDY, use_tqdm=False)


def test_what_is_wrong_is_raised_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ContextLengthExceeded):
        llm.generate([[5] * 400], GREEDY)
    with pytest.raises(RequestError, match="temperature"):
        llm.generate("x", SamplingParams(temperature=-1))
    with pytest.raises(RequestError, match="the model supports no images, audio or video"):
        llm.generate({"prompt": "x", "multi_modal_data": {"image": None}}, GREEDY)
    with pytest.raises(RequestError, match="the model has no text encoder"):
        llm.generate({"encoder_prompt": "x", "decoder_prompt": "y"}, GREEDY)
    with pytest.raises(RequestError, match="2 prompts"):
        llm.generate(["a", "b"], [GREEDY])
    check_empty(llm._core.loop)


def test_embedding_with_a_model_that_generates_says_what_to_do(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r'LLM: runner="pooling"'):
        llm.embed("hi")


def test_enqueued_requests_run_together(llm: LLM) -> None:
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
    first = llm.enqueue(PROMPTS[:2], GREEDY)
    with pytest.raises(RequestError, match="temperature"):
        llm.enqueue("a", GREEDY.with_(temperature=-1.0))
    ids = [*first, *llm.enqueue(PROMPTS[2:], GREEDY)]
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert llm.wait_for_completion(use_tqdm=False) == []
    assert repr(llm) == f"LLM({llm.info.config.model.model!r})"


def test_classes_of_pydantic_are_schemas(llm: LLM) -> None:
    from pydantic import BaseModel

    class Answer(BaseModel):
        yes: bool

    params = SamplingParams(
        max_tokens=40, temperature=0, structured_outputs=StructuredOutputs(json=Answer)
    )
    (output,) = llm.generate("Is it?", params, use_tqdm=False)
    assert isinstance(Answer.model_validate_json(output.outputs[0].text).yes, bool)


def test_interrupting_leaves_nothing_behind(llm: LLM) -> None:
    class Stop(Exception):
        """Raised by a progress bar, as Ctrl-C would be."""

    class Bar:
        def __init__(self, **options: Any) -> None:
            self.steps = 0

        def update(self, done: int) -> None:
            self.steps += 1
            if self.steps == 5:
                raise Stop

        def close(self) -> None:
            """Nothing to close."""

    with pytest.raises(Stop):
        llm.generate(PROMPTS, GREEDY, use_tqdm=Bar)
    check_empty(llm._core.loop)
    assert llm.generate("a", GREEDY, use_tqdm=False)[0].finished


def interrupt_within(monkeypatch: pytest.MonkeyPatch, llm: LLM, step: int, times: int = 1) -> None:
    """Send SIGINT `times` from within a step of the model, as Ctrl-C does."""
    run, steps = llm._core.loop.scheduler.commit, []

    def interrupted(*arguments: Any) -> Any:
        steps.append(None)
        if len(steps) == step:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return run(*arguments)

    monkeypatch.setattr(llm._core.loop.scheduler, "commit", interrupted)


def test_ctrl_c_within_a_step_waits_for_its_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate("a", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    for step in (1, 2, 9):
        with monkeypatch.context() as patch:
            interrupt_within(patch, llm, step)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        check_empty(llm._core.loop)
        assert llm.generate("a", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_step_that_does_not_end_is_interrupted_by_the_third_ctrl_c(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(checkpoint), kv_cache_memory_bytes=1 << 22, cpu_threads=1) as llm:
        interrupt_within(monkeypatch, llm, 2, times=3)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        with pytest.raises(EngineDead, match="interrupted within a step: create a new one"):
            llm.generate("a", GREEDY, use_tqdm=False)


def test_statistics_that_raise_are_removed(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Statistics):
        def step(self, stats: object) -> None:
            raise OSError("disk full")

    llm.count_by(Broken())
    assert llm.generate("a", GREEDY, use_tqdm=False)[0].finished
    check_empty(llm._core.loop)
    assert caplog.text.count("failed and were removed") == 1


def test_waiting_for_a_grammar_is_no_work(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling happens in another process: on a busy machine an engine that asks again and again
    whether it is done takes the time from it."""

    class Compiling(FakeExecutor):
        def prepare(self, request: str, constraint: StructuredOutputs) -> Future[None]:
            self.prepared.append(request)
            compiled: Future[None] = Future()
            Timer(0.3, compiled.set_result, (None,)).start()
            return compiled

    params = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputs(regex="a+"))
    plugins = PluginManager()
    plugins.register("executors", "compiling", Compiling)
    flags = {"distributed_executor_backend": "compiling"}
    with using(plugins), LLM(str(checkpoint), **flags) as llm:
        ticks, tick = [], llm._core.loop.tick
        monkeypatch.setattr(llm._core.loop, "tick", lambda: ticks.append(None) or tick())
        (output,) = llm.generate("a", params, use_tqdm=False)
    assert output.finished
    assert len(ticks) < 20


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    (one,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert one.prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert len(llm.chat([messages, messages], GREEDY, use_tqdm=False)) == 2


@parametrize_sample(
    "flags",
    [
        {"max_num_batched_tokens": 16, "max_num_seqs": 3},
        {"async_scheduling": True},
        {"num_gpu_blocks_override": 8, "max_num_seqs": 4},
        {"scheduling_policy": "priority", "enable_prefix_caching": False},
        {"scheduler_cls": "modulm.engine.scheduling.scheduler:BudgetScheduler"},
        {"block_size": 4},
    ],
    every=2,
)
def test_no_way_of_scheduling_changes_the_answer(
    llm: LLM, checkpoint: Path, flags: dict[str, Any]
) -> None:
    prompts = [*PROMPTS, {"prompt_token_ids": [9 + i % 90 for i in range(90)]}]
    expected = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
    options = {"kv_cache_memory_bytes": 1 << 24, "cpu_threads": 1} | flags
    with LLM(model=str(checkpoint), **options) as other:
        found = other.generate(prompts, GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in found] == expected
        check_empty(other._core.loop)


def test_a_scheduler_that_is_none_is_refused(checkpoint: Path) -> None:
    assert issubclass(BudgetScheduler, Scheduler)
    with pytest.raises(ConfigError, match="scheduler_cls"):
        LLM(model=str(checkpoint), scheduler_cls="collections:Counter")


@pytest.mark.parametrize(
    "memory", [{"num_gpu_blocks_override": 4}, {"kv_cache_memory_bytes": 1 << 18}]
)
def test_a_length_that_was_asked_for_is_not_cut(checkpoint: Path, memory: dict[str, int]) -> None:
    flags = {"model": str(checkpoint), "cpu_threads": 1, "block_size": 32, **memory}
    with LLM(**flags) as llm:
        fits = llm.info.max_model_len
        assert 32 <= fits < 256
        assert any(f"{fits} instead of" in note for note in llm.info.notes)
    with pytest.raises(ConfigError, match=rf"blocks of 32 tokens are missing.*{fits} or auto"):
        LLM(**flags, max_model_len=256)
    with LLM(**flags, max_model_len=fits) as llm:
        assert llm.info.max_model_len == fits


def test_seeds_are_signed(llm: LLM) -> None:
    """OpenAI's are 64 bits with a sign; the last of several choices may be one beyond."""

    def drawn(seed: int) -> list[list[int]]:
        params = SamplingParams(n=2, seed=seed, max_tokens=12, ignore_eos=True)
        (output,) = llm.generate("Hello", params, use_tqdm=False)
        return [list(choice.token_ids) for choice in output.outputs]

    for seed in (-1, -(2**63), 2**63 - 1):
        assert drawn(seed) == drawn(seed)
    assert drawn(-7) != drawn(7)
    assert drawn(2**63 - 1)[1] == drawn(-(2**63))[0], "seeds go round"


def test_weights_that_are_no_numbers_end_the_start(tmp_path: Path) -> None:
    """F33."""
    make_tiny(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.0.mlp.down_proj.weight"].fill_(float("nan"))
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(EngineError, match="returns no finite logits: its weights are broken"):
        LLM(str(tmp_path))
