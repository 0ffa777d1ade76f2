"""The contract kit for poolers.

from modulm.testing.poolers import check_pooler

def test_contract():
    check_pooler(MyPooler)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from modulm.config import EngineConfig
from modulm.contracts.pooler import Pooler, PoolingInputs, PoolingJob, RowPooler
from modulm.contracts.pooling import PoolingRecipe, TextRules
from modulm.contracts.sampling import PoolingParams
from modulm.contracts.tokenizer import Codec, Tokenizer
from modulm.errors import ConfigError, RequestError
from modulm.testing.kit import KitNotRun

__all__ = ["check_pooler"]

_HIDDEN = 6
_TOKENS = 7
_NAME = "KitForCausalLM"
#: The special token of the kit's tokenizer.
_START = 256
_PER_TOKEN = ("token_embed", "token_classify", "reward")


def check_pooler(driver: type[Pooler]) -> None:
    """Run the kit: tasks, settings, both halves of the pooler, without a model.

    Raises AssertionError with what was expected, KitNotRun if it embeds no plain decoder.
    """
    loaded = vars(sys.modules[driver.__module__]).values()
    modules = {each.__name__ for each in loaded if isinstance(each, ModuleType)}
    assert "torch" not in modules, f"{driver.__module__} imports torch; front ends have none"
    pooler = driver()
    pooling = EngineConfig.from_keywords(model="x", runner="pooling")
    generating = EngineConfig.from_keywords(model="x", runner="generate", convert="none")
    recipe = PoolingRecipe()
    left = pooler.conversion(generating, [_NAME], {_NAME}, recipe)
    assert left is None, f"conversion() gave {left!r} for a model that is to generate"
    conversion = pooler.conversion(pooling, [_NAME], {_NAME}, recipe)
    if conversion is None:
        raise KitNotRun("it converts no decoder, so that the kit has no model for it")
    assert conversion[0] == _NAME, f"conversion() gave the architecture {conversion[0]!r}"
    config = {"architectures": [_NAME], "hidden_size": _HIDDEN}
    variant: Any = pooler.convert(_Decoder, conversion[1], config, {})  # type: ignore[arg-type]
    assert issubclass(variant, _Decoder), "convert() gave no variant of the driver"
    assert "generate" not in variant.tasks, "convert() gave a model that still generates"
    checkpoint: Any = SimpleNamespace(config=config, architecture=_NAME, path=Path())
    tasks = pooler.tasks(checkpoint, variant, {})
    named = isinstance(tasks, tuple) and tasks and all(isinstance(task, str) for task in tasks)
    assert named, f"tasks() gave {tasks!r}, not a tuple of names"
    _refuses(lambda: pooler.tasks(checkpoint, variant, {"task": "no_such_task"}), "task")
    settings = pooler.settings(checkpoint, variant, {})
    given = pooler.settings(checkpoint, variant, {"no_such_key": 1})
    assert given.get("no_such_key") == 1, "settings() drops a setting that was given"
    try:
        json.dumps(settings)
    except TypeError as error:
        raise AssertionError(f"settings() gave values that cannot be sent: {error}") from error
    _refuses(lambda: pooler.rows(given, _head, ()), "no_such_key")
    for task in tasks:
        if task != "score":
            _check_rows(lambda: pooler.rows(settings, _head, ()), task)
    _check_layers(pooler, settings, tasks)
    _check_inputs(pooler, tasks)


class _Decoder:
    """What poolers ask of a model."""

    tasks: tuple[str, ...] = ("generate",)
    pooling = "LAST"
    media: tuple[str, ...] = ()
    media_family = ""
    pooler = ""


def _head(hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Logits of two classes."""
    return torch.stack([hidden.sum(-1), hidden[:, 0]], -1)


def _refuses(call: Callable[[], object], key: str) -> None:
    try:
        call()
    except ConfigError as error:
        if key not in str(error):
            raise AssertionError(f"the ConfigError does not name {key}: {error}") from error
        return
    raise AssertionError(f"the setting {key} is not refused with a ConfigError")


def _hidden(seed: int, tokens: int = _TOKENS) -> torch.Tensor:
    return torch.randn(tokens, _HIDDEN, generator=torch.Generator().manual_seed(seed))


def _pooled(rows: RowPooler, row: int, task: str, chunks: Sequence[torch.Tensor]) -> np.ndarray:
    prompt = np.arange(sum(map(len, chunks)), dtype=np.int64)
    rows.admit(row, PoolingParams(task=task), prompt)
    for chunk in chunks:
        rows.feed(row, chunk)
    (result,) = rows.finish([row]).values()
    rows.release(row)
    return result


