"""Every method learns the two tasks as docs/choosing.md says, on four ranks; a new codec needs its rows there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

import pytest

pytest.importorskip("horovod.torch")

from horovod_compress.codecs import registry
from tests.support.jobs import ROOT

#: How much worse a run may be than documented: points of accuracy, or a share of the loss. The arithmetic of a step
#: repeats on one machine, and not on another one; so where the first seed is worse, the mean of all of them counts.
MARGINS = {"digits": 0.03, "text": 0.05}
_HEADING = {"digits": "Digits:", "text": "Text:"}


def documented(task: str) -> dict[str, list[float]]:
    """Return what the seeds 1, 2, ... came to, by method and options as benchmarks/quality.py takes them."""
    text = (Path(ROOT) / "docs" / "choosing.md").read_text()
    table = text.partition(f"\n{_HEADING[task]}\n")[2].strip().partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {row[0].strip("`"): [float(seed) for seed in row[3].split()] for row in rows}


def learning(task: str) -> dict[str, list[float]]:
    """Return the rows that learn: where training fails, its end is chance, and a codec may do anything."""
    rows = documented(task)
    least = {"digits": rows["none"][0] - 0.05, "text": 0.0}[task]
    return {words: seeds for words, seeds in rows.items() if seeds[0] >= least}


CASES = [(task, words) for task in MARGINS for words in learning(task)]


@pytest.mark.parametrize("task", MARGINS)
def test_every_method_has_a_row_that_learns(task: str) -> None:
    # 16-bit floats round far below what a step changes.
    known = {words.split()[0] for words in learning(task)} | {"fp16", "bf16"}
    assert set(registry.available()) - known == set()


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("task", "words"), CASES)
def test_learns(task: str, words: str) -> None:
    seeds = documented(task)[words]
    found = _finals(task, words, [1])
    if not _as_documented(task, found, seeds[:1]):
        found += _finals(task, words, range(2, len(seeds) + 1))
        assert _as_documented(task, found, seeds), found


def _finals(task: str, words: str, seeds: Iterable[int]) -> list[float]:
    command = [sys.executable, str(ROOT / "benchmarks" / "quality.py"), "--task", task, "--json"]
    command += ["--seeds", ",".join(map(str, seeds)), *(["--lr", "0.0005"] if task == "text" else [])]
    done = subprocess.run([*command, "--run", words], capture_output=True, text=True, timeout=1600, check=True)
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["ranks_identical"]
    return record["finals"]


def _as_documented(task: str, found: list[float], seeds: list[float]) -> bool:
    got, expected = fmean(found), fmean(seeds)
    return expected - got <= MARGINS[task] if task == "digits" else got - expected <= MARGINS[task] * expected


def test_what_is_as_documented() -> None:
    """The control: a run that is too bad is told from one that is not."""
    assert _as_documented("digits", [0.93], [0.95, 0.95]) and not _as_documented("digits", [0.91], [0.95, 0.93])
    assert _as_documented("text", [2.0], [1.95]) and not _as_documented("text", [2.1, 2.1], [1.95, 1.95])
