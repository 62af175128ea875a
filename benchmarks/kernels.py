"""Times every kernel beside the memory's own speed and what NumPy and torch need for the same.

All cases take turns, so that each sees the same machine. GB/s counts every array once for each time
it is read and once for each time it is written: 12 bytes an element for the triad a = b + s * c, the
yardstick. Under "bfloat16", gradients and results have 2 bytes an element, residuals 4; the triad is of
float32. `wrong` counts elements of both that differ from the NumPy reference; any makes the run fail.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import results

PROGRAM = "python -m benchmarks.kernels"


def arguments(argv: Sequence[str] | None, program: str = PROGRAM) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=program,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=25_000_000, help="elements (default 25 million, which take 7 GB)")
    parser.add_argument("--threads", type=int, default=1, help="threads a kernel may use (default 1)")
    parser.add_argument("--repeat", type=int, default=15, help="measurements of each case (default 15)")
    parser.add_argument("--filter", default="", help="only cases whose name contains this, and the triad")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append JSON lines to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw bars of float32 into FILE.svg or FILE.png")
    options = parser.parse_args(argv)
    if options.plot and options.plot.suffix not in (".svg", ".png"):
        parser.error("--plot takes a file that ends in .svg or .png")
    try:
        results.check_targets(options.json, None)
    except ValueError as error:
        parser.error(str(error))
    if min(options.count, options.threads, options.repeat) < 1:
        parser.error("--count, --threads and --repeat must be at least 1")
    return options


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    options = arguments(argv, program)
    from benchmarks import kernel_table  # torch takes seconds: what is wrong is told before

    return kernel_table.run(options, argv)


if __name__ == "__main__":
    raise SystemExit(main())
