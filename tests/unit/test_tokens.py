"""What Horovod is given in the place of gradients, and what is said when it ends."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("horovod.torch")

from horovod_compress.fronts.horovod import job
from horovod_compress.fronts.horovod.job import HorovodInternalError
from horovod_compress.fronts.horovod.private import owner_of_token


def test_a_token_is_float32_on_the_cpu_and_owned_whatever_the_program_s_defaults_are() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            owner = owner_of_token()
    finally:
        torch.set_default_dtype(before)
    token = owner.grad
    assert (token.shape, token.dtype, token.device.type) == ((1,), torch.float32, "cpu")
    assert token._use_count() > 1
    alone = torch.empty(1)
    assert alone._use_count() == 1  # the control


@pytest.mark.parametrize(
    "said", ["Horovod has been shut down.\nSee the log.", "Horovod has been shut down. See the log"]
)
def test_a_gather_that_did_not_take_place_is_told_in_the_words_of_users(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of tensors say nothing, and what Horovod says of its end comes last."""
    monkeypatch.setattr(job.hvd, "rank", lambda: 2)
    for word in ("handshake", "connected", "nccl", "linked", "attach", "tuning.0123abcd", "update"):
        text = job._why_not_all(f"hvc.{word}", HorovodInternalError(said), None)
        assert text.startswith("rank 2: the ") and "did not take place. Usual causes: " in text and "hvc." not in text
        assert text.endswith(" Horovod has ended, and says: Horovod has been shut down. See the log")
