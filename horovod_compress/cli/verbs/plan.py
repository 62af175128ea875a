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
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SUFFIXES = (".png", ".svg")
_LEAST, _MOST_MILLISECONDS, _MOST_CORES = 1e-3, 1_000_000_000, 1_000_000
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
    parser.add_argument("--rate", default="1gbit", help="rate of each rank's link (default 1gbit)")
    parser.add_argument("--latency", default="100us", help="latency of a message (default 100us)")
    parser.add_argument(
        "--compute-ms", type=float, default=300.0, help="compute time of a step, without exchange (default 300)"
    )
    parser.add_argument("--cores", type=float, default=1.0, help="processor cores per rank, such as 0.5 (default 1)")
    parser.add_argument("--exchange", default="auto", help="auto, ring, fold, torus, or torus:ROWS (default auto)")
    parser.add_argument("--per-host", type=int, metavar="N", help="predict a hierarchical exchange (not available yet)")
    parser.add_argument(
        "--local-rate", help=f"rate between the ranks of a host, with --per-host (default {_LOCAL_RATE})"
    )
    parser.add_argument("--plot", metavar="DIR|FILE", help="write plots to a folder, or to a .png or .svg file")
    parser.add_argument("--save", metavar="FILE", help="write the best plan; hvc.Plan.load(FILE) reads it")
    parser.add_argument("--measure", action="store_true", help="measure steps too, on the ranks of a horovodrun job")
    parser.add_argument("--repeat", type=int, default=7, help="steps to measure with --measure (default 7)")


def run(arguments: argparse.Namespace) -> int:
    """Predict, show, draw and save; return the exit status."""
    from ...errors import ConfigError

    try:
        return _run(arguments)
    except ConfigError as error:
        return _refuse(str(error))
    except OSError as error:
        if error.filename is None:  # not of --plot or --save, but of the output
            raise
        return _refuse(f"{error.filename}: {error.strerror}")


def _refuse(problem: str) -> int:
    print(f"hvd-compress plan: {' '.join(problem.split())}", file=sys.stderr)
    return 2


def _run(arguments: argparse.Namespace) -> int:
    from ...planner import models, parse

    names = parse.names(arguments.method)
    options = parse.options(arguments.option, names)
    ranks = parse.ranks(arguments.ranks)
    _check(arguments)
    _check_several(arguments, names, ranks)
    table = models.read(arguments.model)
    from ...codecs import registry  # not earlier: torch takes seconds

    codecs = [registry.create(name, **options) for name in names]
    if arguments.measure:
        return _measure(arguments, table, codecs)
    case = _case(arguments, table, ranks[0])
    if len(codecs) > 1 or len(ranks) > 1 or arguments.per_host:
        return _worlds(arguments, case, codecs, ranks)
    return _one_world(arguments, case, codecs[0])


def _check_several(arguments: argparse.Namespace, names: Sequence[str], ranks: Sequence[int]) -> None:
    """Refuse what is for one method, one number of ranks, or predictions only."""
    from ...errors import ConfigError

    if arguments.measure:
        if len(names) > 1:
            raise ConfigError("--measure takes one method")
        if arguments.plot or arguments.per_host:
            option = "--plot" if arguments.plot else "--per-host"
            raise ConfigError(f"{option} applies to predictions only; leave it out with --measure")
    elif arguments.save and (len(names) > 1 or len(ranks) > 1 or arguments.per_host):
        raise ConfigError("--save needs exactly one method and one number of ranks, and no --per-host")


def _check(arguments: argparse.Namespace) -> None:
    """Refuse numbers and files that cannot be, before anything is measured."""
    from ...errors import ConfigError
    from ...options import check_exchange
    from ...planner import parse

    check_exchange(arguments.exchange)
    parse.rate(arguments.rate)
    parse.seconds(arguments.latency)
    for option, value, most in (
        ("--compute-ms", arguments.compute_ms, _MOST_MILLISECONDS),
        ("--cores", arguments.cores, _MOST_CORES),
    ):
        if not _LEAST <= value <= most:
            raise ConfigError(f"{option} should be a number from {_LEAST:g} to {most:,}, got {value:g}")
    if arguments.repeat < 2:
        raise ConfigError(f"--repeat should be at least 2, got {arguments.repeat}")
    _check_hosts(arguments)
    if arguments.save is not None:
        _check_file("--save", arguments.save)
    if arguments.plot is not None:
        _check_plot(arguments.plot)


def _check_hosts(arguments: argparse.Namespace) -> None:
    from ...errors import ConfigError
    from ...planner import parse

    if arguments.local_rate is not None:
        parse.rate(arguments.local_rate)
        if arguments.per_host is None:
            raise ConfigError(
                "--local-rate is the rate of the links inside a host; give --per-host N too, or leave it out"
            )
    if arguments.per_host is None:
        return
    if not 2 <= arguments.per_host <= parse.MOST_RANKS // 2:
        raise ConfigError(f"--per-host should be from 2 to {parse.MOST_RANKS // 2}, got {arguments.per_host}")
    if all(number % arguments.per_host or number == arguments.per_host for number in parse.ranks(arguments.ranks)):
        raise ConfigError(
            f"--per-host {arguments.per_host} needs --ranks with several full hosts, such as {2 * arguments.per_host}; "
            f"got {arguments.ranks}"
        )


