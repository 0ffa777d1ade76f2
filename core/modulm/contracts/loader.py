"""Weight loader: reads one checkpoint format (group `modulm.loaders`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from attrs import field, frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import torch

__all__ = ["API", "StoredTensor", "TokenizerFiles", "WeightLoader"]

API = 1


@frozen
class StoredTensor:
    """A tensor on disk, known from the file's header: nothing of it has been read.

    `dtype` is torch's name of what `read` gives; raw blocks of bytes are "uint8".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    bytes: int


@frozen
class TokenizerFiles:
    """A tokenizer that lies in the weights: what its files would say, had it some.

    `tokenizer` is the text of tokenizer.json; `settings` the table of tokenizer_config.json
    (`eos_token` and other special tokens, `chat_template`).
    """

    tokenizer: str
    settings: Mapping[str, object] = field(factory=dict)


class WeightLoader(ABC):
    """One checkpoint format. All checks of names and shapes happen on the index, before reading."""

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]

    @classmethod
    @abstractmethod
    def opens(cls, path: Path) -> str | None:
        """A reason why this loader is the one for the file or folder `path`, or None."""

    @classmethod
    def choose_files(cls, part: str, names: Sequence[str]) -> Sequence[str] | None:
        """The files that `owner/name:PART` means of a hub repository's `names`, the first to be
        opened first. None: no file is of this format. Raises CheckpointError if `part` is none of
        the files that are."""
        return None

    def __init__(self, path: Path, options: Mapping[str, object] | None = None) -> None:
        self.path = path

    def quantization(self) -> Mapping[str, object]:
        """The key `quantization_config` of config.json, where the weights themselves say how layers
        are stored. Asked of a file whose configuration comes from elsewhere."""
        return {}

    # Asked only of weights that have no config.json beside them.

    def configuration(self) -> Mapping[str, object] | None:
        """What config.json would say, by its names; None: the weights say nothing of it."""
        return None

    def generation_configuration(self) -> Mapping[str, object] | None:
        """What generation_config.json would say."""
        return None

    def tokenizer(self) -> TokenizerFiles | None:
        """The tokenizer and chat template that are stored with the weights."""
        return None

    def expect(self, tensors: Mapping[str, StoredTensor]) -> bool:
        """What the model takes, by its own names, told before `index` is asked.

        A format that holds weights has no use for it and returns False. One that makes them up
        returns True: its names are the model's own and are not rewritten.
        """
        return False

    @abstractmethod
    def index(self) -> Mapping[str, StoredTensor]:
        """Every tensor by name. Raises CheckpointError for truncated, missing or doubled ones."""

    @abstractmethod
    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor, each read when it is yielded and not kept: peak memory is one tensor."""
