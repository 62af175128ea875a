"""`make setup`: what it looks for, what it says, and what an interruption leaves behind."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib.util
import io
import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import setup_env
from environment import cuda_compiler, gpu_operations, horovod_wheel, inspect_environment, prerequisites, steps
from environment.cmake import cmake_version
from environment.file_lock import file_lock
from environment.logged_command import CommandRunner, StepFailed, probable_cause
from environment.package_install import PackageInstall
from environment.prerequisites import PrerequisitesMissing
from environment.progress import Display, clock_text, describe, parse_percent
from environment.steps import Setup
from environment.virtual_environment import EnvironmentProblem, Inspection, VirtualEnvironment
from environment.wheel_cache import BuildFacts, WheelCache, default_folder

FACTS = BuildFacts(
    horovod="0.28.1",
    torch="2.13.0+cpu",
    python="cpython-311-x86_64-linux-gnu",
    platform="linux-x86_64",
    c_library="glibc-2.36",
    compiler="g++ x86_64-linux-gnu 12",
    instruction_sets="avx fma",
    options=(("HOROVOD_WITH_GLOO", "1"),),
    recipe="",
)
INSPECTION = Inspection(
    python=[3, 11],
    abi="",
    suffix=".so",
    include="",
    pip="",
    torch="2.13.0+cpu",
    torch_cuda=None,
    horovod="",
    package="0.1.0",
    unmet=[],
)
WITH_CUDA = dataclasses.replace(INSPECTION, torch="2.13.0", torch_cuda="13.0")


def make_program(folder: Path, name: str, script: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


# ---- the key of a cached wheel ----------------------------------------------------------------


def test_key_is_a_function_of_the_facts():
    assert FACTS.key() == dataclasses.replace(FACTS).key()


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(BuildFacts)])
def test_key_changes_with_every_fact(field):
    other = (("HOROVOD_WITH_MPI", "1"),) if field == "options" else "something else"
    assert dataclasses.replace(FACTS, **{field: other}).key() != FACTS.key()


def test_key_tells_builds_of_one_torch_version_apart():
    assert FACTS.key() != dataclasses.replace(FACTS, torch="2.13.0+cu130").key()
    assert FACTS.key().startswith("horovod-0.28.1-torch-2.13.0+cpu-cpython-311")
    assert "/" not in FACTS.key()


def test_cache_follows_the_xdg_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "horovod-compress" / "wheels"


def test_run_time_settings_of_horovod_are_no_build_options():
    assert horovod_wheel.build_options({"HOROVOD_CYCLE_TIME": "1", "HOROVOD_GLOO_IFACE": "eth0"}) == (
        horovod_wheel.OPTIONS
    )


def test_build_options_of_the_user_win():
    options = horovod_wheel.build_options({"HOROVOD_WITH_MPI": "1", "HOROVOD_CPU_OPERATIONS": "MPI"})
    assert options["HOROVOD_CPU_OPERATIONS"] == "MPI"
    assert "HOROVOD_WITHOUT_MPI" not in options


# ---- the cache: finished or absent ------------------------------------------------------------


def test_wheel_appears_only_when_stored(tmp_path):
    cache, key = WheelCache(tmp_path), FACTS.key()
    with cache.locked(key), cache.workplace(key) as folder:
        built = folder / "wheel"
        built.mkdir()
        (built / "horovod.whl").write_text("wheel")
        assert cache.find(key) is None
        stored = cache.store(key, built, FACTS)
    assert cache.find(key) == stored
    assert stored.read_text() == "wheel"


def test_interrupted_build_leaves_nothing(tmp_path):
    cache, key = WheelCache(tmp_path), FACTS.key()
    with pytest.raises(KeyboardInterrupt), cache.workplace(key) as folder:
        (folder / "horovod.whl").write_text("half a wh")
        raise KeyboardInterrupt
    assert cache.find(key) is None
    assert not folder.exists()


def test_remains_of_a_killed_build_are_removed_first(tmp_path):
    cache, key = WheelCache(tmp_path), FACTS.key()
    with cache.workplace(key) as folder:
        pass
    folder.mkdir()
    (folder / "horovod.whl").write_text("half a wh")
    assert cache.find(key) is None
    with cache.workplace(key) as again:
        assert again != folder
        assert list(again.iterdir()) == []
        assert not folder.exists()


def test_storing_no_wheel_is_an_error(tmp_path):
    cache = WheelCache(tmp_path / "cache")
    with cache.workplace(FACTS.key()) as folder:
        (folder / "wheel").mkdir()
        with pytest.raises(FileNotFoundError, match="left no wheel"):
            cache.store(FACTS.key(), folder / "wheel", FACTS)


def test_workplace_has_no_name_that_build_systems_misread(tmp_path):
    with WheelCache(tmp_path).workplace(FACTS.key()) as folder:
        assert "+" not in folder.name


def test_wheel_without_its_library_is_recognised(tmp_path):
    wheel = tmp_path / "horovod.whl"
    with zipfile.ZipFile(wheel, "w") as opened:
        opened.writestr("home/me/horovod/torch/mpi_lib_v2.so", "in the wrong place")
    assert not horovod_wheel.contains(wheel, horovod_wheel.LIBRARY)


def test_second_process_waits_for_the_lock_and_says_so(tmp_path):
    lock = tmp_path / "lock"
    path = f"__import__('pathlib').Path({str(lock)!r})"
    script = f"from environment.file_lock import file_lock\nwith file_lock({path}, 'busy'): print('mine')"
    environment = {**os.environ, "PYTHONPATH": str(Path(setup_env.__file__).parent)}
    with file_lock(lock, "busy"):
        second = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
        assert second.stdout is not None
        assert second.stdout.readline() == "waiting for another make setup that is busy ...\n"
    rest, _ = second.communicate(timeout=30)
    assert rest == "mine\n"


def test_commands_hold_the_lock_too(tmp_path):
    with file_lock(tmp_path / "lock", "busy"):
        runner = CommandRunner(tmp_path / "log")
        runner.run(["sh", "-c", "readlink /proc/self/fd/* /proc/$$/fd/*; true"], title="Looking")
    assert str(tmp_path / "lock") in runner.log.read_text()


# ---- what the machine lacks -------------------------------------------------------------------


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


# ---- progress ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "percent"),
    [
        ("[ 45%] Building CXX object horovod/torch/CMakeFiles/pytorch.dir/adapter_v2.cc.o", 45),
        ("  [100%] Linking CXX shared library", 100),
        ("[  3%] Building", 3),
        ("Progress 512 of 2048", 25),
        ("Progress 0 of 0", None),
        ("-- The CXX compiler identification is GNU", None),
        ("warning: 50% of nothing", None),
        ("", None),
    ],
)
def test_percent_is_read_from_cmake_and_pip(line, percent):
    assert parse_percent(line) == percent


def test_description_drops_counters_and_paths():
    assert describe("[ 45%] Building CXX object horovod/torch/adapter_v2.cc.o") == "adapter_v2.cc.o"
    assert describe("Progress 1 of 2") == ""
    assert describe("  Collecting torch ") == "Collecting torch"


def test_clock_counts_minutes():
    assert clock_text(109.6) == "1:49"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_shows_one_line_that_fits(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    seconds = iter(range(1000))
    stream = Terminal()
    display = Display("Building", stream, clock=lambda: float(next(seconds)))
    display.update("[ 45%] Building CXX object a/very/long/name/that/does/not/fit/on/any/line_of_forty.o")
    display.finish("done")
    shown = stream.getvalue()
    assert "Building:  45%" in shown
    assert shown.count("\n") == 1
    assert all(len(part.removeprefix("\x1b[K").rstrip("\n")) < 40 for part in shown.split("\r"))


def test_plain_output_is_a_few_lines():
    seconds = iter(range(100_000))
    stream = io.StringIO()
    display = Display("Building", stream, clock=lambda: float(next(seconds)))
    for percent in range(101):
        display.update(f"[{percent:3d}%] Building CXX object x.o")
    display.finish("done")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "Building ..."
    assert 4 <= len(lines) <= 12
    assert "\r" not in stream.getvalue()


# ---- commands ---------------------------------------------------------------------------------


def test_output_goes_to_the_log(tmp_path, capsys):
    runner = CommandRunner(tmp_path / "logs" / "setup.log")
    runner.run(["sh", "-c", "echo one; echo two >&2"], title="Counting")
    runner.run(["sh", "-c", "printf three"], title="Counting on")
    log = runner.log.read_text()
    assert [word in log for word in ("one", "two", "three")] == [True] * 3
    assert "two" not in capsys.readouterr().out


def test_failure_ends_with_three_lines_that_matter(tmp_path):
    runner = CommandRunner(tmp_path / "setup.log")
    script = "echo start; echo 'x.cpp:1: fatal error: no such file'; for i in 1 2 3; do echo noise; done; exit 7"
    with pytest.raises(StepFailed) as failed:
        runner.run(["sh", "-c", script], title="Building")
    *tail, what, cause, log = str(failed.value).splitlines()
    assert "  | noise" in tail
    assert what == "make setup failed at: Building (exit status 7)"
    assert cause.endswith("x.cpp:1: fatal error: no such file")
    assert log.endswith(str(runner.log))


def test_cause_is_the_last_line_where_nothing_looks_like_an_error():
    assert probable_cause(["one", "two"]) == "two"
    assert probable_cause([]) == "no output"


def test_interrupt_ends_the_children_too(tmp_path, monkeypatch):
    def interrupt(display, line=""):
        raise KeyboardInterrupt

    monkeypatch.setattr(Display, "update", interrupt)
    with pytest.raises(KeyboardInterrupt):
        CommandRunner(tmp_path / "log").run(
            ["sh", "-c", f"sleep 300 & echo $! > {tmp_path}/child; echo ready; wait"], title="Sleeping"
        )
    child = int((tmp_path / "child").read_text())
    # The orphan may wait a moment for init to collect it: dead is enough.
    status = Path(f"/proc/{child}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


# ---- the virtual environment ------------------------------------------------------------------


def make_record(venv: Path, name: str, *, complete: bool) -> Path:
    record = venv / "lib" / "python3.11" / "site-packages" / f"{name}-1.0.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text(f"Name: {name}\n")
    if complete:
        (record / "RECORD").write_text(f"{record.name}/METADATA,,\n{name}/__pycache__/gone.pyc,,\n")
    return record


def test_half_installed_packages_count_as_missing_after_an_interruption(tmp_path, capsys):
    half, whole = (make_record(tmp_path, name, complete=name == "whole") for name in ("half", "whole"))
    venv = VirtualEnvironment(tmp_path, CommandRunner(tmp_path / "log"))
    venv.repair()
    assert half.exists(), "nothing was interrupted, so nothing is touched"
    (tmp_path / "installation-unfinished").touch()
    venv.repair()
    assert whole.exists()
    assert not half.exists()
    assert "removed half-1.0.dist-info" in capsys.readouterr().out


def test_package_with_a_lost_file_is_incomplete(tmp_path):
    record = make_record(tmp_path, "lost", complete=True)
    (record / "RECORD").write_text("lost/module.py,sha256=x,12\n")
    (tmp_path / "installation-unfinished").touch()
    VirtualEnvironment(tmp_path, CommandRunner(tmp_path / "log")).repair()
    assert not record.exists()


def test_killed_pip_is_remembered_and_a_failed_one_is_not(tmp_path, monkeypatch):
    venv = VirtualEnvironment(tmp_path, CommandRunner(tmp_path / "log"))
    marker = tmp_path / "installation-unfinished"
    monkeypatch.setattr(venv, "pip", lambda *arguments: ["sh", "-c", "exit 1"])
    with pytest.raises(StepFailed):
        venv.run_pip(title="Failing")
    assert not marker.exists()
    monkeypatch.setattr(venv, "pip", lambda *arguments: ["sh", "-c", "kill -9 $$"])
    with pytest.raises(StepFailed):
        venv.run_pip(title="Killed")
    assert marker.exists()


def test_moved_environment_does_not_work(tmp_path):
    (tmp_path / "location").write_text("/somewhere/else/.venv")
    assert not VirtualEnvironment(tmp_path, CommandRunner(tmp_path / "log")).works()


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


# ---- our own modules --------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path) -> PackageInstall:
    for name in ("setup.py", "pyproject.toml", "csrc/cpu/sign.cpp", "csrc/include/hvc/sign.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    venv = VirtualEnvironment(tmp_path / ".venv", CommandRunner(tmp_path / "log"))
    return PackageInstall(tmp_path, venv, INSPECTION, os.environ)


def test_modules_follow_contents_and_not_times(package, tmp_path):
    before = package.fingerprint()
    os.utime(tmp_path / "csrc/cpu/sign.cpp")
    assert package.fingerprint() == before
    (tmp_path / "csrc/include/hvc/sign.h").write_text("changed")
    changed = package.fingerprint()
    assert changed != before
    (tmp_path / "csrc/cpu/another.cpp").touch()
    assert package.fingerprint() != changed


@pytest.mark.parametrize("name", ["HVC_CUDA", "HVC_SANITIZE", "CXXFLAGS"])
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


# ---- CUDA=1 -----------------------------------------------------------------------------------


def make_packages(venv: Path) -> Path:
    """NVIDIA's packages, as far as they are looked for."""
    site = venv / "lib" / "python3.11" / "site-packages" / "nvidia"
    runtime = [f"cu13/{name}" for name in (*cuda_compiler._FILES, "lib/libcudart.so.13")]
    for name in (*runtime, "nccl/include/nccl.h", "nccl/lib/libnccl.so.2"):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).touch()
    script = f"echo '#$ TOP={site}/cu13/bin/..' >&2; echo release 13.0"
    return make_program(site / "cu13" / "bin", "nvcc", script)


