"""ModelScope instead of the Hugging Face hub, from a server with the paths of its HTTP API."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from modulm import EngineConfig
from modulm.errors import CheckpointError
from modulm.loading import open_checkpoint
from modulm.loading.sources import tokenizer_path
from modulm.plugins import current
from modulm.testing.checkpoints import make_tiny

MODELS = "/api/v1/models/"


class Server(ThreadingHTTPServer):
    """Repositories below `root`; `requests` are the paths and ranges that were asked for."""

    root: Path
    requests: list[tuple[str, str | None]]
    damaged = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    """What ModelScope answers to a list of files and to a file, which it redirects."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: value[0] for name, value in parse_qs(url.query).items()}
        if url.path.startswith("/store/"):
            return self.send_file(url.path.removeprefix("/store/"))
        path = url.path.removeprefix(MODELS)
        repository = "/".join(path.split("/")[:2])
        folder = self.server.root / repository
        self.server.requests.append((query.get("FilePath", path), self.headers.get("Range")))
        if repository == "someone/private" and "m_session_id=secret" not in self.headers.get(
            "Cookie", ""
        ):
            return self.send(403, b"{}")
        if not folder.is_dir() or query["Revision"] not in ("master", "v1"):
            return self.send(404, b'{"Code": 10010205001, "Success": false}')
        if path == f"{repository}/repo/files":
            return self.send(200, json.dumps(self.listing(folder)).encode())
        return self.send(302, b"", Location=f"/store/{repository}/{query['FilePath']}")

    def listing(self, folder: Path) -> dict[str, Any]:
        files: list[dict[str, object]] = [{"Path": "docs", "Type": "tree", "Size": 0, "Sha256": ""}]
        for file in sorted(path for path in folder.iterdir() if path.is_file()):
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            size = file.stat().st_size
            files.append({"Path": file.name, "Type": "blob", "Size": size, "Sha256": digest})
        return {"Code": 200, "Data": {"Files": files}, "Success": True}

    def send_file(self, name: str) -> None:
        content = (self.server.root / name).read_bytes()
        if self.server.damaged and name.endswith(self.server.damaged):
            content = content[::-1]
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        self.send(206, content[first : last + 1])

    def send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *rest: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("modelscope")
    make_tiny(root / "someone" / "tiny")
    (root / "someone" / "private").symlink_to(root / "someone" / "tiny")
    return root


@pytest.fixture
def server(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Answers)
    server.root, server.requests = root, []
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", server.url)
    monkeypatch.delenv("MODELSCOPE_API_TOKEN", raising=False)
    yield server
    server.shutdown()
    server.server_close()


def config(tmp_path: Path, model: str = "someone/tiny", **flags: Any) -> EngineConfig:
    flags = {"use_modelscope": True, "download_dir": str(tmp_path / "cache"), **flags}
    return EngineConfig.from_keywords(model=model, **flags)


def test_hub_ids_lead_to_modelscope(server: Server, root: Path, tmp_path: Path) -> None:
    folder = open_checkpoint(config(tmp_path), current()).path
    expected = root / "someone" / "tiny"
    assert {file.name for file in folder.iterdir()} == {file.name for file in expected.iterdir()}
    assert (folder / "model.safetensors").read_bytes() == (
        expected / "model.safetensors"
    ).read_bytes()
    named = config(tmp_path, "demo", use_modelscope=False, tokenizer="modelscope://someone/tiny")
    assert (Path(tokenizer_path(named, "")) / "tokenizer.json").is_file()
    server.requests.clear()
    assert open_checkpoint(config(tmp_path), current()).path == folder
    assert server.requests == [("someone/tiny/repo/files", None)]


def test_without_a_connection_the_last_download_serves(server: Server, tmp_path: Path) -> None:
    folder = open_checkpoint(config(tmp_path), current()).path
    server.shutdown()
    server.server_close()
    assert open_checkpoint(config(tmp_path), current()).path == folder
    message = r"cannot be reached at http://127.0.0.1:\d+ .*MODELSCOPE_ENDPOINT names another"
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(config(tmp_path, "someone/other"), current())


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("someone/nobody", {}, r"no such model or revision \(master\) on ModelScope"),
        ("someone/tiny", {"revision": "v9"}, r"no such model or revision \(v9\)"),
        ("someone/private", {}, "access denied: set MODELSCOPE_API_TOKEN"),
        ("someone/tiny:Q8_0", {}, "no installed loader knows of parts"),
    ],
)
@pytest.mark.usefixtures("server")
def test_what_is_not_there_is_said(
    tmp_path: Path, name: str, flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(config(tmp_path, name, **flags), current())


def test_private_models_need_the_token(server: Server, tmp_path: Path) -> None:
    flags = {"modelscope_token": "secret", "revision": "v1"}
    assert open_checkpoint(config(tmp_path, "someone/private", **flags), current()).path.is_dir()


def test_a_damaged_file_is_refused(server: Server, tmp_path: Path) -> None:
    server.damaged = "tokenizer.json"
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: sha256 .* is damaged"):
        open_checkpoint(config(tmp_path), current())
