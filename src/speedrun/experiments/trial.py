"""One training in a process of its own: what races, sweeps and ablations are made of.

A `Trial` names a stored recipe; `run_trial` starts `speedrun train --recipe FILE.json` and reads its result. A `RowLog`
keeps one line per trial. Ctrl-C reaches a whole terminal, but `docker stop`, a queue or `kill` signal one process:
within `handle_sigterm` SIGTERM ends an experiment as Ctrl-C does, together with its running trials.
"""

import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from speedrun.arguments import Settings, TrackArgs, narrow
from speedrun.errors import Terminated, UserError
from speedrun.files import DELETE, file_errors, from_json, read_json, read_lines, write_atomic, write_json
from speedrun.recipes import DEFAULT
from speedrun.tracks import Track, find_track
from speedrun.training import Recipe, check_settings, choose, fields_of, runlog, to_dict, usable_cores

ROWS = "rows.jsonl"
RESTORE = "Restore it, or choose another --out."
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class ExperimentArgs(Settings, TrackArgs):
    """What every experiment takes."""

    recipe: str = DEFAULT
    """Which recipe: a name that `speedrun recipes` lists, or the file of a stored one."""

    @property
    def settings(self) -> Settings:
        return narrow(self, Settings)

    def find_track(self) -> Track:
        return find_track(self.track, self.data)


# -------------------------------------------------------------------- trials


@dataclass(frozen=True)
class Trial:
    recipe: Path
    """The file of a stored recipe."""
    seed: int
    out: Path
    """Its run folder."""
    settings: Settings
    data: Path | None = None
    target: float | None = None
    shadow: bool = False
    plan: str | None = None
    """Hash of the race's plan."""

    @property
    def flags(self) -> list[str]:
        """What is trained, and how: flags of `speedrun train`."""
        words = ["--recipe", str(self.recipe), "--seed", str(self.seed)]
        words += ["--data", str(self.data)] if self.data else []
        words += ["--target", repr(self.target)] if self.data and self.target is not None else []
        for name, value in vars(self.settings).items():
            words += [f"--{name}", str(value)] if value is not None else []
        return words

    @property
    def command(self) -> list[str]:
        words = [sys.executable, "-m", "speedrun", "train", *self.flags, "--out", str(self.out)]
        words += ["--shadow", "True"] if self.shadow else []
        words += ["--plan", self.plan] if self.plan else []
        return [*words, "--checkpoint-every", "0", "--save", "False", "--sample", "False"]


class NoResult(UserError):
    """A trial that left no result; its last line of errors, without the full stop."""


def write_recipe(file: Path, recipe: Recipe) -> Path:
    write_json(file, to_dict(recipe))
    return file


def run_trial(
    trial: Trial,
    processes: "ChildProcesses",
    *,
    poll: Callable[[], None] | None = None,
    pass_fds: Sequence[int] = (),
    prefix: Sequence[str] = (),
) -> runlog.Result:
    """Train, and return how the run ended, well or badly; `prefix` stands before the command, such as taskset."""
    done = processes.run([*prefix, *trial.command], poll=poll, pass_fds=pass_fds)
    if not has_ended(trial.out):
        raise NoResult((last_error_line(done.stderr) or f"exit code {done.returncode}").rstrip("."))
    return runlog.read_result(trial.out)


def has_ended(folder: Path) -> bool:
    """Whether a run came to an end by itself, well or badly."""
    return (folder / runlog.RESULT).exists() and runlog.read_result(folder).status in ("ok", "failed")


def last_error_line(errors: str) -> str:
    """The last sentence of speedrun itself in what a run wrote to stderr, after which a launcher may log more."""
    lines = [line.strip("│ ") for line in errors.splitlines() if any(map(str.isalnum, line))]  # strips a box
    own = [line.removeprefix("speedrun: ") for line in lines if line.startswith("speedrun: ")]
    return (own or lines or [""])[-1]


# -------------------------------------------------------------------- processes


@contextlib.contextmanager
def handle_sigterm() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def was_stopped(code: int) -> bool:
    """Whether a process ended by Ctrl-C or SIGTERM, handled or not."""
    return code in (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM)


