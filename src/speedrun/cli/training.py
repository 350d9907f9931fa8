"""`speedrun train`: what can be asked, what is said at the end."""

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from speedrun import sample as sample_room
from speedrun.checks import AboveZero, Count, Positive
from speedrun.cli.words import grid, option, parse, say, with_value
from speedrun.data.loader import LoaderConfig
from speedrun.errors import UserError
from speedrun.experiments.children import arithmetic_for
from speedrun.model.gpt import GPTConfig
from speedrun.optim.sharded import ORDERS
from speedrun.options import unset
from speedrun.recipes import DEFAULT, default_for, get_recipe
from speedrun.recipes.published import get_curve
from speedrun.tracks import TRACKS, Track, get_track, own_track
from speedrun.training import dryrun, scale
from speedrun.training import run as run_room
from speedrun.training.config import Options, PublishedCurve, Recipe, ValidationConfig
from speedrun.training.device import CompilerConfig, Machine, by_name, check_processes, choose
from speedrun.training.distributed import PATIENCE, is_first, launch, may_restart, ranks, restarted
from speedrun.training.gpus import GPUS
from speedrun.training.optimizers import OptimConfig
from speedrun.training.progress import status
from speedrun.training.runlog import read_result, read_run
from speedrun.training.schedule import ScheduleConfig

WORTH_COMPILING = 100  # steps; compiling takes as long as some hundred steps of a small model
PARTS = ("model", "loader", "optim", "schedule", "validation", "compiler")


@dataclass(frozen=True)
class Machinery:
    """Where and how it is computed; shared by the commands that compute."""

    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps. With --dry-run also a GPU that is not here: h100, a100 or 4090."""
    dtype: str = "auto"
    """auto, float32 or bfloat16: the arithmetic of matmuls. On a CPU auto tries both and takes the faster one."""
    threads: Annotated[int | None, unset("INT")] = None
    """CPU threads; default: all usable cores."""
    attention: str = "auto"
    """auto, fa3 (Flash Attention 3), varlen (torch's varlen_attn) or sdpa (torch's SDPA)."""

    memory: Annotated[float | None, unset("GB")] = None
    """GB of a GPU's memory to keep to, of 1e9 bytes; default: all of it."""
    deterministic: bool = False
    """On a GPU, use kernels that give the same bits every time; slower."""

    def choose(self, recipe: Recipe) -> Machine:
        tokens = max(stage.tokens for stage in recipe.schedule.visits())
        return choose(
            self.device,
            self.dtype,
            self.threads,
            self.attention,
            recipe.model,
            tokens,
            memory=self.memory,
            deterministic=self.deterministic,
        )


