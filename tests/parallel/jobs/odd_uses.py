"""What programs do with gradients beside the usual: each way of use beside the framework alone, on two ranks."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.front import start
from tests.support.nets import digest
from tests.support.odd_uses import gradients, models, passes  # noqa: F401  their cases register themselves
from tests.support.odd_uses.run import CASES, Run
from tests.support.rank import arguments, check

start()
torch.set_num_threads(1)


def play(name: str, way: str, method: str | None, number: int) -> Any:
    run = Run(way, method, number, name)
    try:
        model = CASES[name](run)
        return [p.detach().clone() for p in model.parameters()]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        run.close()


def one(name: str, way: str, number: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    alone = "left out" if "one rank" in name else play(name, way, None, number)
    ours = play(name, way, "none", number)
    lossy = play(name, way, "marsit", number)
    for label, value in (("alone", alone), ("none", ours), ("marsit", lossy)):
        found[label] = (
            value if isinstance(value, str) else digest([torch.view_as_real(v) if v.is_complex() else v for v in value])
        )
    if not isinstance(alone, str) and not isinstance(ours, str):
        found["far"] = max(
            (float((a.double() - b.double()).abs().max()) for a, b in zip(alone, ours, strict=True) if a.numel()),
            default=0.0,
        )
    return found


given = arguments()
for number, name in enumerate(CASES):
    if not given.get("only") or name in given["only"]:
        for way in given["ways"]:
            if "one rank" not in name or way == "plain":  # with the others, the ranks that are left wait for a timeout
                check(f"{name} / {way}", lambda name=name, way=way, number=number: one(name, way, number))
