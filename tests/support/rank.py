"""The rank's side of :func:`tests.support.jobs.run_ranks`: imported by the scripts of jobs."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .dynamo import leave_out

leave_out()

_found: dict[str, Any] = {}


def arguments() -> dict[str, Any]:
    """Return what the test passed."""
    return json.loads(os.environ["HVC_TEST_ARGUMENTS"])


def folder() -> Path:
    """Return a folder that all ranks and the test share; it goes away with the job."""
    return Path(os.environ["HVC_TEST_FOLDER"])


def rank() -> int:
    return int(os.environ["HOROVOD_RANK"] if "HOROVOD_RANK" in os.environ else os.environ["RANK"])


def report(value: Any) -> None:
    """Leave this rank's report; the last one counts."""
    _write(f"report.{rank()}", json.dumps(value))


def say_pid() -> None:
    """Let the test know this process."""
    _write(f"pid.{rank()}", str(os.getpid()))


def mark(name: str, text: str = "") -> None:
    """Let the test know that this rank has reached a point."""
    _write(f"mark.{name}.{rank()}", text)


def wait_for(name: str, world: int, seconds: float = 30.0) -> None:
    """Wait until every rank has reached a point, without the framework."""
    missing, end = set(range(world)), time.monotonic() + seconds
    while missing := {rank for rank in missing if not (folder() / f"mark.{name}.{rank}").exists()}:
        if time.monotonic() > end:
            raise TimeoutError(f"rank(s) {sorted(missing)} did not come to {name!r} within {seconds:g} s")
        time.sleep(0.01)


def _write(name: str, text: str) -> None:
    temporary = folder() / f".{name}.{os.getpid()}"
    temporary.write_text(text)
    temporary.rename(folder() / name)  # a reader sees all of it or nothing


def refusal(attempt: Callable[[], Any], kind: type[Exception] = Exception) -> str:
    """Return what a call says where it fails with an error of a kind, "accepted" where it does not fail."""
    try:
        attempt()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def check(name: str, case: Callable[[], Any]) -> None:
    """Run one check of a job that does many, and report what it returned or raised.

    Ranks wait for each other between checks, so that an error says which check it belongs to. Of a job in two parts
    (see :func:`.jobs.checks_of`) only checks of the part that was asked for run.
    """
    later, part = arguments().get("in two", ((), False))
    if (name in later) != part:
        return
    began = time.monotonic()
    try:
        value = case()
        _found[name] = {"value": True if value is None else value, "error": None}
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        _found[name] = {"value": None, "error": f"{type(error).__name__}: {error}", "traceback": text}
    _found[name]["seconds"] = time.monotonic() - began
    report(_found)
    if rank() == 0:
        print(f"{name}: {_found[name]['error'] or 'done'} after {_found[name]['seconds']:.1f} s", flush=True)
    meet()


def meet() -> None:
    """Wait for all ranks, under either front."""
    if "HOROVOD_RANK" in os.environ:
        import horovod.torch as hvd

        if hvd.is_initialized():
            hvd.barrier()
    else:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.barrier()
