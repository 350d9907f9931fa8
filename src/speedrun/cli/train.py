"""`speedrun train`: train one model to a track's target."""

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from speedrun.api import make_options, with_steps
from speedrun.arguments import Settings
from speedrun.checks import Count, Positive
from speedrun.cli.common import MachineOptions, TargetArgs, flat, grid, option, parse, say, unset, with_value
from speedrun.data import LoaderConfig, Tokenizer
from speedrun.errors import UserError, plural
from speedrun.experiments import arithmetic_for, has_ended
from speedrun.model import GPTConfig
from speedrun.recipes import DEFAULT, default_for, get_curve, get_recipe, track_of
from speedrun.sample import load_model, sample_text
from speedrun.tracks import TRACKS, Track, find_track, get_track
from speedrun.training import (
    GPUS,
    CompilerConfig,
    Machine,
    OptimConfig,
    Options,
    PublishedCurve,
    Recipe,
    ScheduleConfig,
    ValidationConfig,
    by_name,
    check_processes,
    distributed,
    dryrun,
    memory_of,
    run,
    runlog,
    scale,
    status,
)

PARTS = ("model", "loader", "optim", "schedule", "validation", "compiler")


@dataclass(frozen=True)
class RunOptions(Options):
    """The options of a run that are flags as they are; `train` finds the others from its own flags."""

    micro_batch_size: Annotated[Positive | None, unset("INT")] = None
    plan: Annotated[str | None, unset("SHA256")] = None
    compile: tyro.conf.Suppress[bool] = True
    checkpoint_every: tyro.conf.Suppress[None] = None
    val_tokens: tyro.conf.Suppress[int | None] = None
    curve: tyro.conf.Suppress[None] = None


