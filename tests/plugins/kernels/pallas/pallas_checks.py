"""Pallas kernels against their twins in plain torch, and lowered for TPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.samples import parametrize_sample

jax = pytest.importorskip("jax", reason="JAX is not installed; make setup installs it")

import jax.numpy as jnp  # noqa: E402

from modulm_kernels_cpu.linear import TABLES  # noqa: E402
from modulm_kernels_pallas import (  # noqa: E402
    bridge,
    experts,
    linear,
    paged_attention,
    twins,
    write_kv,
)  # fmt: skip
from modulm_kernels_pallas import codes as codes_ops  # noqa: E402
from modulm_kernels_pallas.spread import interpreted  # noqa: E402
from modulm_kernels_pallas.tiles import tiles_of  # noqa: E402

BLOCK, BLOCKS = 8, 24
#: New tokens and cached tokens, the new ones included, of each row.
MIXED = [(1, 9), (5, 5), (20, 31), (1, 1), (3, 17)]
SINGLE = [(1, 9), (1, 1), (1, 30)]


def numbers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def step(rows: list[tuple[int, int]], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Block tables, starts, lengths and slots of a step; blocks in random order, none twice."""
    counts, lengths = np.array(rows, np.int32).T
    columns = max(-(-int(lengths.max()) // BLOCK), 1) + 1
    free = iter(rng.permutation(np.arange(1, BLOCKS)).tolist())
    tables = np.zeros((len(rows), columns), np.int32)
    for row, length in enumerate(lengths.tolist()):
        for column in range(-(-length // BLOCK)):
            tables[row, column] = next(free)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    owners = np.repeat(np.arange(len(rows)), counts)
    places = np.arange(starts[-1]) - starts[owners] + (lengths - counts)[owners]
    slots = tables[owners, places // BLOCK] * BLOCK + places % BLOCK
    return {"tables": tables, "starts": starts, "lengths": lengths, "slots": slots}


def stored_integers(cache: np.ndarray, size: int) -> np.ndarray:
    """The cache as 8-bit integers with their scales."""
    blocks, heads, block, width = cache.shape
    entries = torch.from_numpy(cache).transpose(1, 2).reshape(-1, heads, width)
    stored = torch.zeros(blocks, heads, block + 4, width, dtype=torch.int8)
    twins.write_kv(entries, stored, torch.arange(len(entries)), size)
    return stored.numpy()


CASES: dict[str, dict[str, Any]] = {
    "all": {"window": 6, "softcap": 3.0, "values": 8, "sinks": True, "scaled": True},
    "plain": {},
    "gemma": {"window": 6, "softcap": 3.0, "values": 8},
    "sinks": {"sinks": True, "window": 11},
    "latent": {"latent": True, "kv_heads": 1, "values": 12},
    "scaled": {"scaled": True},
    "encoder": {"causal": False},
    "int8": {"integers": True, "window": 11},
    "int8 latent": {"integers": True, "latent": True, "kv_heads": 1, "values": 12},
}
ATTENTION = [(rows, name) for name in CASES for rows in (MIXED, SINGLE)]


@parametrize_sample("rows, name", ATTENTION, 18)
def test_attention_equals_its_twin(rows: list[tuple[int, int]], name: str) -> None:
    case = dict(CASES[name])
    rng = np.random.default_rng(5)
    heads, kv_heads, size = 4, case.get("kv_heads", 2), 16
    values, latent = case.get("values", 16), case.get("latent", False)
    facts = step(rows, rng)
    cache = numbers(rng, BLOCKS, kv_heads, BLOCK, size + (0 if latent else values))
    if case.get("integers"):
        cache = stored_integers(cache, values if latent else size)
    q = numbers(rng, int(facts["starts"][-1]), heads, size)
    extra = {"sinks": numbers(rng, heads)} if case.get("sinks") else {}
    if case.get("scaled"):
        extra["k_scale"] = np.array([0.5], np.float32)
        extra["v_scale"] = np.array([2, 3], np.float32)
    causal, window = case.get("causal", True), case.get("window", 0)
    expected = twins.paged_attention(
        torch.from_numpy(q), torch.from_numpy(cache), torch.from_numpy(facts["tables"]),
        torch.from_numpy(facts["starts"]), torch.from_numpy(facts["lengths"]),
        size=size, values=values, scale=0.25, causal=causal, window=window,
        softcap=case.get("softcap", 0.0), latent=latent,
        **{name: torch.from_numpy(x) for name, x in extra.items()},
    )  # fmt: skip
    tiles = tiles_of(facts["starts"], facts["lengths"], BLOCK, causal=causal, window=window)
    work = paged_attention.Work(facts["tables"], *tiles.arrays())
    look = paged_attention.Look(
        size, values, 0.25, causal, window, case.get("softcap", 0.0), latent
    )

    def attend(*arguments: Any, **more: Any) -> Any:
        kernel = partial(paged_attention.paged_attention, interpret=True)
        return [each(*arguments, look, **more) for each in (kernel, paged_attention.attend_plain)]

    for got in jax.jit(attend)(q, cache, work, **extra):
        # fp32 sums of at most 32 products in another order.
        np.testing.assert_allclose(got, expected, atol=2e-5, rtol=2e-5)


def test_shapes_of_tiles_depend_on_the_sizes_of_a_step_only() -> None:
    one = tiles_of(np.array([0, 1, 30]), np.array([4, 29]), BLOCK, window=5)
    other = tiles_of(np.array([0, 15, 30]), np.array([15, 70]), BLOCK)
    assert [x.shape for x in one.arrays()] == [x.shape for x in other.arrays()]
    assert sorted(other.places.tolist()) == other.places.tolist()
    assert (one.positions >= 0).sum() == 30


@parametrize_sample("dtype", ["int8", "bfloat16", "float32"], 3)
def test_cache_writes_equal_their_twin(dtype: str) -> None:
    rng = np.random.default_rng(3)
    facts = step(MIXED, rng)
    entries = numbers(rng, len(facts["slots"]), 2, 12)
    entries[:, :, 7:] *= np.exp(4 * numbers(rng, len(entries), 2, 1))
    entries[3] = 0
    cache = numbers(rng, BLOCKS, 2, BLOCK + (4 if dtype == "int8" else 0), 12)
    expected = torch.from_numpy(cache).to(getattr(torch, dtype))
    slots = torch.from_numpy(facts["slots"].astype(np.int64))
    twins.write_kv(torch.from_numpy(entries), expected, slots, 7)
    kernel = partial(write_kv.write_kv, interpret=True)

    def write(*arguments: Any) -> Any:
        return [each(*arguments, keys=7) for each in (kernel, write_kv.write_plain)]

    for got in jax.jit(write)(entries, cache.astype(dtype), facts["slots"]):
        assert np.array_equal(np.asarray(got, np.float32), expected.float().numpy())


LINEARS = [
    (4, 2, True, 256),
    (8, 1, False, 256),
    (8, 8, False, 256),
    (8, 2, True, 256),
    (4, 1, False, 256),
    (4, 1, True, 60),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", LINEARS)
def test_linears_of_codes_equal_their_twin(case: tuple[int, int, bool, int]) -> None:
    bits, groups, zeros, inputs = case
    rng = np.random.default_rng(1)
    most = 8 if bits == 4 else 128
    codes = rng.integers(-most, most, (40, inputs)).astype(np.int8)
    scales = np.exp(numbers(rng, 40, groups))
    offsets = np.round(numbers(rng, 40, groups)) if zeros else None
    x, bias = numbers(rng, 11, inputs), numbers(rng, 40)
    packed = linear.pack(codes, scales, offsets, bits=bits)
    expected = twins.linear(
        *(torch.from_numpy(a) for a in (x, codes, scales)),
        None if offsets is None else torch.from_numpy(offsets), torch.from_numpy(bias),
    ).numpy()  # fmt: skip
    # An fp32 sum of K products rounds by at most K eps times the sum of their magnitudes; rounding
    # is random, so its square root is the scale, and 8 times that was never exceeded.
    bound = 8 * inputs**0.5 * 2.0**-24 * (np.abs(x).sum(1).max() * most * 2 * scales.max())
    ways: list[Callable[..., Any]] = [linear.linear_plain]
    if linear.misfit(packed) is None:
        ways.append(partial(linear.linear, interpret=True))
    for got in jax.jit(lambda x, bias: [multiply(x, packed, bias) for multiply in ways])(x, bias):
        np.testing.assert_allclose(got, expected, atol=bound, rtol=0)


#: Format, group, zero points.
PACKED = [
    ("int4", 128, True), ("int4", 0, False), ("int8", 32, True), ("int8", 0, False),
    ("fp8", 0, False), ("e2m1", 32, False), ("iq4", 32, False),
]  # fmt: skip


@parametrize_sample("form, group, zeros", PACKED, 7)
def test_packed_codes_are_multiplied_by_kernels(form: str, group: int, zeros: bool) -> None:
    torch.manual_seed(4)
    codes = torch.randint(0, 16, (40, 256), dtype=torch.uint8)
    if form == "int8":
        codes = torch.randint(-128, 128, (40, 256), dtype=torch.int8)
    if form == "fp8":
        codes = torch.randn(40, 256).to(torch.float8_e4m3fn)
    groups = 256 // group if group else 1
    scales = torch.rand(40, groups).half()
    if form == "e2m1":
        scales = torch.randint(115, 121, (40, groups), dtype=torch.uint8)
    points = torch.randint(0, 16, (40, groups)) if zeros else None
    packed = codes_ops.pack_quantized(codes, form, group, scales, points)
    # By the CPU kernels' definition of the same arguments.
    wide = torch.tensor(TABLES[form])[codes.int()].float() if form in TABLES else codes.float()
    centre = 8 if form == "int4" else 0
    grouped = wide.unflatten(1, (groups, -1)) - (centre if points is None else points[..., None])
    factors = torch.exp2(scales.float() - 127) if form == "e2m1" else scales.float()
    weight = (grouped * factors[..., None]).flatten(1)
    assert torch.equal(packed.weight(), weight.bfloat16())
    x, bias = torch.randn(11, 256), torch.randn(40)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double()).numpy()

    def multiply(x: Any, bias: Any, held: Any) -> Any:
        one = codes_ops.PackedCodes(*held, packed.bits)
        rows, added = bridge.tensor_of(x), bridge.tensor_of(bias)
        with interpreted():
            kernel = bridge.array_of(codes_ops.linear(rows, one, added))
        return kernel, bridge.array_of(codes_ops.linear(rows, one, added))

    held = [
        None if t is None else bridge.tensor_of(bridge.array_of(t))
        for t in (packed.data, packed.scales, packed.zeros)
    ]
    # Sums of 256 products in fp32, see above.
    bound = 8 * 16 * 2.0**-24 * float((x.abs()[:, None] * weight.abs()).sum(-1).max())
    for got in jax.jit(lambda x, bias: multiply(x, bias, held))(x.numpy(), bias.numpy()):
        np.testing.assert_allclose(got, expected, atol=bound, rtol=0)


def test_weights_that_do_not_fit_are_refused() -> None:
    codes = np.zeros((8, 96), np.int8)
    narrow = linear.pack(codes, np.ones((8, 3), np.float32))
    with pytest.raises(ValueError, match="multiples of 128 inputs, not 32"):
        linear.linear(np.zeros((4, 96)), narrow)
    with pytest.raises(ValueError, match="do not divide"):
        linear.pack(codes, np.ones((8, 5), np.float32))
    with pytest.raises(ValueError, match=r"-8\.\.7"):
        linear.pack(codes + 9, np.ones((8, 1), np.float32), bits=4)


@pytest.mark.exhaustive
def test_products_of_experts_equal_their_twin() -> None:
    rng = np.random.default_rng(2)
    ids = np.stack([rng.permutation(5)[:2] for _ in range(21)])
    ids[ids == 3] = 4  # an expert that no token chose, and one twice in a token
    x, weights = numbers(rng, 21, 24), numbers(rng, 5, 32, 24)
    expected = twins.grouped_matmul(*(torch.from_numpy(a) for a in (x, weights, ids))).numpy()
    kernel = partial(experts.grouped_matmul, interpret=True)

    def multiply(x: Any, weights: Any, ids: Any) -> Any:
        groups = experts.group_rows(ids, 5, rows=8)
        ways = kernel, experts.grouped_plain
        results = [way(x[groups.sources], weights, groups) for way in ways]
        return [each.reshape(-1, 32)[groups.places] for each in results]

    for got in jax.jit(multiply)(x, weights, ids):
        np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-5)


def shape(*sizes: int, dtype: str = "bfloat16") -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype)


def lowered(function: Callable[..., Any], *arguments: Any) -> str:
    return str(jax.export.export(jax.jit(function), platforms=["tpu"])(*arguments).mlir_module())


@parametrize_sample("name", ["all", "int8", "latent", "plain", "encoder", "int8 latent"], 6)
def test_attention_is_lowered_for_tpus(name: str) -> None:
    case = CASES[name]
    kv_heads, latent = case.get("kv_heads", 8), case.get("latent", False)
    size, values = (576, 512) if latent else (128, 128)
    facts = step(MIXED, np.random.default_rng(0))
    tiles = tiles_of(facts["starts"], facts["lengths"], 128, window=case.get("window", 0))
    work = paged_attention.Work(facts["tables"], *tiles.arrays())
    look = paged_attention.Look(
        size, values, 0.1, case.get("causal", True), case.get("window", 0),
        case.get("softcap", 0.0), latent,
    )  # fmt: skip
    cache = shape(64, kv_heads, 128, size + (0 if latent else values))
    if case.get("integers"):
        cache = shape(64, kv_heads, 132, cache.shape[-1], dtype="int8")
    sinks = {"sinks": jnp.zeros(32)} if case.get("sinks") else {}

    def attend(q: Any, cache: Any, work: Any) -> Any:
        return paged_attention.paged_attention(q, cache, work, look, **sinks)

    text = lowered(attend, shape(int(facts["starts"][-1]), 32, size), cache, work)
    assert "tpu_custom_call" in text


def test_other_kernels_are_lowered_for_tpus() -> None:
    slots = shape(24, dtype="int32")
    assert "tpu_custom_call" in lowered(
        write_kv.write_kv, shape(24, 8, 256), shape(64, 8, 128, 256), slots
    )
    assert "tpu_custom_call" in lowered(
        partial(write_kv.write_kv, keys=128),
        shape(24, 8, 256), shape(64, 8, 132, 256, dtype="int8"), slots,
    )  # fmt: skip
    groups = experts.Groups(
        shape(10, 64, dtype="int32"), shape(10, dtype="int32"), shape(10, dtype="int32"),
        shape(64, 2, dtype="int32"),
    )  # fmt: skip
    assert "tpu_custom_call" in lowered(
        experts.grouped_matmul, shape(10, 64, 1024), shape(8, 512, 1024), groups
    )
    for bits, zeros, dtype in ((8, False, "int8"), (4, True, "int8"), (8, False, "float8_e4m3fn")):
        width = 1024 if bits == 8 else 512
        data = jnp.zeros((512, width), dtype)
        scales = jnp.ones((8, 1, 512))
        packed = linear.Codes(data, scales, scales if zeros else None, bits)
        multiply = partial(linear.linear, packed=packed)
        assert "tpu_custom_call" in lowered(multiply, shape(100, 1024))
