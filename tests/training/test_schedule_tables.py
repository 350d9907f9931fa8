"""The records' schedules, step by step at every change, against numbers worked out by hand from their descriptions."""

import math

import pytest

from speedrun.errors import UserError
from speedrun.model.gpt import Windows
from speedrun.training.schedule import ScheduleConfig

BLOCK = 128

# The short track's record of January 2026: 1,800 scheduled steps and 40 more.
SHORT = ScheduleConfig(
    steps=1800, extra_steps=40, seq_len=2048, warmup=0.0, cooldown=0.5, min_lr_ratio=0.1, batch_ramp=(64, 128, 192),
    lr_ramp=(1.0, 1.52, 1.73), window_ramp=(3 * BLOCK, 7 * BLOCK, 11 * BLOCK), window_extra=13 * BLOCK,
    window_final=20 * BLOCK, momentum_warmup=300, momentum_cooldown=50, mtp_tokens=3, untie_at=2 / 3,
)  # fmt: skip

# The medium track's record of the same week: 4,700 and 40.
MEDIUM = ScheduleConfig(
    steps=4700, extra_steps=40, seq_len=4096, warmup=0.0, cooldown=0.7, min_lr_ratio=0.1,
    batch_ramp=(32, 64, 96, *[128] * 9), lr_ramp=(1.0, 1.52, 1.73, *[2.0] * 9),
    window_ramp=tuple(BLOCK * b for b in (3, 7, 11, 13, 15, 17, 19, 21, 23, 23, 23, 23)), window_short=11 * BLOCK,
    window_final=27 * BLOCK, momentum_warmup=300, momentum_cooldown=50, mtp_tokens=3, mtp_until=0.25, untie_at=1 / 6,
)  # fmt: skip


@pytest.mark.parametrize(
    ("step", "rows"), [(0, 64), (599, 64), (600, 128), (1199, 128), (1200, 192), (1799, 192), (1800, 192), (1839, 192)]
)
def test_short_batches(step, rows) -> None:
    assert SHORT.at(step).batch_size == rows


def test_tokens_in_total() -> None:
    assert SHORT.tokens == pytest.approx(487.6e6, rel=1e-3)
    assert MEDIUM.tokens == pytest.approx(2.177e9, rel=1e-3)


@pytest.mark.parametrize(
    ("step", "lr"),
    [
        (0, 1.0), (600, 1.0), (601, 1.52), (899, 1.52), (900, 1.52), (1200, 1.0467), (1201, 1.1849), (1500, 0.643),
        (1800, 0.1), (1839, 0.1),
    ],
)  # fmt: skip
def test_short_learning_rate(step, lr) -> None:
    assert SHORT.at(step).lr == pytest.approx(lr, rel=2e-3)


@pytest.mark.parametrize(
    ("step", "long", "short"),
    [(0, 3, 1), (599, 3, 1), (600, 7, 3), (1200, 11, 5), (1799, 11, 5), (1800, 13, 6), (1839, 13, 6)],
)
def test_short_windows(step, long, short) -> None:
    assert SHORT.at(step).windows == Windows(short * BLOCK, long * BLOCK)


def test_the_extension_is_flat_and_has_its_own_window() -> None:
    """Two mistakes of an earlier record: the rate went on falling in the extension, and its window came too late."""
    extension = [SHORT.at(s) for s in range(1800, 1840)]
    assert {stage.lr for stage in extension} == {0.1}
    assert {stage.windows for stage in extension} == {Windows(6 * BLOCK, 13 * BLOCK)}
    before = ScheduleConfig(
        steps=2245, extra_steps=40, cooldown=0.5, warmup=0.0, min_lr_ratio=0.1, seq_len=2048,
        window_ramp=(3 * BLOCK, 7 * BLOCK, 11 * BLOCK), window_extra=13 * BLOCK, window_final=20 * BLOCK,
    )  # fmt: skip
    assert {before.at(s).lr for s in range(2245, 2285)} == {0.1}
    assert before.at(2244).lr == pytest.approx(0.1, abs=1e-3)
    changes = [s for s in range(1, 2285) if before.at(s).windows != before.at(s - 1).windows]
    assert changes == [749, 1497, 2245]


def test_only_the_last_validation_sees_the_final_window() -> None:
    assert SHORT.after(1750).windows == Windows(5 * BLOCK, 11 * BLOCK)
    assert SHORT.after(1840).windows == Windows(6 * BLOCK, 20 * BLOCK)
    assert SHORT.after(1840).window_history == tuple(BLOCK * b for b in (3, 7, 11, 13))


