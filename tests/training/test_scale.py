"""The scale of gradients: the sum of the records and the mean train alike but for eps, and 8-bit scales must fit."""

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from speedrun.data.shards import TokenFolder
from speedrun.errors import UserError
from speedrun.experiments.race import change_recipe
from speedrun.experiments.sweep import Range
from speedrun.recipes import RECIPES, get_recipe
from speedrun.training import scale
from speedrun.training.config import Recipe, with_fields
from speedrun.training.loop import Loop
from speedrun.training.runlog import read_metrics
from tests.distributed.ranks import together
from tests.distributed.test_training import alone, speedrun, train
from tests.training.tiny import tiny_trainer


@pytest.mark.parametrize("clip", [None, 0.02])
@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_with_eps_in_its_scale_the_sum_trains_as_the_mean(
    clip: float | None, micro_batch_size: int | None, tokens: TokenFolder, tmp_path: Path
) -> None:
    """128 tokens and 8 ranks are powers of two: every gradient is exactly 16 times as large, and so is eps.

    eps is large, so that updates depend on the size of the gradient. So logs have the same losses, bit for bit, and
    gradients are clipped at the same norm of the mean's gradient.
    """
    losses = []
    for name, ranks, eps in (("mean", None, 0.01), ("sum", 8, 0.16)):
        changes = {"optim.eps": eps, "optim.clip": clip, "optim.reference_ranks": ranks, "optim.lr": 1.0}
        trainer = tiny_trainer(tokens, tmp_path / name, changes, micro_batch_size=micro_batch_size)
        assert Loop(trainer).run().status == "ok"
        losses.append([m["loss"] for m in read_metrics(tmp_path / name) if m["kind"] in ("train", "val")])
    exact = clip is None  # clipping adds 1e-6 to the norm
    assert losses[1] == (losses[0] if exact else pytest.approx(losses[0], rel=1e-5))


def test_the_backward_pass_starts_from_the_sum_and_the_optimizer_gets_the_eighth(
    tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, torch.Tensor] = {}
    trainer = tiny_trainer(tokens, tmp_path / "run", {"optim.reference_ranks": 8})
    stage = trainer.recipe.schedule.at(0)
    with contextlib.closing(Loop(trainer).batches()) as batches:
        batch = batches.next()
    head = trainer.model.head
    assert head is not None
    trainer.micro_loss(batch, stage).backward()
    assert head.grad is not None
    expected = head.grad.clone()
    assert expected.norm() > 1
    trainer.optimizer.zero_grad()
    trainer.gradients(batch, stage)
    assert torch.equal(head.grad, expected), "the sum, whatever the number of tokens"
    trainer.optimizer.zero_grad()

    def look() -> None:
        assert head.grad is not None
        seen["gradient"] = head.grad.clone()

    monkeypatch.setattr(trainer.optimizer, "step", look)
    trainer.step(stage, batch)
    assert torch.equal(seen["gradient"], expected / 8)


@pytest.mark.parametrize(("size", "clip"), [(2, None), (3, None), (3, 0.3), (8, 0.3)])
def test_the_number_of_processes_does_not_change_the_scale(
    size: int, clip: float | None, tokens: TokenFolder, tmp_path: Path
) -> None:
    """A large eps makes a wrong scale visible: with it updates are proportional to the gradient."""
    changes: dict[str, Any] = {"optim.weights": "float32", "optim.reference_ranks": 8, "optim.eps": 1.0}
    changes["optim.clip"] = clip
    expected, _, validation = alone("interleaved", tokens, changes)
    assert expected != pytest.approx(alone("interleaved", tokens, changes | {"optim.reference_ranks": 4})[0], rel=1e-4)
    for losses, _, loss in together(tmp_path, size, train, "interleaved", str(tokens.path), changes):
        assert losses == pytest.approx(expected, rel=1e-4)
        assert loss == pytest.approx(validation, rel=1e-4)


# -------------------------------------------------------------------- what fits into 8-bit floats


def native(**changes: Any) -> Recipe:
    return with_fields(get_recipe("interleaved", "short"), {k.replace("__", "."): v for k, v in changes.items()})


