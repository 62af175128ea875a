"""Train a small network on 8x8 digits, each replica divided in two; torchrun --nproc-per-node 4 FILE starts it."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import horovod_compress.fsdp as hvc

SHARDS = 2  # ranks of one host, which share a replica

dist.init_process_group("gloo")
if dist.get_world_size() % SHARDS:
    raise SystemExit(f"expected a multiple of {SHARDS} ranks, got {dist.get_world_size()}: change --nproc-per-node")
torch.set_num_threads(1)
torch.manual_seed(0)

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels))
train, test = order[:1440], order[1440:]

model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 3, padding=1),
    torch.nn.ReLU(),
    torch.nn.Conv2d(16, 32, 3, padding=1),
    torch.nn.ReLU(),
    torch.nn.MaxPool2d(2),
    torch.nn.Flatten(),
    torch.nn.Linear(512, 64),
    torch.nn.ReLU(),
    torch.nn.Linear(64, 10),
)
shape = (dist.get_world_size() // SHARDS, SHARDS)
mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
fully_shard(model, mesh=mesh["shard"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
compression = hvc.Compression.marsit(model.named_parameters())
compression.register(model, optimizer, replicate=mesh["replicate"])

for epoch in range(12):
    shuffled = train[torch.randperm(len(train))]  # the same on every rank: all have one seed
    for batch in shuffled[dist.get_rank() :: dist.get_world_size()].split(16):
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    with torch.no_grad():  # on every rank: each has only its shard of the weights
        hits = model(images[test]).argmax(dim=1) == labels[test]
    if dist.get_rank() == 0:
        print(f"epoch {epoch + 1}: test accuracy {hits.float().mean():.3f}", flush=True)

compression.close()
dist.destroy_process_group()
