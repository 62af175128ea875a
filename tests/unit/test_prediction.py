"""Predicted steps: arrivals, time lines, the best of all groupings, worlds, and bytes that are really sent."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest

pytest.importorskip("torch")

from horovod_compress import ops
from horovod_compress.cli.plan import (
    figures,
    measured,
    models,
    parse,
    prediction,
    report,
)
from horovod_compress.cli.plan.measured import Trial
from horovod_compress.cli.plan.models import Table, TensorShape
from horovod_compress.cli.plan.network import Link
from horovod_compress.cli.plan.prediction import Case, Predictor, World, arrivals
from horovod_compress.cli.plan.processor import Processor, measure_codec
from horovod_compress.codecs import registry
from horovod_compress.errors import ConfigError
from horovod_compress.schedule.costs import Affine, Arrivals
from horovod_compress.schedule.plan import Plan
from horovod_compress.schedule.trial import BucketCost
from tests.support.local import Fleet, random_grads
from tests.support.marks import slow
from tests.support.samples import KINDS

FREE = Processor(*[Affine(0.0, 0.0)] * 5, copy=0.0)
CHEAP = replace(FREE, offer=Affine(0.0, 1e-9), encode=Affine(1e-5, 1e-10), decode=Affine(1e-5, 1e-9))
TABLE = Table(
    "small",
    tuple(
        TensorShape(f"layer{number}.{name}", shape, macs)
        for number, size in enumerate((100, 700, 300))
        for name, shape, macs in (("weight", (size, 300), size * 300), ("bias", (size,), 0))
    ),
)
WORLD = World(4, Link(12.5e6, 1e-4))


@pytest.fixture(autouse=True)
def processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every codec cost the same, so that nothing depends on this machine."""
    monkeypatch.setattr(prediction, "measure_codec", lambda method, codec: CHEAP)


def case(**changes: object) -> Case:
    return Case(TABLE, 0.1, replace(WORLD, **changes))  # type: ignore[arg-type]


# ---- arrivals ---------------------------------------------------------------------------------


def test_layers_take_what_their_multiply_adds_are_of_the_backward_pass() -> None:
    come = arrivals(TABLE, 0.33)
    assert come.counts == (300, 90_000, 700, 210_000, 100, 30_000)
    assert come.seconds[0] == come.seconds[1] == pytest.approx(0.11 + 0.22 * 300 / 1100)
    assert come.seconds[-1] == pytest.approx(0.33) and list(come.seconds) == sorted(come.seconds)


def test_gradients_are_taken_in_beside_the_backward_pass() -> None:
    late, usual = arrivals(TABLE, 0.33, lambda elements: 0.001), arrivals(TABLE, 0.33)
    assert [a - b for a, b in zip(late.seconds, usual.seconds, strict=True)] == pytest.approx([0.001, 0.002] * 3)


def test_gradients_wait_for_those_before_them_to_be_taken_in() -> None:
    come = arrivals(TABLE, 0.33, lambda elements: 0.5)
    first = 0.11 + 0.22 * 300 / 1100
    assert list(come.seconds) == pytest.approx([first + 0.5 * n for n in range(1, 7)])


# ---- steps ------------------------------------------------------------------------------------


def test_buckets_follow_each_other_on_the_time_line() -> None:
    line = Predictor(TABLE, registry.create("none"), WORLD, 0.1).usual("layerwise")
    assert len(line.slots) == 6 and line.step == line.slots[-1].decoded
    for before, slot in pairwise(line.slots):
        assert slot.begin == max(before.end, slot.ready) and slot.decoded > slot.end >= slot.begin
    assert line.sent == pytest.approx(2 * 3 / 4 * 4 * TABLE.count, rel=1e-3)  # tensors begin at whole words


def test_no_grouping_of_few_tensors_is_better_than_the_best() -> None:
    for ranks, rate in product((2, 5), (1e6, 1e8)):
        predictor = Predictor(TABLE, registry.create("none"), World(ranks, Link(rate, 1e-3)), 0.1)
        steps = []
        for cuts in product((False, True), repeat=5):
            groups = [1]
            for cut in cuts:
                groups = [*groups, 1] if cut else [*groups[:-1], groups[-1] + 1]
            steps.append(predictor.timeline("any", predictor._cut(groups)).step)
        assert predictor.best().step == pytest.approx(min(steps), rel=0.02)  # the search takes costs to be affine