class FakeSetup(Setup):
    """A set-up in which nothing is installed or built: it only writes down what would be."""

    def __init__(self, tmp_path: Path, found: Inspection, **choices) -> None:
        runner = CommandRunner(tmp_path / "log")
        super().__init__(VirtualEnvironment(tmp_path / ".venv", runner), runner, "torch", ["test"], **choices)
        self.found = found
        self.wanted: list[str] = []
        self.venv.folder.mkdir(exist_ok=True)
        (self.venv.folder / "location").write_text(str(self.venv.folder))

    def inspect(self) -> Inspection:
        self.wanted = [*self.extras, *self._compiler]
        return self.found


@pytest.fixture
def no_nvcc(monkeypatch, tmp_path) -> None:
    """A machine without nvcc; /usr/local/cuda may be there all the same."""
    which = cuda_compiler.shutil.which

    def without_toolkit(name: str, path: str | None) -> str | None:
        return None if name == "/usr/local/cuda/bin/nvcc" else which(name, path=path)

    monkeypatch.setattr(cuda_compiler.shutil, "which", without_toolkit)
    for name in ("CUDACXX", "CUDA_HOME", "HVC_CUDA", *(name for name in os.environ if name.startswith("HOROVOD_"))):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


def test_nvcc_of_the_machine_comes_first(no_nvcc, tmp_path):
    venv = VirtualEnvironment(tmp_path / ".venv", CommandRunner(tmp_path / "log"))
    assert cuda_compiler.find_nvcc(os.environ, venv) is None
    packaged = make_packages(venv.folder)
    assert cuda_compiler.find_nvcc(os.environ, venv) == packaged
    own = make_program(tmp_path, "nvcc", "")
    assert cuda_compiler.find_nvcc(os.environ, venv) == own
    other = make_program(tmp_path / "toolkit" / "bin", "nvcc", "")
    assert cuda_compiler.find_nvcc({"CUDA_HOME": str(tmp_path / "toolkit")}, venv) == other


