"""Builds Horovod's wheel from its source distribution: a minute and three quarters on two idle cores.

Horovod publishes no wheels, and its last release predates the C++20 that torch's headers ask for today.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sysconfig
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cmake import find_cmake
from .logged_command import CommandRunner, StepFailed
from .machine import parallel_jobs
from .prerequisites import find_compiler
from .virtual_environment import Inspection, VirtualEnvironment
from .wheel_cache import BuildFacts, WheelCache

VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

# (file, what it says, what it has to say)
CHANGES = (
    ("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"),
    ("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"),
    # A path is no regular expression: with a + in it, the libraries would land where no wheel looks for them.
    (
        "cmake/Utilities.cmake",
        'string(REGEX REPLACE "${PROJECT_SOURCE_DIR}(/)?" "" SUB_FOLDER "${CMAKE_CURRENT_SOURCE_DIR}")',
        'file(RELATIVE_PATH SUB_FOLDER "${PROJECT_SOURCE_DIR}" "${CMAKE_CURRENT_SOURCE_DIR}")',
    ),
    # Headers take most of the compiler's time, torch's alone a minute and 1.8 GB: sources that include the same ones
    # are compiled together, in half the time. With GPU operations or MPI the sources differ, and that is untried.
    (
        "horovod/torch/CMakeLists.txt",
        "target_link_libraries(${PYTORCH_TARGET_LIB} ${LINKER_LIBS}",
        """\