@dataclass(frozen=True)
class Train:
    """Train one model; leaves a run folder."""

    recipe: str = DEFAULT
    """Which recipe; `speedrun recipes` lists them."""
    track: str = "pocket"
    """Which track; `speedrun tracks` lists them. With --data: at the size of which track."""
    data: Annotated[Path | None, unset("PATH")] = None
    """A folder made by `speedrun data encode`, instead of a track's tokens."""
    target: Annotated[float | None, unset("FLOAT")] = None
    """With --data: the validation loss to reach, in nats per token; default: none."""
    seed: Count = 0
    """Draws the initial weights and the order of documents."""
    steps: Annotated[int | None, unset("INT")] = None
    """Steps of the run, with everything in the schedule that is counted in steps scaled along; default: the recipe's.
    `--schedule.steps` changes that field alone."""
    out: Annotated[Path | None, unset("PATH")] = None
    """Run folder; default: a new one under runs/."""
    resume: Annotated[str | None, unset("PATH|auto")] = None
    """A run folder to continue, with the flags it was started with.
    `auto`: the one at --out, or else the newest unfinished one under runs/ that fits; a new run if there is none."""
    checkpoint_every: Annotated[Count | None, unset("INT")] = None
    """Steps between checkpoints, inside the clock; 0: only at the end. Default: at each validation on the pocket track
    and on your own data, 0 on the short and medium tracks."""
    keep: Positive = 2
    """Checkpoints kept on disk."""
    micro_rows: Annotated[Positive | None, unset("INT")] = None
    """Rows per forward pass; default: the whole batch. Halves itself when memory runs out."""
    compile: Annotated[bool | None, unset("{True,False}")] = None
    """Use torch.compile, which `--no-compile` turns off. Default: where it works, unless a run on a CPU is so short
    that it is sooner done without."""
    val_tokens: Annotated[Positive | None, unset("INT")] = None
    """Validate on the first so many tokens alone, to try something quickly: such a loss is not compared with the
    target. Default: what the track says."""
    save: bool = True
    """Write the trained model at the end (outside the clock)."""
    sample: bool = True
    """Show a little text from the model at the end."""
    shadow: bool = False
    """Also measure the loss on the shadow split at the end, outside the clock: for proof, never for tuning."""
    plan: Annotated[str | None, unset("SHA256")] = None
    """Set by `speedrun race`: the sha256 of the plan that this run belongs to."""
    nproc: Positive = 1
    """Processes on this machine that train together. For several machines: `torchrun ... -m speedrun train`."""
    max_restarts: Count = 0
    """With --nproc: how often a run that lost a process goes on by itself, from its last checkpoint."""
    patience: AboveZero = PATIENCE
    """With several processes: seconds that they wait for one that hangs; four times as long while they compile."""
    backend: str = "auto"
    """With several processes: auto, gloo or nccl."""
    order: str = "eager"
    """With several processes: in which order a step exchanges and computes: eager, interleaved or plain."""
    trace: Count = 0
    """Record so many steps by torch.profiler, a file per process in the run folder. `--trace` alone: 20 steps."""
    curve: Annotated[str | None, unset("NAME|none")] = None
    """A record whose published validation losses are shown beside the run's own: normuon, interleaved...
    Default: that of the recipe itself, where it has one on this track."""
    dry_run: bool = False
    """Train nothing and write nothing: say what the run would be, its memory and time, and whether it fits (exit code
    0) or not (2)."""
    machine: Annotated[Machinery, tyro.conf.arg(name="")] = field(default_factory=Machinery)
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
    """What torch.compile is told beside the model."""

    @classmethod
    def from_recipe(cls, recipe: Recipe, **given: Any) -> "Train":
        parts = {name: getattr(recipe, name) for name in PARTS}
        return cls(**{"recipe": recipe.name, "track": recipe.track, **parts, **given})

    @classmethod
    def from_run(cls, path: Path) -> tuple[Recipe, "Train"]:
        """The recipe and the flags that the run in a folder was started with."""
        about = read_run(path)
        recipe, options = about.recipe, about.options
        kept = {k: getattr(options, k) for k in ("seed", "compile", "checkpoint_every", "keep", "micro_rows", "plan")}
        kept |= {"save": options.final_checkpoint, "shadow": "shadow" in options.splits}
        kept["curve"] = options.curve.record if options.curve else "none"
        kept["machine"] = Machinery(dtype=about.dtype, threads=about.threads)
        if about.track == "own":
            kept |= {"data": Path(about.data.folder), "target": about.target}
        else:
            kept["track"] = about.track
        usual = TRACKS[about.track].val_tokens if about.track in TRACKS else None
        kept["val_tokens"] = None if options.val_tokens == usual else options.val_tokens
        return recipe, cls.from_recipe(recipe, **kept)

    def resolved(self, base: Recipe) -> Recipe:
        return dataclasses.replace(base, **{name: getattr(self, name) for name in PARTS})


