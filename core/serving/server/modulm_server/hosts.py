"""Who a request says it is for, and which page it comes from.

A server without a key trusts whoever reaches it, and on the loopback interface that is meant to be
the user of the machine. A web page that the user has opened reaches it too: under a name of its own
that now leads to 127.0.0.1 (DNS rebinding), or by a request that browsers send to other sites
without asking. Both show in headers that a page cannot set.
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

#: Methods that change nothing: a page of another origin cannot read what they answer.
_HARMLESS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})


@frozen
class HostCheck:
    """Which hosts and origins are served.

    hosts: names, `*.example.org` for all below one, beside those of the loopback interface; None:
    any. addresses: any IP address is served as well, which no name can lead to. origins: of pages
    that may send what changes something, beside the server's own; None: any.
    """

    hosts: frozenset[str] | None = None
    addresses: bool = False
    origins: frozenset[str] | None = None

    @classmethod
    def of(cls, server: ServerConfig, keys: bool) -> Self:
        """As configured: `--allowed-hosts`, or what protects a server on loopback without keys."""
        given = server.allowed_hosts
        exposed = keys or server.uds is not None or not is_loopback(server.host or "127.0.0.1")
        origins = None if exposed or "*" in server.allowed_origins else server.allowed_origins
        hosts = (*given,) if given is not None else ()
        return cls(
            hosts=None
            if "*" in hosts or (given is None and exposed)
            else frozenset(name.lower() for name in (*hosts, *filter(None, (server.host,)))),
            addresses=given is None,
            origins=None if origins is None else frozenset(origins),
        )

    def check(self, scope: Scope) -> None:
        """Raise ApiError: 400 for several Host headers, 403 for a foreign host or page."""
        given = [bytes(value) for name, value in scope["headers"] if name == b"host"]
        if len(given) > 1:
            raise ApiError(400, "there are several Host headers")
        host = given[0].decode("latin-1") if given else ""
        if host and self.hosts is not None and not self._serves(host):
            raise ApiError(
                403,
                f"host {escape(host, 64)!r} is not served here; --allowed-hosts names further ones",
                code="host_not_allowed",
            )
        if self.origins is not None and scope.get("method") not in _HARMLESS:
            for name, value in scope["headers"]:
                if name == b"origin" and not self._welcomes(value.decode("latin-1"), host):
                    raise ApiError(
                        403,
                        "pages of this origin may not send requests here; --allowed-origins names "
                        "those that may",
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
    """Whether an address to listen on is of this machine alone."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def _is_local(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost") or is_loopback(name)


def _name(host: str) -> str | None:
    """The name of a Host header without its port; None if it has no form that browsers send."""
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
