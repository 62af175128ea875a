"""When the ratio of norms is measured, what it is in between, and what is saved of it."""

from __future__ import annotations

import itertools

import pytest

from horovod_compress.engine.ratio import EVERY, FILLING, RECENT, SPREAD, Ratio, check_state
from horovod_compress.engine.usual import ABOVE, BELOW, EMPTIED, SETTLED


def late() -> Ratio:
    """Return one of late in a training, where measurements are far apart."""
    ratio = Ratio()
    ratio.steps, ratio.filling = SPREAD * EVERY, FILLING * EVERY
    return ratio


def test_measurements_are_ever_further_apart() -> None:
    ratio, measured = Ratio(), []
    for step in range(SPREAD * EVERY + 4 * EVERY):
        due = ratio.due
        ratio.age_by_a_step()
        if due:
            ratio.take(1.0, 1.0, empties=False)
            measured.append(step)
    apart = [later - step for step, later in itertools.pairwise(measured)]
    assert measured[: 2 * SPREAD] == list(range(2 * SPREAD))
    assert apart == sorted(apart) and apart[-1] == EVERY
    assert len(measured) < 0.4 * SPREAD * EVERY + 5
    ratio.take(1.0, 1.0, empties=True)
    assert ratio.distance == 1, "residuals fill again"


def test_a_ratio_is_the_mean_of_some_measurements_unless_every_step_measures() -> None:
    ratio = Ratio()
    for made in (1.0, 0.5, 0.4, 0.25):
        ratio.take(1.0, made, empties=False)
    assert ratio.value == 4.0
    ratio = late()
    for made in (0.5, 0.4, 0.5, 0.4, 0.3):
        ratio.take(1.2, made, empties=False)
    assert ratio.value == pytest.approx((2.4 + 3.0 + 4.0) / RECENT)


@pytest.mark.parametrize(("made", "jumps"), [(1.4, False), (1.6, True), (0.7, False), (0.6, True)])
def test_a_ratio_that_jumps_is_measured_anew(made: float, jumps: bool) -> None:
    """As where a program lets another method take its turn, or trains more layers."""
    ratio = late()
    for _ in range(RECENT):
        ratio.take(1.0, 1.0, empties=False)
    ratio.take(1.0, made, empties=False)
    assert (ratio.distance == 1) is jumps
    assert ratio.value == pytest.approx(1 / made if jumps else (2 + 1 / made) / RECENT)


def measured(ratio: Ratio, norm: float, made: float) -> float:
    """Return what a ratio counts as that every step measures."""
    ratio.age_by_a_step()
    ratio.take(norm, made, empties=False)
    return ratio.counted(norm, made, empties=False)


def usual() -> Ratio:
    """Return one whose results are four times as large as the mean."""
    ratio = Ratio()
    ratio.usual.begin(1)
    for _ in range(SETTLED):
        assert measured(ratio, 1.0, 4.0) == 1 / 4
    return ratio


def test_residuals_that_fill_at_first_make_a_ratio_as_small_as_it_is() -> None:
    ratio = Ratio()
    assert [measured(ratio, 1.0, float(step)) for step in range(2, 60)] == [1 / step for step in range(2, 60)]


def test_beside_residuals_of_a_spike_a_ratio_is_near_the_usual_one_for_some_time() -> None:
    ratio, pace = usual(), 1 + 1 / SETTLED
    assert measured(ratio, 1000.0, 2000.0) == 1 / 2, "of the spike itself, as it is: clipping sees the exact norm"
    assert ratio.usual.ratio == pytest.approx(pace / 4)
    for steps in range(1, 30):
        assert measured(ratio, 1.0, 2000.0) == pytest.approx(1 / 4 / BELOW * pace ** (1 - steps))
        assert ratio.used() == ratio.counted(1.0, 2000.0, empties=False) == ratio.counted(1.0, 2000.0, empties=True)
    goes_on = Ratio()
    goes_on.load(ratio.state())
    assert goes_on.used() == ratio.used() and check_state(ratio.state())
    goes_on.usual.begin(1)
    assert measured(goes_on, 1.0, 2000.0) == measured(ratio, 1.0, 2000.0)
    for _ in range(200):  # if that is how it stays
        measured(ratio, 1.0, 2000.0)
    assert ratio.used() == pytest.approx(1 / 2000)


def test_a_ratio_is_as_small_as_it_is_where_results_are_no_larger_than_usual() -> None:
    """Mean gradients may be small for other reasons, and then clipping sees that."""
    ratio = usual()
    assert [measured(ratio, 0.001, 4.0) for _ in range(5)] == [0.001 / 4] * 5
    ratio = usual()
    assert ratio.counted(1.0, 8 * ABOVE, empties=True) == 1 / (8 * ABOVE), "a round that empties residuals"
    assert ratio.counted(1.0, 3 * EMPTIED, empties=True) == 1 / (3 * EMPTIED)
    assert ratio.counted(1.0, 8 * EMPTIED, empties=True) == 1 / 4 / BELOW
    measured(ratio, 1.0, 8 * ABOVE)
    assert ratio.counted(1.0, 8 * ABOVE, empties=True) == ratio.usual.ratio / BELOW, "there was a spike before it"


