"""Every key of every family's config.json, changed and left out: as in transformers, or refused.

The keys are those of transformers' configuration classes and of ours; values come from their
types. Weights are drawn from the names of the parameters, so that two models share what both have.
One test is one architecture, since making its first model is what takes time. `--everything` tries
all keys, `make test` those of `sampled`.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from samples import parametrize_sample

from modulm.errors import ModulmError
from modulm.nn import read_config
from modulm.nn.config import model_keys
from modulm.plugins import manager
from modulm.testing.session import Session

ROOT = Path(__file__).resolve().parents[3]

VOCABULARY = 64
TOKENS = [5, 17, 33, 9, 41, 2, 8, 50, 12, 40, 33, 33, 21, 60, 3, 7, 19, 44, 28, 11]
TOLERANCE = 1e-4

#: Keys that no arithmetic of inference reads, and those that say what a file is.
APART = frozenset(
    {
        "architectures",
        "model_type",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "vocab_size",
        "use_cache",
        "initializer_range",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "chunk_size_feed_forward",
        "output_hidden_states",
        "return_dict",
        "id2label",
        "label2id",
        "problem_type",
        "rope_parameters",
        "rope_scaling",
        "layer_types",
    }
)
#: transformers' eager code adds alibi twice.
REFERENCE = {"FalconForCausalLM": "sdpa"}
#: Buffers that a trained model has.
_TRAINED = ("e_score_correction_bias", "expert_bias")
_ACTIVATIONS = ("relu", "gelu", "silu", "gelu_pytorch_tanh", "relu2", "gelu_new")
_WORDS = {
    "scoring_func": ("softmax", "sigmoid"),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "classifier_pooling": ("cls", "mean"),
    "position_embedding_type": ("rope", "nope", "absolute", "relative_key"),
    "norm_type": ("low_precision_layernorm", "rmsnorm"),
}
#: Keys that bound how long a text can be; ours is not tried beyond the bound.
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
#: A key that counts only with another one.
_WITH = {
    "sliding_window": {"use_sliding_window": True},
    "layer_types": {"sliding_window": 8},
}


class Illegal(Exception):
    """transformers makes no model of such a file, or one without finite numbers."""


@cache
def family(architecture: str) -> SimpleNamespace:
    """The classes of an architecture, its tiny config.json and its numbers."""
    driver = manager.current().load("models", architecture)
    table = {**driver.tiny(), "vocab_size": VOCABULARY, "pad_token_id": 0}
    case = SimpleNamespace(
        name=architecture,
        model=getattr(transformers, architecture),
        config=getattr(transformers, architecture).config_class,
        driver=driver,
        table=table,
    )
    case.resolved, _, case.logits = reference(case, table)
    case.settings = settings(case, table)
    package = driver.config_type.__module__.partition(".")[0]
    case.unknown = model_keys(package)[table["model_type"]]["unknown"]
    return case


def settings(case: SimpleNamespace, table: Mapping[str, Any]) -> Any:
    """config.json as modulm reads it."""
    return read_config(table, case.driver.config_type)


def reference(case: SimpleNamespace, table: Mapping[str, Any]) -> tuple[Any, Any, torch.Tensor]:
    """What transformers makes of config.json: its configuration, the model, its numbers.

    Raises Illegal.
    """
    from transformers.initialization import no_init_weights

    try:
        config = case.config.from_dict(json.loads(json.dumps(table)))
        with no_init_weights():
            attention = REFERENCE.get(case.name, "eager")
            model = case.model._from_config(
                config, dtype=torch.float32, attn_implementation=attention
            )
        model.float().tie_weights()
        _draw(model.eval())
        with torch.inference_mode():
            output = model(torch.tensor([TOKENS]))
        numbers = (output.logits if "logits" in output else output.last_hidden_state)[0].float()
    except Exception as error:
        raise Illegal(str(error)) from error
    if not numbers.isfinite().all():
        raise Illegal("not finite")
    return config, model, numbers


@cache
def _numbers(name: str, count: int) -> torch.Tensor:
    drawn = np.random.default_rng(zlib.crc32(name.encode()))
    return torch.from_numpy(drawn.standard_normal(count, dtype=np.float32))


@torch.no_grad()
def _draw(model: torch.nn.Module) -> None:
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    buffers = [(n, b) for n, b in model.named_buffers() if n.endswith(_TRAINED)]
    for name, tensor in [*model.named_parameters(), *buffers]:
        values = _numbers(name, tensor.numel()).view(tensor.shape)
        if tensor.dim() < 2:
            tensor.copy_(
                0.2 * values if "bias" in name or name.endswith("A_log") else 1 + 0.2 * values
            )
        else:
            tensor.copy_(values if id(tensor) in tables else values * tensor.shape[-1] ** -0.5)


def ours(case: SimpleNamespace, table: Mapping[str, Any], model: Any, folder: Path) -> torch.Tensor:
    """What modulm makes of the same file and weights. Raises ModulmError."""
    for file in folder.iterdir():
        file.unlink()
    model.save_pretrained(folder)
    if case.name in _MENDED:
        _MENDED[case.name](folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(table))
    session = Session(
        folder, device="cpu", dtype="float32", attention_backend="sdpa", kernels=["none"], rows=1
    )
    hidden = session.hidden({0: TOKENS})[0]
    with torch.inference_mode():
        if not {"generate", "token_classify", "classify"} & set(session.model.tasks):
            return hidden.float()
        if "classify" in session.model.tasks:
            pooled = {"CLS": hidden[:1], "LAST": hidden[-1:], "MEAN": hidden.mean(0, keepdim=True)}
            return session.model.logits(pooled[session.model.pooling]).float()[0]
        return session.model.logits(hidden).float()


def _recut_convolutions(file: Path) -> None:
    """transformers saves one convolution in thirds, whatever q, k and v have; files are not so."""
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("q_conv1d.weight")]:
        at = name.removesuffix("q_conv1d.weight")
        names = [f"{at}{n}_conv1d.weight" for n in "qkv"]
        sizes = [len(tensors[f"{at}{n}_proj.weight"]) for n in "qkv"]
        cut = torch.cat([tensors[n] for n in names]).split(sizes)
        tensors |= {n: part.contiguous() for n, part in zip(names, cut, strict=True)}
    save_file(tensors, file, metadata={"format": "pt"})


_MENDED = {"OlmoHybridForCausalLM": _recut_convolutions}


def check(case: SimpleNamespace, key: str, table: Mapping[str, Any], folder: Path) -> str | None:
    """What is wrong with modulm's numbers for a file that is legal in transformers, or nothing.

    Allowed are transformers' numbers, or a refusal that names the key. Raises Illegal.
    """
    _, model, expected = reference(case, table)
    try:
        read = settings(case, table)
        same = expected.shape == case.logits.shape and torch.allclose(
            expected, case.logits, rtol=0, atol=1e-5 * max(1.0, expected.abs().max().item())
        )
        if read == case.settings:
            return None if same else "is not read, and counts"
        logits_ = ours(case, table, model, folder)
    except ModulmError as error:
        mine = {field.name for field in attrs.fields(case.driver.config_type)}
        names_key = any(
            f"{k}:" in str(error) or f"'{k}'" in str(error) for k in {key, *mine, *table}
        )
        return None if names_key else f"refused without its name: {error}"
    if logits_.shape != expected.shape:
        return f"{tuple(logits_.shape)} numbers, not {tuple(expected.shape)}"
    worst = (logits_ - expected).abs().max().item()
    bound = TOLERANCE * max(1.0, expected.abs().max().item())
    return None if worst <= bound else f"other numbers: {worst:.2g} apart"


def keys(case: SimpleNamespace) -> list[str]:
    """Every key that transformers or modulm knows for the architecture, but those set apart."""
    aliases: Mapping[str, str] = getattr(case.driver.config_type, "ALIASES", {})
    theirs = {field.name for field in fields(case.config)}
    mine = {field.name for field in attrs.fields(case.driver.config_type)} - set(aliases.values())
    all_keys = theirs | mine | set(case.table)
    return sorted(k for k in all_keys if k not in APART and "dropout" not in k and "pdrop" not in k)


def changes(case: SimpleNamespace, key: str) -> Iterator[Mapping[str, Any]]:
    """Files in which a key has another value, likely ones first."""
    for value in values(case, key):
        table = {**case.table, key: value}
        extra = _WITH.get(key, {})
        yield table
        if extra and not extra.items() <= case.table.items():
            yield {**table, **extra}


def left_out(case: SimpleNamespace, key: str, folder: Path) -> str | None:
    """What is wrong where a file leaves the key out, or nothing. Raises Illegal.

    Sizes are compared as they are read, since models of the default sizes are no tiny ones.
    """
    table = {k: v for k, v in case.table.items() if k != key}
    try:
        default = getattr(case.config.from_dict(json.loads(json.dumps(table))), key, None)
    except Exception as error:
        raise Illegal(str(error)) from error
    if not isinstance(default, int) or (default < 1000 and "layer" not in key):
        return check(case, key, table, folder)
    one, other = (_read(case, variant) for variant in (table, {**table, key: default}))
    return None if one == other else f"is {default} in transformers"


def _read(case: SimpleNamespace, table: Mapping[str, Any]) -> Any:
    try:
        return settings(case, table)
    except ModulmError as error:
        return str(error)


def values(case: SimpleNamespace, key: str) -> list[Any]:
    """Values that a key may take, other than the one it has."""
    kind = next((str(f.type) for f in fields(case.config) if f.name == key), "")
    mine = {f.name: f for f in attrs.fields(case.driver.config_type)}
    if not kind and key in mine:
        kind = str(mine[key].type)
    try:
        now = case.table.get(key, getattr(case.resolved, key, None))
    except Exception:  # layers that differ have no common value
        now = case.table.get(key)
    none = [None] if now is not None and "None" in kind else []
    if key in _WORDS:
        return [word for word in _WORDS[key] if word != now] + none
    if isinstance(now, bool) or (now is None and "bool" in kind):
        return [not now, *none]
    if isinstance(now, int) or (
        now is None and "int" in kind and "list" not in kind and "tuple" not in kind
    ):
        now = now or 0
        tried = [2 * now or 8, now + 1, max(now // 2, 1), max(now - 1, 0), 0]
        least = len(TOKENS) if key in _LENGTHS else 0
        return [*none, *dict.fromkeys(v for v in tried if v != now and v >= least)]
    if isinstance(now, float) or (
        now is None and "float" in kind and "list" not in kind and "tuple" not in kind
    ):
        return [*none, *(v for v in ((now or 1.0) * 1.5, (now or 1.0) * 0.5))]
    if isinstance(now, str) or (now is None and "str" in kind):
        return [a for a in _ACTIVATIONS if a != now] + none if "act" in key else none
    if isinstance(now, list | tuple):
        items = list(now)
        turned = [items[::-1], items[1:] + items[:1], items[:1] * len(items), [0], []]
        return [v for v in turned if v != items] + none
    if now is None and ("list" in kind or "tuple" in kind):
        return [[0], [1], [1, 2]]
    return none


#: Architectures that differ in their heads only are tried once, as what transformers reads is one.
BARE = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
#: Models around others read those tables as transformers does (test_images.py).
#: Those that speak have vocabularies of codes (test_csm.py).
AROUND = {d.name for kind in ("media_families", "speakers") for d in manager.current().names(kind)}
#: Asked by name: `hasattr` would import each model's module in every process that collects tests.
PUBLIC = frozenset({*vars(transformers), *transformers.__all__})
ARCHITECTURES = [
    declared.name
    for declared in manager.current().names("models")
    if declared.name in PUBLIC and not declared.name.endswith(BARE) and declared.name not in AROUND
]
#: Where modulm gives other numbers, or refuses in other words, and why that is right.
RIGHT = {
    "HYV3ForCausalLM.first_k_dense_replace": "Tencent's own files have it; transformers has a list",
    "Gemma3TextModel.sliding_window": "transformers halves it as it reads the file, also a default",
    "Glm4MoeLiteForCausalLM.head_dim": "another name of qk_rope_head_dim: the file contradicts it",
    "HrmTextForCausalLM.num_hidden_layers": "runs of all layers, which num_layers_per_stack gives",
    "MiMoV2FlashForCausalLM.rope_theta": "Xiaomi's files have it; transformers' class has tables",
    "MptForCausalLM.expansion_ratio": "transformers' class has 4 whatever the file says",
    "MiniMaxForCausalLM.rotary_dim": "MiniMax's own files have it, and its own code obeys",
    "Phi3ForCausalLM.max_position_embeddings": "one set of factors for all keys of a cache",
    "PhimoeForCausalLM.max_position_embeddings": "one set of factors for all keys of a cache",
}


@pytest.fixture(autouse=True)
def quiet():
    transformers.utils.logging.disable_progress_bar()
    level = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    yield
    transformers.utils.logging.set_verbosity(level)


def sampled(case: SimpleNamespace, key: str) -> bool:
    """Whether `make test` tries the key: a third of those that are the architecture's own, and a
    twentieth of those that it shares with others, different ones for each architecture.
    """
    inherited = {f.name for f in attrs.fields(case.driver.config_type) if f.inherited}
    shared = inherited | {f.name for f in fields(transformers.PreTrainedConfig)}
    return zlib.crc32(f"{case.name}.{key}".encode()) % (20 if key in shared else 3) == 0


@parametrize_sample("architecture", ARCHITECTURES, every=45)
def test_every_key_gives_transformers_numbers_or_is_refused_by_name(
    architecture, tmp_path, pytestconfig
):
    everything = pytestconfig.getoption("everything")
    case = family(architecture)
    _, model, expected = reference(case, case.table)
    assert ours(case, case.table, model, tmp_path).allclose(expected, rtol=1e-4, atol=1e-4)
    wrong, tried = [], 0
    for key in keys(case):
        if f"{architecture}.{key}" in RIGHT or not (everything or sampled(case, key)):
            continue
        legal = 0
        if key in case.table:
            try:
                wrong += (
                    [f"{key} left out: {problem}"]
                    if (problem := left_out(case, key, tmp_path))
                    else []
                )
                tried += 1
            except Illegal:
                pass
        for table in changes(case, key):
            try:
                problem = check(case, key, table, tmp_path)
            except Illegal:
                continue
            wrong += [f"{key} = {table[key]!r}: {problem}"] if problem else []
            tried, legal = tried + 1, legal + 1
            if type(table[key]) in (int, float) or legal == 2 or key in case.unknown:
                break
    assert not wrong, "\n".join(wrong)
    assert tried > 10 or not everything, f"only {tried} files were legal"


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tool_keys", ROOT / "tools/model_keys.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.exhaustive
def test_keys_json_is_what_transformers_says() -> None:
    """To the letter, and no other package has one. Where this fails: tools/model_keys.py"""
    tables = tool().tables()
    texts = {file: file.read_text(encoding="utf-8") for file in tables}
    assert texts == {file: tool().encode(table) for file, table in tables.items()}
    assert set(tables) == set((ROOT / "plugins/models").glob("*/*/keys.json"))


def test_entries_of_some_models_are_what_transformers_says() -> None:
    names = ("ParakeetForCTC", "Qwen2_5OmniForConditionalGeneration", "Qwen3ForCausalLM")
    tables = tool().tables(names)
    assert len(tables) == 2
    for file, table in tables.items():
        stored = json.loads(file.read_text(encoding="utf-8"))
        assert {kind: stored.get(kind) for kind in table} == table
