"""The stubs of the compiled modules say what is bound: names, numbers of arguments, and their kinds."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tools import make_stubs

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, SOURCES = ROOT / "horovod_compress", ROOT / "csrc"


def bound(*patterns: str) -> set[str]:
    """Return the names that C++ sources bind."""
    text = "".join(path.read_text() for pattern in patterns for path in SOURCES.glob(pattern))
    listed = re.findall(r"\buse\((\w+)\)", (SOURCES / "kernels.h").read_text())
    return {*re.findall(r'module\.def\(\s*"(\w+)"', text), *listed}


def in_stub(name: str) -> set[str]:
    """Return the names that a stub defines or hands on."""
    found = set()
    for node in ast.parse((PACKAGE / f"{name}.pyi").read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom) and node.level:
            found |= {alias.asname or alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("name", ["_cpu", "_cuda"])
def test_a_stub_names_what_the_sources_bind(name: str) -> None:
    assert in_stub(name) == bound("bind*.h", f"bind{name}.cpp")


def test_stubs_are_as_written_from_the_list_of_kernels(tmp_path: Path) -> None:
    """The remedy is `python tools/make_stubs.py`, then `make format`."""
    for name, text in make_stubs.stubs().items():
        (tmp_path / name).write_text(text)
        assert ast.dump(ast.parse(text)) == ast.dump(ast.parse((PACKAGE / name).read_text())), name


KINDS = {"int": "SupportsInt", "float": "SupportsFloat", "bool": "bool", "_Key": "Sequence[int] | None",
         "_Rows": "Sequence[collections.abc.Sequence[int]]", "Sequence[int]": "Sequence", "_Shape": "tuple[",
         "_Scales": "FixedSize("}  # fmt: skip


def test_arguments_and_results_are_those_that_pybind11_shows() -> None:
    module = pytest.importorskip("horovod_compress._cpu")
    functions = [
        node for node in ast.parse((PACKAGE / "_cpu.pyi").read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    assert len(functions) > 50
    for function in functions:
        shown, _, result = getattr(module, function.name).__doc__.strip().rpartition(" -> ")
        kinds = re.split(r"(?:, )?arg\d+: ", shown.partition("(")[2].removesuffix(")"))[1:]
        given = [ast.unparse(argument.annotation) for argument in function.args.posonlyargs if argument.annotation]
        assert len(kinds) == len(given), function.name
        wrong = [pair for pair in zip(given, kinds, strict=True) if KINDS[pair[0]] not in pair[1]]
        assert not wrong, f"{function.name}: {wrong}"
        returned = function.returns and ast.unparse(function.returns)
        assert result.removeprefix("typing.Annotated[").partition(', "FixedSize')[0] == returned, function.name


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()
