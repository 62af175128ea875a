"""Steps with given gradients on several devices: what is sent, what comes of it, and what is kept, as hashes.

Gradients that a backward pass computes differ between a CPU and a GPU in last bits. Given ones do not: the loss is the
sum of the parameters times them. The learning rate is a power of two, so that an update is rounded once everywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.battery.kept import kept_by
from tests.support.front import hvc, start, trained
from tests.support.nets import digest
from tests.support.placing import count_ranks, place, staging
from tests.support.rank import arguments, check, rank
from tests.support.samples import KINDS, Sample, samples
from tests.support.sent import Sent, recorded

ASKED = arguments()
SAVED_AFTER = 3
SHAPES = ((300, 70), (5,), (40, 64), (1,))
RATE = 2.0**-4
TWO = ("marsit", "topk")  # one whose payloads have a known size, and one whose have not
FEW = (*KINDS, "ef_signsgd", "sketch_fusion")  # each with a payload of its own
start()
torch.set_num_threads(1)


class Given(nn.Module):
    """A model whose gradients are its arguments."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.parts = nn.ParameterList(torch.randn(shape, generator=generator) for shape in SHAPES)

    def forward(self, grads: list[Tensor]) -> Tensor:
        return torch.stack([(part * grad).sum() for part, grad in zip(self.parts, grads, strict=True)]).sum()


def grads(step: int, where: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank())
    return [torch.randn(shape, generator=generator).to(where) for shape in SHAPES]


def made(sample: Sample, where: torch.device) -> tuple[Any, Any, Any, Any]:
    """Return model, compression, optimizer, and what is called."""
    model = Given().to(where)
    exchanges = sample.exchanges()
    options = {"exchange": exchanges[sample.number % len(exchanges)], "transport": ASKED["transport"]}
    common = {"schedule": "size:10KB", "verify_every": 1, "timeout": 30.0}
    named = model.named_parameters()
    compression = hvc.Compression.create(sample.method, named, **common, **(options | sample.options))
    called, optimizer = trained(model, torch.optim.SGD(model.parameters(), lr=RATE), compression)
    return model, compression, optimizer, called


def run(sample: Sample, device: str, sent: Sent) -> list[dict[str, Any]]:
    """Return what each step came to."""
    where, found = place(device), []
    with staging(device):
        model, compression, optimizer, called = made(sample, where)
        if ASKED.get("load"):
            load(model, compression, sample, ASKED["load"])
        sent.take()  # what the start said
        for step in range(*ASKED["steps"]):
            optimizer.zero_grad()
            called(grads(step, where)).backward()
            optimizer.step()
            found.append({"sent": sent.take(), **state(model, compression)})
            if step + 1 == SAVED_AFTER and "save" in ASKED:
                save(model, compression, sample, device)
        compression.close()
    return found


def state(model: nn.Module, compression: Any) -> dict[str, str]:
    assert compression._session.reducer.wait_idle(20.0)
    kept = kept_by(compression._session.reducer)
    return {
        "results": digest(parameter.grad for parameter in model.parameters() if parameter.grad is not None),
        "weights": digest(model.parameters()),
        "kept": digest(kept[name] for name in sorted(kept)),
    }


def folder_of(root: str, sample: Sample, device: str) -> Path:
    return Path(root) / device.replace(":", "") / f"{sample.method}.{sample.number}"


def save(model: nn.Module, compression: Any, sample: Sample, device: str) -> None:
    folder = folder_of(ASKED["save"], sample, device)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / f"model.{rank()}")
    compression.save(folder / "compression")


def load(model: nn.Module, compression: Any, sample: Sample, given: dict[str, str]) -> None:
    folder = folder_of(given["folder"], sample, given["device"])
    model.load_state_dict(torch.load(folder / f"model.{rank()}", weights_only=True, map_location="cpu"))
    compression.load(folder / "compression")


def chosen() -> list[Sample]:
    methods = {"two": TWO, "few": FEW}.get(ASKED["which"])
    return [
        sample
        for sample in samples()
        if sample.worlds(count_ranks()) and (methods is None or (sample.number == 0 and sample.method in methods))
    ]


with recorded() as sent:
    for sample in chosen():
        for device in ASKED["devices"]:
            check(f"{sample.name} on {device}", lambda: run(sample, device, sent))
