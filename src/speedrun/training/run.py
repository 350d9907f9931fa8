"""One run from the outside: find or make its folder, train, and hand back the result.

start(...)   a fresh run folder
resume(...)  an existing one, from its newest good checkpoint
"""

import contextlib
import dataclasses
import itertools
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import speedrun
from speedrun.data import TokenFolder, fineweb
from speedrun.errors import UserError, plural
from speedrun.files import locked
from speedrun.model import GPT
from speedrun.optim import Comm
from speedrun.tracks import Track
from speedrun.training import checkpoint, scale
from speedrun.training.config import Options, Recipe, differences, to_dict, with_fields
from speedrun.training.device import Machine
from speedrun.training.distributed import handshake, joined
from speedrun.training.job import Job
from speedrun.training.loop import Loop
from speedrun.training.progress import Progress
from speedrun.training.runlog import RUN, NullRunFolder, Result, RunFolder, read_metrics, read_result, read_run
from speedrun.training.step import Trainer

WORTH_COMPILING = 100  # steps; compiling takes as long as some hundred steps of a small model


@dataclass(frozen=True)
class Outcome:
    folder: Path
    result: Result
    target: float | None

    @property
    def reached(self) -> bool:
        loss = self.result.val_loss
        return self.target is not None and loss is not None and loss <= self.target


def fit_to_tokens(recipe: Recipe, tokens: TokenFolder, track: Track) -> Recipe:
    """On your own tokens the vocabulary is whatever the tokens need; on a track it is part of the recipe."""
    if track.name == "own" and tokens.vocab_size != recipe.model.vocab_size:
        return with_fields(recipe, {"model.vocab_size": tokens.vocab_size})
    return recipe


def check_supply(recipe: Recipe, tokens: TokenFolder, track: Track) -> None:
    """On a track that is seen once, too few tokens are told before the run, not after hours of it."""
    if track.once:
        s = recipe.schedule
        fineweb.check_supply(tokens, recipe.loader, tokens=s.tokens, seq_len=s.seq_len)


def check_rules(recipe: Recipe, track: Track) -> None:
    """Refuse what the track's rules forbid."""
    if recipe.compiler.coordinate_descent and not track.compiler_flags:
        raise UserError(
            f"compiler.coordinate_descent is True, but the rules of track {track.name!r} allow no extra compiler "
            "flags; pass --compiler.coordinate-descent False."
        )


def worth_compiling(recipe: Recipe, machine: Machine) -> bool:
    """Whether torch.compile is used by default: on a CPU a short run is sooner done without it."""
    return machine.device.type != "cpu" or recipe.schedule.total >= WORTH_COMPILING


def default_checkpoint_every(recipe: Recipe, track: Track) -> int | None:
    """At each validation, unless the clock of the track counts checkpoints."""
    return recipe.validation.every if track.checkpoints else None


def start(
    recipe: Recipe, track: Track, machine: Machine, options: Options, *, out: Path | None = None, quiet: bool = False
) -> Outcome:
    check_rules(recipe, track)
    scale.check(recipe)
    path = out or new_run_path(recipe, track, options.seed)
    return _run(recipe, track, machine, options, path, quiet, fresh=True)


def _run(
    recipe: Recipe, track: Track, machine: Machine, options: Options, path: Path, quiet: bool, *, fresh: bool
) -> Outcome:
    """Meet the other ranks, agree on what is done, and do it: a `fresh` run, or the one in `path`."""
    tokens = track.locate()
    recipe = fit_to_tokens(recipe, tokens, track)
    check_supply(recipe, tokens, track)
    options = dataclasses.replace(options, val_tokens=track.val_tokens)
    with joined(machine.device, options.timeout, options.backend) as (comm, watchdog):
        check_ranks(recipe, comm.size)
        notices: list[str] = []
        saved = None if fresh else checkpoint.newest_good(NullRunFolder(path).checkpoints, notice=notices.append)
        if saved is not None:
            check_fits(saved, recipe)
        handshake(comm, facts(recipe, tokens, machine, options) | {"checkpoint": saved and saved.step})
        machine = as_first(machine, comm)
        path = comm.all_gather_object(path)[0] if fresh else path  # its name has the time of day
        progress = Progress(recipe.schedule.total, quiet=quiet or comm.rank > 0)
        job = Job(recipe, tokens, machine, options, NullRunFolder(path), progress, comm, watchdog)
        if comm.rank:
            result = _train(job, saved)
        else:
            result = _start(job, track) if fresh else _resume(job, saved, notices)
        return Outcome(path, result, track.target)


