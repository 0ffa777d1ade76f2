"""Keys of config.json of families that transformers does not have: as in the oracle, or refused.

As test_keys.py, for families whose oracle is another model of transformers with the same
mathematics (`modulm_layers.testing.Converted`). A key that the oracle does not pass on counts as
wrong where it changes our numbers: then the oracle must learn it.
"""

from __future__ import annotations

import json
from functools import cache
from types import SimpleNamespace

import attrs
import pytest
import torch
import transformers
from safetensors.torch import save_file
from tests.plugins.models.test_keys import (
    APART,
    TOKENS,
    TOLERANCE,
    VOCABULARY,
    changes,
)

from modulm.errors import ModulmError
from modulm.nn import read_config
from modulm.plugins import manager
from modulm.testing.oracles import oracle_of
from modulm.testing.session import Session
from modulm_layers.testing import Converted

#: Asked by name: loading each model's module would slow down every process that collects tests.
ARCHITECTURES = ["BailingMoeV2ForCausalLM"]
#: Keys that the base class of decoders reads, and that no code of the family has.
FOREIGN = frozenset({"mlp_bias", "sliding_window"})


@cache
def family(architecture):
    """The classes of an architecture, its tiny config.json and its numbers."""
    driver = manager.current().load("models", architecture)
    oracle = oracle_of(driver)
    if not isinstance(oracle, Converted):
        pytest.skip(f"its oracle is no model of transformers: {type(oracle).__name__}")
    table = {**driver.tiny(), "vocab_size": VOCABULARY, "pad_token_id": 0}
    return SimpleNamespace(
        name=architecture,
        driver=driver,
        oracle=oracle,
        table=table,
        config=transformers.PreTrainedConfig,
        resolved=read_config(table, driver.config_type),
    )


def check(case, key, table, folder):
    """What is wrong with modulm's numbers, or nothing; "illegal" if the oracle has none."""
    try:
        torch.manual_seed(0)
        weights = case.oracle.weights(table)
        with torch.inference_mode():
            expected = case.oracle.logits(table, weights, TOKENS).float()
    except Exception:
        return "illegal"
    if not expected.isfinite().all():
        return "illegal"
    (folder / "config.json").write_text(json.dumps(table))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    try:
        session = Session(
            folder, device="cpu", dtype="float32", attention_backend="sdpa", kernels=["none"],
            rows=1,
        )  # fmt: skip
        hidden = session.hidden({0: TOKENS})[0]
        with torch.inference_mode():
            found = session.model.logits(hidden).float()
    except ModulmError as error:
        mine = {field.name for field in attrs.fields(case.driver.config_type)}
        named = any(f"{k}:" in str(error) or f"'{k}'" in str(error) for k in {key, *mine, *table})
        return None if named else f"refused without its name: {error}"
    worst = (found - expected).abs().max().item()
    bound = TOLERANCE * max(1.0, expected.abs().max().item())
    return None if worst <= bound else f"other numbers: {worst:.2g} apart"


def keys(case):
    """Every key that modulm knows for the architecture, but those set apart."""
    aliases = getattr(case.driver.config_type, "ALIASES", {})
    mine = {field.name for field in attrs.fields(case.driver.config_type)} - set(aliases.values())
    return sorted((mine | set(aliases) | set(case.table)) - APART - FOREIGN)


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_key_gives_the_oracles_numbers_or_is_refused_by_name(architecture, tmp_path):
    case = family(architecture)
    assert check(case, "", case.table, tmp_path) is None
    wrong, tried = [], 0
    for key in keys(case):
        if "dropout" in key:
            continue
        for table in changes(case, key):
            problem = check(case, key, table, tmp_path)
            if problem == "illegal":
                continue
            wrong += [f"{key} = {table[key]!r}: {problem}"] if problem else []
            tried += 1
            break
    assert not wrong, "\n".join(wrong)
    assert tried > 10, f"only {tried} files were legal"
