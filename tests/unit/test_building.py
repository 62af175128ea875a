"""Building Horovod: what a wheel is for, a cache whose entries are whole, NCCL, and stages that say what to do."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import setup_env
from horovod_compress.building import horovod
from horovod_compress.building.stage import StageFailed, Stages
from horovod_compress.cli import build_horovod, command as cli

SECONDS = 60.0  # that anything here may take on a busy machine
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Leave the user's cache alone, and build nothing by mistake."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith(("HOROVOD_", "HVC_", "CUDA"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def stages(tmp_path: Path) -> Stages:
    return Stages(tmp_path / "logs", "make setup")


def program(path: Path, script: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


# ---- stages -------------------------------------------------------------------------------------


def test_a_stage_is_a_line_and_a_log(stages: Stages, capsys: pytest.CaptureFixture[str]) -> None:
    stages.run("building it", ["sh", "-c", "echo first; echo second >&2"])
    said = capsys.readouterr()
    assert "building it: done" in said.err and "first" not in said.err and not said.out
    assert (stages.logs / "building-it.log").read_text() == "first\nsecond\n"


def test_a_failure_shows_what_matters_and_what_to_do(stages: Stages) -> None:
    noise = "for i in $(seq 100); do echo '-- no error: noise'; done"
    script = f"{noise}; echo 'x.cpp:1: fatal error: omp.h: No such file or directory'; echo why; {noise}; exit 7"
    with pytest.raises(StageFailed) as failed:
        stages.run("building it", ["sh", "-c", script])
    said = str(failed.value)
    assert said.startswith("building it: make setup failed with status 7.\n\n  | x.cpp:1: fatal error: omp.h")
    assert "  | why\n" in said and said.count("noise") < 12
    assert "sudo apt-get install python3-venv python3-dev g++ make" in said
    assert said.endswith(f"it continues where it stopped. The whole log: {stages.logs}/building-it.log")


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("x.cpp:9:1: fatal error: error writing to /tmp/x.s: No space left on device", "disk is full"),
        ("g++: fatal error: Killed signal terminated program cc1plus", "JOBS=1"),
        ("bind.h:6:10: fatal error: Python.h: No such file or directory", "python3-dev"),
        ("error: the compiler g++ does not run: [Errno 2] No such file or directory: 'g++'", "g++ make"),
        ("a.cpp:2:10: fatal error: zlib.h: No such file or directory", "header is missing"),
        ("  NewConnectionError('<pip._vendor.urllib3>: Temporary failure in name resolution')", "PIP_INDEX_URL"),
        ("SSLError(SSLCertVerificationError(1, 'certificate verify failed'))", "PIP_CERT"),
        ("ERROR: No matching distribution found for torch==2.99", "TORCH=torch==VERSION"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE", "cache purge"),
        ("error: [Errno 13] Permission denied: '/src/build'", "chown"),
        ("x.cpp:3:5: error: expected ';' before 'return'", "first error in the log is usually the cause"),
    ],
)
def test_each_cause_has_its_advice(stages: Stages, line: str, remedy: str) -> None:
    with pytest.raises(StageFailed) as failed:
        stages.run("it", ["sh", "-c", f"cat <<'END'\nCollecting things\n{line}\nmake: *** [all] Error 2\nEND\nexit 1"])
    assert remedy in str(failed.value)


def is_over(process: int) -> bool:
    """Whether a process ends that was told to: who told it does not wait, nor does init to collect an orphan."""
    status, deadline = Path(f"/proc/{process}/stat"), time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        try:
            if status.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def number_in(path: Path) -> int:
    """Return the number that another process is about to write."""
    deadline = time.monotonic() + SECONDS
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline, f"{path.name} was not written"
        time.sleep(0.01)
    return int(path.read_text())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, None])
def test_what_ends_a_stage_ends_its_children(stages: Stages, tmp_path: Path, number: int | None) -> None:
    """A signal, or the failure of a stage beside it."""
    script = "from pathlib import Path; from horovod_compress.building.stage import Stages, signal\n"
    script += "[signal.signal(n, signal.SIG_DFL) for n in (1, 15)]; signal.signal(2, signal.default_int_handler)\n"
    script += (
        f"Stages(Path({str(stages.logs)!r}), '').run('a', ['sh', '-c', 'sleep 300 & echo $! >{tmp_path}/child; wait'])"
    )
    stage = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=-3)
    child = number_in(tmp_path / "child")
    if number is None:
        (stages.logs / "failed").touch()
    else:
        stage.send_signal(number)
    assert stage.wait(SECONDS) != 0 and is_over(child)


# ---- the cache ----------------------------------------------------------------------------------


def test_a_key_names_what_a_wheel_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {**horovod.facts({}), "torch": "2.13.0+cpu", "python": "cpython-311-x86_64-linux-gnu"}
    assert horovod.key(found).startswith("horovod-0.28.1-torch-2.13.0+cpu-cpython-311")
    keys = {horovod.key({**found, name: "another"}) for name in found}
    assert len(keys | {horovod.key(found)}) == len(found) + 1
    assert horovod.facts({"CXX": "no-such-compiler"}) != horovod.facts({})


def test_build_options_of_the_user_win_and_settings_are_none() -> None:
    assert horovod.build_options({"HOROVOD_CYCLE_TIME": "1", "HOROVOD_GLOO_IFACE": "eth0"}) == horovod.OPTIONS
    options = horovod.build_options({"HOROVOD_WITH_MPI": "1", "HOROVOD_CPU_OPERATIONS": "MPI"})
    assert options["HOROVOD_CPU_OPERATIONS"] == "MPI" and "HOROVOD_WITHOUT_MPI" not in options


class Builds(Stages):
    """Stages in which pip writes what it would: Horovod's sources, or a wheel.

    Attributes:
        fails: a part of the title at which a stage fails; an interruption with a "!" behind it.
    """

    def run(self, title: str, command: Sequence[Any], environment: Any = None) -> None:
        done.append(title)
        if fails and title in fails[0]:
            raise KeyboardInterrupt if fails[0].endswith("!") else StageFailed(title)
        if title.startswith("downloading"):
            folder = Path(command[command.index("-d") + 1])
            sources = folder / "sources" / f"horovod-{horovod.VERSION}"
            for file, old, _ in horovod.CHANGES:
                (sources / file).parent.mkdir(parents=True, exist_ok=True)
                with (sources / file).open("a") as opened:
                    opened.write(f"{old}\n")
            with tarfile.open(folder / f"horovod-{horovod.VERSION}.tar.gz", "w:gz") as archive:
                archive.add(sources, sources.name)
        elif title.startswith("building"):
            sources, built = Path(command[-1]), Path(command[-2])
            assert all(new in (sources / file).read_text() for file, _, new in horovod.CHANGES)
            assert (
                "+" not in str(sources) and "MAKELEVEL" not in environment and environment["HOROVOD_WITH_GLOO"] == "1"
            )
            built.mkdir()
            (built / "horovod.whl").touch()


done: list[str] = []
fails: list[str] = []
REST = ["installing Horovod", "loading Horovod"]


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builds:
    done.clear(), fails.clear()
    monkeypatch.setattr(horovod.importlib.metadata, "version", lambda name: "2.13.0+cpu")
    monkeypatch.setattr(horovod.shutil, "which", lambda name, path=None: f"/usr/bin/{name}")
    monkeypatch.setattr(horovod, "said", lambda *command: "12")
    return Builds(tmp_path / "logs", "make setup")


def test_a_wheel_is_built_once_for_the_same_facts(builds: Builds) -> None:
    wheel = horovod.install(builds, {"MAKELEVEL": "1"})
    assert done == ["downloading Horovod", "building Horovod", *REST]
    assert wheel.parent.parent == horovod.cache() and json.loads((wheel.parent / "facts.json").read_text())["torch"]
    assert horovod.install(builds, {}) == wheel and done[4:] == REST
    assert horovod.install(builds, {"HOROVOD_WITH_MPI": "1"}) != wheel and len(done) == 10


@pytest.mark.parametrize("at", ["downloading Horovod", "building Horovod!"])
def test_a_build_that_ends_early_leaves_nothing(builds: Builds, at: str) -> None:
    fails.append(at)
    with pytest.raises((StageFailed, KeyboardInterrupt)):
        horovod.install(builds, {})
    assert [path.suffix for path in horovod.cache().iterdir()] == [".lock"]
    entry = next(horovod.cache().iterdir()).stem
    remains = horovod.cache() / f"partial-{entry.rpartition('-')[2]}-killed"
    remains.mkdir()
    fails.clear()
    assert horovod.install(builds, {}).exists() and not remains.exists()


def test_a_wheel_whose_library_does_not_load_is_not_kept(builds: Builds) -> None:
    fails.append("loading Horovod")
    with pytest.raises(StageFailed):
        horovod.install(builds, {})
    assert [path.suffix for path in horovod.cache().iterdir()] == [".lock"]


def test_other_sources_than_those_of_the_changes_are_refused(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    def older(archive: Path, folder: Path) -> None:
        unpack(archive, folder)
        (folder / f"horovod-{horovod.VERSION}" / "setup.py").write_text("of another release")

    unpack = shutil.unpack_archive
    monkeypatch.setattr(horovod.shutil, "unpack_archive", older)
    with pytest.raises(StageFailed, match=r"setup.py does not contain .*this is not Horovod 0.28.1"):
        horovod.install(builds, {})


# ---- NCCL and CUDA ------------------------------------------------------------------------------


@pytest.fixture
def nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """NVIDIA's packages, on a machine without nvcc; /usr/local/cuda may be there all the same."""
    which: Callable[..., str | None] = shutil.which
    monkeypatch.setattr(
        horovod.shutil, "which", lambda name, path=None: None if "/usr/local" in name else which(name, path=path)
    )
    monkeypatch.setattr(horovod, "cuda_of_torch", lambda: "13.0")
    monkeypatch.setenv("PATH", "/bin")
    folder = tmp_path / "nvidia"
    for name in (
        "cu13/lib/libcudart.so.13",
        "cu13/lib/libcudart_static.a",
        "nccl/include/nccl.h",
        "nccl/lib/libnccl.so.2",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    program(folder / "cu13/nvvm/bin/cicc")
    program(folder / "cu13/bin/nvcc", f"echo '#$ TOP={folder}/cu13/bin/..' >&2; echo release 13.0")
    return folder


def test_nvcc_of_the_machine_comes_first(nvidia: Path, tmp_path: Path) -> None:
    empty = {"PATH": str(tmp_path / "bin")}
    assert horovod.find_nvcc(empty, nvidia) == str(nvidia / "cu13/bin/nvcc")
    own = program(tmp_path / "bin/nvcc")
    assert horovod.find_nvcc(empty, nvidia) == str(own)
    other = program(tmp_path / "toolkit/bin/nvcc")
    assert horovod.find_nvcc({**empty, "CUDA_HOME": str(tmp_path / "toolkit")}, nvidia) == str(other)
    own.unlink(), (nvidia / "cu13/nvvm/bin/cicc").unlink()
    assert horovod.find_nvcc(empty, nvidia) is None, "a compiler that came alone builds nothing"


def test_nccl_operations_come_where_all_that_they_need_is_there(
    nvidia: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links, given = tmp_path / "links", {"PATH": "/bin", "LIBRARY_PATH": "/site/lib"}
    for _ in range(2):  # a second run finds the links of the first
        found = horovod.with_nccl(given, links, nvidia)
    assert found["HOROVOD_GPU_OPERATIONS"] == "NCCL" and found["HOROVOD_NCCL_LINK"] == "SHARED"
    assert found["HOROVOD_CUDA_HOME"] == found["CUDA_HOME"] == str(nvidia / "cu13")
    assert found["LIBRARY_PATH"] == f"{links}/lib:/site/lib" and (links / "include/nccl.h").exists()
    names = {path.name: path.resolve().name for path in (links / "lib").iterdir()}
    assert names == {
        "libnccl.so": "libnccl.so.2", "libcudart.so": "libcudart.so.13", "libcudart_static.a": "libcudart_static.a"
    }  # fmt: skip
    own = {**given, "HOROVOD_GPU_OPERATIONS": "MPI"}
    assert horovod.with_nccl(own, links, nvidia)["HOROVOD_GPU_OPERATIONS"] == "MPI"
    # A script of the machine's that starts another, which knows where its own runtime is.
    program(tmp_path / "nvcc", f'exec {nvidia}/cu13/bin/nvcc "$@"')
    found = horovod.with_nccl({**given, "CUDACXX": str(tmp_path / "nvcc")}, links, nvidia)
    assert found["CUDA_HOME"] == str(nvidia / "cu13") and [path.name for path in (links / "lib").iterdir()] == [
        "libnccl.so"
    ]
    monkeypatch.setattr(horovod, "cuda_of_torch", lambda: "12.6")
    with pytest.raises(StageFailed, match=r"is of CUDA 13.0, and torch is built for CUDA 12.6"):
        horovod.with_nccl(given, links, nvidia)
    monkeypatch.setattr(horovod, "cuda_of_torch", lambda: None)
    assert horovod.with_nccl(given, links, nvidia) == given


def test_one_switch_adds_what_gpus_need(nvidia: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod, "find_nvcc", lambda environment: None)
    assert {"cupy-cuda13x>=13.6", f"{setup_env.NVCC}==13.0.*"} <= set(setup_env.cuda())
    monkeypatch.setattr(horovod, "find_nvcc", lambda environment: "/usr/bin/nvcc")
    assert not any("toolkit" in name for name in setup_env.cuda())
    monkeypatch.setattr(horovod, "cuda_of_torch", lambda: "12.6")
    with pytest.raises(StageFailed, match="choose a torch for CUDA 13"):
        setup_env.cuda()


def test_cuda_of_torch_is_read_and_not_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('seconds')")
    (package / "version.py").write_text("from typing import Optional\ncuda: Optional[str] = '13.0'\n")
    spec = horovod.importlib.util.spec_from_file_location("torch", package / "__init__.py")
    monkeypatch.setattr(horovod.importlib.util, "find_spec", lambda name: spec)
    assert horovod.cuda_of_torch() == "13.0"
    monkeypatch.setattr(horovod.importlib.util, "find_spec", lambda name: None)
    assert horovod.cuda_of_torch() is None


def test_requirements_come_from_pyproject() -> None:
    names = {entry.split(">")[0] for entry in setup_env.requirements("test demo,test")}
    assert {"setuptools", "pybind11", "numpy", "pytest", "scikit-learn", "cloudpickle"} <= names
    with pytest.raises(StageFailed, match=r"EXTRAS is 'nothing': pyproject.toml has torch, cuda"):
        setup_env.requirements("nothing")


# ---- hvd-compress build-horovod -----------------------------------------------------------------


def call(*words: str) -> int:
    return cli.main(["build-horovod", *words])


def test_a_horovod_that_works_is_left_alone(monkeypatch, capsys, builds: Builds) -> None:
    monkeypatch.setattr(build_horovod, "loads", lambda: True)
    monkeypatch.setattr(build_horovod, "Stages", Builds)
    assert call() == 0
    assert capsys.readouterr().out == "Horovod already works with torch 2.13.0+cpu; --force builds it again.\n"
    assert call("--json") == 0
    assert json.loads(capsys.readouterr().out) == {"torch": "2.13.0+cpu", "built": False, "wheel": None}
    assert not done
    assert call("--force", "--json") == 0 and done[0] == "installing build tools" and done[-2:] == REST
    assert json.loads(capsys.readouterr().out)["built"] is True
    done.clear(), fails.append("building Horovod")
    assert call("--mpi") == 1 and "building Horovod" in capsys.readouterr().err


def test_without_torch_nothing_is_built(monkeypatch, capsys) -> None:
    def missing(name: str) -> str:
        raise horovod.importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(horovod.importlib.metadata, "version", missing)
    assert call() == 1 and "pip install torch" in capsys.readouterr().err


def test_compilers_are_counted(capsys) -> None:
    assert call("--jobs", "0") == 2 and "--jobs should be at least 1, got 0" in capsys.readouterr().err
