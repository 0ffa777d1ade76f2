"""State on disk carries a version: the next release reads it, or makes it anew if it is a cache; an
older one refuses it by name and changes nothing.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from fault_sites import sites_of

from modulm.errors import ConfigError
from modulm_kv_transfer import block_files
from modulm_loader_npcache import loader as npcache
from modulm_mapped_weights.file import FileWriter
from modulm_mapped_weights.folder import CacheFolder
from modulm_plugin_lock import lock
from modulm_route_chat_page.conversations import ConversationStore
from modulm_route_files.store import check_format

ROOT = Path(__file__).parents[3]
BLOCK = b"a block of the cache"


def write_folder(folder: Path) -> None:
    check_format(folder)


def write_weights(folder: Path) -> None:
    cache = CacheFolder(folder, 1 << 20)
    with cache.lock("a"), cache.write("a") as writer:
        assert isinstance(writer, FileWriter)
        writer.add(torch.arange(4.0))
        writer.mapped()
        writer.finish({"key": "a"})


def read_weights(folder: Path) -> bool:
    return CacheFolder(folder, 1 << 20).read("a") is not None


def write_block(folder: Path) -> None:
    block_files.write(folder / "a.kv", {"model": "m"}, memoryview(BLOCK))


def read_block(folder: Path) -> bool:
    content = bytearray(len(BLOCK))
    try:
        block_files.read(folder / "a.kv", {"model": "m"}, memoryview(content))
    except block_files.BadFile as error:
        return "version is" not in str(error)
    return bytes(content) == BLOCK


def write_tensors(folder: Path) -> None:
    torch.save({"a": torch.arange(4.0)}, folder / "pytorch_model.bin")
    assert dict(npcache.NpcacheLoader(folder).read())


def read_tensors(folder: Path) -> bool:
    return all(one.file.endswith(".npy") for one in npcache.NpcacheLoader(folder).index().values())


def write_lock(folder: Path) -> None:
    (folder / "lock").write_text(lock.PluginLock(lock.FORMAT, {}).text())


def read_lock(folder: Path) -> bool:
    lock.read_lock.cache_clear()
    return lock.read_lock(str(folder / "lock"))[0].version == lock.FORMAT


def write_conversations(folder: Path) -> None:
    ConversationStore(str(folder / "chat.sqlite"))


def read_conversations(folder: Path) -> bool:
    return ConversationStore(str(folder / "chat.sqlite")).listed("owner") == []


def read_folder(folder: Path) -> bool:
    """Files and batches: the note that is beside them."""
    check_format(folder)
    note = json.loads((folder / "format.json").read_text())
    return bool(note["version"] == importlib.import_module("modulm_route_files.store").FORMAT)


@frozen
class Store:
    """version: where the number is. writers: modules that put files there. refusal: what an older
    release says; None for a cache, which it makes anew. reads_older: the next release reads it.
    """

    version: str
    writers: tuple[str, ...]
    write: Callable[[Path], None]
    read: Callable[[Path], bool]
    refusal: str | None = None
    reads_older: bool = False


STORES = {
    "files, batches and their records": Store(
        "modulm_route_files.store.FORMAT",
        ("modulm_route_files.disk", "modulm_route_files.batch_store"),
        write_folder, read_folder, "written by a newer release", reads_older=True,
    ),
    "packed weights": Store(
        "modulm_mapped_weights.file.VERSION",
        ("modulm_mapped_weights.file", "modulm_mapped_weights.folder"),
        write_weights, read_weights,
    ),
    "cache tier on disk": Store(
        "modulm_kv_transfer.block_files.VERSION", ("modulm_kv_transfer.block_files",),
        write_block, read_block,
    ),
    "tensors as numpy files": Store(
        "modulm_loader_npcache.loader._VERSION", ("modulm_loader_npcache.loader",),
        write_tensors, read_tensors,
    ),
    "lock of plugins": Store(
        "modulm_plugin_lock.lock.FORMAT", ("modulm_command_plugins.command",),
        write_lock, read_lock, "has format 2, this modulm reads 1",
    ),
    "conversations of the chat page": Store(
        "modulm_route_chat_page.conversations.FORMAT", ("modulm_route_chat_page.conversations",),
        write_conversations, read_conversations, "has format 2, this modulm reads up to 1",
        reads_older=True,
    ),
}  # fmt: skip
#: What else writes files, and why they have no version.
OTHERS = {
    "modulm_distributed.rounds": "pipes",
    "modulm_distributed.secret": "a secret is its bytes",
    "modulm_isolation.sandbox": "folders of a sandbox",
    "modulm_kv_peer.memory": "shared memory of running processes",
    "modulm_media.decode_worker": "/dev/null",
    "modulm_media.fetch": "reads",
    "modulm_downloads.headers": "headers of safetensors files as the hub has them",
    "modulm_downloads.snapshots": "files as their source has them, named by what they are",
    "modulm_route_ollama.library": "files of a checkpoint, as the client or the hub has them",
    "modulm_server.models.library": "settings by the names of flags, which people may write too",
    "modulm_server.output": "pipes",
    "modulm_tensor_files.beside": "files of a checkpoint, whose format is transformers'",
    "modulm_weight_transfer.receiver": "replaces adapters and drafts in memory",
    "modulm_weights_shared_memory.segment": "shared memory of running processes",
    "modulm_command_plugins.package_commands": "pip's files",
    "modulm_command_plugins.package_index": "wheels",
    "modulm_command_plugins.template": "source that belongs to the user",
    "modulm_command_quantize.output": "files of a checkpoint, whose format is transformers'",
    "modulm_command_run_batch.files": "OpenAI's records of a batch",
    "pytest_modulm.installation": "a package of a test",
    "modulm_demo.recipe.drafter": "files of a checkpoint",
    "modulm_demo.recipe.tokenizer": "files of a checkpoint",
    "modulm_cli.flag_help": "a help text",
    "modulm_mapped_weights.filling": "a text",
}
#: Calls that make a file, by their last name.
WRITES = ("write_bytes", "write_text", "replace", "os.rename", "os.open", "mkstemp")


def test_whatever_writes_files_is_here() -> None:
    writers: set[str] = set()
    for folder in [ROOT / "core/modulm", *ROOT.glob("core/*/*"), *ROOT.glob("plugins/*/*")]:
        for path in folder.rglob("*.py"):
            name = ".".join(path.relative_to(folder).with_suffix("").parts)
            if (
                "testing" not in path.parts
                and not name.endswith("testing")
                and any(word in path.read_text(encoding="utf-8") for word in WRITES)
                and any(site.removesuffix(")").endswith(WRITES) for site in sites_of(path))
            ):
                writers.add(name.removesuffix(".__init__"))
    known = {writer for store in STORES.values() for writer in store.writers} | OTHERS.keys()
    assert writers <= known, f"say what their files are: {sorted(writers - known)}"


@pytest.mark.parametrize("name", STORES)
def test_a_version_is_written_and_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next release is this one with a higher number."""
    store = STORES[name]
    module, _, number = store.version.rpartition(".")
    written = importlib.import_module(module)

    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def release(version: int) -> None:
        monkeypatch.setattr(written, number, version)

    this: Any = getattr(written, number)
    store.write(tmp_path)
    assert store.read(tmp_path)
    release(this + 1)
    if store.refusal is None or store.reads_older:  # the next release
        assert store.read(tmp_path) is store.reads_older
    store.write(tmp_path)
    assert store.read(tmp_path)
    before = contents()
    release(this)
    if store.refusal is None:
        assert not store.read(tmp_path)
        assert contents() == before
        store.write(tmp_path)
        assert store.read(tmp_path)
    else:
        with pytest.raises(ConfigError, match=store.refusal):
            store.read(tmp_path)
        assert contents() == before
