"""The contract kit for attention backends.

    from modulm.testing.attention import check_attention

    def test_contract():
        check_attention(MyAttention)

Rows of every mix of lengths are stepped through random blocks, for each kind of layer and format
of the cache that the backend does not reject, and compared with the op `paged_attention` in plain
torch over a cache of its own. Without a machine that the backend runs on nothing is checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from modulm.contracts.attention import AttentionBackend, AttentionSpec, StepLayout
from modulm.contracts.platform import Platform
from modulm.ops import OpTable, bind, twins
from modulm.plugins import defaults, manager

__all__ = ["SPECS", "check_attention", "qkv_prepare"]

_BASE = AttentionSpec(
    heads=4, kv_heads=2, head_dim=64, scale=0.125, dtype="float32", kv_dtype="float32"
)

#: What is tried: one entry per thing that a layer can ask for.
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
    "both directions": evolve(_BASE, causal=False),
    "smaller values": evolve(_BASE, value_dim=32),
    "latent": evolve(_BASE, kv_heads=1, head_dim=96, latent=64),
}

_TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 5e-3}

#: Formats of the cache that are smaller than the layer's, and what rounding may cost besides.
_NARROW = {"int8": 5e-2, "float8_e4m3fn": 5e-2, "float8_e5m2": 5e-2}

#: Tokens of rows 0 to 4 in each step: prompts whole and in chunks beside rows that decode.
_STEPS: Sequence[Sequence[int]] = (
    (40, 1, 0, 7, 0),
    (1, 1, 33, 20, 0),
    (1, 1, 1, 1, 1),
    (1, 1, 17, 1, 3),
    (1, 1, 1, 1, 1),
)
_ROWS = 5
_LENGTH = 128


def check_attention(
    backend: type[AttentionBackend], platform: Platform | None = None, **options: Any
) -> None:
    """Run the whole kit on `platform`, or on the one here that names the backend.

    Raises AssertionError with what was expected.
    """
    assert backend.name, "the backend has no name"
    platform = platform or _find_platform(backend)
    if platform is None:
        return
    ops = _bind(platform)
    refused = backend.rejects(evolve(_BASE, kv_dtype="unheard_of"), platform, ops)
    assert refused, "rejects() takes a kv_dtype that does not exist"
    formats = [(dtype, dtype) for dtype in platform.dtypes]
    formats += [(platform.dtypes[0], narrow) for narrow in _NARROW]
    accepted = 0
    for dtype, kept in formats:
        for what, base in SPECS.items():
            spec = evolve(base, dtype=dtype, kv_dtype=kept)
            reason = backend.rejects(spec, platform, ops)
            assert reason is None or reason, f"rejects() gives an empty reason for {what}"
            if reason is None:
                accepted += 1
                name = f"{what} in {dtype}, kept in {kept}"
                _check_spec(_Case(backend, platform, ops, spec, name, options))
    assert accepted, f"{backend.name} rejects every kind of layer on {platform.name}"


@frozen(eq=False)
class _Case:
    """One spec on one platform: `what` names it in messages."""

    driver: type[AttentionBackend]
    platform: Platform
    ops: OpTable
    spec: AttentionSpec
    what: str
    options: Mapping[str, Any]

    def make(self) -> AttentionBackend:
        sizes = self.driver.block_sizes(self.spec)
        size = sizes[0] if sizes else 8
        return self.driver(self.spec, self.platform, self.ops, size, self.options)

    def tensor(self, *shape: int, seed: int) -> Tensor:
        """Random numbers in the layer's dtype, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        made = torch.randn(shape, generator=generator)
        return made.to(getattr(torch, self.spec.dtype)).to(self.platform.device)

    def compare(self, found: Tensor, expected: Tensor, where: str) -> None:
        worst = (found.float() - expected.float()).abs().max().item()
        bound = max(_TOLERANCE[self.spec.dtype], _NARROW.get(self.spec.kv_dtype, 0.0))
        assert worst <= bound, f"{self.what}, {where}: differs from the twin by {worst:.2g}"

    def kept(self, x: Tensor) -> Tensor:
        """x: [tokens, heads, size] as the cache gives it back (see `AttentionSpec.kv_dtype`)."""
        if self.spec.kv_dtype == "int8":
            scale = x.float().abs().amax(-1, keepdim=True) / 127
            return (torch.round(x.float() / scale.clamp_min(1e-30)) * scale).to(x.dtype)
        return x.to(getattr(torch, self.spec.kv_dtype)).to(x.dtype)


