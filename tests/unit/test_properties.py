"""What a method says of itself is little, and each part of it tells several methods apart."""

from __future__ import annotations

import ast
import dataclasses
from collections import defaultdict
from pathlib import Path

import horovod_compress
from horovod_compress.codecs.base import Codec, Properties

CODECS = Path(horovod_compress.__file__).parent / "codecs"
FIELDS = [field.name for field in dataclasses.fields(Properties)]
#: What is true of a class with any options is said by a class variable instead.
OF_A_CLASS = ("batched", "divides_itself", "counts_late", "drains_residual", "exact_first", "folded")


def setters() -> dict[str, set[str]]:
    """Return the classes that give each field of ``Properties`` a value."""
    found = defaultdict(set)
    for path in CODECS.rglob("*.py"):
        for kind in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)):
            for call in (node for node in ast.walk(kind) if isinstance(node, ast.Call)):
                made = isinstance(call.func, ast.Name) and call.func.id == "Properties"
                if made or (ast.unparse(call).startswith("replace(") and "properties()" in ast.unparse(call.args[0])):
                    given = FIELDS[: len(call.args)] if made else []
                    for name in (*given, *(word.arg for word in call.keywords)):
                        found[str(name)].add(kind.name)
    return found


def test_every_property_has_several_setters() -> None:
    found = setters()
    assert found.keys() == set(FIELDS) and len(FIELDS) <= 11
    assert {name: kinds for name, kinds in found.items() if len(kinds) < 2} == {}


def test_what_is_true_of_a_class_is_no_property() -> None:
    assert not set(OF_A_CLASS) & set(FIELDS) and all(hasattr(Codec, name) for name in OF_A_CLASS)
