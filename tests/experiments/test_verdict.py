"""Verdicts over made-up runs: every word, its reason, and what a person reads."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from speedrun.experiments.plan import Plan
from speedrun.experiments.verdict import RunSummary, decided, judge, render

TARGET = 3.28


@pytest.fixture
def plan(raced: Path) -> Plan:
    """Five blocks against a target of 3.28, with one look at the end."""
    plan = Plan.read(raced)
    return dataclasses.replace(plan, target=TARGET, seeds=tuple(range(10)), looks=(5,), labels={"A": "new", "B": "old"})


def rows(plan: Plan, a: tuple[float, float], b: tuple[float, float], *, noise: float = 0.001) -> list[RunSummary]:
    """Runs of (mean loss, mean seconds) of each side, with a little noise."""
    rng = np.random.default_rng(0)
    made = []
    for entry in plan.entries:
        loss, seconds = {"A": a, "B": b}[entry.side]
        made.append(
            RunSummary(
                name=entry.name,
                side=entry.side,
                block=entry.block,
                seed=entry.seed,
                status="ok",
                reason=None,
                loss=loss + 0.001 * rng.standard_normal(),
                shadow=loss + 0.05,
                time=seconds * (1 + noise * rng.standard_normal()),
                steps=10,
                tokens=100,
                losses_sha256=f"{entry.seed}",
            )
        )
    return made


def word(plan: Plan, found: list[RunSummary], look: int = 5) -> tuple[str, str]:
    verdict = judge(plan, found, look, "0" * 64)
    return verdict.verdict, verdict.why


def test_faster_claims_the_lower_end(plan: Plan) -> None:
    verdict = judge(plan, rows(plan, (3.27, 100.0), (3.27, 103.0)), 5, "0" * 64)
    assert verdict.verdict == "faster"
    assert 1.02 < verdict.time.low < 1.03 < verdict.time.high < 1.04
    assert f"new is at least {verdict.time.low:.3f} times as fast as old (99 % confidence, 5 blocks)" in verdict.why
    assert decided(verdict)


def test_slower(plan: Plan) -> None:
    said, why = word(plan, rows(plan, (3.27, 103.0), (3.27, 100.0)))
    assert said == "slower"
    assert "at most 0.9" in why


def test_the_same_times_are_no_difference(plan: Plan) -> None:
    verdict = judge(plan, rows(plan, (3.27, 100.0), (3.27, 100.0)), 5, "0" * 64)
    assert verdict.verdict == "inconclusive"
    assert verdict.time.outcome == "no difference"
    assert "no difference in time was found between new and old" in verdict.why
    assert verdict.time.low < 1 < verdict.time.high
    assert not decided(verdict)


def test_a_small_gain_in_much_noise_says_how_many_runs_would_decide(plan: Plan) -> None:
    verdict = judge(plan, rows(plan, (3.27, 100.0), (3.27, 102.0), noise=0.03), 5, "0" * 64)
    assert verdict.verdict == "inconclusive"
    assert verdict.needed["time"] > 10
    assert f"times: with these deviations {verdict.needed['time'] - 10} more runs would decide" in render(verdict)
    assert 0.01 < verdict.noise_floor < 0.05
    assert f"noise            {100 * verdict.noise_floor:.2f} % between identical runs".split() == (
        next(line for line in render(verdict).splitlines() if line.startswith("noise")).split()
    )


def test_nothing_is_faster_without_being_valid(plan: Plan) -> None:
    assert word(plan, rows(plan, (3.2797, 50.0), (3.27, 100.0)))[0] == "inconclusive"
    said, why = word(plan, rows(plan, (3.30, 50.0), (3.27, 100.0)))
    assert said == "failed"
    assert "of new is above the target 3.28" in why


def test_nothing_is_faster_than_something_invalid(plan: Plan) -> None:
    said, why = word(plan, rows(plan, (3.27, 50.0), (3.30, 100.0)))
    assert said == "valid"
    assert "but old is not" in why
    assert "no time is compared" in why


def test_one_failed_run_fails_the_race(plan: Plan) -> None:
    found = rows(plan, (3.27, 50.0), (3.27, 100.0))
    found[3] = dataclasses.replace(
        found[3], status="failed", reason="the loss of step 3 is nan", loss=None, shadow=None
    )
    verdict = judge(plan, found, 5, "0" * 64)
    assert (verdict.verdict, verdict.why) == ("failed", "1 of 10 runs of new failed")
    assert verdict.sides["A"].p is None
    assert verdict.time is None
    assert decided(verdict)
    assert "failed: the loss of step 3 is nan" in render(verdict)


def test_an_early_look_is_stricter(plan: Plan) -> None:
    """The same runs that decide at their own end do not decide as the second of five looks."""
    often = dataclasses.replace(plan, looks=(2, 3, 4, 5))
    alone = dataclasses.replace(plan, seeds=tuple(range(6)), looks=(3,))
    found = rows(plan, (3.27, 100.0), (3.27, 101.0), noise=0.002)[:12]
    assert word(alone, found, 3)[0] == "faster"
    assert word(often, found, 3)[0] == "inconclusive"
    high = rows(plan, (3.2805, 100.0), (3.27, 100.0))
    assert word(often, high[:8], 2)[0] == "inconclusive"  # above the target, but there are more runs to come
    assert word(often, high, 5)[0] == "failed"


def test_systems_races_compare_bits(plan: Plan) -> None:
    systems = dataclasses.replace(plan, kind="systems")
    found = rows(plan, (3.30, 100.0), (3.30, 103.0))  # above the target: that is the predecessor's affair
    assert word(systems, found)[0] == "faster"
    found[0] = dataclasses.replace(found[0], losses_sha256="another")
    said, why = word(systems, found)
    assert said == "failed"
    assert "not bit-equal for 1 of 10 seeds" in why


def test_the_text_is_short_and_complete(plan: Plan) -> None:
    text = render(judge(plan, rows(plan, (3.27, 100.0), (3.27, 103.0)), 5, "0" * 64))
    head, runs = text.split("\n\nrun ")
    assert head.startswith("FASTER: ")
    assert len(head.splitlines()) <= 12
    for name in ("loss", "shadow", "time", "ratio", "noise"):
        assert f"\n{name} " in head
    assert "p=0.0000: valid" in head
    assert len(runs.splitlines()) == 1 + 20
    assert all(entry.name in runs for entry in plan.entries)
