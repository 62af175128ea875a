"""Every bad option is refused in words: its name, the value that came, and what is allowed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("horovod.torch")

from horovod_compress.codecs import registry
from horovod_compress.codecs.base import Codec
from horovod_compress.codecs.by_step import by_step
from horovod_compress.engine.agreement import handshake
from horovod_compress.engine.methods import parse
from horovod_compress.errors import ConfigError, ExchangeError, HorovodCompressError, MismatchError
from horovod_compress.exchange.choose import Choose
from horovod_compress.exchange.device import Deadline
from horovod_compress.fronts import startup
from horovod_compress.options import LONGEST_SECONDS, SHORTEST_SECONDS, Options
from horovod_compress.schedule.plan import Plan
from tests.support.connected import connected
from tests.support.local import spec

COMMON: list[tuple[str, Any, str]] = [
    ("exchange", "rings", "auto, ring, fold"),
    ("exchange", None, "auto, ring, fold"),
    ("transport", "tcp", "auto, gloo"),
    ("nonfinite", "ignore", "propagate, raise, zero"),
    ("seed", -1, "whole number"),
    ("seed", 1 << 64, "18446744073709551615"),
    ("seed", 1.0, "whole number"),
    ("seed", True, "whole number"),
    ("verify_every", -1, "whole number"),
    ("verify_every", "every", "whole number"),
    ("min_elements", -5, "whole number"),
    ("warmup_steps", -5, "whole number"),
    ("warmup_steps", 1.5, "whole number"),
    ("total_steps", 0, "whole number from 1"),
    ("total_steps", 100.0, "whole number"),
    ("follow_lr", 1, "True or False"),
    ("follow_lr", "yes", "True or False"),
    ("timeout", 0, "from 0.1 to 1000000 seconds"),
    ("timeout", -3.0, "from 0.1"),
    ("timeout", 1e-9, "from 0.1"),
    ("timeout", math.inf, "to 1000000 seconds"),
    ("timeout", math.nan, "to 1000000 seconds"),
    ("timeout", 9.3e9, "write timeout=1e6"),
    ("timeout", 1_000_001, "to 1000000 seconds"),
    ("timeout", 10**400, "to 1000000 seconds"),
    ("timeout", "30", "number of seconds"),
    ("timeout", True, "number of seconds"),
    ("timeout", [30.0], "number of seconds"),
]
MARSIT: list[tuple[str, Any, str]] = [
    ("full_precision_every", -1, "0 (never) or a whole number of steps"),
    ("full_precision_every", 2.0, "0 (never) or a whole number of steps"),
    ("full_precision_every", True, "0 (never) or a whole number of steps"),
    ("step_size", "rows", '"tensor", "row" or a positive number'),
    ("step_size", 0.0, "positive"),
    ("step_size", -1, "positive"),
    ("step_size", math.nan, "positive"),
    ("step_size", math.inf, "positive"),
    ("step_size", True, "positive"),
    ("step_size", None, "positive"),
    ("compensation", "both", "'none', 'own', 'global'"),
    ("zeros", "negative", '"random" or "positive"'),
    ("residual_decay", 0, "above 0, at most 1"),
    ("residual_decay", 1.5, "above 0, at most 1"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), COMMON + MARSIT)
def test_a_bad_value_is_refused(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse("marsit", {name: value})
    text = str(caught.value)
    assert name in text and repr(value) in text and allowed in text


@pytest.mark.parametrize(
    ("method", "option", "value"),
    [
        ("marsit", "step_size", 1e300),
        ("marsit", "step_size", 10**400),
        ("signsgd", "step_size", 1e-300),  # 0 in float32
        ("terngrad", "clip", 10**400),
        ("dgc", "clip", 10**400),
        ("global_qsgd", "block", 256 * 10**400),
        ("marsit", "compensation", []),
    ],
)
def test_a_number_that_no_codec_could_take_is_refused(method: str, option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{option} should be"):
        parse(method, {option: value})


def test_the_longest_timeout_is_one_that_the_parts_below_can_carry() -> None:
    """A store that is asked for more than its integers hold says that it timed out at once, or hangs."""
    assert parse("none", {"timeout": LONGEST_SECONDS})[1].timeout == LONGEST_SECONDS
    first, second = connected(2, LONGEST_SECONDS)
    data, deadline = torch.arange(8, dtype=torch.uint8), Deadline(LONGEST_SECONDS)
    arrived = torch.zeros_like(data)
    pending = second.receive(arrived, 0)
    first.send(data, 1).wait(deadline)
    pending.wait(deadline)
    assert torch.equal(arrived, data)
    for transport in (first, second):
        transport.close()


@pytest.mark.parametrize("value", [0, 1, (1 << 64) - 1])
def test_good_values_pass(value: int) -> None:
    given = {"seed": value, "timeout": SHORTEST_SECONDS, "step_size": 3, "zeros": "positive"}
    methods, options = parse("marsit", given)
    assert options.seed == value and options.timeout == SHORTEST_SECONDS
    assert methods.config()["step_size"] == 3


def test_numbers_of_numpy_are_those_of_python() -> None:
    given = {"density": np.float64(0.25), "seed": np.int64(3), "timeout": np.float32(2.5)}
    methods, options = parse("topk", given)
    found = [methods.config()["density"], options.seed, options.timeout]
    assert found == [0.25, 3, 2.5] and [type(value) for value in found] == [float, int, float]
    with pytest.raises(ConfigError, match=r"density should be a number above 0, at most 1, got 1\.5$"):
        parse("topk", {"density": np.float64(1.5)})
    steps = by_step({np.int64(0): "none", np.int64(4): "topk"})
    assert steps == by_step({0: "none", 4: "topk"}) and {type(first) for first, _ in steps.stages} == {int}


@pytest.mark.parametrize("schedule", [25, Path("single"), "Single", "size:25", "size:0MB", "mergecomp:none", "auto:3"])
def test_a_schedule_that_there_is_not_is_refused_without_the_tensors(schedule: Any) -> None:
    """So every rank says it by itself, where it might be one rank's only that makes the plan."""
    with pytest.raises(ConfigError) as caught:
        parse("none", {"schedule": schedule})
    assert "Error:" not in str(caught.value)  # in its own words


