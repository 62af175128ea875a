"""Times steps of a transformer that fully_shard divides within hosts; runs on every rank, see benchmarks.fsdp.

The clock runs from a barrier to the end of the optimizer's step, with the real forward and backward pass. The slowest
rank counts. Bytes are those that the kernel counts on the link of the first host.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import horovod_compress.fsdp as hvc
from benchmarks.jobs.rank import digest, gathered, run_job, say, slowest, tell, timed
from benchmarks.peers.ddp import join
from benchmarks.results import spread_fields

HEADS = 8


class Transformer(nn.Module):
    """A table of embeddings and layers of attention, without a head: what is exchanged is the same."""

    def __init__(self, asked: dict[str, Any]) -> None:
        super().__init__()
        width, rows = asked["width"], asked["vocabulary"]
        self.embedding = nn.Embedding(rows, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, HEADS, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(asked["layers"])
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.embedding(tokens)
        for layer in self.layers:
            found = layer(found)
        return self.norm(found)


class Contestant:
    """A model with its optimizer, whose replicas exchange gradients in one way.

    Args:
        how: "native" and the dtype in which torch reduces, a method of ours with its options, or "alone".
        optimizer: its class.
    """

    def __init__(
        self, asked: dict[str, Any], how: dict[str, Any], mesh: DeviceMesh, optimizer: Any = torch.optim.SGD
    ) -> None:
        options = dict(how)
        reduced = getattr(torch, options.pop("native", "float32"))
        method, alone = options.pop("method", None), options.pop("alone", False)
        torch.manual_seed(0)
        self.model = Transformer(asked)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        given: dict[str, Any] = {
            "mesh": mesh["shard"] if method or alone else mesh,
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=reduced),
            "reshard_after_forward": False,
        }
        for layer in self.model.layers:
            fully_shard(layer, **given)
        fully_shard(self.model, **given)
        self.optimizer = optimizer(self.model.parameters(), lr=1e-3)
        self.compression: Any = None
        if method:
            self.compression = hvc.Compression.create(method, self.model.named_parameters(), **options)
            self.compression.register(self.model, self.optimizer, replicate=mesh["replicate"])

    def step(self, tokens: Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(tokens).square().mean().backward()
        self.optimizer.step()

    def digest(self) -> str:
        """Return a hash of this rank's shards."""
        return digest(p.to_local() for p in self.model.parameters() if isinstance(p, DTensor))


def link_bytes() -> int:
    """Return what this host has sent over its link so far; of ranks on one machine, nothing."""
    name = os.environ.get("HOROVOD_GLOO_IFACE", "")
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        found, _, counts = line.partition(":")
        if name and found.strip() == name:
            return int(counts.split()[8])
    return 0


def measure(asked: dict[str, Any], name: str, how: dict[str, Any], mesh: DeviceMesh) -> int:
    """Time one contestant's steps, and return how many shards differ between replicas."""
    contestant = Contestant(asked, how, mesh)
    generator = torch.Generator().manual_seed(1 + hvd.rank())
    tokens = torch.randint(asked["vocabulary"], (asked["batch"], asked["context"]), generator=generator)
    seconds: list[float] = []
    before = 0
    for number in range(asked["warm_up"] + asked["steps"]):
        if number == asked["warm_up"]:
            before = link_bytes()
        taken = timed(lambda: contestant.step(tokens))
        if number >= asked["warm_up"]:
            seconds.append(taken)
        say(f"{name}: step {number + 1} of {asked['warm_up'] + asked['steps']}, {1e3 * taken:.0f} ms")
    sent = link_bytes() - before
    digests = gathered(contestant.digest(), "bench.weights")
    shards = mesh["shard"].size()
    wrong = 0 if "alone" in how else sum(len(set(digests[shard::shards])) > 1 for shard in range(shards))
    record = {
        "bench": "fsdp",
        "name": name,
        "options": how,
        "parameters": contestant.parameters,
        "replicas": mesh["replicate"].size(),
        "shards": shards,
        "host_bytes_per_step": round(sent / asked["steps"]),
        "wrong": wrong,
        **spread_fields("seconds", slowest(seconds, "bench.seconds")),
    }
    if contestant.compression is not None:
        record["buckets"] = contestant.compression.stats()["buckets"]
        contestant.compression.close()
    tell(record)
    return wrong


def main() -> int:
    asked = json.loads(sys.argv[1])
    join()
    shape = (hvd.size() // asked["shards"], asked["shards"])
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return sum(measure(asked, name, how, mesh) for name, how in asked["cases"].items())


if __name__ == "__main__":
    sys.exit(run_job(main))
