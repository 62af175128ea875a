"""What local steps take with and without an overlap: a step with its share of the exchanges, beside one that has none.

    python -m benchmarks.local_steps --where lab --rate 1gbit --ranks 4 --elements 25e6 --compute-ms 150

Every case is options of DistributedUpdateOptimizer as JSON, with "method" among them; the defaults are CD-SGD's
schedule with and without its overlap, and local steps that exchange nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lab import LabError
from benchmarks.launch import JobFailed, open_launcher
from benchmarks.results import append_json, header, spread, table

CASES = {
    "no exchange": {"method": "marsit", "communication_delay": 1000},
    "cd_sgd without overlap": {"method": "cd_sgd", "overlap": 0},
    "cd_sgd": {"method": "cd_sgd"},
}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.local_steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--where", choices=("lab", "here"), default="here", help="network lab, or horovodrun (default)")
    parser.add_argument("--rate", help="rate of the lab's links, such as 10mbit (default: no limit)")
    parser.add_argument("--delay", help="delay of the lab's links, such as 50ms")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--elements", type=float, default=25e6, help="of the model (default 25e6)")
    parser.add_argument("--compute-ms", type=float, default=150.0, help="of a local step (default 150)")
    parser.add_argument("--steps", type=int, default=6, help="in a measurement, or whole cycles (default 6)")
    parser.add_argument("--repeat", type=int, default=5, help="measurements, whose median counts (default 5)")
    parser.add_argument("--case", action="append", metavar="NAME=JSON", help="in place of the default cases")
    parser.add_argument("--limit", type=float, default=900, help="seconds for the job")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append JSON lines to FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    chosen = arguments(argv)
    cases = {name: json.loads(text) for name, _, text in (c.partition("=") for c in chosen.case or ())} or CASES
    asked = {name: getattr(chosen, name) for name in ("elements", "compute_ms", "steps", "repeat")} | {"cases": cases}
    try:
        with open_launcher(chosen.where, chosen.ranks, chosen.rate, chosen.delay) as launcher:
            outcome = launcher.run(
                "local steps", ["-m", "benchmarks.jobs.local_steps", json.dumps(asked)], chosen.limit
            )
    except (JobFailed, LabError, ValueError) as failure:
        print(f"local_steps: {failure}", file=sys.stderr)
        return 1
    rows = [
        [
            r["name"],
            f"{found.median * 1e3:.0f}",
            f"{found.q1 * 1e3:.0f}-{found.q3 * 1e3:.0f}",
            f"{r['bytes_sent'] / 1e6:.1f}",
        ]
        for r, found in ((record, spread(record["seconds"])) for record in outcome.records)
    ]
    print(table(("case", "ms a local step", "quartiles", "MB sent in all"), rows))
    if chosen.json:
        append_json(chosen.json, [header("local_steps", argv), *outcome.records])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
