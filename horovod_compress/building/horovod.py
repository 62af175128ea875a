"""Builds Horovod for the torch of this Python, once: a minute and three quarters on two idle cores.

Horovod publishes no wheels, and its last release predates the C++20 that torch's headers ask for today. Wheels are
kept for the user, across checkouts and environments.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .stage import StageFailed, Stages

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

# PyTorch over Gloo: nothing but a compiler is needed. A variable of the same name set by the user wins, so that
# HOROVOD_GPU_OPERATIONS=NCCL or an MPI build need no change here.
_CHOSEN = ("WITH_PYTORCH", "WITHOUT_TENSORFLOW", "WITHOUT_MXNET", "WITH_GLOO", "WITHOUT_MPI")
OPTIONS = {**{f"HOROVOD_{name}": "1" for name in _CHOSEN}, "HOROVOD_CPU_OPERATIONS": "GLOO"}
_BUILD_VARIABLE = re.compile(r"HOROVOD_(WITH(OUT)?_|GPU|CPU_OPERATIONS$|BUILD_|CUDA_HOME$|NCCL_|ALLOW_MIXED|ROCM_)")
# Horovod's own needs: its wheel is installed without asking pip for them, because pip would find "torch" there too.
# setuptools stands in for the distutils that its launcher imports, which Python 3.12 removed.
NEEDS = ("cloudpickle", "psutil", "pyyaml", "packaging", "cffi", "setuptools")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
LOADING = "import torch; from horovod.torch import mpi_lib_v2"
NVIDIA = Path(sysconfig.get_path("purelib"), "nvidia")


def build_options(environment: Mapping[str, str]) -> dict[str, str]:
    """Horovod's build options: ours, overridden by those of the caller. Its run-time settings play no part."""
    given = {name: value for name, value in environment.items() if _BUILD_VARIABLE.match(name)}
    # HOROVOD_WITH_MPI=1 alone must be enough, although ours is HOROVOD_WITHOUT_MPI=1.
    return {name: value for name, value in OPTIONS.items() if name.replace("WITHOUT", "WITH") not in given} | given


def facts(environment: Mapping[str, str]) -> dict[str, Any]:
    """Everything that makes one build of Horovod differ from another; equal facts, equal wheel."""
    found = filter(shutil.which, ("c++", "g++", "clang++"))
    compiler, cpuinfo = shlex.split(environment.get("CXX", "")) or [next(found, "c++")], Path("/proc/cpuinfo")
    program = Path(shutil.which(compiler[0]) or compiler[0]).resolve().name
    target, version = (said(*compiler, flag) for flag in ("-dumpmachine", "-dumpversion"))
    flags = re.search("^flags.*", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    return {
        "horovod": VERSION,
        "torch": importlib.metadata.version("torch"),  # 2.13.0+cpu and 2.13.0+cu130 need different builds
        "python": sysconfig.get_config_var("SOABI"),
        "platform": sysconfig.get_platform(),
        "c_library": "-".join(platform.libc_ver()),
        "compiler": f"{program} {target} {version.split('.')[0]}",
        # Horovod's build asks the processor for these, so a shared home folder needs them.
        "instruction_sets": " ".join(name for name in ("avx", "f16c", "fma") if flags and name in flags[0].split()),
        "options": sorted(build_options(environment).items()),
        "recipe": repr(CHANGES),
    }


def key(found: Mapping[str, Any]) -> str:
    """A name a person can read, made unique by a digest of all facts."""
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
    return f"horovod-{found['horovod']}-torch-{found['torch']}-{found['python']}-{digest[:12]}"


def cache() -> Path:
    """The user's folder of wheels, each in a folder that appears whole, by one rename, or not at all."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "horovod-compress", "wheels")


def install(stages: Stages, environment: Mapping[str, str]) -> Path:
    """Installs Horovod into this Python's environment; returns its wheel, from the cache or built now.

    Raises:
        StageFailed: a stage failed. A wheel whose library does not load is removed from the cache.
    """
    found = facts(environment)
    entry = cache() / key(found)
    entry.parent.mkdir(parents=True, exist_ok=True)
    with entry.with_name(f"{entry.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two processes that want it, one builds and the other waits
        if not any(entry.glob("*.whl")):
            _build(stages, entry, found, environment)
    wheel = next(entry.glob("*.whl"))
    stages.run("installing Horovod", [*PIP, "install", "--no-deps", "--no-index", "--force-reinstall", wheel])
    try:
        stages.run("loading Horovod", [sys.executable, "-c", LOADING])
    except StageFailed:
        shutil.rmtree(entry)
        raise
    return wheel


def _build(stages: Stages, entry: Path, found: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Makes an entry of the cache, in a folder of a name that build systems can be trusted with: no + of 2.13.0+cpu."""
    prefix = f"partial-{entry.name.rpartition('-')[2]}-"
    for remains in entry.parent.glob(f"{prefix}*"):  # of a build that was killed
        shutil.rmtree(remains, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=entry.parent, ignore_cleanup_errors=True) as name:
        folder, sources, built = Path(name), Path(name, f"horovod-{VERSION}"), Path(name, "wheel")
        (folder / "wanted.txt").write_text(f"horovod=={VERSION} --hash=sha256:{SHA256}\n")
        options = ["--no-deps", "--no-binary", "horovod", "--no-build-isolation", "-d", name]
        stages.run("downloading Horovod", [*PIP, "download", *options, "-r", f"{name}/wanted.txt"])
        shutil.unpack_archive(next(folder.glob("horovod-*.tar.gz")), folder)
        for file, old, new in CHANGES:
            text = (sources / file).read_text()
            if old not in text:
                raise StageFailed(f"{sources / file} does not contain {old!r}: this is not Horovod {VERSION}")
            (sources / file).write_text(text.replace(old, new))
        path = f"{sysconfig.get_path('scripts')}:{environment.get('PATH', '')}"
        if shutil.which("cmake", path=path) is None:
            stages.run("installing CMake", [*PIP, "install", "cmake>=3.18"])
        # Neither the jobs of the make that runs us nor a user's other generator suit Horovod's build.
        dropped = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "CMAKE_GENERATOR")
        inherited = {name: value for name, value in environment.items() if name not in dropped}
        jobs = environment.get("HVC_JOBS") or len(os.sched_getaffinity(0))
        # CMake 4 refuses the bundled Gloo's own, older, minimum.
        ours = {"PATH": path, "MAKEFLAGS": f"-j{jobs}", "CMAKE_POLICY_VERSION_MINIMUM": "3.5"}
        command = [*PIP, "wheel", "-v", "--no-build-isolation", "--no-deps", "-w", str(built), str(sources)]
        stages.run("building Horovod", command, {**inherited, **dict(found["options"]), **ours})
        (built / "facts.json").write_text(json.dumps(found, indent=2) + "\n")
        shutil.rmtree(entry, ignore_errors=True)  # an incomplete one
        built.rename(entry)


