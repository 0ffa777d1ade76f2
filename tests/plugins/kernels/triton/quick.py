"""Triton's interpreter without what takes most of its time.

Most of that is bookkeeping about types, repeated for each operation of each program. Here types of
blocks, their shapes and what operands are converted to are found once, operands are broadcast by
numpy, and the language is patched once instead of anew for each call of a function inside a kernel
(a process that interprets compiles nothing, so nothing needs it as it was). What operations do to
numbers stays, except that integer arithmetic is not repeated in 64 bits to find overflows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

__all__ = ["quicken"]


class _NoRestore:
    def restore(self) -> None:
        """Nothing: what was patched stays so."""


@cache
def quicken() -> None:
    """Change the interpreter of this process."""
    from triton.runtime import interpreter

    _patch_once(interpreter)
    _remember_types(interpreter)
    _remember_conversions(interpreter)
    _scan_slices(interpreter)
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def _patch_once(interpreter: Any) -> None:
    import triton.language as tl

    patch, done, seen = interpreter._patch_lang, set(), set()

    def once(function):
        if function not in seen:
            seen.add(function)
            names = [value for value in function.__globals__.values() if value in (tl, tl.core)]
            if not done.issuperset(map(id, names)):
                done.update(map(id, names))
                patch(function)
        return _NoRestore()

    def attribute(owner, name, member, builder, scope):
        semantic = interpreter.interpreter_semantic
        # What a builtin calls once it has seen that there is a semantic.
        inner = getattr(member, "__wrapped__", member)

        def call(*args, _semantic=None, **kwargs):
            return inner(*args, _semantic=semantic, **kwargs)

        scope.set_attr(owner, name, call)

    interpreter._patch_lang, interpreter._patch_attr = once, attribute


def _remember_types(interpreter: Any) -> None:
    """Types and shapes are compared by name and by identity."""
    from triton.language import core

    shapes: dict[tuple[int, ...], tuple[Any, ...]] = {}
    names: dict[tuple[str, Any], str] = {}
    make_type, unwrap = core.block_type.__init__, core._unwrap_if_constexpr
    nothing = core.tuple([]), core.constexpr(1)
    sequences = (list, tuple, core.tuple)

    def unwrapped(value):
        if value.__class__ is core.constexpr:
            return value.value
        return unwrap(value) if isinstance(value, sequences) else value

    def block_type(self, element_ty, shape):
        sizes = tuple([unwrapped(size) for size in shape])
        if sizes not in shapes:
            make_type(self, element_ty, shape)
            of_tensors = core.tuple([core.constexpr(size) for size in sizes])
            numel = core.constexpr(math.prod(sizes))
            shapes[sizes] = sizes, self.shape, self.numel, of_tensors, numel
        self.element_ty = element_ty
        self.sizes, self.shape, self.numel, *self.of_tensors = shapes[sizes]
        key = element_ty.name, sizes
        if key not in names:
            names[key] = f"<{self.shape}, {element_ty}>"
        self.name = names[key]

    def tensor(self, handle, kind):
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = kind.of_tensors if kind.is_block() else nothing

    def equals(self, other):
        other = unwrapped(other)
        return isinstance(other, core.dtype) and self.name == other.name

    core._unwrap_if_constexpr = unwrapped
    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    integers = frozenset(core.dtype.SINT_TYPES + core.dtype.UINT_TYPES)
    core.dtype.is_int = lambda self: self.name in integers
    for kind in (core.dtype, core.pointer_type, core.block_type):
        kind.__eq__, kind.__hash__ = equals, lambda self: hash(self.name)

    find, numpy_types = interpreter._get_np_dtype, {}

    def numpy_type(kind):
        name = kind.scalar.name
        if name not in numpy_types:
            numpy_types[name] = find(kind.scalar)
        return numpy_types[name]

    interpreter._get_np_dtype = numpy_type
    interpreter.TensorHandle.__post_init__ = lambda self: None


def _scan_slices(interpreter: Any) -> None:
    """Scans with functions of several values take a step for all numbers at once."""

    def generic_scan(self, inputs):
        arrays = [np.moveaxis(one.handle.data, self.axis, 0) for one in inputs]
        results, state = [np.empty_like(array) for array in arrays], None
        for i in range(len(arrays[0])):
            now = [
                self.to_tensor(np.ascontiguousarray(array[i]), one.dtype)
                for array, one in zip(arrays, inputs, strict=True)
            ]
            state = now if state is None else self.combine_fn.fn(*state, *now)
            for result, value in zip(results, state, strict=True):
                result[i] = value.handle.data
        return [
            self.to_tensor(np.ascontiguousarray(np.moveaxis(result, 0, self.axis)), one.dtype)
            for result, one in zip(results, inputs, strict=True)
        ]

    interpreter.ScanOps.generic_scan = generic_scan


def _remember_conversions(interpreter: Any) -> None:
    """What operands become depends on their types and flags, and for numbers on the number."""
    from triton.language import core

    semantic, match = (
        type(interpreter.interpreter_semantic),
        interpreter.TritonSemantic.binary_op_type_checking_impl,
    )
    tensor, block_type = core.tensor, core.block_type
    converted: dict[tuple[Any, ...], tuple[Any, Any]] = {}
    blocks: dict[tuple[str, Any, Any], Any] = {}

    def kind(operand):
        if isinstance(operand, tensor):
            return operand.dtype.name
        return operand.__class__, repr(operand)

    def scalar(operand):
        """Any number of the same type."""
        if not isinstance(operand, tensor):
            return operand
        zero = np.zeros(1, interpreter._get_np_dtype(operand.dtype))
        return tensor(interpreter.TensorHandle(zero, operand.dtype), operand.dtype)

    def convert(self, operand, example):
        if not isinstance(operand, tensor):
            return example
        if operand.dtype.name == example.dtype.name:
            return operand
        return self.cast(operand, example.dtype)

    def resize(operand, other):
        """Give the operand the type that it has when both have one shape; numpy does the rest."""
        sizes = operand.type.sizes if operand.type.is_block() else ()
        others = other.type.sizes if other.type.is_block() else ()
        key = operand.dtype.name, sizes, others
        if key not in blocks:
            both = np.broadcast_shapes(sizes, others)
            blocks[key] = None if both == sizes else block_type(operand.dtype, list(both))
        kind = blocks[key]
        return operand if kind is None else tensor(operand.handle, kind)

    def match_operands(self, lhs, rhs, *flags):
        key = (kind(lhs), kind(rhs), *flags)
        if key not in converted:
            converted[key] = match(self, scalar(lhs), scalar(rhs), *flags)
        left, right = converted[key]
        lhs, rhs = convert(self, lhs, left), convert(self, rhs, right)
        if lhs.shape is rhs.shape:
            return lhs, rhs
        return resize(lhs, rhs), resize(rhs, lhs)

    semantic.binary_op_type_checking_impl = match_operands
