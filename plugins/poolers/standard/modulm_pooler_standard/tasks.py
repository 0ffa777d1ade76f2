"""Determine a model's pooling tasks and settings from its files, `--runner`, `--convert` and
`--pooler-config`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from modulm.errors import ConfigError, UnsupportedError
from modulm_pooler_standard.convert import as_classifier, as_embedder, as_is, as_reward

if TYPE_CHECKING:
    from modulm.contracts.checkpoint import Checkpoint
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.model import Model
    from modulm.contracts.pooling import PoolingRecipe

__all__ = ["conversion", "convert", "pooling_table", "pooling_tasks"]

_CAUSAL, _CLASSIFIER, _BARE = "ForCausalLM", "ForSequenceClassification", "Model"
#: Endings of decoders that accept media.
_SEEING = "ForConditionalGeneration"
_DECODERS = (_CAUSAL, _SEEING)
_REWARD, _PROCESS = "ForRewardModel", "ForProcessRewardModel"
#: What the architectures of a decoder's family are used for, by the end of their names.
_ENDINGS = {_PROCESS: "reward", _REWARD: "reward", _CLASSIFIER: "classify", _BARE: "embed"}
#: Reward models whose heads are not two layers called `score`.
_OTHER_HEADS = {"InternLM2ForRewardModel"}
_KINDS = ("embed", "classify", "reward")
_TASKS = {"classify": ("classify", "token_classify"), "reward": ("reward", "token_classify")}


def conversion(
    config: EngineConfig,
    names: Sequence[str],
    installed: Collection[str],
    recipe: PoolingRecipe,
) -> tuple[str, str] | None:
    """Return (architecture to run, "embed", "classify" or "reward") if a decoder is to be
    converted, else None.

    Decided by `--convert`, by `--runner pooling`, by other files of the checkpoint, or because
    config.json names the bare decoder, the classifier or the reward model of a family whose
    `...ForCausalLM` or `...ForConditionalGeneration` is installed. Raises UnsupportedError.
    """
    wanted, name = config.model.convert, names[0]
    if wanted not in ("auto", "none", *_KINDS):
        raise UnsupportedError(f"convert: {wanted} is not supported yet; use {', '.join(_KINDS)}")
    if name in _OTHER_HEADS:
        return None
    if wanted == "none" or any(n in installed and not n.endswith(_DECODERS) for n in names):
        return None
    if name.endswith(_DECODERS):
        pooled = "embed" if config.model.runner == "pooling" else None
        kind = (recipe.kind or pooled) if wanted == "auto" else wanted
        return None if kind is None else (name, kind)
    for ending, default_kind in _ENDINGS.items():
        candidates = [name.removesuffix(ending) + end for end in _DECODERS]
        base = next((base for base in candidates if base in installed), None)
        if name.endswith(ending) and base is not None:
            return base, default_kind if wanted == "auto" else wanted
    return None


def convert(
    driver: type[Model], kind: str, table: Mapping[str, Any], settings: Mapping[str, Any]
) -> type[Model]:
    """Convert the driver to a pooling model. table: config.json; settings: the pooler's. Raises
    UnsupportedError.
    """
    if driver.media:
        driver = _seeing(driver, str(table["architectures"][0]))
    if settings.get("returned_token_ids") and kind in _TASKS:
        return as_is(driver, _TASKS[kind])
    if kind == "reward":
        name = str(table["architectures"][0])
        deep, steps = name.endswith((_REWARD, _PROCESS)), name.endswith(_PROCESS)
        rewards = (2 if steps else 1) if deep else _classes(table)
        return as_reward(driver, rewards, deep=deep)
    return as_classifier(driver, _classes(table)) if kind == "classify" else as_embedder(driver)


def _seeing(driver: type[Model], name: str) -> type[Model]:
    """Return the driver, named `name` in config.json, with the prompts of its family."""
    if "image" not in driver.media:
        raise UnsupportedError(f"{driver.__name__} is not supported yet as a pooling model")
    ending = next((end for end in _ENDINGS if name.endswith(end)), None)
    family = name if ending is None else name.removesuffix(ending) + _SEEING
    return type(driver.__name__, (driver,), {"media_family": driver.media_family or family})


def pooling_tasks(
    checkpoint: Checkpoint, model: Model, settings: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the tasks that requests may use; includes "score" for pairs of texts if the model has
    one class.

    settings: the pooler's. Raises ConfigError if `task` is not among them.
    """
    tasks = model.tasks
    task = settings.get("task")
    if task is not None and task not in tasks:
        raise ConfigError("pooler_config", f"task: {task} is not one of {', '.join(tasks)}")
    tasks = tasks if task is None else (task,)
    picked = settings.get("returned_token_ids")
    classes = _classes(checkpoint.config) if picked is None else len(picked)
    if "classify" in tasks and (classes == 1 or settings.get("contrast")):
        tasks = (*tasks, "score")
    return tasks


def _classes(table: Mapping[str, Any]) -> int:
    """Return the number of classes in config.json; two if it states none, as in transformers."""
    labels = table.get("id2label")
    return len(labels) if isinstance(labels, Mapping) else int(table.get("num_labels", 2))


def pooling_table(
    checkpoint: Checkpoint, model: Model, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the pooler's settings, by their names in `--pooler-config`, including the model's
    defaults.
    """
    table: dict[str, Any] = {"pooling_type": model.pooling}
    if model.pooling == "MEDIA":
        table = {"media": True}
    if checkpoint.config.get("problem_type") == "multi_label_classification":
        table["multi_label"] = True
    if "reward" in model.tasks and not settings.get("returned_token_ids"):
        table["use_activation"] = checkpoint.architecture.endswith(_PROCESS)
    return table | dict(settings)