@pytest.mark.parametrize("lost", cuda_compiler._FILES)
def test_nvcc_without_all_that_it_needs_is_none(no_nvcc, tmp_path, lost):
    venv = VirtualEnvironment(tmp_path / ".venv", CommandRunner(tmp_path / "log"))
    packaged = make_packages(venv.folder)
    (packaged.parents[1] / lost).unlink()
    assert cuda_compiler.find_nvcc(os.environ, venv) is None


def test_setup_py_looks_for_the_same_files():
    tree = ast.parse((Path(setup_env.__file__).parents[1] / "setup.py").read_text())
    assigned = [node for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "NVCC_PACKAGE"]
    assert ast.literal_eval(assigned[0].value) == cuda_compiler._FILES


def test_modules_follow_the_nvcc_of_the_packages(package, tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_compiler, "find_on_machine", lambda environment: None)
    before = package.fingerprint()
    make_packages(tmp_path / ".venv")
    assert package.fingerprint() != before


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
    assert setup.environment["HVC_CUDA"] == "1"


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
    venv = VirtualEnvironment(tmp_path / ".venv", CommandRunner(tmp_path / "log"))
    links = gpu_operations.link_folder(venv, make_packages(venv.folder))
    assert (links / "include" / "nccl.h").exists()
    found = {path.name: path.resolve().name for path in (links / "lib").iterdir()}
    assert found == {
        "libnccl.so": "libnccl.so.2",
        "libcudart.so": "libcudart.so.13",
        "libcudart_static.a": "libcudart_static.a",
    }


