"""Train a small model; one rank, the victim, comes to harm at a given point of a given step."""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import horovod.torch as hvd
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import horovod_compress.ddp
import horovod_compress.fsdp
import horovod_compress.torch as hvc
from horovod_compress import options
from horovod_compress.engine import patience
from horovod_compress.engine.shards import local
from tests.support.accelerator import everything_on_accelerator
from tests.support.rank import arguments, mark, rank, report
from tests.support.training import digest

_CHILD_SECONDS = 300  # it is killed with the job

DEFAULTS: dict[str, Any] = {
    "fault": "none",  # kill, stop, term, sleep, raise, exit, interrupt, fork, flip, drop
    "victim": 2,
    "event": "idle",  # of the flight recorder; "idle" is between two steps, "start" and "shutdown" are around all
    "hop": -1,
    "step": 2,
    "bucket": 1,
    "steps": 4,
    "sleeper": -1,  # a rank that comes late to that step, so that the others are found waiting
    "path": "attached",  # or stock, or update; or ddp, "ddp-update" with an overlap, or fsdp, without Horovod
    "shards": 1,  # of the model, with fsdp
    "torch_timeout": 1800.0,  # of torch's own collectives
    "method": "marsit",
    "exchange": "ring",
    "schedule": "layerwise",
    "width": 256,  # of the model: 64 times that many elements in each bucket
    "timeout": 4.0,
    "limits": None,  # with timeout None: in place of 30 s for what flows, and of 10 minutes for who is busy
    "sleep": 8.0,
    "child": "",  # fork, system: how the victim starts a process that outlives it
    "close": True,
    "hosts": 0,  # that the ranks are on, with exchange="hierarchical"; 0 for where they are
    "staged": False,  # payloads are exchanged from copies, as those of a GPU are
    "leave": False,  # at once, without the exit handlers, when all is said
    "catch": True,  # False: let errors end the program
}


class Spoiling:
    """A transport that flips one bit of one frame that it sends, or drops that frame."""

    def __init__(self, inner: Any, number: int, drops: bool) -> None:
        self._inner, self._left, self._drops = inner, number, drops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, data: torch.Tensor, to: int) -> Any:
        self._left -= 1
        if self._left == -1:
            mark("fault", repr(time.monotonic()))
            if self._drops:
                return self
            data = data.clone()
            data[-1] ^= 16
        return self._inner.send(data, to)

    def wait(self, deadline: Any) -> None:
        """Return as if the dropped frame had left."""


def harm(case: dict[str, Any]) -> None:
    """Do to this process what the case asks for."""
    if case["child"] == "fork" and not os.fork():
        time.sleep(_CHILD_SECONDS)
        os._exit(0)
    elif case["child"] == "system":
        os.system(f"sleep {_CHILD_SECONDS} &")  # noqa: S605  it inherits what it may, unlike subprocess's
    mark("fault", repr(time.monotonic()))
    fault = case["fault"]
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    elif fault == "sleep":
        time.sleep(case["sleep"])
    elif fault == "fork":
        fork()
    elif fault == "interrupt":
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    elif fault == "exit":
        sys.exit(5)  # as a handler of SIGTERM may do
    elif fault == "raise":
        raise RuntimeError("this rank's own error")


def fork() -> None:
    """Have children that use the job's compression, and end in the two ways in which children of Python's do."""
    for ends in (os._exit, lambda status: multiprocessing.util._exit_function() or os._exit(status)):
        if not (child := os.fork()):
            try:
                made[0].close()
                step = made[1]
                step()
            except hvc.ConfigError as error:
                if hvd.is_initialized():
                    hvd.shutdown()
                ends(0 if "fork" in str(error) else 3)
            ends(4)
        _, status = os.waitpid(child, 0)
        mark("child", str(os.waitstatus_to_exitcode(status)))


made: list[Any] = []  # the compression and a function that trains a step, for forks


def arm(compression: hvc.Compression, case: dict[str, Any]) -> None:
    """Come to harm when the flight recorder notes the event of the case."""
    recorder = compression._session.reducer.context.recorder
    note = recorder.note
    target = (case["step"], case["bucket"], case["event"], case["hop"])

    def noting(step: int, bucket: int, event: str, hop: int = -1) -> None:
        note(step, bucket, event, hop)
        if (step, bucket, event, hop) == target:
            harm(case)

    recorder.note = noting


