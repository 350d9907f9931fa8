"""A record's losses beside a run's own: the published values, the lines of the log, resuming, the page."""

import dataclasses
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from speedrun import cli
from speedrun.data.shards import TokenFolder
from speedrun.recipes import get_recipe
from speedrun.recipes.published import CURVES, get_curve
from speedrun.report.pages import page_of
from speedrun.tracks import TRACKS, own_track
from speedrun.training import run
from speedrun.training.config import Options, PublishedCurve, with_fields
from speedrun.training.device import choose
from speedrun.training.loop import Loop
from speedrun.training.runlog import read_metrics, read_run, val_line
from speedrun.training.schedule import Stage
from tests.training.tiny import TINY

MADE_UP = PublishedCurve("tiny", "own", "a test", ((0, 8.5), (10, 6.0), (12, 5.0), (99, 1.0)), 3.0, "2xABACUS")


@pytest.mark.parametrize("name", CURVES)
def test_a_record_was_measured_when_its_recipe_is(name: str) -> None:
    curve = CURVES[name]
    recipe, target = get_recipe(name, curve.track), TRACKS[curve.track].target
    steps, losses = zip(*curve.losses, strict=True)
    assert {*steps} <= {*recipe.validation.moments(recipe.schedule.total)}
    assert (steps[0], steps[-1]) == (0, recipe.schedule.total)
    assert list(steps) == sorted({*steps})
    assert list(losses) == sorted(losses, reverse=True)
    assert target is not None
    assert losses[-1] < target < losses[-2]


def test_no_digit_of_a_published_loss_is_lost() -> None:
    """The sums of the losses in the four logs."""
    sums = {name: round(sum(loss for _, loss in curve.losses), 4) for name, curve in CURVES.items()}
    assert sums == {"muon": 24.0727, "normuon": 46.1515, "interleaved": 41.0237, "medium": 51.1993}


def test_a_recipe_has_its_own_curve_on_its_own_track_alone() -> None:
    assert get_curve(None, "interleaved", "short") is CURVES["interleaved"]
    assert get_curve(None, "interleaved", "pocket") is None
    assert get_curve(None, "interleaved", "own") is None
    assert get_curve(None, "gpt2", "short") is None
    assert get_curve("muon", "gpt2", "short") is CURVES["muon"]
    assert get_curve("none", "interleaved", "short") is None


def test_a_line_says_the_record_where_it_has_one() -> None:
    curve = CURVES["interleaved"]
    plain = "step:250/1840 val_loss:4.6071 train_time:8250ms step_avg:33.00ms"
    assert val_line(250, 1840, 4.6071, 8250, curve) == f"{plain} record:4.6059 difference:+0.0012"
    assert val_line(250, 1840, 4.6071, 8250) == plain
    assert val_line(125, 1840, 4.6071, 8250, curve).endswith("step_avg:66.00ms")
    assert val_line(1840, 1840, 3.27, 8250, curve).endswith(" record:3.2763 difference:-0.0063")
    assert val_line(250, 1840, 4.60588, 8250, curve).endswith(" difference:+0.0000")
    assert val_line(250, 1840, float("nan"), 8250, curve).endswith(" difference:+nan")


def start(tokens: TokenFolder, folder: Path, curve: PublishedCurve | None = MADE_UP) -> run.Outcome:
    options = Options(compile=False, checkpoint_every=5, curve=curve)
    return run.start(
        TINY, own_track(tokens.path, None), choose("cpu", "float32", 1), options, out=folder, quiet=True
    )  # fmt: skip


def validations(folder: Path) -> list[str]:
    return [line for line in (folder / "log.txt").read_text().splitlines() if "val_loss:" in line]


def expected(folder: Path, curve: PublishedCurve | None) -> list[str]:
    return [val_line(m["step"], 12, m["loss"], 1000 * m["time"], curve) for m in read_metrics(folder, "val")]


def test_a_run_is_logged_beside_the_record(tokens: TokenFolder, tmp_path: Path) -> None:
    start(tokens, tmp_path / "run")
    assert read_run(tmp_path / "run").options.curve == MADE_UP
    assert validations(tmp_path / "run") == expected(tmp_path / "run", MADE_UP)
    assert ["record:" in line for line in validations(tmp_path / "run")] == [True, False, True, True]  # 0, 5, 10, 12
    said = (tmp_path / "run/log.txt").read_text()
    assert "record: the losses of tiny are shown beside this run's (a test: one run on 2xABACUS, 3.0 s)\n" in said


