"""Train a small network on 8x8 digits; start it with horovodrun -np 2 python FILE."""

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import horovod_compress.torch as hvc

hvd.init()
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
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
    named_parameters=model.named_parameters(),
    compression=hvc.Compression.marsit(model.named_parameters()),
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

for epoch in range(12):
    shuffled = train[torch.randperm(len(train))]  # the same on every rank: all have one seed
    for batch in shuffled[hvd.rank() :: hvd.size()].split(32):
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    if hvd.rank() == 0:
        with torch.no_grad():
            hits = model(images[test]).argmax(dim=1) == labels[test]
        print(f"epoch {epoch + 1}: test accuracy {hits.float().mean():.3f}", flush=True)
