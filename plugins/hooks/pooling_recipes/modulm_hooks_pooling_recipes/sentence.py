"""Folders of the sentence-transformers library: modules.json and the files that it points to.

https://sbert.net/docs/package_reference/sentence_transformer/modules.html
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from modulm.contracts.pooling import PoolingRecipe, TextRules
from modulm.errors import CheckpointError, UnsupportedError
from modulm_hooks_pooling_recipes.files import read_file, read_object

if TYPE_CHECKING:
    import torch

__all__ = ["SentenceModule", "read_modules", "read_sentence", "read_settings"]

_FILE = "modules.json"
_SETTINGS = "config_sentence_transformers.json"
#: Modules that need no action: the model itself, training aids, and masks the engine applies.
_NOTHING = ("Transformer", "Dropout", "MultiVectorMask", "LogitScore")
_KNOWN = (*_NOTHING, "Pooling", "Dense", "LayerNorm", "Normalize")

#: pooling_mode, and its keys in older files -> the mode of `--pooler-config`, in the order in which
#: several are concatenated.
_MODES = {
    "cls": ("pooling_mode_cls_token", "CLS"),
    "max": ("pooling_mode_max_tokens", "MAX"),
    "mean": ("pooling_mode_mean_tokens", "MEAN"),
    "mean_sqrt_len_tokens": ("pooling_mode_mean_sqrt_len_tokens", "MEAN_SQRT_LEN"),
    "weightedmean": ("pooling_mode_weightedmean_tokens", "WEIGHTED_MEAN"),
    "lasttoken": ("pooling_mode_lasttoken", "LAST"),
}
_ABSURD = 10**9
_SIMILARITIES = {
    "cosine": "cosine",
    "dot": "dot",
    "dot_product": "dot",
    "euclidean": "euclidean",
    "manhattan": "manhattan",
}


@frozen
class SentenceModule:
    """One entry of modules.json: its class without the package, and its folder."""

    kind: str
    folder: Path


def read_modules(folder: Path) -> tuple[SentenceModule, ...]:
    """Return the modules in order; empty without modules.json. Raises CheckpointError."""
    file = folder / _FILE
    if not file.exists():
        return ()
    entries = read_file(file, list)
    if not all(isinstance(entry, dict) and isinstance(entry.get("type"), str) for entry in entries):
        raise CheckpointError(f"{file}: a list of objects with type and path is required")
    return tuple(
        SentenceModule(entry["type"].rpartition(".")[2], folder / str(entry.get("path", "")))
        for entry in entries
    )


def read_sentence(folder: Path, modules: tuple[SentenceModule, ...]) -> PoolingRecipe:
    """Translate the modules after the model to a recipe.

    Without a Pooling module, the token vectors are the result (late interaction). Raises
    CheckpointError, or UnsupportedError for an unknown module or order.
    """
    kinds = [module.kind for module in modules]
    if unknown := [kind for kind in kinds if kind not in _KNOWN]:
        raise UnsupportedError(f"{folder / _FILE}: modules {', '.join(unknown)}: not supported yet")
    if kinds.count("Pooling") > 1 or kinds[0] != "Transformer":
        raise UnsupportedError(f"{folder / _FILE}: modules {', '.join(kinds)}: not supported yet")
    after = [module for module in modules if module.kind not in (*_NOTHING, "Pooling")]
    settings, pools_prompt = _pooling(modules, after)
    if after and after[-1].kind == "Normalize":
        after.pop()
    sentence_settings = read_settings(folder)
    if sentence_settings.get("truncate_dim") is not None:
        settings["dimensions"] = sentence_settings["truncate_dim"]
    limits = _limits(modules[0].folder)
    return PoolingRecipe(
        kind="embed" if "Pooling" in kinds or after else None,
        settings=settings,
        layers=lambda device: tuple(_layers(after, device)),
        max_length=limits.get("max_seq_length") or _tokenizer_limit(modules[0].folder),
        texts=_texts(
            folder / _SETTINGS, sentence_settings, bool(limits.get("do_lower_case")), pools_prompt
        ),
    )


def _pooling(
    modules: tuple[SentenceModule, ...], after: list[SentenceModule]
) -> tuple[dict[str, Any], bool]:
    """Return the pooler's settings, and whether the tokens of a prompt (instruction) are pooled."""
    for module in modules:
        if module.kind == "Pooling":
            table = read_object(module.folder / "config.json")
            normalized = any(other.kind == "Normalize" for other in after[-1:])
            settings = {"pooling_type": _modes(module.folder, table), "normalize": normalized}
            return settings, table.get("include_prompt", True) is not False
    return ({"task": "token_embed"} if after else {}), True


def _modes(folder: Path, table: dict[str, Any]) -> tuple[str, ...]:
    mode = table.get("pooling_mode")
    if mode is None:
        mode = [name for name, (key, _) in _MODES.items() if table.get(key)] or ["mean"]
    names = [mode] if isinstance(mode, str) else list(mode)
    if unknown := [name for name in names if name not in _MODES]:
        raise UnsupportedError(
            f"{folder / 'config.json'}: pooling_mode {', '.join(map(str, unknown))}: not "
            "supported yet; "
            f"known are {', '.join(_MODES)}"
        )
    return tuple(_MODES[name][1] for name in names)


def read_settings(folder: Path) -> dict[str, Any]:
    """Read config_sentence_transformers.json, empty if missing. Raises CheckpointError."""
    file = folder / _SETTINGS
    return read_object(file) if file.exists() else {}


def _limits(folder: Path) -> dict[str, Any]:
    """Read sentence_bert_config.json, which older folders name after other models."""
    files = sorted(folder.glob("sentence_*_config.json"))
    return read_object(files[0]) if files else {}


def _tokenizer_limit(folder: Path) -> int | None:
    """Return the limit in the tokenizer's file, as newer folders have it; huge ones mean none."""
    file = folder / "tokenizer_config.json"
    stated = read_object(file).get("model_max_length") if file.exists() else None
    return stated if isinstance(stated, int) and 0 < stated < _ABSURD else None


def _texts(file: Path, table: dict[str, Any], lower: bool, pools_prompt: bool) -> TextRules:
    prompts = dict(table.get("prompts") or {})
    for name in ("query", "document"):
        if prefix := table.get(f"{name}_prefix"):
            prompts.setdefault(name, prefix)
    prompts = {name: text for name, text in prompts.items() if text is not None}
    default = table.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise CheckpointError(f"{file}: default_prompt_name: {default!r} is not among the prompts")
    similarity = str(table.get("similarity_fn_name") or "cosine").lower()
    return TextRules(
        prompts=prompts,
        default_prompt=default,
        pools_prompt=pools_prompt,
        lower_case=lower,
        similarity=_SIMILARITIES.get(similarity, "cosine"),
    )


def _layers(modules: Iterable[SentenceModule], device: torch.device) -> Iterable[Any]:
    from modulm_hooks_pooling_recipes import layers

    readers = {
        "Dense": layers.read_dense,
        "LayerNorm": layers.read_norm,
        "Normalize": layers.read_normalize,
    }
    for module in modules:
        yield readers[module.kind](module.folder, device)
