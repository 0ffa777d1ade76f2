"""The driver kind of route families."""

from modulm.plugins.kinds import Kind

__all__ = ["ROUTES"]

ROUTES = Kind(
    "routes",
    "route family",
    "route",
    "modulm_server.route:RouteFamily",
    kit="modulm_server.testing:check_routes",
)
