"""Builds the two extension modules; everything else about the package is in pyproject.toml.

`_cpu` is always built, `_cuda` where there are a GPU and nvcc, on the machine or among Python's packages. Neither needs
torch, so one build serves every torch version.

Environment: HVC_CUDA=0 never builds `_cuda`, HVC_CUDA=1 builds it without a GPU too and makes a missing nvcc an error;
HVC_SANITIZE=address,undefined builds with sanitizers; CXX, CXXFLAGS, LDFLAGS, CUDACXX and CUDA_HOME mean what they
usually mean.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
OBJECTS = ROOT / "build" / "objects"
MODULES = ("horovod_compress._cpu", "horovod_compress._cuda")

# Turing to Blackwell. Machine code for each of these that the installed nvcc knows, and PTX of the newest for what
# comes after. Never the GPU of the machine that builds: the result is carried to others. HVC_CUDA_ARCH chooses fewer.
CUDA_ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)

# CPU and CUDA must give the same bits, so neither compiler may fuse a multiplication and an addition by itself.
# No -march=native: the instruction set is chosen at run time.
HOST_FLAGS = ("-fPIC", "-fopenmp", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-psabi")
CPU_FLAGS = ("-O3", "-std=c++17", *HOST_FLAGS)
# What only hands arguments on gains nothing from the rest.
BINDING_FLAGS = ("-O1",)
CUDA_FLAGS = ("-O3", "-std=c++17", "--fmad=false", "-lineinfo", "-Xcompiler=" + ",".join(HOST_FLAGS))
# With it, nvcc tells what every kernel uses. That is kept with the object and not shown.
TELL_USAGE = "-Xptxas=-v"
# The CUDA runtime inside `_cuda` stays private: torch brings its own copy into the same process.
CUDA_LINK_FLAGS = ("-cudart=static", "-Xcompiler=-fopenmp", "-Xlinker=--exclude-libs,ALL")

# They take longest to compile, so they are started first: at the end all cores are busy.
SLOW_SOURCES = ("lowrank", "bind_cpu", "sign", "sketch", "values", "dense", "norm")

# nvidia-smi waits for a driver that is in trouble.
MOST_SECONDS = 10

# nvcc as NVIDIA publishes it for Python, and a file of each package that it needs here: cicc, its headers, the runtime
# and CUB. Found without those it came for somebody else, and builds nothing of ours.
NVCC_PACKAGE = (
    "bin/nvcc",
    "nvvm/bin/cicc",
    "include/crt/host_config.h",
    "lib/libcudart_static.a",
    "include/cccl/cub/cub.cuh",
)


@dataclass(frozen=True)
class Toolchain:
    """How the sources of one module become objects and a shared library."""

    compiler: tuple[str, ...]
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]


def sanitizer_flags() -> tuple[str, ...]:
    chosen = [name for name in os.environ.get("HVC_SANITIZE", "").split(",") if name]
    # One flag each: nvcc would take the comma between two for its own.
    return (*(f"-fsanitize={name}" for name in chosen), "-fno-omit-frame-pointer", "-g") if chosen else ()


def include_flags() -> tuple[str, ...]:
    folders = (ROOT / "csrc", pybind11.get_include(), sysconfig.get_path("include"))
    return tuple(f"-I{folder}" for folder in folders)


def cpu_toolchain() -> Toolchain:
    extra, link = (tuple(shlex.split(os.environ.get(name, ""))) for name in ("CXXFLAGS", "LDFLAGS"))
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("c++") or "g++"]
    return Toolchain(
        compiler=tuple(compiler),
        compile_flags=(*CPU_FLAGS, *sanitizer_flags(), *include_flags(), *extra),
        link_flags=("-fopenmp", *sanitizer_flags(), *link),
    )


def cuda_toolchain(nvcc: str, architectures: Sequence[int]) -> Toolchain:
    """nvcc compiles and links everything of `_cuda`: it alone knows where its headers and libraries are."""
    sanitize = tuple(f"-Xcompiler={flag}" for flag in sanitizer_flags())
    return Toolchain(
        compiler=(nvcc,),
        compile_flags=(*CUDA_FLAGS, *architecture_flags(architectures), *sanitize, *include_flags()),
        link_flags=(*CUDA_LINK_FLAGS, *library_flags(nvcc), *sanitize),
    )


def installed_cuda_toolchain() -> Toolchain:
    nvcc, wanted = find_nvcc() or "nvcc", cuda_architectures()
    known = known_architectures(nvcc, wanted)
    if not known:
        raise CompileError(f"{nvcc} knows none of the architectures {wanted}: install CUDA 12 or 13")
    return cuda_toolchain(nvcc, known)


def library_flags(nvcc: str) -> tuple[str, ...]:
    """NVIDIA's packages have their libraries in lib, and their nvcc looks for lib64."""
    folder = Path(nvcc).parent.parent / "lib"
    return (f"-L{folder}",) if (folder / "libcudart_static.a").exists() else ()


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    candidates = [os.environ.get("CUDACXX"), home and f"{home}/bin/nvcc", "nvcc", "/usr/local/cuda/bin/nvcc"]
    return next((found for name in candidates if name and (found := shutil.which(name))), None) or packaged_nvcc()


