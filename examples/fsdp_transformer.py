"""Train a small transformer that is divided among ranks, with what large models are trained with.

    torchrun --nproc-per-node 4 examples/fsdp_transformer.py --method marsit
    torchrun --nproc-per-node 4 examples/fsdp_transformer.py --native

The calls come in the order of torchtitan: activation checkpointing, torch.compile, fully_shard with mixed precision,
optimizer, schedule; the compression is created and registered when all of these are there. With --native, torch itself
exchanges the gradients of replicas, in full.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import horovod_compress.fsdp as hvc
from options import exchanged, positive
from tasks import Text

CLIP = 1.0
LINES = 10  # of progress


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--replicas", type=positive(int), help="of the model (default: half as many as there are ranks)"
    )
    parser.add_argument("--method", type=exchanged, default="marsit", choices=hvc.available(), help="default marsit")
    parser.add_argument("--native", action="store_true", help="let torch exchange the gradients of replicas, in full")
    parser.add_argument("--steps", type=positive(int), default=200)
    parser.add_argument("--batch", type=positive(int), default=8, help="windows of text a rank and step (default 8)")
    parser.add_argument("--lr", type=positive(float), default=1e-3)
    parser.add_argument("--compile", action="store_true", help="compile each block, which takes a minute")
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16; gradients are float32")
    return parser.parse_args()


def divide(model: nn.Module, mesh: DeviceMesh, chosen: argparse.Namespace) -> nn.Module:
    """Prepare a model for training in parallel, as torchtitan's ``parallelize`` does."""
    blocks = cast(nn.Sequential, model.blocks)
    for index, block in enumerate(blocks):
        blocks[index] = checkpoint_wrapper(block)
        if chosen.compile:
            blocks[index].compile(fullgraph=True)
    computed = torch.bfloat16 if chosen.bfloat16 else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def main() -> None:
    chosen = arguments()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    replicas = chosen.replicas or max(1, world // 2)
    if world % replicas:
        sys.exit(
            f"fsdp_transformer.py: {world} ranks do not divide into {replicas} replicas; choose another --replicas"
        )
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))

    task = Text()
    model = divide(task.model(), mesh if chosen.native else mesh["shard"], chosen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=chosen.lr)
    warm_up = max(1, chosen.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, 1 - step / chosen.steps)
    )
    compression = None
    if not chosen.native:
        compression = hvc.Compression.create(chosen.method, model.named_parameters(), total_steps=chosen.steps)
        compression.register(model, optimizer, replicate=mesh["replicate"])

    began = time.perf_counter()
    for step in range(1, chosen.steps + 1):
        inputs, targets = task.batch(0, step, rank, world, chosen.batch)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())
        loss.backward()
        norm = cast(DTensor, nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        optimizer.step()
        schedule.step()
        if step % max(1, chosen.steps // LINES) == 0:
            mean, whole = loss.detach(), norm.full_tensor()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            if rank == 0:
                pace = (time.perf_counter() - began) / step
                print(f"step {step}: loss {mean:.3f}, norm {whole:.2f}, {1e3 * pace:.0f} ms a step", flush=True)

    if compression is not None:
        compression.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
