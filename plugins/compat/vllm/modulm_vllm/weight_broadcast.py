"""The trainer's half of weight updates under the names of vLLM's NCCL engine.

Tensors go through host memory with gloo, to servers with `--weight-transfer-config
'{"backend": "gloo"}'`. So a trainer needs no device of its own.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from attrs import define

from modulm_vllm.failures import as_vllm
from modulm_weight_transfer.broadcast import WeightBroadcaster

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "NCCLTrainerSendWeightsArgs",
    "NCCLWeightTransferEngine",
    "get_ip",
    "get_open_port",
]


class TrainerGroup:
    """A connection to the workers of servers. group: vLLM's fields, which trainers reset when they
    close it.
    """

    def __init__(self, broadcaster: WeightBroadcaster) -> None:
        self.broadcaster = broadcaster
        self.group = SimpleNamespace(store=None, socket=None)


@define
class NCCLTrainerSendWeightsArgs:
    """group: from `trainer_init`. post_iter_func: returns the tensor of an item, by default its
    second field. src, packed and the packing's sizes have no effect: the trainer is rank 0, and
    tensors are sent one by one.
    """

    group: TrainerGroup
    src: int = 0
    post_iter_func: Callable[[Any], Tensor] | None = None
    packed: bool = False
    stream: Any = None
    packed_buffer_size_bytes: int | None = None
    packed_num_buffers: int | None = None


class NCCLWeightTransferEngine:
    """Connects a trainer to workers, and sends weights."""

    @staticmethod
    def trainer_init(init_info: Mapping[str, Any]) -> TrainerGroup:
        """Wait for the workers, who get the same `init_info` with `/init_weight_transfer_engine`.

        Raises ValueError for missing fields.
        """
        fields = dict(init_info) if isinstance(init_info, Mapping) else vars(init_info)
        missing = {"master_address", "master_port", "world_size"} - fields.keys()
        if missing:
            raise ValueError(f"init_info: {min(missing)} is required")
        broadcaster = WeightBroadcaster(
            fields["master_address"], fields["master_port"], fields["world_size"] - 1
        )
        with as_vllm():
            broadcaster.connect()
        return TrainerGroup(broadcaster)

    @staticmethod
    def trainer_send_weights(
        iterator: Iterable[Any], trainer_args: NCCLTrainerSendWeightsArgs | Mapping[str, Any]
    ) -> None:
        """Send tensors in the order in which `/update_weights` has announced them."""
        if isinstance(trainer_args, Mapping):
            trainer_args = NCCLTrainerSendWeightsArgs(**trainer_args)
        tensor_of = trainer_args.post_iter_func or (lambda item: item[1])
        for item in iterator:
            trainer_args.group.broadcaster.send({"": tensor_of(item)})


def get_ip() -> str:
    """The address of this machine that others reach it by; 127.0.0.1 without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("192.0.2.1", 9))  # an address for documentation; sends nothing
        except OSError:
            return "127.0.0.1"
        address: str = asking.getsockname()[0]
        return address


def get_open_port() -> int:
    """A free port of this machine."""
    with socket.socket() as free:
        free.bind(("", 0))
        port: int = free.getsockname()[1]
        return port
