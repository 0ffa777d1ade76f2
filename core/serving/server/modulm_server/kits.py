"""The contract kits for IO processors and stat loggers.

from modulm_server.kits import check_io_processor, check_stat_logger

def test_contract():
    check_io_processor(MyProcessor, sample=[{"texts": ["a", "b"]}])
"""

from __future__ import annotations

import io
import json
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from modulm.config import EngineConfig
from modulm.contracts.sampling import PoolingParams
from modulm.errors import RequestError
from modulm.testing.kit import KitNotRun, sample_of
from modulm_server.io_processor import IOProcessor
from modulm_server.stat_logger import IntervalStats, StatLogger

__all__ = ["check_io_processor", "check_stat_logger"]

#: What no processor should fail on: it accepts the value, or raises RequestError.
_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    1.5,
    "",
    "x" * 1000,
    [],
    [None],
    {},
    {"no_such_field": 1},
    [[[]]],
)
_WIDTH = 6


def check_io_processor(driver: type[IOProcessor], *, sample: Sequence[Any] | None = None) -> None:
    """Run the kit. sample: values of `data` that it accepts; by default the driver's `kit_sample`.

    Raises AssertionError with what was expected, KitNotRun without a sample.
    """
    several = sample_of(driver, sample, "a list of values of `data` that it accepts")
    several = several() if callable(several) else several
    assert several, "the sample is empty"
    processor = driver(EngineConfig())
    answers = [_answer(processor, data) for data in several]
    _check_order(processor, several, answers)
    for data in _VALUES:
        _check_refusal(processor, data)
    for data in several:
        if isinstance(data, Mapping):
            for key in data:
                item = data[key]
                others = [[*item, None], [*item, ""], [5]] if isinstance(item, list) else []
                for wrong in (None, {"a": [1]}, *others):
                    _check_refusal(processor, {**data, key: wrong})


def _vectors(prompts: Sequence[Any]) -> list[np.ndarray]:
    """One vector for each prompt, made from its contents."""
    seeds = [sum(msgspec.json.encode(prompt)) for prompt in prompts]
    return [np.random.default_rng(seed).normal(size=_WIDTH).astype(np.float32) for seed in seeds]


def _prompts(processor: IOProcessor, value: Any) -> Sequence[Any]:
    prompts = processor.pre_process(value)
    assert isinstance(prompts, Sequence), f"pre_process() gave {prompts!r}, not a list of prompts"
    assert not isinstance(prompts, str), f"pre_process() gave {prompts!r}, not a list of prompts"
    assert len(prompts) > 0, "pre_process() gives no prompt for data that parse_data() accepts"
    texts = [isinstance(prompt, str) for prompt in prompts]
    assert all(texts) or not any(texts), "pre_process() mixes texts and token ids"
    for prompt in prompts:
        ids = isinstance(prompt, list | tuple) and {*map(type, prompt)} == {int}
        assert isinstance(prompt, str) or ids, f"pre_process() gave the prompt {prompt!r}"
        assert prompt, "pre_process() gives an empty prompt"
    return prompts


def _answer(processor: IOProcessor, data: Any) -> Any:
    """Process one value; return the answer after checking every step."""
    before = deepcopy(data)
    value = processor.parse_data(data)
    params = processor.merge_pooling_params(value, PoolingParams())
    assert isinstance(params, PoolingParams), f"merge_pooling_params() gave {params!r}"
    prompts = _prompts(processor, value)
    assert _prompts(processor, value) == prompts, "pre_process() gives other prompts when repeated"
    outputs = _vectors(prompts)
    copies = [output.copy() for output in outputs]
    answer = processor.post_process(value, outputs)
    changed = any(not np.array_equal(*pair) for pair in zip(outputs, copies, strict=True))
    assert not changed, "post_process() changes the model's outputs"
    assert data == before, "the request's data was changed"
    return _plain(answer)


