"""The tasks of the examples: shapes, determinism, and disjoint shares of the data."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from tests.support.marks import needs_sklearn

pytestmark = needs_sklearn

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
OURS = {path.stem for path in EXAMPLES.glob("*.py")}


@pytest.fixture(scope="module")
def examples() -> Iterator[None]:
    """Make the examples importable as the scripts themselves see each other."""
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))
    for name in OURS & set(sys.modules):
        del sys.modules[name]


@pytest.fixture(scope="module")
def tasks(examples: None) -> ModuleType:
    import tasks

    return tasks


@pytest.fixture(scope="module", params=["digits", "mlp", "text", "code", "lstm", "words"])
def task(request: pytest.FixtureRequest, tasks: ModuleType):
    return tasks.TASKS[request.param]()


def test_model_gives_a_score_for_every_class(task) -> None:
    inputs, targets = task.batch(seed=0, step=0, rank=0, world=2, size=3)
    scores = task.model()(inputs)
    assert scores.shape[:-1] == targets.shape
    assert targets.max() < scores.shape[-1]


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("digits", 20_000, 90_000),
        ("mlp", 84_000, 86_000),
        ("text", 1_000_000, 2_000_000),
        ("code", 1_000_000, 2_000_000),
        ("lstm", 200_000, 300_000),
        ("words", 800_000, 810_000),
    ],
)
def test_model_has_the_promised_size(tasks, name: str, low: int, high: int) -> None:
    count = sum(parameter.numel() for parameter in tasks.TASKS[name]().model().parameters())
    assert low < count < high


def test_batch_is_a_function_of_its_arguments(task) -> None:
    first = task.batch(7, 41, 1, 4, 8)
    task.batch(8, 0, 0, 4, 8)  # something else in between must not matter
    again = task.batch(7, 41, 1, 4, 8)
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))


@pytest.mark.parametrize("other", [(8, 41, 1), (7, 42, 1), (7, 41, 2)])
def test_batch_changes_with_seed_step_and_rank(task, other: tuple[int, int, int]) -> None:
    assert not torch.equal(task.batch(7, 41, 1, 4, 8)[0], task.batch(*other, 4, 8)[0])


def test_held_out_shares_make_up_the_whole(task) -> None:
    whole = rows(task.held_out(0, 1))
    shares = [row for rank in range(3) for row in rows(task.held_out(rank, 3))]
    assert sorted(shares) == sorted(whole)


def rows(pairs) -> list[tuple[float, ...]]:
    """Return every held-out sample with its target as one tuple of numbers."""
    return [
        (*sample.flatten().tolist(), *target.flatten().tolist())
        for inputs, targets in pairs
        for sample, target in zip(inputs, targets, strict=True)
    ]


def test_an_epoch_visits_every_image_once(tasks) -> None:
    visited = [tasks.shuffled_index(3, position, 50) for position in range(50, 100)]
    assert sorted(visited) == list(range(50))


def test_ranks_of_one_step_share_no_image(tasks) -> None:
    shares = [set(range(rank * 16, rank * 16 + 16)) for rank in range(4)]
    chosen = [{tasks.shuffled_index(0, position, 1437) for position in share} for share in shares]
    assert len(set.union(*chosen)) == 64


def test_split_is_stratified_and_complete(tasks) -> None:
    from sklearn.datasets import load_digits

    labels = load_digits().target
    train, test = tasks.stratified_split(labels, test_share=0.2)
    assert sorted([*train, *test]) == list(range(len(labels)))
    for label in range(10):
        assert (labels[test] == label).sum() == round((labels == label).sum() * 0.2)


def test_text_targets_are_the_next_characters(tasks) -> None:
    inputs, targets = tasks.Text().batch(0, 0, 0, 1, 2)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_validation_text_is_never_trained_on(tasks) -> None:
    text = tasks.Text()
    assert len(text.train) + len(text.validation) == len(tasks.reference_text())


def test_a_gpu_that_is_not_there_is_missed_aloud(examples: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("horovod.torch")
    import build

    assert build.device_of("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--device cuda needs a GPU, and torch sees none here"):
        build.device_of("cuda")


READINGS = [("3", 3), ("0.5", 0.5), ("True", True), ("false", False), ("global", "global")]


@pytest.mark.parametrize(("text", "value"), READINGS)
def test_options_are_read_as_what_they_look_like(examples: None, text: str, value: object) -> None:
    from options import value_of

    assert value_of(text) == value
    assert type(value_of(text)) is type(value)


@pytest.mark.parametrize("given", [[], ["--exact-steps", "7"]])
def test_exact_steps_are_what_the_package_chooses_unless_a_number_is_given(
    examples: None, monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    pytest.importorskip("horovod.torch")
    import build
    import horovod_compress.torch as hvc
    from options import parse

    assert parse(["--method", "marsit", *given]).exact_steps == (7 if given else None)
    asked: dict[str, object] = {}
    monkeypatch.setattr(hvc, "DistributedUpdateOptimizer", lambda *parts, **options: asked.update(options))
    build.distributed(parse(["--method", "marsit", "--update-mode", *given]), torch.nn.Linear(2, 2), None)
    assert asked.get("warmup_steps", "unsaid") == (7 if given else "unsaid")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "0"], "above zero"),
        (["--lr", "nan"], "above zero"),
        (["--option", "no-equals-sign"], "KEY=VALUE"),
        (["--option", "timeout=3", "--timeout", "4"], "given twice"),
        (["--task", "speech"], "invalid choice"),
    ],
)
def test_wrong_arguments_say_what_is_wrong(examples: None, arguments: list[str], said: str) -> None:
    from options import UsageError, parse

    with pytest.raises(UsageError, match=said):
        parse(arguments)


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        ("virtual_ranks", ["--ranks", "0"], "--ranks: must be above zero"),
        ("virtual_ranks", ["--max-norm", "-1"], "--max-norm: must be above zero"),
        ("virtual_ranks", ["--exact-steps", "0"], "--exact-steps: must be above zero"),
        ("virtual_ranks", ["--run", ""], "--run: a method is missing"),
        ("virtual_ranks", ["--run", "diloco"], "--run: diloco takes local steps"),
        ("lengths", ["--method", "diloco"], "--method: diloco takes local steps"),
        ("lengths", ["--ranks", "1"], "--ranks should be at least 2"),
        ("recipe", ["--task", "gpt", "--lr", "0.001,x"], "--lr: invalid rates value: '0.001,x'"),
    ],
)
def test_scripts_refuse_what_they_would_not_train(
    examples: None, script: str, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(script).main()
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_minimal_differs_from_plain_horovod_by_two_lines() -> None:
    plain = (EXAMPLES / "minimal_plain.py").read_text().splitlines()
    ours = (EXAMPLES / "minimal.py").read_text().splitlines()
    added = [line.strip() for line in ours if line.strip() and line not in plain]
    assert len(added) == 2
    assert added[0] == "import horovod_compress.torch as hvc"
    assert added[1].startswith("compression=hvc.Compression.")
    assert [line for line in ours if line.strip() not in added and line] == [line for line in plain if line]
    assert len(ours) < 60


def test_demo_tells_ranks_that_differ_and_losses_that_diverge(examples: None) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("psutil")
    from demo import problem

    record = {"config": {"task": "text", "method": "marsit"}, "ranks_identical": True, "final": {"loss": 0.1}}
    assert problem(record, EXAMPLES) is None
    differing = problem(record | {"ranks_identical": False}, EXAMPLES)
    diverged = problem(record | {"final": {"loss": None}}, EXAMPLES)
    assert differing and "different parameters" in differing and "text-marsit.log" in differing
    assert diverged and "not a finite number" in diverged


def test_a_failed_job_gives_its_first_error_as_the_reason(examples: None) -> None:
    pytest.importorskip("psutil")
    from benchmarks.horovodrun import reason

    lines = ["step 1/9", "ExchangeError: rank 1 is gone", "Traceback (most recent call last):", "RuntimeError: Horovod"]
    assert reason(lines) == "ExchangeError: rank 1 is gone"
    assert reason(["killed", ""]) == "killed"


def test_records_hold_no_number_that_json_lacks(examples: None, tmp_path: Path) -> None:
    import json

    from records import write_json

    path = tmp_path / "record.json"
    write_json(str(path), {"loss": float("nan"), "norm": torch.tensor(2.5)})
    assert json.loads(path.read_text()) == {"loss": None, "norm": 2.5}
    assert list(tmp_path.iterdir()) == [path]
