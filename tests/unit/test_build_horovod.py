"""`hvd-compress build-horovod`: what it refuses before anything is built, and that a Horovod that works stays."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from horovod_compress.building import current, inspect_environment, prerequisites
from horovod_compress.building.horovod_install import LOADING, with_gpu_operations
from horovod_compress.building.prerequisites import Missing, PrerequisitesMissing
from horovod_compress.cli import command as cli
from tests.support.setup import INSPECTION, WITH_CUDA, make_packages, make_program, make_runner


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Leave the user's cache alone, and build nothing by mistake."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was installed")

    monkeypatch.setattr(current.CurrentEnvironment, "run_pip", refuse)
    monkeypatch.setattr(current.HorovodInstall, "run", refuse)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Horovod that does not load, in an environment of the user's."""
    monkeypatch.setattr(current, "loads", lambda venv: False)
    monkeypatch.setattr(current, "_check_managed", lambda: None)


def test_a_horovod_that_works_is_left_alone(monkeypatch, capsys):
    monkeypatch.setattr(current, "loads", lambda venv: True)
    found = dataclasses.replace(INSPECTION, horovod="0.28.1")
    monkeypatch.setattr(current.CurrentEnvironment, "look", lambda self: found)
    assert cli.main(["build-horovod"]) == 0
    assert capsys.readouterr().out == "Horovod already works with torch 2.13.0+cpu; --force builds it again.\n"
    assert cli.main(["build-horovod", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"torch": "2.13.0+cpu", "built": False, "wheel": None}


def test_loading_is_tried_in_a_process_of_its_own(tmp_path):
    venv = current.CurrentEnvironment(make_runner(tmp_path))
    assert venv.statement(LOADING)[-2:] == ["-c", LOADING]
    venv._isolated = [str(make_program(tmp_path, "python", "exit 1"))]
    assert not current.loads(venv)
    venv._isolated = [str(make_program(tmp_path, "python", "exit 0"))]
    assert current.loads(venv)


def test_without_torch_nothing_is_built(monkeypatch, capsys):
    monkeypatch.setattr(inspect_environment, "installed_version", lambda name: None)
    assert cli.main(["build-horovod"]) == 1
    said = capsys.readouterr().err
    assert "has no torch" in said and "pip install torch" in said


@pytest.mark.usefixtures("broken")
def test_what_the_machine_lacks_is_said_by_the_name_of_the_command(monkeypatch, capsys):
    def require(include: Path, program: str) -> None:
        raise PrerequisitesMissing([Missing("a C++ compiler", "g++", "gcc-c++")], program)

    monkeypatch.setattr(prerequisites, "require", require)
    assert cli.main(["build-horovod", "--force"]) == 1
    said = capsys.readouterr().err
    assert "hvd-compress build-horovod cannot go on" in said and "make setup" not in said


@pytest.mark.usefixtures("broken")
def test_mpi_needs_its_compiler(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["build-horovod", "--mpi"]) == 1
    assert "needs mpicxx in PATH" in capsys.readouterr().err


def test_a_python_of_the_system_is_refused(monkeypatch, tmp_path, capsys):
    (tmp_path / "EXTERNALLY-MANAGED").touch()
    monkeypatch.setattr(current.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(current.sys, "prefix", current.sys.base_prefix)
    with pytest.raises(current.EnvironmentProblem, match="--system-site-packages"):
        current._check_managed()
    monkeypatch.setattr(current.sys, "prefix", str(tmp_path))
    current._check_managed()


def test_compilers_are_counted(capsys):
    assert cli.main(["build-horovod", "--jobs", "0"]) == 2
    assert "--jobs should be at least 1, got 0" in capsys.readouterr().err


@pytest.fixture
def venv(monkeypatch, tmp_path):
    """An environment whose packages lie in a folder of the test's."""
    venv = current.CurrentEnvironment(make_runner(tmp_path))
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    monkeypatch.setattr(venv, "package_folder", lambda name: path if (path := site / name).is_dir() else None)
    return venv


def test_nccl_operations_come_where_torch_has_cuda_and_the_packages_are_there(venv, tmp_path):
    def build_environment(environment, inspection):
        return current.build_environment(venv, environment, inspection, pytest.fail)

    assert build_environment({"PATH": ""}, WITH_CUDA) == {"PATH": ""}
    with_cuda = {"CUDACXX": str(make_packages(tmp_path)), "PATH": ""}
    assert build_environment(with_cuda, WITH_CUDA)["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert build_environment(with_cuda, INSPECTION) == with_cuda, "torch is built for CPUs"
    chosen = {**with_cuda, "HOROVOD_GPU_OPERATIONS": "MPI"}
    assert build_environment(chosen, WITH_CUDA) == chosen
    assert with_gpu_operations(venv, chosen, WITH_CUDA)["HOROVOD_GPU_OPERATIONS"] == "MPI"


def test_an_nvcc_of_another_cuda_than_torch_builds_no_nccl_operations(venv, tmp_path):
    said = []
    environment = {"CUDACXX": str(make_packages(tmp_path)), "PATH": ""}
    older = dataclasses.replace(INSPECTION, torch="2.4.0+cu121", torch_cuda="12.1")
    assert current.build_environment(venv, environment, older, said.append) == environment
    assert "is of CUDA 13.0, and torch is built for CUDA 12.1" in said[0] and "--force" in said[0]
