"""What a rank holds of a model that fully_shard divides, with the gradients of replicas exchanged in several ways.

    python -m benchmarks.fsdp_memory --shards 2 --methods native,none,marsit

Ranks are processes of this machine, and all tensors of one are counted after some steps with AdamW, by the memory that
they hold; the largest count of all ranks is shown. "kept" is what a method keeps from step to step: its residual. Its
payloads are among the others, as is what torch holds; "native" is torch's own hybrid sharding, for comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.outcomes import environment, records_in
from benchmarks.results import ROOT, append_json, header, table

KINDS = ("parameters", "gradients", "optimizer", "kept", "frames", "others")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fsdp_memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--methods", default="native,none,global_qsgd,marsit", help="separated by commas")
    parser.add_argument("--width", type=int, default=768, help="of the transformer (default 768)")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=20000, help="rows of the embedding (default 20000)")
    parser.add_argument("--context", type=int, default=8, help="tokens of a rank and step (default 8)")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--limit", type=float, default=600, help="seconds for each method (default 600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append JSON lines to FILE")
    return parser.parse_args(argv)


def measure(chosen: argparse.Namespace, method: str) -> dict[str, Any]:
    """Return the record of one method.

    Raises:
        CalledProcessError: a rank ended badly.
        TimeoutExpired: they took too long.
    """
    names = ("shards", "width", "layers", "vocabulary", "context", "steps")
    how = {"native": "float32"} if method == "native" else {"method": method}
    asked = {name: getattr(chosen, name) for name in names} | {"name": method, "how": how}
    ranks = str(chosen.replicas * chosen.shards)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    done = subprocess.run(
        [*start, "-m", "benchmarks.jobs.fsdp_memory", json.dumps(asked)],
        cwd=ROOT,
        env=os.environ | environment(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=chosen.limit,
        check=True,
    )
    return records_in(done.stdout.splitlines())[0]


def main(argv: Sequence[str] | None = None) -> int:
    chosen = arguments(argv)
    records = []
    for method in chosen.methods.split(","):
        print(f"{method} ...", file=sys.stderr, flush=True)
        try:
            records.append(measure(chosen, method))
            print(f"{method}: {records[-1]['bytes']}", file=sys.stderr, flush=True)
        except (subprocess.SubprocessError, OSError) as failure:
            print(f"fsdp_memory: {method}: {failure}", file=sys.stderr)
            return 1
    found = [[record["bytes"][kind] for kind in KINDS] for record in records]
    rows = [
        [record["name"], *(f"{size / 1e6:.1f}" for size in (*sizes, sum(sizes), record["bytes"]["peak_memory"]))]
        for record, sizes in zip(records, found, strict=True)
    ]
    print(f"{records[0]['parameters'] / 1e6:.1f} million parameters; MB of a rank")
    print(table(("method", *KINDS, "in all", "peak of the process"), rows))
    if chosen.json:
        append_json(chosen.json, [header("fsdp_memory", argv), *records])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
