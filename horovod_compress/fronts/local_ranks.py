"""Ranks on this machine that no launcher ends: whoever starts them sees how each of them ends.

``horovodrun`` and ``torchrun`` kill all ranks as soon as one has died. What the others do is seen here.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_POLL_SECONDS = 0.02
_LOOK_SECONDS = 0.2
#: After that, a process that nobody asks for ranks any more is killed.
_END_SECONDS = 5.0
#: What a rank finds its folder, its task and its number by.
FOLDER, TASK, RANK = "HVC_RANK_FOLDER", "HVC_RANK_TASK", "HVC_RANK_NUMBER"
#: What the process that starts them finds the descriptor of its answers by.
_ANSWERS = "HVC_RANK_ANSWERS"

Look = Callable[[list[dict[str, Any]]], None]


@dataclass(frozen=True)
class End:
    """How one rank ended.

    Attributes:
        status: of its exit, negative for a signal, None if it did not end by itself.
        found: what it has written by :func:`leave`, by name.
        output: what it printed.
    """

    rank: int
    status: int | None
    found: Mapping[str, Any]
    output: str


def task() -> Any:
    """Return what this rank is to do."""
    return json.loads(os.environ[TASK])


def leave(name: str, value: Any) -> None:
    """Leave something for whoever started this rank; the last value of a name counts."""
    folder, rank = Path(os.environ[FOLDER]), os.environ[RANK]
    temporary = folder / f".{name}.{rank}"
    temporary.write_text(json.dumps(value))
    temporary.rename(folder / f"{name}.{rank}.json")  # a reader sees all of it or nothing


def run(
    module: str,
    ranks: Sequence[Mapping[str, str]],
    what: Any,
    seconds: float,
    victims: Collection[int] = (),
    look: Look = lambda left: None,
) -> list[End]:
    """Run a module as every rank of a job of its own, and say how each ended.

    Args:
        module: ends with :func:`serve`.
        ranks: what each has in its environment, by which it finds the others.
        what: the task, as plain data.
        seconds: after which all that still run are killed.
        victims: ranks that need not end; they are killed when the others have.
        look: called again and again while they run, with what each has left so far, by name.
    """
    with tempfile.TemporaryDirectory(prefix="hvc-ranks-") as name:
        folder, common = Path(name), {FOLDER: name, TASK: json.dumps(what)}
        own = [{**common, **mine, RANK: str(rank)} for rank, mine in enumerate(ranks)]
        order = {"folder": name, "ranks": own, "seconds": seconds, "victims": list(victims)}
        numbers = range(len(ranks))
        found = _starter(module).carry_out(order, lambda: look([_left(folder, rank) for rank in numbers]))
        if isinstance(found, str):  # it could not even start
            return [End(rank, None, {}, found) for rank in numbers]
        outputs = [folder / f"output.{rank}" for rank in numbers]
        texts = [path.read_text(errors="replace") if path.exists() else "" for path in outputs]
        return [End(rank, found[rank], _left(folder, rank), texts[rank]) for rank in numbers]


def _left(folder: Path, rank: int) -> dict[str, Any]:
    return {path.name.split(".")[0]: json.loads(path.read_text()) for path in folder.glob(f"*.{rank}.json")}


# ---- the process that starts them ----


class _Starter:
    """Runs a module that has imported all that ranks need, and becomes them by forking: they start at once.

    It answers through a pipe of its own: what is imported may print. It and its ranks end as soon as nobody can write
    to its standard input, however this process has ended.
    """

    def __init__(self, module: str) -> None:
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  open as long as the process
        answers, theirs = os.pipe()
        self._answers = os.fdopen(answers)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                # Ranks share the processors; and a fork would have none of a pool's threads.
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
                    _ANSWERS: str(theirs),
                },
                stdin=subprocess.PIPE,
                stdout=self._said,
                stderr=self._said,
                pass_fds=[theirs],
                text=True,
            )
        finally:
            os.close(theirs)

    def carry_out(self, order: Mapping[str, Any], look: Callable[[], None]) -> list[int | None] | str:
        """Return the ranks' statuses; what this process said instead if it has ended."""
        try:
            answer = self._answer(order, look)
        except BaseException:  # this one would answer when the next order is given
            self.end()
            _starter.cache_clear()
            raise
        if answer:
            found: list[int | None] = json.loads(answer)
            return found
        self._stop()
        self._said.seek(0)
        return self._said.read()

    def _answer(self, order: Mapping[str, Any], look: Callable[[], None]) -> str:
        """Return its answer, "" if it has ended."""
        assert self._process.stdin
        try:
            print(json.dumps(order), file=self._process.stdin, flush=True)
        except (BrokenPipeError, ValueError):  # ValueError: it has ended before
            return ""
        poll = select.poll()  # select() has a limit of descriptors
        poll.register(self._answers, select.POLLIN)
        while not poll.poll(_LOOK_SECONDS * 1000):
            look()
        return self._answers.readline()

    def _stop(self) -> None:
        """Let the process end, and its ranks if there are any."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def end(self) -> None:
        """Let it end, for good."""
        self._stop()
        self._answers.close()
        self._said.close()


@functools.cache
def _starter(module: str) -> _Starter:
    found = _Starter(module)
    atexit.register(found.end)
    return found


def serve(become: Callable[[], None]) -> None:
    """Start ranks as :func:`run` asks for them, until nobody can ask any more.

    Args:
        become: a rank's whole work, in a process of its own with the rank's environment.
    """
    answers = os.fdopen(int(os.environ.pop(_ANSWERS)), "w")
    os.set_inheritable(answers.fileno(), False)
    sys.stdout.flush()  # what was printed so far is no rank's

    def begin() -> None:
        answers.close()  # whoever waits for it should see when the process that writes to it has ended
        become()

    for line in sys.stdin:
        order = json.loads(line)
        started: list[_Rank] = []
        try:
            for number, mine in enumerate(order["ranks"]):
                started.append(_Rank(mine, Path(order["folder"], f"output.{number}"), begin))
            until = time.monotonic() + order["seconds"]
            expected = [rank for number, rank in enumerate(started) if number not in order["victims"]]
            while time.monotonic() < until and any(rank.status() is None for rank in expected):
                if _is_over(sys.stdin.fileno(), _POLL_SECONDS):
                    break
        finally:
            statuses = [rank.status() for rank in started]
            for rank in started:
                rank.kill()
        if not _is_over(sys.stdin.fileno(), 0.0):
            print(json.dumps(statuses), file=answers, flush=True)


class _Rank:
    """A fork that becomes a rank."""

    def __init__(self, mine: Mapping[str, str], output: Path, become: Callable[[], None]) -> None:
        self._status: int | None = None
        self._pid = os.fork()
        if not self._pid:
            try:
                os.environ.update(mine)
                orders = os.dup(sys.stdin.fileno())
                _redirect(output)
                threading.Thread(target=_end_with, args=(orders,), daemon=True).start()
                become()
            except BaseException:  # noqa: BLE001  whatever it is, this process has nothing else to do
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)  # one that ends well does so itself

    def status(self) -> int | None:
        """Return the status of its exit, negative for a signal, None while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def kill(self) -> None:
        if self.status() is None:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _is_over(orders: int, seconds: float | None) -> bool:
    """Return whether nobody can write to a pipe any more; wait for that so long, None for ever."""
    poll = select.poll()
    poll.register(orders, 0)  # which tells of nothing else
    return bool(poll.poll(seconds and seconds * 1000))


def _end_with(orders: int) -> None:
    """End this rank as soon as nobody can ask for ranks any more: its parent may have been killed."""
    if _is_over(orders, None):
        os._exit(1)


def _redirect(output: Path) -> None:
    """Read nothing, and write to a file."""
    with Path(os.devnull).open("rb") as nothing, output.open("wb") as file:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
