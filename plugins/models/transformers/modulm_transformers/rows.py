"""Runs a model row by row with the library's own caches, whose parts lie in our blocks and slots.

For models whose attention ours cannot replace: those with recurrent states, with masks or position
biases of their own, with layers that attend twice, with indexers, and encoder-decoders. A model
whose cache cannot be taken apart computes each row's whole text again in every step; then only the
row's tokens lie in blocks. Which of both gives the right result is tried when the model is loaded.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch
from modulm.contracts.state import StateSpec
from modulm.errors import ModulmError, UnsupportedError
from modulm.nn import Builder
from modulm_transformers.cache_tree import CacheTree
from modulm_transformers.load import explained
from modulm_transformers.row_cache import row_spec

__all__ = ["RowRunner"]

log = logging.getLogger("modulm.models")

#: Tokens of the short and the long run that a cache is learned from.
_SHORT, _LONG = 3, 5
_CLOSE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_CACHES = ("past_key_values", "cache_params")

#: (arguments of the model for a row's tokens) -> its output.
Call = Callable[[Mapping[str, Any]], Any]


class RowRunner:
    """Steps of one model, row by row.

    model: the module that runs, and whose output has what `result` reads of it. encoded: width of
    an encoder's output; 0 without an encoder. wrap: makes the model's argument of it.
    """

    def __init__(
        self,
        model: Module,
        build: Builder,
        result: Callable[[Any], Tensor],
        vocabulary: int,
        *,
        encoded: int = 0,
        wrap: Callable[[Tensor], Any] = tuple,
    ) -> None:
        self.model, self.build, self.result, self.encoded = model, build, result, encoded
        self.wrap = wrap
        self.name, self.device = type(model).__name__, build.shared.device
        self.vocabulary = vocabulary
        self.accepted = inspect.signature(model.forward).parameters.keys()
        self.ids = "decoder_input_ids" if "decoder_input_ids" in self.accepted else "input_ids"
        self.past = next((name for name in _CACHES if name in self.accepted), None)
        self.tree: CacheTree | None = None
        #: Whether only the first tokens of a text may run together.
        self.single = False
        self.caches: list[int] = []
        self.slots: int | None = None
        self.crossed: int | None = None

    # Learning.

    @torch.inference_mode()
    def learn(self) -> None:
        """Find out how the model's cache is taken apart, and register the caches.

        Raises UnsupportedError if neither way gives what the model computes for a whole text.
        """
        with explained(f"{self.name}: transformers' code for it does not run"):
            self._check_order()
        why = self._learn_tree()
        if why:
            self.tree = None
            log.warning("slow: %s computes each row's whole text in every step: %s", self.name, why)
        self._register()

    def _check_order(self) -> None:
        whole, part = (self.result(self._run(self._probe(n))) for n in (2 * _SHORT, _SHORT))
        if not self._close(whole[:_SHORT], part):
            raise UnsupportedError(f"{self.name}: tokens see those after them, as in an encoder")

    def _learn_tree(self) -> str:
        """Learn the cache's parts; returns why it cannot be taken apart, or ""."""
        if self.past is None:
            return "it takes no cache"
        try:
            short, long = (self._cache_of(self._run(self._probe(n), None)) for n in (_SHORT, _LONG))
            self.tree = CacheTree(short, long, (_SHORT, _LONG))
            self._check_continued(_LONG, 1)
            self.single = not self._continues_by_chunks()
        except ModulmError as error:
            return str(error)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _continues_by_chunks(self) -> bool:
        """Whether a text may be continued by several tokens at once."""
        try:
            self._check_continued(_SHORT, _SHORT)
        except Exception:
            return False
        return True

    def _check_continued(self, first: int, more: int) -> None:
        """Compare a text in two runs with the same text in one."""
        tree = self.tree
        if tree is None:
            return
        whole = self.result(self._run(self._probe(first + more)))
        begun = self._run(self._probe(first), None)
        if not self._close(self.result(begun), whole[:first]):
            raise UnsupportedError("it gives other results with a cache than without")
        grown, states = tree.parts(self._cache_of(begun))
        rows = [part.rows(t, first) for part, t in zip(tree.growing, grown, strict=True)]
        cache = tree.build(first, lambda i, a, b: rows[i][a:b], lambda i: states[i].clone())
        inputs = self._probe(more, first)
        output = self._run(inputs, cache)
        if not self._close(self.result(output), whole[first:]):
            raise UnsupportedError("its cache gives other results than the whole text")
        tree.parts(self._cache_of(output))

    def _close(self, one: Tensor, other: Tensor) -> bool:
        tolerance = _CLOSE.get(self.build.shared.dtype, 1e-2)
        scale = max(float(other.float().abs().max()), 1e-6)
        return float((one.float() - other.float()).abs().max()) <= tolerance * scale

    def _probe(self, count: int, first: int = 0) -> dict[str, Any]:
        at = torch.arange(first, first + count, device=self.device)
        tokens = (7 * at + 11) % min(self.vocabulary, 499)
        encoded = None
        if self.encoded:
            generator = torch.Generator().manual_seed(0)
            encoded = torch.randn(_LONG, self.encoded, generator=generator).to(
                self.device, self.build.shared.dtype
            )
        return self._inputs(tokens, at, encoded)

    def _register(self) -> None:
        b = self.build
        if self.encoded:
            spec = row_spec(self.encoded, b.shared.dtype, cross=b.shared.max_length)
            self.crossed = b.at("encoder").attention_cache(spec)[0]
        if self.tree is None:
            self.caches = [b.at("tokens").attention_cache(row_spec(1, torch.int64))[0]]
            return
        for index, part in enumerate(self.tree.growing):
            spec = row_spec(part.width, part.dtype, window=part.window)
            self.caches.append(b.at(f"parts.{index}").attention_cache(spec)[0])
        if self.tree.states:
            tensors = tuple(
                (f"state{i}", tuple(t.shape), str(t.dtype).removeprefix("torch."))
                for i, (_, t) in enumerate(self.tree.states)
            )
            self.slots = b.at("states").cache(StateSpec(tensors))
        if not self.caches and self.slots is None:
            raise UnsupportedError(f"{self.name}: its cache is empty")

    # Steps.

    def run(self, batch: Batch, embeds: Tensor | None = None) -> Tensor:
        """[tokens, width]: results of the batch's tokens. embeds: [tokens, hidden] or None."""
        starts = batch.query_starts.tolist()
        positions = batch.positions[batch.query_starts[:-1].long()].tolist()
        if self.crossed is not None and batch.encoded is not None:
            batch.plan(self.crossed).write(batch.caches[self.crossed], batch.encoded)
        if self.tree is None:
            at = self.caches[0]
            batch.plan(at).write(batch.caches[at], batch.tokens[:, None])
        fresh: list[list[Tensor]] = [[] for _ in self.caches]
        results = []
        for row, past in enumerate(positions):
            span = slice(starts[row], starts[row + 1])
            results += self._row(batch, row, past, span, embeds, fresh)
        if self.tree is not None:
            for cache, rows in zip(self.caches, fresh, strict=True):
                batch.plan(cache).write(batch.caches[cache], torch.cat(rows))
        return torch.cat(results)

    def _row(
        self,
        batch: Batch,
        row: int,
        past: int,
        span: slice,
        embeds: Tensor | None,
        fresh: list[list[Tensor]],
    ) -> list[Tensor]:
        encoded = None
        if self.crossed is not None:
            plan = batch.plan(self.crossed)
            encoded = plan.read(batch.caches[self.crossed], row, 0, plan.lengths[row])
        tokens = batch.tokens[span]
        if self.tree is None:
            at = self.caches[0]
            before = batch.plan(at).read(batch.caches[at], row, 0, past)[:, 0]
            text = torch.cat([before, tokens])
            order = torch.arange(len(text), device=text.device)
            return [self.result(self._run(self._inputs(text, order, encoded)))[past:]]
        cache = self._stored(batch, row, past) if past else None
        stops = self._stops(batch, row, span.stop - span.start, past)
        results, first = [], 0
        for stop, slots in stops:
            piece = slice(span.start + first, span.start + stop)
            inputs = self._inputs(batch.tokens[piece], batch.positions[piece], encoded)
            if embeds is not None:
                inputs["inputs_embeds"] = embeds[piece][None]
                del inputs[self.ids]
            output = self._run(inputs, cache)
            cache = self._cache_of(output)
            results.append(self.result(output))
            grown, states = self.tree.parts(cache)
            for index, (part, tensor) in enumerate(zip(self.tree.growing, grown, strict=True)):
                fresh[index].append(part.rows(tensor, stop - first))
            for slot in slots:
                for index, tensor in enumerate(states):
                    batch.caches[self.slots][f"state{index}"][slot] = tensor
            first = stop
        return results

    def _stops(self, batch: Batch, row: int, count: int, past: int) -> list[tuple[int, list[int]]]:
        """Where a row's runs end, with the slots of the states that are stored there.

        A run is no longer than what layers with a window keep, since all of it is stored.
        """
        stops: dict[int, list[int]] = {count: []}
        parts = () if self.tree is None else self.tree.growing
        windows = [max(part.window - 1, 1) for part in parts if part.window is not None]
        if windows:
            stops |= {at: [] for at in range(min(windows), count, min(windows))}
        if self.slots is not None:
            plan = batch.plan(self.slots)
            for of, at, slot in plan.saves:
                if of == row:
                    stops.setdefault(at, []).append(slot)
            stops[count].append(int(plan.slots[row]))
        if self.single:
            begun = 0 if past else min(stops)
            stops = {at: [] for at in range(begun + 1, count)} | stops
        return sorted(stops.items())

    def _stored(self, batch: Batch, row: int, past: int) -> Any:
        """The row's cache as the library's object."""
        tree = self.tree
        if tree is None:
            return None
        sources: Mapping[str, Tensor] = {}
        slot = 0
        if self.slots is not None:
            plan = batch.plan(self.slots)
            sources = batch.caches[self.slots]
            slot = int((plan.slots if plan.sources is None else plan.sources)[row])

        def rows(index: int, first: int, end: int) -> Tensor:
            cache = self.caches[index]
            stored: Tensor = batch.plan(cache).read(batch.caches[cache], row, first, end)
            return stored

        return tree.build(past, rows, lambda i: sources[f"state{i}"][slot].clone())

    # Calls of the library.

    def _inputs(self, tokens: Tensor, positions: Tensor, encoded: Tensor | None) -> dict[str, Any]:
        inputs: dict[str, Any] = {self.ids: tokens[None]}
        if "position_ids" in self.accepted:
            inputs["position_ids"] = positions[None]
        if encoded is not None:
            inputs["encoder_outputs"] = self.wrap(encoded[None])
        return inputs

    def _run(self, inputs: Mapping[str, Any], cache: Any = False) -> Any:
        """Call the model; cache: False for none, None for a new one."""
        used = {} if self.past is None or cache is False else {self.past: cache}
        if "use_cache" in self.accepted:
            used["use_cache"] = cache is not False
        return self.model(**inputs, **used)

    def _cache_of(self, output: Any) -> Any:
        cache = getattr(output, str(self.past), None)
        if cache is None:
            raise UnsupportedError("it returns no cache")
        return cache
