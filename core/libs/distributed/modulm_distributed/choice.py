"""The choice of collectives for a group of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen
from torch._C import _distributed_c10d as c10d

from modulm.contracts.decision import Decision, Verdict
from modulm.errors import PluginError
from modulm_distributed.collectives import Members
from modulm_distributed.flags import DistributedConfig

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.platform import Platform
    from modulm.plugins.manager import PluginManager
    from modulm_distributed.collectives import Collectives

__all__ = ["ChosenCollectives", "choose_collectives", "collectives_decisions", "custom_sums"]

_OFF = "--disable-custom-all-reduce"


@frozen
class ChosenCollectives:
    """The first collectives that accept the ranks, None if none do; and the decision."""

    driver: type[Collectives] | None
    decision: Decision


def custom_sums(config: EngineConfig) -> bool:
    """Whether collectives may sum with kernels of their own."""
    return not config.group(DistributedConfig).disable_custom_all_reduce


def choose_collectives(
    platform: Platform, members: Members, plugins: PluginManager, *, custom: bool = True
) -> ChosenCollectives:
    """Choose the first of the platform's collectives that is installed and accepts these ranks.

    custom: whether those that sum with kernels of their own are candidates.
    """
    verdicts, drivers = [], {}
    for name in platform.collectives:
        try:
            driver: type[Collectives] = plugins.load("collectives", name)
        except PluginError as error:
            verdicts.append(Verdict(name, str(error)))
            continue
        off = driver.custom_all_reduce and not custom
        reason = _OFF if off else driver.rejects(platform, members)
        verdicts.append(Verdict(name, reason))
        if reason is None:
            drivers[name] = driver
    winner = next(iter(drivers), None)
    reason = f"the first of platform {platform.name} that connects {members.size} ranks"
    decision = Decision("collectives", tuple(verdicts), winner, reason if winner else "none fits")
    return ChosenCollectives(drivers.get(winner or ""), decision)


def collectives_decisions(
    config: EngineConfig, platform: Platform, plugins: PluginManager
) -> list[Decision]:
    """Return what `modulm explain` shows of the ranks' collectives; nothing for a single rank.

    Ranks may find only when they connect that their devices cannot reach each other; they log that.
    """
    ranks = config.parallel.tensor_parallel_size
    if ranks == 1:
        return []
    members = Members("explain", 0, ranks, c10d.HashStore())
    return [choose_collectives(platform, members, plugins, custom=custom_sums(config)).decision]
