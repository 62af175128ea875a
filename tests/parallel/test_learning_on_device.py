"""Training on a device comes to the losses of the CPU: the text task, AdamW, with a second moment that is held."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.jobs import ROOT, launcher, needs_front, run_ranks

WORLD, SECONDS = 2, 280.0
#: As in test_learning.py: how much worse a loss may be where arithmetic differs, as a share of it.
MARGIN = 0.05
LONG = {"methods": ["none", "marsit"], "steps": 200, "every": 20, "exact_steps": 30}
SHORT = {"methods": ["marsit"], "steps": 6, "every": 3, "exact_steps": 2}


def curves(front: str, device: str, asked: dict[str, Any]) -> tuple[dict[str, list[list[float]]], list[Any]]:
    """Return the held-out losses over all ranks by method, and the reports."""
    given = asked | {"device": device, "seed": 0}
    reports = run_ranks(WORLD, "learn.py", timeout=SECONDS, arguments=given, front=front).values()
    found = {}
    for method in asked["methods"]:
        ours = [report[method] for report in reports]
        assert len({mine["weights"] for mine in ours}) == 1, method
        assert bool(ours[0]["held"]) is (method == "marsit")
        points = zip(*(mine["curve"] for mine in ours), strict=True)
        found[method] = [[p[0][0], sum(one[1] for one in p) / sum(one[2] for one in p)] for p in points]
    return found, reports


@pytest.mark.gpu
@pytest.mark.timeout(2 * SECONDS + 60)
@pytest.mark.parametrize("front", ["horovod", "torch"])
def test_losses_on_a_gpu_are_those_of_the_cpu(front: str, record_property: Callable[[str, object], None]) -> None:
    needs_front(front)
    (here, _), (there, _) = (curves(front, device, LONG) for device in ("cpu", "cuda:0"))
    for method in here:
        record_property(f"curve {method} {front}", {"cpu": here[method], "gpu": there[method]})
    for method in here:
        (_, first), (_, last), (_, theirs) = here[method][0], here[method][-1], there[method][-1]
        assert last < 0.8 * first, f"{method} has not learned: held-out loss {first:.3f}, then {last:.3f}"
        assert abs(theirs - last) <= MARGIN * last, f"{method}: {theirs:.3f} on the GPU, {last:.3f} on the CPU"


@pytest.mark.slow
def test_a_staged_run_has_the_bits_of_the_cpu() -> None:
    """The same job without a GPU."""
    (here, ours), (there, staged) = (curves("torch", device, SHORT) for device in ("cpu", "staged"))
    assert here == there and ours == staged
    assert len(here["marsit"]) == 3


def example(*words: str) -> subprocess.CompletedProcess[str]:
    """Run examples/train.py on two ranks."""
    train = [sys.executable, "examples/train.py", "--task", "text", "--method", "marsit", *words]
    command = [*launcher("horovod"), "2", *train]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)


@pytest.mark.gpu
def test_the_example_trains_under_horovod_on_a_gpu(tmp_path: Any) -> None:
    """And goes on from its checkpoint on the CPU."""
    needs_front("horovod")
    saved = str(tmp_path / "checkpoint")
    done = example("--device", "cuda", "--steps", "40", "--save", saved)
    assert done.returncode == 0 and "ranks identical: yes" in done.stdout, done.stdout + done.stderr
    done = example("--steps", "5", "--load", saved)
    assert done.returncode == 0 and "ranks identical: yes" in done.stdout, done.stdout + done.stderr
