"""The sampler: what every parameter does, in which order, and that rows do not see each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modulm.contracts.executor import RowStart
from modulm.contracts.grammar import Grammar, Matcher
from modulm.contracts.sampling import LogitsProcessor, SamplingParams
from modulm.engine.sampling.logits_processors import Processors
from modulm.engine.sampling.sampler import Sampled, Sampler
from modulm.errors import RequestError
from modulm.ops import bind
from modulm.plugins import manager

V = 100
CPU = torch.device("cpu")
OPS = bind()
PLATFORM = manager.current().load("platforms", "cpu")()


def new(processors=(), mode="raw_logprobs", vocabulary=V, rows=16) -> Sampler:
    return Sampler(
        OPS,
        PLATFORM,
        vocabulary=vocabulary,
        rows=rows,
        mode=mode,
        processors=Processors(processors),
    )


def start(row, prompt=(1, 2), output=(), seed=0, **more) -> RowStart:
    taken = {k: more.pop(k) for k in ("stop_ids", "bad_words") if k in more}
    params = SamplingParams(**{"temperature": 0.0, **more})
    arrays = np.array(prompt), np.array(output, dtype=np.int64)
    return RowStart(row, f"r{row}", params, *arrays, seed, **taken)


def admit(sampler: Sampler, *starts: RowStart, grammar: Grammar | None = None) -> None:
    """`grammar` is the first row's."""
    for index, one in enumerate(starts):
        sampler.admit(one, one.params, None if index else grammar)


def logits(rows=1, seed=0, vocabulary=V) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def pick(sampler: Sampler, rows, x, position=5):
    """What was chosen, with logprobs and errors by row instead of by place."""
    got = sampler.sample(np.array(rows), np.full(len(rows), position), x.clone()).result()
    tables = [
        {rows[place]: value for place, value in t.items()} for t in (got.logprobs, got.errors)
    ]
    return Sampled(got.tokens, *tables)


def one(x, **params) -> int:
    sampler = new()
    admit(sampler, start(0, **params))
    return int(pick(sampler, [0], x).tokens[0])


def ranked(x: torch.Tensor) -> list[int]:
    return x[0].argsort(descending=True).tolist()


def test_greedy_is_the_argmax_and_needs_nothing_else() -> None:
    sampler = new()
    admit(sampler, start(3), start(1))
    got = pick(sampler, [1, 3], x := logits(2))
    assert got.tokens.tolist() == x.argmax(-1).tolist()
    assert (got.logprobs, got.errors) == ({}, {})


