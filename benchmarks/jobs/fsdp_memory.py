"""Counts what a rank holds of a divided model and its compression; runs on every rank, see benchmarks.fsdp_memory."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks.jobs.fsdp import Contestant
from benchmarks.memory import frames_of, kept_by, tensors_of_process
from benchmarks.outcomes import emit


def storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Return the memory behind tensors, by its address: what several share counts once."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    found = (tensor.untyped_storage() for tensor in local if isinstance(tensor, Tensor))
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


def count(contestant: Contestant) -> dict[str, int]:
    """Return the bytes of each kind, of this rank."""
    parameters = list(contestant.model.parameters())
    states = (value for state in contestant.optimizer.state.values() for value in state.values())
    reducer = contestant.compression and contestant.compression._session.reducer
    kinds: dict[str, Iterable[Any]] = {
        "parameters": parameters,
        "gradients": [parameter.grad for parameter in parameters],
        "optimizer": states,
        "kept": kept_by(reducer) if reducer else [],
        "frames": frames_of(reducer) if reducer else [],
        "others": tensors_of_process(),
    }
    seen: set[int] = set()
    found: dict[str, int] = {}
    for kind, tensors in kinds.items():
        of_kind = storages(tensors)
        found[kind] = sum(size for place, size in of_kind.items() if place not in seen)
        seen |= of_kind.keys()
    return found


def main() -> None:
    asked = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    shape = (dist.get_world_size() // asked["shards"], asked["shards"])
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    contestant = Contestant(asked, asked["how"], mesh, torch.optim.AdamW)
    tokens = torch.randint(asked["vocabulary"], (1, asked["context"]))
    for _ in range(asked["steps"]):
        contestant.step(tokens)
        dist.barrier()
    found = count(contestant) | {"peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    if dist.get_rank() == 0:
        largest = {kind: max(each[kind] for each in every) for kind in found}
        emit({"bench": "fsdp_memory", "name": asked["name"], "parameters": contestant.parameters, "bytes": largest})
    if contestant.compression is not None:
        contestant.compression.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
