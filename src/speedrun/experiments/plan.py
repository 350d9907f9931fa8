"""The plan of a race: every choice that could favour a side, written before the first run.

`plan.json` has the track with its hashes, both recipes in full, the seeds, the order of the runs, alpha, and when the
results are looked at. Every run carries the sha256 of the file, so it cannot be changed afterwards unnoticed.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from speedrun.arguments import Settings
from speedrun.errors import UserError
from speedrun.experiments import statistics
from speedrun.experiments.trial import write_recipe
from speedrun.files import from_json, read_object, write_json
from speedrun.training import Recipe, runlog, telemetry

PLAN = "plan.json"
BLOCK = "ABBA"
KINDS = ("full", "systems")
RESTORE = "Restore it from a copy, or use the version of speedrun that wrote it."
SEEDS = 10**9  # random seeds of a race lie below this


@dataclass(frozen=True)
class Entry:
    """One run of the race."""

    number: int
    """From 1, in the order of the race."""
    side: str
    seed: int
    block: int
    """From 0."""

    @property
    def name(self) -> str:
        return f"{self.number:03d}-{self.side}"


@dataclass(frozen=True)
class MachineInfo:
    """What distinguishes machines and installations, as far as a run records it."""

    cpu: str | None
    cores: int | None
    memory_gib: int
    devices: tuple[str, ...]
    platform: str
    python: str
    torch: str
    cpu_capability: str


@dataclass(frozen=True)
class Plan:
    created: str
    kind: str
    """full: losses are tested against the target; systems: both sides must have bit-equal losses."""
    track: str
    target: float
    val_tokens: int | None
    files: dict[str, str]
    """sha256 of each token file."""
    data: str | None
    """The token folder of a race on other data than a track's."""
    labels: dict[str, str]
    """Name of each side; `both`: what is changed in the recipes of both."""
    recipes: dict[str, Recipe]
    """Of side A, the challenger, and of side B, if there is one."""
    seeds: tuple[int, ...]
    """One per run of a side; both sides use the same ones."""
    random_seeds: bool
    """Whether the seeds follow from the rest of the plan; False: the first one was chosen."""
    alpha: float
    looks: tuple[int, ...]
    """After how many blocks (or runs, without a side B) the results are judged; the last one ends the race."""
    splits: tuple[str, ...]
    settings: Settings
    machine: MachineInfo
    source_sha256: str

    @property
    def paired(self) -> bool:
        return "B" in self.recipes

    @property
    def unit(self) -> str:
        return "block" if self.paired else "run"

    @property
    def entries(self) -> list[Entry]:
        """Every run, in order: ABBA blocks, in which both sides have the same two seeds, or A alone."""
        if not self.paired:
            return [Entry(i + 1, "A", seed, i) for i, seed in enumerate(self.seeds)]
        found: list[Entry] = []
        for block in range(len(self.seeds) // 2):
            first, second = self.seeds[2 * block : 2 * block + 2]
            for side, seed in zip(BLOCK, (first, first, second, second), strict=True):
                found.append(Entry(len(found) + 1, side, seed, block))
        return found

    def until(self, look: int) -> list[Entry]:
        """The runs that a look sees."""
        return [entry for entry in self.entries if entry.block < look]

    def levels(self, look: int) -> tuple[float, float]:
        """The p-values that decide about losses and about times at this look."""
        number = self.looks.index(look)
        runs = tuple(2 * k if self.paired else k for k in self.looks)
        return statistics.levels(self.alpha, runs)[number], statistics.levels(self.alpha, self.looks)[number]

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = runlog.to_jsonable(self)
        value["runs"] = [{"name": e.name, "seed": e.seed} for e in self.entries]
        value["levels"] = [dict(zip(("loss", "time"), self.levels(look), strict=True)) for look in self.looks]
        return dict(json.loads(json.dumps(runlog.to_jsonable(value))))

    def write(self, folder: Path) -> None:
        for side, recipe in self.recipes.items():
            write_recipe(folder / recipe_file(side), recipe)
        write_json(folder / PLAN, self.to_json())

    @classmethod
    def read(cls, folder: Path) -> "Plan":
        """Checked: the order of the runs follows from the seeds, the levels from alpha."""
        where, value = folder / PLAN, stored(folder)
        derived = {name: value.pop(name, None) for name in ("runs", "levels")}
        plan = from_json(value, cls, str(where), RESTORE)
        try:
            check(plan)
            again = plan.to_json()
        except ValueError as e:
            raise UserError(f"{where} is damaged or was edited ({e}). {RESTORE}") from e
        odd = [name for name in derived if not agree(again[name], derived[name])]
        if odd:
            raise UserError(f"{where} was edited: its {', '.join(odd)} cannot follow from the rest of it. {RESTORE}")
        return plan


def recipe_file(side: str) -> str:
    """The stored recipe with which the runs of a side are started, beside the plan."""
    return f"recipe-{side}.json"


def stored(folder: Path) -> dict[str, Any]:
    """plan.json as it stands in the file, without its format number."""
    return read_object(folder / PLAN, RESTORE)


def check(plan: Plan) -> None:
    """Refuse a plan that cannot lead to a verdict."""
    runs, paired = len(plan.seeds), plan.paired
    least = statistics.FEWEST * (2 if paired else 1)
    datetime.fromisoformat(plan.created)
    if plan.kind not in KINDS:
        raise UserError(f"The kind of race is {plan.kind!r}; choose {' or '.join(KINDS)}.")
    if sorted(plan.recipes) not in (["A"], ["A", "B"]) or not {*plan.recipes} <= {*plan.labels}:
        raise UserError(f"The sides {', '.join(plan.recipes)} do not fit: a race has A, or A and B, each with a label.")
    if plan.kind == "systems" and not paired:
        raise UserError("A systems race compares two sides; name the other one with --against.")
    if runs < least:
        why = "the comparison of times needs two ABBA blocks" if paired else "a t-test needs two losses"
        raise UserError(f"--runs is {runs}, too few for the test: {why}, so at least {least} runs{' a side' * paired}.")
    if paired and runs % 2:
        raise UserError(f"--runs is {runs}; an ABBA block has two runs a side, so choose {runs - 1} or {runs + 1}.")
    if len(set(plan.seeds)) != runs:
        raise UserError(f"The seeds {plan.seeds} repeat one; every run of a side needs its own.")
    if not 0 < plan.alpha <= 0.1:
        raise UserError(f"--alpha is {plan.alpha}; it must be above 0 and at most 0.1.")
    last = runs // 2 if paired else runs
    rising = all(a < b for a, b in zip((statistics.FEWEST - 1, *plan.looks), plan.looks, strict=False))
    if not rising or plan.looks[-1:] != (last,):
        raise UserError(
            f"The looks {' '.join(map(str, plan.looks)) or 'are missing'} do not fit: they must rise, from {plan.unit} "
            f"{statistics.FEWEST} or later to the last one, {last}."
        )


def agree(a: Any, b: Any) -> bool:
    """Equal, but for the last digits of floats that another version of a library may compute differently."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(agree(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(agree, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= 1e-7 * max(abs(a), abs(b)) or a == b
    return type(a) is type(b) and bool(a == b)


def random_seeds(plan: dict[str, Any], runs: int) -> tuple[int, ...]:
    """Seeds that follow from everything else in the plan's JSON, the time of day included."""
    value = {k: v for k, v in plan.items() if k not in ("seeds", "runs")}
    first = int(hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest(), 16) % SEEDS
    return tuple(range(first, first + runs))


# -------------------------------------------------------------------- what is the same in all runs of a race


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def this_machine() -> MachineInfo:
    return machine(runlog.describe_environment(), runlog.describe_devices(), telemetry.snapshot())


def machine(environment: dict[str, Any], devices: Sequence[str], snapshot: dict[str, Any]) -> MachineInfo:
    return MachineInfo(
        cpu=snapshot.get("cpu_model"),
        cores=snapshot.get("cpu_logical_cores"),
        memory_gib=round(snapshot.get("memory_total_mib", 0) / 1024),
        devices=tuple(devices),
        platform=environment["platform"],
        python=environment["python"].split()[0],
        torch=environment["torch"]["version"],
        cpu_capability=environment["torch"]["cpu_capability"],
    )
