"""One bar over the whole set-up, which never goes back."""

from __future__ import annotations

import io
import itertools

import pytest

from horovod_compress.building.bar import Bar, Phase
from horovod_compress.building.progress import CommandProgress, clock_text, describe, parse_download, parse_percent
from tests.support.setup import Terminal


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


PHASES = (
    Phase("environment", "creating .venv", 10),
    Phase("packages", "installing packages", 40),
    Phase("horovod", "building Horovod", 100, counts=True),
    Phase("kernels", "compiling kernels", 50, counts=True),
)


# ---- one command ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "percent"),
    [
        ("[ 45%] Building CXX object horovod/torch/CMakeFiles/pytorch.dir/adapter_v2.cc.o", 45),
        ("  [100%] Linking CXX shared library", 100),
        ("[  3%] Building", 3),
        ("Progress 512 of 2048", None),
        ("-- The CXX compiler identification is GNU", None),
        ("warning: 50% of nothing", None),
        ("", None),
    ],
)
def test_percent_of_a_build_is_read(line, percent):
    assert parse_percent(line) == percent


def test_bytes_of_a_download_are_read():
    assert parse_download("Progress 512 of 2048") == (512, 2048)
    assert parse_download("Progress 0 of 0") is None


def test_description_drops_counters_and_paths():
    assert describe("[ 45%] Building CXX object horovod/torch/adapter_v2.cc.o") == "adapter_v2.cc.o"
    assert describe("Progress 12000000 of 190000000") == "12 of 190 MB"
    assert describe("  Collecting torch ") == "Collecting torch"
    assert describe("Processing /opt/wheels/torch.whl") == "Processing torch.whl"


def test_clock_counts_minutes():
    assert clock_text(109.6) == "1:49"


def test_command_without_a_percentage_goes_by_the_clock_and_never_arrives():
    clock = Clock()
    progress = CommandProgress(10, False, clock)
    seen = []
    for clock.now in (0, 5, 9, 10, 20, 1000):
        seen.append(progress.fraction())
    assert seen[:3] == [0, 0.5, 0.9]
    assert seen == sorted(seen) and seen[-1] < 1


def test_commands_between_the_lines_that_count_are_not_shown():
    progress = CommandProgress(10, True, Clock())
    progress.take("-- Looking for pthread.h")
    assert progress.activity == "-- Looking for pthread.h"
    progress.take("[ 45%] Building CXX object torch/adapter_v2.cc.o")
    progress.take("cd /build && c++ -DHAVE_GLOO=1 -o adapter_v2.cc.o")
    assert progress.activity == "adapter_v2.cc.o"


def test_slow_download_stretches_the_time_that_is_expected():
    clock = Clock()
    progress = CommandProgress(10, False, clock)
    progress.take("Progress 0 of 100")
    clock.now = 5
    progress.take("Progress 5 of 100")  # another 95 seconds
    assert progress.fraction() == pytest.approx(0.05)


# ---- all of them ------------------------------------------------------------------------------


def test_bar_never_goes_back_and_arrives_only_at_the_end():
    """Two lanes side by side; downloads and builds whose own percentages begin again and again."""
    clock, stream = Clock(), io.StringIO()
    bar, seen = Bar(PHASES, stream, clock), []

    def look() -> None:
        clock.now += 1
        seen.append(bar.percent())

    with bar.phase("environment") as show:
        for _ in range(30):  # longer than expected
            show("")
            look()
    bar.done("environment")
    with bar.phase("packages") as packages, bar.phase("kernels") as kernels:
        for file, percent in itertools.product(range(3), range(0, 101, 20)):
            packages(f"Progress {percent} of {100 + file}")
            look()
            kernels(f"[{100 - percent:3d}%] again")
            look()
    bar.done("packages", "kernels")
    with bar.phase("horovod") as horovod:
        for percent in (*range(0, 96, 5), *range(5, 101, 5)):
            horovod(f"[{percent:3d}%] Building CXX object x.o")
            look()
    bar.done("horovod")
    look()
    assert seen == sorted(seen) and seen[-1] == 99
    bar.finish("all is there")
    shown = [int(line.split("%")[0]) for line in stream.getvalue().splitlines()]
    assert shown == sorted(shown) and shown[-1] == 100 and 100 not in shown[:-1]


def test_failed_phase_keeps_what_it_had():
    bar = Bar(PHASES, io.StringIO(), Clock())
    with pytest.raises(ValueError, match="gone"), bar.phase("horovod") as show:
        show("[ 50%] Building")
        raise ValueError("gone")
    assert bar.percent() == 25


def test_what_is_cached_counts_as_done():
    bar = Bar(PHASES, io.StringIO(), Clock())
    bar.done("environment", "packages", "a phase of other runs")
    assert bar.percent() == 25


def test_nothing_is_shown_where_nothing_is_done():
    stream = io.StringIO()
    bar = Bar(PHASES, stream, Clock())
    bar.done(*(phase.name for phase in PHASES))
    bar.finish("all is there")
    bar.abandon()
    assert stream.getvalue() == ""


def test_terminal_shows_one_line_that_fits_with_all_that_is_under_way(monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    clock, stream = Clock(), Terminal()
    bar = Bar(PHASES, stream, clock)
    with bar.phase("horovod") as horovod, bar.phase("kernels") as kernels:
        clock.now = 65
        horovod("[ 50%] Building CXX object a/name/that/does/not/fit/on/any/line_beside_another_one_like_it.o")
        clock.now = 66
        kernels("[ 10%] cpu.lowrank.cpp")
    bar.finish("all is there")
    *others, last = stream.getvalue().split("\r\x1b[K")
    assert all(len(line) < 90 and "\n" not in line for line in others)
    assert "27 % [####----" in others[-1] and "1:06  building Horovod: line_b" in others[-1]
    assert "compiling kernels: cpu.low" in others[-1]
    assert last == "100 % [################]  1:06  all is there\n"


def test_line_that_stays_does_not_mix_with_the_bar():
    stream = Terminal()
    Bar(PHASES, stream, Clock()).say("waiting")
    assert stream.getvalue() == "\r\x1b[Kwaiting\n"


def test_plain_output_is_a_few_lines():
    clock, stream = Clock(), io.StringIO()
    bar = Bar(PHASES, stream, clock)
    with bar.phase("horovod") as show:
        for percent in range(101):
            clock.now += 1
            show(f"[{percent:3d}%] Building CXX object x.o")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "  0 %  0:00  building Horovod"
    assert 4 <= len(lines) <= 12
    assert "\r" not in stream.getvalue()