def note_tokens(compression: hvc.Compression) -> list[int]:
    """Return where the references from C++ are counted of each token that Horovod gets."""
    compress, counts = compression.compress, []

    def noting(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        token, context = compress(tensor)
        counts.append(token._use_count())
        return token, context

    compression.compress = noting
    return counts


def build(case: dict[str, Any]) -> tuple[nn.Module, hvc.Compression, Callable[[], None], Callable[[], None]]:
    """Return the model, the compression, a function that trains one step, and one that ends the training."""
    if case["limits"]:
        options.FLOW_SECONDS, options.BUSY_SECONDS = case["limits"]
        patience._WARN_SECONDS = options.FLOW_SECONDS
    torch.manual_seed(1)
    width = case["width"]
    # Two buckets of one tensor each: the first is exchanged while backward still runs.
    model: nn.Module = nn.Sequential(nn.Linear(64, width, bias=False), nn.Tanh(), nn.Linear(width, 64, bias=False))
    front = {"d": horovod_compress.ddp, "f": horovod_compress.fsdp}.get(case["path"][0], hvc)
    if case["path"] == "fsdp":
        model = divided(model, case)
    compression = front.Compression.create(
        case["method"],
        model.named_parameters(),
        schedule=case["schedule"],
        exchange=case["exchange"],
        timeout=case["timeout"],
    )
    called = model
    if case["path"] == "ddp":
        called = DistributedDataParallel(model, bucket_cap_mb=0.001)  # so its buckets are these two as well
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        compression.register(called, optimizer)
    elif case["path"] == "fsdp":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        compression.register(model, optimizer, replicate=grid(case)["replicate"])
    else:
        optimizer = distributed(model, compression, case["path"])
    data = torch.Generator().manual_seed(rank())

    def step() -> None:
        x = torch.randn(8, 64, generator=data)
        optimizer.zero_grad()
        (called(x) - x).square().mean().backward()
        optimizer.step()

    def finish() -> None:
        if case["path"] == "ddp-update":  # its last exchange is under way
            optimizer.flush()

    return model, compression, step, finish


@cache
def mesh_of(shards: int) -> DeviceMesh:
    shape = (dist.get_world_size() // shards, shards)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def grid(case: dict[str, Any]) -> DeviceMesh:
    return mesh_of(case["shards"])


def divided(model: Any, case: dict[str, Any]) -> Any:
    for block in (model[0], model[2]):
        fully_shard(block, mesh=grid(case)["shard"])
    return fully_shard(model, mesh=grid(case)["shard"])


def distributed(model: nn.Module, compression: hvc.Compression, path: str) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    named = list(model.named_parameters())
    if path.endswith("update"):  # the same function under either front
        return hvc.DistributedUpdateOptimizer(optimizer, named, compression, overlap=int(path != "update"))
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression)
    return compression.attach(optimizer) if path == "attached" else optimizer


def tried(what: Callable[[], None]) -> dict[str, Any]:
    """Return how a call ended."""
    began = time.monotonic()
    try:
        what()
    except BaseException as error:
        now = time.monotonic()
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {"error": kinds[0], "kinds": kinds, "text": str(error), "at": now, "seconds": now - began}
    return {"error": None, "at": time.monotonic(), "seconds": time.monotonic() - began}


def train(case: dict[str, Any], step: Callable[[], None], done: list[int]) -> None:
    for number in range(case["steps"]):
        mine = rank() == case["victim"]
        if mine and case["event"] == "idle" and number == case["step"]:
            harm(case)
        if rank() == case["sleeper"] and number == case["step"]:
            time.sleep(case["sleep"])
        step()
        done.append(number)


def main() -> None:
    case = DEFAULTS | arguments()
    with everything_on_accelerator() if case["staged"] else contextlib.nullcontext():
        run(case)


def torch_alone(case: dict[str, Any]) -> bool:
    return case["path"].startswith(("ddp", "fsdp"))


def run(case: dict[str, Any]) -> None:
    if torch_alone(case):
        dist.init_process_group("gloo", timeout=timedelta(seconds=case["torch_timeout"]))
    else:
        hvd.init()
    if (rank(), case["event"]) == (case["victim"], "start"):
        harm(case)
    if case["hosts"]:
        os.environ["GROUP_RANK"] = str(rank() * case["hosts"] // 4)  # as a launcher numbers its hosts
    model, compression, train_step, finish = build(case)
    made.extend((compression, train_step))
    weights = [digest(map(local, model.parameters()))]
    tokens = note_tokens(compression) if not torch_alone(case) else []

    def step() -> None:
        train_step()
        weights.append(digest(map(local, model.parameters())))

    if rank() == case["victim"] and case["fault"] != "none":
        if case["fault"] in ("flip", "drop"):
            inner, drops = compression._session.reducer.context.transport, case["fault"] == "drop"
            compression._session.reducer.context.transport = Spoiling(inner, case["hop"], drops)
        else:
            arm(compression, case)
    done: list[int] = []
    if not case["catch"]:
        train(case, step, done)
        finish()
        mark("done", repr(time.monotonic()))
        if (rank(), case["event"]) == (case["victim"], "shutdown"):
            harm(case)
        return
    found = {"first": tried(lambda: train(case, step, done)), "steps": len(done)}
    if found["first"]["error"]:
        found["again"] = tried(step)
    found |= {"tokens": tokens, "last": weights[-1], "left": digest(map(local, model.parameters()))}
    if case["close"]:
        found["close"] = tried(compression.close)
        found["twice"] = tried(compression.close)
    report(found | {"end": time.monotonic()})
    mark("done", repr(time.monotonic()))
    if case["leave"]:
        os._exit(0)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
