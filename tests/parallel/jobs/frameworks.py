"""The examples for trainers, each trained by DDP alone, with `none` and with `marsit`; all three clip.

Those for Lightning and Accelerate are in examples, that for the Trainer of transformers is in docs/frameworks.md.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import horovod_compress.ddp as hvc
from tests.support.jobs import ROOT
from tests.support.rank import arguments, report
from tests.support.training import digest

sys.path.insert(0, str(ROOT / "examples"))


def by_lightning(method: str | None) -> torch.nn.Module:
    import lightning_ddp

    return lightning_ddp.train([lightning_ddp.Compress(method)] if method else [], epochs=3)


def by_accelerate(method: str | None) -> torch.nn.Module:
    from accelerate import Accelerator

    import accelerate_ddp

    return accelerate_ddp.train(Accelerator(cpu=True), method, epochs=3)


class Letters(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences in which every second letter repeats the one before."""

    def __init__(self) -> None:
        self.text = torch.randint(0, 64, (256, 32), generator=torch.Generator().manual_seed(1))
        self.text[:, 1::2] = self.text[:, ::2]

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.text[index], "labels": self.text[index]}


def by_trainer(method: str | None) -> torch.nn.Module:
    """Run the page's own code on a small GPT-2, with clipping and accumulation."""
    import transformers

    page = (Path(ROOT) / "docs" / "frameworks.md").read_text()
    code = re.search(r"```python\n(class Compress\(transformers.*?)```", page, re.DOTALL)
    assert code
    text = code[1].replace("marsit", method) if method else code[1].replace("[Compress()]", "[]")
    torch.set_num_threads(1)
    transformers.set_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder,
            use_cpu=True,
            max_steps=80,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            gradient_accumulation_steps=2,
            ddp_find_unused_parameters=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        names: dict[str, Any] = {"transformers": transformers, "hvc": hvc, "model": model, "args": args}
        exec(compile(text, "frameworks.md", "exec"), names | {"data": Letters()})
    return model


def noting(into: list[float], function: Any) -> Any:
    """Return a function that also notes what it returns."""

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        into.append(float(found := function(*args, **kwargs)))
        return found

    return noted


def trained(method: str | None) -> tuple[dict[str, Any], list[float]]:
    """Train; return the weights' digest with the norms that the trainer has clipped by and logs, and its losses."""
    norms: list[float] = []
    losses: list[float] = []
    with (
        mock.patch("torch.nn.utils.clip_grad_norm_", noting(norms, torch.nn.utils.clip_grad_norm_)),
        mock.patch("torch.nn.utils.get_total_norm", noting(norms, torch.nn.utils.get_total_norm)),  # Accelerate's
        mock.patch("torch.nn.functional.cross_entropy", noting(losses, torch.nn.functional.cross_entropy)),
    ):
        weights = digest(train(method).parameters())
    return {"weights": weights, "norms": norms}, losses


train: Any = {"lightning": by_lightning, "accelerate": by_accelerate, "transformers": by_trainer}[
    arguments()["framework"]
]
found = {str(method): trained(method) for method in (None, "none", "marsit")}
report({name: {"alike": alike, "losses": losses} for name, (alike, losses) in found.items()})
