"""Hosts and network addresses that media may be fetched from."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import httpx

from modulm_media.flags import MediaConfig
from modulm_media.limits import Undecodable

__all__ = ["Hosts"]

_NAT64 = ip_network("64:ff9b::/96")
_6TO4 = ip_network("2002::/16")
_COMPATIBLE = ip_network("::/96")
#: Networks that are not public, whatever this Python version's own list says: IPv4 in IPv6, local
#: NAT64, discard, Teredo, benchmarks, ORCHID, documentation, segment routing, private, link, site.
_REFUSED = tuple(
    ip_network(one)
    for one in (
        "64:ff9b:1::/48",
        "100::/64",
        "2001::/32",
        "2001:2::/48",
        "2001:10::/28",
        "2001:db8::/32",
        "3fff::/20",
        "5f00::/16",
        "fc00::/7",
        "fe80::/10",
        "fec0::/10",
        "::/16",
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/3",
    )
)
#: Names that are looked up at once. A name server that does not answer takes a thread for a while.
_LOOKUPS = 16
#: Characters that are rejected in URLs, because programs disagree about their meaning.
_STRANGE = re.compile(r"[\x00-\x20\x7f\\]")


class Hosts:
    """The hosts that the server's flags allow."""

    def __init__(self, flags: MediaConfig) -> None:
        domains = flags.allowed_media_domains
        self._domains = None if domains is None else [_plain(domain) for domain in domains]
        self._networks = [ip_network(one) for one in flags.allowed_media_networks]
        self._lookups = ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="modulm-media-names")

    def parsed(self, url: str) -> httpx.URL:
        """Parse a URL; the result is what is checked and fetched. Raises Undecodable."""
        if _STRANGE.search(url):
            raise Undecodable("a URL has no spaces, backslashes or control characters")
        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, ValueError, UnicodeError) as error:
            raise Undecodable("not a valid URL") from error
        return self.checked(parsed)

    def checked(self, url: httpx.URL) -> httpx.URL:
        """Return the URL if its scheme and host are allowed. Raises Undecodable otherwise."""
        if url.scheme not in ("http", "https"):
            raise Undecodable("only http, https, data and file URLs are supported")
        if url.userinfo or _STRANGE.search(str(url)):
            raise Undecodable("a URL must not have a user or control characters")
        host = _plain(url.raw_host.decode("ascii"))
        if not host or "%" in host or not 0 < (url.port or 80) < 2**16:
            raise Undecodable("the URL has no host")
        if self._domains is not None and not any(_fits(host, one) for one in self._domains):
            raise Undecodable(
                f"media may not be fetched from {host[:100]!r} (--allowed-media-domains)"
            )
        return url

    async def resolved(self, url: httpx.URL) -> Sequence[str]:
        """Resolve the URL's host; all addresses must be allowed. Raises Undecodable."""
        host = url.raw_host.decode("ascii").strip("[]")
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            entries = await asyncio.get_running_loop().run_in_executor(
                self._lookups, partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
            )
        except (OSError, UnicodeError) as error:
            raise Undecodable(f"the host {host[:100]!r} is unknown") from error
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
        for address in addresses:
            if not self.allowed(address):
                raise Undecodable(
                    f"the host {host[:100]!r} has no public address (--allowed-media-networks)"
                )
        return addresses

    def close(self) -> None:
        """End the threads that look names up, once they are done."""
        self._lookups.shutdown(wait=False, cancel_futures=True)

    def allowed(self, address: str) -> bool:
        """Whether connections to an address are allowed."""
        outer: IPv4Address | IPv6Address = ip_address(address.partition("%")[0])
        inner = _inner(outer)
        if any(one in network for network in self._networks for one in (outer, inner)):
            return True
        return not _is_refused(outer) and not _is_refused(inner)


def _is_refused(address: IPv4Address | IPv6Address) -> bool:
    """Whether an address is outside the public internet."""
    if address.is_multicast or not address.is_global:
        return True
    return any(address in network for network in _REFUSED)


def _inner(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The IPv4 address embedded in an IPv6 address, otherwise the address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address in _NAT64 or (address in _COMPATIBLE and int(address) > 1):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    if address in _6TO4 and address.sixtofour is not None:
        return address.sixtofour
    return address.teredo[1] if address.teredo is not None else address


def _plain(host: str) -> str:
    return host.strip().lower().rstrip(".")


def _fits(host: str, domain: str) -> bool:
    if domain.startswith("*."):
        return host.endswith(domain[1:])
    return host == domain
