"""Every recipe of the lineage: it runs at a tiny size, its losses stay what they were, its numbers are the records'."""

import json
from pathlib import Path

import pytest
import torch

from speedrun.data.shards import TokenFolder
from speedrun.experiments.ablate import switches_of
from speedrun.files import from_json
from speedrun.model.gpt import GPT, count_parameters
from speedrun.recipes import LINEAGE, get_recipe
from speedrun.training.config import Options, Recipe, fields_of, to_dict, with_fields
from speedrun.training.device import choose
from speedrun.training.job import Job
from speedrun.training.loop import Loop
from speedrun.training.optimizers import build_optimizer
from speedrun.training.progress import Progress
from speedrun.training.runlog import RunFolder, read_metrics
from speedrun.training.step import Trainer

GOLDEN = Path(__file__).parent / "golden.json"  # after a change that is meant to change losses, see `rewrite` below
STEPS = 30


def tiny(name: str) -> Recipe:
    """The pocket recipe with narrow layers, short rows and 30 steps."""
    recipe = get_recipe(name, "pocket")
    changes = {
        "model.dim": 32,
        "model.num_heads": 2,
        "schedule.seq_len": 32,
        "schedule.batch_size": 2,
        "validation.seq_len": 32,
        "validation.batch_size": 4,
        "validation.every": 1000,
        "validation.first": False,
        "schedule.extra_steps": 2 if recipe.schedule.extra_steps else 0,
    }
    changes["schedule.steps"] = STEPS - int(changes["schedule.extra_steps"])  # type: ignore[call-overload]
    if recipe.schedule.momentum_warmup:
        changes |= {
            "schedule.momentum_warmup": 8,
            "schedule.momentum_cooldown": min(4, recipe.schedule.momentum_cooldown),
        }
    if recipe.schedule.window_ramp:
        changes |= {"schedule.window_ramp": (8, 16, 24), "schedule.window_block": 4, "schedule.window_extra": 28}
        changes |= {"schedule.window_final": 32, "schedule.window_short": None}
    if recipe.schedule.window_cubic:
        changes |= {"schedule.window_cubic": 32, "schedule.window_block": 8}
    if recipe.schedule.batch_ramp:
        changes["schedule.batch_ramp"] = (1, 2, 3)
    if recipe.optim.snoo.k:
        changes["optim.snoo.k"] = 6
    return with_fields(recipe, changes)


def train(name: str, tokens: TokenFolder, folder: Path) -> list[float]:
    return losses_of(tiny(name), tokens, folder)


def losses_of(recipe: Recipe, tokens: TokenFolder, folder: Path) -> list[float]:
    run = RunFolder.create(folder, {"recipe": recipe.name}, console=lambda line: None)
    options = Options(compile=False, save=False)
    progress = Progress(recipe.schedule.total, quiet=True)
    result = Loop(Trainer(Job(recipe, tokens, choose("cpu", "float32", 1), options, run, progress))).run()
    assert result.status == "ok", result.reason
    return [m["loss"] for m in read_metrics(folder, "train")] + [result.val_loss]


@pytest.mark.parametrize("name", LINEAGE)
def test_thirty_steps_have_the_losses_they_had(name: str, tokens: TokenFolder, tmp_path: Path) -> None:
    found = train(name, tokens, tmp_path / "run")
    assert len(found) == STEPS + 1
    assert found[-1] < 0.9 * found[0], "it learns"
    assert found == pytest.approx(json.loads(GOLDEN.read_text())[name], rel=1e-3)


def rewrite(tokens: TokenFolder, folder: Path) -> None:
    """Write the golden losses anew: call it by hand, and say in the commit why they changed."""
    losses = {name: [round(x, 6) for x in train(name, tokens, folder / name)] for name in LINEAGE}
    GOLDEN.write_text(json.dumps(losses, indent=1) + "\n")


@pytest.mark.parametrize(("name", "track"), [(name, track) for name, sizes in LINEAGE.items() for track in sizes])
def test_a_recipe_survives_its_run_json(name: str, track: str) -> None:
    recipe = get_recipe(name, track)
    assert (recipe.name, recipe.track) == (name, track)
    assert from_json(json.loads(json.dumps(to_dict(recipe))), Recipe, "run.json", "") == recipe


@pytest.mark.parametrize(
    ("name", "track", "millions"),
    [
        ("gpt2", "short", 123.53),
        ("orthogonal-nesterov", "short", 123.53),
        ("muon", "short", 123.53),
        ("adamw", "short", 123.53),
        ("normuon", "short", 268.66),
        ("interleaved", "short", 268.66),
        ("medium-before", "medium", 609.2),
        ("medium", "medium", 613.4),
    ],
)
def test_native_sizes(name: str, track: str, millions: float) -> None:
    counts = count_parameters(get_recipe(name, track).model)
    large = sum(n for kind, n in counts.items() if kind != "gates and scalars")
    assert large / 1e6 == pytest.approx(millions, abs=0.03)


