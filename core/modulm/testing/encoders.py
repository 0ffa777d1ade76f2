"""The contract kit for encoders: hidden states and classes are compared with transformers, or with
the oracle that the driver names (`modulm.testing.oracles.EncoderOracle`).

A tiny random checkpoint runs over rows of different lengths, together and one by one, in fp32.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file

from modulm.contracts.model import Model
from modulm.testing.checkpoints import save_tiny, tiny_model
from modulm.testing.offering import architecture_of, offering
from modulm.testing.oracles import oracle_of, write_tiny
from modulm.testing.session import Session

__all__ = ["check_encoder"]

TOLERANCE = 1e-4
_LENGTHS = (37, 5, 1, 5)

#: Token ids -> hidden states [tokens, hidden], and the classes [n, classes] if the model has them.
_Reference: TypeAlias = Callable[[list[int]], tuple[torch.Tensor, torch.Tensor | None]]


def check_encoder(driver: type[Model], **flags: Any) -> None:
    """Run the kit; `flags` go to the engine's configuration. Raises AssertionError."""
    with tempfile.TemporaryDirectory() as name, offering(driver):
        folder = Path(name) / "whole"
        reference = _reference_of(driver, folder)
        settings = {"device": "cpu", "dtype": "float32", **flags}
        session = Session(folder, **settings)
        assert session.model.caches == (), "an encoder must not cache anything between steps"
        rng = random.Random(1)
        vocabulary = session.loaded.vocabulary
        rows = {r: [rng.randrange(3, vocabulary) for _ in range(n)] for r, n in enumerate(_LENGTHS)}
        hidden = session.hidden(rows)
        for row, tokens in rows.items():
            with torch.inference_mode():
                expected, classes = reference(tokens)
            _compare(hidden[row], expected, f"hidden states of {len(tokens)} tokens, the reference")
            session.release(row)
            _compare(session.hidden({row: tokens})[row], expected, "a row by itself")
            if classes is not None:
                _compare(_classes(session.model, hidden[row]), classes, "classes, the reference")


def _reference_of(driver: type[Model], folder: Path) -> _Reference:
    """Write the driver's tiny checkpoint; return what computes its states and classes."""
    oracle: Any = oracle_of(driver)
    if oracle is None:
        model = tiny_model(architecture_of(driver), attn_implementation="eager")
        save_tiny(model, folder)
        return partial(_of_transformers, model)
    write_tiny(driver, oracle, folder)
    config = json.loads((folder / "config.json").read_text())
    return partial(oracle.outputs, config, load_file(folder / "model.safetensors"))


def _classes(model: Model, hidden: torch.Tensor) -> torch.Tensor:
    """Return [n, classes]; n is 1, or the number of tokens if each has classes."""
    if "classify" in model.tasks:
        pooled = {"CLS": hidden[:1], "LAST": hidden[-1:], "MEAN": hidden.mean(0, keepdim=True)}
        hidden = pooled[model.pooling]
    with torch.inference_mode():
        return model.logits(hidden)


def _of_transformers(model: Any, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
    output = model(torch.tensor([tokens]), output_hidden_states=True)
    if "last_hidden_state" in output:
        return output.last_hidden_state[0], None
    states = model.base_model(torch.tensor([tokens])).last_hidden_state[0]
    return states, output.logits.reshape(-1, output.logits.shape[-1])


def _compare(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert actual.shape == expected.shape, f"{what}: {actual.shape}, not {expected.shape}"
    worst = (actual - expected).abs().max().item()
    assert worst <= TOLERANCE, f"{what}: differ by {worst:.2g} > {TOLERANCE}"
