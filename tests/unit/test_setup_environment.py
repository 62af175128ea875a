"""The folder `.venv` and our own modules: what is missing, and what is made again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import setup_env
from environment import package_install
from environment.lanes import side_by_side
from environment.package_install import PackageInstall
from horovod_compress.building import cuda_compiler, inspect_environment, machine
from horovod_compress.building.logged_command import StepFailed
from horovod_compress.building.virtual_environment import VirtualEnvironment
from tests.support.setup import INSPECTION, FakeSetup, make_packages, make_runner


def make_record(venv: Path, name: str, *, complete: bool) -> Path:
    record = venv / "lib" / "python3.11" / "site-packages" / f"{name}-1.0.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text(f"Name: {name}\n")
    if complete:
        (record / "RECORD").write_text(f"{record.name}/METADATA,,\n{name}/__pycache__/gone.pyc,,\n")
    return record


def test_half_installed_packages_count_as_missing_after_an_interruption(tmp_path):
    half, whole = (make_record(tmp_path, name, complete=name == "whole") for name in ("half", "whole"))
    venv = VirtualEnvironment(tmp_path, make_runner(tmp_path))
    said = []
    venv.repair(said.append)
    assert half.exists(), "nothing was interrupted, so nothing is touched"
    (tmp_path / "installation-unfinished").touch()
    venv.repair(said.append)
    assert whole.exists()
    assert not half.exists()
    assert said == ["removed half-1.0.dist-info, whose installation was interrupted"]


def test_package_with_a_lost_file_is_incomplete(tmp_path):
    record = make_record(tmp_path, "lost", complete=True)
    (record / "RECORD").write_text("lost/module.py,sha256=x,12\n")
    (tmp_path / "installation-unfinished").touch()
    VirtualEnvironment(tmp_path, make_runner(tmp_path)).repair(print)
    assert not record.exists()


def test_killed_pip_is_remembered_and_a_failed_one_is_not(tmp_path, monkeypatch):
    venv = VirtualEnvironment(tmp_path, make_runner(tmp_path))
    marker = tmp_path / "installation-unfinished"
    monkeypatch.setattr(venv, "pip", lambda *arguments: ["sh", "-c", "exit 1"])
    with pytest.raises(StepFailed):
        venv.run_pip(phase="packages")
    assert not marker.exists()
    monkeypatch.setattr(venv, "pip", lambda *arguments: ["sh", "-c", "kill -9 $$"])
    with pytest.raises(StepFailed):
        venv.run_pip(phase="packages")
    assert marker.exists()


def test_moved_environment_does_not_work(tmp_path):
    (tmp_path / "location").write_text("/somewhere/else/.venv")
    assert not VirtualEnvironment(tmp_path, make_runner(tmp_path)).works()


def test_requirements_are_judged_all_the_way_down():
    assert inspect_environment.is_met("pytest")
    assert not inspect_environment.is_met("pytest<1")
    assert not inspect_environment.is_met("a-package-that-nobody-has-published-yet")
    assert inspect_environment.is_met("a-package-that-nobody-has-published-yet; python_version < '3'")


def test_path_of_a_wheel_is_judged_by_what_was_installed():
    path = "./torch-2.13.0-cp311-cp311-linux_x86_64.whl"
    assert inspect_environment.unmet([path], already_installed="") == [path]
    assert inspect_environment.unmet([path], already_installed=path) == []


def test_dependencies_come_from_pyproject():
    project = Path(setup_env.__file__).parents[1] / "pyproject.toml"
    wanted = inspect_environment.wanted_requirements(project, ["test", "demo"])
    names = {entry.split(">")[0] for entry in wanted}
    assert {"setuptools", "pybind11", "numpy", "pytest", "scikit-learn"} <= names
    assert len(wanted) == len(set(wanted))
    with pytest.raises(SystemExit, match="unknown extras nothing"):
        inspect_environment.wanted_requirements(project, ["nothing"])


@pytest.fixture
def package(tmp_path) -> PackageInstall:
    for name in ("setup.py", "pyproject.toml", "csrc/cpu/sign.cpp", "csrc/rules/sign.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    runner = make_runner(tmp_path)
    venv = VirtualEnvironment(tmp_path / ".venv", runner)
    return PackageInstall(tmp_path, venv, runner, INSPECTION, os.environ)


def test_modules_follow_contents_and_not_times(package, tmp_path):
    before = package.fingerprint()
    os.utime(tmp_path / "csrc/cpu/sign.cpp")
    assert package.fingerprint() == before
    (tmp_path / "csrc/rules/sign.h").write_text("changed")
    changed = package.fingerprint()
    assert changed != before
    (tmp_path / "csrc/cpu/another.cpp").touch()
    assert package.fingerprint() != changed


@pytest.mark.parametrize("name", ["HVC_CUDA", "HVC_CUDA_ARCH", "HVC_SANITIZE", "CXXFLAGS"])
def test_modules_follow_build_settings(package, monkeypatch, name):
    monkeypatch.delenv(name, raising=False)
    before = package.fingerprint()
    monkeypatch.setenv(name, "1")
    assert package.fingerprint() != before


def test_modules_are_current_only_with_file_and_stamp(package, tmp_path):
    stamp, module = tmp_path / "build/modules.so.fingerprint", tmp_path / "horovod_compress/_cpu.so"
    for path in (stamp, module):
        path.parent.mkdir()
    stamp.write_text(package.fingerprint())
    assert not package.is_current()
    module.touch()
    assert package.is_current()
    stamp.write_text("of another time")
    assert not package.is_current()


@pytest.mark.parametrize(("choice", "follows"), [("", True), ("0", False), ("1", False)])
def test_modules_follow_the_gpu_where_that_decides(package, monkeypatch, choice, follows):
    monkeypatch.setenv("HVC_CUDA", choice)
    found = []
    for present in (False, True):
        monkeypatch.setattr(machine, "has_gpu", lambda: present)
        monkeypatch.setattr(package_install, "find_nvcc", lambda environment, venv: "/bin/echo")
        found.append(package.fingerprint())
    assert (found[0] != found[1]) is follows


def test_pips_take_turns(tmp_path, monkeypatch):
    """Two lanes install; what one interrupted pip left is known by one mark."""
    venv = VirtualEnvironment(tmp_path, make_runner(tmp_path))
    monkeypatch.setattr(
        venv, "pip", lambda *words: ["sh", "-c", f"mkdir {tmp_path}/busy && sleep 0.2 && rmdir {tmp_path}/busy"]
    )
    side_by_side(*[lambda: venv.run_pip(phase="packages")] * 3, stop=lambda: None)
    assert not (tmp_path / "installation-unfinished").exists()


def test_tools_are_what_builds_the_package():
    project = Path(setup_env.__file__).parents[1] / "pyproject.toml"
    names = {entry.split(">")[0] for entry in inspect_environment.build_requirements(project)}
    assert names == {"setuptools", "pybind11"}


def test_modules_follow_the_nvcc_of_the_packages(package, tmp_path, monkeypatch):
    monkeypatch.setenv("HVC_CUDA", "1")
    monkeypatch.setattr(cuda_compiler, "find_on_machine", lambda environment: None)
    before = package.fingerprint()
    make_packages(tmp_path / ".venv")
    assert package.fingerprint() != before


def test_dependencies_alone_leave_the_package_out(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(FakeSetup, "install_dependencies", lambda self, inspection: done.append("dependencies"))
    monkeypatch.setattr(FakeSetup, "install_package", lambda self, inspection: done.append("package"))
    monkeypatch.setattr(VirtualEnvironment, "works", lambda self: True)
    FakeSetup(tmp_path, INSPECTION, package=False).run()
    assert done == ["dependencies"]
    FakeSetup(tmp_path, INSPECTION).run()
    assert sorted(done[1:]) == ["dependencies", "package"]