@pytest.mark.parametrize(
    ("name", "track", "steps", "tokens"),
    [
        ("gpt2", "short", 9536, 5.0e9),
        ("orthogonal-nesterov", "short", 7000, 3.67e9),
        ("muon", "short", 6200, 3.25e9),
        ("normuon", "short", 2285, 599e6),
        ("interleaved", "short", 1840, 487.6e6),
        ("medium", "medium", 4740, 2.177e9),
        ("medium-before", "medium", 5535, 2.902e9),
    ],
)
def test_native_steps_and_tokens(name: str, track: str, steps: int, tokens: float) -> None:
    schedule = get_recipe(name, track).schedule
    assert schedule.total == steps
    assert schedule.tokens == pytest.approx(tokens, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "track", "steps"),
    [
        ("interleaved", "short", {599: (3,), 600: (3, 7), 1200: (3, 7, 11), 1800: (3, 7, 11, 13)}),
        ("normuon", "short", {748: (3,), 749: (3, 7), 1497: (3, 7, 11), 2245: (3, 7, 11, 13)}),
        (
            "medium",
            "medium",
            {391: (3,), 392: (3, 7), 1175: (3, 7, 11, 13), 1567: (3, 7, 11, 13), 4739: (3, 7, 11, 13)},
        ),
    ],
)
def test_native_positions_follow_the_windows_that_the_records_stretched_them_for(
    name: str, track: str, steps: dict[int, tuple[int, ...]]
) -> None:
    """`medium` went on to windows of 23 and at last 27 blocks with the positions of 13."""
    schedule = get_recipe(name, track).schedule
    for step, blocks in steps.items():
        assert schedule.at(step).window_history == tuple(128 * b for b in blocks)
    assert schedule.after(schedule.total).window_history == (384, 896, 1408, 1664)


@pytest.mark.parametrize(("name", "track"), [(name, track) for name, sizes in LINEAGE.items() for track in sizes])
def test_scale_and_validation_are_those_of_the_record(name: str, track: str) -> None:
    """The records of 2025 and 2026 summed the loss, and validated documents whole; pocket recipes do neither."""
    recipe = get_recipe(name, track)
    summed = track != "pocket" and name in ("normuon", "interleaved", "medium")
    assert recipe.optim.reference_ranks == (8 if summed else None)
    whole = track != "pocket" and recipe.loader.packing == "documents"
    assert recipe.validation.cut_documents == (not whole)
    assert (recipe.validation.seq_len == 262_144) == whole


def test_native_decay_of_the_medium_track_s_earlier_record_is_twice_as_strong_in_the_mlp() -> None:
    recipe = get_recipe("medium-before", "medium")
    with torch.device("meta"):
        model = GPT(recipe.model, 1)
        model.store_matrices(torch.bfloat16)
        optimizer = build_optimizer(model.named_parameters(), model.param_roles(), recipe.optim)
    (group,) = (g for g in optimizer.param_groups if g["part"] == "blocks")
    found = {(name.split(".")[2], 0.01 * mul) for name, mul in zip(group["param_names"], group["wd_mul"], strict=True)}
    assert group["weight_decay"] == 0.01
    assert found == {("attention", 0.01), ("mlp", 0.02)}


@pytest.mark.parametrize("name", ["interleaved", "medium", "normuon", "medium-before"])
def test_at_pocket_depth_every_technique_keeps_a_place(name: str) -> None:
    sizes = LINEAGE[name]
    large = next(make() for track, make in sizes.items() if track != "pocket")
    native, pocket = fields_of(large.model), fields_of(sizes["pocket"]().model)
    for field in ("attention.long_layers", "no_attention", "embeddings.value_layers", "residual.skips"):
        assert bool(pocket[field]) == bool(native[field]) or field == "no_attention", field
    for field in (
        "attention.gates", "attention.key_offset", "attention.yarn", "attention.lambdas", "embeddings.value_gates",
        "embeddings.value_lambdas", "embeddings.smear", "embeddings.second", "head.smear_mtp", "head.untie",
        "head.softcap", "residual.skip_gates",
    ):  # fmt: skip
        assert pocket[field] == native[field], field
    assert pocket["residual.backout"] is not None


def test_only_the_earlier_medium_stack_tunes_its_kernels() -> None:
    """The short track has forbidden it since its 21st record; the medium record did not use it."""
    tuned = [(n, t) for n, sizes in LINEAGE.items() for t in sizes if get_recipe(n, t).compiler.coordinate_descent]
    assert tuned == [("medium-before", "medium")]


# -------------------------------------------------------------------- switches


def five_steps(name: str) -> Recipe:
    """The tiny recipe with everything that happens on the way happening within five steps."""
    recipe = tiny(name)
    changes: dict[str, object] = {"schedule.steps": 5, "schedule.extra_steps": 0}
    if recipe.schedule.momentum_warmup:
        changes |= {
            "schedule.momentum_warmup": 3,
            "schedule.momentum_cooldown": min(1, recipe.schedule.momentum_cooldown),
        }
    if recipe.optim.snoo.k:
        changes["optim.snoo.k"] = 2
    if recipe.schedule.untie_at:
        changes["schedule.untie_at"] = 0.4
    return with_fields(recipe, changes)


def first_with_each_switch() -> list[tuple[str, str]]:
    """(switch, recipe): every switch that any recipe has on, with the first recipe that has it."""
    found: dict[str, str] = {}
    for name, sizes in LINEAGE.items():
        if "pocket" in sizes:
            for switch in switches_of(get_recipe(name, "pocket")):
                found.setdefault(switch, name)
    return list(found.items())


@pytest.mark.parametrize(("switch", "name"), first_with_each_switch())
def test_turning_a_switch_off_changes_the_loss_within_five_steps(
    switch: str, name: str, tokens: TokenFolder, tmp_path: Path
) -> None:
    recipe = five_steps(name)
    without = with_fields(recipe, switches_of(recipe)[switch])
    assert losses_of(recipe, tokens, tmp_path / "on") != losses_of(without, tokens, tmp_path / "off")
