"""Nothing that comes from the network or from a disk is ever executed: the package unpickles nothing."""

from __future__ import annotations

import ast
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import horovod_compress
from horovod_compress.errors import CorruptFrameError

PACKAGE = Path(horovod_compress.__file__).parent
#: Modules that execute what they read.
BANNED_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "copyreg",
    "yaml",
}
#: Functions that do, by their last name; Horovod's and torch's take and give objects through pickles.
BANNED_CALLS = {
    "eval", "exec", "compile", "Unpickler",
    "allgather_object", "broadcast_object", "broadcast_optimizer_state", "all_gather_object", "broadcast_object_list",
    "gather_object", "scatter_object_list",
}  # fmt: skip
#: What compiles text of its own: a table's rows, nothing that was read.
COMPILES = {"ops/dispatch.py": ["exec", "compile"]}


def banned(source: str) -> Iterator[str]:
    """Return what a module must not have."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in BANNED_MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in BANNED_MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            yield from _banned_call(node)


def _banned_call(node: ast.Call) -> Iterator[str]:
    called = node.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    of = getattr(called.value, "id", "") if isinstance(called, ast.Attribute) else ""
    weights_only = any(k.arg == "weights_only" and getattr(k.value, "value", None) is True for k in node.keywords)
    if of == "torch" and name == "load" and not weights_only:
        yield "torch.load without weights_only=True"
    if of in ("np", "numpy") and name == "load":
        yield "numpy.load"
    if name in BANNED_CALLS and of not in ("re", "optimizer", "torch"):
        yield f"{of}.{name}" if of else name
    first = node.args[0] if node.args else None
    if name in ("import_module", "__import__") and isinstance(first, ast.Constant):
        yield from {str(first.value).split(".")[0]} & BANNED_MODULES


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_executes_what_it_reads(path: Path) -> None:
    assert list(banned(path.read_text())) == COMPILES.get(path.relative_to(PACKAGE).as_posix(), [])


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import marshal as m",
        "import importlib\nimportlib.import_module('dill')",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path)",
        "hvd.allgather_object(x, name='y')",
        "from horovod.torch import allgather_object\nallgather_object(x)",
        "hvd.broadcast_object(x)",
        "eval(text)",
        "dist.broadcast_object_list(x)",
    ],
)
def test_the_walk_sees_what_it_must(source: str) -> None:
    assert list(banned(source))


def test_the_walk_lets_pass_what_it_may() -> None:
    text = "import json\ntorch.load(p, weights_only=True)\nre.compile(x)\nself.gather(x)\n"
    assert list(banned(text)) == []


gather = pytest.importorskip("horovod_compress.fronts.gather")  # which needs torch

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 60), 1 << 60) | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(PLAIN, min_size=1, max_size=4))
def test_values_of_all_ranks_come_as_they_were(values: list[object]) -> None:
    joined = b"".join(map(gather.pack, values))
    assert gather.unpack(joined, len(values)) == json.loads(json.dumps(values))


@given(
    st.binary(max_size=200) | st.lists(st.binary(max_size=30), max_size=3).map(gather._MAGIC.join), st.integers(1, 3)
)
def test_anything_else_is_refused_in_words(data: bytes, ranks: int) -> None:
    with pytest.raises(CorruptFrameError):
        gather.unpack(data, ranks)


def test_every_flipped_bit_and_every_cut_is_refused() -> None:
    joined = gather.pack({"plan": [1, 2.5, None]}) + gather.pack([])
    for bit in range(8 * len(joined)):
        changed = bytearray(joined)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptFrameError):
            gather.unpack(bytes(changed), 2)
    for size in range(len(joined)):
        with pytest.raises(CorruptFrameError):
            gather.unpack(joined[:size], 2)
    huge = struct.pack("<4sIQ", gather._MAGIC, 0, 1 << 63)
    with pytest.raises(CorruptFrameError):
        gather.unpack(huge, 1)
