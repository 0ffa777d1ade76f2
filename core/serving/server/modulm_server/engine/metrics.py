"""Statistics of the engine as Prometheus metrics, with vLLM's names after the prefix `modulm:`.

Counting must be cheap: histograms take a step's values in one vector operation, and metric families
are built only when scraped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from attrs import define
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from modulm.contracts.sampling import PoolingParams
from modulm_server.engine.histograms import HISTOGRAMS, bucket_bounds
from modulm_server.flags import ServerConfig

if TYPE_CHECKING:
    from modulm.contracts.engine_info import EngineInfo
    from modulm.contracts.outputs import Finished
    from modulm.contracts.requests import StepStats

__all__ = ["Histogram", "Metrics", "ReplicaMetrics", "cache_labels", "draft_labels"]

_PREFIX = "modulm:"
_COUNTERS = {
    "num_preemptions": "Preemptions: sequences whose blocks were freed and that were recomputed.",
    "prompt_tokens": "Prompt tokens.",
    "generation_tokens": "Generated tokens.",
    "prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens found in the prefix cache.",
    "prompt_tokens_cached": "Prompt tokens of requests that were found in a cache.",
    "admission_rejections": "Requests refused because too many wait.",
    "spec_decode_num_drafts": "Drafts verified: at most one per sequence and step.",
    "spec_decode_num_draft_tokens": "Drafted tokens that were verified.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that were accepted.",
}
#: Counted by step parts of the engine: `StepEvents.counts`.
_PART_COUNTERS = {
    "external_prefix_cache_queries": "Tokens looked up with the KV connector.",
    "external_prefix_cache_hits": "Tokens that the KV connector loaded.",
    "kv_offload_load_blocks": "Blocks that the KV connector loaded.",
    "kv_offload_store_blocks": "Blocks that the KV connector stored.",
    "kv_offload_load_time": "Seconds of loads of the KV connector, from request to arrival.",
    "kv_offload_store_time": "Seconds of stores of the KV connector.",
    "kv_offload_load_failures": "Loads of the KV connector that failed.",
    "kv_offload_store_failures": "Stores of the KV connector that failed.",
    "compilations": "Compilations of programs and operations, at start and later (TPU).",
    "compile_time": "Seconds of these compilations.",
}
#: Metrics of step parts with a label: name -> what it is, the label, its usual values. In
#: `StepEvents.counts`, the label's value follows the name after "/".
_LABELLED_GAUGES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "num_requests_kv_fetch_by_stage": (
        "Waiting requests whose prefix a KV connector loads, by stage.",
        "stage",
        ("waiting_to_start", "in_progress", "completed_waiting"),
    ),
}
_LABELLED_COUNTERS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "prompt_tokens_by_source": (
        "Prompt tokens of finished requests, by where they came from.",
        "source",
        ("local_compute", "local_cache_hit", "external_kv_transfer"),
    ),
    "prompt_tokens_cached_by_source": (
        "Tokens found in caches when requests were admitted, by the cache.",
        "source",
        ("device", "host", "disk", "p2p", "external_unspecified"),
    ),
}
_REASONS = ("capacity", "deferred")
_AT = "spec_decode_num_accepted_tokens_per_pos"
_GAUGES = {
    "num_requests_running": "Running sequences.",
    "num_requests_waiting": "Waiting sequences.",
    "kv_cache_usage_perc": "Fraction of KV cache blocks in use, 0 to 1.",
    "weight_version": "Number of weight updates, or the version that a trainer set.",
}
#: Sleep level -> label of `engine_sleep_state`.
_SLEEP_STATES = {None: "awake", 0: "awake", 1: "weights_offloaded", 2: "discard_all"}

_ADAPTER_COUNTERS = {
    "requests": "Finished requests, by adapter.",
    "prompt_tokens": "Prompt tokens, by adapter.",
    "generation_tokens": "Generated tokens, by adapter.",
}
#: Maximum number of adapters counted by name; the rest share one label.
_NAMED, _OTHERS = 1000, "(others)"


@define
class _AdapterCounts:
    """The counts of one adapter."""

    requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0

    def add(self, request: Finished) -> None:
        self.requests += 1
        self.prompt_tokens += request.prompt
        self.generation_tokens += sum(request.generated)


class Histogram:
    """Counts per bucket. `bounds`: the upper bounds; the last bucket has none."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = np.array(bounds)
        self.counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self.total = 0.0

    def add(self, values: Sequence[float]) -> None:
        """Count all values at once."""
        buckets = np.searchsorted(self.bounds, values)
        self.counts += np.bincount(buckets, minlength=len(self.counts))
        self.total += sum(values)

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, cumulative count) of each bucket, in Prometheus' form."""
        ends = [*(str(bound) for bound in self.bounds.tolist()), "+Inf"]
        return list(zip(ends, map(float, np.cumsum(self.counts)), strict=True))


