"""Hand what a run measured to a tracker: TensorBoard, Weights & Biases or trackio.

speedrun send runs/NAME --to tensorboard
speedrun send runs/NAME --to wandb --project mine --follow

It reads the run folder, so it can be done at any time: while the run goes on (`--follow`, in another terminal), after
it, or for every run of a race. Training knows nothing of it and cannot be slowed down or broken by a tracker.
"""

import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import tyro

from speedrun.errors import UserError, nearest
from speedrun.files import explained
from speedrun.options import unset
from speedrun.report.curves import tokens_by_step
from speedrun.templates import markdown
from speedrun.training.config import fields_of
from speedrun.training.runlog import RESULT, RunInfo, plain, read_metrics, read_result, read_run

Say = Callable[[str], Any]
Values = dict[str, float]
PAUSE = 2.0  # seconds between two looks at a run that goes on


class Tracker(Protocol):
    def log(self, step: int, values: Values, seconds: float) -> None: ...

    def finish(self, summary: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Send:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, unset("RUN ...")]
    """Run folders."""
    to: str
    """tensorboard, wandb or trackio."""
    project: str = "speedrun"
    """What the tracker files the runs under."""
    out: Path = Path("tracked")
    """Where tensorboard's event files, and what wandb keeps, are put."""
    follow: bool = False
    """Go on until the run ends. `--follow` alone will do."""


# -------------------------------------------------------------------- trackers


def load(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise UserError(f"{package} is not installed; `pip install {package}` will do.") from e


class Tensorboard:
    """Event files that `tensorboard --logdir` shows."""

    def __init__(self, given: Send, name: str, about: RunInfo) -> None:
        load("tensorboard", "tensorboard")
        folder = given.out / given.project / name
        if folder.exists():
            raise UserError(f"{folder} exists already, and sending twice would double its curves; delete it first.")
        with explained(folder):
            folder.mkdir(parents=True)
        self.writer = load("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder))
        self.began = about.started.timestamp()
        fields = markdown([("field", "value"), *((k, str(v)) for k, v in config_of(about).items())])
        self.writer.add_text("recipe", fields, walltime=self.began)

    def log(self, step: int, values: Values, seconds: float) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step, walltime=self.began + seconds)

    def finish(self, summary: dict[str, Any]) -> None:
        self.writer.add_text("result", "\n".join(f"- {k}: {v}" for k, v in summary.items()))
        self.writer.close()


class Wandb:
    """wandb, or trackio, which has its interface. `WANDB_MODE=offline` keeps it on this machine, as wandb documents."""

    def __init__(self, given: Send, name: str, about: RunInfo) -> None:
        self.module = load(given.to, given.to)
        where = {}
        if given.to == "wandb":
            with explained(given.out):
                given.out.mkdir(parents=True, exist_ok=True)
            where = {"dir": str(given.out)}
        self.run = self.module.init(project=given.project, name=name, config=config_of(about), **where)

    def log(self, step: int, values: Values, seconds: float) -> None:
        self.run.log({**values, "seconds": seconds}, step=step)

    def finish(self, summary: dict[str, Any]) -> None:
        getattr(self.run, "summary", {}).update(summary)  # trackio has none
        self.module.finish()


TRACKERS: dict[str, Callable[[Send, str, RunInfo], Tracker]] = {
    "tensorboard": Tensorboard,
    "wandb": Wandb,
    "trackio": Wandb,
}


# -------------------------------------------------------------------- what is sent


def config_of(about: RunInfo) -> dict[str, Any]:
    """The recipe, flat, and where it ran: what a tracker's table filters by."""
    fields = {k: str(v) if isinstance(v, tuple) else v for k, v in fields_of(about.recipe).items()}
    return {"recipe": about.recipe.name, "track": about.track, "seed": about.seed, **fields}


def measured(folder: Path) -> Iterator[tuple[int, Values, float]]:
    """(steps done, values, seconds on the clock), in the order of the run."""
    schedule = read_run(folder).recipe.schedule
    lines = read_metrics(folder)
    tokens = tokens_by_step(schedule, max((m["step"] for m in lines), default=0))
    done, seconds = 0, 0.0
    for m in lines:
        if m["kind"] in ("train", "val"):  # telemetry belongs to the steps done so far: trackers want steps in order
            done = m["step"] + (m["kind"] == "train")
        seconds = m.get("time", seconds)
        if m["kind"] == "train":
            values = {"train/loss": m["loss"], "train/lr": m["lr"]}
        elif m["kind"] == "val":
            values = {f"{split}/loss": loss for split, loss in m["losses"].items()}
        else:
            values = {f"{m['kind']}/{k}": v for k, v in m.items() if k != "step" and type(v) in (int, float)}
        yield done, {**values, "tokens": float(tokens[done])}, seconds


def run(given: Send, say: Say) -> int:
    if given.to not in TRACKERS:
        raise UserError(f"--to is {given.to!r}; it can be {', '.join(TRACKERS)}.{nearest(given.to, TRACKERS)}")
    if not given.runs:
        raise UserError("No run folder was named; `speedrun send runs/NAME --to tensorboard` sends one.")
    if given.follow and len(given.runs) > 1:
        raise UserError(f"--follow goes with one run, not with {len(given.runs)}; start one command for each.")
    told = [(folder, read_run(folder)) for folder in given.runs]
    for folder in given.runs:  # what cannot be read is told before anything is sent
        list(measured(folder))
        if (folder / RESULT).exists():
            read_result(folder)
    for folder, about in told:
        tracker = TRACKERS[given.to](given, folder.resolve().name, about)
        sent = send(folder, tracker, given.follow)
        say(f"{folder}: {sent:,} measurements sent to {given.to}")
    return 0


def send(folder: Path, tracker: Tracker, follow: bool) -> int:
    """Everything that was measured, and with `follow` what is measured until the run ends."""
    sent = 0
    while True:
        ended = (folder / RESULT).exists()  # asked first: what comes between the two looks is read by the next one
        for step, values, seconds in list(measured(folder))[sent:]:
            tracker.log(step, values, seconds)
            sent += 1
        if ended or not follow:
            break
        time.sleep(PAUSE)
    result = plain(read_result(folder)) if ended else {"status": "unfinished"}
    tracker.finish({k: v for k, v in result.items() if isinstance(v, str | int | float)})
    return sent
