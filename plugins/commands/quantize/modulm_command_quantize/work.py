"""Runs the quantization, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from modulm.contracts.quantization import LinearKind, LinearSpec
from modulm.errors import ConfigError, UnsupportedError
from modulm_command_quantize import awq
from modulm_command_quantize.gptq import gptq
from modulm_command_quantize.layers import Layers
from modulm_command_quantize.output import Output
from modulm_command_quantize.schemes import Scheme
from modulm_quantized import matches

__all__ = ["Job", "Source"]

#: Name of the LM head, which stays unquantized, also if tied to the embedding.
_HEAD = "lm_head"

#: Called with the number of a finished step.
Tell = Callable[[int], None]


@frozen(eq=False)
class Source:
    """A plain checkpoint: stored tensors by file, and which of them are weights of linear layers.

    `linear`: stored name -> the layer, including kinds that are not quantized.
    """

    folder: Path
    config: Mapping[str, Any]
    paths: Mapping[str, Path]
    linear: Mapping[str, LinearSpec]

    def read(self, name: str) -> Tensor:
        """Read one tensor. Raises KeyError."""
        from safetensors import safe_open

        with safe_open(self.paths[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor

    def steps(self) -> list[list[str]]:
        """Tensor names by decoder layer, and last those outside any layer."""
        names_by_layer: dict[str, list[str]] = {"": []}
        for name in self.paths:
            names_by_layer.setdefault(_layer(name), []).append(name)
        rest = names_by_layer.pop("")
        order = sorted(names_by_layer, key=lambda path: [_number(part) for part in path.split(".")])
        return [*(names_by_layer[path] for path in order), rest]


@frozen(eq=False)
class Job:
    """A quantization job. ignore: patterns of layers to leave unquantized."""

    source: Source
    scheme: Scheme
    method: str
    ignore: tuple[str, ...] = ()
    coded: dict[str, str] = field(init=False, factory=dict)
    left: list[str] = field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        self.left.append(_HEAD)
        for name, spec in self.source.linear.items():
            path = name.removesuffix(".weight")
            reason = self._unfit(path, name, spec)
            if reason is None:
                self.coded[name] = path
            elif (
                spec.kind
                in (LinearKind.LINEAR, LinearKind.EXPERT, LinearKind.ROUTER, LinearKind.LM_HEAD)
                and path != _HEAD
            ):
                self.left.append(path)
        self._check_fused()
        if not self.coded:
            raise UnsupportedError(
                f"{self.source.folder}: no layer can be quantized to {self.scheme.name}"
            )

    def _unfit(self, path: str, name: str, spec: LinearSpec) -> str | None:
        if spec.kind not in (LinearKind.LINEAR, LinearKind.EXPERT):
            return "another kind"
        if matches(path, self.ignore):
            return "ignored"
        return self.scheme.unfit(spec.inputs)

    def _check_fused(self) -> None:
        """Raise ConfigError if only some parts of a fused layer would be quantized."""
        for path in self.left:
            spec = self.source.linear.get(f"{path}.weight")
            if spec is None:
                continue
            parts = [f"{part}.weight" for part in spec.part_names]
            mixed = [part for part in parts if part in self.coded]
            if mixed and path in spec.part_names:
                raise ConfigError(
                    "ignore", f"{mixed[0]} is fused with {path}: ignore both or neither"
                )

    def run(self, output: Output, rows: Sequence[Sequence[int]], tell: Tell) -> None:
        """Write all missing steps."""
        if self.method == "rtn":
            for step, names in enumerate(self.source.steps()):
                if not output.done(step):
                    output.write(step, dict(self._rounded(names)))
                tell(step)
            return
        self._calibrated(output, rows, tell)

    def _rounded(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            tensor = self.source.read(name)
            if name not in self.coded:
                yield name, tensor
                continue
            grid = self.scheme.grid(tensor)
            yield from self._named_tensors(name, grid.codes(tensor.float()), grid)

    def _named_tensors(self, name: str, codes: Tensor, grid: Any) -> Iterator[tuple[str, Tensor]]:
        for ending, tensor in self.scheme.stored_tensors(codes, grid).items():
            yield f"{self.coded[name]}.{ending}", tensor

    def _calibrated(self, output: Output, rows: Sequence[Sequence[int]], tell: Tell) -> None:
        layers, steps = Layers.of(self.source.folder), self.source.steps()
        if len(layers.layers) + 1 != len(steps):
            raise UnsupportedError(
                f"transformers has {len(layers.layers)} layers in {layers.name}, the checkpoint "
                f"has {len(steps) - 1}: use --method rtn"
            )
        done = next((s for s in range(len(steps)) if not output.done(s)), len(steps))
        hidden = layers.begin(rows, self.source.read)
        if 0 < done < len(layers.layers):
            hidden = output.hidden(done - 1)
        for step in range(done):
            tell(step)
        for step in range(done, len(layers.layers)):
            tensors, hidden = self._layer(layers, step, steps[step], hidden)
            output.keep_hidden(step, hidden)
            output.write(step, tensors)
            output.drop_hidden(step - 1)
            tell(step)
        if done < len(steps):
            output.write(len(steps) - 1, dict(self._rounded(steps[-1])))
            tell(len(steps) - 1)

    def _layer(
        self, layers: Layers, step: int, names: Sequence[str], hidden: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Quantize a layer; returns (its tensors, its output with quantized weights)."""
        layer, prefix = layers.fill(step, self.source.read), f"{layers.name}.{step}."
        inside = [self.coded[name].removeprefix(prefix) for name in names if name in self.coded]
        seen = layers.watch(step, hidden, inside)
        if self.method == "awq":
            self._scale(layer, layers, step, hidden, inside)
            seen = layers.watch(step, hidden, inside)
        written: dict[str, Tensor] = {}
        modules = dict(layer.named_modules())
        for name in names:
            if name not in self.coded:
                module, _, parameter_name = name.removeprefix(prefix).rpartition(".")
                parameter = modules[module].get_parameter(parameter_name).detach()
                written[name] = parameter.to(self.source.read(name).dtype)
                continue
            path = self.coded[name].removeprefix(prefix)
            weight = modules[path].get_parameter("weight")
            if self.method == "gptq":
                codes, grid = gptq(weight.detach(), seen[path].squares, self.scheme)
            else:
                grid = self.scheme.grid(weight.detach())
                codes = grid.codes(weight.detach())
            weight.data.copy_(grid.weight(codes))
            written.update(self._named_tensors(name, codes, grid))
        out = layers.run(step, hidden)
        layers.release(step)
        return written, out

    def _scale(
        self, layer: Any, layers: Layers, step: int, hidden: Tensor, inside: Sequence[str]
    ) -> None:
        """Apply AWQ scales. Raises UnsupportedError if they change the layer's output."""
        probe = hidden[:1]
        before = layers.run(step, probe)
        for source, takers in awq.sources(layer, inside).items():
            statistics = layers.watch(step, hidden, takers)[takers[0]]
            modules = dict(layer.named_modules())
            weights = [modules[taker].get_parameter("weight").detach() for taker in takers]
            awq.fold(
                layer,
                source,
                takers,
                awq.search(weights, statistics.squares, statistics.sizes, self.scheme),
            )
        error = (layers.run(step, probe) - before).norm() / before.norm().clamp(min=1e-9)
        if not torch.isfinite(error) or error > 1e-3:
            raise UnsupportedError(
                f"awq: scales cannot be moved through the norms of {layers.name}.{step} "
                f"(its output changes by {float(error):.1%}): use --method gptq"
            )


def _layer(name: str) -> str:
    """The path up to and including the first number, or ""."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return "" if at is None else ".".join(parts[: at + 1])


def _number(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdigit() else (-1, part)
