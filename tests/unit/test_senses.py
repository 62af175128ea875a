"""A name has one sense: no class, and no module of the engine, is called what something else is called."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import horovod_compress

PACKAGE = Path(horovod_compress.__file__).parent

#: Public names that two frameworks share, and what they are.
SHARED = {"Compression": "what users create, with Horovod, with torch.distributed and of divided models"}
#: Modules that stand for each other in several rooms.
TWINS = {
    "compression": "the public classes, and what they share",
    "job": "the ranks of a job: the interface, and what it is with each framework",
    "ranks": "the ranks of a job as commands see them: likewise",
    "updates": "update mode: in the engine, and as users see it",
    "reports": "what is counted, in words: of a compression, and in files",
    "checksums": "sums that show a change: of saved states, and the operations",
    "dense": "plain numbers: as a method, as operations, and their reference",
    "signs": "signs: likewise",
    "linear": "sums and products of rows: the operations, and their reference",
    "quantise": "numbers in few bits: likewise",
    "records": "those in blocks, with a scale for each: likewise",
    "sparse": "values and their positions: likewise",
}


def classes(path: Path) -> Iterator[str]:
    """Yield the names of a module's classes."""
    yield from (node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))


def module(path: Path) -> Iterator[str]:
    """Yield the name of a module."""
    yield path.stem


def several(names: Callable[[Path], Iterable[str]], paths: Iterable[Path]) -> dict[str, list[Path]]:
    """Return the names that more than one of these files has."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        for name in names(path):
            found[name].append(path)
    return {name: where for name, where in found.items() if len(where) > 1}


def sources() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py"]


def test_a_class_has_a_name_of_its_own() -> None:
    assert set(several(classes, sources())) == set(SHARED)


def test_modules_of_one_name_stand_for_each_other() -> None:
    assert set(several(module, sources())) == set(TWINS)


def test_what_is_called_alike_is_found(tmp_path: Path) -> None:
    """The control."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same.py").write_text(f"class Same:\n    class {name.upper()}: ...\n")
    paths = sorted(tmp_path.rglob("*.py"))
    assert set(several(classes, paths)) == {"Same"} and set(several(module, paths)) == {"same"}
