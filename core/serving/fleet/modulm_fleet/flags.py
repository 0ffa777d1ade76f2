"""The flags of several replicas, by vLLM's names."""

from __future__ import annotations

from modulm.config.schema.flags import FlagGroup, flag, flag_group

__all__ = ["FleetConfig"]

#: Where replicas of other machines announce themselves, unless a port is given: vLLM's.
_PORT = 29550


@flag_group
class FleetConfig(FlagGroup):
    """Replicas of a model behind one address; how many there are: --data-parallel-size."""

    title = "FleetConfig"
    server = True

    data_parallel_rank: int | None = flag(
        None, "Serve the one replica of this number; somebody else spreads requests.", least=0,
        aliases=("-dpn",),
    )  # fmt: skip
    data_parallel_start_rank: int | None = flag(
        None, "Number of the first replica on this machine; None: 0, or by --node-rank.", least=0,
        aliases=("-dpr",),
    )  # fmt: skip
    data_parallel_address: str | None = flag(
        None, "Address of the machine with the front end; None: --master-addr.", aliases=("-dpa",)
    )
    data_parallel_rpc_port: int = flag(
        _PORT, "Port there where replicas of other machines announce themselves.", least=1,
        most=65535, aliases=("-dpp",),
    )  # fmt: skip
    data_parallel_secret_file: str | None = flag(
        None,
        "File with what machines prove to one another that they belong together; needed where the "
        "address is not this machine's own.",
        unit="path",
    )
    data_parallel_backend: str = flag(
        "mp", "Who starts replicas.", choices=("mp", "ray"), aliases=("-dpb",)
    )
    data_parallel_hybrid_lb: bool = flag(
        False, "Each machine's front end spreads requests over its own replicas only.",
        aliases=("-dph",),
    )  # fmt: skip
    data_parallel_external_lb: bool = flag(
        False, "Each replica has a front end; needs --data-parallel-rank.", aliases=("-dpe",)
    )
    headless: bool = flag(False, "Only replicas for the front end of another machine.")
    nnodes: int = flag(1, "Machines that share the replicas.", least=1, aliases=("-n",))
    node_rank: int = flag(0, "Which of them this is.", least=0, aliases=("-r",))
    master_addr: str = flag("127.0.0.1", "Address of the first of them.")
