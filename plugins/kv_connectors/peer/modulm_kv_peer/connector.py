"""A KV connector that moves prompts' blocks between engines.

They go through shared memory on one machine, else over TCP with TLS.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from attrs import field, frozen
from attrs.validators import and_, ge, gt, in_, le

from modulm.contracts.connector import BlockTransfer, KVMover
from modulm.contracts.requests import Request
from modulm.errors import ConfigError, RequestError
from modulm_distributed.secret import read_secret, secret_file
from modulm_distributed.tls import tls_contexts
from modulm_kv_peer.client import PeerClient, Writer
from modulm_kv_peer.encoder_outputs import PeerEncoderOutputs
from modulm_kv_peer.layout import Layout, block_loader, source_ranks
from modulm_kv_peer.memory import SharedMemory
from modulm_kv_peer.nixl import NixlAgent
from modulm_kv_peer.server import PeerServer
from modulm_kv_peer.store import PeerStore
from modulm_kv_peer.wire import Deadline
from modulm_kv_transfer.block_files import FOLDER
from modulm_kv_transfer.encoder_outputs import EncoderConnector, EncoderOutputs, EncoderTransfer
from modulm_kv_transfer.layers import BlockWriter, LayeredMover
from modulm_kv_transfer.remote import FIELD, RemoteConnector, RemoteIndex, transfer_params

__all__ = ["PeerConnector", "PeerOptions"]

_FLAG = "kv_transfer_config"
#: Flag that is "all" if recurrent states are cached.
_STATES = "mamba_cache_mode"
#: Fetches at once; others wait, and their time runs.
_FETCHES = 32


@frozen
class PeerOptions:
    """Options of the connector.

    kv_role: kv_producer computes prompts for others, kv_consumer continues them, kv_both does
    either. engine_id: in answers; by default host name and port. kv_ip: address to listen on, and
    to name in answers. kv_port: of rank 0; rank R of replica N uses the port N * ranks + R higher.
    cpu_bytes_to_use: host memory of all ranks for blocks that wait to be fetched. timeout: seconds
    after which a load has ended, one way or the other; while the prompt is being computed, seconds
    without a new block. allowed_hosts: values of remote_host that requests may have; "*": any,
    where clients cannot set it. secret_file: a file that all engines share; not needed on loopback
    addresses. shared_memory: whether engines on one machine use it instead of a socket, if both
    can. backends: of NIXL, such as UCX, which then moves blocks between machines.

    Of encoder outputs (`--ec-transfer-config`), peers: HOST:PORT of the engines that compute them.
    shared_storage_path: folder of those that were computed or fetched. max_bytes: of all files in
    it.
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
    shared_memory: bool = True
    backends: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    shared_storage_path: str = FOLDER
    max_bytes: int = field(default=16 << 30, validator=ge(1))

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

    def __init__(self, options: PeerOptions, port: int, size: int) -> None:
        self._options, self._port, self._size = options, port, size
        self._engine = options.engine_id or f"{socket.gethostname()}-{port}"
        self._sending: set[str] = set()
        #: Request -> host and port of the blocks that it has not begun to load, tensor parallel
        #: size of their engine, and whether they are still being computed.
        self._sources: dict[str, tuple[str, int, int, bool]] = {}

    def check(self, request: Request) -> None:
        table = transfer_params(request)
        if table.get("do_remote_decode") and not self._options.produces:
            raise RequestError("do_remote_decode: this engine is a kv_consumer", FIELD)
        if table.get("do_remote_prefill"):
            if not self._options.consumes:
                raise RequestError("do_remote_prefill: this engine is a kv_producer", FIELD)
            self._source(table)

    def add(self, request: Request) -> None:
        table = transfer_params(request)
        if table.get("do_remote_decode"):
            self._sending.add(request.id)
        if table.get("do_remote_prefill"):
            self._sources[request.id] = self._source(table)

    def _source(self, table: Mapping[str, Any]) -> tuple[str, int, int, bool]:
        host, port = table.get("remote_host"), table.get("remote_port")
        if not isinstance(host, str):
            raise RequestError("remote_host must be a string", FIELD)
        if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 1 << 16:
            raise RequestError("remote_port must be a port", FIELD)
        if not {host, "*"} & set(self._options.allowed_hosts):
            message = f"remote_host: {host} is not in allowed_hosts of --kv-transfer-config"
            raise RequestError(message, FIELD)
        size = table.get("tp_size") or self._size
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise RequestError("tp_size must be a positive number", FIELD)
        return host, port, size, table.get("remote_computing") is True

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
            "tp_size": self._size,
        }

    def finish(self, request: str) -> None:
        self._sending.discard(request)
        self._sources.pop(request, None)


class _BlockWriter(BlockWriter):
    """Writes blocks into the store while their step runs."""

    def __init__(self, mover: _Mover, transfer: BlockTransfer) -> None:
        self._copier, self._store, self._synchronize = mover.copier, mover.store, mover.synchronize
        new, slots = self._store.reserve(transfer.names)
        self._blocks = [[ids[index] for index in new] for ids in transfer.blocks]
        self._rows = [self._store.memory[slot] for slot in slots]
        self._filling = self._store.fill([transfer.names[index] for index in new], slots)

    def write(self, tensors: Sequence[int]) -> None:
        self._copier.save(self._blocks, self._rows, tensors)
        self._synchronize()
        self._store.write(self._filling, tensors)

    def end(self, *, worked: bool) -> None:
        self._store.end(self._filling, worked=worked)


