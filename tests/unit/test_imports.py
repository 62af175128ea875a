"""Dependencies run one way: between the rooms of the package, inside them, and between the repository's folders."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

import horovod_compress

PACKAGE = Path(horovod_compress.__file__).parent
ROOT = PACKAGE.parent
NAME = PACKAGE.name

#: From the top down. A room may import what lies below its layer; rooms of one layer do not know each other.
LAYERS = [
    {"torch", "ddp", "fsdp", "timeline", "cli"},
    {"fronts"},
    {"engine"},
    {"codecs", "exchange", "observe"},
    {"options"},
    {"ops", "schedule"},
    {"errors", "known", "building", "_cpu", "_cuda"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

#: What both fronts share.
FRONTS = {f"fronts.{name}" for name in ("compression", "factories", "gather", "local_ranks", "ranks", "reports")}
FRONTS |= {f"fronts.{name}" for name in ("optim", "saving", "scale", "selftest", "session", "startup", "steps")}
FRONTS |= {"fronts.copies", "fronts.fresh", "fronts.update_options", "fronts.updates"}
#: What a room inside a room may import of the rest of that room.
INNER = {
    "cli.plan": {"cli.common"},
    "codecs.shared": {"codecs.base", "codecs.work"},
    "engine.agreement": {"engine.methods"},
    "engine.bucket": set(),
    "engine.optimizer": {
        "engine.agreement",
        "engine.kept",
        "engine.methods",
        "engine.norms",
        "engine.reducer",
        "engine.saved",
        "engine.shards",
    },
    "engine.saved": {"engine.bucket", "engine.methods", "engine.ratio", "engine.reducer"},
    "exchange.transports": {"exchange.device"},
    "fronts.horovod": FRONTS,
    "fronts.torch_dist": FRONTS,
    "fronts.fsdp": FRONTS | {"fronts.torch_dist"},
    "ops.reference": {"ops.keys"},
}
#: These import nothing else of their room: all of it may use them.
GROUND = {"exchange.device", "ops.algebra", "ops.keys", "schedule.costs", "schedule.plan"}
#: What a codec may use of its room.
FOR_CODECS = {
    "codecs.base",
    "codecs.dense",
    "codecs.registry",
    "codecs.shared",
    "codecs.work",
}

HOROVOD = "fronts.horovod"
ALSO_HOROVOD = {"errors"}  # for the class of its error, which needs no framework
EXTENSIONS = {f"{NAME}._cpu", f"{NAME}._cuda"}
MOST_AT_THE_TOP = 8
#: Rooms that offer something themselves, beside saying what belongs there.
OFFER = {"cli", "codecs", "ops", "ops.reference", "cli.plan"}

#: What the folders of the repository may import of each other.
FOLDERS = {
    "horovod_compress": set(),
    "tools": {"horovod_compress"},
    "benchmarks": {"horovod_compress"},
    "examples": {"horovod_compress", "benchmarks"},
    "tests": {"horovod_compress", "benchmarks", "examples", "tools"},
}
#: Their files see each other as scripts do: by their bare names.
FLAT = {"examples", "tools"}


def name_of(path: Path) -> str:
    """Return the name that a file of the repository is imported by."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    parts = parts[1:] if parts[0] in FLAT else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def files() -> dict[str, Path]:
    """Return all Python files of the repository by the names of their modules."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found = {name_of(path): path for path in paths}
    assert len(found) == len(paths), "two files have one name"
    return found


def imports_of(tree: ast.AST, package: list[str], known: Iterable[str]) -> set[str]:
    """Return the modules that a module in ``package`` imports, also inside functions and by ``import_module``.

    Of ``from a import b`` that is a.b where this is a module, else a. A module does not import the packages it is in.
    """
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            full = ".".join([*base, *([node.module] if node.module else [])])
            names = {f"{full}.{alias.name}" for alias in node.names}
            found |= {name if name in known or full == "horovod" else full for name in names}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                found.add(str(node.args[0].value))
    return found


@cache
def graph() -> dict[str, set[str]]:
    """Return what every module of the repository imports."""
    known = {*files(), *EXTENSIONS}
    found = {}
    for name, path in files().items():
        package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        found[name] = imports_of(ast.parse(path.read_text()), package, known) - {name}
    return found


def inside(name: str) -> str:
    """Return a name without that of the package: ``codecs.marsit``; of other modules nothing."""
    return name.removeprefix(f"{NAME}.") if name.startswith(f"{NAME}.") else ""


def room(name: str) -> str:
    """Return the room of a module of the package: ``codecs`` for ``codecs.shared.signs``."""
    return name.partition(".")[0]


def within(name: str, rooms: Iterable[str]) -> bool:
    """Return whether a module is one of these, or lies in one."""
    return any(name == other or name.startswith(f"{other}.") for other in rooms)


@cache
def ours() -> dict[str, set[str]]:
    """Return what every module of the package imports from it."""
    return {inside(name): {inside(other) for other in used} - {""} for name, used in graph().items() if inside(name)}


# Of names only: each process that collects tests would parse the whole repository.
MODULES = [inside(name) for name in files() if inside(name)]
ROOMS = [name for name in MODULES if files()[f"{NAME}.{name}"].name == "__init__.py"]


def upward(module: str, used: Iterable[str]) -> set[str]:
    """Return what a module of the package imports and must not, as it is not below its layer."""
    return {name for name in used if room(name) != room(module) and LEVEL[room(name)] <= LEVEL[room(module)]}


def sideways(module: str, used: Iterable[str]) -> set[str]:
    """Return what a module in an inner room imports of the room around it and must not."""
    inner = next((name for name in INNER if within(module, [name])), None)
    own = [name for name in used if room(name) == room(module) and name != room(module)]
    if module in GROUND:
        return {name for name in own if name not in GROUND}
    return {name for name in own if not within(name, {inner, *INNER[inner]})} if inner else set()


# ---- the tables of this file ------------------------------------------------------------------


def test_these_tables_name_only_what_there_is() -> None:
    stubs = {path.stem for path in PACKAGE.glob("*.pyi")}
    named = {*LEVEL, *INNER, *(name for names in INNER.values() for name in names), *GROUND, *FOR_CODECS}
    named |= {HOROVOD, *ALSO_HOROVOD, *OFFER, *map(inside, EXTENSIONS)}
    assert named <= {*MODULES, *stubs}
    assert {*FLAT, *(name for names in FOLDERS.values() for name in names)} <= set(FOLDERS)
    assert all((ROOT / folder).is_dir() for folder in FOLDERS)


def test_every_module_has_a_place() -> None:
    assert len(MODULES) > 100
    assert {room(module) for module in MODULES} <= set(LEVEL)
    assert {name for name in ROOMS if "." in name} == set(INNER)
    assert all((path.parent / "__init__.py").exists() for path in PACKAGE.rglob("*.py"))


def test_few_modules_lie_outside_the_rooms() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_AT_THE_TOP


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_says_what_belongs_there(name: str) -> None:
    said, *rest = ast.parse(files()[f"{NAME}.{name}"].read_text()).body
    assert isinstance(said, ast.Expr) and isinstance(said.value, ast.Constant) and isinstance(said.value.value, str)
    assert bool(rest) == (name in OFFER)


# ---- the package ------------------------------------------------------------------------------


@pytest.mark.parametrize("module", MODULES)
def test_dependencies_run_one_way(module: str) -> None:
    assert not upward(module, ours()[module]) and not sideways(module, ours()[module])


@pytest.mark.parametrize("module", [name for name in MODULES if room(name) == "codecs" and name not in ROOMS])
def test_methods_do_not_import_each_other(module: str) -> None:
    siblings = {name for name in ours()[module] if room(name) == "codecs"}
    assert not {name for name in siblings if not within(name, FOR_CODECS)}


def test_horovod_is_imported_in_its_front_only() -> None:
    users = {inside(m) for m in graph() if inside(m) and any(within(n, ["horovod"]) for n in graph()[m])}
    assert users and {name for name in users if not within(name, [HOROVOD])} <= ALSO_HOROVOD
    bound = {inside(m) for m in graph() if inside(m) and any(within(n, ["horovod.torch"]) for n in graph()[m])}
    assert bound and all(within(name, [HOROVOD]) for name in bound)


def test_extensions_are_imported_by_operations_only() -> None:
    for module, used in ours().items():
        assert room(module) == "ops" or not set(map(inside, EXTENSIONS)) & used, module


# ---- the repository ---------------------------------------------------------------------------


def cycles(used: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, by whatever way (Tarjan, SIAM J. Comput. 1, 1972)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = lowest[name] = len(number)
        path.append(name)
        for other in sorted(used[name] & set(used)):
            if other not in number:
                visit(other)
            if other in path:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == number[name]:
            at = path.index(name)
            found.append(path[at:])
            del path[at:]

    for name in used:
        if name not in number:
            visit(name)
    return [group for group in found if len(group) > 1]


def test_no_module_of_the_repository_imports_itself_round_a_corner() -> None:
    assert cycles(graph()) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_import_what_they_may(folder: str) -> None:
    place = {name: path.relative_to(ROOT).parts[0] for name, path in files().items()}
    for module, used in graph().items():
        if place[module] == folder:
            assert {place[name] for name in used if name in place} <= {folder, *FOLDERS[folder]}, module


# ---- controls ---------------------------------------------------------------------------------


def test_the_walk_sees_what_it_must() -> None:
    source = """
