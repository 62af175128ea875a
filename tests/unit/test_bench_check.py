"""The watch on speed: what it calls slower, what it cannot tell, and how two versions take turns."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from benchmarks import check
from benchmarks.results import ROOT


def measured(slow: float = 1.0, noise: float = 0.05, seed: int = 0) -> list[float]:
    """Return ratios of a case that takes so many times as long."""
    rng = random.Random(seed)
    return [slow * rng.gauss(1.0, noise) for _ in range(check.ROUNDS)]


def test_thirty_percent_is_found_and_nothing_else() -> None:
    assert all(check.judge("x", measured(1.3, seed=seed)).slower for seed in range(200))
    assert not any(check.judge("x", measured(1.0, 0.1, seed=seed)).slower for seed in range(200))


def test_noise_is_said_to_be_noise() -> None:
    verdict = check.judge("x", measured(1.1, noise=0.6))
    assert verdict.unclear and "too noisy" in verdict.words() and not verdict.slower


def test_what_seems_slower_is_measured_again() -> None:
    """An hiccup in one process fails nothing."""
    asked: list[list[str]] = []

    def measure(names: Sequence[str]) -> dict[str, list[float]]:
        asked.append(list(names))
        slow = {"hiccup": 1.5 if len(asked) == 1 else 1.0, "slower": 1.3, "fine": 1.0}
        return {name: measured(slow[name]) for name in names or slow}

    verdicts = check.compare(measure)
    assert asked == [[], ["hiccup", "slower"]] and len(verdicts) == 3
    assert [verdict.name for verdict in verdicts if verdict.slower] == ["slower"]


@pytest.mark.parametrize(("ratio", "slower"), [(1.0, False), (1.4, True)])
def test_a_second_measurement_decides_where_the_first_could_not(ratio: float, slower: bool) -> None:
    passes = iter([measured(noise=0.6), measured(ratio, noise=0.01)])
    (verdict,) = check.compare(lambda names: {"x": next(passes)})
    assert verdict.slower == slower and not verdict.unclear


@pytest.mark.parametrize(("ratios", "status"), [(measured(), 0), (measured(1.5), 1), (measured(noise=0.6), 3)])
def test_the_status_says_what_came_of_it(ratios: list[float], status: int) -> None:
    assert check.conclude([check.judge("x", ratios)]) == status


@pytest.mark.parametrize("slow", [1.0, 1.3])
def test_a_machine_that_gets_slower_changes_no_ratio(slow: float) -> None:
    """Turns go old, new, new, old, and of each two the shorter one counts: neither drift nor a hiccup does."""
    turns = [0]

    def taking(seconds: float) -> check.Seconds:
        def run(times: int) -> float:
            turns[0] += 1
            hiccup = 10.0 if turns[0] % 7 == 0 else 1.0
            return times * hiccup * seconds * (1 + turns[0] / 50)

        return run

    ratios = check.ratios_of(taking(0.01), taking(0.01 * slow))
    assert abs(check.judge("x", ratios).median + 1 - slow) < 0.02


# ---- two versions -------------------------------------------------------------------------------

#: At the end of what loads the kernels: that of the name runs three times.
PLANTED = """

def _plant(kernel):
    def run(*given):
        kernel(*given)
        kernel(*given)
        return kernel(*given)
    return run

CPU.sign_pack = _plant(CPU.sign_pack)
"""


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Return the root of another version, which is a copy of ours."""
    for name in ("horovod_compress", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_what_is_slower_in_the_compiled_module_of_one_version_is_found(other: Path) -> None:
    """And nothing else of that module: with a module for both versions, each would have been compared with itself."""
    with (other / "horovod_compress" / "ops" / "legality.py").open("a") as legality:
        legality.write(PLANTED)
    best = check.instruction_sets()[0]
    with check.Side(ROOT, best, count=300_000) as old, check.Side(other, best, count=300_000) as new:
        assert old.names == new.names
        planted, same = (
            check.judge(name, check.ratios_of(partial(old.seconds, name), partial(new.seconds, name)))
            for name in ("sign_pack", "sign_decode own")
        )
    assert planted.slower and planted.low > 0.5, planted
    assert abs(same.median) < 0.5, same


def test_a_version_that_takes_the_kernels_of_another_is_refused(other: Path, capfd: pytest.CaptureFixture[str]) -> None:
    package = other / "horovod_compress"
    for module in package.glob("_cpu.*.so"):
        module.unlink()
    with (package / "__init__.py").open("a") as init:
        init.write(f"\n__path__.append({str(ROOT / 'horovod_compress')!r})\n")
    refused = f"no answer from the process that measures {other}: it ended"
    with check.Side(other, check.instruction_sets()[0]) as side, pytest.raises(ValueError, match=refused):
        print(side.names)
    assert f"expected the kernels of {other}" in capfd.readouterr().err


def test_the_other_commit_is_named_and_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"status": ""}

    def git(*words: str) -> str:
        return said["status"] if words[0] == "status" else words[-1]

    monkeypatch.setattr(check, "git", git)
    assert check.base_of(None) == "HEAD~1^{commit}", "where nothing differs from HEAD"
    said["status"] = " M csrc/kernels.h"
    assert check.base_of(None) == "HEAD^{commit}" and check.base_of("v1") == "v1^{commit}"
    monkeypatch.undo()
    assert check.main(["--base", "no-such-commit"]) == 2