def _check_spec(case: _Case) -> None:
    backend = case.make()
    device = case.platform.device
    blocks = 1 + _ROWS * -(-_LENGTH // backend.block_size)
    layout = backend.layout(blocks)
    cache = torch.zeros(layout.shape, dtype=getattr(torch, layout.dtype), device=device)
    _check_layout(case, layout.block_bytes, cache, blocks)
    spec = case.spec
    values = spec.latent or spec.value_dim or spec.head_dim
    width = spec.head_dim if spec.latent else spec.head_dim + values
    mirror = torch.zeros(
        (blocks, backend.block_size, spec.kv_heads, width),
        dtype=getattr(torch, spec.dtype),
        device=device,
    )
    extra = {
        "sinks": torch.randn(spec.heads, device=device) if spec.sinks else None,
        "alibi": torch.rand(spec.heads, device=device) if spec.alibi else None,
    }
    for number, step in enumerate(_layouts(backend.block_size, blocks, spec.window)):
        count = int(step.query_starts[-1])
        q = case.tensor(count, spec.heads, spec.head_dim, seed=3 * number)
        k = case.tensor(count, spec.kv_heads, spec.head_dim, seed=3 * number + 1)
        v = case.tensor(count, spec.kv_heads, values, seed=3 * number + 2)
        out = torch.empty(count, spec.heads, values, dtype=q.dtype, device=device)
        backend.forward(q.clone(), k.clone(), v.clone(), cache, backend.plan(step), out, **extra)
        expected = _expected(case, mirror, step, (q, k, v), extra, torch.empty_like(out))
        case.compare(out, expected, f"step {number}")
    _check_copy(case, backend, cache, mirror)
    if not (spec.latent or spec.sinks or spec.alibi or spec.value_dim):
        _check_fused(case)


def _check_layout(case: _Case, block_bytes: int, cache: Tensor, blocks: int) -> None:
    assert cache.shape[0] == blocks, f"{case.what}: blocks are not the first dimension of the cache"
    assert block_bytes * blocks == cache.nbytes, (
        f"{case.what}: {blocks} blocks of {block_bytes} bytes are not {cache.nbytes} bytes"
    )


def _expected(
    case: _Case,
    mirror: Tensor,
    step: StepLayout,
    qkv: tuple[Tensor, Tensor, Tensor],
    extra: Mapping[str, Tensor | None],
    out: Tensor,
) -> Tensor:
    """The twin's answer, from its own cache."""
    q, k, v = qkv
    spec = case.spec
    device = mirror.device
    twins.write_kv(case.kept(k), case.kept(v), mirror, torch.from_numpy(step.slots).to(device))
    return twins.paged_attention(
        q,
        mirror,
        torch.from_numpy(step.block_tables).to(device),
        torch.from_numpy(step.query_starts),
        torch.from_numpy(step.context_lens),
        spec.scale,
        out,
        window=spec.window or 0,
        softcap=spec.softcap,
        causal=spec.causal,
        **extra,
    )


def _layouts(block_size: int, blocks: int, window: int | None) -> Iterator[StepLayout]:
    """The steps, over blocks in random order; a row that gets no token is not in the step."""
    order = 1 + np.random.default_rng(0).permutation(blocks - 1).astype(np.int32)
    tables = order.reshape(_ROWS, -1)
    done = np.zeros(_ROWS, dtype=np.int64)
    for counts in _STEPS:
        rows = np.flatnonzero(counts)
        taken = np.asarray(counts)[rows]
        ends = done[rows] + taken
        table = tables[rows].copy()
        columns = np.arange(table.shape[1])
        table[columns >= -(-ends[:, None] // block_size)] = 0
        if window is not None:
            table[columns < (np.maximum(done[rows] - window + 1, 0) // block_size)[:, None]] = 0
        places = [np.arange(start, end) for start, end in zip(done[rows], ends, strict=True)]
        slots = [
            row[place // block_size].astype(np.int64) * block_size + place % block_size
            for row, place in zip(table, places, strict=True)
        ]
        yield StepLayout(
            block_size,
            table,
            np.concatenate([[0], np.cumsum(taken)]).astype(np.int32),
            ends.astype(np.int32),
            np.concatenate(slots),
        )
        done[rows] = ends


def _check_copy(case: _Case, backend: AttentionBackend, cache: Tensor, mirror: Tensor) -> None:
    """A row whose blocks were copied elsewhere goes on there as it would have here."""
    size = backend.block_size
    used = -(-2 * size // size)
    source = np.arange(1, 1 + used)
    target = source + used
    device = cache.device
    moves = [torch.from_numpy(ids).to(device) for ids in (source, target)]
    backend.copy_blocks(cache, *moves)
    mirror[moves[1]] = mirror[moves[0]]
    end = 2 * size
    step = StepLayout(
        size,
        target[None].astype(np.int32),
        np.array([0, 1], dtype=np.int32),
        np.array([end], dtype=np.int32),
        np.array([target[(end - 1) // size] * size + (end - 1) % size], dtype=np.int64),
    )
    spec = case.spec
    values = spec.latent or spec.value_dim or spec.head_dim
    q = case.tensor(1, spec.heads, spec.head_dim, seed=90)
    k = case.tensor(1, spec.kv_heads, spec.head_dim, seed=91)
    v = case.tensor(1, spec.kv_heads, values, seed=92)
    extra = {
        "sinks": torch.zeros(spec.heads, device=device) if spec.sinks else None,
        "alibi": torch.ones(spec.heads, device=device) if spec.alibi else None,
    }
    out = torch.empty(1, spec.heads, values, dtype=q.dtype, device=device)
    backend.forward(q.clone(), k.clone(), v.clone(), cache, backend.plan(step), out, **extra)
    expected = _expected(case, mirror, step, (q, k, v), extra, torch.empty_like(out))
    case.compare(out, expected, "after copy_blocks")


def _check_fused(case: _Case) -> None:
    """`forward_qkv`, if the backend has it, is split, norm, rotation and `forward`."""
    spec, device = case.spec, case.platform.device
    size = spec.head_dim
    for name, norm, rotated, neox in (
        ("rotation", False, size, True),
        ("norm and rotation", True, size, True),
        ("part of each head", False, size // 2, True),
        ("neighbours as pairs", False, size, False),
        ("no rotation", True, 0, True),
    ):
        backend = case.make()
        blocks = 1 + _ROWS * -(-_LENGTH // backend.block_size)
        layout = backend.layout(blocks)
        caches = [
            torch.zeros(layout.shape, dtype=getattr(torch, layout.dtype), device=device)
            for _ in range(2)
        ]
        angles = torch.rand(_LENGTH, rotated // 2, device=device)
        prepare: dict[str, Any] = {
            "q_norm": case.tensor(size, seed=80) if norm else None,
            "k_norm": case.tensor(size, seed=81) if norm else None,
            "eps": 1e-5,
            "norm_offset": 0.0,
            "cos_sin": torch.cat([angles.cos(), angles.sin()], -1) if rotated else None,
            "neox": neox,
        }
        for number, step in enumerate(_layouts(backend.block_size, blocks, spec.window)):
            count = int(step.query_starts[-1])
            qkv = case.tensor(count, (spec.heads + 2 * spec.kv_heads) * size, seed=number)
            prepare["positions"] = _positions(step).to(device)
            out = torch.empty(count, spec.heads, size, dtype=qkv.dtype, device=device)
            plan = backend.plan(step)
            if not backend.forward_qkv(qkv.clone(), prepare, caches[0], plan, out):
                break
            expected = torch.empty_like(out)
            q, k, v = _prepared(qkv, prepare, spec)
            backend.forward(q, k, v, caches[1], backend.plan(step), expected)
            case.compare(out, expected, f"forward_qkv with {name}, step {number}")


def _prepared(
    qkv: Tensor, prepare: Mapping[str, Any], spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """What `forward_qkv` does before it attends, with the twins."""
    heads = torch.unflatten(qkv, -1, (-1, spec.head_dim))
    q, k, v = (
        part.contiguous()
        for part in torch.split(heads, [spec.heads, spec.kv_heads, spec.kv_heads], 1)
    )
    if prepare["q_norm"] is not None:
        q = twins.rms_norm(q, prepare["q_norm"], prepare["eps"])
        k = twins.rms_norm(k, prepare["k_norm"], prepare["eps"])
    if prepare["cos_sin"] is not None:
        twins.rotary(q, k, prepare["positions"], prepare["cos_sin"], prepare["neox"])
    return q, k, v


def _positions(step: StepLayout) -> Tensor:
    counts = np.diff(step.query_starts)
    parts = [
        np.arange(end - count, end) for end, count in zip(step.context_lens, counts, strict=True)
    ]
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))


def _bind(platform: Platform) -> OpTable:
    """The op table that an engine here would have."""
    chosen = defaults.choose_kernels(manager.current(), platform)
    return bind([provider() for provider in chosen.driver])


def _find_platform(backend: type[AttentionBackend]) -> Platform | None:
    """A platform of this machine that would use the backend."""
    plugins = manager.current()
    for declared in plugins.names("platforms"):
        driver = plugins.load_declared(declared)
        if backend.name in driver.attention and driver.probe().score > 0:
            made: Platform = driver()
            return made
    return None


def qkv_prepare(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos_sin: Tensor | None,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    heads: int,
    kv_heads: int,
    neox: bool = True,
    norm_offset: float = 0.0,
) -> Tensor:
    """What `AttentionBackend.forward_qkv` does before it attends, in plain torch.

    Split, norm per head, rotate, and write keys and values to the cache; returns the queries.

    qkv: [T, (Hq + 2 Hk) D]; q_norm, k_norm: [D]; cos_sin: None for no rotation -> [T, Hq, D].
    """
    size = qkv.shape[-1] // (heads + 2 * kv_heads)
    q, k, v = torch.split(torch.unflatten(qkv, -1, (-1, size)), [heads, kv_heads, kv_heads], dim=1)
    q = q.clone() if q_norm is None else twins.rms_norm(q, q_norm, eps, offset=norm_offset)
    k = k.clone() if k_norm is None else twins.rms_norm(k, k_norm, eps, offset=norm_offset)
    if cos_sin is not None:
        twins.rotary(q, k, positions, cos_sin, neox)
    twins.write_kv(k, v, cache, slots)
    return q
