"""The report of a first run on a GPU: here on a CPU, in one and two processes, and what it calls wrong."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from speedrun import gpu_report
from speedrun.doctor import examine
from speedrun.errors import UserError, plural
from speedrun.model import head
from speedrun.optim.sharded import Comm
from speedrun.training import memory
from speedrun.training.config import Options, with_fields
from speedrun.training.device import choose
from speedrun.training.warmup import made_up
from tests.distributed.ranks import together
from tests.recipes.test_lineage import tiny


def report(rank: int, size: int, out: str) -> list[str]:
    """What one rank is told while the report is made."""
    machine = choose("cpu", "float32", 1)
    comm = Comm.of(None) if size > 1 else Comm()
    told: list[str] = []
    recipe = with_fields(tiny("interleaved"), {"model.head.fp8": True})
    for _, lines, text in gpu_report.report(recipe, machine, Options(compile=False), comm, examine(machine), 2):
        if rank == 0:
            Path(out).write_text(text)
            told += [f"{line.what} {line.predicted} {line.measured}" for line in lines]
    return told


def table(text: str, title: str) -> dict[str, tuple[str, str]]:
    """{what: (predicted, measured)} of one section."""
    section = text.split(f"## {title}")[1].split("\n## ")[0]
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| ")]
    return {what: (predicted, measured) for what, predicted, measured in cells[1:]}


def test_every_kind_of_step_is_measured(tmp_path: Path) -> None:
    told = report(0, 1, str(tmp_path / "report.md"))
    text = (tmp_path / "report.md").read_text()
    kinds = gpu_report.kinds_of_steps(tiny("interleaved"))
    assert len({(s.batch_size, len(s.mtp_weights), s.tied) for s in kinds}) == len(kinds) > 2
    for stage in kinds:
        lines = table(text, f"Step {stage.step}, {stage.batch_size} x {stage.seq_len} tokens")
        assert lines["passes over the model"] == ("-", f"1 of {plural(stage.batch_size, 'row')}")
        assert lines["kernel launches"] == ("not predicted", "no GPU")
        assert "tokens per second" in lines["step"][1]
    assert "ms" in table(text, "Validation")["batch"][1]
    parity = table(text, "Attention and 8-bit head")
    assert {what for what in parity if "8-bit" in what} == {f"8-bit head, {x}" for x in ("product", "dx", "dW")}
    assert not any("wrong" in measured for _, measured in parity.values())
    assert "- torch: " in text
    assert any(line.startswith("attention by sdpa, window 64: output below 0.02 ") for line in told)


def test_what_is_wrong_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, recipe = choose("cpu", "float32", 1), with_fields(tiny("interleaved"), {"model.head.fp8": True})
    monkeypatch.setattr(gpu_report, "attend", lambda q, k, v, **_: q + k + v)
    monkeypatch.setattr(gpu_report, "fp8_linear", lambda x, w, *_: head.fp8_linear(x, 0.9 * w, 1.0, 1.0, 1.0))
    assert all(line.measured.endswith("**wrong**") for line in gpu_report.parity(recipe, machine))


def test_what_fails_takes_one_line_and_the_rest_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("\nno kernel for this | device\nand much more")

    monkeypatch.setattr(gpu_report, "attend", fail)
    first = gpu_report.kinds_of_steps(tiny("interleaved"))[0]
    monkeypatch.setattr(
        gpu_report,
        "made_up",
        lambda job, size, *rest: (fail if size == first.batch_size else made_up)(job, size, *rest),
    )
    report(0, 1, str(tmp_path / "report.md"))
    text = (tmp_path / "report.md").read_text()
    for title in ("Attention and 8-bit head", f"Step {first.step}"):
        said = table(text, title)["all of it"]
        assert said == ("-", "failed: RuntimeError: no kernel for this &#124; device")
    assert "ms" in table(text, "Validation")["batch"][1]


def test_several_ranks_do_not_go_on_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(gpu_report, "parity", fail)
    found = gpu_report.report(
        tiny("interleaved"), choose("cpu", "float32", 1), Options(), SimpleNamespace(size=2), [], 2
    )
    _, lines, text = next(found)
    assert lines[0].measured == "failed: RuntimeError: no kernel"
    assert "no kernel" in text
    with pytest.raises(UserError, match=r"failed: RuntimeError: no kernel\. The report ends there"):
        next(found)


def test_predictions_come_from_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's numbers in place of this CPU's: twice the rows take two passes, or twice the memory."""
    recipe, machine = tiny("interleaved"), choose("cpu", "float32", 1)
    stage = recipe.schedule.at(0)
    part = {"launches": 111, "bytes": 5 * 10**9}
    row = {"graph": memory.graph_of(recipe, stage, "sdpa"), "rows": 1, "peak": 2**30, "forward": part, "backward": part}
    steps = [{"launches": n, "syncs": n // 10, "copies": 4, "passes": stage.batch_size} for n in (50, 70)]
    rows = [
        {**row, "name": "interleaved from step 0"},
        {**steps[0], "name": "step of interleaved, 1 GPU, Adam waits"},
        {**steps[1], "name": "step of interleaved, 1 GPU, Adam steps"},
        {**steps[1], "name": "step of interleaved, 8 ranks, Adam steps"},
        {**steps[1], "name": "step of interleaved, 1 GPU, other passes", "passes": stage.batch_size + 1},
    ]
    for module in (memory, gpu_report):
        monkeypatch.setattr(module, "table", lambda: rows)
    monkeypatch.setattr(torch.compiler, "set_stance", lambda _: None)
    monkeypatch.setattr("speedrun.training.step.compiled", lambda model, *_: (model, None))
    trainer = made_up_trainer(recipe, machine)
    trainer.fitting = {stage.shape: 1}
    found = {line.what: line for line in gpu_report.step_lines(trainer, stage, 1)}
    assert found["kernel launches"].predicted == f"{222 * stage.batch_size + 50} or {222 * stage.batch_size + 70}"
    assert found["host syncs"].predicted == "9 or 11", "copies are waited for"
    assert found["bytes that kernels touch"].predicted == f"{10 * stage.batch_size:.1f} GB"
    assert found["bytes that kernels touch"].measured.startswith("if so, ")
    m = memory.memory_of(recipe, machine, Options())
    assert found["memory at most"].predicted == memory.gib(m.fixed - m.warm_up + 2**30)


def made_up_trainer(recipe: Any, machine: Any) -> Any:
    from speedrun.training.job import Job
    from speedrun.training.progress import Progress
    from speedrun.training.runlog import NullRunFolder
    from speedrun.training.step import Trainer

    tokens: Any = SimpleNamespace(vocab_size=recipe.model.vocab_size)
    return Trainer(
        Job(recipe, tokens, machine, Options(), NullRunFolder(Path("nowhere")), Progress(1, quiet=True), Comm())
    )


def test_launches_and_syncs_are_those_of_the_profiler() -> None:
    names = ["cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx", "aten::add", "cudaMemcpyAsync"]
    names += ["cudaStreamSynchronize"] * 2 + ["cudaGraphLaunch"]
    profiled = SimpleNamespace(events=lambda: [SimpleNamespace(name=name) for name in names])
    assert gpu_report.counted(profiled) == (4, {"cudaStreamSynchronize": 2})  # type: ignore[arg-type]


def test_several_ranks_agree_on_the_order_of_transfers(tmp_path: Path) -> None:
    told = together(tmp_path, 2, report, str(tmp_path / "report.md"))
    assert told[1] == [], "rank 0 writes"
    order = table((tmp_path / "report.md").read_text(), "Order of transfers")
    assert order["the same on all ranks"] == ("yes", "yes")
    assert "reduce" in order["order"][1]
    assert "gather" in order["order"][1]
    assert order["host waits"][1].count("ms") == 2


def test_ranks_that_differ_in_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_report, "made_up", lambda *_: None)

    def step(*_: object) -> None:
        with torch.profiler.record_function("launch: reduce a"):
            pass

    schedule = SimpleNamespace(at=lambda _: tiny("interleaved").schedule.at(0))
    trainer: Any = SimpleNamespace(
        recipe=SimpleNamespace(schedule=schedule),
        job=None,
        step=step,
        comm=SimpleNamespace(all_gather_object=lambda mine: [mine, (["gather a"], 0.0)]),
    )
    assert gpu_report.order_lines(trainer)[0] == ("the same on all ranks", "yes", "**no**")