@pytest.mark.parametrize("limit", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_limits_that_leave_one_token_are_greedy(limit) -> None:
    x = logits()
    for seed in range(20):
        assert one(x, temperature=3.0, seed=seed, **limit) == ranked(x)[0]


def test_allowed_ids() -> None:
    x = logits()
    low = ranked(x)[-3:]
    assert one(x, allowed_token_ids=low) == low[0]


def test_logit_bias() -> None:
    x = logits()
    last = ranked(x)[-1]
    assert one(x, logit_bias={last: 100.0}) == last
    assert one(x, logit_bias={ranked(x)[0]: -100.0}) == ranked(x)[1]


def test_a_bias_that_is_equal_for_all_changes_nothing() -> None:
    x = logits()
    assert one(x, logit_bias=dict.fromkeys(range(V), -100.0)) == ranked(x)[0]


def test_bad_words_ban_the_token_that_would_complete_one() -> None:
    x = logits()
    best, second = ranked(x)[:2]
    assert one(x, bad_words=((best,),)) == second
    sequence = ((7, 8, best),)
    assert one(x, bad_words=sequence, output=[7, 8]) == second
    assert one(x, bad_words=sequence, output=[7]) == best
    assert one(x, bad_words=sequence, output=[8, 7]) == best
    assert one(x, bad_words=sequence, output=[8]) == best


def test_min_tokens_hold_stop_ids_back_until_they_are_reached() -> None:
    x = logits()
    best, second = ranked(x)[:2]
    sampler = new()
    admit(sampler, start(0, min_tokens=3, stop_ids=(best,), output=[5]))
    assert [int(pick(sampler, [0], x).tokens[0]) for _ in range(4)] == [second, second, best, best]


def test_penalties_count_prompt_and_output_as_documented() -> None:
    x = torch.full((1, V), -1.0)
    x[0, [10, 11, 12]] = torch.tensor([4.0, 3.9, 3.8])
    assert one(x, prompt=[10]) == 10
    assert one(x, prompt=[10], repetition_penalty=1.5) == 11
    assert one(x, prompt=[10], presence_penalty=2.0) == 10  # the prompt does not count
    assert one(x, output=[10], presence_penalty=2.0) == 11
    assert one(x, output=[10, 10, 11], frequency_penalty=0.15) == 12
    assert one(x, output=[10, 10, 11], frequency_penalty=-0.2) == 10
    assert one(x, output=[11] * 3, frequency_penalty=-0.2) == 11


def test_penalties_follow_what_the_row_says() -> None:
    x = logits()
    best = ranked(x)[:4]
    sampler = new()
    admit(sampler, start(0, presence_penalty=50.0))
    assert [int(pick(sampler, [0], x).tokens[0]) for _ in range(4)] == best


def test_a_preempted_row_goes_on_as_if_it_had_not_been() -> None:
    asks = {"temperature": 1.3, "seed": 3, "frequency_penalty": 0.9, "repetition_penalty": 1.2}
    whole = new()
    admit(whole, start(0, **asks))
    tokens = [int(pick(whole, [0], logits(1, i), i).tokens[0]) for i in range(12)]
    for cut in (0, 1, 7):
        again = new()
        admit(again, start(4, output=tokens[:cut], **asks))
        rest = [int(pick(again, [4], logits(1, i), i).tokens[0]) for i in range(cut, 12)]
        assert tokens[:cut] + rest == tokens


def test_order_bans_come_before_bias_and_bias_before_penalties() -> None:
    x = torch.zeros(1, V)
    assert one(x, allowed_token_ids=[4], logit_bias={5: 100.0}) == 4
    assert one(x, bad_words=((5,),), logit_bias={5: 100.0, 6: 1.0}) == 6
    # 3 * 2 > 5 but the bias is scaled down by the penalty as well: (1 + 3) / 2 < 2.5.
    x[0, 7], x[0, 8] = 1.0, 2.5
    assert one(x, logit_bias={7: 3.0}, prompt=[7], repetition_penalty=2.0) == 8


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs",
                                  "processed_logits"])  # fmt: skip
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_logprobs_modes(mode, temperature) -> None:
    x = logits()
    best = ranked(x)
    sampler = new(mode=mode)
    asks = {"temperature": temperature, "top_k": 1, "logit_bias": {best[5]: 40.0}, "logprobs": 2}
    admit(sampler, start(0, **asks))
    entry = pick(sampler, [0], x).logprobs[0]
    values = x.clone()
    if mode.startswith("processed"):
        values[0, best[5]] += 40
        if temperature:
            values = values / temperature
            values[values < values.max()] = -torch.inf
    if mode.endswith("logprobs"):
        values = values.log_softmax(-1)
    assert int(entry.ids[0]) == best[5]
    np.testing.assert_allclose(entry.values[0], values[0, best[5]], rtol=1e-6)
    order = values[0].topk(2)
    np.testing.assert_allclose(entry.values[1:], order.values, rtol=1e-6)
    assert entry.rank == (6 if mode.startswith("raw") else 1)


