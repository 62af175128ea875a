"""Gloo's device is made with the torch that is there, at the address of an interface that has one."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from horovod_compress.errors import ConfigError
from horovod_compress.exchange.transports import gloo

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
    assert gloo.own_address(False, [VARIABLE]) == "127.0.0.1"


def test_several_interfaces_without_an_address_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "nosuch0,nosuch1")
    with pytest.raises(ConfigError, match=f"{VARIABLE}=nosuch0,nosuch1 has no IPv4 address; interfaces here: .*lo"):
        gloo.own_address(False, [VARIABLE])
