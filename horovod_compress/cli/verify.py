"""Test this installation: equal bits on all ranks, and faults that are noticed in time, with ranks on this machine.

    hvd-compress verify --np 4
    horovodrun -np 8 -H a:4,b:4 hvd-compress verify
    torchrun --nproc-per-node 4 --no-python hvd-compress verify
    hvd-compress verify --launcher torchrun --front fsdp

Every method trains for some steps, after which all ranks must have the same weights, bit for bit. Then a frame with one
bit changed, a different seed on one rank and a result with one bit changed must be refused; and if a rank is killed or
frozen in the middle of a step, every other rank must fail in time and name it. Under a launcher, which ends all ranks
when one dies, the last two are left out.

--front fsdp trains a model that fully_shard divides among two ranks, if there is an even number of ranks from 4 on; the
checks of faults, and all with another number of ranks, are done with one rank a replica.

The exit status is 0 if all checks pass, 1 if one fails, 2 if they could not be run. --plant makes one rank misbehave
where nothing should go wrong, to show that the checks notice: the exit status is then 1, and the table says where.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from . import common

_refuse = partial(common.refuse, "verify")

PLANTS = ("corruption", "freeze", "mismatch", "drift")
_MOST_RANKS = 64
_BOUND = 300.0  # seconds for all checks in one job, after which it is called hung
_BOUND_OF_ONE = 120.0
_TIMEOUT_FROZEN = 5.0  # of the first steps too, which take long on a machine that is busy
_TIMEOUT_KILLED = 60.0  # so long that survivors can only notice the death itself, on a busy machine too
_LATE = 8.0  # seconds after the timeout, or after the death, at which a failure is called late: machines may be busy
HEAD = f"{'check':24}  {'result':6}  {'seconds':>7}  detail"
_START = {
    "horovodrun": "horovodrun -np 8 -H a:4,b:4 hvd-compress verify",
    "torchrun": "torchrun --nproc-per-node 4 --no-python hvd-compress verify",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the number of ranks, and the fault to plant."""
    parser.add_argument("--np", type=int, default=4, metavar="N", help="ranks to start on this machine (default 4)")
    parser.add_argument("--plant", choices=PLANTS, help="make the last rank misbehave; the checks must notice")
    common.add_launcher(parser)
    parser.add_argument(
        "--front",
        choices=("ddp", "fsdp"),
        help="with torchrun: whole models, with DistributedDataParallel (default), or replicas that are divided",
    )


def run(arguments: argparse.Namespace) -> int:
    """Do the checks and print the table; return the exit status."""
    if not 2 <= arguments.np <= _MOST_RANKS:
        return _refuse(f"--np should be a number from 2 to {_MOST_RANKS}, got {arguments.np}")
    under, launcher = common.started_by(), common.chosen_launcher(arguments.launcher)
    front = "fsdp" if arguments.front == "fsdp" else ""
    if arguments.front and launcher != "torchrun":
        return _refuse(f"--front {arguments.front} needs ranks of torch.distributed: give --launcher torchrun, too")
    if under not in ("", launcher):
        return _refuse(f"--launcher {launcher} needs ranks that verify starts itself: run it without {under}")
    if under and arguments.plant == "freeze":
        return _refuse(f"--plant freeze needs ranks that verify starts itself: run it without {under}")
    table = _Table(quiet=arguments.json)
    try:
        ranks = common.ranks_of(launcher, front) if under else None
        if ranks is not None and ranks.size < 2:
            return _refuse(
                "one rank has no one to exchange with; start it on the hosts of your job, such as\n"
                f"  {_START[launcher]}",
            )
        if ranks is None:
            _with_own_ranks(arguments, launcher, front, table)
        else:
            _in_this_job(arguments, ranks, launcher, table)
    except ImportError as error:
        return _refuse(str(error))
    if ranks is not None and ranks.rank:  # another rank prints
        return 0
    found = {
        "ranks": ranks.size if ranks else arguments.np,
        "launcher": launcher,
        "front": front or ("ddp" if launcher == "torchrun" else "horovod"),
        "ok": all(row["ok"] for row in table.rows),
        "seconds": table.seconds(),
        "checks": table.rows,
        "planted": arguments.plant,
    }
    print(json.dumps(found) if arguments.json else ending(found), flush=True)
    return 0 if found["ok"] else 1


