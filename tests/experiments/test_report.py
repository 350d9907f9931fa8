"""The HTML report in a real browser: every kind of page, on a phone, in the dark, by keyboard, without network."""

import base64
import csv
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from speedrun import cli
from speedrun.data.shards import TokenFolder
from speedrun.experiments import ablate, records
from speedrun.experiments.ablate import BASE, SHORTER
from speedrun.experiments.trial import ROWS
from speedrun.files import write_atomic, write_json
from speedrun.recipes import get_recipe
from speedrun.report.draw import COLORS, on_page, short, ticks
from speedrun.report.pages import page_of
from speedrun.training.config import PublishedCurve
from speedrun.training.runlog import RUN, read_metrics, to_jsonable
from tests.experiments.conftest import SMALL, Speedrun

KINDS = ("run", "runs", "beside", "traced", "race", "record", "ablation", "records")
CHROME = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync"

# Contrast of every visible text with what lies behind it, as the accessibility guidelines count it.
CONTRASTS = """
() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgb = color => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, k) => sum + v * [.2126, .7152, .0722][k], 0);
  const covers = (rect, words) => {
    const [a, b] = [rect.getBBox(), words.getBBox()], [x, y] = [b.x + b.width / 2, b.y + b.height / 2];
    const before = rect.compareDocumentPosition(words) & Node.DOCUMENT_POSITION_FOLLOWING;
    return before && a.x <= x && x <= a.x + a.width && a.y <= y && y <= a.y + a.height;
  };
  const behind = node => {
    for (let e = node; e; e = e.parentElement) {
      const papers = e instanceof SVGSVGElement ? [...e.querySelectorAll(":scope > rect")] : [];
      const paper = papers.findLast(r => covers(r, node));
      const found = rgb(paper ? getComputedStyle(paper).fill : getComputedStyle(e).backgroundColor);
      if (found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
  while (walker.nextNode()) {
    const node = walker.currentNode, e = node.parentElement;
    if (!node.textContent.trim() || !e.checkVisibility() || e.closest('title')) continue;
    const style = getComputedStyle(e), svg = e instanceof SVGElement;
    const size = parseFloat(style.fontSize) * (svg ? e.getScreenCTM().a : 1);
    const [a, b] = [light(rgb(svg ? style.fill : style.color)), light(behind(e))].sort((x, y) => y - x);
    found.push({words: node.textContent.trim().slice(0, 40), contrast: (a + .05) / (b + .05), size});
  }
  return found;
}
"""


