"""The all-reduce benchmark without ranks: definitions, sizes, tables, records, peer files, plots."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("psutil")  # of the launchers

from benchmarks import allreduce, bandwidth, results  # noqa: E402
from benchmarks.peers import base  # noqa: E402

LAB = {"launcher": "lab", "hosts": 4, "ranks": 4, "rate": "1gbit", "rate_bits": 1e9, "delay_seconds": 0.0}


def measured(
    name: str,
    seconds: float,
    check: str = "identical",
    exchange: float | None = None,
    size: int = 100_000_000,
    **more: Any,
) -> results.Record:
    """Return a record as the job tells it, of four ranks."""
    record = {
        "bench": "allreduce",
        "name": name,
        "ranks": 4,
        "elements": size // 4,
        "bytes": size,
        "repeats": 3,
        "check": check,
        "wrong": 0,
        "bytes_sent": 150_000_000,
        "bytes_computed": False,
        "bytes_sent_all": 0,
        "median_exchange_seconds": exchange,
        **results.spread_fields("seconds", [0.9 * seconds, seconds, 1.1 * seconds]),
    }
    return record | more


def cell(*records: results.Record, place: results.Record = LAB) -> list[results.Record]:
    return [bandwidth.enriched(record, place) for record in records]


# ---- definitions --------------------------------------------------------------------------------


def test_bandwidths_are_those_of_nccl_tests() -> None:
    assert bandwidth.algorithm_bandwidth(100e6, 0.5) == 200e6
    assert bandwidth.bus_bandwidth(100e6, 0.5, 4) == 300e6  # 2(M-1)/M = 1.5
    assert bandwidth.bus_bandwidth(100e6, 0.5, 2) == 200e6


def test_the_fraction_of_the_wire_is_of_the_exchange_alone_where_that_is_told() -> None:
    whole, alone = cell(measured("horovod fp32", 2.4, "float32"), measured("none ring", 2.4, "float32", exchange=1.5))
    assert whole["fraction_of_wire"] == pytest.approx(0.5)  # 1.2 s on the wire
    assert alone["fraction_of_wire"] == pytest.approx(0.8)
    assert (whole["fraction_of"], alone["fraction_of"]) == ("whole", "exchange")
    assert (allreduce.wire_text(whole), allreduce.wire_text(alone)) == ("~0.50", "0.80")
    assert not whole["effective"] and cell(measured("marsit ring", 1.0))[0]["effective"]


@pytest.mark.parametrize(
    ("text", "size"),
    [("1kB", 1000), ("100MB", 100_000_000), ("25Melem", 100_000_000), ("4096", 4096), ("0.5MB", 500_000)],
)
def test_sizes(text: str, size: int) -> None:
    assert bandwidth.size_in_bytes(text) == size


# ---- verdict, tables ------------------------------------------------------------------------------


def test_the_verdict_credits_nobody_with_what_the_transport_does() -> None:
    stock, ring = measured("horovod fp32", 1.0, "float32"), measured("none ring", 0.2, "float32", exchange=0.1)
    found = cell(stock, ring, measured("marsit ring", 0.1, exchange=0.05))
    assert bandwidth.verdict(found) == (
        "Compression pays here: marsit ring is 2 times as fast as none ring, the fastest without compression "
        "(10 times as fast as horovod fp32)."
    )
    found = cell(stock, ring, measured("marsit ring", 0.19, exchange=0.15))
    assert "does not pay" in bandwidth.verdict(found) and "none ring, 200 ms" in bandwidth.verdict(found)


def test_wrong_results_have_no_say_in_the_verdict() -> None:
    stock, ours = measured("horovod fp32", 1.0, "float32"), measured("marsit ring", 0.5, exchange=0.05)
    fast = [measured("lazy", 0.001, wrong=1), measured("lazy too", 0.001, "float32", wrong=1)]
    assert bandwidth.verdict(cell(stock, ours, *fast)) == bandwidth.verdict(cell(stock, ours))
    assert bandwidth.verdict(cell(stock, fast[0])) == ""


def test_the_verdict_when_a_method_adds_more_than_all_that_can_be_saved() -> None:
    found = cell(
        measured("horovod fp32", 0.020, "float32"),
        measured("headroom", 0.001, "none"),
        measured("marsit ring", 0.030, exchange=0.005),
    )
    assert bandwidth.verdict(found) == (
        "At this rate and size compression does not pay: horovod fp32 has at most 19 ms to save, "
        "and the compressed methods that report their exchange add at least 25 ms to it."
    )


# ---- records --------------------------------------------------------------------------------------


# ---- contestants ----------------------------------------------------------------------------------


def test_methods_of_this_package() -> None:
    pytest.importorskip("horovod.torch")
    from benchmarks.peers import adapter, adapters
    from benchmarks.peers.names import parse

    assert parse("marsit exchange=fold full_precision_every=0 schedule=size:4MB") == (
        "marsit",
        {"exchange": "fold", "full_precision_every": 0, "schedule": "size:4MB"},
    )
    assert parse("none auto") == ("none", {"exchange": "auto"})
    assert adapter("none ring").name == "none ring" and adapter("headroom").name == "headroom"
    bad = (("nothing ring", "unknown"), ("marsit circle", "neither"), ("marsit ring exchange=fold", "twice"))
    for text, why in bad:
        with pytest.raises(base.PeerError, match=why):
            adapter(text)
    with pytest.raises(base.PeerError, match="unique"):
        adapters(["none ring", "none ring"])


def test_methods_under_ddp_take_an_option_of_ddp() -> None:
    pytest.importorskip("horovod.torch")
    from benchmarks.peers import adapter, names

    found = adapter("ddp:topk bucket_cap_mb=5 density=0.1")
    assert found._ddp == {"bucket_cap_mb": 5}
    assert found.options["density"] == 0.1 and "bucket_cap_mb" not in found.options
    names.check(["ddp:topk bucket_cap_mb=5 density=0.1", "topk density=0.1"])
    for text in ("topk bucket_cap_mb=5", "ddp:topk bucket_cap_kb=5"):
        with pytest.raises(base.PeerError, match="no option 'bucket_cap_"):
            names.check([text])


def test_every_default_contestant_can_be_made() -> None:
    pytest.importorskip("horovod.torch")
    from benchmarks.peers import adapters

    names = allreduce.words(allreduce.METHODS)
    found = adapters(names)
    assert [adapter.name for adapter in found] == names
    assert all(base.check_of(adapter) in base.CHECKS for adapter in found)


PEER = """
class Mine:
    name = "mine"
    def wrap(self, model, optimizer):
        return model, optimizer