def test_runtime_of_the_machine_is_left_to_its_own_nvcc(no_nvcc, tmp_path):
    venv = VirtualEnvironment(tmp_path / ".venv", CommandRunner(tmp_path / "log"))
    make_packages(venv.folder)
    links = gpu_operations.link_folder(venv, make_program(tmp_path, "nvcc", ""))
    assert [path.name for path in (links / "lib").iterdir()] == ["libnccl.so"]


def test_what_the_user_says_of_gpu_operations_wins(no_nvcc, tmp_path):
    make_packages(tmp_path / ".venv")
    own = {"HOROVOD_GPU_OPERATIONS": "MPI", "LIBRARY_PATH": "/site/lib"}
    variables = FakeSetup(tmp_path, WITH_CUDA, cuda=True, environment=own).horovod_environment(WITH_CUDA)
    assert variables["HOROVOD_GPU_OPERATIONS"] == "MPI"
    assert variables["LIBRARY_PATH"].split(os.pathsep) == [variables["CMAKE_LIBRARY_PATH"], "/site/lib"]


@pytest.mark.parametrize(
    ("inspection", "variables", "message"),
    [
        (INSPECTION, {"HVC_CUDA": "0"}, "leave one of them out"),
        (dataclasses.replace(WITH_CUDA, torch_cuda="12.6"), {}, "built for CUDA 12.6.*\n.*choose a torch for CUDA 13"),
    ],
)
def test_what_excludes_the_switch_is_refused(inspection, variables, message):
    with pytest.raises(EnvironmentProblem, match=message):
        steps._cuda_environment(variables, inspection)


