"""The runner on a real tiny model: plans made by hand, transformers as the oracle."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from modulm.config import EngineConfig
from modulm.contracts.executor import Plan, RowStart
from modulm.contracts.sampling import PoolingParams, SamplingParams
from modulm.contracts.step_part import PartRunner
from modulm.engine.worker.model_runner import ModelRunner
from modulm.errors import EngineError
from modulm.loading import load_model, open_checkpoint
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny
from modulm_pooler_standard.rows import PoolerConfig, StandardRows
from modulm_pooling.part import PoolingRunner

GREEDY = SamplingParams(temperature=0.0)
PROMPTS = [[5, 99, 7, 300, 2, 2, 41], [17], list(range(100, 140)), [8] * 21]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("runner") / "tiny")


@pytest.fixture(scope="module")
def oracle(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class Grammars(PartRunner):
    """Gives what is in `known`."""

    def __init__(self) -> None:
        self.known: dict[str, object] = {}

    def grammar(self, start):
        return self.known.get(start.request)


def new_runner(folder, pooler=None, **flags) -> ModelRunner:
    flags = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "max_model_len": 128,
        "num_gpu_blocks_override": 65,
        "dtype": "float32",
        **flags,
    }
    config = EngineConfig.from_keywords(model=str(folder), **flags)
    plugins = manager.current()
    platform = plugins.load("platforms", "cpu")()
    loaded = load_model(config, open_checkpoint(config, plugins), platform, plugins)
    parts = {"grammars": Grammars()}
    if pooler is not None:
        made = SimpleNamespace(rows=lambda pooling, logits, layers: StandardRows(pooler, logits))
        parts["pooling"] = PoolingRunner(SimpleNamespace(pooler=made, pooling={}, layers=()))
    return ModelRunner(config, loaded, platform, plugins, parts=parts)


def pooled_arrays(result) -> dict[int, np.ndarray]:
    (report,) = result.parts
    return report.value


@pytest.fixture(scope="module")
def runner(folder):
    return new_runner(folder)


class Rows:
    """Feeds a runner like a scheduler that gives row r the blocks 1 + 8 r ... 8 + 8 r."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.steps = runner, 0
        self.history: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.prompts: dict[int, int] = {}
        self.fresh: list[RowStart] = []
        self.gone: list[int] = []

    def admit(self, row, prompt, params=GREEDY, output=(), seed=0, **more) -> None:
        arrays = np.array(prompt), np.array(output, dtype=np.int64)
        self.fresh.append(RowStart(row, f"r{row}", params, *arrays, seed, **more))
        self.history[row], self.computed[row] = [*prompt, *output], 0
        self.prompts[row] = len(prompt)

    def release(self, row) -> None:
        self.gone.append(row)
        del self.history[row]

    def step(self, counts: dict[int, int], placeholders=False):
        rows = np.array(list(counts), dtype=np.int32)
        starts = np.array([self.computed[r] for r in counts], dtype=np.int32)
        tokens = []
        for row, count in counts.items():
            at = self.computed[row]
            piece = self.history[row][at : at + count]
            tokens += [-1] if placeholders and at >= self.prompts[row] else piece
            self.computed[row] = at + count
        samples = np.array([self.computed[r] == len(self.history[r]) for r in counts])
        tables = (1 + 8 * rows[:, None] + np.arange(8)).astype(np.int32)
        plan = Plan(
            step=self.steps,
            rows=rows,
            starts=starts,
            counts=np.array(list(counts.values()), dtype=np.int32),
            tokens=np.array(tokens, dtype=np.int64),
            tables=tuple(tables for _ in self.runner.capacity.groups),
            samples=samples,
            admit=tuple(self.fresh),
            release=tuple(self.gone),
        )
        self.steps, self.fresh, self.gone = self.steps + 1, [], []
        result = self.runner.run(plan)
        gave = rows[samples] if result.accepted is None else rows[samples][result.accepted > 0]
        for row, token in zip(gave.tolist(), result.tokens.tolist(), strict=True):
            self.history[row].append(token)
        return result

    def finish(self) -> None:
        for row in list(self.history):
            self.release(row)
        self.runner.run(
            Plan(0, *(np.zeros(0, dtype=np.int32) for _ in range(3)), np.zeros(0, np.int64), (),
                 np.zeros(0, bool), (), tuple(self.gone))
        )  # fmt: skip


@pytest.fixture
def rows(runner):
    rows = Rows(runner)
    yield rows
    rows.finish()


