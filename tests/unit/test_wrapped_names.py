"""A compression has the same names, and saves the same state, whether it is given a model or a wrapper of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import horovod_compress.ddp as hvc
from horovod_compress.engine import names
from horovod_compress.engine.saved import checksums
from horovod_compress.errors import ConfigError, CorruptFrameError, StateError
from horovod_compress.schedule.plan import Plan
from tests.unit.test_one_rank_ddp import group as group


class Compiled(nn.Module):
    """Names parameters as torch.compile does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model


class Checkpointing(nn.Module):
    """Names parameters as torch's activation checkpointing does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = model


class Distributed(nn.Module):
    """Names parameters as DistributedDataParallel does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "module.": Distributed,
    "_orig_mod.": Compiled,
    "module._orig_mod.": lambda model: Distributed(Compiled(model)),
    "_checkpoint_wrapped_module.": Checkpointing,
    "_orig_mod._checkpoint_wrapped_module.": lambda model: Compiled(Checkpointing(model)),
    "_orig_mod.module.": lambda model: Compiled(Distributed(model)),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


@pytest.fixture(autouse=True)
def closing(group: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[hvc.Compression] = []
    whole = hvc.Compression.__init__

    def init(self: hvc.Compression, *given: Any, **options: Any) -> None:
        whole(self, *given, **options)
        made.append(self)

    monkeypatch.setattr(hvc.Compression, "__init__", init)
    yield
    for compression in made:
        compression.close()


def same(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    return one[checksums.KEY] == two[checksums.KEY] and one["plan"] == two["plan"]


@pytest.mark.parametrize("prefix", WRAPPERS)
def test_a_state_is_the_same_with_and_without_a_wrapper(prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "horovod_compress")
    plain = hvc.Compression.topk(net().named_parameters())
    plain_state = plain.state_dict()
    assert "is called" not in caplog.text
    given = list(WRAPPERS[prefix](net()).named_parameters())
    assert given[0][0] == f"{prefix}0.weight"
    wrapped = hvc.Compression.topk(given)
    [record] = [record for record in caplog.records if "is called" in record.getMessage()]
    assert record.levelno == logging.INFO and f"{prefix}0.weight is called 0.weight here" in record.getMessage()
    in_front = "module." in prefix.replace("_checkpoint_wrapped_module.", "")
    assert ("all names begin with module., which is left out" in record.getMessage()) == in_front
    for part in ("_orig_mod.", "_checkpoint_wrapped_module."):
        assert (f"{part} is left out of names" in record.getMessage()) == (part in prefix)
    assert wrapped.plan == plain.plan and same(wrapped.state_dict(), plain_state)
    wrapped.load_state_dict(plain_state)
    plain.load_state_dict(wrapped.state_dict())


@pytest.mark.slow  # it takes seconds to import these
def test_the_wrappers_of_torch() -> None:
    """Wrap as the classes above do, and train."""
    model = net()
    wrapped = torch.compile(DistributedDataParallel(model), backend="eager")
    assert [name for name, _ in wrapped.named_parameters()] == [
        name for name, _ in Compiled(Distributed(model)).named_parameters()
    ]
    compression = hvc.Compression.topk(wrapped.named_parameters(), warmup_steps=0, min_elements=0)
    called = compression.register(DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1))
    called(torch.ones(1, 4)).sum().backward()
    assert set(compression.state_dict()["state"]["residual"]) == {name for name, _ in net().named_parameters()}


def test_patterns_and_plans_with_the_names_of_a_wrapper() -> None:
    model = net()
    plain = hvc.Compression.per_layer({"0.*": "topk", "*": "none"}, model.named_parameters())
    given = list(Distributed(net()).named_parameters())
    wrapped = hvc.Compression.per_layer({"module.0.*": "topk", "*": "none"}, given)
    assert wrapped.plan == plain.plan and same(wrapped.state_dict(), plain.state_dict())
    longer = {name: f"module.{name}" for name in plain.plan.names()}
    plan = Plan.from_document(names._renamed(plain.plan.document(), longer))
    for named in (given, list(net().named_parameters())):
        assert hvc.Compression.create("topk", named, schedule=plan).plan.names() == plain.plan.names()


class Bare(nn.Module):
    """Has a parameter of its own beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bias = nn.Linear(4, 4), nn.Parameter(torch.zeros(4))


@pytest.mark.parametrize(
    ("patterns", "short"),
    [
        ({"*.bias": "none", "*": "topk"}, ["bias", "layer.bias"]),
        ({"module.bias": "none", "*": "topk"}, ["bias"]),
        ({"bias": "none", "*": "topk"}, ["bias"]),
        ({"module.l*": "none", "bias": "topk"}, ["layer.bias", "layer.weight"]),
        ({"module*": "none"}, ["bias", "layer.bias", "layer.weight"]),
        ({"module.layer.weight": hvc.masked("topk"), "layer.*": "none", "*": "topk"}, ["layer.bias"]),
    ],
)
def test_a_pattern_fits_the_given_name_or_the_short_one(patterns: dict[str, Any], short: list[str]) -> None:
    """The first rule that fits either decides."""
    given = list(Distributed(Bare()).named_parameters())
    compression = hvc.Compression.per_layer(patterns, given, min_elements=0)
    methods = compression._session.methods
    assert sorted(name for name in compression.plan.names() if methods.codec(name).name == "none") == short
    assert methods.is_masked("layer.weight") == (len(patterns) == 3)
    assert not any("module." in key for key in methods.config())


class Own(nn.Module):
    """Has a part that is called `module`, and another one."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.head = nn.Linear(4, 4), nn.Linear(4, 2)


def test_names_that_are_the_models_own_stay(caplog: pytest.LogCaptureFixture) -> None:
    model = Own()
    for parameter in model.head.parameters():
        parameter.requires_grad_(False)
    compression = hvc.Compression.topk(model.named_parameters())
    assert sorted(compression.plan.names()) == ["module.bias", "module.weight"] and not caplog.records
    compression.load_state_dict(compression.state_dict())  # of which all names begin with "module."
    twice = {"a._orig_mod.b": "", "a.b": ""}
    assert names.without_wrappers(twice) == names.without_wrappers([]) == names.without_wrappers(["module."]) == {}
    assert names.without_wrappers(["a._orig_mod.b", "my_orig_mod.b"]) == {"a._orig_mod.b": "a.b"}
    assert names._without_torch("*_orig_mod.b*") == "*b*" and names._without_torch("my_orig_mod.*") == "my_orig_mod.*"
    some = names.without_wrappers(["a._checkpoint_wrapped_module.b", "c"])  # of one block only
    assert some == {"a._checkpoint_wrapped_module.b": "a.b"}


def test_another_model_is_still_another_model() -> None:
    compression = hvc.Compression.topk(net().named_parameters())
    other = hvc.Compression.topk(nn.Sequential(nn.Linear(4, 4)).named_parameters())
    with pytest.raises(StateError):
        compression.load_state_dict(other.state_dict())
    for wrong in (None, 3, {}, {"format": 3, "state": [], "buckets": 7}):
        with pytest.raises((ConfigError, CorruptFrameError)):
            compression.load_state_dict(wrong)  # type: ignore[arg-type]
