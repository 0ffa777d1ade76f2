"""Classifiers on decoders: the logits of certain tokens after the prompt are the class scores.

vLLM's users add the keys `classifier_from_token` and `method` to config.json with `--hf-overrides`;
LogitScore is the equivalent module of sentence-transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from modulm.contracts.tokenizer import Tokenizer
from modulm.errors import CheckpointError, UnsupportedError
from modulm.loading import stored_tokenizer
from modulm.loading.sources import tokenizer_path
from modulm_hooks_pooling_recipes.files import read_object
from modulm_hooks_pooling_recipes.sentence import SentenceModule
from modulm_tokenizers.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from modulm.contracts.checkpoint import Checkpoint
    from modulm.contracts.config import EngineConfig

__all__ = ["Classifier", "activation", "read_classifier"]

#: method -> whether the only class is the first token's logit minus the second's.
_METHODS = {"from_2_way_softmax": True, "no_post_processing": False}
#: Ends each step that a process reward model scores.
_STEP = "<extra_0>"
_ACTIVATIONS = {
    "Identity": "identity",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
    "Tanh": "tanh",
}


@frozen(kw_only=True)
class Classifier:
    """Settings of a classifier; the names are those of `PoolingRecipe` and `TextRules`."""

    kind: str | None = None
    settings: Mapping[str, Any] = field(factory=dict)
    joined: bool = False
    template: str | None = None


def read_classifier(
    checkpoint: Checkpoint, config: EngineConfig, modules: Sequence[SentenceModule]
) -> Classifier | None:
    """Read the classifier in config.json or a module, or None. Raises CheckpointError."""
    table = checkpoint.config
    if table.get("classifier_from_token"):
        return _from_tokens(checkpoint, config)
    for module in modules:
        if module.kind == "LogitScore":
            return _from_module(module, _tokenizer(checkpoint, config))
    if checkpoint.architecture.endswith("ForProcessRewardModel"):
        step = _tokenizer(checkpoint, config).token_to_id(_STEP)
        return None if step is None else Classifier(settings={"step_tag_id": step})
    return None


def _from_tokens(checkpoint: Checkpoint, config: EngineConfig) -> Classifier:
    table, file = checkpoint.config, checkpoint.config_file
    method = table.get("method")
    if method is None and table.get("is_original_qwen3_reranker"):
        method = "from_2_way_softmax"
    if method not in _METHODS:
        raise CheckpointError(
            f"{file}: method: with classifier_from_token one of {', '.join(_METHODS)} is needed "
            "(--hf-overrides '{\"method\": ...}')"
        )
    names, tokenizer = table["classifier_from_token"], _tokenizer(checkpoint, config)
    ids = [tokenizer.token_to_id(name) for name in names]
    if None in ids:
        raise CheckpointError(
            f"{file}: classifier_from_token: {names[ids.index(None)]!r} is not a token of the model"
        )
    contrast = _METHODS[method]
    if contrast and len(ids) != 2:
        raise CheckpointError(f"{file}: classifier_from_token: {method} requires two tokens")
    settings = {"returned_token_ids": ids, "contrast": contrast}
    joined = not table.get("use_sep_token", False)
    return Classifier(kind="classify", settings=settings, joined=joined)


def _from_module(module: SentenceModule, tokenizer: Tokenizer) -> Classifier:
    table = read_object(module.folder / "config.json")
    true, false = table.get("true_token_id"), table.get("false_token_id")
    if true is None:
        raise CheckpointError(f"{module.folder / 'config.json'}: true_token_id is required")
    ids = [true] if false is None else [false, true]
    template = tokenizer.chat_template
    return Classifier(
        kind="classify",
        settings={"returned_token_ids": ids, "contrast": false is not None},
        joined=True,
        template=template if isinstance(template, str) else None,
    )


def _tokenizer(checkpoint: Checkpoint, config: EngineConfig) -> Tokenizer:
    model = config.model
    return load_tokenizer(
        tokenizer_path(config, checkpoint.path),
        model.tokenizer_mode,
        model.tokenizer_revision if model.tokenizer else None,
        model.trust_remote_code,
        None if model.tokenizer else stored_tokenizer(config, checkpoint.path),
    )


def activation(checkpoint: Checkpoint, class_path: str) -> str:
    """Return the `--pooler-config` name of an activation, from its class path in torch."""
    name = class_path.rpartition(".")[2].partition("(")[0]
    if name not in _ACTIVATIONS:
        file = checkpoint.config_file
        raise UnsupportedError(f"{file}: activation_fn {class_path}: not supported yet")
    return _ACTIVATIONS[name]
