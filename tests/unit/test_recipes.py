"""Each recipe of the examples trains, clips what the exchange hands back, and says the same for the same words."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from tests.support.marks import needs_sklearn

pytestmark = needs_sklearn

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
OURS = {path.stem for path in EXAMPLES.glob("*.py")} | {"recipes"}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Import the script as it sees the other examples; models that were trained before go to a temporary folder."""
    sys.path.insert(0, str(EXAMPLES))
    import recipe
    from recipes import language

    language.BASES = tmp_path_factory.mktemp("bases")
    yield recipe
    sys.path.remove(str(EXAMPLES))
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]


def training(recipe: Any, task: str, words: str, **more: Any) -> Any:
    settings = {"task": task, "lr": recipe.RECIPES[task].lr, "steps": 2, "seed": 1, "ranks": 2, "exchange": "auto"}
    return recipe.RecipeTraining(words.split(), argparse.Namespace(**settings | {"quick": True} | more))


TASKS = ("vit", "resnet", "gpt", "lstm", "tabular", "lora", "moe", "diffusion")


def test_these_are_all_recipes(recipe) -> None:
    assert tuple(recipe.RECIPES) == TASKS


def test_the_page_lists_the_recipes_as_they_are(recipe) -> None:
    page = (EXAMPLES.parent / "docs" / "recipes.md").read_text()
    rows = [
        f"| `{task}` | {one.said} | {one.steps} | {one.batch} | {one.lr:g} |" for task, one in recipe.RECIPES.items()
    ]
    assert [line for line in page.splitlines() if line.startswith(tuple(f"| `{task}`" for task in TASKS))] == rows


@pytest.mark.each_value
@pytest.mark.parametrize("words", ["none", "marsit warmup_steps=0 full_precision_every=0"])
@pytest.mark.parametrize("task", TASKS)
def test_a_recipe_trains(recipe, task: str, words: str) -> None:
    record = training(recipe, task, words).run()
    assert math.isfinite(record["loss"]) and math.isfinite(record["start_loss"])
    assert record["loss"] != record["start_loss"]
    assert all(map(math.isfinite, record["train_losses"]))
    assert (record["accuracy"] is None) == (task == "diffusion")
    assert record["parameters"] > 10_000
    assert record["metric"] in {name for name in ("loss", "accuracy") if record[name] is not None}


@pytest.mark.slow
def test_equal_words_give_equal_results(recipe) -> None:
    first, second = (training(recipe, "vit", "marsit").run() for _ in range(2))
    assert first["loss"] == second["loss"] and first["train_losses"] == second["train_losses"]
    assert training(recipe, "vit", "marsit", seed=2).run()["loss"] != first["loss"]


def test_what_the_exchange_hands_back_is_clipped(recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact mean of the ranks' gradients is what the norm is taken of, once in a step, and before it."""
    seen: list[float] = []
    clip = nn.utils.clip_grad_norm_

    def clipped(parameters: Any, most: float) -> torch.Tensor:
        parameters = list(parameters)
        norm = clip(parameters, most)
        seen.append(float(torch.stack([p.grad.square().sum() for p in parameters]).sum().sqrt()))
        return norm

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", clipped)
    one = training(recipe, "vit", "none")
    means: list[float] = []
    gradients = one._gradients
    parts: list[dict[str, torch.Tensor]] = []

    def kept(step: int, rank: int) -> dict[str, torch.Tensor]:
        found = gradients(step, rank)
        parts.append({name: gradient.clone() for name, gradient in found.items()})
        return found

    one._gradients = kept
    record = one.run()
    for step in range(2):
        both = zip(parts[2 * step].values(), parts[2 * step + 1].values(), strict=True)
        means.append(float(torch.stack([((a + b) / 2).square().sum() for a, b in both]).sum().sqrt()))
    assert one.norms == pytest.approx(means, rel=1e-4)
    assert seen == pytest.approx([min(mean, 1.0) for mean in means], rel=1e-3)
    assert record["clipped"] == sum(mean > 1.0 for mean in means) / 2 > 0


def test_only_matrices_decay(recipe) -> None:
    one = training(recipe, "gpt", "none")
    decays = {id(p): group["weight_decay"] for group in one.optimizer.param_groups for p in group["params"]}
    assert len(decays) == len(one.named)
    for name, parameter in one.named.items():
        matrix = name.endswith("weight") and "norm" not in name and not name.startswith(("tokens", "positions"))
        assert (decays[id(parameter)] > 0) == (matrix and parameter.dim() > 1), name
    for reducer in one.reducers:
        reducer.close()


def test_adapters_alone_are_trained_and_begin_as_nothing(recipe) -> None:
    one = training(recipe, "lora", "none")
    before = {name: p.clone() for name, p in one.model.named_parameters()}
    assert all(name.endswith((".up", ".down")) for name in one.named) and len(one.named) == 2 * 4 * 3
    tokens = one.task.train[:32][None]
    plain = recipe.RECIPES["gpt"].problem(True)
    base = type(one.model)(one.task.vocabulary, dropout=0.0)
    base.load_state_dict(one.task._base())
    assert torch.equal(one.model.eval()(tokens), base.eval()(tokens)) and plain.vocabulary == one.task.vocabulary
    one.run()
    moved = {name for name, p in one.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved and moved <= set(one.named)


@pytest.mark.slow
def test_the_running_mean_is_measured_and_the_weights_go_on(recipe) -> None:
    one = training(recipe, "diffusion", "none", steps=4)
    one.run()
    weights = {name: p.detach().clone() for name, p in one.named.items()}
    assert any(not torch.equal(weights[name], one.average[name]) for name in weights)
    one._held_out()
    assert all(torch.equal(weights[name], p) for name, p in one.named.items())


@pytest.mark.parametrize(("step", "share"), [(0, 0.1), (9, 1.0), (10, 1.0), (55, 0.5), (100, 0.0)])
def test_the_rate_warms_up_and_falls(recipe, step: int, share: float) -> None:
    assert recipe.RECIPES["gpt"].share(step, 100) == pytest.approx(share)


def test_a_constant_rate_stays(recipe) -> None:
    assert {recipe.RECIPES["diffusion"].share(step, 100) for step in range(10, 100)} == {1.0}


# ---- byte pairs -------------------------------------------------------------------------------


def test_the_most_frequent_pairs_are_merged_first(recipe) -> None:
    from recipes.bpe import encoded

    codes, size = encoded("abab ab abc", "abab ab abc", 2)  # letters: blank, a, b, c; then unknown, ab, " ab"
    assert size == 7 and codes.tolist() == [5, 5, 6, 6, 3]


def test_equal_letters_are_merged_by_twos(recipe) -> None:
    from recipes.bpe import encoded

    assert encoded("aaaaa aa", "aaaaa aa", 1)[0].tolist() == [3, 3, 1, 0, 3]


def test_merges_come_from_what_is_learnt_from_alone(recipe) -> None:
    from recipes.bpe import encoded

    codes, size = encoded("zzzz ab", "ab ab ab", 1)
    assert size == 5 and codes.tolist() == [3, 3, 3, 3, 0, 4]  # z is unknown, however often it comes
