"""What Horovod is given in the place of gradients."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("horovod.torch")

from horovod_compress._horovod import owner_of_token


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
