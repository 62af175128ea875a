"""The training benchmarks: tables of shapes, the stand-in model, and what is concluded from measurements."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("horovod.torch")

from benchmarks import accuracy, curves, overlap, shapes
from benchmarks.jobs import step as job
from benchmarks.shapes import generate
from horovod_compress.cli.plan import synthetic

PUBLISHED = {
    "resnet50": 25_557_032,
    "vgg16": 138_357_544,
    "bert_base": 109_482_240,
    "gpt2": 124_439_808,
    "mlp": 10_512_394,
}
TENSORS = {"resnet50": 161, "vgg16": 32, "bert_base": 199, "gpt2": 148, "mlp": 8}

# ---- tables -----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", PUBLISHED)
def test_tables_have_the_published_number_of_parameters(model: str) -> None:
    table = shapes.load(model)
    assert table.count == PUBLISHED[model] == table.nbytes // 4
    assert len(table.tensors) == TENSORS[model] == len({tensor.name for tensor in table.tensors})
    assert f"# {table.count:,} parameters" in (shapes.FOLDER / f"{model}.csv").read_text()


@pytest.mark.parametrize("model", PUBLISHED)
def test_tables_are_the_output_of_the_script(model: str) -> None:
    assert (shapes.FOLDER / f"{model}.csv").read_text() == generate.text(model)


# ---- the stand-in -----------------------------------------------------------------------------

TINY = """\
name,shape,macs
embedding.weight,50x8,0
body.0.weight,30x20,600
body.0.bias,30,0
body.1.weight,7x5x3x3,1800
norm.weight,9,0
norm.bias,9,0
head.weight,1100x1000,600
head.bias,11,0
"""


@pytest.fixture
def table(tmp_path: Path) -> shapes.Table:
    path = tmp_path / "tiny.csv"
    path.write_text(TINY)
    return shapes.load(str(path))


class Stand:
    """A stand-in model, and a step of it."""

    def __init__(self, table: shapes.Table, seconds: float) -> None:
        self.pace = synthetic.ComputeClock(seconds)
        self.tile = torch.randn(1000)
        self.gradients = synthetic.Gradients(table, self.tile)
        self.model = synthetic.SyntheticModel(table, self.gradients, self.pace, synthetic.untouched_memory(table.count))

    def step(self) -> float:
        for parameter in self.model.parameters():
            parameter.grad = None
        began = time.perf_counter()
        self.model(torch.zeros(1)).backward()
        return time.perf_counter() - began


def test_parameters_have_the_names_and_shapes_of_the_table(table: shapes.Table) -> None:
    found = [(name, tuple(p.shape)) for name, p in Stand(table, 0.0).model.named_parameters()]
    assert found == [(tensor.name, tensor.shape) for tensor in table.tensors]


def test_gradients_arrive_in_backward_order_without_a_copy(table: shapes.Table) -> None:
    stand, order = Stand(table, 0.0), []
    for name, parameter in stand.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: order.append((name, p.grad.data_ptr())))
    stand.gradients.refill()
    stand.step()
    assert order == [(t.name, stand.gradients.views[t.name].data_ptr()) for t in table.backward()]


def test_gradients_are_refilled_with_the_repeated_tile(table: shapes.Table) -> None:
    stand = Stand(table, 0.0)
    stand.gradients.refill()
    stand.step()
    for _, parameter in stand.model.named_parameters():
        parameter.grad.fill_(7.0)  # as a reduction does, in place
    stand.gradients.refill()
    stand.step()
    for name, parameter in stand.model.named_parameters():
        start = stand.gradients.views[name].storage_offset()
        places = torch.arange(start, start + parameter.numel()) % len(stand.tile)
        assert torch.equal(parameter.grad.reshape(-1), stand.tile[places])


def test_compute_takes_its_time_and_layers_their_shares(table: shapes.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    clock = [0.0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds + 0.002  # every sleep is too long, as on a real machine

    monkeypatch.setattr(synthetic.time, "sleep", sleep)
    monkeypatch.setattr(synthetic.time, "perf_counter", lambda: clock[0])
    stand = Stand(table, 0.9)
    stand.model(torch.zeros(1)).backward()
    # Forward: a third in the shares 0.2, 0.6, 0.2; backward: the rest, from the end.
    assert slept == pytest.approx([0.06, 0.178, 0.058, 0.118, 0.358, 0.118])
    assert clock[0] == pytest.approx(0.9, abs=0.0021)  # what was slept too long is not added up


def test_calibration_makes_up_for_what_the_walk_costs() -> None:
    """Exact, with a step that has a fixed cost; a real clock is used in the parallel test."""
    pace = synthetic.ComputeClock(0.3)
    assert synthetic.calibrate(pace, lambda: pace.budget + 0.012) == pytest.approx(0.3)
    assert pace.budget == pytest.approx(0.288)


# ---- the job ----------------------------------------------------------------------------------


def test_results_are_compared_with_the_mean_wherever_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job.hvd, "size", lambda: 3)
    judge = job.Judge(1000)
    tiles = [job.fill_block(torch.empty(1000), rank, 0) for rank in range(3)]
    mean = (sum(tile.double() for tile in tiles) / 3).float().repeat(5)
    for start, count in ((0, 1000), (700, 2400), (999, 1), (1500, 600)):
        values = mean[start : start + count].clone()
        assert judge.wrong(values, start, "float32") == 0
        assert judge.wrong(values.half().float(), start, "float16") == 0
        assert judge.wrong(values + 1e-3, start, "float32") == count
        values[0] = float("nan")
        assert [judge.wrong(values, start, check) for check in ("float32", "identical", "none")] == [1, 1, 0]


# ---- what follows from steps ------------------------------------------------------------------

PLACE = {"launcher": "lab", "hosts": 4, "ranks": 4, "rate": "1gbit", "rate_bits": 1e9}


def measured(name: str, seconds: float, alone: float, sent: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "bench": "step",
        "name": name,
        "model": "tiny",
        "parameters": 10,
        "tensors": 2,
        "ranks": 4,
        "group": 0,
        "repeats": 3,
        "compute_seconds": 0.3,
        "check": "none" if name == "headroom" else "identical",
        "wrong": 0,
        "bytes_sent": sent,
        "bytes_computed": False,
        "buckets": None,
        "median_seconds": seconds,
        "q1_seconds": seconds,
        "q3_seconds": seconds,
        "median_alone_seconds": alone,
        "median_exchange_seconds": None,
    } | more


RECORDS = [
    measured("headroom", 0.300, 0.010),
    measured("none", 0.600, 0.410, sent=50_000_000),
    measured("none schedule=single", 0.700, 0.410, sent=50_000_000),
    measured("marsit full_precision_every=0", 0.320, 0.050, sent=1_000_000),
    measured("marsit schedule=single full_precision_every=0", 0.330, 0.050, sent=1_000_000),
    measured("marsit full_precision_every=50", 0.330, 0.050, sent=2_000_000),
]


def test_steps_are_compared_with_the_one_that_exchanges_nothing() -> None:
    nothing, none, *_ = overlap.enriched(RECORDS, PLACE)
    assert nothing["scaling"] == 1 and nothing["hidden_share"] is None
    assert none["scaling"] == pytest.approx(0.5)
    assert none["exposed_seconds"] == pytest.approx(0.3)
    assert none["exchange_alone_seconds"] == pytest.approx(0.4)
    assert none["hidden_share"] == pytest.approx(0.25)
    assert none["wire_seconds"] == pytest.approx(0.4)


def test_full_precision_rounds_are_spread_over_the_others() -> None:
    found = {record["name"]: record for record in overlap.amortised(overlap.enriched(RECORDS, PLACE))}
    assert list(found) == ["marsit K=50", "marsit K=100", "marsit schedule=single K=50", "marsit schedule=single K=100"]
    assert found["marsit K=50"]["computed_seconds"] == pytest.approx((0.6 + 49 * 0.32) / 50)
    assert found["marsit K=50"]["bytes_sent"] == (50_000_000 + 49 * 1_000_000) // 50
    assert found["marsit schedule=single K=100"]["computed_from"][1] == "none schedule=single"
    assert "median_seconds" not in found["marsit K=50"]  # it was not measured


# ---- time to accuracy -------------------------------------------------------------------------


def curve(*values: float | None) -> list[dict[str, float | None]]:
    return [{"step": 10.0 * at, "seconds": 2.0 * at, "value": value} for at, value in enumerate(values)]


def test_one_lucky_evaluation_does_not_reach_the_target() -> None:
    found = curve(0.1, 0.9, 0.1, 0.6, 0.8, 0.8, 0.8)
    assert curves.seconds_to(found, 0.7, "accuracy") == 10.0  # the mean of 0.6, 0.8 and 0.8
    assert curves.seconds_to(found, 0.85, "accuracy") is None
    assert curves.seconds_to(curve(3.0, 2.0, 1.0, 1.0), 1.4, "loss") == 6.0
    assert curves.seconds_to(curve(None, None, 1.0, 1.0), 1.0, "loss") is None
    assert curves.best(curve(0.0, 0.6, 0.9, 0.9, 0.3), "accuracy") == pytest.approx(0.8)


def run(name: str, seed: int, found: list[dict[str, float | None]]) -> dict[str, Any]:
    return {
        "name": name,
        "seed": seed,
        "task": "text",
        "metric": "loss",
        "optimizer": "adam",
        "steps": 30,
        "training_seconds": 6.0,
        "bytes_sent": 1_000_000,
        "bytes_computed": True,
        "place": PLACE,
        "curve": found,
    }


def test_methods_are_compared_by_the_median_of_their_seeds() -> None:
    slow, fast = curve(3.0, 3.0, 3.0, 2.0, 2.0, 2.0), curve(3.0, 2.0, 2.0, 2.0)
    runs = [run("horovod", 1, slow), run("horovod", 2, slow), run("marsit", 1, fast), run("marsit", 2, fast)]
    first, second = accuracy.summary(accuracy.judged(runs, 2.0))
    assert first["median_seconds_to_target"] == 10.0 and first["times_faster"] == 1
    assert second["median_seconds_to_target"] == 6.0 and second["times_faster"] == pytest.approx(10 / 6)
    assert second["median_steps_to_target"] == 30
    text = accuracy.text(accuracy.judged(runs, 2.0))
    assert "given on the command line" in text and "baseline: horovod" in text


@pytest.mark.slow
def test_plots_are_drawn_from_records(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import figures_training

    steps = figures_training.draw_steps(overlap.enriched(RECORDS, PLACE), {}, tmp_path)
    runs = [run("horovod", 1, curve(3.0, 2.5, 2.0, 2.0)), run("marsit", 1, curve(3.0, 2.9, 2.0, 2.0))]
    runs = [one | {"ranks": 4, "parameters": 10} for one in runs]
    training_time = figures_training.draw_accuracy(accuracy.judged(runs, None), {}, tmp_path)
    assert all(path.stat().st_size > 5000 for path in [*steps, *training_time])
    powersgd = [*RECORDS, measured("ddp powersgd r1", 0.4, 0.1)]
    assert "one bucket" in figures_training.step_notes(overlap.enriched(powersgd, PLACE), {})
    assert "one bucket" not in figures_training.step_notes(overlap.enriched(RECORDS, PLACE), {})
