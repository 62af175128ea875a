"""Compiles the CUDA kernels with warnings as errors, and reads what they use of a GPU. Needs nvcc, and no GPU.

The machine code of every architecture is made with the flags of setup.py. A kernel that spills registers
or keeps arrays in local memory pays for it with memory traffic that nobody asked for, and one that starts
with 1,024 threads in a block and uses more than 64 registers cannot be started at all: any is listed and
makes the run fail. Results are kept in build/cuda_report, so that a second run compiles what changed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / "build" / "cuda_report"
STRICT = ("-Werror=all-warnings", "-Xcompiler=-Werror")
REGISTERS = 65_536  # that the threads of a block share


@dataclass(frozen=True)
class Usage:
    """What one kernel uses on one architecture."""

    kernel: str
    architecture: str
    registers: int
    stack: int
    spills: int  # bytes of stores and loads
    threads: int = 256  # of a block

    @property
    def wasteful(self) -> bool:
        return self.stack > 0 or self.spills > 0

    @property
    def too_large(self) -> bool:
        """A block of it does not fit into a GPU: registers are given out in eights."""
        return -(-self.registers // 8) * 8 * self.threads > REGISTERS


def flags() -> ModuleType:
    """Return setup.py as a module: the one place where compilers and flags are chosen."""
    spec = importlib.util.spec_from_file_location("hvc_setup", ROOT / "setup.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def architectures(setup: ModuleType, nvcc: str) -> list[str]:
    """Return what setup.py would make machine code for, such as "90"."""
    return re.findall(r"code=sm_(\d+)", " ".join(setup.architecture_flags(nvcc)))


# ---- compiling --------------------------------------------------------------------------------


def target_flags(chosen: Sequence[str]) -> list[str]:
    return [f"-gencode=arch=compute_{number},code=sm_{number}" for number in chosen]


def command(setup: ModuleType, nvcc: str, chosen: Sequence[str]) -> list[str]:
    strict = [*STRICT, "-Xptxas=-v"]
    return [nvcc, *setup.CUDA_FLAGS, *strict, *target_flags(chosen), *setup.include_flags(), "-c"]


def sources() -> list[Path]:
    return sorted((ROOT / "csrc" / "cuda").glob("*.cu"))


def wide_kernels(text: str) -> set[str]:
    """Return the names of the kernels that a source starts with 1,024 threads in a block."""
    return set(re.findall(r"start_blocks\((\w+)[^;]*?, kLineThreads,", text))


def digest(paths: Iterable[Path], words: Sequence[str]) -> str:
    found = hashlib.sha256("\0".join(words).encode())
    for path in paths:
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def version(nvcc: str) -> str:
    """An upgraded compiler behind the same name makes other code."""
    return subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout


def report_of(source: Path, words: Sequence[str]) -> str:
    """Return what ptxas says of a source; compile it where that is not known.

    Raises:
        RuntimeError: it does not compile without a warning.
    """
    headers = sorted((ROOT / "csrc").rglob("*.h"))
    kept = REPORTS / f"{source.stem}.{digest([source, *headers], [*words, version(words[0])])}.txt"
    if not kept.exists():
        REPORTS.mkdir(parents=True, exist_ok=True)
        done = subprocess.run([*words, str(source), "-o", os.devnull], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{source.name} does not compile without warnings:\n{done.stdout}{done.stderr}")
        made = kept.with_suffix(f".{os.getpid()}")
        made.write_text(done.stdout + done.stderr)
        made.replace(kept)
    return kept.read_text()


# ---- reading ----------------------------------------------------------------------------------


def usages(report: str, wide: Iterable[str] = ()) -> list[Usage]:
    """Return the kernels of a report of ``ptxas -v``, one for each architecture; ``wide`` have 1,024 threads."""
    found = []
    pattern = (
        r"Compiling entry function '(\S+)' for 'sm_(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers"
    )
    for kernel, architecture, stack, stores, loads, registers in re.findall(pattern, report, re.DOTALL):
        threads = 1024 if any(f"{len(name)}{name}" in kernel for name in wide) else 256
        found.append(Usage(kernel, architecture, int(registers), int(stack), int(stores) + int(loads), threads))
    return found


def readable(kernel: str) -> str:
    """Return a kernel's name as it is written, where c++filt is installed."""
    program = shutil.which("c++filt")
    if not program:
        return kernel
    full = subprocess.run([program, kernel], capture_output=True, text=True, check=True).stdout.strip()
    name = re.sub(r"\(anonymous namespace\)::|hvc::|^void ", "", full)
    return name.split("(")[0]


def table(found: Sequence[Usage]) -> str:
    """Return a line for every kernel that is wasteful or too large; none is an empty text."""
    lines = []
    for usage in sorted(found, key=lambda one: (one.kernel, one.architecture)):
        if usage.wasteful:
            spent = f"{usage.stack} bytes of local memory, {usage.spills} bytes of spills"
            lines.append(f"  sm_{usage.architecture} {readable(usage.kernel)}: {spent}")
        if usage.too_large:
            spent = f"{usage.registers} registers for each of {usage.threads} threads cannot be started"
            lines.append(f"  sm_{usage.architecture} {readable(usage.kernel)}: {spent}")
    return "\n".join(lines)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python tools/cuda_report.py", description=__doc__)
    parser.add_argument("--arch", default="", metavar="NUMBERS", help="such as 80,90 (default: all of setup.py)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilations at a time")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options, setup = arguments(argv), flags()
    nvcc = setup.find_nvcc()
    if not nvcc:
        print("nvcc was not found: put it in PATH, or set CUDACXX or CUDA_HOME", file=sys.stderr)
        return 2
    chosen = [number for number in options.arch.split(",") if number] or architectures(setup, nvcc)
    words = command(setup, nvcc, chosen)
    with ThreadPoolExecutor(max_workers=options.jobs) as pool:
        try:
            reports = list(pool.map(lambda source: report_of(source, words), sources()))
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
    wrong = 0
    for source, report in zip(sources(), reports, strict=True):
        found = usages(report, wide_kernels(source.read_text()))
        most = max(usage.registers for usage in found)
        print(f"{source.name:14s} {len(found):4d} kernels, at most {most:3d} registers")
        wrong += sum(usage.wasteful or usage.too_large for usage in found)
        if lines := table(found):
            print(lines)
    print(f"architectures {', '.join(chosen)}: {wrong} kernel(s) with spills or local memory, or too large")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
