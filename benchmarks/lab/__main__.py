"""Run a command on every host of a lab.

    sudo python -m benchmarks.lab --ranks 4 --rate 1gbit -- examples/train.py --task digits --method marsit

The words after -- are what Python gets on every rank: a script, or -m and a module, with arguments.
The exit status is 0 when every rank's was. At the end, the bytes on every host's link are told.
"""

from __future__ import annotations

import argparse
import json
import sys

from ..horovodrun import JobFailed
from .lab import Lab
from .needs import LabError


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.lab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--slots", type=int, default=1, help="ranks per host (default 1)")
    parser.add_argument("--rate", help="rate of every link in both directions: 100mbit, 1gbit, ... or none (default)")
    parser.add_argument("--delay", help="delay from one host to another: 5ms, 200us, ...")
    parser.add_argument(
        "--congestion", help="TCP's congestion control (default: cubic, or reno where cubic is not allowed)"
    )
    parser.add_argument("--limit", type=float, default=600, help="seconds after which the job is ended (default 600)")
    parser.add_argument("words", nargs="*", metavar="-- script or -m module, and its arguments")
    chosen = parser.parse_args()
    if not chosen.words:
        parser.error("nothing to run: after --, name a script, or -m and a module")
    try:
        rate = None if chosen.rate == "none" else chosen.rate
        with Lab(chosen.ranks, rate, chosen.delay, chosen.slots, chosen.congestion) as lab:
            print(json.dumps(lab.describe()), file=sys.stderr)
            outcome = lab.run(" ".join(chosen.words), chosen.words, chosen.limit, lambda line: print(line, flush=True))
    except (LabError, JobFailed, ValueError) as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lab: interrupted; everything was removed", file=sys.stderr)
        return 130
    for link in outcome.links or []:
        print(json.dumps(link._asdict()), file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
