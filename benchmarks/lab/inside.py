"""The lab's first process: makes the network, runs jobs in it, and takes all of it along when it ends.

It reads one JSON document a line from standard input and writes one a line to standard output:

    {"do": "limit", "rate": "1gbit" | null, "delay": 0.0}        -> {"event": "limited", ...}
    {"do": "run", "job": 1, "words": [...], "ranks": 4, "slots": 1, "environment": {...}, "limit": 60.0}
                                            -> {"event": "line", "job": 1, "rank": 0, "text": "..."} ...
                                               {"event": "done", "job": 1, "status": {"0": 0, ...}, "links": [...]}
    {"do": "stop", "job": 1}                ends a job, whose "done" follows

It ends when its input ends: when whoever started it has closed it, or died.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
from typing import IO, Any

from .needs import LabError
from .network import Host, build, congestion_control, counters, difference, has_netem, limit
from .rates import Rate
from .relay import Relay

Document = dict[str, Any]


class _Lab:
    def __init__(self, out: IO[str], names: list[str], congestion: str | None) -> None:
        self._out, self._writing = out, threading.Lock()
        self._orders: queue.Queue[Document] = queue.Queue()
        self._stopped = 0  # the last job that is not to go on
        threading.Thread(target=self._read, daemon=True).start()
        self._hosts: list[Host] = build(names)
        self._relay: Relay | None = None
        self._say("ready", congestion_control=congestion_control(self._hosts, congestion))

    def _say(self, event: str, **fields: object) -> None:
        with self._writing:
            self._out.write(json.dumps({"event": event, **fields}) + "\n")
            self._out.flush()

    def _read(self) -> None:
        """Queue the orders, apart from those that cannot wait."""
        try:
            for line in sys.stdin:
                order = json.loads(line)
                if order["do"] == "stop":
                    self._stopped = order["job"]
                else:
                    self._orders.put(order)
        finally:  # also after half a line, from somebody who died in the middle of it
            os._exit(0)  # the kernel ends every process here, and removes the namespaces

    def serve(self) -> None:
        while True:
            order = self._orders.get()
            try:
                getattr(self, f"_{order.pop('do')}")(**order)
            except (LabError, OSError, ValueError) as error:
                self._say("error", text=str(error))

    def _limit(self, rate: str | None, delay: float) -> None:
        parsed = Rate.parse(rate) if rate else None
        if self._relay:
            self._relay.stop()
        self._relay = None
        by_netem = bool(delay) and has_netem()
        limit(self._hosts, parsed, delay if by_netem else 0.0)
        if delay and not by_netem:
            self._relay = Relay([host.port for host in self._hosts], delay)
        facts: Document = {"burst_bytes": parsed.burst, "queue_bytes": parsed.queue} if parsed else {}
        self._say("limited", delayed_by=("netem" if by_netem else "relay") if delay else None, **facts)

    def _run(
        self, job: int, words: list[str], ranks: int, slots: int, environment: dict[str, str], limit: float
    ) -> None:
        from .ranks import Job  # imports Horovod, which takes a while: the network is there by then

        def say(rank: int, text: str) -> None:
            self._say("line", job=job, rank=rank, text=text)

        before = counters(self._hosts)
        spared = [self._relay.pid] if self._relay else []
        running = Job(self._hosts, ranks, slots, words, environment, say, spared)
        ended = running.wait(limit, lambda: self._stopped >= job)
        if self._relay:
            self._relay.check()
        self._say("done", job=job, links=difference(counters(self._hosts), before), **ended)


def main() -> None:
    for sign in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sign, lambda number, frame: os._exit(128 + number))
    # What anything prints here must not get between the answers.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with contextlib.suppress(BrokenPipeError):
        try:
            _Lab(out, **json.loads(sys.argv[1])).serve()
        except LabError as error:
            print(json.dumps({"event": "error", "text": str(error)}), file=out, flush=True)


if __name__ == "__main__":
    main()
