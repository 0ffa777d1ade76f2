"""From events to text: stop strings, deltas, n answers, errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modulm.contracts.executor import RowLogprobs
from modulm.contracts.requests import Finish, Start, StepEvents
from modulm.contracts.sampling import OutputKind, PoolingParams, SamplingParams
from modulm.contracts.tokenizer import Tokenizer
from modulm.errors import EngineDead, RequestError
from modulm.testing.checkpoints import make_tokenizer
from modulm_frontend.output_processor import OutputProcessor, RequestState
from modulm_tokenizers.tokenizer import load_tokenizer

_TOKENIZERS: dict[str, Tokenizer] = {}


def cached_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if "it" not in _TOKENIZERS:
        folder: Path = tmp_path_factory.mktemp("tokenizer")
        make_tokenizer(folder)
        _TOKENIZERS["it"] = load_tokenizer(folder)
    return _TOKENIZERS["it"]


@pytest.fixture(name="tokenizer")
def _tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return cached_tokenizer(tmp_path_factory)


def open_answer(
    tokenizer: Tokenizer, params: SamplingParams, n: int = 1
) -> tuple[OutputProcessor, RequestState]:
    ids = tuple(f"a#{index}" for index in range(n)) if n > 1 else ("a",)
    answer = RequestState("a", "text", np.array([3, 4]), params, tokenizer, 0.0, ids, keep=params.n)
    answers = OutputProcessor()
    answers.add(answer)
    return answers, answer


def play(
    answers: OutputProcessor,
    answer: RequestState,
    tokens: list[int],
    finish: Finish | None,
    every: int = 1,
) -> tuple[list[object], list[str]]:
    """Feed one token per step; take an output every so many steps. (outputs, aborted ids)."""
    outputs, aborted = [], []
    for step, token in enumerate(tokens, start=1):
        ends = [finish] if finish is not None and step == len(tokens) else []
        _, stopped = answers.process(StepEvents(requests=["a"], tokens=[token], finished=ends))
        aborted += stopped
        if step % every == 0 or ends or stopped:
            outputs.append(answer.take())
        if stopped:
            break
    return [output for output in outputs if output is not None], aborted


LENGTH = Finish("a", "length")


def test_drafts_are_counted_for_each_answer(tokenizer: Tokenizer) -> None:
    params = SamplingParams(n=2, max_tokens=9)
    state = RequestState(
        "a", "text", np.array([3, 4]), params, tokenizer, 0.0, ("a#0", "a#1"), keep=2, drafts=4
    )
    answers = OutputProcessor()
    answers.add(state)
    for verified in ({"a#0": (4, 4), "a#1": (4, 0)}, {"a#0": (2, 1)}, {"gone": (4, 4)}):
        answers.process(StepEvents(drafted=verified))
    ends = [Finish("a#0", "length"), Finish("a#1", "length")]
    answers.process(StepEvents(finished=ends, drafted={"a#0": (4, 0)}))
    first, second = (choice.spec_decode_metrics for choice in state.take().outputs)
    assert first.to_dict(detailed=True) == {
        "mean_acceptance_length": 1 + 5 / 3,
        "draft_acceptance_rate": 0.5,
        "acceptance_histogram": [1, 1, 0, 0, 1],
        "acceptance_histogram_by_draft_length": {"4": [1, 0, 0, 0, 1], "2": [0, 1, 0]},
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 10,
        "num_spec_tokens": 4,
        "per_step_accepted": [4, 1, 0],
        "per_step_drafted": [4, 2, 4],
    }
    assert second.to_dict()["acceptance_histogram"] == [1, 0, 0, 0, 0]
    plain, state = open_answer(tokenizer, params.with_(n=1))
    plain.process(StepEvents(finished=[LENGTH]))
    assert state.take().outputs[0].spec_decode_metrics is None


@settings(max_examples=40, deadline=None)
@given(
    st.text(alphabet="abcé€🙂 \n", min_size=1, max_size=24),
    st.lists(st.text(alphabet="abcé€", min_size=1, max_size=3), max_size=3),
    st.booleans(),
    st.integers(1, 4),
)
def test_deltas_joined_are_the_text_and_end_before_the_stop(
    tmp_path_factory: pytest.TempPathFactory, text: str, stops: list[str], include: bool, every: int
) -> None:
    tokenizer = cached_tokenizer(tmp_path_factory)
    ids = tokenizer.encode(text, add_special_tokens=False)
    matches = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    expected = text
    if matches:
        end, length = min(matches)
        expected = text[: end if include else end + length]
    base = SamplingParams(stop=stops, include_stop_str_in_output=include, max_tokens=99)
    whole = ""
    for kind in OutputKind:
        answers, answer = open_answer(tokenizer, base.with_(output_kind=kind))
        outputs, aborted = play(answers, answer, ids, LENGTH, every)
        texts = [output.outputs[0].text for output in outputs]
        whole = "".join(texts) if kind is OutputKind.DELTA else texts[-1]
        assert whole == expected
        last = outputs[-1].outputs[0]
        assert last.finish_reason == ("stop" if matches else "length")
        assert (last.stop_reason in stops) == bool(matches)
        assert len(aborted) <= 1
        if kind is OutputKind.CUMULATIVE:
            assert all(expected.startswith(part) for part in texts)
        if kind is OutputKind.FINAL_ONLY:
            assert len(outputs) == 1
        assert len(answers) == 0


@pytest.mark.parametrize("stop", [None, "op", "zz"])
@pytest.mark.parametrize("least", [0, 9])
def test_a_run_of_tokens_gives_what_single_steps_give(
    tokenizer: Tokenizer, stop: str | None, least: int
) -> None:
    """Several tokens of a step, with their logprobs; a stop string drops the rest of the run."""
    params = SamplingParams(stop=stop, min_tokens=least, max_tokens=99, logprobs=0)
    ids = tokenizer.encode("go on stop more, stop", add_special_tokens=False)
    entries = [RowLogprobs(np.array([i]), np.array([-i / 8]), 1) for i in range(len(ids))]
    outputs = []
    for size in (1, 3, len(ids)):
        answers, answer = open_answer(tokenizer, params, n=2)
        answers.process(
            StepEvents(requests=["a#1"], tokens=[ids[0]], logprobs={"a#1": (entries[0],)})
        )
        for first in range(0, len(ids), size):
            run = ids[first : first + size]
            ends = [Finish("a#0", "length")] if first + size >= len(ids) else []
            logprobs = {"a#0": tuple(entries[first : first + size]), "a#1": (entries[1],)}
            names = ["a#0"] * len(run) + ["a#1"]
            answers.process(
                StepEvents(requests=names, tokens=[*run, ids[1]], logprobs=logprobs, finished=ends)
            )
        outputs.append(answer.choices[0].output())
        assert len(answers) == 1
    assert outputs[0] == outputs[1] == outputs[2]
    assert outputs[0].finish_reason == ("stop" if stop == "op" else "length")
    assert len(outputs[0].logprobs) == len(outputs[0].token_ids)


def test_a_match_aborts_the_row_and_late_tokens_are_ignored(tokenizer: Tokenizer) -> None:
    answers, answer = open_answer(tokenizer, SamplingParams(stop="stop", max_tokens=99))
    ids = tokenizer.encode("go on stop more", add_special_tokens=False)
    outputs, aborted = play(answers, answer, ids, None)
    assert aborted == ["a"]
    assert outputs[-1].outputs[0].text == "go on "
    assert outputs[-1].outputs[0].stop_reason == "stop"
    assert answers.process(StepEvents(requests=["a"], tokens=[5])) == ([], [])
    assert answer.take() is None


def test_the_stop_token_is_counted_but_not_shown(tokenizer: Tokenizer) -> None:
    end = tokenizer.eos_id
    ids = [*tokenizer.encode("hi", add_special_tokens=False), end]
    for include, text in ((False, "hi"), (True, "hi" + tokenizer.decode([end], False))):
        params = SamplingParams(include_stop_str_in_output=include, skip_special_tokens=False)
        answers, answer = open_answer(tokenizer, params)
        outputs, _ = play(answers, answer, ids, Finish("a", "stop"))
        assert outputs[-1].outputs[0].text == text
        assert outputs[-1].outputs[0].token_ids == ids
        assert outputs[-1].outputs[0].finish_reason == "stop"


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ababab", add_special_tokens=False)
    params = SamplingParams(stop="b", min_tokens=len(ids), max_tokens=99)
    answers, answer = open_answer(tokenizer, params)
    outputs, aborted = play(answers, answer, ids, LENGTH)
    assert not aborted
    assert outputs[-1].outputs[0].text == "ababab"


def test_an_unfinished_character_comes_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂", add_special_tokens=False)
    assert len(ids) > 1
    answers, answer = open_answer(tokenizer, SamplingParams(max_tokens=9))
    outputs, _ = play(answers, answer, ids[:-1], LENGTH)
    assert [output.outputs[0].text for output in outputs[:-1]] == [""] * (len(ids) - 2)
    assert outputs[-1].outputs[0].text == "\N{REPLACEMENT CHARACTER}"


def test_n_answers_end_together_and_deltas_carry_only_news(tokenizer: Tokenizer) -> None:
    params = SamplingParams(n=2, output_kind=OutputKind.DELTA)
    answers, answer = open_answer(tokenizer, params, 2)
    answers.process(StepEvents(requests=["a#0", "a#1"], tokens=[70, 71]))
    assert [o.index for o in answer.take().outputs] == [0, 1]
    answers.process(StepEvents(finished=[Finish("a#0", "length")], requests=["a#0"], tokens=[72]))
    output = answer.take()
    assert [o.index for o in output.outputs] == [0]
    assert not output.finished
    answers.process(StepEvents(requests=["a#1"], tokens=[73], finished=[Finish("a#1", "length")]))
    output = answer.take()
    assert [o.index for o in output.outputs] == [1]
    assert output.finished


def test_best_of_keeps_the_most_probable(tokenizer: Tokenizer) -> None:
    params = SamplingParams(n=1, best_of=3, logprobs=0)
    answers, answer = open_answer(tokenizer, params, 3)
    answer.ranks_only = True
    names = ["a#0", "a#1", "a#2"]
    entries = {
        name: (RowLogprobs(np.array([70 + i]), np.array([value], dtype=np.float32), 1),)
        for i, (name, value) in enumerate(zip(names, (-2.0, -0.5, -1.0), strict=True))
    }
    events = StepEvents(
        requests=names,
        tokens=[70, 71, 72],
        logprobs=entries,
        finished=[Finish(name, "length") for name in names],
    )
    answers.process(events)
    outputs = answer.take().outputs
    assert [(o.index, o.token_ids, o.logprobs) for o in outputs] == [(0, [71], None)]


def test_logprobs_show_the_chosen_token_first_and_ranks(tokenizer: Tokenizer) -> None:
    answers, answer = open_answer(tokenizer, SamplingParams(logprobs=2, prompt_logprobs=1))
    entry = RowLogprobs(np.array([9, 5, 9]), np.array([-1.5, -0.5, -1.5]), 2)
    answers.process(
        StepEvents(
            started=[Start("a", 1, 5.0)],
            requests=["a"],
            tokens=[9],
            logprobs={"a": (entry,)},
            prompt_logprobs={"a": (1, (entry, entry))},
            finished=[LENGTH],
        )
    )
    output = answer.take()
    (position,) = output.outputs[0].logprobs
    assert [(t, p.logprob, p.rank) for t, p in position.items()] == [(9, -1.5, 2), (5, -0.5, 1)]
    assert position[5].decoded_token == tokenizer.decode([5], False)
    assert output.outputs[0].cumulative_logprob == -1.5
    assert output.prompt_logprobs[0] is None
    assert set(output.prompt_logprobs[1]) == {9, 5}
    assert len(output.prompt_logprobs) == 2
    assert output.num_cached_tokens == 1


def test_wrong_requests_raise_and_failed_rows_say_so(tokenizer: Tokenizer) -> None:
    answers, answer = open_answer(tokenizer, SamplingParams())
    answers.process(StepEvents(finished=[Finish("a", "error", None, RequestError("no", "prompt"))]))
    with pytest.raises(RequestError, match="no"):
        answer.take()
    answers, answer = open_answer(tokenizer, SamplingParams())
    answers.process(StepEvents(finished=[Finish("a", "error", None, EngineDead("broke"))]))
    output = answer.take().outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("error", "broke")
    answers, answer = open_answer(tokenizer, SamplingParams())
    assert answers.fail_all(EngineDead("gone")) == [answer]
    with pytest.raises(EngineDead):
        answer.take()


def test_an_id_in_use_is_refused(tokenizer: Tokenizer) -> None:
    answers, answer = open_answer(tokenizer, SamplingParams())
    with pytest.raises(RequestError, match="in use"):
        answers.add(answer)


def test_a_pooled_answer_comes_once() -> None:
    answer = RequestState("a", None, np.array([1, 2]), PoolingParams(), None, 0.0, ("a",))
    answers = OutputProcessor()
    answers.add(answer)
    values = np.array([1.0, 2.0])
    answers.process(StepEvents(pooled={"a": values}, finished=[Finish("a", "stop")]))
    assert answer.take().outputs.data is values
    assert answer.take() is None
