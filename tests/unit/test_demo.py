"""The demo: what it says of measured curves, its picture and bar, and what it does where no slow link can be had."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")
pytest.importorskip("psutil")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
OURS = {path.stem for path in EXAMPLES.glob("*.py")}
SENT = {"horovod-none": 4_000_000, "fp16": 2_000_000, "global_qsgd": 1_000_000, "marsit": 200_000}

Record = dict[str, Any]
Load = Callable[[str], ModuleType]


@pytest.fixture
def load() -> Iterator[Load]:
    """Import modules of the examples as the scripts themselves see each other."""
    before = set(sys.modules)
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module
    sys.path.remove(str(EXAMPLES))
    for name in (OURS & set(sys.modules)) - before:
        del sys.modules[name]


def record(method: str, losses: list[float | None], seconds: float = 1.0, rate: float | None = 1e8) -> Record:
    """Return a run with a loss for every ten steps, each of which takes so many seconds."""
    curve = [
        {"step": 10 * number, "seconds": seconds * number, "bytes_sent": 10 * SENT[method] * number, "loss": loss}
        for number, loss in enumerate(losses)
    ]
    steps = curve[-1]["step"]
    config = {"method": method, "task": "text", "steps": steps, "parameters": 1_000_000, "optimizer": "adam"}
    sent = curve[-1]["bytes_sent"]
    return {
        "config": config | {"lr": 1e-3, "seed": 0, "world": 2, "cores": 2},
        "curve": curve,
        "final": {"metric": "loss", **curve[-1]},
        "stats": {"steps": steps, "bytes_sent": sent, "bytes_dense": 4_000_000 * steps},
        "step_seconds": {"median": 0.1, "q1": 0.1, "q3": 0.2},
        "exchange_seconds_per_step": 0.05,
        "ranks_identical": True,
        "versions": {"torch": "1", "horovod": "2"},
        "place": {"rate_bits": rate, "hosts": 2},
    }


def four(rate: float | None = 1e8) -> list[Record]:
    """Return four runs; three are within a second of each other, so that their names are close."""
    return [
        record("horovod-none", [4.0, 3.0, 2.0], 10.0, rate),
        record("fp16", [4.0, 3.0, 2.0], 1.2, rate),
        record("global_qsgd", [4.0, 3.0, 2.0], 1.1, rate),
        record("marsit", [4.0, 3.0, 2.5, 2.0, 1.8], 0.5, rate),
    ]


def test_the_common_loss_is_reached_where_the_curve_stays(load: Load) -> None:
    target = load("target")
    slow, fast = record("horovod-none", [4.0, 3.0, 2.0], 10.0), record("marsit", [4.0, 2.0, 3.0, 1.0])
    assert target.target([slow, fast]) == 2.0  # where the worst of them ends
    assert target.needed(slow, 2.5, "seconds") == 15.0  # half way from one evaluation to the next
    assert target.needed(slow, 2.5, "step") == 15.0
    assert target.needed(fast, 2.0, "seconds") == 2.5  # not at 1.0, where it was for a moment
    assert target.needed(slow, 1.9, "seconds") is None
    assert target.times_better([slow, fast], "seconds") == [1.0, 8.0]


def test_a_loss_that_is_no_number_is_no_result(load: Load) -> None:
    target = load("target")
    fine, diverged = record("horovod-none", [4.0, None, 2.0]), record("marsit", [4.0, 3.0, None])
    assert target.target([fine, diverged]) == 2.0
    assert target.needed(fine, 2.0, "seconds") == 2.0
    assert target.times_better([fine, diverged], "seconds") == [1.0, None]
    assert "diverged" in load("table").render([fine, diverged])


class Launcher:
    """A launcher that writes the records of `four`; the lab among them can break at its second run."""

    def __init__(self, where: str, broken: type[Exception] | None, identical: bool) -> None:
        self.where, self.broken, self.identical, self.started = where, broken, identical, 0

    def describe(self) -> Record:
        return {"rate_bits": 1e8 if self.where == "lab" else None, "hosts": 2}

    def run(self, name: str, arguments: list[str], limit: float, on_line: Callable[[str], None], log: Path) -> None:
        self.started += 1
        if self.where == "lab" and self.broken and self.started == 2:
            raise self.broken("this kernel does not offer tbf")
        on_line("step 1/40")
        words = dict(zip(arguments[1::2], arguments[2::2], strict=False))
        (found,) = (run for run in four() if run["config"]["method"] == words["--method"])
        log.parent.mkdir(exist_ok=True)
        Path(words["--json"]).write_text(json.dumps(found | {"ranks_identical": self.identical}))

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


@pytest.fixture
def demo(load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Return a function that runs the demo with jobs that are none."""
    module = load("demo")

    def run(*words: str, broken: bool = False, identical: bool = True) -> None:
        def launcher(where: str, ranks: int, rate: str | None) -> Launcher:
            assert rate == ("100mbit" if where == "lab" else None)
            return Launcher(where, module.LabError if broken else None, identical)

        monkeypatch.setattr(module, "open_launcher", launcher)
        monkeypatch.setattr(module.signal, "signal", lambda *arguments: None)
        monkeypatch.setattr(sys, "argv", ["demo.py", "--out", str(tmp_path / "out"), *words])
        module.main()

    return run


def test_standard_output_is_json_alone_and_the_end_says_what_next(
    demo: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    demo("--json")
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert summary["problems"] == [] and "faster" in summary["finding"]
    assert [run["method"] for run in summary["runs"]] == list(SENT)
    assert all(run["place"]["rate_bits"] == 1e8 for run in summary["records"])
    last = err.strip().splitlines()[-1]
    assert last.startswith("Next: ") and "hvd-compress headroom" in last
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"demo.png", "table.txt", "summary.json"}


def test_a_lab_that_breaks_is_replaced_by_bytes_for_every_run(
    demo: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    demo("--json", broken=True)
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert [run["place"]["rate_bits"] for run in summary["records"]] == [None] * 4
    assert "fewer bytes" in summary["finding"]
    (line,) = (line for line in err.splitlines() if "this kernel does not offer tbf" in line)
    assert line.startswith("No slow link, so the picture shows bytes instead of seconds")


def test_who_asks_for_the_lab_gets_it_or_an_error(
    demo: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        demo("--where", "lab", broken=True)
    assert ended.value.code == 1
    assert "demo failed: this kernel does not offer tbf" in capsys.readouterr().err


def test_ranks_that_differ_are_a_failure(demo: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        demo("--where", "here", identical=False)
    assert ended.value.code == 1
    err = capsys.readouterr().err
    assert err.count("the ranks ended with different parameters") == 4 and "Next:" not in err


def test_what_sudo_wrote_belongs_to_its_caller(load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = load("files")
    given: list[tuple[str, int, int]] = []
    monkeypatch.setattr(files.os, "geteuid", lambda: 0)
    monkeypatch.setattr(files.os, "chown", lambda path, user, group, **_: given.append((path.name, user, group)))
    out, project = tmp_path / "project" / "build" / "out", tmp_path / "project"
    out.mkdir(parents=True)
    (out / "table.txt").touch()
    monkeypatch.delenv("SUDO_UID", raising=False)
    files.give_to_caller(out, project)
    assert not given
    monkeypatch.setenv("SUDO_UID", "1000")
    monkeypatch.setenv("SUDO_GID", "100")
    files.give_to_caller(tmp_path, project)  # where other people's files may be
    assert not given
    files.give_to_caller(out, project)
    assert given == [("out", 1000, 100), ("table.txt", 1000, 100), ("build", 1000, 100)]
