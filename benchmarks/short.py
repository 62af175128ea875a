"""A short form of all three levels on this machine: kernels, one tensor, and training steps.

It writes tables to the terminal, and records and plots into a folder. No link is limited here, so it
says what this machine does, not what a slow network would make of it: `make lab` does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import allreduce, kernels, step
from benchmarks.results import ROOT

ALLREDUCE = "horovod fp32,horovod fp16,headroom,none auto,fp16 auto,marsit auto,global_qsgd,ddp fp32,ddp powersgd r1"
STEP = "horovod fp32,none,marsit"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.short", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="folder (default build/bench)")
    chosen = parser.parse_args(argv)
    chosen.out.mkdir(parents=True, exist_ok=True)

    def outputs(name: str) -> list[str]:
        records = chosen.out / f"{name}.json"
        records.unlink(missing_ok=True)
        return ["--json", str(records), "--plot", str(chosen.out)]

    plot = ["--plot", str(chosen.out / "kernels.svg")]
    status = kernels.main(["--repeat", "7", *outputs("kernels")[:2], *plot])
    one = ["--ranks", "2", "--sizes", "10kB,1MB,100MB", "--methods", ALLREDUCE]
    status |= allreduce.main([*one, *outputs("allreduce")])
    steps = ["--ranks", "2", "--compute-ms", "100", "--repeat", "5", "--methods", STEP]
    status |= step.main([*steps, *outputs("step")])
    print(f"records and plots are in {chosen.out}")
    return status


if __name__ == "__main__":
    sys.exit(main())
