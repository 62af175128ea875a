"""The text task with AdamW, held-out losses on the way, on a device: one run for each method."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.front import hvc, start, trained
from tests.support.jobs import ROOT
from tests.support.nets import digest
from tests.support.placing import count_ranks, place, staging
from tests.support.rank import arguments, check, rank

sys.path.insert(0, str(ROOT / "examples"))
import tasks

ASKED = arguments()
RATE, BATCH = 1e-3, 8
start()
torch.set_num_threads(1)
WHERE = place(ASKED["device"])
TASK = tasks.TASKS["text"]()


@torch.no_grad()
def held_out(model: nn.Module) -> list[float]:
    """Return the sum of this rank's losses on its share of the held-out text, and their number."""
    total, count = 0.0, 0
    for share in TASK.held_out(rank(), count_ranks()):
        inputs, targets = (part.to(WHERE) for part in share)
        total += float(F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten(), reduction="sum"))
        count += targets.numel()
    return [total, count]


def run(method: str) -> dict[str, Any]:
    torch.manual_seed(ASKED["seed"])
    model = TASK.model().to(WHERE)
    # A fixed plan: one that is chosen by times would differ from device to device.
    options = {"schedule": "size:25MB", "seed": ASKED["seed"], "transport": "gloo"}
    compression = hvc.Compression.create(method, model.named_parameters(), **options)
    adam = torch.optim.AdamW(model.parameters(), lr=RATE)
    called, optimizer = trained(model, adam, compression, {"warmup_steps": ASKED["exact_steps"]})
    curve = [[0, *held_out(model)]]
    for step in range(ASKED["steps"]):
        batch = TASK.batch(ASKED["seed"], step, rank(), count_ranks(), BATCH)
        inputs, targets = (part.to(WHERE) for part in batch)
        optimizer.zero_grad()
        F.cross_entropy(called(inputs).flatten(0, -2), targets.flatten()).backward()
        optimizer.step()
        if (step + 1) % ASKED["every"] == 0:
            curve.append([step + 1, *held_out(model)])
    held = len(compression.state_dict().get("second_moment", {}))
    compression.close()
    return {"curve": curve, "weights": digest(model.parameters()), "held": held}


with staging(ASKED["device"]):
    for method in ASKED["methods"]:
        check(method, lambda: run(method))
