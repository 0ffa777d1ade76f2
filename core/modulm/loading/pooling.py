"""What a model pools for, and how: by its files, `--runner`, `--convert`, `--pooler-config`."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modulm.errors import CheckpointError, ConfigError, UnsupportedError
from modulm.nn.convert import as_classifier, as_embedder

if TYPE_CHECKING:
    from modulm.config import EngineConfig
    from modulm.contracts.model import Model
    from modulm.loading.checkpoint import Checkpoint

__all__ = ["conversion", "convert", "pooling_table", "pooling_tasks"]

_CAUSAL, _CLASSIFIER, _BARE = "ForCausalLM", "ForSequenceClassification", "Model"
_KINDS = ("embed", "classify")

#: Keys of 1_Pooling/config.json and what they mean to us.
_MODES = {
    "pooling_mode_cls_token": "CLS",
    "pooling_mode_mean_tokens": "MEAN",
    "pooling_mode_lasttoken": "LAST",
}
_NEW_MODES = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}


def conversion(
    config: EngineConfig, names: Sequence[str], installed: Collection[str]
) -> tuple[str, str] | None:
    """(architecture to run, "embed" or "classify") if a decoder is to be pooled, else None.

    By `--convert`, by `--runner pooling`, or because config.json names the bare decoder or the
    classifier of a family whose `...ForCausalLM` is installed. Raises UnsupportedError.
    """
    wanted, name = config.model.convert, names[0]
    if wanted not in ("auto", "none", *_KINDS):
        raise UnsupportedError(f"convert: {wanted}: not yet; there are {', '.join(_KINDS)}")
    if wanted == "none" or any(n in installed and not n.endswith(_CAUSAL) for n in names):
        return None
    if name.endswith(_CAUSAL):
        kind = "embed" if wanted == "auto" and config.model.runner == "pooling" else wanted
        return (name, kind) if kind in _KINDS else None
    for ending, own in ((_CLASSIFIER, "classify"), (_BARE, "embed")):
        base = name.removesuffix(ending) + _CAUSAL
        if name.endswith(ending) and base in installed:
            return base, own if wanted == "auto" else wanted
    return None


def convert(driver: type[Model], kind: str, table: Mapping[str, Any]) -> type[Model]:
    """The driver as a pooling model; table: config.json."""
    return as_classifier(driver, _classes(table)) if kind == "classify" else as_embedder(driver)


def pooling_tasks(config: EngineConfig, checkpoint: Checkpoint, model: Model) -> tuple[str, ...]:
    """What requests may ask of the model; "score" if it has one class, for pairs of texts.

    Raises ConfigError if `--runner` asks for something else.
    """
    tasks = model.tasks
    runner = config.model.runner
    if "generate" not in tasks and runner == "generate":
        raise ConfigError("runner", f"{checkpoint.architecture} cannot generate; use pooling")
    if "classify" in tasks and _classes(checkpoint.config) == 1:
        tasks = (*tasks, "score")
    return tasks


def _classes(table: Mapping[str, Any]) -> int:
    """How many classes config.json names; two where it says nothing, as transformers has it."""
    named = table.get("id2label")
    return len(named) if isinstance(named, Mapping) else int(table.get("num_labels", 2))


def pooling_table(config: EngineConfig, checkpoint: Checkpoint, model: Model) -> dict[str, Any]:
    """The pooler's settings, by their names in `--pooler-config`, which comes first.

    Then what the files of sentence-transformers say (modules.json and what it points to), then
    the model's own way.
    """
    table: dict[str, Any] = {"pooling_type": model.pooling}
    if checkpoint.config.get("problem_type") == "multi_label_classification":
        table["multi_label"] = True
    trained = checkpoint.config.get("sentence_transformers")
    if isinstance(trained, Mapping) and str(trained.get("activation_fn")).endswith("Identity"):
        table["use_activation"] = False
    table |= _sentence_transformers(checkpoint.path)
    return table | dict(config.model.pooler_config or config.model.override_pooler_config or {})


def _sentence_transformers(folder: Path) -> dict[str, Any]:
    """Pooling and normalisation as modules.json lists them; nothing if there is no such file."""
    file = folder / "modules.json"
    if not file.exists():
        return {}
    table: dict[str, Any] = {"normalize": False}
    for module in _read(file, list):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            table["pooling_type"] = _mode(folder / str(module.get("path", "")) / "config.json")
        elif kind == "Normalize":
            table["normalize"] = True
        elif kind != "Transformer":
            raise UnsupportedError(f"{file}: a module of type {kind}: not yet")
    settings = folder / "config_sentence_transformers.json"
    cut = _read(settings, dict).get("truncate_dim") if settings.exists() else None
    return table if cut is None else {**table, "dimensions": cut}


def _mode(file: Path) -> str:
    table = _read(file, dict)
    if "pooling_mode" in table:
        chosen, known = [table["pooling_mode"]], _NEW_MODES
    else:
        chosen = [k for k, v in table.items() if k.startswith("pooling_mode_") and v is True]
        known = _MODES
    if len(chosen) != 1 or chosen[0] not in known:
        raise UnsupportedError(f"{file}: pooling by {chosen}: not yet; known are {list(known)}")
    return known[chosen[0]]


def _read(file: Path, kind: type) -> Any:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}") from error
    if not isinstance(found, kind):
        raise CheckpointError(f"{file}: a JSON {kind.__name__} is needed")
    return found
