"""The `speedrun` command: parses, calls, prints.

speedrun train                      the pocket track with the default recipe
speedrun train --help               every field of the recipe, with its meaning
"""

import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

import speedrun
from speedrun import doctor as doctor_room
from speedrun import sample as sample_room
from speedrun.data import encode, pocket
from speedrun.data.loader import LoaderConfig
from speedrun.data.shards import TokenFolder
from speedrun.errors import UserError, nearest
from speedrun.model.gpt import GPTConfig, count_parameters
from speedrun.optim.adamw import AdamWConfig
from speedrun.race import sweep as sweep_room
from speedrun.recipes import DEFAULT, LINEAGE, get_recipe
from speedrun.tracks import TRACKS, Track, get_track, own_track
from speedrun.train import run as run_room
from speedrun.train.config import Recipe, ValidationConfig, fields_of, meanings, recipe_from_dict
from speedrun.train.device import choose
from speedrun.train.loop import Options
from speedrun.train.runlog import RunFolder
from speedrun.train.schedule import ScheduleConfig

console = Console(highlight=False, soft_wrap=True)


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
    """The value of --name before the real parse, which needs it to know the defaults."""
    for i, arg in enumerate(args):
        if arg == f"--{name}" and i + 1 < len(args):
            return args[i + 1]
        if arg.startswith(f"--{name}="):
            return arg.partition("=")[2]
    return None


# -------------------------------------------------------------------- train


@dataclass(frozen=True)
class Machinery:
    """Where and how it is computed; shared by the commands that compute."""

    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    dtype: str = "auto"
    """auto, float32 or bfloat16: the arithmetic of matmuls."""
    threads: int | None = None
    """CPU threads; default: all usable cores."""


@dataclass(frozen=True)
class Train:
    """Train one model; leaves a run folder."""

    recipe: str = DEFAULT
    """Which recipe; `speedrun recipes` lists them."""
    track: str = "pocket"
    """Which track; `speedrun tracks` lists them."""
    data: Path | None = None
    """A folder made by `speedrun data encode`, instead of a track."""
    target: float | None = None
    """With --data: the validation loss to reach."""
    seed: int = 0
    """Draws the initial weights and the order of documents."""
    out: Path | None = None
    """Run folder; default: a new one under runs/."""
    resume: str | None = None
    """A run folder to continue, or `auto`: the newest unfinished one that fits (a new run if there is none)."""
    checkpoint_every: int | None = None
    """Steps between checkpoints, inside the clock; 0: only at the end; default: at each validation."""
    keep: int = 2
    """Checkpoints kept on disk."""
    micro_rows: int | None = None
    """Rows per forward pass; default: the whole batch. Halves itself when memory runs out."""
    compile: bool = True
    """Use torch.compile where it works."""
    save: bool = True
    """Write the trained model at the end (outside the clock)."""
    sample: bool = True
    """Show a little text from the model at the end."""
    machine: Annotated[Machinery, tyro.conf.arg(name="")] = field(default_factory=Machinery)
    model: GPTConfig = field(default_factory=GPTConfig)
    """The network."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """How tokens become rows."""
    optim: AdamWConfig = field(default_factory=AdamWConfig)
    """The optimizer."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Steps, batch and learning rate over time."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    """When and how the validation loss is measured."""

    @classmethod
    def from_recipe(cls, recipe: Recipe, **given: Any) -> "Train":
        parts = {n: getattr(recipe, n) for n in ("model", "loader", "optim", "schedule", "validation")}
        return cls(recipe=recipe.name, track=recipe.track, **parts, **given)

    def resolved(self, base: Recipe) -> Recipe:
        parts = {n: getattr(self, n) for n in ("model", "loader", "optim", "schedule", "validation")}
        return dataclasses.replace(base, **parts)


def train(args: Sequence[str]) -> int:
    resume = option(args, "resume")
    name, track_name = option(args, "recipe"), option(args, "track")
    if name and name not in LINEAGE or track_name and track_name not in TRACKS:
        get_recipe(name or DEFAULT, get_track(track_name or "pocket").name)
    if resume and resume != "auto":
        about = RunFolder.open(Path(resume)).description
        stored = recipe_from_dict(about["recipe"])
        base = get_recipe(name, track_name or stored.track) if name else stored
        own = Path(about["data"]["folder"]) if about["track"] == "own" else None
        default = Train.from_recipe(base, seed=about["seed"], data=own, target=about["target"] if own else None)
        if not own and not track_name:
            default = dataclasses.replace(default, track=about["track"])
    else:
        base = get_recipe(name or DEFAULT, track_name or "pocket")
        default = Train.from_recipe(base)
    given: Train = parse(Train, "train", args, default, "Train one model to a track's target; leaves a run folder.")
    recipe = given.resolved(base)
    if given.target is not None and given.data is None:
        raise UserError(f"--target {given.target} goes with --data; the target of track {given.track!r} is fixed.")
    track = own_track(given.data, given.target) if given.data else get_track(given.track)
    return run_training(given, recipe, track)


