"""The drafters `eagle` and `eagle3`: read a head's files and choose the target layers it uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from attrs import evolve, frozen

from modulm.contracts.drafter import DraftStep, Needs, Runs
from modulm.errors import ConfigError
from modulm.loading import open_checkpoint
from modulm.plugins import manager
from modulm_speculation import Options, Target
from modulm_speculation.chain import HiddenChain
from modulm_speculation.draft_model import DraftModel, DraftOptions, load_draft, stored
from modulm_speculator_eagle.family_heads import (
    FAMILIES,
    HEAD,
    FamilyHead,
    LatentEagle3Head,
    family_of,
)
from modulm_speculator_eagle.heads import LAYER, MASKED, Eagle3Head, EagleHead, Head

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Eagle", "Eagle3", "EagleOptions"]

#: Properties implied by the first name in `architectures`; others follow from weight shapes.
_FAMILIES = ("llama", "qwen", "eagle3", "eaglemodel", "peagle")


@frozen
class EagleOptions(DraftOptions):
    """Options of `DraftOptions`; `model` is the head."""

    needs_model: ClassVar[str] = "EAGLE needs the path or hub id of a head"


class Eagle(HiddenChain):
    """EAGLE 1 and 2; drafts a chain of tokens, with `trees` the second choice for each, too."""

    name: ClassVar[str] = "eagle"
    Config: ClassVar[type] = EagleOptions
    head: ClassVar[type[Head]] = EagleHead

    def __init__(self, config: EagleOptions, draft: DraftModel, layers: tuple[int, ...]) -> None:
        super().__init__(config, draft)
        self.needs = Needs(histories=False, hidden=not layers, layers=layers, every=True)  # type: ignore[misc]

    @classmethod
    def open(cls, config: Options, target: Target) -> Self:
        if not isinstance(config, EagleOptions):
            raise ConfigError("method", f"{cls.name} has options of its own")
        table, names = stored(target, config.weights(driver=cls.head))
        table = _flat(table)
        weights = config.weights(driver=cls.head_of(table))
        _check(config.model, table, target)
        layers = cls.layers(config.model, table, target)
        overrides = {
            **table,
            **_config_keys(names, both=cls.head is Eagle3Head),
            "aux": len(layers),
            HEAD: str((table.get("architectures") or [""])[0]),
            "target_hidden_size": _width(target),
            "max_position_embeddings": max(
                table.get("max_position_embeddings", 0), target.loaded.max_model_len
            ),
        }
        draft = load_draft(target, evolve(weights, overrides=overrides))
        if isinstance(draft.model, Head):
            draft.model.target = target
        return cls(config, draft, layers)

    @classmethod
    def head_of(cls, table: Mapping[str, Any]) -> type[Head]:
        """The class of a head, by its config.json."""
        return cls.head if family_of(table) is None else FamilyHead

    @classmethod
    def layers(cls, model: str, table: Mapping[str, Any], target: Target) -> tuple[int, ...]:
        """The target's layers whose output the head reads; empty: the output of the last layer."""
        return ()


