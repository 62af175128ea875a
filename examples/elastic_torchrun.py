"""Train under torchrun with as many ranks as there are: save now and then, and on SIGTERM, and go on with any number.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes 1:4 --nproc-per-node 2 --max-restarts 10 --rdzv-backend c10d --rdzv-endpoint HOST:29500 FILE run

torchrun ends all ranks by SIGTERM when their number changes, or when it gets that signal itself, and by SIGKILL 30 s
later. Some ranks may get it steps before others; so all ask each other after each step, and save after the same one.
A rank that is killed says nothing: the others fail, torchrun starts all ranks again, and what came after the last save
is lost. So there is one every --save-every steps. Without that variable, ranks that torchrun has started again may look
for each other where those of before were (https://github.com/pytorch/pytorch/issues/135712).
"""

import argparse
import shutil
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import horovod_compress.ddp as hvc

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path, help="that all ranks share")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--save-every", type=int, default=100, metavar="STEPS", help="0 for at the end and on SIGTERM only")
asked = parser.parse_args()

word = torch.zeros(1)  # 1 once this rank was told to stop
signal.signal(signal.SIGTERM, lambda *given: word.fill_(1))


asked.folder.mkdir(parents=True, exist_ok=True)


def save(step: int) -> None:
    """Save everything in a new folder, and name that last: whenever this is cut off, an earlier one is whole."""
    began, made = time.monotonic(), asked.folder / f"step{step}"
    made.mkdir(exist_ok=True)
    if dist.get_rank() == 0:
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, made / "model.new")
        (made / "model.new").replace(made / "model.pt")
    compression.save(made / "compression")  # every rank; returns when all have
    if dist.get_rank() == 0:
        (asked.folder / "new").write_text(made.name)
        (asked.folder / "new").replace(asked.folder / "latest")
        for older in asked.folder.glob("step*"):
            if older != made and older.name.removeprefix("step").isdigit():
                shutil.rmtree(older, ignore_errors=True)  # an error here would leave the other ranks waiting
        print(f"saved after step {step} in {time.monotonic() - began:.2f} s", flush=True)


def load() -> int:
    """Return the step to go on with."""
    if not (asked.folder / "latest").exists():
        return 0
    saved_in = asked.folder / (asked.folder / "latest").read_text()
    saved = torch.load(saved_in / "model.pt")
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    compression.load(saved_in / "compression", residuals="redistribute")
    if dist.get_rank() == 0:
        print(f"went on after step {saved['step']} with {dist.get_world_size()} ranks", flush=True)
    return int(saved["step"])


dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Linear(64, asked.width), torch.nn.ReLU(), torch.nn.Linear(asked.width, 10))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
compression = hvc.Compression.topk(net.named_parameters())
compression.register(model, optimizer)

step, stop = load(), torch.zeros(1)
(asked.folder / "began").touch()
generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
while step < asked.steps and not stop:
    images = torch.randn(32, 64, generator=generator)
    optimizer.zero_grad()
    F.cross_entropy(model(images), images[:, :10].argmax(dim=1)).backward()
    optimizer.step()
    step += 1
    stop.copy_(word)
    dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    if asked.save_every and step % asked.save_every == 0 and step < asked.steps and not stop:
        save(step)
save(step)
compression.close()
dist.destroy_process_group()