def packaged_nvcc() -> str | None:
    home = Path(sysconfig.get_path("platlib"), "nvidia", "cu13")
    return str(home / "bin" / "nvcc") if all((home / name).exists() for name in NVCC_PACKAGE) else None


def architecture_flags(chosen: Sequence[int]) -> tuple[str, ...]:
    machine_code = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in chosen]
    return (*machine_code, f"-gencode=arch=compute_{chosen[-1]},code=compute_{chosen[-1]}")


def known_architectures(nvcc: str, wanted: Sequence[int]) -> tuple[int, ...]:
    """Return those of the wanted architectures that a compiler has."""
    listed = subprocess.run([nvcc, "--list-gpu-arch"], check=True, capture_output=True, text=True).stdout.split()
    return tuple(number for number in wanted if f"compute_{number}" in listed)


def cuda_architectures() -> tuple[int, ...]:
    asked = os.environ.get("HVC_CUDA_ARCH") or ",".join(map(str, CUDA_ARCHITECTURES))
    chosen = tuple(number for number in CUDA_ARCHITECTURES if str(number) in asked.split(","))
    if len(chosen) < len(asked.split(",")):
        raise CompileError(f"HVC_CUDA_ARCH is {asked!r}: expected some of {CUDA_ARCHITECTURES}, separated by commas")
    return chosen


def sources(binding: str, pattern: str) -> list[str]:
    """Paths relative to the root, as setuptools wants them."""
    found = [ROOT / "csrc" / binding, *sorted((ROOT / "csrc").glob(pattern))]
    found.sort(key=lambda path: SLOW_SOURCES.index(path.stem) if path.stem in SLOW_SOURCES else len(SLOW_SOURCES))
    return [str(path.relative_to(ROOT)) for path in found]


def extensions() -> list[Extension]:
    modules = [Extension(MODULES[0], sources("bind_cpu.cpp", "cpu/*.cpp"))]
    if cuda_wanted():
        modules.append(Extension(MODULES[1], sources("bind_cuda.cpp", "cuda/*.cu")))
    return modules


def cuda_wanted() -> bool:
    choice = os.environ.get("HVC_CUDA", "")
    if choice not in ("", "0", "1"):
        raise CompileError(
            f"HVC_CUDA is {choice!r}: expected 0 (never), 1 (required) or nothing (where there is a GPU)"
        )
    if choice == "1" and not find_nvcc():
        raise CompileError(
            "HVC_CUDA=1, but nvcc was not found: put it in PATH, or set CUDACXX or CUDA_HOME; "
            "make setup CUDA=1 brings one"
        )
    has_sources = (ROOT / "csrc" / "bind_cuda.cpp").exists()
    wanted = choice == "1" or (choice == "" and has_gpu())
    return wanted and has_sources and find_nvcc() is not None


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """Whether there is an NVIDIA GPU: one of its device files, or one that nvidia-smi lists (as in WSL)."""
    if any(devices.glob("nvidia[0-9]*")):
        return True
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=MOST_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and "GPU 0:" in listed.stdout


