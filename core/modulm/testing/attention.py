"""The contract kit for attention backends.

    from modulm.testing.attention import check_attention

    def test_contract():
        check_attention(MyAttention)

Steps over rows of mixed lengths run on random blocks, for each kind of layer and cache format that
the backend supports, and are compared with `ReferenceAttention` on its own cache. If plans can be
recorded, steps that are replayed from an earlier plan must give the same bits. A backend that no
platform names is tried on every platform of this machine; one that runs on none raises KitNotRun.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import evolve, fields, frozen
from torch import Tensor

from modulm.contracts.attention import (
    AttentionBackend,
    AttentionInputs,
    AttentionPlan,
    AttentionSpec,
    QKVPrepare,
    StepLayout,
)
from modulm.contracts.ops import Ops
from modulm.contracts.platform import Platform
from modulm.ops import bind, twins
from modulm.ops.recording import FixedInputs, signature
from modulm.plugins import defaults, manager
from modulm.testing.kit import KitNotRun
from modulm.testing.paged_attention import ReferencePlan, attend, pick_scores, write_kv
from modulm.testing.platform import usable_platforms

__all__ = ["SPECS", "check_attention"]

_BASE = AttentionSpec(
    heads=4, kv_heads=2, head_dim=64, scale=0.125, dtype="float32", kv_dtype="float32"
)

#: Kinds of layers: one entry per feature that a layer can require.
SPECS: Mapping[str, AttentionSpec] = {
    "grouped heads": _BASE,
    "as many kv heads": evolve(_BASE, kv_heads=4),
    "one kv head": evolve(_BASE, kv_heads=1),
    "heads of 128": evolve(_BASE, head_dim=128, heads=8),
    "heads of 80": evolve(_BASE, head_dim=80),
    "a scale of its own": evolve(_BASE, scale=0.3),
    "window": evolve(_BASE, window=9),
    "softcap": evolve(_BASE, softcap=2.0),
    "sinks": evolve(_BASE, sinks=True),
    "sinks and window": evolve(_BASE, sinks=True, window=9),
    "alibi": evolve(_BASE, alibi=True),
    "biases": evolve(_BASE, biases=True),
    "biases and softcap": evolve(_BASE, biases=True, softcap=2.0),
    "both directions": evolve(_BASE, causal=False),
    "smaller values": evolve(_BASE, value_dim=32),
    "latent": evolve(_BASE, kv_heads=1, head_dim=96, latent=64),
    "scales": evolve(_BASE, scales=True),
    "selected runs": evolve(_BASE, selection=8),
    "selected tokens": evolve(_BASE, selection=1, heads=2),
    "selected latents": evolve(_BASE, selection=1, kv_heads=1, head_dim=96, latent=64),
    "selected tokens, window": evolve(_BASE, selection=1, kv_heads=1, window=9),
    "spans": evolve(_BASE, spans=True),
    "spans and window": evolve(_BASE, spans=True, window=9),
    "cross": evolve(_BASE, cross=64),
    "picks": evolve(_BASE, kv_heads=1, picks=12),
    "masks": evolve(_BASE, masks=True),
    "masks, softcap": evolve(_BASE, masks=True, softcap=2.0),
    "masks, sinks": evolve(_BASE, masks=True, sinks=True),
    "masks over latents": evolve(_BASE, kv_heads=1, head_dim=96, latent=64, masks=True),
    "parts": evolve(_BASE, partial=True),
    "parts, softcap": evolve(_BASE, partial=True, softcap=2.0),
    "parts of latents": evolve(_BASE, kv_heads=1, head_dim=96, latent=64, partial=True),
}

_TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 5e-3}

#: Cache formats narrower than the layer's dtype -> additional tolerance for rounding.
_NARROW = {"int8": 5e-2, "float8_e4m3fn": 5e-2, "float8_e5m2": 5e-2}

#: Tokens of rows 0 to 4 in each step: whole and chunked prompts beside decoding rows.
_STEPS: Sequence[Sequence[int]] = (
    (40, 1, 0, 7, 0),
    (1, 1, 33, 20, 0),
    (1, 1, 1, 1, 1),
    (1, 1, 17, 1, 3),
    (1, 1, 1, 1, 1),
)
_ROWS = 5
_QUICK = 2
_LENGTH = 128
#: Replaces the logarithm of zero.
_NOTHING = -1e4

#: Features of layers that never use `forward_qkv`.
_UNFUSED = {
    "latent", "value_dim", "scales", "selection", "spans", "cross", "picks", "partial", "masks",
}  # fmt: skip


def check_attention(
    backend: type[AttentionBackend],
    platform: Platform | None = None,
    only: Collection[str] = SPECS,
    quick: bool = False,
    **options: Any,
) -> None:
    """Run the kit on `platform`, or on the platform of this machine that lists the backend or else
    accepts some kind of layer.

    only: kinds of layers to check, of SPECS. quick: run fewer steps, for interpreted kernels.
    Raises AssertionError with what was expected, and KitNotRun if it runs on no platform here.
    """
    assert backend.name, "the backend has no name"
    platform = platform or _find_platform(backend)
    ops = _bind(platform)
    assert backend.features <= {field.name for field in fields(AttentionSpec)}, (
        "features are fields of AttentionSpec"
    )
    refused = backend.refuses(evolve(_BASE, kv_dtype="unheard_of"), platform, ops)
    assert refused, "rejects() accepts an unknown kv_dtype"
    formats = [(dtype, dtype) for dtype in platform.dtypes]
    formats += [(platform.dtypes[0], narrow) for narrow in _NARROW]
    accepted = 0
    for dtype, kv_dtype in formats:
        for what in only:
            spec = evolve(SPECS[what], dtype=dtype, kv_dtype=kv_dtype)
            reason = backend.refuses(spec, platform, ops)
            assert reason is None or reason, f"rejects() gives an empty reason for {what}"
            if reason is None:
                accepted += 1
                name = f"{what} in {dtype}, cache in {kv_dtype}"
                _check_spec(_Case(backend, platform, ops, spec, name, options, quick))
    assert accepted, f"{backend.name} rejects every kind of layer on {platform.name}"


@frozen(eq=False)
class _Case:
    """One spec on one platform; `what` names it in messages."""

    driver: type[AttentionBackend]
    platform: Platform
    ops: Ops
    spec: AttentionSpec
    what: str
    options: Mapping[str, Any]
    quick: bool = False

    def layouts(
        self, backend: AttentionBackend, blocks: int, steps: Sequence[Sequence[int]] = _STEPS
    ) -> Iterator[StepLayout]:
        """Yield the layouts of the steps."""
        most = _QUICK if self.quick else len(steps)
        return _layouts(backend.block_size, blocks, self.spec, steps[:most])

    def make(self) -> AttentionBackend:
        sizes = self.driver.block_sizes(self.spec)
        size = sizes[0] if sizes else 8
        return self.driver(self.spec, self.platform, self.ops, size, self.options)

    def tensor(self, *shape: int, seed: int) -> Tensor:
        """Return random numbers in the layer's dtype, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randn(shape, generator=generator)
        return numbers.to(getattr(torch, self.spec.dtype)).to(self.platform.device)

    def compare(self, actual: Tensor, expected: Tensor, where: str) -> None:
        worst = (actual.float() - expected.float()).abs().max().item()
        bound = _TOLERANCE[self.spec.dtype] + _NARROW.get(self.spec.kv_dtype, 0.0)
        assert worst <= bound, f"{self.what}, {where}: differs from the reference by {worst:.2g}"

    def values(self) -> int:
        """Return the size of a head's values."""
        return self.spec.latent or self.spec.value_dim or self.spec.head_dim

    def width(self) -> int:
        """Return the numbers that the reference cache holds per token and head."""
        keys_only = self.spec.latent or self.spec.picks
        return self.spec.head_dim if keys_only else self.spec.head_dim + self.values()

    def out(self, q: Tensor) -> Tensor:
        """Return an output tensor for the backend."""
        if self.spec.picks:
            return q.new_empty(q.shape[0], 1, self.spec.picks, dtype=torch.int32)
        return q.new_empty(*q.shape[:2], self.values())

    def qkv(self, step: StepLayout, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values for a step."""
        spec, keys = self.spec, len(step.slots)
        q = self.tensor(int(step.query_starts[-1]), spec.heads, spec.head_dim, seed=3 * seed)
        k = self.tensor(keys, spec.kv_heads, spec.head_dim, seed=3 * seed + 1)
        return q, k, self.tensor(keys, spec.kv_heads, self.values(), seed=3 * seed + 2)

    def inputs(self, step: StepLayout) -> AttentionInputs:
        """Return the inputs of a layer with this spec; the same in each step except `selected`."""
        spec, device = self.spec, self.platform.device
        draw = torch.Generator().manual_seed(7)
        heads = torch.rand(2, spec.heads, generator=draw).to(device)
        scales = 0.5 + torch.rand(2, spec.kv_heads, generator=draw).to(device)
        return AttentionInputs(
            sinks=heads[0] if spec.sinks else None,
            alibi=heads[1] if spec.alibi else None,
            k_scale=scales[0] if spec.scales else None,
            v_scale=scales[1] if spec.scales else None,
            selected=self._selected(step) if spec.selection else None,
            head_weights=self._head_weights(step) if spec.picks else None,
            biases=self._biases() if spec.biases else None,
            lse=self._lse(step) if spec.partial else None,
        )

    def _selected(self, step: StepLayout) -> Tensor:
        """Return [tokens, kv_heads, 3]: each query's own run, an earlier one, and none."""
        current = _positions(step).view(-1, 1, 1).expand(-1, self.spec.kv_heads, 1)
        current = current // self.spec.selection
        earlier = current * torch.arange(1, self.spec.kv_heads + 1).view(1, -1, 1) // 3
        earlier = earlier.masked_fill(earlier == current, -1)
        chosen = torch.cat([current, earlier, torch.full_like(current, -1)], -1)
        return chosen.int().to(self.platform.device)

    def _biases(self) -> Tensor:
        """Return [heads, 20] biases of both signs; rows are longer than 20."""
        draw = torch.Generator().manual_seed(9)
        biases = 2 * torch.randn(self.spec.heads, 20, generator=draw)
        return biases.to(self.platform.device)

    def _lse(self, step: StepLayout) -> Tensor:
        return torch.zeros(int(step.query_starts[-1]), self.spec.heads, device=self.platform.device)

    def _head_weights(self, step: StepLayout) -> Tensor:
        """Return [tokens, heads] weights of both signs."""
        draw = torch.Generator().manual_seed(8)
        weights = torch.randn(int(step.query_starts[-1]), self.spec.heads, generator=draw)
        return weights.to(self.platform.device)

    def caches(self, count: int, blocks: int) -> tuple[AttentionBackend, list[Tensor]]:
        """Return a backend and zeroed caches in its layout."""
        backend = self.make()
        layout = backend.layout(blocks)
        dtype, device = getattr(torch, layout.dtype), self.platform.device
        return backend, [
            torch.zeros(layout.shape, dtype=dtype, device=device) for _ in range(count)
        ]

    def blocks(self, backend: AttentionBackend) -> int:
        """Return the blocks of a pool for all rows."""
        return 1 + _ROWS * -(-_LENGTH // backend.block_size)

    def mirror(self, backend: AttentionBackend) -> Tensor:
        """Return the reference's zeroed cache."""
        shape = self.blocks(backend), backend.block_size, self.spec.kv_heads, self.width()
        return torch.zeros(
            shape, dtype=getattr(torch, self.spec.dtype), device=self.platform.device
        )

    def rounded(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return x [tokens, heads, size] as the cache would return it (see
        `AttentionSpec.kv_dtype`).
        """
        if scale is not None:
            return (self.rounded(x / scale[:, None]) * scale[:, None]).to(x.dtype)
        if self.spec.kv_dtype == "int8":
            scale = x.float().abs().amax(-1, keepdim=True) / 127
            return (torch.round(x.float() / scale.clamp_min(1e-30)) * scale).to(x.dtype)
        return x.to(getattr(torch, self.spec.kv_dtype)).to(x.dtype)


def _check_spec(case: _Case) -> None:
    spec, blocks = case.spec, case.blocks(case.make())
    backend, (cache,) = case.caches(1, blocks)
    _check_layout(case, backend.layout(blocks).block_bytes, cache, blocks)
    mirror = case.mirror(backend)
    for number, step in enumerate(case.layouts(backend, blocks)):
        _compare_step(case, backend, (cache, mirror), step, number, f"step {number}")
    if not spec.cross:
        _check_copy(case, backend, cache, mirror)
    if spec.masks:
        _check_copy_slots(case, backend, cache, mirror)
    if spec.dtype == spec.kv_dtype == case.platform.dtypes[0]:
        _check_recorded(case)
    if not spec.features & _UNFUSED:
        _check_fused(case)


def _compare_step(
    case: _Case,
    backend: AttentionBackend,
    caches: tuple[Tensor, Tensor],
    step: StepLayout,
    seed: int,
    where: str,
) -> None:
    """Run one step with the backend and with the reference, whose cache is the second."""
    cache, mirror = caches
    (q, k, v), inputs = case.qkv(step, seed), case.inputs(step)
    out = case.out(q)
    backend.forward(q.clone(), k.clone(), v.clone(), cache, backend.plan(step), out, inputs)
    plan = ReferencePlan.of(step, mirror.device)
    write_kv(case.rounded(k, inputs.k_scale), case.rounded(v, inputs.v_scale), mirror, plan.slots)
    if case.spec.picks:
        _compare_picks(case, q, mirror, plan, out, inputs, where)
        return
    unscaled = evolve(inputs, k_scale=None, v_scale=None)
    if inputs.lse is not None:
        unscaled = evolve(unscaled, lse=torch.zeros_like(inputs.lse))
    case.compare(out, attend(case.spec, q, mirror, plan, torch.empty_like(out), unscaled), where)
    if inputs.lse is not None and unscaled.lse is not None:
        actual, expected = (lse.clamp_min(_NOTHING) for lse in (inputs.lse, unscaled.lse))
        case.compare(actual, expected, f"{where}, log of the sum")


def _compare_picks(
    case: _Case,
    q: Tensor,
    mirror: Tensor,
    plan: ReferencePlan,
    out: Tensor,
    inputs: AttentionInputs,
    where: str,
) -> None:
    """Check that the picked tokens have the highest scores, but for rounding."""
    for row, (first, end) in enumerate(itertools.pairwise(plan.query_starts.tolist())):
        scores = pick_scores(case.spec, q, mirror, plan, row, inputs)
        for query, picked in zip(scores, out[first:end, 0].long(), strict=True):
            seen = int(query.isfinite().sum())
            count = min(case.spec.picks, seen)
            missing = case.spec.picks - count
            assert bool((picked[:missing] == -1).all()), (
                f"{case.what}, {where}: missing picks must be -1 and come first"
            )
            positions = picked[missing:]
            assert bool((positions.diff() > 0).all()), (
                f"{case.what}, {where}: picks are not in order"
            )
            assert not count or 0 <= int(positions[0]) <= int(positions[-1]) < seen, (
                f"{case.what}, {where}: picked a token that the query may not see"
            )
            case.compare(
                query[positions].sort().values, query.topk(count).values.sort().values, where
            )


def _check_layout(case: _Case, block_bytes: int, cache: Tensor, blocks: int) -> None:
    assert cache.shape[0] == blocks, f"{case.what}: blocks must be the first dimension of the cache"
    assert block_bytes * blocks == cache.nbytes, (
        f"{case.what}: {blocks} blocks of {block_bytes} bytes are not {cache.nbytes} bytes"
    )


def _layouts(
    block_size: int, blocks: int, spec: AttentionSpec, steps: Sequence[Sequence[int]] = _STEPS
) -> Iterator[StepLayout]:
    """Yield the steps, over blocks in random order; rows without tokens are not in a step."""
    window = spec.window
    order = 1 + np.random.default_rng(0).permutation(blocks - 1).astype(np.int32)
    tables = order.reshape(_ROWS, -1)
    done = np.zeros(_ROWS, dtype=np.int64)
    for counts in steps:
        rows = np.flatnonzero(counts)
        row_counts = np.asarray(counts)[rows]
        ends = done[rows] + row_counts
        table = tables[rows].copy()
        columns = np.arange(table.shape[1])
        table[columns >= -(-ends[:, None] // block_size)] = 0
        if window is not None:
            table[columns < (np.maximum(done[rows] - window + 1, 0) // block_size)[:, None]] = 0
        positions = [np.arange(start, end) for start, end in zip(done[rows], ends, strict=True)]
        slots = [
            row[position // block_size].astype(np.int64) * block_size + position % block_size
            for row, position in zip(table, positions, strict=True)
        ]
        step = StepLayout(
            block_size,
            table,
            np.concatenate([[0], np.cumsum(row_counts)]).astype(np.int32),
            ends.astype(np.int32),
            np.concatenate(slots),
        )
        if spec.spans:
            step = evolve(step, spans=_spans(done[rows], ends))
        if spec.masks:
            step = evolve(step, masks=_masks(row_counts))
        if spec.partial:
            step = _halved(step, positions)
        yield _crossed(step, tables[rows], rows, done[rows] == 0) if spec.cross else step
        done[rows] = ends


def _halved(step: StepLayout, positions: Sequence[np.ndarray]) -> StepLayout:
    """Return the step of a rank that caches every second token of a row, starting with the
    second.
    """
    size = step.block_size
    slots = [
        np.where(
            position % 2,
            row[position // 2 // size].astype(np.int64) * size + position // 2 % size,
            0,
        )
        for row, position in zip(step.block_tables, positions, strict=True)
    ]
    return evolve(
        step,
        context_lens=step.context_lens // 2,
        slots=np.concatenate(slots),
        visible=((np.concatenate(positions) + 1) // 2).astype(np.int32),
    )


def _masks(counts: np.ndarray) -> Mapping[int, np.ndarray]:
    """Return the mask of a tree in every second row, and of a block that attends both ways in the
    others; the longest row keeps its order.
    """
    masks = {}
    for row, count in enumerate(counts.tolist()):
        mask = np.ones((count, count), dtype=bool)
        if row % 2:
            mask = np.eye(count, dtype=bool)
            for node in range(1, count):
                mask[node] |= mask[(node - 1) // 2]
        if 1 < count < counts.max():
            masks[row] = mask
    return masks


def _spans(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return two spans in each row that is long enough, one of them ending at its last token."""
    spans = [
        (row, first, last)
        for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True))
        if end - start > 6
        for first, last in ((start + 1, start + 4), (end - 2, end))
    ]
    return np.array(spans, dtype=np.int32).reshape(-1, 3)


def _crossed(step: StepLayout, tables: np.ndarray, rows: np.ndarray, new: np.ndarray) -> StepLayout:
    """Return the step of a cross-attention layer, whose keys are written when a row begins."""
    lengths, size = 3 + 9 * rows, step.block_size
    positions = [
        np.arange(length if first else 0) for length, first in zip(lengths, new, strict=True)
    ]
    slots = [
        table[position // size].astype(np.int64) * size + position % size
        for table, position in zip(tables, positions, strict=True)
    ]
    lens = lengths.astype(np.int32)
    return evolve(step, block_tables=tables.copy(), slots=np.concatenate(slots), encoder_lens=lens)


def _check_copy(case: _Case, backend: AttentionBackend, cache: Tensor, mirror: Tensor) -> None:
    """Check that a row continues identically after its blocks are copied elsewhere."""
    size = backend.block_size
    used = -(-2 * size // size)
    source = np.arange(1, 1 + used)
    target = source + used
    device = cache.device
    moves = [torch.from_numpy(ids).to(device) for ids in (source, target)]
    backend.copy_blocks(cache, *moves)
    mirror[moves[1]] = mirror[moves[0]]
    step = _last_query(target, size)
    if case.spec.spans:
        step = evolve(step, spans=np.zeros((0, 3), dtype=np.int32))
    if case.spec.partial:
        step = evolve(step, visible=step.context_lens)
    _compare_step(case, backend, (cache, mirror), step, 30, "after copy_blocks")


def _last_query(blocks: np.ndarray, size: int) -> StepLayout:
    """Return the step of one token, the last in its row's two blocks of `size` tokens."""
    end = 2 * size
    return StepLayout(
        size,
        blocks[None].astype(np.int32),
        np.array([0, 1], dtype=np.int32),
        np.array([end], dtype=np.int32),
        np.array([blocks[(end - 1) // size] * size + (end - 1) % size], dtype=np.int64),
    )


def _check_copy_slots(
    case: _Case, backend: AttentionBackend, cache: Tensor, mirror: Tensor
) -> None:
    """Check that tokens which move up are all read before any is written."""
    size, flat = backend.block_size, mirror.view(-1, *mirror.shape[2:])
    slots = size + np.array([[2, 3, size + 1], [1, 2, 3]])
    source, target = torch.from_numpy(slots).to(cache.device)
    backend.copy_slots(cache, source, target)
    flat[target] = flat[source]
    step = _last_query(np.array([1, 2]), size)
    _compare_step(case, backend, (cache, mirror), step, 31, "after copy_slots")


def _check_recorded(case: _Case) -> None:
    """Check that replaying a plan needs only the listed tensors of later plans."""
    steps = [[1] * _ROWS for _ in range(40)]
    blocks = case.blocks(case.make())
    backend, (direct, repeated) = case.caches(2, blocks)
    programs: dict[Any, FixedInputs[AttentionPlan]] = {}
    for number, step in enumerate(case.layouts(backend, blocks, steps)):
        plan = backend.plan(step)
        key = signature(plan)
        if key is None:
            return
        if key in programs:
            programs[key].put(plan)
        else:
            programs[key] = FixedInputs(plan)
        (q, k, v), inputs = case.qkv(step, number), case.inputs(step)
        outs = [case.out(q), case.out(q)]
        for used, cache, out in zip(
            (plan, programs[key].step), (direct, repeated), outs, strict=True
        ):
            backend.forward(q.clone(), k.clone(), v.clone(), cache, used, out, inputs)
        assert torch.equal(*outs), f"{case.what}: step {number}, replayed, gives different bits"
    assert len(programs) < len(steps), (
        f"{case.what}: no two plans have the same key, so none is replayed"
    )


def _check_fused(case: _Case) -> None:
    """Check that `forward_qkv`, if implemented, equals split, norm, rotation and the reference."""
    spec, device = case.spec, case.platform.device
    size = spec.head_dim
    kinds = (
        ("norm and rotation", True, size, True),
        ("rotation", False, size, True),
        ("part of each head", False, size // 2, True),
        ("neighbours as pairs", False, size, False),
        ("no rotation", True, 0, True),
    )
    for name, norm, rotated, neox in kinds[:1] if case.quick else kinds:
        blocks = case.blocks(case.make())
        backend, (fused,) = case.caches(1, blocks)
        mirror = case.mirror(backend)
        angles = torch.rand(_LENGTH, rotated // 2, device=device)
        prepare = QKVPrepare(
            q_norm=case.tensor(size, seed=80) if norm else None,
            k_norm=case.tensor(size, seed=81) if norm else None,
            eps=1e-5,
            cos_sin=torch.cat([angles.cos(), angles.sin()], -1) if rotated else None,
            neox=neox,
        )
        for number, step in enumerate(case.layouts(backend, blocks)):
            count = int(step.query_starts[-1])
            qkv = case.tensor(count, (spec.heads + 2 * spec.kv_heads) * size, seed=number)
            positions, inputs = _positions(step).to(device), case.inputs(step)
            out = torch.empty(count, spec.heads, size, dtype=qkv.dtype, device=device)
            plan = backend.plan(step)
            if not backend.forward_qkv(qkv.clone(), positions, prepare, fused, plan, out, inputs):
                break
            q, k, v = _prepared(qkv, positions, prepare, spec)
            rows = ReferencePlan.of(step, device)
            write_kv(case.rounded(k), case.rounded(v), mirror, rows.slots)
            expected = attend(spec, q, mirror, rows, torch.empty_like(out), inputs)
            case.compare(out, expected, f"forward_qkv with {name}, step {number}")


def _prepared(
    qkv: Tensor, positions: Tensor, prepare: QKVPrepare, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `forward_qkv` does before attention, with the twins."""
    heads = torch.unflatten(qkv, -1, (-1, spec.head_dim))
    q, k, v = (
        part.contiguous()
        for part in torch.split(heads, [spec.heads, spec.kv_heads, spec.kv_heads], 1)
    )
    if prepare.q_norm is not None:
        q = twins.rms_norm(q, prepare.q_norm, prepare.eps)
        k = twins.rms_norm(k, prepare.k_norm, prepare.eps)
    if prepare.cos_sin is not None:
        twins.rotary(q, k, positions, prepare.cos_sin, prepare.neox)
    return q, k, v


def _positions(step: StepLayout) -> Tensor:
    counts = np.diff(step.query_starts)
    parts = [
        np.arange(end - count, end) for end, count in zip(step.context_lens, counts, strict=True)
    ]
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))


def _bind(platform: Platform) -> Ops:
    """Return the op table that an engine would use on the platform."""
    chosen = defaults.choose_kernels(manager.current(), platform)
    return bind([provider() for provider in chosen.driver])


def _find_platform(backend: type[AttentionBackend]) -> Platform:
    """Return the platform of this machine that lists the backend, or else one that it accepts."""
    platforms, reasons = usable_platforms(), []
    for platform in platforms:
        if backend.name in platform.attention:
            return platform
    for platform in platforms:
        ops, dtype = _bind(platform), platform.dtypes[0]
        specs = (evolve(spec, dtype=dtype, kv_dtype=dtype) for spec in SPECS.values())
        refusals = [backend.refuses(spec, platform, ops) for spec in specs]
        if None in refusals:
            return platform
        reasons.append(f"{platform.name}: {refusals[0]}")
    raise KitNotRun(f"no platform here runs {backend.name} ({'; '.join(reasons)})")
