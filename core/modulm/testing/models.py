"""The contract kit for models.

    from modulm.testing.models import check_model

    def test_contract():
        check_model(MyForCausalLM)

A tiny random checkpoint of the driver's `tiny()` is written with transformers, whose implementation
is the oracle. Log probabilities over the whole vocabulary are compared in fp32. Results may depend
on the batch in their last bits, since a matrix product of one row and of many is summed in
different orders. The tolerance is 1e-4; a wrong mask, position or norm exceeds it by far.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from modulm.contracts.model import Model
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny
from modulm.testing.encoders import check_encoder
from modulm.testing.oracles import Oracle, logprobs_of, oracle_of, write_tiny
from modulm.testing.session import Session

__all__ = [
    "check_equals_transformers",
    "check_model",
    "check_steps",
    "check_storage",
    "tiny_folder",
]

TOLERANCE = 1e-4
_STEPS = 32
_PROMPTS = (37, 5, 1)


def check_model(driver: type[Model], *, oracle: Oracle | None = None, **flags: Any) -> None:
    """Run the kit; `flags` go to the engine's configuration.

    oracle: compared with instead of transformers; by default the oracle that the driver names.
    Raises AssertionError with what was expected. Encoders have a kit of their own.
    """
    if "generate" not in driver.tasks:
        check_encoder(driver, **flags)
        return
    with tempfile.TemporaryDirectory() as name, _offering(driver):
        driver_oracle = oracle or oracle_of(driver)
        folder = tiny_folder(driver, Path(name) / "whole", oracle=driver_oracle)
        check_equals_transformers(folder, reference=driver_oracle or "eager", **flags)
        check_steps(folder, **flags)
        check_storage(driver, folder, Path(name), oracle=driver_oracle, **flags)


def tiny_folder(
    driver: type[Model], path: Path, *, oracle: Oracle | None = None, **settings: Any
) -> Path:
    """Write a tiny checkpoint of the driver's architecture, with transformers or with an oracle.

    `settings` are those of `make_tiny`; with an oracle, `dtype` and `shards` are supported.
    """
    if oracle is not None:
        return write_tiny(driver, oracle, path, **settings)
    return make_tiny(path, _architecture(driver), **settings)


def check_equals_transformers(
    folder: Path, *, steps: int = _STEPS, reference: str | Oracle = "eager", **flags: Any
) -> None:
    """Compare greedy tokens and the log probabilities of all tokens with transformers.

    reference: the attention implementation that transformers uses, or an oracle that replaces
    transformers.
    """
    whose = "transformers" if isinstance(reference, str) else "the oracle"
    session = _session(folder, **flags)
    prompts = _prompts(session)
    results = session.greedy(prompts, steps)
    texts = [[*prompts[row], *tokens[:-1]] for row, (tokens, _) in results.items()]
    references = _references(folder, texts, reference)
    for (row, (tokens, logprobs)), expected in zip(results.items(), references, strict=True):
        _compare(logprobs, expected, f"prompt of {len(prompts[row])} tokens, {whose}")
        best = expected[len(prompts[row]) - 1 :].argmax(-1).tolist()
        assert tokens == best, f"greedy tokens differ from those of {whose}: {tokens} and {best}"
    seen = {token for tokens, _ in results.values() for token in tokens}
    assert len(seen) > 3, f"the tiny model only generates {seen}, which tests nothing"


def check_steps(folder: Path, **flags: Any) -> None:
    """Check that results do not depend on chunking and batching, including in reused blocks."""
    session = _session(folder, **flags)
    prompts = _prompts(session)
    whole = session.greedy(prompts, 8)
    for chunk in (1, 7):
        _restart(session, prompts)
        _same(session.greedy(prompts, 8, chunk=chunk), whole, f"chunks of {chunk}")
    for row, prompt in prompts.items():
        _restart(session, prompts)
        _same(session.greedy({row: prompt}, 8), {row: whole[row]}, "a row by itself")
    _restart(session, prompts)
    _check_mixed(session, prompts, whole)


def check_storage(
    driver: type[Model], folder: Path, root: Path, *, oracle: Oracle | None = None, **flags: Any
) -> None:
    """Check that shards load like a single file, and bf16 weights like the same numbers in fp32."""
    session = _session(folder, **flags)
    prompt = _prompts(session)[0]
    whole = session.step({0: prompt})[0]
    cut = tiny_folder(driver, root / "parts", oracle=oracle, shards=3)
    parts = _session(cut, **flags).step({0: prompt})[0]
    assert torch.equal(whole, parts), "three shards give different numbers than one file"
    half = tiny_folder(driver, root / "half", oracle=oracle, dtype="bfloat16")
    logprobs = _session(half, **flags).step({0: prompt})[0]
    (expected,) = _references(half, [prompt], oracle or "eager")
    _compare(logprobs, expected, "bf16 weights computed in fp32, the reference")


def _check_mixed(
    session: Session,
    prompts: Mapping[int, Sequence[int]],
    whole: Mapping[int, tuple[list[int], torch.Tensor]],
) -> None:
    """Check a step in which one row prefills, one is inside its prompt and one decodes."""
    first, second, third = prompts
    tokens, expected = whole[third]
    session.step({third: prompts[third], second: prompts[second][:2]})
    results = session.step({first: prompts[first], second: prompts[second][2:], third: tokens[:1]})
    for row, logprobs in results.items():
        length = len(prompts[row])
        part = {first: slice(0, length), second: slice(2, length), third: slice(1, 2)}[row]
        _compare(logprobs, whole[row][1][part], "a mixed step")
    assert expected.shape[0] >= 2


def _session(folder: Path, **flags: Any) -> Session:
    settings = {"device": "cpu", "dtype": "float32", "block_size": 16, **flags}
    return Session(folder, **settings)


def _restart(session: Session, prompts: Mapping[int, Sequence[int]]) -> None:
    for row in prompts:
        session.release(row)


def _prompts(session: Session) -> dict[int, list[int]]:
    rng = random.Random(1)
    return {
        row: [rng.randrange(session.loaded.vocabulary) for _ in range(length)]
        for row, length in enumerate(_PROMPTS)
    }


def _references(
    folder: Path, texts: Sequence[Sequence[int]], reference: str | Oracle = "eager"
) -> list[torch.Tensor]:
    """Return the reference's log probabilities [tokens, vocabulary] of each text, in one fp32
    pass.
    """
    if not isinstance(reference, str):
        return [logprobs_of(reference, folder, tokens) for tokens in texts]
    import transformers

    (name, *_) = json.loads((folder / "config.json").read_text())["architectures"]
    kind = getattr(transformers, name, transformers.AutoModelForCausalLM)
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation=reference).eval()
    with torch.inference_mode():
        logits = [model(torch.tensor([list(tokens)])).logits[0] for tokens in texts]
    return [each.float().log_softmax(-1) for each in logits]


def _same(
    actual: Mapping[int, tuple[list[int], torch.Tensor]],
    expected: Mapping[int, tuple[list[int], torch.Tensor]],
    what: str,
) -> None:
    for row, (tokens, logprobs) in expected.items():
        _compare(actual[row][1], logprobs, what)
        assert actual[row][0] == tokens, f"{what}: different tokens: {actual[row][0]}, not {tokens}"


def _compare(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert actual.shape == expected.shape, f"{what}: {actual.shape} log probabilities"
    worst = (actual - expected).abs().max().item()
    assert worst <= TOLERANCE, f"{what}: log probabilities differ by {worst:.2g} > {TOLERANCE}"


def _architecture(driver: type[Model]) -> str:
    architectures = driver.tiny().get("architectures")
    assert architectures, "tiny() has no architectures"
    name: str = architectures[0]
    return name


def _offering(driver: type[Model]) -> Any:
    """Return the installed plugins with this driver taking precedence."""
    plugins = manager.PluginManager()
    plugins.register("models", _architecture(driver), driver)
    return manager.using(plugins)