@cache
def compiler_version(compiler: tuple[str, ...]) -> str:
    """An upgraded compiler behind the same name must rebuild the objects."""
    try:
        return subprocess.run([*compiler, "--version"], check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError(f"the compiler {shlex.join(compiler)} does not run: {error}") from error


def digest(path: str | Path) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def dependencies(depfile: Path) -> list[str]:
    """The headers and the source that a compiler listed with -MMD, in make's syntax."""
    _, _, listed = depfile.read_text().replace("\\\n", " ").partition(":")
    return shlex.split(listed)


class ObjectFile:
    """One source's object, and the record of what it was made from.

    Times of files say nothing after a checkout or a copy, so the record holds the contents' digests.
    """

    def __init__(self, source: str, toolchain: Toolchain) -> None:
        self.source = source
        # Variants (another Python, sanitizers) live side by side: going back and forth compiles nothing twice.
        variant = hashlib.sha256(repr(toolchain).encode()).hexdigest()[:12]
        self.path = OBJECTS / variant / f"{source.replace('/', '.')}.o"
        self.record = self.path.with_suffix(".json")
        less = BINDING_FLAGS if Path(source).stem == "bind_cpu" else ()  # nvcc warns of a second level
        self.command = [*toolchain.compiler, *toolchain.compile_flags, *less, "-c", str(ROOT / source)]
        self.version = compiler_version(toolchain.compiler)

    def is_current(self) -> bool:
        try:
            record = json.loads(self.record.read_text())
            same = record["command"] == self.command and record["version"] == self.version and self.path.exists()
            return same and all(digest(path) == value for path, value in record["files"].items())
        except (OSError, ValueError, KeyError):
            return False

    def compile(self) -> Path:
        if not self.is_current():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.record.unlink(missing_ok=True)
            depfile = self.path.with_suffix(".d")
            command = [*self.command, "-MMD", "-MF", str(depfile), "-o", str(self.path)]
            said = run(command, what=self.source, shows=TELL_USAGE not in command)
            files = {path: digest(path) for path in dependencies(depfile)}
            record = {"command": self.command, "version": self.version, "files": files, "said": said}
            self.record.write_text(json.dumps(record))
        return self.path

    def said(self) -> str:
        """What the compiler said of it, whenever it was compiled."""
        return str(json.loads(self.record.read_text())["said"])


def compile_all(files: list[ObjectFile], workers: int | None) -> list[str]:
    with ThreadPoolExecutor(max_workers=workers or os.cpu_count()) as pool:
        objects = [pool.submit(file.compile) for file in files]
        for done, compiled in enumerate(as_completed(objects), start=1):
            try:
                name = compiled.result().stem.removeprefix("csrc.")
            except BaseException:
                pool.shutdown(cancel_futures=True)  # what has not begun need not begin
                raise
            # In CMake's form, which the progress bar of `make setup` reads.
            print(f"[{100 * done // len(files):3d}%] {name}", flush=True)
    return [str(compiled.result()) for compiled in objects]


def run(command: list[str], what: str, shows: bool = True) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    said = result.stdout + result.stderr
    if shows or result.returncode != 0:
        print(said, end="", flush=True)
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()[-1:]
        hint = "; HVC_CUDA=0 builds without CUDA" if "nvcc" in command[0] else ""
        raise CompileError(f"{what} did not compile{hint}\n  {''.join(errors[:1])}\n  command: {shlex.join(command)}")
    return said


class BuildExtensions(build_ext):  # type: ignore[misc]
    """Compiles what changed, all sources at once, and replaces modules whole."""

    def build_extension(self, extension: Extension) -> None:
        is_cuda = extension.name.endswith("._cuda")
        toolchain = installed_cuda_toolchain() if is_cuda else cpu_toolchain()
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        objects = compile_all([ObjectFile(source, toolchain) for source in extension.sources], self.parallel)
        run([*toolchain.compiler, "-shared", *objects, *toolchain.link_flags, "-o", str(target)], what=extension.name)

    def copy_extensions_to_source(self) -> None:
        """Renames into place: a process that has the old module mapped must keep it unharmed."""
        built = [extension.name for extension in self.extensions]
        for name in MODULES:
            target = ROOT / self.get_ext_filename(name)
            if name in built:
                # Not get_ext_fullpath: in place, that is the target itself.
                shutil.copyfile(Path(self.build_lib, self.get_ext_filename(name)), target.with_suffix(".new"))
                target.with_suffix(".new").replace(target)
            else:
                # A `_cuda` of an earlier build would speak of sources that are no longer these.
                target.unlink(missing_ok=True)


if __name__ == "__main__":
    setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExtensions})
