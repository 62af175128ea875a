"""Train a small network on 8x8 digits with Accelerate: torchrun --nproc-per-node 2 FILE, or accelerate launch."""

import sys
from typing import cast

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import horovod_compress.ddp as hvc


def train(accelerator: Accelerator, method: hvc.MethodName | None = "marsit", epochs: int = 4) -> torch.nn.Module:
    set_seed(0)
    torch.set_num_threads(1)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model, optimizer, loader = accelerator.prepare(
        net,
        torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        DataLoader(data, batch_size=32, shuffle=True, drop_last=True),
    )
    compression = None
    if method:
        compression = hvc.Compression.create(method, accelerator.unwrap_model(model).named_parameters())
        compression.register(model, optimizer)
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(images), labels))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    with torch.no_grad():
        hits = net(data.tensors[0]).argmax(dim=1) == data.tensors[1]
    print(f"rank {accelerator.process_index}: accuracy {hits.float().mean():.3f}", flush=True)
    if compression:
        compression.close()
    return net


if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    train(accelerator, cast(hvc.MethodName, sys.argv[1]) if sys.argv[1:] else "marsit")
    accelerator.end_training()
