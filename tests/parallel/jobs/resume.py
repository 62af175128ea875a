"""Train, save, load in new processes, and go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from tests.support import rank
from tests.support.training import digest, loss_of, net, optimizer_for, train

hvd.init()
torch.set_num_threads(1)
given = rank.arguments()
MIDDLE, END = 11, 20  # not right after a round in full precision, which empties residuals
saved = Path(given["folder"]) / f"rank{hvd.rank()}.pt"
together = saved.parent / "together"  # of all ranks


def run(method: str, options: dict[str, Any], load: str) -> dict[str, Any]:
    model = net()
    codec, others = options["codec"], {name: value for name, value in options.items() if name != "codec"}
    optimizer, compression = optimizer_for(model, codec, attach=True, **others)

    def state() -> dict[str, object]:
        kept = compression.state_dict()
        residuals = [tensor for tensors in kept["state"].values() for tensor in tensors.values()]
        residuals += kept["tables"].values()
        return {
            "weights": digest(model.parameters()),
            "residuals": digest(residuals),
            "has residuals": any(bool(r.any()) for r in residuals),
            "step": kept["step"],
        }

    path = saved.with_name(f"{method}.{saved.name}")
    if load != "nothing":
        kept = torch.load(path, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        if load == "all":
            compression.load_state_dict(kept["compression"])
        if load == "folder":
            compression.load(together / method)
    else:
        train(model, optimizer, range(MIDDLE), loss_of)
    middle = state()
    if load == "nothing":
        parts = {"model": model, "optimizer": optimizer, "compression": compression}
        torch.save({name: part.state_dict() for name, part in parts.items()}, path)
        compression.save(together / method)
    train(model, optimizer, range(MIDDLE, END), loss_of)
    end = state()
    compression.close()
    return {"middle": middle, "end": end}


rank.report({load: {m: run(m, o, load) for m, o in given["methods"].items()} for load in given["loads"]})
