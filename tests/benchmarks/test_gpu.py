"""The bench that looks at the GPU path without a GPU: what it says today, and that it can say no."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu import pretend
from benchmarks.gpu.__main__ import worse

from speedrun.training.gpus import GPUS, TABLE

REPO = Path(__file__).parents[2]
KEPT = {(row["device"], row["name"]): row for row in json.loads(TABLE.read_text())}


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    try:
        found = pretend.preloaded_environment(tmp_path_factory.mktemp("guard"))
    except pretend.Absent as e:
        pytest.skip(str(e))
    return {**found, "PYTHONPATH": os.pathsep.join([str(REPO / "src"), str(REPO)])}


def answers(environment: dict[str, str], *command: str) -> list[dict[str, Any]]:
    """The lines of JSON that a process with the guard prints."""
    done = subprocess.run([sys.executable, *command], env=environment, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_table_has_every_case_and_no_other() -> None:
    from benchmarks.gpu import stages, steps

    lowered = {"loss of 1 token", "loss of 3 tokens", *(case.name for case in stages.cases())}
    stepped = {name for case in steps.cases() for name in case.names}
    assert set(KEPT) == {(gpu, name) for gpu in GPUS for name in lowered} | {("h100", name) for name in stepped}


def test_a_word_that_no_case_has_is_an_error(environment) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--devices", "h100", "--only", "losss"]
    done = subprocess.run(command, env=environment, cwd=REPO, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "No case has 'losss' in its name.\n")


@pytest.mark.parametrize("device", ["h100", "4090"])
def test_the_loss_of_one_and_of_three_tokens_is_two_passes_over_the_logits(environment, device: str) -> None:
    """bfloat16 logits are read twice and their gradient is written once: 4.95 GB for 16,384 x 50,304 of them."""
    rows = answers(environment, "-m", "benchmarks.gpu", "--inside", device, "--only", "loss", "--kernels")
    assert [row["name"] for row in rows] == ["loss of 1 token", "loss of 3 tokens"]
    for row in rows:
        assert "failure" not in row
        assert row["forward"]["bytes"] + row["backward"]["bytes"] < 5.0e9
        assert row["forward"]["kernels"] + row["backward"]["kernels"] <= 5
        assert row["compiled"] == row["forward"]["kernels"] + row["backward"]["kernels"], "by ptxas, for this device"
        assert not worse(row, KEPT[device, row["name"]])


def test_the_first_stage_of_interleaved_lowers_for_an_h100(environment) -> None:
    name = "interleaved from step 0"
    (row,) = answers(environment, "-m", "benchmarks.gpu", "--inside", "h100", "--only", name)
    assert "failure" not in row
    assert not worse(row, KEPT["h100", name]), "if it must be: python -m benchmarks.gpu --write"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("device", ["h100", "4090"])
def test_every_stage_of_every_native_recipe_lowers(environment, device: str) -> None:
    rows = answers(environment, "-m", "benchmarks.gpu", "--inside", device)
    assert {(device, row["name"]) for row in rows} == {key for key in KEPT if key[0] == device}
    for row in rows:
        assert "failure" not in row
        assert not worse(row, KEPT[device, row["name"]])


@pytest.mark.slow
@pytest.mark.parametrize("device", ["h100", "4090"])
def test_all_kernels_of_a_stage_compile_to_machine_code(environment, device: str) -> None:
    name = "interleaved from step 0"
    (row,) = answers(environment, "-m", "benchmarks.gpu", "--inside", device, "--only", name, "--kernels")
    assert "failure" not in row
    assert row["shared"] <= pretend.CHIPS[device].shared_memory_per_block_optin


BIGRAMS = """
import json
from dataclasses import replace
from benchmarks.gpu import pretend
pretend.start("h100")
from benchmarks.gpu import stages

class WithBigrams(stages.Case):
    @property
    def whole(self):
        recipe = super().whole
        embeddings = replace(recipe.model.embeddings, bigram_vocab_size=15 * 50304, bigram_dim=192)
        return replace(recipe, model=replace(recipe.model, embeddings=embeddings))

stages.install_stand_in()
for graph in stages.lower_stage(WithBigrams("interleaved", "short", 0), "fa3"):
    print(json.dumps({"name": graph.name, "kernels": graph.kernels, "bytes": graph.bytes}))