@pytest.fixture(scope="session")
def folders(raced: Path, held_out: TokenFolder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One folder of each kind."""
    root = tmp_path_factory.mktemp("reports")
    fields = [word for pair in SMALL.split() for word in (f"--{pair.split('=')[0]}", pair.split("=")[1])]
    common = ["train", "--data", str(held_out.path), "--recipe", "adamw", "--compile", "False", "--threads", "1"]
    common += [*fields, "--schedule.steps", "12", "--validation.every", "4", "--sample", "False", "--target", "9"]
    for name, more in (("run", []), ("traced", ["--trace", "3"])):
        assert cli.main([*common, "--out", str(root / name), *more]) == 0
    shutil.copytree(root / "run", root / "beside")
    about = json.loads((root / "beside" / RUN).read_text())
    about["options"]["curve"] = to_jsonable(
        PublishedCurve("adamw", "own", "a test", ((0, 8.3), (8, 7.9), (12, 7.8)), 3.0)
    )
    write_json(root / "beside" / RUN, about)
    records.submit(raced, "first", root / "records")
    base = get_recipe("adamw", "pocket")
    names = [BASE, SHORTER, "qk-norm", "zero-init"]
    rows = [
        {"variant": name, "seed": seed, "status": "ok", "loss": 4 + 0.01 * k + 0.001 * (seed * k % 3),
         "seconds": 10.0 + k, "tokens": 9, "steps": 3, "minutes": 0.2}
        for seed in range(4) for k, name in enumerate(names)
    ]  # fmt: skip
    (root / "ablation").mkdir()
    asked = ablate.AblationPlan(ablate.AblationArgs(recipe="adamw", seeds=4), base, {}, tuple(names), "")
    write_json(root / "ablation" / ablate.PLAN, to_jsonable(asked))
    write_atomic(root / "ablation" / ROWS, "".join(json.dumps(row) + "\n" for row in rows))
    return {
        **{name: root / name for name in ("run", "beside", "traced", "ablation", "records")},
        "race": raced,
        "record": root / "records/own/first",
    }


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if CHROME is None:
        pytest.skip("no Chromium here; `make browser` installs Debian's")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as p:
        started = p.chromium.launch(executable_path=CHROME, args=QUIET.split())
        yield started
        started.close()


@pytest.fixture
def look(browser: Any, folders: dict[str, Path], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Open the page of a kind; whatever it asks of the network, complains about or pops up fails the test."""
    contexts, trouble = [], []

    def opened(kind: str, width: int = 1100, scheme: str = "light") -> Any:
        file = tmp_path / f"{kind}.html"
        named = [folders["run"], folders["traced"]] if kind == "runs" else [folders[kind]]
        assert cli.main(["report", *map(str, named), "--out", str(file)]) == 0
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: trouble.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: trouble.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (trouble.append("dialog"), dialog.dismiss()))
        page.on("request", lambda r: None if r.url == file.as_uri() else trouble.append(f"request: {r.url[:60]}"))
        page.goto(file.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert trouble == []


# -------------------------------------------------------------------- what every page keeps


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_stands_alone_and_says_first_what_matters(kind: str, look: Callable[..., Any]) -> None:
    page = look(kind)
    first = {"run": "target reached", "traced": "target reached", "race": "faster", "record": "faster"}
    first |= {"ablation": "ablation", "records": "1 record", "beside": "target reached", "runs": "2 runs"}
    assert page.locator(".headline strong").inner_text() == first[kind]
    assert page.locator("h1").count() == 1
    for link in page.locator("nav a").all():
        assert page.locator(link.get_attribute("href")).count() == 1
    labels = [svg.get_attribute("aria-label") for svg in page.locator("svg[role=img]").all()]
    assert labels
    assert all(re.search(r"\w+.*\d|Schedules", label or "") for label in labels)  # told in numbers, not just named
    assert page.locator("svg:not([role=img]):not([aria-hidden])").count() == 0
    assert page.locator("script").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_phone_nothing_overflows_and_all_words_can_be_read(
    kind: str, scheme: str, look: Callable[..., Any]
) -> None:
    page = look(kind, 360, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", background)[:3])) / 3
    assert (brightness < 60) == (scheme == "dark")
    found = page.evaluate(CONTRASTS)
    assert len(found) > 20
    assert [f for f in found if f["contrast"] < 4.5] == []
    assert [f for f in found if f["size"] < 8] == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_data_behind_the_pictures_can_be_saved(kind: str, look: Callable[..., Any], tmp_path: Path) -> None:
    page = look(kind)
    links = page.locator("a[download]").all()
    assert links
    for link in links:
        with page.expect_download() as waiting:
            link.click()
        saved = tmp_path / waiting.value.suggested_filename
        waiting.value.save_as(saved)
        rows = list(csv.reader(io.StringIO(saved.read_text())))
        promised = int(re.search(r"([\d,]+) rows?", link.inner_text())[1].replace(",", ""))  # type: ignore[index]
        assert len(rows) == promised + 1
        assert len({len(row) for row in rows}) == 1


def test_the_keyboard_reaches_everything(look: Callable[..., Any]) -> None:
    page = look("race", 360)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    reached = set()
    for _ in range(80):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent")
        )
    regions = {r.get_attribute("aria-label") for r in page.locator("[role=region]").all() if r.is_visible()}
    assert regions
    assert regions <= reached
    assert {a.inner_text() for a in page.locator("nav a").all()} <= reached
    wide = page.get_by_role("region", name="in the order of the race")
    wide.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("e => e.scrollLeft > 0", arg=wide.element_handle())


def test_a_screen_reader_hears_verdict_pictures_and_tables(look: Callable[..., Any]) -> None:
    told = look("race").locator("body").aria_snapshot()
    assert "- strong: faster" in told
    assert 'heading "Final losses" [level=2]' in told
    assert re.search(r'img "Seconds of every run by block. Means: adamw .*"', told)
    assert 'columnheader "mean loss"' in told
    assert re.search(r'rowheader "001-A"', told)


# -------------------------------------------------------------------- what is on them


def data_of(html: str, name: str) -> list[dict[str, str]]:
    coded = re.search(rf'download="{name}.csv" href="data:text/csv;charset=utf-8;base64,([^"]*)"', html)
    assert coded, f"the page has no {name}.csv"
    return list(csv.DictReader(io.StringIO(base64.b64decode(coded[1]).decode())))


def test_the_losses_of_a_run_are_those_of_its_folder(folders: dict[str, Path]) -> None:
    rows = data_of(page_of(folders["run"]), "loss")
    for kind in ("train", "val"):
        measured = [(m["time"], m["loss"]) for m in read_metrics(folders["run"], kind)]
        assert [(float(r["seconds"]), float(r["loss"])) for r in rows if r["kind"] == kind] == measured


def test_a_run_beside_a_record_shows_it_as_a_dashed_line_and_as_data(
    folders: dict[str, Path], look: Callable[..., Any]
) -> None:
    page, name = look("beside"), "record: adamw (published, 8xH100)"
    dashed = [figure.locator("path[stroke-dasharray]").count() for figure in page.locator("#loss figure").all()]
    assert dashed == [1, 1, 0]  # over steps and tokens; its seconds are of another machine
    assert page.locator("#loss ul.key li").nth(1).inner_text() == name
    assert page.locator("#loss tbody tr").count() == 3
    rows = [r for r in data_of(page.content(), "loss") if r["run"] == name]
    assert [(r["kind"], r["step"], r["seconds"], r["loss"]) for r in rows] == [
        ("val", "0", "", "8.3"), ("val", "8", "", "7.9"), ("val", "12", "", "7.8")
    ]  # fmt: skip


def test_several_runs_by_step_token_and_second(raced: Path, speedrun: Speedrun, tmp_path: Path) -> None:
    runs = raced / "runs"
    html = page_of(runs / "001-A", runs / "002-B")
    table = [[row[name] for name in ("run", "steps", "tokens", "status")] for row in data_of(html, "runs")]
    assert table == [["001-A", "4", "256", "ok"], ["002-B", "40", "2,560", "ok"]]
    rows = data_of(html, "loss")
    assert list(rows[0]) == ["run", "kind", "step", "tokens", "seconds", "loss"]
    assert (rows[0]["step"], rows[0]["tokens"]) == ("1", "64")
    assert len([r for r in rows if (r["run"], r["kind"]) == ("001-A", "train")]) == 4
    for axis in ("steps", "tokens", "seconds on the clock"):
        assert f"by {axis}" in html
    for name in ("one", "other", "001-A"):
        shutil.copytree(runs / "001-A", tmp_path / name)
    named = {str(runs / "001-A"), str(tmp_path / "001-A")}
    assert {row["run"] for row in data_of(page_of(runs / "001-A", tmp_path / "001-A"), "loss")} == named
    assert str(tmp_path / "one+other.html") in speedrun("report", "one", "other")[1]
    assert str(tmp_path / "one+2.html") in speedrun("report", "one", "other", "one")[1]


def test_mistakes_with_several_runs(raced: Path, speedrun: Speedrun, tmp_path: Path) -> None:
    run = raced / "runs/001-A"
    assert "No folder was named" in speedrun("report")[2]
    assert "There is no run folder nowhere" in speedrun("report", run, "nowhere")[2]
    shutil.copytree(run, tmp_path / "other")
    write_json(tmp_path / "other/run.json", {**json.loads((run / "run.json").read_text()), "track": "pocket"})
    assert "Runs of different tracks cannot be compared: own, pocket" in speedrun("report", run, "other")[2]


def test_a_race_shows_every_run_and_the_claim(folders: dict[str, Path]) -> None:
    html = page_of(folders["race"])
    verdict = json.loads((folders["race"] / "verdict.json").read_text())
    assert [float(r["time"]) for r in data_of(html, "runs")] == [r["time"] for r in verdict["runs"]]
    assert f"{verdict['time']['low']:.4f}" in html
    assert {r["run"] for r in data_of(html, "loss")} == {r["name"] for r in verdict["runs"]}
    assert html.count("<circle") >= 3 * len(verdict["runs"])  # losses, final losses and times


def test_a_race_whose_files_were_changed_says_so_on_top(race_copy: Path) -> None:
    result = race_copy / "runs/002-B/result.json"
    changed = json.loads(result.read_text()) | {"train_time": 0.001}
    write_json(result, changed)
    html = page_of(race_copy)
    headline = html[html.index('<div class="headline') : html.index("<nav")]
    assert "does not hold" in headline
    assert "002-B" in headline


def test_an_unfinished_race_and_run_are_shown_as_such(
    race_copy: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    (race_copy / "manifest.json").unlink()
    shutil.rmtree(race_copy / "runs/012-A")
    html = page_of(race_copy)
    assert "11 of 12 planned runs have ended" in html
    half = tmp_path / "half"
    shutil.copytree(folders["run"], half, copy_function=os.link)
    (half / "result.json").unlink()
    assert "unfinished" in page_of(half)


def test_names_are_words_and_never_markup(folders: dict[str, Path], browser: Any, tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>&\"'"
    evil = tmp_path / name
    shutil.copytree(folders["run"], evil, copy_function=os.link)
    about = json.loads((evil / "run.json").read_text())
    about["recipe"]["name"] = about["track"] = "<script>alert(2)</script>"
    write_json(evil / "run.json", about)
    html = page_of(evil)
    assert "<script" not in html
    assert "<img" not in html
    assert "<img" not in page_of(evil, evil)
    page = browser.new_page()
    alerts: list[str] = []
    page.on("dialog", lambda dialog: (alerts.append(dialog.message), dialog.dismiss()))
    page.set_content(html)
    assert page.locator("h1").inner_text() == f"Run {name}"
    page.close()
    assert alerts == []


def test_a_traced_run_shows_its_timeline(folders: dict[str, Path]) -> None:
    (row,) = data_of(page_of(folders["traced"]), "timeline")
    assert row["rank"] == "0"
    assert float(row["step ms"]) > 0
    assert float(row["waiting ms"]) == 0, "one rank waits for nobody"
    assert "Optimizer timeline" not in page_of(folders["run"])


# -------------------------------------------------------------------- the command, and its pieces


def test_the_page_lies_beside_the_folder(folders: dict[str, Path], speedrun: Speedrun, tmp_path: Path) -> None:
    shutil.copytree(folders["run"], tmp_path / "mine", copy_function=os.link)
    code, out, _ = speedrun("report", tmp_path / "mine")
    assert (code, (tmp_path / "mine.html").exists()) == (0, True)
    assert str(tmp_path / "mine.html") in out


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: path / "none", "There is no folder"),
        (lambda path: path, "is no run, race, record or ablation"),
    ],
)
def test_what_has_no_page_is_refused(
    make: Callable[[Path], Path], sentence: str, speedrun: Speedrun, tmp_path: Path
) -> None:
    code, _, err = speedrun("report", make(tmp_path))
    assert code == 2
    assert sentence in err


def test_a_page_is_not_put_among_the_evidence(race_copy: Path, speedrun: Speedrun) -> None:
    code, _, err = speedrun("report", race_copy, "--out", race_copy / "page.html")
    assert code == 2
    assert "--out" in err
    assert not (race_copy / "page.html").exists()


def test_axes_have_few_round_numbers() -> None:
    for low, high in ((0, 1), (4.21, 4.58), (0, 1433600), (-0.02, 0.3), (0, 135.1), (1e-9, 3e-9)):
        found = ticks(low, high)
        assert 2 <= len(found) <= 7
        assert low - 1e-12 <= found[0] < found[-1] <= high + 1e-12
        assert all(len(short(v)) <= 7 for v in found)
    assert ticks(2, 2) == [2]
    assert [short(v) for v in (1_500_000, 20_000, 9_000, 0.1 + 0.2)] == ["1.5M", "20k", "9000", "0.3"]


def test_a_picture_takes_the_colours_of_its_page() -> None:
    assert on_page(f'<path stroke="{COLORS[0]}"/>') == f'<path stroke="var(--c0, {COLORS[0]})"/>'
