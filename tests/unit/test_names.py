"""Names that the package has given up for the field's words do not come back."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "horovod_compress"

#: What was once a name here, and the word to use.
GIVEN_UP = {
    "Apart": "FakeAccelerator",
    "Bad": "NonFiniteCount",
    "Cargo": "Payload",
    "Cuda": "CudaDevice",
    "Drift": "RetuneTrigger",
    "Host": "Device",
    "Mark": "Event",
    "Meeting": "Rendezvous",
    "StandIn": "SyntheticModel",
    "Taken": "Cost",
    "apart": "is_accelerator, disjoint",
    "drift": "retune",
    "gain": "result_scale",
    "keeps_to_itself": "has_private_state",
    "mark": "record_event",
    "ragged": "all_gatherv",
    "sees": "for_step",
    "standin": "synthetic",
    "takes_over": "drains_residual",
}
#: What these words are elsewhere, in their usual sense.
USUAL = {
    ("cli/headroom.py", "gain"): "what compression gains",
    ("cli/common.py", "mark"): "what marks the processes of a job",
    ("fronts/selftest.py", "drift"): "ranks whose weights drift apart",
}


def names(tree: ast.AST) -> Iterator[str]:
    """Return the names that a module gives."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.alias):
            yield node.asname or ""
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def given_up(module: str, text: str) -> set[str]:
    """Return the names in a module, and its own, that were given up."""
    return {name.lstrip("_") for name in (module, *names(ast.parse(text)))} & set(GIVEN_UP)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_name_is_one_that_was_given_up(path: Path) -> None:
    usual = {name for at, name in USUAL if at == str(path.relative_to(PACKAGE))}
    # Equal, so that an exception goes when its name does.
    assert given_up(path.stem, path.read_text()) == usual, GIVEN_UP


def test_a_name_that_was_given_up_is_found() -> None:
    """The control."""
    text = "import x as gain\nclass Host:\n async def _mark(self, of): self.apart = 1"
    assert given_up("drift", text) == {"Host", "mark", "gain", "apart", "drift"}
