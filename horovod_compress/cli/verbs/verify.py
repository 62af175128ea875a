"""Test this installation: equal bits on all ranks, and faults that are noticed in time, with ranks on this machine.

    hvd-compress verify --np 4
    horovodrun -np 8 -H a:4,b:4 hvd-compress verify
    torchrun --nproc-per-node 4 --no-python hvd-compress verify

Every method trains for some steps, after which all ranks must have the same weights, bit for bit. Then a frame with one
bit changed, a different seed on one rank and a result with one bit changed must be refused; and if a rank is killed or
frozen in the middle of a step, every other rank must fail in time and name it. Under a launcher, which ends all ranks
when one dies, the last two are left out.

The exit status is 0 if all checks pass, 1 if one fails, 2 if they could not be run. --plant makes one rank misbehave
where nothing should go wrong, to show that the checks notice: the exit status is then 1, and the table says where.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from typing import Any

from .. import launchers

PLANTS = ("corruption", "freeze", "mismatch", "drift")
_MOST_RANKS = 64
_BOUND = 300.0  # seconds for all checks in one job, after which it is called hung
_BOUND_OF_ONE = 120.0
_TIMEOUT_FROZEN = 5.0  # of the first steps too, which take long on a machine that is busy
_TIMEOUT_KILLED = 60.0  # so long that survivors can only notice the death itself, on a busy machine too
_LATE = 8.0  # seconds after the timeout, or after the death, at which a failure is called late: machines may be busy
_SAME = "same bits: "
_START = {
    "horovodrun": "horovodrun -np 8 -H a:4,b:4 hvd-compress verify",
    "torchrun": "torchrun --nproc-per-node 4 --no-python hvd-compress verify",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the number of ranks, and the fault to plant."""
    parser.add_argument("--np", type=int, default=4, metavar="N", help="ranks to start on this machine (default 4)")
    parser.add_argument("--plant", choices=PLANTS, help="make the last rank misbehave; the checks must notice")
    launchers.add_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Do the checks and print the table; return the exit status."""
    if not 2 <= arguments.np <= _MOST_RANKS:
        return _refuse(f"--np should be a number from 2 to {_MOST_RANKS}, got {arguments.np}")
    under, launcher = launchers.started_by(), launchers.chosen(arguments.launcher)
    if under not in ("", launcher):
        return _refuse(f"--launcher {launcher} needs ranks that verify starts itself: run it without {under}")
    if under and arguments.plant == "freeze":
        return _refuse(f"--plant freeze needs ranks that verify starts itself: run it without {under}")
    began = time.monotonic()
    try:
        ranks = launchers.ranks(launcher) if under else None
        if ranks is not None and ranks.size < 2:
            return _refuse(
                "one rank has no one to exchange with; start it on the hosts of your job, such as\n"
                f"  {_START[launcher]}"
            )
        rows, world = _with_own_ranks(arguments, launcher) if ranks is None else _in_this_job(arguments, ranks)
    except ImportError as error:
        return _refuse(str(error))
    if not rows:  # another rank prints
        return 0
    found = {
        "ranks": world,
        "launcher": launcher,
        "ok": all(row["ok"] for row in rows),
        "seconds": time.monotonic() - began,
        "checks": rows,
        "planted": arguments.plant,
    }
    print(json.dumps(found) if arguments.json else text(found), flush=True)
    return 0 if found["ok"] else 1


def _with_own_ranks(arguments: argparse.Namespace, launcher: str) -> tuple[list[dict[str, Any]], int]:
    run = launchers.module(launcher, "local_ranks").run
    world, plant = arguments.np, arguments.plant or ""
    victims = [world - 1] if plant == "freeze" else []
    ends = run(world, {"how": "checks", "plant": plant}, _BOUND, victims)
    rows = merged([end.found.get("checks") for end in ends if end.rank not in victims], [end.output for end in ends])
    for how in ("kill", "freeze"):
        began = time.monotonic()
        ends = run(
            world,
            {"how": how, "seconds": _TIMEOUT_KILLED if how == "kill" else _TIMEOUT_FROZEN},
            _BOUND_OF_ONE,
            [world - 1],
        )
        problem, detail = judged(how, ends, world)
        rows.append({"check": how, "ok": not problem, "seconds": time.monotonic() - began, "detail": problem or detail})
    return rows, world


def _in_this_job(arguments: argparse.Namespace, ranks: Any) -> tuple[list[dict[str, Any]], int]:
    from ...errors import HorovodCompressError
    from ...fronts.common.selftest import Checks

    rows = Checks(ranks, arguments.plant or "").run()
    with contextlib.suppress(HorovodCompressError):  # of a rank that is gone the rows tell
        ranks.gather(None, "hvc.verify.end")  # the first rank may have the store by which the others meet
    return (rows if ranks.rank == 0 else []), ranks.size


def merged(of_ranks: list[list[dict[str, Any]] | None], outputs: list[str]) -> list[dict[str, Any]]:
    """Return one row for each check: it holds if it does on every rank; the first that fails on one is the last."""
    if silent := [rank for rank, rows in enumerate(of_ranks) if not rows]:
        detail = f"rank(s) {', '.join(map(str, silent))} failed: {outputs[silent[0]][-2000:].strip()}"
        return [{"check": "a job of all ranks", "ok": False, "seconds": 0.0, "detail": detail}]
    rows = []
    for same in zip(*filter(None, of_ranks), strict=False):
        worst = next((row for row in same if not row["ok"]), same[0])
        rows.append({**worst, "seconds": max(row["seconds"] for row in same)})
        if not worst["ok"]:
            break
    return rows


def judged(how: str, ends: Any, world: int) -> tuple[str, str]:
    """Return what is wrong with the way in which the survivors failed, empty if nothing is; and what is right."""
    victim = world - 1
    at = ends[victim].found.get("fault")
    if at is None:
        return f"rank {victim} did not reach its planted fault: {ends[victim].output[-2000:].strip()}", ""
    earliest, latest = (0.0, _LATE) if how == "kill" else (_TIMEOUT_FROZEN - 1.0, _TIMEOUT_FROZEN + _LATE)
    delays = []
    for end in ends[:victim]:
        error = end.found.get("error")
        if not error:
            return f"rank {end.rank} did not fail, or did not end: {end.output[-2000:].strip()}", ""
        delays.append(error["at"] - at)
        if f"rank(s) {victim}:" not in error["text"] and f"rank {victim} " not in error["text"]:
            return f"the error of rank {end.rank} does not name rank {victim}: {error['text']}", ""
    if not earliest <= min(delays) or max(delays) > latest:
        return f"the others failed after {min(delays):.1f} to {max(delays):.1f} s, not {earliest:g} to {latest:g} s", ""
    done = "killed" if how == "kill" else f"frozen (timeout={_TIMEOUT_FROZEN:g})"
    return "", f"rank {victim} {done}: the others failed after at most {max(delays):.1f} s, and named it"


def text(found: dict[str, Any]) -> str:
    """Return the table for people."""
    rows = found["checks"]
    same = [row for row in rows if row["check"].startswith(_SAME) and row["ok"]]
    shown = [row for row in rows if row not in same]
    if same:
        names = ", ".join(row["check"].removeprefix(_SAME) for row in same)
        seconds = sum(row["seconds"] for row in same)
        shown.insert(
            0, {"check": "same bits", "ok": True, "seconds": seconds, "detail": f"{len(same)} methods: {names}"}
        )
    head = f"{'check':22}  {'result':6}  {'seconds':>7}  detail"
    lines = [head, *(f"{r['check']:22}  {_word(r):6}  {r['seconds']:7.1f}  {r['detail']}" for r in shown)]
    end = "all checks passed" if found["ok"] else "a check failed"
    lines.append(f"{found['ranks']} ranks, started the way {found['launcher']} does, {found['seconds']:.0f} s: {end}")
    return "\n".join(lines)


def _word(row: dict[str, Any]) -> str:
    return "ok" if row["ok"] else "FAILED"


def _refuse(problem: str) -> int:
    print(f"hvd-compress verify: {problem}", file=sys.stderr)
    return 2
