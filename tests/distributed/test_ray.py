"""Ranks on two nodes of a Ray cluster, each in a network namespace of its own: two machines, but
for the processor.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from modulm import LLM, SamplingParams
from modulm.testing.checkpoints import make_tiny

NETWORK = "10.213.7"
HEAD, OTHER = f"{NETWORK}.1", f"{NETWORK}.2"
#: Seconds until a program that says nothing is ended.
PATIENCE = 600
#: Times that a node may try to begin.
STARTS = 5
FLAGS: dict[str, Any] = {
    "max_model_len": 128,
    "dtype": "float32",
    "num_gpu_blocks_override": 32,
    "use_tqdm_on_load": False,
    "enable_sleep_mode": True,
    "worker_cls": "modulm_distributed.testing:MarkedWorker",
}
PROMPT = {"prompt_token_ids": [5, 9, 40, 7]}
ENVIRONMENT = {
    **os.environ,
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    # Its own 15 would leave its processes nothing on a busy machine.
    "RAY_worker_niceness": "0",
    # A node that begins on a busy machine takes longer than Ray waits by itself.
    "RAY_py_gcs_connect_timeout_s": f"{PATIENCE}",
    "RAY_worker_register_timeout_seconds": f"{PATIENCE}",
}
#: Does what it reads: start an engine, ask it, end it; says what came of it.
DRIVER = """
    import json, sys
    from modulm import LLM, SamplingParams
    from modulm.errors import ModulmError

    folder, prompt, flags = json.loads(sys.argv[1])
    params = SamplingParams(temperature=0, max_tokens=6)
    llm = None

    def start():
        global llm
        llm = LLM(folder, distributed_executor_backend="ray", tensor_parallel_size=2, **flags)
        return "started"

    def ask():
        (answer,) = llm.generate([prompt], params, use_tqdm=False)
        return list(answer.outputs[0].token_ids)

    def call():
        return llm.collective_rpc("label", args=["!"])

    def doze():
        for level in (1, 2):
            llm.sleep(level)
            for tag in ("weights", "kv_cache"):
                llm.wake_up([tag])
        return ask()

    def end():
        llm.shutdown()
        return "ended"

    known = {"start": start, "ask": ask, "call": call, "doze": doze, "end": end}
    for line in sys.stdin:
        try:
            said = known[line.strip()]()
        except ModulmError as error:
            said = str(error)
        print("SAID " + json.dumps(said), flush=True)
