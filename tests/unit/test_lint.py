"""What `make lint` runs: its report, its exit status, and versions that agree with pre-commit's."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import lint

ROOT = Path(__file__).resolve().parents[2]
FINE = lint.Check("fine", [sys.executable, "-c", "print('nothing')"], "nothing")
WRONG = lint.Check("wrong", [sys.executable, "-c", "print('line 7 is bad'); exit(3)"], "mend line 7")
ABSENT = lint.Check("absent", [ROOT / "no such tool"], "none")


def test_what_fails_is_shown_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lint, "checks", lambda: [WRONG, FINE, ABSENT])
    assert lint.main([]) == 1
    shown = capsys.readouterr().out
    assert re.search(r"^ok +fine +[\d.]+ s$", shown, re.MULTILINE)
    assert "line 7 is bad" in shown and "mend line 7" in shown and "nothing" not in shown
    assert "no such tool is missing: `make lint` installs it" in shown
    assert re.search(r"^2 of 3 checks failed: .*wrong", shown, re.MULTILINE)


def test_all_well(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(lint, "checks", lambda: [FINE])
    assert lint.main([]) == 0 and "failed" not in capsys.readouterr().out


def test_every_native_source_is_formatted() -> None:
    found = {path.relative_to(ROOT).parts[0] for path in lint.native_sources()}
    assert found == {"csrc", "tests"}
    assert any(path.suffix == ".cu" for path in lint.native_sources())


def test_pre_commit_has_the_versions_of_the_extra() -> None:
    wanted = dict(re.findall(r'^    "([\w-]+)==([\d.]+)\.\*",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    pinned = re.findall(r"repo: .*/(\S+)\n +rev: v(\S+)", (ROOT / ".pre-commit-config.yaml").read_text())
    names = {"ruff-pre-commit": "ruff", "mirrors-clang-format": "clang-format", "codespell": "codespell"}
    assert {repo for repo, _ in pinned} == set(names)
    for repo, version in pinned:
        assert version.startswith(f"{wanted[names[repo]]}."), f"{repo} {version}"