@pytest.mark.parametrize(("name", "track"), [(name, track) for name, sizes in RECIPES.items() for track in sizes])
def test_the_scales_of_every_recipe_fit(name: str, track: str) -> None:
    scale.check(get_recipe(name, track))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"optim__reference_ranks": None},
            "A gradient of a logit of 3.5e-11 rounds to zero in 8-bit floats: its scale in model.head.fp8_scales is "
            "0.001674; choose other model.head.fp8_scales, or sum the loss with optim.reference_ranks, or turn",
        ),
        ({"model__head__fp8_scales": (100 / 448, 1.6 / 448, 1e-6)}, "A gradient of a logit of 1.3 overflows"),
        ({"model__head__fp8_scales": (100 / 448, 1.6 / 448, 10.0)}, "A gradient of a logit of 1.4e-05 rounds to zero"),
        ({"model__head__fp8_scales": (0.01, 1.6 / 448, 0.75 / 448)}, "A feature of 28 overflows"),
        ({"model__head__fp8_scales": (2000.0, 1.6 / 448, 0.75 / 448)}, "A feature of 1 rounds to zero"),
        ({"model__head__fp8_scales": (100 / 448, 1e-6, 0.75 / 448)}, "A weight of 0.03 overflows"),
        ({"model__head__fp8_scales": (100 / 448, 10.0, 0.75 / 448)}, "A weight of 0.005 rounds to zero"),
    ],
)
def test_scales_that_cannot_work_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        scale.check(native(**changes))
    assert str(caught.value).startswith(sentence)
    scale.check(native(**changes, model__head__fp8=False))


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        (0, "at least 1"),
        (-8, "at least 1 or None"),
        (2**16 + 1, "at most 65536"),
        (8.0, "a whole number or None"),
        (True, "a whole number or None"),
        ("8", "a whole number or None"),
    ],
)
def test_a_number_of_ranks_that_makes_no_scale_is_refused(ranks: Any, says: str) -> None:
    with pytest.raises(UserError, match=f"optim.reference_ranks is {ranks!r}; it must be .*{says}"):
        native(optim__reference_ranks=ranks)


def test_the_ranges_are_those_of_torch_s_8_bit_floats() -> None:
    for dtype, (tiny, huge), beyond in (
        (torch.float8_e4m3fn, scale.E4M3_RANGE, 448.0),
        (torch.float8_e5m2, scale.E5M2_RANGE, math.inf),
    ):
        rounded = torch.tensor([0.99 * tiny, 1.01 * tiny, 0.999 * huge, 1.05 * huge]).to(dtype).float()
        assert rounded[0] == 0
        assert rounded[1] == 2 * tiny
        assert rounded[2] == torch.finfo(dtype).max
        assert rounded[3] == beyond


@pytest.mark.parametrize(
    ("flags", "processes", "way"),
    [("--dry-run", 1, "This run does not fit: A"), ("", 1, "A"), ("", 2, "A")],
)
def test_a_run_with_such_a_scale_ends_before_it_begins(
    flags: str, processes: int, way: str, tokens: TokenFolder, tmp_path: Path
) -> None:
    words = f"--recipe interleaved --model.head.fp8 True --model.head.fp8-scales 1 1 1e-9 {flags}".split()
    done = speedrun(*words, "--data", str(tokens.path), processes=processes, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("speedrun: ")]
    assert told == [
        f"speedrun: {way} gradient of a logit of 0.0013 overflows in 8-bit floats: its scale in model.head.fp8_scales "
        "is 1e-09; choose other model.head.fp8_scales, or turn model.head.fp8 off."
    ]
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_mean_and_the_sum_can_be_raced_and_searched() -> None:
    """None is written as such, also where the recipe has a number now."""
    for name, track, value, expected in (
        ("interleaved", "short", "None", None),
        ("adamw", "pocket", "8", 8),
        ("adamw", "pocket", "None", None),
    ):
        _, recipe = change_recipe(name, track, [f"optim.reference_ranks={value}"])
        assert recipe.optim.reference_ranks == expected
        assert Range.parse(f"optim.reference_ranks={value}", get_recipe(name, track)).choices == [expected]
    for change, says in (
        ("optim.reference_ranks=1.5", "optim.reference_ranks is 1.5; it must be a whole number or None"),
        ("optim.reference_ranks=many", "it must be a whole number or None"),
        ("optim.lr=None", "optim.lr is None; it must be a number"),
        ("model.num_layers=None", "model.num_layers is None"),
    ):
        with pytest.raises(UserError, match=says):
            change_recipe("adamw", "pocket", [change])
