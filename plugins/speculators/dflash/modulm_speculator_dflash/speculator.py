"""The drafter `dflash` (also named `dspark`): drafts a block of tokens in one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from attrs import evolve, frozen

from modulm.contracts.drafter import DraftStep, Needs, Runs
from modulm.errors import ConfigError
from modulm.loading import open_checkpoint
from modulm.plugins import manager
from modulm_speculation import Options, Target
from modulm_speculation.chain import ModelSpeculator, allocated_tokens, lengthened
from modulm_speculation.draft_model import DraftModel, DraftOptions, load_draft, stored
from modulm_speculator_dflash.backbone import (
    ANCHORS,
    CONTEXT_AT,
    CONTEXTS,
    QUERIES,
    STATE,
    Block,
    DFlashHead,
)
from modulm_speculator_dflash.family_heads import FAMILY_HEADS
from modulm_speculator_dflash.selectors import (
    CandidateHead,
    CorrelatedHead,
    MarkovHead,
    RefinedHead,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

__all__ = ["HEADS", "DFlash", "DFlashOptions"]

#: By the architecture of a head.
HEADS: Mapping[str, type[DFlashHead]] = {
    "DFlashDraftModel": DFlashHead,
    "MuseGlimmerAssistantModel": DFlashHead,
    "DFlashMuseGlimmerAssistantModel": DFlashHead,
    "DFlash2DraftModel": CandidateHead,
    "DFlash2BeamDraftModel": CandidateHead,
    "LiLiCorrDraftModel": CorrelatedHead,
    "Qwen3DSparkModel": MarkovHead,
    "Qwen3OmniDSparkModel": MarkovHead,
    "Qwen3XPressModel": RefinedHead,
    "DFlashQwen3XPressModel": RefinedHead,
    **FAMILY_HEADS,
}
#: `speculators_model_type` of the speculators library's files -> architecture.
_TYPES = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "Qwen3DSparkModel",
}
#: Key of config.json -> another name for it.
_NAMES = {
    "mask_token_id": ("dspark_noise_token_id", "pard_token", "ptd_token_id"),
    "block_size": ("dspark_block_size",),
    "target_layer_ids": ("dspark_target_layer_ids",),
    "attention_sink_bias": ("add_swa_attention_sink_bias",),
}
_MASK_FILE = "mask_embedding.pt"


@frozen
class DFlashOptions(DraftOptions):
    """Options of `DraftOptions`; `model` is the head. At most its block is drafted."""

    num_speculative_tokens: int = 15
    needs_model: ClassVar[str] = "DFlash needs the path or hub id of a head"

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.trees:
            raise ConfigError("trees", "not supported: DFlash heads draft chains; leave it out")


@frozen(eq=False)
class _Part:
    """Tokens of a row in one batch of the head.

    place: index of the row in the step. start: position of the first token. contexts: indices of
    its accepted tokens in the step. block: number of tokens to draft from, anchor included.
    """

    place: int
    start: int
    contexts: np.ndarray
    block: int

    @property
    def count(self) -> int:
        return len(self.contexts) + self.block


class DFlash(ModelSpeculator):
    """Drafts with a head that reads the target's states and fills a block of masked tokens."""

    name: ClassVar[str] = "dflash"
    Config: ClassVar[type] = DFlashOptions

    def __init__(
        self, config: DFlashOptions, draft: DraftModel, layers: tuple[int, ...], budget: int
    ) -> None:
        super().__init__(config, draft)
        if not isinstance(draft.model, DFlashHead):
            raise TypeError(f"{type(draft.model).__name__} is no DFlash head")
        self.head, self._budget = draft.model, budget
        self.needs = Needs(histories=False, hidden=not layers, layers=layers, every=True)  # type: ignore[misc]
        settings = self.head.config
        #: Tokens of a block that are no drafts.
        self._given = 0 if settings.sample_from_anchor else 1
        if settings.block_size is not None:
            self.most = max(1, min(self.most, settings.block_size - self._given))

    @classmethod
    def open(cls, config: Options, target: Target) -> Self:
        if not isinstance(config, DFlashOptions):
            raise ConfigError("method", "dflash has options of its own")
        raw, names = stored(target, config.weights())
        table = _flat(raw)
        head = _head_of(config.model, table)
        layers = _layers(config.model, table, target)
        _check(config.model, table, names, target)
        longest = max(table.get("max_position_embeddings", 0), target.loaded.max_model_len)
        padded = target.platform.step_sizes(1, 1) is not None
        if padded:
            _check_shapes(config.model, table, head)
        overrides = {
            **table,
            **_config_keys(names),
            "aux": len(layers),
            "target_hidden_size": _target_table(target)["hidden_size"],
            "max_position_embeddings": longest,
            "is_causal": True,  # see `causal`
        }
        weights = config.weights(driver=head, overrides=overrides)
        # Batches mix contexts and blocks in any proportion, so they are not recorded, unless the
        # device pads them: then contexts and blocks have batches of their own.
        draft = load_draft(target, weights if padded else evolve(weights, enforce_eager=True))
        if isinstance(draft.model, DFlashHead):
            draft.model.target = target
            folder = open_checkpoint(draft.config, manager.current()).path
            draft.model.mask_embedding = _mask_embedding(folder, draft.model)
        return cls(config, draft, layers, target.config.scheduler.max_num_batched_tokens or 2048)

    def propose(self, step: DraftStep) -> Sequence[np.ndarray]:
        states = step.layers or (() if step.hidden is None else (step.hidden,))
        if self.draft.padded:
            return self._propose_alone(step, states)
        contexts = self.head.combined(states)
        ran, drafts = step.ran, [np.zeros(0, dtype=np.int64)] * len(step.rows)
        firsts = ran.lasts - ran.counts + 1
        ends = ran.starts + step.lasts - firsts + 1
        wanted = {row: index for index, row in enumerate(step.rows) if step.most[index]}
        for parts in self._batches(step, firsts, ends, wanted):
            chosen = self._run(step, parts, contexts)
            for part, tokens in zip([p for p in parts if p.block], chosen, strict=True):
                at = wanted[int(ran.rows[part.place])]
                drafts[at] = tokens[: step.most[at]]
        return drafts

    @property
    def chosen_at_once(self) -> int:
        return self.most

    def example_inputs(
        self, tokens: int, rows: int, zeros: Callable[..., Tensor]
    ) -> Sequence[Mapping[str, Tensor]]:
        dtype = getattr(torch, self.draft.loaded.dtype)
        width = self.head.config.target_hidden_size or self.head.config.hidden_size
        count = max(len(self.needs.layers), 1)
        return ({f"{STATE}{at}": zeros((tokens, width), dtype) for at in range(count)}, {})

    def _propose_alone(self, step: DraftStep, states: Sequence[Tensor]) -> Sequence[np.ndarray]:
        """Propose with a batch of contexts, the step's own tokens, and batches of blocks.

        Their shapes are those of steps. Contexts of rejected drafts lie behind the block's tokens
        or are overwritten by them.
        """
        ran, batch = step.ran, step.build_batch(step.ran)
        count = len(batch.tokens)
        contexts = {f"{STATE}{at}": lengthened(each, count) for at, each in enumerate(states)}
        self.draft.run(evolve(batch, extras=contexts))
        drafts = [np.zeros(0, dtype=np.int64)] * len(step.rows)
        ends = ran.starts + step.lasts - ran.lasts + ran.counts
        wanted = {row: index for index, row in enumerate(step.rows) if step.most[index]}
        blocks = self._blocks(step, ends, wanted)
        for places in _within(blocks, self._budget):
            counts = blocks[places].astype(np.int32)
            firsts = np.cumsum(counts) - counts
            tokens = np.full(int(counts.sum()), self.head.config.mask_token_id, np.int64)
            tokens[firsts] = step.following[places]
            runs = Runs(ran.rows[places], ends[places], counts, tokens)
            hidden = self.draft.run(step.build_batch(runs))
            is_draft = np.ones(len(tokens), dtype=bool)
            if self._given:
                is_draft[firsts] = False
            at = torch.from_numpy(np.flatnonzero(is_draft))
            chosen = self.draft.choose(hidden[at]).cpu().numpy()
            parts = np.split(chosen, np.cumsum(counts - self._given)[:-1])
            for place, part in zip(places.tolist(), parts, strict=True):
                index = wanted[int(ran.rows[place])]
                drafts[index] = part[: step.most[index]]
        return drafts

    def _batches(
        self, step: DraftStep, firsts: np.ndarray, ends: np.ndarray, wanted: Mapping[int, int]
    ) -> Iterator[list[_Part]]:
        """Divide the step into batches within the budget, whose blocks are equally long."""
        blocks = self._blocks(step, ends, wanted)
        batch: list[_Part] = []
        for place, block in enumerate(blocks.tolist()):
            start, end = int(step.ran.starts[place]), int(ends[place])
            contexts = np.arange(firsts[place], step.lasts[place] + 1)
            parts = [_Part(place, start, contexts, block)]
            if len(contexts) + block > self._budget:
                parts = [_Part(place, start, contexts, 0), _Part(place, end, contexts[:0], block)]
            for part in parts:
                lengths = {p.block for p in (*batch, part)} - {0}
                full = sum(p.count for p in (*batch, part)) > self._budget
                if batch and (full or len(lengths) > 1):
                    yield batch
                    batch = []
                batch.append(part)
        yield batch

    def _blocks(self, step: DraftStep, ends: np.ndarray, wanted: Mapping[int, int]) -> np.ndarray:
        """Return the length of each row's block, as far as its slots go: [rows of ran]."""
        free = [allocated_tokens(t, s) for t, s in zip(step.tables, step.sizes, strict=True)]
        room = np.minimum(np.min(free, axis=0), self.draft.max_length) - ends
        blocks = np.minimum(room, self.most + self._given)
        drafted = np.array([row in wanted for row in step.ran.rows.tolist()], dtype=bool)
        usable = drafted & (step.following >= 0) & (blocks > self._given)
        lengths: np.ndarray = np.where(usable, blocks, 0)
        return lengths

    def _run(self, step: DraftStep, parts: Sequence[_Part], contexts: Tensor) -> np.ndarray:
        """Run a batch and return the drafts of its blocks: [blocks, drafts]."""
        ran, mask = step.ran, self.head.config.mask_token_id
        with_block = [part for part in parts if part.block]
        masks = [np.full(max(part.block - 1, 0), mask) for part in parts]
        anchors = [step.following[part.place : part.place + 1][: part.block] for part in parts]
        tokens = [
            piece
            for part, anchor, filler in zip(parts, anchors, masks, strict=True)
            for piece in (ran.tokens[part.contexts], anchor, filler)
        ]
        counts = np.array([part.count for part in parts], dtype=np.int32)
        runs = Runs(
            ran.rows[[part.place for part in parts]],
            np.array([part.start for part in parts]),
            counts,
            np.concatenate(tokens).astype(np.int64),
        )
        device = contexts.device
        in_block = np.concatenate([np.arange(p.count) >= len(p.contexts) for p in parts])
        taken = contexts[torch.from_numpy(np.concatenate([p.contexts for p in parts])).to(device)]
        lasts = torch.from_numpy(step.lasts[[p.place for p in with_block]]).to(device)
        first = torch.from_numpy(np.concatenate(anchors)).to(device)
        extras = {
            CONTEXTS: taken,
            CONTEXT_AT: torch.from_numpy(np.flatnonzero(~in_block)).to(device),
            QUERIES: torch.from_numpy(np.flatnonzero(in_block)).to(device),
            ANCHORS: first,
        }
        states = self.draft.run(evolve(step.build_batch(runs), extras=extras))
        if not with_block:
            return np.zeros((0, 0), dtype=np.int64)
        blocks = states.view(len(with_block), -1, states.shape[-1])
        return self.head.select(Block(blocks, first, contexts[lasts])).cpu().numpy()


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a head's config.json in one form, also if the speculators library wrote it."""
    flat = dict(table)
    kind = _TYPES.get(str(table.get("speculators_model_type")))
    layer = table.get("transformer_layer_config")
    if isinstance(layer, Mapping):
        outer = {k: v for k, v in table.items() if k != "model_type"}
        flat = {**layer, **outer}
        flat["target_layer_ids"] = [i - 1 for i in table.get("aux_hidden_state_layer_ids", ())]
        if kind != "Qwen3DSparkModel":
            flat["causal"] = not table.get("sliding_window_non_causal", True)
    if kind is not None and _architecture(table) not in HEADS:
        flat["architectures"] = [kind]
    flat |= table.get("eagle_config") or {}
    flat |= table.get("dflash_config") or {}
    for key, others in _NAMES.items():
        given = [flat[name] for name in (key, *others) if flat.get(name) is not None]
        if given:
            flat[key] = given[0]
    if flat.get("is_causal") is not None:
        flat["causal"] = flat["is_causal"]
    if _architecture(flat) in ("MuseGlimmerAssistantModel", "DFlashMuseGlimmerAssistantModel"):
        flat = {"causal": False, "vocab_size": 202048, **flat}
    inputs = flat.get("eagle_aux_hidden_state_layer_ids") or flat.get("layer_ids")
    if inputs and not flat.get("target_layer_ids"):
        flat["target_layer_ids"] = [i - 1 for i in inputs]  # these count layer inputs
    # DSpark heads predict from the anchor on, unless the speculators library trained them.
    flat.setdefault("sample_from_anchor", _is_markov(flat) and not kind)
    return flat