@pytest.mark.parametrize("method", registry.methods())
def test_an_unknown_option_is_refused_with_the_known_ones(method: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(method, {"tiemout": 3})
    text = str(caught.value)
    assert method in text and "'tiemout'" in text and "timeout" in text and "process_set" in text
    assert all(name in text for name in registry.option_names(method))


@pytest.mark.parametrize("method", ["none", "fp16"])
def test_a_method_without_options_says_so(method: str) -> None:
    for attempt in (lambda: parse(method, {"density": 0.1}), lambda: registry.create(method, density=0.1)):
        with pytest.raises(ConfigError, match=f"{method} has no option 'density'; it has no specific options"):
            attempt()


def test_an_unknown_method_is_refused_with_the_known_ones() -> None:
    for attempt in (registry.codec_class, registry.create, registry.option_names):
        with pytest.raises(ConfigError) as caught:
            attempt("marsitt")
        assert "'marsitt'" in str(caught.value) and ", ".join(registry.available()) in str(caught.value)


def test_names_are_unique_and_options_do_not_collide() -> None:
    class Twice(Codec):
        name = "none"

    with pytest.raises(TypeError, match="none"):
        registry.register(Twice)
    for method in registry.methods():
        assert not set(registry.option_names(method)) & {*Options.names(), "process_set"}


def test_errors_are_of_the_promised_kinds() -> None:
    assert issubclass(ConfigError, HorovodCompressError) and issubclass(ConfigError, ValueError)
    assert issubclass(MismatchError, HorovodCompressError)
    from horovod.common.exceptions import HorovodInternalError

    from horovod_compress.errors import CorruptFrameError

    assert issubclass(ExchangeError, HorovodInternalError) and issubclass(CorruptFrameError, ExchangeError)
    assert not issubclass(MismatchError, HorovodInternalError)  # elastic must not retry it


def test_parameters_that_cannot_work_are_refused() -> None:
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(ConfigError, match="'w' twice"):
        startup.specs([("w", weight), ("w", nn.Parameter(torch.ones(3)))])
    with pytest.raises(ConfigError, match=r"no parameter that needs a gradient$"):
        startup.specs([("w", nn.Parameter(torch.ones(2), requires_grad=False))])
    iterator = iter([("w", weight)])
    assert [tensor.name for tensor in startup.specs(iterator)] == ["w"]
    for empty in ([], iterator):
        with pytest.raises(
            ConfigError, match="no parameter that needs a gradient; it is empty: an iterator can be read"
        ):
            startup.specs(empty)
    with pytest.raises(ConfigError) as caught:
        startup.specs([("w", nn.Parameter(torch.ones(2, dtype=torch.complex64)))])
    assert "w is complex64" in str(caught.value) and "float32" in str(caught.value)


def test_parameters_come_in_backward_order_without_frozen_ones() -> None:
    parameters = [nn.Parameter(torch.ones(i + 1), requires_grad=i != 1) for i in range(3)]
    found = startup.specs([(str(i), parameter) for i, parameter in enumerate(parameters)])
    assert [tensor.name for tensor in found] == ["2", "0"]


def test_a_method_that_cannot_take_the_exchange_says_so() -> None:
    from horovod_compress.codecs.base import Algebra

    class Folding(Codec):
        name = "folding"
        algebra = Algebra.FOLD

    assert Choose("auto")(Folding(), 10, 4).name == "fold"
    with pytest.raises(ConfigError) as caught:
        Choose("ring")(Folding(), 10, 4)
    assert "folding" in str(caught.value) and "fold only" in str(caught.value) and '"ring"' in str(caught.value)


# ---- the handshake ----


def _document(**changes: Any) -> handshake.Document:
    methods, options = parse("marsit", changes)
    return handshake.Document(handshake.fields(methods, options, [spec("a", 3)], "gloo", 3))


def test_every_option_is_in_the_document() -> None:
    """A new option that the handshake does not compare would fail here."""
    shown = _document().fields
    for name in [*Options.names(), *registry.option_names("marsit")]:
        assert name in shown
    plan = Plan.of([([spec("a", 3)], True)])
    changed: dict[str, Any] = {
        "schedule": plan, "exchange": "ring", "seed": 9, "timeout": 9.0, "nonfinite": "zero", "verify_every": 9,
        "min_elements": 9, "full_precision_every": 9, "step_size": 9.0, "compensation": "none", "zeros": "positive",
        "residual_decay": 0.5, "warmup_steps": 9, "merge": "sampled", "step_scale": 1.25, "follow_lr": True,
        "levels": 3, "total_steps": 9, "residual_dtype": "bfloat16", "full_precision_dtype": "bfloat16",
    }  # fmt: skip
    assert {*Options.names(), *registry.option_names("marsit")} - set(changed) == {"transport"}
    same = {"residual_decay": 0.9, "step_scale": 1.0, "levels": 2}  # which otherwise follow other options
    for name, value in changed.items():
        with pytest.raises(MismatchError) as caught:
            handshake.check([_document(**same), _document(**same | {name: value}), _document(**same)])
        text = str(caught.value)
        assert f"agree on {name}:" in text and "ranks 0, 2 = " in text and "rank 1 = " in text


def test_equal_documents_pass_and_refusals_come_first() -> None:
    handshake.check([_document(), _document()])
    refusal = handshake.refusal(ConfigError("seed should be something else"))
    with pytest.raises(ConfigError, match="rank 1 cannot start: seed should be"):
        handshake.check([_document(), refusal, _document(seed=3)])


def test_a_field_that_only_one_rank_has_is_a_difference() -> None:
    more = handshake.Document(_document().fields | {"new option": 1})
    with pytest.raises(MismatchError, match=r"new option: rank 0 = '\(not there\)', rank 1 = 1"):
        handshake.check([_document(), more])


def test_a_plan_is_told_by_its_fingerprint() -> None:
    """Else print(compression) would show every tensor."""
    plan = Plan.of([([spec(f"layer.{number}", 7) for number in range(50)], 1)])
    assert Options(schedule=plan, seed=3).differing() == f"schedule='plan {plan.fingerprint()}' seed=3"
