"""Runs what the workflows of CI run, on this machine: every `run:` step, but those that need an engine or publish.

    python tools/run_workflow_steps.py            every step once, in the order of the files
    python tools/run_workflow_steps.py --list     what would run, and what is left out and why

A step that several jobs share runs once. A step that fails does not end the run; the exit status says that one did.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = ROOT / ".github" / "workflows"
# (the beginning of a command, why it does not run here)
LEFT_OUT = (
    ("docker ", "needs a Docker engine: docker/build-local.sh and docker/compose-local.sh do the same without"),
    ("python -m pip install cibuildwheel", "needs a Docker engine"),
    ("python -m cibuildwheel", "needs a Docker engine"),
    (".venv/bin/python -m pip install", "brings nvcc, which make setup CUDA=1 does here"),
    ("python -m pip install twine", "belongs to publishing"),
    ("python -m twine upload", "publishes"),
)


def steps(folder: Path = WORKFLOWS) -> dict[str, list[str]]:
    """Return each command with the jobs that run it, such as "ci/lint"."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.yml")):
        content: dict[str, Any] = yaml.safe_load(path.read_text())
        for name, job in content["jobs"].items():
            for step in job["steps"]:
                if "run" in step:
                    found.setdefault(step["run"].strip(), []).append(f"{path.stem}/{name}")
    return found


def reason(command: str) -> str | None:
    """Return why a step is left out here; None if it runs."""
    return next((why for beginning, why in LEFT_OUT if command.startswith(beginning)), None)


def run(command: str) -> int:
    """Run one step as a runner does, and return its status."""
    # Not with the workflow's env, which names an index: packages come from where this machine's pip finds them.
    shell = ["bash", "-eo", "pipefail", "-c", command]
    return subprocess.run(shell, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument("--only", metavar="REGEX", default="", help="only steps whose command matches")
    options = parser.parse_args(arguments)
    failed = False
    for command, jobs in steps().items():
        why = reason(command)
        if why is None and not re.search(options.only, command):
            why = f"does not match --only {options.only}"
        if why or options.list:
            print(f"{'left out' if why else 'runs':9} {command}  [{', '.join(jobs)}]{f': {why}' if why else ''}")
            continue
        print(f"== {command}  [{', '.join(jobs)}]", flush=True)
        began = time.monotonic()
        status = run(command)
        failed = failed or status != 0
        verdict = "passed" if status == 0 else f"FAILED with status {status}"
        print(f"{verdict} after {time.monotonic() - began:.0f} s: {command}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