def test_what_is_usual_of_one_code_says_nothing_of_another() -> None:
    """Whose residuals may have to fill."""
    ratio = usual()
    measured(ratio, 1.0, 400.0)
    ratio.usual.begin(1)
    assert ratio.used() == ratio.usual.ratio / BELOW
    ratio.usual.begin(2)
    assert ratio.used() == 1 / 400
    sizes = [4000.0 * step for step in range(1, 60)]
    assert [measured(ratio, 1.0, size) for size in sizes] == [1 / size for size in sizes]


def test_steps_of_a_code_that_was_not_measured_yet_are_saved() -> None:
    ratio = usual()
    ratio.usual.begin(2)
    ratio.age_by_a_step()
    goes_on = Ratio()
    goes_on.load(ratio.state())
    for one in (ratio, goes_on):
        one.usual.begin(2)
        one.age_by_a_step()
    assert goes_on.state() == ratio.state() and ratio.usual.steps == 2 and check_state(ratio.state())


def test_gradients_may_be_of_another_scale() -> None:
    ratio = usual()
    ratio.rescale(1024.0)
    assert measured(ratio, 512.0, 4096.0) == 1 / 8 and not ratio.usual.large


def test_residuals_that_follow_a_lower_learning_rate_are_no_spike() -> None:
    ratio = usual()
    ratio.expect(10.0)
    assert ratio.due and measured(ratio, 1.0, 40.0) == 1 / 40 and not ratio.usual.large
    ratio = late()
    for _ in range(RECENT):
        measured(ratio, 1.0, 4.0)
    ratio.expect(1.05)
    assert not ratio.due and ratio.used() == 1 / 4


def test_no_time_without_a_measurement_is_too_long() -> None:
    ratio = usual()
    for _ in range(20_000):
        ratio.age_by_a_step()
    ratio.take(1.0, 2.0, empties=False)
    assert ratio.usual.ratio == 1 / 2


@pytest.mark.parametrize("keeps", [False, True])
def test_results_of_the_right_norm_are_seldom_measured_where_nothing_fills(keeps: bool) -> None:
    """With a residual they may be on their way through it."""
    ratio = Ratio()
    ratio.keeps = keeps
    for _ in range(RECENT):
        assert ratio.distance == 1
        ratio.take(1.0, 1.05, empties=False)
    assert ratio.distance == (1 if keeps else EVERY)
    ratio.take(1.0, 1.3, empties=False)
    assert ratio.distance == 1


def test_states_of_before_have_one_ratio() -> None:
    ratio, before = Ratio(), {"ratio": 0.3, "norm": 2.0, "age": 4, "since": [2.0, 0.3], "stale": False, "off": False}
    assert check_state(before)
    ratio.load(before)
    assert ratio.state() == before
    assert (ratio.value, ratio.norm, ratio.age, ratio.distance) == (0.3, 2.0, 4, 1)


@pytest.mark.parametrize(
    "state",
    [
        None,
        {"ratio": -1.0},
        {"ratio": float("nan")},
        {"earlier": [0.0]},
        {"earlier": [1.0] * RECENT},
        {"other": 1},
        {"since": [1.0]},
        {"stale": 1},
        {"norm": "1"},
    ],
)
def test_malformed_states_are_refused(state: object) -> None:
    assert not check_state(state)
    assert check_state({}) and check_state(Ratio().state())


def test_norms_that_run_away_are_noticed_until_the_next_exact_round() -> None:
    ratio = Ratio()
    for _ in range(FILLING * EVERY):
        ratio.age_by_a_step()
    ratio.take(1.0, 3.0, empties=False)
    ratio.take(2.5, 7.5, empties=False)
    assert not ratio.stale, "less than three times"
    ratio.take(3.5, 10.5, empties=False)
    assert ratio.stale
    ratio.refresh()
    ratio.take(3.5, 10.5, empties=False)
    assert not ratio.stale
    ratio.take(3.5, 35.0, empties=False)
    assert ratio.stale, "the ratio has changed, not the norm"


def test_a_norm_that_runs_away_is_noticed_from_the_first_step_on() -> None:
    ratio = Ratio()
    ratio.take(1.0, 3.0, empties=False)
    ratio.take(2.5, 7.5, empties=False)
    assert not ratio.stale, "less than three times"
    ratio.take(3.5, 10.5, empties=False)
    assert ratio.stale


@pytest.mark.parametrize("keeps", [True, False])
def test_results_that_grow_while_residuals_fill_are_no_news(keeps: bool) -> None:
    """The control: of a method that keeps nothing they are."""
    ratio = Ratio()
    ratio.keeps = keeps
    for step in range(FILLING * EVERY):
        ratio.take(1.0, 1.0 + step / 4, empties=False)
        ratio.age_by_a_step()
    assert ratio.stale is not keeps
    ratio.take(1.0, 20.0, empties=False)
    assert ratio.stale, "residuals are full"
