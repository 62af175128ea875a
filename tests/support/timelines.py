"""Reads timelines, and checks what viewers ask of them."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def read(path: Path) -> list[Event]:
    return json.loads(path.read_text())["traceEvents"]


def spans(events: list[Event], row: str = "", category: str = "") -> list[Event]:
    """Return the spans of a row whose name begins so, in order of their beginnings."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return [
        e for e in events
        if e["ph"] == "X" and names[e["pid"], e["tid"]].startswith(row) and e["cat"].startswith(category)
    ]  # fmt: skip


def rows(events: list[Event]) -> list[str]:
    return [e["args"]["name"] for e in events if e["name"] == "thread_name"]


def end(event: Event) -> int:
    return event["ts"] + event["dur"]


def check(events: list[Event]) -> None:
    """Every span has an end and a named row; those of a row are apart or within each other, and within their step."""
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {e["pid"] for e in events} == {e["pid"] for e in events if e["name"] == "process_name"}
    by_row: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0 and isinstance(event["ts"], int) and event["args"]["step"] >= 0
            by_row[event["pid"], event["tid"]].append(event)
    assert set(by_row) <= named
    for found in by_row.values():
        open_ends: list[int] = []
        for event in found:
            while open_ends and open_ends[-1] <= event["ts"]:
                open_ends.pop()
            assert not open_ends or end(event) <= open_ends[-1], event
            open_ends.append(end(event))
    steps = {(e["pid"], e["args"]["step"]): e for e in spans(events, "steps", "step")}
    for event in spans(events):
        step = steps.get((event["pid"], event["args"]["step"]))
        if step and event["cat"] != "wait":  # the thread that waited wakes up after the end
            assert step["ts"] <= event["ts"] and end(event) <= end(step), (event, step)
