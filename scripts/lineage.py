"""Race the recipes of the lineage on the pocket track, and write docs/lineage.md's table and picture.

    python scripts/lineage.py run --seeds 3                 # every recipe, interleaved; continues where it was stopped
    python scripts/lineage.py run --only findings --seeds 8 # two claims of the records, at a third of the length
    python scripts/lineage.py table                         # from docs/sweeps/lineage.jsonl, in Markdown
    python scripts/lineage.py plot

Every run is a process of its own. `--cores 0 1` makes two at a time, each with one thread on its own core. Seeds follow
each other, and the order of the entrants is reversed with each seed, so that a machine that slows down or speeds up
favours no recipe. No seed that counts was used in tuning.
"""

import argparse
import queue
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scipy import stats

from speedrun.arguments import Settings
from speedrun.experiments.trial import ChildProcesses, RowLog, Trial, read_rows, run_trial, write_recipe
from speedrun.recipes import get_recipe
from speedrun.report.draw import INK, dot, line, picture, text
from speedrun.tracks import POCKET_TARGET
from speedrun.training.config import with_fields

DOCS = Path(__file__).parents[1] / "docs"
ROWS = DOCS / "sweeps" / "lineage.jsonl"
FIRST_SEED = {"lineage": 2000, "findings": 1000}  # 1000 and 1001 decided the numbers of steps of the lineage


@dataclass(frozen=True)
class Entrant:
    name: str
    recipe: str
    changes: dict[str, Any] = field(default_factory=dict)


LINEAGE = [
    Entrant(name, name)
    for name in ("adamw", "orthogonal-nesterov", "muon", "normuon", "interleaved", "medium-before", "medium")
]
SHORT = {"schedule.steps": 200}  # and the extension of 40: a third of the recipe's steps
QUESTIONS = {
    "lineage": LINEAGE,
    "findings": [
        Entrant("as the recipe", "interleaved", SHORT),
        Entrant("bf16 without the remainder", "interleaved", {**SHORT, "optim.weights": "bf16"}),
    ],
}


def run(question: str, seeds: int, rows_file: Path, cores: list[int]) -> None:
    """Everything that is missing, one run at a time on each of these cores, or on all cores together."""
    entrants = QUESTIONS[question]
    log = RowLog(rows_file, LineageRun)
    done = {(r["question"], r["name"], r["seed"]) for r in log.rows}
    first = FIRST_SEED[question]
    order = [(e, s) for s in range(first, first + seeds) for e in entrants[:: 1 if s % 2 == 0 else -1]]
    free: queue.Queue[int | None] = queue.Queue()
    for core in cores or [None]:
        free.put(core)

    def one(entrant: Entrant, seed: int) -> None:
        core = free.get()
        row = {"question": question, "name": entrant.name, "seed": seed, **run_once(entrant, seed, core, processes)}
        free.put(core)
        log.add(row)
        print(f"{entrant.name:22} seed {seed}  loss {row['loss']:.4f}  {row['seconds']:.1f} s", flush=True)

    with ThreadPoolExecutor(max(1, len(cores))) as pool, ChildProcesses() as processes:
        for result in [pool.submit(one, e, s) for e, s in order if (question, e.name, s) not in done]:
            result.result()


@dataclass(frozen=True)
class LineageRun:
    """A row of lineage.jsonl."""

    question: str
    name: str
    seed: int
    loss: float
    seconds: float
    tokens: int
    steps: int


def run_once(entrant: Entrant, seed: int, core: int | None, processes: ChildProcesses) -> dict[str, Any]:
    """One timed run without validations on the way, on one core or on all of them."""
    fixed = {"validation.first": False, "validation.every": 10**6}
    recipe = with_fields(get_recipe(entrant.recipe, "pocket"), {**fixed, **entrant.changes})
    with tempfile.TemporaryDirectory() as folder:
        file = write_recipe(Path(folder) / "recipe.json", recipe)
        settings = Settings(threads=None if core is None else 1)
        prefix = () if core is None else ("taskset", "--cpu-list", str(core))
        result = run_trial(Trial(file, seed, Path(folder) / "run", settings), processes, prefix=prefix)
    return {"loss": result.val_loss, "seconds": result.train_time, "tokens": result.tokens, "steps": result.steps}


def of(rows: list[dict], question: str, name: str, field: str) -> list[float]:
    return [r[field] for r in sorted(rows, key=lambda r: r["seed"]) if (r["question"], r["name"]) == (question, name)]


def ratio(rows: list[dict], name: str, base: str) -> str:
    """Seconds of one recipe over another's, paired by seed, with a 95 % interval."""
    if name == base:
        return ""
    ours, theirs = (of(rows, "lineage", n, "seconds") for n in (name, base))
    pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, high = stats.t.interval(0.95, len(pairs) - 1, statistics.mean(pairs), stats.sem(pairs))
    return f"{100 * statistics.mean(pairs):.0f} % ({100 * low:.0f} to {100 * high:.0f})"


