"""Medusa heads: each predicts a token one position further ahead (arXiv 2401.10774).

All heads read the same hidden state. The most probable token of each is drafted, as one chain; with
`trees`, the second one of each is a branch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from attrs import frozen

from modulm.contracts.drafter import DraftStep, Needs
from modulm.errors import ConfigError, ModulmError
from modulm.loading import open_checkpoint
from modulm.plugins import manager
from modulm_speculation import Options, Speculator, Target
from modulm_speculation.draft_model import ReplaceableDraft, set_draft
from modulm_speculation.speculator import Branch, single_branches

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

__all__ = ["Heads", "Medusa", "MedusaOptions"]

#: Weight names in Medusa's own files, which number a head's blocks and output layer in one list,
#: and in the files that vLLM reads.
_BLOCKS = (
    re.compile(r"^(?:medusa_head\.)?(\d+)\.(\d+)\.linear\.(weight|bias)$"),
    re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$"),
)
_OUTPUTS = (
    re.compile(r"^(?:medusa_head\.)?(\d+)\.\d+\.weight$"),
    re.compile(r"^lm_heads\.(\d+)\.weight$"),
)
_ALL_OUTPUTS, _WORDS = "lm_head.weight", "token_map"
_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors")


@frozen
class MedusaOptions(Options):
    """model: folder or hub id of the heads. num_speculative_tokens: None for one per head. trees:
    draft the second choice of each head, too; attention needs masks.
    """

    num_speculative_tokens: int = 64
    model: str = ""
    revision: str | None = None
    dtype: str | None = None
    trees: bool = False

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if not self.model:
            raise ConfigError("model", "medusa needs the path or hub id of its heads")


class Heads(ReplaceableDraft):
    """The heads' weights.

    blocks: the residual blocks of each head, (weight [hidden, hidden], bias or None) each. outputs:
    [words, hidden] of each head, or None for the target's LM head. words: [words] int64, token ids
    of a reduced vocabulary; None for the target's. table: the heads' config.json.
    """

    def __init__(
        self,
        blocks: Sequence[Sequence[tuple[Tensor, Tensor | None]]],
        outputs: Sequence[Tensor | None],
        words: Tensor | None,
        target: Target,
        table: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.blocks, self.outputs, self.words = blocks, outputs, words
        self._target, self._table = target, table

    def __len__(self) -> int:
        return len(self.blocks)

    def replace(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        new = _arrange(tensors, self._table, self._target)
        pairs = list(zip(self._tensors(), new._tensors(), strict=True))
        if any((old is None) != (other is None) for old, other in pairs):
            raise ValueError("the heads have other biases, outputs or token ids than before")
        together = [(old, other) for old, other in pairs if old is not None and other is not None]
        for old, other in together:
            if old.shape != other.shape:
                raise ValueError(f"{list(other.shape)} where {list(old.shape)} is required")

        def put() -> None:
            for old, other in together:
                old.copy_(other)

        return put

    def _tensors(self) -> list[Tensor | None]:
        blocks = (tensor for head in self.blocks for block in head for tensor in block)
        return [*blocks, *self.outputs, self.words]

    def choose(self, hidden: Tensor, head: int, count: int = 1) -> Tensor:
        """Return a head's most probable tokens: [rows, hidden] -> [rows, count] int64."""
        x = hidden
        for weight, bias in self.blocks[head]:
            x = x + F.silu(F.linear(x, weight, bias))
        output = self.outputs[head]
        if output is None:
            return _most_probable(self._target.logits(x), count)
        best = _most_probable(F.linear(x, output), count)
        return best if self.words is None else self.words[best]


def _most_probable(logits: Tensor, count: int) -> Tensor:
    """[rows, words] -> the words of the greatest logits, [rows, count] int64."""
    return logits.argmax(-1, keepdim=True) if count == 1 else logits.topk(count).indices


