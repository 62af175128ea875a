r"""Learning quality over many ranks, in one process: real reducers and payloads, one model, no network.

    python examples/virtual_ranks.py --ranks 16 --steps 300 --lr 1e-3 --run none --run marsit \
        --run "marsit merge=sampled"

All ranks have the same weights, so that one model serves them all; each draws its own batch, of the task's batch for
four ranks divided among them. Everything else is as in a job: the reducer of every rank encodes, exchanges with the
others through memory, and decodes. Each run leaves a JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horovod_compress.engine.methods import parse
from horovod_compress.engine.optimizer import held, holding
from horovod_compress.engine.optimizer.held import HeldSecondMoment
from horovod_compress.engine.optimizer.matching import Matching
from horovod_compress.engine.optimizer.momentum import exact_first
from horovod_compress.engine.optimizer.step_hooks import before_step
from horovod_compress.engine.reducer import Next, Reducer
from horovod_compress.exchange.choose import Choose
from horovod_compress.exchange.transports.local import Hub
from horovod_compress.schedule.by_name import make_plan
from horovod_compress.schedule.plan import TensorSpec
from options import exchanged, fraction, positive, value_of
from tasks import TASKS, Task
from train import cosine, cross_entropy

#: Seconds for one exchange: all ranks share two or three cores.
TIMEOUT = 600.0
#: What a caller need not choose.
UNCHOSEN = {
    "beta2": 0.999,
    "second_moment": "auto",
    "exact_steps": None,
    "rebuild_every": None,
    "match_norm": True,
    "max_norm": 0.0,
    "clip": "norm",
    "batch": None,
}
OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def main() -> None:
    chosen = arguments()
    for words in chosen.run or ["none", "marsit", "marsit merge=sampled"]:
        print(json.dumps(Training(words.split(), chosen).run()), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=sorted(TASKS), default="text")
    parser.add_argument("--shards", choices=("even", "uneven"), default="even")
    parser.add_argument("--ranks", type=positive(int), default=16)
    parser.add_argument("--steps", type=positive(int), default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--optimizer", choices=(*OPTIMIZERS, "sgd"), default="adamw")
    parser.add_argument("--lr", type=positive(float), default=1e-3)
    parser.add_argument(
        "--beta2", type=fraction, default=0.999, help="the second beta of adam and adamw (default 0.999)"
    )
    parser.add_argument(
        "--second-moment", choices=("auto", "shared", "own"), default="auto", help="which second moment Adam uses"
    )
    parser.add_argument("--exact-steps", type=positive(int), help="exact rounds at the start, as attach(warmup_steps=)")
    parser.add_argument("--rebuild-every", type=positive(int), help="after them, one round in so many is exact")
    parser.add_argument(
        "--batch", type=positive(int), help="samples per rank and step, instead of a share of the task's batch"
    )
    parser.add_argument("--lr-schedule", choices=("constant", "cosine"), default="cosine")
    parser.add_argument("--max-norm", type=positive(float), default=0.0, help="clip at this; default: no clipping")
    parser.add_argument(
        "--clip",
        choices=("norm", "value", "unit", "local"),
        default="norm",
        help="by the norm of all gradients, by element, by row relative to its weights, or by the norm on each rank",
    )
    parser.add_argument("--no-match-norm", dest="match_norm", action="store_false")
    parser.add_argument("--exchange", choices=("auto", "ring", "fold", "torus"), default="auto")
    parser.add_argument("--run", type=exchanged, action="append", metavar="'METHOD [option=value ...]'")
    return parser.parse_args()


class Every:
    """All ranks' parts of one kind, where one is asked for: what holds the second moment speaks to them at once."""

    def __init__(self, parts: Sequence[Any], together: Sequence[str]) -> None:
        self._parts, self._together = parts, together

    def __getattr__(self, name: str) -> Any:
        if name not in self._together:
            return getattr(self._parts[0], name)
        return lambda *given, **named: [getattr(part, name)(*given, **named) for part in self._parts]


