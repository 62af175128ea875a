"""Builds the source distribution, a wheel from it, and installs that into a new environment to see that it works.

python tools/build_wheel.py                  all of it, into dist/
python tools/build_wheel.py --without-job    without Horovod and its job of two ranks

The wheel comes from the unpacked source distribution, so that this has what a build needs. Its tag is the one that
auditwheel finds to be true. The new environment gets torch, the wheel, and Horovod by `hvd-compress build-horovod`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheels"
SOURCE, VENV, ELSEWHERE = WORK / "source", WORK / "venv", WORK / "elsewhere"
BIN = Path(sys.executable).parent  # not resolved: .venv/bin/python is a link
TORCH = "torch==2.13.0"
_EXTRACTION: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


class Broken(Exception):
    """What was built is not what it should be."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, audit, install and try; return 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the results (default dist)")
    parser.add_argument("--torch", default=TORCH, help="torch requirement to try the wheel with")
    parser.add_argument("--without-job", action="store_true", help="leave Horovod and its job of two ranks out")
    options = parser.parse_args(arguments)
    try:
        archive = build_sdist(options.out)
        if absent := missing(tracked(), names(archive)):
            raise Broken(f"{archive.name} lacks {', '.join(absent)}: add them to MANIFEST.in")
        wheel = audited(build_wheel(archive), options.out)
        attempt(wheel, options.torch, job=not options.without_job)
    except (Broken, subprocess.CalledProcessError) as problem:
        print(f"tools/build_wheel.py: {problem}", file=sys.stderr)
        return 1
    print(f"{archive}\n{wheel}")
    return 0


# ---- building ---------------------------------------------------------------------------------


def build_sdist(out: Path) -> Path:
    """Return the archive, made by the tools of this environment."""
    step("building the source distribution")
    run([sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", out, ROOT])
    return newest(out, "*.tar.gz")


def names(archive: Path) -> set[str]:
    """Return the files of an archive, without the folder around them."""
    with tarfile.open(archive) as opened:
        return {name.partition("/")[2] for name in opened.getnames()}


def tracked() -> list[str]:
    """Return the files of this checkout; none outside of git, or where there is no git."""
    if shutil.which("git") is None:
        return []
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


def missing(wanted: Iterable[str], present: set[str]) -> list[str]:
    """Return what a source distribution lacks."""
    return sorted(set(wanted) - present)


def build_wheel(archive: Path) -> Path:
    """Return the wheel as the compiler made it; objects of the last time are used again."""
    step("building the wheel from it")
    for path in SOURCE.iterdir() if SOURCE.exists() else ():
        if path.name != "build":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    unpacked = WORK / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    with tarfile.open(archive) as opened:
        opened.extractall(unpacked, **_EXTRACTION)  # noqa: S202  made a moment ago
    shutil.copytree(next(unpacked.iterdir()), SOURCE, dirs_exist_ok=True)
    shutil.rmtree(unpacked)
    out = WORK / "built"
    shutil.rmtree(out, ignore_errors=True)
    for stale in SOURCE.glob("build/[bl]*"):  # bdist and lib: their old files would be packed too
        shutil.rmtree(stale)
    environment = {**os.environ, "HVC_CUDA": os.environ.get("HVC_CUDA", "0")}
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, SOURCE], environment)
    return newest(out, "*.whl")


def audited(wheel: Path, out: Path) -> Path:
    """Return the wheel with the tag that is true of it, stripped."""
    step("auditing the wheel")
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"}
    repaired = WORK / "repaired"
    shutil.rmtree(repaired, ignore_errors=True)
    run([sys.executable, "-m", "auditwheel", "repair", "--strip", "-w", repaired, wheel], environment)
    found = newest(repaired, "*.whl")
    if "manylinux" not in found.name:
        raise Broken(f"{found.name} has no manylinux tag")
    return Path(shutil.copy(found, out / found.name))


# ---- trying -----------------------------------------------------------------------------------


def attempt(wheel: Path, torch: str, *, job: bool) -> None:
    """Install it into a new environment, away from the sources, and use it there."""
    step("installing it into a new environment")
    run([sys.executable, "-m", "venv", "--clear", VENV])
    ELSEWHERE.mkdir(exist_ok=True)
    inside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment = {**inside, "PATH": f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"}

    def there(*command: str) -> None:
        run([VENV / "bin" / command[0], *command[1:]], environment, ELSEWHERE)

    there("python", "-m", "pip", "install", "--quiet", "--no-compile", torch, str(wheel))
    step("trying it")
    there("python", "-c", _IMPORTS)
    there("hvd-compress", "bench", "kernels", "--count", "100000", "--repeat", "3")
    if job:
        there("hvd-compress", "build-horovod")
        there("python", "-c", "import horovod_compress.torch")
        there("hvd-compress", "--check-build")
        there("hvd-compress", "verify", "--np", "2")


# No import of the package's own may bring what it did not ask for, and none may come from the sources.
_IMPORTS = f"""
import sys
import horovod_compress
assert not horovod_compress.__file__.startswith({str(ROOT / "horovod_compress")!r}), horovod_compress.__file__
assert "torch" not in sys.modules
from horovod_compress import ops
print(horovod_compress.__version__, ops.instruction_set())
"""


def newest(folder: Path, pattern: str) -> Path:
    """Return the file that was written last."""
    return max(folder.glob(pattern), key=lambda path: path.stat().st_mtime)


def step(text: str) -> None:
    """Say what comes next."""
    print(f"== {text}", flush=True)


def run(command: Sequence[str | Path], environment: dict[str, str] | None = None, folder: Path | None = None) -> None:
    """Run a command that must succeed."""
    subprocess.run(list(map(str, command)), env=environment, cwd=folder, stdin=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    sys.exit(main())