"""


@pytest.mark.slow
def test_the_bigram_table_of_a_record_lowers_for_an_h100(environment, tmp_path: Path) -> None:
    """Fifteen rows for each token of the vocabulary, 192 channels wide: few kernels more than without it.

    The lookup and its gradient touch the whole table, 0.58 GB; eleven layers read 0.05 GB of features each.
    """
    script = tmp_path / "bigrams.py"
    script.write_text(BIGRAMS)
    forward, backward = answers(environment, str(script))
    kept = KEPT["h100", "interleaved from step 0"]
    for graph, more in ((forward, 3), (backward, 13)):
        assert graph["kernels"] <= kept[graph["name"]]["kernels"] + more
        assert graph["bytes"] < kept[graph["name"]]["bytes"] + 1.4e9


FAULTS = """
import json, torch
from benchmarks.gpu import pretend
pretend.start("h100")
from torch._subclasses.fake_tensor import FakeTensorMode
from benchmarks.gpu import stages
from benchmarks.gpu.lower import lower
from speedrun.model import head

def attempt(name, function):
    row = {"name": name}
    try:
        graphs = function()
        row["bytes"], row["saved"] = sum(graph.bytes for graph in graphs), graphs[0].saved
        row["peaks"] = [graph.peak for graph in graphs]
    except Exception as e:
        row["failure"] = f"{type(e).__name__}: {e}"
    print(json.dumps(row), flush=True)

def with_softcap(broken):
    stages.softcap = broken
    return stages.lower_loss(1)

def breaks(z, config):
    torch._dynamo.graph_break()
    return z

def fp8(rows):
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda:0"):
        x, w = torch.empty(rows, 768, requires_grad=True), torch.empty(50304, 768, requires_grad=True)
        return lower(lambda x, w: head.fp8_linear(x, w, 0.1, 0.1, 0.1).float().sum(), x, w)

def chain():  # three products, of which the first two are kept for the backward pass
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda:0"):
        x = torch.empty(2048, 2048, dtype=torch.bfloat16, requires_grad=True)
        return lower(lambda x: (((x @ x) @ x) @ x).sum(), x)

attempt("chain", chain)
attempt("sound", lambda: stages.lower_loss(3))
attempt("16 rows", lambda: fp8(16384))
attempt("not 16 rows", lambda: fp8(16380))
head.chosen = head.gathered
attempt("gather", lambda: stages.lower_loss(3))
attempt("graph break", lambda: with_softcap(breaks))
attempt("item", lambda: with_softcap(lambda z, config: z * int(z.sum().item())))
"""


def test_it_can_fail(environment, tmp_path: Path) -> None:
    script = tmp_path / "faults.py"
    script.write_text(FAULTS)
    rows = {row["name"]: row for row in answers(environment, str(script))}
    matrix, logits = 2 * 2048**2, 2 * 16384 * 50304
    assert rows["chain"]["saved"] // matrix == 2
    assert rows["chain"]["peaks"][0] // matrix == 3
    assert rows["16 rows"]["peaks"][1] // (logits / 10) == 25, "the gradient, its scaled copy, and that in 8 bits"
    assert rows["sound"]["bytes"] < 5.0e9
    assert "bytes" in rows["16 rows"]
    assert "multiples of 16, not (16380, 768)" in rows["not 16 rows"]["failure"]
    assert rows["gather"]["bytes"] > 2 * rows["sound"]["bytes"]
    assert "graph_break" in rows["graph break"]["failure"]
    assert rows["item"]["failure"].startswith("HostSync: File")
    assert "int(z.sum().item())" in rows["item"]["failure"]


def test_numbers_that_grow_are_worse() -> None:
    kept = KEPT["h100", "interleaved from step 0"]
    assert not worse(kept, kept)
    more = {
        **kept,
        "forward": {**kept["forward"], "kernels": kept["forward"]["kernels"] + 1},
        "saved": 2 * kept["saved"],
    }
    assert [sentence.split()[:2] for sentence in worse(more, kept)] == [
        ["forward", "kernels"],
        ["saved", f"{more['saved']:,}"],
    ]
    assert not worse({**kept, "peak": 0}, kept)
