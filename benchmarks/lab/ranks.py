"""One job on the lab's hosts: Horovod's own rendezvous and host assignment, a process for each rank."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousServer

from .network import INTERFACE, SWITCH_ADDRESS, Host

#: After the first rank ended badly, the others have so long to notice and to say why.
_GRACE_SECONDS = 10.0
_END_SECONDS = 5.0
_LOOK_SECONDS = 0.02

Say = Callable[[int, str], None]


class Job:
    """The ranks of one job.

    Args:
        hosts: every host takes ``slots`` ranks, in order, until all ranks have a place.
        words: the command that every rank runs.
        environment: what is added to the environment.
        say: called with (rank, line) for everything that the ranks print.
        spared: processes that do not end with the job.
    """

    def __init__(
        self,
        hosts: list[Host],
        ranks: int,
        slots: int,
        words: list[str],
        environment: dict[str, str],
        say: Say,
        spared: Iterable[int] = (),
    ) -> None:
        self._say = say
        self._rendezvous = RendezvousServer()
        port = self._rendezvous.start()
        by_name = {host.name: host for host in hosts}
        places = get_host_assignments(parse_hosts(",".join(f"{host.name}:{slots}" for host in hosts)), ranks, ranks)
        self._rendezvous.init(places)
        common = _common_environment(port) | environment
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self._readers: list[threading.Thread] = []
        self._spared = {os.getpid(), *(host.holder.pid for host in hosts), *spared}
        try:
            for place in places:
                own = {name: str(value) for name, value in create_slot_env_vars(place).items()}
                self._start(by_name[place.hostname], place.rank, words, os.environ | common | own)
        except BaseException:
            self._end_all()
            raise

    def _start(self, host: Host, rank: int, words: list[str], environment: dict[str, str]) -> None:
        process = subprocess.Popen(
            host.enter(*words),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self.processes[rank] = process
        reader = threading.Thread(target=self._read, args=(rank, process.stdout), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _read(self, rank: int, lines: Iterable[str]) -> None:
        for line in lines:
            self._say(rank, line.rstrip("\n"))

    def wait(self, limit: float, stopped: Callable[[], bool]) -> dict[str, Any]:
        """Wait for all ranks and return their exit statuses, and whether the time was up.

        Args:
            stopped: whether nobody wants the job any more.
        """
        end = time.monotonic() + limit
        grace: float | None = None
        late = False
        while any(process.poll() is None for process in self.processes.values()):
            now = time.monotonic()
            if grace is None and any(process.poll() for process in self.processes.values()):
                grace = now + _GRACE_SECONDS
            late = now > end
            if late or stopped() or (grace is not None and now > grace):
                self._terminate()
                break
            time.sleep(_LOOK_SECONDS)
        self._end_all()
        return {"status": {str(rank): process.wait() for rank, process in self.processes.items()}, "late": late}

    def _terminate(self) -> None:
        """Ask the ranks to end, and wait a little."""
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        end = time.monotonic() + _END_SECONDS
        while any(process.poll() is None for process in self.processes.values()) and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)

    def _end_all(self) -> None:
        """End every process of the job for good, those that ranks have started too, and the rendezvous.

        The lab numbers its own processes, so all that is there and is not the lab's belongs to the job.
        """
        for process in Path("/proc").iterdir():
            if process.name.isdecimal() and int(process.name) not in self._spared:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process.name), signal.SIGKILL)
        for reader in self._readers:
            reader.join(1.0)
        self._rendezvous.stop()
        self._rendezvous._httpd.server_close()  # which stop() leaves open


def _common_environment(port: int) -> dict[str, str]:
    run = create_run_env_vars(SWITCH_ADDRESS, [INTERFACE], port)
    return {name: str(value) for name, value in run.items()} | {
        "HOROVOD_GLOO_IFACE": INTERFACE,
        "PYTHONUNBUFFERED": "1",
        # torch looks the name of every mapped IPv6 address up, and complains where it finds none.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
