"""Checks the Host and Origin headers of requests.

A server without API keys trusts whoever reaches it: the user of the machine, or of its network. A
web page that such a user opens can reach it too: under a name that now resolves to its address (DNS
rebinding), or by a cross-site request that browsers send without a preflight. Both are visible in
headers that pages cannot set.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from attrs import frozen

from modulm_server.errors import ApiError, escape

if TYPE_CHECKING:
    from starlette.types import Scope

    from modulm_server.flags import ServerConfig

__all__ = ["HostCheck", "is_loopback"]

#: Methods that change nothing; pages of other origins cannot read their responses.
_HARMLESS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})


@frozen
class HostCheck:
    """The allowed hosts and origins.

    hosts: names in addition to those of the loopback interface, `*.example.org` for subdomains;
    None allows any. addresses: allow any IP address, which DNS rebinding cannot use. origins: of
    pages, in addition to the server's own, that may send requests with side effects; None allows
    any.
    """

    hosts: frozenset[str] | None = None
    addresses: bool = False
    origins: frozenset[str] | None = None

    @classmethod
    def of(cls, server: ServerConfig, keys: bool) -> Self:
        """Create the check of a configuration. The default protects servers without keys."""
        configured = server.allowed_hosts
        exposed = keys or server.uds is not None
        origins = None if exposed or "*" in server.allowed_origins else server.allowed_origins
        hosts = (*configured,) if configured is not None else ()
        return cls(
            hosts=None
            if "*" in hosts or (configured is None and exposed)
            else frozenset(name.lower() for name in (*hosts, *filter(None, (server.host,)))),
            addresses=configured is None,
            origins=None if origins is None else frozenset(origins),
        )

    def check(self, scope: Scope) -> None:
        """Raise ApiError: 400 for several Host headers, 403 for a host or origin not allowed."""
        host_headers = [bytes(value) for name, value in scope["headers"] if name == b"host"]
        if len(host_headers) > 1:
            raise ApiError(400, "several Host headers")
        host = host_headers[0].decode("latin-1") if host_headers else ""
        if host and self.hosts is not None and not self._serves(host):
            raise ApiError(
                403,
                f"host {escape(host, 64)!r} is not allowed; allow more hosts with --allowed-hosts",
                code="host_not_allowed",
            )
        if self.origins is not None and scope.get("method") not in _HARMLESS:
            for name, value in scope["headers"]:
                if name == b"origin" and not self._welcomes(value.decode("latin-1"), host):
                    raise ApiError(
                        403,
                        "requests from this origin are not allowed; allow it with "
                        "--allowed-origins",
                        code="origin_not_allowed",
                    )

    def _serves(self, host: str) -> bool:
        name = _name(host)
        if name is None:
            return False
        if _is_local(name) or name in (self.hosts or ()):
            return True
        if self.addresses and _address(name) is not None:
            return True
        return any(
            pattern.startswith("*.") and name.endswith(pattern[1:]) for pattern in self.hosts or ()
        )

    def _welcomes(self, origin: str, host: str) -> bool:
        if origin in (self.origins or ()):
            return True
        parts = urlsplit(origin)
        if parts.scheme not in ("http", "https"):
            return origin != "null"
        return parts.netloc == host or _is_local(_name(parts.netloc) or "")


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reachable only from this machine."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def _is_local(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost") or is_loopback(name)


def _name(host: str) -> str | None:
    """The name in a Host header without its port; None if the header is malformed."""
    try:
        parts = urlsplit(f"//{host}")
        if parts.netloc != host or parts.username is not None:
            return None
        if parts.port is None and host.endswith(":"):
            return None
    except ValueError:
        return None
    return (parts.hostname or "").removesuffix(".") or None


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