class Metrics(Collector):
    """Metrics of one front end's requests and of its engine's steps.

    adapters: maximum number in one step. cache: labels of `cache_config_info`. buckets: see
    `bucket_bounds`. drafts: labels of `spec_decode_info`. SHARED: metrics that all front ends of an
    engine count alike, because each receives all steps.
    """

    SHARED = frozenset(
        _PREFIX + name
        for name in (
            *_GAUGES,
            *(_COUNTERS.keys() - {"prompt_tokens", "prompt_tokens_cached", "admission_rejections"}),
            *_PART_COUNTERS,
            *_LABELLED_GAUGES,
            "num_requests_waiting_by_reason",
            "prompt_tokens_cached_by_source",
            "kv_block_lifetime_seconds",
            "kv_block_idle_before_evict_seconds",
            "kv_block_reuse_gap_seconds",
            "engine_sleep_state",
            _AT,
            "iteration_tokens_total",
        )
    )

    def __init__(
        self,
        model_name: str,
        engine: str = "0",
        adapters: int = 0,
        cache: Mapping[str, str] = MappingProxyType({}),
        buckets: Mapping[str, Sequence[float]] | None = None,
        drafts: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._labels = (model_name, engine)
        self._settings = (
            ("cache_config_info", "Settings of the KV cache", cache),
            ("spec_decode_info", "Drafter of speculative decoding", drafts),
        )
        #: Names of the adapters of waiting and running requests; None without adapters.
        self.in_use: Callable[[], tuple[Iterable[str], Iterable[str]]] | None = None
        self._slots = adapters
        self._by_adapter: dict[str, _AdapterCounts] = {}
        bounds = bucket_bounds(None) if buckets is None else buckets
        self._histograms = {name: Histogram(bounds[name]) for name in HISTOGRAMS}
        self._counters = dict.fromkeys((*_COUNTERS, *_PART_COUNTERS), 0.0)
        self._labelled = {
            name: dict.fromkeys(values, 0.0)
            for name, (_, _, values) in (_LABELLED_GAUGES | _LABELLED_COUNTERS).items()
        }
        self._asleep: int | None = None
        self._gauges = dict.fromkeys(_GAUGES, 0.0)
        self._accepted_at: list[int] = []
        self._routed: list[int] = []
        self._success = dict.fromkeys(("abort", "error", "length", "repetition", "stop"), 0)
        self.last: StepStats | None = None

    @classmethod
    def of(cls, info: EngineInfo, engine: str, adapters: int) -> Self:
        """The metrics of an engine."""
        buckets = bucket_bounds(info.config.group(ServerConfig).custom_histogram_buckets)
        metrics = cls(
            info.models[0], engine, adapters, cache_labels(info), buckets, draft_labels(info)
        )
        for values in info.parts.values():
            metrics.parts(values.get("counts", {}))  # of the start
        return metrics

    def registry(self) -> CollectorRegistry:
        """A new registry with these metrics."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return registry

    def set_weight_version(self, version: int) -> None:
        """Set the version of the weights."""
        self._gauges["weight_version"] = version

    def set_sleep(self, level: int | None) -> None:
        """Set the sleep level, None for awake."""
        self._asleep = level

    def rejected(self) -> None:
        """Count a request that was refused because too many wait."""
        self._counters["admission_rejections"] += 1

    def parts(self, counts: Mapping[str, Any]) -> None:
        """Count what step parts counted in a step; unknown names are left out."""
        for key, value in counts.items():
            name, _, label = key.partition("/")
            if name in self._labelled:
                by_label = self._labelled[name]
                by_label[label] = by_label.get(label, 0.0) + value
            elif name in _PART_COUNTERS:
                self._counters[name] += value
            elif name in self._histograms and value:
                self._histograms[name].add(value)

    def step(self, stats: StepStats) -> None:
        """Count a step of the engine."""
        self.last = stats
        self._gauges["num_requests_running"] = stats.running
        self._gauges["num_requests_waiting"] = stats.waiting
        self._gauges["kv_cache_usage_perc"] = stats.usage
        counters = self._counters
        counters["num_preemptions"] += stats.preempted
        counters["generation_tokens"] += stats.generated
        counters["prefix_cache_queries"] += stats.queried
        counters["prefix_cache_hits"] += stats.hit
        self._labelled["prompt_tokens_cached_by_source"]["device"] += stats.hit
        if stats.drafts:
            self._drafts(stats)
        if stats.routed:
            _add_each(self._routed, stats.routed)
        if stats.computed:
            self._histograms["iteration_tokens_total"].add((stats.computed,))

    def forget_now(self) -> None:
        """Reset the gauges of a dead engine."""
        self._gauges = dict.fromkeys(_GAUGES, 0.0)
        for name in _LABELLED_GAUGES:
            self._labelled[name] = dict.fromkeys(self._labelled[name], 0.0)
        if self.last is not None:
            self.last = self.last._replace(running=0, waiting=0, usage=0.0, deferred=0)

    def totals(self) -> tuple[float, float, float, float]:
        """Total tokens that were computed, generated, looked up in the prefix cache, and found
        there.
        """
        counters = self._counters
        return (
            self._histograms["iteration_tokens_total"].total,
            counters["generation_tokens"],
            counters["prefix_cache_queries"],
            counters["prefix_cache_hits"],
        )

    def _drafts(self, stats: StepStats) -> None:
        self._counters["spec_decode_num_drafts"] += stats.drafts
        self._counters["spec_decode_num_draft_tokens"] += stats.drafted
        self._counters["spec_decode_num_accepted_tokens"] += stats.accepted
        _add_each(self._accepted_at, stats.accepted_at)

    def gaps(self, seconds: Sequence[float]) -> None:
        """Count the times between tokens of all sequences in a step."""
        if seconds:
            self._histograms["inter_token_latency_seconds"].add(seconds)

    def finished(self, request: Finished) -> None:
        """Count a finished request."""
        times, params = request.times, request.params
        self._counters["prompt_tokens"] += request.prompt
        self._add("request_prompt_tokens", request.prompt)
        if request.cached is not None:
            self._counters["prompt_tokens_cached"] += request.cached
            by_source = self._labelled["prompt_tokens_by_source"]
            by_source["local_compute"] += request.prompt - request.cached
            by_source["local_cache_hit"] += request.cached - request.loaded
            by_source["external_kv_transfer"] += request.loaded
            self._add("request_prefill_kv_computed_tokens", request.prompt - request.cached)
            self._add("request_num_preemptions", request.preemptions)
        self._between("e2e_request_latency_seconds", times.arrival_time, times.finished_time)
        scheduled, first, last = (
            times.first_scheduled_time,
            times.first_token_time,
            times.last_token_time,
        )
        self._between("request_queue_time_seconds", times.arrival_time, scheduled)
        self._between("time_to_first_token_seconds", times.arrival_time, first)
        self._between("request_prefill_time_seconds", scheduled, first)
        self._between("request_decode_time_seconds", first, last)
        self._between("request_inference_time_seconds", scheduled, last)
        for reason in request.reasons:
            self._success[reason] += 1
        if request.adapter is not None:
            name = request.adapter
            if name not in self._by_adapter and len(self._by_adapter) >= _NAMED:
                name = _OTHERS
            self._by_adapter.setdefault(name, _AdapterCounts()).add(request)
        if isinstance(params, PoolingParams):
            return
        self._add("request_generation_tokens", sum(request.generated))
        self._add("request_max_num_generation_tokens", max(request.generated))
        self._add("request_params_n", params.n)
        if params.max_tokens is not None:
            self._add("request_params_max_tokens", params.max_tokens)
        gaps = max(request.generated) - 1
        if first is not None and last is not None and gaps > 0:
            self._add("request_time_per_output_token_seconds", (last - first) / gaps)

    def _add(self, name: str, value: float) -> None:
        self._histograms[name].add((value,))

    def _between(self, name: str, begin: float | None, end: float | None) -> None:
        if begin is not None and end is not None:
            self._add(name, end - begin)

    # For Prometheus.

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        names = ("model_name", "engine")
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=names)
            gauge.add_metric(self._labels, self._gauges[name])
            yield gauge
        for name, text in (_COUNTERS | _PART_COUNTERS).items():
            counter = CounterMetricFamily(_PREFIX + name, text, labels=names)
            counter.add_metric(self._labels, self._counters[name])
            yield counter
        yield from self._with_labels()
        asleep = GaugeMetricFamily(
            _PREFIX + "engine_sleep_state",
            "1 for the engine's sleep state, 0 for the others.",
            labels=(*names, "sleep_state"),
        )
        for state in dict.fromkeys(_SLEEP_STATES.values()):
            asleep.add_metric((*self._labels, state), _SLEEP_STATES[self._asleep] == state)
        yield asleep
        for name, text, settings in self._settings:
            if settings:
                help_text = f"{text}, as labels; the value is 1."
                info = GaugeMetricFamily(_PREFIX + name, help_text, labels=(*names, *settings))
                info.add_metric((*self._labels, *settings.values()), 1)
                yield info
        at = CounterMetricFamily(
            _PREFIX + _AT, "Drafted tokens that were accepted, by position in the draft.",
            labels=(*names, "position"),
        )  # fmt: skip
        for position, right in enumerate(self._accepted_at):
            at.add_metric((*self._labels, str(position)), right)
        yield at
        routed = CounterMetricFamily(
            _PREFIX + "expert_tokens",
            "Tokens routed to each expert, over all layers of the last pipeline stage; with "
            "`--enable-eplb`.",
            labels=(*names, "expert"),
        )
        for expert, chosen in enumerate(self._routed):
            routed.add_metric((*self._labels, str(expert)), chosen)
        yield routed
        for name, (text, _) in HISTOGRAMS.items():
            values = self._histograms[name]
            histogram = HistogramMetricFamily(_PREFIX + name, text, labels=names)
            histogram.add_metric(self._labels, values.buckets(), values.total)
            yield histogram
        success = CounterMetricFamily(
            _PREFIX + "request_success", "Finished sequences, by reason.",
            labels=(*names, "finished_reason"),
        )  # fmt: skip
        for reason, count in self._success.items():
            success.add_metric((*self._labels, reason), count)
        yield success
        if self.in_use is not None:
            yield from self._adapters(*self.in_use())

    def _with_labels(self) -> Iterator[Metric]:
        """Gauges and counters with a label of their own."""
        names = ("model_name", "engine")
        waiting = 0 if self.last is None else self.last.waiting
        deferred = 0 if self.last is None else self.last.deferred
        reasons = GaugeMetricFamily(
            _PREFIX + "num_requests_waiting_by_reason",
            "Waiting sequences: for room in the batch and the cache, or deferred, such as until "
            "an adapter or blocks of a KV connector are loaded.",
            labels=(*names, "reason"),
        )
        for reason, count in zip(_REASONS, (waiting - deferred, deferred), strict=True):
            reasons.add_metric((*self._labels, reason), count)
        yield reasons
        for kinds, family in (
            (_LABELLED_GAUGES, GaugeMetricFamily),
            (_LABELLED_COUNTERS, CounterMetricFamily),
        ):
            for name, (text, label, _) in kinds.items():
                metric = family(_PREFIX + name, text, labels=(*names, label))
                for value, amount in self._labelled[name].items():
                    metric.add_metric((*self._labels, value), amount)
                yield metric

    def _adapters(self, waiting: Iterable[str], running: Iterable[str]) -> Iterator[Metric]:
        labels = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        info = GaugeMetricFamily(
            _PREFIX + "lora_requests_info", "Adapters in use; the value is the Unix time.",
            labels=labels,
        )  # fmt: skip
        joined = (",".join(sorted(set(names))) for names in (waiting, running))
        info.add_metric((str(self._slots), *joined), time.time())
        yield info
        for name, text in _ADAPTER_COUNTERS.items():
            counter = CounterMetricFamily(
                f"{_PREFIX}adapter_{name}", text, labels=("model_name", "engine", "adapter")
            )
            for adapter, counts in self._by_adapter.items():
                counter.add_metric((*self._labels, adapter), getattr(counts, name))
            yield counter


def cache_labels(info: EngineInfo) -> dict[str, str]:
    """Return the labels of `cache_config_info`: flags of the cache, and its blocks.

    num_gpu_blocks: of layers that cache whole sequences, as in vLLM, whatever the device.
    """
    cache = info.config.cache
    names = (
        "enable_prefix_caching", "gpu_memory_utilization", "kv_cache_memory_bytes",
        "num_gpu_blocks_override", "prefix_caching_hash_algo",
    )  # fmt: skip
    labels = {name: str(getattr(cache, name)) for name in names}
    labels["block_size"] = str(info.block_size)
    labels["cache_dtype"] = cache.kv_cache_dtype
    labels["num_gpu_blocks"] = str(info.cache_tokens // max(info.block_size, 1))
    return labels


def draft_labels(info: EngineInfo) -> dict[str, str]:
    """Return the labels of `spec_decode_info`; none without speculative decoding."""
    values = info.parts.get("drafts", {})
    if not values.get("drafts"):
        return {}
    return {"method": str(values["method"]), "num_speculative_tokens": str(values["drafts"])}


def _add_each(known: list[int], now: Sequence[int]) -> None:
    known += [0] * (len(now) - len(known))
    for index, count in enumerate(now):
        known[index] += count


class ReplicaMetrics(Collector):
    """Metrics of one front end's requests and of several engines' steps, by engine."""

    def __init__(self, each: Sequence[Metrics]) -> None:
        self._each = each

    @property
    def last(self) -> StepStats | None:
        """The last steps of all engines: their sums, and the largest cache usage."""
        steps = [metrics.last for metrics in self._each if metrics.last is not None]
        if not steps:
            return None
        return steps[-1]._replace(
            running=sum(stats.running for stats in steps),
            waiting=sum(stats.waiting for stats in steps),
            usage=max(stats.usage for stats in steps),
        )

    def totals(self) -> tuple[float, float, float, float]:
        """See `Metrics.totals`: of all engines."""
        first, second, third, fourth = map(
            sum, zip(*(metrics.totals() for metrics in self._each), strict=True)
        )
        return first, second, third, fourth

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for metrics in self._each:
            for family in metrics.collect():
                if family.name == _PREFIX + "lora_requests_info" and family.name in families:
                    continue  # it describes this front end, not an engine
                if family.name in families:
                    families[family.name].samples += family.samples
                else:
                    families[family.name] = family
        yield from families.values()