class EveryReducer(Every):
    """All ranks' reducers."""

    def __init__(self, reducers: Sequence[Reducer]) -> None:
        super().__init__(reducers, ())
        self.buckets = Every([reducer.buckets for reducer in reducers], ("choose", "divide_by", "set_linear"))
        kept: Any = Every([reducer.kept for reducer in reducers], ("convert", "scale", "scale_errors"))
        kept.withholding = Every([reducer.kept.withholding for reducer in reducers], ("withhold",))
        self.kept = kept
        self.start = Every([reducer.start for reducer in reducers], ("again",))
        self.norms = Every([reducer.norms for reducer in reducers], ("begin", "follow", "vote_against"))

    def idle(self) -> bool:
        return all(reducer.idle() for reducer in self._parts)


class Training:
    """One training of all ranks.

    A subclass may have data, a model or a loss that are no `Task` (`_task`, `_loss`, `_held_out`), another optimizer or
    learning rate, and what programs do between the exchange and the step, such as clipping (`_clip`).
    """

    def __init__(self, words: list[str], chosen: argparse.Namespace) -> None:
        self.words, self.chosen = words, argparse.Namespace(**UNCHOSEN | vars(chosen))
        torch.manual_seed(chosen.seed)
        self.task = self._task()
        self.model = self.task.model()
        self.named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = self._optimizer()
        self.reducers = self._reducers(words)
        every: Any = EveryReducer(self.reducers)
        self.every = every
        every.buckets.set_linear(self.named if type(self.optimizer) is torch.optim.SGD else ())
        self.held = self._hold()
        self.matching = Matching(self.optimizer, every, self.named, lambda: 1.0) if self.chosen.match_norm else None
        self.optimizer.register_step_pre_hook(before_step(self._prepare))
        self.norms: list[float] = []  # as clip_grad_norm_ returns them
        self.exact_first = 0
        if self.options.warmup_steps is None:
            self.exact_first = exact_first(self.optimizer, self.methods, self.named.items(), self.options.total_steps)

    def _task(self) -> Any:
        return TASKS[self.chosen.task](self.chosen.shards)

    def _reducers(self, words: list[str]) -> list[Reducer]:
        """Return the reducers of all ranks, which exchange through memory."""
        chosen = self.chosen
        own = {key: value_of(text) for key, _, text in (word.partition("=") for word in words[1:])}
        shared = {"schedule": "size:25MB", "exchange": chosen.exchange, "seed": chosen.seed, "verify_every": 0}
        self.methods, self.options = methods, options = parse(words[0], shared | {"timeout": TIMEOUT} | own)
        tensors = [TensorSpec(name, tuple(p.shape), "float32") for name, p in self.named.items()]
        if options.follow_lr:
            sys.exit("virtual_ranks.py: follow_lr=True needs an optimizer for each rank; use examples/train.py")
        plan = make_plan(options.schedule, tensors, options.min_elements, methods.number)
        self.every_full = methods.full_precision_every()
        return [
            Reducer(plan, methods.codecs, transport, Choose(options.exchange, transport.adds), options, None)
            for transport in Hub(chosen.ranks).transports()
        ]

    def _hold(self) -> HeldSecondMoment | None:
        chosen = self.chosen
        exact = {"warmup_steps": chosen.exact_steps, "rebuild_every": chosen.rebuild_every}
        named = self.named.items()
        return holding.hold(self.optimizer, self.every, named, self.every_full, chosen.second_moment, **exact)

    def _optimizer(self) -> torch.optim.Optimizer:
        chosen, parameters = self.chosen, self.model.parameters()
        if chosen.optimizer in OPTIMIZERS:
            return OPTIMIZERS[chosen.optimizer](parameters, lr=chosen.lr, betas=(0.9, chosen.beta2))
        return torch.optim.SGD(parameters, lr=chosen.lr, momentum=0.9)

    def run(self) -> dict[str, Any]:
        """Train, and return a record."""
        began = time.monotonic()
        try:
            for step in range(self.chosen.steps):
                self._step(step)
        finally:
            for reducer in self.reducers:
                reducer.close()
        loss, accuracy = self._held_out()
        asked = {name: value for name, value in vars(self.chosen).items() if name != "run"}
        found: dict[str, Any] = {
            "loss": loss,
            "accuracy": accuracy,
            "bytes_sent": self.reducers[0].metrics.bytes_sent,
            "bytes_dense": round(self.reducers[0].metrics.bytes_dense),
            "seconds": time.monotonic() - began,
        }
        if self.norms and self.chosen.max_norm:
            found["norms"] = [round(norm, 4) for norm in self.norms]
        return {"bench": "virtual_ranks", "name": " ".join(self.words)} | asked | found

    def _step(self, step: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(step)
        grads = [self._gradients(step, rank) for rank in range(self.chosen.ranks)]
        if self.held:
            held.begin([self.held], self.reducers[0].next_step())
        if self.exact_first:
            for reducer in self.reducers:
                reducer.buckets.choose(Next("short" if step < self.exact_first else "method"))
        if self.matching:
            self.matching.begin()
        self.every.norms.begin(self.reducers[0].next_step(), exact=bool(self.held and self.held.exact))
        order = self.reducers[0].plan.names()
        for reducer, mine in zip(self.reducers, grads, strict=True):
            for index, name in enumerate(order):
                reducer.offer(index, mine[name])
        for reducer in self.reducers:  # the results are the same on all of them
            results = {name: reducer.result(index, step) for index, name in enumerate(order)}
        for name, parameter in self.named.items():
            parameter.grad = results[name]
        self._clip()
        self.optimizer.step()

    def _prepare(self) -> None:
        """Before the optimizer's own step, do what a compression of a job does."""
        if self.matching:
            self.matching.take_out()
        if self.held:
            self.held.prepare()

    def _rate(self, step: int) -> float:
        chosen = self.chosen
        return chosen.lr * (cosine(step, chosen.steps) if chosen.lr_schedule == "cosine" else 1.0)

    def _gradients(self, step: int, rank: int) -> dict[str, Tensor]:
        self.model.zero_grad(set_to_none=True)
        self._loss(step, rank).backward()
        if self.chosen.max_norm and self.chosen.clip == "local":
            clip(list(self.named.values()), "norm", self.chosen.max_norm)
        return {name: _gradient(parameter) for name, parameter in self.named.items()}

    def _loss(self, step: int, rank: int) -> Tensor:
        world = self.chosen.ranks
        batch = self.chosen.batch or max(1, self.task.defaults.batch * 4 // world)
        return cross_entropy(self.model, *self.task.batch(self.chosen.seed, step, rank, world, batch))

    def _clip(self) -> None:
        """Do what the program does between the exchange and the step."""
        if self.chosen.max_norm and self.chosen.clip != "local":
            self.norms.append(clip(list(self.named.values()), self.chosen.clip, self.chosen.max_norm))

    def _held_out(self) -> tuple[float, float | None]:
        return held_out(self.task, self.model)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def clip(parameters: Sequence[nn.Parameter], how: str, most: float) -> float:
    """Clip gradients as programs do; return the norm that they had, where that is what is clipped."""
    if how == "value":
        nn.utils.clip_grad_value_(parameters, most)
    elif how == "unit":  # adaptive clipping: Brock et al. 2021, arXiv:2102.06171, section 4.1
        for parameter in parameters:
            grad = _gradient(parameter).view(len(parameter), -1)
            weights = parameter.detach().view(len(parameter), -1).norm(dim=1, keepdim=True).clamp_min(1e-3)
            grad.mul_((most * weights / grad.norm(dim=1, keepdim=True).clamp_min(1e-12)).clamp_max(1.0))
    else:
        return float(nn.utils.clip_grad_norm_(parameters, most))
    return 0.0


@torch.no_grad()
def held_out(task: Task, model: nn.Module) -> tuple[float, float]:
    """Return the mean loss and the accuracy on all that is held out."""
    loss, right, count = 0.0, 0, 0
    for inputs, targets in task.held_out(0, 1):
        scores, wanted = model(inputs).flatten(0, -2), targets.flatten()
        loss += float(F.cross_entropy(scores, wanted, reduction="sum"))
        right, count = right + int((scores.argmax(dim=1) == wanted).sum()), count + len(wanted)
    return loss / count, right / count


if __name__ == "__main__":
    main()
