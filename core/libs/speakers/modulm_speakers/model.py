"""Speaking models: each new token is a frame of sound, described by several codes.

The engine samples a frame's first code like any token. The model completes the frame with the
others, and its codec turns frames into samples. The next token's input is the whole frame.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from attrs import frozen

from modulm.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

__all__ = ["CODES", "GIVEN", "MIXED", "STATES", "TEXTS", "Choose", "SpeakingModel", "StateSource"]

#: Name in `Batch.extras`: [tokens, codebooks] int64, the frame that each token stands for; -1 in
#: rows of text tokens, and for codes that a token lacks.
CODES = "codes"
#: Names in `Batch.extras` of models that speak beside a text model, in steps with rows that speak.
#: [tokens] int64: the text token that is spoken at each token of such rows; -1 for none.
TEXTS = "spoken_texts"
#: If any token has a state of the text model: [tokens, width] float32, and [tokens] bool.
STATES = "spoken_states"
GIVEN = "spoken_given"
#: [tokens] bool: which tokens are of rows that speak, if not all are.
MIXED = "speaking"

#: (logits [n, codebook_size], codebook) -> the chosen codes [n] int64.
Choose: TypeAlias = "Callable[[Tensor, int], Tensor]"


@frozen(kw_only=True)
class StateSource:
    """The states of a text model that rows that speak need.

    layer: index of the layer after which they are taken; None: after the final norm. width: their
    length.
    """

    layer: int | None
    width: int


class SpeakingModel(ABC):
    """What a model implements besides `modulm.contracts.model.Model`.

    codebooks: codes of a frame. codebook_size: values of a code that `complete` chooses. rate:
    samples per second. frame_samples: samples of a frame.
    """

    #: Why `modulm.testing.models.check_model`, which compares texts, cannot check it.
    kit_not_run: ClassVar[str] = "it answers in sound: compare its frames with an implementation"
    #: Why `modulm_speculation` drafts no tokens for it; None for a model beside a text model.
    no_drafts: ClassVar[str | None] = "its tokens are codes of sound"

    codebooks: int
    codebook_size: int
    rate: int
    frame_samples: int
    #: Whether it was loaded with what it needs to speak.
    speaks: bool = True
    #: Set by a model that speaks beside a text model: rows of texts and rows that speak share its
    #: steps, and both have caches for all layers.
    beside_text: StateSource | None = None
    #: Whether `flush` gives sound.
    flushes: bool = False

    def focus(self, speaking: np.ndarray | None) -> None:
        """Announce which of the next logits are of rows that speak: [n] bool; None if none are.

        For a model that speaks beside a text model.
        """

    @abstractmethod
    def complete(self, hidden: Tensor, first: Tensor, choose: Choose) -> Tensor:
        """Choose the other codes of frames: [n, codebooks] int64, `first` included.

        hidden: [n, hidden], what the first codes were sampled from. first: [n] int64.
        """

    @abstractmethod
    def ends(self, frames: np.ndarray) -> np.ndarray:
        """Return which frames end the sound: [n, codebooks] -> [n] bool."""

    @abstractmethod
    def is_heard(self, frames: np.ndarray) -> np.ndarray:
        """Return which frames are sound, and not only marks: [n, codebooks] -> [n] bool."""

    @abstractmethod
    def decode(
        self, frames: Tensor, states: Sequence[Any]
    ) -> tuple[Sequence[Tensor], Sequence[Any]]:
        """Turn frames into sound: [n, frames, codebooks] -> n times [samples] float32 in -1 to 1.

        states: for each of the n sounds what this method returned for its earlier frames; at its
        beginning, of `open_sound`. Several calls give the same samples as one call with all frames.
        """

    def open_sound(self, voice: str, seed: int | None) -> Any:
        """Return the state of a sound that begins. voice: of the row's `Script`, or empty."""
        return None

    def flush(self, state: Any) -> Tensor:
        """Return the samples that are left once a sound has no more frames, if it `flushes`."""
        raise UnsupportedError(f"{type(self).__name__} decodes frames as they come")
