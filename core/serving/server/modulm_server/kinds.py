"""The kind of driver that the server brings: families of routes."""

from modulm.plugins.kinds import Kind

__all__ = ["ROUTES"]

ROUTES = Kind("routes", "route family", "route", "modulm_server.route:RouteFamily")
