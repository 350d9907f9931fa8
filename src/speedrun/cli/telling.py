"""Commands that tell or prepare: tracks, recipes, data, sample, doctor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import tyro
from msgspec import Meta
from rich.table import Column, Table

from speedrun import doctor as doctor_room
from speedrun import gpu_report
from speedrun import sample as sample_room
from speedrun.checks import Count, NotNegative, Positive
from speedrun.cli.training import Machinery
from speedrun.cli.words import dispatch, grid, parse, say
from speedrun.data import encode, fineweb, pocket
from speedrun.data.shards import TokenFolder
from speedrun.errors import UserError, nearest
from speedrun.files import write_atomic
from speedrun.model.gpt import count_parameters
from speedrun.options import unset
from speedrun.recipes import DEFAULT, RECIPES, default_for, get_recipe
from speedrun.report.schedules import schedule_svg
from speedrun.tracks import TRACKS, get_track
from speedrun.training.config import Options, Recipe, fields_of, meanings
from speedrun.training.device import check_processes, choose
from speedrun.training.distributed import is_first, joined, launch, ranks
from speedrun.training.load import usable_cores
from speedrun.training.memory import memory_of, problems_of
from speedrun.training.run import check_ranks

# -------------------------------------------------------------------- tracks and recipes


def tracks(args: Sequence[str]) -> int:
    @dataclass(frozen=True)
    class Tracks:
        """List the tracks."""

    parse(Tracks, "tracks", args, about="List the tracks: what must be reached, on which tokens.")
    rows = [("track", "target loss", "data", "what")]
    for track in TRACKS.values():
        try:
            track.locate()
            data = "ready"
        except UserError:
            data = "missing"
        rows.append((track.name, f"{track.target:g} nats", data, track.about))
    grid(rows)
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
        rows = [("recipe", "sizes", "what")]
        for name, sizes in RECIPES.items():
            called = name + (" (default)" if name == DEFAULT else "")
            rows.append((called, ", ".join(sizes), next(iter(sizes.values()))().about))
        grid(rows)
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
    grid(recipe.model.table())
    table = Table(Column("field", no_wrap=True), "value", "meaning", box=None)
    explained = meanings(Recipe)
    for name, value in fields_of(recipe).items():
        if "." in name:
            table.add_row(name, f"{value:g}" if isinstance(value, float) else str(value), explained[name])
    say(table)
    if given.plot is not None:
        write_atomic(given.plot, schedule_svg(recipe))
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
    val_fraction: Annotated[float, Meta(gt=0, lt=1)] = 0.05
    """Share of the documents that become the validation split."""
    processes: Annotated[Positive | None, unset("INT")] = None
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
    folder = fineweb.fetch(chunks, say)
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
        processes=usable_cores() if given.processes is None else given.processes,
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
    tokens: Count = 200
    """Longest continuation, in tokens; it ends earlier where the model ends the document."""
    temperature: NotNegative = 0.8
    """How much chance there is in the choice; 0 always takes the likeliest token."""
    top_k: Annotated[Positive | None, tyro.conf.arg(metavar="INT|None")] = 50
    """Choose among so many likeliest tokens; None: all."""
    seed: Count = 0
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


@dataclass(frozen=True)
class Doctor:
    """What this machine will use and why; what is missing."""

    gpu_report: bool = False
    """Run a few steps of each kind of a recipe on made-up tokens, and write what was predicted beside what was
    measured. Meant for a machine with a GPU."""
    recipe: str = "interleaved"
    """With --gpu-report: whose steps; `speedrun recipes` lists them."""
    track: str = "short"
    """With --gpu-report: in which size."""
    steps: Positive = 5
    """With --gpu-report: timed steps of each kind."""
    nproc: Positive = 1
    """With --gpu-report: processes, one for each GPU."""
    compile: bool = True
    """With --gpu-report: use torch.compile."""
    out: Path = Path("gpu-report.md")
    """With --gpu-report: the file, to be attached to an issue."""
    machine: Annotated[Machinery, tyro.conf.arg(name="")] = field(default_factory=Machinery)


def doctor(args: Sequence[str]) -> int:
    given: Doctor = parse(Doctor, "doctor", args, about="What this machine will use and why; what is missing.")
    recipe = get_recipe(given.recipe, given.track) if given.gpu_report else get_recipe(DEFAULT, "pocket")
    if given.nproc != 1 and not given.gpu_report:
        raise UserError(f"--nproc {given.nproc} goes with --gpu-report; drop it.")
    if given.gpu_report and given.machine.device == "auto" and not torch.cuda.is_available():
        raise UserError(
            "--gpu-report is for a machine with a GPU, and torch sees none here; --device cpu --track pocket tries it "
            "on the CPU."
        )
    if given.gpu_report and (given.out.is_dir() or not given.out.parent.is_dir()):
        raise UserError(f"--out {given.out} is a folder, or in a folder that does not exist; name a file.")
    if given.nproc != 1 and ranks() == 1:
        check_processes(given.nproc, given.machine.device)
        check_ranks(recipe, given.nproc)
        return launch(given.nproc, ["doctor", *args])
    machine = given.machine.choose(recipe)
    findings = doctor_room.examine(machine)
    if not given.gpu_report or is_first():
        width = max(len(finding.what) for finding in findings)
        for f in findings:
            text = (
                f"ok  {f.what:{width}}  {f.chosen} ({f.why})"
                if f.good
                else f"--  {f.what:{width}}  {f.chosen}: {f.why}"
            )
            say(text)
    if given.gpu_report:
        options = Options(compile=given.compile)
        if machine.device.type != "cuda":  # there the trainer looks
            for problem in problems_of(memory_of(recipe, machine, options, given.nproc), recipe):
                raise UserError(problem)
        with joined(machine.device) as (comm, _):
            for title, lines, text in gpu_report.report(recipe, machine, options, comm, findings, given.steps):
                if comm.rank == 0:
                    write_atomic(given.out, text)  # it grows: a crash leaves what was measured before
                    say(f"\n{title}")
                    grid(lines)
        if is_first():
            say(f"report       {given.out}")
    return 0
