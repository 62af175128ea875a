"""`make setup CUDA=1`: packages, compiler, NCCL and kernels."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

import setup_env
from environment import steps
from horovod_compress.building import cuda_compiler, gpu_operations, inspect_environment
from horovod_compress.building.virtual_environment import EnvironmentProblem, Inspection, VirtualEnvironment
from tests.support.setup import INSPECTION, WITH_CUDA, FakeSetup, make_packages, make_program, make_runner


@pytest.fixture
def no_nvcc(monkeypatch, tmp_path) -> None:
    """A machine without nvcc; /usr/local/cuda may be there all the same."""
    which = cuda_compiler.shutil.which

    def without_toolkit(name: str, path: str | None = None) -> str | None:
        return None if name == "/usr/local/cuda/bin/nvcc" else which(name, path=path)

    monkeypatch.setattr(cuda_compiler.shutil, "which", without_toolkit)
    for name in ("CUDACXX", "CUDA_HOME", "HVC_CUDA", *(name for name in os.environ if name.startswith("HOROVOD_"))):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


def test_nvcc_of_the_machine_comes_first(no_nvcc, tmp_path):
    venv = VirtualEnvironment(tmp_path / ".venv", make_runner(tmp_path))
    assert cuda_compiler.find_nvcc(os.environ, venv) is None
    packaged = make_packages(venv.folder)
    assert cuda_compiler.find_nvcc(os.environ, venv) == packaged
    own = make_program(tmp_path, "nvcc", "")
    assert cuda_compiler.find_nvcc(os.environ, venv) == own
    other = make_program(tmp_path / "toolkit" / "bin", "nvcc", "")
    assert cuda_compiler.find_nvcc({"CUDA_HOME": str(tmp_path / "toolkit")}, venv) == other


@pytest.mark.parametrize("lost", cuda_compiler._FILES)
def test_nvcc_without_all_that_it_needs_is_none(no_nvcc, tmp_path, lost):
    venv = VirtualEnvironment(tmp_path / ".venv", make_runner(tmp_path))
    packaged = make_packages(venv.folder)
    (packaged.parents[1] / lost).unlink()
    assert cuda_compiler.find_nvcc(os.environ, venv) is None


def test_setup_py_looks_for_the_same_files():
    tree = ast.parse((Path(setup_env.__file__).parents[1] / "setup.py").read_text())
    assigned = [node for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "NVCC_PACKAGE"]
    assert ast.literal_eval(assigned[0].value) == cuda_compiler._FILES


def test_compiler_is_of_the_cuda_of_torch():
    assert cuda_compiler.requirement("13.2").endswith("==13.2.*")
    assert cuda_compiler.requirement(None).endswith("==13.0.*")
    assert inspect_environment.is_judged_by_version(cuda_compiler.requirement(None))


def test_headers_are_those_of_the_compiler_itself(tmp_path):
    packaged = make_packages(tmp_path)
    wrapper = make_program(tmp_path, "nvcc", f'exec {packaged} "$@"')
    assert cuda_compiler.home_of(wrapper) == packaged.parents[1]
    with pytest.raises(EnvironmentProblem, match="does not say where its headers are: no licence"):
        cuda_compiler.home_of(make_program(tmp_path, "nvcc", "echo no licence >&2"))


def test_one_switch_adds_everything(no_nvcc, tmp_path):
    setup = FakeSetup(tmp_path, INSPECTION, cuda=True)
    setup.install_cuda(INSPECTION)
    assert setup.wanted == ["test", "cuda", cuda_compiler.requirement(None)]
    assert steps._cuda_environment({"CXX": "g++"}) == {"CXX": "g++", "HVC_CUDA": "1"}


def test_nvcc_of_the_machine_is_enough(no_nvcc, tmp_path):
    make_program(tmp_path, "nvcc", "")
    setup = FakeSetup(tmp_path, INSPECTION, cuda=True)
    setup.install_cuda(INSPECTION)
    assert setup.wanted == ["test", "cuda"]


def test_horovod_gets_nccl_where_torch_has_cuda(no_nvcc, tmp_path):
    nvcc = make_packages(tmp_path / ".venv")
    setup = FakeSetup(tmp_path, WITH_CUDA, cuda=True)
    variables = setup.horovod_environment(WITH_CUDA)
    assert variables["HOROVOD_GPU_OPERATIONS"] == "NCCL" and variables["HOROVOD_NCCL_LINK"] == "SHARED"
    assert variables["HOROVOD_CUDA_HOME"] == variables["CUDA_HOME"] == str(nvcc.parents[1])
    assert setup.horovod_environment(WITH_CUDA) == variables, "a second run finds the links of the first"
    assert setup.horovod_environment(INSPECTION) == setup.environment
    assert FakeSetup(tmp_path, WITH_CUDA, cuda=False).horovod_environment(WITH_CUDA) == setup.environment


def test_libraries_have_the_names_that_linkers_look_for(no_nvcc, tmp_path):
    venv = VirtualEnvironment(tmp_path / ".venv", make_runner(tmp_path))
    links = gpu_operations.link_folder(venv, make_packages(venv.folder))
    assert (links / "include" / "nccl.h").exists()
    found = {path.name: path.resolve().name for path in (links / "lib").iterdir()}
    assert found == {
        "libnccl.so": "libnccl.so.2",
        "libcudart.so": "libcudart.so.13",
        "libcudart_static.a": "libcudart_static.a",
    }


def test_runtime_of_the_machine_is_left_to_its_own_nvcc(no_nvcc, tmp_path):
    venv = VirtualEnvironment(tmp_path / ".venv", make_runner(tmp_path))
    make_packages(venv.folder)
    links = gpu_operations.link_folder(venv, make_program(tmp_path, "nvcc", ""))
    assert [path.name for path in (links / "lib").iterdir()] == ["libnccl.so"]


def test_what_the_user_says_of_gpu_operations_wins(no_nvcc, tmp_path):
    make_packages(tmp_path / ".venv")
    own = {"HOROVOD_GPU_OPERATIONS": "MPI", "LIBRARY_PATH": "/site/lib"}
    variables = FakeSetup(tmp_path, WITH_CUDA, cuda=True, environment=own).horovod_environment(WITH_CUDA)
    assert variables["HOROVOD_GPU_OPERATIONS"] == "MPI"
    assert variables["LIBRARY_PATH"].split(os.pathsep) == [variables["CMAKE_LIBRARY_PATH"], "/site/lib"]


def test_what_excludes_the_switch_is_refused():
    with pytest.raises(EnvironmentProblem, match="leave one of them out"):
        steps._cuda_environment({"HVC_CUDA": "0"})
    with pytest.raises(EnvironmentProblem, match=r"built for CUDA 12.6.*\n.*choose a torch for CUDA 13"):
        steps._check_torch(dataclasses.replace(WITH_CUDA, torch_cuda="12.6"))


def whole_run(tmp_path: Path, monkeypatch, choice: str, *, moved: bool = False, fails: bool = False) -> bool:
    """Run a set-up, and return whether it was one for GPUs."""
    options = steps._parse(["--venv", str(tmp_path / ".venv"), "--cuda", choice])
    setup = FakeSetup(tmp_path, INSPECTION, cuda=steps._setup(options).cuda, environment={})
    if moved:
        (setup.venv.folder / "location").write_text("/elsewhere")
    monkeypatch.setattr(setup.venv, "works", lambda: not moved)
    monkeypatch.setattr(setup.venv, "create", lambda: (setup.venv.folder / "cuda-wanted").unlink(missing_ok=True))
    monkeypatch.setattr(setup, "check_machine", lambda inspection: None)
    monkeypatch.setattr(setup, "install_package", lambda inspection: None)

    def build(inspection: Inspection) -> None:
        if fails:
            raise EnvironmentProblem("no NCCL")

    monkeypatch.setattr(setup, "install_horovod", build)
    with pytest.raises(EnvironmentProblem) if fails else contextlib.nullcontext():
        setup.run()
    return setup.cuda


def test_switch_holds_until_it_is_turned_off(no_nvcc, monkeypatch, tmp_path):
    choices = ("", "1", "", "0", "")
    assert [whole_run(tmp_path, monkeypatch, choice) for choice in choices] == [False, True, True, False, False]


def test_switch_survives_a_folder_that_is_made_anew_and_no_failure(no_nvcc, monkeypatch, tmp_path):
    assert whole_run(tmp_path, monkeypatch, "1", fails=True) and not whole_run(tmp_path, monkeypatch, "")
    assert whole_run(tmp_path, monkeypatch, "1") and whole_run(tmp_path, monkeypatch, "", moved=True)
    assert whole_run(tmp_path, monkeypatch, "")


def test_kernels_for_gpus_wait_for_the_compiler_that_the_other_lane_brings(no_nvcc, monkeypatch, tmp_path):
    done = []

    class Modules:
        def __init__(self, *arguments: object) -> None: ...

        def is_current(self) -> bool:
            return "install" in done

        def compile(self, *, phase: str, environment: dict[str, str]) -> None:
            done.append(f"{phase} {environment['HVC_CUDA']}")

        def install(self) -> None:
            done.append("install")

    monkeypatch.setattr(steps, "PackageInstall", Modules)
    setup = FakeSetup(tmp_path, INSPECTION, cuda=True, environment={"HVC_CUDA": "1"})
    monkeypatch.setattr(setup, "check_machine", lambda inspection: None)
    waits = iter([lambda: done.append("waited"), setup._packages_ready.set])
    monkeypatch.setattr(setup.runner, "pause", lambda: next(waits)())  # noqa: PLW0108  the next one at each call
    setup.install_package(INSPECTION)
    assert done == ["kernels 0", "waited", "cuda-kernels 1", "install"]
    setup.install_package(INSPECTION)
    assert len(done) == 4, "what is current is not made again"


def test_a_compiler_of_another_cuda_than_torch_is_refused(no_nvcc, tmp_path):
    make_program(tmp_path, "nvcc", "echo 'Cuda compilation tools, release 12.4, V12.4.131'")
    with pytest.raises(EnvironmentProblem, match=r"is of CUDA 12.4, and torch 2.13.0 is built for CUDA 13.0"):
        FakeSetup(tmp_path, WITH_CUDA, cuda=True).install_cuda(WITH_CUDA)
    FakeSetup(tmp_path, INSPECTION, cuda=True).install_cuda(INSPECTION)  # a torch for CPUs goes with any


def test_a_variable_of_the_environment_is_no_choice(tmp_path):
    makefile = Path(__file__).parents[2]
    told = [
        subprocess.run(
            ["make", "-n", "setup", *given],
            cwd=makefile,
            env=os.environ | {"CUDA": "/opt/cuda"},
            capture_output=True,
            text=True,
            check=True,
        )
        for given in ([], ["CUDA=1"])
    ]
    assert "--cuda ''" in told[0].stdout and "--cuda '1'" in told[1].stdout


def test_variable_of_that_name_with_another_meaning_is_refused(capsys, tmp_path):
    with pytest.raises(SystemExit):
        steps._parse(["--cuda", "/opt/cuda"])
    assert "CUDA is '/opt/cuda': expected 1, 0 or nothing" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        steps._parse(["--jobs", "many"])
    assert "JOBS is 'many': expected a number" in capsys.readouterr().err
    assert steps._setup(steps._parse(["--venv", str(tmp_path)])).cuda is False
    assert steps._setup(steps._parse(["--venv", str(tmp_path), "--cuda", "1"])).cuda is True


@pytest.mark.parametrize(("inspection", "said"), [(INSPECTION, True), (WITH_CUDA, False)])
def test_torch_without_cuda_is_said(no_nvcc, monkeypatch, tmp_path, inspection, said):
    setup = FakeSetup(tmp_path, inspection, cuda=True, environment={})
    setup.machine_checked = True
    monkeypatch.setattr(setup.venv, "works", lambda: True)
    for step in ("install_horovod", "install_package"):
        monkeypatch.setattr(setup, step, lambda found: found)
    texts = []
    monkeypatch.setattr(setup.runner.bar, "say", texts.append)
    assert setup.run()
    assert ("torch 2.13.0+cpu is a build for CPUs" in "".join(texts)) is said


def test_cuda_of_torch_is_read_and_not_imported(monkeypatch, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('seconds')")
    (tmp_path / "torch" / "version.py").write_text("from typing import Optional\ncuda: Optional[str] = '13.0'\n")
    spec = importlib.util.spec_from_file_location("torch", tmp_path / "torch" / "__init__.py")
    monkeypatch.setattr(inspect_environment.importlib.util, "find_spec", lambda name: spec)
    assert inspect_environment.cuda_of_torch() == "13.0"
    monkeypatch.setattr(inspect_environment.importlib.util, "find_spec", lambda name: None)
    assert inspect_environment.cuda_of_torch() is None