def _plain(answer: Any) -> Any:
    try:
        text = msgspec.json.encode(answer)
    except TypeError as error:
        raise AssertionError(f"post_process() gives no JSON value: {error}") from error
    json.loads(text)
    written = repr(msgspec.json.decode(text))
    finite = "nan" not in repr(answer).lower() and "inf" not in repr(answer).lower()
    assert finite, f"post_process() gives numbers that JSON does not have: {written[:200]}"
    return msgspec.json.decode(text)


def _check_order(processor: IOProcessor, several: Sequence[Any], answers: Sequence[Any]) -> None:
    """Check that requests whose steps alternate get what they get alone."""
    pairs = [*several, *reversed(several)]
    values = [processor.parse_data(data) for data in pairs]
    outputs = [_vectors(_prompts(processor, value)) for value in values]
    together = [
        _plain(processor.post_process(value, output))
        for value, output in reversed(list(zip(values, outputs, strict=True)))
    ]
    expected = list(reversed([*answers, *reversed(answers)]))
    assert together == expected, "an answer depends on other requests"


def _check_refusal(processor: IOProcessor, data: Any) -> None:
    """Check that a value is accepted and can be processed, or raises RequestError."""
    try:
        processor.parse_data(deepcopy(data))
    except RequestError:
        return
    except Exception as error:
        name = type(error).__name__
        raise AssertionError(
            f"parse_data({data!r}) raised {name}: {error}, not RequestError"
        ) from error
    _answer(processor, data)


#: Intervals of an idle, a busy and a starting engine.
_INTERVALS = (
    IntervalStats(10.0),
    IntervalStats(0.001, 1, 1, 1, 1, 1, 1, 1.0),
    IntervalStats(10.0, 2_000_000, 300_000, 2_000_000, 1_500_000, 256, 4_000, 0.97),
    IntervalStats(10.0, running=1),
)

#: Written by `kit_sample`: flags that switch the logger on, and a function that returns how many
#: intervals it has recorded so far.
Sample = Callable[[Path], tuple[Mapping[str, Any], Callable[[], int]]]


def check_stat_logger(driver: type[StatLogger], *, sample: Sample | None = None) -> None:
    """Run the kit. sample: by default the driver's `kit_sample`.

    Raises AssertionError with what was expected, KitNotRun without a sample.
    """
    sample = sample_of(driver, sample, "a function of a folder that returns flags and a counter")
    if sample is None:
        raise KitNotRun("there is no sample")
    with tempfile.TemporaryDirectory() as folder:
        flags, count = sample(Path(folder))
        config = EngineConfig.from_keywords(**flags)
        unasked = driver.of(EngineConfig()) if flags else None
        assert unasked is None, "of() creates a logger that nobody switched on"
        logger = driver.of(config)
        assert isinstance(logger, driver), f"of() gave {logger!r}, not a {driver.__name__}"
        _check_records(logger, count)


def _check_records(logger: StatLogger, count: Callable[[], int]) -> None:
    """Record every interval, each on another thread, as the server does."""
    started = count()
    output = io.StringIO()
    for number, stats in enumerate(_INTERVALS, 1):
        with redirect_stdout(output):
            error = _on_a_thread(partial(_record, logger, stats))
        assert error is None, f"record({stats}) raised {type(error).__name__}: {error}"
        recorded = count() - started
        assert recorded == number, f"{number} intervals were recorded, and {recorded} are there"
    with redirect_stdout(output):
        error = _on_a_thread(logger.close)
    assert error is None, f"close() raised {type(error).__name__}: {error}"
    recorded = count() - started
    assert recorded == len(_INTERVALS), f"after close() {recorded} of {len(_INTERVALS)} are there"
    assert not output.getvalue(), f"it prints to standard output: {output.getvalue()[:200]!r}"


def _record(logger: StatLogger, stats: IntervalStats) -> None:
    result: Any = logger.record(stats)
    if result is not None:
        raise TypeError(f"it returned {result!r}")


def _on_a_thread(call: Callable[[], Any]) -> BaseException | None:
    """Run a function on a thread; return what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None