class Eagle3(Eagle):
    """EAGLE-3; drafts like EAGLE. P-EAGLE heads draft all tokens of a chain in one step."""

    name: ClassVar[str] = "eagle3"
    head: ClassVar[type[Head]] = Eagle3Head

    def __init__(self, config: EagleOptions, draft: DraftModel, layers: tuple[int, ...]) -> None:
        super().__init__(config, draft, layers)
        #: Whether the head drafts all tokens in one step.
        self.parallel = isinstance(draft.model, Eagle3Head) and draft.model.masked
        if self.parallel and config.trees:
            message = f"model {config.model}: heads that draft all tokens in one step: no `trees`"
            raise ConfigError("speculative_config", message)

    @classmethod
    def head_of(cls, table: Mapping[str, Any]) -> type[Head]:
        return LatentEagle3Head if "kv_lora_rank" in table else cls.head

    @classmethod
    def layers(cls, model: str, table: Mapping[str, Any], target: Target) -> tuple[int, ...]:
        own = table.get("eagle_config") or {}
        if not own.get("use_aux_hidden_state", True):
            return ()
        key = "eagle_aux_hidden_state_layer_ids"
        count = _target_table(target)["num_hidden_layers"]
        # The ids count layer inputs, not outputs.
        inputs = table.get(key) or own.get(key) or (2, count // 2, count - 3)
        layers = tuple(index - 1 for index in inputs)
        if not all(0 <= index < count for index in layers):
            raise ConfigError(
                "speculative_config",
                f"model {model}: {key} {list(inputs)}: the target has {count} layers",
            )
        return layers

    def follow(
        self, step: DraftStep, states: Tensor, ends: np.ndarray, first: int
    ) -> list[np.ndarray]:
        head = self.draft.model
        if not (self.parallel and isinstance(head, Eagle3Head)):
            return super().follow(step, states, ends, first)
        most = np.clip(self.draft.max_length - ends, 0, step.most)
        chosen = self.draft.choose(states).cpu().numpy()
        drafts = [chosen[at : at + 1][:count] for at, count in enumerate(most.tolist())]
        more = np.flatnonzero(most > 1)
        counts = (most[more] - 1).astype(np.int32)
        total = int(counts.sum())
        if total:
            token = head.config.ptd_token_id
            tokens = np.full(total, token, np.int64)
            runs = Runs(np.asarray(step.rows)[more], ends[more] + first, counts, tokens)
            batch = step.build_batch(runs)
            if self.draft.padded:  # the program computes the masks' state itself
                masks = torch.ones(len(batch.tokens), dtype=torch.bool)
                states = self.draft.run(evolve(batch, extras={MASKED: masks}))
            else:
                states = self.run(batch, head.mask_states(total), 1)
            if len(states) > total:
                states = states[torch.arange(total)]
            chosen = self.draft.choose(states).cpu().numpy()
            for at, part in zip(
                more.tolist(), np.split(chosen, np.cumsum(counts)[:-1]), strict=True
            ):
                drafts[at] = np.append(drafts[at], part)
        return drafts

    def inputs(self, step: DraftStep) -> Mapping[str, Tensor]:
        # A program combines the states itself.
        if self.draft.padded and step.layers:
            return {f"{LAYER}{at}": states for at, states in enumerate(step.layers)}
        return super().inputs(step)

    def example_inputs(
        self, tokens: int, rows: int, zeros: Callable[..., Tensor]
    ) -> Sequence[Mapping[str, Tensor]]:
        later = super().example_inputs(tokens, rows, zeros)
        head, layers = self.draft.model, range(len(self.needs.layers))
        if not layers or not isinstance(head, Eagle3Head):
            return later
        dtype = getattr(torch, self.draft.loaded.dtype)
        first = {f"{LAYER}{at}": zeros((tokens, head.state_size), dtype) for at in layers}
        if self.parallel:
            return (first, {MASKED: torch.ones(tokens, dtype=torch.bool)})
        return (first, *later) if tokens == rows else (first,)

    @property
    def chosen_at_once(self) -> int:
        return max(1, self.most - 1) if self.parallel else 1

    def hidden(self, step: DraftStep) -> Tensor:
        head = self.draft.model
        if not step.layers or not isinstance(head, Eagle3Head):
            return super().hidden(step).clone()
        return head.combined(step.layers)


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a head's config.json in one form, also if the speculators library wrote it."""
    layer = table.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        return dict(table)
    outer = {k: v for k, v in table.items() if k not in ("transformer_layer_config", "model_type")}
    return {**layer, "norm_before_residual": True, **outer}


def _config_keys(names: Iterable[str], *, both: bool) -> dict[str, bool]:
    """Return the keys of `EagleConfig` for a head's weights. both: also embedding and LM head."""
    known = {name.removeprefix("model.") for name in names}
    return {
        "own_embedding": both and "embed_tokens.weight" in known,
        "own_head": both and "lm_head.weight" in known,
        "fc_bias": bool({"fc.bias", "fusion_fc.bias", "eagle_linear.bias"} & known),
        "qk_norm": any(name.endswith("self_attn.q_norm.weight") for name in known),
        "masked": "mask_hidden" in known,
        "qkv_bias": any(name.endswith("self_attn.q_proj.bias") for name in known),
    }


def _check(model: str, table: Mapping[str, Any], target: Target) -> None:
    """Raise ConfigError for a head of another model family or another target."""
    name = str((table.get("architectures") or [""])[0])
    if name not in FAMILIES and not any(family in name.lower() for family in _FAMILIES):
        message = (
            f"model {model}: {name} is no EAGLE head of a kind that is known: not supported yet"
        )
        raise ConfigError("speculative_config", message)
    wanted = {"vocab_size": _target_table(target).get("vocab_size")}
    given = table.get("target_hidden_size") or table.get("hidden_size")
    for key, own, theirs in (
        ("vocab_size", table.get("vocab_size"), wanted["vocab_size"]),
        ("hidden_size", given, _width(target)),
    ):
        if own != theirs:
            message = f"model {model}: {key} {own} is not the target's, {theirs}"
            raise ConfigError("speculative_config", message)


def _target_table(target: Target) -> Mapping[str, Any]:
    """Return the target's config.json; of a multimodal model, the text model's part."""
    table = open_checkpoint(target.config, manager.current()).config
    text: Mapping[str, Any] = table.get("text_config", table)
    return text


def _width(target: Target) -> int:
    return int(_target_table(target)["hidden_size"])
