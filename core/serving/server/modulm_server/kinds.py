"""The kinds of drivers that the server adds."""

from modulm.plugins.kinds import Kind

__all__ = ["IO_PROCESSORS", "ROUTES", "STAT_LOGGERS"]

ROUTES = Kind(
    "routes",
    "route family",
    "route",
    "modulm_server.route:RouteFamily",
    kit="modulm_server.testing:check_routes",
)
IO_PROCESSORS = Kind(
    "io_processors",
    "IO processor",
    "io",
    "modulm_server.io_processor:IOProcessor",
    kit="modulm_server.kits:check_io_processor",
)
STAT_LOGGERS = Kind(
    "stat_loggers",
    "stat logger",
    "stats",
    "modulm_server.stat_logger:StatLogger",
    kit="modulm_server.kits:check_stat_logger",
)
