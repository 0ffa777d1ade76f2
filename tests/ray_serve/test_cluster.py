"""A small Ray on this machine: two models behind Ray Serve, used as clients use them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from tests.ray_serve import ray_workers

from modulm import LLM, SamplingParams
from modulm.testing.adapters import write_lora
from modulm.testing.checkpoints import make_tiny

#: Tokens of a stream that lasts longer than replicas need to go.
LONG = 8000
FAST = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    # Processes are started when they are needed, not one for each processor beforehand.
    "RAY_prestart_worker_first_driver": "0",
    # Its own 15 would leave them nothing on a busy machine.
    "RAY_worker_niceness": "0",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.2",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.2",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray ends its own proxy when it has not begun in 5 seconds, and gives up on what a busy machine
    # takes minutes for.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "600",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "600",
    "RAY_py_gcs_connect_timeout_s": "600",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_health_check_failure_threshold": "100",
}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def processes(word: str) -> list[psutil.Process]:
    """Those below this process whose command line has the word."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if word in " ".join(child.cmdline()):
                found.append(child)
    return found


def until(holds: Callable[[], Any], seconds: float = 600.0) -> Any:
    """What it says once that is something."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.2)
    return found


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the application answers: "tiny" with an adapter, one replica or two, and "demo"."""
    before = set(processes(""))
    folder = make_tiny(tmp_path_factory.mktemp("tiny"))
    shapes = {"q_proj": (64, 64), "o_proj": (64, 64)}
    modules = {
        f"model.layers.{layer}.self_attn.{name}": shape
        for layer in range(2)
        for name, shape in shapes.items()
    }
    place = tmp_path_factory.mktemp("lora")
    adapters = {
        name: str(write_lora(place / name, modules, 8, seed, lora_alpha=64))
        for seed, name in enumerate(("poet", "sage"))
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FAST.items():
            patch.setenv(name, value)
        # A short path: sockets are made below it.
        with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as logs:
            yield from cluster(folder, adapters, logs)
    until(lambda: not set(processes("")) - before)


class SlowClock:
    """The module `time` with a clock that is twenty times too slow: Ray's 30 seconds for the start
    of a node, which no setting changes, are 10 minutes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return time.monotonic() / 20


#: Ports of a node's agents. Ray's node ends if an agent has not chosen its port and written it into
#: a file after 15 seconds, which no setting changes; it does not wait for ports that it knows.
AGENT_PORTS = (
    "metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port",
    "runtime_env_agent_port",
)  # fmt: skip


@contextlib.contextmanager
def running_ray(logs: str) -> Iterator[None]:
    """A cluster of this machine, whose workers are forks."""
    import ray

    with pytest.MonkeyPatch.context() as patch, ray_workers.template(logs) as template:
        patch.setenv(ray_workers.TEMPLATE, template)
        begin_ray(logs)
        try:
            yield
        finally:
            ray.shutdown()


def begin_ray(logs: str) -> None:
    import ray
    from ray._private import node, parameter
    from ray._raylet import DASHBOARD_AGENT_LISTEN_PORT_NAME, persist_port

    start = node.Node.start_raylet

    def start_raylet(self: Any, *args: Any, **fields: Any) -> None:
        port = self._ray_params.dashboard_agent_listen_port
        persist_port(self._session_dir, self._node_id, DASHBOARD_AGENT_LISTEN_PORT_NAME, port)
        start(self, *args, **fields)

    class Params(parameter.RayParams):
        def __init__(self, **fields: Any) -> None:
            ports = {name: free_port() for name in AGENT_PORTS}
            super().__init__(**fields | ports, setup_worker_path=ray_workers.__file__)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node, "time", SlowClock())
        patch.setattr(parameter, "RayParams", Params)
        patch.setattr(node.Node, "start_raylet", start_raylet)
        ray.init(
            "local", num_cpus=4, num_gpus=0, include_dashboard=False,
            object_store_memory=80 << 20, log_to_driver=False, logging_level="error",
            _temp_dir=logs,
        )  # fmt: skip


def cluster(folder: Path, adapters: dict[str, str], logs: str) -> Iterator[str]:
    from ray import serve
    from ray.serve._private import api, client

    from modulm_ray_serve import AppArgs, app

    small = {
        "num_gpu_blocks_override": 1100, "num_cpus": 0.1, "dtype": "float32",
        "deployment": {"health_check_period_s": 0.3, "health_check_timeout_s": 300,
                       "graceful_shutdown_wait_loop_s": 0.1},
    }  # fmt: skip
    # On a busy machine figures come late: a replica that starts must not go because of that.
    quick = {
        "upscale_delay_s": 0.2,
        "downscale_delay_s": 5.0,
        "look_back_period_s": 2.0,
        "metrics_interval_s": 0.2,
    }
    args = AppArgs.model_validate(
        {
            "models": [
                {"model": str(folder), "served-model-name": "tiny", "max_replicas": 2, **small,
                 "target_ongoing_requests": 2, "adapters": adapters, "max-cpu-loras": 1,
                 "max-lora-rank": 8, "hf_overrides": {"max_position_embeddings": 8192},
                 "autoscaling": quick},
                {"model": "demo", "max_model_len": 512, **small},
            ],
            "ingress": {"ray_actor_options": {"num_cpus": 0.1}},
        }
    )  # fmt: skip
    port = free_port()
    with running_ray(logs):
        try:
            with pytest.MonkeyPatch.context() as patch:
                for module in (api, client):
                    patch.setattr(module, "HTTP_PROXY_TIMEOUT", 600)
                serve.start(http_options={"host": "127.0.0.1", "port": port})
                serve.run(app(args), name="app", route_prefix="/")
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600, max_retries=0) as made:
        yield made


def say(client: openai.OpenAI, model: str, prompt: str = "one two three", count: int = 8) -> str:
    made = client.completions.create(
        model=model, prompt=prompt, max_tokens=count, temperature=0, extra_body={"ignore_eos": True}
    )
    assert made.usage is not None
    assert made.usage.completion_tokens == count
    assert made.model == model
    return made.choices[0].text


def running(model: str) -> int:
    from ray import serve

    deployment = serve.status().applications["app"].deployments[model]
    return deployment.replica_states.get("RUNNING", 0)


def test_two_models_and_an_adapter_answer(client: openai.OpenAI, url: str) -> None:
    assert [card.id for card in client.models.list()] == ["tiny", "poet", "sage", "demo"]
    assert client.models.retrieve("poet").model_dump()["parent"] == "tiny"
    answers = {name: say(client, name) for name in ("tiny", "poet", "sage", "demo")}
    assert len(set(answers.values())) == 4
    assert answers == {name: say(client, name) for name in answers}
    # The replica keeps one adapter: the other was put away, and read again when it was named.
    (own, held) = (card["id"] for card in json.loads(ask("tiny", "/v1/models"))["data"])
    assert (own, held) == ("tiny", "sage")
    asked: Any = [{"role": "user", "content": "What is the capital of France?"}]
    chat = client.chat.completions.create(model="demo", messages=asked, temperature=0)
    assert "Paris" in str(chat.choices[0].message.content)
    stream = client.chat.completions.create(
        model="demo", messages=asked, temperature=0, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert len(pieces) > 2
    assert "".join(pieces) == chat.choices[0].message.content
    with pytest.raises(openai.NotFoundError):
        say(client, "nobody")
    with pytest.raises(openai.BadRequestError, match="prompt"):
        say(client, "tiny", "word " * 9000)
    states = {"status": "ok", "models": {"tiny": "ok", "demo": "ok"}}
    assert httpx.get(f"{url}/health").json() == states


def ask(model: str, path: str) -> str:
    """What a replica of the model says of itself, which the front does not tell."""
    from ray import serve

    from modulm_ray_serve.replica import Call

    scope = {
        "type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "headers": [],
        "query_string": b"", "root_path": "",
    }  # fmt: skip
    handle = serve.get_deployment_handle(model, "app").options(stream=True)

    async def whole() -> bytes:
        found = b""
        async for messages in handle.ask.remote(Call(scope), None):
            found += b"".join(message.get("body", b"") for message in messages)
        return found

    return asyncio.run(whole()).decode()


def aborted(model: str) -> float:
    (count,) = re.findall(
        r'^modulm:request_success_total{.*finished_reason="abort".*} (.*)$',
        ask(model, "/metrics"),
        re.MULTILINE,
    )
    return float(count)


def test_who_goes_away_takes_the_request_along(client: openai.OpenAI) -> None:
    assert aborted("tiny") == 0
    stream = client.completions.create(
        model="tiny", prompt="a b", max_tokens=LONG, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert '"server_load":1' in ask("tiny", "/load")
    stream.close()
    until(lambda: '"server_load":0' in ask("tiny", "/load"))
    assert aborted("tiny") == 1


def test_two_ranks_answer_as_one_process(url: str, tmp_path: Path) -> None:
    """The executor of ranks uses the cluster that is there (two machines:
    `tests/distributed/test_ray.py`).
    """
    folder = str(make_tiny(tmp_path / "ranks"))
    flags: dict[str, Any] = {
        "max_model_len": 128, "dtype": "float32", "num_gpu_blocks_override": 32,
        "use_tqdm_on_load": False,
    }  # fmt: skip
    ranks = {"distributed_executor_backend": "ray", "tensor_parallel_size": 2}
    params = SamplingParams(temperature=0, max_tokens=6)
    answers = []
    for more in ({}, ranks):
        with LLM(folder, **flags, **more) as llm:
            (answer,) = llm.generate([{"prompt_token_ids": [5, 9, 40, 7]}], params, use_tqdm=False)
            answers.append(list(answer.outputs[0].token_ids))
    assert answers[0] == answers[1]


@pytest.mark.exhaustive
def test_replicas_come_and_go_under_load_and_nothing_is_lost(client: openai.OpenAI) -> None:
    enough, fewer = threading.Event(), threading.Event()
    failed: list[BaseException] = []
    after: list[int] = []

    def insist(number: int) -> None:
        turn = 0
        while not enough.is_set():
            say(client, "tiny", f"{number} {turn} and more", 60)
            turn += 1
        assert turn

    def listen(number: int) -> None:
        """A stream that goes on while there are fewer replicas, for a while or to its end."""
        count = ended = 0
        with client.completions.create(
            model="tiny", prompt=f"{number} and no end", max_tokens=LONG, stream=True,
            temperature=0, extra_body={"ignore_eos": True},
        ) as stream:  # fmt: skip
            for chunk in stream:
                count += fewer.is_set()
                ended += chunk.choices[0].finish_reason is not None
                if count > 100:
                    break
        assert ended == (count <= 100)
        after.append(count)

    def begin(work: Callable[[int], None], count: int) -> list[threading.Thread]:
        def guarded(number: int) -> None:
            try:
                work(number)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=guarded, args=(n,)) for n in range(count)]
        for thread in threads:
            thread.start()
        return threads

    assert running("tiny") == 1
    threads = begin(insist, 5)
    until(lambda: running("tiny") == 2 or failed)
    first, second = processes("ServeReplica:app:tiny")
    enough.set()
    for thread in threads:
        thread.join(600)
    assert not failed
    # One for each replica, as the router has it: one of them is on the replica that goes.
    threads = begin(listen, 2)
    until(lambda: running("tiny") == 1 or failed)
    fewer.set()
    for thread in threads:
        thread.join(600)
    assert not failed
    assert len(after) == 2
    until(lambda: first.is_running() + second.is_running() == 1)


@pytest.mark.exhaustive
def test_a_replica_whose_engine_is_killed_is_replaced(client: openai.OpenAI, url: str) -> None:
    (replica,) = processes("ServeReplica:app:demo")
    (engine,) = [
        child
        for child in replica.children(recursive=True)
        if "engine_process" in " ".join(child.cmdline())
    ]
    before = say(client, "demo")
    os.kill(engine.pid, signal.SIGKILL)
    # Asked at once: the front finds the replica dead, and waits for the one that replaces it.
    assert say(client, "demo") == before
    (other,) = until(lambda: [p for p in processes("ServeReplica:app:demo") if p != replica])
    assert other.pid != replica.pid
    assert say(client, "tiny")
    until(lambda: httpx.get(f"{url}/health").json()["models"]["demo"] == "ok")
