"""The numbers of the records come out, boundaries hold what they promise, and few runs are told so."""

import math
import shlex

import numpy as np
import pytest
import torch
from scipy import stats

from speedrun import cli
from speedrun.errors import UserError
from speedrun.experiments import statistics as s

# (target, losses, p, std, mean) as records printed them.
RECORDS = {
    "interleaved": (
        3.28,
        [3.2795, 3.2789, 3.2776, 3.2763, 3.2785, 3.278, 3.2774, 3.2777, 3.2802, 3.2767],
        ("0.0004", "0.0012", "3.2781"),
    ),
    "normuon": (
        3.28,
        [3.2804, 3.2754, 3.2753, 3.2800, 3.2780, 3.2813, 3.2778, 3.2771, 3.2780, 3.2783],
        ("0.0083", "0.0020", "3.2782"),
    ),
    "medium": (2.92, [2.9165, 2.9166], ("0.0046", "7.0638e-05", "2.9166")),
}
TIMES = {
    "interleaved": (
        [112.774, 112.798, 112.837, 112.767, 112.805, 112.802, 112.822, 112.755, 112.932, 112.953],
        ("0.0671", "112.8245"),
    ),
    "normuon": (
        [139.441, 139.780, 139.889, 139.464, 139.761, 139.411, 139.555, 139.570, 139.804, 139.847],
        ("0.1825", "139.6522"),
    ),
    "normuon, the one before": ([143.018, 142.641, 142.789, 143.072, 143.241], ("0.2375", "142.9522")),
    "medium": ([1041.071, 1041.483], ("0.2913", "1041.2771")),
}


@pytest.mark.parametrize("name", RECORDS)
def test_the_losses_of_the_records(name: str) -> None:
    target, losses, (p, std, mean) = RECORDS[name]
    assert f"{float(s.below(np.array(losses), target)):.4f}" == p
    assert tuple(map(s.shown, s.std_mean(losses))) == (std, mean)


@pytest.mark.parametrize("name", TIMES)
def test_the_times_of_the_records(name: str) -> None:
    times, printed = TIMES[name]
    assert tuple(map(s.shown, s.std_mean(times))) == printed
    assert s.std_mean(times) == tuple(x.item() for x in torch.std_mean(torch.tensor(times)))


