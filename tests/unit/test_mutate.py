"""The faults that tools/mutate.py plants still fit the code, and are taken out again."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

import mutate

FAULT = mutate.Fault("a fault", "file.py", "good", "bad", "tests/unit/test_wire.py")


@pytest.mark.parametrize("fault", mutate.FAULTS, ids=lambda fault: fault.name)
def test_faults_fit_the_code(fault: mutate.Fault) -> None:
    healthy = (mutate.ROOT / fault.file).read_text()
    assert mutate.sick(fault, healthy) != healthy


@pytest.mark.parametrize("text", ["nothing", "good good"])
def test_a_fault_that_does_not_fit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="once was expected"):
        mutate.sick(FAULT, text)


def test_a_fault_is_taken_out_whatever_happens(tmp_path: Path) -> None:
    path = tmp_path / "file.py"
    path.write_text("all good")
    with pytest.raises(KeyboardInterrupt), mutate.planted(FAULT, tmp_path):
        assert path.read_text() == "all bad"
        raise KeyboardInterrupt
    assert path.read_text() == "all good"


def test_the_files_where_a_fault_should_be_noticed_are_there():
    assert all((mutate.ROOT / name).is_file() for fault in mutate.FAULTS for name in fault.near.split())


@pytest.mark.parametrize(("failing", "noticed", "runs"), [("near", "near", 1), ("all", "all", 2), ("", None, 2)])
def test_all_tests_run_where_those_near_a_fault_pass(monkeypatch, failing, noticed, runs):
    ran = []

    def failed(arguments):
        ran.append("near" if FAULT.near in arguments else "all")
        return failing if ran[-1] == failing else None

    monkeypatch.setattr(mutate, "_failed_of", failed)
    options = argparse.Namespace(pytest=["-m", "not slow"])
    assert mutate._measure("x", options, FAULT.near)["noticed_by"] == noticed and len(ran) == runs
