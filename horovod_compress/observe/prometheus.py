"""Counters in Prometheus' text format, in a file for the textfile collector of its node exporter.

The format is version 0.0.4: for each metric a line HELP, a line TYPE, and a line for each of its series.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from math import inf, isnan
from typing import Any, NamedTuple

from ..errors import ConfigError
from .files import check_writable, path_of, replace_whole
from .window import Window

_ENDING = ".prom"  # the collector reads no other file
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_OURS = ("rank", "method", "phase")


class Metric(NamedTuple):
    """One metric with its series.

    Attributes:
        series: values by what labels they have beside those of all metrics.
    """

    name: str
    kind: str
    help: str
    series: Mapping[tuple[tuple[str, str], ...], float]


class PrometheusFile:
    """Writes the file of one rank.

    Args:
        path: of all ranks; the number of the rank is put before its ending.
        labels: of every series, beside the rank and the method.

    Raises:
        ConfigError: the file cannot be written or would not be read, or a label is not allowed.
    """

    def __init__(
        self, path: str | os.PathLike[str], rank: int, method: str, labels: Mapping[str, str] | None = None
    ) -> None:
        self.path = path_of(path, rank, "metrics file", f"train{_ENDING}")
        if self.path.suffix != _ENDING:
            raise ConfigError(
                f"prometheus should be a path that ends in {_ENDING}, because others are ignored; got "
                f"{os.fspath(path)!r}"
            )
        self._labels = {"rank": str(rank), "method": method, **_checked({} if labels is None else labels)}
        check_writable(self.path, "metrics file")

    def write(self, step: int, stats: Mapping[str, Any], window: Window) -> None:
        """Replace the file.

        Raises:
            OSError: it could not be written.
        """
        replace_whole(self.path, text_of(metrics_of(stats, window), self._labels))


def _checked(labels: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(labels, Mapping):
        raise ConfigError(f'labels should be names with values, such as {{"job_name": "first"}}, got {labels!r:.200}')
    for name in labels:
        if not isinstance(name, str) or not _LABEL.fullmatch(name) or name in _OURS:
            raise ConfigError(
                f"a label should have a name of letters, digits and _, and not be one of {', '.join(_OURS)}; "
                f"got {name!r}"
            )
    return {name: str(value) for name, value in labels.items()}


def metrics_of(stats: Mapping[str, Any], window: Window) -> Iterator[Metric]:
    """Yield what is reported of a compression.

    Args:
        stats: its counters.
        window: the steps since the last report.
    """

    def one(name: str, kind: str, text: str, value: float) -> Metric:
        return Metric(f"hvc_{name}", kind, text, {(): value})

    busy, hidden = stats["overlap_seconds"]["busy"], stats["overlap_seconds"]["hidden"]
    yield one("steps_total", "counter", "Steps exchanged by this process.", stats["steps"])
    yield one("exact_steps_total", "counter", "Steps in which nothing was compressed.", stats["exact_steps"])
    yield one("sent_bytes_total", "counter", "Bytes sent to other ranks, headers included.", stats["bytes_sent"])
    yield one("exact_bytes_total", "counter", "Of these, gradients as plain numbers.", stats["bytes_exact"])
    yield one("compressed_bytes_total", "counter", "Of these, compressed gradients.", stats["bytes_compressed"])
    yield one("dense_bytes_total", "counter", "Bytes a float32 ring would have sent.", stats["bytes_dense"])
    yield one("exchange_seconds_total", "counter", "Time in which gradients were exchanged.", busy)
    yield one("hidden_seconds_total", "counter", "Part of the exchange behind the backward pass.", hidden)
    yield Metric(
        "hvc_phase_seconds_total", "counter", "Time by phase; phases overlap.",
        {(("phase", phase),): seconds for phase, seconds in stats["seconds"].items()},
    )  # fmt: skip
    yield one("nonfinite_values_total", "counter", "NaN and infinite values offered by all ranks.", stats["nonfinite"])
    yield one("verified_steps_total", "counter", "Steps compared across ranks.", stats["verified"])
    yield one("step_seconds", "gauge", "Mean duration of a step since the last report.", window.seconds_per_step)
    yield one("residual_norm", "gauge", "Euclidean norm of the unsent residual.", stats["residual_norm"])
    yield one("buckets", "gauge", "Buckets of the plan.", stats["buckets"])
    yield one("plain_buckets", "gauge", "Buckets that the schedule leaves uncompressed.", stats["plain_buckets"])


def text_of(metrics: Iterator[Metric], labels: Mapping[str, str]) -> str:
    """Return metrics in the text format, each series with these labels."""
    lines = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
        for own, value in metric.series.items():
            said = ",".join(f'{name}="{_escaped(text)}"' for name, text in {**labels, **dict(own)}.items())
            lines.append(f"{metric.name}{{{said}}} {_number(value)}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if isnan(value):
        return "NaN"
    return {inf: "+Inf", -inf: "-Inf"}.get(value, repr(value))