if(NOT HAVE_CUDA AND NOT HAVE_ROCM AND NOT HAVE_MPI)
    set_target_properties(${PYTORCH_TARGET_LIB} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
    set_source_files_properties(${SOURCES} PROPERTIES UNITY_GROUP common)
    foreach(FOLDER optim ops gloo)
        set(TOGETHER ${SOURCES})
        list(FILTER TOGETHER INCLUDE REGEX "/${FOLDER}/")
        set_source_files_properties(${TOGETHER} PROPERTIES UNITY_GROUP ${FOLDER})
    endforeach()
    set_source_files_properties(${PYTORCH_SOURCES} PROPERTIES UNITY_GROUP torch)
endif()
target_link_libraries(${PYTORCH_TARGET_LIB} ${LINKER_LIBS}""",
    ),
    (
        "CMakeLists.txt",
        "    target_compile_definitions(gloo PRIVATE _GLIBCXX_USE_CXX11_ABI=1)",
        """\
    if(NOT HAVE_CUDA AND NOT HAVE_ROCM AND NOT HAVE_MPI)
        set_target_properties(gloo PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 20)
        set(APART allreduce.cc allreduce_local.cc)  # both give one name two meanings
        list(TRANSFORM APART PREPEND ${PROJECT_SOURCE_DIR}/third_party/gloo/gloo/)
        set_source_files_properties(${APART} TARGET_DIRECTORY gloo PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    endif()
    target_compile_definitions(gloo PRIVATE _GLIBCXX_USE_CXX11_ABI=1)""",
    ),
    # The first scope that all ranks have left must not reset the count of the others: those would never be cleared, and
    # a rank that begins Horovod a second time would connect to addresses of the first, where nobody listens.
    (
        "horovod/runner/http/http_server.py",
        "                        self.server.finished_list.clear()",
        "                        del self.server.finished_list[scope]",
    ),
    # Both are -O3; debug information takes a third of the compiler's time, and of 30 MB all but one.
    ("setup.py", "else 'RelWithDebInfo'", "else 'Release'"),
)
# What a wheel must contain: Horovod's Python files alone import, and fail only when a job starts.
LIBRARY = "horovod/torch/mpi_lib_v2"

# Those of the bar that a wheel in the cache makes superfluous.
PHASES = ("horovod-source", "cmake", "horovod")

# PyTorch over Gloo: nothing but a compiler is needed. A variable of the same name set by the user wins, so that
# HOROVOD_GPU_OPERATIONS=NCCL or an MPI build need no change here.
OPTIONS = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_CPU_OPERATIONS": "GLOO",
}
_BUILD_VARIABLE = re.compile(r"HOROVOD_(WITH(OUT)?_|GPU|CPU_OPERATIONS$|BUILD_|CUDA_HOME$|NCCL_|ALLOW_MIXED|ROCM_)")

# Pythons since 3.12 complain where no filter is named, and some older ones know none. pip has checked the digest.
_EXTRACTION: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}

# Horovod's own needs: its wheel is installed without asking pip for them, because pip would find "torch" there too.
# setuptools stands in for the distutils that its launcher imports, which Python 3.12 removed.
NEEDS = ("cloudpickle", "psutil", "pyyaml", "packaging", "cffi", "setuptools")


def build_options(environment: Mapping[str, str]) -> dict[str, str]:
    """Horovod's build options: ours, overridden by those of the caller. Its run-time settings play no part."""
    given = {name: value for name, value in environment.items() if _BUILD_VARIABLE.match(name)}
    # HOROVOD_WITH_MPI=1 alone must be enough, although ours is HOROVOD_WITHOUT_MPI=1.
    ours = {name: value for name, value in OPTIONS.items() if name.replace("WITHOUT", "WITH") not in given}
    return {**ours, **given}


def collect_facts(inspection: Inspection, environment: Mapping[str, str]) -> BuildFacts:
    return BuildFacts(
        horovod=VERSION,
        torch=inspection.torch or "none",
        python=inspection.abi,
        platform=sysconfig.get_platform(),
        c_library="-".join(platform.libc_ver()),
        compiler=_compiler_facts(),
        instruction_sets=_instruction_sets(Path("/proc/cpuinfo")),
        options=tuple(sorted(build_options(environment).items())),
        recipe=repr(CHANGES),
    )


@dataclass(frozen=True)
class HorovodWheel:
    """One build, wanted by one virtual environment."""

    cache: WheelCache
    venv: VirtualEnvironment
    runner: CommandRunner
    facts: BuildFacts
    environment: Mapping[str, str]

    def get(self) -> tuple[Path, bool]:
        """The wheel, and whether it had to be built now."""
        key = self.facts.key()
        with self.cache.locked(key, self.runner.bar.say, self.runner.pause):
            if wheel := self.cache.find(key):
                self.runner.bar.done(*PHASES)
                return wheel, False
            with self.cache.workplace(key) as folder:
                built = self._build(self._sources(folder), folder)
                return self.cache.store(key, built, self.facts), True

    def _sources(self, folder: Path) -> Path:
        """Downloads Horovod's source distribution through pip, as its user configured it, and applies CHANGES."""
        wanted = folder / "requirements.txt"
        wanted.write_text(f"horovod=={VERSION} --hash=sha256:{SHA256}\n")
        options = ["--no-deps", "--no-binary", "horovod", "--no-build-isolation"]
        command = self.venv.pip("download", *options, "-d", str(folder), "-r", str(wanted))
        self.runner.run(command, phase="horovod-source")
        archive = next(folder.glob("horovod-*.tar.gz"))
        with tarfile.open(archive) as opened:
            opened.extractall(folder, **_EXTRACTION)  # noqa: S202  see there
        sources = folder / f"horovod-{VERSION}"
        for name, old, new in CHANGES:
            _change(sources / name, old, new)
        return sources

    def _build(self, sources: Path, folder: Path) -> Path:
        cmake = find_cmake(self.venv)
        self.runner.bar.done("cmake")
        built = folder / "wheel"
        command = self.venv.pip("wheel", "-v", "--no-build-isolation", "--no-deps", "-w", str(built), str(sources))
        self.runner.run(command, phase="horovod", environment=self._environment(cmake))
        if not any(contains(wheel, LIBRARY) for wheel in built.glob("*.whl")):
            reason = f"the build succeeded, but its wheel has no {LIBRARY}"
            raise StepFailed(
                self.runner.bar.title("horovod"), 0, self.runner.log("horovod"), [reason], self.runner.program
            )
        return built

    def _environment(self, cmake: Path) -> dict[str, str]:
        # Neither the jobs of the make that runs us nor a user's other generator suit Horovod's build.
        dropped = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "CMAKE_GENERATOR")
        inherited = {name: value for name, value in self.environment.items() if name not in dropped}
        return {
            **inherited,
            **dict(self.facts.options),
            "PATH": f"{self.venv.programs}{os.pathsep}{self.environment.get('PATH', '')}",
            "HOROVOD_CMAKE": str(cmake),
            "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 refuses the bundled Gloo's own, older, minimum
            "MAKEFLAGS": f"-j{parallel_jobs(self.environment)}",
        }


def contains(wheel: Path, beginning: str) -> bool:
    with zipfile.ZipFile(wheel) as opened:
        return any(name.startswith(beginning) for name in opened.namelist())


def _change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    if old not in text:
        raise ValueError(f"{path} does not contain {old!r}: this is not Horovod {VERSION}")
    path.write_text(text.replace(old, new))


def _compiler_facts() -> str:
    """Target and major version: what decides the C++ library's symbols."""
    compiler = find_compiler()
    if compiler is None:
        return "none"
    target, version = (_ask([*compiler, flag]) for flag in ("-dumpmachine", "-dumpversion"))
    return f"{Path(shutil.which(compiler[0]) or compiler[0]).resolve().name} {target} {version.split('.')[0]}"


def _ask(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _instruction_sets(cpuinfo: Path) -> str:
    """Those of the three that Horovod's CMakeLists.txt looks for which this processor has."""
    try:
        flags = next(line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")).split()
    except (OSError, StopIteration):
        return ""
    return " ".join(name for name in ("avx", "f16c", "fma") if name in flags)
