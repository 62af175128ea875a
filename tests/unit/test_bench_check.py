"""The watch on speed: what it calls slower, what it cannot tell, and how two versions take turns."""

from __future__ import annotations

import contextlib
import importlib
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import check, kernel_cases
from benchmarks.results import ROOT
from horovod_compress.ops import legality


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
def test_a_machine_that_gets_slower_changes_no_ratio(monkeypatch: pytest.MonkeyPatch, slow: float) -> None:
    """Turns go old, new, new, old, and of each two the shorter one counts: neither drift nor a hiccup does."""
    now, turns = [0.0], [0]

    def taking(seconds: float) -> Callable[[], None]:
        def run() -> None:
            turns[0] += 1
            hiccup = 10.0 if turns[0] % 7 == 0 else 1.0
            now[0] += hiccup * seconds * (1 + turns[0] / 50)

        return run

    monkeypatch.setattr(time, "process_time", lambda: now[0])
    ratios = check.ratios_of(taking(0.01), taking(0.01 * slow), contextlib.nullcontext)
    assert abs(check.judge("x", ratios).median + 1 - slow) < 0.02


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Return the root of another version, which is a copy of ours."""
    for name in ("horovod_compress", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_two_versions_live_in_one_process(other: Path) -> None:
    import horovod_compress

    (other / "horovod_compress" / "part.py").write_text("VALUE = 'the other one'\n")
    with (other / "horovod_compress" / "__init__.py").open("a") as init:
        init.write("\n\ndef later():\n    from . import part\n    return part.VALUE\n")
    version, path = check.Version(other), list(sys.path)
    with version.active():
        theirs: Any = importlib.import_module("horovod_compress")
    assert sys.modules["horovod_compress"] is horovod_compress is not theirs and sys.path == path
    with version.active():
        assert theirs.later() == "the other one"
    with version.active():
        assert sys.modules["horovod_compress"] is theirs
    assert sys.modules["horovod_compress"] is horovod_compress


def kernels(arrays: kernel_cases.Arrays) -> dict[str, Callable[[], object]]:
    """Return what runs some kernels of the version that imports find now, by name."""
    from benchmarks.kernel_cases import cases

    return {case.name: case.run for case in cases(arrays, "sign_")}


@pytest.mark.alone
def test_what_is_slower_in_the_compiled_module_of_one_version_is_found(other: Path) -> None:
    """And nothing else: with one compiled module for both versions, it would be compared with itself."""
    version, arrays = check.Version(other), kernel_cases.Arrays(300_000)
    with version.active():
        theirs = kernels(arrays)
        from horovod_compress.ops import legality as compiled

        pack = compiled.CPU.sign_pack
        assert Path(str(compiled.CPU.__file__)).parent == other / "horovod_compress"
        assert compiled.CPU is not legality.CPU and pack is not legality.CPU.sign_pack

        def planted(*given: object) -> None:
            for _ in range(3):
                pack(*given)

        compiled.CPU.sign_pack = planted  # type: ignore[attr-defined]
    ours = kernels(arrays)
    slower, same = (
        check.judge(name, [1 / ratio for ratio in check.ratios_of(theirs[name], ours[name], version.active)])
        for name in ("sign_pack", "sign_decode own")
    )
    assert slower.slower and slower.low > 0.5, slower
    assert abs(same.median) < 0.5, same


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
