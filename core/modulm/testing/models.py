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
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

import torch

from modulm.contracts.model import Model
from modulm.testing.checkpoints import make_tiny, save_tiny, tiny_model
from modulm.testing.encoders import check_encoder
from modulm.testing.kit import KitNotRun
from modulm.testing.offering import architecture_of, offering
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
_TRANSFORMERS, _ORACLE = "transformers", "the oracle"
#: Every row crosses a boundary of blocks while it decodes.
_STEPS = 16
_PROMPTS = (37, 5, 1)
_CHUNK = 7
#: How many tokens go one by one: more than a block, and than the windows of tiny models.
_SINGLE = 24

#: New tokens, and the log probabilities of prompt and answer.
Answer: TypeAlias = tuple[list[int], torch.Tensor]
_References: TypeAlias = Callable[[Sequence[Sequence[int]]], list[torch.Tensor]]


def check_model(driver: type[Model], *, oracle: Oracle | None = None, **flags: Any) -> None:
    """Run the kit; `flags` go to the engine's configuration.

    oracle: compared with instead of transformers; by default the oracle that the driver names.
    Raises AssertionError with what was expected, KitNotRun for a model whose `kit_not_run` says why
    it cannot be compared. Encoders have a kit of their own.
    """
    if reason := getattr(driver, "kit_not_run", ""):
        raise KitNotRun(reason)
    if "generate" not in driver.tasks:
        check_encoder(driver, **flags)
        return
    with tempfile.TemporaryDirectory() as name, offering(driver):
        source = _source(driver, oracle)
        folder = source.write(Path(name) / "whole")
        session = _session(folder, **flags)
        answers = _check_greedy(session, partial(source.logprobs, folder), source.whose, _STEPS)
        _check_steps(session, answers)
        _check_storage(source, Path(name) / "parts", **flags)


def tiny_folder(
    driver: type[Model], path: Path, *, oracle: Oracle | None = None, **settings: Any
) -> Path:
    """Write a tiny checkpoint of the driver's architecture, with transformers or with an oracle.

    `settings` are those of `make_tiny`; with an oracle, `dtype` and `shards` are supported.
    """
    if oracle is not None:
        return write_tiny(driver, oracle, path, **settings)
    return make_tiny(path, architecture_of(driver), **settings)


def check_equals_transformers(
    folder: Path, *, steps: int = _STEPS, reference: str | Oracle = "eager", **flags: Any
) -> None:
    """Compare greedy tokens and the log probabilities of all tokens with transformers.

    reference: the attention implementation that transformers uses, or an oracle that replaces
    transformers.
    """
    whose = _TRANSFORMERS if isinstance(reference, str) else _ORACLE
    references = partial(_references, folder, reference=reference)
    _check_greedy(_session(folder, **flags), references, whose, steps)


def check_steps(folder: Path, **flags: Any) -> None:
    """Check that results do not depend on chunking and batching, including in reused blocks."""
    session = _session(folder, **flags)
    _check_steps(session, session.greedy(_prompts(session), 8))


def check_storage(
    driver: type[Model], root: Path, *, oracle: Oracle | None = None, **flags: Any
) -> None:
    """Check that bf16 weights in shards are computed like the same numbers in fp32."""
    _check_storage(_source(driver, oracle), root / "parts", **flags)