def _check_plot(target: str) -> None:
    from ...errors import ConfigError

    path = Path(target)
    if not target or (path.suffix and path.suffix not in _SUFFIXES and not path.is_dir()):
        raise ConfigError(f"--plot takes a folder, or a file that ends in .png or .svg, got {target!r}")
    if not path.suffix and path.exists() and not path.is_dir():
        raise ConfigError(f"--plot {target} is a file; give a folder, or a file that ends in .png or .svg")
    if not next(parent for parent in path.absolute().parents if parent.exists()).is_dir():
        raise ConfigError(f"--plot {target} cannot be created: one of its folders is a file")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'horovod-compress[plot]'") from None


def _check_file(option: str, target: str) -> None:
    """Refuse a file that could not be written in the end."""
    from ...errors import ConfigError

    path = Path(target)
    if not target or path.is_dir():
        raise ConfigError(f"{option} takes a file to write, got {f'the folder {target}' if target else 'no name'}")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {target}: No such folder: {path.parent}; create it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option} {target}: no permission to write there")


def _case(arguments: argparse.Namespace, table: Any, ranks: int) -> Any:
    from ...planner import parse
    from ...planner.network import Link
    from ...planner.prediction import World
    from ...planner.predictions import Case

    link = Link(parse.rate(arguments.rate), parse.seconds(arguments.latency))
    world = World(ranks, link, arguments.cores, arguments.exchange)
    return Case(table, arguments.compute_ms / 1e3, world)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _measure_codecs(codecs: list[Any]) -> None:
    """Measure what codecs cost, saying so: it takes a moment for each."""
    from ...planner.processor import measured
    from ...planner.traffic import rounds

    for number, codec in enumerate(codecs, 1):
        _tell(f"measuring the codec of {codec.name} on this machine ({number} of {len(codecs)})")
        for kind, _ in rounds(codec):
            measured(codec, kind)


# ---- one world, several, measured ------------------------------------------------------------


def _one_world(arguments: argparse.Namespace, case: Any, codec: Any) -> int:
    from ...planner import predictions, report

    _measure_codecs([codec, *_plain(codec)])
    found, bare = predictions.predicted(case, codec), predictions.plain(case)
    if arguments.save:
        found.best.plan.save(arguments.save)
    document = predictions.document(case, found, bare, arguments.save)
    print(json.dumps(document) if arguments.json else report.text(case, found, bare), flush=True)
    if arguments.save:
        _tell(f'wrote {arguments.save}; in a job: schedule=hvc.Plan.load("{arguments.save}")')
    if arguments.plot:
        from ...planner import figures

        _wrote(figures.draw_timelines(case, found, arguments.plot))
    return 0


def _plain(codec: Any) -> list[Any]:
    from ...codecs import registry
    from ...planner.predictions import PLAIN

    return [] if codec.name == PLAIN else [registry.create(PLAIN)]


def _worlds(arguments: argparse.Namespace, case: Any, codecs: list[Any], ranks: list[int]) -> int:
    from ...planner import parse, predictions, report
    from ...planner.network import Link

    if all(codec.name != predictions.PLAIN for codec in codecs):
        codecs = [*codecs, *_plain(codecs[0])]
    local = Link(parse.rate(arguments.local_rate or _LOCAL_RATE), case.world.link.latency)
    hosts = (arguments.per_host, local) if arguments.per_host else None
    _measure_codecs(codecs)
    _tell(f"predicting {len(codecs)} methods for {', '.join(map(str, ranks))} ranks")
    found = predictions.cells(case, codecs, ranks, hosts)
    document = predictions.cells_document(case, found)
    print(json.dumps(document) if arguments.json else report.worlds_text(case, found), flush=True)
    if arguments.plot:
        from ...planner import figures

        _wrote(figures.draw_worlds(case, found, arguments.plot))
    return 0


def _wrote(paths: list[Path]) -> None:
    for path in paths:
        _tell(f"wrote {path}")


def _measure(arguments: argparse.Namespace, table: Any, codecs: list[Any]) -> int:
    from ...errors import ConfigError

    try:
        from ...fronts.horovod import ranks
    except ImportError as error:
        raise ConfigError(f"--measure needs Horovod: {error}") from None
    job = ranks.begin()
    if job.size < 2:
        _tell(
            "with one rank, only the codec was measured, not the network; to measure both, start this on the hosts of "
            "your job, for example\n  horovodrun -np 4 -H a:1,b:1,c:1,d:1 hvd-compress plan --measure"
        )
        from ...planner import parse

        return _one_world(arguments, _case(arguments, table, parse.ranks(arguments.ranks)[0]), codecs[0])
    from ...planner import comparison
    from ...schedule.plan import Plan

    case = _case(arguments, table, job.size)
    found = ranks.compare(case, codecs[0], arguments.repeat, _tell)
    if job.rank == 0:
        print(json.dumps(found) if arguments.json else comparison.text(case, found), flush=True)
        if arguments.save:
            Plan.from_document(found["plan"]).save(arguments.save)
            _tell(f"wrote {arguments.save}, the fastest plan")
    return 0
