"""One run from the outside: find or make its folder, train, and hand back the result.

start(...)   a fresh run folder
resume(...)  an existing one, from its newest good checkpoint
"""

import dataclasses
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speedrun.data.shards import TokenFolder
from speedrun.errors import UserError
from speedrun.train import checkpoint
from speedrun.train.config import Recipe, differences, recipe_from_dict, to_dict, with_fields
from speedrun.train.device import Machine
from speedrun.train.loop import Options, Trainer
from speedrun.train.progress import Report
from speedrun.train.runlog import RunFolder, read_result
from speedrun.tracks import Track


@dataclass(frozen=True)
class Outcome:
    folder: Path
    result: dict[str, Any]
    target: float | None

    @property
    def reached(self) -> bool:
        loss = self.result["val_loss"]
        return self.target is not None and loss is not None and loss <= self.target


def fit_to_tokens(recipe: Recipe, tokens: TokenFolder, track: Track) -> Recipe:
    """On one's own tokens the vocabulary is whatever the tokens need; on a track it is part of the recipe."""
    if track.name == "own" and tokens.vocab_size != recipe.model.vocab:
        return with_fields(recipe, {"model.vocab": tokens.vocab_size})
    return recipe


def start(
    recipe: Recipe,
    track: Track,
    machine: Machine,
    options: Options,
    *,
    out: Path | None = None,
    quiet: bool = False,
) -> Outcome:
    tokens = track.locate()
    recipe = fit_to_tokens(recipe, tokens, track)
    options = dataclasses.replace(options, val_tokens=track.val_tokens)
    path = out or new_run_path(recipe, track, options.seed)
    report = Report(recipe.schedule.steps, quiet=quiet)
    description = {
        "recipe": to_dict(recipe),
        "track": track.name,
        "target": track.target,
        "seed": options.seed,
        "data": {"folder": str(tokens.path), "files": {n: f.sha256 for n, f in tokens.files.items()}},
        "options": dataclasses.asdict(options),
        "machine": machine.lines(),
        "threads": machine.threads,
    }
    folder = RunFolder.create(path, description, console=report.line)
    if tokens.tokenizer_path.exists():
        shutil.copyfile(tokens.tokenizer_path, path / "tokenizer.json")
    return _train(recipe, track, tokens, machine, options, folder, report, None)


def resume(
    path: Path,
    recipe: Recipe | None,
    track: Track | None,
    machine: Machine,
    options: Options,
    *,
    quiet: bool = False,
) -> Outcome:
    """Continue the run in `path`. `recipe` and `track`, when given, must be those of the run."""
    stored = RunFolder.open(path)
    about = stored.description
    original = recipe_from_dict(about["recipe"])
    assert track is not None
    if track.name != about["track"]:
        raise UserError(
            f"{path} is a run on track {about['track']!r}, not {track.name!r}; drop --track or start a new run."
        )
    tokens = track.locate()
    recipe = original if recipe is None else fit_to_tokens(recipe, tokens, track)
    changed = differences(original, recipe)
    if changed:
        raise UserError(f"{path} was started with another recipe ({'; '.join(changed)}); start a new run for that.")
    hashes = {n: f.sha256 for n, f in tokens.files.items()}
    if hashes != about["data"]["files"]:
        odd = sorted(n for n in {*hashes, *about["data"]["files"]} if hashes.get(n) != about["data"]["files"].get(n))
        raise UserError(f"{path} was started on other data ({', '.join(odd)} differ); start a new run for that.")
    if options.seed != about["seed"]:
        raise UserError(f"{path} was started with seed {about['seed']}, not {options.seed}; start a new run for that.")
    options = dataclasses.replace(options, val_tokens=track.val_tokens)
    report = Report(recipe.schedule.steps, quiet=quiet)
    folder = RunFolder.open(path, console=report.line)
    saved = checkpoint.newest_good(folder.checkpoints, notice=folder.log)
    if saved is not None and saved.step >= recipe.schedule.steps and (path / "result.json").exists():
        raise UserError(f"{path} is finished; there is nothing to resume.")
    if machine.threads != about["threads"]:
        folder.log(f"{machine.threads} threads, {about['threads']} before: losses may differ in the last bits")
    step = 0 if saved is None else saved.step
    checkpoint.drop_later(folder.checkpoints, step, folder.log)
    folder.cut_back(step, "resumed")
    return _train(recipe, track, tokens, machine, options, folder, report, saved)


def _train(
    recipe: Recipe,
    track: Track,
    tokens: TokenFolder,
    machine: Machine,
    options: Options,
    folder: RunFolder,
    report: Report,
    saved: checkpoint.Checkpoint | None,
) -> Outcome:
    with report:
        trainer = Trainer(recipe, tokens, machine, options, folder, report)
        return Outcome(folder.path, trainer.run(saved), track.target)


def new_run_path(recipe: Recipe, track: Track, seed: int) -> Path:
    stem = f"{track.name}-{recipe.name}-s{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1000):
        path = Path("runs") / (stem if number == 0 else f"{stem}-{number}")
        if not path.exists():
            return path
    raise UserError(f"runs/ already has a thousand folders named {stem}; clean up or choose one with --out.")


def newest_unfinished(recipe: str, track: str, seed: int) -> Path | None:
    """The newest folder under runs/ of this recipe, track and seed that has no result yet, or was interrupted."""
    found = []
    for path in Path("runs").glob(f"{track}-{recipe}-s{seed}-*"):
        if (path / "run.json").exists() and not finished(path):
            found.append((path.stat().st_mtime_ns, path))
    return max(found)[1] if found else None


def finished(path: Path) -> bool:
    """A result that is not just 'interrupted' ends a run for good."""
    if not (path / "result.json").exists():
        return False
    return read_result(path).get("status") != "interrupted"
