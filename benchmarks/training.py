"""Training benchmarks: `step` times steps of well-known models, `accuracy` times training to a result.

python -m benchmarks.training step --model resnet50 ...
python -m benchmarks.training accuracy --task digits ...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

KINDS = ("step", "accuracy")
PROGRAM = "python -m benchmarks.training"


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] not in KINDS:
        asked_for_help = words[:1] in (["-h"], ["--help"])
        if asked_for_help:
            print(__doc__)
        else:
            got = f", got {words[0]!r}" if words else ""
            print(f"{program} takes {' or '.join(KINDS)} first{got}; each has --help", file=sys.stderr)
        return 0 if asked_for_help else 2
    from benchmarks import accuracy, step

    return {"step": step, "accuracy": accuracy}[words[0]].main(words[1:], f"{program} {words[0]}")


if __name__ == "__main__":
    raise SystemExit(main())
