"""A small Ray on this machine: a model with a replica in each of two pools."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.ray_serve.test_cluster import FAST, free_port, processes, running_ray, until

from modulm import LLM, SamplingParams
from modulm.testing.checkpoints import make_tiny

LONG = "a long beginning of a prompt " * 6


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Where an application with a replica in each pool answers, and the model's folder."""
    before = set(processes(""))
    folder = str(make_tiny(tmp_path_factory.mktemp("tiny")))
    args = {
        "model": folder, "served_model_name": "tiny", "prefill_replicas": 1, "decode_replicas": 1,
        "enable_prompt_tokens_details": True,
        "block_size": 16, "num_gpu_blocks_override": 200, "num_cpus": 0.1, "dtype": "float32",
        "kv_transfer_config": {"kv_connector": "peer",
                               "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 22}},
        "deployment": {"health_check_period_s": 0.3, "health_check_timeout_s": 300,
                       "graceful_shutdown_wait_loop_s": 0.1},
        "ingress": {"ray_actor_options": {"num_cpus": 0.1}},
    }  # fmt: skip
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FAST.items():
            patch.setenv(name, value)
        from ray import serve  # it reads the environment
        from ray.serve._private import api, client

        from modulm_ray_serve import AppArgs, app

        for module in (api, client):
            patch.setattr(module, "HTTP_PROXY_TIMEOUT", 600)
        logs = tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True)
        with logs as folder_of_logs, running_ray(folder_of_logs):
            try:
                serve.start(http_options={"host": "127.0.0.1", "port": port})
                serve.run(app(AppArgs.model_validate(args)), name="app", route_prefix="/")
                yield f"http://127.0.0.1:{port}", folder
            finally:
                serve.shutdown()
    until(lambda: not set(processes("")) - before)


@pytest.mark.exhaustive
def test_a_real_application(url: tuple[str, str]) -> None:
    address, folder = url
    prompts = [f"{number} and {LONG}" for number in range(3)]
    flags: dict[str, Any] = {"dtype": "float32", "block_size": 16, "num_gpu_blocks_override": 200}
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(folder, **flags) as llm:
        expected = [o.outputs[0].text for o in llm.generate(prompts, params, use_tqdm=False)]

    def answer(prompt: str) -> tuple[str, int]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0,
                "ignore_eos": True}  # fmt: skip
        found = httpx.post(f"{address}/v1/completions", json=body, timeout=600)
        assert found.status_code == 200, found.text
        details = found.json()["usage"]["prompt_tokens_details"] or {}
        return found.json()["choices"][0]["text"], details.get("cached_tokens", 0)

    for prompt, text in zip(prompts[:2], expected[:2], strict=True):
        found, cached = answer(prompt)
        assert found == text
        assert cached >= 64
    states = httpx.get(f"{address}/health", timeout=300).json()["models"]
    assert states == {"tiny": "ok", "tiny-prefill": "ok"}
    for process in processes("ServeReplica:app:tiny-prefill"):
        process.send_signal(signal.SIGKILL)
    assert answer(prompts[2])[0] == expected[2]
