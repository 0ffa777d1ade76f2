"""A hub that huggingface_hub's client asks over HTTP: it lists, sends and takes files."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

__all__ = ["COMMIT", "Hub", "serve_hub"]

COMMIT = "c" * 40
_NAME = r"[\w.-]+/[\w.-]+"


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks of an endpoint."""

    protocol_version = "HTTP/1.1"
    root: Path

    def do_HEAD(self) -> None:
        self.answer(False)

    def do_GET(self) -> None:
        self.answer(True)

    def do_POST(self) -> None:
        path = urlsplit(self.path).path
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append(("POST", path))  # type: ignore[attr-defined]
        if path == "/api/repos/create":
            table = json.loads(body)
            name = (
                table["name"]
                if "/" in table["name"]
                else f"{table['organization']}/{table['name']}"
            )
            (self.root / name).mkdir(parents=True, exist_ok=True)
            self.send(200, {"url": f"{self.server.url}/{name}"})  # type: ignore[attr-defined]
        elif path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            modes = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                     for one in files]  # fmt: skip
            self.send(200, {"files": modes})
        elif match := re.fullmatch(rf"/api/models/({_NAME})/commit/main", path):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    file = self.root / match[1] / line["value"]["path"]
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(base64.b64decode(line["value"]["content"]))
            url = f"{self.server.url}/{match[1]}/commit/{COMMIT}"  # type: ignore[attr-defined]
            self.send(200, {"success": True, "commitOid": COMMIT, "commitUrl": url})
        else:
            self.send(404, {})

    def answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append((self.command, path))  # type: ignore[attr-defined]
        match = re.fullmatch(rf"/(api/models/)?({_NAME})(?:/(\w+)/(\w+)(?:/(.+))?)?", path)
        folder = self.root / match[2] if match else None
        if match is None or folder is None or not folder.is_dir():
            return self.send(404, {}, {"X-Error-Code": "RepoNotFound"}, body)
        if match[4] not in (None, "main", COMMIT):
            return self.send(404, {}, {"X-Error-Code": "RevisionNotFound"}, body)
        files = {file.relative_to(folder).as_posix(): file.stat().st_size
                 for file in folder.rglob("*") if file.is_file()}  # fmt: skip
        if match[1] and match[3] == "tree":
            return self.send(200, [{"type": "file", "path": name, "size": size, "oid": "a" * 40}
                                   for name, size in files.items()], {}, body)  # fmt: skip
        if match[1]:
            siblings = [{"rfilename": name, "size": size} for name, size in files.items()]
            table = {"id": match[2], "sha": COMMIT, "siblings": siblings}
            return self.send(200, table, {}, body)
        if match[5] not in files:
            return self.send(404, {}, {"X-Error-Code": "EntryNotFound"}, body)
        content = (folder / match[5]).read_bytes()
        etag = hashlib.sha256(content).hexdigest()
        return self.send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, body)

    def send(
        self, status: int, content: Any, headers: dict[str, str] | None = None, body: bool = True
    ) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *rest: Any) -> None:
        pass


@contextmanager
def serve_hub(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Serve OWNER/NAME folders of a folder, and let huggingface_hub ask that server. Its `requests`
    are method and path of each.
    """
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Hub,), {"root": root}))
    server.requests = []
    Thread(target=server.serve_forever, daemon=True).start()
    server.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    server.server_close()
