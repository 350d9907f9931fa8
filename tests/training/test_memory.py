"""Memory known beforehand: from compiled graphs where they were measured, for GPUs that need not be here."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from speedrun.data.shards import TokenFolder
from speedrun.errors import UserError
from speedrun.model.gpt import GPT
from speedrun.recipes import LINEAGE, RECIPES, get_recipe
from speedrun.training import memory
from speedrun.training.config import Options, differences, with_fields
from speedrun.training.device import by_name, choose
from speedrun.training.gpus import GPUS
from speedrun.training.job import Job
from speedrun.training.loop import Loop
from speedrun.training.memory import (
    bytes_at_once,
    check_rows,
    compiled_graph,
    fitting,
    graph_of,
    memory_of,
    problems_of,
)
from speedrun.training.progress import Progress
from speedrun.training.runlog import NullRunFolder
from speedrun.training.step import Trainer
from speedrun.training.warmup import warm_up
from tests.training.tiny import TINY, tiny_trainer

NATIVE = [(name, track) for track in ("short", "medium") for name, sizes in RECIPES.items() if track in sizes]
SHORT = [(name, track) for name, track in NATIVE if track == "short"]


# -------------------------------------------------------------------- the table


def kernels_of(name: str) -> str:
    return by_name(name, None, "auto", "auto").kernels


def test_every_stage_of_every_native_recipe_is_in_the_table() -> None:
    for name, track in NATIVE:
        recipe = get_recipe(name, track)
        for attention in map(kernels_of, GPUS):
            for stage in recipe.schedule.visits():
                assert bytes_at_once(recipe, stage, 1, attention), (name, stage.step, attention)
            last = recipe.schedule.after(recipe.schedule.total)
            assert bytes_at_once(recipe, last, 1, attention, training=False)


def test_a_graph_is_known_by_what_its_memory_depends_on() -> None:
    recipe = get_recipe("interleaved", "short")
    stages = recipe.schedule.visits()
    graph = graph_of(recipe, stages[0], "fa3")
    wider = dataclasses.replace(stages[0], windows=stages[-1].windows, batch_size=99, lr=0.1)
    assert graph_of(recipe, wider, "fa3") == graph, "a window is a constant in it, and rows are counted"
    assert graph_of(recipe, stages[-1], "fa3") != graph, "it predicts fewer tokens"
    assert graph_of(recipe, stages[0], "varlen") != graph
    for changes in ({"model.num_layers": 12}, {"optim.weights": "float32"}, {"schedule.seq_len": 8192}):
        other = with_fields(
            recipe, {**changes, **({"model.attention.long_layers": (3, 11)} if "model.num_layers" in changes else {})}
        )
        assert graph_of(other, other.schedule.at(0), "fa3") != graph
        assert bytes_at_once(other, other.schedule.at(0), 1, "fa3") is None, "and was not measured"


def test_rows_take_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = TINY.schedule.at(0)
    row = {"graph": graph_of(TINY, stage, "fa3"), "rows": 4, "peak": 4001}
    monkeypatch.setattr(memory, "table", lambda: [row, {**row, "peak": 3000}, {"device": "h100", "launches": 3}])
    assert [bytes_at_once(TINY, stage, rows, "fa3") for rows in (1, 2, 4, 8)] == [1001, 2001, 4001, 8002]


# -------------------------------------------------------------------- micro-batches


@example(rows=4, row=10, left=20)
@given(rows=st.integers(1, 64), row=st.integers(1, 1000), left=st.integers(-100, 70_000))
def test_micro_batches_are_as_few_as_fit(rows: int, row: int, left: int) -> None:
    size = fitting(rows, row, left)
    parts = -(-rows // size)
    assert size == 1 or size * row <= left
    assert parts == 1 or -(-rows // (parts - 1)) * row > left, "in fewer parts it would not fit"


LARGE = [
    (*of, device, ranks, 76e9)
    for of in [*SHORT, ("medium", "medium")]
    for device in ("h100", "a100")
    for ranks in (1, 8)
]
SMALL = [(*of, "4090", 1, 22e9) for of in SHORT if of != ("normuon", "short")]


@pytest.mark.parametrize(("name", "track", "device", "ranks", "limit"), LARGE + SMALL)
def test_every_stage_fits_in_the_micro_batches_that_are_chosen(
    name: str, track: str, device: str, ranks: int, limit: float
) -> None:
    """What a stage saves and the most that is alive at once, beside weights, gradients, optimizer and transfers."""
    recipe = get_recipe(name, track)
    found = memory_of(recipe, by_name(device, None, "auto", "auto"), Options(), ranks)
    assert found.measured
    assert problems_of(found, recipe) == []
    assert found.total < limit
    for stage in recipe.schedule.visits():
        graph = compiled_graph(recipe, stage, kernels_of(device))
        assert graph is not None
        assert graph["saved"] <= graph["peak"], "what is saved is a part of what is alive"
        held = -(-graph["peak"] * found.micro_batch_sizes[stage.shape] // graph["rows"])
        assert found.fixed + held < limit, stage.step


def test_rows_for_24_gb_are_shorter_and_nothing_else_differs() -> None:
    """Steps, tokens of a step and validation are `normuon`'s; twice the length does not fit."""
    whole, small = get_recipe("normuon", "short"), get_recipe("normuon-24gb", "short")
    assert {change.partition(":")[0] for change in differences(whole, small)} == {
        "name",
        "schedule.batch_size",
        "schedule.seq_len",
    }
    steps = range(whole.schedule.total)
    assert [whole.schedule.at(s).tokens for s in steps] == [small.schedule.at(s).tokens for s in steps]
    machine = by_name("4090", None, "auto", "auto")
    assert problems_of(memory_of(whole, machine, Options()), whole) != []
    planned = memory_of(small, machine, Options())
    assert {*planned.micro_batch_sizes.values()} == {1}, "what was measured"
    assert small.name not in LINEAGE


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("k", [None, 28])
def test_what_a_rank_holds_beside_its_rows(ranks: int, k: int | None) -> None:
    recipe = with_fields(TINY, {"optim.snoo.k": k})
    model, _, states = memory.skeleton(recipe)
    weights, state = sum(p.nbytes for p in model.parameters()), sum(states.values())
    outer = weights if k else 0
    found = memory_of(recipe, by_name("h100", None, "auto", "auto"), Options(), ranks)
    assert found.gradients == weights
    assert found.weights == weights + sum(b.nbytes for b in model.buffers())
    assert found.optimizer == 2 * outer + -(-(state - 2 * outer) // ranks), "each rank has all that Snoo keeps"
    assert found.warm_up == weights + outer
    assert (found.transfers > 0) == (ranks > 1)


def test_what_does_not_fit_is_told_with_the_way_out() -> None:
    medium, normuon = get_recipe("medium", "medium"), get_recipe("normuon", "short")
    small = by_name("4090", None, "auto", "auto")
    rows, validation = problems_of(memory_of(medium, small, Options()), medium)
    assert "A micro-batch of 1 row takes about" in rows
    assert "shorten the rows (--schedule.seq-len)" in rows
    assert "A validation batch of 1 x 262144 tokens" in validation
    for recipe in (medium, normuon):
        with pytest.raises(UserError, match="A micro-batch of 1 row takes about"):
            check_rows(memory_of(recipe, small, Options()), recipe, GPUS["4090"].total_memory)
    interleaved = get_recipe("interleaved", "short")
    check_rows(memory_of(interleaved, small, Options()), interleaved, GPUS["4090"].total_memory)
    check_rows(memory_of(medium, by_name("h100", None, "auto", "auto"), Options(), 8), medium, 2**36)


def test_a_gpu_is_not_promised_whole() -> None:
    recipe = get_recipe("medium", "medium")
    whole = memory_of(recipe, by_name("h100", None, "auto", "auto"), Options(), 8)
    assert whole.usable == int(memory.USABLE * GPUS["h100"].total_memory)
    last = recipe.schedule.at(recipe.schedule.total - 1)
    assert whole.micro_batch_sizes[last.shape] == 2, "of four"
    small = memory_of(recipe, by_name("h100", 40, "auto", "auto"), Options(), 8)
    assert small.usable == int(memory.USABLE * 40e9)
    assert small.micro_batch_sizes[last.shape] == 1
    assert memory_of(recipe, by_name("h100", None, "auto", "auto"), Options(micro_batch_size=3), 8).rows == 3, (
        "as asked"
    )


def test_the_trainer_takes_what_fits(tokens: TokenFolder, tmp_path: Path) -> None:
    whole, parts = (tiny_trainer(tokens, tmp_path / name, {"schedule.batch_size": 5}) for name in ("whole", "parts"))
    stage = whole.recipe.schedule.at(0)
    batch = Loop(whole).batches().next()
    parts.fitting = {stage.shape: 2}
    sizes: list[int] = []
    micro_loss = parts.micro_loss
    parts.micro_loss = lambda b, s: (sizes.append(len(b.inputs)), micro_loss(b, s))[1]  # type: ignore[method-assign]
    assert parts.gradients(batch, stage) == pytest.approx(whole.gradients(batch, stage), rel=1e-6)
    assert sizes == [2, 2, 1]


@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_the_trainer_asks_what_fits_before_it_compiles(
    tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro_batch_size: int | None
) -> None:
    machine = dataclasses.replace(choose("cpu", "float32", 1), device=torch.device("cuda"))
    stage, options = TINY.schedule.at(0), Options(micro_batch_size=micro_batch_size)
    row = {"graph": graph_of(TINY, stage, machine.attention), "rows": 1, "peak": 2**30}
    monkeypatch.setattr(memory, "table", lambda: [row])
    monkeypatch.setattr(GPT, "to", lambda model, _: model)
    monkeypatch.setattr("speedrun.training.step.compiled", lambda model, *_: (model, None))
    gpu = SimpleNamespace(total_memory=4 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(memory.telemetry, "memory_bytes", lambda _: gpu.total_memory)
    rest = NullRunFolder(tmp_path), Progress(1, quiet=True)
    assert Trainer(Job(TINY, tokens, machine, options, *rest)).fitting == ({} if micro_batch_size else {stage.shape: 2})
    for small in (dataclasses.replace(machine, memory=2**29), machine):
        with pytest.raises(UserError, match=r"A micro-batch of 1 row takes about 1.0 GiB"):
            Trainer(Job(TINY, tokens, small, options, *rest))
        gpu.total_memory = 2**29
    assert list(tmp_path.iterdir()) == []


def test_a_warm_up_that_ran_out_of_memory_visits_all_stages_again(tokens: TokenFolder, tmp_path: Path) -> None:
    """The stages before were compiled for larger micro-batches; in the run they would have to be compiled again."""
    trainer = tiny_trainer(tokens, tmp_path / "run", {"schedule.batch_ramp": (2, 4, 8)})
    seen: list[int] = []
    micro_loss = trainer.micro_loss

    def tight(batch, stage):  # type: ignore[no-untyped-def]
        if torch.is_grad_enabled():
            if len(batch.inputs) > 1 and stage.batch_size == 8:
                raise torch.OutOfMemoryError("injected")
            seen.append(len(batch.inputs))
        return micro_loss(batch, stage)

    trainer.micro_loss = tight  # type: ignore[method-assign]
    warm_up(trainer)
    assert trainer.micro_batch_size == 1
    assert seen[:4] == [2, 2, 4, 4]
    assert seen[-2 * (2 + 4 + 8) :] == [1] * 28, "all three stages, twice each, row by row"


# -------------------------------------------------------------------- bad input


@pytest.mark.parametrize("content", [None, "", "<<<<<<< HEAD"])
def test_a_table_that_cannot_be_read(content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.gpus, "TABLE", tmp_path / "gpus.json")
    if content is not None:
        (tmp_path / "gpus.json").write_text(content)
    memory.table.cache_clear()
    with pytest.raises(UserError, match=r"gpus.json is missing or damaged .*; install speedrun again"):
        memory.table()


def test_memory_that_is_not_there() -> None:
    for asked in (0, 1e-10, -1, 200, float("nan"), float("inf")):
        with pytest.raises(UserError, match=r"--memory is .* GB, but NVIDIA H100 80GB HBM3 has 85.5; choose"):
            by_name("h100", asked, "auto", "auto")
    with pytest.raises(UserError, match="--memory 8 is for a GPU, and the device is cpu"):
        choose("cpu", "float32", 1, memory=8)


def test_what_was_not_measured_for_a_gpu_by_name() -> None:
    with pytest.raises(UserError, match="--attention sdpa was not measured for --device h100; drop it, or pass fa3"):
        by_name("h100", None, "auto", "sdpa")
    with pytest.raises(UserError, match="--dtype float32 was not measured for --device 4090"):
        by_name("4090", None, "float32", "auto")
    with pytest.raises(UserError, match=r"Unknown device 'h200'; choose .* with --dry-run also h100, a100, 4090"):
        choose("h200")
    with pytest.raises(UserError, match=r"Unknown device 'h100'; .* h100 goes with --dry-run"):
        choose("h100")
