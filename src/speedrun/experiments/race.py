"""Run a race: the plan first, then every run as a process of its own, then the verdict.

    speedrun race --recipe normuon --against adamw --runs 10

The same command continues a race that was stopped, killed or switched off: finished runs stay, an interrupted one is
set aside and starts again from step 0. What it may not do is change the plan.
"""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from msgspec import Meta
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from speedrun.checks import Count, Positive
from speedrun.errors import UserError
from speedrun.experiments import plan as plans
from speedrun.experiments.children import arithmetic_for, kept_dtype, last_words, was_stopped
from speedrun.experiments.plan import PLAN, Entry, Plan, Settings
from speedrun.experiments.statistics import ALPHA, FEWEST
from speedrun.experiments.sweep import field_of, value_of
from speedrun.experiments.verdict import TEXT, VERDICT, Row, decided, judge, read_row, render
from speedrun.experiments.verification import INTERRUPTED, MANIFEST, RUNS, Run, examine_run, write_manifest
from speedrun.files import locked, sha256_file, write_atomic, write_json
from speedrun.options import unset
from speedrun.recipes import DEFAULT, get_recipe
from speedrun.tracks import Track, get_track, own_track
from speedrun.training import scale
from speedrun.training.config import Recipe, as_tuple, with_fields
from speedrun.training.device import check_settings
from speedrun.training.run import check_ranks, check_rules, check_supply, fit_to_tokens, hashes
from speedrun.training.runlog import METRICS, RESULT, SOURCE, read_metrics, read_result, source_sha256

POLL = 1.0  # seconds between looks at a run's progress, which must not disturb it


