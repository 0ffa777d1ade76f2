"""What a model pools for, and how: by its files, `--runner`, `--convert`, `--pooler-config`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from modulm.errors import ConfigError, UnsupportedError
from modulm_pooler_standard.convert import as_classifier, as_embedder, as_is, as_reward

if TYPE_CHECKING:
    from modulm.config import EngineConfig
    from modulm.contracts.model import Model
    from modulm.contracts.pooling import PoolingRecipe
    from modulm.loading.checkpoint import Checkpoint

__all__ = ["conversion", "convert", "pooling_table", "pooling_tasks"]

_CAUSAL, _CLASSIFIER, _BARE = "ForCausalLM", "ForSequenceClassification", "Model"
#: Of decoders that take media.
_SEEING = "ForConditionalGeneration"
_DECODERS = (_CAUSAL, _SEEING)
_REWARD, _PROCESS = "ForRewardModel", "ForProcessRewardModel"
#: What the architectures of a decoder's family are for, by the end of their names.
_ENDINGS = {_PROCESS: "reward", _REWARD: "reward", _CLASSIFIER: "classify", _BARE: "embed"}
_KINDS = ("embed", "classify", "reward")
_TASKS = {"classify": ("classify", "token_classify"), "reward": ("reward", "token_classify")}


def conversion(
    config: EngineConfig,
    names: Sequence[str],
    installed: Collection[str],
    recipe: PoolingRecipe,
) -> tuple[str, str] | None:
    """(architecture to run, "embed", "classify" or "reward") if a decoder is to be pooled.

    By `--convert`, by `--runner pooling`, by the checkpoint's other files, or because config.json
    names the bare decoder, the classifier or the reward model of a family whose `...ForCausalLM`
    or `...ForConditionalGeneration` is installed. Otherwise None. Raises UnsupportedError.
    """
    wanted, name = config.model.convert, names[0]
    if wanted not in ("auto", "none", *_KINDS):
        raise UnsupportedError(f"convert: {wanted}: not yet; there are {', '.join(_KINDS)}")
    if wanted == "none" or any(n in installed and not n.endswith(_DECODERS) for n in names):
        return None
    if name.endswith(_DECODERS):
        pooled = "embed" if config.model.runner == "pooling" else None
        kind = (recipe.kind or pooled) if wanted == "auto" else wanted
        return None if kind is None else (name, kind)
    for ending, own in _ENDINGS.items():
        found = [name.removesuffix(ending) + end for end in _DECODERS]
        base = next((base for base in found if base in installed), None)
        if name.endswith(ending) and base is not None:
            return base, own if wanted == "auto" else wanted
    return None


def convert(
    driver: type[Model], kind: str, table: Mapping[str, Any], settings: Mapping[str, Any]
) -> type[Model]:
    """The driver as a pooling model; table: config.json; settings: of the pooler.

    Raises UnsupportedError.
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
    """The driver, named `name` in config.json, with the prompts of its family."""
    if "image" not in driver.media:
        raise UnsupportedError(f"{driver.__name__} as a model that pools: not yet")
    ending = next((end for end in _ENDINGS if name.endswith(end)), None)
    family = name if ending is None else name.removesuffix(ending) + _SEEING
    return type(driver.__name__, (driver,), {"media_family": driver.media_family or family})


def pooling_tasks(
    checkpoint: Checkpoint, model: Model, settings: Mapping[str, Any]
) -> tuple[str, ...]:
    """What requests may ask of the model; "score" if it has one class, for pairs of texts.

    settings: of the pooler. Raises ConfigError if `task` asks for something else.
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
    """How many classes config.json names; two where it says nothing, as transformers has it."""
    named = table.get("id2label")
    return len(named) if isinstance(named, Mapping) else int(table.get("num_labels", 2))


def pooling_table(
    checkpoint: Checkpoint, model: Model, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The pooler's settings, by their names in `--pooler-config`, with the model's own way."""
    table: dict[str, Any] = {"pooling_type": model.pooling}
    if model.pooling == "MEDIA":
        table = {"media": True}
    if checkpoint.config.get("problem_type") == "multi_label_classification":
        table["multi_label"] = True
    if "reward" in model.tasks and not settings.get("returned_token_ids"):
        table["use_activation"] = checkpoint.architecture.endswith(_PROCESS)
    return table | dict(settings)
