"""What the recipes of `make setup` ask for: a stage TITLE COMMAND..., Horovod, or packages to be installed.

setup_env.py stage TITLE COMMAND... | requirements EXTRAS | cuda | horovod WITH_CUDA
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # nothing is installed yet

from horovod_compress.building import horovod  # noqa: E402
from horovod_compress.building.stage import StageFailed, Stages  # noqa: E402

# nvcc, cicc, its own headers, the runtime's headers and libraries, and CUB.
NVCC = "cuda-toolkit[nvcc,nvvm,crt,cudart,cccl]"
STAGES = Stages(ROOT / "build" / "setup", "make setup")


def requirements(extras: str, project: Path = ROOT / "pyproject.toml") -> list[str]:
    """What builds the package, what it and Horovod need, and what the extras add, with commas or spaces between."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        from pip._vendor import tomli as tomllib
    content = tomllib.loads(project.read_text(encoding="utf-8"))
    known, names = content["project"]["optional-dependencies"], extras.replace(",", " ").split()
    if not known.keys() >= set(names):
        raise StageFailed(f"EXTRAS is {extras!r}: pyproject.toml has {', '.join(known)}")
    needed = [*content["build-system"]["requires"], *content["project"]["dependencies"], *horovod.NEEDS]
    return list(dict.fromkeys([*needed, *(entry for name in names for entry in known[name])]))


def cuda() -> list[str]:
    """CuPy, NCCL and, where the machine has no nvcc, NVIDIA's packages of one."""
    release = horovod.cuda_of_torch()
    if release and not release.startswith("13."):
        problem = f"torch is built for CUDA {release}, and CUDA=1 installs packages of CUDA 13"
        raise StageFailed(f"{problem}: choose a torch for CUDA 13 with TORCH=, or go without:  make setup CUDA=0")
    # Where torch says nothing, the oldest release, which asks least of a driver (580 or newer).
    return [*requirements("cuda"), *([] if horovod.find_nvcc(os.environ) else [f"{NVCC}=={release or '13.0'}.*"])]


def install_horovod(with_cuda: bool) -> None:
    """Installs Horovod, unless it is there for the same torch, compiler and options."""
    environment = horovod.with_nccl(os.environ, Path(sys.prefix, "gpu-links")) if with_cuda else os.environ
    noted, wanted = Path(sys.prefix, "horovod-wheel"), horovod.key(horovod.facts(environment))
    installed = any(importlib.metadata.distributions(name="horovod"))
    if not (installed and noted.exists() and noted.read_text() == wanted):
        noted.unlink(missing_ok=True)
        horovod.install(STAGES, environment)
        noted.write_text(wanted)
        if with_cuda and not horovod.cuda_of_torch():
            print("This torch is a build for CPUs, so Horovod has no GPU operations; horovod-compress needs none.")


def main(verb: str, *words: str) -> int:
    """Does what a recipe asks for."""
    try:
        if verb == "stage":
            STAGES.run(words[0], words[1:])
        elif verb == "horovod":
            install_horovod(words == ("1",))
        else:
            print("\n".join(cuda() if verb == "cuda" else requirements(words[0])))
    except (StageFailed, KeyboardInterrupt) as problem:
        print(f"\n{str(problem) or 'Interrupted: run make setup again, it keeps what is done.'}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
