"""What `make setup` does again and what not, with a Python that only writes down what it is asked for."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """\
#!/bin/sh
here={folder}
case "$*" in
  -c*) [ -e $here/old ] && exit 1; exit 0;;
  *"stage creating .venv"*) rm -rf .venv; mkdir -p .venv/bin; cp $0 .venv/bin/python; echo .venv >>$here/calls;;
  *" stage "*) [ -e "$here/fails" ] && exit 1; echo "$3" >>$here/calls;;
  *requirements*) echo numpy; echo "requirements $3" >>$here/asked;;
  *" horovod "*) echo "horovod $3 HVC_CUDA=$HVC_CUDA" >>$here/asked;;
esac
"""
ALL = {".venv", "installing build tools", "installing packages", "compiling kernels", "installing horovod-compress"}
OURS = {"compiling kernels", "installing horovod-compress"}
PACKAGES = {"installing packages"}


class Checkout:
    """A copy of what make reads."""

    def __init__(self, folder: Path) -> None:
        self.python = folder / "python"
        self.python.write_text(PYTHON.format(folder=folder))
        self.python.chmod(0o755)
        self.calls, self.asked, self.root = folder / "calls", folder / "asked", folder / "checkout"
        for name in ("csrc/cpu", "horovod_compress"):
            (self.root / name).mkdir(parents=True)
        for name in ("Makefile", "pyproject.toml", "setup.py"):
            shutil.copy(ROOT / name, self.root / name)
        for name in ("csrc/cpu/sign.cpp", "horovod_compress/_cpu.any.so"):
            (self.root / name).touch()

    def make(self, *words: str, status: int = 0, **environment: str) -> set[str]:
        """Run make, and return the stages that it has run."""
        for path in (self.calls, self.asked):
            path.write_text("")
        done = subprocess.run(
            ["make", f"PYTHON={self.python}", *(words or ["environment"])],
            cwd=self.root,
            env=_outside_of_make() | environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        self.said = done.stdout + done.stderr
        assert (done.returncode != 0) == (status != 0), self.said
        return set(self.calls.read_text().splitlines())


def _outside_of_make() -> dict[str, str]:
    """Return the environment without that of `make test`."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "HVC_", "CUDA"))
    }


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_each_stage_is_done_once_and_again_where_what_it_is_made_from_has_changed(checkout: Checkout) -> None:
    assert checkout.make() == ALL
    assert checkout.make() == set() and checkout.said == ""
    assert checkout.asked.read_text() == "horovod 0 HVC_CUDA=\n", "what is there decides, not what was done"
    source = checkout.root / "csrc/cpu/sign.cpp"
    os.utime(source)
    assert checkout.make() == set(), "contents count, not times"
    source.write_text("changed")
    os.utime(source, (1, 1))
    assert checkout.make() == OURS
    (source.parent / "new.h").touch()
    assert checkout.make() == OURS
    assert checkout.make(HVC_SANITIZE="address") == OURS and checkout.make() == OURS
    (checkout.root / "horovod_compress/_cpu.any.so").unlink()
    assert checkout.make() == OURS


def test_packages_follow_torch_the_extras_and_the_project(checkout: Checkout) -> None:
    checkout.make()
    for _ in range(2):
        assert checkout.make("environment", "TORCH=torch==2.12") == PACKAGES and checkout.make() == PACKAGES
    assert checkout.make("environment", "EXTRAS=test,lint") == PACKAGES
    assert "requirements test,lint\n" in checkout.asked.read_text()
    assert checkout.make() == checkout.make("environment", "EXTRAS=test,lint") == set(), "neither undoes the other"
    with (checkout.root / "pyproject.toml").open("a") as project:
        project.write("# changed\n")
    assert checkout.make() == PACKAGES | OURS


def test_an_environment_that_does_not_work_is_made_anew(checkout: Checkout, tmp_path: Path) -> None:
    checkout.make()
    checkout.root = checkout.root.rename(tmp_path / "elsewhere")
    assert checkout.make() == ALL, "its programs have their old path in them"
    (checkout.root / ".venv/bin/python").unlink()
    assert checkout.make() == ALL


def test_what_has_failed_is_done_again_and_what_was_interrupted_is_removed(checkout: Checkout, tmp_path: Path) -> None:
    checkout.make()
    site = checkout.root / ".venv/lib/python3.12/site-packages"
    for name in ("half", "whole"):
        (site / f"{name}-1.0.dist-info").mkdir(parents=True)
    (site / "whole-1.0.dist-info/RECORD").touch()
    (tmp_path / "fails").touch()
    assert checkout.make("environment", "TORCH=torch==2.12", status=2) == set()
    (tmp_path / "fails").unlink()
    assert checkout.make("environment", "TORCH=torch==2.12") == PACKAGES
    assert [path.name for path in site.iterdir()] == ["whole-1.0.dist-info"]


def test_cuda_holds_until_it_is_turned_off(checkout: Checkout) -> None:
    """A variable of the environment is no choice; a failure is not remembered."""
    checkout.make(CUDA="/opt/cuda")
    assert "HVC_CUDA=\n" in checkout.asked.read_text()
    expected = OURS | PACKAGES | {"installing packages for CUDA"}
    assert checkout.make("environment", "CUDA=1") == expected
    assert checkout.make() == set() and "horovod 1 HVC_CUDA=1\n" in checkout.asked.read_text()
    assert checkout.make("environment", "CUDA=0") == OURS | PACKAGES and checkout.make() == set()
    checkout.make("environment", "CUDA=1", status=2, HVC_CUDA="0")
    assert "leave one of them out" in checkout.said and checkout.make() == set()


def test_dependencies_alone_leave_the_package_out(checkout: Checkout) -> None:
    assert checkout.make("dependencies") == ALL - OURS and "horovod 0" in checkout.asked.read_text()
    assert checkout.make() == OURS


@pytest.mark.parametrize(
    ("word", "said"),
    [("JOBS=many", "JOBS is 'many': expected a number"), ("CUDA=/opt/cuda", "CUDA is '/opt/cuda': expected 1, 0")],
)
def test_what_has_another_meaning_is_refused(checkout: Checkout, word: str, said: str) -> None:
    checkout.make("setup", word, status=2)
    assert said in checkout.said and not (checkout.root / ".venv").exists()


def test_a_python_that_is_missing_or_too_old_gets_an_answer(checkout: Checkout, tmp_path: Path) -> None:
    checkout.make("setup", "PYTHON=no-such-python", status=2)
    assert "no-such-python was not found, or is older than 3.10" in checkout.said and "apt-get" in checkout.said
    (tmp_path / "old").touch()
    checkout.make(status=2)
    assert "or is older than 3.10" in checkout.said


def test_a_second_make_waits_for_the_first(checkout: Checkout) -> None:
    lock = checkout.root / "build/setup/lock"
    lock.parent.mkdir(parents=True)
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        command = ["make", f"PYTHON={checkout.python}", "environment"]
        second = subprocess.Popen(command, cwd=checkout.root, env=_outside_of_make(), stdout=subprocess.PIPE, text=True)
        assert second.stdout is not None
        assert second.stdout.readline().startswith("waiting for another make")
    second.communicate(timeout=60)
    assert second.returncode == 0