class _Transformers:
    """The driver's tiny model in transformers, which is made once and written several times."""

    whose = _TRANSFORMERS

    def __init__(self, driver: type[Model]) -> None:
        self._model = tiny_model(architecture_of(driver), attn_implementation="eager")

    def write(self, folder: Path, **settings: Any) -> Path:
        """Write the model; it computes with the rounded weights from then on."""
        return save_tiny(self._model, folder, **settings)

    def logprobs(self, folder: Path, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Return the log probabilities [tokens, vocabulary] of each text."""
        return _logprobs(self._model, texts)


class _Oracle:
    """A driver's oracle, which reads its numbers from the checkpoints that it has written."""

    whose = _ORACLE

    def __init__(self, driver: type[Model], oracle: Oracle) -> None:
        self._driver, self._oracle = driver, oracle

    def write(self, folder: Path, **settings: Any) -> Path:
        """Write the oracle's weights."""
        return write_tiny(self._driver, self._oracle, folder, **settings)

    def logprobs(self, folder: Path, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Return the log probabilities [tokens, vocabulary] of each text."""
        return _references(folder, texts, self._oracle)


def _source(driver: type[Model], oracle: Oracle | None) -> _Transformers | _Oracle:
    oracle = oracle or oracle_of(driver)
    return _Transformers(driver) if oracle is None else _Oracle(driver, oracle)


def _check_greedy(
    session: Session, references: _References, whose: str, steps: int
) -> dict[int, Answer]:
    """Compare prompts and greedy answers with the references; return the answers."""
    prompts = _prompts(session)
    answers = session.greedy(prompts, steps)
    texts = [[*prompts[row], *tokens[:-1]] for row, (tokens, _) in answers.items()]
    for (row, (tokens, logprobs)), expected in zip(answers.items(), references(texts), strict=True):
        _compare(logprobs, expected, f"prompt of {len(prompts[row])} tokens, {whose}")
        best = expected[len(prompts[row]) - 1 :].argmax(-1).tolist()
        assert tokens == best, f"greedy tokens differ from those of {whose}: {tokens} and {best}"
    seen = {token for tokens, _ in answers.values() for token in tokens}
    assert len(seen) > 3, f"the tiny model only generates {seen}, which tests nothing"
    return answers


def _check_steps(session: Session, answers: Mapping[int, Answer]) -> None:
    """Check that the answers' texts have the same log probabilities in other steps."""
    prompts = _prompts(session)
    whole = {row: logprobs for row, (_, logprobs) in answers.items()}
    texts = {row: [*prompts[row], *tokens[:-1]] for row, (tokens, _) in answers.items()}
    single = {row: _pieces(text[:_SINGLE], 1) for row, text in texts.items()}
    _same(_replay(session, single), whole, "single tokens")
    chunks = {
        row: _pieces(prompts[row], _CHUNK) + _pieces(text[len(prompts[row]) :][:3], 1)
        for row, text in texts.items()
    }
    _same(_replay(session, chunks), whole, f"chunks of {_CHUNK}")
    for row, prompt in prompts.items():
        alone = [prompt, *_pieces(texts[row][len(prompt) :][:2], 1)]
        _same(_replay(session, {row: alone}), whole, "a row by itself")
    _check_mixed(session, texts, whole)


def _check_mixed(
    session: Session, texts: Mapping[int, Sequence[int]], whole: Mapping[int, torch.Tensor]
) -> None:
    """Check a step in which one row prefills, one is inside its prompt and one decodes."""
    (first, second, third), lengths = texts, _PROMPTS
    _restart(session, texts)
    session.step({third: texts[third][: lengths[2]], second: texts[second][:2]})
    parts = {
        first: slice(0, lengths[0]),
        second: slice(2, lengths[1]),
        third: slice(lengths[2], lengths[2] + 1),
    }
    results = session.step({row: texts[row][part] for row, part in parts.items()})
    for row, logprobs in results.items():
        _compare(logprobs, whole[row][parts[row]], "a mixed step")


def _check_storage(source: _Transformers | _Oracle, folder: Path, **flags: Any) -> None:
    source.write(folder, dtype="bfloat16", shards=3)
    session = _session(folder, **flags)
    prompt = _prompts(session)[0]
    logprobs = session.step({0: prompt})[0]
    (expected,) = source.logprobs(folder, [prompt])
    _compare(logprobs, expected, "bf16 weights in three files, computed in fp32, the reference")


def _pieces(tokens: Sequence[int], size: int) -> list[Sequence[int]]:
    return [tokens[start : start + size] for start in range(0, len(tokens), size)]


def _replay(
    session: Session, pieces: Mapping[int, Sequence[Sequence[int]]]
) -> dict[int, torch.Tensor]:
    """Run each row's pieces, one piece of each in a step, from the start."""
    _restart(session, pieces)
    logprobs: dict[int, list[torch.Tensor]] = {row: [] for row in pieces}
    for step in zip_longest(*pieces.values()):
        work = {row: piece for row, piece in zip(pieces, step, strict=True) if piece}
        for row, part in session.step(work).items():
            logprobs[row].append(part)
    return {row: torch.cat(parts) for row, parts in logprobs.items()}


def _session(folder: Path, **flags: Any) -> Session:
    settings = {"device": "cpu", "dtype": "float32", "block_size": 16, **flags}
    return Session(folder, **settings)


def _restart(session: Session, rows: Iterable[int]) -> None:
    for row in rows:
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
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation=reference)
    return _logprobs(model.eval(), texts)


def _logprobs(model: Any, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    with torch.inference_mode():
        logits = [model(torch.tensor([list(tokens)])).logits[0] for tokens in texts]
    return [each.float().log_softmax(-1) for each in logits]


def _same(
    actual: Mapping[int, torch.Tensor], expected: Mapping[int, torch.Tensor], what: str
) -> None:
    for row, logprobs in actual.items():
        _compare(logprobs, expected[row][: len(logprobs)], what)


def _compare(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert actual.shape == expected.shape, f"{what}: {actual.shape} log probabilities"
    worst = (actual - expected).abs().max().item()
    assert worst <= TOLERANCE, f"{what}: log probabilities differ by {worst:.2g} > {TOLERANCE}"
