"""The tools that compile CUDA sources, where there is no GPU: what they run, read and say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cuda_usage

TOOLS = Path(cuda_usage.__file__).parent

REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5firstPf' for 'sm_90'
ptxas info    : Function properties for _Z5firstPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers
ptxas info    : Compile time = 1.234 ms
ptxas info    : Compiling entry function '_Z6secondPf' for 'sm_80'
ptxas info    : Function properties for _Z6secondPf
    64 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, 64 bytes cumulative stack size, 352 bytes cmem[0]
"""


def test_reports_of_ptxas_are_read() -> None:
    first, second = cuda_usage.usages(REPORT)
    assert first == cuda_usage.Usage("_Z5firstPf", "90", 12, 0, 0) and not first.wasteful
    assert second == cuda_usage.Usage("_Z6secondPf", "80", 255, 64, 20) and second.wasteful
    assert "sm_80" in cuda_usage.table([first, second]) and "20 bytes of spills" in cuda_usage.table([first, second])
    assert cuda_usage.table([first]) == ""


def test_a_kernel_with_too_many_registers_for_its_threads_is_found() -> None:
    wide = cuda_usage.wide_kernels("start_blocks(second<W>, blocks, kLineThreads, launch); start_blocks(first, 1, 1);")
    assert wide == {"second"}
    first, second = cuda_usage.usages(REPORT.replace("255", "66").replace("12 reg", "66 reg"), wide)
    assert (first.threads, second.threads) == (256, 1024) and second.too_large and not first.too_large
    assert "cannot be started" in cuda_usage.table([second]) and cuda_usage.table([first]) == ""
    assert not cuda_usage.Usage("third", "75", 64, 0, 0, 1024).too_large
    assert cuda_usage.wide_kernels((TOOLS.parent / "csrc" / "cuda" / "lowrank.cu").read_text()) == {
        "orthonormalise_kernel",
        "start_kernel",
    }


def tool(*arguments: str, program: str, **environment: str) -> Any:
    """Run the tool, or another program, in its own process: setup.py imports setuptools, which takes over distutils."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(TOOLS)!r}); {program}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)


@pytest.mark.slow
def test_fewer_architectures_can_be_asked_for() -> None:
    program = "import cuda_compile as c; print(c.flags().cuda_architectures())"
    assert tool(program=program, HVC_CUDA_ARCH="").stdout == "(75, 80, 86, 89, 90, 100, 120)\n"
    assert tool(program=program, HVC_CUDA_ARCH="90,80").stdout == "(80, 90)\n"
    refused = tool(program=program, HVC_CUDA_ARCH="sm_90")
    assert refused.returncode == 1 and "HVC_CUDA_ARCH is 'sm_90': expected some of (75, 80" in refused.stderr


def test_libraries_are_found_where_packages_of_nvcc_have_them(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libcudart_static.a").touch()
    program = "import cuda_compile as c; print(*(c.flags().library_flags(name) for name in sys.argv[1:]))"
    done = tool(f"{tmp_path}/bin/nvcc", f"{tmp_path}/toolkit/bin/nvcc", "nvcc", program=program)
    assert done.stdout == f"('-L{tmp_path}/lib',) () ()\n", done.stderr


COMPILE = """
import pathlib, cuda_compile
folder, setup = pathlib.Path(sys.argv.pop(1)), cuda_compile.flags()
setup.OBJECTS, cuda_compile.TARGET, cuda_compile.flags = folder / "objects", folder / "_cuda.so", lambda: setup
sys.exit(cuda_compile.main())
"""

# Writes down what it is called for; fails for the source in FAILS, and says of a source's kernels what a file has that
# is named like it, else what `report` has.
NVCC = """\
#!/bin/sh
case "$*" in *--version*) echo release 13.0; exit;; *--list-gpu-arch*) echo compute_80 compute_90; exit;; esac
echo "$@" >> {folder}/calls
while [ $# -gt 0 ]; do
  case $1 in -c) source=$2;; -MF) depfile=$2;; -o) object=$2;; esac
  shift
