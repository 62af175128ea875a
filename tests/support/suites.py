"""Questions to a process that has PyTorch's own tests, and runs one at a time: both of its ends, by lines of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import ROOT


class Suite:
    """The process that has the tests.

    Args:
        program: its module.
        environment: of it, besides that of this process.
    """

    def __init__(self, program: str, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | environment,
        )

    def ask(self, what: object) -> Any:
        """Return the answer to a question."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def run(self, name: str, **how: Any) -> dict[str, Any]:
        """Run a test; return how it ended, and the least that any rank's compressions did."""
        return self.ask({"name": name, **how})

    def close(self) -> None:
        """End the process: it has no rank then."""
        self._process.kill()
        self._process.communicate()


def opened(program: str, environment: Mapping[str, str]) -> Iterator[Suite]:
    """Yield the process of a program, for a fixture."""
    for needed in ("numpy", "expecttest"):
        pytest.importorskip(needed, reason=f"PyTorch's tests need {needed}: the extra `test` has it")
    made = Suite(program, environment)
    yield made
    made.close()


def check_alike(suite: Suite, name: str, exchanges: bool, control: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Expect a test to pass with us as without, and to exchange gradients, or not to.

    Args:
        control, ours: how to run it without us, and with us.
    """
    alone = suite.run(name, ours=False, **control)
    if alone["outcome"] == "absent":
        pytest.skip(alone["text"])
    assert alone["outcome"] == "passed", alone["text"]
    found = suite.run(name, ours=True, **ours)
    assert found["outcome"] == "passed", found["text"]
    assert found["models"] > 0, "no model had a compression, so this says nothing"
    assert (found["steps"] > 0) is exchanges, found


def answer(list_names: Callable[[], Any], run: Callable[..., Any]) -> None:
    """Answer every line of the standard input.

    Args:
        list_names: answers the question "list".
        run: answers all others, which are its arguments, besides the ``folder`` for what ranks write.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what tests print must not get between the answers
    for line in sys.stdin:
        asked = json.loads(line)
        with tempfile.TemporaryDirectory() as folder:
            found = list_names() if asked == "list" else run(**asked, folder=Path(folder))
        answers.write(json.dumps(found) + "\n")
        answers.flush()


def outcome(test: unittest.TestCase, folder: Path, world: int) -> dict[str, Any]:
    """Run a test; return how it ended, and the least of each count that ranks have written into files of a folder."""
    told = unittest.TestResult()
    unittest.TestSuite([test]).run(told)
    failures = [text for _, text in (*told.failures, *told.errors)]
    skips = [text for _, text in told.skipped]
    ended = "failed" if failures else "skipped" if skips else "passed"
    counts = [json.loads(path.read_text()) for path in folder.iterdir()]
    found = {key: min(count[key] for count in counts) for key in ("models", "steps") if len(counts) == world > 0}
    return {"outcome": ended, "text": "\n".join([*failures, *skips])} | found
