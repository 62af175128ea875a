"""Writes the stubs of the compiled modules, from the list of kernels in csrc/kernels.h.

python tools/make_stubs.py          writes horovod_compress/_cpu.pyi and _cuda.pyi
"""

from __future__ import annotations

import builtins
import keyword
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, KERNELS = ROOT / "horovod_compress", ROOT / "csrc" / "kernels.h"

#: What is for host memory, or says something about the processor.
HOST_ONLY = {"crc32c", "crc32c_copy", "instruction_set"}
#: What Python passes for an argument of a type, as `Argument` in csrc/bind.h says.
KINDS = {
    "double": "float",
    "float": "float",
    "bool": "bool",
    "const Stream*": "_Key",
    "const Section*": "_Rows",
    "const Span*": "_Rows",
    "QsgdShape": "_Shape",
    "AdamScales<double>": "_Scales",
    "AdamStep<double>": "_Scales",
    "SgdStep<double>": "_Scales",
}
RESULTS = {"void": "None", "const char*": "str", "Found": "tuple[int, int]"}

HEAD = """# The kernels for CPUs, as csrc/bind.h binds them. Written by tools/make_stubs.py from csrc/kernels.h.
#
# Memory is given by address, 0 for none; dtypes and rules by their number in csrc/kernels.h; keys by their five words.
# ``launch`` is the number of threads. Counts go to the memory that is given, and 0 has them returned.
# ``rows`` has the addresses and numbers of one tensor each, in the order of the members in csrc/kernels.h.

from collections.abc import Sequence
from typing import TypeAlias

_Key: TypeAlias = Sequence[int] | None
_Rows: TypeAlias = Sequence[Sequence[int]]
_Shape: TypeAlias = tuple[int, int, int]  # bits, block, norm
_Scales: TypeAlias = Sequence[float]

"""
PHILOX = "def philox4x32(counter: Sequence[int], key: Sequence[int], /) -> list[int]: ...\n"


def prototypes() -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """Return the kernels: their results, and the types and names of their arguments."""
    text = re.sub(r"//.*", "", KERNELS.read_text())
    found = re.findall(r"^([\w:]+(?: char)?\*?) (\w+)\(([^;{]*)\);", text, re.MULTILINE)
    return {
        name: (result, [argument(one) for one in listed.split(",") if one.strip()]) for result, name, listed in found
    }


def argument(text: str) -> tuple[str, str]:
    """Return the type and the name of an argument."""
    kind, _, name = " ".join(text.split()).rpartition(" ")
    return kind, name


def stub(name: str, result: str, arguments: list[tuple[str, str]]) -> str:
    """Return the line of a kernel."""
    batch = len(arguments) > 1 and arguments[1][1] == "tensor_count"
    given = [("_Rows", "rows"), *arguments[2:]] if batch else arguments
    counts = len(arguments) > 1 and arguments[-2][0] == "int64_t*"
    shown = RESULTS.get(result, "int")
    if counts:
        shown = "list[int]" if batch else "int" if result == "void" else "tuple[int, int]"
    listed = "".join(f"{name_of(argument)}: {kind_of(kind)}, " for kind, argument in given)
    return f"def {name}({listed}{'/' if given else ''}) -> {shown}: ...\n"


def name_of(argument: str) -> str:
    """Return a name that Python takes."""
    return f"{argument}_" if keyword.iskeyword(argument) or hasattr(builtins, argument) else argument


def kind_of(kind: str) -> str:
    """Return what Python passes for a type."""
    if kind == "_Rows" or kind.endswith("* const*"):
        return "_Rows" if kind == "_Rows" else "Sequence[int]"
    return KINDS.get(kind, "int")


def stubs() -> dict[str, str]:
    """Return the texts of both stubs, before they are formatted."""
    kernels = prototypes()
    cpu = HEAD + "".join(stub(name, *kernel) for name, kernel in kernels.items()) + PHILOX
    names = "".join(f"    {name} as {name},\n" for name in sorted(set(kernels) - HOST_ONLY))
    cuda = (
        "# The kernels for CUDA: those of `_cpu`, with a stream for ``launch`` and memory of the device.\n"
        f"# Written by tools/make_stubs.py from csrc/kernels.h.\n\nfrom ._cpu import (\n{names})\n\n"
        "def device_count() -> int: ...\n"
    )
    return {"_cpu.pyi": cpu, "_cuda.pyi": cuda}


def main() -> None:
    """Write the stubs; `make format` puts them into lines."""
    for name, text in stubs().items():
        (PACKAGE / name).write_text(text)


if __name__ == "__main__":
    main()
