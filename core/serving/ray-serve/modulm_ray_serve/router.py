"""A request router for Ray Serve that sends requests where their prefix is cached.

Ray Serve serializes this class for every process with a handle, so state shared with the ingress is
in `modulm_ray_serve.affinity`.
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
    """Chooses a replica by load and cached prefixes (`modulm_fleet.router`).

    If it is full, the others follow, least busy first. Requests without a route go to the least
    busy replica.
    """

    def initialize_state(self, slots: int = 64, shared: bool = False) -> None:
        """Create the state. slots: maximum replicas. shared: other ingress replicas exist."""
        self._affinity = Affinity(slots, shared)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Set the replicas that take requests."""
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
        """Forget a dead replica."""
        super().on_replica_actor_died(replica_id)
        self._affinity.disable(replica_id.unique_id)

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        """Record the requests of a replica, including this one."""
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        if self._affinity.shared:
            self._affinity.record_load(replica_id.unique_id, num_ongoing_requests)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Rank the replicas: the best one, then all others."""
        route = _route_of(pending_request)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        if route is None:
            return [candidate_replicas]
        chosen = self._affinity.choose(route)
        if chosen is None:
            return []
        first = [each for each in candidate_replicas if each.replica_id.unique_id == chosen]
        return [first, [each for each in candidate_replicas if each not in first]]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Record the replica that took a request."""
        route = _route_of(pending_request)
        if route is not None:
            self._affinity.record_sent(route, replica_id.unique_id)


def _route_of(pending: PendingRequest | None) -> Route | None:
    """The route that the ingress attached to a request."""
    if pending is None:
        return None
    return next((value for value in pending.args if isinstance(value, Route)), None)
