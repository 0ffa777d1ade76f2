"""`LLM.get_metrics()`: the engine's statistics in the form and with the names of vLLM's reader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from modulm_server.engine.metrics import Metrics

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector", "read"]

_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


@frozen
class Metric:
    """A named statistic."""

    name: str
    labels: dict[str, str]


@frozen
class Counter(Metric):
    """A value that only increases."""

    value: int


@frozen
class Vector(Metric):
    """Several counters, in order."""

    values: list[int]


@frozen
class Gauge(Metric):
    """A current value."""

    value: float


@frozen
class Histogram(Metric):
    """buckets: upper bound -> cumulative count."""

    count: int
    sum: float
    buckets: dict[str, int]


def read(metrics: Metrics) -> list[Metric]:
    """Return all statistics, with vLLM's prefix instead of modulm's."""
    return [metric for family in metrics.collect() for metric in _family(family)]


def _family(family: object) -> Iterator[Metric]:
    name = "vllm:" + str(family.name).partition(":")[2]  # type: ignore[attr-defined]
    samples = family.samples  # type: ignore[attr-defined]
    kind = family.type  # type: ignore[attr-defined]
    if name == _PER_POSITION:
        totals = [sample for sample in samples if sample.name.endswith("_total")]
        if totals:
            labels = {k: v for k, v in totals[0].labels.items() if k != "position"}
            totals.sort(key=lambda sample: int(sample.labels["position"]))
            yield Vector(name, labels, [int(sample.value) for sample in totals])
    elif kind == "histogram":
        yield from _histograms(name, samples)
    else:
        for sample in samples:
            if kind == "counter" and sample.name.endswith("_total"):
                yield Counter(name, dict(sample.labels), int(sample.value))
            elif kind == "gauge":
                yield Gauge(name, dict(sample.labels), float(sample.value))


def _histograms(name: str, samples: list[object]) -> Iterator[Histogram]:
    """Yield one histogram per set of labels."""
    grouped: dict[tuple[tuple[str, str], ...], dict[str, object]] = {}
    for sample in samples:
        labels = dict(sample.labels)  # type: ignore[attr-defined]
        end = labels.pop("le", None)
        part = grouped.setdefault(tuple(sorted(labels.items())), {"buckets": {}})
        value = sample.value  # type: ignore[attr-defined]
        if end is not None:
            part["buckets"][end] = int(value)  # type: ignore[index]
        else:
            part[str(sample.name).rpartition("_")[2]] = value  # type: ignore[attr-defined]
    for key, part in grouped.items():
        yield Histogram(
            name,
            dict(key),
            int(part.get("count", 0)),  # type: ignore[call-overload]
            float(part.get("sum", 0.0)),  # type: ignore[arg-type]
            part["buckets"],  # type: ignore[arg-type]
        )
