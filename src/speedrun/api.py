"""speedrun as a library: `train` and `race` do what the commands of these names do, `load` opens a run folder.

Mistakes raise `speedrun.UserError`, a ValueError, with the sentence that the command prints.
"""

import contextlib
import dataclasses
import inspect
import tempfile
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from speedrun.checks import check_options
from speedrun.data import Tokenizer
from speedrun.errors import UserError, nearest, plural, similar
from speedrun.model import GPT
from speedrun.recipes import DEFAULT, default_for, get_curve, get_recipe
from speedrun.sample import load_model, sample_text
from speedrun.tracks import Track, find_track, get_track
from speedrun.training import Machine, Options, Recipe, choose, fields_of, runlog, with_fields
from speedrun.training import run as runs

if TYPE_CHECKING:
    from speedrun.experiments import Verdict

OPTIONS = {f.name for f in dataclasses.fields(Options)}


class Run:
    """A run folder: what was trained, what was measured, and the trained model."""

    def __init__(self, path: str | Path, device: str = "cpu") -> None:
        self.path, self.device = Path(path), device

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @cached_property
    def info(self) -> runlog.RunInfo:
        """run.json: recipe, track, seed, options, machine, environment."""
        return runlog.read_run(self.path)

    @property
    def recipe(self) -> Recipe:
        return self.info.recipe

    @property
    def result(self) -> runlog.Result:
        """How the run ended: status, val_loss, steps, train_time, tokens..."""
        return runlog.read_result(self.path)

    @property
    def reached(self) -> bool:
        """Whether the run ended at or below its target."""
        target, loss = self.info.target, self.result.val_loss if (self.path / runlog.RESULT).exists() else None
        return target is not None and loss is not None and loss <= target

    @property
    def metrics(self) -> dict[str, dict[str, NDArray[Any]]]:
        """Columns by kind of line: `metrics["train"]["loss"]`, `metrics["val"]["step"]`."""
        lines: dict[str, list[dict[str, Any]]] = {}
        for line in runlog.read_metrics(self.path):
            lines.setdefault(line["kind"], []).append(line)
        return {kind: _columns(found) for kind, found in lines.items()}

    @cached_property
    def _loaded(self) -> tuple[GPT, Tokenizer]:
        machine = choose(self.device, "float32", torch.get_num_threads(), "sdpa")
        return load_model(self.path, machine.device)

    @property
    def model(self) -> GPT:
        """The trained model, in float32."""
        return self._loaded[0]

    @property
    def tokenizer(self) -> Tokenizer:
        return self._loaded[1]

    def generate(
        self, prompt: str = "", *, tokens: int = 200, temperature: float = 0.8, top_k: int | None = 50, seed: int = 0
    ) -> str:
        """The prompt and its continuation of at most this many tokens."""
        return sample_text(
            self.model, self.tokenizer, prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed
        )

    @torch.no_grad()
    def loss(self, text: str) -> float:
        """Mean loss of a text in nats per token. A long text is cut into pieces as long as the rows of training."""
        if not text:
            raise UserError("The text is empty, so it has no loss; pass at least one character.")
        model = self.model
        ids = torch.tensor([self.tokenizer.bos, *self.tokenizer.encode(text)], device=model.embed.device)
        total = sum(
            float(model(x[None], y[None], windows=model.sampling_windows, tied=model.sampling_tied))
            for x, y in zip(ids[:-1].split(model.context), ids[1:].split(model.context), strict=True)
        )
        return total / (len(ids) - 1)


def _columns(lines: list[dict[str, Any]]) -> dict[str, NDArray[Any]]:
    """The numbers that all lines have."""
    return {
        name: np.array([line[name] for line in lines])
        for name in lines[0]
        if all(type(line.get(name)) in (int, float) for line in lines)
    }


def load(path: str | Path, *, device: str = "cpu") -> Run:
    """The run in a folder. Its model is loaded when it is first used, onto `device`."""
    run = Run(path, device)
    run.info  # noqa: B018  refuses what is not a run folder
    return run


