"""pull, list and rm, with a hub of our own behind real HTTP and the hub client's real cache."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from click.testing import CliRunner, Result
from huggingface_hub import constants

from modulm.cli.main import cli
from modulm.testing.checkpoints import make_tiny

COMMIT = "0" * 39 + "7"


class Hub(BaseHTTPRequestHandler):
    """The three routes that a download asks for: the files' names, their heads, their bytes."""

    files: ClassVar[dict[str, bytes]] = {}

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/me/tiny/tree/"):
            self._send(json.dumps([self._entry(name) for name in self.files]).encode())
            return
        if self.path.startswith("/api/models/me/tiny/"):
            names = [{"rfilename": name} for name in self.files]
            self._send(json.dumps({"id": "me/tiny", "sha": COMMIT, "siblings": names}).encode())
            return
        prefix = f"/me/tiny/resolve/{COMMIT}/"
        body = self.files.get(self.path.removeprefix(prefix))
        if not self.path.startswith(prefix) or body is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self._send(body)

    def _entry(self, name: str) -> dict[str, object]:
        body = self.files[name]
        digest = hashlib.sha1(body).hexdigest()
        return {"type": "file", "path": name, "size": len(body), "oid": digest}

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = make_tiny(tmp_path_factory.mktemp("hub") / "tiny")
    Hub.files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words))


def test_a_model_comes_is_listed_and_goes(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub + "/{repo_id}/resolve/{revision}/{filename}"
    )
    where = ["--download-dir", str(tmp_path / "cache")]
    (tmp_path / "cache").mkdir()
    assert "no model is in the cache" in run("list", *where).output
    pulled = run("pull", "me/tiny", *where)
    assert pulled.exit_code == 0, pulled.output
    folder = Path(pulled.output.splitlines()[-1])
    assert (folder / "config.json").read_bytes() == Hub.files["config.json"]
    (row,) = json.loads(run("list", "--json", *where).output)
    assert row["model"] == "me/tiny"
    assert row["revisions"] == [COMMIT]
    assert row["bytes"] == sum(file.stat().st_size for file in folder.iterdir())
    assert "me/tiny" in run("list", *where).output
    assert run("rm", "me/tinny", *where).exit_code == 1
    kept = CliRunner().invoke(cli, ["rm", "me/tiny", *where], input="n\n")
    assert kept.exit_code == 1
    assert folder.is_dir()
    gone = run("rm", "-y", "me/tiny", *where)
    assert gone.exit_code == 0, gone.output
    assert json.loads(run("list", "--json", *where).output) == []


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    nowhere = run("list", "--download-dir", str(tmp_path / "nowhere"))
    assert nowhere.exit_code == 1
    assert "modulm pull" in nowhere.output


def test_models_that_are_not_there_and_servers_that_do_not_answer(tmp_path: Path) -> None:
    removed = run("rm", "me/none", "--download-dir", str(tmp_path))
    assert "me/none is not in the cache, which is empty" in removed.output
    shown = run("ps", "--url", "http://127.0.0.1:9")
    assert "no answer from http://127.0.0.1:9: " in shown.output
    assert shown.output.endswith("; --url names another server\n")
