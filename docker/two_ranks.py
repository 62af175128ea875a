"""A job of two ranks for the images' self-check: one compressed step, after which both hold the same bits."""

import horovod.torch as hvd
import torch

import horovod_compress.torch as hvc

hvd.init()
assert hvd.size() == 2, f"two ranks were started, and rank {hvd.rank()} sees {hvd.size()}"
torch.manual_seed(7)
model = torch.nn.Linear(64, 8)
compression = hvc.Compression.global_qsgd(model.named_parameters())
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), compression=compression
)
compression.attach(optimizer)
inputs = torch.randn(16, 64) + hvd.rank()
model(inputs).square().mean().backward()
optimizer.step()
weights = hvd.allgather_object(model.weight.tolist())
assert weights[0] == weights[1], "the ranks hold different weights after one step"
if hvd.rank() == 0:
    print("two ranks hold the same bits after a compressed step")
