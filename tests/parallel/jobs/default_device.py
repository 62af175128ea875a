"""Trainings of a program that has torch make tensors on another device by default, and of one that has not."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.front import hvc, start, trained
from tests.support.nets import digest
from tests.support.rank import arguments, check, folder, rank

start()
torch.set_num_threads(1)
PLAIN = arguments().get("plain", False)


def train(method: str, default: str) -> str:
    with torch.device("cpu"):
        torch.manual_seed(0)
        embedding = nn.Embedding(9, 6, sparse=method == "none" and PLAIN)
        model = nn.Sequential(embedding, nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.set_default_device(default)
    try:
        named = [(f"{method}.{default}.{name}", parameter) for name, parameter in model.named_parameters()]
        compression = hvc.Compression.create(
            method, named, timeout=30.0, min_elements=1, warmup_steps=1, verify_every=2
        )
        called, optimizer = trained(model, optimizer, compression, plain=PLAIN)
        for step in range(5):
            if step == 4:
                compression.save(folder() / f"{method}.{default}")
            optimizer.zero_grad()
            called(torch.tensor([step, rank()], device="cpu")).square().mean().backward()
            optimizer.step()
        compression.close()
    finally:
        torch.set_default_device("cpu")
    return digest(model.parameters())


for method in ("none", "marsit", "topk", "powersgd"):
    check(method, lambda method=method: [train(method, default) for default in ("cpu", "meta")])
