"""Rates, delays and what the lab refuses, without starting one."""

from __future__ import annotations

import pytest

from benchmarks.lab.rates import Rate
from benchmarks.launch import open_launcher
from benchmarks.outcomes import environment


@pytest.mark.parametrize(("text", "bits"), [("100mbit", 1e8), ("1gbit", 1e9), (" 2.5Gbit ", 2.5e9), ("64kbit", 64e3)])
def test_rates(text: str, bits: float) -> None:
    assert Rate.parse(text).bits == bits


@pytest.mark.parametrize("text", ["", "1", "gbit", "0mbit", "-1gbit", "1gb", "1 gbit/s", "1e3mbit"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 100mbit"):
        Rate.parse(text)


def test_a_burst_covers_the_timer_and_no_more() -> None:
    """A burst passes at once: it has to be small against what a benchmark sends."""
    assert Rate.parse("1gbit").burst == 80_000 > 64 * 1024
    assert Rate.parse("100mbit").burst == Rate.parse("10mbit").burst == 16 * 1024
    assert Rate.parse("10gbit").burst < 1 << 20
    assert all(Rate.parse(text).queue > 2 * Rate.parse(text).burst for text in ("10mbit", "1gbit", "10gbit"))


def test_a_piece_passes_a_burst_whole() -> None:
    """A token bucket cuts up what is longer than its burst, and a piece's segments have headers."""
    assert Rate.parse("10gbit").piece == Rate.parse("1gbit").piece == 64 * 1024
    for text in ("10mbit", "300mbit", "500mbit"):
        rate = Rate.parse(text)
        assert rate.burst // 2 < rate.piece < rate.burst - rate.piece // 1448 * 66


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("here", 2, "1gbit"), "only the lab can limit"),
        (("here", 2, None, "5ms"), "only the lab can limit"),
        (("lab", 2, None, None, "a:1,b:1"), "leave --hosts out"),
        (("there", 2), "where should be"),
        (("lab", 0), "1 to 200 hosts"),
    ],
)
def test_launchers_refuse_what_makes_no_sense(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_launcher(*arguments)  # type: ignore[arg-type]


def test_ranks_find_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    assert environment()["PYTHONPATH"].endswith(":/elsewhere")
    monkeypatch.delenv("PYTHONPATH")
    assert ":" not in environment()["PYTHONPATH"] and environment()["OMP_NUM_THREADS"] == "1"
