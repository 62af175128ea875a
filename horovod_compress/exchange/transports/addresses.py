"""The address at which a rank says that others reach it: that of an interface, of the host's name, or loopback."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from ipaddress import IPv6Address
from pathlib import Path

from ...errors import ConfigError

#: Names the network interface of the exchange; without Horovod, torch's own variable does too.
INTERFACE = "HOROVOD_GLOO_IFACE"
INTERFACES = (INTERFACE, "GLOO_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface
_LONGEST_NAME = 15
_OF_IPV6 = Path("/proc/net/if_inet6")
_UNUSABLE = 0x08 | 0x40  # flags there: another host has the address, or nobody has looked yet whether one has it


def own_address(one_host: bool, variables: Sequence[str] = (INTERFACE,)) -> str:
    """Return the address at which other ranks reach this one: of IPv4 where there is one, else of IPv6.

    The interface that the first of some environment variables names decides where one is set, or the first that has an
    address, where it names several; else loopback when all ranks share one host; else the address of this host's name.

    Raises:
        ConfigError: the interface has no address, or the host's name does not resolve.
    """
    for variable in variables:
        if interface := os.environ.get(variable, ""):
            return _interface_address(interface, variable)
    if one_host:
        return "127.0.0.1"
    name = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
    advice = f"correct /etc/hosts, or set {variables[-1]} to the network interface to use"
    try:
        address = _resolved(name)
    except OSError as error:
        raise ConfigError(f"this host's name {name!r} does not resolve ({error}); {advice}") from None
    if address == "::1" or address.startswith("127."):
        raise ConfigError(f"this host's name {name!r} resolves to {address}, which other hosts cannot reach; {advice}")
    return address


def _resolved(name: str) -> str:
    """Return the first address of a name.

    Raises:
        OSError: it has none.
    """
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        with contextlib.suppress(OSError):
            for _, _, _, _, (address, *_) in socket.getaddrinfo(name, None, socket.AF_INET6, socket.SOCK_STREAM):
                if not IPv6Address(address).is_link_local:
                    return str(address)
        raise error from None


def _interface_address(interface: str, variable: str) -> str:
    names = interface.split(",")  # as torch reads its own variable
    for name in names:
        if address := _ipv4_of(name):
            return address
    for name in names:
        if address := _ipv6_of(name):
            return address
    known = ", ".join(name for _, name in socket.if_nameindex())
    raise ConfigError(f"{variable}={interface} has no IP address; interfaces here: {known}")


def _ipv4_of(interface: str) -> str:
    if len(asked := interface.encode()) > _LONGEST_NAME:
        return ""  # cut, it would be another one's
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", asked))
        return socket.inet_ntoa(found[20:24])
    return ""


def _ipv6_of(interface: str) -> str:
    """Return an address of an interface that counts on other links too; empty if there is none."""
    with contextlib.suppress(OSError):
        for line in _OF_IPV6.read_text().splitlines():
            digits, *_, flags, name = line.split()
            if name != interface or int(flags, 16) & _UNUSABLE:
                continue
            if not (found := IPv6Address(int(digits, 16))).is_link_local:
                return str(found)
    return ""
