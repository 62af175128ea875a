"""Dependencies run one way; the whole package is walked."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import horovod_compress

PACKAGE = Path(horovod_compress.__file__).parent
NAME = PACKAGE.name

# A module may import modules of its own layer and of those below it. A package counts as a whole.
LAYERS = [
    {
        "torch",
        "update",
        "update_schedule",
        "update_moment",
        "second_moment",
        "heavy_ball",
        "held",
        "rates",
        "_start",
        "_horovod",
        "_headroom",
        "cli",
        "verbs",
        "checkpoint",
        "handshake",
        "way",
        "check_build",
        "elastic",
        "planning",
        "_plan_trial",
    },
    {"reducer", "station", "tuning", "trace", "uneven", "weights"},
    {
        "arrivals",
        "carry",
        "codecs",
        "collectives",
        "plan",
        "schedule",
        "options",
        "feedback",
        "methods",
        "help_text",
        "watch",
        "timeline",
        "shapes",
        "parameters",
        "staging",
    },
    {
        "kernels",
        "transports",
        "wire",
        "keys",
        "deadline",
        "worker",
        "metrics",
        "drift",
        "spoilt",
        "overlap",
        "device",
        "rollcall",
    },
    {"errors", "ranks", "_cpu", "_cuda"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
HOROVOD = {"torch", "_start", "_horovod", "_headroom", "elastic", "_plan_trial"}
CODECS_MAY_SHARE = {"base", "registry", "dense", "dithering", "sections", "signs", "gathered_signs"}


def modules() -> dict[str, set[str]]:
    """Return what every module of the package imports, with full names."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = [NAME, *path.relative_to(PACKAGE).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        if is_package:
            parts.pop()
        found[".".join(parts)] = imports_of(ast.parse(path.read_text()), parts if is_package else parts[:-1])
    return found


def imports_of(tree: ast.AST, package: list[str]) -> set[str]:
    """Return the imports of a module in ``package``, those inside functions included."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            full = ".".join([*base, *([node.module] if node.module else [])])
            found |= {full, *(f"{full}.{alias.name}" for alias in node.names)}
    return found


def part(module: str) -> str:
    """Return the part of the package that a module belongs to: ``codecs`` for ``x.codecs.marsit``."""
    return module.split(".")[1] if module.count(".") else ""


MODULES = modules()


def ours(imports: set[str]) -> set[str]:
    """Return the parts of the package among imports."""
    return {part(name) for name in imports if name.startswith(f"{NAME}.") and part(name) in LEVEL}


def test_every_module_has_a_place() -> None:
    assert len(MODULES) > 30
    assert {part(module) for module in MODULES} - {""} <= set(LEVEL)


@pytest.mark.parametrize("module", [name for name in MODULES if name != NAME])
def test_dependencies_run_one_way(module: str) -> None:
    upward = {name for name in ours(MODULES[module]) if LEVEL[name] < LEVEL[part(module)]}
    assert not upward, f"{module} imports {upward}"


@pytest.mark.parametrize("module", [name for name in MODULES if part(name) == "codecs"])
def test_codecs_import_neither_transports_nor_each_other(module: str) -> None:
    assert not ours(MODULES[module]) & {"transports", "wire", "collectives", "schedule"}
    codecs = f"{NAME}.codecs."
    siblings = {name.removeprefix(codecs).split(".")[0] for name in MODULES[module] if name.startswith(codecs)}
    files = {path.stem for path in (PACKAGE / "codecs").glob("*.py")}
    assert (siblings & files) - {module.rpartition(".")[2]} <= CODECS_MAY_SHARE


def test_horovod_is_imported_where_it_is_used_only() -> None:
    users = {part(m) for m, names in MODULES.items() if any(n.startswith("horovod.torch") for n in names)}
    assert users and users <= HOROVOD | {"verbs"}
    every = {part(m) for m, names in MODULES.items() if any(n.split(".")[0] == "horovod" for n in names)}
    assert every <= HOROVOD | {"errors", "check_build", "verbs"}


def test_extensions_are_imported_by_the_kernels_only() -> None:
    for module, names in MODULES.items():
        if part(module) not in ("kernels", "check_build"):
            assert not {f"{NAME}._cpu", f"{NAME}._cuda"} & names, module


def test_the_walk_sees_what_it_must() -> None:
    """The positive control of the tests above."""
    source = "import horovod.torch as hvd\nfrom ..transports import gloo\ndef f():\n    from . import dense\n"
    found = imports_of(ast.parse(source), [NAME, "codecs"])
    assert "horovod.torch" in found and f"{NAME}.codecs.dense" in found
    assert ours(found) >= {"transports", "codecs"}
    assert f"{NAME}.codecs.dense" in MODULES[f"{NAME}.codecs.marsit"]
    assert "kernels" in ours(MODULES[f"{NAME}.wire"]) and "reducer" in ours(MODULES[f"{NAME}._start"])


def test_the_package_alone_imports_neither_torch_nor_horovod() -> None:
    import subprocess

    script = f"import sys, {NAME}, {NAME}.cli; print([m for m in ('torch', 'horovod') if m in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "[]"


@pytest.mark.slow
def test_any_codec_may_be_imported_first() -> None:
    import subprocess

    script = f"""
import importlib, sys
for codec in {sorted(path.stem for path in (PACKAGE / "codecs").glob("*.py") if path.stem != "__init__")}:
    for name in [name for name in sys.modules if name.startswith("{NAME}.codecs")]:
        del sys.modules[name]
    importlib.import_module(f"{NAME}.codecs.{{codec}}")
    print(len(importlib.import_module("{NAME}.codecs.registry").available()))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    counts = {int(line) for line in ended.stdout.split()}
    assert len(counts) == 1 and counts.pop() >= 4
