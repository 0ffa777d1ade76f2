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
    """A tensor on disk, described by the file's header. Its data has not been read.

    `dtype` is the torch name of the dtype that `read` yields; raw blocks of bytes are "uint8".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    bytes: int


@frozen
class TokenizerFiles:
    """A tokenizer stored with the weights, in the form of tokenizer files.

    `tokenizer` is the text of a tokenizer.json; `settings` the table of a tokenizer_config.json
    (`eos_token` and other special tokens, `chat_template`).
    """

    tokenizer: str
    settings: Mapping[str, object] = field(factory=dict)


class WeightLoader(ABC):
    """One checkpoint format. Names and shapes are checked on the index, before data is read."""

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]
    #: Patterns (`fnmatch`) of the files to download for this format; all that `--load-format NAME`
    #: downloads. None: those of the other formats.
    downloads: ClassVar[tuple[str, ...] | None] = None
    #: Whether they are downloaded only where no file of another format is.
    fallback: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def opens(cls, path: Path) -> str | None:
        """Return why this loader reads the file or folder `path`, or None if it does not."""

    @classmethod
    def choose_files(cls, part: str, names: Sequence[str]) -> Sequence[str] | None:
        """Choose the files of a hub repository that `owner/name:PART` refers to.

        Returns names out of `names`, the one to open first; None if none has this format. Raises
        CheckpointError if `part` matches none of them.
        """
        return None

    def __init__(self, path: Path, options: Mapping[str, object] | None = None) -> None:
        self.path = path

    def quantization(self) -> Mapping[str, object]:
        """Return `quantization_config` as stored in the weights, like that of a config.json.

        Called for a file whose configuration comes from elsewhere.
        """
        return {}

    # Called only for weights without a config.json beside them.

    def configuration(self) -> Mapping[str, object] | None:
        """Return the contents of a config.json, or None if the weights store none."""
        return None

    def generation_configuration(self) -> Mapping[str, object] | None:
        """Return the contents of a generation_config.json, or None."""
        return None

    def tokenizer(self) -> TokenizerFiles | None:
        """Return the tokenizer and chat template that are stored with the weights, or None."""
        return None

    def expect(self, tensors: Mapping[str, StoredTensor]) -> bool:
        """Receive the tensors that the model takes, by its own names. Called before `index`.

        Formats that generate weights return True: their names are then the model's own and are not
        rewritten. All others return False.
        """
        return False

    @abstractmethod
    def index(self) -> Mapping[str, StoredTensor]:
        """Return all tensors by name. Raises CheckpointError for truncated, missing or duplicate
        ones.
        """

    @abstractmethod
    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all tensors, each read when it is yielded, so that only one is in memory."""