def run_training(given: Train, recipe: Recipe, track: Track) -> int:
    every = recipe.validation.every if given.checkpoint_every is None else given.checkpoint_every
    if every < 0 or given.keep < 1 or (given.micro_rows is not None and given.micro_rows < 1) or given.seed < 0:
        raise UserError("--checkpoint-every and --seed must not be negative, --keep and --micro-rows at least 1.")
    options = Options(given.seed, given.compile, every, given.keep, given.save, given.micro_rows)
    machine = choose(given.machine.device, given.machine.dtype, given.machine.threads)
    where: Path | None = None
    if given.resume == "auto":
        where = given.out if given.out and (given.out / "run.json").exists() else None
        where = where or (None if given.out else run_room.newest_unfinished(recipe.name, track.name, given.seed))
        if where is None:
            console.print("nothing to resume: starting a new run", markup=False)
    elif given.resume:
        where = Path(given.resume)
    if where is not None:
        outcome = run_room.resume(where, recipe, track, machine, options)
    else:
        outcome = run_room.start(recipe, track, machine, options, out=given.out)
    return summarize(outcome, given, machine.device)


def summarize(outcome: run_room.Outcome, given: Train, device: Any) -> int:
    """What happened, in a few lines. Exit code 0 only for a run that ended well and reached its target, if it has one."""
    result, target = outcome.result, outcome.target
    say = lambda line: console.print(line, markup=False)  # noqa: E731
    if result["status"] == "interrupted":
        say(f"Stopped and saved. To continue:\n  speedrun train --resume {outcome.folder}")
        return 128 + signal.SIGINT
    if result["status"] == "failed":
        say(f"Failed: {result['reason']}. The weights before that step are untouched.\nrun folder   {outcome.folder}")
        return 1
    loss = result["val_loss"]
    if target is not None:
        verdict = "reached" if outcome.reached else "NOT reached"
        say(f"\ntarget       {target:.2f} {verdict}: validation loss {loss:.4f}")
    else:
        say(f"\nloss         {loss:.4f} on the validation split (no target)")
    timed = "" if result["timed"] else " (resumed, so not a time that counts)"
    say(f"trained      {result['train_time']:.1f} s on the clock{timed}, {result['steps']:,} steps")
    say(f"tokens       {result['tokens']:,}, {result['tokens_per_second']:,.0f} a second")
    say(f"peak memory  {', '.join(f'{v:,.0f} MiB {k}' for k, v in result['peak_memory'].items())}")
    if given.sample and given.save and (outcome.folder / "tokenizer.json").exists():
        model, tokenizer, _ = sample_room.load_model(outcome.folder, device)
        text = sample_room.sample_text(model, tokenizer, "The ", tokens=60, temperature=0.8, top_k=50, seed=0)
        say("sample       " + " ".join(text.split()))
    say(f"run folder   {outcome.folder}")
    return 0 if target is None or outcome.reached else 1


# -------------------------------------------------------------------- tracks and recipes


def tracks(args: Sequence[str]) -> int:
    @dataclass(frozen=True)
    class Tracks:
        """List the tracks."""

    parse(Tracks, "tracks", args, about="List the tracks: what must be reached, on which tokens.")
    table = Table("track", "target", "what", "data", box=None)
    for track in TRACKS.values():
        try:
            data = str(track.locate().path)
        except UserError:
            data = "not prepared"
        table.add_row(track.name, f"{track.target:.2f}", track.about, data)
    console.print(table)
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
        console.print(table)
        return 0
    if given.action != "show":
        raise UserError(f"Unknown action {given.action!r}; use `speedrun recipes` or `speedrun recipes show NAME`.")
    recipe = get_recipe(given.name or DEFAULT, get_track(given.track).name)
    counts = count_parameters(recipe.model)
    console.print(f"{recipe.name} at {recipe.track} size: {recipe.about}", markup=False)
    parts = ", ".join(f"{k} {v / 1e6:.2f} M" for k, v in counts.items())
    console.print(
        f"{sum(counts.values()) / 1e6:.2f} M parameters ({parts}), {recipe.schedule.tokens / 1e6:.2f} M tokens",
        markup=False,
    )
    table = Table("field", "value", "meaning", box=None)
    explained = meanings(Recipe)
    for name, value in fields_of(recipe).items():
        if "." in name:
            table.add_row(name, str(value), explained.get(name, ""))
    console.print(table)
    return 0


