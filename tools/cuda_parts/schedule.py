"""Runs parts within a time limit, some of them side by side, and ends whatever takes too long."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from .part import Part
from .process import Process
from .result import NOT_RUN, RIGHT, WRONG, Result, Results
from .verdict import figures, tail, verdict

FIGURES = "HVC_CHECK_FIGURES"  # as tests/support/figures.py reads it
POLL_SECONDS = 0.1
SECONDS_BETWEEN_LINES = 30.0
#: What a part may need more than it last did.
_MARGIN = 1.2
#: No more than this share of a call is kept for a part because of what it took: it could never start again.
_MOST = 0.9
#: A part that had this share of a call to itself and was not done has overrun: another call would not help.
_NEARLY_ALL = 0.85


class Schedule:
    """One call's run of parts.

    Args:
        results: where each part leaves its result.
        limit: seconds of the whole call.
        began: when the call began, by time.monotonic(); now if None.
        at_once: the most parts side by side.
        say: prints a line of progress.
        noted: called after each result.
    """

    def __init__(
        self,
        results: Results,
        limit: float,
        at_once: int,
        say: Callable[[str], None],
        noted: Callable[[], None],
        began: float | None = None,
    ) -> None:
        self._results, self._at_once, self._say_line, self._noted = results, at_once, say, noted
        self._began = time.monotonic() if began is None else began
        self._end = self._began + limit
        self._whole = self._left()  # what a call has for its parts
        self._running: list[tuple[Part, Process, bool]] = []
        self._printed = self._began

    def run(self, parts: Sequence[Part]) -> None:
        """Run the parts, in order; each has a result afterwards, if only that there was no time for it."""
        waiting = list(parts)
        try:
            while waiting or self._running:
                while waiting and self._may_start(waiting[0]):
                    self._start(waiting.pop(0))
                self._look()
                time.sleep(POLL_SECONDS)
        finally:
            # Ends every one, whatever an error or a second signal does to the others.
            with contextlib.ExitStack() as stack:
                for part, process, _ in self._running:
                    stack.callback(self._interrupted, part, process.seconds)
                for _, process, _ in self._running:
                    stack.callback(process.end)

    # ---- starting ----

    def _may_start(self, part: Part) -> bool:
        """Return whether nothing that runs is in the way; parts that will not be started have no way to go."""
        if part.missing or self._needs(part) > self._left():
            return True
        alone = part.alone or any(running.alone for running, _, _ in self._running)
        return len(self._running) < (1 if alone else self._at_once)

    def _start(self, part: Part) -> None:
        if part.missing:
            self._note(Result(part.name, NOT_RUN, part.missing))
        elif self._needs(part) > self._left():
            self._no_time(part)
        else:
            folder = self._results.figures_of(part.name)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
            limit, output = min(part.limit, self._left()), self._results.folder / f"{part.name}.log"
            environment = {**part.environment, FIGURES: str(folder)}
            process = Process(part.command, environment, output, limit, self._results.folder.parent)
            self._running.append((part, process, limit < min(part.limit, _NEARLY_ALL * self._whole)))
            self._say(f"{part.name} started, {limit:.0f} s at most")

    def _no_time(self, part: Part) -> None:
        needs, left = self._needs(part), max(self._left(), 0.0)
        again = "call again to continue" if needs <= _MOST * self._whole else "--limit gives it longer"
        why = f"it may need {needs:.0f} s, and {left:.0f} s of this call were left; {again}"
        if self._results.current(part.name):
            self._say(f"{part.name}: not run again: {why}")  # what was found still holds
        else:
            self._note(Result(part.name, NOT_RUN, why))

    def _left(self) -> float:
        return self._end - time.monotonic()

    def _needs(self, part: Part) -> float:
        """Return the seconds to reserve: what it took here before, or what we believe."""
        before = self._results.read(part.name)
        took = min(before.expected or 0.0, _MOST * self._whole) if before else 0.0
        if before and took and before.result == RIGHT:
            return min(part.limit, took)
        return min(part.limit, max(part.expected, took))  # one that failed early says little of the whole

    # ---- ending ----

    def _look(self) -> None:
        for running in list(self._running):
            part, process, cut = running
            status = process.status()
            if status is None and not process.overran():
                continue
            seconds = process.seconds
            left_over = process.end()  # children that outlive a part too
            self._running.remove(running)
            found = self._ended(part, process, status, cut, seconds)
            self._note(replace(found, reason="; ".join(filter(None, [found.reason, left_over]))))
        if self._running and time.monotonic() - self._printed > SECONDS_BETWEEN_LINES:
            self._say(f"running: {', '.join(part.name for part, _, _ in self._running)}")

    def _ended(self, part: Part, process: Process, status: int | None, cut: bool, seconds: float) -> Result:
        output = process.output()
        if status is not None:
            result, reason = verdict(part, status, output)
        elif cut:
            result, reason = (
                NOT_RUN,
                f"this call's time was up after {seconds:.0f} s of it; call again to continue",
            )
        else:
            option = "--part-limit" if process.limit >= part.limit else "--limit"
            result, reason = WRONG, f"not done after {seconds:.0f} s, and ended; {option} gives it longer"
        return Result(
            part.name,
            result,
            reason,
            round(seconds, 1),
            expected=round(_MARGIN * seconds, 1),
            output=tail(output),
            figures=figures(self._results.figures_of(part.name)),
            command=shlex.join(part.command),
        )

    def _interrupted(self, part: Part, seconds: float) -> None:
        if not self._results.current(part.name):  # what was found still holds
            why = f"the call was ended after {seconds:.0f} s of it; call again to continue"
            self._note(Result(part.name, NOT_RUN, why, round(seconds, 1)))

    def _note(self, result: Result) -> None:
        self._results.write(result)
        self._noted()
        reason = f": {result.reason}" if result.reason else ""
        self._say(f"{result.part}: {result.result}, {result.seconds:.0f} s{reason}")

    def _say(self, text: str) -> None:
        self._printed = time.monotonic()
        self._say_line(f"[{self._printed - self._began:5.0f} s] {text}")
