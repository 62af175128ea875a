"""Lays timelines of several ranks, and Horovod's own, beside each other in one file.

python -m horovod_compress.timeline all.json horovod.json trace.rank0.json trace.rank1.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_HOROVOD_START = "start_time_since_epoch_in_micros"


def merge(paths: Sequence[str | Path]) -> Iterator[dict[str, Any]]:
    """Yield the events of several timelines, Horovod's own among them, on one clock."""
    for path in paths:
        events = _read(Path(path))
        # Horovod counts from its start, and says when that was.
        start = next((e["args"][_HOROVOD_START] for e in events if _HOROVOD_START in e.get("args", {})), 0)
        for event in events:
            yield event | {"ts": event["ts"] + start} if "ts" in event else event


def _read(path: Path) -> list[dict[str, Any]]:
    text = path.read_text().strip()
    if text.startswith("["):  # Horovod leaves its list open
        found: list[dict[str, Any]] = json.loads(text.rstrip(",]") + "]")
        return found
    return list(json.loads(text)["traceEvents"])


def main(arguments: Sequence[str]) -> int:
    """Merge timelines: the file to write, then those to read."""
    if len(arguments) < 2:
        print("usage: python -m horovod_compress.timeline MERGED TIMELINE...", file=sys.stderr)
        return 2
    Path(arguments[0]).write_text(json.dumps({"traceEvents": list(merge(arguments[1:]))}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
