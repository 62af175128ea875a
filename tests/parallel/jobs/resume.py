"""Train, save, load in new processes, and go on."""

from __future__ import annotations

from pathlib import Path

import horovod.torch as hvd
import torch

from tests.support import rank
from tests.support.training import digest, loss_of, net, optimizer_for, train

hvd.init()
torch.set_num_threads(1)
given = rank.arguments()
saved = Path(given["folder"]) / f"rank{hvd.rank()}.pt"
found = {}
for method, options in given["methods"].items():
    model = net()
    optimizer, compression = optimizer_for(model, options.pop("codec"), attach=True, **options)

    def state() -> dict[str, object]:
        kept = compression.state_dict()
        return {
            "weights": digest(model.parameters()),
            "residuals": digest(kept["residuals"].values()),
            "has residuals": any(bool(r.any()) for r in kept["residuals"].values()),
            "step": kept["step"],
        }

    path = saved.with_name(f"{method}.{saved.name}")
    first = 0
    if given["load"]:
        kept = torch.load(path, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        if given["load"] == "all":
            compression.load_state_dict(kept["compression"])
        first = 10
    train(model, optimizer, range(first, 10), loss_of)
    middle = state()
    if not given["load"]:
        parts = {"model": model, "optimizer": optimizer, "compression": compression}
        torch.save({name: part.state_dict() for name, part in parts.items()}, path)
    train(model, optimizer, range(10, 20), loss_of)
    found[method] = {"middle": middle, "end": state()}
    compression.close()
rank.report(found)
