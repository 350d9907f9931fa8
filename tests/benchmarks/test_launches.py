"""Launches, syncs and collectives of a training step: that they are counted right, and that they have not grown."""

from pathlib import Path

import pytest
from benchmarks.gpu.__main__ import worse

from tests.benchmarks.test_gpu import KEPT, answers, environment  # noqa: F401 - a fixture

PROGRAMS = """
import json, torch
from pathlib import Path
from benchmarks.gpu import pretend
pretend.start("h100")
from benchmarks.gpu import declared
from benchmarks.gpu.launches import Launches, fake_gpu
from benchmarks.gpu.lower import lower
from speedrun.model import embeddings, head

@torch.library.custom_op("test::opaque", mutates_args=(), device_types="cuda")
def opaque(x: torch.Tensor) -> torch.Tensor:
    return x.clone()

opaque.register_fake(torch.empty_like)
opaque.register_autograd(lambda ctx, g: g)

def on_gpu(*shape, dtype=torch.float32, **kwargs):
    return torch.empty(shape, dtype=dtype, device="cuda:0", **kwargs)

def compiled(x):
    return torch.compile(lambda x: (x * 2).relu() @ x)(x).add_(1)

def region(x):
    with Launches.current.elsewhere():
        opaque(x)

def count(name, function, *args):
    row = {"name": name}
    try:
        with Launches(Path(__file__).parent) as counted:
            function(*args)
        row["lines"] = [[line, *numbers] for line, numbers in counted.by_line().items()]
        row["total"] = [counted.launches.total(), counted.syncs.total(), counted.copies.total()]
        row["waits"] = [what for _, what in counted.syncs]
    except Exception as e:
        row["failure"] = f"{type(e).__name__}: {e}"
    print(json.dumps(row), flush=True)

def lowered(name, function, *args):
    row = {"name": name}
    try:
        row["launches"] = [graph.launches for graph in lower(function, *args)]
    except Exception as e:
        row["failure"] = f"{type(e).__name__}: {e}"
    print(json.dumps(row), flush=True)

with fake_gpu():
    x, many, large = on_gpu(4, 4), [on_gpu(10) for _ in range(200)], [on_gpu(65536 * 330)]
    count("add", lambda: x + 1)
    count("views", lambda: x.view(16)[2:10].view(2, 4).t().unsqueeze(0).expand(3, 4, 2))
    count("foreach in place", lambda: torch._foreach_mul_(many, 2.0))  # 110 tensors a launch
    count("foreach", lambda: torch._foreach_mul(many, 2.0))  # 64
    count("foreach, blocks", lambda: torch._foreach_mul_(large, 2.0))  # 320 blocks
    count("foreach, slow", lambda: torch._foreach_add_(many[:3], [on_gpu(10, dtype=torch.bfloat16)] * 3))
    count("item", lambda: x.sum().item())
    count("bool", lambda: bool(x.sum() > 0))
    count("to the CPU", lambda: x.cpu())
    count("to the CPU, later", lambda: torch.empty(4, 4, pin_memory=True).copy_(x, non_blocking=True).sum().item())
    count("from the CPU", lambda: torch.zeros(5).to("cuda:0"))
    count("from pinned memory", lambda: torch.zeros(5).pin_memory()[1:].to("cuda:0", non_blocking=True))
    count("constant", lambda: torch.tensor([1.0, 2.0], device="cuda:0"))
    count("nonzero", lambda: x.nonzero())
    count("mask", lambda: x[x > 0])
    count("mask, written", lambda: x.__setitem__(x > 0, 0.0))
    count("event", lambda: torch.cuda.Event().synchronize())
    count("host", lambda: torch.ones(3).nonzero().sum().item())
    count("compiled", compiled, x)
    count("undeclared", opaque, x)
    count("undeclared, elsewhere", region, x)
    declared.DECLARED["test::opaque"] = 7
    count("declared", opaque, x)
    del declared.DECLARED["test::opaque"]

    a, w, g = on_gpu(32, 16), on_gpu(64, 16), on_gpu(32, 64)
    a8, w8 = on_gpu(32, 16, dtype=head.E4M3), on_gpu(64, 16, dtype=head.E4M3)
    ids = on_gpu(2, 16, dtype=torch.long)
    count("speedrun::fp8_product", head.fp8_product._init_fn, a, w, 0.1, 0.1, 0.1)
    count("speedrun::fp8_gradients", head.fp8_gradients._init_fn, g, a8, w8, 0.1, 0.1, 0.1)
    count("speedrun::lookup", embeddings.lookup._init_fn, w, ids)
    count("speedrun::lookup_gradient", embeddings.lookup_gradient._init_fn, on_gpu(2, 16, 16), ids, 64)

    y = on_gpu(64, 64, requires_grad=True)
    lowered("lowered, undeclared", lambda y: opaque(y * 2).sum(), y)
    declared.DECLARED["test::opaque"] = 7
    lowered("lowered, declared", lambda y: opaque(y * 2).sum(), y)
print(json.dumps({"name": "declared", "launches": declared.DECLARED, "waits": declared.WAITS}))
"""


@pytest.fixture(scope="module")
def counted(environment, tmp_path_factory):  # noqa: F811
    script = tmp_path_factory.mktemp("programs") / "programs.py"
    script.write_text(PROGRAMS)
    rows = answers(environment, str(script))
    return {row["name"]: row for row in rows[:-1]}, rows[-1]


