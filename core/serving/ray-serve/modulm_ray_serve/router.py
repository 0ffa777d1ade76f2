"""Ray Serve's request router that sends requests where their prefix lies.

Ray Serve takes this class apart and sends it to whoever has a handle; what it shares with the front
is therefore in `modulm_ray_serve.affinity`.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import (
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from modulm_ray_serve.affinity import Affinity, Route

__all__ = ["PrefixRouter"]


class PrefixRouter(MultiplexMixin, RequestRouter):
    """Chooses among replicas by `modulm_fleet.router`: what each has to do, and what it holds.

    A replica that is full is passed over for the others, the least busy first. What comes without
    a route goes to the least busy one.
    """

    def initialize_state(self, slots: int = 64, shared: bool = False) -> None:
        """slots: replicas at most; shared: whether there are other fronts."""
        self._affinity = Affinity(slots, shared)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Replicas that take requests."""
        super().update_replicas(replicas)
        self._affinity.update(
            {
                each.replica_id.unique_id: (
                    int(each.replica_metadata.get("cache_tokens", 0)),
                    each.multiplexed_model_ids,
                )
                for each in replicas
            }
        )

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A replica is gone."""
        super().on_replica_actor_died(replica_id)
        self._affinity.down(replica_id.unique_id)

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        """A replica says how much it has, this request included."""
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        if self._affinity.shared:
            self._affinity.heard(replica_id.unique_id, num_ongoing_requests)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The best one, then all others."""
        asked = _route_of(pending_request)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        if asked is None:
            return [candidate_replicas]
        chosen = self._affinity.choose(asked)
        if chosen is None:
            return []
        first = [each for each in candidate_replicas if each.replica_id.unique_id == chosen]
        return [first, [each for each in candidate_replicas if each not in first]]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """A replica has taken a request."""
        asked = _route_of(pending_request)
        if asked is not None:
            self._affinity.sent(asked, replica_id.unique_id)


def _route_of(pending: PendingRequest | None) -> Route | None:
    """The route that the front gave with a request."""
    if pending is None:
        return None
    return next((value for value in pending.args if isinstance(value, Route)), None)
