"""Find out whether compression pays on these hosts, before you change anything.

    horovodrun -np 4 -H a:1,b:1,c:1,d:1 hvd-compress headroom --elements 25000000
    torchrun --nproc-per-node 4 --no-python hvd-compress headroom

It times the framework's own all-reduce of that many float32 values, its fp16, this package's exchange
without compression (none), and the same with a method, in turns. A method pays if it beats the
fastest of the others. That time is the headroom: no compression can save more of a step, and what is
already hidden behind the backward pass saves nothing. Marsit is measured in its one-bit rounds.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

from . import common

_refuse = partial(common.refuse, "headroom")

#: A gain smaller than this drowns in the noise of a step.
_LEAST_GAIN = 1.05
_MOST_ELEMENTS = (1 << 31) - 1  # of one tensor: positions are 32-bit numbers
_MOST_MILLISECONDS = 1_000_000_000
#: How to start it.
_START = {
    "horovodrun": "horovodrun -np 4 -H a:1,b:1,c:1,d:1 hvd-compress headroom",
    "torchrun": "torchrun --nnodes 4 --rdzv-backend c10d --rdzv-endpoint a --no-python hvd-compress headroom",
}
#: What to do where the method does not pay.
_ADVICE = {
    "horovod fp32": "Train without compression.",
    "horovod fp16": "Horovod's own fp16 is the best of these: compression=hvd.Compression.fp16.",
    "ddp fp32": "Train without compression.",
    "ddp fp16": "DDP's own fp16_compress_hook is the best of these.",
    "none": "Method none, which does not compress, is the best of these.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what can be chosen about the measurement."""
    parser.add_argument("--elements", type=int, default=25_000_000, help="values in the gradient (default 25 million)")
    parser.add_argument("--method", default="marsit", help="method to compare with the rest (default marsit)")
    parser.add_argument("--repeat", type=int, default=7, help="measurements of each, at least 2 (default 7)")
    parser.add_argument(
        "--compute-ms", type=float, help="duration of your step without the exchange; adds the gain per step"
    )
    common.add_launcher(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure on every rank and print on rank 0; return the exit status."""
    if problem := _problem(arguments):
        return _refuse(problem)
    launcher = common.chosen_launcher(arguments.launcher)
    try:
        ranks = _ranks(launcher)
    except ImportError as error:
        return _refuse(f"it measures inside a job, but {error}")
    if ranks is None or ranks.size < 2:
        return _refuse(
            f"one rank has no one to exchange with; start it on the hosts of your job, such as\n  {_START[launcher]}"
        )
    from ..errors import ConfigError
    from ..fronts.ranks import measure

    options = {"full_precision_every": 0} if arguments.method == "marsit" else {}
    try:
        timings = measure(ranks, arguments.elements, arguments.repeat, arguments.method, options)
    except ConfigError as error:  # such as more ranks than the method can serve
        return _refuse(str(error))
    if ranks.rank == 0:
        found = document(arguments, ranks.size, [timing.document() for timing in timings])
        print(json.dumps(found) if arguments.json else text(found), flush=True)
    ranks.gather(None, "hvc.headroom.end")  # the first rank may have the store by which the others meet
    return 0


def _ranks(launcher: str) -> Any:
    """Return the ranks of this job; None where no launcher has started this process as one."""
    if launcher == "torchrun" and common.started_by() != "torchrun":
        common.module_of(launcher, "ranks")  # else it would be of no use to start it
        return None
    return common.ranks_of(launcher)  # MPI may have started Horovod's, which it alone sees


def _problem(arguments: argparse.Namespace) -> str:
    """Return what is wrong with the arguments, empty if nothing is."""
    from ..errors import ConfigError
    from ..options import check_known

    if not 1 <= arguments.elements <= _MOST_ELEMENTS:
        return f"--elements should be a whole number from 1 to {_MOST_ELEMENTS}, got {arguments.elements}"
    if arguments.repeat < 2:
        return f"--repeat should be at least 2, got {arguments.repeat}"
    if arguments.compute_ms is not None and not 0 < arguments.compute_ms <= _MOST_MILLISECONDS:
        return f"--compute-ms should be a number above 0, at most {_MOST_MILLISECONDS:,}, got {arguments.compute_ms:g}"
    try:
        check_known(arguments.method, {})
    except ConfigError as error:
        return str(error)
    return ""


def document(arguments: argparse.Namespace, world: int, timings: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the measurements and what follows from them.

    Args:
        timings: of those that do without the method, Horovod's own float32 first, and last the method.
    """
    *others, last = timings
    best = min(others, key=lambda timing: timing["median_seconds"])
    advice = best if others[0]["median_seconds"] / best["median_seconds"] >= _LEAST_GAIN else others[0]
    other, method = best["median_seconds"], last["median_seconds"]
    found = {
        "bench": "headroom",
        "ranks": world,
        "elements": arguments.elements,
        "timings": timings,
        "against": best["name"],  # what the method is compared with: the fastest of the others
        "times_faster": other / method,
        "saved_seconds": other - method,
        "pays": other / method >= _LEAST_GAIN,
        "advice": advice["name"],  # if it does not pay
    }
    if arguments.compute_ms is not None:
        compute = arguments.compute_ms / 1e3
        rival = other if found["pays"] else advice["median_seconds"]
        found["most_step_gain"] = rival / (compute + rival)
        found["step_gain"] = (rival - method) / (compute + rival)
    return found


def text(found: dict[str, Any]) -> str:
    """Return the same for people."""
    lines = [f"{found['elements']:,} float32 values, {found['ranks']} ranks; median of the slowest rank [spread]"]
    lines += [
        f"  {timing['name']:14} {1e3 * timing['median_seconds']:9.1f} ms  [{1e3 * timing['spread_seconds']:.1f}]"
        for timing in found["timings"]
    ]
    seconds, method = (
        {timing["name"]: 1e3 * timing["median_seconds"] for timing in found["timings"]},
        found["timings"][-1]["name"],
    )
    against, advice = found["against"], found["advice"]
    if found["pays"]:
        lines.append(
            f"{method} can pay: it takes {1e3 * found['saved_seconds']:.1f} ms less than {against}, the fastest "
            f"without it, and is {found['times_faster']:.1f} times as fast."
        )
    else:
        gains = f"gains less than {_LEAST_GAIN - 1:.0%} here" if found["times_faster"] > 1 else "does not pay here"
        said = f"{method} {gains}: {advice} takes {seconds[advice]:.1f} ms, {method} {seconds[method]:.1f} ms."
        lines.append(f"{said} {_ADVICE[advice]}")
    if "step_gain" in found:
        gain = found["step_gain"]
        rival = against if found["pays"] else advice
        change = f"{abs(gain):.0%} {'longer' if gain < 0 else 'shorter'}"
        lines.append(
            f"If nothing hides behind the backward pass, a step gets {change} than with {rival}; an "
            f"exchange that cost nothing would make it {found['most_step_gain']:.0%} shorter."
        )
    return "\n".join(lines)
