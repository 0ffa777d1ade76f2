"""Samplers of llama.cpp's users: each against its published formula, and through an engine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modulm import LLM, SamplingParams
from modulm.contracts.sampling import RowView
from modulm.errors import RequestError
from modulm.testing.checkpoints import make_tiny
from modulm.testing.engines import check_empty
from modulm_frontend.validation import check
from modulm_logits_dry import Dry
from modulm_logits_dynamic_temperature import DynamicTemperature
from modulm_logits_mirostat import Mirostat
from modulm_logits_top_n_sigma import TopNSigma
from modulm_logits_typical_p import TypicalP
from modulm_logits_xtc import Xtc, chance
from modulm_samplers import SAMPLERS, SettingsProcessor, sampler_arguments

VOCABULARY = 40
CPU = torch.device("cpu")
CLASSES = (Dry, DynamicTemperature, Mirostat, TopNSigma, TypicalP, Xtc)


def row(
    kind: type[SettingsProcessor[Any]],
    arguments: dict[str, Any],
    prompt: Any = (1, 2),
    output: list[int] | None = None,
    **params: Any,
) -> tuple[SettingsProcessor[Any], RowView]:
    """A processor with one row."""
    given = SamplingParams(extra_args=arguments, **params)
    view = RowView(0, given, np.array(prompt), [] if output is None else output)
    processor = kind(VOCABULARY, CPU)
    assert processor.admit(view)
    return processor, view


def some_logits(seed: int) -> torch.Tensor:
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    logits[7] = float("-inf")
    return logits


def probabilities(logits: torch.Tensor) -> list[float]:
    return logits.double().softmax(0).tolist()


def kept(logits: torch.Tensor) -> set[int]:
    return set(logits.isfinite().nonzero().flatten().tolist())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sigmas", [0.3, 1.0, 2.5])
def test_top_n_sigma(seed: int, sigmas: float) -> None:
    """Tang et al., algorithm 1: the set does not depend on the temperature."""
    logits = some_logits(seed)
    values = [value for value in logits.tolist() if value > -math.inf]
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
    expected = {
        token
        for token, value in enumerate(logits.tolist())
        if value >= max(values) - sigmas * deviation
    }
    for temperature in (1.0, 0.4):
        processor, view = row(TopNSigma, {"top_n_sigma": sigmas})
        assert kept(processor.apply_row(view, logits / temperature)) == expected


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_typical_p(seed: int, share: float) -> None:
    """Meister et al., equation 8: the smallest such set, nearest surprise first."""
    logits = some_logits(seed)
    chances = probabilities(logits)
    entropy = -sum(p * math.log(p) for p in chances if p)
    order = sorted(
        (token for token, p in enumerate(chances) if p),
        key=lambda token: abs(-math.log(chances[token]) - entropy),
    )
    expected, mass = set(), 0.0
    for token in order:
        expected.add(token)
        mass += chances[token]
        if mass >= share:
            break
    processor, view = row(TypicalP, {"typical_p": share})
    assert kept(processor.apply_row(view, logits.clone())) == expected


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("threshold", [0.02, 0.1, 0.5])
def test_xtc(seed: int, threshold: float) -> None:
    logits = some_logits(seed)
    above = [token for token, p in enumerate(probabilities(logits)) if p >= threshold]
    expected = kept(logits)
    if len(above) > 1:
        expected -= set(above) - {min(above, key=lambda token: float(logits[token]))}
    arguments = {"xtc_probability": 1.0, "xtc_threshold": threshold}
    processor, view = row(Xtc, arguments)
    assert kept(processor.apply_row(view, logits.clone())) == expected


def test_xtc_happens_as_often_as_asked_and_by_the_seed() -> None:
    outputs = [list(range(length)) for length in range(2000)]
    chances = [chance(5, output) for output in outputs]
    assert chances == [chance(5, output) for output in outputs]
    assert chances != [chance(6, output) for output in outputs]
    happened = sum(one < 0.3 for one in chances)
    # Six standard deviations of the binomial distribution.
    assert abs(happened - 600) < 6 * math.sqrt(2000 * 0.3 * 0.7)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("span", "exponent"), [(0.5, 1.0), (1.5, 2.0), (0.2, 0.3)])
def test_dynamic_temperature(seed: int, span: float, exponent: float) -> None:
    temperature, logits = 0.9, some_logits(seed)
    chances = probabilities(logits)
    entropy = -sum(p * math.log(p) for p in chances if p)
    share = entropy / math.log(len(kept(logits)))
    low, high = max(temperature - span, 0), temperature + span
    expected = logits.double() / (low + (high - low) * share**exponent)
    arguments = {"dynatemp_range": span, "dynatemp_exponent": exponent}
    processor, view = row(DynamicTemperature, arguments, temperature=temperature)
    found = processor.apply_row(view, logits / temperature)
    # Twice the rounding of float32 in each of the few operations, on values of at most 20.
    assert torch.allclose(found.double(), expected, rtol=2e-5, atol=2e-5)


def mirostat_twin(
    version: int, steps: list[torch.Tensor], chosen: list[int], target: float, rate: float
) -> list[set[int]]:
    """Basu et al., algorithms 1 and 2, with the surprise of version 2 among the kept tokens."""
    bound, sets = 2 * target, []
    for logits, token in zip(steps, chosen, strict=True):
        chances = probabilities(logits)
        order = sorted(range(VOCABULARY), key=lambda each: -chances[each])
        best = [chances[token] for token in order if chances[token]][:100]
        if version == 1:
            ratios = [math.log((i + 2) / (i + 1)) for i in range(len(best) - 1)]
            falls = [math.log(best[i] / best[i + 1]) for i in range(len(best) - 1)]
            products = sum(a * b for a, b in zip(ratios, falls, strict=True))
            exponent = products / sum(a * a for a in ratios)
            excess = exponent - 1
            size = (excess * 2**bound / (1 - VOCABULARY**-excess)) ** (1 / exponent)
            sets.append(set(order[: min(max(round(size), 1), VOCABULARY)]))
            observed = -math.log2(chances[token])
        else:
            good = {each for each in order if chances[each] and -math.log2(chances[each]) <= bound}
            sets.append(good | {order[0]})
            observed = -math.log2(chances[token] / sum(chances[each] for each in sets[-1]))
        bound -= rate * (observed - target)
    return [{each for each in one if each != 7} for one in sets]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("target", [1.0, 2.5])
def test_mirostat(version: int, target: float) -> None:
    steps = [some_logits(seed) for seed in range(12)]
    arguments = {"mirostat": version, "mirostat_tau": target, "mirostat_eta": 0.4}
    output: list[int] = []
    processor, view = row(Mirostat, arguments, output=output)
    sets, chosen = [], []
    for logits in steps:
        sets.append(kept(processor.apply_row(view, logits.clone())))
        chosen.append(min(sets[-1], key=lambda token: float(logits[token])))
        output.append(chosen[-1])
    assert sets == mirostat_twin(version, steps, chosen, target, 0.4)
    assert len({len(one) for one in sets}) > 1


def test_mirostat_goes_on_after_a_preemption() -> None:
    steps = [some_logits(seed) for seed in range(6)]
    arguments = {"mirostat": 2, "mirostat_tau": 1.0, "mirostat_eta": 0.5}
    sets: list[list[set[int]]] = []
    for preempted in (False, True):
        output: list[int] = []
        processor, view = row(Mirostat, arguments, output=output)
        sets.append([])
        for place, logits in enumerate(steps):
            if preempted and place == 3:
                processor.release(0)
                view = RowView(0, view.params, view.prompt, output)
                assert processor.admit(view)
            sets[-1].append(kept(processor.apply_row(view, logits.clone())))
            output.append(max(sets[-1][-1]))
    assert sets[0] == sets[1]


def dry_twin(tokens: list[int], breakers: set[int], settings: dict[str, Any]) -> dict[int, float]:
    """The definition, written out: penalties by token."""
    last_n = settings.get("dry_penalty_last_n", -1)
    tokens = tokens if last_n < 0 else tokens[-last_n:]
    longest: dict[int, int] = {}
    for place in range(len(tokens) - 1):
        length = 0
        while (
            length <= place
            and tokens[place - length] == tokens[len(tokens) - 1 - length]
            and tokens[place - length] not in breakers
        ):
            length += 1
        following = tokens[place + 1]
        if length and following not in breakers:
            longest[following] = max(longest.get(following, 0), length)
    allowed, base = settings["dry_allowed_length"], settings["dry_base"]
    return {
        token: settings["dry_multiplier"] * base ** (length - allowed)
        for token, length in longest.items()
        if length >= allowed
    }


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("last_n", [-1, 12])
@pytest.mark.parametrize("allowed", [1, 3])
def test_dry(seed: int, last_n: int, allowed: int) -> None:
    rng = np.random.default_rng(seed)
    motif = rng.integers(0, 6, 5).tolist()
    tokens = [*rng.integers(0, 6, 20).tolist(), *motif, 5, *motif, *rng.integers(0, 6, 4), *motif]
    tokens = [int(token) for token in tokens]
    settings = {
        "dry_multiplier": 0.8, "dry_base": 1.5, "dry_allowed_length": allowed,
        "dry_penalty_last_n": last_n,
    }  # fmt: skip
    processor, view = row(Dry, settings, prompt=tokens[:9], output=tokens[9:])
    processor._breaking[0][4] = True  # type: ignore[attr-defined]
    logits = some_logits(seed)
    expected = logits.clone()
    for token, penalty in dry_twin(tokens, {4}, settings).items():
        expected[token] -= penalty
    found = processor.apply_row(view, logits.clone())
    assert torch.allclose(found, expected)


def test_penalties_of_long_repetitions_are_finite() -> None:
    processor, view = row(Dry, {"dry_multiplier": 1.0}, prompt=[3] * 3000)
    found = processor.apply_row(view, torch.zeros(VOCABULARY))
    assert found.isfinite().all()
    assert found[3] < -1e30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dry_multiplier": -1}, "dry_multiplier must be a number of at least 0"),
        ({"dry_multiplier": 1, "dry_allowed_length": 1.5}, "dry_allowed_length must be a whole"),
        ({"dry_multiplier": 1, "dry_sequence_breakers": [""]}, "dry_sequence_breakers must be"),
        ({"mirostat": 3}, "mirostat must be a whole number of at least 0 and at most 2"),
        ({"mirostat": 1, "mirostat_tau": float("nan")}, "mirostat_tau must be a number"),
        ({"typical_p": 2}, "typical_p must be a number of at least 0 and at most 1"),
        ({"xtc_probability": "often"}, "xtc_probability must be a number"),
        ({"top_n_sigma": True}, "top_n_sigma must be a number"),
        ({"dynatemp_range": 1}, "dynatemp_range needs a temperature above 0"),
    ],
)
def test_wrong_settings_name_the_field(arguments: dict[str, Any], message: str) -> None:
    params = SamplingParams(temperature=0, extra_args=arguments)
    with pytest.raises(RequestError, match=message) as caught:
        check(params, vocabulary=VOCABULARY, max_model_len=64, processors=CLASSES)
    assert caught.value.param in arguments


def test_a_sampler_that_is_not_installed_is_named() -> None:
    for sampler in SAMPLERS:
        params = SamplingParams(extra_args={sampler.switch: 1.7})
        with pytest.raises(RequestError, match=f"needs {sampler.distribution}: pip"):
            check(params, vocabulary=VOCABULARY, max_model_len=64)
        off = SamplingParams(extra_args={sampler.switch: sampler.off[0]})
        assert check(off, vocabulary=VOCABULARY, max_model_len=64)


def test_every_setting_is_served() -> None:
    served = {name for each in CLASSES for name in each.arguments()}
    assert served == {name for sampler in SAMPLERS for name in sampler.settings}
    values = {"dry_base": 2.0, "mirostat": 0, "xtc_probability": 0.5, "xtc_threshold": None}
    assert sampler_arguments(values) == {"xtc_probability": 0.5}


# Through an engine.


ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"dry_multiplier": 5.0, "dry_allowed_length": 1},
    {"xtc_probability": 0.7, "xtc_threshold": 0.001},
    {"mirostat": 1, "mirostat_tau": 2.0},
    {"mirostat": 2, "mirostat_tau": 2.0},
    {"typical_p": 0.4},
    {"top_n_sigma": 1.0},
    {"dynatemp_range": 0.8},
    {"dry_multiplier": 1.0, "xtc_probability": 0.5, "dynatemp_range": 0.3, "typical_p": 0.8},
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("samplers") / "tiny")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), dtype="float32", cpu_threads=1, num_gpu_blocks_override=64) as made:
        yield made
        check_empty(made._core.loop)


def answers(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_a_seed_gives_the_same_alone_and_in_a_crowd(checkpoint: Path, llm: LLM) -> None:
    prompts = [f"One two three {place} one two" for place in range(len(ARGUMENTS))]
    settings = {"temperature": 1.0, "max_tokens": 20, "ignore_eos": True}
    params = [SamplingParams(seed=3, extra_args=arguments, **settings) for arguments in ARGUMENTS]
    alone = [answers(llm, *pair)[0] for pair in zip(prompts, params, strict=True)]
    assert answers(llm, prompts, params) == alone
    plain = answers(llm, prompts, SamplingParams(seed=3, **settings))
    # The first answer repeats nothing.
    changed = [one != other for one, other in zip(plain, alone, strict=True)]
    assert changed[1:] == [True] * (len(alone) - 1)
    few = {"max_num_seqs": 3, "num_gpu_blocks_override": 5, "block_size": 16, "max_model_len": 64}
    with LLM(str(checkpoint), dtype="float32", cpu_threads=1, **few) as tight:  # preempts rows
        assert answers(tight, prompts, params) == alone


def test_texts_break_repetitions(llm: LLM) -> None:
    """Of a repetition over a line's end only what comes after it counts."""
    arguments = {"dry_multiplier": 50.0, "dry_allowed_length": 2}
    tokenizer = llm.get_tokenizer()
    line = tokenizer.encode("alpha beta\n alpha beta\n alpha beta\n")
    assert any("\n" in tokenizer.decode([token]) for token in line)
    greedy = {"temperature": 0, "max_tokens": 1, "ignore_eos": True}
    broken, whole = (
        SamplingParams(extra_args={**arguments, "dry_sequence_breakers": texts}, **greedy)
        for texts in (["\n"], [])
    )
    plain = SamplingParams(**greedy)
    assert answers(llm, [line], broken) == answers(llm, [line], plain)
    assert answers(llm, [line], whole)
