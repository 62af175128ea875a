"""What every benchmark writes: a header record, one record per measurement, and what they share."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from horovod_compress.cli.common import milliseconds as milliseconds, table as table
from horovod_compress.errors import naming

Record = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "horovod", "horovod-compress", "numpy")


class Spread(NamedTuple):
    """A median and its quartiles, in the unit of the values."""

    median: float
    q1: float
    q3: float
    count: int  # type: ignore[assignment]


def spread(values: Sequence[float]) -> Spread:
    """Return median and quartiles; of one value, that value three times.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values to take a median of")
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, q1, q3, len(values))


def spread_fields(name: str, values: Sequence[float]) -> Record:
    """Return the fields of a record: ``median_NAME``, ``q1_NAME``, ``q3_NAME`` and all values as ``NAME``."""
    found = spread(values)
    return {f"median_{name}": found.median, f"q1_{name}": found.q1, f"q3_{name}": found.q3, name: list(values)}


# ---- the header -------------------------------------------------------------------------------


def header(bench: str, argv: Sequence[str] | None = None, **more: Any) -> Record:
    """Return the first record of a run: where, with what and how it was made."""
    return {
        "bench": bench,
        "name": "header",
        "commit": commit(),
        "command": command(bench, argv),
        "machine": machine(),
        "versions": versions(),
        **more,
    }


def command(bench: str, argv: Sequence[str] | None) -> list[str]:
    """Return the command without the folders it was found in, which say nothing to others."""
    words = sys.argv[1:] if argv is None else list(argv)
    return ["python", "-m", f"benchmarks.{bench}", *words]


def commit() -> str | None:
    """Return the commit of this checkout, with a + where files differ from it; None outside of git."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    with suppress(OSError):
        if found := git("rev-parse", "HEAD"):
            return found + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    return None


def machine() -> Record:
    return {"processor": processor(), "cores": os.cpu_count(), "system": platform.platform()}


def processor() -> str:
    """Return the processor's name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def versions() -> dict[str, str]:
    """Return the versions that decide the numbers."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


# ---- files ------------------------------------------------------------------------------------


def append_json(path: Path, records: Iterable[Record]) -> None:
    """Append records to a file of JSON lines, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), path.open("a") as file:
        file.writelines(json.dumps(plain(record), allow_nan=False) + "\n" for record in records)


def read_json(path: Path) -> list[Record]:
    """Return the records of a file of JSON lines.

    Raises:
        ValueError: there is no such file, or it holds something else.
    """
    try:
        found = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValueError as error:  # no JSON, or no text
        raise ValueError(f"{path} should hold the records of a benchmark, a line of JSON each: {error}") from None
    if not found or not all(isinstance(record, dict) for record in found):
        raise ValueError(f"{path} should hold the records of a benchmark, as --json FILE writes them")
    return found


def check_targets(json: Path | None, plot: Path | None) -> None:
    """Refuse, before anything is measured, what could not be written after it.

    Raises:
        ValueError: names the option.
    """
    if json is not None and json.is_dir():
        raise ValueError(f"--json takes a file to append to, {json} is a folder")
    if plot is not None and plot.exists() and not plot.is_dir():
        raise ValueError(f"--plot takes a folder, {plot} is a file")
    for option, path in (("--json", json), ("--plot", plot)):
        if path is not None and path.exists() and os.access(path, os.W_OK):
            continue  # such as /dev/stdout: what is there already needs no right to its folder
        parents = [parent for parent in (path.parents if path else ()) if parent.exists()]
        if parents and not (parents[0].is_dir() and os.access(parents[0], os.W_OK)):
            raise ValueError(f"{option} {path} cannot be made in {parents[0]}")


def plain(value: Any) -> Any:
    """Return a value as JSON knows it; numbers that are not finite become None."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "item"):  # tensor and NumPy scalars
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


# ---- tables -----------------------------------------------------------------------------------


def size_text(count: float) -> str:
    """Return a number of bytes in the unit that leaves a short number."""
    for unit in ("B", "kB", "MB"):
        if abs(count) < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def near_square(count: int) -> tuple[int, int]:
    """Return the rows and columns of the matrix nearest to a square that has so many elements."""
    rows = math.isqrt(count)
    while count % rows:
        rows -= 1
    return rows, count // rows
