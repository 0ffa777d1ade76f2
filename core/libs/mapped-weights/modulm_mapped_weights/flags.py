"""The flags of mapped weights."""

from __future__ import annotations

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["MappedWeightsFlags"]


@flag_group
class MappedWeightsFlags(FlagGroup):
    """Where weights on CPUs are held: in memory, or in files that are mapped."""

    title = "MappedWeights"

    weights_memory: str = flag(
        "private",
        "Where weights on CPUs are held; private: in the process's own memory. mmap: in a file, "
        "packed as the kernels read them, whose pages the processes of a machine share.",
        choices=("private", "mmap"),
    )
    weights_cache_dir: str | None = flag(
        None,
        "Folder of the files of --weights-memory mmap; default: modulm/weights in the user's cache "
        "folder.",
    )
    weights_cache_size: float = flag(
        100.0,
        "Most that the files in --weights-cache-dir may take together; those that were not used "
        "for longest are deleted.",
        least=0.0,
        unit="GiB",
    )
