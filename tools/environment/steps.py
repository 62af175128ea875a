"""The order of the steps. Each looks first whether there is anything to do, so a second run is over at once."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from environment import prerequisites
from environment.file_lock import file_lock
from environment.horovod_wheel import NEEDS, HorovodWheel, collect_facts
from environment.logged_command import CommandRunner, StepFailed
from environment.package_install import PackageInstall
from environment.prerequisites import PrerequisitesMissing
from environment.progress import clock_text
from environment.virtual_environment import EnvironmentProblem, Inspection, VirtualEnvironment
from environment.wheel_cache import WheelCache, default_folder

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Setup:
    """One run of `make setup`."""

    venv: VirtualEnvironment
    runner: CommandRunner
    torch: str
    extras: list[str]
    machine_checked: bool = False

    def run(self) -> bool:
        """Brings everything up to date; returns whether anything had to be done."""
        if not self.venv.works():
            self.check_machine(None)
            self.venv.create()
        self.venv.repair()
        inspection = self.install_requirements(self.inspect())
        self.install_horovod(inspection)
        self.install_package(inspection)
        return self.machine_checked

    def inspect(self) -> Inspection:
        return self.venv.inspect(ROOT / "pyproject.toml", self.extras, [self.torch, *NEEDS])

    def check_machine(self, inspection: Inspection | None) -> None:
        """Before the first step that does something, so that nobody waits for a download only to miss a compiler."""
        if not self.machine_checked:
            prerequisites.require(Path(inspection.include) if inspection else None)
            self.machine_checked = True

    def install_requirements(self, inspection: Inspection) -> Inspection:
        if not inspection.unmet:
            return inspection
        self.check_machine(inspection)
        self.venv.install(inspection.unmet, inspection, self.torch)
        return self.inspect()

    def install_horovod(self, inspection: Inspection) -> None:
        facts = collect_facts(inspection, os.environ)
        installed = self.venv.folder / "horovod-wheel"
        if inspection.horovod and installed.exists() and installed.read_text() == facts.key():
            return
        self.check_machine(inspection)
        installed.unlink(missing_ok=True)
        cache = WheelCache(default_folder())
        wheel, is_new = HorovodWheel(cache, self.venv, self.runner, facts).get()
        self.venv.install_wheel(wheel)
        if not self.venv.runs("import torch; from horovod.torch import mpi_lib_v2"):
            cache.discard(facts.key())
            again = "" if is_new else " It came from the cache and was removed there: run make setup again."
            raise EnvironmentProblem(f"{wheel.name} was installed, but Horovod's library does not load.{again}")
        installed.write_text(facts.key())

    def install_package(self, inspection: Inspection) -> None:
        package = PackageInstall(ROOT, self.venv, inspection)
        if not package.is_current():
            self.check_machine(inspection)
            package.install()


def run_from_command_line(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    started = time.monotonic()
    try:
        with file_lock(ROOT / "build" / "setup.lock", "working in this folder"):
            did_something = _setup(options).run()
    except (PrerequisitesMissing, StepFailed, EnvironmentProblem) as problem:
        print(f"\n{problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nmake setup was interrupted; run it again to go on from there.", file=sys.stderr)
        return 130
    if did_something:
        print(f"Ready after {clock_text(time.monotonic() - started)}: everything is in {options.venv}")
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--torch", default="torch==2.13.0", help="a requirement of pip's: version, path or address")
    parser.add_argument("--extras", default="test,demo,plot", help="extras of pyproject.toml, separated by commas")
    return parser.parse_args(arguments)


def _setup(options: argparse.Namespace) -> Setup:
    runner = CommandRunner(ROOT / "build" / "setup.log")
    extras = [name for name in options.extras.replace(",", " ").split() if name]
    return Setup(VirtualEnvironment(options.venv, runner), runner, options.torch, extras)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
