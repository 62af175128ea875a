"""The command line of train.py."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from tasks import TASKS

SHARDS = ("even", "uneven")
DEVICES = ("cpu", "cuda")
EXCHANGES = ("auto", "ring", "fold")
OPTIMIZERS = ("sgd", "adam", "adamw")
OUTER = {"nesterov": {"lr": 0.7, "momentum": 0.9, "nesterov": True}, "sgd": {"lr": 0.4}}
_LOCAL = ("outer", "outer_lr", "warmup_exchanges", "overlap", "fragments")  # options of update mode


class UsageError(ValueError):
    """The command line cannot be used; the text says what to change."""


class Parser(argparse.ArgumentParser):
    """A parser that raises instead of exiting, and prints help on one rank only."""

    def __init__(self, *args: Any, quiet: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._quiet = quiet

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def print_help(self, file: Any = None) -> None:
        if not self._quiet:
            super().print_help(file)


def parse(arguments: list[str] | None = None, quiet: bool = False) -> argparse.Namespace:
    """Return the checked command line, with the task's defaults filled in.

    Raises:
        UsageError: an argument is missing, unknown or out of range.
    """
    chosen = _parser(quiet).parse_args(arguments)
    defaults = TASKS[chosen.task].defaults
    chosen.optimizer = chosen.optimizer or defaults.optimizer
    chosen.lr = chosen.lr or defaults.rates[chosen.optimizer.removesuffix("w")]
    chosen.batch = chosen.batch or defaults.batch
    if chosen.eval_every is None:
        chosen.eval_every = max(1, chosen.steps // 10)
    chosen.options = _method_options(chosen)
    _settle_local_steps(chosen)
    if not (chosen.attach or chosen.update_mode) and chosen.second_moment != "auto":
        raise UsageError("--second-moment is an option of attach() and of update mode: leave out --no-attach")
    if chosen.lr_schedule != "constant" and (chosen.save or chosen.load):
        raise UsageError("--lr-schedule cosine covers the steps of one run: leave out --save and --load")
    if chosen.update_mode and chosen.method.startswith("horovod-"):
        raise UsageError(f"{chosen.method} is stock Horovod, which has no update mode; take one of the plugin's")
    return chosen


def _settle_local_steps(chosen: argparse.Namespace) -> None:
    """Make of --local-steps what it stands for, and refuse options of update mode without it."""
    if chosen.local_steps and chosen.delay:
        raise UsageError("--local-steps N is --delay N: give one of them")
    if chosen.local_steps:
        chosen.update_mode, chosen.delay = True, chosen.local_steps
    if not chosen.update_mode and chosen.delay:
        raise UsageError("--delay needs --update-mode")
    usual = {name: 1 if name == "fragments" else 0 for name in _LOCAL}
    given = [name for name in _LOCAL if (getattr(chosen, name) or 0) != usual[name]]
    if given and not chosen.update_mode:
        raise UsageError(f"--{given[0].replace('_', '-')} needs --local-steps")
    if chosen.outer_lr and not chosen.outer:
        raise UsageError("--outer-lr needs --outer")
    chosen.outer_options = (
        OUTER[chosen.outer] | ({"lr": chosen.outer_lr} if chosen.outer_lr else {}) if chosen.outer else None
    )


def _parser(quiet: bool) -> Parser:
    parser = Parser(
        quiet=quiet,
        description="Train a small task with a gradient-compression method.",
        epilog="Start it with: horovodrun -np 2 python examples/train.py --task digits --method marsit",
    )
    _add_task(parser.add_argument_group("task"))
    _add_method(parser.add_argument_group("compression"))
    _add_output(parser.add_argument_group("output and checkpoints"))
    return parser


def _add_task(group: Any) -> None:
    group.add_argument("--task", choices=sorted(TASKS), default="digits")
    group.add_argument("--steps", type=positive(int), default=200, help="steps of this run")
    group.add_argument(
        "--device",
        choices=DEVICES,
        default="cpu",
        help="cuda: a GPU for each rank where a host has several, else one that its ranks share",
    )
    group.add_argument("--seed", type=count, default=0)
    group.add_argument("--optimizer", choices=OPTIMIZERS, help="default: the task's own")
    group.add_argument("--lr", type=positive(float), help="learning rate")
    group.add_argument(
        "--lr-schedule",
        choices=("constant", "cosine"),
        default="constant",
        help="cosine: linear warm-up over a tenth of the steps, then down to a tenth of the rate",
    )
    group.add_argument(
        "--beta2", type=fraction, default=0.999, help="the second beta of adam and adamw (default 0.999)"
    )
    group.add_argument(
        "--momentum", type=fraction, default=0.9, help="momentum of sgd; use 0 if the method has its own"
    )
    group.add_argument("--batch", type=positive(int), help="samples per rank and step")
    group.add_argument("--threads", type=positive(int), default=1, help="torch threads per rank")
    group.add_argument("--shards", choices=SHARDS, default="even", help="uneven: each rank has its own classes or text")
    group.add_argument("--eval-every", type=count, help="steps between evaluations, 0 for the end only")


def _add_method(group: Any) -> None:
    group.add_argument(
        "--method",
        default="horovod-none",
        help="a method of the plugin (hvd-compress list), or horovod-none, horovod-fp16",
    )
    group.add_argument(
        "--schedule",
        help="auto, mergecomp, layerfusion, layerwise, single or size:... (default size:25MB, not the plugin's auto, "
        "so that a run repeats bit for bit)",
    )
    group.add_argument("--exchange", choices=EXCHANGES)
    group.add_argument("--verify-every", type=count, help="steps between checks of the ranks")
    group.add_argument("--timeout", type=positive(float), help="seconds one exchange may take")
    group.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="a method's own option")
    group.add_argument(
        "--attach",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="exchange outside Horovod (faster) instead of through its tokens",
    )
    group.add_argument("--update-mode", action="store_true", help="exchange weight updates instead of gradients")
    group.add_argument("--delay", type=positive(int), help="local steps between exchanges")
    _add_local_steps(group)
    group.add_argument(
        "--second-moment", choices=("auto", "shared", "own"), default="auto", help="which second moment Adam uses"
    )
    group.add_argument(
        "--exact-steps",
        type=positive(int),
        help="exact rounds at the start, with a shared second moment (default: what the package chooses)",
    )


def _add_local_steps(group: Any) -> None:
    group.add_argument("--local-steps", type=positive(int), metavar="N", help="the same as --update-mode --delay N")
    group.add_argument(
        "--outer",
        choices=tuple(OUTER),
        help="the optimizer of the common weights, once an exchange: nesterov is DiLoCo's, sgd SparseLoCo's",
    )
    group.add_argument("--outer-lr", type=positive(float), help="its learning rate; default: 0.7, and 0.4 for sgd")
    group.add_argument(
        "--warmup-exchanges", type=count, default=0, help="local steps at the start that are each exchanged"
    )
    group.add_argument("--overlap", type=count, help="local steps that go on while an exchange is under way")
    group.add_argument("--fragments", type=positive(int), default=1, help="parts of the model exchanged by turns")


def _add_output(group: Any) -> None:
    group.add_argument("--json", metavar="OUT", help="write the record of the run here")
    group.add_argument("--save", metavar="FILE", help="write FILE.rankN at the end")
    group.add_argument("--load", metavar="FILE", help="continue from FILE.rankN")
    group.add_argument("--hash-residuals", action="store_true", help="add a hash of the compression state")


def positive(kind: type) -> Any:
    """Return an argparse type for numbers above zero."""

    def convert(text: str) -> Any:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be above zero, got {text}")
        return value

    convert.__name__ = kind.__name__  # argparse names the type in its messages
    return convert


def count(text: str) -> int:
    """Return a whole number that is not negative."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {text}")
    return value