@pytest.mark.parametrize("name", RECORDS)
def test_the_command_prints_them(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    target, losses, (p, std, mean) = RECORDS[name]
    times, (time_std, time_mean) = TIMES[name]
    words = ["stats", "--target", str(target), *map(str, losses), "--times", *map(str, times)]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert f"p={p}\n" in out
    assert f"losses: (std={std}, mean={mean})\n" in out
    assert f"time: (std={time_std}, mean={time_mean})\n" in out
    assert "valid: " in out


def test_a_race_that_is_not_yet_decided_says_how_many_runs_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(shlex.split("stats --target 3.28 3.2795 3.2801 3.2776 3.2803")) == 1
    out = capsys.readouterr().out
    assert "not valid: " in out
    assert "more runs would decide" in out
    assert cli.main(shlex.split("stats --target 3.28 3.2805 3.2811")) == 1
    assert "above the target" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--target 3.28 3.27", "Too few runs for the test: 1; a t-test needs at least 2."),
        ("--target 3.28", "Too few runs for the test: 0"),
        ("--target nan 3.27 3.26", "--target is nan; it must be above 0."),
        ("--target 3.28 3.27 nan", "A loss is nan: a failed run cannot be averaged"),
        ("--target 3.28 3.27 3.26 --times 1 -2", "--times is (1.0, -2.0); every value must be above 0."),
        ("--target 3.28 3.27 3.26 --times 1", "Too few runs for a deviation: 1; it needs at least 2."),
        ("--target 3.28 3.27 3.26 --alpha 2", "--alpha is 2.0; it must be below 0.5."),
    ],
)
def test_mistakes_in_stats(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stats", *shlex.split(line)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err


def test_one_sided_p_is_scipy_s_for_many_samples_at_once() -> None:
    values = np.random.default_rng(0).normal(1.0, 0.1, (50, 7))
    expected = stats.ttest_1samp(values, 0.95, axis=1, alternative="less").pvalue
    assert np.allclose(s.below(values, 0.95), expected, rtol=1e-9)


def test_values_without_spread_decide_by_themselves() -> None:
    assert s.below(np.array([1.0, 1.0]), 2.0) == 0
    assert s.below(np.array([2.0, 2.0]), 2.0) == 1
    assert s.below(np.array([3.0, 3.0]), 2.0) == 1


# -------------------------------------------------------------------- ratios


def test_a_steady_drift_cancels_within_a_block() -> None:
    """The machine gets 3 % slower with each run; A takes 0.9 of B's time, and that is what comes out, exactly."""
    drift = 1.03 ** np.arange(12).reshape(3, 4)
    times = drift * np.array([0.9, 1.0, 1.0, 0.9])
    logs = s.log_ratios(times[:, [0, 3]], times[:, [1, 2]])
    found = s.compare(logs, 0.01)
    assert found.ratio == pytest.approx(1 / 0.9, rel=1e-12)
    assert found.low == pytest.approx(found.high, rel=1e-9)
    assert found.p_faster < 1e-9 < found.p_slower


def test_the_interval_ends_where_the_test_does() -> None:
    logs = np.array([0.03, 0.01, 0.05, 0.02, 0.015])
    p = float(stats.ttest_1samp(logs, 0, alternative="greater").pvalue)
    found = s.compare(logs, p)
    assert found.p_faster == pytest.approx(p)
    assert found.low == pytest.approx(1.0)  # at this very level the claim is: not slower
    assert found.high == pytest.approx(math.exp(2 * logs.mean()))
    assert s.compare(logs, 0.0).low == 0
    assert s.compare(logs, 0.0).high == math.inf


def test_one_block_is_too_few() -> None:
    with pytest.raises(UserError, match="Too few blocks for the test: 1; it needs at least 2, that is 4 runs a side"):
        s.compare(np.array([0.1]), 0.01)


def test_the_noise_floor_is_the_spread_within_each_side() -> None:
    assert s.noise_floor([100, 102, 98], [50, 51, 49]) == pytest.approx(0.02, rel=0.01)
    assert s.noise_floor([10.0], [11.0]) is None


# -------------------------------------------------------------------- looking early


def test_one_look_is_the_plain_test() -> None:
    assert s.levels(0.01, (12,)) == (0.01,)


def test_levels_rise_and_the_last_one_is_hardly_below_alpha() -> None:
    found = s.levels(0.01, (2, 4, 6, 8, 10, 12))
    assert list(found) == sorted(found)
    assert found[0] < 1e-6
    assert 0.007 < found[-1] < 0.01


def test_the_first_level_is_all_that_may_be_spent_by_then() -> None:
    assert s.levels(0.05, (4, 8))[0] == pytest.approx(s.spent(0.05, 0.5), rel=1e-6)
    assert s.spent(0.05, 1.0) == pytest.approx(0.05)
    assert s.spent(0.025, 0.5) == pytest.approx(0.001525, rel=0.001)  # a standard table's value


def test_many_looks_need_the_levels_of_the_normal_distribution_in_the_end() -> None:
    """With large samples t is normal, for which the boundary of two equal looks is in every textbook (2.5 %)."""
    found = s.levels(0.025, (40, 80))
    assert stats.norm.isf(found[0]) == pytest.approx(2.963, abs=0.001)
    assert stats.norm.isf(found[1]) == pytest.approx(1.969, abs=0.004)


@pytest.mark.parametrize("sizes", [(2, 3, 4, 5, 6, 7, 8), (2, 4, 6, 8, 10, 12), (3, 6)])
def test_the_levels_hold_alpha_over_all_looks(sizes: tuple[int, ...]) -> None:
    """Crossings counted in 150,000 races without an effect; five times what is allowed, to have many of them."""
    alpha, races = 0.05, 150_000
    values = np.random.default_rng(7).normal(size=(races, sizes[-1]))
    border = s.levels(alpha, sizes)
    crossed = np.zeros(races, dtype=bool)
    for size, level in zip(sizes, border, strict=True):
        crossed |= s.below(values[:, :size], 0.0) < level
        share = crossed.mean()
        assert share == pytest.approx(s.spent(alpha, size / sizes[-1]), abs=4 * math.sqrt(alpha / races))


def test_looks_must_rise() -> None:
    with pytest.raises(UserError, match="must rise, and begin at 2"):
        s.levels(0.01, (1, 2))
    with pytest.raises(UserError, match="must rise"):
        s.levels(0.01, (4, 4))


# -------------------------------------------------------------------- power


def test_power_agrees_with_what_is_known() -> None:
    """The gap and deviation of many records: 12 runs decide with 88 %, 10 with 78 %."""
    assert s.power(0.0015, 0.0013, 12) == pytest.approx(0.88, abs=0.01)
    assert s.power(0.0015, 0.0013, 10) == pytest.approx(0.78, abs=0.01)
    assert s.power(0.0030, 0.0013, 3) == pytest.approx(0.29, abs=0.01)


def test_runs_needed_is_the_smallest_number_with_enough_power() -> None:
    n = s.needed(0.0015, 0.0013)
    assert n == 11
    assert s.power(0.0015, 0.0013, n) >= 0.8 > s.power(0.0015, 0.0013, n - 1)
    assert s.needed(0.0, 0.0013) is None
    assert s.needed(-0.1, 0.0013) is None
    assert s.needed(1e-9, 0.0013) is None
    assert s.needed(1.0, 0.0) == 2
