r"""Train a task under elastic horovodrun while hosts change at given steps; rank 0 writes a record.

    echo localhost:2 > hosts; printf '#!/bin/sh\ncat hosts\n' > hosts.sh; chmod +x hosts.sh
    horovodrun -np 2 --min-np 1 --network-interfaces lo --host-discovery-script ./hosts.sh \
        python examples/elastic_horovod.py --hosts hosts --change 400:localhost:3 --change 800:localhost:4 \
        --json out.json

`hosts.sh` prints the file `hosts`, which rank 0 rewrites when a change is due; all ranks wait there until Horovod has
noticed. Nothing else is needed to go on among other ranks: docs/elastic.md. benchmarks/elastic.py runs this.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

import horovod_compress.torch as hvc
from options import value_of
from records import parameter_hash
from tasks import TASKS
from train import cosine, cross_entropy
from virtual_ranks import held_out

PAUSE_SECONDS = 0.1
#: For so long ranks wait for word of other hosts.
PATIENCE_SECONDS = 120.0


def change(text: str) -> tuple[int, str]:
    """Return a step and what hosts there are from it on."""
    step, host, slots = text.split(":")
    return int(step), f"{host}:{int(slots)}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=sorted(TASKS), default="text")
    parser.add_argument("--method", default="marsit")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of the method")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--hosts", type=Path, required=True, help="the file that the discovery script prints")
    parser.add_argument(
        "--change", type=change, action="append", default=[], metavar="STEP:HOST:SLOTS", help="after so many steps"
    )
    parser.add_argument("--lose-residuals", action="store_true", help="at each change, to see what that costs")
    parser.add_argument("--json", type=Path, required=True)
    return parser.parse_args()


hvd.init()
torch.set_num_threads(1)
asked = arguments()
task = TASKS[asked.task]("even")
torch.manual_seed(asked.seed)
model = task.model()
named = list(model.named_parameters())
options = {name: value_of(text) for name, _, text in (option.partition("=") for option in asked.option)}
shared = {"schedule": "size:25MB", "seed": asked.seed, "total_steps": asked.steps}
compression = hvc.Compression.create(asked.method, named, **shared | options)
optimizer = hvd.DistributedOptimizer(
    torch.optim.AdamW(model.parameters(), lr=asked.lr), named_parameters=named, compression=compression
)
compression.attach(optimizer)
changes: dict[int, str] = dict(asked.change)
state = hvd.elastic.TorchState(
    model=model, optimizer=optimizer, compression=compression, step=0, worlds=[hvd.size()], seconds=0.0
)


def change_hosts() -> None:
    """Let hosts change if that is due, and wait until Horovod tells of it, which ends :func:`train` for now."""
    hosts = changes.get(state.step)
    if hosts is None or len(state.worlds) > [*changes].index(state.step) + 1:
        return
    state.worlds = [*state.worlds, int(hosts.rpartition(":")[2])]
    if hvd.rank() == 0:
        asked.hosts.with_suffix(".new").write_text(hosts + "\n")
        asked.hosts.with_suffix(".new").rename(asked.hosts)
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        state.commit()
        time.sleep(PAUSE_SECONDS)
    raise TimeoutError(f"Horovod did not notice within {PATIENCE_SECONDS:g} s that the hosts are {hosts}")


@hvd.elastic.run  # type: ignore[untyped-decorator]
def train(state: Any) -> None:
    assert hvd.size() == state.worlds[-1], (hvd.size(), state.worlds)
    if len(state.worlds) > 1 and asked.lose_residuals:
        compression.load_state_dict(compression.state_dict(), residuals="reset")
    while state.step < asked.steps:
        change_hosts()
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = asked.lr * cosine(state.step, asked.steps)
        optimizer.zero_grad()
        batch = task.batch(asked.seed, state.step, hvd.rank(), hvd.size(), task.defaults.batch)
        cross_entropy(model, *batch).backward()
        optimizer.step()
        state.step += 1
        state.seconds += time.perf_counter() - began


train(state)
hashes = hvd.allgather_object(parameter_hash(model.parameters()), name="elastic.hash")
if hvd.rank() == 0:
    loss, accuracy = held_out(task, model)
    stats = compression.stats()
    record = {
        "loss": loss, "accuracy": accuracy, "worlds": state.worlds, "ranks_identical": len(set(hashes)) == 1,
        "residual_norm": stats["residual_norm"], "times_fewer_bytes": stats["times_fewer_bytes"],
        "seconds": round(state.seconds, 1),
    }  # fmt: skip
    asked.json.with_suffix(".new").write_text(json.dumps(record) + "\n")
    asked.json.with_suffix(".new").rename(asked.json)
