"""The examples for trainers that create DistributedDataParallel themselves, with the real packages.

`pip install 'horovod-compress[frameworks]'` installs Lightning and Accelerate, see CONTRIBUTING.md; for the third,
`pip install transformers`.
"""

from __future__ import annotations

from statistics import mean

import pytest

from tests.support.jobs import run_ranks

pytestmark = pytest.mark.slow


#: Steps at the end of a training, all of them compressed but one at most.
LATE = 30


@pytest.mark.parametrize("framework", ["lightning", "accelerate", "transformers"])
def test_none_is_the_training_without_us_and_marsit_is_clipped_alike_on_all_ranks(framework: str) -> None:
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    ranks = run_ranks(2, "frameworks.py", timeout=300.0, arguments={"framework": framework}, front="torch").reports
    first, second = ({method: found["alike"] for method, found in rank.items()} for rank in ranks)
    assert first == second
    assert first["None"] == first["none"]
    assert first["marsit"]["weights"] != first["none"]["weights"]
    norm, matched = (mean(first[method]["norms"][-LATE:]) for method in ("none", "marsit"))
    assert matched == pytest.approx(norm, rel=0.15), "the norm that is logged"
    loss, compressed = (mean(mean(rank[method]["losses"][-LATE:]) for rank in ranks) for method in ("none", "marsit"))
    assert compressed == pytest.approx(loss, rel=0.01), "the losses on the way"
