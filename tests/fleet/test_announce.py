"""Replicas of other machines: what they say, what is asked of them, and who is let in."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import attrs
import pytest

from modulm.config import EngineConfig
from modulm.errors import ConfigError, EngineDead, EngineError
from modulm.plugins import manager
from modulm_fleet.announce import Announcement, Announcements, address_of_rank, announce
from modulm_fleet.placement import placement
from modulm_fleet.secret import secret_file


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(autouse=True)
def own_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the secret of this user lies."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/modulm/data-parallel-secret"


def config(port: int, secret: Path | None, **flags: object) -> EngineConfig:
    return EngineConfig().with_parts({
        "data_parallel_size": 3, "data_parallel_size_local": 1, "data_parallel_rpc_port": port,
        "data_parallel_secret_file": secret and str(secret), **flags,
    })  # fmt: skip


def there(port: int, secret: Path | None, **flags: object) -> EngineConfig:
    own = {"headless": True, "data_parallel_start_rank": 1, "data_parallel_size_local": 2}
    return config(port, secret, **{**own, **flags})


def test_replicas_announce_themselves_and_are_refused_by_name(port: int, tmp_path: Path) -> None:
    plugins = manager.current()
    (secret := tmp_path / "secret").write_text("a secret of two machines")
    (other := tmp_path / "other").write_text("another one, as long as")
    here = config(port, secret)
    taking = Announcements(here, placement(here), plugins)
    try:
        for given, kind, words in (
            (there(port, other), EngineDead, "the secrets differ"),
            (there(port, None), EngineDead, "the secrets differ"),  # this user's own
            (there(port, secret, data_parallel_size=4), EngineError, "data-parallel-size is 4"),
        ):
            with pytest.raises(kind, match=words):
                announce(given, placement(given), plugins)
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" * 9)
            with suppress(ConnectionResetError):
                while stranger.recv(64):
                    pass
        assert not taking._hosts
        good = there(port, secret)
        with announce(good, placement(good), plugins):
            assert taking.wait() == [(r, f"127.0.0.1:{port + 1 + r}") for r in (1, 2)]
    finally:
        taking.close()


def test_other_versions_and_plugins_are_named() -> None:
    ours = Announcement("1.2", frozenset({("modulm-a", "1.2", "models/A", "a:A")}), 4, range(2))
    theirs = attrs.evolve(ours, ranks=range(2, 4))
    missing = range(2, 4)
    assert Announcement.unpack(theirs.pack()) == theirs
    assert ours.refuses(theirs, missing) is None
    old = attrs.evolve(theirs, version="1.1")
    assert ours.refuses(old, missing) == "modulm is 1.1 there and 1.2 here"
    more = attrs.evolve(theirs, installed=theirs.installed | {("evil", "0", "models/B", "b:B")})
    assert "evil differ" in str(ours.refuses(more, missing))
    assert "2 to 3 are there, and 3 to 3 are missing" in str(ours.refuses(theirs, range(3, 4)))


def test_an_address_that_others_reach_needs_a_secret(tmp_path: Path) -> None:
    (short := tmp_path / "short").write_text("few")
    (good := tmp_path / "good").write_text("sixteen bytes or more")
    assert secret_file("0.0.0.0", str(good)) == str(good)
    for host, file, words in (
        ("0.0.0.0", None, "is reachable from other machines"),
        ("127.0.0.1", str(short), "less than 16 bytes"),
        ("127.0.0.1", str(tmp_path / "none"), "No such file"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            secret_file(host, file)
        assert caught.value.field == "data_parallel_secret_file"


def test_without_a_file_a_user_has_a_secret_of_their_own(own_secret: Path) -> None:
    assert not own_secret.exists()
    with ThreadPoolExecutor(8) as pool:
        made = set(pool.map(lambda _: secret_file("127.0.0.1", None), range(8)))
    assert made == {str(own_secret)}
    assert own_secret.stat().st_mode & 0o777 == 0o600
    assert len(secret := own_secret.read_bytes()) == 64
    assert secret_file("::1", None) == str(own_secret)
    assert own_secret.read_bytes() == secret
    assert list(own_secret.parent.iterdir()) == [own_secret]


def test_a_secret_that_others_can_read_is_refused(own_secret: Path) -> None:
    secret_file("127.0.0.1", None)
    own_secret.chmod(0o644)
    with pytest.raises(ConfigError, match="readable by you only"):
        secret_file("127.0.0.1", None)
    own_secret.unlink()
    (planted := own_secret.with_name("planted")).write_text("what somebody else knows")
    planted.chmod(0o600)
    own_secret.symlink_to(planted)
    with pytest.raises(ConfigError, match="readable by you only"):
        secret_file("127.0.0.1", None)


def test_a_folder_that_cannot_be_written_is_named(own_secret: Path) -> None:
    own_secret.parent.parent.mkdir()
    own_secret.parent.write_text("a file")
    with pytest.raises(ConfigError, match="use a readable file"):
        secret_file("127.0.0.1", None)


def test_where_a_replica_listens() -> None:
    assert address_of_rank("10.1.2.3", 29550, 2) == "10.1.2.3:29553"
    assert address_of_rank("fd00::1", 29550, 0) == "[fd00::1]:29551"
