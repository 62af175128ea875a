"""Gloo's device is made with the torch that is there, at the address of an interface that has one."""

from __future__ import annotations

import contextlib
import fcntl
import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from horovod_compress.errors import ConfigError
from horovod_compress.exchange.transports import addresses, gloo

VARIABLE = "GLOO_SOCKET_IFNAME"


class Recent:
    @staticmethod
    def create_device(hostname: str, lazy_init: bool) -> tuple[str, bool]:
        return hostname, lazy_init


class Early:
    """As in torch 2.4, which always connects at once."""

    @staticmethod
    def create_device(hostname: str, interface: str = "") -> str:
        return hostname


@pytest.mark.parametrize(("kind", "made"), [(Recent, ("::1", False)), (Early, "::1")])
def test_connections_are_made_at_once(kind: type, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo.dist, "ProcessGroupGloo", kind)
    assert gloo._device("::1") == made


@pytest.mark.parametrize("named", ["lo", "lo,nosuch0", "nosuch0,lo", "nosuch0,,lo"])
def test_of_several_interfaces_the_first_with_an_address_is_taken(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, named)
    assert addresses.own_address(False, [VARIABLE]) == "127.0.0.1"


def test_several_interfaces_without_an_address_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "nosuch0,nosuch1")
    with pytest.raises(ConfigError, match=f"{VARIABLE}=nosuch0,nosuch1 has no IP address; interfaces here: .*lo"):
        addresses.own_address(False, [VARIABLE])


def test_a_name_that_is_too_long_is_that_of_no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux cuts it, so that it would be another one's."""
    made = "a" * 15
    monkeypatch.setattr(fcntl, "ioctl", lambda *given: bytes(20) + bytes([10, 0, 0, 1]) + bytes(232))
    for name, refused in ((made, False), (made + "b", True)):
        monkeypatch.setenv(VARIABLE, name)
        with pytest.raises(ConfigError, match="no IP address") if refused else contextlib.nullcontext():
            assert addresses.own_address(False, [VARIABLE]) == "10.0.0.1"


def test_an_interface_of_ipv6_alone_has_an_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """But none of a link, which says nothing without the interface of whoever asks, nor one that another host has."""
    known = tmp_path / "if_inet6"
    known.write_text(
        "fe800000000000000042acfffe110002 05 40 20 80     six0\n"
        "fd000000000000000000000000000001 05 40 00 c8     six0\n"
        "fd000000000000000000000000000003 05 40 00 c0     six0\n"
        "fd000000000000000000000000000002 05 40 00 82     six0\n"
        "fe800000000000000042acfffe110003 06 40 20 80     link0\n"
    )
    monkeypatch.setattr(addresses, "_OF_IPV6", known)
    monkeypatch.setenv(VARIABLE, "six0")
    assert addresses.own_address(False, [VARIABLE]) == "fd00::2"
    monkeypatch.setenv(VARIABLE, "six0,lo")
    assert addresses.own_address(False, [VARIABLE]) == "127.0.0.1"
    monkeypatch.setenv(VARIABLE, "link0")
    with pytest.raises(ConfigError, match="has no IP address"):
        addresses.own_address(False, [VARIABLE])


@pytest.mark.parametrize(
    ("ipv4", "ipv6", "found"),
    [
        ("10.0.0.1", ["fd00::2"], "10.0.0.1"),
        (None, ["fe80::1", "fd00::2"], "fd00::2"),
        (None, ["::1"], "resolves to ::1, which other hosts cannot reach"),
        ("127.0.1.1", ["fd00::2"], "resolves to 127.0.1.1, which other hosts cannot reach"),
        (None, [], "does not resolve"),
    ],
)
def test_a_name_of_ipv6_alone_resolves(
    ipv4: str | None, ipv6: list[str], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_ipv4(name: str) -> str:
        if ipv4 is None:
            raise socket.gaierror("no address")
        return ipv4

    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(socket, "gethostbyname", of_ipv4)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given: [(0, 0, 0, "", (one, 0, 0, 0)) for one in ipv6])
    if " " in found:
        with pytest.raises(ConfigError, match=found):
            addresses.own_address(False, [VARIABLE])
    else:
        assert addresses.own_address(False, [VARIABLE]) == found
