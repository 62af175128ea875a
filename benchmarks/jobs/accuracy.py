"""Trains with examples/train.py and tells its record; runs on every rank.

    horovodrun -np 2 python -m benchmarks.jobs.accuracy --task digits --method marsit

All arguments are those of train.py. The record travels on rank 0's output, as the host that it runs
on need not share a file with the one that the job was started from.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
from pathlib import Path

from benchmarks.outcomes import ROOT, emit

TRAIN = ROOT / "examples" / "train.py"
TOLD = ("config", "curve", "final", "stats", "ranks_identical")


def main(argv: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        path = Path(folder) / "record.json"  # of rank 0; the other ranks write none
        sys.path.insert(0, str(TRAIN.parent))  # of the modules beside it, as if it were started by itself
        sys.argv = [str(TRAIN), *argv, "--json", str(path)]
        runpy.run_path(str(TRAIN), run_name="__main__")
        if os.environ.get("HOROVOD_RANK", "0") == "0":
            record = json.loads(path.read_text())
            print(flush=True)  # no line of the training's own may be left open
            emit({name: record[name] for name in TOLD})


if __name__ == "__main__":
    main(sys.argv[1:])
