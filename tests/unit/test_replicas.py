"""What replicas of torchft are refused with; tests/parallel/test_torchft.py has the real package."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import horovod_compress.ddp as hvc


class Group:
    """Stands for a process group of torchft's."""

    def configure(self, *given: Any) -> None:
        self.given = given


def manager(**others: Any) -> Any:
    told: list[str] = []
    made: dict[str, Any] = {"_use_async_quorum": False, "_group_world_size": 1}
    made |= {"register_state_dict_fn": lambda *given: told.append(given[0])}
    return SimpleNamespace(**made | others, told=told)


def made() -> hvc.Compression:
    raise AssertionError("it is made once replicas have met")


def test_what_does_not_fit_is_refused_with_the_remedy() -> None:
    group = hvc.Replicas.group_class(Group)()
    for other in ({"_use_async_quorum": True}, {"_group_world_size": 2}):
        with pytest.raises(hvc.ConfigError, match="use_async_quorum=False, whose replicas are one process each"):
            hvc.Replicas(manager(**other), group, made)
    with pytest.raises(hvc.ConfigError, match="group_class"):
        hvc.Replicas(manager(), Group(), made)
    accepted = manager()
    replicas = hvc.Replicas(accepted, group, made)
    assert accepted.told == ["horovod_compress"]
    with pytest.raises(hvc.ExchangeError, match="not connected"):
        _ = replicas.compression


def test_a_group_remembers_where_its_replicas_meet() -> None:
    group = hvc.Replicas.group_class(Group)()
    assert group.place is None
    group.configure("host:1/torchft/2/0", "replica_1", 1, 3, 2, 0, 1)
    assert group.place == ("host:1/torchft/2/0", 1, 3)
    assert group.given == ("host:1/torchft/2/0", "replica_1", 1, 3, 2, 0, 1)
