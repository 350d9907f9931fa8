"""The learning rate over the steps, against values worked out by hand."""

import itertools

import pytest

from speedrun.errors import UserError
from speedrun.recipes import LINEAGE, get_recipe
from speedrun.training.schedule import ScheduleConfig


def test_the_trapezoid_of_the_record_before_muon() -> None:
    """256 steps up, flat, 2,048 steps down to zero, which the step after the last would reach."""
    schedule = get_recipe("gpt2", "short").schedule
    at = lambda step: schedule.at(step).lr  # noqa: E731
    assert schedule.steps == 9536
    assert at(0) == 1 / 256
    assert at(254) == 255 / 256
    assert at(255) == at(256) == at(9536 - 2048 - 1) == at(9536 - 2048) == 1.0
    assert at(9536 - 2047) == 2047 / 2048
    assert at(9536 - 1024) == 0.5
    assert at(9535) == 1 / 2048
    assert schedule.tokens == 9536 * 524_288


def test_the_floor_is_where_the_cooldown_ends() -> None:
    schedule = ScheduleConfig(steps=100, warmup=0.0, cooldown=0.5, min_lr_ratio=0.1)
    assert schedule.at(0).lr == schedule.at(50).lr == 1.0
    assert schedule.at(75).lr == pytest.approx(0.5 + 0.1 * 0.5)
    assert schedule.at(100).lr == pytest.approx(0.1)


def test_no_warmup_and_no_cooldown_is_constant() -> None:
    schedule = ScheduleConfig(steps=10, warmup=0.0, cooldown=0.0)
    assert {schedule.at(s).lr for s in range(10)} == {1.0}


def test_the_rate_never_jumps_and_never_leaves_its_bounds() -> None:
    schedule = ScheduleConfig(steps=997, warmup=0.1, cooldown=0.6, min_lr_ratio=0.02)
    rates = [schedule.at(s).lr for s in range(997)]
    assert min(rates) > 0
    assert max(rates) == 1.0
    assert max(abs(a - b) for a, b in itertools.pairwise(rates)) < 0.02


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 0},
        {"batch_size": 0},
        {"seq_len": -1},
        {"warmup": 1.5},
        {"min_lr_ratio": -0.1},
        {"warmup": 0.6, "cooldown": 0.6},
    ],
)
def test_impossible_schedules_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(UserError):
        ScheduleConfig(**change)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*LINEAGE])
@pytest.mark.parametrize("total", [2, 20, 80, 3000])
def test_a_scaled_schedule_keeps_the_share_of_everything(name: str, total: int) -> None:
    for track in LINEAGE[name]:
        whole = get_recipe(name, track).schedule
        assert whole.scaled(whole.total) == whole
        scaled = whole.scaled(total)
        assert scaled.total == total
        assert scaled.scaled(total) == scaled
        for count in ("extra_steps", "momentum_warmup", "momentum_cooldown"):
            before, after = getattr(whole, count), getattr(scaled, count)
            assert (before > 0) == (after > 0)
            assert abs(after - before * total / whole.total) <= 1
