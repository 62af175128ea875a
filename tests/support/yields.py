"""What makes jobs with a rank for every core last a third as long, and keeps them from standing still.

Horovod waits for a result in a loop around ``sched_yield``. Where ranks leave no core free, those loops take
the processor from the threads that would bring the result: rounds of small all-reduces that take 0.7 s otherwise
took 2.3 s with three ranks on two cores, and now and then one all-reduce of 4 bytes took 3 to 30 s, after which
Horovod's Gloo gives up. So there ``sched_yield`` sleeps for a moment, for all of a rank.

Gloo's own thread asks ``epoll_wait`` again and again for bytes that came before anyone wants them, until somebody does:
that was a quarter of the processor time of a job of three ranks. So there it sleeps, too, when it has been given one
and the same event eight times in a row. Nothing else is changed.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


def sleeping_yields(world: int) -> dict[str, str]:
    """Return what the environment of a job's ranks needs for it: nothing with a core left, or without a compiler."""
    if sys.platform != "linux" or world < len(os.sched_getaffinity(0)):
        return {}
    library = _library()
    return {"LD_PRELOAD": " ".join(filter(None, [os.environ.get("LD_PRELOAD"), library]))} if library else {}


@cache
def _library() -> str:
    folder = tempfile.mkdtemp(prefix="hvc-yields-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    compiler = shutil.which(os.environ.get("CXX", "") or "c++")
    if compiler is None or set(folder) & set(" :"):  # which part the names in LD_PRELOAD
        return ""
    target = f"{folder}/yields.so"
    subprocess.run([compiler, "-x", "c", "-shared", "-fPIC", "-O2", str(SOURCE), "-o", target], check=True)
    return target