def test_a_run_without_a_record_says_nothing_of_one(tokens: TokenFolder, tmp_path: Path) -> None:
    start(tokens, tmp_path / "run", None)
    assert "record" not in (tmp_path / "run/log.txt").read_text()
    assert "record" not in page_of(tmp_path / "run")


def test_a_resumed_run_keeps_its_record(
    tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log_step = Loop.log_step

    def logged(self: Loop, stage: Stage, loss: float) -> None:
        log_step(self, stage, loss)
        self.trainer.asked_to_stop = 2 if stage.step == 6 else None

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "log_step", logged)
        assert start(tokens, tmp_path / "run").result.status == "interrupted"
    assert cli.main(["train", "--resume", str(tmp_path / "run"), "--sample", "False"]) == 0
    assert read_run(tmp_path / "run").options.curve == MADE_UP
    assert validations(tmp_path / "run") == expected(tmp_path / "run", MADE_UP)
    assert re.search(r"step:12/12 val_loss:.* record:5\.0000 difference:[-+]\d\.\d{4}\n", capsys.readouterr().out)


def test_the_command_line_takes_the_record_of_the_recipe(
    tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    track = dataclasses.replace(TRACKS["pocket"], locate=lambda: tokens, target=None)
    monkeypatch.setitem(TRACKS, "pocket", track)
    monkeypatch.setitem(CURVES, "adamw", dataclasses.replace(MADE_UP, record="adamw", track="pocket"))
    small = "--compile False --threads 1 --sample False --save False --schedule.steps 2 --schedule.seq-len 16"
    small += " --validation.seq-len 16 --model.dim 16 --model.num-heads 2 --model.num-layers 1"
    for recipe, flags, there in (("adamw", "", True), ("adamw", "--curve none", False), ("gpt2", "", False)):
        asked = f"train --recipe {recipe} --out {tmp_path / (recipe + flags[-4:])} {small} {flags}"
        assert cli.main(asked.split()) == 0
        assert ("record:8.5000 difference:" in capsys.readouterr().out) == there
    assert cli.main(f"train --recipe gpt2 --curve adamw --out {tmp_path / 'beside'} {small}".split()) == 0
    assert "record: the losses of adamw" in capsys.readouterr().out


# -------------------------------------------------------------------- the page


def pictures(html: str) -> list[ElementTree.Element]:
    """The charts of the losses: by steps, tokens and seconds."""
    section = html[html.index('<section id="loss"') : html.index('<section id="schedules"')]
    found = re.findall(r'<svg xmlns="http://www.w3.org/2000/svg".*?</svg>', section, re.DOTALL)
    return [ElementTree.fromstring(svg) for svg in found]


def test_the_page_draws_the_record_over_steps_and_tokens(tokens: TokenFolder, tmp_path: Path) -> None:
    start(tokens, tmp_path / "run")
    html = page_of(tmp_path / "run")
    charts = pictures(html)
    dashed = [[p for p in c.iterfind(".//{*}path") if p.get("stroke-dasharray")] for c in charts]
    assert [len(found) for found in dashed] == [1, 1, 0]
    hollow = [[t.text or "" for t in c.iterfind(".//{*}title") if "record" in (t.text or "")] for c in charts]
    name = "record: tiny (published, 2xABACUS)"
    assert hollow[0][-2:] == [f"{name}: 6.0000 at 10", f"{name}: 5.0000 at 12"]  # 99 steps were not made
    assert hollow[1][-1] == f"{name}: 5.0000 at 1,536"  # 12 steps of 4 rows of 32 tokens
    assert hollow[2] == []
    assert f"<li>{name}</li>" in re.sub(r"<svg.*?</svg>", "", html, flags=re.DOTALL)
    assert "by seconds on the clock, without the record" in html
    own = {m["step"]: m["loss"] for m in read_metrics(tmp_path / "run", "val")}
    row = f'<tr><th scope="row">10</th><td class="n">{own[10]:.4f}</td><td class="n">6.0000</td>'
    assert f'{row}<td class="n">{own[10] - 6:+.4f}</td></tr>' in html


def test_a_run_too_short_for_its_record_has_a_page(tokens: TokenFolder, tmp_path: Path) -> None:
    recipe = with_fields(TINY, {"schedule.steps": 2, "validation.first": False})
    curve = dataclasses.replace(MADE_UP, losses=((99, 1.0),))
    options = Options(compile=False, save=False, curve=curve)
    machine = choose("cpu", "float32", 1)
    run.start(recipe, own_track(tokens.path, None), machine, options, out=tmp_path / "run", quiet=True)
    assert "Dashed" not in page_of(tmp_path / "run")