def whole_run(tmp_path: Path, monkeypatch, choice: bool | None, *, moved: bool = False, fails: bool = False) -> bool:
    """Run a set-up, and return whether it was one for GPUs."""
    setup = FakeSetup(tmp_path, INSPECTION, cuda=choice)
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
    return bool(setup.cuda)


def test_switch_holds_until_it_is_turned_off(no_nvcc, monkeypatch, tmp_path):
    choices = (None, True, None, False, None)
    assert [whole_run(tmp_path, monkeypatch, choice) for choice in choices] == [False, True, True, False, False]


def test_switch_survives_a_folder_that_is_made_anew_and_no_failure(no_nvcc, monkeypatch, tmp_path):
    assert whole_run(tmp_path, monkeypatch, True, fails=True) and not whole_run(tmp_path, monkeypatch, None)
    assert whole_run(tmp_path, monkeypatch, True) and whole_run(tmp_path, monkeypatch, None, moved=True)
    assert whole_run(tmp_path, monkeypatch, None)


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
            check=False,
        )
        for given in ([], ["CUDA=1"])
    ]
    assert "--cuda ''" in told[0].stdout and "--cuda '1'" in told[1].stdout


def test_variable_of_that_name_with_another_meaning_is_refused(capsys):
    with pytest.raises(SystemExit):
        steps._parse(["--cuda", "/opt/cuda"])
    assert "CUDA is '/opt/cuda': expected 1, 0 or nothing" in capsys.readouterr().err
    assert steps._setup(steps._parse([])).cuda is None
    assert steps._setup(steps._parse(["--cuda", "0"])).cuda is False


@pytest.mark.parametrize(("inspection", "said"), [(INSPECTION, True), (WITH_CUDA, False)])
def test_torch_without_cuda_is_said(monkeypatch, tmp_path, capsys, inspection, said):
    setup = FakeSetup(tmp_path, inspection, cuda=True, environment={})
    setup.machine_checked = True
    monkeypatch.setattr(setup.venv, "works", lambda: True)
    for step in ("install_cuda", "install_horovod", "install_package"):
        monkeypatch.setattr(setup, step, lambda found: found)
    assert setup.run()
    assert ("torch 2.13.0+cpu is a build for CPUs" in capsys.readouterr().out) is said


def test_cuda_of_torch_is_read_and_not_imported(monkeypatch, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('seconds')")
    (tmp_path / "torch" / "version.py").write_text("from typing import Optional\ncuda: Optional[str] = '13.0'\n")
    spec = importlib.util.spec_from_file_location("torch", tmp_path / "torch" / "__init__.py")
    monkeypatch.setattr(inspect_environment.importlib.util, "find_spec", lambda name: spec)
    assert inspect_environment.cuda_of_torch() == "13.0"
    monkeypatch.setattr(inspect_environment.importlib.util, "find_spec", lambda name: None)
    assert inspect_environment.cuda_of_torch() is None
