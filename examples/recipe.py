r"""Train one of eight small recipes, with clipping, decay, warm-up, dropout and augmentation, on ranks in one process.

    python examples/recipe.py --task gpt --run none --run "qsgd bits=4"
    python examples/recipe.py --task gpt --run none --lr 0.001,0.002,0.004      # a sweep

As in virtual_ranks.py, every rank draws its own batch and has a reducer of its own, and one model serves all. Batches
of all ranks pass through it in turn, so running statistics of batch normalisation are those of all ranks. Gradients
are clipped between the exchange and the step. Each training leaves a JSON line on the standard output.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from options import exchanged, positive
from progress import Progress
from recipes.base import Problem, Recipe, Result
from recipes.images import DIFFUSION, RESNET, VIT
from recipes.language import GPTRECIPE, LORA, LSTM_TEXT, MOE
from recipes.tabular import TABULAR
from virtual_ranks import Training

RECIPES: dict[str, Recipe] = {
    "vit": VIT,
    "resnet": RESNET,
    "gpt": GPTRECIPE,
    "lstm": LSTM_TEXT,
    "tabular": TABULAR,
    "lora": LORA,
    "moe": MOE,
    "diffusion": DIFFUSION,
}
POINTS = 10  # of the curve of the training loss
QUICK_STEPS = 2


class RecipeTraining(Training):
    """One training of a recipe; nothing of it depends on the method."""

    def __init__(self, words: list[str], chosen: argparse.Namespace, shown: bool = False) -> None:
        self.recipe = RECIPES[chosen.task]
        super().__init__(words, chosen)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.average = {name: p.detach().clone() for name, p in self.named.items()} if self.recipe.average else {}
        self.progress = Progress(chosen.steps, shown)
        self.start = self._held_out()[0]

    def _task(self) -> Problem:
        return self.recipe.problem(self.chosen.quick)

    def _optimizer(self) -> torch.optim.Optimizer:
        return self.recipe.make_optimizer(self.model, self.chosen.lr)

    def _rate(self, step: int) -> float:
        return self.chosen.lr * self.recipe.share(step, self.chosen.steps)

    def _loss(self, step: int, rank: int) -> Tensor:
        torch.manual_seed(int(np.random.SeedSequence([self.chosen.seed, step, rank]).generate_state(1, np.uint64)[0]))
        self.model.train()
        loss: Tensor = self.task.loss(self.model, self.recipe.batch)
        self.losses.append(float(loss.detach()))
        return loss

    def _clip(self) -> None:
        if self.recipe.max_norm is not None:
            self.norms.append(float(nn.utils.clip_grad_norm_(self.named.values(), self.recipe.max_norm)))

    def _step(self, step: int) -> None:
        super()._step(step)
        share = min(self.recipe.average, (1 + step) / (10 + step))
        for name, mean in self.average.items():
            mean.lerp_(self.named[name].detach(), 1 - share)
        self.progress.step(self.losses[-1])

    @torch.no_grad()
    def _held_out(self) -> Result:
        """Measure the running mean of the weights where there is one, else the weights."""
        self.model.eval()
        weights = {name: self.named[name].detach().clone() for name in self.average}
        for name, mean in self.average.items():
            self.named[name].copy_(mean)
        found: Result = self.task.held_out(self.model)
        for name, weight in weights.items():
            self.named[name].copy_(weight)
        return found

    def run(self) -> dict[str, Any]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        try:
            record = super().run()
        finally:
            self.progress.close()
        after = resource.getrusage(resource.RUSAGE_SELF)
        most = self.recipe.max_norm
        return record | {
            "bench": "recipe",
            "metric": self.recipe.metric,
            "parameters": sum(parameter.numel() for parameter in self.named.values()),
            "batch": self.recipe.batch,
            "start_loss": self.start,
            "train_losses": [
                float(np.mean(part)) for part in np.array_split(self.losses, min(POINTS, len(self.losses)))
            ],
            "mean_norm": float(np.mean(self.norms)) if self.norms else None,
            "clipped": float(np.mean([norm > most for norm in self.norms])) if most is not None else None,
            "cpu_seconds": after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime,
        }


def main() -> None:
    chosen = arguments()
    if chosen.list:
        for task, recipe in RECIPES.items():
            print(json.dumps({"task": task} | settings(recipe, chosen)))
        return
    torch.set_num_threads(1)
    rates = [RECIPES[chosen.task].lr] if chosen.lr is None else chosen.lr
    for words in chosen.run or ["none"]:
        for rate in rates:
            print(json.dumps(_plain(trained(words, chosen, rate)), allow_nan=False), flush=True)


def settings(recipe: Recipe, chosen: argparse.Namespace) -> dict[str, Any]:
    """Return everything that decides how a recipe ends, but for method and seed."""
    given = {field.name: getattr(recipe, field.name) for field in fields(recipe) if field.name != "problem"}
    steps = chosen.steps or (QUICK_STEPS if chosen.quick else recipe.steps)
    return given | {"steps": steps, "ranks": chosen.ranks, "exchange": chosen.exchange, "quick": chosen.quick}


def trained(words: str, chosen: argparse.Namespace, rate: float) -> dict[str, Any]:
    """Train once, and return the record."""
    given = {name: settings(RECIPES[chosen.task], chosen)[name] for name in ("steps", "ranks", "exchange", "quick")}
    given |= {"task": chosen.task, "seed": chosen.seed, "lr": rate}
    training = RecipeTraining(words.split(), argparse.Namespace(**given), chosen.progress)
    return training.run()


def _plain(value: Any) -> Any:
    """Return a value with None for numbers that are not finite, which JSON lacks."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def rates(text: str) -> list[float]:
    """Return learning rates that have commas between them."""
    return [positive(float)(rate) for rate in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--task", choices=tuple(RECIPES))
    what.add_argument("--list", action="store_true", help="print the settings of all recipes as JSON lines")
    parser.add_argument(
        "--run", type=exchanged, action="append", metavar="'METHOD [option=value ...]'", help="default: none"
    )
    parser.add_argument("--ranks", type=positive(int), default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=positive(int), help="default: the recipe's own")
    parser.add_argument("--lr", type=rates, help="default: the recipe's own; several with commas between them")
    parser.add_argument("--exchange", choices=("auto", "ring", "fold", "torus"), default="auto")
    quick = "two steps with little data: shows that it runs, not how well it learns"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--progress", action="store_true", help="show how far a training is")
    return parser.parse_args()


if __name__ == "__main__":
    main()