@pytest.mark.parametrize(
    ("program", "total"),
    [
        ("add", [1, 0, 0]),
        ("views", [0, 0, 0]),
        ("foreach in place", [2, 0, 0]),
        ("foreach", [4, 0, 0]),
        ("foreach, blocks", [2, 0, 0]),
        ("foreach, slow", [3, 0, 0]),
        ("item", [1, 1, 0]),
        ("bool", [2, 1, 0]),
        ("to the CPU", [0, 1, 0]),
        ("to the CPU, later", [1, 0, 0]),
        ("from the CPU", [0, 0, 1]),
        ("from pinned memory", [1, 0, 0]),
        ("constant", [0, 1, 0]),
        ("nonzero", [1, 1, 0]),
        ("mask", [2, 1, 0]),
        ("mask, written", [2, 0, 0]),
        ("event", [0, 1, 0]),
        ("host", [0, 0, 0]),
        ("compiled", [3, 0, 0]),  # a Triton kernel, a product, and the addition that is not compiled
        ("declared", [7, 0, 0]),
    ],
)
def test_launches_syncs_and_copies_of_small_programs(counted, program: str, total: list[int]) -> None:
    row = counted[0][program]
    assert "failure" not in row
    assert row["total"] == total


def test_a_sync_is_named_by_its_line_and_by_what_it_is(counted) -> None:
    rows, _ = counted
    line = 1 + next(i for i, text in enumerate(PROGRAMS.splitlines()) if text.strip().startswith('count("item"'))
    assert rows["item"]["waits"] == ["item"]
    assert rows["item"]["lines"][0][0].endswith(f"programs.py:{line}")
    assert rows["to the CPU"]["waits"] == ["copy to the CPU"]
    assert rows["constant"]["waits"] == ["torch.tensor on the GPU"]


def test_an_operator_that_nobody_declared_is_refused(counted) -> None:
    rows, _ = counted
    for program in ("undeclared", "undeclared, elsewhere", "lowered, undeclared"):
        assert "Undeclared" in rows[program]["failure"]
        assert "test::opaque at " in rows[program]["failure"]
        assert "programs.py" in rows[program]["failure"]
    assert sum(rows["lowered, declared"]["launches"]) >= 7


@pytest.mark.parametrize("operator", ["fp8_product", "fp8_gradients", "lookup", "lookup_gradient"])
def test_what_our_operators_declare_is_what_their_bodies_do(counted, operator: str) -> None:
    rows, declared = counted
    name = f"speedrun::{operator}"
    assert rows[name]["total"] == [declared["launches"][name], declared["waits"].get(name, 0), 0]


def test_a_step_of_interleaved_on_eight_ranks_is_what_is_kept(environment) -> None:  # noqa: F811
    name = "step of interleaved, 8 ranks"
    rows = answers(environment, "-m", "benchmarks.gpu", "--inside", "h100", "--only", name)
    assert [row["name"] for row in rows] == [f"{name}, Adam waits", f"{name}, Adam steps"]
    for row in rows:
        lines = row.pop("lines")
        assert row == KEPT["h100", row["name"]], 'python -m benchmarks.gpu --devices h100 --only "step of" --write'
        assert sum(launches for _, launches, _, _ in lines) == row["launches"]
        assert all(where == "autograd itself" or Path(where.rpartition(":")[0]).exists() for where, *_ in lines)


WHOLE = """
import json, torch
from benchmarks.gpu import pretend
pretend.start("h100")
from benchmarks.gpu import stages, steps
from benchmarks.gpu.launches import Launches, fake_gpu
from speedrun.recipes import get_recipe

stages.install_stand_in()
recipe = get_recipe("interleaved", "short")
with steps.ranks(8), fake_gpu():
    trainer = steps.made_up_trainer(recipe, "fa3")
    model = torch.compile(trainer.model, dynamic=False, fullgraph=True)
    for number in range(3):
        stage = recipe.schedule.at(number)
        with Launches() as counted:
            trainer.loss_of = model
            trainer.step(stage, steps.made_up(recipe, stage))
print(json.dumps(steps.summary(counted)))
"""


@pytest.mark.slow
def test_with_the_compiled_model_a_step_has_its_launches_in_addition(environment, tmp_path: Path) -> None:  # noqa: F811
    script = tmp_path / "whole.py"
    script.write_text(WHOLE)
    (whole,) = answers(environment, str(script))
    (graph,) = answers(environment, "-m", "benchmarks.gpu", "--inside", "h100", "--only", "interleaved from step 0")
    around = KEPT["h100", "step of interleaved, 8 ranks, Adam waits"]
    model = graph["forward"]["launches"] + graph["backward"]["launches"]
    assert whole["launches"] == around["launches"] + model
    assert [whole[what] for what in ("syncs", "copies")] == [around[what] for what in ("syncs", "copies")]


@pytest.mark.slow
def test_a_step_of_every_native_recipe_is_what_is_kept(environment) -> None:  # noqa: F811
    rows = answers(environment, "-m", "benchmarks.gpu", "--inside", "h100", "--only", "step of")
    assert {row["name"] for row in rows} == {name for _, name in KEPT if name.startswith("step of")}
    for row in rows:
        assert "failure" not in row
        assert not worse(row, KEPT["h100", row["name"]])


def test_a_step_that_does_more_is_worse() -> None:
    kept = KEPT["h100", "step of interleaved, 8 ranks, Adam waits"]
    assert not worse(kept, kept)
    count, size = kept["collectives"]["all-gather"]
    more = {
        **kept,
        "syncs": kept["syncs"] + 1,
        "launches": kept["launches"] - 1,
        "collectives": {**kept["collectives"], "all-gather": [count, 2 * size]},
    }
    assert [sentence.split()[0] for sentence in worse(more, kept)] == ["syncs", "all-gather"]