def exchanged(text: str) -> str:
    """Return a method and its options, ``METHOD [option=value ...]``, if ranks exchange gradients by it."""
    from horovod_compress.options import FOR_UPDATES  # a stock run imports nothing of it

    name = next(iter(text.split()), "")
    if not name or name in FOR_UPDATES:
        raise argparse.ArgumentTypeError(FOR_UPDATES.get(name, "a method is missing, such as marsit"))
    return text


def fraction(text: str) -> float:
    """Return a number from 0 up to, but not including, 1."""
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and less than 1, got {text}")
    return value


def value_of(text: str) -> int | float | bool | str:
    """Return the text of an option as a number or truth value where it reads as one."""
    words = {"true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _method_options(chosen: argparse.Namespace) -> dict[str, Any]:
    names = ("schedule", "exchange", "timeout", "verify_every")
    options = {name: getattr(chosen, name) for name in names if getattr(chosen, name) is not None}
    for pair in chosen.option:
        key, equals, text = pair.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(f"--option takes KEY=VALUE, got {pair!r}")
        if key in options:
            raise UsageError(f"option {key!r} is given twice")
        options[key] = value_of(text)
    # The seed of the run is the seed of its randomness too, unless --option says otherwise.
    if not chosen.method.startswith("horovod-"):
        options.setdefault("seed", chosen.seed)
        options.setdefault("schedule", "size:25MB")
    return options
