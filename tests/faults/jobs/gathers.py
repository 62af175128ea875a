"""One rank fails where ranks meet through Horovod's gathers: while they connect, save, load, or begin to train."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import psutil
import torch

import horovod_compress.torch as hvc
from horovod_compress.exchange.transports import gloo
from horovod_compress.fronts import startup
from tests.support.rank import arguments, folder, mark, report

case = arguments()
hvd.init()
harmed, faulty = hvd.rank() in case["victims"], case["fault"] is not None


def tried(what: Callable[[], Any]) -> dict[str, Any]:
    """Return how a call ended, and when."""
    began = time.monotonic()
    try:
        what()
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - began}
    return {"error": None, "text": "", "seconds": time.monotonic() - began}


def cannot_connect() -> None:
    """Let a rank find, after a while, that it cannot reach another one; those that can be reached are connected."""
    connected = gloo._connected

    def failing(*given: Any) -> Any:
        gloo._connected = connected
        connected(*given)
        time.sleep(case["sleep"])
        raise hvc.ExchangeError(f"rank {hvd.rank()}: not all of {hvd.size()} ranks connected")

    gloo._connected = failing


def has_no_reducer() -> None:
    def failing(*given: Any) -> Any:
        raise MemoryError("no room for buffers")

    startup.Reducer = failing


def held() -> dict[str, int]:
    """Return what connections take of this process."""
    gc.collect()  # what an error's traceback still holds
    end = time.monotonic() + 5
    while (names := [t.name for t in threading.enumerate() if t.name.startswith("hvc-")]) and time.monotonic() < end:
        time.sleep(0.05)
    listening = [c for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
    return {"threads": len(names), "ports": len(listening)}


before = held()["ports"]  # Horovod's own
if harmed and faulty:
    {"connect": cannot_connect, "reducer": has_no_reducer}.get(case["fault"], lambda: None)()

torch.manual_seed(3)
model, made = torch.nn.Linear(20, 20), []


def make() -> None:
    made.append(hvc.Compression.topk(model.named_parameters(), timeout=case["timeout"]))


def train() -> None:
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), compression=made[0])
    model(torch.full((1, 20), 1.0 + hvd.rank())).square().sum().backward()
    optimizer.step()


def fail() -> None:
    """Let this rank's reducer fail, as it would in an exchange; nothing else of the job knows."""
    made[0]._session.reducer.failure.report("a test", RuntimeError("this rank's own error"))


def wait_for_the_others() -> None:
    end = time.monotonic() + case["sleep"]
    while time.monotonic() < end and len(list(folder().glob("mark.called.*"))) < hvd.size() - 1:
        time.sleep(0.05)


def main() -> None:
    found: dict[str, Any] = {"start": tried(make)}
    if made:
        saved = folder() / "saved"
        calls = {"save": lambda: made[0].save(saved), "load": lambda: made[0].load(saved), "train": train}
        if case["fault"] is None:
            found |= {name: tried(calls[name]) for name in ("save", "load", "train")}
        elif harmed and case["fault"] in calls:
            fail()
            wait_for_the_others()  # it never comes
        elif case["fault"] in calls:
            found["call"] = tried(calls[case["fault"]])
            mark("called", "")
        made[0].close()
    now = held()
    report(found | {"threads": now["threads"], "ports": now["ports"] - before})


main()
