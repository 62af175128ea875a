"""Models that ``fully_shard`` divides, in several replicas, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest

from horovod_compress.codecs.registry import methods
from tests.support.jobs import run_ranks

SECONDS = 200.0
WAYS = (
    "for some time", "kept whole after the forward pass", "bfloat16 weights", "accumulation by no_sync",
    "accumulation of whole gradients", "frozen", "checkpoints", "offload", "a factor",
    "a scaler, and an infinity in one shard",
)  # fmt: skip
#: All that a model goes through as it is, and more.
FEW = ("accumulation, a scaler, and an infinity in one shard", "a factor")
CONSERVE = (("topk", {"density": 0.1}), ("ef_signsgd", {}), ("none", {}))
GRIDS = [(2, 3), (1, 4), (3, 2)]


def run(grid: tuple[int, int], **asked: Any) -> list[dict[str, Any]]:
    job = run_ranks(grid[0] * grid[1], "fsdp.py", timeout=SECONDS, arguments={"grid": grid} | asked, front="torch")
    return job.values()


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run(
        (2, 2), ways=FEW, conserve=CONSERVE[:1], resume=["marsit"],
        more=["refused", "raise", "updates", "before", "small shards", "dead columns"],
    )  # fmt: skip


def check_ways(reports: list[dict[str, Any]], names: tuple[str, ...]) -> None:
    for name in names:
        for report in reports:
            way = report[name]
            assert way["far"] < 1e-6 < 1e-4 < way["control"], (name, way)
            assert way["norms"] < 1e-5 and way["scales"][0] == way["scales"][1], (name, way)


def test_none_is_what_torch_s_own_hybrid_sharding_does(found: list[dict[str, Any]]) -> None:
    check_ways(found, FEW)
    infinity = found[0][FEW[0]]
    assert infinity["scales"] == [32.0, 32.0]  # a step was skipped on all ranks


def test_what_waits_and_results_are_the_sum_of_gradients(found: list[dict[str, Any]]) -> None:
    assert all(report["topk conserves"] < 1e-6 for report in found)


@pytest.mark.slow
def test_clipping_sees_the_norm_of_the_exact_mean() -> None:
    """The model is small, so that a ratio of norms is measured roughly, and changes soon."""
    for report in run((2, 2), more=["norms"]):
        matched, control = report["norms"]
        assert abs(matched - 1) < 0.2 and control > 1.5, (matched, control)


def test_all_ranks_refuse_a_step_that_is_not_finite_on_one(found: list[dict[str, Any]]) -> None:
    for number, report in enumerate(found):
        (text,) = report["raise"]
        shard = number % 2
        assert "those of the replicas of shard" in text or "another shard than" in text, (shard, text)


def test_a_job_goes_on_with_the_same_bits_or_with_the_same_sum(found: list[dict[str, Any]]) -> None:
    for report in found:
        way = report["marsit resumes"]
        assert set(way["resumed"].values()) == {way["straight"]}
        assert way["sums"] and any(way["saved"])
        for sums in way["sums"].values():
            assert sums == pytest.approx(way["saved"], rel=1e-5, abs=1e-7)
        assert "StateError" in report["marsit on another grid"], report["marsit on another grid"]


def test_local_steps_of_divided_models(found: list[dict[str, Any]]) -> None:
    """They end where those of whole ones do; where a shard is not finite, all ranks raise in the same step."""
    for report in found:
        way = report["updates"]
        assert way["far"] < 1e-5 and way["equal"]
        assert len(way["told"]) == len(found[0]["updates"]["told"]) > 0


def test_what_comes_before_register_does_no_harm(found: list[dict[str, Any]]) -> None:
    for report in found:
        way = report["before"]
        assert "not registered yet" in way["shown"] and "has none of the parameters" in way["wrong"]
        assert way["equal"]
    tells = [report["before"]["assigned"] for report in found]
    assert tells[0] == 1 and sum(tells) < len(tells)  # one replica of each shard, once
    assert "residuals of 4 replicas" in found[0]["before"]["other"], found[0]["before"]["other"]


def test_a_tensor_may_be_small_in_some_columns_or_grids_only(found: list[dict[str, Any]]) -> None:
    for report in found:
        way = report["small shards"]
        saved = way.pop("saved")
        assert len(way) == 2 and saved["second.0.weight"]
        for kept in way.values():
            assert kept == pytest.approx(saved, rel=1e-5, abs=1e-7)


def test_elements_without_a_gradient_stay_where_they_are_on_another_grid(found: list[dict[str, Any]]) -> None:
    """Their second moment is exactly 0 there, too; what waits for some of them is sent by the next exact round."""
    for report in found:
        way = report["dead columns"]
        saved = way.pop("saved")
        never, late, used = saved["columns"][-1]
        assert len(way) == 3 and any(saved["waits"].values())
        for name, other in way.items():
            assert other["waits"] == pytest.approx(saved["waits"], rel=1e-5), name
            assert {column for column, _, _ in other["columns"]} == {never}, name
            assert [column == late for _, column, _ in other["columns"]] == [True] * 5 + [False] * 2, name
            assert used not in {column for _, _, column in other["columns"]}, name


REFUSED = {
    "two dimensions": "ConfigError: first.0.weight is divided by a mesh of 2 dimensions, along one of which it is",
    "whole": "ConfigError: first.0.weight is not divided among ranks: call fully_shard() with the whole model",
    "no mesh": "ConfigError: replicate= should be the dimension of a mesh along which the model is replicated",
    "the other dimension": "ConfigError: replicate= has ranks [0, 1], and the model is divided among ranks [0, 1]",
    "both dimensions": "ConfigError: replicate= should be the dimension of a mesh",
    "a hook": "ConfigError: first.0.weight has a hook that is called when its gradient is there",
    "wrapped": "ConfigError: this module has the class DistributedDataParallel, which exchanges gradients itself",
    "twice": "ConfigError: this compression has a module already",
    "not registered": "ConfigError: the ranks do not know each other yet: write compression.register(",
    "a scaler before": "ConfigError: the ranks do not know each other yet: write compression.register(",
    "an option": "ConfigError: ",
    "other options of another shard": "MismatchError: ",
    "hosts": 'ConfigError: exchange="hierarchical" shares tensors among the ranks of a host',
    "masks": "ConfigError: masked() looks at whole tensors",
    "local steps": "ConfigError: replicate= should be the dimension of a mesh",
    "no optimizer": "ConfigError: register() takes an optimizer",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_with_the_remedy(name: str, found: list[dict[str, Any]]) -> None:
    assert found[0]["refused"].keys() == REFUSED.keys()
    assert found[0]["refused"][name].startswith(REFUSED[name]), found[0]["refused"][name]


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("grid", [(2, 2), *GRIDS])
def test_every_way_on_every_grid(grid: tuple[int, int]) -> None:
    ways = WAYS if grid == (2, 2) else WAYS[:-1]
    reports = run(grid, ways=ways, conserve=CONSERVE)
    check_ways(reports, ways)
    assert all(report[f"{method} conserves"] < 1e-5 for report in reports for method, _ in CONSERVE)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("grid", [(2, 2), (2, 3)])
def test_replicas_are_equal_after_every_step_of_every_method(grid: tuple[int, int]) -> None:
    reports = run(grid, methods=methods())
    for name in methods():
        assert len({report[name] for report in reports}) == 1


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
def test_blocks_that_are_compiled() -> None:
    way = run((2, 2), ways=["compiled"])[0]["compiled"]
    assert way["far"] < 1e-5 < 1e-4 < way["control"]


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
def test_bfloat16_reduction_rounds_and_nothing_else() -> None:
    way = run((2, 2), ways=["bfloat16 reduction"])[0]["bfloat16 reduction"]
    assert way["far"] < 1e-2 and way["norms"] < 1e-2


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("method", ["topk", "qsgd", "powersgd", "onebit_adam", "loco"])
def test_other_methods_resume(method: str) -> None:
    for report in run((2, 2), resume=[method], **{"all grids": True}):
        way = report[f"{method} resumes"]
        assert len(way["sums"]) == 2
        for sums in way["sums"].values():
            assert sums == pytest.approx(way["saved"], rel=1e-4, abs=1e-6)
        assert set(way["resumed"].values()) == {way["straight"]}