class _Mover(LayeredMover):
    """This rank's store and server, and its fetches from ranks of other engines.

    size: tensor parallel size.
    """

    def __init__(
        self, options: PeerOptions, facts: Mapping[str, str], port: int, size: int
    ) -> None:
        super().__init__()
        self._options, self._facts, self._port, self._size = options, facts, port, size
        self._resources = ExitStack()
        self._writing = threading.Lock()

    def prepare(self) -> None:
        options = self._options
        file = secret_file(options.kv_ip, options.secret_file, _FLAG)
        tls = tls_contexts(read_secret(file, _FLAG))
        slots = options.cpu_bytes_to_use // self.ranks // max(self.copier.width, 1)
        if options.produces and slots < 1:
            message = f"cpu_bytes_to_use: {options.cpu_bytes_to_use} bytes hold no block"
            raise ConfigError(_FLAG, message)
        memory = self._shared_memory(slots) if options.produces else None
        blocks = self.copier.buffer(slots if options.produces else 0)
        self.store = PeerStore(blocks if memory is None else memory.blocks)
        agent = NixlAgent(options.backends) if options.backends else None
        if agent is not None:
            self._resources.callback(agent.close)
            if options.produces:
                agent.register(self.store.memory)
        self._fetchers = ThreadPoolExecutor(_FETCHES, "kv-fetches")
        self._resources.callback(self._fetchers.shutdown, wait=True, cancel_futures=True)
        self._client = PeerClient(self._facts, tls, shared=options.shared_memory, agent=agent)
        self._resources.callback(self._client.close)
        if options.produces:
            address = options.kv_ip, self._port + self.rank
            layout = Layout.of(self.copier)
            server = PeerServer(
                self.store, layout, self._size, memory, self._facts, tls, *address,
                options.timeout, agent,
            )  # fmt: skip
            self._resources.callback(server.close)

    def _shared_memory(self, slots: int) -> SharedMemory | None:
        """Memory that peers can read; None on devices, whose copies need pinned memory."""
        if self.copier.staged or not self._options.shared_memory:
            return None
        with suppress(OSError):
            memory = SharedMemory(slots, self.copier.width)
            self._resources.callback(memory.close)
            return memory
        return None

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

    def writer(self, transfer: BlockTransfer) -> BlockWriter:
        return _BlockWriter(self, transfer)

    def start_load(self, transfer: BlockTransfer, ready: Any) -> None:
        self._fetchers.submit(self._fetch, transfer, ready, self._deadline(transfer))

    def _fetch(self, transfer: BlockTransfer, ready: Any, deadline: Deadline) -> None:
        try:
            self._fill(transfer, ready, deadline)
        except Exception as error:
            self.fail(transfer, str(error) or type(error).__name__)
            return
        self.complete(transfer)

    def _writer(
        self, transfer: BlockTransfer, ready: Any, source: int, layout: Layout, size: int
    ) -> Writer | None:
        """Return the function that fills the transfer's blocks with those of a rank."""
        load = block_loader(self.copier, layout, self.rank, self._size, source, size)
        if load is None:
            return None

        @torch.inference_mode()
        def write(first: int, rows: Sequence[torch.Tensor], tensors: Sequence[int] | None) -> None:
            blocks = [ids[first : first + len(rows)] for ids in transfer.blocks]
            with self._writing, self.streamed(ready):
                load(blocks, rows, tensors)

        return write

    def load(self, transfer: BlockTransfer) -> None:
        self._fill(transfer, None, self._deadline(transfer))

    def _deadline(self, transfer: BlockTransfer) -> Deadline:
        computing = transfer.source[3]
        return Deadline(self._options.timeout, renewed=computing)

    def _fill(self, transfer: BlockTransfer, ready: Any, deadline: Deadline) -> None:
        host, port, size, _ = transfer.source
        for source in source_ranks(self.rank, self._size, size):
            opener = partial(self._writer, transfer, ready, source)
            self._client.fetch(host, port + source, transfer.names, deadline, opener)

    def close(self) -> None:
        self._resources.close()
        super().close()


class PeerConnector(RemoteConnector, EncoderConnector):
    """Moves the blocks of prompts, and encoder outputs, between engines."""

    name: ClassVar[str] = "peer"
    api: ClassVar[int | tuple[int, int]] = 3
    Config: ClassVar[type] = PeerOptions

    config: PeerOptions
    _ranks, _port, _size = 1, 0, 1

    def bind(self, model: str, ranks: int) -> None:
        self._ranks = ranks

    def describe_engine(self, facts: Mapping[str, str], replica: int) -> None:
        self._size = int(facts["tensor_parallel_size"])
        self._port = self.config.kv_port + replica * self._ranks
        # Ranks have different tokens, or parts of recurrent states that are no whole heads.
        same_size = facts["decode_context_parallel_size"] != "1" or facts[_STATES] == "all"
        self._facts = {
            name: value
            for name, value in facts.items()
            if same_size or name != "tensor_parallel_size"
        }

    def index(self) -> RemoteIndex:
        return _Index(self.config, self._port, self._size)

    def mover(self) -> KVMover:
        return _Mover(self.config, self._facts, self._port, self._size)

    def encoder_outputs(self, transfer: EncoderTransfer) -> EncoderOutputs:
        options = self.config
        return PeerEncoderOutputs(
            Path(options.shared_storage_path).expanduser(), options.max_bytes, transfer,
            peers=options.peers, secret_file=options.secret_file, seconds=options.timeout,
        )  # fmt: skip
