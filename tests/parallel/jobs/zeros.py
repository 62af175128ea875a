"""Pruned layers and a padding row under either front: how many of their weights have moved."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.front import DDP, hvc, start, trained
from tests.support.nets import digest
from tests.support.rank import arguments, rank, report

ASKED = arguments()
WORDS, WIDE, SHORT = 20, 64, 8


class Net(nn.Module):
    """Two embeddings with a padding row, in rows with a step of their own and in short ones, and a pruned layer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Embedding(WORDS, WIDE, padding_idx=0)
        self.short = nn.Embedding(WORDS, SHORT, padding_idx=3)
        self.pruned = nn.Linear(WIDE + SHORT, 80)
        self.out = nn.Linear(80, 2)

    def forward(self, words: Tensor) -> Tensor:
        seen = torch.cat([self.wide(words), self.short(words)], dim=-1).sum(1)
        return self.out(torch.tanh(self.pruned(seen)))


def drawn(step: int) -> Tensor:
    return torch.randint(0, WORDS, (16, 4), generator=torch.Generator().manual_seed(10 * step + rank()))


def train(case: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(4)
    model = Net()
    saved: dict[str, Any] = {}
    kept = torch.rand(model.pruned.weight.shape, generator=torch.Generator().manual_seed(2)) > case.get("share", 0.8)
    late, dense = case.get("late", 0), model.pruned.weight.clone()
    pruning = [not late]

    def begin() -> tuple[Any, Any, Any]:
        """Return the model to be called, the optimizer and the compression, with what was saved."""
        model.pruned.weight.register_hook(lambda grad: grad * kept if pruning[0] else grad)
        method = hvc.masked(case["method"]) if case.get("masked") else case["method"]
        compression = hvc.Compression.create(method, model.named_parameters(), verify_every=1, timeout=30.0)
        plain: Any = torch.optim.SGD(model.parameters(), lr=0.005)  # dgc multiplies it by 10
        if case.get("adam"):
            plain = torch.optim.AdamW(model.parameters(), lr=0.005)
        called, optimizer = trained(model, plain, compression, case.get("attach"))
        if saved:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            compression.load_state_dict(saved["compression"])
        return called, optimizer, compression

    called, optimizer, compression = begin()
    for step in range(case["steps"]):
        if step == case.get("resumes"):
            parts = {"model": model, "optimizer": optimizer, "compression": compression}
            saved = copy.deepcopy({name: part.state_dict() for name, part in parts.items()})
            compression.close()
            model = Net()
            called, optimizer, compression = begin()
        if step == late:
            pruning[0] = True
            with torch.no_grad():
                model.pruned.weight.mul_(kept)
                for state in (optimizer.state[model.pruned.weight],):
                    if "exp_avg" in state:
                        state["exp_avg"].mul_(kept)
        if step == case.get("differs") and rank() == 1:
            with torch.no_grad():
                model.pruned.weight[kept] = model.pruned.weight[kept] * (torch.arange(int(kept.sum())) > 0)
        optimizer.zero_grad()
        try:
            called(drawn(step)).square().sub(1).square().mean().backward()
            optimizer.step()
        except hvc.MismatchError as error:
            return {"refused": str(error)}
    padding = [model.wide.weight[0], model.short.weight[3]]
    compression.close()
    return {
        "pruned": int((model.pruned.weight != 0)[~kept].sum()),
        "padding": int(sum((row != 0).sum() for row in padding)),
        "others": float((model.pruned.weight != dense)[kept].float().mean()),
        "weights": digest(model.parameters()),
    }


start()
report({name: train(case) for name, case in ASKED["cases"].items()})
if DDP:
    torch.distributed.destroy_process_group()
