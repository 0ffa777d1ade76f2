"""Replicas in two deployments: some compute prompts, the others continue them.

The ingress sends a prompt to a prefill replica, as a request that ends after one token, and then
the request to a decode replica, which fetches the prompt's KV cache. This module does not import
Ray at its top.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import msgspec
from attrs import frozen

from modulm.errors import ConfigError

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm_ray_serve.args import ModelArgs

__all__ = [
    "Pool", "fetching_body", "least_prompt", "pools_of", "prefill_body", "transfer_table",
    "without_params",
]  # fmt: skip

_FLAG = "kv_transfer_config"
_FIELD = "kv_transfer_params"
#: Blocks that a decode replica rather computes itself, and their size if no flag says it.
_FEW_BLOCKS, _BLOCK = 2, 64
#: Routes whose requests may be divided, and the fields of one token.
_DIVIDED = {
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/completions": ("max_tokens",),
}
#: Fields that a prefill does without: they concern the answer only.
_OF_ANSWERS = (
    "n", "best_of", "stream", "stream_options", "logprobs", "top_logprobs", "min_tokens",
    "vllm_xargs", "seed", _FIELD,
)  # fmt: skip
#: Fields that need the whole prompt where the answer is computed.
_UNDIVIDED = ("echo", "prompt_logprobs", "prompt_embeds")
#: Ports of replicas: below those of outgoing connections.
_PORTS = range(14_600, 32_000)


@frozen
class Pool:
    """What the replicas of a pool have in common.

    role: of `--kv-transfer-config`. table: its other keys. secret: shared by both pools; empty if
    the table names a file.
    """

    role: str
    table: Mapping[str, Any]
    secret: str


def pools_of(args: ModelArgs, config: EngineConfig) -> tuple[Pool, Pool] | None:
    """Return the pools of prefill and decode replicas, or None. Raises ConfigError."""
    if not (args.prefill_replicas or args.decode_replicas):
        return None
    if not (args.prefill_replicas and args.decode_replicas):
        missing = "decode_replicas" if args.prefill_replicas else "prefill_replicas"
        raise ConfigError(missing, "set it as well: there are two pools, or none")
    if args.min_replicas != 1 or args.max_replicas or args.autoscaling:
        raise ConfigError(
            "prefill_replicas",
            "the pools have fixed sizes: leave out min_replicas, max_replicas and autoscaling",
        )
    table = dict(config.value(_FLAG) or {"kv_connector": "peer"})
    for key in ("kv_role", "kv_ip", "kv_port"):
        if key in table:
            raise ConfigError(_FLAG, f"{key}: remove it, each replica of a pool sets its own")
    named = table.get("kv_connector_extra_config", {}).get("secret_file")
    secret = "" if named else secrets.token_hex(32)
    return Pool("kv_producer", table, secret), Pool("kv_consumer", table, secret)


def least_prompt(config: EngineConfig) -> int:
    """Return the tokens of a prompt from which on a prefill is worth it."""
    return _FEW_BLOCKS * (config.cache.block_size or _BLOCK)


def transfer_table(pool: Pool, ranks: int) -> dict[str, Any]:
    """Return `--kv-transfer-config` of a replica in this process. ranks: that share its model.

    The secret is in a file without a name, which ends with the process.
    """
    import ray

    extra = dict(pool.table.get("kv_connector_extra_config", {}))
    if pool.secret:
        file = os.memfd_create("modulm-kv-secret", os.MFD_CLOEXEC)
        os.write(file, pool.secret.encode())
        extra["secret_file"] = f"/proc/{os.getpid()}/fd/{file}"
    # The ingress alone says where blocks are; replicas may come on any machine.
    extra.setdefault("allowed_hosts", ["*"])
    table = {**pool.table, "kv_role": pool.role, "kv_connector_extra_config": extra}
    if pool.role == "kv_producer":
        table["kv_ip"] = ray.util.get_node_ip_address()
        table["kv_port"] = _free_ports(table["kv_ip"], ranks)
    return table


def _free_ports(host: str, count: int) -> int:
    """Return the first of some free ports in a row. Raises ConfigError."""
    first = secrets.randbelow(len(_PORTS) - count)
    for offset in range(0, len(_PORTS) - count, count):
        port = _PORTS[(first + offset) % (len(_PORTS) - count)]
        with suppress(OSError), ExitStack() as sockets:
            for number in range(port, port + count):
                sockets.enter_context(socket.create_server((host, number)))
            return port
    raise ConfigError(_FLAG, f"kv_port: no port of {host} is free")


def without_params(members: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body without `kv_transfer_params`: clients must not say where to connect to."""
    body = {name: value for name, value in members.items() if name != _FIELD}
    more = body.get("vllm_xargs")
    if isinstance(more, dict) and _FIELD in more:
        body["vllm_xargs"] = {name: value for name, value in more.items() if name != _FIELD}
    return body


def prefill_body(path: str, members: Mapping[str, Any]) -> bytes | None:
    """Return the body that lets a prefill replica compute a request's prompt.

    None: the request cannot be divided.
    """
    limits = _DIVIDED.get(path)
    if limits is None or any(members.get(name) for name in _UNDIVIDED):
        return None
    prompt = members.get("prompt")
    tokens = isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
    if path == "/v1/completions" and not (isinstance(prompt, str) or tokens):
        return None
    body = {name: value for name, value in members.items() if name not in _OF_ANSWERS}
    one = {name: 1 for name in limits if name in members} or {limits[0]: 1}
    return msgspec.json.encode({**body, **one, _FIELD: {"do_remote_decode": True}})


def fetching_body(members: Mapping[str, Any], answer: bytes) -> bytes | None:
    """Return a request's body with the place of its prompt's blocks. answer: to the prefill.

    None: it names none.
    """
    with suppress(msgspec.DecodeError):
        decoded = msgspec.json.decode(answer)
        params = decoded.get(_FIELD) if isinstance(decoded, dict) else None
        if isinstance(params, dict):
            return msgspec.json.encode({**members, _FIELD: params})
    return None
