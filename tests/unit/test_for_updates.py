"""What update mode asks of a compression, on a rank that takes no part."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("horovod.torch")

from horovod_compress.fronts.horovod.updates import ForUpdates


class Outside:
    """A job in whose process set this rank is not."""

    def included(self) -> bool:
        return False


def test_a_rank_outside_the_process_set_has_no_parameters() -> None:
    job: Any = Outside()
    compression = ForUpdates("topk", [], {}, job)
    assert not compression.included() and compression.parameters() == []
    compression.close()