def _start(job: Job, track: Track) -> Result:
    """Make the run folder and train in it; remove it again if not a single step was done."""
    path, tokens, machine = job.folder.path, job.tokens, job.machine
    description = {
        "recipe": to_dict(job.recipe),
        "track": track.name,
        "target": track.target,
        "seed": job.options.seed,
        "data": {"folder": str(tokens.path.resolve()), "files": hashes(tokens)},
        "options": job.options,
        "machine": machine.lines(),
        "threads": machine.threads,
        "dtype": machine.dtype_name,
        "world_size": job.comm.size,
    }
    made = [p for p in (path, *path.parents) if not p.exists()]
    folder = RunFolder.create(path, description, console=job.progress.line)
    with only_here(path):
        try:
            return _train(dataclasses.replace(job, folder=folder))
        except (UserError, KeyboardInterrupt):
            if not read_metrics(path, "train"):  # no step was done: leave everything as it was
                for inside in path.iterdir():
                    shutil.rmtree(inside) if inside.is_dir() else inside.unlink()
                for empty in made:
                    with contextlib.suppress(OSError):
                        empty.rmdir()
            raise


def resume(
    path: Path, recipe: Recipe, track: Track, machine: Machine, options: Options, *, quiet: bool = False
) -> Outcome:
    """Continue the run in `path`, which must have been started with this recipe, track, data and seed.

    The record beside it stays the one it began with, so that its log is of one piece.
    """
    check_rules(recipe, track)
    scale.check(recipe)
    problem = obstacle(path, recipe, track, options.seed)
    if problem:
        raise UserError(problem)
    options = dataclasses.replace(options, curve=read_run(path).options.curve)
    return _run(recipe, track, machine, options, path, quiet, fresh=False)


def _resume(job: Job, saved: checkpoint.Checkpoint | None, notices: list[str]) -> Result:
    """Cut the run folder back to the checkpoint, and train on from there."""
    path = job.folder.path
    with only_here(path):
        folder = RunFolder.open(path, console=job.progress.line)
        about = read_run(path)
        for notice in notices:  # only now: a resume that cannot go on must not even touch the log
            folder.log(notice)
        counts = (("rank", job.comm.size, about.world_size), ("thread", job.machine.threads, about.threads))
        for noun, here, before in counts:
            if here != before:
                folder.log(f"{plural(here, noun)}, {before} before: losses may differ in the last bits")
        step = 0 if saved is None else saved.step
        lost = step - sum(line["step"] < step for line in read_metrics(path, "train"))  # damage is refused here
        if lost > 0:
            folder.log(f"metrics.jsonl lacks {lost} of the {step} steps that were trained before")
        checkpoint.drop_later(folder.checkpoints, step, folder.log)
        folder.cut_back(step, "resumed")
        return _train(dataclasses.replace(job, folder=folder), saved)


def _train(job: Job, saved: checkpoint.Checkpoint | None = None) -> Result:
    tokenizer, copy = job.tokens.tokenizer_path, job.folder.path / "tokenizer.json"
    if job.comm.rank == 0 and tokenizer.exists() and not copy.exists():
        shutil.copyfile(tokenizer, copy)
    with job.progress:
        job.progress.at("building the model")
        return Loop(Trainer(job)).run(saved)


def check_fits(saved: checkpoint.Checkpoint, recipe: Recipe) -> None:
    """A checkpoint that is not of this model is refused before the run folder is touched."""
    with torch.device("meta"):
        model = GPT(recipe.model, 1)
    weights = saved.weights
    for name, p in model.named_parameters():
        stored = weights.get(name)
        if stored is None or stored.shape != p.shape:
            raise UserError(
                f"{saved.path} does not fit the model of run.json: {name} is missing or of another shape. "
                "Restore run.json from a copy."
            )


