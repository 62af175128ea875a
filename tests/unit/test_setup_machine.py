"""What `make setup` looks for on a machine, and what it says of what is missing."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import setup_env
from horovod_compress.building import machine, prerequisites
from horovod_compress.building.cmake import cmake_version
from horovod_compress.building.prerequisites import PrerequisitesMissing
from tests.support.setup import make_program


def last_lines(missing: pytest.ExceptionInfo[PrerequisitesMissing], count: int = 2) -> list[str]:
    return str(missing.value).splitlines()[-count:]


def test_everything_missing_is_named_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(PrerequisitesMissing) as missing:
        prerequisites.require(include=tmp_path)
    assert "none of c++, g++, clang++ is in PATH" in str(missing.value)
    assert f"no Python.h in {tmp_path}" in str(missing.value)
    debian, fedora = last_lines(missing)
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    assert debian.endswith(f"sudo apt-get install make g++ {python}-dev")
    assert fedora.endswith("sudo dnf install make gcc-c++ python3-devel")


def test_old_compiler_is_named_with_its_complaint(monkeypatch, tmp_path):
    make_program(tmp_path, "make", "")
    make_program(tmp_path, "c++", "echo \"c++: error: unrecognized option '-std=c++20'\" >&2; exit 1")
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(PrerequisitesMissing) as missing:
        prerequisites.require(include=tmp_path)
    assert "1 thing is missing" in str(missing.value)
    assert "unrecognized option '-std=c++20'" in str(missing.value)


def test_compiler_that_the_user_names_must_exist(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "g++-99")
    (tmp_path / "Python.h").touch()
    with pytest.raises(PrerequisitesMissing, match=r"CXX=g\+\+-99 is not in PATH"):
        prerequisites.require(include=tmp_path)


def test_complete_machine_passes(monkeypatch, tmp_path):
    make_program(tmp_path, "make", "")
    make_program(tmp_path, "c++", "exit 0")
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    prerequisites.require(include=tmp_path)


def test_missing_venv_module_is_named(monkeypatch):
    monkeypatch.setattr(prerequisites.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PrerequisitesMissing, match="venv and ensurepip"):
        prerequisites.require(include=None)


def test_old_python_gets_an_answer_instead_of_a_syntax_error():
    message = setup_env.too_old((3, 9))
    assert "this is Python 3.9" in message
    assert "sudo apt-get install python3" in message
    assert setup_env.too_old((3, 10)) is None
    ast.parse(Path(setup_env.__file__).read_text(), feature_version=(3, 4))


def test_cmake_version_is_read(tmp_path):
    program = make_program(tmp_path, "cmake", "echo cmake version 4.1.2")
    assert cmake_version(str(program)) == (4, 1)
    assert cmake_version(str(tmp_path / "none")) is None


# ---- what the machine has ---------------------------------------------------------------------


def test_gpu_is_a_device_or_what_nvidia_smi_lists(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "nvidiactl").touch()
    assert not machine.has_gpu(tmp_path), "the driver's control file is there without a GPU too"
    make_program(tmp_path, "nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    assert not machine.has_gpu(tmp_path)
    make_program(tmp_path, "nvidia-smi", "echo 'GPU 0: NVIDIA T4 (UUID: GPU-1)'")
    assert machine.has_gpu(tmp_path)
    (tmp_path / "nvidia-smi").unlink()
    (tmp_path / "nvidia0").touch()
    assert machine.has_gpu(tmp_path)


def test_kernels_for_gpus_follow_the_gpu_and_the_switch(monkeypatch):
    for present in (False, True):
        monkeypatch.setattr(machine, "has_gpu", lambda: present)
        assert [machine.wants_cuda_kernels({"HVC_CUDA": choice}) for choice in ("", "0", "1")] == [present, False, True]


def test_setup_py_sees_a_gpu_in_the_same_way():
    root = Path(setup_env.__file__).parents[1]
    texts = [(root / name).read_text() for name in ("setup.py", "horovod_compress/building/machine.py")]
    found = [
        [ast.dump(node) for node in ast.parse(text).body if getattr(node, "name", "") == "has_gpu"] for text in texts
    ]
    assert found[0] == found[1] and len(found[0]) == 1


def test_compilers_are_as_many_as_cores_and_memory_allow(monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: range(4))
    for memory, alone, beside in ((16, 4, 4), (6, 4, 2), (3, 3, 1), (0, 1, 1)):
        monkeypatch.setattr(machine, "_compilers_in_memory", lambda: memory)
        assert machine.parallel_jobs({}) == alone
        assert machine.jobs_beside(alone, {}) == beside, "both together fit into memory, where that is possible"
    assert machine.parallel_jobs({"HVC_JOBS": "7"}) == 7
