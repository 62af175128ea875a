"""The machine and the sources that results hold for."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .process import ROOT

#: Folders and files. The catalogue says what a part runs.
SOURCES = (
    "csrc", "horovod_compress", "tests", "benchmarks", "examples", "setup.py", "pyproject.toml",
    "tools/cuda_parts/catalogue.py",
)  # fmt: skip
#: What is not a source: made by compilers and interpreters.
_MADE = (".so", ".pyc", ".o")
_SECONDS = 120.0

# In a process: a driver that hangs must not hang the check.
_ASK = """
import importlib.metadata as m, json, torch

def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return None

found = {"torch": torch.__version__, "torch's CUDA": torch.version.cuda, "GPUs": torch.cuda.device_count()}
if torch.cuda.is_available():
    about = torch.cuda.get_device_properties(0)
    found |= {"GPU": about.name, "memory": f"{about.total_memory / 2**30:.0f} GiB",
              "compute capability": f"{about.major}.{about.minor}"}
    try:
        from horovod_compress import ops
        a, b, c = (torch.zeros(1, device="cuda") for _ in range(3))
        ops.triad(a, b, c, 1.0)
        torch.cuda.synchronize()
    except Exception as error:
        found["no kernels"] = f"{type(error).__name__}: {error}"
for package in ("horovod", "pytest", "numpy"):
    found[package] = version(package)
found["CuPy"] = next(filter(None, map(version, ("cupy", "cupy-cuda13x", "cupy-cuda12x"))), None)
print(json.dumps(found))
"""


def facts() -> dict[str, Any]:
    """Return what is here; ``GPU`` is absent without one, ``no kernels`` says why ours do not run."""
    found = {"Python": platform.python_version(), "system": platform.platform(), "cores": _cores()}
    found |= _asked([sys.executable, "-c", _ASK])
    found["driver"] = _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {name: value for name, value in found.items() if value is not None}


def key(facts: Mapping[str, Any], root: Path = ROOT) -> str:
    """Return a hash of the sources, the GPU's name and torch's version: a result holds for these."""
    found = hashlib.sha256(json.dumps([facts.get("GPU"), facts.get("torch")]).encode())
    for name in SOURCES:
        for path in [root / name, *sorted((root / name).rglob("*"))]:
            if path.is_file() and "__pycache__" not in path.parts and path.suffix not in _MADE:
                found.update(f"{path.relative_to(root).as_posix()}\0{path.stat().st_size}\0".encode())
                found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _asked(command: Sequence[str]) -> dict[str, Any]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return {"problem": f"torch did not answer within {_SECONDS:g} s: the driver may hang; see nvidia-smi"}
    except (ValueError, IndexError):
        return {"problem": f"torch does not start: {(done.stderr.strip().splitlines() or ['no output'])[-1]}"}


def _first_line(program: str, *words: str) -> str | None:
    path = shutil.which(program)
    if path is None:
        return None
    try:
        done = subprocess.run([path, *words], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines() if done.returncode == 0 else []
    return lines[0] if lines else None
