"""Send what a run measured to a tracker: TensorBoard, Weights & Biases or trackio.

speedrun send runs/NAME --to tensorboard
speedrun send runs/NAME --to wandb --project mine --follow

It reads the run folder, so it works at any time: during the run (`--follow`, in another terminal), after it, or for
every run of a race. Training cannot be slowed down or broken by a tracker.
"""

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from speedrun.errors import UserError, nearest
from speedrun.files import file_errors
from speedrun.report.curves import tokens_by_step
from speedrun.templates import markdown
from speedrun.training import fields_of, runlog

Say = Callable[[str], Any]
Values = dict[str, float]
BOOKKEEPING = ("step", "time")
PAUSE = 2.0  # seconds between two reads of a run that is followed


class Tracker(Protocol):
    def log(self, step: int, values: Values, seconds: float) -> None: ...

    def finish(self, summary: dict[str, Any]) -> None: ...


# -------------------------------------------------------------------- trackers


def load(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise UserError(f"{package} is not installed; `pip install {package}` installs it.") from e


class Tensorboard:
    """Event files that `tensorboard --logdir` shows."""

    def __init__(self, name: str, about: runlog.RunInfo, project: str, out: Path) -> None:
        load("tensorboard", "tensorboard")
        folder = out / project / name
        if folder.exists():
            raise UserError(f"{folder} exists already, and sending twice would double its curves; delete it first.")
        with file_errors(folder):
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

    def __init__(self, package: str, name: str, about: runlog.RunInfo, project: str, out: Path) -> None:
        self.module = load(package, package)
        where = {}
        if package == "wandb":
            with file_errors(out):
                out.mkdir(parents=True, exist_ok=True)
            where = {"dir": str(out)}
        self.run = self.module.init(project=project, name=name, config=config_of(about), **where)

    def log(self, step: int, values: Values, seconds: float) -> None:
        self.run.log({**values, "seconds": seconds}, step=step)

    def finish(self, summary: dict[str, Any]) -> None:
        getattr(self.run, "summary", {}).update(summary)  # trackio has none
        self.module.finish()


TRACKERS: dict[str, Callable[[str, runlog.RunInfo, str, Path], Tracker]] = {
    "tensorboard": Tensorboard,
    "wandb": partial(Wandb, "wandb"),
    "trackio": partial(Wandb, "trackio"),
}


# -------------------------------------------------------------------- what is sent


def config_of(about: runlog.RunInfo) -> dict[str, Any]:
    """The recipe, flat, and where it ran: what a tracker's table filters by."""
    fields = {k: str(v) if isinstance(v, tuple) else v for k, v in fields_of(about.recipe).items()}
    return {"recipe": about.recipe.name, "track": about.track, "seed": about.seed, **fields}


def measured(folder: Path) -> Iterator[tuple[int, Values, float]]:
    """(steps done, values, seconds on the clock), in the order of the run."""
    schedule = runlog.read_run(folder).recipe.schedule
    lines = runlog.read_metrics(folder)
    tokens = tokens_by_step(schedule, max((m["step"] for m in lines), default=0))
    done, seconds = 0, 0.0
    for m in lines:
        if m["kind"] in ("train", "val"):  # telemetry belongs to the steps done so far: trackers want steps in order
            done = m["step"] + (m["kind"] == "train")
        seconds = m.get("time", seconds)
        if m["kind"] == "val":
            values = {f"{split}/loss": loss for split, loss in m["losses"].items()}
        else:
            values = {f"{m['kind']}/{k}": v for k, v in m.items() if k not in BOOKKEEPING and type(v) in (int, float)}
        yield done, {**values, "tokens": float(tokens[done])}, seconds


def send_runs(runs: Sequence[Path], to: str, project: str, out: Path, follow: bool, say: Say) -> None:
    """Send run folders to a tracker. All of them are read before the first is sent."""
    if to not in TRACKERS:
        raise UserError(f"--to is {to!r}; it can be {', '.join(TRACKERS)}.{nearest(to, TRACKERS)}")
    if not runs:
        raise UserError("No run folder was named; `speedrun send runs/NAME --to tensorboard` sends one.")
    if follow and len(runs) > 1:
        raise UserError(f"--follow goes with one run, not with {len(runs)}; start one command for each.")
    infos = [runlog.read_run(folder) for folder in runs]
    for folder in runs:
        list(measured(folder))
        if (folder / runlog.RESULT).exists():
            runlog.read_result(folder)
    for folder, about in zip(runs, infos, strict=True):
        tracker = TRACKERS[to](folder.resolve().name, about, project, out)
        say(f"{folder}: {send(folder, tracker, follow):,} measurements sent to {to}")


def send(folder: Path, tracker: Tracker, follow: bool) -> int:
    """Send what was measured, and with `follow` what is measured until the run ends; return the number of lines."""
    sent = 0
    while True:
        ended = (folder / runlog.RESULT).exists()  # asked first: a line written after this is read by the next pass
        for step, values, seconds in list(measured(folder))[sent:]:
            tracker.log(step, values, seconds)
            sent += 1
        if ended or not follow:
            break
        time.sleep(PAUSE)
    result = runlog.to_jsonable(runlog.read_result(folder)) if ended else {"status": "unfinished"}
    tracker.finish({k: v for k, v in result.items() if isinstance(v, str | int | float)})
    return sent
