"""DistributedDataParallel in the ways in which it is used, and without Horovod."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import ROOT, run_ranks


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    return run_ranks(2, "ddp.py", timeout=200.0, front="torch", launched=True).reports


def test_none_is_ddp_alone(reports: list[dict[str, Any]]) -> None:
    """Parameters that no rank uses, or some only; static graphs, accumulation, gradients that are views of buckets."""
    for report in reports:
        assert len(report["ways"]) == 7
        assert all(difference < 1e-6 for difference in report["ways"].values()), report["ways"]


def test_buckets_that_are_built_anew_change_nothing(reports: list[dict[str, Any]]) -> None:
    first, last = reports[0]["rebuilt"]
    assert first != last and sum(first) == sum(last)


def test_models_scalers_and_frozen_parameters(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["two models"] and report["frozen"]
        assert report["scaled"] == [1.0, 0.5, 1.0]


def test_weights_that_are_set_back_before_the_optimizer_s_step_are_no_difference(reports: list[dict[str, Any]]) -> None:
    assert [report["climbing"] for report in reports] == [[], []]


def test_training_goes_on_after_a_step_that_was_not_finite(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        first, refused, last = report["not finite"]
        assert first == last == "fine" and "gradient values of bucket 0" in refused


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("join", "ConfigError: DistributedDataParallel's join() with uneven batches is not supported"),
        ("outside", "ConfigError: DistributedDataParallel's join() with uneven batches is not supported"),
        ("other model", "named_parameters has none of the model's parameters; a compression serves one model"),
        ("no model", "register() takes a module, or DistributedDataParallel(module), got ["),
        ("twice", "was registered before, with <Compression none"),
        ("skipping", "skip_all_reduce_unused_params=True, which withholds buckets from its hook"),
        ("late optimizer", "call attach() before the first backward pass"),
        ("updates", "a compression serves one optimizer"),
        ("averaged", "ConfigError: this model is in DistributedDataParallel, which averages gradients"),
        ("averaged alone", "accepted"),
        ("averaged elsewhere", "accepted"),
        ("averaged before", "accepted"),
        ("averaged in vain", "accepted"),
        ("local steps", "diloco takes local steps: write optimizer = hvc.DistributedUpdateOptimizer"),
        ("group", "process_group should be None"),
        ("mismatch", "MismatchError: the ranks do not agree on seed: rank 0 = 0, rank 1 = 1"),
        ("one rank", "ConfigError: rank 1 cannot start: none has no option 'colour'"),
        ("control", "accepted"),
    ],
)
def test_what_cannot_work_is_refused(case: str, text: str, reports: list[dict[str, Any]]) -> None:
    for report in reports:
        told = report["refused"][case]
        assert told == text or (text != "accepted" and text in told)


WITHOUT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("horovod", "psutil"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
import os
import torch
import torch.distributed as dist
import horovod_compress.ddp as hvc
try:
    import horovod_compress.torch
except ImportError as error:
    print(error)
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
model = torch.nn.Linear(3, 2)
called = torch.nn.parallel.DistributedDataParallel(model)
compression = hvc.Compression.marsit(model.named_parameters())
compression.register(called)
called(torch.ones(1, 3)).sum().backward()
print(compression.stats()["steps"], "horovod" in sys.modules)
"""


def test_horovod_is_not_needed(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT, str(tmp_path / "store")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    said, counts = ended.stdout.splitlines()
    assert said.startswith("horovod_compress.torch needs Horovod, which is not installed")
    assert counts == "1 False"
