"""The flags of several replicas, by vLLM's names."""

from __future__ import annotations

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["FleetConfig"]

#: Default of --data-parallel-rpc-port, as in vLLM.
_PORT = 29550


@flag_group
class FleetConfig(FlagGroup):
    """Replicas of a model behind one address. --data-parallel-size sets their number."""

    title = "FleetConfig"
    server = True

    data_parallel_rank: int | None = flag(
        None,
        "Serve only the replica with this number; an external load balancer distributes requests.",
        least=0,
        aliases=("-dpn",),
    )
    data_parallel_start_rank: int | None = flag(
        None,
        "Number of the first replica on this machine. Default: derived from --node-rank.",
        least=0,
        aliases=("-dpr",),
    )
    data_parallel_address: str | None = flag(
        None,
        "Address of the machine with the front end. Default: --master-addr.",
        aliases=("-dpa",),
    )
    data_parallel_rpc_port: int = flag(
        _PORT,
        "Port of that machine at which replicas on other machines register.",
        least=1,
        most=65535,
        aliases=("-dpp",),
    )
    data_parallel_secret_file: str | None = flag(
        None,
        "File with a secret of at least 16 bytes, the same on all machines; it encrypts and "
        "authenticates their connections. Required unless the address is a loopback address, for "
        "which each user has a generated secret.",
        unit="path",
    )
    data_parallel_backend: str = flag(
        "mp", "How replicas are started.", choices=("mp", "ray"), aliases=("-dpb",)
    )
    prefill_replicas: int = flag(
        0,
        "Replicas that only compute prompts. Their KV cache goes to --decode-replicas, which "
        "generate the answers. Replaces --data-parallel-size.",
        least=0,
    )
    decode_replicas: int = flag(
        0, "Replicas that continue the prompts of --prefill-replicas.", least=0
    )
    data_parallel_hybrid_lb: bool = flag(
        False,
        "Let each machine's front end distribute requests over its own replicas only.",
        aliases=("-dph",),
    )
    data_parallel_external_lb: bool = flag(
        False,
        "Give each replica its own front end; requires --data-parallel-rank.",
        aliases=("-dpe",),
    )
    headless: bool = flag(
        False, "Run replicas for the front end on another machine, without a server."
    )
    nnodes: int = flag(
        1, "Number of machines that the replicas are spread over.", least=1, aliases=("-n",)
    )
    node_rank: int = flag(0, "Number of this machine, from 0.", least=0, aliases=("-r",))
    master_addr: str = flag("127.0.0.1", "Address of the first machine.")
