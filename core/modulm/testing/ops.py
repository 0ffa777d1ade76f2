"""The contract kits for ops (twins in plain torch) and for kernel providers.

    from modulm.testing.ops import check_kernels, check_op

    def test_contract():
        check_op(my_op, sample=arguments)
        check_kernels(MyProvider)

A sample is a function of (rows, dtype) that returns the arguments of one call; tensors with `rows`
as their first size have one entry a row. Providers are compared with twins on every platform of
this machine that they run on: results, what is written in place, dtypes, and each row alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from modulm.contracts.kernels import KernelProvider, Op
from modulm.contracts.platform import Platform, Probe
from modulm.ops import sampling_twins, twins
from modulm.ops.table import BUNDLES, twin_ops
from modulm.testing.kit import KitNotRun, sample_of
from modulm.testing.platform import usable_platforms

__all__ = ["Sample", "check_kernels", "check_op"]

#: (rows, dtype) -> positional arguments of one call.
Sample = Callable[[int, torch.dtype], Sequence[Any]]

#: Rows of a call; no other size of a sample is the same.
_ROWS = 5
_SIZE = 64
_DTYPES = (torch.float32, torch.bfloat16)
#: Relative and absolute: one rounding step of the dtype, and sums in another order.
_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-6}


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=made).to(dtype)


def _turns() -> Tensor:
    angles = torch.outer(torch.arange(64.0), 0.5 ** torch.arange(8.0))
    return torch.cat((angles.cos(), angles.sin()), -1)


#: Op -> calls to compare. The row count is that of the first argument with several rows.
_SAMPLES: Mapping[str, tuple[Sample, ...]] = MappingProxyType(
    {
        "activate": tuple(
            lambda n, d, act=act: (_random(n, _SIZE, dtype=d), act)  # type: ignore[misc]
            for act in ("silu", "gelu", "gelu_tanh", "relu2")
        ),
        "add": (lambda n, d: (_random(n, _SIZE, dtype=d), _random(n, _SIZE, dtype=d)),),
        "multiply": (lambda n, d: (_random(n, _SIZE, dtype=d), _random(n, _SIZE, dtype=d)),),
        "scale": (lambda n, d: (_random(n, _SIZE, dtype=d), 0.75),),
        "clamp": (lambda n, d: (_random(n, _SIZE, dtype=d), 0.75),),
        "rms_norm": (
            lambda n, d: (_random(n, _SIZE, dtype=d), _random(_SIZE), 1e-6),
            lambda n, d: (_random(n, _SIZE, dtype=d), _random(_SIZE).to(d), 1e-2, None, 1.0),
            lambda n, d: (_random(n, _SIZE, dtype=d), None, 1e-6),
        ),
        "add_rms_norm": (
            lambda n, d: (
                _random(n, _SIZE, dtype=d), 2 * _random(n, _SIZE, dtype=d), _random(_SIZE), 1e-6,
            ),
        ),
        "layer_norm": (
            lambda n, d: (_random(n, _SIZE, dtype=d), _random(_SIZE), _random(_SIZE), 1e-5),
            lambda n, d: (_random(n, _SIZE, dtype=d), None, None, 1e-5),
        ),
        "act_and_mul": (lambda n, d: (_random(n, 2 * _SIZE, dtype=d), "silu"),),
        "embedding": (lambda n, d: (torch.arange(n) * 7, _random(48, _SIZE, dtype=d)),),
        "rotary": tuple(
            lambda n, d, neox=neox: (  # type: ignore[misc]
                _random(n, 4, 16, dtype=d), _random(n, 2, 16, dtype=d), torch.arange(n) * 3,
                _turns(), neox,
            )
            for neox in (True, False)
        ),
        "argmax": (lambda n, d: (_random(n, 3 * _SIZE),),),
        "linear": (lambda n, d: (_random(n, _SIZE, dtype=d), _random(96, _SIZE, dtype=d)),),
    }
)  # fmt: skip


def check_op(
    driver: Op, *, sample: Sample | None = None, writes: Collection[int] | None = None
) -> None:
    """Run the kit for an op, a twin in plain torch.

    sample: arguments of a call; by default the function's `kit_sample`. writes: positions of the
    arguments that the op writes to; by default the function's `kit_writes`, else none.
    Raises AssertionError with what was expected, KitNotRun without a sample.
    """
    assert inspect.isfunction(driver), f"{driver!r} is not a function, which ops are"
    own = {*twins.__all__, *sampling_twins.__all__}
    assert driver.__name__ not in own, f"the core has an op {driver.__name__}, which comes first"
    described = (driver.__doc__ or "").strip()
    assert described, f"{driver.__name__} has no docstring, and a twin is the op's specification"
    several = inspect.signature(driver).parameters.values()
    open_ended = [each.name for each in several if each.kind in (each.VAR_KEYWORD,)]
    assert not open_ended, f"{driver.__name__} takes any **{open_ended[0]}: kernels need names"
    sample = sample_of(driver, sample, "a function of (rows, dtype) that returns the arguments")
    written = set(getattr(driver, "kit_writes", ()) if writes is None else writes)
    results = {}
    for dtype in _DTYPES:
        state = torch.get_rng_state()
        before, after, result = _call(driver, sample(_ROWS, dtype))
        drawn = not torch.equal(torch.get_rng_state(), state)
        assert not drawn, f"{driver.__name__} draws random numbers, so no kernel can repeat them"
        for position, (old, new) in enumerate(zip(before, after, strict=True)):
            changed = isinstance(old, Tensor) and not _same(old, new)
            stated = not changed or position in written
            assert stated, (
                f"{driver.__name__} writes to argument {position}: state it in kit_writes"
            )
        again = _call(driver, sample(_ROWS, dtype))[1:]
        _compare(again, (after, result), "the same call gives another result", exact=True)
        _check_rows(driver, sample(_ROWS, dtype), (after, result), dtype)
        _check_strides(driver, sample(_ROWS, dtype), (after, result), dtype)
        results[dtype] = result
    wide, narrow = (_tensors(results[dtype]) for dtype in _DTYPES)
    for one, other in zip(wide, narrow, strict=True):
        kept = one.dtype == other.dtype or other.dtype is torch.bfloat16
        kept = kept and torch.float64 not in (one.dtype, other.dtype)
        assert kept, f"{driver.__name__} of bfloat16 gives {other.dtype}"
    rough = {torch.float32: 0.1}
    _compare(narrow, wide, "bfloat16 gives another result than float32", tolerance=rough)


def check_kernels(
    driver: type[KernelProvider], *, samples: Mapping[str, Sequence[Sample]] | None = None
) -> str:
    """Run the kit for a kernel provider. samples: calls of further ops; by default those of the
    driver's `kit_samples`.

    Returns what was left out. Raises AssertionError with what was expected, KitNotRun if the
    provider runs on no platform of this machine, or if no op could be compared.
    """
    further = getattr(driver, "kit_samples", {}) if samples is None else samples
    calls = {**_SAMPLES, **further}
    tried: set[str] = set()
    offered: set[str] = set()
    reasons = []
    for platform in usable_platforms():
        probe = driver.probe(platform)
        assert isinstance(probe, Probe), f"probe() gave {probe!r}, not a Probe"
        assert probe.reason, "probe() gives no reason"
        assert probe.score >= 0, f"probe() gave the score {probe.score}, which is negative"
        if not probe.score:
            reasons.append(f"{platform.name}: {probe.reason}")
            continue
        provider = driver()
        ops = provider.ops()
        _check_table(provider, ops)
        offered |= ops.keys()
        tried |= _check_ops(provider, ops, platform, calls)
    if not offered:
        raise KitNotRun("; ".join(reasons) or "this machine has no platform")
    if not tried:
        raise KitNotRun("none of its ops has a sample: pass samples=, or define kit_samples")
    left = sorted(offered - tried)
    return f"without a sample: {', '.join(left)}" if left else ""


def _check_table(provider: KernelProvider, ops: Mapping[str, Op]) -> None:
    table = isinstance(ops, Mapping) and len(ops) > 0
    assert table, f"ops() gave {ops!r}, not a table of ops"
    for name, op in ops.items():
        assert name.isidentifier(), f"ops(): {name!r} is no name that layers can call"
        assert callable(op), f"ops(): {name} is {op!r}, which cannot be called"
        for dtype in ("float32", "bfloat16", "float64"):
            reason = provider.rejects(name, dtype=dtype)
            valid = reason is None or (isinstance(reason, str) and reason.strip())
            assert valid, f"rejects({name!r}) gave {reason!r}, not a reason or None"
    for bundle in BUNDLES:
        lacking = [name for name in bundle if name not in ops]
        whole = len(lacking) in (0, len(bundle))
        assert whole, f"{', '.join(lacking)} is missing: {', '.join(bundle)} share a format"


def _check_ops(
    provider: KernelProvider,
    ops: Mapping[str, Op],
    platform: Platform,
    calls: Mapping[str, Sequence[Sample]],
) -> set[str]:
    """Compare the ops with their twins. Returns the names of those that were compared."""
    known, tried = twin_ops(), set()
    for name in ops.keys() & calls.keys() & known.keys():
        for dtype in _DTYPES:
            stated = str(dtype).removeprefix("torch.")
            runs = stated in platform.dtypes and provider.rejects(name, dtype=stated) is None
            for sample in calls[name] if runs else ():
                _check_call(name, ops, known, sample, dtype, platform.device)
                tried.add(name)
    return tried


def _check_call(
    name: str,
    ops: Mapping[str, Op],
    known: Mapping[str, Op],
    sample: Sample,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    op, twin = _packing(name, ops), _packing(name, known)
    arguments = [_moved(each, device) for each in sample(_ROWS, dtype)]
    expected = _call(twin, sample(_ROWS, dtype))[1:]
    what = f"{name} of {dtype} differs from its twin"
    actual = _call(op, arguments)[1:]
    _compare(actual, expected, what, tolerance=_TOLERANCE)
    for one, other in zip(_tensors(actual), _tensors(expected), strict=True):
        assert one.dtype == other.dtype, f"{name} of {dtype} gives {one.dtype}, not {other.dtype}"
    again = _call(op, [_moved(each, device) for each in sample(_ROWS, dtype)])[1:]
    _compare(again, actual, f"{name}: the same call gives another result", exact=True)
    _check_rows(op, _new_arguments(sample, dtype, device), actual, dtype, exact=True, name=name)
    if name == "linear":
        _check_unpacked(ops, arguments[1])
    elif "out" in inspect.signature(known[name]).parameters and len(_tensors(actual[1])) == 1:
        out = torch.full_like(_tensors(actual[1])[0], torch.nan)
        result = op(*_new_arguments(sample, dtype, device)[: _before_out(known[name])], out=out)
        plain = op(*_new_arguments(sample, dtype, device)[: _before_out(known[name])])
        assert result is out, f"{name} does not return the tensor `out`"
        _compare(out, plain, f"{name} does not fill `out`", exact=True)


def _new_arguments(sample: Sample, dtype: torch.dtype, device: torch.device) -> list[Any]:
    """New arguments of a call, on the device."""
    return [_moved(each, device) for each in sample(_ROWS, dtype)]


def _before_out(twin: Op) -> int:
    return list(inspect.signature(twin).parameters).index("out")


def _packing(name: str, ops: Mapping[str, Op]) -> Op:
    """The op; linear packs its weight first."""
    if name != "linear":
        return ops[name]
    return lambda x, weight: ops["linear"](x, ops["pack_linear"](weight))


def _check_unpacked(ops: Mapping[str, Op], weight: Tensor) -> None:
    back = ops["unpack_linear"](ops["pack_linear"](weight))
    _compare(back, weight, "unpack_linear does not give the weight back", exact=True)


def _check_rows(
    op: Op,
    arguments: Sequence[Any],
    whole: tuple[Sequence[Any], Any],
    dtype: torch.dtype,
    *,
    exact: bool = False,
    name: str = "",
) -> None:
    """Check that the first two rows alone have the same results as in the batch."""
    few = [_first(each, 2) for each in arguments]
    alone = _call(op, few)[1:]
    expected = [_first(each, 2) for each in _tensors(whole)]
    what = f"{name or getattr(op, '__name__', 'the op')}: a row's result depends on other rows"
    _compare(alone, expected, what, exact=exact, tolerance=_TOLERANCE)


def _check_strides(
    op: Op, arguments: Sequence[Any], plain: tuple[Sequence[Any], Any], dtype: torch.dtype
) -> None:
    """Check that rows that are not adjacent in memory give the same result."""
    apart = [_apart(each) for each in arguments]
    try:
        result = _call(op, apart)[1:]
    except RuntimeError as error:
        raise AssertionError(f"rows that are not adjacent in memory: {error}") from error
    _compare(
        result, plain, "rows that are not adjacent in memory give another result",
        tolerance=_TOLERANCE,
    )  # fmt: skip


def _apart(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dim() < 2 or len(value) != _ROWS:
        return value
    wide = value.new_zeros(*value.shape[:-1], value.shape[-1] + 3)
    wide[..., : value.shape[-1]] = value
    return wide[..., : value.shape[-1]]


def _call(op: Op, arguments: Sequence[Any]) -> tuple[list[Any], list[Any], Any]:
    """Return (copies of the arguments before, the arguments after, the result)."""
    before = [each.clone() if isinstance(each, Tensor) else each for each in arguments]
    result = op(*arguments)
    return before, list(arguments), result


def _first(value: Any, rows: int) -> Any:
    of_rows = isinstance(value, Tensor) and value.dim() > 0 and len(value) == _ROWS
    return value[:rows].clone() if of_rows else value


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _same(one: Tensor, other: Any) -> bool:
    return isinstance(other, Tensor) and torch.equal(one, other)


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in a value, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


def _compare(
    actual: Any,
    expected: Any,
    what: str,
    *,
    exact: bool = False,
    tolerance: Mapping[torch.dtype, float] | None = None,
) -> None:
    actual, expected = _tensors(actual), _tensors(expected)
    assert len(actual) == len(expected), f"{what}: {len(actual)} tensors, not {len(expected)}"
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape, f"{what}: shape {list(one.shape)}, not {list(other.shape)}"
        if exact or not one.is_floating_point():
            assert torch.equal(one.cpu(), other.cpu()), what
            continue
        limits = tolerance or {}
        most = max((limits.get(each, 0.0) for each in (one.dtype, other.dtype)), default=0.0)
        wide, reference = one.cpu().float(), other.cpu().float()
        close = torch.allclose(wide, reference, rtol=most, atol=most)
        far = float((wide - reference).abs().max()) if one.numel() else 0.0
        assert close, f"{what}: by up to {far:.3g}, {most:.3g} are allowed"
