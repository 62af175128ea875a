"""What the source distribution has to contain, and metadata that agree with the rest of the project."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import build_wheel

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_what_an_archive_lacks_is_named(tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text("")
    archive = tmp_path / "a-1.tar.gz"
    with tarfile.open(archive, "w:gz") as opened:
        opened.add(tmp_path / "setup.py", "a-1/setup.py")
    assert build_wheel.missing(["setup.py"], build_wheel.names(archive)) == []
    assert build_wheel.missing(["setup.py", "csrc/bind.h"], build_wheel.names(archive)) == ["csrc/bind.h"]


def test_without_git_no_file_is_tracked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build_wheel.tracked() == []


def test_every_tracked_file_is_in_the_source_distribution(tmp_path: Path) -> None:
    tracked = build_wheel.tracked()
    if not tracked:
        pytest.skip("no git checkout")
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("no setuptools")
    # setuptools' own list, without building: the metadata command writes SOURCES.txt from MANIFEST.in.
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    written = next(tmp_path.glob("*/SOURCES.txt")).read_text().splitlines()
    listed = {line.removeprefix("./") for line in written}  # package-dir is "."
    assert build_wheel.missing(tracked, listed) == []


def test_nothing_of_torch_is_needed_to_build_or_install() -> None:
    wanted = [*PROJECT["build-system"]["requires"], *PROJECT["project"]["dependencies"]]
    assert not [text for text in wanted if re.match(r"torch|horovod", text)]


def test_the_extras_are_complete_and_each_name_exists() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert {"cuda", "tensorboard", "plot", "test", "dev", "docs"} <= set(extras)
    (own,) = [text for text in extras["dev"] if text.startswith("horovod-compress[")]
    assert set(own.partition("[")[2].rstrip("]").split(",")) <= set(extras)


def test_pythons_agree() -> None:
    """Classifiers, the oldest allowed and the wheels name the same ones."""
    project = PROJECT["project"]
    named = re.findall(r"Python :: 3\.(\d+)'", str(project["classifiers"]))
    assert f">=3.{named[0]}" == project["requires-python"]
    assert re.findall(r"cp3(\d+)-", PROJECT["tool"]["cibuildwheel"]["build"]) == named