@dataclass(frozen=True)
class Train:
    """Train one model; leaves a run folder."""

    recipe: str = DEFAULT
    """Which recipe: a name that `speedrun recipes` lists, or the file of a stored one."""
    target: Annotated[TargetArgs, flat] = field(default_factory=TargetArgs)
    steps: int | None = None
    """Steps of the run, with everything in the schedule that is counted in steps scaled along; default: the recipe's.
    `--schedule.steps` changes that field alone."""
    out: Path | None = None
    """Run folder; default: a new one under runs/."""
    resume: Annotated[str | None, unset("PATH|auto")] = None
    """A run folder to continue, with the flags it was started with.
    `auto`: the one at --out, or else the newest unfinished one under runs/ that fits; a new run if there is none."""
    options: Annotated[RunOptions, flat] = field(default_factory=RunOptions)
    checkpoint_every: Count | None = None
    """Steps between checkpoints, inside the clock; 0: only at the end. Default: at each validation on the pocket track
    and on your own data, 0 on the short and medium tracks."""
    compile: Annotated[bool | None, unset("{True,False}")] = None
    """Use torch.compile, which `--no-compile` turns off. Default: where it works, unless a run on a CPU is so short
    that it is sooner done without."""
    val_tokens: Positive | None = None
    """Validate on the first tokens alone, this many, to try something quickly: such a loss is not compared with the
    target. Default: as many as the track has."""
    sample: bool = True
    """Show a little text from the model at the end."""
    nproc: Positive = 1
    """Processes on this machine that train together. For several machines: `torchrun ... -m speedrun train`."""
    max_restarts: Count = 0
    """With --nproc: how often a run that lost a process continues by itself, from its last checkpoint."""
    curve: Annotated[str | None, unset("NAME|none")] = None
    """A record whose published validation losses are shown beside the run's own: normuon, interleaved...
    Default: that of the recipe itself, where it has one on this track."""
    dry_run: bool = False
    """Train nothing and write nothing: report parameters, memory and time, and whether the run fits (exit code 0) or
    not (2)."""
    machine: Annotated[MachineOptions, flat] = field(default_factory=MachineOptions)
    model: GPTConfig = field(default_factory=GPTConfig)
    """The network."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """How tokens become rows."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizers."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Steps, batch and learning rate over time."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    """When and how the validation loss is measured."""
    compiler: CompilerConfig = field(default_factory=CompilerConfig)
    """Options of torch.compile."""

    @classmethod
    def from_recipe(cls, recipe: Recipe, **given: Any) -> "Train":
        parts = {name: getattr(recipe, name) for name in PARTS}
        return cls(**{"recipe": recipe.name, "target": TargetArgs(track=recipe.track), **parts, **given})

    @classmethod
    def from_run(cls, path: Path) -> tuple[Recipe, "Train"]:
        """The recipe and the flags that the run in a folder was started with."""
        about = runlog.read_run(path)
        recipe, options = about.recipe, about.options
        target = TargetArgs(track=recipe.track if about.track == "own" else about.track)
        if about.track == "own":
            target = dataclasses.replace(target, data=Path(about.data.folder), target=about.target)
        usual = TRACKS[about.track].val_tokens if about.track in TRACKS else None
        return recipe, cls.from_recipe(
            recipe,
            target=target,
            options=RunOptions(**{**vars(options), "checkpoint_every": None, "curve": None, "trace": 0}),
            checkpoint_every=options.checkpoint_every or 0,
            compile=options.compile,
            val_tokens=None if options.val_tokens == usual else options.val_tokens,
            curve=options.curve.record if options.curve else "none",
            machine=MachineOptions(dtype=about.dtype, threads=about.threads),
        )

    def resolved(self, base: Recipe) -> Recipe:
        return with_steps(dataclasses.replace(base, **{name: getattr(self, name) for name in PARTS}), self.steps)


def main(args: Sequence[str]) -> int:
    args = with_value(args, "trace", "20")
    resume = option(args, "resume")
    if resume == "":
        raise UserError("--resume is empty, perhaps an unset variable; name a run folder, or auto, or drop it.")
    folder = Path(resume) if resume and resume != "auto" else None
    if folder:
        base, default = Train.from_run(folder)
    else:
        name = option(args, "recipe")
        track_name = get_track(option(args, "track") or track_of(name)).name
        base = get_recipe(name or default_for(track_name), track_name)
        default = Train.from_recipe(base, target=TargetArgs(track=track_name))
    given: Train = parse(
        Train, "train", args, default=default, about="Train one model to a track's target; leaves a run folder."
    )
    if given.steps is not None and option(args, "schedule.steps"):
        raise UserError(f"--steps {given.steps} scales the whole schedule; drop --schedule.steps.")
    recipe = given.resolved(base)
    if folder:
        check_same(folder, default, given)
    track = find_track(**vars(given.target), val_tokens=given.val_tokens)
    curve = None if folder else get_curve(given.curve, recipe.name, track.name)  # a resumed run has its own
    if given.max_restarts and given.nproc == 1 and distributed.ranks() == 1:
        raise UserError(f"--max-restarts {given.max_restarts} goes with --nproc; one process is resumed with --resume.")
    if distributed.ranks() == 1:
        check_processes(given.nproc, given.machine.device)
        run.check_ranks(recipe, given.nproc)
    if given.nproc != 1 and distributed.ranks() == 1 and not given.dry_run:
        if given.max_restarts and not (given.out or given.resume):  # the next attempt must find the run
            args = [*args, "--out", str(run.new_run_path(recipe, track, given.options.seed))]
        if given.machine.dtype == "auto" and not given.resume:  # decided once, before there are ranks
            settings = Settings(given.machine.device, threads=given.machine.threads, nproc=given.nproc)
            args = [*args, "--dtype", arithmetic_for(recipe, settings)]
        return distributed.launch(given.nproc, ["train", *args], given.max_restarts)
    return train(given, recipe, track, curve)


def check_same(folder: Path, default: Train, given: Train) -> None:
    """Refuse flags that a resumed run cannot have."""
    if given.out:
        raise UserError(f"--out {given.out} does not go with --resume {folder}: a run stays in its folder; drop --out.")
    for flag, old, new in (
        ("recipe", default.recipe, given.recipe),
        ("track", default.target.track, given.target.track),
        ("curve", default.curve, given.curve),
        ("val-tokens", default.val_tokens, given.val_tokens),
    ):
        if old != new:
            raise UserError(f"{folder} was started with --{flag} {old}, not {new}; drop that, or start a new run.")


def train(given: Train, recipe: Recipe, track: Track, curve: PublishedCurve | None) -> int:
    if not given.dry_run:  # which reports it with all else that does not fit
        run.check_rules(recipe, track)
        scale.check(recipe)
    if given.dry_run and given.resume:
        raise UserError(f"--dry-run does not go with --resume {given.resume}: it describes a new run; drop one.")
    if distributed.may_restart() and not (given.out or given.resume):
        raise UserError("With restarts every attempt must find the run: pass --out FOLDER.")
    if distributed.restarted() and given.out and has_ended(given.out):
        return 1  # already reported; torchrun restarts whatever ended with 1
    where = None if given.dry_run else folder_to_resume(given, recipe, track)
    if distributed.is_first():
        status.at("looking at the machine", show=False)
    asked = given.machine if where is None else arithmetic_of(where, given.machine)
    if given.dry_run and asked.device in GPUS:
        machine = by_name(asked.device, asked.memory, asked.dtype, asked.attention)
    else:
        machine = asked.choose(recipe)
    decided = {"compile": given.compile, "checkpoint_every": given.checkpoint_every, "curve": curve}
    notice = say if distributed.is_first() else str
    options = make_options(recipe, track, machine, **{**vars(given.options), **decided}, notice=notice)
    if given.dry_run:
        return dry_run(given, recipe, track, machine, options)
    if given.sample and given.options.save:
        check_tokenizer(where, track)
    if where is not None:
        outcome = run.resume(where, recipe, track, machine, options)
    else:
        outcome = run.start(recipe, track, machine, options, out=given.out)
    if not distributed.is_first():
        return 0 if outcome.result.status == "ok" else 1
    return summarize(outcome, given, machine)


def check_tokenizer(where: Path | None, track: Track) -> None:
    """Refuse a tokenizer that cannot write the sample, before the run and not at its end."""
    theirs = track.locate().tokenizer_path
    kept = theirs if where is None else where / "tokenizer.json"
    path = kept if kept.exists() else theirs
    if path.exists():
        try:
            _ = Tokenizer.load(path).bos
        except UserError as e:
            raise UserError(f"{e} Restore {path}, or pass --sample False.") from e


def folder_to_resume(given: Train, recipe: Recipe, track: Track) -> Path | None:
    """The run to resume; None: a new one begins."""
    there = given.out if given.out and (given.out / "run.json").exists() else None
    if distributed.restarted() and there:
        return there
    if given.resume != "auto":
        return Path(given.resume) if given.resume else None
    where = there or (None if given.out else run.newest_unfinished(recipe, track, given.options.seed, say))
    if where is None:
        say("nothing to resume: starting a new run")
    return where


def arithmetic_of(folder: Path, machine: MachineOptions) -> MachineOptions:
    """A run keeps the arithmetic that it began with, whatever a trial would choose today."""
    began = runlog.read_run(folder).dtype
    if machine.dtype not in ("auto", began):
        raise UserError(
            f"{folder} was started with --dtype {began}, not {machine.dtype}; drop that, or start a new run."
        )
    return dataclasses.replace(machine, dtype=began)


def summarize(outcome: run.Outcome, given: Train, machine: Machine) -> int:
    """Print the result. Exit code 0 only for a run that ended well and reached its target, if any."""
    result, target = outcome.result, outcome.target
    if result.status == "interrupted":
        again = ["speedrun", "train", "--resume", str(outcome.folder)]
        for name in ("device", "attention"):
            value = getattr(given.machine, name)
            again += [] if value == "auto" else [f"--{name}", value]
        again += [] if given.machine.memory is None else ["--memory", f"{given.machine.memory:g}"]
        again += ["--deterministic"] * given.machine.deterministic
        say(f"Stopped and saved. To continue:\n  {shlex.join(again)}")
        return 128 + int(str(result.reason).removeprefix("signal "))
    if result.status == "failed":
        say(f"Failed: {result.reason}; a lower learning rate may help (--optim.lr is {given.optim.lr:g}).")
        say(f"run folder   {outcome.folder}")
        return 1
    loss = result.val_loss
    if target is not None:
        verdict = "reached" if outcome.reached else "NOT reached"
        say(f"\ntarget       {target:g} {verdict}: validation loss {loss:.4f}")
    else:
        part = f"the first {plural(given.val_tokens, 'token')} of " if given.val_tokens else ""
        say(f"\nloss         {loss:.4f} on {part}the validation split (no target)")
    timed = "" if result.timed else " (resumed, so not a time that counts)"
    say(f"trained      {result.train_time:.1f} s on the clock{timed}, {plural(result.steps, 'step')}")
    say(f"tokens       {result.tokens:,}, {result.tokens_per_second:,.0f} per second")
    say(f"peak memory  {', '.join(f'{v:,.0f} MiB {k}' for k, v in result.peak_memory.items())}")
    if given.sample and given.options.save and (outcome.folder / "tokenizer.json").exists():
        model, tokenizer = load_model(outcome.folder, machine.device)
        text = sample_text(model, tokenizer, "The ", tokens=60, temperature=0.8, top_k=50, seed=0)
        say("sample       " + " ".join(text.split()))
    say(f"run folder   {outcome.folder}")
    return 0 if target is None or outcome.reached else 1


def dry_run(given: Train, recipe: Recipe, track: Track, machine: Machine, options: Options) -> int:
    """Print what is known before a run, in tables; what does not fit comes last, as an error."""
    found = dryrun.examine(recipe, track, machine, options, given.out or Path("runs"), given.nproc)
    status.stop()
    say(f"{recipe.name} at {recipe.track} size: {found.count / 1e6:.2f} M parameters, nothing is trained\n")
    grid(found.parameters)
    if recipe.optim.snoo.k:
        say(f"Snoo around all of them, every {plural(recipe.optim.snoo.k, 'step')}; the state holds its copies.")
    say(f"\n{plural(recipe.schedule.tokens, 'training token')} in {plural(recipe.schedule.total, 'step')}")
    grid(found.stages)
    say("\nmemory" + (f" of each of {given.nproc} processes" if given.nproc > 1 else ""))
    grid(dryrun.memory_table(found.memory))
    say("\n" + "\n".join([*found.lines, *(f"note         {note}" for note in found.notes)]))
    if found.problems:
        raise UserError("This run does not fit: " + " ".join(found.problems))
    if found.memory.measured is None:
        compiled = dataclasses.replace(options, compile=True)
        if memory_of(recipe, machine, compiled, given.nproc).measured:
            raise UserError(
                "It is not known whether this run fits: only compiled passes were measured on "
                f"{machine.device_reason}; drop --no-compile."
            )
        raise UserError(
            f"It is not known whether this run fits: what a row of this recipe needs on {machine.device_reason} was "
            "not measured; the table has the native recipes as they are. Repeat this on such a machine."
        )
    say("fits         as far as can be known beforehand")
    return 0
