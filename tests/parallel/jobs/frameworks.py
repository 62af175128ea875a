"""The examples for Lightning and Accelerate, each trained by DDP alone, with `none` and with `marsit`."""

from __future__ import annotations

import sys
from typing import Any

import torch

from tests.support.jobs import ROOT
from tests.support.rank import arguments, report
from tests.support.training import digest

sys.path.insert(0, str(ROOT / "examples"))


def by_lightning(method: str | None) -> torch.nn.Module:
    import lightning_ddp

    return lightning_ddp.train([lightning_ddp.Compress(method)] if method else [], epochs=2)


def by_accelerate(method: str | None) -> torch.nn.Module:
    from accelerate import Accelerator

    import accelerate_ddp

    return accelerate_ddp.train(Accelerator(cpu=True), method, epochs=2)


train: Any = {"lightning": by_lightning, "accelerate": by_accelerate}[arguments()["framework"]]
report({str(method): digest(train(method).parameters()) for method in (None, "none", "marsit")})
