"""Modules and classes stay small enough to be read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import horovod_compress
from horovod_compress.codecs.base import Codec

PACKAGE = Path(horovod_compress.__file__).parent

#: Lines of a module; public methods of a class, which a reader has to know; and attributes that it gives itself.
MOST = {"lines": 400, "methods": 20, "attributes": 17}
#: Methods of the interface that every compression method fills in.
MOST_OF_A_CODEC = 10


def sizes(name: str, source: str) -> Iterator[tuple[str, str, int]]:
    """Yield what, of which kind, and how much of it, for a module and its classes."""
    yield name, "lines", len(source.splitlines())
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            methods = [inner for inner in node.body if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef))]
            public = {method.name for method in methods if not method.name.startswith("_")}  # a setter is no other
            yield f"{name} {node.name}", "methods", len(public)
            yield f"{name} {node.name}", "attributes", len(set(attributes(node)))


def attributes(node: ast.AST) -> Iterator[str]:
    """Yield every name that a class assigns as ``self.name``; those of classes inside it are theirs."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and ast.unparse(inner.value) == "self":
            yield inner.attr
        if not isinstance(inner, ast.ClassDef):
            yield from attributes(inner)


@cache
def found() -> dict[tuple[str, str], int]:
    """Return all sizes of the package."""
    paths = sorted(PACKAGE.rglob("*.py"))
    each = (sizes(path.relative_to(PACKAGE).as_posix(), path.read_text()) for path in paths)
    return {(what, kind): number for module in each for what, kind, number in module}


def test_modules_and_classes_are_small() -> None:
    over = {key: number for key, number in found().items() if number > MOST[key[1]]}
    assert not over, "divide them: each has a part that stands by itself"


def test_a_codec_has_to_say_little() -> None:
    """One form for every operation: what would be an eleventh method is a property, or a field of the layout."""
    public = [name for name, value in vars(Codec).items() if callable(value) and not name.startswith("_")]
    assert len(public) <= MOST_OF_A_CODEC, public


def test_what_is_counted() -> None:
    source = """
class A:
    shared = 1

    def __init__(self):
        self.a, self._b = 1, 2
        self.c: int = 3
        self.a += 1
        other.d = self.e

    async def f(self):
        with f() as self.g:
            [self.h] = []

    class B:
        def __init__(self):
            self.i = 1
"""
    counted = {(what, kind): number for what, kind, number in sizes("m.py", source)}
    expected = {
        "m.py": {"lines": 17},
        "m.py A": {"methods": 1, "attributes": 5},
        "m.py B": {"methods": 0, "attributes": 1},
    }
    assert counted == {(what, kind): number for what, each in expected.items() for kind, number in each.items()}