class _Table:
    """The checks, each printed as soon as it is done."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._began = quiet, time.monotonic()
        self.rows: list[dict[str, Any]] = []

    def begin(self, world: int, launcher: str) -> None:
        self._print(f"{world} ranks, started the way {launcher} does\n{HEAD}")

    def extend(self, rows: Sequence[dict[str, Any]]) -> None:
        """Take the rows so far: those that are new come last."""
        for row in rows[len(self.rows) :]:
            self.rows.append(row)
            self._print(line(row))

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def _print(self, text: str) -> None:
        if not self._quiet:
            print(text, flush=True)  # into a pipe too, which somebody may watch


def _with_own_ranks(arguments: argparse.Namespace, launcher: str, front: str, table: _Table) -> None:
    run = common.module_of(launcher, "ranks", front).run_local
    world, plant = arguments.np, arguments.plant or ""
    table.begin(world, launcher)
    victims = [world - 1] if plant == "freeze" else []
    others = [rank for rank in range(world) if rank not in victims]

    def look(left: list[dict[str, Any]]) -> None:
        table.extend(agreed([left[rank].get("checks", []) for rank in others]))

    ends = run(world, {"how": "checks", "plant": plant}, _BOUND, victims, look)
    table.extend(merged([ends[rank].found.get("checks") for rank in others], [end.output for end in ends]))
    table.extend([*table.rows, *unfinished([ends[rank] for rank in others], table.rows)])
    for how in ("kill", "freeze"):
        began = time.monotonic()
        ends = run(
            world,
            {"how": how, "seconds": _TIMEOUT_KILLED if how == "kill" else _TIMEOUT_FROZEN},
            _BOUND_OF_ONE,
            [world - 1],
        )
        problem, detail = judged(how, ends, world)
        row = {"check": how, "ok": not problem, "seconds": time.monotonic() - began, "detail": problem or detail}
        table.extend([*table.rows, row])


def _in_this_job(arguments: argparse.Namespace, ranks: Any, launcher: str, table: _Table) -> None:
    from ..errors import HorovodCompressError
    from ..fronts.selftest import Checks

    if ranks.rank == 0:
        table.begin(ranks.size, launcher)
    Checks(ranks, arguments.plant or "", table.extend if ranks.rank == 0 else None).run()
    with contextlib.suppress(HorovodCompressError):  # of a rank that is gone the rows tell
        ranks.gather(None, "hvc.verify.end")  # the first rank may have the store by which the others meet


def merged(of_ranks: list[list[dict[str, Any]] | None], outputs: list[str]) -> list[dict[str, Any]]:
    """Return the rows of all ranks, see :func:`agreed`, or one that says which ranks have none."""
    if silent := [rank for rank, rows in enumerate(of_ranks) if not rows]:
        detail = f"rank(s) {', '.join(map(str, silent))} failed: {outputs[silent[0]][-2000:].strip()}"
        return [_broken(detail)]
    return agreed([rows or [] for rows in of_ranks])


def unfinished(ends: Sequence[Any], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for the first rank that did not end well, where the rows of all ranks say nothing of it."""
    if not all(row["ok"] for row in rows):
        return []
    of_some = (row for end in ends for row in end.found.get("checks", []) if not row["ok"])
    if failed := next(of_some, None):  # in a check that others could not end
        return [failed]
    bad = next((end for end in ends if end.status != 0), None)
    if bad is None:
        return []
    how = "did not end" if bad.status is None else f"ended with {bad.status}"
    return [_broken(f"rank {bad.rank} {how}: {bad.output[-2000:].strip()}")]


def _broken(detail: str) -> dict[str, Any]:
    return {"check": "a job of all ranks", "ok": False, "seconds": 0.0, "detail": detail}


def agreed(of_ranks: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row for each check that all have done: it holds if it does on every rank; one that fails is the last."""
    rows = []
    for same in zip(*of_ranks, strict=False):
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


def line(row: dict[str, Any]) -> str:
    """Return a row of the table for people."""
    word = "ok" if row["ok"] else "FAILED"
    return f"{row['check']:24}  {word:6}  {row['seconds']:7.1f}  {row['detail']}".rstrip()


def ending(found: dict[str, Any]) -> str:
    """Return the line below the table."""
    return f"{'all checks passed' if found['ok'] else 'a check failed'}, after {found['seconds']:.0f} s"
