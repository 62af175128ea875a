"""One side of `bench-check`: runs the kernels and the step of one version when asked to, and says how long they took.

    python benchmarks/check_side.py ROOT SOCKET COUNT

It is a process of its own, as two versions of a compiled module cannot be told apart within one: who asks pybind11 for
a module of a name that it has made before is handed that one. So it is started by its path, and imports what ROOT has.

It first says the names of its cases, in a line of JSON on the socket with this number. Then it answers each line with
a name and a number of runs by the seconds of processor time that these took, of all threads.
"""

from __future__ import annotations

import importlib
import json
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

TENSORS, STEP = 161, "a step of marsit, two ranks"

Run = Callable[[], object]


def main() -> None:
    root, number, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    sys.path[0] = str(root)  # instead of the folder of this file
    with socket.socket(fileno=number) as connection, connection.makefile("rw") as lines:
        check_kernels(root)
        cases = cases_of(count)
        answer: object = list(cases)
        while True:
            print(json.dumps(answer), file=lines, flush=True)
            if not (asked := lines.readline()):
                return
            name, times = json.loads(asked)
            answer = seconds(cases[name], times)


def check_kernels(root: Path) -> None:
    """Refuse to measure a version with the compiled kernels of another."""
    importlib.import_module("horovod_compress.ops")
    kernels = Path(sys.modules["horovod_compress._cpu"].__file__ or "")
    if root not in kernels.parents:
        raise SystemExit(f"bench-check: expected the kernels of {root}, and {kernels} was loaded")


def seconds(run: Run, times: int) -> float:
    began = time.process_time()  # of all threads: a step has several
    for _ in range(times):
        run()
    return time.process_time() - began


def cases_of(count: int) -> dict[str, Run]:
    """Return what runs the kernels and the step, by name.

    Args:
        count: elements of their arrays.
    """
    import torch

    from benchmarks import kernel_cases

    torch.set_num_threads(1)
    every = kernel_cases.cases(kernel_cases.Arrays(count), "")
    return {STEP: step_of_two_ranks(count)} | {
        case.name: case.run for case in every if not kernel_cases.by_others(case.name)
    }


def step_of_two_ranks(count: int) -> Run:
    """Return what does a step of two ranks in this process, with the tensors of a network and no network."""
    import torch

    from horovod_compress.engine.methods import parse
    from horovod_compress.engine.reducer import Reducer
    from horovod_compress.exchange.choose import Choose
    from horovod_compress.exchange.transports.local import Hub
    from horovod_compress.schedule.by_name import make_plan
    from horovod_compress.schedule.plan import TensorSpec

    tensors = [TensorSpec(f"t{number}", (count // TENSORS,), "float32") for number in range(TENSORS)]
    methods, options = parse("marsit", {"schedule": "size:6MB", "full_precision_every": 0, "verify_every": 0})
    plan = make_plan(options.schedule, tensors, options.min_elements, methods.number)
    reducers = [
        Reducer(plan, methods.codecs, transport, Choose(options.exchange, transport.adds), options)
        for transport in Hub(2).transports()
    ]
    grads = [[torch.randn(count // TENSORS) for _ in tensors] for _ in reducers]

    def step() -> None:
        for index in range(TENSORS):
            for reducer, mine in zip(reducers, grads, strict=True):
                number = reducer.offer(index, mine[index])
        for reducer in reducers:
            for index in range(TENSORS):
                reducer.result(index, number)

    return step


if __name__ == "__main__":
    main()
