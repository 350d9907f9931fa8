"""A dry run: what it counts is what a real run has, and what does not fit is told."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from speedrun.data.shards import TokenFolder, write_shard
from speedrun.errors import UserError
from speedrun.model.config import AttentionConfig
from speedrun.model.gpt import GPT, GPTConfig, Windows, flops_per_token
from speedrun.recipes import RECIPES, get_recipe
from speedrun.tracks import get_track, own_track
from speedrun.training import dryrun, memory, telemetry
from speedrun.training.config import Options, Recipe, with_fields
from speedrun.training.device import choose
from speedrun.training.dryrun import DryRun, examine, spans, stage_table, turns
from tests.training.tiny import TINY

EVERY = [(name, track) for name, sizes in RECIPES.items() for track in sizes]
GIB = 2**30


@pytest.fixture(autouse=True)
def _no_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dryrun, "matmul_speed", lambda machine, config: 1e11)


def look(recipe: Recipe, tokens: TokenFolder, out: Path, **options: Any) -> DryRun:
    return examine(recipe, own_track(tokens.path, None), choose("cpu", "float32", 1), Options(**options), out)


# -------------------------------------------------------------------- stages


@pytest.mark.parametrize(("name", "track"), EVERY)
def test_the_table_of_stages_is_the_schedule(name: str, track: str) -> None:
    recipe = get_recipe(name, track)
    schedule = recipe.schedule
    laid = spans(schedule)
    assert [stage for stages in laid for stage in stages] == [schedule.at(step) for step in range(schedule.total)]
    for stages in laid:
        assert len({(s.batch_size, s.seq_len, s.windows, s.tied, len(s.mtp_weights)) for s in stages}) == 1
    for before, after in itertools.pairwise(laid):
        assert before[-1].shape != after[0].shape
    (heads, *rows), first, last = stage_table(recipe, laid), laid[0], laid[-1]
    assert [len(row) for row in rows] == [len(heads)] * len(laid)
    assert rows[0][0] == f"0-{len(first) - 1}"
    assert rows[-1][:2] == (f"{last[0].step}-{schedule.total - 1}", f"{last[0].batch_size} x {last[0].seq_len}")
    assert rows[-1][3].endswith(f"{last[-1].lr:.4g}")
    assert ("then untied" in " ".join(row[-1] for row in rows)) == any(s.untie for stages in laid for s in stages)


def test_a_row_of_numbers_is_told_by_where_it_turns() -> None:
    assert turns([]) == []
    assert turns([2.0, 2.0]) == [2.0]
    assert turns([0.1, 0.5, 1.0, 1.0, 0.5, 0.0]) == [0.1, 1.0, 0.0]
    assert turns([1.0, 0.5, 0.7, 0.6]) == [1.0, 0.5, 0.7, 0.6]


# -------------------------------------------------------------------- arithmetic


def test_flops_of_a_plain_gpt_by_hand(tokens: TokenFolder, tmp_path: Path) -> None:
    recipe = with_fields(
        TINY, {"model.num_layers": 2, "model.dim": 32, "schedule.batch_size": 4, "schedule.seq_len": 32}
    )
    weights = 2 * (4 * 32 * 32 + 2 * 32 * 128) + 4096 * 32
    attention = 2 * 32 * 32 / 2 * 2  # layers, width, keys on average, scores and values
    per_token = 3 * 2 * (weights + attention)
    assert look(recipe, tokens, tmp_path).flops == pytest.approx(12 * 4 * 32 * per_token)


def test_flops_see_windows() -> None:
    model = GPTConfig(num_layers=3, dim=64, num_heads=2, no_attention=(2,), attention=AttentionConfig(long_layers=(1,)))
    plain = flops_per_token(model, 0)

    def keys(window: int) -> float:  # how many a query sees on average in a row of 512, itself counted by half
        return sum(min(t, window) for t in range(512)) / 512 + 0.5

    found = flops_per_token(model, 512, Windows(32, 128)) - plain
    assert found == pytest.approx(12 * 64 * (keys(32) + keys(128)), rel=0.02)
    assert flops_per_token(model, 512, Windows(512, 512)) == flops_per_token(model, 512)


def test_the_speed_of_matmuls_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert dryrun.matmul_speed(choose("cpu", "float32", 1), TINY.model, seconds=0.01) > 0


# -------------------------------------------------------------------- memory


def test_activations_are_what_autograd_keeps(tokens: TokenFolder, tmp_path: Path) -> None:
    model = GPT(TINY.model, TINY.context)
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    ids = torch.zeros(1, 32, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model(ids, ids)
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    real = sum(size for storage, size in kept.items() if storage not in own)
    logits = memory.GRADIENT_COPIES * 4 * 32 * 4096
    assert look(TINY, tokens, tmp_path).memory.row == pytest.approx(real + logits, rel=0.01)


def test_memory_that_is_too_small_names_the_way_out(
    tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = with_fields(TINY, {"schedule.batch_size": 64})
    fitting = look(recipe, tokens, tmp_path)
    assert fitting.problems == []
    m = fitting.memory

    def with_memory(left: float, recipe: Recipe = recipe, **options: Any) -> DryRun:
        monkeypatch.setattr(telemetry, "memory_bytes", lambda device: m.fixed + 2**24 + int(left))
        return look(recipe, tokens, tmp_path, **options)

    few = with_memory(10.5 * m.row + m.validation)
    assert any("A micro-batch of 64 rows" in p and "pass --micro-batch-size" in p for p in few.problems)
    assert with_memory(10.5 * m.row + m.validation, micro_batch_size=10).problems == []

    wide = with_fields(recipe, {"validation.batch_size": 512, "schedule.batch_size": 1})
    (validation,) = with_memory(m.row + 64 * 2**20, wide).problems
    assert "A validation batch of 512 x 32 tokens" in validation
    assert "; pass --validation.batch-size " in validation
    long = with_fields(wide, {"validation.batch_size": 1, "validation.seq_len": 512 * 32})
    (validation,) = with_memory(m.row + 64 * 2**20, long).problems
    assert "pass --validation.batch-size 1 --validation.seq-len 8192 or less" in validation

    monkeypatch.setattr(telemetry, "memory_bytes", lambda device: m.weights)
    (alone,) = look(recipe, tokens, tmp_path).problems
    assert "Weights, gradients and optimizer state alone take" in alone


def test_a_full_disk_is_told_and_fewer_checkpoints_help(
    tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = look(TINY, tokens, tmp_path).checkpoint
    usage = dataclasses.make_dataclass("Usage", ["free"])
    monkeypatch.setattr(dryrun.shutil, "disk_usage", lambda path: usage(2 * size))
    (problem,) = look(TINY, tokens, tmp_path / "not" / "yet", checkpoint_every=5).problems
    assert "Checkpoints take" in problem
    assert "(3 of" in problem
    assert look(TINY, tokens, tmp_path, checkpoint_every=5, keep=1).problems == []
    assert look(TINY, tokens, tmp_path).problems == []
    assert look(TINY, tokens, tmp_path, save=False).checkpoints == 0


# -------------------------------------------------------------------- data


def test_several_rounds_through_ones_own_tokens_are_a_note(tokens: TokenFolder, tmp_path: Path) -> None:
    found = look(with_fields(TINY, {"schedule.steps": 400}), tokens, tmp_path)
    assert found.problems == []
    assert found.notes == ["The run goes through the 20,000 training tokens about 2.6 times."]


@pytest.mark.parametrize(("name", "track"), [("interleaved", "short"), ("medium", "medium")])
def test_a_native_run_says_what_data_is_missing(
    name: str, track: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEEDRUN_HOME", str(tmp_path))
    monkeypatch.setattr(telemetry, "memory_bytes", lambda device: 10_000 * GIB)
    monkeypatch.setattr(dryrun.shutil, "disk_usage", lambda path: dataclasses.make_dataclass("U", ["free"])(10**15))
    recipe, machine = get_recipe(name, track), choose("cpu", "float32", 1)

    def problems() -> list[str]:
        return examine(recipe, get_track(track), machine, Options(), tmp_path).problems

    (missing,) = problems()
    assert "There are no FineWeb train and no val shards" in missing

    folder = tmp_path / "fineweb10B"
    for shard in ("fineweb_train_000001.bin", "fineweb_val_000000.bin"):
        write_shard(folder / shard, np.ones(5000, dtype=np.int64))
    train, val = problems()
    assert f"The run trains on {recipe.schedule.tokens:,} tokens" in train
    assert "has only 5,000; run `speedrun data fetch fineweb10B --chunks" in train
    assert "Validation takes 10,485,760 tokens" in val


def test_a_vocabulary_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEEDRUN_HOME", str(tmp_path))
    for shard in ("fineweb_train_000001.bin", "fineweb_val_000000.bin"):
        write_shard(tmp_path / "fineweb10B" / shard, np.ones(5000, dtype=np.int64))
    found = examine(TINY, get_track("short"), choose("cpu", "float32", 1), Options(), tmp_path)
    assert found.problems[0].endswith("pass --model.vocab-size 50257.")


def test_rules_are_obeyed(tmp_path: Path) -> None:
    recipe = with_fields(get_recipe("interleaved", "short"), {"compiler.coordinate_descent": True})
    with pytest.raises(UserError, match="allow no extra compiler flags"):
        examine(recipe, get_track("short"), choose("cpu", "float32", 1), Options(), tmp_path)
