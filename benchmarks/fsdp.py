"""What a step takes where hosts have replicas of a model and fully_shard divides each among a host's ranks.

    python -m benchmarks.fsdp --rate 1gbit --hosts 2 --shards 2

It runs in the lab: links between hosts are limited, and those within a host are not. Contestants are torch's own hybrid
sharding, which reduces in float32 or bfloat16, and methods of this package. The model is a transformer of 25 million
parameters, with real forward and backward passes of few tokens. Every case is "native" and a dtype, "method" with
options, or "alone" where hosts exchange nothing: no case can be faster than that one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lab import Lab, LabError
from benchmarks.launch import JobFailed
from benchmarks.results import append_json, header, size_text, table

CASES = {
    "native float32": {"native": "float32"},
    "native bfloat16": {"native": "bfloat16"},
    "none": {"method": "none"},
    "global_qsgd": {"method": "global_qsgd"},
    "marsit": {"method": "marsit", "full_precision_every": 0},
    "nothing between hosts": {"alone": True},
}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fsdp", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="1gbit", help="of the links between hosts (default 1gbit)")
    parser.add_argument("--hosts", type=int, default=2, help="each has a replica (default 2)")
    parser.add_argument("--shards", type=int, default=2, help="ranks of a host (default 2)")
    parser.add_argument("--width", type=int, default=512, help="of the model (default 512)")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=12000, help="rows of the embedding (default 12000)")
    parser.add_argument("--context", type=int, default=16, help="tokens of a sample (default 16)")
    parser.add_argument("--batch", type=int, default=1, help="samples of a rank and step (default 1)")
    parser.add_argument("--steps", type=int, default=7, help="whose median counts (default 7)")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--case", action="append", metavar="NAME=JSON", help="in place of the default cases")
    parser.add_argument("--limit", type=float, default=900, help="seconds for the job")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append JSON lines to FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    chosen = arguments(argv)
    cases = {name: json.loads(text) for name, _, text in (c.partition("=") for c in chosen.case or ())} or CASES
    names = ("shards", "width", "layers", "vocabulary", "context", "batch", "steps", "warm_up")
    asked = {name: getattr(chosen, name) for name in names} | {"cases": cases}
    try:
        with Lab(chosen.hosts * chosen.shards, chosen.rate, slots=chosen.shards) as lab:
            facts = lab.describe()
            words = ["-m", "benchmarks.jobs.fsdp", json.dumps(asked)]
            outcome = lab.run("fsdp", words, chosen.limit, lambda line: print(line, file=sys.stderr, flush=True))
    except (JobFailed, LabError, ValueError) as failure:
        print(f"fsdp: {failure}", file=sys.stderr)
        return 1
    first = outcome.records[0]["median_seconds"]
    rows = [
        [
            record["name"],
            f"{record['median_seconds'] * 1e3:.0f}",
            f"{record['q1_seconds'] * 1e3:.0f}-{record['q3_seconds'] * 1e3:.0f}",
            f"{first / record['median_seconds']:.1f}",
            size_text(record["host_bytes_per_step"]),
        ]
        for record in outcome.records
    ]
    print(table(("case", "ms a step", "quartiles", "times faster", "sent by a host and step"), rows))
    if chosen.json:
        append_json(chosen.json, [header("fsdp", argv, **facts), *outcome.records])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
