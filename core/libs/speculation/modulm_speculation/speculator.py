"""Base class of speculators chosen by `--speculative-config`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

from attrs import frozen

from modulm.contracts.drafter import Drafter
from modulm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from modulm.contracts.checkpoint import Checkpoint
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.model import Model
    from modulm_speculation.target import Target

__all__ = ["Branch", "Options", "Speculator", "single_branches"]

#: An alternative to a row's drafts: how many of them are before it, and its tokens, [n] int64.
Branch: TypeAlias = "tuple[int, np.ndarray]"


def single_branches(tokens: np.ndarray) -> list[Branch]:
    """Return branches of one token: [n] int64, an alternative to each draft."""
    return [(depth, tokens[depth : depth + 1]) for depth in range(len(tokens))]


#: Upper bound, since each drafted token enlarges the buffers of all rows.
_MOST = 64


@frozen
class Options:
    """Options of every speculator. num_speculative_tokens: maximum drafts per row and step."""

    num_speculative_tokens: int = 5

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.num_speculative_tokens <= _MOST:
            raise ConfigError("num_speculative_tokens", f"from 1 to {_MOST}")


class Speculator(Drafter):
    """A drafter that `--speculative-config` can choose. `Config`: a subclass of `Options`.

    cheap: proposing costs almost nothing compared with a step. The maximum is then always proposed,
    even if less is verified, to measure which drafts would have been accepted.
    """

    api: ClassVar[int | tuple[int, int]] = 1
    Config: ClassVar[type] = Options
    cheap: ClassVar[bool] = False
    #: How many classes of drafts `classes_of_drafts` distinguishes.
    classes: ClassVar[int] = 1
    #: Whether drafts are trees, with the `branches` of a proposal. Needs attention with masks.
    trees: bool = False
    #: With `--speculative auto`, speculators are tried in descending order of this number.
    preference: ClassVar[int] = 0

    def __init__(self, config: Options) -> None:
        super().__init__(config)
        self.most = config.num_speculative_tokens

    @classmethod
    def automatic(
        cls, config: EngineConfig, checkpoint: Checkpoint, family: type[Model]
    ) -> Mapping[str, Any] | str:
        """Return the options with which `--speculative auto` uses it, or why it does not.

        config: resolved. checkpoint, family: those of the model that verifies the drafts.
        """
        return "used only if it is named"

    def classes_of_drafts(self) -> Sequence[int]:
        """Return the class of each row's drafts in the last proposal, if there are several classes:
        how often drafts are accepted is counted for each class.
        """
        return ()

    def branches(self) -> Sequence[Sequence[Branch]]:
        """Return, for each row of the last proposal, the branches beside its drafts, with `trees`.

        Drafts and branches of a row together are at most the row's `most`, the rest is not
        verified.
        """
        return ()

    @classmethod
    def open(cls, config: Options, target: Target) -> Self:
        """Create the speculator for a loaded model, and load its own weights, if any."""
        return cls(config)
