"""Ranks that were started differently: refused on every rank, in time, with the difference named."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

import horovod_compress
from horovod_compress.engine.agreement import handshake
from horovod_compress.fronts import startup
from horovod_compress.schedule.plan import Plan, TensorSpec
from tests.support.front import hvc, start
from tests.support.rank import check, meet, rank

start()
ODD = rank() == 1


def model(width: int = 8, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2)).to(dtype)


def attempt(make: Callable[[], Any]) -> dict[str, Any]:
    began = time.monotonic()
    try:
        made = make()
    except Exception as error:
        kind, text = type(error).__name__, str(error)
        recoverable = isinstance(error, hvc.ExchangeError)
        return {"kind": kind, "text": text, "seconds": time.monotonic() - began, "recoverable": recoverable}
    # close() cuts the connections, and the other ranks may still be connecting: the last one to
    # connect would find nobody.
    meet()
    made.close()
    return {"kind": "accepted", "text": "", "seconds": time.monotonic() - began, "recoverable": None}


def with_options(odd: dict[str, Any], usual: dict[str, Any] | None = None) -> Callable[[], Any]:
    return lambda: hvc.Compression.marsit(model().named_parameters(), **(odd if ODD else usual or {}))


def with_model(odd: nn.Module, usual: nn.Module) -> Callable[[], Any]:
    return lambda: hvc.Compression.marsit((odd if ODD else usual).named_parameters())


def with_method() -> Any:
    return hvc.Compression.create("fp16" if ODD else "bf16", model().named_parameters())


def with_name() -> Any:
    pairs = [("odd.weight" if ODD and name == "0.weight" else name, p) for name, p in model().named_parameters()]
    return hvc.Compression.marsit(pairs)


def with_attribute(module: Any, name: str, odd: Any) -> Callable[[], Any]:
    def make() -> Any:
        usual = getattr(module, name)
        if ODD:
            setattr(module, name, odd)
        try:
            return hvc.Compression.marsit(model().named_parameters())
        finally:
            setattr(module, name, usual)

    return make


def own_plan(reverse: bool) -> Plan:
    specs = [TensorSpec(n, tuple(p.shape), "float32") for n, p in model().named_parameters()]
    return Plan.of([(specs[::-1] if reverse else specs, True)])


def unreadable(odd: Exception) -> Callable[[], Any]:
    """Parameters that this rank fails to produce: an error of its own, before anything is compared."""

    def pairs() -> Iterator[tuple[str, nn.Parameter]]:
        if ODD:
            raise odd
        yield from model().named_parameters()

    return lambda: hvc.Compression.marsit(pairs())


def buggy() -> Any:
    """Make the compression with an error that the package does not raise on purpose."""
    with mock.patch.object(startup, "specs", side_effect=KeyError("a bug")):
        return hvc.Compression.marsit(model().named_parameters())


CASES: dict[str, Callable[[], Any]] = {
    "control": with_options({}),
    "seed": with_options({"seed": 8}, {"seed": 7}),
    "full_precision_every": with_options({"full_precision_every": 4}, {"full_precision_every": 5}),
    "step_size": with_options({"step_size": "tensor"}, {"step_size": "row"}),
    "compensation": with_options({"compensation": "none"}, {"compensation": "own"}),
    "zeros": with_options({"zeros": "positive"}, {"zeros": "random"}),
    "schedule": with_options({"schedule": "single"}, {"schedule": "layerwise"}),
    "plan": lambda: hvc.Compression.marsit(model().named_parameters(), schedule=own_plan(ODD)),
    "exchange": with_options({"exchange": "ring"}, {"exchange": "fold"}),
    "nonfinite": with_options({"nonfinite": "zero"}, {"nonfinite": "raise"}),
    "verify_every": with_options({"verify_every": 10}, {"verify_every": 11}),
    "min_elements": with_options({"min_elements": 3}, {"min_elements": 2}),
    "timeout": with_options({"timeout": 9.0}, {"timeout": 8.0}),
    "method": with_method,
    "shape": with_model(model(9), model(8)),
    "dtype": with_model(model(dtype=torch.float64), model()),
    "name": with_name,
    "count": with_model(nn.Sequential(nn.Linear(4, 8)), model()),
    "wire version": with_attribute(handshake, "WIRE_VERSION", 99),
    "package version": with_attribute(handshake, "__version__", "9.9.9"),
    "invalid": with_options({"full_precision_every": -1}),
    "unknown": with_options({"full_precission_every": 5}),
    "transport": with_options({"transport": "local"}),
    "integer parameter": with_model(
        nn.ParameterList([nn.Parameter(torch.ones(3, dtype=torch.int32), requires_grad=False)]), model()
    ),
    "method before": lambda: hvc.Compression.create(5 if ODD else "none", model().named_parameters()),
    "pattern before": lambda: hvc.Compression.per_layer({"*": 5 if ODD else "none"}, model().named_parameters()),
    "parameters before": unreadable(RuntimeError("this rank cannot read its model")),
    "any other error": lambda: buggy() if ODD else with_options({})(),
    "control again": with_options({}),
}
assert horovod_compress.__version__ != "9.9.9"

for name, make in CASES.items():
    check(name, lambda: attempt(make))


def absent() -> dict[str, Any]:
    if ODD:
        return {"kind": "absent"}
    return attempt(lambda: hvc.Compression.marsit(model().named_parameters(), timeout=1.5))


check("absent", absent)
