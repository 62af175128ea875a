"""The workflows run what is there: make targets, scripts and files exist, and actions are pinned by hash."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")  # Horovod needs it too
import run_workflow_steps  # noqa: E402  needs it as well

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
#: Programs that a runner brings, or that an earlier step makes.
BROUGHT = {"docker", "python", ".venv/bin/python"}
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def steps(path: Path) -> list[dict[str, object]]:
    return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]


def problem(command: str, targets: set[str] = TARGETS) -> str | None:
    """Return why a command of a step would not find what it runs."""
    program, *rest = shlex.split(command)
    if program == "make":
        wanted = [word for word in rest if "=" not in word]
        absent = [word for word in wanted if word not in targets]
        return f"no make target {absent}" if absent or not wanted else None
    files = [word for word in rest if word.startswith(("docker/", "tools/", ".ci/"))]
    if program not in BROUGHT:
        files.append(program)
    absent = [name for name in files if not (ROOT / name).is_file()]
    return f"no file {absent}" if absent else None


def test_there_are_workflows() -> None:
    assert {path.stem for path in FILES} == {"ci", "nightly", "release"}


@each_file
def test_every_command_finds_what_it_runs(path: Path) -> None:
    commands = [str(step["run"]) for step in steps(path) if "run" in step]
    assert commands
    assert not [text for command in commands if (text := problem(command))]


def test_a_command_that_finds_nothing_is_noticed() -> None:
    assert problem("make no-such-target") and problem("make") and problem("docker/none.sh")
    assert problem("docker build -f docker/Dockerfile.none .")
    assert problem("make test ARGS=-x") is None and problem("docker/ci.sh lint") is None


def test_what_does_not_run_here_is_named_and_everything_else_is_ours() -> None:
    found = run_workflow_steps.steps()
    ours = {command for command in found if run_workflow_steps.reason(command) is None}
    assert all(command.startswith("make ") for command in ours), "a step is neither ours nor left out"
    assert "ci/lint" in found["make lint"] and {"ci/tests"} == set(found["make test"])
    unused = [start for start, _ in run_workflow_steps.LEFT_OUT if not any(one.startswith(start) for one in found)]
    assert not unused


def test_a_step_that_fails_is_a_failure_and_the_others_still_run(monkeypatch, capsys) -> None:
    monkeypatch.setattr(run_workflow_steps, "steps", lambda: {"false | cat": ["ci/a"], "true": ["ci/b"]})
    assert run_workflow_steps.main([]) == 1
    said = capsys.readouterr().out
    assert "FAILED with status 1" in said and "passed after" in said
    assert run_workflow_steps.main(["--only", "true"]) == 0


@each_file
def test_actions_are_pinned_by_hash_with_their_version_beside_it(path: Path) -> None:
    uses = re.findall(r"uses: (.*)", path.read_text())
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", text) for text in uses)


@each_file
def test_every_job_ends_and_may_only_read(path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    assert content["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] > 0 for job in content["jobs"].values())


def test_the_pythons_of_the_tests_are_those_of_the_classifiers() -> None:
    named = re.findall(r"Python :: (3\.\d+)\"", (ROOT / "pyproject.toml").read_text())
    content = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert content["jobs"]["tests"]["strategy"]["matrix"]["python"] == named
