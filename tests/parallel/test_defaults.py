"""No default diverges unannounced where uncompressed training converges: SGD on a small regression, every method."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("horovod.torch")

from tests.support.jobs import run_ranks

pytestmark = [pytest.mark.alone, pytest.mark.slow]

#: How many methods end within a tenth of `none`, by learning rate and momentum. Those that send few elements need a
#: lower rate under momentum.
AS_GOOD = {"0.05 0": 16, "0.01 0": 15, "0.01 0.9": 12, "0.05 0.9": 10}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(4, "defaults.py", timeout=900).reports[0]
    return found


@pytest.mark.parametrize("setting", AS_GOOD)
def test_what_diverges_was_announced_or_refused(found: dict[str, Any], setting: str) -> None:
    ended, start = found[setting], found["start"]
    assert ended["none"][0] < 0.2 * start, "it converges without compression"
    refused = {name: why for name, (why, _) in ended.items() if isinstance(why, str)}
    assert all("together they diverge" in why for why in refused.values()), refused
    bad = {name for name, (loss, _) in ended.items() if name not in refused and not loss < start}
    assert bad <= {name for name, (_, told) in ended.items() if told}
    assert not ended["none"][1] and not ended["marsit"][1]  # not everybody is told


@pytest.mark.parametrize("setting", AS_GOOD)
def test_most_defaults_end_where_no_compression_does(found: dict[str, Any], setting: str) -> None:
    ended = found[setting]
    good = {name for name, (loss, _) in ended.items() if isinstance(loss, float) and loss < 1.1 * ended["none"][0]}
    assert "marsit" in good and len(good - {"none"}) >= AS_GOOD[setting], sorted(good)