class Medusa(Speculator):
    """Drafts the heads' tokens after each step."""

    name: ClassVar[str] = "medusa"
    Config: ClassVar[type] = MedusaOptions
    needs: ClassVar[Needs] = Needs(histories=False, hidden=True)

    def __init__(self, config: MedusaOptions, heads: Heads) -> None:
        super().__init__(config)
        self.heads = heads
        self.trees = config.trees
        # Trees have a second draft for each head.
        most = 2 * len(heads) if config.trees else len(heads)
        self.most = min(config.num_speculative_tokens, most)
        self._branches: list[Sequence[Branch]] = []

    def branches(self) -> Sequence[Sequence[Branch]]:
        return self._branches

    @classmethod
    def open(cls, config: Options, target: Target) -> Self:
        if not isinstance(config, MedusaOptions):
            raise ConfigError("method", "medusa has options of its own")
        try:
            heads = _read(config, target)
            set_draft(target, heads)
            return cls(config, heads)
        except (ModulmError, ValueError, KeyError) as error:
            message = f"model {config.model}: {error}"
            raise ConfigError("speculative_config", message) from error

    def propose(self, step: DraftStep) -> Sequence[np.ndarray]:
        if step.hidden is None:
            raise ValueError("the step has no hidden states")
        accepted = torch.from_numpy(np.asarray(step.accepted, dtype=np.int64)).to(
            step.hidden.device
        )
        states, most = step.hidden[accepted], np.minimum(step.most, len(self.heads)).tolist()
        each = 2 if self.trees else 1
        chosen = [self.heads.choose(states, head, each) for head in range(max(most, default=0))]
        if not chosen:
            self._branches = [()] * len(step.rows)
            return [np.zeros(0, dtype=np.int64)] * len(step.rows)
        choices = torch.stack(chosen, 1).cpu().numpy()
        if self.trees:
            self._branches = [
                single_branches(row[:count, 1]) for row, count in zip(choices, most, strict=True)
            ]
        return [row[:count, 0] for row, count in zip(choices, most, strict=True)]


def _read(config: MedusaOptions, target: Target) -> Heads:
    """Read the heads from a folder. Raises ModulmError, or ValueError for files that do not fit."""
    parts: dict[str, Any] = {
        "model": config.model,
        "revision": config.revision,
        "hf_config_path": None,
        "hf_overrides": {"architectures": ["MedusaModel"]},
    }
    checkpoint = open_checkpoint(target.config.with_parts(parts), manager.current())
    return _arrange(_tensors(checkpoint.path), checkpoint.config, target)


def _arrange(stored: Mapping[str, Tensor], table: Mapping[str, Any], target: Target) -> Heads:
    """Put stored tensors together to heads. table: config.json. Raises ValueError, KeyError."""
    shared = stored.get(_ALL_OUTPUTS)
    blocks: dict[int, dict[int, dict[str, Tensor]]] = {}
    outputs: dict[int, Tensor] = {}
    for name, tensor in stored.items():
        if block := next(filter(None, (p.match(name) for p in _BLOCKS)), None):
            head, number, kind = int(block[1]), int(block[2]), block[3]
            blocks.setdefault(head, {}).setdefault(number, {})[kind] = tensor
        elif output := next(filter(None, (p.match(name) for p in _OUTPUTS)), None):
            outputs[int(output[1])] = tensor
        elif name not in (_ALL_OUTPUTS, _WORDS):
            raise ValueError(f"{name} is not part of Medusa heads")
    count = int(table.get("medusa_num_heads") or table.get("num_heads") or len(blocks))
    if sorted(blocks)[:count] != list(range(count)) or not count:
        raise ValueError(f"{count} heads are declared, but {len(blocks)} exist")
    like = target.embeddings(torch.zeros(1, dtype=torch.int64, device=target.platform.device))
    width = like.shape[1]

    def placed(tensor: Tensor, *shape: int) -> Tensor:
        if tensor.shape != shape:
            raise ValueError(f"{list(tensor.shape)} where {list(shape)} is required")
        return tensor.to(like.device, like.dtype)

    words = stored.get(_WORDS)
    rows = target.loaded.vocabulary if words is None else len(words)
    return Heads(
        [
            [
                (
                    placed(block["weight"], width, width),
                    placed(block["bias"], width) if "bias" in block else None,
                )
                for _, block in sorted(blocks[head].items())
            ]
            for head in range(count)
        ],
        [
            None if output is None else placed(output, rows, width)
            for output in (outputs.get(head, shared) for head in range(count))
        ],
        None if words is None else words.to(like.device, torch.int64),
        target,
        table,
    )


def _tensors(folder: Path) -> Mapping[str, Tensor]:
    """Read the stored tensors, by name."""
    file = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if file is None:
        raise ValueError(f"none of {', '.join(_FILES)} is there")
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    tensors: Mapping[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    return tensors