def greedy(oracle, prompt, count) -> list[int]:
    ids = torch.tensor([prompt])
    out = oracle.generate(
        ids, do_sample=False, min_new_tokens=count, max_new_tokens=count, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("placeholders", [False, True])
def test_rows_of_any_mix_give_the_tokens_of_transformers(rows, oracle, placeholders) -> None:
    for row, prompt in enumerate(PROMPTS[:3]):
        rows.admit(row, prompt)
    rows.step({0: 7, 2: 13})
    rows.step({0: 1, 1: 1, 2: 20}, placeholders)
    rows.step({2: 7, 0: 1, 1: 1}, placeholders)
    rows.admit(5, PROMPTS[3])
    rows.step({5: 21, 1: 1, 0: 1, 2: 1})
    for _ in range(6):
        rows.step({0: 1, 1: 1, 2: 1, 5: 1}, placeholders)
    for row, prompt in zip((0, 1, 2, 5), PROMPTS, strict=True):
        got = rows.history[row][len(prompt) :]
        assert got == greedy(oracle, prompt, len(got))


def test_a_row_may_change_hands_within_a_plan(rows, oracle) -> None:
    rows.admit(0, PROMPTS[0], SamplingParams(temperature=2.0, logprobs=1), seed=3)
    rows.step({0: 7})
    rows.release(0)
    rows.admit(0, PROMPTS[2])
    got = rows.step({0: 40})
    assert (got.logprobs, got.errors) == ({}, {})
    assert rows.history[0][40:] == greedy(oracle, PROMPTS[2], 1)


def test_a_preempted_row_is_recomputed(rows, oracle) -> None:
    asks = SamplingParams(temperature=1.5, presence_penalty=1.0)
    rows.admit(0, PROMPTS[0], asks, seed=9)
    rows.step({0: 7})
    for _ in range(5):
        rows.step({0: 1})
    whole = rows.history[0][7:]
    rows.release(0)
    rows.admit(3, PROMPTS[0], asks, output=whole[:3], seed=9)
    rows.step({3: 6})
    rows.step({3: 4})
    for _ in range(2):
        rows.step({3: 1})
    assert rows.history[3][7:] == whole


def test_logprobs_are_those_of_transformers(rows, oracle) -> None:
    prompt = PROMPTS[2]
    rows.admit(0, prompt, SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2))
    rows.admit(1, PROMPTS[1])
    entries = []
    for count in (1, 25, 14):
        result = rows.step({0: count, **({1: 1} if count == 25 else {})})
        entries += result.prompt_logprobs.get(0, ())
    with torch.no_grad():
        expected = oracle(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert [int(entry.ids[0]) for entry in entries] == prompt[1:]
    for entry, wanted in zip(entries, expected[:-1], strict=True):
        best = wanted.topk(2)
        np.testing.assert_allclose(entry.values[1:], best.values, atol=1e-4)
        np.testing.assert_allclose(entry.values[0], wanted[int(entry.ids[0])], atol=1e-4)
    got = result.logprobs[0][0]
    np.testing.assert_allclose(got.values, expected[-1][torch.tensor(got.ids)], atol=1e-4)
    assert got.rank == 1


def test_a_row_that_cannot_start_fails_alone(rows, oracle) -> None:
    class Broken:
        def matcher(self):
            raise RuntimeError("broken on purpose")

    rows.runner.parts["grammars"].known["r0"] = Broken()
    rows.admit(0, PROMPTS[0])
    rows.admit(1, PROMPTS[1])
    result = rows.step({0: 7, 1: 1})
    assert result.accepted.tolist() == [0, 1]
    assert "broken on purpose" in result.errors[0].message
    assert rows.history[1][1:] == greedy(oracle, PROMPTS[1], 1)


def test_a_row_of_nan_fails_alone_and_stays_failed(folder, oracle) -> None:
    runner = new_runner(folder)
    rows = Rows(runner)
    for row in range(3):
        rows.admit(row, PROMPTS[row])
    rows.step({0: 7, 1: 1, 2: 40})
    for cache in runner.builder.caches:
        cache[1 + 8 * 1] = torch.nan  # the first block of row 1
    for _ in range(2):
        rows.history[1] = [*rows.history[1][: rows.computed[1]], 3]
        result = rows.step({0: 1, 1: 1, 2: 1})
        assert result.accepted.tolist() == [1, 0, 1]
        assert list(result.errors) == [1]
        assert "NaN" in result.errors[1].message
    for row in (0, 2):
        assert rows.history[row][len(PROMPTS[row]) :] == greedy(oracle, PROMPTS[row], 3)


def test_an_error_of_the_model_is_the_steps(folder, monkeypatch) -> None:
    runner = new_runner(folder)
    rows = Rows(runner)
    rows.admit(0, PROMPTS[0])

    def fail(*given) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(runner.model.norm, "forward", fail)
    monkeypatch.setattr(runner.model.norm, "add", fail)
    with pytest.raises(MemoryError):
        rows.step({0: 7})


def test_a_plan_that_exceeds_the_buffers_is_refused(rows) -> None:
    rows.admit(0, [1] * 129)
    with pytest.raises(EngineError, match="129 tokens"):
        rows.step({0: 129})


def test_broken_weights_are_seen_at_the_start(folder) -> None:
    runner = new_runner(folder)
    runner.check()
    with torch.no_grad():
        next(runner.model.parameters()).fill_(torch.nan)
    with pytest.raises(EngineError, match="no finite logits"):
        runner.check()


def pooled(hidden: torch.Tensor, kind: str) -> torch.Tensor:
    """hidden: [tokens, hidden]; the definitions, on everything at once."""
    return {
        "last": hidden[-1],
        "cls": hidden[0],
        "mean": hidden.mean(0),
        "max": hidden.amax(0),
        "all": hidden,
        "mean_sqrt_len": hidden.sum(0) / len(hidden) ** 0.5,
    }[kind]


@pytest.mark.parametrize(
    "kind", ["last", "cls", "mean", "max", "all", "mean_sqrt_len", "weighted_mean", "cls+max"]
)
@pytest.mark.parametrize("skipped", [0, 12])
def test_pooling_gives_the_same_for_every_way_of_cutting(folder, oracle, kind, skipped) -> None:
    config = PoolerConfig.from_table({"pooling_type": kind, "normalize": False})
    runner = new_runner(folder, config)
    with torch.no_grad():
        hidden = oracle.model(torch.tensor([PROMPTS[2]])).last_hidden_state[0]
    if kind == "weighted_mean":
        ranks = torch.arange(1, len(hidden) + 1)[skipped:, None]
        expected = (hidden[skipped:] * ranks).sum(0) / ranks.sum()
    else:
        expected = torch.cat([pooled(hidden[skipped:], part) for part in kind.split("+")])
    for chunks in ([40], [1, 30, 9]):
        rows = Rows(runner)
        rows.admit(4, PROMPTS[2], PoolingParams(pool_from=skipped))
        rows.admit(1, PROMPTS[1])
        for chunk in chunks:
            result = rows.step({4: chunk, **({1: 1} if chunk != 30 else {})})
        assert result.accepted[0] == 0
        np.testing.assert_allclose(pooled_arrays(result)[4], expected, atol=1e-4)
        rows.finish()


def test_embeddings_are_cut_then_normalised_and_scores_activated(folder) -> None:
    runner = new_runner(folder, PoolerConfig())
    vectors = {}
    for row, params in enumerate([
        PoolingParams(normalize=False), PoolingParams(), PoolingParams(dimensions=8),
        PoolingParams(task="classify"), PoolingParams(task="classify", use_activation=False),
        PoolingParams(task="token_embed", normalize=False),
    ]):  # fmt: skip
        rows = Rows(runner)
        rows.admit(0, PROMPTS[0], params)
        vectors[row] = pooled_arrays(rows.step({0: 7}))[0]
        rows.finish()
    plain, unit, short, scores, raw, tokens = vectors.values()
    np.testing.assert_allclose(unit, plain / np.linalg.norm(plain), rtol=1e-5)
    np.testing.assert_allclose(short, plain[:8] / np.linalg.norm(plain[:8]), rtol=1e-5)
    np.testing.assert_allclose(scores, np.exp(raw) / np.exp(raw).sum(), rtol=1e-4)
    assert tokens.shape == (7, len(plain))
    np.testing.assert_allclose(tokens[-1], plain, rtol=1e-6)


def test_capacity_tells_what_was_allocated(runner) -> None:
    (group,) = runner.capacity.groups
    assert (group.kind, group.window, group.blocks) == ("attention", None, 65)
    assert group.block_size == runner.builder.groups[0].block_size
    assert runner.capacity.max_model_len == 128
    assert runner.capacity.vocabulary == 512
