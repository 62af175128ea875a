"""Small tensors, which are not compressed, move as large ones do where the method has momentum."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from horovod_compress.codecs.by_step import by_step, method
from horovod_compress.engine.methods import per_layer
from horovod_compress.errors import ConfigError
from tests.support.local import Fleet, all_same, spec

WORLD = 2
TENSORS = [spec("big", 300), spec("small", 3)]
KINDS: list[Any] = [
    ("dgc", {"density": 1.0, "masking": False, "momentum": 0.75}),
    (by_step({0: "none", 3: method("dgc", density=1.0, masking=False, momentum=0.75)}), {}),
    ("dgc", {"density": 1.0, "masking": False, "momentum": 0.75, "warmup_steps": 2}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=["dgc", "by_step", "warmup"])
def test_small_and_large_tensors_move_alike(kind: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    tensors = [spec("big", 300, dtype=dtype), spec("small", 3, dtype=dtype)]
    with Fleet(WORLD, tensors, kind, min_elements=10, **options) as fleet:
        assert [bucket.compressed for bucket in fleet.plan.buckets] == [True, False]
        for step in range(8):
            grads = [{t.name: torch.full(t.shape, 1.0 + rank, dtype=dtype) for t in tensors} for rank in range(WORLD)]
            if step == 5:
                for mine in grads:
                    for grad in mine.values():
                        grad[0] = torch.inf  # leaves no trace
            results = fleet.step(grads)
            assert all_same(results)
            if step != 5:
                assert float(results[0]["big"][1]) == float(results[0]["small"][1])
        assert float(results[0]["small"][1]) > 3  # the control: momentum made it larger than the mean, 1.5
        assert set(fleet.reducers[0].kept.states()["momentum"]) == {"big", "small"}


def test_sketch_fusion_has_it_too() -> None:
    with Fleet(1, TENSORS, "sketch_fusion", min_elements=10, momentum=0.5) as fleet:
        found = [float(fleet.step([{"big": torch.ones(300), "small": torch.ones(3)}])[0]["small"][0]) for _ in range(3)]
    assert found == [1.0, 1.5, 1.75]


def test_methods_that_want_different_things_are_refused() -> None:
    methods = per_layer({"b*": method("dgc"), "*": "none"})
    with Fleet(1, TENSORS, methods) as fleet:
        methods.check_plain(fleet.plan)  # nothing is left uncompressed
    with Fleet(1, TENSORS, methods, min_elements=10) as fleet:
        with pytest.raises(ConfigError, match="min_elements=0"):
            methods.check_plain(fleet.plan)
        per_layer({"b*": method("dgc"), "*": method("dgc", density=0.1)}).check_plain(fleet.plan)
