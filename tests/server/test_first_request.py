"""What a server's first message suggests is answered by that server."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from modulm.config import EngineConfig
from modulm.plugins import manager
from modulm_server.first_request import first_request
from modulm_server.serve import banner
from modulm_server.testing import Live

ServerMaker = Callable[..., Live]

TASKS = [
    (("generate",), "/v1/chat/completions"),
    (("embed", "token_embed"), "/v1/embeddings"),
    (("score",), "/rerank"),
    (("classify",), "/classify"),
    (("token_classify",), "/pooling"),
]


@pytest.mark.parametrize(("tasks", "path"), TASKS, ids=lambda value: str(value))
def test_the_suggested_command_works(
    make_server: ServerMaker, tasks: tuple[str, ...], path: str
) -> None:
    live = make_server(info={"tasks": tasks})
    url = httpx.URL(live.url)
    sock: Any = SimpleNamespace(getsockname=lambda: (url.host, url.port))
    suggested = first_request("M", live.engine.info.tasks)
    text = banner(EngineConfig.from_keywords(model="M"), manager.current(), sock, (), suggested)
    assert suggested[0] == path
    (line,) = [line for line in text.splitlines() if line.startswith("  try")]
    assert ("chat page" in text) is ("generate" in tasks)
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    command = line.removeprefix("  try").strip().replace("curl", "curl -sSf", 1)
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    assert "usage" in done.stdout or "results" in done.stdout


def test_a_model_without_a_template_completes() -> None:
    path, body = first_request("it's", ("generate",), chats=False)
    assert path == "/v1/completions"
    assert '"prompt"' in body
