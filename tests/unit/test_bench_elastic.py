"""What the benchmark of elastic jobs takes for a training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import elastic

RECORD = {"loss": 1.5, "worlds": [4, 3, 4], "ranks_identical": True}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, ""),
        ({"worlds": [4, 3]}, "trained on 4, then 3 ranks, expected"),
        ({"ranks_identical": False}, "ranks ended with different weights"),
    ],
)
def test_a_job_that_failed_counts_only_with_the_ranks_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys, changed: dict[str, Any], told: str
) -> None:
    def run(job: Any, on_line: Any) -> None:
        Path(job.arguments[job.arguments.index("--json") + 1]).write_text(json.dumps(RECORD | changed))
        raise elastic.JobFailed("the rank that was removed has aborted")

    monkeypatch.setattr(elastic, "run", run)
    keep = tmp_path / "kept.jsonl"
    given = ["--run", "none", "--out", str(tmp_path / "out"), "--keep", str(keep)]
    monkeypatch.setattr("sys.argv", ["elastic.py", *given])
    if told:
        with pytest.raises(SystemExit, match=told):
            elastic.main()
        assert not keep.exists()
        return
    elastic.main()
    assert json.loads(capsys.readouterr().out)["worlds"] == [4, 3, 4] and keep.exists()
