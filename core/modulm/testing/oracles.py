"""Oracles: reference implementations for the model kit, if transformers has no such model.

    class Mine:  # in modulm_foo/oracle.py, which serving does not import
        def weights(self, config): ...  # name in the checkpoint -> random fp32 tensor
        def logits(self, config, weights, tokens): ...  # [tokens, vocabulary] in fp32

    class FooForCausalLM(DecoderForCausalLM):
        oracle = "modulm_foo.oracle:Mine"

`kit.check("models", FooForCausalLM)` and `modulm plugins doctor` use it; `check_model(driver,
oracle=Mine())` takes an instance.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors.torch import load_file, save_file

from modulm.testing.checkpoints import make_tokenizer, split

if TYPE_CHECKING:
    from modulm.contracts.model import Model

__all__ = ["EncoderOracle", "Oracle", "logprobs_of", "oracle_of", "write_tiny"]

_VOCABULARY = 512


class Oracle(Protocol):
    """An implementation of the model that shares no code with the driver: plain and complete."""

    def weights(self, config: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        """Return random fp32 weights for the driver's `tiny()`, by their names in a checkpoint.

        Norms and biases must be random, too; a norm of ones does not show that it is missing.
        """
        ...

    def logits(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, torch.Tensor],
        tokens: Sequence[int],
    ) -> torch.Tensor:
        """Return the logits of every position of one sequence, [tokens, vocabulary] in fp32."""
        ...


class EncoderOracle(Protocol):
    """An implementation of a model of vectors or classes that shares no code with the driver."""

    def weights(self, config: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        """Return random fp32 weights, as in `Oracle`."""
        ...

    def outputs(
        self, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], tokens: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the hidden states of one text, [tokens, hidden], and its classes [n, classes]: one
        row, or one per token if tokens are classified; None without classes.
        """
        ...


def oracle_of(driver: type[Model]) -> Oracle | None:
    """Create the oracle that a driver names; None if transformers is the oracle."""
    if not driver.oracle:
        return None
    module, _, name = driver.oracle.partition(":")
    oracle: Oracle = getattr(import_module(module), name)()
    return oracle


def write_tiny(
    driver: type[Model], oracle: Oracle, folder: Path, *, dtype: str = "float32", shards: int = 1
) -> Path:
    """Write a checkpoint of the driver's `tiny()` with the oracle's weights."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = {"bos_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}
    config = {"vocab_size": _VOCABULARY, **ids, **driver.tiny(), "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = oracle.weights(config)
    stored = {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    if shards > 1:
        split(folder, shards)
    make_tokenizer(folder, vocab=config["vocab_size"])
    return folder


def logprobs_of(oracle: Oracle, folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Return the oracle's log probabilities [tokens, vocabulary] with the stored weights."""
    config = json.loads((folder / "config.json").read_text())
    weights = {
        name: tensor.float()
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    with torch.inference_mode():
        return oracle.logits(config, weights, tokens).float().log_softmax(-1)
