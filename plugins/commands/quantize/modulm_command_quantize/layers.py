"""Loads and runs a transformers model's decoder layers one at a time.

The model is created on the meta device. The modules before the layers are loaded to compute the
inputs of the first one; then each layer is loaded, run, changed, run again and released. Memory
holds one layer, the statistics of its inputs, and the hidden states of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor
from torch.nn import Linear, Module, ModuleList, Parameter

from modulm.errors import UnsupportedError

__all__ = ["Inputs", "Layers"]

#: Reads a stored tensor by name.
Read = Callable[[str], Tensor]


class _Stop(Exception):
    """Raised when the first layer is reached."""


@frozen(eq=False)
class Inputs:
    """Input statistics of a linear layer: squares [K, K], sum of x x^T; sizes [K], sum of |x|."""

    squares: Tensor
    sizes: Tensor


@frozen(eq=False)
class Layers:
    """The decoder layers of a model. `name`: path of their list."""

    model: Any
    name: str
    layers: Sequence[Module]
    calls: list[dict[str, Any]] = field(factory=list)

    @classmethod
    def of(cls, folder: Path) -> Layers:
        """Create the model of a folder, without weights. Raises UnsupportedError."""
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            with _without_memory():
                config = AutoConfig.from_pretrained(folder)
                config._attn_implementation = "sdpa"
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        except (ValueError, OSError, ImportError) as error:
            raise UnsupportedError(f"transformers does not make this model: {error}") from error
        lists = [(n, m) for n, m in model.named_modules() if isinstance(m, ModuleList)]
        if not lists:
            raise UnsupportedError("the model has no list of layers: use --method rtn")
        name, layers = max(lists, key=lambda pair: len(pair[1]))
        return cls(model, name, list(layers))

    def begin(self, rows: Sequence[Sequence[int]], read: Read) -> Tensor:
        """Compute the inputs of the first layer: [rows, tokens, hidden] fp32."""
        within = f"{self.name}."
        for name, module in self.model.base_model.named_modules():
            path = f"{self.model.base_model_prefix}.{name}".strip(".")
            if not path.startswith(within):
                _fill(module, path, read)
        arrived: list[Tensor] = []
        holder = self.model.get_submodule(self.name)
        for index in range(len(self.layers)):
            holder[index] = _Recorder(partial(self._arrive, arrived, index))
        try:
            for row in rows:
                self._reach(torch.tensor([row]))
        finally:
            for index, layer in enumerate(self.layers):
                holder[index] = layer
        return torch.cat(arrived)

    def _reach(self, ids: Tensor) -> None:
        try:
            with torch.no_grad():
                self.model.base_model(ids, use_cache=False)
        except _Stop:
            return

    def _arrive(self, arrived: list[Tensor], index: int, hidden: Tensor, **call: Any) -> Tensor:
        if index == 0:
            arrived.append(hidden.detach())
        if len(self.calls) == index:
            self.calls.append(call)
        if index + 1 == len(self.layers):
            raise _Stop
        return hidden

    def fill(self, index: int, read: Read) -> Module:
        """Load a layer's weights in fp32."""
        layer = self.layers[index]
        for name, module in layer.named_modules():
            _fill(module, f"{self.name}.{index}.{name}".rstrip("."), read)
        return layer

    def run(self, index: int, hidden: Tensor) -> Tensor:
        """Run all rows through a layer: [rows, tokens, hidden]."""
        layer, call = self.layers[index], self.calls[index]
        out = torch.empty_like(hidden)
        with torch.no_grad():
            for row, state in enumerate(hidden):
                output = layer(state[None], **call)
                out[row] = (output[0] if isinstance(output, tuple) else output)[0]
        return out

    def watch(self, index: int, hidden: Tensor, names: Sequence[str]) -> dict[str, Inputs]:
        """Collect input statistics of linear layers; layers with equal inputs share them."""
        watched: dict[str, Inputs] = {}
        first: dict[int, str] = {}
        alike: dict[str, str] = {}

        def see(name: str, module: Module, arguments: tuple[Tensor, ...]) -> None:
            x = arguments[0]
            leader = alike.setdefault(name, first.setdefault(x.data_ptr(), name))
            if leader == name:
                rows = x.detach().reshape(-1, x.shape[-1])
                size = rows.shape[1]
                statistics = watched.get(name) or Inputs(torch.zeros(size, size), torch.zeros(size))
                statistics.squares.addmm_(rows.T, rows)
                statistics.sizes.add_(rows.abs().sum(0))
                watched[name] = statistics
            references.append(x)  # kept alive, so that no other tensor gets the same id

        references: list[Tensor] = []
        modules = dict(self.layers[index].named_modules())
        for name in names:
            if not isinstance(modules.get(name), Linear):
                raise UnsupportedError(
                    f"{self.name}.{index}.{name} is not a separate linear layer in transformers: "
                    "use --method rtn"
                )
        hooks = [modules[n].register_forward_pre_hook(partial(see, n)) for n in names]
        try:
            for state in hidden:
                self.run(index, state[None])
                first.clear()
                references.clear()
        finally:
            for hook in hooks:
                hook.remove()
        silent = [name for name in names if name not in alike]
        if silent:
            raise UnsupportedError(
                f"{silent[0]} got no calibration tokens: use more text, or --method rtn"
            )
        return {name: watched[alike[name]] for name in names}

    def release(self, index: int) -> None:
        """Release a layer's weights."""
        for module in self.layers[index].modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    module._parameters[name] = Parameter(parameter.to("meta"), requires_grad=False)


class _Recorder(Module):
    """A placeholder for a released layer."""

    def __init__(self, arrive: Callable[..., Tensor]) -> None:
        super().__init__()
        self.arrive = arrive
        self.attention_type = "full_attention"

    def forward(self, hidden_states: Tensor, **call: Any) -> Tensor:
        return self.arrive(hidden_states, **call)


def _fill(module: Module, path: str, read: Read) -> None:
    """Load a module's own parameters. Raises UnsupportedError if they are not stored."""
    for name, parameter in list(module._parameters.items()):
        if parameter is None:
            continue
        try:
            tensor = read(f"{path}.{name}")
        except KeyError:
            raise UnsupportedError(
                f"transformers has {path}.{name}, the checkpoint does not: use --method rtn"
            ) from None
        if tensor.shape != parameter.shape:
            raise UnsupportedError(
                f"{path}.{name} is {list(tensor.shape)}, not {list(parameter.shape)}"
            )
        module._parameters[name] = Parameter(tensor.float(), requires_grad=False)


@contextmanager
def _without_memory() -> Iterator[None]:
    """Create parameters on the meta device; buffers are allocated."""
    register: Any = Module.register_parameter

    def without(module: Module, name: str, parameter: Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    patched: Mapping[str, Any] = {"register_parameter": without}
    for name, value in patched.items():
        setattr(Module, name, value)
    try:
        yield
    finally:
        Module.register_parameter = register  # type: ignore[method-assign]
