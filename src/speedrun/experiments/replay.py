"""Repeat the first steps of a run, or all of it, and compare every loss.

    speedrun verify races/NAME --replay --steps 20

On the same kind of CPU, with the same torch, number of threads and version of this program, the losses must be the same
to the last bit; elsewhere they may differ by rounding, which grows with the steps. One process repeats a run, so that
of a run in several processes may differ by rounding, too.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from speedrun.errors import UserError
from speedrun.experiments.plan import Plan, this_machine
from speedrun.experiments.verification import Run
from speedrun.tracks import get_track, own_track
from speedrun.training import Job, Loop, Options, Progress, Trainer, choose, hashes, runlog, warm_up
from speedrun.training import validation_loss as validate

TOLERANCE = 0.01  # of a loss, where bits may differ


@dataclass(frozen=True)
class Replay:
    steps: int
    inexact: str
    """Why bits may differ; empty: they had to agree."""
    worst: float
    problem: str | None


def replay_sides(folder: Path, plan: Plan, steps: int, data: Path | None) -> Iterator[tuple[str, Replay]]:
    """(name, outcome) of the first run of each side, by as many steps as there are at most; 0: all."""
    for side, recipe in plan.recipes.items():
        entry = next(e for e in plan.entries if e.side == side)
        run = Run.read(folder, entry)
        yield entry.name, replay(run, plan, min(steps or recipe.schedule.total, len(run.lines("train"))), data)


def replay(run: Run, plan: Plan, steps: int, data: Path | None) -> Replay:
    """Train the first `steps` steps of a run again, here."""
    folder = data or (Path(plan.data) if plan.data else None)
    track = own_track(folder, plan.target) if plan.track == "own" and folder else get_track(plan.track)
    tokens = track.locate()
    if hashes(tokens) != plan.files:
        raise UserError(f"The tokens in {tokens.path} are not those of the race; name the right folder with --data.")
    recipe, settings = plan.recipes[run.entry.side], plan.settings
    total = recipe.schedule.total
    if not 1 <= steps <= total:
        raise UserError(f"--steps is {steps}; the run has {total}, so choose 1 to {total}.")
    about = run.about
    machine = choose(settings.device, about.dtype, about.threads, settings.attention, recipe.model)
    options = Options(run.entry.seed, settings.compile, save=False, val_tokens=plan.val_tokens)
    with tempfile.TemporaryDirectory() as temporary:
        scratch = runlog.RunFolder.create(Path(temporary) / "replay", {}, console=lambda line: None)
        trainer = Trainer(Job(recipe, tokens, machine, options, scratch, Progress(total, quiet=True)))
        again: list[tuple[str, float]] = []
        try:
            warm_up(trainer)
            with contextlib.closing(Loop(trainer).batches()) as batches:
                for step in range(steps):
                    again.append((f"step {step}", trainer.step(recipe.schedule.at(step), batches.next())))
            stored = [m["loss"] for m in run.lines("train")[:steps]]
            if steps == total:
                again += [(f"the final {split} loss", validate(trainer, split, total)) for split in plan.splits]
                stored += [run.result.losses[split] for split in plan.splits]
        finally:
            torch.compiler.set_stance("default")
    here, there = this_machine(), plan.machine
    inexact = ""
    if plan.source_sha256 != runlog.source_sha256():
        inexact = "another version of speedrun trained it"
    elif here.devices != ("cpu",) or any(
        getattr(here, k) != getattr(there, k) for k in ("cpu", "torch", "cpu_capability", "devices")
    ):
        inexact = "another kind of machine"
    elif run.about.world_size > 1:
        inexact = f"{run.about.world_size} processes trained it, one repeats it here"
    allowed = TOLERANCE if inexact else 0.0
    problem, worst = None, 0.0
    for (what, mine), theirs in zip(again, stored, strict=True):
        worst = max(worst, abs(mine - theirs))
        if problem is None and not abs(mine - theirs) <= allowed:
            problem = f"{run.entry.name}: {what} gives {mine!r} here, but {theirs!r} is stored"
    return Replay(steps, inexact, worst, problem)
