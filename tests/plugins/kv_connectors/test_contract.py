"""The contract kit over both tiers, and faults that it catches."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from modulm.errors import ConfigError
from modulm.testing.kv_connectors import (
    block_names,
    check_bounded,
    check_connector,
    check_holds,
    open_tier,
)
from modulm_command_kv.command import command
from modulm_kv_disk.connector import DiskConnector, DiskOptions, _Index
from modulm_kv_host.connector import HostConnector, HostOptions
from modulm_kv_multi.connector import MultiConnector, MultiOptions
from modulm_kv_transfer import block_files
from modulm_kv_transfer.copies import BlockCopier


def host(size: int = 1 << 20) -> HostConnector:
    return HostConnector(HostOptions(cpu_bytes_to_use=size))


def disk(folder: Path, size: int = 1 << 20) -> DiskConnector:
    return DiskConnector(DiskOptions(str(folder), size))


def used(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_host_memory() -> None:
    check_connector(host)
    check_bounded(lambda: host(2000), lambda: 0, 2000)
    check_holds(lambda: host(4000))


def test_files(tmp_path: Path) -> None:
    check_connector(lambda: disk(tmp_path / "all"), durable=True)
    few = tmp_path / "few"
    check_bounded(lambda: disk(few, 6000), lambda: used(few), 6000)
    held = tmp_path / "held"
    check_holds(lambda: disk(held, 12000), durable=True)


def test_several_tiers(tmp_path: Path) -> None:
    def tiers() -> MultiConnector:
        tables = (
            {"kv_connector": "host", "kv_connector_extra_config": {"cpu_bytes_to_use": 4000}},
            {
                "kv_connector": "disk",
                "kv_connector_extra_config": {
                    "shared_storage_path": str(tmp_path), "max_bytes": 16_000,
                },
            },
        )  # fmt: skip
        return MultiConnector(MultiOptions(tables))

    check_connector(tiers, durable=True)
    check_holds(tiers)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ((), "at least one table"),
        (({"kv_connector": 1},), r"connectors\[0\]: kv_connector: must be the name"),
        (({"kv_connector": "host", "port": 1},), r"connectors\[0\]: port is unknown"),
        (({"kv_connector": "host", "kv_role": "kv_producer"},), "kv_role"),
        (({"kv_connector": "MultiConnector"},), "multi cannot be combined"),
        (({"kv_connector": "host", "kv_connector_extra_config": {"x": 1}},), "x"),
    ],
)
def test_wrong_tables_of_tiers(tables: tuple[dict[str, object], ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MultiConnector(MultiOptions(tables))


class _SwapsBlocks(BlockCopier):
    def load(self, blocks, stored):
        super().load([list(reversed(ids)) for ids in blocks], stored)


class _SkipsALayer(BlockCopier):
    def load(self, blocks, stored):
        self._views, self._arrays = self._views[:-1], self._arrays[:-1]
        super().load(blocks, stored)


class _WritesElsewhere(BlockCopier):
    def load(self, blocks, stored):
        super().load(blocks, stored)
        self._views[0][2][20].fill_(1)


@pytest.mark.parametrize("fault", [_SwapsBlocks, _SkipsALayer, _WritesElsewhere])
def test_the_kit_sees_wrong_copies(fault: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modulm_kv_transfer.copies.BlockCopier", fault)
    with pytest.raises(AssertionError, match="bytes|order|other blocks"):
        check_connector(host)


@pytest.mark.parametrize("quota", [True, False])
def test_the_kit_sees_what_is_wrong_with_holds(
    quota: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if quota:
        monkeypatch.setattr(HostConnector, "limit_holds", _Unlimited.limit_holds)
    else:
        monkeypatch.setattr("modulm_kv_host.connector._Mover.hold", lambda self, hold: None)
    with pytest.raises(AssertionError, match="more than its share" if quota else "was evicted"):
        check_holds(lambda: host(4000))


class _Unlimited(HostConnector):
    def limit_holds(self, share: float, per_key: float) -> None:
        self._shares = 0.9, 1.0


def test_the_kit_sees_an_index_that_counts_over_gaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Index, "match", lambda self, _, names, __: sum(map(self._has, names)))
    with pytest.raises(AssertionError, match="gap"):
        check_connector(lambda: disk(tmp_path), durable=True)


def test_the_kit_sees_models_mixed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bind = DiskConnector.bind
    monkeypatch.setattr(DiskConnector, "bind", lambda self, _, ranks: bind(self, "0" * 32, ranks))
    with pytest.raises(AssertionError, match="another model"):
        check_connector(lambda: disk(tmp_path), durable=True)


def test_the_kit_sees_a_store_without_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_files, "evict", lambda folder, most: 0)
    with pytest.raises(AssertionError, match="at most 6000"):
        check_bounded(lambda: disk(tmp_path, 6000), lambda: used(tmp_path), 6000)


@pytest.mark.parametrize("damage", ["torn", "changed", "foreign"])
def test_a_bad_file_is_refused_and_removed(damage: str, tmp_path: Path) -> None:
    names = block_names(2)
    with open_tier(disk(tmp_path)) as tier:
        assert tier.save(1, names)
        first, second = sorted(tmp_path.rglob("*.kv"))
        content = first.read_bytes()
        changed = {
            "torn": content[:-9],
            "changed": content[:-1] + bytes([content[-1] ^ 1]),
            "foreign": second.read_bytes(),
        }
        first.write_bytes(changed[damage])
        assert not tier.load(2, names, 9)
        assert tier.match(names) == 0
        assert tier.save(3, names)
        assert tier.load(4, names, 9)


def test_temporary_files_are_told_by_their_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is written stays, however old it looks; one whose writer died goes."""
    model = "0" * 32
    path = block_files.block_path(tmp_path, model, 0, 1, b"name")
    abandoned = path.with_name(f".{path.name}.1.2")
    replace, looks = Path.replace, []

    def look_before(self: Path, target: Path) -> Path:
        os.utime(self, (0, 0))
        abandoned.write_bytes(b"half a blo")
        looks.append([file.path for file in block_files.scan(tmp_path)])
        assert self.exists()
        assert not abandoned.exists()
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", look_before)
    block_files.write(path, {}, memoryview(b"block"))
    assert looks == [[]]
    assert [file.path for file in block_files.scan(tmp_path)] == [path]


