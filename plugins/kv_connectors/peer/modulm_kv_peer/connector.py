"""A KV connector that moves prompts' blocks between engines, over TCP with TLS."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from attrs import field, frozen
from attrs.validators import and_, ge, gt, in_, le

from modulm.contracts.connector import BlockTransfer, KVMover
from modulm.contracts.requests import Request
from modulm.errors import ConfigError, RequestError
from modulm_distributed.secret import read_secret, secret_file
from modulm_distributed.tls import tls_contexts
from modulm_kv_peer.client import PeerClient
from modulm_kv_peer.server import PeerServer
from modulm_kv_peer.store import PeerStore
from modulm_kv_transfer.copies import CopyingMover, TransferFailed
from modulm_kv_transfer.remote import FIELD, RemoteConnector, RemoteIndex, transfer_params

__all__ = ["PeerConnector", "PeerOptions"]

_FLAG = "kv_transfer_config"
#: Fetches at once; others wait, and their time runs.
_FETCHES = 8


@frozen
class PeerOptions:
    """Options of the connector.

    kv_role: kv_producer computes prompts for others, kv_consumer continues them, kv_both does
    either. engine_id: in answers; by default host name and port. kv_ip: address to listen on, and
    to name in answers. kv_port: of rank 0; rank R of replica N uses the port N * ranks + R higher.
    cpu_bytes_to_use: host memory of all ranks for blocks that wait to be fetched. timeout: seconds
    after which a load has ended, one way or the other. allowed_hosts: values of remote_host that
    requests may have. secret_file: a file that all engines share; not needed on loopback addresses.
    """

    kv_role: str = field(
        default="kv_both", validator=in_(("kv_both", "kv_producer", "kv_consumer"))
    )
    engine_id: str | None = None
    kv_ip: str = "127.0.0.1"
    kv_port: int = field(default=14579, validator=and_(ge(1), le(65535)))
    cpu_bytes_to_use: int = field(default=1 << 30, validator=ge(1))
    timeout: float = field(default=10.0, validator=gt(0))
    allowed_hosts: tuple[str, ...] = ("127.0.0.1", "localhost", "::1")
    secret_file: str | None = None

    @property
    def produces(self) -> bool:
        """Whether other engines may fetch blocks."""
        return self.kv_role != "kv_consumer"

    @property
    def consumes(self) -> bool:
        """Whether requests may name another engine."""
        return self.kv_role != "kv_producer"


class _Index(RemoteIndex):
    """Requests that send their blocks, and requests that fetch them."""

    #: Names of adapters may stand for other weights in another engine.
    durable = True

    def __init__(self, options: PeerOptions, port: int, ranks: int) -> None:
        self._options, self._port, self._ranks = options, port, ranks
        self._engine = options.engine_id or f"{socket.gethostname()}-{port}"
        self._sending: set[str] = set()
        #: Request -> (host, port) of the blocks that it has not begun to load.
        self._sources: dict[str, tuple[str, int]] = {}

    def check(self, request: Request) -> None:
        table = transfer_params(request)
        if table.get("do_remote_decode") and not self._options.produces:
            raise RequestError("do_remote_decode: this engine is a kv_consumer", FIELD)
        if table.get("do_remote_prefill"):
            if not self._options.consumes:
                raise RequestError("do_remote_prefill: this engine is a kv_producer", FIELD)
            self._address(table)

    def add(self, request: Request) -> None:
        table = transfer_params(request)
        if table.get("do_remote_decode"):
            self._sending.add(request.id)
        if table.get("do_remote_prefill"):
            self._sources[request.id] = self._address(table)

    def _address(self, table: Mapping[str, Any]) -> tuple[str, int]:
        host, port = table.get("remote_host"), table.get("remote_port")
        if not isinstance(host, str):
            raise RequestError("remote_host must be a string", FIELD)
        if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 1 << 16:
            raise RequestError("remote_port must be a port", FIELD)
        if host not in self._options.allowed_hosts:
            message = f"remote_host: {host} is not in allowed_hosts of --kv-transfer-config"
            raise RequestError(message, FIELD)
        return host, port

    def match(self, request: str, names: Sequence[bytes], cached: int) -> int:
        return len(names) if request in self._sources else 0

    def source(self, request: str) -> Any:
        return self._sources.pop(request)

    def blocks_to_save(self, request: str, names: Sequence[bytes]) -> int:
        return len(names) if request in self._sending else 0

    def answer(self, request: str) -> Mapping[str, Any] | None:
        if request not in self._sending:
            return None
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine,
            "remote_request_id": request,
            "remote_block_ids": [],  # blocks are found by the prompt's tokens
            "remote_host": self._options.kv_ip,
            "remote_port": self._port,
            "tp_size": self._ranks,
        }

    def finish(self, request: str) -> None:
        self._sending.discard(request)
        self._sources.pop(request, None)


class _Mover(CopyingMover):
    """This rank's store and server, and its fetches from the same rank of other engines."""

    def __init__(self, options: PeerOptions, facts: Mapping[str, str], port: int) -> None:
        super().__init__()
        self._options, self._facts, self._port = options, facts, port
        self._fetched: dict[int, torch.Tensor] = {}
        self._resources = ExitStack()

    def prepare(self) -> None:
        options = self._options
        file = secret_file(options.kv_ip, options.secret_file, _FLAG)
        tls = tls_contexts(read_secret(file, _FLAG))
        facts = {**self._facts, "cache layout": self.copier.layout}
        slots = options.cpu_bytes_to_use // self.ranks // max(self.copier.width, 1)
        if options.produces and slots < 1:
            message = f"cpu_bytes_to_use: {options.cpu_bytes_to_use} bytes hold no block"
            raise ConfigError(_FLAG, message)
        self.store = PeerStore(self.copier.buffer(slots if options.produces else 0))
        self._fetchers = ThreadPoolExecutor(_FETCHES, "kv-fetches")
        self._resources.callback(self._fetchers.shutdown, wait=True, cancel_futures=True)
        self._client = PeerClient(facts, tls, self.copier.width)
        self._resources.callback(self._client.close)
        if options.produces:
            port = self._port + self.rank
            server = PeerServer(self.store, facts, tls, options.kv_ip, port, options.timeout)
            self._resources.callback(server.close)

    def save(self, transfer: BlockTransfer) -> None:
        new, slots = self.store.reserve(transfer.names)
        names = [transfer.names[index] for index in new]
        blocks = [[ids[index] for index in new] for ids in transfer.blocks]
        try:
            self.copier.save(blocks, [self.store.memory[slot] for slot in slots])
            self.synchronize()
        except BaseException:
            self.store.give_up(names, slots)
            raise
        self.store.add(names, slots)

    def start_load(self, transfer: BlockTransfer, ready: Any) -> None:
        deadline = time.monotonic() + self._options.timeout
        self._fetchers.submit(self._fetch, transfer, ready, deadline)

    def _fetch(self, transfer: BlockTransfer, ready: Any, deadline: float) -> None:
        host, port = transfer.source
        try:
            blocks = self._client.fetch(host, port + self.rank, transfer.names, deadline)
        except Exception as error:
            self.fail(transfer, str(error) or type(error).__name__)
            return
        self._fetched[transfer.id] = blocks
        super().start_load(transfer, ready)

    def load(self, transfer: BlockTransfer) -> None:
        blocks = self._fetched.pop(transfer.id, None)
        if blocks is None:
            raise TransferFailed("nothing was fetched")
        self.copier.load(transfer.blocks, list(blocks))

    def close(self) -> None:
        self._resources.close()
        super().close()
        self._fetched.clear()


class PeerConnector(RemoteConnector):
    """Moves the blocks of prompts between engines."""

    name: ClassVar[str] = "peer"
    api: ClassVar[int | tuple[int, int]] = 3
    Config: ClassVar[type] = PeerOptions

    config: PeerOptions
    _ranks, _port = 1, 0

    def bind(self, model: str, ranks: int) -> None:
        self._ranks = ranks

    def describe_engine(self, facts: Mapping[str, str], replica: int) -> None:
        self._facts, self._port = facts, self.config.kv_port + replica * self._ranks

    def index(self) -> RemoteIndex:
        return _Index(self.config, self._port, self._ranks)

    def mover(self) -> KVMover:
        return _Mover(self.config, self._facts, self._port)
