"""Test oracles for families that only rename or rearrange the weights of a transformers model.

class AsLlama(Converted):  # in modulm_foo/oracle.py, which serving does not import
    def settings(self, config):  # the config.json for transformers' class
        return {"model_type": "llama", **config, "num_hidden_layers": config["num_layers"]}

    def store(self, config, weights):  # the weights as the family's files have them
        ...
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Converted", "rotary", "split_experts", "stack_heads"]


class Converted(ABC):
    """A transformers model with the same mathematics (`modulm.testing.oracles.Oracle`)."""

    @abstractmethod
    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the config.json of the transformers model, including `model_type`."""

    @abstractmethod
    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Return transformers' weights under the family's names: rearranged, not computed."""

    def renamed(
        self, weights: Mapping[str, Tensor], names: Mapping[str, str]
    ) -> Mapping[str, Tensor]:
        """Return the weights with parts of their names replaced, in order."""
        stored = {}
        for name, tensor in weights.items():
            for theirs, own in names.items():
                name = name.replace(theirs, own)  # noqa: PLW2901
            stored[name] = tensor
        return stored

    def weights(self, config: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Create random weights with about unit gain per layer."""
        from modulm.testing.checkpoints import _randomise

        model = self._model(config)
        with torch.no_grad():
            _randomise(model)
        stored = self.store(config, model.state_dict())
        return {name: tensor.contiguous().clone() for name, tensor in stored.items()}

    def logits(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor], tokens: Sequence[int]
    ) -> Tensor:
        """Compute logits: [tokens, vocabulary] fp32."""
        model = self._model(config)
        self._read(config, model, weights)
        logits: Tensor = model(torch.tensor([list(tokens)])).logits[0]
        return logits

    def _read(self, config: Mapping[str, Any], model: Any, weights: Mapping[str, Tensor]) -> None:
        """Load the weights. Stores consecutive numbers first to find where each element belongs."""
        state, first, places = model.state_dict(), 0, {}
        for name, tensor in state.items():
            places[name] = torch.arange(first, first + tensor.numel()).view(tensor.shape)
            first += tensor.numel()
        numbers = torch.zeros(first)
        for name, where in self.store(config, places).items():
            numbers[where.flatten()] = weights[name].float().flatten()
        sizes = [tensor.numel() for tensor in state.values()]
        parts = zip(state.items(), torch.split(numbers, sizes), strict=True)
        model.load_state_dict({name: part.view(tensor.shape) for (name, tensor), part in parts})

    def _model(self, config: Mapping[str, Any]) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        settings = dict(self.settings(config))
        theirs = AutoConfig.for_model(settings.pop("model_type"), **settings)
        model: Any = AutoModelForCausalLM.from_config(
            theirs, dtype=torch.float32, attn_implementation="eager"
        )
        return model.eval()


def rotary(config: Mapping[str, Any], theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    """Return transformers' `rope_parameters` for either spelling of the keys of config.json.

    theta: the base that a file has by default. more: further defaults.
    """
    table = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    table.setdefault("rope_type", table.pop("type", "default"))
    return {"rope_theta": config.get("rope_theta", theta), **more, **table}


def stack_heads(q: Tensor, k: Tensor, v: Tensor, kv_heads: int) -> Tensor:
    """Stack q, k and v by key head: its query heads, the key head, its value head."""
    grouped = [part.reshape(kv_heads, -1, *part.shape[1:]) for part in (q, k, v)]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def split_experts(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with those of stacked experts as one layer each."""
    stored = dict(weights)
    for name, stack in weights.items():
        at = name.rpartition(".")[0]
        if name.endswith("experts.gate_up_proj"):
            del stored[name]
            for expert, both in enumerate(stack):
                gate, up = both.chunk(2)
                stored[f"{at}.{expert}.gate_proj.weight"] = gate
                stored[f"{at}.{expert}.up_proj.weight"] = up
        elif name.endswith("experts.down_proj"):
            del stored[name]
            for expert, down in enumerate(stack):
                stored[f"{at}.{expert}.down_proj.weight"] = down
    return stored