"""


def command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@pytest.fixture(scope="module")
def spaces() -> Iterator[tuple[str, str]]:
    """Two namespaces that reach each other."""
    one, two = (f"modulm-{os.getpid()}-{i}" for i in "ab")
    try:
        command("ip", "netns", "add", one)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no network namespaces can be made here")
    command("ip", "netns", "add", two)
    try:
        pair = ("veth-a", "netns", one, "type", "veth", "peer", "name", "veth-b", "netns", two)
        command("ip", "link", "add", *pair)
        for space, end, address in ((one, "a", HEAD), (two, "b", OTHER)):
            inside = ("ip", "-n", space)
            command(*inside, "address", "add", f"{address}/24", "dev", f"veth-{end}")
            command(*inside, "link", "set", f"veth-{end}", "up")
            command(*inside, "link", "set", "lo", "up")
        yield one, two
    finally:
        for space in (one, two):
            subprocess.run(["ip", "netns", "delete", space], check=False)


class Node:
    """A node of the cluster, of one processor."""

    def __init__(self, space: str, folder: Path, *flags: str, **variables: str) -> None:
        self.space = space
        words = ["ip", "netns", "exec", space, sys.executable, "-m", "ray.scripts.scripts", "start"]
        words += ["--num-cpus=1", "--object-store-memory=80000000", "--block", *flags]
        # Ray gives a node half a minute to begin, which is not enough on a busy machine.
        for _ in range(STARTS):
            log = folder / f"{space}-{len(list(folder.iterdir()))}.log"
            self.process = subprocess.Popen(
                words,
                env=ENVIRONMENT | variables,
                stdin=subprocess.DEVNULL,
                stdout=log.open("w"),
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            if self._begun(log):
                return
            self.end()
        pytest.fail(log.read_text())

    def _begun(self, log: Path) -> bool:
        """Whether the node has begun, once that or its end is known."""
        until = time.monotonic() + PATIENCE
        while self.process.poll() is None and time.monotonic() < until:
            if "Ray runtime started" in log.read_text():
                return True
            time.sleep(0.05)
        return False

    def ranks(self) -> list[int]:
        """The processes of ranks in it."""
        told = subprocess.run(
            ["ip", "netns", "pids", self.space], capture_output=True, text=True, check=True
        )
        found = []
        for pid in map(int, told.stdout.split()):
            with suppress(OSError):
                name = Path(f"/proc/{pid}/cmdline").read_bytes()
                found += [pid] if name.startswith(b"ray::Rank") else []
        return found

    def end(self) -> None:
        """End all that runs in the namespace."""
        told = subprocess.run(["ip", "netns", "pids", self.space], capture_output=True, text=True)
        for pid in map(int, told.stdout.split()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(300)


class Driver:
    """A program that has an engine of two ranks on the cluster."""

    def __init__(
        self, space: str, model: str, flags: dict[str, Any] = FLAGS, **variables: str
    ) -> None:
        given = json.dumps([model, PROMPT, flags])
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", space, sys.executable, "-c", textwrap.dedent(DRIVER), given],
            env=ENVIRONMENT | {"RAY_ADDRESS": f"{HEAD}:6379"} | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def do(self, word: str) -> Any:
        """What it says to that; what Ray says between is left out."""
        patience = threading.Timer(PATIENCE, self.process.kill)
        patience.start()
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("SAID "):
                patience.cancel()
                return json.loads(line.removeprefix("SAID "))
        raise AssertionError(f"it ended with {self.process.wait()}")


@pytest.fixture(scope="module")
def start(spaces: tuple[str, str]) -> Iterator[Callable[..., Node]]:
    """The head runs; starts the other node, with variables."""
    # Ray makes sockets in it, whose paths must be short.
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    flags = ("--head", "--port=6379", f"--node-ip-address={HEAD}", "--include-dashboard=false")
    nodes = [Node(spaces[0], folder, *flags, f"--temp-dir={folder}/head")]

    def other(**variables: str) -> Node:
        flags = (f"--address={HEAD}:6379", f"--node-ip-address={OTHER}")
        nodes.append(Node(spaces[1], folder, *flags, **variables))
        return nodes[-1]

    try:
        yield other
    finally:
        for node in nodes:
            node.end()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("model") / "tiny"))


def gone(pids: list[int]) -> bool:
    until = time.monotonic() + 300
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.exhaustive
def test_two_tpu_machines(spaces: tuple[str, str], model: str) -> None:
    """A worker on each machine with a device that Ray calls TPU, which is a processor, says what
    one process says: JAX joins the two. Both have the same network namespace, since gloo, with
    which JAX joins processors, connects to the address of the host's name.
    """
    if find_spec("torchax") is None:
        pytest.skip("torchax is not installed; make setup installs it")
    with LLM(model, **FLAGS) as llm:
        params = SamplingParams(temperature=0, max_tokens=6)
        expected = list(llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids)
    variables = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    tpu = {"max_num_seqs": 3, "max_num_batched_tokens": 24}
    tpu["additional_config"] = {"rows": [4], "tokens": [28]}
    folder, resources = Path(tempfile.mkdtemp(prefix="ray-")), '--resources={"TPU": 1}'
    flags = ("--head", "--port=6379", f"--node-ip-address={HEAD}", "--include-dashboard=false")
    nodes = []
    try:
        nodes.append(Node(spaces[0], folder, *flags, resources, **variables))
        second = f"{NETWORK}.3"
        command("ip", "-n", spaces[0], "address", "add", f"{second}/24", "dev", "veth-a")
        flags = (f"--address={HEAD}:6379", f"--node-ip-address={second}")
        nodes.append(Node(spaces[0], folder, *flags, resources, **variables))
        driver = Driver(spaces[0], model, FLAGS | tpu | {"device": "tpu"}, **variables)
        assert driver.do("start") == "started"
        assert driver.do("ask") == expected
        assert driver.do("call") == ["rank 0!", "rank 1!"]
        assert len(nodes[0].ranks()) == 2
        assert driver.do("end") == "ended"
        driver.process.stdin.close()
        assert driver.process.wait(300) == 0
    finally:
        for node in nodes:
            node.end()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.exhaustive
def test_two_machines(
    start: Callable[..., Node], spaces: tuple[str, str], model: str, tmp_path: Path
) -> None:
    """Other plugins on a node are refused by name; two ranks say what one process says; a rank that
    is killed and a machine that is gone end the engine, and nothing is left of it.
    """
    with LLM(model, **FLAGS) as llm:
        params = SamplingParams(temperature=0, max_tokens=6)
        expected = list(llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids)

    info = tmp_path / "modulm_otherwise-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: modulm-otherwise\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[modulm.models]\nOtherwise = otherwise:Otherwise\n")
    driver = Driver(spaces[0], model)
    node = start(PYTHONPATH=str(tmp_path))
    told = driver.do("start")
    assert "modulm-otherwise differ" in told, told
    assert OTHER in told
    node.end()

    node = start()
    assert driver.do("start") == "started"
    assert driver.do("ask") == expected
    assert driver.do("call") == ["rank 0!", "rank 1!"]
    assert driver.do("doze") == expected
    (rank,) = node.ranks()
    os.kill(rank, signal.SIGKILL)
    driver.do("ask")  # the first to ask may be told as one whose step failed
    told = driver.do("ask")
    assert "was killed" in told, told
    assert OTHER in told
    assert driver.do("end") == "ended"

    assert driver.do("start") == "started"
    assert driver.do("ask") == expected
    ranks = node.ranks()
    command("ip", "-n", spaces[1], "link", "set", "veth-b", "down")
    driver.do("ask")
    told = driver.do("ask")
    assert OTHER in told, told
    assert "connection was lost" in told
    driver.process.stdin.close()
    assert driver.process.wait(300) == 0
    assert gone(ranks)


@pytest.mark.exhaustive
def test_an_address_where_nothing_answers(spaces: tuple[str, str], model: str) -> None:
    """A cluster that was named is not replaced by one of this machine alone."""
    soon = {
        "RAY_NUM_REDIS_GET_RETRIES": "1",
        "RAY_gcs_rpc_server_connect_timeout_s": "1",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "1",
        "RAY_gcs_server_request_timeout_seconds": "2",
        "RAY_py_gcs_connect_timeout_s": "1",
    }
    driver = Driver(spaces[0], model, RAY_ADDRESS=f"{HEAD}:6999", **soon)
    told = driver.do("start")
    assert f"RAY_ADDRESS names {HEAD}:6999, where no cluster responds" in told
    driver.process.stdin.close()
    assert driver.process.wait(300) == 0
