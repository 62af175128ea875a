"""All parts of the check, in the order in which they run: what says most in the least time comes first."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from .part import LIMIT, Part

# Before the limit of a part ends a test that hangs, its stack says which one it is.
_STACK = ("-o", "faulthandler_timeout=150")
PYTEST = (
    *(sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--timeout", "0", "-rs", "-p", "no:cacheprovider"), *_STACK
)  # fmt: skip
KERNELS = "tests/kernels/test_cuda.py"
FRONTS = ("torch", "horovod")
SANITIZERS = {
    "memcheck": "memory that is not the kernel's",
    "racecheck": "threads that write what others use",
    "initcheck": "memory read before it is written",
    "synccheck": "barriers that not all threads reach",
}
#: Processes that share a long list of tests. No multiple of the number of dtypes, or each would get one dtype.
SHARES = 5
#: Parts that run once for each front: what, file, choice of tests, seconds.
JOBS = (
    ("jobs", "2 and 4 ranks that share a GPU, through host memory", "device", "gloo", 120.0),
    ("payloads", "given equal gradients, the CPU's payloads byte for byte in every step", "given", "payloads", 150.0),
    ("nccl", "a rank for each GPU, over NCCL", "", "nccl", 60.0),
    ("resume", "what was saved on the GPU continues on the CPU, and the other way round", "given", "resumes", 250.0),
    ("training", "held-out losses on the GPU and on the CPU, with Adam", "learning_on_device", "", 200.0),
)


def sanitizer() -> str | None:
    """Return compute-sanitizer's path."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("compute-sanitizer") or shutil.which(f"{home}/bin/compute-sanitizer")


def has_horovod() -> bool:
    return importlib.util.find_spec("horovod") is not None


def parts(folder: Path, limit: float = LIMIT, program: str | None = None, horovod: bool = True) -> list[Part]:
    """Return all parts.

    Args:
        folder: where the benchmark writes.
        limit: seconds of each part.
        program: compute-sanitizer.
        horovod: whether it is installed.
    """
    missing = {front: "needs Horovod" if front == "horovod" and not horovod else "" for front in FRONTS}
    return [
        *_kernel_tests(limit),
        *_jobs(limit, missing),
        *_measurements(folder, limit, missing),
        *_sanitizers(limit, program),
    ]


def _kernel_tests(limit: float) -> Iterator[Part]:
    for number in range(1, SHARES + 1):
        about = f"every kernel gives the CPU's bits, share {number} of {SHARES}"
        share = {"HVC_TEST_SHARE": f"{number}/{SHARES}"}
        yield Part(f"tests.kernels.{number}", about, (*PYTEST, KERNELS), 150.0, share, limit=limit)
    steps = (*PYTEST, "tests/battery/test_cuda_steps.py")
    yield Part("tests.steps", "whole steps of every method give the CPU's bits", steps, 150.0, limit=limit)
    link = (*PYTEST, "tests/unit/test_nccl.py")
    yield Part("tests.nccl", "NCCL with a communicator of one rank", link, 60.0, limit=limit)


def _jobs(limit: float, missing: Mapping[str, str]) -> Iterator[Part]:
    for group, about, file, chosen, expected in JOBS:
        files = [f"tests/parallel/test_{name}.py" for name in ([file] if file else ["device", "given"])]
        for front in missing:
            choice = f"{chosen} and {front}" if chosen else front
            launcher = "horovodrun" if front == "horovod" else "torch.distributed"
            command = (*PYTEST, *files, "-k", choice)
            words = f"{about}; under {launcher}"
            yield Part(f"{group}.{front}", words, command, expected, missing=missing[front], limit=limit)


def _measurements(folder: Path, limit: float, missing: Mapping[str, str]) -> Iterator[Part]:
    large = (*PYTEST, "tests/kernels/test_large.py")
    yield Part("large", "one-bit kernels with 2^31 + 77 elements", large, 120.0, alone=True, limit=limit)
    for front, why in missing.items():
        about = f"the timeline of a step, and how often it makes the host wait; under {front}"
        command = (*PYTEST, "tests/parallel/test_steady_on_device.py", "-k", front)
        yield Part(f"trace.{front}", about, command, 60.0, alone=True, missing=why, limit=limit)
    timed = (sys.executable, "-m", "benchmarks.gpu", "--json", str(folder / "figures" / "benchmark" / "lines.jsonl"))
    yield Part("benchmark", "time of every kernel beside a copy's", timed, 180.0, alone=True, limit=limit)


def _sanitizers(limit: float, program: str | None) -> Iterator[Part]:
    missing = "" if program else "compute-sanitizer was not found: it comes with the CUDA toolkit; set CUDA_HOME"
    for tool, about in SANITIZERS.items():
        # All kernels, torch's too: what a kernel that is not watched writes would count as never written.
        # Nor calls of the driver that fail and are dealt with: torch asks for what is not there.
        options = ("--tool", tool, *(("--report-api-errors", "no") if tool == "memcheck" else ()))
        command = (program or "compute-sanitizer", *options, "--error-exitcode", "9", *PYTEST, KERNELS, "-x")
        for number in range(1, SHARES + 1):
            environment = {"HVC_TEST_LENGTHS": "short", "HVC_TEST_SHARE": f"{number}/{SHARES}"}
            words = f"{about}, share {number} of {SHARES}"
            yield Part(f"{tool}.{number}", words, command, 300.0, environment, missing=missing, limit=limit)
