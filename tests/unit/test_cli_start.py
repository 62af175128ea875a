"""The command line answers at once: help, and a refusal of what was asked for, need no torch."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.jobs import ALONE

HEAVY = ("torch", "numpy", "horovod.torch", "scipy", "matplotlib")
SCRIPT = """
import contextlib, io, json, os, sys
from horovod_compress.cli import main

answers = []
for words in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            status = main(words)
        except SystemExit as left:
            status = left.code
    answers.append([status, said.getvalue(), sorted(set(sys.modules) & set(HEAVY))])
json.dump(answers, sys.stdout)
"""
VERBS = ["bench", "build-horovod", "headroom", "inspect", "list", "plan", "verify"]
REFUSED = {
    "nothing-such": "invalid choice",
    "--nothing-such": "unrecognized arguments",
    "--version foo": "invalid choice",
    "--version list": "--version is a command of its own",
    **{f"{verb} --nothing-such": "" for verb in VERBS if verb != "bench"},
    "bench nothing": "invalid choice",
    "bench kernels --nothing-such": "unrecognized arguments",
    "bench kernels --count 0": "must be at least 1",
    "bench allreduce --nothing-such": "unrecognized arguments",
    "bench training step --nothing-such": "unrecognized arguments",
    "build-horovod --jobs 0": "--jobs should be at least 1",
    "headroom --elements 0": "--elements should be",
    "headroom --repeat 1": "--repeat should be",
    "headroom --compute-ms 0": "--compute-ms should be",
    "headroom --method masrit": "did you mean 'marsit'?",
    "headroom --launcher mpirun": "invalid choice",
    "inspect /nowhere/at/all": "is not a folder",
    "list --json --markdown": "not both",
    "plan --method masrit": "did you mean 'marsit'?",
    "plan --method ,": "--method takes",
    "plan --option ratio=0.1": "topk has no option 'ratio'",
    "plan --option timeout=3": "timeout is common to all methods",
    "plan --method marsit --option merge=shapd": 'merge should be "shaped" or "sampled", got \'shapd\'',
    "plan --method topk,marsit --option density=0.1": "--option needs exactly one method",
    "plan --ranks 1": "--ranks takes numbers",
    "plan --rate fast": "a rate is a number",
    "plan --latency 5": "a latency is a number",
    "plan --exchange rign": "exchange should be one of",
    "plan --model nothing": "nothing",
    "plan --per-host 1": "--per-host should be",
    "plan --save /nowhere/at/all": "No such folder",
    "plan --method all --save plan.json": "--save needs exactly one method",
    "plan --method all --measure": "--measure takes one method",
    "verify --np 1": "--np should be",
    "verify --plant nothing": "invalid choice",
}


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[int, str, list[str]]]:
    """Return status, text, and what was imported that takes long, of all commands in one process."""
    import json

    asked = ["--help", "--version", *(f"{verb} --help" for verb in VERBS), *REFUSED]
    done = subprocess.run(
        [sys.executable, "-c", f"HEAVY = {HEAVY!r}\n{SCRIPT}"],
        input=json.dumps([words.split() for words in asked]),
        env=ALONE,
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(zip(asked, json.loads(done.stdout), strict=True))


def test_help_imports_nothing_that_takes_long(answers: dict[str, tuple[int, str, list[str]]]) -> None:
    for words, (status, _, heavy) in answers.items():
        if words not in REFUSED:
            assert (status, heavy) == (0, []), words


def test_the_first_lines_of_help_name_ddp(answers: dict[str, tuple[int, str, list[str]]]) -> None:
    usage, first = answers["--help"][1].split("\n\n")[:2]
    assert usage.startswith("usage: hvd-compress") and "DDP" in first.splitlines()[0]


def test_the_version_is_told(answers: dict[str, tuple[int, str, list[str]]]) -> None:
    assert re.fullmatch(r"hvd-compress \d+\.\d+\S*\n", answers["--version"][1])


@pytest.mark.parametrize("words", REFUSED)
def test_a_wrong_argument_is_refused_without_torch(words: str, answers: dict[str, tuple[int, str, list[str]]]) -> None:
    status, said, heavy = answers[words]
    assert (status, heavy) == (2, []), said
    assert REFUSED[words] in said
