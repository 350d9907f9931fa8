"""The `speedrun` command: parses, calls, prints.

speedrun train                      the pocket track with the default recipe
speedrun train --help               every field of the recipe, with its meaning
speedrun train --dry-run            what it would be: memory, time, and whether it fits
"""

import dataclasses
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Column, Table

import speedrun
from speedrun import doctor as doctor_room
from speedrun import sample as sample_room
from speedrun.data import encode, fineweb, pocket
from speedrun.data.loader import LoaderConfig
from speedrun.data.shards import TokenFolder
from speedrun.errors import UserError, nearest
from speedrun.files import explained as file_errors
from speedrun.files import write_atomic
from speedrun.model.gpt import GPTConfig, count_parameters
from speedrun.optim.config import OptimConfig
from speedrun.race import ablate as ablate_room
from speedrun.race import commands as race_room
from speedrun.race import records as records_room
from speedrun.race import sweep as sweep_room
from speedrun.race.race import Race
from speedrun.recipes import DEFAULT, LINEAGE, default_for, get_recipe
from speedrun.report import compare as compare_room
from speedrun.report import export as export_room
from speedrun.report import pages, traces
from speedrun.report.ablation import ablation_svg
from speedrun.report.records import records_svg
from speedrun.report.schedules import schedule_svg
from speedrun.tracks import TRACKS, Track, get_track, own_track
from speedrun.train import dryrun
from speedrun.train import run as run_room
from speedrun.train.config import Recipe, ValidationConfig, fields_of, meanings, recipe_from_dict
from speedrun.train.device import CompilerConfig, Machine, choose
from speedrun.train.distributed import PATIENCE, is_first, launch, may_restart, ranks, restarted, speaks
from speedrun.train.loop import Options
from speedrun.train.runlog import read_result
from speedrun.train.schedule import ScheduleConfig
from speedrun.train.watch import RankLost

console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
say = console.print
PARTS = ("model", "loader", "optim", "schedule", "validation", "compiler")


def unset(kind: str) -> Any:
    """An option that may be left out: its help names the kind of value, and says itself what happens without."""
    return tyro.conf.arg(metavar=kind, help_behavior_hint="")


def parse(kind: type, command: str, args: Sequence[str], default: Any = None, about: str | None = None) -> Any:
    """tyro's parser with our manners: exit code 2 and a named way out for every mistake."""
    extra = {} if default is None else {"default": default}
    return tyro.cli(
        kind,
        prog=f"speedrun {command}",
        args=list(args),
        description=about,
        config=(tyro.conf.FlagConversionOff,),
        **extra,
    )


def option(args: Sequence[str], name: str) -> str | None:
    """The value of --name before the real parse, which needs it to know the defaults. The last one counts."""
    value = None
    for i, arg in enumerate(args):
        if arg == f"--{name}" and i + 1 < len(args):
            value = args[i + 1]
        elif arg.startswith(f"--{name}="):
            value = arg.partition("=")[2]
    return value


def with_value(args: Sequence[str], name: str, value: str = "True") -> list[str]:
    """A switch given alone means this value: the parser wants one after every option."""
    flag = f"--{name}"
    given = list(args)
    for i in reversed(range(len(given))):
        if given[i] == flag and (i + 1 == len(given) or given[i + 1].startswith("-")):
            given.insert(i + 1, value)
    return given


