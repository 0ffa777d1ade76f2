"""Hooks that read pooling settings from a checkpoint's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve

from modulm.contracts.pooling import PoolingRecipe
from modulm.plugins import Choice, hookimpl
from modulm_hooks_pooling_recipes.bge_m3 import BGE_M3, read_bge_m3
from modulm_hooks_pooling_recipes.classifiers import Classifier, activation, read_classifier
from modulm_hooks_pooling_recipes.colbert import encoder, is_colbert, read_colbert
from modulm_hooks_pooling_recipes.jina import JINA, RANKING, read_jina, read_ranking
from modulm_hooks_pooling_recipes.sentence import (
    read_modules,
    read_sentence,
    read_settings,
)

if TYPE_CHECKING:
    from modulm.contracts.checkpoint import Checkpoint
    from modulm.contracts.config import EngineConfig

__all__ = ["modulm_choose_model", "modulm_pooling"]

#: Its vectors are weights of words, whose sizes count.
_SPLADE = "BertSpladeSparseEmbeddingModel"


@hookimpl(trylast=True)
def modulm_choose_model(architectures: Sequence[str], config: Mapping[str, Any]) -> Choice | None:
    """Choose the encoder inside a ColBERT model."""
    name = encoder(architectures, config)
    return Choice(name, "the encoder of ColBERT") if name else None


@hookimpl(trylast=True)
def modulm_pooling(checkpoint: Checkpoint, config: EngineConfig) -> PoolingRecipe | None:
    """Read a sentence-transformers folder, or pooling keys of config.json.

    Raises CheckpointError or UnsupportedError naming the file.
    """
    if is_colbert(checkpoint.architectures):
        return read_colbert(checkpoint.path)
    if JINA in checkpoint.architectures:
        return read_jina(checkpoint.config, str(checkpoint.config_file))
    if RANKING in checkpoint.architectures:
        return read_ranking(checkpoint.path)
    if BGE_M3 in checkpoint.architectures:
        return read_bge_m3(checkpoint)
    if _SPLADE in checkpoint.architectures:
        return PoolingRecipe(settings={"pooling_type": "MAX", "normalize": False})
    modules = read_modules(checkpoint.path)
    recipe = read_sentence(checkpoint.path, modules) if modules else PoolingRecipe()
    classifier = read_classifier(checkpoint, config, modules)
    recipe = recipe if classifier is None else _with(recipe, classifier)
    settings = {**recipe.settings, **_activation(checkpoint)}
    sizes = checkpoint.config.get("matryoshka_dimensions") or ()
    prompts = {**(checkpoint.config.get("task_instructions") or {}), **recipe.texts.prompts}
    texts = evolve(recipe.texts, dimensions=sizes, prompts=prompts)
    recipe = evolve(recipe, settings=settings, texts=texts)
    return None if recipe == PoolingRecipe() else recipe


def _with(recipe: PoolingRecipe, classifier: Classifier) -> PoolingRecipe:
    texts = evolve(recipe.texts, joined=classifier.joined, template=classifier.template)
    settings = {**recipe.settings, **classifier.settings}
    return evolve(recipe, kind=classifier.kind or recipe.kind, settings=settings, texts=texts)


def _activation(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read the activation that a cross-encoder of sentence-transformers names."""
    table = checkpoint.config.get("sentence_transformers")
    class_path = table.get("activation_fn") if isinstance(table, dict) else None
    class_path = class_path or checkpoint.config.get("sbert_ce_default_activation_function")
    class_path = class_path or read_settings(checkpoint.path).get("activation_fn")
    return {} if class_path is None else {"activation": activation(checkpoint, str(class_path))}
