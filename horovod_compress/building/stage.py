"""Runs one command as a stage: a line with its time, and a log, of which a failure shows what matters."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# What a log says, and what to do; the first that fits counts: a full disk causes many other errors.
_ADVICE = {
    r"No space left|quota exceeded": "The disk is full: make room, or move caches by XDG_CACHE_HOME and TMPDIR.",
    r"Killed signal|Cannot allocate|bad_alloc|MemoryError": "Out of memory: make setup JOBS=1, or --jobs 1.",
    r"ensurepip|Python\.h|omp\.h|std=c\+\+20|CXX_COMPILER|compiler .* does not run": """\
This takes Python's venv and headers, a C++ compiler with C++20 and OpenMP (g++ 11 or newer) and make:
  Debian, Ubuntu:  sudo apt-get install python3-venv python3-dev g++ make
  Fedora:          sudo dnf install python3-pip python3-devel gcc-c++ make""",
    r"fatal error: .*(No such file|not found)": "A header is missing: install the package that contains it.",
    r"MPI_CXX": "MPI was not found: load your site's MPI module, so that mpicxx is in PATH.",
    r"CERTIFICATE_VERIFY|CertVerification": "The package index's certificate is not trusted: see pip's PIP_CERT.",
    r"name resolution|onnection|imed out|unreachable|Max retries": """\
The package index cannot be reached: check the network; for a proxy set HTTPS_PROXY, for a mirror PIP_INDEX_URL.""",
    r"DO NOT MATCH THE HASHES": "A mirror or a proxy changed a file: python3 -m pip cache purge, or another index.",
    r"No matching dist|ResolutionImpossible": "Choose another TORCH=torch==VERSION, PYTHON= or PIP_INDEX_URL.",
    r"Permission denied": 'A file belongs to another user, perhaps after a sudo: sudo chown -R "$USER" .',
    "": "The first error in the log is usually the cause.",
}
_ERROR = re.compile(r"^(?!\s*(--|WARNING))(.*error:|\s*ERROR\b|.*\bError: |CMake Error|.*undefined reference)")


class StageFailed(Exception):
    """What a person needs to go on."""


@dataclass(frozen=True)
class Stages:
    """Stages of one program.

    Args:
        logs: the folder of the logs. A stage that fails leaves a file `failed` there, which ends those beside it.
        program: what to run again after a failure.
    """

    logs: Path
    program: str

    def run(self, title: str, command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> None:
        """Runs a command to its end; what ends this ends all that it has started.

        Raises:
            StageFailed: its status is not 0.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        log, failed = self.logs / f"{title.replace(' ', '-')}.log", self.logs / "failed"
        began, start = time.monotonic(), "\r\x1b[K" if sys.stderr.isatty() else ""
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:  # not where nohup ignores it
                signal.signal(number, signal.default_int_handler)
        _write("" if start else f"        {title} ...\n")
        with log.open("wb") as output, (self.logs / "terminal").open("a") as terminal:
            # A session of its own, to be ended with its compilers; locks are inherited.
            # And what ends this waits until the process is known.
            unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
            process = subprocess.Popen(
                list(map(str, command)), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env=environment, start_new_session=True, close_fds=False,
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, unblocked),  # noqa: PLW1509  one thread
            )  # fmt: skip
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
                while process.poll() is None and not failed.exists():
                    if start:
                        with contextlib.suppress(BlockingIOError):  # of stages side by side, one has the terminal
                            fcntl.flock(terminal, fcntl.LOCK_EX | fcntl.LOCK_NB)
                            line = f"{_clock(began)}  {title}: {_last_line(log)}"
                            _write(f"{start}{line[: shutil.get_terminal_size().columns - 1]}")
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(0.5)
            finally:
                for number in (signal.SIGTERM, signal.SIGKILL) if process.returncode is None else ():
                    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                        os.killpg(process.pid, number)
                        process.wait(3)
        if process.returncode != 0:
            reason = "another stage failed" if failed.exists() else self._reason(process.returncode, log)
            failed.touch()
            raise StageFailed(f"{start}{title}: {reason}")
        _write(f"{start}{_clock(began)}  {title}: done\n")

    def _reason(self, status: int, log: Path) -> str:
        text = log.read_text(errors="replace")
        lines = text.splitlines()
        first = next((at for at, line in enumerate(lines) if _ERROR.match(line)), len(lines))
        shown = [*lines[first : first + 6], *lines[max(first + 6, len(lines) - 5) :]]
        excerpt = "\n".join(f"  | {line}" for line in shown)
        advice = next(advice for pattern, advice in _ADVICE.items() if re.search(pattern, text))
        again = f"Then run {self.program} again: it continues where it stopped. The whole log: {log}"
        return f"{self.program} failed with status {status}.\n\n{excerpt}\n\n{advice}\n{again}"


def _last_line(log: Path) -> str:
    lines = re.split(r"[\r\n]+", log.read_bytes()[-2000:].decode(errors="replace").rstrip())
    found = re.match(r"Progress (\d+) of (\d+)", lines[-1])  # pip's, in bytes
    return f"{int(found[1]) / 1e6:.0f} of {int(found[2]) / 1e6:.0f} MB" if found else lines[-1].strip()


def _clock(began: float) -> str:
    return "{:3d}:{:02d}".format(*divmod(int(time.monotonic() - began), 60))


def _write(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)
