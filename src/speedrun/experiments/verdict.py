"""The verdict of a race, from its plan and its run folders alone.

valid          the mean loss is at or below the target, one-sided t-test p < alpha
faster         both sides are valid, and the interval of the ratio of times lies above 1; its lower end is the claim
slower         the same the other way round
inconclusive   neither can be said; how many runs would probably decide is
failed         a run failed, or the mean loss is above the target
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speedrun.experiments import statistics
from speedrun.experiments.plan import Entry, Plan
from speedrun.training import runlog

VERDICT, TEXT = "verdict.json", "verdict.txt"


# -------------------------------------------------------------------- verdict.json


@dataclass(frozen=True)
class RunSummary:
    """What one run contributes."""

    name: str
    side: str
    block: int
    seed: int
    status: str
    reason: str | None
    loss: float | None
    shadow: float | None
    time: float
    steps: int
    tokens: int
    losses_sha256: str
    """Of every loss on its way, bit by bit."""


@dataclass(frozen=True)
class Moments:
    std: float
    mean: float


@dataclass(frozen=True)
class Side:
    label: str
    runs: int
    failed: int
    loss: Moments | None
    p: float | None
    valid: bool
    shadow: Moments | None
    time: Moments | None


@dataclass(frozen=True)
class Look:
    after: int
    of: tuple[int, ...]
    unit: str
    loss: float
    """p below which losses are valid at this look."""
    time: float
    """The same of times."""


@dataclass(frozen=True)
class EqualPairs:
    """Seeds that gave both sides the same losses, every one of them, to the last bit."""

    all: int
    equal: int


@dataclass(frozen=True)
class TimeRatio(statistics.Ratio):
    outcome: str
    ratios: tuple[float, ...]


@dataclass(frozen=True)
class Verdict:
    verdict: str
    why: str
    kind: str
    track: str
    target: float
    look: Look
    sides: dict[str, Side]
    both: str | None
    pairs: EqualPairs | None
    time: TimeRatio | None
    noise_floor: float | None
    needed: dict[str, int | None]
    """Runs of a side that would probably decide what is open; None: more than 1000."""
    runs: tuple[RunSummary, ...]
    plan_sha256: str

    @property
    def proved(self) -> bool:
        return self.verdict in ("valid", "faster")

    def to_json(self) -> dict[str, Any]:
        return dict(json.loads(json.dumps(runlog.to_jsonable(self))))


# -------------------------------------------------------------------- runs


def read_summary(folder: Path, entry: Entry) -> RunSummary:
    result = runlog.read_result(folder)
    ok = result.status == "ok"
    losses = [(m["kind"], m["step"], m["loss"]) for m in runlog.read_metrics(folder) if m["kind"] in ("train", "val")]
    return RunSummary(
        name=entry.name,
        side=entry.side,
        block=entry.block,
        seed=entry.seed,
        status=result.status,
        reason=result.reason,
        loss=result.val_loss if ok else None,
        shadow=result.losses.get("shadow") if ok else None,
        time=result.train_time,
        steps=result.steps,
        tokens=result.tokens,
        losses_sha256=hashlib.sha256(json.dumps(runlog.to_jsonable(losses)).encode()).hexdigest()[:16],
    )


# -------------------------------------------------------------------- judging


def judge(plan: Plan, runs: Sequence[RunSummary], look: int, plan_sha256: str) -> Verdict:
    """The verdict over the runs that a look sees."""
    loss_level, time_level = plan.levels(look)
    pairs = _equal_pairs(runs) if plan.kind == "systems" else None
    sides = {side: _side(plan, side, [r for r in runs if r.side == side], loss_level, pairs) for side in plan.recipes}
    time = _time(plan, runs, time_level) if plan.paired and not any(s.failed for s in sides.values()) else None
    word, why = _word(plan, sides, time, pairs, last=look == plan.looks[-1])
    times = [[r.time for r in runs if r.side == side and r.status == "ok"] for side in sides]
    return Verdict(
        verdict=word,
        why=why,
        kind=plan.kind,
        track=plan.track,
        target=plan.target,
        look=Look(look, plan.looks, plan.unit, loss_level, time_level),
        sides=sides,
        both=plan.labels.get("both"),
        pairs=pairs,
        time=time,
        noise_floor=statistics.noise_floor(*times),
        needed=_needed(plan, sides, time),
        runs=tuple(runs),
        plan_sha256=plan_sha256,
    )


def decided(verdict: Verdict) -> bool:
    """Whether more runs could not change it, so that the race may end at this look."""
    wanted = ("faster", "slower") if "B" in verdict.sides else ("valid",)
    return verdict.verdict in wanted or any(side.failed for side in verdict.sides.values())


def _side(plan: Plan, side: str, runs: Sequence[RunSummary], level: float, pairs: EqualPairs | None) -> Side:
    good = [r for r in runs if r.status == "ok"]
    losses = [r.loss for r in good if r.loss is not None]
    p, valid = None, False
    if len(good) == len(runs):  # a failed run has no loss, and leaving it out would flatter
        p = float(statistics.below(np.array(losses), plan.target))
        valid = p < level and float(np.mean(losses)) <= plan.target
        valid = valid if pairs is None else pairs.equal == pairs.all
    return Side(
        label=plan.labels[side],
        runs=len(runs),
        failed=len(runs) - len(good),
        loss=_moments(losses),
        p=p,
        valid=valid,
        shadow=_moments([r.shadow for r in good if r.shadow is not None]),
        time=_moments([r.time for r in good]),
    )


def _moments(values: list[float]) -> Moments | None:
    return Moments(*statistics.std_mean(values)) if len(values) >= statistics.FEWEST else None


def _equal_pairs(runs: Sequence[RunSummary]) -> EqualPairs:
    seeds = {r.seed for r in runs}
    return EqualPairs(len(seeds), sum(len({r.losses_sha256 for r in runs if r.seed == seed}) == 1 for seed in seeds))


def _time(plan: Plan, runs: Sequence[RunSummary], level: float) -> TimeRatio:
    blocks = sorted({r.block for r in runs})
    times = {
        side: np.array([[r.time for r in runs if (r.side, r.block) == (side, b)] for b in blocks])
        for side in plan.recipes
    }
    logs = statistics.log_ratios(times["A"], times["B"])
    found = statistics.compare(logs, level)
    outcome = "no difference"
    if found.p_faster < level:
        outcome = "faster"
    elif found.p_slower < level:
        outcome = "slower"
    return TimeRatio(**vars(found), outcome=outcome, ratios=tuple(np.exp(logs).tolist()))


def _word(
    plan: Plan, sides: dict[str, Side], time: TimeRatio | None, pairs: EqualPairs | None, *, last: bool
) -> tuple[str, str]:
    """The verdict and its reason in one sentence."""
    for side in sides.values():
        if side.failed:
            return "failed", f"{side.failed} of {side.runs} runs of {side.label} failed"
    a = sides["A"]
    if pairs is not None and pairs.equal < pairs.all:
        odd = pairs.all - pairs.equal
        return "failed", f"losses are not bit-equal for {odd} of {pairs.all} seeds, so this is no systems-only change"
    assert a.loss  # of at least two runs, none of which failed
    if not a.valid:
        mean = a.loss.mean
        if last and mean > plan.target:
            return "failed", f"the mean loss {mean:.4f} of {a.label} is above the target {plan.target:g}"
        return "inconclusive", f"the losses of {a.label} do not prove the target {plan.target:g} (p={a.p:.4f})"
    proof = "bit-equal losses" if pairs is not None else f"p={a.p:.4f}"
    if time is None:
        return "valid", f"the mean loss {a.loss.mean:.4f} of {a.label} is below the target {plan.target:g} ({proof})"
    b = sides["B"]
    if not b.valid:
        return "valid", f"{a.label} is valid ({proof}), but {b.label} is not (p={b.p:.4f}): no time is compared"
    sure = f"{100 * (1 - time.level):.4g} % confidence, {time.blocks} blocks"
    if time.outcome == "faster":
        return "faster", f"{a.label} is at least {time.low:.3f} times as fast as {b.label} ({sure})"
    if time.outcome == "slower":
        return "slower", f"{a.label} is slower than {b.label}, at most {time.high:.3f} times as fast ({sure})"
    return "inconclusive", f"no difference in time was found between {a.label} and {b.label} ({sure})"


def _needed(plan: Plan, sides: dict[str, Side], time: TimeRatio | None) -> dict[str, int | None]:
    """Runs of a side that would probably decide what is still open, if effects and deviations are as they look now."""
    needed: dict[str, int | None] = {}
    for name, side in sides.items():
        if side.loss and not side.valid and not side.failed and plan.kind == "full":
            needed[f"loss {name}"] = statistics.needed(plan.target - side.loss.mean, side.loss.std, plan.alpha)
    if time is not None and time.outcome == "no difference":
        blocks = statistics.needed(abs(math.log(time.ratio)), time.std, plan.alpha)
        needed["time"] = None if blocks is None else 2 * blocks
    return needed


# -------------------------------------------------------------------- as text


def render(verdict: Verdict) -> str:
    """A summary, and the runs below it."""
    v, sides, shown = verdict, verdict.sides, statistics.shown
    lines = [f"{v.verdict.upper()}: {v.why}", ""]
    width = max(len(side.label) for side in sides.values())

    def line(name: str, label: str, words: str) -> None:
        lines.append(f"{name:8}{label:{width}}  {words}".rstrip())

    for side in sides.values():
        loss, mark = side.loss, "valid" if side.valid else "not valid"
        if loss is None:
            line("loss", side.label, f"{side.failed} of {side.runs} runs failed")
            continue
        p = "p=-" if side.p is None else f"p={side.p:.4f}"
        proof = mark if v.pairs is None else f"bit-equal for {v.pairs.equal} of {v.pairs.all} seeds"
        numbers = f"mean={shown(loss.mean)} std={shown(loss.std)} n={side.runs - side.failed}"
        line("loss", side.label, f"{numbers} target={v.target:g} {p}: {proof}")
    for side in sides.values():
        if side.shadow:
            line("shadow", side.label, f"mean={shown(side.shadow.mean)} std={shown(side.shadow.std)}")
    for side in sides.values():
        if side.time:
            line("time", side.label, f"mean={shown(side.time.mean)} std={shown(side.time.std)} seconds")
    time = v.time
    if time:
        p = f"p={time.p_slower if time.outcome == 'slower' else time.p_faster:.4f}"
        line("ratio", "", f"{time.ratio:.4f} ({time.low:.4f} to {time.high:.4f}) over {time.blocks} blocks, {p}")
    if v.noise_floor is not None:
        line("noise", "", f"{100 * v.noise_floor:.2f} % between identical runs")
    for what, runs in v.needed.items():
        now = sides["A"].runs
        name = "times" if what == "time" else f"losses of {sides[what.removeprefix('loss ')].label}"
        if runs is None:
            more = "no number of runs up to 1000 would decide"
        elif runs <= now:
            more = f"as many runs again would probably decide ({now} a side)"
        else:
            more = f"with these deviations {runs - now} more runs would decide"
        line("power", "", f"{name}: {more}")
    if v.both:
        line("both", "", f"changed on both sides: {v.both}")
    look = v.look
    if len(look.of) > 1:
        line("look", "", f"after {look.unit} {look.after} of {look.of[-1]}, declared: {', '.join(map(str, look.of))}")
    lines += ["", "run    seed        loss     shadow   seconds    status"]
    for r in v.runs:
        found, shadow = ("-" if x is None else f"{x:.4f}" for x in (r.loss, r.shadow))
        status = r.status if r.status == "ok" else f"{r.status}: {r.reason}"
        lines.append(f"{r.name:6} {r.seed:<11} {found:8} {shadow:8} {r.time:<10.3f} {status}")
    return "\n".join(lines) + "\n"
