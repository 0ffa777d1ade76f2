"""Checkpoints from buckets: of S3 on moto's server; the rest with fsspec's files in memory."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from modulm import LLM, EngineConfig, SamplingParams
from modulm.errors import CheckpointError, ConfigError
from modulm.loading import open_checkpoint
from modulm.loading.sources import fetch, tokenizer_path
from modulm.plugins import current
from modulm.testing.checkpoints import make_tiny
from modulm_downloads import snapshots
from modulm_hooks_object_stores import stores
from modulm_memory.report import report

#: What no client may take from the machine that runs the tests.
VARIABLES = {
    "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny(tmp_path_factory.mktemp("tiny") / "model")
    (folder / "README.md").write_text("not needed")
    return folder


@pytest.fixture
def bucket(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryFileSystem]:
    """A bucket in memory that counts what is read from it."""
    store = stores.Store("fsspec", "MEMORY_KEY", "MEMORY_URL names another endpoint")
    monkeypatch.setitem(stores.STORES, "memory", store)  # type: ignore[arg-type]
    client = fsspec.filesystem("memory")
    for file in tiny.iterdir():
        client.pipe_file(f"/models/tiny/{file.name}", file.read_bytes())
    client.pipe_file("/models/tiny/original/old/model.safetensors", b"ignored")
    yield client
    client.store.clear()
    client.pseudo_dirs[:] = [""]


def config(tmp_path: Path, model: str = "memory://models/tiny", **flags: Any) -> EngineConfig:
    return EngineConfig.from_keywords(model=model, download_dir=str(tmp_path / "cache"), **flags)


class Reads(list[tuple[str, int]]):
    """Counts the pieces that are read; `fail_after` of them there is no connection."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.fail_after: int | None = None
        read = MemoryFileSystem.cat_file

        def counted(client: Any, path: str, start: int, end: int) -> bytes:
            if self.fail_after is not None and len(self) >= self.fail_after:
                raise ConnectionError("no route to host")
            self.append((path.rpartition("/")[2], start))
            data: bytes = read(client, path, start=start, end=end)
            return data

        monkeypatch.setattr(MemoryFileSystem, "cat_file", counted)


