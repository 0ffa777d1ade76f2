"""The base of speculators that `--speculative-config` chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self

from attrs import frozen

from modulm.contracts.drafter import Drafter
from modulm.errors import ConfigError

if TYPE_CHECKING:
    from modulm_speculation.target import Target

__all__ = ["Options", "Speculator"]

#: Each drafted token makes every step of a row larger, and all rows' buffers.
_MOST = 64


@frozen
class Options:
    """What every speculator takes. num_speculative_tokens: most that are drafted for a row."""

    num_speculative_tokens: int = 5

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.num_speculative_tokens <= _MOST:
            raise ConfigError("num_speculative_tokens", f"from 1 to {_MOST}")


class Speculator(Drafter):
    """A drafter with options of its own. `Config`: a subclass of `Options`.

    cheap: proposing costs next to nothing beside a step, so it is asked for as much as may be,
    also when less is verified: what would have been right is then known too.
    """

    api: ClassVar[int | tuple[int, int]] = 1
    Config: ClassVar[type] = Options
    cheap: ClassVar[bool] = False

    def __init__(self, config: Options) -> None:
        super().__init__(config)
        self.most = config.num_speculative_tokens

    @classmethod
    def open(cls, config: Options, target: Target) -> Self:
        """Make it for a model that is loaded; what it loads for itself is loaded here."""
        return cls(config)
