r"""Learning with optimizers of all kinds: compressed, beside DistributedDataParallel alone, on a small transformer.

    torchrun --nproc-per-node 2 benchmarks/optimizers.py --method stock --steps 120
    torchrun --nproc-per-node 2 benchmarks/optimizers.py --method marsit --steps 120 --optimizers "NAdam;Lamb"

Each line has the mean loss of the last 20 steps. The text is a random one of 64 symbols, in which each follows from the
two before; every rank reads its own places. Optimizers of other packages are left out where these are not installed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import horovod_compress.ddp as hvc

RATE, SYMBOLS, WIDTH, LENGTH, SEQUENCES = 2e-3, 64, 48, 24, 8
#: Package, class, and options beside the learning rate.
OPTIMIZERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{name: ("torch.optim", name, {}) for name in ("AdamW", "NAdam", "RAdam", "RMSprop", "Adamax", "Adagrad")},
    "RMSprop, momentum 0.9": ("torch.optim", "RMSprop", {"lr": RATE / 4, "momentum": 0.9}),
    "RMSprop, centered": ("torch.optim", "RMSprop", {"centered": True}),
    "Adafactor": ("torch.optim", "Adafactor", {}),
    "AdamWScheduleFree": ("schedulefree", "AdamWScheduleFree", {"lr": 2 * RATE, "warmup_steps": 10}),
    "Lamb": ("pytorch_optimizer", "Lamb", {"lr": 5 * RATE}),
    "Lion": ("pytorch_optimizer", "Lion", {"lr": RATE / 5}),
    "AdamW8bit": ("bitsandbytes.optim", "AdamW8bit", {}),
}


class Text:
    """Sequences of a text that is the same on all ranks."""

    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self._next = torch.randint(1, SYMBOLS, (SYMBOLS, SYMBOLS, 4), generator=generator)
        self._own = torch.Generator().manual_seed(100 + rank)

    def batch(self) -> tuple[Tensor, Tensor]:
        found = torch.zeros(SEQUENCES, LENGTH + 1, dtype=torch.long)
        for place in (0, 1):
            found[:, place] = torch.randint(1, SYMBOLS, (SEQUENCES,), generator=self._own)
        picks = torch.randint(0, 4, found.shape, generator=self._own)
        picks = torch.where(torch.rand(found.shape, generator=self._own) < 0.5, 0, picks)
        for place in range(2, LENGTH + 1):
            found[:, place] = self._next[found[:, place - 2] % 8, found[:, place - 1], picks[:, place]]
        return found[:, :-1], found[:, 1:]


class Transformer(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(SYMBOLS, WIDTH)
        layer: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, **layer)
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS)

    def forward(self, given: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(given.shape[1])
        hidden = self.symbols(given) + self.places(torch.arange(given.shape[1]))
        return self.out(self.norm(self.layer(hidden, src_mask=mask, is_causal=True)))


def trained(name: str, method: str, steps: int, **register: Any) -> str:
    """Train once; return what came of it, in words.

    Args:
        register: options of ``register()``.
    """
    package, kind, options = OPTIMIZERS[name]
    torch.manual_seed(0)
    model = Transformer()
    optimizer = getattr(importlib.import_module(package), kind)(model.parameters(), **{"lr": RATE} | options)
    if hasattr(optimizer, "train"):
        optimizer.train()
    called, compression = DistributedDataParallel(model), None
    if method != "stock":
        compression = hvc.Compression.create(cast(hvc.MethodName, method), model.named_parameters())
        compression.register(called, optimizer, **register)
    text, losses = Text(dist.get_rank()), []
    for _ in range(steps):
        given, wanted = text.batch()
        optimizer.zero_grad()
        loss = cross_entropy(called(given).flatten(0, 1), wanted.flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    said = f"{sum(losses[-20:]) / len(losses[-20:]):.4f}"
    if compression:
        found = compression.stats()
        said += f"  bytes 1/{found['bytes_dense'] / max(1, found['bytes_sent']):.1f}"
        said += "  held" if compression.state_dict().get("second_moment") else "  not held"
        compression.close()
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="marsit", help='a method, or "stock" for DistributedDataParallel alone')
    parser.add_argument("--second-moment", choices=("auto", "own"), default="auto")
    parser.add_argument("--step", choices=("auto", "torch"), default="auto", help="who moves the weights")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--optimizers", help=f"separated by semicolons (default: {'; '.join(OPTIMIZERS)})")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level="WARNING", format="%(message)s")
    dist.init_process_group("gloo")
    names = chosen.optimizers.split(";") if chosen.optimizers else list(OPTIMIZERS)
    for name in map(str.strip, names):
        if importlib.util.find_spec(OPTIMIZERS[name][0].partition(".")[0]) is None:
            continue
        found = trained(name, chosen.method, chosen.steps, second_moment=chosen.second_moment, step=chosen.step)
        if not dist.get_rank():
            print(f"{name:24} {chosen.method:8} {chosen.steps:4} steps  loss {found}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