done
case $source in */$FAILS) echo "$source(3): error: variable was declared but never referenced" >&2; exit 2;; esac
case $source in *.cu) cat {folder}/$(basename $source) 2>/dev/null || cat {folder}/report;; esac
[ -z "$depfile" ] || echo "$object: $source" > "$depfile"
echo made > "$object"
"""
FIT = REPORT[: REPORT.index("ptxas info    : Compile time")]


def compile_all(folder: Path, *arguments: str, reports: dict[str, str] | None = None, **environment: str) -> Any:
    nvcc = folder / "nvcc"
    nvcc.write_text(NVCC.format(folder=folder))
    nvcc.chmod(0o755)
    for name, text in {"report": FIT, **(reports or {})}.items():
        (folder / name).write_text(text)
    return tool(str(folder), *arguments, program=COMPILE, CUDACXX=str(nvcc), **environment)


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def test_all_cuda_sources_are_compiled_for_one_architecture_and_linked_once(tmp_path: Path) -> None:
    done = compile_all(tmp_path)
    assert done.returncode == 0 and "All CUDA kernels compile for sm_90" in done.stdout, done.stdout + done.stderr
    *compiled, linked = calls(tmp_path)
    sources = sorted(Path(call.split(" -c ")[1].split()[0]).name for call in compiled)
    assert sources == sorted(["bind_cuda.cpp", *(path.name for path in (TOOLS.parent / "csrc" / "cuda").glob("*.cu"))])
    assert all("code=sm_90" in call and "sm_80" not in call for call in compiled)
    assert all("-Werror=all-warnings" in call and "-Xcompiler=-Werror" in call for call in compiled)
    assert "-shared" in linked and linked.endswith(str(tmp_path / "_cuda.so"))
    (tmp_path / "calls").unlink()
    assert compile_all(tmp_path).returncode == 0
    assert len(calls(tmp_path)) == 1, "what has not changed is not compiled again"


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["90,80", "all"])
def test_other_architectures_can_be_compiled_for(asked: str, tmp_path: Path) -> None:
    """All are those that this nvcc knows, whatever HVC_CUDA_ARCH says."""
    done = compile_all(tmp_path, "--arch", asked, HVC_CUDA_ARCH="75")
    assert done.returncode == 0 and "compile for sm_80, sm_90 without" in done.stdout
    assert all("code=sm_80" in call and "code=sm_90" in call and "sm_75" not in call for call in calls(tmp_path)[:-1])


def test_a_kernel_that_spills_fails_also_when_nothing_is_compiled_again(tmp_path: Path) -> None:
    for _ in range(2):
        done = compile_all(tmp_path, reports={"sign.cu": REPORT})
        assert done.returncode == 1 and "1 kernel(s) spill" in done.stderr and "20 bytes of spills" in done.stderr
        assert "sm_80: 1 kernels; registers of a thread: median 255, more than 64 in 1, maximum 255" in done.stdout
        assert "ptxas info" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("said", ["", REPORT.replace("Used 12 registers", "Used twelve registers")])
def test_a_report_that_is_not_understood_fails(said: str, tmp_path: Path) -> None:
    done = compile_all(tmp_path, reports={"sign.cu": said})
    assert done.returncode == 1 and "sign.cu: what nvcc says of its kernels was not understood" in done.stderr


def test_a_warning_of_nvcc_fails(tmp_path: Path) -> None:
    done = compile_all(tmp_path, FAILS="sign.cu")
    assert done.returncode == 1 and "sign.cu did not compile" in done.stderr and "never referenced" in done.stderr


def test_compiling_without_nvcc_is_skipped_aloud_and_fails_where_it_is_insisted_on() -> None:
    program = (
        "import cuda_compile as c; s = c.flags(); s.find_nvcc = lambda: None; c.flags = lambda: s; sys.exit(c.main())"
    )
    skipped, insisted = (tool(program=program, HVC_CUDA=choice) for choice in ("", "1"))
    assert skipped.returncode == 0 and "were not compiled: no nvcc" in skipped.stdout
    assert insisted.returncode == 1 and "were not compiled: no nvcc" in insisted.stderr