def test_rows_ask_for_different_numbers_of_logprobs() -> None:
    sampler = new()
    wants = {0: None, 1: 0, 2: 5, 3: -1}
    admit(sampler, *(start(row, logprobs=k) for row, k in wants.items()))
    x = logits(4)
    got = pick(sampler, [0, 1, 2, 3], x)
    assert {row: len(entry.ids) for row, entry in got.logprobs.items()} == {1: 1, 2: 6, 3: V + 1}
    whole = torch.tensor(got.logprobs[3].values[1:])
    assert float(whole.double().exp().sum()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits"])
def test_rows_name_the_tokens_whose_logprobs_they_get(mode: str) -> None:
    """Beside rows that get the best ones, and for several positions of one row."""
    sampler, x = new(mode=mode), logits(4)
    named = [start(row, temperature=0, logprobs=0, logprob_token_ids=ids)
             for row, ids in ((0, (5, 3, 9)), (1, (7,)))]  # fmt: skip
    admit(sampler, *named, start(2, temperature=0, logprobs=2))
    rows = np.array([0, 1, 2, 0])
    drawn = sampler.sample(rows, np.full(4, 5), x.clone()).result()
    expected = x.log_softmax(-1) if mode.endswith("logprobs") else x
    for index, ids in enumerate(((5, 3, 9), (7,), None, (5, 3, 9))):
        entry, token = drawn.logprobs[index], int(x[index].argmax())
        ids = ids or tuple(x[index].topk(2).indices.tolist())
        assert entry.ids.tolist() == [token, *ids]
        torch.testing.assert_close(
            torch.as_tensor(entry.values), expected[index][[token, *ids]], rtol=1e-4, atol=1e-4
        )


def test_rows_without_a_choice_fail_alone() -> None:
    sampler = new()
    admit(sampler, start(0), start(1), start(2, allowed_token_ids=[9], bad_words=((9,),)), start(3))
    x = logits(4)
    x[1] = torch.nan
    x[3, 6] = torch.inf
    got = pick(sampler, [0, 1, 2, 3], x)
    assert got.tokens.tolist() == [int(x[0].argmax()), -1, -1, -1]
    assert "NaN" in got.errors[1].message
    assert "no token can be sampled" in got.errors[2].message
    assert "infinite" in got.errors[3].message


def test_a_constraint_that_cannot_run_ends_its_row() -> None:
    sampler = new()
    admit(sampler, start(0, logit_bias={V: 1.0}), start(1))
    got = pick(sampler, [0, 1], x := logits(2))
    assert got.tokens.tolist() == [-1, int(x[1].argmax())]
    assert "could not be changed" in got.errors[0].message


class Fixed(Grammar):
    """Allows exactly one sequence of tokens, then `end`; may break at a given step."""

    def __init__(self, tokens, end=0, breaks_at=None) -> None:
        self.tokens, self.end, self.breaks_at = tokens, end, breaks_at

    def matcher(self) -> Matcher:
        return _FixedMatcher(self)


class _FixedMatcher(Matcher):
    def __init__(self, grammar: Fixed) -> None:
        self.grammar, self.at = grammar, 0

    @property
    def expected(self) -> int:
        return [*self.grammar.tokens, self.grammar.end][self.at]

    def accept(self, token: int) -> bool:
        if token != self.expected:
            return False
        self.at += 1
        return True

    def fill(self, mask: np.ndarray) -> None:
        if self.at == self.grammar.breaks_at:
            raise RuntimeError("broken on purpose")
        mask[:] = 0
        mask[self.expected // 32] = np.array(1 << self.expected % 32, np.uint32).view(np.int32)

    def rollback(self, tokens: int) -> None:
        self.at -= tokens

    @property
    def finished(self) -> bool:
        return self.at == len(self.grammar.tokens)


def test_a_grammar_decides_and_is_replayed_after_preemption() -> None:
    for cut in (0, 2):
        sampler = new()
        admit(sampler, start(0, output=[31, 32][:cut]), grammar=Fixed([31, 32, 5, 99]))
        got = [int(pick(sampler, [0], logits(1, i)).tokens[0]) for i in range(5 - cut)]
        assert [31, 32][:cut] + got == [31, 32, 5, 99, 0]


def test_a_finished_grammar_ends_before_min_tokens() -> None:
    sampler = new()
    admit(sampler, start(0, min_tokens=9, stop_ids=(0,)), grammar=Fixed([7]))
    assert [int(pick(sampler, [0], logits()).tokens[0]) for _ in range(2)] == [7, 0]


def test_a_grammar_that_raises_ends_its_row() -> None:
    sampler = new()
    admit(sampler, start(0), start(1, temperature=1.0), grammar=Fixed([3, 4, 5], breaks_at=1))
    alone = new()
    admit(alone, start(1, temperature=1.0))
    for step in range(2):
        x = logits(2, step)
        got = pick(sampler, [0, 1], x, step)
        assert got.tokens[1] == pick(alone, [1], x[1:], step).tokens[0]
    assert got.tokens[0] == -1
    assert "broken on purpose" in got.errors[0].message


def test_a_grammar_that_takes_too_long_ends_its_row(monkeypatch) -> None:
    monkeypatch.setattr("modulm.engine.sampling.sampler._GRAMMAR_SECONDS", -1.0)
    sampler = new()
    admit(sampler, start(0), start(1), grammar=Fixed([3]))
    got = pick(sampler, [0, 1], x := logits(2))
    assert got.tokens.tolist() == [-1, int(x[1].argmax())]
    assert "too ambiguous" in got.errors[0].message


def test_a_replay_that_the_grammar_refuses_is_an_error_of_the_admission() -> None:
    with pytest.raises(RequestError, match="does not accept token 8"):
        admit(new(), start(0, output=[8]), grammar=Fixed([3]))


class Favourite(LogitsProcessor):
    """Adds to one token's logits where the request asks for it."""

    api = 1
    batched = 0

    def admit(self, view) -> bool:
        wish = (view.params.extra_args or {}).get("favourite")
        if wish == "refuse":
            raise ValueError("never that")
        self.admitted = [*getattr(self, "admitted", []), view.row]
        return wish is not None

    def release(self, row: int) -> None:
        self.admitted.remove(row)

    def apply_row(self, view, logits: torch.Tensor) -> torch.Tensor:
        wish = view.params.extra_args["favourite"]
        if wish == len(view.output):
            raise RuntimeError("broken on purpose")
        logits[wish] += 1000.0
        return logits


class Together(Favourite):
    def apply(self, views, logits, index):
        type(self).batched += 1
        for view, place in zip(views, index, strict=True):
            logits[place] = self.apply_row(view, logits[place])
        return logits


class Gentle(Favourite):
    @property
    def keeps_argmax(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [Favourite, Together])
def test_processors_change_the_rows_that_want_them(kind) -> None:
    sampler = new([kind(V, CPU)])
    admit(sampler, start(0), start(1, extra_args={"favourite": 42}))
    admit(sampler, start(2, extra_args={"favourite": 0}), start(3, temperature=1.0))
    x = logits(4)
    alone = new()
    admit(alone, start(3, temperature=1.0))
    got = pick(sampler, [0, 1, 2, 3], x)
    assert got.tokens[:3].tolist() == [int(x[0].argmax()), 42, -1]
    assert got.tokens[3] == pick(alone, [3], x[3:]).tokens[0]
    assert list(got.errors) == [2]
    assert "broken on purpose" in got.errors[2].message
    for row in range(4):
        sampler.release(row)
    assert sampler.processors.all[0].admitted == [0, 3]  # it did not want these


def test_a_processor_that_refuses_a_row_frees_it_everywhere() -> None:
    first, second = Favourite(V, CPU), Favourite(V, CPU)
    sampler = new([first, second])
    with pytest.raises(ValueError, match="never that"):
        admit(sampler, start(0, extra_args={"favourite": "refuse"}))
    sampler.release(0)
    admit(sampler, start(0))
    assert int(pick(sampler, [0], x := logits()).tokens[0]) == ranked(x)[0]


def test_processors_that_keep_the_argmax_run_for_drawn_rows_only() -> None:
    sampler = new([Gentle(V, CPU)])
    admit(sampler, start(0, extra_args={"favourite": 42}))
    admit(sampler, start(1, temperature=0.5, extra_args={"favourite": 42}))
    got = pick(sampler, [0, 1], x := logits(2))
    assert got.tokens.tolist() == [int(x[0].argmax()), 42]


def test_released_rows_leave_nothing_behind() -> None:
    sampler = new([Favourite(V, CPU)])
    asks = {"temperature": 2.0, "logprobs": 3, "allowed_token_ids": [4], "min_tokens": 4}
    admit(sampler, start(0, presence_penalty=1.0, extra_args={"favourite": 42}, **asks))
    pick(sampler, [0], logits())
    sampler.release(0)
    admit(sampler, start(0))
    got = pick(sampler, [0], x := logits())
    assert (got.tokens.tolist(), got.logprobs, got.errors) == ([ranked(x)[0]], {}, {})


PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.6, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 5, 40]),
        "top_p": st.sampled_from([1.0, 0.5, 0.95]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "presence_penalty": st.sampled_from([0.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.0, -0.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "logit_bias": st.just({3: 5.0, 77: -3.0}),
        "allowed_token_ids": st.just(tuple(range(5, 60))),
        "logprobs": st.sampled_from([0, 3]),
        "extra_args": st.sampled_from([{"favourite": 9}, {"favourite": 2}]),
        "min_tokens": st.just(3),
    },
)


@settings(max_examples=40, deadline=None)
@given(st.lists(PARAMS, min_size=2, max_size=8), st.integers(0, 1000), st.data())
def test_a_row_gets_the_same_alone_and_in_a_crowd(asks, seed, data) -> None:
    """Rows come, go and fail at random; each row's tokens, logprobs and errors stay its own."""
    starts = [
        start(i, seed=seed + i, stop_ids=(9, 10), bad_words=((6,), (7, 8)), **ask)
        for i, ask in enumerate(asks)
    ]
    crowd, solos = new([Together(V, CPU)]), []
    for each in starts:
        admit(crowd, each)
        solos.append(new([Together(V, CPU)]))
        admit(solos[-1], each)
    alive = set(range(len(asks)))
    for step in range(5):
        here = data.draw(st.permutations(sorted(alive)))
        here = here[: data.draw(st.integers(1, len(here)))]
        x = torch.stack([logits(1, hash((seed, row, step)) % 2**31)[0] for row in here])
        together = pick(crowd, here, x, step)
        for place, row in enumerate(here):
            alone = pick(solos[row], [row], x[place : place + 1], step)
            assert alone.tokens.tolist() == together.tokens[place : place + 1].tolist()
            assert alone.errors == {k: v for k, v in together.errors.items() if k == row}
            mine = together.logprobs.get(row)
            assert (mine is None) == (row not in alone.logprobs)
            if mine is not None:
                assert mine.ids.tolist() == alone.logprobs[row].ids.tolist()
                assert mine.values.tobytes() == alone.logprobs[row].values.tobytes()
        alive -= set(together.errors)
        if not alive:
            break
