"""The faults that tools/mutate.py plants still fit the code, and are taken out again."""

from __future__ import annotations

from pathlib import Path

import pytest

import mutate

FAULT = mutate.Fault("a fault", "file.py", "good", "bad")


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