# -------------------------------------------------------------------- data


@dataclass(frozen=True)
class Prepare:
    """Fetch, clean, split and encode the pocket corpus. Quick when it is already there."""


@dataclass(frozen=True)
class Verify:
    """Check every token file against its sha256."""

    folder: Annotated[Path | None, tyro.conf.Positional] = None
    """A folder made by `speedrun data encode`; default: the pocket corpus."""


@dataclass(frozen=True)
class Encode:
    """Turn your own text into a token folder for `speedrun train --data`."""

    files: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Text files, .jsonl files with a text field, or folders of them."""
    out: Path
    """The token folder to make."""
    tokenizer: str = "pocket"
    """`pocket`, or the path of a tokenizer.json."""
    val_fraction: float = 0.05
    """Share of the documents that become the validation split."""
    processes: int | None = None
    """Worker processes; default: one per usable core. Does not change the result."""


def data(args: Sequence[str]) -> int:
    actions: dict[str, Callable[[Sequence[str]], int]] = {
        "prepare": _prepare,
        "verify": _verify,
        "encode": _encode,
    }
    return dispatch("speedrun data", actions, args, "Prepare, verify and make token folders.")


def _prepare(args: Sequence[str]) -> int:
    parse(Prepare, "data prepare", args)
    tokens = pocket.prepare(notice=console.print)
    return _describe(tokens)


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
        notice=console.print,
    )
    return _describe(tokens)


def _describe(tokens: TokenFolder) -> int:
    for name, file in sorted(tokens.files.items()):
        console.print(f"{name}  {file.tokens:>12,} tokens  sha256 {file.sha256[:16]}…", markup=False)
    console.print(f"good: {tokens.path}", markup=False)
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
    """0 always takes the likeliest token."""
    top_k: int | None = 50
    """Choose among so many likeliest tokens; None: all."""
    seed: int = 0
    """Another seed, another text."""
    machine: Annotated[Machinery, tyro.conf.arg(name="")] = field(default_factory=Machinery)


def sample(args: Sequence[str]) -> int:
    given: Sample = parse(Sample, "sample", args)
    machine = choose(given.machine.device, "float32", given.machine.threads)
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
    table = Table("", "what", "chosen", "why", box=None)
    for finding in doctor_room.examine(given.device, given.dtype, given.threads):
        table.add_row("ok" if finding.good else "--", finding.what, finding.chosen, finding.why)
    console.print(table)
    return 0


def sweep(args: Sequence[str]) -> int:
    given = parse(sweep_room.Sweep, "sweep", args, about=sweep_room.__doc__)
    return sweep_room.run(given, console)


# -------------------------------------------------------------------- the command itself

COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (train, "train one model to a track's target"),
    "sample": (sample, "write text with a trained model"),
    "tracks": (tracks, "what must be reached, on which tokens"),
    "recipes": (recipes, "how: list them, or show every field of one"),
    "data": (data, "prepare, verify or make token folders"),
    "sweep": (sweep, "search a recipe's fields within a budget"),
    "doctor": (doctor, "what this machine will use, and what is missing"),
}


def dispatch(prog: str, actions: dict[str, Callable[[Sequence[str]], int]], args: Sequence[str], about: str) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(f"usage: {prog} {{{','.join(actions)}}} ...\n\n{about}\n`{prog} COMMAND --help` explains one.")
        return 0 if args else 2
    if args[0] not in actions:
        raise UserError(f"Unknown command {args[0]!r}.{nearest(args[0], actions)}")
    return actions[args[0]](args[1:])


def main(argv: Sequence[str] | None = None) -> int:
    args = sys.argv[1:] if argv is None else list(argv)
    if args == ["--version"]:
        print(f"speedrun {speedrun.__version__}")
        return 0
    lines = "\n".join(f"  {name:9} {text}" for name, (_, text) in COMMANDS.items())
    try:
        about = f"Train GPTs to a target validation loss as fast as this machine allows, and prove it.\n\n{lines}\n"
        return dispatch("speedrun", {name: call for name, (call, _) in COMMANDS.items()}, args, about)
    except UserError as e:
        print(f"speedrun: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("speedrun: stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left; so do we
        return 0
