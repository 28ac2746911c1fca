"""The network interfaces of this node, by address and by name."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from clusterddp.errors import InterfaceMissing

#: IPv6 addresses: the address in hexadecimal, its interface last.
_IPV6 = Path("/proc/net/if_inet6")
_LINK_LOCAL = ipaddress.ip_network("fe80::/10")


def names() -> list[str]:
    """The names of all interfaces."""
    return [name for _, name in socket.if_nameindex()]


def addresses_of(name: str) -> list[str]:
    """The addresses of an interface that other nodes can reach. IPv4 comes first."""
    return [address for owner, address in _all() if owner == name]


def interface_of(address: str) -> str | None:
    """The name of the interface with this address, or None."""
    return next((name for name, own in _all() if own == address), None)


def chosen(interfaces: Sequence[str]) -> tuple[str, str]:
    """The first of the interfaces that this node has, and its address. Raises InterfaceMissing if it has none of them,
    or if that one has no address."""
    there = names()
    if (found := next((name for name in interfaces if name in there), None)) is None:
        raise InterfaceMissing(
            f"interface: {socket.gethostname()} has no {' or '.join(interfaces)}. It has {', '.join(there)}. Change "
            "the key, which takes a list for nodes that differ, or exclude the node"
        )
    if not (addresses := addresses_of(found)):
        raise InterfaceMissing(f"interface: {found} has no address on {socket.gethostname()}")
    return found, addresses[0]


def _all() -> Iterator[tuple[str, str]]:
    get_address = 0x8915  # SIOCGIFADDR, linux/sockios.h
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names():
            with suppress(OSError):
                answer = fcntl.ioctl(probe, get_address, struct.pack("256s", name.encode()[:15]))
                yield name, socket.inet_ntoa(answer[20:24])
    with suppress(OSError):  # no IPv6
        for words in map(str.split, _IPV6.read_text().splitlines()):
            address = ipaddress.ip_address(bytes.fromhex(words[0]))
            if address not in _LINK_LOCAL:
                yield words[-1], str(address)