class ChildProcesses:
    """Processes started from several threads. An exception inside `with` stops them all, and no other starts."""

    def __init__(self) -> None:
        self.alive: set[subprocess.Popen[str]] = set()
        self.stopped = False
        self.lock = threading.Lock()

    def __enter__(self) -> "ChildProcesses":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self.lock:
            self.stopped = kind is not None
            for child in self.alive if self.stopped else ():
                child.terminate()

    def run(
        self, command: Sequence[str], *, poll: Callable[[], None] | None = None, pass_fds: Sequence[int] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end and return its errors; with `poll` call that every second."""
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            with self.lock:
                if self.stopped:
                    raise Terminated
                child = subprocess.Popen(
                    command, stdout=subprocess.DEVNULL, stderr=errors, pass_fds=pass_fds, text=True
                )
                self.alive.add(child)
            try:
                while True:
                    try:
                        child.wait(POLL_SECONDS if poll else None)
                        break
                    except subprocess.TimeoutExpired:
                        if poll:
                            poll()
            except BaseException:
                child.terminate()
                child.wait()
                raise
            finally:
                with self.lock:
                    self.alive.discard(child)
            if was_stopped(child.returncode):
                raise KeyboardInterrupt  # a run that was stopped says nothing about its recipe: the experiment ends
            errors.seek(0)
            return subprocess.CompletedProcess(command, child.returncode, "", errors.read())


# -------------------------------------------------------------------- one arithmetic for all trials


def arithmetic_for(recipe: Recipe, settings: Settings, jobs: int = 1) -> str:
    """What `--dtype auto` means for runs of this recipe that are started from here."""
    threads = settings.threads or max(1, usable_cores() // (settings.nproc * jobs))
    tokens = max(stage.tokens for stage in recipe.schedule.visits()) // settings.nproc
    return choose(settings.device, "auto", threads, model=recipe.model, tokens=tokens).dtype_name


def check_dtype(folder: Path, planned: str, asked: str) -> str:
    """The arithmetic of the plan in a folder; another one is refused."""
    if asked not in ("auto", planned):
        raise UserError(
            f"The plan in {folder} says --dtype {planned}, not {asked}; drop that, or choose another --out."
        )
    return planned


def with_arithmetic(args: Any, file: Path, kind: type, recipe: Recipe, jobs: int = 1) -> Any:
    """`args` with the arithmetic decided: all runs have the same, also those after a restart."""
    if file.exists():
        stored: Any = read_json(file, kind, RESTORE)
        return dataclasses.replace(args, dtype=check_dtype(file.parent, stored.args.dtype, args.dtype))
    check_settings(args.device, args.dtype, args.nproc)
    return (
        dataclasses.replace(args, dtype=arithmetic_for(recipe, args.settings, jobs)) if args.dtype == "auto" else args
    )


# -------------------------------------------------------------------- what is kept


def check_same_plan(file: Path, plan: Any, what: str, free: tuple[str, ...]) -> None:
    """Store the plan of a folder, or refuse to continue there with another one; `free` arguments may change."""
    if not file.exists():
        write_json(file, runlog.to_jsonable(plan))
        return
    stored, wanted = fields_of(read_json(file, type(plan), RESTORE)), fields_of(plan)
    names = {name: name.removeprefix("args.") for name in wanted if wanted[name] != stored[name]}
    odd = [name for name in names.values() if name not in (*free, "base.about")]
    if odd:
        raise UserError(f"{file.parent} holds {what} with another {', '.join(odd)}; choose another --out.")


class RowLog:
    """A file with one JSON line per trial, whole or absent."""

    def __init__(self, file: Path, kind: type) -> None:
        self.file = file
        self.rows = read_rows(file, kind)
        self.torn = file.exists() and not file.read_bytes().endswith(b"\n")
        if self.torn:
            write_atomic(file, "".join(json.dumps(row) + "\n" for row in self.rows))

    @property
    def minutes(self) -> float:
        return float(sum(row["minutes"] for row in self.rows))

    def add(self, row: dict[str, Any]) -> None:
        with file_errors(self.file), open(self.file, "a") as f:
            f.write(json.dumps(row, allow_nan=False) + "\n")
        self.rows.append(row)


def read_rows(file: Path, kind: type) -> list[dict[str, Any]]:
    """The whole rows of a file; one that a kill has torn does not count."""
    rows = []
    for where, _, row in read_lines(file, RESTORE) if file.exists() else ():
        from_json(row, kind, where, DELETE)
        rows.append(row)
    return rows
