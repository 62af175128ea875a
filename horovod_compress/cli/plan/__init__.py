"""Predict a step on a network you don't have, and choose the buckets for it.

    hvd-compress plan --model resnet50 --method topk --option density=0.01 --ranks 4 --rate 1gbit --latency 0.1ms
    hvd-compress plan --method all --ranks 8,64,512,4096 --plot plots
    horovodrun -np 4 -H a:1,b:1,c:1,d:1 hvd-compress plan --method topk --measure

The model is a name, a CSV file with the columns name, shape (64x3x7x7) and macs, or module:function, which
returns a torch.nn.Module or (name, tensor or shape) pairs in forward order. A method's codec is timed briefly on
this machine; the network is modelled. With several numbers of ranks or methods, it shows the steps of all of
them. With --measure, on every rank of a job, steps are measured too, with compute replaced by sleeping, and
predictions are compared with them. docs/planning.md has the formulas and what they leave out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...errors import ConfigError
from ..common import refuse, started_by

if TYPE_CHECKING:
    from ...codecs.base import Codec
    from .models import Table
    from .prediction import Case

_LOCAL_RATE = "100gbit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what describes the model, the job and the form of the answer."""
    parser.add_argument(
        "--model", default="resnet50", help="model: name, FILE.csv or module:function (default resnet50)"
    )
    parser.add_argument("--method", default="topk", help="a method, several separated by commas, or all (default topk)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="option of the method; repeatable"
    )
    parser.add_argument("--ranks", default="4", help="a number, or several separated by commas (default 4)")
    parser.add_argument(
        "--rate", default="1gbit", help="rate of each rank's link, in kbit, mbit or gbit per second (default 1gbit)"
    )
    parser.add_argument("--latency", default="100us", help="latency of a message, in us, ms or s (default 100us)")
    parser.add_argument(
        "--compute-ms", type=float, default=300.0, help="compute time of a step, without exchange (default 300)"
    )
    parser.add_argument("--cores", type=float, default=1.0, help="processor cores per rank, such as 0.5 (default 1)")
    parser.add_argument(
        "--exchange",
        default="auto",
        help="auto, ring, fold, torus, or torus:ROWS (default auto); hierarchical is predicted by --per-host",
    )
    parser.add_argument("--per-host", type=int, metavar="N", help="ranks on a host: predict exchange=hierarchical")
    parser.add_argument(
        "--local-rate", help=f"rate of copies in a host's memory, with --per-host (default {_LOCAL_RATE})"
    )
    parser.add_argument("--plot", metavar="DIR|FILE", help="write plots to a (new) folder, or to a .png or .svg file")
    parser.add_argument("--save", metavar="FILE", help="write the best plan; hvc.Plan.load(FILE) reads it")
    parser.add_argument("--measure", action="store_true", help="measure steps too, on the ranks of a horovodrun job")
    parser.add_argument("--repeat", type=int, default=7, help="steps to measure with --measure (default 7)")


def run(arguments: argparse.Namespace) -> int:
    """Predict, show, draw and save; return the exit status."""
    try:
        return _run(arguments)
    except ConfigError as error:
        return refuse("plan", " ".join(str(error).split()))
    except OSError as error:
        if error.filename is None:  # not of --plot or --save, but of the output
            raise
        return refuse("plan", f"{error.filename}: {error.strerror}")


def _run(arguments: argparse.Namespace) -> int:
    from . import models, parse

    names, options, ranks = parse.checked(arguments)
    table = models.read(arguments.model)
    from ...codecs import registry  # not earlier: torch takes seconds

    codecs = [registry.create(name, **options) for name in names]
    if arguments.measure:
        return _measure(arguments, table, codecs[0])
    case = _case(arguments, table, ranks[0])
    if len(codecs) > 1 or len(ranks) > 1 or arguments.per_host:
        return _worlds(arguments, case, codecs, ranks)
    return _one_world(arguments, case, codecs[0])


