"""What a codec works on: pieces of it are cut once."""

from __future__ import annotations

import torch

from horovod_compress.codecs.work import Work
from horovod_compress.schedule.plan import Bucket, TensorSpec


def test_a_piece_of_what_is_kept_is_a_view_of_what_is_kept_now() -> None:
    bucket = Bucket(0, (TensorSpec("a", (3,), "float32"), TensorSpec("b", (5,), "float32")))
    work = Work(bucket, 2, [None, None], {"residual": torch.zeros(bucket.padded)})
    first = work.state_of("residual", 1)
    assert first is not None and first is work.state_of("residual", 1)
    first[0] = 7
    assert float(work.state["residual"][work.span(1)][0]) == 7
    work.state["residual"] = torch.ones(bucket.padded)
    again = work.state_of("residual", 1)
    assert again is not None and again.tolist() == [1.0] * 5 and work.state_of("momentum", 1) is None
