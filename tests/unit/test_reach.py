"""Whoever has a reducer is given its parts, or asks it: few places reach through it, and none changes a part."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import horovod_compress

PACKAGE = Path(horovod_compress.__file__).parent
#: Where the parts are put together.
REDUCER = PACKAGE / "engine" / "reducer.py"
PARTS = {"buckets", "context", "failure", "kept", "norms", "start", "verification"}
VALUES = {"metrics", "options", "plan"}  # these may be read by whoever has the reducer
MOST = 10


def chain(node: ast.AST) -> list[str]:
    """Return the names of ``a.b.c``, the outermost last; what stands before a call's result is left out."""
    if isinstance(node, ast.Attribute):
        return [*chain(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else []


def reaches(source: str) -> Iterator[tuple[str, bool]]:
    """Yield each place that uses something of a part of a reducer, and whether it assigns to that."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and len(names := chain(node)) > 2:
            owner, part = names[-3].lstrip("_"), names[-2]
            stored = not isinstance(node.ctx, ast.Load)
            if owner == "reducer" and (part in PARTS or (stored and part in VALUES)):
                yield ".".join(names), stored


def test_few_places_reach_through_a_reducer_and_none_assigns() -> None:
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path != REDUCER]
    found = [
        (f"{path.relative_to(PACKAGE)}: {text}", stored) for path in paths for text, stored in reaches(path.read_text())
    ]
    assert not [text for text, stored in found if stored], "add a verb to the reducer or to the part"
    assert len(found) <= MOST, [text for text, _ in found]


def test_what_counts() -> None:
    source = """
kept = self._reducer.kept
kept.scale(2)
self._reducer.kept.scale(2)
session.reducer.norms.ratio.used()
reducer.context.watch = watch
reducer.metrics.bytes_dense += reducer.metrics.bytes_sent
reducer.result_scale = reducer.options.seed
for state in reducer.buckets:
    state.finished = reducer.plan.count
"""
    assert sorted(reaches(source)) == [
        ("reducer.context.watch", True),
        ("reducer.metrics.bytes_dense", True),
        ("self._reducer.kept.scale", False),
        ("session.reducer.norms.ratio", False),
    ]
