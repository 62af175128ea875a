"""Trainings with exact first steps: gone back into them, and resumed inside them; with fixed and searched buckets."""

from __future__ import annotations

import copy
from typing import Any

import horovod.torch as hvd
import torch

from horovod_compress.engine.optimizer.momentum import EXACT_FIRST
from tests.support import rank
from tests.support.training import digest, gathered, net, optimizer_for, train

hvd.init()
torch.set_num_threads(1)
given = rank.arguments()
INSIDE, END = given["inside"], given["end"]
#: As users have it: the number of exact steps is not given.
OPTIONS: dict[str, Any] = {"warmup_steps": None, "verify_every": 1}


class Run:
    """A model with all that trains it."""

    def __init__(self, attach: bool, **options: Any) -> None:
        self.model = net()
        self.optimizer, made = optimizer_for(self.model, "marsit", attach=attach, **{**OPTIONS, **options})
        assert made
        self.compression = made

    def to(self, step: int) -> list[bool]:
        """Train up to a step; return of each step on the way whether it was exact."""
        exact, reducer = [], self.compression._session.reducer
        for number in range(reducer.next_step(), step):
            train(self.model, self.optimizer, [number])
            exact.append(all(state.round(number).exact for state in reducer.buckets))
        return exact

    def state(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "compression": self.compression}
        return copy.deepcopy({name: part.state_dict() for name, part in parts.items()})

    def load(self, state: dict[str, Any]) -> None:
        state = copy.deepcopy(state)  # optimizers go on with the tensors that they are given
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.compression.load_state_dict(state["compression"])

    def weights(self) -> str:
        return digest(self.model.parameters())


def fixed(attach: bool) -> dict[str, Any]:
    """Go back to a step inside them after the last, and resume there with new objects."""
    run = Run(attach)
    found: dict[str, Any] = {"exact": run.to(INSIDE)}
    saved = run.state()
    found["exact"] += run.to(END)
    found["whole"] = run.weights()
    run.load(saved)  # back into the exact steps
    found["again exact"], found["again"] = run.to(END), run.weights()
    run.compression.close()
    other = Run(attach)
    other.load(saved)
    found["resumed exact"], found["resumed"] = other.to(END), other.weights()
    other.compression.close()
    compressed = Run(attach, warmup_steps=0)
    compressed.to(END)
    found["compressed"] = compressed.weights()
    compressed.compression.close()
    return found


def searched(attach: bool) -> dict[str, Any]:
    """Resume inside them where buckets are searched for: that begins with the first step that is compressed."""
    options = {"schedule": "mergecomp:2", "min_elements": 1}
    run = Run(attach, **options)
    run.to(INSIDE)
    saved = run.state()
    run.to(END)
    run.load(saved)
    found: dict[str, Any] = {"first": EXACT_FIRST}
    for name, one in (("again", run), ("resumed", Run(attach, **options))):
        if one is not run:
            one.load(saved)
        reducer, tuner = one.compression._session.reducer, one.compression._session.steps.tuner
        plan = reducer.plan.fingerprint()
        exact = one.to(EXACT_FIRST)
        waits = tuner._tuning is None and reducer.context.watch is None and reducer.plan.fingerprint() == plan
        rest = one.to(END)
        found[name] = {"exact": exact + rest, "waits": waits, "done": tuner.done, "ranks": gathered(one.weights())}
        one.compression.close()
    return found


rank.report({f"{name} {attach}": call(attach) for name, call in (("fixed", fixed), ("searched", searched))
             for attach in (False, True)})  # fmt: skip
