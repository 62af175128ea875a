"""Ranks that share hosts: what a method makes of the means of hosts, share by share, is what it makes without hosts.

So each law of a method holds for these means: what conserves does, and what is unbiased is so.
"""

from __future__ import annotations

import pytest
import torch

from horovod_compress.engine.bucket.shares import cut
from horovod_compress.schedule.plan import TensorSpec
from tests.battery.cases import each_case
from tests.support.local import Fleet, random_grads, same_bits, spec
from tests.support.samples import FEW, Sample

HOSTS, RANKS, STEPS = 2, 4, 4
EACH = RANKS // HOSTS
TENSORS = [spec("rows", 37, 65), spec("short", 50, 3, 3), spec("flat", 1000), spec("few", 3), spec("one row", 1, 70)]


@pytest.fixture
def one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all shares of a bucket the same random bits, as jobs of their own have."""
    monkeypatch.setattr("horovod_compress.engine.context._BUCKETS", 1)


def means(grads: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Return the mean over each host."""
    hosts = [grads[first : first + EACH] for first in range(0, RANKS, EACH)]
    return [{name: sum(mine[name] for mine in host) / EACH for name in host[0]} for host in hosts]


def part(tensor: TensorSpec, place: int, values: torch.Tensor) -> torch.Tensor:
    """Return one share of a tensor."""
    share = cut(tensor, EACH)[place]
    return values.reshape(-1)[share.where].view(share.tensor.shape)


def give_momenta(fleet: Fleet) -> list[dict[str, torch.Tensor]]:
    """Let a step empty the momenta of every rank where it sends, and return them, by rank."""
    momenta = [{tensor.name: torch.ones(tensor.shape) for tensor in fleet.tensors} for _ in fleet.reducers]
    for reducer, mine in zip(fleet.reducers, momenta, strict=True):
        for index, momentum in enumerate(mine.values()):
            reducer.buckets.clear_where_sent(index, [momentum])
    return momenta


@pytest.mark.usefixtures("one_key")
@each_case(quick=FEW)
def test_a_method_makes_of_the_means_of_hosts_what_it_makes_of_gradients(case: Sample) -> None:
    if HOSTS not in case.worlds(HOSTS):
        return
    with Fleet(RANKS, TENSORS, case.codec(), hosts=HOSTS, verify_every=1, seed=3) as fleet:
        found, kept, momenta = [], [], []
        for step in range(STEPS):
            momenta.append(give_momenta(fleet))
            found.append(fleet.step(random_grads(RANKS, TENSORS, seed=step)))
            kept.append(fleet.residuals())
    for place in range(EACH):
        shares = [cut(tensor, EACH)[place].tensor for tensor in TENSORS]
        with Fleet(HOSTS, shares, case.codec(), verify_every=0, seed=3) as flat:
            for step in range(STEPS):
                mine, emptied = means(random_grads(RANKS, TENSORS, seed=step)), give_momenta(flat)
                results = flat.step([{t.name: part(t, place, host[t.name]) for t in TENSORS} for host in mine])
                for tensor in TENSORS:
                    for rank in range(RANKS):
                        got = part(tensor, place, found[step][rank][tensor.name])
                        assert same_bits(got.contiguous(), results[0][tensor.name]), (tensor.name, step, rank)
                        momentum = part(tensor, place, momenta[step][rank][tensor.name])  # also of what others own
                        assert torch.equal(momentum, emptied[rank // EACH][tensor.name]), (tensor.name, step, rank)
                for host, residuals in enumerate(flat.residuals()):
                    for name, residual in residuals.items():
                        assert same_bits(kept[step][host * EACH + place][name], residual)
