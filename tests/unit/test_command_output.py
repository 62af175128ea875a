"""An output that cannot be written is one line on stderr; a reader that has seen enough is no error to speak of."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from horovod_compress.cli import command as cli, common
from horovod_compress.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [
    ["list"],
    ["list", "--json"],
    ["--check-build"],
    ["plan", "--model", "mlp"],
    ["plan", "--model", "mlp", "--method", "none", "--ranks", "2,3"],
    ["bench", "kernels", "--count", "2048", "--repeat", "1", "--filter", "crc32c"],
]


def closed_pipe() -> Any:
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w")


def run(words: list[str], output: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    pytest.importorskip("torch")
    with output, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", output)
        return cli.main(words)


def errors(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what was written to stderr, without what is said of progress."""
    progress = ("measuring", "predicting")
    return [line for line in capsys.readouterr().err.splitlines() if not line.startswith(progress)]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_full_disk_is_one_line(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full:
        assert run(words, full, monkeypatch) == 1
    assert errors(capsys) == ["hvd-compress: the output cannot be written: No space left on device"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "--model", "mlp", "--save"], "hvd-compress plan: /dev/full: No space left on device"),
        ([*COMMANDS[-1], "--json"], "hvd-compress: /dev/full: No space left on device"),
    ],
    ids=["plan", "bench"],
)
def test_a_full_disk_is_told_of_the_file_that_was_asked_for(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not of the output, which can be written."""
    with Path(os.devnull).open("w") as output:
        assert run([*words, "/dev/full"], output, monkeypatch) != 0
    assert errors(capsys) == [said]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_closed_pipe_is_quiet(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words, closed_pipe(), monkeypatch) == 1
    assert errors(capsys) == []


@pytest.mark.parametrize(
    ("redirection", "said"),
    [
        ("> /dev/full", "hvd-compress: the output cannot be written: No space left on device\n"),
        (">&-", "hvd-compress: standard output is closed; remove >&-, or redirect it to a file\n"),
    ],
)
def test_python_adds_nothing_at_its_end(redirection: str, said: str) -> None:
    command = f"exec {sys.executable} -m horovod_compress.cli --help {redirection}"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(  # noqa: S602  the redirection is a shell's
        command, shell=True, cwd=ROOT, env=buffered, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1 and done.stderr == said


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(parsed: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.check_build, "run", interrupt)
    assert cli.main(["--check-build"]) == 130 and errors(capsys) == []


def test_a_package_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from horovod_compress.cli import list as listing

    def needs_torch(parsed: object) -> int:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(listing, "run", needs_torch)
    assert cli.main(["list"]) == 1
    (line,) = errors(capsys)
    assert line.startswith("hvd-compress: list needs torch: ") and "--check-build" in line


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ImportError("build it", name="horovod_compress._cpu"), 1, "hvd-compress: list needs the kernels: build it"),
        (ConfigError("HVC_ISA is wrong"), 2, "hvd-compress list: HVC_ISA is wrong"),
    ],
)
def test_kernels_that_do_not_load_are_no_traceback(
    error: Exception, status: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from horovod_compress.cli import list as listing

    def fails(parsed: object) -> int:
        raise error

    monkeypatch.setattr(listing, "run", fails)
    assert cli.main(["list"]) == status and errors(capsys) == [said]


def test_without_kernels_a_framework_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> object:
        raise ImportError("build it", name="horovod_compress._cpu")

    monkeypatch.setattr(common.importlib, "import_module", fails)
    with pytest.raises(ImportError, match=r"^build it$"):
        common.module_of("horovodrun", "ranks")


def test_another_import_that_fails_is_an_error_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod_compress.cli import list as listing

    def fails(parsed: object) -> int:
        raise ImportError("cannot import name", name="horovod_compress.options")

    monkeypatch.setattr(listing, "run", fails)
    with pytest.raises(ImportError, match="cannot import name"):
        cli.main(["list"])