@dataclass(frozen=True)
class Race:
    recipe: str = DEFAULT
    """Side A: the recipe that is to prove something."""
    against: Annotated[str | None, unset("STR")] = None
    """Side B: the recipe that it is compared with; default: none, the target alone."""
    track: str = "pocket"
    """On which track. With --data: at the size of which track."""
    data: Annotated[Path | None, unset("PATH")] = None
    """A folder made by `speedrun data encode`, instead of a track's tokens."""
    target: Annotated[float | None, unset("FLOAT")] = None
    """With --data: the validation loss to reach, in nats per token."""
    runs: Annotated[int, Meta(ge=FEWEST)] = 10
    """Runs of each side. Two sides are interleaved in blocks of four (ABBA), so it must be even then."""
    changes: Annotated[tuple[str, ...], unset("FIELD=VALUE ...", name="set")] = ()
    """FIELD=value, changed in side A's recipe."""
    against_changes: Annotated[tuple[str, ...], unset("FIELD=VALUE ...", name="against-set")] = ()
    """FIELD=value, changed in side B's recipe."""
    kind: Literal["full", "systems"] = "full"
    """full: losses are tested against the target. systems: side A only computes the same thing faster, which bit-equal
    losses prove instead."""
    looks: Annotated[tuple[str, ...], unset("end|every|INT ...")] = ("end",)
    """When results are judged: at the `end`, after `every` block (or run, with one side), or after these ones. A race
    that is decided at a look ends there; every look makes the others a little stricter."""
    alpha: float = ALPHA
    """How often a wrong `valid` or `faster` is accepted."""
    seed: Annotated[Count | None, unset("INT")] = None
    """First seed; the others follow it. Default: drawn from the plan, so that nobody can pick one."""
    out: Annotated[Path | None, unset("PATH")] = None
    """Folder of the race; the same folder continues. Default: races/TRACK-RECIPE[-vs-AGAINST]."""
    nproc: Positive = 1
    """Processes of each run, on this machine; the same for both sides."""
    threads: Annotated[Positive | None, unset("INT")] = None
    """CPU threads of each process; default: all usable cores, shared by the processes."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    dtype: str = "auto"
    """auto, float32 or bfloat16: the arithmetic of matmuls."""
    attention: str = "auto"
    """auto, fa3, varlen or sdpa."""
    compile: bool = True
    """Use torch.compile where it works."""
    submit: Annotated[str | None, unset("NAME")] = None
    """Write a record folder of this name when the verdict allows it."""
    records: Path = Path("records")
    """Where records are kept."""


# -------------------------------------------------------------------- the plan


def side(name: str, track: str, changes: Sequence[str], unsaid: Sequence[str] = ()) -> tuple[str, Recipe]:
    """(label, recipe) of a side, with `FIELD=value` applied; the label leaves out what the other side changes, too."""
    base = get_recipe(name, track)
    wanted: dict[str, Any] = {}
    for text in changes:
        field, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"{text!r} changes nothing; write FIELD=value, such as optim.lr=0.01.")
        wanted[field] = as_tuple(value_of(value, field_of(base, field), field))
    return " ".join([name, *(c for c in changes if c not in unsaid)]), with_fields(base, wanted)


def look_numbers(words: tuple[str, ...], last: int) -> tuple[int, ...]:
    if words == ("end",):
        return (last,)
    if words == ("every",):
        return tuple(range(FEWEST, last + 1))
    if not words or not all(word.isdecimal() for word in words):
        raise UserError(
            f"--looks is {' '.join(words) or 'empty'}; write `end`, `every`, or numbers such as 2 4 {last}."
        )
    numbers = tuple(map(int, words))
    return numbers if numbers[-1] >= last else (*numbers, last)


def draw_up(given: Race, created: str | None = None) -> Plan:
    """The plan that the options describe; nothing is written yet."""
    if given.target is not None and given.data is None:
        raise UserError(f"--target {given.target} goes with --data; the target of track {given.track!r} is fixed.")
    if given.data is not None and given.target is None:
        raise UserError(f"--data {given.data} needs a --target: a race is about reaching one.")
    if given.against is None and given.against_changes:
        raise UserError("--against-set changes side B's recipe, but there is none; name it with --against.")
    size = get_track(given.track).name
    # What is changed on both sides alike is said once, not in every line of the verdict.
    both = [c for c in given.changes if c in given.against_changes]
    sides = {"A": side(given.recipe, size, given.changes, both)}
    if given.against is not None:
        sides["B"] = side(given.against, size, given.against_changes, both)
    track = own_track(given.data, given.target) if given.data else get_track(given.track)
    return of_sides(given, sides, track, created or plans.now(), " ".join(both))


def of_sides(given: Race, sides: dict[str, tuple[str, Recipe]], track: Track, created: str, both: str) -> Plan:
    check_settings(given.device, given.dtype, given.nproc)
    if given.dtype == "auto":
        sides_say = {arithmetic_for(recipe, given.device, given.threads, given.nproc) for _, recipe in sides.values()}
        given = dataclasses.replace(given, dtype="bfloat16" if sides_say == {"bfloat16"} else "float32")
    tokens = track.locate()
    assert track.target is not None
    recipes = {name: fit_to_tokens(recipe, tokens, track) for name, (_, recipe) in sides.items()}
    for recipe in recipes.values():
        check_rules(recipe, track)
        scale.check(recipe)
        check_ranks(recipe, given.nproc)
        check_supply(recipe, tokens, track)
    labels = {name: label for name, (label, _) in sides.items()}
    if len(set(labels.values())) < len(labels):
        labels = {name: f"{label} ({name})" for name, label in labels.items()}
    labels |= {"both": both} if both else {}
    files = hashes(tokens)
    first = given.seed or 0
    plan = Plan(
        created=created,
        kind=given.kind,
        track=track.name,
        target=track.target,
        val_tokens=track.val_tokens,
        files=files,
        data=str(given.data) if given.data else None,
        labels=labels,
        recipes=recipes,
        seeds=tuple(range(first, first + given.runs)),
        drawn=given.seed is None,
        alpha=given.alpha,
        looks=look_numbers(given.looks, given.runs // 2 if len(sides) == 2 else given.runs),
        splits=("val", "shadow") if any("shadow_" in name for name in files) else ("val",),
        settings=Settings(given.device, given.dtype, given.threads, given.attention, given.compile, given.nproc),
        machine=plans.this_machine(),
        source_sha256=source_sha256(),
    )
    plans.check(plan)
    return dataclasses.replace(plan, seeds=plans.drawn_seeds(plan.to_json(), given.runs)) if plan.drawn else plan


SAYS = {
    "machine": "was planned on another machine or installation; times of different machines are never mixed",
    "source_sha256": "was planned with other code; put that version back, or begin another race",
    "files": "was planned on other data; put that back, or begin another race",
}


def compare_plans(folder: Path, stored: Plan, wanted: Plan) -> None:
    old, new = stored.to_json(), wanted.to_json()
    changed = sorted(name for name in {*old, *new} if not plans.agree(old.get(name), new.get(name)))
    for name, words in SAYS.items():
        if name in changed:
            raise UserError(f"The race in {folder} {words} (--out names another folder).")
    if changed:
        raise UserError(
            f"{folder} holds a race with another {', '.join(changed)}; a plan is not changed once it is written, "
            "so choose another --out."
        )


# -------------------------------------------------------------------- runs


class Course:
    """A race folder while its race is going on."""

    def __init__(self, folder: Path, plan: Plan, console: Console, lock: BinaryIO | None) -> None:
        self.folder, self.plan, self.console, self.lock = folder, plan, console, lock
        self.plan_sha256 = sha256_file(folder / PLAN)
        self.rows: list[Row] = []
        self.entries = plan.entries

    def run(self) -> dict[str, Any]:
        """Do what is missing, look when it was planned, and return the verdict."""
        with self.progress() as tick:
            for look in self.plan.looks:
                for entry in self.plan.until(look)[len(self.rows) :]:
                    self.rows.append(self.result_of(entry, tick))
                verdict = judge(self.plan, self.rows, look, self.plan_sha256)
                if decided(verdict) or look == self.plan.looks[-1]:
                    break
                self.console.print(f"look after {self.plan.unit} {look}: not decided yet ({verdict['why']})")
        return verdict

    def result_of(self, entry: Entry, tick: Callable[[Entry, int], None]) -> Row:
        path = self.folder / RUNS / entry.name
        fresh = not finished(path)
        if fresh:
            if source_sha256() != self.plan.source_sha256:
                raise UserError(f"The race in {self.folder} {SAYS['source_sha256']} (--out names another folder).")
            self.set_aside(path)
            self.execute(entry, path, tick)
        run = Run.read(self.folder, entry)
        problems = examine_run(run, self.plan, self.plan_sha256, path / SOURCE / "speedrun")
        if problems:
            raise UserError(f"The race in {self.folder} cannot go on: {problems[0]}. Begin another with --out.")
        row = read_row(path, entry)
        tick(entry, run.result.steps)
        told = f"loss {row['loss']:.4f} in {row['time']:.2f} s" if run.ok else f"failed: {row['reason']}"
        number = f"[{entry.number}/{len(self.entries)}]"
        self.console.print(
            f"{number} {self.plan.labels[entry.side]}, seed {entry.seed}: {told}" + ("" if fresh else " (done before)")
        )
        return row

    def set_aside(self, path: Path) -> None:
        """An attempt without an end is kept as evidence: whoever stops runs that look bad leaves a trace."""
        if not path.exists():
            return
        # If the launcher of several processes was killed, too, they end by themselves, but a little later.
        with locked(path / ".lock", lambda: self.console.print(f"{path.name} is about to end; waiting for it")):
            pass
        shelf = self.folder / INTERRUPTED
        shelf.mkdir(exist_ok=True)
        number = next(n for n in range(1, 10**6) if not (shelf / f"{path.name}-{n}").exists())
        os.replace(path, shelf / f"{path.name}-{number}")
        self.console.print(f"{path.name} was interrupted; it starts again from step 0")

    def execute(self, entry: Entry, path: Path, tick: Callable[[Entry, int], None]) -> None:
        errors = self.folder / ".stderr"
        # A run inherits the lock, so that it holds the race even if this process is killed before it.
        inherited = (self.lock.fileno(),) if self.lock is not None else ()
        with open(errors, "w+") as stderr:
            child = subprocess.Popen(
                self.command(entry, path), stdout=subprocess.DEVNULL, stderr=stderr, pass_fds=inherited
            )
            try:
                self.wait(child, entry, path, tick)
            except BaseException:
                child.terminate()
                child.wait()
                raise
        said = errors.read_text(errors="replace")
        errors.unlink()
        if finished(path):
            return
        if was_stopped(child.returncode):
            raise KeyboardInterrupt  # somebody stopped the run, and so the race
        last = (last_words(said) or f"exit code {child.returncode}").rstrip(".")
        raise UserError(f"Run {entry.name} ended without a result: {last}. Mend that; the same command goes on.")

    def wait(
        self, child: subprocess.Popen[bytes], entry: Entry, path: Path, tick: Callable[[Entry, int], None]
    ) -> None:
        while True:
            try:
                child.wait(POLL if self.console.is_terminal else None)
                return
            except subprocess.TimeoutExpired:
                if (path / METRICS).exists():
                    tick(entry, len(read_metrics(path, "train")))

    def command(self, entry: Entry, path: Path) -> list[str]:
        recipe, settings = self.plan.recipes[entry.side], self.plan.settings
        base = get_recipe(recipe.name, recipe.track)
        words = [sys.executable, "-m", "speedrun", "train", "--recipe", recipe.name, "--track", recipe.track]
        words += plans.flags(recipe, base)
        if self.plan.data is not None:
            words += ["--data", self.plan.data, "--target", repr(self.plan.target)]
        for name, value in vars(settings).items():
            words += [] if value is None else [f"--{name}", str(value)]
        words += ["--shadow", str("shadow" in self.plan.splits), "--plan", self.plan_sha256, "--seed", str(entry.seed)]
        return [*words, "--checkpoint-every", "0", "--save", "False", "--sample", "False", "--out", str(path)]

    # ---------------------------------------------------------------- what a person sees

    @contextmanager
    def progress(self) -> Iterator[Callable[[Entry, int], None]]:
        """One bar over the steps of all runs, on a terminal; elsewhere the lines of the runs are enough."""
        steps = [self.plan.recipes[entry.side].schedule.total for entry in self.entries]
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
        quiet = not self.console.is_terminal
        with Progress(*columns, TimeRemainingColumn(), console=self.console, transient=True, disable=quiet) as bar:
            task = bar.add_task("race", total=sum(steps))

            def tick(entry: Entry, done: int) -> None:
                k = entry.number - 1
                text = f"run {entry.number}/{len(steps)} ({entry.name}) step {done}/{steps[k]}"
                bar.update(task, completed=sum(steps[:k]) + done, description=text)

            yield tick


def finished(path: Path) -> bool:
    """Whether a run came to an end by itself, well or badly."""
    return (path / RESULT).exists() and read_result(path).status in ("ok", "failed")


# -------------------------------------------------------------------- the command


def default_folder(given: Race) -> Path:
    name = "own" if given.data else given.track
    return Path("races") / "-".join([name, given.recipe, *(["vs", given.against] if given.against else [])])


def hold(given: Race, console: Console) -> tuple[Path, dict[str, Any]]:
    """Race as the options say, or go on; returns the folder and the verdict."""
    folder = given.out or default_folder(given)
    if folder.is_dir() and not (folder / PLAN).exists() and any(not p.name.startswith(".") for p in folder.iterdir()):
        raise UserError(f"{folder} already holds files that are no race; choose another --out.")
    given = dataclasses.replace(given, dtype=planned_dtype(folder, given.dtype))
    wanted = draw_up(given)
    return folder, start(folder, wanted, console, lambda created: draw_up(given, created))


def planned_dtype(folder: Path, asked: str) -> str:
    """A race that goes on keeps the arithmetic of its plan, whatever a trial would say today."""
    return kept_dtype(folder, Plan.read(folder).settings.dtype, asked) if (folder / PLAN).exists() else asked


def start(folder: Path, wanted: Plan, console: Console, again: Callable[[str], Plan]) -> dict[str, Any]:
    """Write the plan, or find it unchanged; then run. `again` draws up the plan as at another time."""

    def waiting() -> None:
        console.print(f"another process is racing in {folder}, or a run of it is still going; waiting for it")

    with locked(folder / ".lock", waiting) as lock:
        if (folder / PLAN).exists():
            stored = Plan.read(folder)
            compare_plans(folder, stored, again(stored.created))
        else:
            stored = wanted
            stored.write(folder)
        how = f"{len(stored.entries)} runs in the order {order(stored)}, {stored.settings.dtype} arithmetic"
        console.print(f"plan: {folder / PLAN}, {how}")
        try:
            verdict = Course(folder, stored, console, lock).run()
        except KeyboardInterrupt:
            console.print("The same command goes on with the runs that are missing.")
            raise
        if not (folder / MANIFEST).exists():
            write_json(folder / VERDICT, verdict)
            write_atomic(folder / TEXT, render(verdict))
            write_manifest(folder)
    return verdict


def order(plan: Plan) -> str:
    sides = "".join(entry.side for entry in plan.entries)
    return " ".join(sides[i : i + 4] for i in range(0, len(sides), 4)) if plan.paired else f"A x {len(sides)}"