def adapters():
    return [Mine()]
"""


def test_a_peer_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "my_peer.py"
    path.write_text(PEER)
    (mine,) = base.load(path)
    assert mine.name == "mine" and base.check_of(mine) == "identical" and base.stats_of(mine) == {}
    assert base.allreduce_of(mine) is None and base.warm_up_of(mine, 2) == 2
    base.close(mine)  # it has nothing to close


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import surely_not_installed_anywhere", "needs surely_not_installed_anywhere"),
        ("def adapters():\n    import surely_not_installed_anywhere", "needs surely_not_installed_anywhere"),
        ("x = 1", r"defines adapters\(\)"),
        ("def adapters(:", "SyntaxError"),
        ("def adapters():\n    return 1 // 0", "ZeroDivisionError"),
        ("def adapters():\n    return [object()]", "has a name"),
        (PEER.replace("def wrap", "def other"), r"no wrap\(model, optimizer\)"),
        (PEER.replace('name = "mine"', 'name = "mine"\n    check = "perhaps"'), "should be one of"),
    ],
)
def test_a_bad_peer_file_is_refused_by_name(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(base.PeerError, match=why) as caught:
        base.load(path)
    assert str(path) in str(caught.value)


# ---- the check of results -------------------------------------------------------------------------


def test_wrong_elements_are_counted() -> None:
    pytest.importorskip("horovod.torch")
    from benchmarks.jobs.allreduce import fill, wrong_elements

    gradients = [fill(torch.empty(1000), rank) for rank in range(3)]
    mean = torch.stack(gradients).double().mean(0).float()
    assert wrong_elements(mean, "float32", 0, 3) == 0
    assert wrong_elements(mean.half().float(), "float16", 0, 3) == 0
    assert wrong_elements(mean.half().float(), "float32", 0, 3) > 500
    broken = mean.clone()
    broken[:2] = torch.tensor([math.nan, 1e3])
    assert wrong_elements(broken, "float32", 0, 3) == 2
    assert wrong_elements(broken, "identical", 0, 3) == 1 and wrong_elements(broken, "none", 0, 3) == 0
    assert wrong_elements(broken, "float32", 1, 3) == 0  # there is one block, and it is the first rank's


# ---- plots ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_plots_are_drawn_and_say_what_they_show(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.figures_allreduce import draw

    records = [
        record
        for size in (1000, 100_000_000)
        for record in cell(
            measured("horovod fp32", 1e-8 * size, "float32", size=size), measured("marsit ring", 1e-9 * size, size=size)
        )
    ]
    paths = draw([results.header("allreduce", []), *records], tmp_path)
    assert {path.suffix for path in paths} == {".svg", ".png"} and len(paths) == 4
    assert all(path.stat().st_size > 1000 for path in paths)
