"""What type checkers see: written from the codecs' options, the same at run time, and there in an editable install."""

from __future__ import annotations

import ast
import dataclasses
import os
import shutil
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from horovod_compress import known
from horovod_compress.codecs import registry
from horovod_compress.errors import ConfigError
from horovod_compress.observe.metrics import CounterValues, Hidden, Metrics, Overlap
from horovod_compress.options import Options
from tools import make_types

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "horovod_compress"
KINDS = [*map(registry.codec_class, registry.methods()), Options]


@pytest.mark.parametrize("path", make_types.files(), ids=str)
def test_stubs_are_as_written_from_the_options(path: Path) -> None:
    """The remedy is `python tools/make_types.py`, then `make format`."""
    assert ast.dump(ast.parse(make_types.files()[path])) == ast.dump(ast.parse((PACKAGE / path).read_text())), path


def test_names_are_those_of_the_methods() -> None:
    assert list(typing.get_args(known.MethodName)) == registry.available()
    assert list(known.OPTIONS) == registry.methods()
    for name, options in known.OPTIONS.items():
        assert list(options) == registry.option_names(name)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(getattr(kind, "name", "all methods")))
def test_an_option_takes_the_words_of_its_type_and_no_others(kind: Any) -> None:
    for option, hint in make_types.options_of(kind).items():
        words = [value for part in (hint, *typing.get_args(hint)) for value in typing.get_args(part)]
        words = [value for value in words if isinstance(value, (str, int)) and not isinstance(value, type)]
        for word in words:
            assert any(_takes(kind, {**sample, option: word}) for sample in ({}, *getattr(kind, "samples", ()))), word
        if option not in ("schedule", "exchange"):  # words with numbers in them
            assert not _takes(kind, {option: "nothing"})
            assert str not in (hint, *typing.get_args(hint)), f"{option}: say by a Literal which words it takes"


def _takes(kind: Any, options: dict[str, Any]) -> bool:
    try:
        kind(**options)
    except ConfigError:
        return False
    return True


def test_counters_have_the_keys_of_their_types() -> None:
    assert set(Metrics().document()) == set(typing.get_type_hints(CounterValues))
    assert set(Overlap().document()) == set(typing.get_type_hints(Hidden))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with our pyproject.toml, and nothing to compile."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in ("README.md", "LICENSE"):
        (tmp_path / name).write_text("")
    for folder in ("horovod_compress/inner", "tests", "tools"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").touch()
    for name in ("__init__.py", "py.typed", "top.pyi", "inner/types.pyi"):
        (tmp_path / "horovod_compress" / name).touch()
    return tmp_path


def _built(project: Path, what: str) -> Path:
    """Return the contents of what pip would install."""
    build = f"from setuptools.build_meta import {what}; print({what}('.'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shutil.unpack_archive(project / done.stdout.split()[-1], project / "contents", "zip")
    return project / "contents"


def test_an_editable_install_is_a_path(project: Path) -> None:
    """Type checkers read .pth files, and run no import hook."""
    contents = _built(project, "build_editable")
    (path,) = contents.glob("*.pth")
    assert Path(path.read_text().strip()).samefile(project)
    assert not list(contents.glob("*.py"))


def test_a_wheel_has_all_stubs(project: Path) -> None:
    package = _built(project, "build_wheel") / "horovod_compress"
    found = {path.relative_to(package).as_posix() for path in package.rglob("*") if path.suffix in (".pyi", ".typed")}
    assert found == {"py.typed", "top.pyi", "inner/types.pyi"}


WRONG = """
import torch
import horovod_compress.ddp as hvc

named = list(torch.nn.Linear(3, 4).named_parameters())
hvc.Compression.topk(named, ratio=0.1)
hvc.Compression.marsit(named, merge="shapd")
hvc.Compression.create("masrit", named)
hvc.Compression.create("topk", named, ratio=0.1)
hvc.Compression.per_layer({"*": "masrit"}, named)
hvc.Compression.topk(named, process_set=None)
hvc.Compression.topk(named, transport="glooo")
hvc.method("masrit")
hvc.method("topk", ratio=0.1)
hvc.masked("masrit")
hvc.Compression.topk(named).stats()["bytes_snt"]
"""
RIGHT = """
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel

import horovod_compress.ddp as hvc

model = torch.nn.Linear(3, 4)
named = list(model.named_parameters())
options: dict[str, Any] = {"density": 0.1}
name: str = "topk"
compression: hvc.Compression = hvc.Compression.topk(named, density=0.1, timeout=3, schedule="size:25MB")
hvc.Compression.marsit(model.named_parameters(), merge="sampled", step_size=0.5, process_group=None)
hvc.Compression.create("marsit", named, merge="shaped", exchange="torus:2")
hvc.Compression.create(cast(hvc.MethodName, name), named, **options)
hvc.Compression.create(hvc.available()[0], named)
hvc.Compression.create(hvc.by_step({0: "none", 5: hvc.method("topk", density=0.1)}), named)
hvc.Compression.per_layer({"a": hvc.masked("signsgd"), "b": "none", "*": hvc.method("powersgd", rank=2)}, named)
compression.register(DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1))
sent: int = compression.stats()["bytes_sent"]
hidden: float = compression.stats()["overlap_seconds"]["hidden"]
everything: hvc.Stats = compression.stats()
"""


@pytest.mark.slow
def test_mypy_refuses_wrong_calls_and_takes_right_ones(tmp_path: Path) -> None:
    """In a program of a user, as `mypy --strict` sees an installed package: by its py.typed, and silent inside it."""
    pytest.importorskip("mypy")
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "right.py").write_text(RIGHT)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache", "wrong.py", "right.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    wrong = [line.partition(": error: ")[0] for line in done.stdout.splitlines() if ": error: " in line]
    first = WRONG.splitlines().index("hvc.Compression.topk(named, ratio=0.1)") + 1
    assert wrong == [f"wrong.py:{line}" for line in range(first, len(WRONG.splitlines()) + 1)], done.stdout


def test_every_field_of_an_option_has_a_type() -> None:
    for kind in KINDS:
        assert list(make_types.options_of(kind)) == [field.name for field in dataclasses.fields(kind)]
