"""What makes jobs of more ranks than cores last a third as long, and keeps them from standing still.

Horovod waits for a result in a loop around ``sched_yield``. Where ranks outnumber the cores, those loops take
the processor from the threads that would bring the result: rounds of small all-reduces that take 0.7 s otherwise
took 2.3 s with three ranks on two cores, and now and then one all-reduce of 4 bytes took 3 to 30 s, after which
Horovod's Gloo gives up. So there ``sched_yield`` sleeps for a moment; all else is Horovod's own.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

_SOURCE = Path(__file__).with_name("yields.cpp")
_BUILD = Path(__file__).resolve().parents[2] / "build" / "yields"


def sleeping_yields(world: int) -> dict[str, str]:
    """Return what the environment of a job's ranks needs for it; nothing where every rank has a core."""
    if sys.platform != "linux" or world <= (os.cpu_count() or 1):
        return {}
    return {"LD_PRELOAD": " ".join(filter(None, [os.environ.get("LD_PRELOAD"), str(_library())]))}


@cache
def _library() -> Path:
    target = _BUILD / f"{hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if not target.exists():
        _BUILD.mkdir(parents=True, exist_ok=True)
        made = target.with_suffix(f".{os.getpid()}")
        compiler = shutil.which(os.environ.get("CXX", "") or "c++") or "c++"
        subprocess.run([compiler, "-shared", "-fPIC", "-O2", str(_SOURCE), "-o", str(made)], check=True)
        made.replace(target)
    return target