def train(args: Sequence[str]) -> int:
    args = with_value(args, "trace", "20")
    resume = option(args, "resume")
    folder = Path(resume) if resume and resume != "auto" else None
    if folder:
        base, default = Train.from_run(folder)
    else:
        track_name = get_track(option(args, "track") or "pocket").name
        base = get_recipe(option(args, "recipe") or default_for(track_name), track_name)
        default = Train.from_recipe(base)
    given: Train = parse(Train, "train", args, default, "Train one model to a track's target; leaves a run folder.")
    if given.order not in ORDERS:
        raise UserError(f"--order is {given.order!r}; it must be one of: {', '.join(ORDERS)}.")
    recipe = given.resolved(base)
    if given.steps is not None:
        if option(args, "schedule.steps"):
            raise UserError(f"--steps {given.steps} scales the whole schedule; drop --schedule.steps.")
        recipe = dataclasses.replace(recipe, schedule=recipe.schedule.scaled(given.steps))
    if folder and given.out:
        raise UserError(f"--out {given.out} does not go with --resume {folder}: a run stays in its folder; drop --out.")
    for name in ("recipe", "track", "curve", "val_tokens") if folder else ():
        old, new = getattr(default, name), getattr(given, name)
        if old != new:
            flag = name.replace("_", "-")
            raise UserError(f"{folder} was started with --{flag} {old}, not {new}; drop that, or start a new run.")
    if given.target is not None and given.data is None:
        raise UserError(f"--target {given.target} goes with --data; the target of track {given.track!r} is fixed.")
    track = own_track(given.data, given.target) if given.data else get_track(given.track)
    if given.val_tokens is not None:
        track = dataclasses.replace(track, val_tokens=given.val_tokens, target=None)
    curve = None if folder else get_curve(given.curve, recipe.name, track.name)  # a run that goes on has its own
    if given.max_restarts and given.nproc == 1 and ranks() == 1:
        raise UserError(f"--max-restarts {given.max_restarts} goes with --nproc; one process is resumed with --resume.")
    if ranks() == 1:
        check_processes(given.nproc, given.machine.device)
        run_room.check_ranks(recipe, given.nproc)
    if given.nproc != 1 and ranks() == 1 and not given.dry_run:
        if given.max_restarts and not (given.out or given.resume):  # the next attempt must find the run
            args = [*args, "--out", str(run_room.new_run_path(recipe, track, given.seed))]
        if given.machine.dtype == "auto" and not given.resume:  # decided once, before there are ranks
            machine = given.machine
            args = [*args, "--dtype", arithmetic_for(recipe, machine.device, machine.threads, given.nproc)]
        return launch(given.nproc, ["train", *args], given.max_restarts)
    return run_training(given, recipe, track, curve)


def run_training(given: Train, recipe: Recipe, track: Track, curve: PublishedCurve | None) -> int:
    every = given.checkpoint_every
    if every is None:
        every = recipe.validation.every if track.checkpoints else 0
        if is_first() and not (track.checkpoints or given.dry_run):
            say(
                f"no checkpoints on the way: the clock of track {track.name!r} would count them; "
                f"--checkpoint-every {recipe.validation.every} writes them, for a run that may have to be resumed"
            )
    if not given.dry_run:  # which says so, with all else that does not fit
        run_room.obey(recipe, track)
        scale.check(recipe)
    if given.dry_run and given.resume:
        raise UserError(f"--dry-run does not go with --resume {given.resume}: it tells of a new run; drop one.")
    if may_restart() and not (given.out or given.resume):
        raise UserError("With restarts every attempt must find the run: pass --out FOLDER.")
    if restarted() and given.out and has_ended(given.out):
        return 1  # it has said how; torchrun starts again whatever ended with 1
    where = None if given.dry_run else folder_to_resume(given, recipe, track)
    if is_first():
        status.at("looking at the machine", show=False)
    asked = given.machine if where is None else arithmetic_of(where, given.machine)
    if given.dry_run and asked.device in GPUS:
        machine = by_name(asked.device, asked.memory, asked.dtype, asked.attention)
    else:
        machine = asked.choose(recipe)
    compile = given.compile
    if compile is None:
        compile = machine.device.type != "cpu" or recipe.schedule.total >= WORTH_COMPILING
        if not compile and is_first():
            steps = f"{recipe.schedule.total} step{'s' * (recipe.schedule.total != 1)}"
            say(f"torch.compile is not used: {steps} are sooner done without it; --compile uses it")
    options = Options(
        given.seed,
        compile,
        every,
        given.keep,
        given.save,
        given.micro_rows,
        splits=("val", "shadow") if given.shadow else ("val",),
        plan=given.plan,
        patience=given.patience,
        backend=given.backend,
        order=given.order,
        trace=given.trace,
        curve=curve,
    )
    if given.dry_run:
        return dry_run(given, recipe, track, machine, options)
    if where is not None:
        outcome = run_room.resume(where, recipe, track, machine, options)
    else:
        outcome = run_room.start(recipe, track, machine, options, out=given.out)
    if not is_first():
        return 0 if outcome.result.status == "ok" else 1
    return summarize(outcome, given, machine.device)


