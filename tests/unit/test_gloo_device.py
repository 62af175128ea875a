"""Gloo's device is made with the torch that is there."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from horovod_compress.exchange.transports import gloo


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