def _case(arguments: argparse.Namespace, table: Table, ranks: int) -> Case:
    from . import parse
    from .network import Link
    from .prediction import Case, World

    link = Link(parse.rate(arguments.rate), parse.seconds(arguments.latency))
    return Case(table, arguments.compute_ms / 1e3, World(ranks, link, arguments.cores, arguments.exchange))


def _one_world(arguments: argparse.Namespace, case: Case, codec: Codec) -> int:
    from . import prediction, report

    methods = _with_plain([codec])
    for one in methods:
        prediction.check(one, case.world)
    _measure_codecs(methods)
    found, bare = prediction.predicted(case, codec), prediction.plain(case)
    if arguments.save:
        found.best.plan.save(arguments.save)
    document = report.document(case, found, bare, arguments.save)
    print(json.dumps(document) if arguments.json else report.text(case, found, bare), flush=True)
    if arguments.save:
        _tell(f'wrote {arguments.save}; in a job: schedule=hvc.Plan.load("{arguments.save}")')
    if arguments.plot:
        from . import figures

        for path in figures.draw_timelines(case, found, arguments.plot):
            _tell(f"wrote {path}")
    return 0


def _worlds(arguments: argparse.Namespace, case: Case, codecs: Sequence[Codec], ranks: list[int]) -> int:
    from . import parse, prediction, report
    from .network import Link

    codecs = _with_plain(codecs)
    local = Link(parse.rate(arguments.local_rate or _LOCAL_RATE), case.world.link.latency)
    hosts = (arguments.per_host, local) if arguments.per_host else None
    _measure_codecs([one for one in codecs if any(prediction.can_serve(one, case.world, number) for number in ranks)])
    _tell(f"predicting {len(codecs)} methods for {', '.join(map(str, ranks))} ranks")
    found = prediction.cells(case, codecs, ranks, hosts)
    document = report.cells_document(case, found)
    print(json.dumps(document) if arguments.json else report.worlds_text(case, found), flush=True)
    if arguments.plot:
        from . import figures

        for path in figures.draw_worlds(case, found, arguments.plot):
            _tell(f"wrote {path}")
    return 0


def _measure(arguments: argparse.Namespace, table: Table, codec: Codec) -> int:
    if started_by() == "torchrun":
        raise ConfigError(
            "--measure needs Horovod's ranks: start it with horovodrun; under torchrun, hvd-compress headroom measures "
            "the exchange, and plan without --measure, started once, predicts the step"
        )
    try:
        from ...fronts.horovod.ranks import begin
    except ImportError as error:
        raise ConfigError(f"--measure needs Horovod: {error}") from None
    ranks = begin()
    if ranks.size < 2:
        _tell(
            "with one rank, only the codec was measured, not the network; to measure both, start this on the hosts of "
            "your job, for example\n  horovodrun -np 4 -H a:1,b:1,c:1,d:1 hvd-compress plan --measure"
        )
        from . import parse

        return _one_world(arguments, _case(arguments, table, parse.ranks(arguments.ranks)[0]), codec)
    from ...schedule.plan import Plan
    from . import measured

    case = _case(arguments, table, ranks.size)
    found = measured.compare(case, codec, arguments.repeat, ranks, _tell)
    if ranks.rank == 0:
        print(json.dumps(found) if arguments.json else measured.text(case, found), flush=True)
        if arguments.save:
            Plan.from_document(found["plan"]).save(arguments.save)
            _tell(f"wrote {arguments.save}, the fastest plan")
    return 0


def _with_plain(codecs: Sequence[Codec]) -> list[Codec]:
    """Return methods, and after them the one that does not compress."""
    from ...codecs import registry
    from .prediction import PLAIN

    return [*codecs, *([] if any(codec.name == PLAIN for codec in codecs) else [registry.create(PLAIN)])]


def _measure_codecs(codecs: Sequence[Codec]) -> None:
    """Measure what codecs cost, saying so: it takes a moment for each."""
    from .network import rounds
    from .processor import measure_codec

    for number, codec in enumerate(codecs, 1):
        _tell(f"measuring the codec of {codec.name} on this machine ({number} of {len(codecs)})")
        for kind, _ in rounds(codec):
            measure_codec(codec, kind)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
