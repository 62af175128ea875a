"""Forks the ranks of one job after another from a process that has imported everything once.

Reads one JSON document per job from its input: ``script``, ``ranks`` (an environment and an output
file each), ``victims`` (ranks that need not end), ``bound`` in seconds, and ``patience``, how many of them the others
have when a rank has failed. Answers with one line: for every rank its exit status (negative for a signal, null if the
bound ended it), how many seconds after the job's beginning it ended, when that was on the monotonic clock, and its
process id.

Every rank is a process of its own that ends as any Python program does, with all its exit
handlers; what the fork saves is two to three seconds of imports per rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch._dynamo  # torch's optimizers and process groups import these at their first use
import torch.distributed.fsdp

import horovod_compress.ddp

with contextlib.suppress(ImportError):  # which torch.distributed alone does not need
    import horovod_compress.torch  # noqa: F401  the imports that this process is for

_POLL_SECONDS = 0.01
_TELL_SECONDS = 0.2


def main() -> None:
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).zero_grad()
    # A fork takes one thread along, and locks that others hold stay locked.
    assert len(list(Path("/proc/self/task").iterdir())) == 1
    keep_what_is_imported()
    for line in sys.stdin:
        job = json.loads(line)
        pids: list[int] = []
        for rank in job["ranks"]:
            pid = os.fork()
            if pid == 0:
                become(rank)
                play(job["script"])
                return  # and leave as any program does
            pids.append(pid)
        sys.stdout.write(json.dumps(watch(pids, set(job["victims"]), job["bound"], job["patience"])) + "\n")
        sys.stdout.flush()


def keep_what_is_imported() -> None:
    """Have ranks leave alone what they were forked with: not look through it for garbage, nor take it apart at the end.

    Either copies most pages of memory, half a second of a core for each rank. What a rank makes itself is collected and
    ends as in any program.
    """
    gc.collect()
    imported = gc.get_objects()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(imported))  # for the list itself, so that nothing ever frees it
    gc.freeze()


def become(rank: dict[str, Any]) -> None:
    """Turn this process into a rank: a session, an environment, an output and random numbers of its own."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(rank["environment"])
    output = os.open(rank["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for at, to in ((null, 0), (output, 1), (output, 2)):
        os.dup2(at, to)
    faulthandler.register(signal.SIGUSR1)
    random.seed()
    np.random.seed()  # noqa: NPY002  what programs use that do not make a generator of their own


def play(script: str) -> None:
    """Run a script as the program of this process."""
    program = ModuleType("__main__")
    program.__file__ = script
    sys.modules["__main__"], sys.argv = program, [script]
    exec(compile(Path(script).read_text(), script, "exec"), vars(program))


def watch(pids: list[int], victims: set[int], bound: float, patience: float) -> list[dict[str, Any]]:
    """Wait for the ranks that are to end; then, or when the time is over, kill the rest."""
    began = time.monotonic()
    ended: dict[int, dict[str, Any]] = {}
    expected = set(range(len(pids))) - victims
    while expected - set(ended) and time.monotonic() - began < bound:
        for rank, pid in enumerate(pids):
            if rank not in ended:
                got, status = os.waitpid(pid, os.WNOHANG)
                if got:
                    code = os.waitstatus_to_exitcode(status)
                    now = time.monotonic()
                    ended[rank] = {"status": code, "seconds": now - began, "at": now, "pid": pid}
                    bound = min(bound, now - began + patience) if code else bound
        time.sleep(_POLL_SECONDS)
    if late := expected - set(ended):
        for rank in late:  # says where it is, into its output
            os.kill(pids[rank], signal.SIGUSR1)
        time.sleep(_TELL_SECONDS)
    for rank, pid in enumerate(pids):
        if rank not in ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # it may not lead its session yet
            os.waitpid(pid, 0)
            now = time.monotonic()
            ended[rank] = {"status": None, "seconds": now - began, "at": now, "pid": pid}
    for pid in pids:  # what ranks have started ends with them
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    return [ended[rank] for rank in range(len(pids))]


if __name__ == "__main__":
    main()
