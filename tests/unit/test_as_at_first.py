"""After a reset of an elastic job, the parameters that are exchanged are those of the start, whatever is frozen now."""

from __future__ import annotations

from torch import nn

from horovod_compress.fronts.startup import as_at_first, specs


def test_what_was_frozen_or_thawed_since_then_makes_no_difference() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    named = list(model.named_parameters())
    first = [tensor.name for tensor in specs(named)]
    assert first == ["1.bias", "1.weight"]
    model[0].requires_grad_(True)
    model[1].weight.requires_grad_(False)
    assert [tensor.name for tensor in specs(named)] != first  # the control
    with as_at_first(named, first):
        assert [tensor.name for tensor in specs(named)] == first
    assert [name for name, parameter in named if not parameter.requires_grad] == ["1.weight"]