def has_ended(folder: Path) -> bool:
    there = (folder / "run.json").exists() and (folder / "result.json").exists()
    return there and read_result(folder).status != "interrupted"


def folder_to_resume(given: Train, recipe: Recipe, track: Track) -> Path | None:
    """The run that is to go on; None: a new one begins."""
    there = given.out if given.out and (given.out / "run.json").exists() else None
    if restarted() and there:
        return there
    if given.resume != "auto":
        return Path(given.resume) if given.resume else None
    where = there or (None if given.out else run_room.newest_unfinished(recipe, track, given.seed, say))
    if where is None:
        say("nothing to resume: starting a new run")
    return where


def arithmetic_of(folder: Path, machine: Machinery) -> Machinery:
    """A run keeps the arithmetic that it began with, whatever a trial would say today."""
    began = read_run(folder).dtype
    if machine.dtype not in ("auto", began):
        raise UserError(
            f"{folder} was started with --dtype {began}, not {machine.dtype}; drop that, or start a new run."
        )
    return dataclasses.replace(machine, dtype=began)


def summarize(outcome: run_room.Outcome, given: Train, device: Any) -> int:
    """What happened, in a few lines. Exit code 0 only for a run that ended well and reached its target, if any."""
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
        part = f"the first {given.val_tokens:,} tokens of " if given.val_tokens else ""
        say(f"\nloss         {loss:.4f} on {part}the validation split (no target)")
    timed = "" if result.timed else " (resumed, so not a time that counts)"
    say(f"trained      {result.train_time:.1f} s on the clock{timed}, {result.steps:,} steps")
    say(f"tokens       {result.tokens:,}, {result.tokens_per_second:,.0f} per second")
    say(f"peak memory  {', '.join(f'{v:,.0f} MiB {k}' for k, v in result.peak_memory.items())}")
    if given.sample and given.save and (outcome.folder / "tokenizer.json").exists():
        model, tokenizer, _ = sample_room.load_model(outcome.folder, device)
        text = sample_room.sample_text(model, tokenizer, "The ", tokens=60, temperature=0.8, top_k=50, seed=0)
        say("sample       " + " ".join(text.split()))
    say(f"run folder   {outcome.folder}")
    return 0 if target is None or outcome.reached else 1


def dry_run(given: Train, recipe: Recipe, track: Track, machine: Machine, options: Options) -> int:
    """Everything known beforehand, in tables; what does not fit comes last, as an error."""
    found = dryrun.examine(recipe, track, machine, options, given.out or Path("runs"), given.nproc)
    status.stop()
    say(f"{recipe.name} at {recipe.track} size: {found.count / 1e6:.2f} M parameters, nothing is trained\n")
    grid(found.parameters)
    if recipe.optim.snoo.k:
        say(f"Snoo around all of them, every {recipe.optim.snoo.k} steps; the state holds its copies.")
    say(f"\n{recipe.schedule.tokens:,} training tokens in {recipe.schedule.total:,} steps")
    grid(found.stages)
    say("\nmemory" + (f" of each of {given.nproc} processes" if given.nproc > 1 else ""))
    grid(dryrun.memory_table(found.memory))
    say("\n" + "\n".join([*found.lines, *(f"note         {note}" for note in found.notes)]))
    if found.problems:
        raise UserError("This run does not fit: " + " ".join(found.problems))
    if found.memory.measured is None:
        raise UserError(
            f"It is not known whether this run fits: what a row of this recipe needs on {machine.device_reason} was "
            "not measured; the table has the native recipes as they are. Ask again on such a machine."
        )
    say("fits         as far as can be known beforehand")
    return 0