def test_medium_changes_come_at_the_right_steps() -> None:
    rows = [s for s in range(1, MEDIUM.total) if MEDIUM.at(s).batch_size != MEDIUM.at(s - 1).batch_size]
    assert rows == [392, 784, 1175]
    windows = [s for s in range(1, MEDIUM.total) if MEDIUM.at(s).windows != MEDIUM.at(s - 1).windows]
    assert windows == [392, 784, 1175, 1567, 1959, 2350, 2742, 3134]
    assert MEDIUM.at(3134).windows == Windows(11 * BLOCK, 23 * BLOCK)
    assert [MEDIUM.at(s).windows.short // BLOCK for s in (1567, 1959, 2350, 2742)] == [7, 8, 9, 10]  # type: ignore[union-attr]
    assert MEDIUM.after(4740).windows == Windows(11 * BLOCK, 27 * BLOCK)


@pytest.mark.parametrize(
    ("step", "lr"),
    [(391, 1.0), (392, 1.52), (784, 1.73), (1175, 1.73), (1176, 2.0), (1410, 2.0), (4700, 0.1), (4739, 0.1)],
)
def test_medium_learning_rate(step, lr) -> None:
    assert MEDIUM.at(step).lr == pytest.approx(lr, rel=1e-3)


@pytest.mark.parametrize(
    ("step", "momentum"), [(0, 0.85), (150, 0.90), (300, 0.95), (1000, 0.95), (1790, 0.95), (1839, 0.852)]
)
def test_momentum_rises_and_falls(step, momentum) -> None:
    assert SHORT.at(step).momentum == pytest.approx(momentum, abs=1e-9)


@pytest.mark.parametrize(
    ("schedule", "step", "weights"),
    [
        (SHORT, 0, (1, 0.5, 0.25)),
        (SHORT, 300, (1, 0.5, 0.125)),
        (SHORT, 599, (1, 0.5, 0.25 / 600)),
        (SHORT, 600, (1, 0.5)),
        (SHORT, 900, (1, 0.25)),
        (SHORT, 1200, (1,)),
        (SHORT, 1839, (1,)),
        (MEDIUM, 391, (1, 0.5, 0.25 * (1 - 1173 / 1175))),
        (MEDIUM, 392, (1, 0.5 * (1 - (3 * 392 / 1175 - 1)))),
        (MEDIUM, 783, (1, 0.5 * (2 - 3 * 783 / 1175))),
        (MEDIUM, 784, (1,)),
    ],
)
def test_weights_of_the_predicted_tokens(schedule, step, weights) -> None:
    assert schedule.at(step).mtp_weights == pytest.approx(weights)


def test_the_split_is_odd_and_final() -> None:
    assert (SHORT.untie_step, MEDIUM.untie_step) == (1201, 785)
    assert [SHORT.at(s).tied for s in (0, 1201, 1202)] == [True, True, False]
    assert [s for s in range(SHORT.total) if SHORT.at(s).untie] == [1201]
    assert SHORT.after(1202).tied is False  # a validation right after the splitting step sees the split head


def test_the_cubic_window() -> None:
    """3,456 tokens in the end; blocks at tenths of the run."""
    cubic = ScheduleConfig(steps=1000, seq_len=3456, window_cubic=27 * BLOCK)
    blocks = [cubic.at(s).windows.long // BLOCK for s in (0, 100, 200, 300, 500, 700, 800, 900)]  # type: ignore[union-attr]
    assert blocks == [1, 7, 11, 13, 14, 15, 17, 21]
    assert (
        ScheduleConfig(steps=10, extra_steps=1, seq_len=3456, window_cubic=27 * BLOCK).at(10).windows.long == 27 * BLOCK
    )  # type: ignore[union-attr]


def test_the_trapezoid() -> None:
    """7,000 steps, 250 up, 2,000 down."""
    old = ScheduleConfig(steps=7000, warmup=250 / 7000, cooldown=2000 / 7000)
    for step, lr in ((0, 1 / 250), (248, 249 / 250), (249, 1), (4999, 1), (5000, 1), (6000, 0.5), (6999, 1 / 2000)):
        assert old.at(step).lr == pytest.approx(lr)
    assert old.at(5000).momentum is None
    assert old.at(5000).windows is None


def test_the_warm_up_visits_every_shape_once() -> None:
    visits = SHORT.visits()
    assert len({v.shape for v in visits}) == len(visits)
    assert {SHORT.at(s).shape for s in range(SHORT.total)} == {v.shape for v in visits}
    assert [v.step for v in visits] == [0, 600, 1200, 1202, 1800]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"mtp_tokens": 2}, "schedule.mtp_tokens is 2; it must be one of: 1, 3"),
        ({"window_ramp": (100,)}, "A window of 100 tokens is no multiple of schedule.window_block 128"),
        ({"window_ramp": (128,), "window_cubic": 128}, "exclude each other"),
        ({"window_final": 128}, "need a window_ramp or window_cubic"),
        ({"batch_ramp": (0, 1)}, "schedule.batch_ramp is (0, 1); every value must be at least 1"),
        ({"extra_steps": -1}, "schedule.extra_steps is -1; it must be at least 0"),
        ({"momentum_low": math.nan}, "schedule.momentum_low is nan"),
    ],
)
def test_impossible_schedules_are_refused(changes, sentence) -> None:
    with pytest.raises(UserError) as e:
        ScheduleConfig(**changes)
    assert sentence in str(e.value)