import horovod.torch as hvd
from ..exchange import ring, wire
def f():
    from . import dense
    from .base import Codec
    importlib.import_module("horovod.common")
"""
    found = imports_of(ast.parse(source), [NAME, "codecs"], files())
    here = {f"{NAME}.{name}" for name in ("exchange.ring", "exchange.wire", "codecs.dense", "codecs.base")}
    assert found == here | {"horovod.torch", "horovod.common"}
    assert imports_of(ast.parse("from horovod import torch"), [], ()) == {"horovod.torch"}
    assert "codecs.dense" in ours()["codecs.marsit"] and "ops" in ours()["exchange.wire"]
    assert "engine.reducer" in ours()["fronts.startup"]


@pytest.mark.parametrize(
    ("module", "used"),
    [
        ("codecs.topk", "exchange.ring"),
        ("exchange.choose", "codecs.base"),
        ("schedule.plan", "ops.keys"),
        ("engine.reducer", "cli.plan.network"),
        ("observe.trace", "engine.reducer"),
        ("fronts.horovod.private", "cli.command"),
    ],
)
def test_a_room_that_is_not_below_is_noticed(module: str, used: str) -> None:
    assert {module, used} <= set(MODULES) and upward(module, {used})


@pytest.mark.parametrize(
    ("module", "used"),
    [
        ("exchange.transports.gloo", "exchange.wire"),
        ("exchange.device", "exchange.collective"),
        ("schedule.plan", "schedule.trial"),
        ("engine.agreement.notes", "engine.reducer"),
    ],
)
def test_an_inner_room_that_looks_out_is_noticed(module: str, used: str) -> None:
    assert {module, used} <= set(MODULES) and sideways(module, {used})


def test_cycles_are_found() -> None:
    used = {"a": {"b"}, "b": {"c", "elsewhere"}, "c": {"a"}, "d": {"a", "e"}, "e": {"d"}, "f": {"a"}}
    assert sorted(map(sorted, cycles(used))) == [["a", "b", "c"], ["d", "e"]]


# ---- what running shows -----------------------------------------------------------------------


def test_the_package_alone_imports_neither_torch_nor_horovod() -> None:
    import subprocess

    script = f"import sys, {NAME}, {NAME}.cli; print([m for m in ('torch', 'horovod') if m in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "[]"


def test_operations_are_found_by_their_former_name() -> None:
    with pytest.warns(DeprecationWarning, match="is horovod_compress.ops now"):
        former = getattr(horovod_compress, "kernels")  # noqa: B009  as `from horovod_compress import kernels` does
    assert former is sys.modules[f"{NAME}.ops"]
    assert not hasattr(horovod_compress, "no_such_room")


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
