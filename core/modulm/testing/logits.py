"""The contract kit for logits processors.

    from modulm.testing.logits import check_logits_processor

    def test_contract():
        check_logits_processor(MyProcessor, sample=[SamplingParams(extra_args={"mine": 2})])

`sample`: parameters of requests whose logits the processor changes. Rows are processed one by one,
in batches and in reused rows, and must give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import fields

from modulm.config import EngineConfig
from modulm.contracts.sampling import LogitsProcessor, RowView, SamplingParams
from modulm.testing.kit import KitNotRun, sample_of

__all__ = ["check_logits_processor"]

_VOCABULARY = 48
_DEVICE = torch.device("cpu")


def check_logits_processor(
    driver: type[LogitsProcessor], *, sample: Sequence[SamplingParams] | None = None
) -> None:
    """Run the kit. Raises AssertionError with what was expected, KitNotRun without a sample of
    parameters for which the processor does something.
    """
    known = {attribute.name for attribute in fields(SamplingParams)}
    unknown = set(driver.fields) - known
    assert not unknown, f"fields that SamplingParams does not have: {', '.join(sorted(unknown))}"
    driver.validate_for(SamplingParams(), None)
    try:
        several = sample_of(driver, sample, "parameters of requests that use the processor")
    except KitNotRun:
        if driver.fields:
            raise
        several = [SamplingParams()]
    several = several() if callable(several) else several
    processor = _open(driver)
    assert isinstance(processor, LogitsProcessor), f"open() gave {processor!r}"
    assert isinstance(processor.keeps_argmax, bool), "keeps_argmax is not a bool"
    processed = 0
    for params in several:
        driver.validate_for(params, None)
        processed += _check_row(driver, params)
    if not processed:
        raise KitNotRun("admit() accepts no row of the sample: pass sample= with other parameters")
    _check_batch(driver, [*several, *several])
    _check_release(driver, several)


def _open(driver: type[LogitsProcessor]) -> LogitsProcessor:
    return driver.open(EngineConfig(), _VOCABULARY, _DEVICE)


def _view(row: int, params: SamplingParams, seed: int = 0) -> RowView:
    seeded = params if params.seed is not None else params.with_(seed=7)
    draw = torch.Generator().manual_seed(seed)
    prompt, output = (torch.randint(8, _VOCABULARY, (n,), generator=draw).tolist() for n in (6, 3))
    return RowView(row, seeded, prompt, output)


def _logits(seed: int) -> torch.Tensor:
    return torch.randn(_VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def _admits(processor: LogitsProcessor, view: RowView) -> bool:
    answer = processor.admit(view)
    assert isinstance(answer, bool), f"admit() gave {answer!r}, not True or False"
    return answer


def _apply(processor: LogitsProcessor, view: RowView, logits: torch.Tensor) -> torch.Tensor:
    before = list(view.prompt), list(view.output)
    result = processor.apply_row(view, logits.clone())
    assert isinstance(result, torch.Tensor), f"apply_row() gave {result!r}"
    assert result.shape == (_VOCABULARY,), f"apply_row() gave shape {tuple(result.shape)}"
    assert result.dtype == torch.float32, f"apply_row() gave {result.dtype}, not float32"
    assert not result.isnan().any(), "apply_row() gave NaN"
    assert not (result == torch.inf).any(), "apply_row() gave infinity"
    assert (result > -torch.inf).any(), "apply_row() leaves no token"
    after = list(view.prompt), list(view.output)
    assert before == after, "apply_row() changes the row's tokens"
    return result


def _check_row(driver: type[LogitsProcessor], params: SamplingParams) -> bool:
    """Check one row by itself; return whether it was admitted."""
    results = []
    for _ in range(2):
        processor, view = _open(driver), _view(0, params)
        if not _admits(processor, view):
            return False
        results.append(_apply(processor, view, _logits(1)))
        if processor.keeps_argmax:
            kept = results[-1].argmax() == _logits(1).argmax()
            assert kept, "keeps_argmax is true, but the most probable token has changed"
    assert torch.equal(*results), "the same row gives different logits in two engines"
    return True


def _check_batch(driver: type[LogitsProcessor], several: Sequence[SamplingParams]) -> None:
    """Check that rows of a batch get what they get alone, and that other rows are unchanged."""
    together, views, expected, index = _open(driver), [], [], []
    logits = torch.stack([_logits(10 + i) for i in range(2 * len(several))])
    for i, params in enumerate(several):
        view, alone = _view(i, params, seed=i), _open(driver)
        admitted = _admits(together, view)
        assert admitted == _admits(alone, view), "admit() depends on the engine's other rows"
        if admitted:
            position = 2 * i + 1
            views.append(view)
            index.append(position)
            expected.append(_apply(alone, view, logits[position]))
    result = together.apply(views, logits.clone(), index)
    assert isinstance(result, torch.Tensor), f"apply() gave {result!r}"
    assert result.shape == logits.shape, f"apply() gave shape {tuple(result.shape)}"
    for position, row in zip(index, expected, strict=True):
        same = torch.allclose(result[position], row, atol=1e-5)
        assert same, "a row gets other logits in a batch than alone"
    others = [i for i in range(len(logits)) if i not in index]
    assert torch.equal(result[others], logits[others]), "apply() changes rows that it was not given"


def _check_release(driver: type[LogitsProcessor], several: Sequence[SamplingParams]) -> None:
    """Check that a row's next request gets nothing of the one before it."""
    processor = _open(driver)
    for number, params in enumerate(several):
        first, second = _view(3, params, seed=20), _view(3, params, seed=21)
        if _admits(processor, first):
            for step in range(3):
                _apply(processor, first, _logits(30 + step))
            processor.release(3)
        fresh = _open(driver)
        if not _admits(fresh, second):
            continue
        assert _admits(processor, second), "admit() refuses a row that was used before"
        used, new = (_apply(p, second, _logits(40 + number)) for p in (processor, fresh))
        assert torch.equal(used, new), "release() leaves something for the row's next request"
        processor.release(3)
