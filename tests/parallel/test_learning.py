"""Every method learns the two tasks on four ranks as it did before; a new codec needs its rows in learned.json."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("horovod.torch")

from horovod_compress.codecs import registry
from tests.support.jobs import ROOT

#: How much worse the first seed may be than documented: points of accuracy, or a share of the loss. The arithmetic of
#: a step repeats on one machine, and not on another one.
MARGINS = {"digits": 0.03, "text": 0.05}
#: As docs/choosing.md says.
SETTINGS = {"digits": [], "text": ["--optimizer", "adamw", "--lr", "0.001", "--lr-schedule", "cosine"]}
#: What the first seed came to, by task, and method and options as benchmarks/quality.py takes them.
LEARNED: dict[str, dict[str, float]] = json.loads((Path(__file__).parent / "learned.json").read_text())
_HEADING = {"digits": "Digits:", "text": "Text:"}


def documented(task: str) -> dict[str, float]:
    """Return what docs/choosing.md says of the first seed."""
    text = (Path(ROOT) / "docs" / "choosing.md").read_text()
    table = text.partition(f"\n{_HEADING[task]}\n")[2].strip().partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {row[0].strip("`"): float(re.split(r"\s+", row[3])[0]) for row in rows}


def learning(task: str) -> dict[str, float]:
    """Return the rows that learn: where training fails, its end is chance, and a codec may do anything."""
    rows = LEARNED[task]
    least = {"digits": rows["none"] - 0.05, "text": 0.0}[task]
    return {words: value for words, value in rows.items() if value >= least}


@pytest.mark.parametrize("task", MARGINS)
def test_the_page_shows_what_is_tested(task: str) -> None:
    assert documented(task) == LEARNED[task]


CASES = [(task, words) for task in MARGINS for words in learning(task)]


@pytest.mark.parametrize("task", MARGINS)
def test_every_method_has_a_row_that_learns(task: str) -> None:
    # 16-bit floats round far below what a step changes, and one method has the results of none at all.
    known = {words.split()[0] for words in learning(task)} | {"fp16", "bf16", "homomorphic"}
    assert set(registry.methods()) - known == set()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("task", "words"), CASES)
def test_learns(task: str, words: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "quality.py"), "--task", task, "--seeds", "1", "--json"]
    command += SETTINGS[task]
    done = subprocess.run([*command, "--run", words], capture_output=True, text=True, timeout=800, check=True)
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["ranks_identical"]
    worse = LEARNED[task][words] - record["mean"]
    assert (worse if task == "digits" else -worse / LEARNED[task][words]) <= MARGINS[task]