def table(question: str, rows: list[dict]) -> str:
    """Markdown: every recipe against the baseline and against the one before it."""
    first = QUESTIONS[question][0].name
    base_tokens = of(rows, question, first, "tokens")
    lines = [
        f"| recipe | runs | tokens | of `{first}`'s | seconds | of `{first}`'s (95 % interval) "
        "| of the one before (95 % interval) | validation loss | p |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    before = first
    for entrant in QUESTIONS[question]:
        losses, seconds, tokens = (of(rows, question, entrant.name, f) for f in ("loss", "seconds", "tokens"))
        p = stats.ttest_1samp(losses, POCKET_TARGET, alternative="less").pvalue
        earlier = "" if entrant.name == "medium-before" else ratio(rows, entrant.name, before)
        lines.append(
            f"| `{entrant.name}` | {len(losses)} | {tokens[0] / 1e6:.2f} M "
            f"| {100 * tokens[0] / base_tokens[0]:.0f} % "
            f"| {statistics.mean(seconds):.1f} ± {statistics.stdev(seconds):.1f} "
            f"| {ratio(rows, entrant.name, first)} | {earlier} "
            f"| {statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f} | {p:.3f} |"
        )
        before = entrant.name
    return "\n".join(lines)


def differences(question: str, rows: list[dict]) -> str:
    """Each entrant's loss minus the first one's, paired by seed: mean, 95 % interval, two-sided p."""
    first, *others = QUESTIONS[question]
    lines = ["| | runs | validation loss | difference (95 % interval) | p |", "|---|---|---|---|---|"]
    base = of(rows, question, first.name, "loss")
    lines.append(f"| {first.name} | {len(base)} | {statistics.mean(base):.4f} ± {statistics.stdev(base):.4f} | | |")
    for entrant in others:
        losses = of(rows, question, entrant.name, "loss")
        gaps = [a - b for a, b in zip(losses, base, strict=True)]
        low, high = stats.t.interval(0.95, len(gaps) - 1, statistics.mean(gaps), stats.sem(gaps))
        p = stats.ttest_rel(losses, base).pvalue
        lines.append(
            f"| {entrant.name} | {len(losses)} | {statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f} | "
            f"{statistics.mean(gaps):+.4f} ({low:+.4f} to {high:+.4f}) | {p:.2g} |"
        )
    return "\n".join(lines)


def plot(rows: list[dict]) -> str:
    """Seconds of every run, one row per recipe, as SVG."""
    names = [e.name for e in LINEAGE if of(rows, "lineage", e.name, "seconds")]
    width, left, right, top, row = 720, 150, 90, 48, 30
    height = top + row * len(names) + 36
    longest = max(max(of(rows, "lineage", name, "seconds")) for name in names)

    def x(seconds: float) -> float:
        return left + (width - left - right) * seconds / longest

    title = f"Seconds of training to a validation loss of {POCKET_TARGET}, pocket track"
    parts = [text(left, 24, title, size=14)]
    for mark in range(0, int(longest) + 1, 50):
        parts.append(line(x(mark), top - 8, x(mark), height - 30))
        parts.append(text(x(mark), height - 14, str(mark), anchor="middle"))
    for k, name in enumerate(names):
        seconds, tokens = of(rows, "lineage", name, "seconds"), of(rows, "lineage", name, "tokens")[0]
        mean, y = statistics.mean(seconds), top + row * k
        parts.append(f'<rect x="{left}" y="{y}" width="{x(mean) - left:.1f}" height="{row - 12}" fill="#7fb3d5"/>')
        parts += [dot(x(s), y + row / 2 - 6, INK) for s in seconds]
        parts.append(text(left - 8, y + 13, name, anchor="end"))
        parts.append(text(x(max(seconds)) + 8, y + 13, f"{mean:.0f} s, {tokens / 1e6:.2f} M"))
    told = ", ".join(f"{name} {statistics.mean(of(rows, 'lineage', name, 'seconds')):.0f}" for name in names)
    return picture(width, height, parts, f"{title}: {told}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "table", "plot"])
    parser.add_argument("--only", choices=list(QUESTIONS), default="lineage", help="which comparison")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cores", type=int, nargs="*", default=[], help="a run at a time with one thread on each")
    parser.add_argument("--rows", type=Path, default=ROWS, help="where results are kept")
    args = parser.parse_args()
    if args.action == "run":
        run(args.only, args.seeds, args.rows, args.cores)
    elif args.action == "table":
        print((table if args.only == "lineage" else differences)(args.only, read_rows(args.rows, LineageRun)))
    else:
        (DOCS / "images" / "lineage.svg").write_text(plot(read_rows(args.rows, LineageRun)))


if __name__ == "__main__":
    main()