def _architecture(table: Mapping[str, Any]) -> str:
    return str((table.get("architectures") or [""])[0])


def _is_markov(table: Mapping[str, Any]) -> bool:
    return issubclass(HEADS.get(_architecture(table), DFlashHead), MarkovHead)


def _head_of(model: str, table: Mapping[str, Any]) -> type[DFlashHead]:
    """Return the class of a head. Raises ConfigError for other architectures."""
    name = _architecture(table)
    if name not in HEADS:
        known = ", ".join(sorted(HEADS))
        message = f"model {model}: {name or 'no architecture'} is no DFlash head; known: {known}"
        raise ConfigError("speculative_config", message)
    if table.get("sample_from_anchor") and not _is_markov(table):
        message = f"model {model}: sample_from_anchor: only DSpark heads support it"
        raise ConfigError("speculative_config", message)
    return HEADS[name]


def _check_shapes(model: str, table: Mapping[str, Any], head: type[DFlashHead]) -> None:
    """Raise ConfigError for a head that devices with few shapes do not run."""
    if head.select is not DFlashHead.select or table.get("conv_kernel_size"):
        message = (
            f"model {model}: {_architecture(table)} chooses the tokens of a block by each other: "
            "not supported on devices that pad steps to few sizes; use a DFlashDraftModel head"
        )
        raise ConfigError("speculative_config", message)