def train(
    recipe: str | Recipe | None = None,
    track: str = "pocket",
    *,
    data: str | Path | None = None,
    target: float | None = None,
    steps: int | None = None,
    val_tokens: int | None = None,
    out: str | Path | None = None,
    compile: bool | None = None,
    checkpoint_every: int | None = None,
    curve: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    threads: int | None = None,
    attention: str = "auto",
    memory: float | None = None,
    deterministic: bool = False,
    progress: bool = True,
    **changes: Any,
) -> Run:
    """Train one model and return its run folder. The arguments are the flags of `speedrun train`.

    Ctrl-C saves a checkpoint and raises KeyboardInterrupt; `speedrun train --resume` continues.

    recipe: a name, the file of a stored one, or a Recipe; default: that of the track.
    changes: options of a run (`seed=1`, `keep=3`, `save=False`...), and fields of the recipe, by their dotted names
    (`**{"schedule.steps": 20}`) or by part (`schedule={"steps": 20}`).
    """
    if not isinstance(recipe, Recipe):
        name = get_track(track).name
        recipe = get_recipe(recipe or default_for(name), name)
    asked = {name: changes.pop(name) for name in OPTIONS & changes.keys()}
    fields = _dotted(changes)
    known = fields_of(recipe)
    for name in fields.keys() - known:
        close = similar(name, [*known, *OPTIONS, *inspect.signature(train).parameters])
        way_out = close or " `speedrun recipes show NAME` lists the fields."
        raise UserError(f"{name!r} is neither an option of a run nor a field of recipe {recipe.name!r}.{way_out}")
    recipe = with_steps(with_fields(recipe, fields), steps)
    found = find_track(track, Path(data) if data else None, target, val_tokens)
    machine = choose(
        device, dtype, threads, attention, recipe.model, recipe.schedule.max_tokens,
        memory=memory, deterministic=deterministic,
    )  # fmt: skip
    shown = get_curve(curve, recipe.name, found.name)
    options = make_options(
        recipe, found, machine, compile=compile, checkpoint_every=checkpoint_every, curve=shown, **asked
    )
    outcome = runs.start(recipe, found, machine, options, out=Path(out) if out else None, quiet=not progress)
    if outcome.result.status == "interrupted":
        raise KeyboardInterrupt
    return Run(outcome.folder)


def with_steps(recipe: Recipe, steps: int | None) -> Recipe:
    """The recipe with its schedule scaled to a number of steps; None: as it is."""
    return recipe if steps is None else dataclasses.replace(recipe, schedule=recipe.schedule.scaled(steps))


def make_options(
    recipe: Recipe,
    track: Track,
    machine: Machine,
    *,
    compile: bool | None,
    checkpoint_every: int | None,
    notice: Callable[[str], object] = lambda line: None,
    **options: Any,
) -> Options:
    """The options of a run, checked; `notice` gets a line for each that is turned off by default here."""
    if checkpoint_every is None:
        checkpoint_every = runs.default_checkpoint_every(recipe, track)
        if not checkpoint_every:
            notice(
                f"no checkpoints on the way: the clock of track {track.name!r} would count them; "
                f"--checkpoint-every {recipe.validation.every} writes them, for a run that may have to be resumed"
            )
    if compile is None:
        compile = runs.worth_compiling(recipe, machine)
        if not compile:
            steps = plural(recipe.schedule.total, "step")
            notice(f"torch.compile is not used: {steps} are sooner done without it; --compile uses it")
    made = Options(**{**options, "compile": compile, "checkpoint_every": checkpoint_every or None})
    check_options(made)
    return made


def race(
    recipe: str | Path | Recipe = DEFAULT,
    against: str | Path | Recipe | None = None,
    track: str = "pocket",
    *,
    data: str | Path | None = None,
    target: float | None = None,
    runs: int = 10,
    out: str | Path | None = None,
    progress: bool = True,
    **options: Any,
) -> "Verdict":
    """Race a recipe against a target or another recipe, or continue the race in `out`, and return the verdict.

    Every run is a process of its own. recipe, against: a name, the file of a stored one, or a Recipe. options: other
    flags of `speedrun race` (`kind="systems"`, `seed=1`, `dtype="float32"`, `set=("optim.lr=0.01",)`...).
    """
    from speedrun.experiments import RaceArgs, run_race, write_recipe

    known = [field.name for field in dataclasses.fields(RaceArgs)]
    for name in options.keys() - {*known}:
        raise UserError(f"{name!r} is not an option of a race.{nearest(name, known)}")
    with contextlib.ExitStack() as stack:

        def named(side: str | Path | Recipe) -> str:
            if not isinstance(side, Recipe):
                return str(side)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            return str(write_recipe(folder / f"{side.name}.json", side))

        args = RaceArgs(
            recipe=named(recipe),
            against=None if against is None else named(against),
            track=track,
            data=Path(data) if data else None,
            target=target,
            runs=runs,
            out=Path(out) if out else None,
            **options,
        )
        check_options(args)
        return run_race(args, Console(quiet=not progress, highlight=False, soft_wrap=True, markup=False, emoji=False))


def _dotted(changes: Mapping[str, Any]) -> dict[str, Any]:
    """{"model": {"num_layers": 3}} as {"model.num_layers": 3}."""
    found: dict[str, Any] = {}
    for name, value in changes.items():
        inner = value if isinstance(value, Mapping) else {}
        found |= {f"{name}.{k}": v for k, v in inner.items()} if inner else {name: value}
    return found