def said(*command: str) -> str:
    """What a command prints; nothing where there is none."""
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, stdout=-1, stderr=subprocess.STDOUT, text=True, check=False).stdout.strip()


# ---- NCCL operations ----------------------------------------------------------------------------


def find_nvcc(environment: Mapping[str, str], nvidia: Path = NVIDIA) -> str | None:
    """As setup.py looks for it: the machine's, or the one among Python's packages, if its parts are there."""
    home, packaged = environment.get("CUDA_HOME"), nvidia / "cu13"
    names = [environment.get("CUDACXX"), home and f"{home}/bin/nvcc", "nvcc", "/usr/local/cuda/bin/nvcc"]
    names.append(f"{packaged}/bin/nvcc" if (packaged / "nvvm/bin/cicc").exists() else None)
    return next(filter(None, (shutil.which(name, path=environment.get("PATH")) for name in names if name)), None)


def cuda_of_torch() -> str | None:
    """The CUDA release that the installed torch was built with; read, because importing torch takes seconds."""
    found = importlib.util.find_spec("torch")
    written = Path(found.origin or "").parent / "version.py" if found else Path()
    return runpy.run_path(str(written)).get("cuda") if written.is_file() else None


def with_nccl(environment: Mapping[str, str], links: Path, nvidia: Path = NVIDIA) -> Mapping[str, str]:
    """The environment of a build with NCCL operations, if torch has CUDA, and nvcc and NCCL's package are there.

    Args:
        links: a folder in which linkers find NVIDIA's packages: those have libraries with a number only, and no lib64.

    Raises:
        StageFailed: nvcc is of another CUDA than torch.
    """
    nvcc, torch = find_nvcc(environment, nvidia), cuda_of_torch()
    if not (nvcc and torch and (nvidia / "nccl").is_dir()):
        return environment
    release = re.search(r"release ((\d+)\.\d+)", said(nvcc, "--version"))
    if release and release[2] != torch.split(".")[0]:
        what = f"{nvcc} is of CUDA {release[1]}, and torch is built for CUDA {torch}"
        raise StageFailed(f"{what}: set CUDACXX to an nvcc of the same major release")
    # It may be a script that starts another, which says where it is.
    top = re.search(r"^#\$ TOP=(.+)$", said(nvcc, "--dryrun", "-x", "cu", "-c", "/dev/null"), re.MULTILINE)
    home = str(Path(top[1] if top else f"{nvcc}/../..").resolve())
    shutil.rmtree(links, ignore_errors=True)
    (links / "lib").mkdir(parents=True)
    (links / "include").symlink_to(nvidia / "nccl/include")
    # The machine's nvcc knows where its own runtime is.
    runtime = nvidia.glob("cu13/lib/libcud*") if nvidia in Path(nvcc).parents else ()
    for library in (*nvidia.glob("nccl/lib/libnccl.so.*"), *runtime):
        name = library.name if library.suffix == ".a" else f"{library.name.partition('.so')[0]}.so"
        (links / "lib" / name).symlink_to(library)
    nccl = {"GPU_OPERATIONS": "NCCL", "NCCL_HOME": str(links), "NCCL_LINK": "SHARED", "CUDA_HOME": home}
    ours = {f"HOROVOD_{name}": value for name, value in nccl.items()}
    linked = ":".join(filter(None, (f"{links}/lib", environment.get("LIBRARY_PATH"))))
    # What the caller says of it wins.
    return {**ours, "CUDA_HOME": home, "CMAKE_LIBRARY_PATH": f"{links}/lib", **environment, "LIBRARY_PATH": linked}
