"""Reads what ``ptxas -v`` says that kernels use of a GPU.

A kernel that spills registers or keeps arrays in local memory pays for it with memory traffic that nobody asked for,
and one that starts with 1,024 threads in a block and uses more than 64 registers cannot be started at all.
"""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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


def wide_kernels(text: str) -> set[str]:
    """Return the names of the kernels that a source starts with 1,024 threads in a block."""
    return set(re.findall(r"start_blocks\((\w+)[^;]*?, kLineThreads,", text))


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


def summary(found: Sequence[Usage]) -> str:
    """Return a line for every architecture."""
    lines = []
    for architecture in sorted({usage.architecture for usage in found}, key=int):
        own = [usage for usage in found if usage.architecture == architecture]
        median, most = statistics.median(usage.registers for usage in own), max(own, key=lambda usage: usage.registers)
        lines.append(
            f"sm_{architecture}: {len(own)} kernels; registers of a thread: median {median:.0f}, more than 64 in "
            f"{sum(usage.registers > 64 for usage in own)}, maximum {most.registers} ({readable(most.kernel)})"
        )
    return "\n".join(lines)


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


def readable(kernel: str) -> str:
    """Return a kernel's name as it is written, where c++filt is installed."""
    program = shutil.which("c++filt")
    if not program:
        return kernel
    full = subprocess.run([program, kernel], capture_output=True, text=True, check=True).stdout.strip()
    name = re.sub(r"\(anonymous namespace\)::|hvc::|^void ", "", full)
    return name.split("(")[0]
