"""Trains the text model divided by `fully_shard`, between replicas uncompressed by torch or by a method of ours.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 examples/fsdp_text.py --method native --seed 1
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 examples/fsdp_text.py --method marsit --seed 1

AdamW with warm-up and cosine, clipped; replicas of two ranks. `native` is torch's own HSDP. Rank 0 prints a JSON line,
with means of the norms that clipping saw, over 50 steps each.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import horovod_compress.fsdp as hvc
from options import exchanged, positive, value_of
from tasks import TASKS
from train import cosine, cross_entropy
from virtual_ranks import held_out

SHARDS = 2
WINDOW = 50


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", type=exchanged, default="native", metavar="'native | METHOD [option=value ...]'")
    parser.add_argument("--steps", type=positive(int), default=1200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=positive(float), default=2e-3)
    parser.add_argument("--max-norm", type=positive(float), default=1.0)
    return parser.parse_args()


def divided(model: Any, mesh: Any) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def main() -> None:
    asked = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if world % SHARDS:
        sys.exit(f"fsdp_text.py: each replica is divided in {SHARDS}; start a multiple of that many ranks, not {world}")
    mesh = init_device_mesh("cpu", (world // SHARDS, SHARDS), mesh_dim_names=("replicate", "shard"))
    task = TASKS["text"]("even")
    torch.manual_seed(asked.seed)
    model = task.model()
    method, *options = asked.method.split()
    divided(model, mesh if method == "native" else mesh["shard"])
    optimizer, compression = torch.optim.AdamW(model.parameters(), lr=asked.lr), None
    if method != "native":
        own = {name: value_of(text) for name, _, text in (option.partition("=") for option in options)}
        shared = {"schedule": "size:25MB", "seed": asked.seed}
        compression = hvc.Compression.create(method, model.named_parameters(), **shared | own)
        compression.register(model, optimizer, replicate=mesh["replicate"])
    norms, began = [], time.monotonic()
    for step in range(asked.steps):
        for group in optimizer.param_groups:
            group["lr"] = asked.lr * cosine(step, asked.steps)
        optimizer.zero_grad()
        cross_entropy(model, *task.batch(asked.seed, step, rank, world, task.defaults.batch)).backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), asked.max_norm)
        norms.append(float(norm.full_tensor()))
        optimizer.step()
    seconds = time.monotonic() - began
    with torch.no_grad():  # on every rank: each has only its shard of the weights
        loss, accuracy = held_out(task, model)
    windows = [round(sum(norms[at : at + WINDOW]) / WINDOW, 3) for at in range(0, asked.steps, WINDOW)]
    found = {"bench": "fsdp_text"} | vars(asked) | {"loss": loss, "accuracy": accuracy, "norms": windows}
    if compression:
        found["times_fewer_bytes"] = compression.stats()["times_fewer_bytes"]
        compression.close()
    if not rank:
        print(json.dumps(found | {"seconds": round(seconds, 1)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