def test_a_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with open_tier(disk(tmp_path)) as tier:
        monkeypatch.setattr(Path, "replace", full)
        assert not tier.save(1, block_names(2))
        assert tier.match(block_names(2)) == 0
    assert used(tmp_path) == 0


def test_two_engines_share_a_folder(tmp_path: Path) -> None:
    names = block_names(3)
    with open_tier(disk(tmp_path)) as one, open_tier(disk(tmp_path)) as other:
        assert one.save(1, names)
        assert other.match(names) == 3
        assert other.load(1, names, 9)


def test_a_hit_counts_where_all_ranks_have_it(tmp_path: Path) -> None:
    names = block_names(2)
    with open_tier(disk(tmp_path), ranks=2) as tier:
        assert tier.save(1, names)
        next(path for path in tmp_path.rglob("1of2/*/*.kv") if names[1].hex() in path.name).unlink()
        assert tier.match(names) == 1


def test_a_threshold_saves_what_comes_again() -> None:
    index = HostConnector(HostOptions(store_threshold=2)).index()
    names = block_names(3)
    index.match("one", names, 0)
    index.match("one", names, 0)
    assert index.blocks_to_save("one", names) == 0
    index.match("two", names[:2], 0)
    assert index.blocks_to_save("two", names) == 2


def test_the_command_lists_and_clears(tmp_path: Path) -> None:
    with open_tier(disk(tmp_path)) as tier:
        assert tier.save(1, block_names(2))
    listed = CliRunner().invoke(command, ["list", "--path", str(tmp_path)])
    assert listed.output.startswith("0" * 32 + "  2 files")
    wrong = CliRunner().invoke(command, ["clear", "..", "--path", str(tmp_path)])
    assert wrong.exit_code == 2
    done = CliRunner().invoke(command, ["clear", "0" * 32, "--path", str(tmp_path)])
    assert done.exit_code == 0
    assert used(tmp_path) == 0