def check_ranks(recipe: Recipe, ranks: int) -> None:
    """A rank that never gets a row would cost a core or a GPU and do nothing."""
    rows = min(rows for rows, _ in recipe.schedule.shapes())
    if ranks > rows:
        raise UserError(
            f"There are {ranks} ranks, but a step has only {plural(rows, 'row')} to deal out; "
            f"start at most {rows}, or raise the rows of the schedule."
        )


def as_first(machine: Machine, comm: Comm) -> Machine:
    """All ranks compute in the arithmetic of rank 0: a trial may end differently from one process to the next."""
    return dataclasses.replace(machine, dtype=getattr(torch, comm.all_gather_object(machine.dtype_name)[0]))


def facts(recipe: Recipe, tokens: TokenFolder, machine: Machine, options: Options) -> dict[str, Any]:
    """What all ranks of a run must have in common."""
    packages = {"speedrun": speedrun.__version__, "torch": torch.__version__}
    return {
        "recipe": to_dict(recipe),
        "data": hashes(tokens),
        "seed": options.seed,
        "packages": packages,
        "attention": machine.attention,  # a kernel may load on one rank and not on another
        "order": options.order,  # ranks that exchange in different orders would wait for each other
    }


def only_here(path: Path) -> AbstractContextManager[object]:
    """Two processes that train in one folder would spoil it; the lock goes with its holder, however that one ends."""

    def refuse() -> None:
        raise UserError(f"Another process is training in {path}; wait for it, or start a new run.")

    return locked(path / ".lock", refuse)


def new_run_path(recipe: Recipe, track: Track, seed: int) -> Path:
    stem = f"{track.name}-{recipe.name}-s{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    paths = (Path("runs") / (f"{stem}-{number}" if number else stem) for number in itertools.count())
    return next(path for path in paths if not path.exists())


def hashes(tokens: TokenFolder) -> dict[str, str]:
    return {name: file.sha256 for name, file in tokens.files.items()}


def obstacle(path: Path, recipe: Recipe, track: Track, seed: int) -> str | None:
    """Why the run in `path` cannot go on with this recipe, track and seed, in one sentence; None: it can."""
    about = read_run(path)
    status = read_result(path).status if (path / "result.json").exists() else None
    if status not in (None, "interrupted"):
        return f"{path} is finished (it ended as {status!r}); there is nothing to resume."
    tokens = track.locate()
    changed = differences(about.recipe, fit_to_tokens(recipe, tokens, track))
    asked: dict[str, Any] = {"track": track.name, "seed": seed}
    asked |= {"target": track.target} if track.name == "own" else {}
    if about.options.val_tokens != track.val_tokens:
        changed.append(f"val_tokens: {about.options.val_tokens} -> {track.val_tokens}")
    changed += [f"{k}: {getattr(about, k)} -> {value}" for k, value in asked.items() if getattr(about, k) != value]
    old, new = about.data.files, hashes(tokens)
    if track.once and recipe.loader.shuffle is None:  # chunks fetched since come after all that the run needs
        new = {name: sha256 for name, sha256 in new.items() if name in old}
    for name in sorted({*old, *new}):
        unknown = name in old and name in new and "" in (old[name], new[name])  # put there by hand
        changed += [f"data: another {name}"] if old.get(name) != new.get(name) and not unknown else []
    if changed:
        return f"{path} was started differently ({'; '.join(changed)}); drop that, or start a new run."
    return None


def newest_unfinished(recipe: Recipe, track: Track, seed: int, notice: Callable[[str], None]) -> Path | None:
    """The newest folder under runs/ whose run can go on with this recipe, track and seed."""
    found = Path("runs").glob(f"{track.name}-{recipe.name}-s{seed}-*/{RUN}")
    for path in sorted((file.parent for file in found), key=lambda p: p.stat().st_mtime_ns, reverse=True):
        try:
            if obstacle(path, recipe, track, seed) is None:
                return path
        except UserError as e:
            notice(f"passing over {path}: {e}")
    return None