def _check_rows(make: Callable[[], RowPooler], task: str) -> None:
    rows = make()
    assert isinstance(rows, RowPooler), f"rows() gave {rows!r}, not a RowPooler"
    rows.release(5)
    assert rows.finish([]) == {}, "finish() of no rows gave results"
    first, second = _hidden(1), _hidden(2)
    before = first.clone()
    whole = _pooled(rows, 0, task, [first])
    assert torch.equal(first, before), f"{task}: feed() changes the hidden states"
    assert isinstance(whole, np.ndarray), f"{task}: finish() gave {type(whole).__name__}"
    assert whole.dtype == np.float32, f"{task}: finish() gave {whole.dtype}, not float32"
    assert np.isfinite(whole).all(), f"{task}: the result is not finite"
    wanted = 2 if task in _PER_TOKEN else 1
    assert whole.ndim == wanted, f"{task}: finish() gave shape {whole.shape}"
    if task == "embed":
        width = rows.width(first[:1])
        assert whole.shape == (width,), f"width() is {width}, and vectors have {whole.shape}"
    apart = _pooled(make(), 0, task, [first[:3], first[3:4], first[4:]])
    assert np.array_equal(apart, whole), f"{task}: a prompt in several steps gives another result"
    following = _pooled(rows, 0, task, [second]), _pooled(make(), 0, task, [second])
    assert np.array_equal(*following), f"{task}: the next request of a row gives another result"
    prompt = np.arange(_TOKENS, dtype=np.int64)
    for row in (3, 4):
        rows.admit(row, PoolingParams(task=task), prompt)
    rows.feed(4, second)
    rows.feed(3, first)
    both = rows.finish([4, 3])
    assert set(both) == {3, 4}, f"{task}: finish() gave the rows {sorted(both)}, not 3 and 4"
    assert np.array_equal(both[3], whole), f"{task}: a row's result depends on other rows"
    assert not np.array_equal(both[4], whole), f"{task}: two prompts have one result"


def _check_layers(pooler: Pooler, settings: Mapping[str, Any], tasks: Sequence[str]) -> None:
    """Check that layers of the checkpoint are applied to embeddings."""
    if "embed" not in tasks:
        return
    rows = pooler.rows(settings, _head, (lambda vector: vector[:, :3] * 2,))
    assert rows.width(_hidden(1)[:1]) == 3, "width() leaves out the layers of the checkpoint"
    result = _pooled(rows, 0, "embed", [_hidden(1)])
    assert result.shape == (3,), "the layers of the checkpoint are not applied"


class _Bytes(Codec):
    """The bytes of a text, after a special token."""

    def encode(self, text: str, special: bool) -> list[int]:
        return [_START] * special + list(text.encode())

    def fit(
        self, texts: Sequence[str], special: bool, limit: int | None, side: str
    ) -> tuple[list[int], list[int]]:
        ids = self.encode("".join(texts), special)[:limit]
        return ids, [0] * len(ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return bytes(index for index in ids if index < _START).decode(errors="replace")

    def token(self, index: int) -> str | None:
        return "<s>" if index == _START else None

    def index(self, token: str) -> int | None:
        return _START if token == "<s>" else None

    def size(self) -> int:
        return _START + 1

    def special_ids(self) -> frozenset[int]:
        return frozenset({_START})


def _check_inputs(pooler: Pooler, tasks: tuple[str, ...]) -> None:
    config = EngineConfig.from_keywords(model="x", runner="pooling")
    info: Any = SimpleNamespace(config=config, texts=TextRules(), max_model_len=64, tasks=tasks)
    tokenizer = Tokenizer(_Bytes(), {"bos_token": "<s>"}, (), None, "kit", lambda: None)
    inputs = pooler.inputs(info, tokenizer)
    assert isinstance(inputs, PoolingInputs), f"inputs() gave {inputs!r}"
    params = PoolingParams(task=tasks[0])
    ids, read = inputs.read("two words", params)
    assert isinstance(read, PoolingParams), f"read() gave {read!r}, not PoolingParams"
    assert list(ids) == list(tokenizer.encode("two words", True)), "read() gave other tokens"
    _check_job(inputs.job(ids, params), 1)
    try:
        job = inputs.pairs(["a"], ["b"], params)
    except RequestError:
        pass
    else:
        assert isinstance(job, PoolingJob), f"pairs() gave {job!r}, not a PoolingJob"
    try:
        missing = pooler.inputs(info, None).tokenizer
    except RequestError:
        return
    raise AssertionError(f"without a tokenizer, inputs().tokenizer is {missing!r}")


def _check_job(job: PoolingJob, outputs: int) -> None:
    assert isinstance(job, PoolingJob), f"job() gave {job!r}, not a PoolingJob"
    assert len(job.parts) == outputs, f"job() gave {len(job.parts)} prompts, not {outputs}"
    for prompt, params in job.parts:
        assert prompt, "job() gave an empty prompt"
        assert isinstance(params, PoolingParams), f"job() gave {params!r}, not PoolingParams"
