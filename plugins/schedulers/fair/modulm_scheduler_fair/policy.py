"""Fair sharing: tokens computed for each tenant follow the weights, by deficit round robin.

Sources: deficit round robin (Shreedhar and Varghese, SIGCOMM 1995), FQ-CoDel's treatment of new
flows (RFC 8290), and counters of computed tokens for language models (Sheng et al., "Fairness in
Serving Large Language Models", OSDI 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from modulm.contracts.policy import Candidate, Policy
from modulm_scheduler_fair.accounts import Accounts
from modulm_scheduler_fair.background import Background
from modulm_scheduler_fair.planner import SharePlanner
from modulm_scheduler_fair.queue import FairQueue, order

if TYPE_CHECKING:
    from modulm.contracts.policy import WaitingQueue
    from modulm.contracts.step_part import PartPlanner, PlannerContext

__all__ = ["Fair"]

#: Steps' budgets in a quantum, and the tokens that it has at least: of a prompt of medium length.
_BUDGETS, _LEAST = 2, 4096


class Fair(Policy):
    """Tenants with work get tokens in proportion to their weights, within a quantum.

    One tenant alone uses everything. Requests of one tenant are ordered by priority, then by
    arrival. Those with a priority above 0 are in the background (`Background`): they make room for
    the first tokens of all others. quantum: in tokens; None: 4096, or twice the token budget of a
    step if that is more.
    """

    name: ClassVar[str] = "fair"
    api: ClassVar[int | tuple[int, int]] = 1

    def __init__(self, quantum: int | None = None) -> None:
        self.accounts = Accounts()
        self.background = Background()
        self._quantum = quantum
        self._planner: SharePlanner | None = None

    def key(self, request: Candidate) -> tuple[float, float]:
        return order(request)

    def queue(self) -> WaitingQueue:
        return FairQueue(self.accounts, self.background)

    def planner(self, context: PlannerContext) -> PartPlanner:
        self.accounts.quantum = self._quantum or max(_BUDGETS * context.limits.tokens, _LEAST)
        self._planner = SharePlanner(self.accounts, context, self.background)
        return self._planner

    def victim(self, running: Sequence[Candidate]) -> int:
        """Preempt a background request if there is one, of the tenant with the highest level; among
        its requests, the last in order.
        """
        return max(
            range(len(running)),
            key=lambda i: (Background.has(running[i]), *self._level(running[i]), i),
        )

    def displaced(self, waiting: Candidate, running: Sequence[Candidate]) -> int | None:
        """Displace a request of the tenant with the highest level if the waiting one's tenant is
        owed half a quantum: the one with the fewest computed tokens, which its tenant pays for.

        A background request is displaced for one that is not, whoever is owed something, unless it
        is the last of several running ones: else none would ever end beside enough others.
        """
        accounts, planner = self.accounts, self._planner
        number = accounts.number(waiting.tenant, waiting.weight)
        if not running or planner is None:
            return None
        victim = running[self.victim(running)]
        tenant, behind = victim.tenant, Background.has(victim)
        highest = accounts.number(tenant)
        makes_room = behind and not Background.has(waiting) and (
            len(running) == 1 or sum(map(Background.has, running)) > 1
        )  # fmt: skip
        if not makes_room and (
            highest == number or 2 * accounts.owed(highest, number) < accounts.quantum
        ):
            return None
        places = [
            place for place, request in enumerate(running)
            if request.tenant == tenant and Background.has(request) == behind
        ]  # fmt: skip
        index = min(places, key=lambda place: planner.computed(running[place].id))
        planner.displace(running[index].id, number)
        return index

    def _level(self, request: Candidate) -> tuple[float, float, float]:
        number = self.accounts.number(request.tenant)
        return float(self.accounts.level[number]), *order(request)
