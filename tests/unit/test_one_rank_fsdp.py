"""What can be seen of a model that ``fully_shard`` divides with one rank, in this process."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import horovod_compress.fsdp as hvc
from horovod_compress.engine.agreement import differences
from horovod_compress.engine.optimizer.held_moment import loaded
from horovod_compress.errors import ConfigError, ExchangeError, MismatchError, StateError
from horovod_compress.fronts.ending import left_open
from horovod_compress.fronts.fsdp.divided import DivideFactors
from horovod_compress.fronts.fsdp.grid import Column


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield DeviceMesh("cpu", torch.zeros(1, 1, dtype=torch.int64), mesh_dim_names=("replicate", "shard"))
    dist.destroy_process_group()


def test_what_was_divided_anew_is_known_to_wait(mesh: DeviceMesh) -> None:
    """Else the first exact round, which sends it, would pass for the exact mean."""
    saved: dict[str, Any] = {}
    for _ in range(2):
        net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        fully_shard(net, mesh=mesh["shard"])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        compression = hvc.Compression.topk(net.named_parameters(), density=0.1, min_elements=0, warmup_steps=0)
        compression.register(net, optimizer, replicate=mesh["replicate"])
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if saved:
            compression.resharded(replicas=1).load_state_dict(saved)
            found = compression._saved.state()
            waits = sorted(n for n, t in found["state"]["residual"].items() if t.any())
            assert found["norms"]["wait"] == waits and waits
        else:  # as torch leaves it where a checkpoint lacks it, with allow_partial_load=True
            empty = compression.resharded(replicas=1)
            with pytest.raises(StateError, match="has no compression"):
                empty.load_state_dict(empty.state_dict())
        saved = compression.state_dict()
        compression.close()


@pytest.mark.parametrize("shards", [1, 4])
def test_what_is_usual_is_that_of_a_checkpoint_that_was_dealt_out_anew(shards: int, mesh: DeviceMesh) -> None:
    """Else a spike that waits would pass for usual, and all of it would reach the weights, however much is clipped."""
    net = nn.Linear(64, 30)
    fully_shard(net, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    compression = hvc.Compression.topk(net.named_parameters(), density=0.1, min_elements=1, warmup_steps=0)
    compression.register(net, optimizer, replicate=mesh["replicate"])

    def step(scale: float = 1.0) -> None:
        optimizer.zero_grad()
        (net(torch.ones(2, 64)).square().sum() * scale).backward()
        optimizer.step()

    step()
    step()
    saved, before = compression.state_dict(), compression._saved.state()["norms"]
    assert {"usual", "made", "ratio", "norm"} <= {*before}
    step(1000.0)
    assert compression._saved.state()["norms"]["norm"] != before["norm"], "the control"
    saved["about"] = json.dumps(json.loads(saved["about"]) | {"shards": shards})  # a quarter has half the norm
    compression.resharded(replicas=1).load_state_dict(saved)
    expected = {name: before[name] * shards**0.5 for name in ("made", "norm")}
    expected["since"] = [before["since"][0] * shards**0.5, before["since"][1]]  # type: ignore[assignment]
    expected |= {"code": 0} if shards > 1 else {}
    after = compression._saved.state()["norms"]
    assert after | {"wait": None} == before | expected | {"wait": None}
    step(1000.0)
    assert compression._saved.state()["norms"]["large"], "results of a spike are not usual, whatever the buckets here"
    compression.close()


def test_residuals_of_rows_without_a_gradient_keep_their_size(mesh: DeviceMesh) -> None:
    net = nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 4))
    fully_shard(net, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    compression = hvc.Compression.topk(net.named_parameters(), density=0.1, min_elements=1)
    compression.register(net, optimizer, replicate=mesh["replicate"])
    for step in range(34):
        optimizer.zero_grad()
        words = torch.tensor([0, 1, 2, 3 if step == 33 else 0])
        nn.functional.cross_entropy(net(words), words % 4).backward()
        optimizer.step()

    def waits() -> Tensor:
        """Return what waits for the new row, in units of gradients, as who loads the state sees it."""
        state = compression._saved.state()
        divisor = loaded(state["second_moment"]["0.weight"], torch.device("cpu")).divisor
        assert divisor is not None
        return (state["state"]["residual"]["0.weight"] * divisor).view(8, 64)[3]

    before, saved = waits(), compression.state_dict()
    assert bool(before.any())
    compression.resharded(replicas=1).load_state_dict(saved)
    assert torch.allclose(waits(), before, rtol=1e-4)
    compression.close()


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(self.block(given).tanh()))  # type: ignore[no-any-return]


@pytest.mark.parametrize("local", [True, False])
def test_of_a_module_that_runs_twice_gradients_are_accumulated_within_no_sync(mesh: DeviceMesh, local: bool) -> None:
    """Torch reduces in two parts what it has kept whole, one for each run of the module in the last pass."""
    net: Any = _Twice()
    fully_shard(net.block, mesh=mesh["shard"])
    fully_shard(net, mesh=mesh["shard"])
    compression = hvc.Compression.none(net.named_parameters(), replicate=mesh["replicate"])
    compression.register(net, torch.optim.SGD(net.parameters(), lr=0.1))
    try:
        if local:
            with compression.no_sync():
                net(torch.ones(2, 4)).sum().backward()
            net(torch.ones(2, 4)).sum().backward()
            return
        net.set_requires_gradient_sync(False)
        net(torch.ones(2, 4)).sum().backward()
        net.set_requires_gradient_sync(True)
        with pytest.raises(ConfigError, match=r"come twice .*after set_requires_gradient_sync.*no_sync\(\) instead"):
            net(torch.ones(2, 4)).sum().backward()
    finally:
        compression.close()


@pytest.mark.parametrize("by_torch", [False, True])
def test_a_compression_that_failed_to_register_is_not_open(
    by_torch: bool, mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timeline looks at all that are, and so does the end of the process; it may be registered again."""
    net = nn.Linear(4, 3)
    fully_shard(net, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    compression = hvc.Compression.topk(net.named_parameters(), replicate=mesh["replicate"])

    before = {*threading.enumerate()}

    def broken(*given: object) -> DeviceMesh:
        raise RuntimeError("no mesh today")

    with monkeypatch.context() as patch, pytest.raises((MismatchError, RuntimeError), match=r"density differs|no mesh"):
        if by_torch:
            patch.setattr(Column, "mesh", broken)
        else:
            patch.setattr(differences, "difference", lambda shown: "density differs between ranks")
        compression.register(net, optimizer)
    assert compression not in left_open
    assert not any(thread.name.startswith("hvc") for thread in {*threading.enumerate()} - before)
    hvc.trace(str(tmp_path / "trace.json")).close()
    compression.register(net, optimizer)
    net(torch.ones(2, 4)).sum().backward()
    assert compression in left_open and compression.stats()["steps"] == 1
    compression.close()


def test_rates_are_those_of_a_checkpoint_that_was_dealt_out_anew(mesh: DeviceMesh) -> None:
    """Also where this job has followed a fall of its rate only half the way before it loads."""
    net = nn.Linear(64, 30)
    fully_shard(net, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options = {"follow_lr": True, "density": 0.1, "min_elements": 1}
    compression = hvc.Compression.create("topk", net.named_parameters(), replicate=mesh["replicate"], **options)
    compression.register(net, optimizer)

    def step() -> dict[str, Any]:
        optimizer.zero_grad()
        net(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        return {name: rates for name, rates in compression._here().steps.state().items() if name.startswith("rates")}

    step()
    first, saved = step(), compression.state_dict()
    optimizer.param_groups[0]["lr"] = 1e-4
    assert step().keys() > first.keys(), "the control"
    compression.resharded(replicas=1).load_state_dict(saved)
    state = compression._here().steps.state()
    assert {name: state.get(name) for name in ("rates", "rates_seen")} == {"rates": first["rates"], "rates_seen": None}
    compression.close()


def test_a_factor_in_place_of_the_mean_is_shared_among_replicas_until_the_compression_is_closed(
    mesh: DeviceMesh,
) -> None:
    """Torch adds up within a replica, and results are means over replicas."""
    net = nn.Linear(4, 3)
    fully_shard(net, mesh=mesh["shard"])
    (group,) = net._get_fsdp_state()._fsdp_param_groups
    net.set_gradient_divide_factor(6.0)
    first, second = DivideFactors(net, replicas=3), DivideFactors(net, replicas=2)
    first.share()
    assert group.gradient_divide_factor == 2.0
    second.share()  # of the next compression, where nobody has closed this one
    assert group.gradient_divide_factor == 3.0
    first.give_back()
    second.refuse_others()
    assert group.gradient_divide_factor == 3.0
    second.give_back()
    assert group.gradient_divide_factor == 6.0 and type(group.gradient_divide_factor) is float


@pytest.mark.parametrize(
    ("dtype", "forced", "refused"),
    [(torch.float32, False, False), (torch.float32, True, True), (torch.float64, False, True)],
)
def test_a_factor_that_torch_divides_by_twice_is_refused(
    mesh: DeviceMesh, dtype: torch.dtype, forced: bool, refused: bool
) -> None:
    """As it does where one rank has the whole model, and gradients are summed without a product."""
    net = nn.Linear(4, 3, dtype=dtype)
    fully_shard(net, mesh=mesh["shard"])
    net.set_gradient_divide_factor(4.0)
    net.set_force_sum_reduction_for_comms(forced)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    compression = hvc.Compression.none(net.named_parameters(), replicate=mesh["replicate"])
    if refused:
        with pytest.raises(ConfigError, match=r"divides twice where .* multiply the loss by 0\.25\."):
            compression.register(net, optimizer)
    else:
        compression.register(net, optimizer)
    net(torch.ones(2, 4, dtype=dtype)).sum().backward()
    assert net.bias.grad.full_tensor().tolist() == [2.0 / (16.0 if refused else 4.0)] * 3
    compression.close()


def test_what_is_closed_takes_no_model(mesh: DeviceMesh) -> None:
    net = nn.Linear(4, 3)
    fully_shard(net, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    compression = hvc.Compression.none(net.named_parameters(), replicate=mesh["replicate"])
    compression.close()
    with pytest.raises(ConfigError, match="was closed before its ranks have met"):
        compression.register(net, optimizer)


def test_a_factor_that_comes_behind_register_is_refused(mesh: DeviceMesh) -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    for module in (net[1], net):
        fully_shard(module, mesh=mesh["shard"])
    net[1].set_gradient_divide_factor(4.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    compression = hvc.Compression.none(net.named_parameters(), replicate=mesh["replicate"])
    compression.register(net, optimizer)
    net(torch.ones(2, 4)).sum().backward()  # the control
    net[1].set_gradient_divide_factor(2.0)
    with pytest.raises(ConfigError, match=r"factor\(2\) was called for 1 after register\(\), .* call it before"):
        net(torch.ones(2, 4)).sum().backward()
    compression.close()
    assert net[1]._get_fsdp_state()._fsdp_param_groups[0].gradient_divide_factor == 2.0


def test_a_difference_at_the_first_gradient_says_which_ranks_its_numbers_are(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differ(ways: object) -> None:
        raise MismatchError("rank 0 = 'SGD', rank 1 = 'AdamW'; give every rank the same optimizer")

    net = nn.Linear(4, 3)
    fully_shard(net, mesh=mesh["shard"])
    compression = hvc.Compression.none(net.named_parameters(), replicate=mesh["replicate"])
    compression.register(net, torch.optim.SGD(net.parameters(), lr=0.1))
    monkeypatch.setattr(differences, "check", differ)
    with pytest.raises(
        MismatchError, match=r"same optimizer\. Numbers of ranks are .* in the job, replica 0 is rank 0\.$"
    ):
        net(torch.ones(2, 4)).sum().backward()
    compression.close()


def test_what_a_forward_pass_leaves_whole_is_divided_by_the_line_that_is_advised(mesh: DeviceMesh) -> None:
    """Also in blocks that are kept whole after it, which reshard() of the model leaves alone: the control."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh["shard"], reshard_after_forward=False)
    with torch.no_grad():
        model(torch.ones(2, 4))
    model.reshard()
    with pytest.raises(ConfigError, match=r"0\.weight is not divided among ranks") as caught:
        hvc.Compression.none(model.named_parameters())
    (line,) = re.findall(r"write (\[module\.reshard\(\) .*\]) first$", str(caught.value))
    eval(line, {"model": model, "FSDPModule": FSDPModule})
    compression = hvc.Compression.none(model.named_parameters(), replicate=mesh["replicate"])
    compression.register(model)
    compression.close()


@pytest.mark.parametrize("asks", [False, True])
def test_one_that_was_refused_a_model_is_closed_quietly(
    asks: bool, mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    net = nn.Linear(4, 3)
    fully_shard(net, mesh=mesh["shard"])
    compression = hvc.Compression.topk(net.named_parameters())
    if asks:
        with pytest.raises(ConfigError, match="was not called with this module"):
            compression.register(nn.Linear(4, 3), replicate=mesh["replicate"])
    compression.close()
    assert sum("topk has compressed nothing" in text for text in caplog.messages) == (not asks)


def test_after_a_rank_of_another_shard_has_not_come_nothing_goes_on(mesh: DeviceMesh) -> None:
    """Else this one would have skipped a step that the late one makes."""
    net = nn.Linear(4, 3)
    fully_shard(net, mesh=mesh["shard"])
    compression = hvc.Compression.topk(net.named_parameters(), nonfinite="raise")
    compression.register(net, torch.optim.SGD(net.parameters(), lr=0.1), replicate=mesh["replicate"])
    net(torch.ones(2, 4)).sum().backward()  # the control
    job: Any = compression._here().job

    def late(mine: object, seconds: float) -> None:
        raise ExchangeError(f"nobody came within {seconds:g} s")

    job.agree = late
    for _ in range(2):
        with pytest.raises(ExchangeError, match="nobody came within 630 s"):
            net(torch.ones(2, 4)).sum().backward()
    compression.close()
