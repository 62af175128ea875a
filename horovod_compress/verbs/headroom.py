"""Tell whether compression pays on these hosts, before anything is changed.

    horovodrun -np 4 -H a:1,b:1,c:1,d:1 hvd-compress headroom --elements 25000000

It times Horovod's own all-reduce of so many float32 values and the same with a method, in turns.
What Horovod's own takes is the headroom: no compression can save more than that of a step, and
nothing of what is hidden behind the backward pass. Marsit is measured in its sign rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

#: A gain smaller than this drowns in the noise of a step.
_LEAST_GAIN = 1.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--elements", type=int, default=25_000_000, help="values of the gradient (default 25 million)")
    parser.add_argument("--method", default="marsit", help="the method to compare with (default marsit)")
    parser.add_argument("--repeat", type=int, default=7, help="measurements of each, at least 2 (default 7)")
    parser.add_argument("--compute-ms", type=float, help="time of your step without exchange, for the gain of a step")


def run(arguments: argparse.Namespace) -> int:
    """Measure on every rank and print on rank 0; return the exit status."""
    if arguments.elements < 1 or arguments.repeat < 2:
        print("hvd-compress headroom: --elements has to be at least 1 and --repeat at least 2", file=sys.stderr)
        return 2
    import horovod.torch as hvd

    from .. import _headroom
    from ..errors import ConfigError

    hvd.init()
    if hvd.size() < 2:
        print(
            "hvd-compress headroom: there is nobody to exchange with; start it on the hosts of your job, such as\n"
            "  horovodrun -np 4 -H a:1,b:1,c:1,d:1 hvd-compress headroom",
            file=sys.stderr,
        )
        return 2
    options = {"full_precision_every": 0} if arguments.method == "marsit" else {}
    try:
        timings = _headroom.measure(arguments.elements, arguments.repeat, arguments.method, options)
    except ConfigError as error:
        print(f"hvd-compress headroom: {error}", file=sys.stderr)
        return 2
    if hvd.rank() == 0:
        found = document(arguments, hvd.size(), [timing.document() for timing in timings])
        print(json.dumps(found) if arguments.json else text(found), flush=True)
    return 0


def document(arguments: argparse.Namespace, world: int, timings: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the measurements and what follows from them."""
    plain, _, method = (timing["median_seconds"] for timing in timings)
    found = {
        "bench": "headroom",
        "ranks": world,
        "elements": arguments.elements,
        "timings": timings,
        "times_faster": plain / method,
        "saved_seconds": plain - method,
        "pays": plain / method >= _LEAST_GAIN,
    }
    if arguments.compute_ms:
        compute = arguments.compute_ms / 1e3
        found["most_step_gain"] = plain / (compute + plain)
        found["step_gain"] = (plain - method) / (compute + plain)
    return found


def text(found: dict[str, Any]) -> str:
    """Return the same for people."""
    lines = [f"{found['elements']:,} float32 values, {found['ranks']} ranks; median of the slowest rank [spread]"]
    for timing in found["timings"]:
        lines.append(
            f"  {timing['name']:14} {1e3 * timing['median_seconds']:9.1f} ms  [{1e3 * timing['spread_seconds']:.1f}]"
        )
    plain, _, method = found["timings"]
    if found["pays"]:
        lines.append(
            f"Compression can pay: {method['name']} takes {1e3 * found['saved_seconds']:.1f} ms less, "
            f"{found['times_faster']:.1f} times faster than Horovod's own exchange."
        )
    else:
        lines.append(
            f"Compression does not pay here: Horovod's own exchange takes {1e3 * plain['median_seconds']:.1f} ms, "
            f"{method['name']} {1e3 * method['median_seconds']:.1f} ms. Leave the compression out."
        )
    if "step_gain" in found:
        lines.append(
            f"If nothing hides behind the backward pass, a step gets {found['step_gain']:.0%} shorter; an exchange "
            f"at no cost at all would make it {found['most_step_gain']:.0%} shorter."
        )
    return "\n".join(lines)
