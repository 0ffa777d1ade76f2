"""Files of CoreWeave's tensorizer: the tensors of a Hugging Face model in one stream.

Used with `--load-format tensorizer --model-loader-extra-config '{"tensorizer_uri": "..."}'` and
vLLM's keys. Without a URI, model.tensors in the checkpoint's folder is read. The library opens
files, http(s):// and s3:// URIs. Write such a file with `TensorSerializer(...).write_module(model)`
or `write_state_dict(...)`; files that vLLM wrote from its own layers are rejected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen

from modulm.contracts.loader import StoredTensor, WeightLoader
from modulm.errors import CheckpointError
from modulm.plugins.index import to_install
from modulm.plugins.options import structure

__all__ = ["TensorizerConfig", "TensorizerLoader"]

_FILE = "model.tensors"
#: Tensor that marks files written by vLLM.
_MARKER = "vllm_tensorized_marker"
#: numpy's names of dtypes, without the byte order.
_DTYPES = {
    "f2": "float16", "f4": "float32", "f8": "float64", "b1": "bool",
    "i1": "int8", "i2": "int16", "i4": "int32", "i8": "int64",
    "u1": "uint8", "u2": "uint16", "u4": "uint32", "u8": "uint64",
}  # fmt: skip


@frozen
class TensorizerConfig:
    """Keys of `--model-loader-extra-config`.

    `tensorizer_dir` holds model.tensors if no URI is set. `vllm_tensorized` must be false.
    """

    tensorizer_uri: str | None = None
    tensorizer_dir: str | None = None
    vllm_tensorized: bool = False
    verify_hash: bool = False
    num_readers: int | None = None
    encryption_keyfile: str | None = None
    s3_access_key_id: str | None = None
    s3_secret_access_key: str | None = None
    s3_endpoint: str | None = None
    stream_kwargs: dict[str, Any] = field(factory=dict)
    deserialization_kwargs: dict[str, Any] = field(factory=dict)


class TensorizerLoader(WeightLoader):
    """Reads a stream sequentially, one tensor at a time."""

    name = "tensorizer"
    api = 1
    downloads = (_FILE,)
    fallback = True
    Config = TensorizerConfig

    def __init__(self, path: Path, options: Mapping[str, object] | None = None) -> None:
        super().__init__(path, options)
        flat = dict(options or {})
        nested = flat.pop("tensorizer_config", None)
        table = nested if isinstance(nested, dict) and not flat else {**(options or {})}
        self.config = structure(table, TensorizerConfig, "model_loader_extra_config")
        if self.config.vllm_tensorized:
            raise CheckpointError(f"{self.uri}: {_OTHER}")

    @classmethod
    def opens(cls, path: Path) -> str | None:
        if path.is_dir() and (path / _FILE).exists() and not any(path.glob("*.safetensors*")):
            return f"found {_FILE}"
        return None

    @property
    def uri(self) -> str:
        """The path or URI of the stream."""
        folder = self.config.tensorizer_dir or str(self.path)
        return self.config.tensorizer_uri or f"{folder.rstrip('/')}/{_FILE}"

    @cached_property
    def _index(self) -> Mapping[str, StoredTensor]:
        reader, stored = self._open(lazy_load=True), {}
        size = Path(self.uri).stat().st_size if Path(self.uri).exists() else None
        with reader:
            for path, entry in reader._metadata.items():
                name, shape = ".".join(map(str, path)), tuple(entry.shape)
                dtype = _dtype(entry.dtype)
                if dtype is None:
                    raise CheckpointError(f"{self.uri}: {name}: dtype {entry.dtype!r} is unknown")
                length, needed = entry.data_length, prod(shape) * getattr(torch, dtype).itemsize
                sealed = self.config.encryption_keyfile is not None
                if not sealed and length != needed:
                    raise CheckpointError(
                        f"{self.uri}: {name}: {dtype} of shape {list(shape)} takes {needed} "
                        f"bytes, not {length}"
                    )
                if size is not None and entry.data_offset + length > size:
                    raise CheckpointError(
                        f"{self.uri}: {name}: the file is truncated: "
                        f"{entry.data_offset + length} bytes expected, {size} found"
                    )
                stored[name] = StoredTensor(name, shape, dtype, Path(self.uri).name, needed)
        if _MARKER in stored:
            raise CheckpointError(f"{self.uri}: {_OTHER}")
        return stored

    def index(self) -> Mapping[str, StoredTensor]:
        return self._index

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        expected = self.index()
        with self._open(lazy_load=True) as reader:
            try:
                for _, _, path, tensor in reader.read_tensors():
                    name = path if isinstance(path, str) else ".".join(map(str, path))
                    if name not in expected:
                        raise CheckpointError(f"{self.uri}: {name}: missing from the file's index")
                    yield name, tensor.detach()
            except CheckpointError:
                raise
            except Exception as error:
                raise CheckpointError(f"{self.uri}: reading failed: {error}") from error

    def _open(self, **options: Any) -> Any:
        """Open the stream with the library's reader. Raises CheckpointError."""
        try:
            from tensorizer import DecryptionParams, TensorDeserializer
            from tensorizer.stream_io import open_stream
        except ImportError as error:
            raise CheckpointError(
                "--load-format tensorizer needs the package tensorizer"
                + to_install("modulm-loader-tensorizer[library]")
            ) from error
        config = self.config
        s3 = {
            "s3_access_key_id": config.s3_access_key_id,
            "s3_secret_access_key": config.s3_secret_access_key,
            "s3_endpoint": config.s3_endpoint,
        }
        reading = {"verify_hash": config.verify_hash, "num_readers": config.num_readers}
        try:
            if config.encryption_keyfile:
                key = Path(config.encryption_keyfile).read_bytes()
                options["encryption"] = DecryptionParams.from_key(key)
            stream = open_stream(self.uri, "rb", **{**s3, **config.stream_kwargs})
            return TensorDeserializer(
                stream, device="cpu", **{**reading, **config.deserialization_kwargs, **options}
            )
        except Exception as error:
            raise CheckpointError(f"{self.uri}: not a tensorizer file: {error!r}") from error


_OTHER = (
    "written by vLLM from its own fused layers, which is not supported; serialize the Hugging Face "
    "model instead"
)


def _dtype(written: str) -> str | None:
    """Return torch's name of a dtype in a header: numpy's name, or that, a zero byte and
    torch's.
    """
    plain, _, torch_name = written.partition("\0")
    name = torch_name.removeprefix("torch.") or _DTYPES.get(plain[1:])
    return name if name and isinstance(getattr(torch, name, None), torch.dtype) else None
