"""Random trainings: each is saved at some step and resumed, and must find the same bits as without, on all ranks."""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.front import DDP, hvc, start, trained
from tests.support.nets import digest
from tests.support.rank import arguments, check, rank
from tests.support.samples import samples
from tests.support.states import resealed

WORLD = 2
#: What makes each optimizer; options that all of them have come with it.
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "Adam, amsgrad": lambda given, **options: torch.optim.Adam(given, amsgrad=True, **options),
    "AdamW, fused": lambda given, **options: torch.optim.AdamW(given, fused=True, **options),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": torch.optim.RMSprop,
    "RMSprop, centered": lambda given, **options: torch.optim.RMSprop(given, centered=True, **options),
    "SGD": torch.optim.SGD,
    "SGD, momentum": lambda given, **options: torch.optim.SGD(given, momentum=0.9, **options),
}
SAMPLES = [sample for sample in samples() if sample.worlds(WORLD)]
LAYERS = ("embedding", "middle", "late")


#: Words that all steps may have, and those that begin one after another; a row of each has a step of its own.
WORDS, NEW, WIDE = 20, 8, 64


class Net(nn.Module):
    """A few layers, of which some may be left out of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first = nn.Embedding(WORDS + NEW, WIDE), nn.Linear(WIDE, 16)
        self.middle = nn.Linear(16, 16)
        self.last, self.late, self.norm = nn.Linear(16, 4), nn.Linear(16, 4), nn.LayerNorm(16)

    def forward(self, x: Tensor, used: set[str]) -> Tensor:
        hidden = self.embedding(x) if "embedding" in used else F.one_hot(x, WIDE).float()
        hidden = torch.tanh(self.first(hidden))
        if "middle" in used:
            hidden = hidden + torch.tanh(self.middle(self.norm(hidden)))
        return self.last(hidden) + self.late(hidden) if "late" in used else self.last(hidden)


@dataclass(kw_only=True)
class Draw:
    """One training, the same on every rank.

    Attributes:
        apart: the last layers have an optimizer of their own.
        joins: from this step on the optimizer has the layer ``late``; 0 for the beginning.
        frozen, left_out, cleared, surges, skipped: by step, which layers are frozen, or not used; whether the
            optimizers' state is cleared before it, whether its loss is far larger; and whose results nobody uses.
        order: when a resume loads the compression's state.
    """

    steps: int
    saved: int
    method: str
    options: dict[str, Any]
    compression: dict[str, Any]
    attach: dict[str, Any]
    optimizers: list[str]
    own: dict[str, Any]
    apart: bool
    joins: int
    frozen: list[set[str]]
    left_out: list[set[str]]
    cleared: set[int]
    surges: set[int]
    skipped: list[set[int]]
    schedule: bool
    clip: float
    order: str
    clears: bool


def drawn(number: int) -> Draw:
    draw = random.Random(number)
    steps = draw.randint(14, 30)

    def maybe(options: dict[str, list[Any]], part: float) -> dict[str, Any]:
        return {name: draw.choice(values) for name, values in options.items() if draw.random() < part}

    def spans() -> list[set[str]]:
        found: list[set[str]] = []
        now = {name for name in LAYERS if draw.random() < 0.3}
        for _ in range(steps):
            now = now ^ {name for name in LAYERS if draw.random() < 0.1}
            found.append(now)
        return found if draw.random() < 0.6 else [set()] * steps

    def some(part: float, often: float) -> set[int]:
        return {step for step in range(steps) if draw.random() < often} if draw.random() < part else set()

    sample, apart, joins = draw.choice(SAMPLES), draw.random() < 0.4, draw.randint(1, steps - 3)
    joins = joins if draw.random() < 0.3 else 0
    optimizers = [draw.choice([*OPTIMIZERS]) for _ in range(2)]
    skipped = [some(0.2, 0.2) for _ in range(2)]
    return Draw(
        steps=steps,
        saved=draw.randint(1, steps - 2),
        method=sample.method,
        options=sample.options,
        compression={"schedule": draw.choice(["single", "layerwise", "size:1KB"]), "verify_every": draw.choice([1, 3])}
        | maybe({"total_steps": [steps], "warmup_steps": [0, 2, 5], "min_elements": [20], "follow_lr": [True]}, 0.2),
        attach=maybe({"warmup_steps": [1, 2, 3, 5], "rebuild_every": [1, 2, 5, 9]}, 0.6)
        | maybe({"step": ["torch"], "match_norm": [False], "second_moment": ["own"]}, 0.15),
        optimizers=optimizers if apart and DDP else optimizers[:1],
        own={"lr": draw.choice([1e-3, 1e-2, 3e-2]), "weight_decay": draw.choice([0.0, 0.01])},
        apart=apart and DDP,
        joins=joins if DDP else 0,
        frozen=spans(),
        left_out=spans(),
        cleared=some(0.3, 0.05),
        surges=some(0.5, 0.08),
        skipped=skipped,
        schedule=draw.random() < 0.4,
        clip=draw.choice([0.0, 0.0, 1.0, 0.1]),
        order=draw.choice(["before register", "before optimizers", "after"]),
        clears=draw.random() < 0.8,
    )


class Training:
    """A model, its optimizers and its compression, from the beginning or from what was saved."""

    def __init__(self, draw: Draw, number: int, saved: bytes = b"") -> None:
        self.draw, self.number = draw, number
        state = torch.load(io.BytesIO(saved), weights_only=True) if saved else None
        torch.manual_seed(number)
        model = self.model = Net()
        late = [*model.late.parameters()]
        rest = [p for name, p in model.named_parameters() if not name.startswith(("late", "last"))]
        head = [*model.last.parameters(), *([] if draw.joins else late)]
        parts = [head, rest] if draw.apart else [head + rest]
        self.optimizers = [
            OPTIMIZERS[kind](part, **draw.own) for kind, part in zip(draw.optimizers, parts, strict=True)
        ]
        named = model.named_parameters()
        self.compression = hvc.Compression.create(draw.method, named, timeout=30.0, **draw.compression, **draw.options)
        if state:
            model.load_state_dict(state["model"])
            self._load(state, "before register")
        self.called = self._registered()
        if state:
            if 0 < draw.joins < draw.saved:
                self.optimizers[0].add_param_group({"params": late})
            self._load(state, "before optimizers")
            for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(kept)
            self._load(state, "after")
            for parameter, grad in zip(model.parameters(), state["grads"], strict=True):
                parameter.grad = grad

    def _registered(self) -> Any:
        if not DDP:
            called, optimizer = trained(self.model, self.optimizers[0], self.compression, self.draw.attach)
            self.optimizers = [optimizer]
            return called
        called = self.model
        if not arguments()["plain"]:
            called = nn.parallel.DistributedDataParallel(called, find_unused_parameters=True)
        return self.compression.register(called, self.optimizers, **self.draw.attach)

    def _load(self, state: dict[str, Any], when: str) -> None:
        if when == self.draw.order:
            self.compression.load_state_dict(state["compression"])

    def save(self) -> bytes:
        file = io.BytesIO()
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "compression": self.compression.state_dict(),
            "grads": [parameter.grad for parameter in self.model.parameters()],
        }
        torch.save(state, file)
        return file.getvalue()

    def step(self, step: int) -> list[Tensor]:
        """Do one step; return the weights."""
        draw, model = self.draw, self.model
        if step and step == draw.joins:
            self.optimizers[0].add_param_group({"params": [*model.late.parameters()]})
        for name in LAYERS:
            getattr(model, name).requires_grad_(name not in draw.frozen[step])
        for optimizer in self.optimizers:
            if step in draw.cleared:
                optimizer.state.clear()
            for group in optimizer.param_groups if draw.schedule else ():
                group["lr"] = draw.own["lr"] * (1 - step / (draw.steps + 3)) * (0.1 if step > 15 else 1.0)
        model.zero_grad(set_to_none=draw.clears)
        for parameter in model.late.parameters():
            parameter.grad = parameter.grad if draw.clears and not draw.joins else None
        numbers = torch.Generator().manual_seed(1000 * self.number + 2 * step + rank())
        words = WORDS + min(NEW, step // 2)
        x, wanted = torch.randint(words, (8,), generator=numbers), torch.randn(8, 4, generator=numbers)
        loss = F.mse_loss(self.called(x, {*LAYERS} - draw.left_out[step]), wanted)
        (loss * (30.0 if step in draw.surges else 1.0)).backward()
        if not DDP:
            self.optimizers[0].synchronize()
        if draw.clip:
            nn.utils.clip_grad_norm_(model.parameters(), draw.clip)
        for optimizer, skipped in zip(self.optimizers, draw.skipped, strict=False):
            if step not in skipped:
                self._use(optimizer)
        return [parameter.detach().clone() for parameter in model.parameters()]

    @staticmethod
    def _use(optimizer: Any) -> None:
        if DDP:
            optimizer.step()
            return
        with optimizer.skip_synchronize():
            optimizer.step()


def marks(state: dict[str, Any]) -> dict[str, Any]:
    """Return the checksums of a state, in which zeros do not wait."""
    waiting = {name: values for name, values in state.get("waiting", {}).items() if bool(values.any())}
    return resealed(state | {"waiting": waiting})["checksums"]


def play(number: int) -> dict[str, Any]:
    """Train without a break, and with one; return what differs."""
    draw = drawn(number)
    try:
        whole = Training(draw, number)
    except hvc.ConfigError as error:
        return {"refused": str(error)}
    weights, saved = [], b""
    for step in range(draw.steps):
        weights.append(digest(whole.step(step)))
        if step + 1 == draw.saved:
            saved = whole.save()
    end = marks(whole.compression.state_dict())
    whole.compression.close()
    resumed = Training(draw, number, saved)
    steps = range(draw.saved, draw.steps)
    found = [
        f"saved before {draw.saved}, another {step}" for step in steps if digest(resumed.step(step)) != weights[step]
    ]
    if not found and marks(resumed.compression.state_dict()) != end:
        found.append("another state at the end")
    resumed.compression.close()
    return {"weights": weights, "differs": found}


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of unused parameters, where a draw uses all of them
    start()
    torch.set_num_threads(1)
    for number in arguments()["numbers"]:
        check(str(number), lambda number=number: play(number))