def grid(rows: Sequence[Sequence[str]]) -> None:
    """Rows in columns, never folded: a table that is cut at the width of the terminal cannot be read or searched."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


# -------------------------------------------------------------------- train


@dataclass(frozen=True)
class Machinery:
    """Where and how it is computed; shared by the commands that compute."""

    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    dtype: str = "auto"
    """auto, float32 or bfloat16: the arithmetic of matmuls."""
    threads: Annotated[int | None, unset("INT")] = None
    """CPU threads; default: all usable cores."""
    attention: str = "auto"
    """auto, fa3 (Flash Attention 3), flex (FlexAttention) or sdpa (PyTorch's own)."""

    def choose(self, head_width: int | None = None) -> Machine:
        return choose(self.device, self.dtype, self.threads, self.attention, head_width)


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
    seed: int = 0
    """Draws the initial weights and the order of documents."""
    out: Annotated[Path | None, unset("PATH")] = None
    """Run folder; default: a new one under runs/."""
    resume: Annotated[str | None, unset("PATH|auto")] = None
    """A run folder to continue, with the flags it was started with.
    `auto`: the one at --out, or else the newest unfinished one under runs/ that fits; a new run if there is none."""
    checkpoint_every: Annotated[int | None, unset("INT")] = None
    """Steps between checkpoints, inside the clock; 0: only at the end; default: at each validation."""
    keep: int = 2
    """Checkpoints kept on disk."""
    micro_rows: Annotated[int | None, unset("INT")] = None
    """Rows per forward pass; default: the whole batch. Halves itself when memory runs out."""
    compile: bool = True
    """Use torch.compile where it works."""
    save: bool = True
    """Write the trained model at the end (outside the clock)."""
    sample: bool = True
    """Show a little text from the model at the end."""
    shadow: bool = False
    """Also measure the loss on the shadow split at the end, outside the clock: for proof, never for tuning."""
    plan: Annotated[str | None, unset("SHA256")] = None
    """Set by `speedrun race`: the sha256 of the plan that this run belongs to."""
    nproc: int = 1
    """Processes on this machine that train together. For several machines: `torchrun ... -m speedrun train`."""
    max_restarts: int = 0
    """With --nproc: how often a run that lost a process goes on by itself, from its last checkpoint."""
    patience: float = PATIENCE
    """With several processes: seconds that they wait for one that hangs; four times as long while they compile."""
    backend: str = "auto"
    """With several processes: auto, gloo or nccl."""
    order: str = "eager"
    """With several processes: in which order a step exchanges and computes: eager, interleaved or plain."""
    trace: int = 0
    """Record what every process does in so many steps, as trace.json in the run folder. `--trace` alone: 20 steps."""
    dry_run: bool = False
    """Train nothing and write nothing: say what the run would be, its memory and time, and whether it fits (exit code
    0) or not (2). `--dry-run` alone will do."""
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
        about = run_room.read_description(path)
        recipe, options = recipe_from_dict(about["recipe"]), about["options"]
        kept = {k: options[k] for k in ("seed", "compile", "checkpoint_every", "keep", "micro_rows") if k in options}
        kept |= {"save": options.get("final_checkpoint", True), "machine": Machinery(threads=about["threads"])}
        kept |= {"shadow": "shadow" in options.get("splits", ()), "plan": options.get("plan")}
        if about["track"] == "own":
            kept |= {"data": Path(about["data"]["folder"]), "target": about["target"]}
        else:
            kept["track"] = about["track"]
        return recipe, cls.from_recipe(recipe, **kept)

    def resolved(self, base: Recipe) -> Recipe:
        return dataclasses.replace(base, **{name: getattr(self, name) for name in PARTS})


def train(args: Sequence[str]) -> int:
    args = with_value(with_value(args, "dry-run"), "trace", "20")
    resume = option(args, "resume")
    folder = Path(resume) if resume and resume != "auto" else None
    if folder:
        base, default = Train.from_run(folder)
    else:
        track_name = get_track(option(args, "track") or "pocket").name
        base = get_recipe(option(args, "recipe") or default_for(track_name), track_name)
        default = Train.from_recipe(base)
    given: Train = parse(Train, "train", args, default, "Train one model to a track's target; leaves a run folder.")
    recipe = given.resolved(base)
    if folder and given.out:
        raise UserError(f"--out {given.out} does not go with --resume {folder}: a run stays in its folder; drop --out.")
    for name in ("recipe", "track") if folder else ():
        old, new = getattr(default, name), getattr(given, name)
        if old != new:
            raise UserError(f"{folder} was started with --{name} {old}, not {new}; drop that, or start a new run.")
    if given.target is not None and given.data is None:
        raise UserError(f"--target {given.target} goes with --data; the target of track {given.track!r} is fixed.")
    track = own_track(given.data, given.target) if given.data else get_track(given.track)
    if given.max_restarts and given.nproc == 1 and ranks() == 1:
        raise UserError(f"--max-restarts {given.max_restarts} goes with --nproc; one process is resumed with --resume.")
    if given.nproc != 1 and ranks() == 1 and not given.dry_run:
        if given.max_restarts and not (given.out or given.resume):  # the next attempt must find the run
            args = [*args, "--out", str(run_room.new_run_path(recipe, track, given.seed))]
        return launch(given.nproc, args, given.max_restarts)
    return run_training(given, recipe, track)


def run_training(given: Train, recipe: Recipe, track: Track) -> int:
    every = recipe.validation.every if given.checkpoint_every is None else given.checkpoint_every
    for name, least in (("checkpoint_every", 0), ("keep", 1), ("micro_rows", 1), ("trace", 0)):
        value = getattr(given, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}.")
    if not 0 <= given.seed < 2**63:
        raise UserError(f"--seed is {given.seed}; it must lie between 0 and 2**63 - 1.")
    options = Options(
        given.seed,
        given.compile,
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
    )
    machine = given.machine.choose(recipe.model.head_width)
    if given.dry_run:
        if given.resume:
            raise UserError(f"--dry-run does not go with --resume {given.resume}: it tells of a new run; drop one.")
        return dry_run(dryrun.examine(recipe, track, machine, options, given.out or Path("runs")))
    where: Path | None = None
    if may_restart() and not (given.out or given.resume):
        raise UserError("With restarts every attempt must find the run: pass --out FOLDER.")
    if restarted() and given.out and (given.out / "run.json").exists():
        if (given.out / "result.json").exists() and read_result(given.out)["status"] != "interrupted":
            return 1  # it had ended already, and has said how; torchrun starts again whatever ended with 1
        where = given.out
    elif given.resume == "auto":
        where = given.out if given.out and (given.out / "run.json").exists() else None
        where = where or (None if given.out else run_room.newest_unfinished(recipe, track, given.seed, say))
        if where is None:
            say("nothing to resume: starting a new run")
    elif given.resume:
        where = Path(given.resume)
    if where is not None:
        outcome = run_room.resume(where, recipe, track, machine, options)
    else:
        outcome = run_room.start(recipe, track, machine, options, out=given.out)
    if not is_first():
        return 0 if outcome.result["status"] == "ok" else 1
    return summarize(outcome, given, machine.device)


def summarize(outcome: run_room.Outcome, given: Train, device: Any) -> int:
    """What happened, in a few lines. Exit code 0 only for a run that ended well and reached its target, if any."""
    result, target = outcome.result, outcome.target
    if result["status"] == "interrupted":
        again = ["speedrun", "train", "--resume", str(outcome.folder)]
        for name in ("device", "dtype", "attention"):
            value = getattr(given.machine, name)
            again += [] if value == "auto" else [f"--{name}", value]
        say(f"Stopped and saved. To continue:\n  {shlex.join(again)}")
        return 128 + int(result["reason"].removeprefix("signal "))
    if result["status"] == "failed":
        say(f"Failed: {result['reason']}; a lower learning rate may help (--optim.lr is {given.optim.lr:g}).")
        say(f"run folder   {outcome.folder}")
        return 1
    loss = result["val_loss"]
    if target is not None:
        verdict = "reached" if outcome.reached else "NOT reached"
        say(f"\ntarget       {target:g} {verdict}: validation loss {loss:.4f}")
    else:
        say(f"\nloss         {loss:.4f} on the validation split (no target)")
    timed = "" if result["timed"] else " (resumed, so not a time that counts)"
    say(f"trained      {result['train_time']:.1f} s on the clock{timed}, {result['steps']:,} steps")
    say(f"tokens       {result['tokens']:,}, {result['tokens_per_second']:,.0f} per second")
    say(f"peak memory  {', '.join(f'{v:,.0f} MiB {k}' for k, v in result['peak_memory'].items())}")
    if given.sample and given.save and (outcome.folder / "tokenizer.json").exists():
        model, tokenizer, _ = sample_room.load_model(outcome.folder, device)
        text = sample_room.sample_text(model, tokenizer, "The ", tokens=60, temperature=0.8, top_k=50, seed=0)
        say("sample       " + " ".join(text.split()))
    say(f"run folder   {outcome.folder}")
    return 0 if target is None or outcome.reached else 1


def dry_run(found: dryrun.DryRun) -> int:
    """Everything known beforehand, in tables; what does not fit comes last, as an error."""
    size, recipe, memory = dryrun.gib, found.recipe, found.memory

    def over(values: Iterable[float]) -> str:
        return " > ".join(f"{value:.4g}" for value in values) or "-"

    count = sum(kind.parameters for kind in found.kinds)
    say(f"{recipe.name} at {recipe.track} size: {count / 1e6:.2f} M parameters, nothing is trained\n")
    rows = [("parameters", "trained by", "tensors", "number", "learning rate", "weights", "state")]
    for k in found.kinds:
        rate = f"{k.lr:.4g}" + (f" ({k.multiplier:.4g}x)" if round(k.multiplier, 9) != 1 else "")
        rows.append((k.kind, k.optimizer, f"{k.tensors}", f"{k.parameters:,}", rate, size(k.weights), size(k.state)))
    grid(rows)
    if recipe.optim.snoo.k:
        say(f"Snoo around all of them, every {recipe.optim.snoo.k} steps; the state holds its copies.")
    say(f"\n{recipe.schedule.tokens:,} training tokens in {recipe.schedule.total:,} steps")
    rows = [("steps", "rows x length", "windows", "lr factor", "momentum", "loss weights", "head")]
    for s in found.spans:
        windows = "-" if s.windows is None else f"{s.windows.short}, {s.windows.long}"
        weights = ", ".join(over(dict.fromkeys(pair)) for pair in s.predict)
        head = "tied" if recipe.model.tied and (s.tied or not recipe.model.split) else "its own"
        head += ", then split" if s.splits else ""
        steps = f"{s.first}-{s.last}"
        rows.append((steps, f"{s.rows} x {s.length}", windows, over(s.lr), over(s.momentum), weights, head))
    grid(rows)
    say("\nmemory")
    grid(
        [
            ("weights", size(memory.weights), "with rotary tables"),
            ("gradients", size(memory.gradients), ""),
            ("optimizer state", size(memory.optimizer), "when it is fullest"),
            ("copy of weights", size(memory.warm_up), "during the warm-up"),
            ("this program", size(memory.process), ""),
            ("activations", size(memory.activations), f"estimate for {memory.rows} rows at once, not compiled"),
            ("validation", size(memory.validation), "estimate, not at the same time as activations"),
            ("together", size(memory.total), "of " + ("?" if not found.memory_there else size(found.memory_there))),
        ]
    )
    say(f"\ndisk         {found.checkpoints} x {size(found.checkpoint)} of checkpoints, {size(found.disk_free)} free")
    per_token = found.flops / recipe.schedule.tokens
    say(f"arithmetic   {per_token / 1e9:.3g} GFLOP per token, {found.flops:.3g} FLOP in all, without the optimizer's")
    say(f"matmuls      {found.flops_per_second / 1e9:,.0f} GFLOP/s, measured here just now")
    valid = found.validation_seconds
    beside = "" if valid is None else f", and about {dryrun.duration(valid)} for validation outside the clock"
    say(f"time         about {dryrun.duration(found.seconds)}{beside}")
    say(f"             (an estimate: a training step gets about {dryrun.ATTAINABLE:g} of the speed of bare matmuls)")
    for note in found.notes:
        say(f"note         {note}")
    if found.problems:
        raise UserError("This run does not fit: " + " ".join(found.problems))
    say("fits         as far as can be known beforehand")
    return 0


# -------------------------------------------------------------------- tracks and recipes


def tracks(args: Sequence[str]) -> int:
    @dataclass(frozen=True)
    class Tracks:
        """List the tracks."""

    parse(Tracks, "tracks", args, about="List the tracks: what must be reached, on which tokens.")
    table = Table("track", "target loss", "data", "what", box=None)
    for track in TRACKS.values():
        try:
            track.locate()
            data = "ready"
        except UserError:
            data = "missing"
        table.add_row(track.name, f"{track.target:g} nats", data, track.about)
    say(table)
    say("`speedrun doctor` tells where the data lies, and how to get what is missing.")
    return 0


@dataclass(frozen=True)
class Recipes:
    """List the recipes, or show every field of one."""

    action: Annotated[str, tyro.conf.Positional] = "list"
    """`list`, or `show NAME`."""
    name: Annotated[str | None, tyro.conf.Positional] = None
    """Which recipe to show."""
    track: str = "pocket"
    """At the size of which track."""
    plot: Annotated[Path | None, unset("FILE.svg")] = None
    """Also draw the schedules over the steps into this file."""


def recipes(args: Sequence[str]) -> int:
    given: Recipes = parse(
        Recipes,
        "recipes",
        args,
        about="`speedrun recipes` lists them; `speedrun recipes show NAME` explains one.",
    )
    if given.action == "list":
        table = Table("recipe", "sizes", "what", box=None)
        for name, sizes in LINEAGE.items():
            table.add_row(
                name + (" (default)" if name == DEFAULT else ""),
                ", ".join(sizes),
                next(iter(sizes.values()))().about,
            )
        say(table)
        say("`speedrun recipes show NAME` lists every field of one.")
        return 0
    if given.action != "show":
        raise UserError(f"Unknown action {given.action!r}; use `speedrun recipes` or `speedrun recipes show NAME`.")
    track_name = get_track(given.track).name
    recipe = get_recipe(given.name or default_for(track_name), track_name)
    counts = count_parameters(recipe.model)
    say(f"{recipe.name} at {recipe.track} size: {recipe.about}")
    parts = ", ".join(f"{k} {v / 1e6:.2f} M" for k, v in counts.items())
    say(f"{sum(counts.values()) / 1e6:.2f} M parameters ({parts})")
    say(f"{recipe.schedule.tokens / 1e6:,.2f} M training tokens in {recipe.schedule.total:,} steps")
    header, *rows = recipe.model.table()
    layers = Table(*header, box=None)
    for row in rows:
        layers.add_row(*row)
    say(layers)
    table = Table(Column("field", no_wrap=True), "value", "meaning", box=None)
    explained = meanings(Recipe)
    for name, value in fields_of(recipe).items():
        if "." in name:
            table.add_row(name, f"{value:g}" if isinstance(value, float) else str(value), explained[name])
    say(table)
    if given.plot is not None:
        with file_errors(given.plot):
            write_atomic(given.plot, schedule_svg(recipe).encode())
        say(f"schedules drawn in {given.plot}")
    return 0


# -------------------------------------------------------------------- data


@dataclass(frozen=True)
class Prepare:
    """Fetch, clean, split and encode the pocket corpus. Quick when it is already there."""


@dataclass(frozen=True)
class Verify:
    """Check every token file against its sha256."""

    folder: Annotated[Path | None, tyro.conf.Positional, unset("PATH")] = None
    """A folder made by `speedrun data encode` or `speedrun data fetch`; default: the pocket corpus."""


@dataclass(frozen=True)
class Fetch:
    """Download the tokens of the short and medium tracks: 200 MB per chunk of 100 M. Continues where it stopped."""

    dataset: Annotated[str, tyro.conf.Positional]
    """fineweb10B."""
    chunks: Annotated[int | None, unset("INT")] = None
    """How many training chunks, 1 to 103; default: what the recipe needs."""
    recipe: Annotated[str | None, unset("STR")] = None
    """For which recipe; default: the one that `speedrun train` takes."""
    track: Annotated[str | None, unset("STR")] = None
    """At the size of which track, short or medium; default: short."""


@dataclass(frozen=True)
class Encode:
    """Turn your own text into a token folder for `speedrun train --data`."""

    files: Annotated[tuple[Path, ...], tyro.conf.Positional, unset("PATH ...")]
    """Text files, .jsonl files with a text field, or folders of them."""
    out: Path
    """The token folder to make."""
    tokenizer: str = "pocket"
    """`pocket`, `gpt2`, or the path of a tokenizer.json."""
    val_fraction: float = 0.05
    """Share of the documents that become the validation split."""
    processes: Annotated[int | None, unset("INT")] = None
    """Worker processes; default: one per usable core. Does not change the result."""


def data(args: Sequence[str]) -> int:
    actions: dict[str, Callable[[Sequence[str]], int]] = {
        "prepare": _prepare,
        "fetch": _fetch,
        "verify": _verify,
        "encode": _encode,
    }
    return dispatch("speedrun data", actions, args, "Prepare, fetch, verify and make token folders.")


def _prepare(args: Sequence[str]) -> int:
    parse(Prepare, "data prepare", args)
    return _describe(pocket.prepare(notice=say))


def _fetch(args: Sequence[str]) -> int:
    given: Fetch = parse(Fetch, "data fetch", args)
    if given.dataset != fineweb.NAME:
        raise UserError(f"Unknown dataset {given.dataset!r}.{nearest(given.dataset, [fineweb.NAME])}")
    chunks = given.chunks
    if chunks is None:
        track = get_track(given.track or "short")
        if track.locate is not fineweb.load:
            raise UserError(f"Track {track.name!r} does not use {fineweb.NAME}; choose short or medium.")
        recipe = get_recipe(given.recipe or default_for(track.name), track.name)
        tokens = recipe.schedule.tokens
        chunks = fineweb.chunks_needed(tokens, recipe.schedule.length, recipe.loader)
        say(f"{recipe.name} at {recipe.track} size trains on {tokens:,} tokens: {chunks} chunks")
    elif given.recipe or given.track:
        raise UserError(f"--chunks {chunks} says it already; drop --recipe and --track.")
    folder = fineweb.fetch(chunks, console=console)
    try:
        folder = fineweb.add_tokenizer(folder)
    except UserError as e:  # the tokens are complete without it
        say(f"no tokenizer.json, so `speedrun sample` will not work for these tokens: {e}")
    return _describe(folder)


def _verify(args: Sequence[str]) -> int:
    given: Verify = parse(Verify, "data verify", args)
    tokens = TokenFolder.read(given.folder) if given.folder else pocket.load()
    tokens.verify()
    return _describe(tokens)


def _encode(args: Sequence[str]) -> int:
    given: Encode = parse(Encode, "data encode", args)
    tokens = encode.encode_files(
        given.files,
        given.out,
        given.tokenizer,
        val_fraction=given.val_fraction,
        processes=given.processes,
        notice=say,
    )
    return _describe(tokens)


def _describe(tokens: TokenFolder) -> int:
    for name, file in sorted(tokens.files.items()):
        say(f"{name:18}  {file.tokens:>13,} tokens  sha256 {file.sha256[:16]}…")
    say(f"good: {tokens.path}")
    return 0


# -------------------------------------------------------------------- sample, doctor, sweep


@dataclass(frozen=True)
class Sample:
    """Write text with a trained model."""

    run: Annotated[Path, tyro.conf.Positional]
    """A run folder."""
    prompt: str = ""
    """How the text begins."""
    tokens: int = 200
    """Longest continuation, in tokens; it ends earlier where the model ends the document."""
    temperature: float = 0.8
    """How much chance there is in the choice; 0 always takes the likeliest token."""
    top_k: Annotated[int | None, tyro.conf.arg(metavar="INT|None")] = 50
    """Choose among so many likeliest tokens; None: all."""
    seed: int = 0
    """Another seed, another text."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    threads: Annotated[int | None, unset("INT")] = None
    """CPU threads; default: all usable cores."""


def sample(args: Sequence[str]) -> int:
    given: Sample = parse(Sample, "sample", args)
    machine = choose(given.device, "float32", given.threads, "sdpa")
    model, tokenizer, _ = sample_room.load_model(given.run, machine.device)
    text = sample_room.sample_text(
        model,
        tokenizer,
        given.prompt,
        tokens=given.tokens,
        temperature=given.temperature,
        top_k=given.top_k,
        seed=given.seed,
    )
    print(text)
    return 0


def doctor(args: Sequence[str]) -> int:
    given: Machinery = parse(Machinery, "doctor", args, about="What this machine will use and why; what is missing.")
    findings = doctor_room.examine(given.device, given.dtype, given.threads, given.attention)
    width = max(len(finding.what) for finding in findings)
    for f in findings:
        say(f"ok  {f.what:{width}}  {f.chosen} ({f.why})" if f.good else f"--  {f.what:{width}}  {f.chosen}: {f.why}")
    return 0


def sweep(args: Sequence[str]) -> int:
    given = parse(sweep_room.Sweep, "sweep", args, about=sweep_room.__doc__)
    return sweep_room.run(given, console)


# -------------------------------------------------------------------- races and records


def race(args: Sequence[str]) -> int:
    about = "Plan, run and judge a race. Exit code 0 for `valid` and `faster`, 1 for any other verdict."
    return race_room.hold(parse(Race, "race", args, about=about), console)


def stats(args: Sequence[str]) -> int:
    about = "What these losses prove about the target. Exit code 0 if they are valid, 1 if not."
    return race_room.stats(parse(race_room.Stats, "stats", args, about=about), console)


def verify(args: Sequence[str]) -> int:
    about = "Recompute a race or record from its run folders, and say what does not agree."
    return race_room.verify(parse(race_room.Verify, "verify", with_value(args, "replay"), about=about), console)


def challenge(args: Sequence[str]) -> int:
    about = "Race somebody's record against its baseline again, on this machine, with fresh seeds."
    return race_room.challenge(parse(race_room.Challenge, "challenge", args, about=about), console)


@dataclass(frozen=True)
class Records:
    """The leaderboard."""

    track: Annotated[str | None, unset("STR")] = None
    """Of this track alone; default: of all that have records."""
    root: Path = Path("records")
    """Where records are kept."""
    markdown: bool = False
    """As Markdown. `--markdown` alone will do."""
    plot: Annotated[Path | None, unset("FILE.svg")] = None
    """Also draw record times over the dates into this file; it needs --track where several have records."""


def records(args: Sequence[str]) -> int:
    given: Records = parse(Records, "records", with_value(args, "markdown"), about="The leaderboard of each track.")
    tracks = [given.track] if given.track else records_room.tracks(given.root)
    boards = {track: records_room.board(given.root, track) for track in tracks}
    if not any(boards.values()):
        raise UserError(f"There are no records in {given.root}{f' for track {given.track!r}' if given.track else ''}.")
    if given.plot is not None and len(boards) > 1:
        raise UserError(f"--plot draws one track, but {', '.join(boards)} have records; choose with --track.")
    for track, found in boards.items():
        say(f"\n## {track}\n" if given.markdown else f"{track} track")
        if given.markdown:
            say(records_room.markdown(found))
        else:
            grid(records_room.table(found))
        if given.plot is not None:
            write_atomic(given.plot, records_svg(track, found))
            say(f"drawn in {given.plot}")
    return 0


def compare(args: Sequence[str]) -> int:
    about = "Compare runs: losses by step, token and second."
    given = parse(compare_room.Compare, "compare", args, about=about)
    curves = compare_room.read_curves(given.runs)
    grid(compare_room.table(curves))
    for file, content in ((given.plot, compare_room.curves_svg), (given.csv, compare_room.as_csv)):
        if file is not None:
            write_atomic(file, content(curves))
            say(f"written to {file}")
    return 0


def ablate(args: Sequence[str]) -> int:
    given = parse(ablate_room.Ablate, "ablate", args, about=ablate_room.__doc__)
    lines = ablate_room.run(given, console)
    grid(ablate_room.table(lines))
    title = f"{given.recipe} without each of its switches"
    for file, content in ((given.markdown, ablate_room.markdown(lines)), (given.plot, ablation_svg(title, lines))):
        if file is not None:
            write_atomic(file, content)
            say(f"written to {file}")
    return 0


def report(args: Sequence[str]) -> int:
    return pages.run(parse(pages.Report, "report", args, about=pages.__doc__), say)


def trace(args: Sequence[str]) -> int:
    actions: dict[str, Callable[[Sequence[str]], int]] = {
        "show": lambda rest: traces.show(parse(traces.Show, "trace show", rest), say),
        "simulate": lambda rest: traces.simulate(parse(traces.Simulate, "trace simulate", rest), say),
    }
    return dispatch("speedrun trace", actions, args, "Look at recorded steps, or foretell them.")


def export(args: Sequence[str]) -> int:
    given = parse(export_room.Export, "export", with_value(args, "force"))
    return export_room.run(given, say)


# -------------------------------------------------------------------- the command itself

COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (train, "train one model to a track's target"),
    "sample": (sample, "write text with a trained model"),
    "tracks": (tracks, "what must be reached, on which tokens"),
    "recipes": (recipes, "how: list them, or show every field of one"),
    "data": (data, "prepare, fetch, verify or make token folders"),
    "sweep": (sweep, "search a recipe's fields within a budget"),
    "race": (race, "prove a recipe: plan, interleaved runs, verdict, record"),
    "stats": (stats, "what some losses prove about a target"),
    "verify": (verify, "recompute a race or record, and say what does not agree"),
    "challenge": (challenge, "race somebody's record again on this machine"),
    "records": (records, "the leaderboard"),
    "ablate": (ablate, "what each switch of a recipe is worth"),
    "compare": (compare, "losses of several runs by step, token and second"),
    "report": (report, "one HTML page of a run, race, record, ablation or of all records"),
    "export": (export, "write a recipe as one file that trains by itself"),
    "trace": (trace, "what the processes of a run wait for, or would wait for"),
    "doctor": (doctor, "what this machine will use, and what is missing"),
}


def dispatch(prog: str, actions: dict[str, Callable[[Sequence[str]], int]], args: Sequence[str], about: str) -> int:
    if not args or args[0] in ("-h", "--help"):
        usage = f"usage: {prog} {{{','.join(actions)}}} ...\n\n{about}\n`{prog} COMMAND --help` explains one."
        print(usage, file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    if args[0] not in actions:
        raise UserError(f"Unknown command {args[0]!r}.{nearest(args[0], actions)}")
    return actions[args[0]](args[1:])


def main(argv: Sequence[str] | None = None) -> int:
    args = sys.argv[1:] if argv is None else list(argv)
    lines = "\n".join(f"  {name:9} {text}" for name, (_, text) in COMMANDS.items())
    about = f"Train GPTs to a target validation loss as fast as this machine allows, and prove it.\n\n{lines}\n"
    try:
        try:
            if args == ["--version"]:
                print(f"speedrun {speedrun.__version__}")
                return 0
            return dispatch("speedrun", {name: call for name, (call, _) in COMMANDS.items()}, args, about)
        finally:
            sys.stdout.flush()  # here, where a reader that has left can still be told from a bug
    except UserError as e:
        if speaks(e):
            print(f"speedrun: {e}", file=sys.stderr)
        return 2
    except RankLost as e:
        if not e.told:
            print(f"speedrun: {e}; all ranks end.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("speedrun: stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `| head` has seen enough
        return 1
