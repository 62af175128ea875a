"""Replicas of torchft with a manager that stands for it: what is refused, what ends the job, and what discards a step.

tests/parallel/test_torchft.py has the real package.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore

import horovod_compress.ddp as hvc


class Group:
    """Stands for a process group of torchft's."""

    _timeout = timedelta(seconds=20)

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


class Manager:
    """Stands for the manager of the only replica."""

    _use_async_quorum, _group_world_size = False, 1

    def __init__(self) -> None:
        self.told: list[Exception] = []  # in this step

    def register_state_dict_fn(self, key: str, heal: Any, shown: Any) -> None:
        self.heal, self.shown = heal, shown

    def start_quorum(self) -> None:
        self.told = []

    def errored(self) -> Exception | None:
        return self.told[-1] if self.told else None

    def report_error(self, error: Exception) -> None:
        self.told.append(error)

    def should_commit(self) -> bool:
        return not self.told


class Alone:
    """The only replica, and what its compression is made with."""

    def __init__(self) -> None:
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.options: dict[str, Any] = {"timeout": 20.0}
        self.fails: Exception | None = None  # of make()
        self.made: list[hvc.Compression] = []
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.manager, self.group, self.quorum = Manager(), hvc.Replicas.group_class(Group)(), 0
        self.replicas = hvc.Replicas(self.manager, self.group, self.make)

    def make(self) -> hvc.Compression:
        if self.fails:
            raise self.fails
        self.made.append(hvc.Compression.create("topk", self.model.named_parameters(), **self.options))
        self.made[-1].register(self.model, self.optimizer)
        return self.made[-1]

    def meet(self) -> None:
        self.quorum += 1
        self.group.configure(f"127.0.0.1:{self.store.port}/torchft/{self.quorum}/0", "replica_0", 0, 1)

    def step(self, fault: Exception | None = None) -> bool:
        self.replicas.begin()
        self.optimizer.zero_grad()
        with self.replicas.reporting():
            self.model(torch.ones(2, 8)).sum().backward()
            if fault:
                raise fault
        if committed := self.replicas.should_commit():
            self.optimizer.step()
        return committed


@pytest.fixture
def alone() -> Iterator[Alone]:
    found = Alone()
    yield found
    found.replicas._leave()


MISTAKES = [hvc.ConfigError, hvc.StateError, hvc.MismatchError, hvc.NonFiniteError]
PASSING = [hvc.ExchangeError, dist.DistNetworkError]


@pytest.mark.parametrize("kind", MISTAKES)
def test_what_would_come_in_every_step_again_ends_the_job(alone: Alone, kind: type[Exception], monkeypatch) -> None:
    def refuse(*given: object) -> None:
        raise kind("planted in load_state_dict()")

    alone.meet()
    assert alone.step()
    with pytest.raises(kind, match="planted in the pass"):
        alone.step(kind("planted in the pass"))
    alone.meet()
    alone.fails = kind("planted in make()")
    with pytest.raises(kind, match=r"planted in make\(\)"):
        alone.step()
    alone.meet()
    alone.fails = None
    monkeypatch.setattr(hvc.Compression, "load_state_dict", refuse)
    with pytest.raises(kind, match=r"planted in load_state_dict\(\)"):
        alone.step()


@pytest.mark.parametrize("kind", PASSING)
def test_what_may_pass_discards_steps_until_replicas_meet_again(alone: Alone, kind: type[Exception]) -> None:
    alone.meet()
    assert alone.step()
    assert not alone.step(kind("planted in the pass"))
    alone.meet()
    alone.fails = kind("planted in make()")
    assert not alone.step(), "the backward pass meets with what is left of the compression of before"
    assert [type(error) for error in alone.manager.told] == [kind, hvc.ConfigError]
    assert not alone.step(), "they have not met again"
    alone.meet()
    alone.fails = None
    assert alone.step()
    assert alone.replicas.compression.state_dict()["step"] == 2


def test_a_second_pass_of_a_step_that_is_lost_already_may_fail_in_any_way(alone: Alone) -> None:
    alone.meet()
    alone.replicas.begin()
    with alone.replicas.reporting():
        raise dist.DistError("planted, of a collective of the program's")
    with alone.replicas.reporting():
        raise hvc.ConfigError("planted: gradients of another pass are there")
    assert not alone.replicas.should_commit()
    assert alone.step()


def test_a_replica_that_healed_and_could_not_connect_hands_on_what_it_got(alone: Alone) -> None:
    alone.meet()
    assert alone.step() and alone.step()
    alone.replicas.begin()
    shown = alone.manager.shown()
    assert shown["step"] == 2
    alone.manager.heal(shown)
    alone.meet()
    alone.fails = hvc.ExchangeError("planted")
    assert not alone.step()
    assert alone.manager.shown() == shown


def test_shares_of_hosts_are_refused_and_closed(alone: Alone) -> None:
    alone.meet()
    alone.options["exchange"] = "hierarchical"
    with pytest.raises(hvc.ConfigError, match='change with the replicas: use exchange="auto"'):
        alone.step()
    assert alone.made[0]._here().failure.closing and not dist.is_initialized()


@pytest.mark.parametrize("kind", [hvc.ExchangeError, hvc.StateError])
def test_a_compression_that_cannot_go_on_is_closed(alone: Alone, kind: type[Exception], monkeypatch) -> None:
    def refuse(*given: object) -> None:
        raise kind("planted")

    alone.meet()
    assert alone.step()
    alone.meet()
    with monkeypatch.context() as patched:
        patched.setattr(hvc.Compression, "load_state_dict", refuse)
        if kind is hvc.ExchangeError:
            assert not alone.step()
        else:
            with pytest.raises(kind, match="planted"):
                alone.step()
    assert len(alone.made) == 2 and all(made._here().failure.closing for made in alone.made)
    with pytest.raises(hvc.ExchangeError, match="not connected"):
        _ = alone.replicas.compression


def test_an_exchange_that_fails_after_its_step_counts_loses_nothing(alone: Alone, monkeypatch) -> None:
    """Another replica has died in the end of a step that this one has made; it hears of that before the next."""

    def fail(*given: object) -> None:
        raise hvc.ExchangeError("planted: a replica is gone")

    alone.meet()
    assert alone.step() and alone.step()
    with monkeypatch.context() as planted:
        planted.setattr(alone.replicas.compression._here().reducer, "wait_idle", fail)
        alone.replicas.begin()
    assert alone.manager.shown()["step"] == 2, "who heals from this one would get an older state"
    alone.meet()
    assert alone.step()
    assert alone.replicas.compression.state_dict()["step"] == 3


def test_replicas_that_do_not_meet_discard_the_step(alone: Alone, monkeypatch) -> None:
    """Gloo says so by a plain RuntimeError."""

    def fail(*given: object, **options: object) -> None:
        raise RuntimeError("planted: Gloo connectFullMesh failed")

    alone.meet()
    with monkeypatch.context() as planted:
        planted.setattr(dist, "init_process_group", fail)
        assert not alone.step()
    alone.meet()
    assert alone.step()
