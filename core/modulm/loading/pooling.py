"""What a model pools for, and how: by its files, `--runner`, `--convert`, `--pooler-config`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from modulm.errors import ConfigError, UnsupportedError
from modulm.loading.sentence import sentence_table
from modulm.nn.convert import as_classifier, as_embedder, as_reward

if TYPE_CHECKING:
    from modulm.config import EngineConfig
    from modulm.contracts.model import Model
    from modulm.loading.checkpoint import Checkpoint

__all__ = ["conversion", "convert", "pooling_table", "pooling_tasks"]

_CAUSAL, _CLASSIFIER, _BARE = "ForCausalLM", "ForSequenceClassification", "Model"
_REWARD, _PROCESS = "ForRewardModel", "ForProcessRewardModel"
#: What the architectures of a decoder's family are for, by the end of their names.
_ENDINGS = {_PROCESS: "reward", _REWARD: "reward", _CLASSIFIER: "classify", _BARE: "embed"}
_KINDS = ("embed", "classify", "reward")


def conversion(
    config: EngineConfig, names: Sequence[str], installed: Collection[str]
) -> tuple[str, str] | None:
    """(architecture to run, "embed", "classify" or "reward") if a decoder is to be pooled.

    By `--convert`, by `--runner pooling`, or because config.json names the bare decoder, the
    classifier or the reward model of a family whose `...ForCausalLM` is installed. Otherwise
    None. Raises UnsupportedError.
    """
    wanted, name = config.model.convert, names[0]
    if wanted not in ("auto", "none", *_KINDS):
        raise UnsupportedError(f"convert: {wanted}: not yet; there are {', '.join(_KINDS)}")
    if wanted == "none" or any(n in installed and not n.endswith(_CAUSAL) for n in names):
        return None
    if name.endswith(_CAUSAL):
        kind = "embed" if wanted == "auto" and config.model.runner == "pooling" else wanted
        return (name, kind) if kind in _KINDS else None
    for ending, own in _ENDINGS.items():
        base = name.removesuffix(ending) + _CAUSAL
        if name.endswith(ending) and base in installed:
            return base, own if wanted == "auto" else wanted
    return None


def convert(driver: type[Model], kind: str, table: Mapping[str, Any]) -> type[Model]:
    """The driver as a pooling model; table: config.json."""
    if kind == "reward":
        name = str(table["architectures"][0])
        deep, steps = name.endswith((_REWARD, _PROCESS)), name.endswith(_PROCESS)
        rewards = (2 if steps else 1) if deep else _classes(table)
        return as_reward(driver, rewards, deep=deep)
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
    if "reward" in model.tasks:
        table["use_activation"] = checkpoint.architecture.endswith(_PROCESS)
    table |= sentence_table(checkpoint.path)
    return table | dict(config.model.pooler_config or config.model.override_pooler_config or {})
