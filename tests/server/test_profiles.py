"""Profiles on request: traces of an engine in a thread, in a process and offline."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import modulm
from modulm.config.sources import keywords
from modulm.errors import ConfigError, RequestError, UnsupportedError
from modulm.testing.checkpoints import make_tiny
from modulm_server.engine.async_llm import AsyncLLM
from modulm_server.testing import Live, error_of, serve_in_thread

PARAMS = modulm.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
SMALL = {"max_model_len": 64, "num_gpu_blocks_override": 17}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny")))


@contextmanager
def served(model: str, **flags: Any) -> Iterator[Live]:
    config = keywords(model=model, served_model_name="m", **SMALL, **flags).config
    engine = AsyncLLM.from_config(config)
    try:
        with serve_in_thread(engine, config) as live:
            yield live
    finally:
        engine.shutdown()


def events(folder: Path) -> list[dict[str, Any]]:
    """What the one trace in a folder holds, read as its viewers read it."""
    (file,) = folder.glob("modulm.*.pt.trace.json*")
    raw = file.read_bytes()
    text = gzip.decompress(raw) if file.suffix == ".gz" else raw
    trace_events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return trace_events


def steps(folder: Path) -> list[int]:
    """Numbers of the steps that were recorded, in order of time; each has a length."""
    marks = [e for e in events(folder) if str(e.get("name", "")).startswith("modulm step ")]
    annotations = [e for e in marks if e.get("cat") == "user_annotation"]
    assert all(mark["dur"] > 0 for mark in annotations)
    return [
        int(e["name"].rpartition(" ")[2]) for e in sorted(annotations, key=lambda e: float(e["ts"]))
    ]


@pytest.mark.parametrize("thread", [True, False])
def test_a_server_writes_a_trace(model: str, tmp_path: Path, thread: bool) -> None:
    profiler = {"profiler": "torch", "torch_profiler_dir": str(tmp_path / "new" / "folder"),
             "torch_profiler_with_stack": False, "torch_profiler_use_gzip": thread}  # fmt: skip
    ask = {"model": "m", "prompt": "One", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    with (
        served(model, profiler_config=profiler, disable_frontend_multiprocessing=thread) as live,
        live.client(timeout=300) as http,
    ):
        plain = http.post("/v1/completions", json=ask).json()["choices"][0]["text"]
        wrong = http.post("/stop_profile")
        assert wrong.status_code == 400
        assert "start one first" in error_of(wrong)["message"]
        assert http.post("/start_profile").status_code == 200
        again = http.post("/start_profile")
        assert again.status_code == 400
        assert "stop it first" in error_of(again)["message"]
        assert http.post("/v1/completions", json=ask).json()["choices"][0]["text"] == plain
        assert http.post("/stop_profile").status_code == 200
        assert http.post("/v1/completions", json=ask).json()["choices"][0]["text"] == plain
        assert http.post("/sleep").status_code == 404, "developers' routes stay behind their switch"
    folder = tmp_path / "new" / "folder"
    assert steps(folder) == list(range(1, 6))
    assert any(str(event.get("name")).startswith("aten::") for event in events(folder))


def test_a_part_of_the_steps(model: str, tmp_path: Path) -> None:
    """delay_iterations and max_iterations; afterwards another profile may be taken."""
    profiler = {"profiler": "torch", "torch_profiler_dir": str(tmp_path), "delay_iterations": 1,
             "max_iterations": 2, "torch_profiler_with_stack": False}  # fmt: skip
    with modulm.LLM(model, profiler_config=profiler, **SMALL) as llm:
        llm.start_profile()
        llm.generate("One", PARAMS, use_tqdm=False)
        assert steps(tmp_path) == [2, 3]
        llm.stop_profile()
        assert "run" not in vars(llm._core.executor), "nothing is left in the way of steps"
        with pytest.raises(RequestError, match="start one first"):
            llm.stop_profile()


def test_without_the_flag(model: str, tmp_path: Path) -> None:
    with (
        modulm.LLM(model, **SMALL) as llm,
        pytest.raises(UnsupportedError, match="profiler-config"),
    ):
        llm.start_profile()
    (tmp_path / "file").touch()
    profiler = {"profiler": "torch", "torch_profiler_dir": str(tmp_path / "file" / "below")}
    with (
        modulm.LLM(model, profiler_config=profiler, **SMALL) as llm,
        pytest.raises(RequestError, match="cannot be created"),
    ):
        llm.start_profile()
    for wrong in ({"profiler": "cuda"}, {"profiler": "torch", "steps": 5}):
        with pytest.raises(ConfigError, match="profiler"):
            keywords(model=model, profiler_config=wrong)