def _within(blocks: np.ndarray, budget: int) -> Iterator[np.ndarray]:
    """Yield indices of the rows that have a block, in groups of at most `budget` tokens."""
    group: list[int] = []
    for place in np.flatnonzero(blocks).tolist():
        if group and int(blocks[[*group, place]].sum()) > budget:
            yield np.array(group)
            group = []
        group.append(place)
    if group:
        yield np.array(group)


def _layers(model: str, table: Mapping[str, Any], target: Target) -> tuple[int, ...]:
    """The target's layers whose outputs the head reads; empty: the output of the last layer."""
    if not table.get("use_aux_hidden_state", True):
        return ()
    layers, count = table.get("target_layer_ids"), _target_table(target)["num_hidden_layers"]
    if not layers or not all(isinstance(i, int) and 0 <= i < count for i in layers):
        message = f"model {model}: target_layer_ids {layers}: the target has {count} layers"
        raise ConfigError("speculative_config", message)
    return tuple(layers)


def _check(model: str, table: Mapping[str, Any], names: Iterable[str], target: Target) -> None:
    """Raise ConfigError for a head of another target, or without its mask."""
    theirs = _target_table(target)
    width = table.get("target_hidden_size") or table.get("hidden_size")
    pairs = [("hidden_size", width, theirs["hidden_size"])]
    if not _config_keys(names)["own_embedding"]:
        pairs.append(("vocab_size", table.get("vocab_size"), theirs.get("vocab_size")))
    for key, own, other in pairs:
        if own != other:
            message = f"model {model}: {key} {own} is not the target's, {other}"
            raise ConfigError("speculative_config", message)
    mask = table.get("mask_token_id")
    if not isinstance(mask, int) or not 0 <= mask < (table.get("vocab_size") or 0):
        message = f"model {model}: mask_token_id {mask}: required, an id of the vocabulary"
        raise ConfigError("speculative_config", message)


def _config_keys(names: Iterable[str]) -> dict[str, bool]:
    """Return the keys of `DFlashConfig` for a head's weights."""
    known = {name.removeprefix("model.") for name in names}
    return {
        "own_embedding": "embed_tokens.weight" in known,
        "own_head": "lm_head.weight" in known,
    }


def _mask_embedding(folder: Path, head: DFlashHead) -> Tensor | None:
    """Return the embedding of masked tokens, if the checkpoint has a file of its own for it."""
    file = folder / _MASK_FILE
    if not file.is_file():
        return None
    content = torch.load(file, weights_only=True, map_location="cpu")
    vector = content["embedding"] if isinstance(content, Mapping) else content
    expected = head.config.hidden_size
    if vector.numel() != expected:
        message = f"{file}: {vector.numel()} numbers, expected {expected}"
        raise ConfigError("speculative_config", message)
    return vector.flatten().to(next(head.parameters()))


def _target_table(target: Target) -> Mapping[str, Any]:
    """Return the target's config.json; of a multimodal model, the text model's part."""
    table = open_checkpoint(target.config, manager.current()).config
    text: Mapping[str, Any] = table.get("text_config", table)
    return text
