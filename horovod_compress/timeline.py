"""Lays timelines of several ranks, and Horovod's own, beside each other in one file.

python -m horovod_compress.timeline all.json horovod.json trace.rank0.json trace.rank1.json
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .errors import ConfigError

#: What a merged file says of itself, so that another merge may replace it.
_MERGED = {"merged by": "horovod_compress.timeline"}
_HOROVOD_START = "start_time_since_epoch_in_micros"


def merge(paths: Sequence[str | Path]) -> Iterator[dict[str, Any]]:
    """Yield the events of several timelines, Horovod's own among them, on one clock.

    Raises:
        ConfigError: one of them cannot be read, or is no timeline.
    """
    for path in paths:
        events, start = _read(Path(path))
        for event in events:
            yield event | {"ts": event["ts"] + start} if "ts" in event else event


def _read(path: Path) -> tuple[list[dict[str, Any]], float]:
    """Return a timeline's events, and when its clock began: Horovod's begins with the job, and says when."""
    try:
        text = path.read_text().strip()
        of_horovod = text.startswith("[")  # which leaves its list open
        found = json.loads(text.rstrip(",]") + "]") if of_horovod else json.loads(text)["traceEvents"]
        events = [dict(event) for event in found]
        begun = [args[_HOROVOD_START] for event in events if _HOROVOD_START in (args := _arguments(event))]
        if all(math.isfinite(number) for number in (*begun, *(event.get("ts", 0) for event in events))):
            return events, begun[0] if of_horovod and begun else 0
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        pass
    raise ConfigError(f"{path} is no timeline, neither of this package nor of Horovod")


def _arguments(event: dict[str, Any]) -> dict[str, Any]:
    return args if isinstance(args := event.get("args"), dict) else {}


def _check_target(path: Path) -> None:
    """Refuse to replace anything but what was merged before, such as the first of the timelines."""
    try:
        if not path.exists() or json.loads(path.read_text())["otherData"] == _MERGED:
            return
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ConfigError(f"{path} is there already, and no merged timeline: give first the name of the file to write")


def main(arguments: Sequence[str]) -> int:
    """Merge timelines: the file to write, then those to read; return the exit status."""
    if len(arguments) < 2:
        print("usage: python -m horovod_compress.timeline MERGED TIMELINE...", file=sys.stderr)
        return 2
    target, *timelines = arguments
    try:
        _check_target(Path(target))
        merged = json.dumps({"otherData": _MERGED, "traceEvents": list(merge(timelines))})
        Path(target).write_text(merged)
    except ConfigError as error:
        told = f"{error}"
    except (OSError, ValueError) as error:
        told = f"{target}: {getattr(error, 'strerror', error)}"
    else:
        return 0
    print(f"horovod_compress.timeline: {told}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