@pytest.mark.usefixtures("bucket")
def test_needed_files_are_downloaded_once(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)
    first = open_checkpoint(config(tmp_path), current()).path
    names = {file.name for file in first.iterdir()}
    assert names == {file.name for file in tiny.iterdir()} - {"README.md"}
    assert (first / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    reads.clear()
    assert open_checkpoint(config(tmp_path), current()).path == first
    assert reads == []


def test_what_changed_is_downloaded_again(
    bucket: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_checkpoint(config(tmp_path), current())
    changed = (first.path / "config.json").read_bytes().replace(b"{", b'{"marked": true,', 1)
    bucket.pipe_file("/models/tiny/config.json", changed)
    reads = Reads(monkeypatch)
    second = open_checkpoint(config(tmp_path), current())
    assert second.config["marked"] is True
    assert "marked" not in first.config
    assert [name for name, _ in reads] == ["config.json"]


@pytest.mark.usefixtures("bucket")
def test_an_interrupted_download_goes_on_where_it_ended(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "_PIECE", 4096)
    monkeypatch.setattr(snapshots, "_READS", 1)
    reads = Reads(monkeypatch)
    reads.fail_after = 8
    message = r"the store cannot be reached \(no route to host\); MEMORY_URL names another endpoint"
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(config(tmp_path), current())
    interrupted = set(reads)
    assert len(interrupted) == 8
    reads.clear()
    reads.fail_after = None
    folder = open_checkpoint(config(tmp_path), current()).path
    assert not interrupted & set(reads)
    for file in folder.iterdir():
        assert file.read_bytes() == (tiny / file.name).read_bytes()


@pytest.mark.usefixtures("bucket")
def test_without_a_connection_the_last_download_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: Any, **more: Any) -> None:
        raise ConnectionError("no route to host")

    first = open_checkpoint(config(tmp_path), current()).path
    monkeypatch.setattr(MemoryFileSystem, "find", fail)
    with caplog.at_level(logging.WARNING, logger="modulm"):
        assert open_checkpoint(config(tmp_path), current()).path == first
    assert "using the files downloaded before" in caplog.text
    with pytest.raises(CheckpointError, match="the store cannot be reached"):
        open_checkpoint(config(tmp_path / "elsewhere"), current())


def test_a_damaged_download_is_refused(
    bucket: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Google's and Azure's stores say the checksum of a file."""
    contents = bucket.cat_file("/models/tiny/config.json")
    find = MemoryFileSystem.find

    def with_checksums(client: Any, path: str, **more: Any) -> Any:
        found = find(client, path, **more)
        for entry in found.values():
            entry["content_settings"] = {"content_md5": hashlib.md5(contents).digest()}
        return found

    monkeypatch.setattr(MemoryFileSystem, "find", with_checksums)
    single = "memory://models/tiny/config.json"
    path = fetch(single, config(tmp_path))
    assert path is not None
    assert path.read_bytes() == contents
    with pytest.raises(CheckpointError, match=r"model\.safetensors: md5 .* instead of .* damaged"):
        fetch("memory://models/tiny/model.safetensors", config(tmp_path))


@pytest.mark.usefixtures("bucket")
def test_an_estimate_reads_headers_alone(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)
    text, fits = report(config(tmp_path), ())
    assert fits
    whole, _ = report(config(tmp_path, str(tiny)), ())
    assert text.splitlines()[1:4] == whole.splitlines()[1:4]
    assert [start for name, start in reads if name.endswith(".safetensors")] == [0, 8]
    assert not [*tmp_path.rglob("*.safetensors")]


@pytest.mark.parametrize(
    ("name", "flags", "error", "message"),
    [
        ("memory://models/none", {}, CheckpointError, "no such folder"),
        ("memory://", {}, CheckpointError, "must be memory://BUCKET/FOLDER"),
        ("memory://models/tiny", {"revision": "v1"}, ConfigError, "has no revisions"),
        ("gs://a/b", {}, CheckpointError, r"needs the package gcsfs.*object-stores\[gs\]"),
        ("s3://a", {"object_store_options": {"s4": {}}}, ConfigError, "'s4' is no scheme"),
        ("ftp://a/b", {}, CheckpointError, "is neither a folder nor a hub id"),
    ],
)
def test_what_is_wrong_is_said(
    bucket: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    name: str, flags: dict[str, Any], error: type[Exception], message: str,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(error, match=message):
        open_checkpoint(config(tmp_path, name, **flags), current())


@pytest.fixture(scope="module")
def s3(tiny: Path) -> Iterator[str]:
    """moto's server with one model and one adapter's file; its address."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in VARIABLES.items():
            patch.setenv(name, value)
        client = boto3.client("s3", endpoint_url=address)
        client.create_bucket(Bucket="models")
        for file in tiny.iterdir():
            client.upload_file(str(file), "models", f"llms/tiny/{file.name}")
    yield address
    server.stop()


@pytest.fixture
def variables(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**VARIABLES, "AWS_ENDPOINT_URL": s3}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("variables")
def test_a_model_of_a_bucket_of_s3(tiny: Path, tmp_path: Path) -> None:
    flags = {"download_dir": str(tmp_path), "device": "cpu", "max_model_len": 64}
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    texts = []
    for name in (str(tiny), "s3://models/llms/tiny"):
        with LLM(name, **flags) as llm:
            texts.append(llm.generate(["one"], params)[0].outputs[0].token_ids)
    assert texts[0] == texts[1]
    with LLM(str(tiny), tokenizer="s3://models/llms/tiny/", **flags) as llm:
        assert llm.generate(["one"], params)[0].outputs[0].token_ids == texts[0]
    named = config(tmp_path, tokenizer="s3://models/llms/tiny")
    folder = Path(tokenizer_path(named, tiny))
    assert (folder / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("variables")
def test_errors_of_s3_say_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="no such bucket, folder or file"):
        open_checkpoint(config(tmp_path, "s3://nobody/tiny"), current())
    with pytest.raises(CheckpointError, match="no such folder"):
        open_checkpoint(config(tmp_path, "s3://models/llms/none"), current())
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    fsspec.filesystem("s3").clear_instance_cache()
    with pytest.raises(CheckpointError, match="cannot be reached.*AWS_ENDPOINT_URL names another"):
        open_checkpoint(config(tmp_path, "s3://models/other"), current())
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    fsspec.filesystem("s3").clear_instance_cache()
    with pytest.raises(CheckpointError, match=r"access denied.*AWS_ACCESS_KEY_ID.*\"anon\": true"):
        open_checkpoint(config(tmp_path, "s3://models/other"), current())
