"""Where ranks connect: over loopback on one host only, and at addresses that others can reach."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from horovod_compress.engine.agreement.handshake import LOOPBACK, Document, Place, host_name, own_address
from horovod_compress.errors import ConfigError

HERE, THERE = "one boot", "other boot"


def shown(*places: Place) -> list[Document]:
    return [Document({}, host=place.host, unreachable=place.problem) for place in places]


def test_ranks_of_one_host_connect_over_loopback_whatever_its_name_resolves_to() -> None:
    place = Place(None, HERE, "resolves to 127.0.1.1")
    assert own_address(place, shown(place, place)) == LOOPBACK


def test_ranks_of_two_hosts_take_their_addresses() -> None:
    places = Place("10.0.0.1", HERE), Place("10.0.0.2", THERE)
    assert [own_address(place, shown(*places)) for place in places] == ["10.0.0.1", "10.0.0.2"]


def test_a_rank_that_other_hosts_cannot_reach_is_named_on_all() -> None:
    places = Place("10.0.0.1", HERE), Place(None, THERE, "resolves to 127.0.1.1")
    for place in places:
        with pytest.raises(
            ConfigError, match=r"rank 1 is not on the same host as the others: resolves to 127\.0\.1\.1"
        ):
            own_address(place, shown(*places))


def test_an_interface_that_was_chosen_decides() -> None:
    place = Place("10.0.0.1")
    assert own_address(place, shown(place, place)) == "10.0.0.1"


def test_a_host_has_one_name() -> None:
    assert host_name() == host_name() != ""
