"""Training that goes on in the same processes, after an exchange has failed."""

from __future__ import annotations

import pytest

from tests.support.nursery import Nursery


@pytest.mark.slow
def test_the_same_names_can_be_used_again(nursery: Nursery) -> None:
    """Horovod keeps a token by name until every rank has handed over its own."""
    for rank in nursery.run(2, "again.py", {}):
        failed, *after = rank.report
        assert failed and failed.startswith(("CorruptFrameError", "ExchangeError")), rank
        assert after == [None, None], rank