@pytest.mark.parametrize("name", registry.methods())
def test_a_faster_network_is_never_slower(name: str) -> None:
    steps = [
        Predictor(TABLE, registry.create(name), replace(WORLD, link=Link(rate, 1e-4)), 0.1).best().step
        for rate in (1e6, 1e7, 1e8, 1e9)
    ]
    assert steps == sorted(steps, reverse=True) and steps[-1] > 0.1


def test_sharing_a_core_takes_longer_and_more_cores_than_one_do_not_help() -> None:
    one, half, many = (prediction.plain(case(cores=cores)).best.step for cores in (1.0, 0.5, 8.0))
    assert half > one == many


def test_rounds_of_two_kinds_have_a_mean() -> None:
    def step(every: int) -> float:
        return Predictor(TABLE, registry.create("marsit", full_precision_every=every), WORLD, 0.1).usual("single").step

    full = Predictor(TABLE, registry.create("none"), WORLD, 0.1).usual("single").step
    assert step(10) == pytest.approx(0.9 * step(0) + 0.1 * full)


@pytest.mark.parametrize("name", ["none", "marsit", "topk", "powersgd", *slow("signsgd", "global_qsgd")])
def test_predicted_bytes_are_sent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The positive control of everything above: a real exchange between threads."""
    monkeypatch.setattr(prediction, "measure_codec", measure_codec)
    options = {"full_precision_every": 0} if name == "marsit" else {}
    predictor = Predictor(TABLE, registry.create(name, **options), WORLD, 0.1)
    line = predictor.usual("size:500KB")
    with Fleet(4, predictor.tensors, name, schedule="size:500KB", verify_every=0, **options) as fleet:
        for seed in range(2):
            before = sum(reducer.metrics.bytes_sent for reducer in fleet.reducers)
            fleet.step(random_grads(4, fleet.tensors, seed=seed))
        sent = (sum(reducer.metrics.bytes_sent for reducer in fleet.reducers) - before) / 4
    headers = 2000 * len(line.slots)
    assert line.sent <= 1.02 * sent and sent <= 1.02 * line.sent + headers


# ---- worlds -----------------------------------------------------------------------------------


def test_methods_that_cannot_serve_a_world_are_shown_with_the_reason() -> None:
    codecs = [registry.create(name) for name in ("none", "topk", "global_qsgd")]
    found = prediction.cells(case(), codecs, [4, 512], None)
    refused = [cell for cell in found if cell.timeline is None]
    assert [(cell.method, cell.ranks) for cell in refused] == [("global_qsgd", 512)]
    said = report.worlds_text(case(), found)
    assert "cannot: global_qsgd on 512 ranks: " in said and "choose bits=16" in said
    document = report.cells_document(case(), found)
    assert [one["method"] for one in document["worlds"] if "problem" in one] == ["global_qsgd"]


def test_hosts_with_one_link_each_make_an_exchange_between_them_shorter() -> None:
    codecs = [registry.create(name) for name in ("none", "topk")]
    found = prediction.cells(case(), codecs, [64], (8, Link(12.5e9, 1e-5)))
    assert [cell.method for cell in found if cell.hosted] == ["none, hierarchical", "topk, hierarchical"]
    assert 'Those of "hierarchical" are for hosts with one link each' in report.worlds_text(case(), found)
    slow = replace(case(), compute=1e-6, world=World(4, Link(12.5e6, 1e-4)))  # its wire is all that counts
    flat, hosted = prediction.cells(slow, [registry.create("none")], [4], (2, Link(12.5e9, 1e-5)))
    assert flat.timeline and hosted.timeline
    # What a rank sends falls to a third, and ranks of a host share its link.
    assert hosted.timeline.step / flat.timeline.step == pytest.approx(2 / 3, rel=0.1)


@pytest.mark.slow
def test_all_methods_for_four_worlds_in_seconds() -> None:
    import time

    began = time.process_time()
    resnet = Case(models.load("resnet50"), 0.3, World(8, Link(125e6, 5e-5)))
    codecs = [registry.create(name) for name in registry.methods()]
    found = prediction.cells(resnet, codecs, [8, 64, 512, 4096], None)
    assert len(found) == 4 * len(registry.methods()) and time.process_time() - began < 20


# ---- codecs of this machine -------------------------------------------------------------------


@pytest.mark.parametrize("name", [*KINDS, *slow(*sorted(set(registry.methods()) - set(KINDS)))])
def test_every_codec_can_be_measured(name: str) -> None:
    codec = registry.create(name)
    for kind, _ in prediction.rounds(codec):
        found = measure_codec(codec, kind)
        assert found.decoding(1e6, 4) > 0 and 0 < found.filled <= 1 and found.copy > 0
        assert found.scaled(2).decoding(1e6, 4) == pytest.approx(2 * found.decoding(1e6, 4))
        assert measure_codec(codec, kind) is found


# ---- beside measurements ----------------------------------------------------------------------


def trials() -> list[Trial]:
    predictor = Predictor(TABLE, registry.create("none"), WORLD, 0.1)
    found = []
    for schedule in ("layerfusion", "layerwise", "single", "size:25MB"):
        line = predictor.best() if schedule == "layerfusion" else predictor.usual(schedule)
        sizes = [slot.bucket.count for slot in line.slots]
        costs = tuple(BucketCost(size, 0.001 + 1e-7 * size, 1e-9 * size) for size in sizes)
        found.append(Trial(schedule, line.plan, 0.2, (0.19, 0.21), 1e6, costs))
    return found


def test_a_step_is_not_predicted_from_its_own_measurement() -> None:
    every = trials()
    spoilt = [replace(every[0], buckets=tuple(replace(b, exchange=99.0) for b in every[0].buckets)), *every[1:]]
    come = Arrivals(tuple(t.count for t in TABLE.backward()), (0.0,) * 6)
    step, costs = measured.refined(come, spoilt, 0)
    assert costs.exchange.each == pytest.approx(1e-7) and costs.exchange.fixed == pytest.approx(0.001)
    assert step < 1


def test_errors_are_part_of_the_comparison() -> None:
    found = prediction.predicted(case(), registry.create("none"))
    document = measured.document(case(), found, trials())
    for row in document["schedules"]:
        assert row["model_error"] == pytest.approx(row["model_seconds"] / 0.2 - 1)
        assert row["refined_error"] == pytest.approx(row["refined_seconds"] / 0.2 - 1)
    assert "refined ms" in measured.text(case(), document) and Plan.from_document(document["plan"])


# ---- words and files --------------------------------------------------------------------------


def test_rates_and_times() -> None:
    assert parse.rate("1gbit") == 125e6 and parse.rate("200 Mbit/s") == 25e6
    assert parse.seconds("50us") == pytest.approx(5e-5) and parse.seconds("0.1ms") == pytest.approx(1e-4)
    assert parse.ranks("64, 8,8") == [8, 64]


@pytest.mark.parametrize("text", ["", "fast", "0gbit", "1GB", "-1gbit", "1"])
def test_other_rates_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="a rate is a number and"):
        parse.rate(text)


def test_a_plan_is_read_from_the_file_it_was_saved_to(tmp_path: Path) -> None:
    plan = prediction.plain(case()).best.plan
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    (tmp_path / "other.json").write_text('[{"a": 1}]')
    for name, why in (("other.json", "is not a plan"), ("missing.json", "cannot be read: No such file")):
        with pytest.raises(ConfigError, match=why):
            Plan.load(tmp_path / name)


def test_pictures_are_made(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = prediction.predicted(case(), registry.create("topk"))
    made = figures.draw_timelines(case(), found, str(tmp_path))
    assert [path.name for path in made] == ["plan-small-topk-4ranks.png", "plan-small-topk-4ranks.svg"]
    assert figures.draw_timelines(case(), found, str(tmp_path / "one.svg")) == [tmp_path / "one.svg"]
    cells = prediction.cells(case(), [registry.create(name) for name in ("none", "topk")], [4, 8], None)
    made += figures.draw_worlds(case(), cells, str(tmp_path / "new"))
    assert all(path.stat().st_size > 10_000 for path in made)
    assert not list(tmp_path.rglob("*.tmp*"))


def test_what_is_measured_is_the_way_of_more_than_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of marsit pass on less than three values."""
    unpacked: list[int] = []
    unpack = ops.ternary_unpack
    monkeypatch.setattr(ops, "ternary_unpack", lambda *given: unpacked.append(1) or unpack(*given))
    measure_codec.cache_clear()
    codec = registry.create("marsit", full_precision_every=0)
    measure_codec(codec, codec)
    assert unpacked


@pytest.mark.parametrize(
    ("factor", "said"),
    [(2.0, "pays here"), (1.03, "gains less than 5% here: without"), (0.9, "does not pay here: without")],
)
def test_a_small_gain_is_no_loss(factor: float, said: str) -> None:
    """What stands beside it shows a shorter step."""
    found = prediction.predicted(case(), registry.create("topk"))
    bare = prediction.plain(case())
    bare = replace(bare, timelines=(replace(bare.best, step=found.best.step * factor),))
    assert f"topk {said}" in report.verdict(found, bare)
