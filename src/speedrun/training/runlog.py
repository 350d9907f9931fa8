"""The run folder: what a run was, what it measured, and how it ended.

`run.json` says what ran (recipe, seed, track, environment, commit, interruptions), `metrics.jsonl` has one
line per measurement, `log.txt` the lines a person greps, `source/` the package itself, `result.json` the end.
A verdict is computed from these files alone, so numbers keep every digit and a run that failed says so.

Steps: a `train` line carries the index of the step just done (from 0), and so do `telemetry` and `event`
lines; a `val` line carries the number of steps done. A checkpoint of step k has done steps 0 .. k-1, so
`cut_back(k)` keeps `val` lines up to k and all others below k. Validate before the checkpoint of the same
step, then a resume has nothing to repeat.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, TextIO

import torch
from msgspec import Meta

from speedrun.checks import Count, NotNegative, Positive
from speedrun.errors import UserError
from speedrun.files import DELETE, file_errors, from_json, new_folder, read_json, read_lines, write_atomic, write_json
from speedrun.training.config import Options, PublishedCurve, Recipe
from speedrun.training.load import MOST_THREADS

RUN = "run.json"
METRICS = "metrics.jsonl"
LOG = "log.txt"
RESULT = "result.json"
SOURCE = "source"

KINDS = ("train", "val", "telemetry", "event")
Status = Literal["ok", "failed", "interrupted"]

_PACKAGE = Path(__file__).resolve().parents[1]


Seconds = Annotated[float, Meta(ge=0, le=1e12)]


@dataclass(frozen=True)
class RunData:
    folder: str
    files: dict[str, str]
    """sha256 of each token file."""


@dataclass(frozen=True)
class RunInfo:
    """run.json: what ran. Its format number is also that of metrics.jsonl."""

    recipe: Recipe
    track: str
    target: float | None
    seed: Count
    data: RunData
    options: Options
    machine: tuple[str, ...]
    """Device, arithmetic, threads and attention, each with the reason."""
    threads: Annotated[int, Meta(ge=1, le=MOST_THREADS)]
    started: datetime
    command: tuple[str, ...]
    git: dict[str, Any] | None
    devices: tuple[str, ...]
    environment: dict[str, Any]
    source_sha256: str
    world_size: Positive
    """Number of processes."""
    dtype: Literal["float32", "bfloat16"]
    """Of matrix products, as chosen or asked for."""
    interruptions: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Result:
    """result.json: how a run ended. A run that went NaN ends too, as failed."""

    status: Status
    reason: str | None
    """Why it is not ok."""
    val_loss: float | None
    losses: dict[str, float]
    """Of the last validation, by split."""
    steps: Count
    """Of the recipe, also if the run ended before the last one."""
    train_time: Seconds
    """Seconds on the clock."""
    tokens: Count
    tokens_per_second: NotNegative
    resumed: bool
    timed: bool
    """Whether its time counts."""
    peak_memory: dict[str, float]
    """MiB."""
    finished: datetime
    warmup_seconds: Seconds
    """Before the clock started: compiling, and a visit of every shape."""
    wall_seconds: Seconds
    """From the first step to the last, validations included. After a resume: from the first step after it."""
    cpu_seconds: Seconds
    """CPU time of all processes of the run in these seconds."""
    machine_load: NotNegative | None
    """Cores that other processes kept busy in these seconds, on average; None: unknown."""

    def __post_init__(self) -> None:
        if (self.status == "ok") != (self.val_loss is not None):
            raise ValueError(f"a run that ended as {self.status!r} has the validation loss {self.val_loss}")


@dataclass(frozen=True)
class TrainLine:
    """A line of metrics.jsonl after a step."""

    kind: str
    step: Count
    loss: float
    lr: float
    time: Seconds


@dataclass(frozen=True)
class ValLine:
    """A line of metrics.jsonl after a validation."""

    kind: str
    step: Count
    loss: float
    losses: dict[str, float]
    time: Seconds
    val_seconds: Seconds
    """Of this validation, outside the clock."""
    weights: tuple[str, str] | None = None
    """Hashes of all weights before and after, in a race: validation must be forward only."""


LINES: dict[str, type] = {"train": TrainLine, "val": ValLine}  # others have whatever the machine offers


class RunFolder:
    """One run's folder, open for appending. Only one process writes it: rank 0."""

    def __init__(self, path: Path, console: Callable[[str], None]) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._console = console
        self._open: dict[str, TextIO] = {}

    @classmethod
    def create(cls, path: Path, description: Mapping[str, Any], console: Callable[[str], None] = print) -> "RunFolder":
        """A new run folder. `description` has what only the caller knows: recipe, seed, track and its hashes.

        The rest of run.json is added here; what `description` itself says wins.
        """
        with file_errors(path):
            if path.is_dir() and any(path.iterdir()):
                raise UserError(f"{path} already holds files. Choose another folder, or resume the run in it.")
        found = {
            "started": now(),
            "command": list(sys.argv),
            "git": describe_git(),
            "devices": describe_devices(),
            "environment": describe_environment(),
            "interruptions": [],
        }
        run: dict[str, Any] = to_jsonable({**description, **{k: v for k, v in found.items() if k not in description}})
        with file_errors(path):
            if path.is_dir():
                # Filled in place, not replaced: it may be a mount point or a working directory.
                try:
                    _fill(path, run)
                except BaseException:
                    shutil.rmtree(path / SOURCE, ignore_errors=True)
                    raise
            else:
                with new_folder(path) as temporary:
                    _fill(temporary, run)
        return cls(path, console)

    @classmethod
    def open(cls, path: Path, console: Callable[[str], None] = print) -> "RunFolder":
        """The folder of a run that is to go on."""
        read_run(path)  # refuses what is no run folder
        return cls(path, console)

    def metric(self, values: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl. It has a `step`, which is an int, and a `kind`, one of KINDS."""
        self._append(METRICS, json.dumps(to_jsonable(values), allow_nan=False))

    def log(self, line: str, *, show: bool = True) -> None:
        """Append to log.txt and show it."""
        self._append(LOG, line)
        if show:
            self._console(line)

    def _append(self, name: str, line: str) -> None:
        """One line, with the system when this returns: the file is flushed at each newline."""
        with file_errors(self.path / name):
            if name not in self._open:
                path = self.path / name
                self._open[name] = open(path, "a", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
            self._open[name].write(line + "\n")

    def cut_back(self, step: int, note: str) -> None:
        """Forget what was measured beyond the checkpoint of `step`, and note the interruption.

        Step 0 means starting over, with the validation before the first step, so nothing is kept then.
        A result written by the interrupted attempt moves into run.json: the run has not ended after all.
        """
        self.close()
        metrics = self.path / METRICS
        kept, total = [], 0
        for _, line, values in _metric_lines(metrics):
            total += 1
            if values["step"] < step or (values["kind"] == "val" and values["step"] == step > 0):
                kept.append(line)
        interruption: dict[str, Any] = {
            "time": now(),
            "resumed_from": step,
            "note": note,
            "dropped_lines": total - len(kept),
        }
        result = self.path / RESULT
        if result.exists():
            interruption["result"] = read_result(self.path)
        # Noted first: killed in between, the next resume finds the lines still there and cuts again.
        run = read_run(self.path)
        run = dataclasses.replace(run, interruptions=(*run.interruptions, interruption))
        write_json(self.path / RUN, to_jsonable(run))
        write_atomic(metrics, b"".join(kept))
        with file_errors(result):
            result.unlink(missing_ok=True)
        self.log(f"--- resumed from step {step} at {interruption['time'].isoformat()}: {note} ---")

    def finish(self, result: Result) -> None:
        """Write result.json."""
        self.close()
        write_json(self.path / RESULT, to_jsonable(result))

    def close(self) -> None:
        """Make the lines durable. A later `metric` or `log` opens the files again."""
        while self._open:
            name, file = self._open.popitem()
            with file_errors(self.path / name), file:
                os.fsync(file.fileno())


class NullRunFolder:
    """Takes the place of the run folder on every rank but rank 0: it knows the path and writes nothing."""

    def __init__(self, path: Path) -> None:
        self.path, self.checkpoints = path, path / "checkpoints"

    def log(self, line: str, *, show: bool = True) -> None: ...

    def metric(self, values: Mapping[str, Any]) -> None: ...

    def finish(self, result: Result) -> None: ...


# --- reading --------------------------------------------------------------------------------------


def read_run(path: Path) -> RunInfo:
    """run.json of the run folder `path`."""
    if not path.is_dir():
        raise UserError(f"There is no run folder {path}. Check the name, or start a new run.")
    if not (path / RUN).exists():
        raise UserError(f"{path / RUN} is missing, so {path} is no run folder. Start a new run.")
    return read_json(path / RUN, RunInfo, f"Restore it from a copy, or use the speedrun in {path / SOURCE}.")


def read_result(path: Path) -> Result:
    """result.json of a run folder; a run that has not ended has none, which is an error here."""
    if not (path / RESULT).exists():
        raise UserError(f"{path} has no {RESULT}: the run has not ended.")
    return read_json(path / RESULT, Result, "Restore it from a copy, or train again.")


def read_metrics(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The lines of one kind (or all) of a run folder or a metrics.jsonl. A torn last line does not count."""
    file = path / METRICS if path.is_dir() else path
    if not path.exists():
        raise UserError(f"There is no run folder {path}. Check the name.")
    found = []
    for where, _, values in _metric_lines(file):
        values = _numbers(values)
        if values["kind"] in LINES:
            from_json(values, LINES[values["kind"]], where, DELETE)
        if kind is None or values["kind"] == kind:
            found.append(values)
    return found


def _metric_lines(path: Path) -> Iterator[tuple[str, bytes, dict[str, Any]]]:
    """Each whole line: what an error calls it, as it stands, and as JSON."""
    if not path.exists():
        return
    for where, line, values in read_lines(path, "Restore it from a copy, or train again."):
        if type(values.get("step")) is not int or values.get("kind") not in KINDS:
            raise UserError(f"{where} is damaged: {line[:60]!r} has no step or kind. {DELETE}")
        yield where, line + b"\n", values


# --- JSON that any reader can read ----------------------------------------------------------------


def to_jsonable(value: Any) -> Any:
    """`value` as plain JSON, which has no nan and no inf: they become strings. Floats keep every digit."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(float(value))  # 'nan', 'inf' or '-inf'
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_jsonable(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Path | torch.dtype | torch.device):
        return str(value)
    if isinstance(value, date):  # or a datetime
        return value.isoformat()
    return value


def _numbers(value: Any) -> Any:
    """What `to_jsonable` made words of."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    return float(value) if value in ("nan", "inf", "-inf") else value


# --- lines to grep --------------------------------------------------------------------------------


def val_line(step: int, total: int, val_loss: float, train_time_ms: float, curve: PublishedCurve | None = None) -> str:
    """`step` is the number of steps done, here and in `train_line`. The record's loss follows where it has one."""
    line = f"step:{step}/{total} val_loss:{val_loss:.4f} {_times(step, train_time_ms)}"
    record = curve.at(step) if curve else None
    return line if record is None else f"{line} record:{record:.4f} difference:{val_loss - record:+z.4f}"


def train_line(step: int, total: int, train_loss: float, train_time_ms: float) -> str:
    return f"step:{step}/{total} train_loss:{train_loss:.4f} {_times(step, train_time_ms)}"


def _times(step: int, train_time_ms: float) -> str:
    average = train_time_ms / step if step else math.nan
    return f"train_time:{train_time_ms:.0f}ms step_avg:{average:.2f}ms"


# --- what ran -------------------------------------------------------------------------------------

_PACKAGES = (
    "speedrun", "torch", "numpy", "scipy", "safetensors", "msgspec", "tokenizers", "tyro", "rich",
    "platformdirs", "triton", "kernels", "tiktoken", "huggingface-hub",
)  # fmt: skip
# What can change the arithmetic or the speed of a run, and nothing that could be a secret.
_VARIABLES = re.compile(
    r"(OMP|GOMP|KMP|MKL|OPENBLAS|VECLIB|BLIS|DNNL|ONEDNN|ATEN|AT|TORCH|TORCHINDUCTOR|PYTORCH|INDUCTOR|TRITON"
    r"|CUDA|CUBLAS|CUDNN|NVIDIA|NCCL|GLOO|HIP|HSA|ROCR|SPEEDRUN)_\w+|LD_PRELOAD|MALLOC_\w+|PYTHONHASHSEED"
    r"|RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|CXX|CC"
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|JWT", re.IGNORECASE)


def describe_environment() -> dict[str, Any]:
    """Python, platform, packages, torch's build, threads and the environment variables that matter."""
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "python": sys.version,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "packages": versions,
        "torch": {
            "version": str(torch.__version__),
            "git": torch.version.git_version,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "mkl": torch.backends.mkl.is_available(),
            "mkldnn": torch.backends.mkldnn.is_available(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "build": torch.__config__.show(),
        },
        "threads": {"intra_op": torch.get_num_threads(), "inter_op": torch.get_num_interop_threads()},
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if _VARIABLES.fullmatch(name) and not _SECRET.search(name)
        },
    }


def describe_devices() -> list[str]:
    """The accelerators torch sees, or the CPU."""
    if torch.cuda.is_available():
        return [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        return ["mps"]
    return ["cpu"]


def describe_git() -> dict[str, Any] | None:
    """The commit of the package's own checkout; None when it was installed without one."""
    # An installed package may lie inside the checkout of something else: is it tracked there?
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit, status = _git("rev-parse", "HEAD"), _git("status", "--porcelain")
    if commit is None or status is None:
        return None
    return {"commit": commit.strip(), "dirty": bool(status.strip())}


def _git(*arguments: str) -> str | None:
    # Without the variables that a hook sets, which would point git at another repository.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment["GIT_OPTIONAL_LOCKS"] = "0"
    try:
        done = subprocess.run(
            ["git", "-C", str(_PACKAGE), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=20,
            env=environment,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None  # no git here, or a checkout too slow to ask
    return done.stdout if done.returncode == 0 else None


def _fill(folder: Path, run: dict[str, Any]) -> None:
    """The source, its hash, and run.json last: a folder with a run.json is complete."""
    for name, content in modules():
        target = folder / SOURCE / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    run["source_sha256"] = source_sha256(folder / SOURCE / _PACKAGE.name)
    write_json(folder / RUN, run)


def source_sha256(package: Path = _PACKAGE) -> str:
    """One hash for all modules and templates of the package, of a copy of it, or of one in a zip file."""
    digest = hashlib.sha256()
    for name, content in modules(package):
        digest.update(f"{name}\0".encode() + content)
    return digest.hexdigest()


def modules(package: Path = _PACKAGE) -> list[tuple[str, bytes]]:
    """Path and content of every module and template, as `speedrun/...`."""
    if package.suffix == ".zip":
        with zipfile.ZipFile(package) as archive:
            found = [(name, archive.read(name)) for name in archive.namelist()]
    else:
        files = (file for file in package.rglob("*") if file.suffix in (".py", ".html", ".css", ".md"))
        found = [(file.relative_to(package.parent).as_posix(), file.read_bytes()) for file in files]
    return sorted(found, key=lambda one: PurePosixPath(one[0]))


def now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)
