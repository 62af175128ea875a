"""What is no ``named_parameters``, no compression and no process set is refused in words: what came, what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from horovod_compress.engine.names import listed, pairs
from horovod_compress.errors import ConfigError

MODEL = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
WEIGHT = MODEL[0].weight


@pytest.mark.parametrize(
    ("given", "came"),
    [
        (None, "None"),
        (3, "an int"),
        ("weight", "a str"),
        (MODEL, "a Sequential"),
        (nn.Linear(1, 1), "a Linear"),
        (MODEL.named_parameters, "a method; call it"),
        (MODEL.parameters(), "a Parameter without a name"),
        (dict(MODEL.named_parameters()), "a dict"),
        (torch.optim.SGD(MODEL.parameters(), lr=0.1), "a SGD"),
        ([("weight", WEIGHT, 1)], "a tuple of 3 among them"),
        ([["weight", WEIGHT]], "a list among them"),
        ([("weight", None)], "None as the parameter 'weight'"),
        ([("weight", torch.ones(2))], "a Tensor as the parameter 'weight'"),
        ([(0, WEIGHT)], "the name 0, which is not a string"),
        ([(None, WEIGHT)], "the name None, which is not a string"),
        ([(b"weight", WEIGHT)], "the name b'weight', which is not a string"),
        ([([], WEIGHT)], "the name [], which is not a string"),
    ],
)
def test_what_is_no_list_of_parameters_is_refused(given: Any, came: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pairs(listed(given))
    wanted = "named_parameters should be (name, parameter) pairs: write model.named_parameters(), got"
    assert str(caught.value) == f"{wanted} {came}"


def test_named_parameters_pass_in_any_container() -> None:
    wanted = list(MODEL.named_parameters())
    for given in (MODEL.named_parameters(), wanted, tuple(wanted), dict(wanted).items()):
        assert pairs(listed(given)) == wanted


def test_a_parameter_without_a_shape_is_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ConfigError, match=r"parameter 0.weight has no shape yet, as in LazyLinear: run a forward pass"):
        pairs(model.named_parameters())
    model(torch.ones(1, 2))
    assert len(pairs(model.named_parameters())) == 2


def test_a_parameter_without_memory_of_its_own_is_refused() -> None:
    """Kernels are given the address of a gradient, and such a tensor has none."""
    testing = pytest.importorskip("torch.testing._internal.two_tensor")
    weight = nn.Parameter(testing.TwoTensor(torch.ones(2), torch.ones(2)))
    with pytest.raises(
        ConfigError, match=r"parameter weight has the class TwoTensor, which keeps its numbers in other tensors"
    ):
        pairs([("weight", weight)])
    weight.requires_grad_(False)
    assert pairs([("weight", weight)]) == [("weight", weight)]


# ---- with Horovod -----------------------------------------------------------------------------


def test_a_start_refuses_them() -> None:
    pytest.importorskip("horovod.torch")
    from horovod_compress.fronts.startup import specs

    with pytest.raises(ConfigError, match="got None"):
        specs(None)
    with pytest.raises(ConfigError, match="one parameter under two names; leave remove_duplicate=True"):
        specs([("a", WEIGHT), ("b", WEIGHT)])
    with pytest.raises(ConfigError, match=r"w is torch.sparse_coo; parameters must be dense"):
        specs([("w", nn.Parameter(torch.eye(3).to_sparse()))])


@pytest.mark.parametrize("given", [[0], 0, None, "global", True])
def test_what_is_no_process_set_is_refused(given: Any) -> None:
    pytest.importorskip("horovod.torch")
    import horovod_compress.torch as hvc

    with pytest.raises(ConfigError) as caught:
        hvc.Compression.marsit(MODEL.named_parameters(), process_set=given)
    text = str(caught.value)
    assert text.startswith("process_set should be hvd.global_process_set, or what hvd.add_process_set([0, 1]) returned")
    assert text.endswith(f"got {given!r}")


def test_a_process_set_that_horovod_does_not_know_is_refused() -> None:
    hvd = pytest.importorskip("horovod.torch")
    import horovod_compress.torch as hvc

    with pytest.raises(ConfigError, match=r"got ProcessSet\(process_set_id=None, ranks=\[0\]"):
        hvc.Compression.marsit(MODEL.named_parameters(), process_set=hvd.ProcessSet([0]))


def uncalled(name: str) -> Callable[[Any], Any]:
    return lambda hvc: getattr(hvc.Compression, name)


@pytest.mark.parametrize(
    ("take", "said"),
    [
        (
            uncalled("marsit"),
            (
                "hvc.Compression.marsit is not a compression but makes one: write "
                "compression = hvc.Compression.marsit(model.named_parameters())"
            ),
        ),
        (uncalled("none"), "hvc.Compression.none(model.named_parameters())"),
        (uncalled("create"), 'hvc.Compression.create("marsit", model.named_parameters())'),
        (uncalled("per_layer"), 'hvc.Compression.per_layer({"*": "marsit"}, model.named_parameters())'),
        (lambda hvc: hvc.Compression, "hvc.Compression is a class: write compression = hvc.Compression.marsit("),
        (
            lambda hvc: hvc.method("topk"),
            'hvc.Compression.create(hvc.method("topk", option=...), model.named_parameters())',
        ),
    ],
)
def test_what_horovod_is_given_in_place_of_a_compression_says_so(take: Callable[[Any], Any], said: str) -> None:
    """Horovod asks a compression for ``compress`` first."""
    pytest.importorskip("horovod.torch")
    import horovod_compress.torch as hvc

    with pytest.raises(ConfigError) as caught:
        take(hvc).compress(torch.ones(3))
    assert said in str(caught.value)


@pytest.mark.parametrize("method", ["attach", "follow", "decompress"])
def test_an_uncalled_factory_has_no_other_use(method: str) -> None:
    pytest.importorskip("horovod.torch")
    import horovod_compress.torch as hvc

    with pytest.raises(ConfigError, match="makes one"):
        getattr(hvc.Compression.marsit, method)(None)


@pytest.mark.parametrize(
    "take", [lambda hvc: hvc.Compression, lambda hvc: hvc.Compression.marsit, lambda hvc: "marsit", lambda hvc: None,
             lambda hvc: hvc.method("topk")]
)  # fmt: skip
def test_update_mode_takes_a_compression_only(take: Callable[[Any], Any]) -> None:
    pytest.importorskip("horovod.torch")
    import horovod_compress.torch as hvc

    plain, given = torch.optim.SGD(MODEL.parameters(), lr=0.1), take(hvc)
    with pytest.raises(ConfigError, match=r"compression should be what hvc.Compression.marsit\(model") as caught:
        hvc.DistributedUpdateOptimizer(plain, MODEL.named_parameters(), given)
    assert repr(given)[:100] in str(caught.value)
    for optimizer in (None, torch.optim.SGD, "sgd"):
        with pytest.raises(ConfigError, match=r"the optimizer should be one of torch.optim"):
            hvc.DistributedUpdateOptimizer(optimizer, MODEL.named_parameters(), given)
