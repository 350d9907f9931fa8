"""The command line: mistakes cost a sentence, runs end in a summary, and nothing that was interrupted is lost."""

import dataclasses
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest

from speedrun import __version__, cli
from speedrun.cli.train import PARTS, Train
from speedrun.data.shards import TokenFolder, write_shard
from speedrun.recipes import DEFAULT, RECIPES, get_recipe
from speedrun.tracks import TRACKS
from speedrun.training import dryrun
from speedrun.training.config import Recipe, fields_of, meanings
from speedrun.training.loop import Loop
from speedrun.training.progress import Progress
from speedrun.training.runlog import read_metrics, read_result
from speedrun.training.schedule import Stage
from tests.conftest import make_token_folder

TINY = shlex.split(
    "--recipe adamw --model.num-layers 1 --model.dim 32 --model.num-heads 2 --optim.lr 0.01 --schedule.batch-size 2 "
    "--schedule.seq-len 32 --validation.seq-len 32 --validation.batch-size 4 --compile False --threads 1"
)
EIGHT = [*TINY, "--schedule.steps", "8", "--checkpoint-every", "2"]


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """stderr as one line, without the boxes that the parser draws."""
        return re.sub(r"[│╭╮╰╯─\s]+", " ", self.err)


Speedrun = Callable[..., Done]


@pytest.fixture
def speedrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Speedrun:
    """The command inside this process, in an empty folder, with no data prepared."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPEEDRUN_HOME", str(tmp_path / "home"))

    def run(*args: str | Path) -> Done:
        capsys.readouterr()
        try:
            code = cli.main([str(arg) for arg in args])
        except SystemExit as e:  # the parser's way
            code = int(e.code or 0)
        return Done(code, *capsys.readouterr())

    return run


def process(*args: str | Path, cwd: Path, **more: object) -> subprocess.Popen[str]:
    """The command as a process of its own."""
    command = [sys.executable, "-m", "speedrun", *map(str, args)]
    return subprocess.Popen(command, cwd=cwd, text=True, stdout=-1, stderr=-1, **more)  # type: ignore[call-overload]


def files_in(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in sorted(folder.rglob("*"))}


def losses(folder: Path) -> list[tuple[str, int, float]]:
    return [(m["kind"], m["step"], m["loss"]) for m in read_metrics(folder) if m["kind"] in ("train", "val")]


def interrupt_after(step: int, patch: pytest.MonkeyPatch) -> None:
    """Ctrl-C when so many steps are done."""
    log_step = Loop.log_step

    def logged(self: Loop, stage: Stage, loss: float) -> None:
        log_step(self, stage, loss)
        if stage.step + 1 == step:
            os.kill(os.getpid(), signal.SIGINT)

    patch.setattr(Loop, "log_step", logged)


@pytest.fixture(scope="module")
def whole(tokens: TokenFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert cli.main(["train", "--data", str(tokens.path), *EIGHT, "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def stopped_once(tokens: TokenFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, stopped by Ctrl-C after five steps; it has checkpoints of steps 4 and 5."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(5, patch)
        assert cli.main(["train", "--data", str(tokens.path), *EIGHT, "--out", str(folder)]) == 130
    return folder


@pytest.fixture
def stopped(stopped_once: Path, tmp_path: Path) -> Path:
    """A copy of the stopped run, to be changed."""
    shutil.copytree(stopped_once, tmp_path / "stopped")
    return tmp_path / "stopped"


# -------------------------------------------------------------------- mistakes

MISTAKES = [
    ("trian", "Unknown command 'trian'. Did you mean 'train'?"),
    ("data unpack", "Unknown command 'unpack'. Known: encode, fetch, prepare, verify."),
    ("train --track poket", "Unknown track 'poket'. Did you mean 'pocket'?"),
    ("train --track medium", "Recipe 'adamw' has no size for track 'medium'; it has pocket, short."),
    ("train --recipe adam", "Unknown recipe 'adam'. Did you mean 'adamw'?"),
    ("train --recipe adamw --recipe=adam", "Unknown recipe 'adam'. Did you mean 'adamw'?"),
    ("train --recipe", "Missing value for argument '--recipe'"),
    ("train --modle.layers 3", "Perhaps you meant: --model.num-layers"),
    ("train --optim.lr -1", "optim.lr is -1.0; it must be at least 0."),
    ("train --optim.lr inf", "optim.lr is inf; it must be finite."),
    ("train --optim.beta2 1", "optim.beta2 is 1.0; it must be below 1."),
    ("train --schedule.steps 0", "schedule.steps is 0; it must be at least 1."),
    ("train --model.num-heads 5", "model.num_heads may be one of 1, 2, 4, 8,"),
    (
        "train --recipe interleaved --schedule.window-ramp 272",
        "A window of 272 tokens is longer than what a sequence holds of one document (128 tokens)",
    ),
    (
        "train --recipe interleaved --model.num-layers 3",
        "model.attention.long_layers names layer 3, but the model has 3 layers, 0 to 2.",
    ),
    ("train --recipe interleaved --model.gate-inputs 999", "model.gate_inputs is 999; the gates read 1 to"),
    ("train --schedule.warmup 0.9 --schedule.cooldown 0.9", "their sum may be at most 1."),
    ("train --schedule.steps many", "invalid literal for int() with base 10: 'many'"),
    ("train --loader.packing boxes", "invalid choice 'boxes' for argument '--loader.packing'"),
    ("train", "run `speedrun data prepare`"),
    ("train --track short", "run `speedrun data fetch fineweb10B`"),
    ("train --dry-run", "This run does not fit: pocket data is not prepared; run `speedrun data prepare`"),
    ("train --dry-run --resume auto", "--dry-run does not go with --resume auto: it describes a new run; drop one."),
    ("train --dry-run perhaps", "invalid choice 'perhaps' for argument '--dry-run'"),
    (
        "train --dry-run --device h200",
        "Unknown device 'h200'; choose auto, cpu, cuda, cuda:N or mps; with --dry-run also",
    ),
    ("train --dry-run --device h100 --memory 100", "--memory is 100 GB, but NVIDIA H100 80GB HBM3 has 85.5; choose"),
    ("train --dry-run --device h100 --memory 1e-10", "--memory is 1e-10 GB, but NVIDIA H100 80GB HBM3 has 85.5"),
    ("train --dry-run --device h100 --nproc 0", "--nproc is 0; it must be at least 1."),
    ("train --dry-run --device h100 --nproc -1", "--nproc is -1; it must be at least 1."),
    ("train --device 4090", "Unknown device '4090'; choose auto, cpu, cuda, cuda:N or mps. 4090 goes with --dry-run."),
    ("train --memory 8", "--memory 8 is for a GPU, and the device is cpu; drop it."),
    (
        "train --dry-run --device h100 --track short --recipe interleaved --model.head.softcap tanh",
        "It is not known whether this run fits: what a row of this recipe needs on NVIDIA H100 80GB HBM3 was not",
    ),
    ("train --dry-run --device 4090 --track medium --recipe medium", "shorten the rows (--schedule.seq-len)"),
    ("doctor --gpu-report", "--gpu-report is for a machine with a GPU, and torch sees none here"),
    ("doctor --gpu-report --device cpu --recipe nobody", "Unknown recipe 'nobody'"),
    ("data encode TOKENS --out here --val-fraction 1", "--val-fraction is 1.0; it must be below 1."),
    ("data encode TOKENS --out here --processes 0", "--processes is 0; it must be at least 1."),
    ("doctor --gpu-report --device cpu --steps 0", "--steps is 0; it must be at least 1."),
    (
        "doctor --gpu-report --device cpu --out no/such/file",
        "--out no/such/file is a folder, or in a folder that",
    ),
    ("doctor --nproc 2", "--nproc 2 goes with --gpu-report; drop it."),
    ("doctor --no-compile", "--no-compile goes with --gpu-report; drop it."),
    ("doctor --out here.md", "--out here.md goes with --gpu-report; drop it."),
    ("doctor --recipe adamw --track pocket", "--recipe adamw goes with --gpu-report; drop it."),
    ("doctor --steps 6", "--steps 6 goes with --gpu-report; drop it."),
    (
        "train --dry-run --device h100 --track short --recipe interleaved --no-compile",
        "only compiled passes were measured on NVIDIA H100 80GB HBM3; drop --no-compile.",
    ),
    ("train --resume=", "--resume is empty, perhaps an unset variable; name a run folder, or auto, or drop it."),
    (
        "train --track short --recipe muon --compiler.coordinate-descent True",
        "the rules of track 'short' allow no extra compiler flags; pass --compiler.coordinate-descent False.",
    ),
    (
        "train --track short --recipe interleaved --curve interleavd",
        "Unknown curve 'interleavd'. Did you mean 'interleaved'?",
    ),
    (
        "train --track short --recipe muon --curve medium",
        "--curve medium is of track 'medium', but the run is on track 'short'; "
        "pass --curve muon or normuon or interleaved or none.",
    ),
    ("train --track medium --recipe medium --curve muon", "the run is on track 'medium'; pass --curve medium or none."),
    ("train --curve normuon", "the run is on track 'pocket'; pass --curve none."),
    ("train --data TOKENS --curve normuon", "the run is on track 'own'; pass --curve none."),
    ("train --nproc 2 --curve zzz", "Unknown curve 'zzz'. Known: interleaved, medium, muon, none, normuon."),
    ("train --target 3", "--target 3.0 goes with --data; the target of track 'pocket' is fixed."),
    ("train --data TOKENS --target -1", "The target -1.0 is not a loss"),
    ("train --data nowhere", "nowhere is not a token folder"),
    ("train --data a-file", "a-file is a file, but a token folder is needed."),
    ("train --data TOKENS --out full", "full already holds files. Choose another folder"),
    ("train --data TOKENS --out a-file", "a-file is in the way"),
    ("train --data TOKENS --out a-file/below/it", "a-file/below is in the way"),
    ("train --data TOKENS --out UNWRITABLE/run", "UNWRITABLE/run cannot be written: permission denied."),
    ("train --data TOKENS --device tpu", "Unknown device 'tpu'; choose auto, cpu, cuda, cuda:N or mps"),
    ("train --data TOKENS --device cpu:x", "Unknown device 'cpu:x'; choose auto, cpu, cuda, cuda:N or mps"),
    ("train --data TOKENS --dtype float8", "Unknown dtype 'float8'; choose auto, float32 or bfloat16."),
    ("train --data TOKENS --attention flash", "Unknown attention 'flash'; choose auto, fa3, varlen, sdpa."),
    (
        "train --data TOKENS --attention fa3 --device cpu",
        "Attention 'fa3' was asked for, but Flash Attention 3 needs an",
    ),
    (
        "train --data TOKENS --attention varlen --device cpu",
        "compute capability 8.0 or later (the device is cpu); here there is sdpa: choose that",
    ),
    ("train --data TOKENS --threads 0", "threads is 0; it must be at least 1."),
    ("train --data TOKENS --threads 5000 --dtype float32", "threads is 5000; it must be at most 4096."),
    ("train --data TOKENS --micro-batch-size 0", "--micro-batch-size is 0; it must be at least 1."),
    ("train --data TOKENS --keep 0", "--keep is 0; it must be at least 1."),
    ("train --data TOKENS --checkpoint-every -1", "--checkpoint-every is -1; it must be at least 0."),
    ("train --data TOKENS --seed -1", "--seed is -1; it must be at least 0."),
    ("train --data TOKENS --seed 99999999999999999999", "--seed is 99999999999999999999; it must be at most"),
    ("train --resume nowhere", "There is no run folder nowhere."),
    ("train --resume full", "full/run.json is missing, so full is no run folder."),
    ("recipes show adm", "Unknown recipe 'adm'. Did you mean 'adamw'?"),
    ("recipes show adamw --track poket", "Unknown track 'poket'. Did you mean 'pocket'?"),
    ("recipes adamw", "Unknown action 'adamw'; use `speedrun recipes` or `speedrun recipes show NAME`."),
    ("tracks all", "Unrecognized options: all"),
    ("data verify", "run `speedrun data prepare`"),
    ("data verify nowhere", "nowhere is not a token folder"),
    ("data encode nowhere --out tokens", "There is no file or folder nowhere"),
    ("data encode --out tokens", "No files were named"),
    ("data fetch finewebb10B", "Unknown dataset 'finewebb10B'. Did you mean 'fineweb10B'?"),
    ("data fetch fineweb10B --chunks 0", "fineweb10B has training chunks 1 to 103, so --chunks 0 is not possible."),
    ("data fetch fineweb10B --chunks 104", "fineweb10B has training chunks 1 to 103, so --chunks 104 is not possible."),
    ("data fetch fineweb10B --chunks 2 --track short", "--chunks 2 says it already; drop --recipe and --track."),
    ("data fetch fineweb10B --track pocket", "Track 'pocket' does not use fineweb10B; choose short or medium."),
    (
        "data fetch fineweb10B --track medium --recipe adamw",
        "Recipe 'adamw' has no size for track 'medium'; it has pocket, short.",
    ),
    ("doctor --device tpu", "Unknown device 'tpu'"),
    ("doctor --device cpu --attention fa3", "NVIDIA Hopper GPU, compute capability 9.x (the device is cpu); here"),
    ("sample nowhere", "There is no run folder nowhere."),
    ("sample full", "full is no run folder"),
    ("sample", "Missing from speedrun sample: PATH"),
]


@pytest.mark.parametrize(("line", "words"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_costs_one_sentence_and_changes_nothing(
    speedrun: Speedrun, tokens: TokenFolder, tmp_path: Path, line: str, words: str
) -> None:
    (tmp_path / "a-file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    unwritable = tmp_path / "unwritable"
    unwritable.mkdir(mode=0o500)
    if os.access(unwritable, os.W_OK):
        unwritable = Path("/sys")  # the one place where even root may not write
    if "UNWRITABLE" in line and not unwritable.exists():
        pytest.skip("root may write everywhere on this system")
    before = files_in(tmp_path)
    line = line.replace("TOKENS", str(tokens.path)).replace("UNWRITABLE", str(unwritable))
    command, *flags = line.split()
    plain = ["--recipe", "adamw"] if command == "train" and not {"--recipe", "--resume"} & {*flags} else []
    done = speedrun(command, *(EIGHT if "--data" in line else plain), *flags)
    assert done.code == 2
    assert words.replace("UNWRITABLE", str(unwritable)) in done.said
    assert "Traceback" not in done.err
    assert done.err.startswith("speedrun: ") == (done.err.count("\n") == 1)  # our own sentences take one line
    assert files_in(tmp_path) == before


def test_a_resume_of_nothing_is_no_new_run(speedrun: Speedrun, tokens: TokenFolder, tmp_path: Path) -> None:
    done = speedrun("train", "--data", tokens.path, *EIGHT, "--resume", "")
    assert done.code == 2
    assert "--resume is empty" in done.said
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_that_cannot_write_the_sample_is_told_before_the_run(
    speedrun: Speedrun, tmp_path: Path, stopped: Path
) -> None:
    make_token_folder(tmp_path / "tokens")
    (tmp_path / "tokens" / "tokenizer.json").write_text("{")
    before = files_in(tmp_path)
    done = speedrun("train", "--data", "tokens", *EIGHT, "--out", "run")
    assert done.code == 2
    assert "tokens/tokenizer.json is not a tokenizer.json of the `tokenizers` library" in done.said
    assert done.said.strip().endswith("Restore tokens/tokenizer.json, or pass --sample False.")
    assert files_in(tmp_path) == before
    assert speedrun("train", "--data", "tokens", *EIGHT, "--out", "run", "--sample", "False").code == 0
    (stopped / "tokenizer.json").write_text("{")
    before = files_in(stopped)
    done = speedrun("train", "--resume", stopped)
    assert done.code == 2
    assert f"Restore {stopped}/tokenizer.json" in done.said
    assert files_in(stopped) == before


def test_one_is_not_many(speedrun: Speedrun, tokens: TokenFolder) -> None:
    done = speedrun("train", "--data", tokens.path, *TINY, "--schedule.steps", "1", "--val-tokens", "1")
    assert done.code == 0
    assert "on the first 1 token of the validation split" in done.out
    assert done.out.count(", 1 step\n") == 1


def test_a_process_told_nonsense_says_so_and_ends_with_2(tmp_path: Path) -> None:
    asked = process("train", "--recipe", "adam", cwd=tmp_path)
    out, err = asked.communicate()
    assert asked.returncode == 2
    assert {line.split(",")[0] for line in out.splitlines()} == {"loading torch"}
    assert err == "speedrun: Unknown recipe 'adam'. Did you mean 'adamw'?\n"


def test_no_command_is_a_mistake_that_shows_the_commands(speedrun: Speedrun) -> None:
    done = speedrun()
    assert done.code == 2
    assert "usage: speedrun" in done.err


def put_a_stranger(folder: Path, split: str) -> None:
    stream = np.ones(2000, dtype=np.int64)
    stream[700] = 5000
    write_shard(folder / f"{split}_000000.bin", stream)


def cut_off(folder: Path, split: str, size: int) -> None:
    with open(folder / f"{split}_000000.bin", "r+b") as f:
        f.truncate(size)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: put_a_stranger(folder, "train"), "train_000000.bin has token 5000 at position 700, outside"),
        (lambda folder: put_a_stranger(folder, "val"), "val_000000.bin has token 5000 at position 700, outside"),
        (lambda folder: cut_off(folder, "train", 3000), "its header promises 20000 tokens, but it holds 988"),
        (lambda folder: cut_off(folder, "val", 100), "val_000000.bin is truncated: it has 100 bytes"),
        (lambda folder: write_shard(folder / "train_000000.bin", np.ones(20, dtype=np.int64)), "No row of 32 tokens"),
        (lambda folder: (folder / "val_000000.bin").unlink(), "has no 'val' shards"),
        (lambda folder: (folder / "tokens.json").write_text("{"), "tokens.json is damaged"),
    ],
)
def test_damaged_data_is_named_and_leaves_no_run(
    speedrun: Speedrun, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    make_token_folder(tmp_path / "tokens")
    damage(tmp_path / "tokens")
    (tmp_path / "empty").mkdir()
    before = files_in(tmp_path)
    for out in ([], ["--out", "new/run"], ["--out", "empty"]):
        done = speedrun("train", "--data", "tokens", *EIGHT, *out)
        assert done.code == 2
        assert words in done.said
        assert files_in(tmp_path).keys() == before.keys()


# -------------------------------------------------------------------- dry runs


@pytest.fixture
def no_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dryrun, "matmul_speed", lambda machine, config: 1e11)


@pytest.mark.parametrize("spelling", [["--dry-run"], ["--dry-run", "True"], ["--dry-run=True"]])
def test_a_dry_run_says_what_a_run_would_be_and_leaves_nothing(
    speedrun: Speedrun, tokens: TokenFolder, tmp_path: Path, no_calibration: None, spelling: list[str]
) -> None:
    done = speedrun("train", "--data", tokens.path, *spelling, *EIGHT)
    assert (done.code, done.err) == (0, "")
    for words in ("AdamW", "512 training tokens in 8 steps", "0-7", "2 x 32", "optimizer state", "time", "fits"):
        assert words in done.out
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_that_is_not_wanted_trains(speedrun: Speedrun, tokens: TokenFolder, tmp_path: Path) -> None:
    done = speedrun("train", "--data", tokens.path, *EIGHT, "--dry-run", "False", "--out", "run", "--sample", "False")
    assert done.code == 0
    assert read_result(tmp_path / "run").status == "ok"


@pytest.mark.parametrize(("recipe", "track"), [("interleaved", "short"), ("medium", "medium")])
def test_a_dry_run_of_a_record_needs_neither_its_data_nor_its_memory(
    speedrun: Speedrun, tmp_path: Path, no_calibration: None, recipe: str, track: str
) -> None:
    done = speedrun("train", "--recipe", recipe, "--track", track, "--dry-run")
    assert done.code == 2
    assert "There are no FineWeb train and no val shards in" in done.said
    assert "NorMuon" in done.out
    assert "tied, then untied" in done.out
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_for_gpus_that_are_not_here(speedrun: Speedrun, tmp_path: Path) -> None:
    eight = ["--device", "h100", "--nproc", "8", "--recipe", "medium", "--track", "medium"]
    done = speedrun("train", "--dry-run", *eight)
    assert (done.code, done.err) == (0, "")
    for words in (
        "memory of each of 8 processes",
        "rows at once, from the compiled graph",
        "Micro-batches of 2 of 4 rows from step 1175 on",
        "run `speedrun data fetch fineweb10B`",  # worth knowing, but no reason why it would not fit there
        "time         not known: the device is not here",
        "fits",
    ):
        assert words in done.out
    one = speedrun("train", "--dry-run", "--device", "4090", "--recipe", "interleaved", "--track", "short")
    assert (one.code, one.err) == (0, "")
    assert "Micro-batches of 1 of 24 rows" in one.out
    shorter = speedrun("train", "--dry-run", "--device", "4090", "--recipe", "normuon-24gb", "--track", "short")
    assert (shorter.code, shorter.err) == (0, "")
    assert "16 x 16384" in shorter.out
    assert "for 1 row at once, from the compiled graph" in shorter.out
    assert list(tmp_path.iterdir()) == []


def test_memory_grows_in_place_unless_told_otherwise(speedrun: Speedrun, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as older:
        older.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")
        speedrun("--version")
        assert "PYTORCH_ALLOC_CONF" not in os.environ
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")
    speedrun("--version")
    assert os.environ["PYTORCH_ALLOC_CONF"] == "backend:native"
    del os.environ["PYTORCH_ALLOC_CONF"]
    speedrun("--version")
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_a_report_that_would_not_fit_into_memory_is_refused(
    speedrun: Speedrun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speedrun.training.telemetry.memory_bytes", lambda _: 2**20)
    done = speedrun("doctor", "--gpu-report", "--device", "cpu", "--dtype", "float32", "--track", "pocket")
    assert done.code == 2
    assert "Weights, gradients and optimizer state alone take" in done.said
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_cannot_fit_is_told_at_once(
    speedrun: Speedrun, tokens: TokenFolder, tmp_path: Path, no_calibration: None
) -> None:
    huge = ["--model.dim", "262144", "--model.num-heads", "2048", "--model.num-layers", "12"]
    done = speedrun("train", "--data", tokens.path, *EIGHT, *huge, "--dry-run")
    assert done.code == 2
    assert "Weights, gradients and optimizer state alone take" in done.said
    assert "choose a smaller model" in done.said
    assert "attention" in done.out, "the tables come all the same"
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------- resuming


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--recipe gpt2", "was started with --recipe adamw, not gpt2"),
        ("--track short", "was started with --track pocket, not short"),
        ("--optim.lr 0.5 --model.num-layers 2", "(model.num_layers: 1 -> 2; optim.lr: 0.01 -> 0.5)"),
        ("--seed 3", "(seed: 0 -> 3)"),
        ("--target 3", "(target: None -> 3.0)"),
        ("--data OTHER", "(data: another train_000000.bin; data: another val_000000.bin)"),
        ("--out elsewhere", "--out elsewhere does not go with --resume"),
        ("--curve normuon", "was started with --curve none, not normuon"),
    ],
)
def test_a_resume_must_be_of_the_same_run(
    speedrun: Speedrun, stopped: Path, tmp_path: Path, flags: str, words: str
) -> None:
    make_token_folder(tmp_path / "other", seed=5)
    before = files_in(tmp_path)
    done = speedrun("train", "--resume", stopped, *flags.replace("OTHER", str(tmp_path / "other")).split())
    assert done.code == 2
    assert words in done.said
    assert files_in(tmp_path) == before


def test_a_resume_needs_no_flags(speedrun: Speedrun, stopped: Path, whole: Path) -> None:
    done = speedrun("train", "--resume", stopped)
    assert done.code == 0
    assert "resumed at step 5 from step-000005" in done.out
    assert losses(stopped) == losses(whole)
    assert read_result(stopped).timed is False


def test_a_resume_says_that_measurements_are_gone(speedrun: Speedrun, stopped: Path) -> None:
    """A power failure may take lines of metrics.jsonl that were written before a checkpoint."""
    metrics = stopped / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(text for text in lines if json.loads(text)["step"] not in (2, 3)))
    done = speedrun("train", "--resume", stopped)
    assert done.code == 0
    assert "metrics.jsonl lacks 2 of the 5 steps that were trained before" in done.out


def test_a_finished_run_is_not_resumed(speedrun: Speedrun, tokens: TokenFolder, tmp_path: Path) -> None:
    """Not even one that kept no checkpoint: it would begin again from step 0 and lose its result."""
    flags = ["train", "--data", tokens.path, *TINY, "--schedule.steps", "2", "--save", "False"]
    assert speedrun(*flags, "--resume", "auto", "--out", "run").code == 0
    before = files_in(tmp_path / "run")
    for way in (["train", "--resume", "run"], [*flags, "--resume", "auto", "--out", "run"]):
        done = speedrun(*way)
        assert done.code == 2
        assert "run is finished (it ended as 'ok'); there is nothing to resume." in done.said
    assert files_in(tmp_path / "run") == before


def test_a_kill_between_the_last_checkpoint_and_the_result_costs_nothing(
    speedrun: Speedrun, whole: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    assert speedrun("train", "--resume", "run").code == 0
    assert losses(tmp_path / "run") == losses(whole)
    assert read_result(tmp_path / "run").val_loss == read_result(whole).val_loss


def flip_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json"])
@pytest.mark.parametrize("auto", [False, True])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    speedrun: Speedrun, tokens: TokenFolder, stopped: Path, whole: Path, name: str, auto: bool
) -> None:
    flip_a_byte(stopped / "checkpoints" / "step-000005" / name)
    fresh = ["--data", tokens.path, *EIGHT, "--resume", "auto", "--out", stopped]
    done = speedrun("train", *(fresh if auto else ["--resume", stopped]))
    assert done.code == 0
    assert f"DAMAGED CHECKPOINT {stopped / 'checkpoints' / 'step-000005'}: {name} does not match" in done.out
    assert "resumed at step 4" in done.out
    assert losses(stopped) == losses(whole)


@pytest.mark.parametrize("left", [1, 2])
def test_when_no_checkpoint_is_good_a_person_must_decide(speedrun: Speedrun, stopped: Path, left: int) -> None:
    if left == 1:
        shutil.rmtree(stopped / "checkpoints" / "step-000004")
    for folder in (stopped / "checkpoints").glob("step-*"):
        flip_a_byte(folder / "tensors.safetensors")
    before = files_in(stopped)
    done = speedrun("train", "--resume", stopped)
    assert done.code == 2
    assert "None of the checkpoints" in done.said
    assert "tensors.safetensors does not match" in done.said
    assert files_in(stopped) == before


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            '{"recipe": {',
            "run.json is damaged: Input data was truncated. Restore it from a copy, or",
        ),
        ("[]", "run.json is damaged: it is not a JSON object"),
        ('{"format": 2, "interruptions": []}', "run.json is damaged: Object missing required field `recipe`"),
    ],
)
def test_a_damaged_run_json_is_named(speedrun: Speedrun, stopped: Path, content: str, words: str) -> None:
    (stopped / "run.json").write_text(content)
    before = files_in(stopped)
    for command in (["train", "--resume", stopped], ["sample", stopped]):
        done = speedrun(*command)
        assert done.code == 2
        assert words in done.said
    assert files_in(stopped) == before


def test_auto_finds_the_newest_unfinished_run_that_fits(
    speedrun: Speedrun, tokens: TokenFolder, stopped_once: Path, whole: Path
) -> None:
    shutil.copytree(stopped_once, "runs/own-adamw-s0-20300101-000000")
    shutil.copytree(whole, "runs/own-adamw-s0-20300101-000001")
    shutil.copytree(stopped_once, "runs/own-adamw-s0-20300101-000002")
    (Path("runs") / "own-adamw-s0-20300101-000002" / "run.json").write_text("{")
    again = ["train", "--data", tokens.path, *EIGHT, "--resume", "auto"]
    other = speedrun(*again, "--seed", "1")
    assert "nothing to resume: starting a new run" in other.out
    longer = speedrun(*again, "--schedule.steps", "9")
    assert "passing over runs/own-adamw-s0-20300101-000002: " in longer.out
    assert "nothing to resume: starting a new run" in longer.out
    done = speedrun(*again)
    assert done.code == 0
    assert "resumed at step 5" in done.out
    assert losses(Path("runs/own-adamw-s0-20300101-000000")) == losses(whole)


# -------------------------------------------------------------------- a run from beginning to end


@pytest.mark.parametrize(("target", "code", "verdict"), [("9", 0, "9 reached"), ("0.125", 1, "0.125 NOT reached")])
def test_a_run_ends_with_a_summary(
    speedrun: Speedrun, tokens: TokenFolder, target: str, code: int, verdict: str
) -> None:
    """A folder whose name looks like markup is shown as it is."""
    done = speedrun("train", "--data", tokens.path, "--target", target, *EIGHT, "--out", "[red]run")
    assert done.code == code
    result = read_result(Path("[red]run"))
    assert f"target       {verdict}: validation loss {result.val_loss:.4f}\n" in done.out
    assert re.search(r"trained +\d+\.\d s on the clock, 8 steps\n", done.out)
    assert re.search(r"tokens +512, [\d,]+ per second\n", done.out)
    assert re.search(r"peak memory +[\d,]+ MiB resident\n", done.out)
    assert re.search(r"sample +The .+\n", done.out)
    assert done.out.endswith("run folder   [red]run\n")


def test_a_run_says_that_its_model_is_built(
    speedrun: Speedrun, tokens: TokenFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(Progress, "at", lambda self, doing: said.append(doing))
    speedrun("train", "--data", tokens.path, *EIGHT)
    assert said[0] == "building the model"


def test_without_a_target_reaching_the_end_is_enough(speedrun: Speedrun, tokens: TokenFolder) -> None:
    done = speedrun("train", "--data", tokens.path, *EIGHT, "--save", "False")
    assert done.code == 0
    assert "on the validation split (no target)" in done.out
    assert "sample " not in done.out
    [folder] = Path("runs").iterdir()
    assert folder.name.startswith("own-adamw-s0-")


def test_a_run_that_goes_nan_says_what_may_help(speedrun: Speedrun, tokens: TokenFolder) -> None:
    done = speedrun("train", "--data", tokens.path, *EIGHT, "--optim.lr", "1e30", "--out", "run")
    assert done.code == 1
    assert "Failed: the loss of step" in done.out
    assert "a lower learning rate may help (--optim.lr is 1e+30)" in done.out
    assert read_result(Path("run")).status == "failed"


def test_ctrl_c_before_the_first_step_leaves_nothing(
    speedrun: Speedrun, tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warm_up(trainer: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("speedrun.training.loop.warm_up", warm_up)
    done = speedrun("train", "--data", tokens.path, *EIGHT)
    assert (done.code, done.err) == (130, "speedrun: stopped\n")
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------- kills

LONG = [*TINY, "--schedule.steps", "300", "--validation.every", "100", "--dtype", "float32"]


@pytest.fixture(scope="module")
def undisturbed(tokens: TokenFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long") / "run"
    assert cli.main(["train", "--data", str(tokens.path), *LONG, "--out", str(folder)]) == 0
    return folder


def wait_for(what: Callable[[], bool], running: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 100
    while not what():
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def steps_done(folder: Path) -> int:
    return len(read_metrics(folder, "train")) if (folder / "metrics.jsonl").exists() else 0


def test_ctrl_c_saves_and_prints_the_command_that_continues_to_the_same_bits(
    tokens: TokenFolder, tmp_path: Path, undisturbed: Path
) -> None:
    folder = tmp_path / "my run"
    running = process("train", "--data", tokens.path, *LONG, "--out", "my run", cwd=tmp_path)
    wait_for(lambda: steps_done(folder) >= 20, running)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate()
    assert running.returncode == 130, err
    assert read_result(folder).status == "interrupted"
    said = out.partition("Stopped and saved. To continue:\n")[2].strip()
    assert said == "speedrun train --resume 'my run'"
    again = process(*shlex.split(said)[1:], cwd=tmp_path)
    out, err = again.communicate()
    assert again.returncode == 0, err
    assert "trained" in out
    assert losses(folder) == losses(undisturbed)


@pytest.mark.parametrize("after_a_checkpoint", [False, True])
def test_a_killed_run_continues_to_the_same_bits(
    tokens: TokenFolder, tmp_path: Path, undisturbed: Path, speedrun: Speedrun, after_a_checkpoint: bool
) -> None:
    every = "25" if after_a_checkpoint else "250"
    again = ["train", "--data", tokens.path, *LONG, "--checkpoint-every", every, "--resume", "auto", "--out", "run"]
    running = process(*again, cwd=tmp_path)
    wait_for(lambda: steps_done(tmp_path / "run") >= 60, running)
    running.kill()
    running.communicate()
    assert (tmp_path / "run" / "checkpoints").exists() == after_a_checkpoint
    done = speedrun(*again)
    assert done.code == 0
    assert ("resumed at step" in done.out) == after_a_checkpoint
    assert losses(tmp_path / "run") == losses(undisturbed)
    [interruption] = json.loads((tmp_path / "run" / "run.json").read_text())["interruptions"]
    assert (interruption["resumed_from"] > 0) == after_a_checkpoint


def test_sigterm_saves_too_and_says_so_in_the_exit_code(
    speedrun: Speedrun, tokens: TokenFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "kill", lambda pid, _, kill=os.kill: kill(pid, signal.SIGTERM))
    interrupt_after(3, monkeypatch)
    done = speedrun("train", "--data", tokens.path, *EIGHT, "--out", "run")
    assert done.code == 143
    assert "speedrun train --resume run\n" in done.out


# -------------------------------------------------------------------- looking around


def test_the_tracks_are_listed_with_their_targets(speedrun: Speedrun) -> None:
    done = speedrun("tracks")
    assert done.code == 0
    for track in TRACKS.values():
        assert re.search(rf"{track.name} +{track.target:g} nats +missing", done.out)


def test_the_recipes_are_listed(speedrun: Speedrun) -> None:
    done = speedrun("recipes")
    assert done.code == 0
    assert all(name in done.out for name in RECIPES)
    assert f"{DEFAULT} (default)" in done.out


def test_a_track_without_the_default_recipe_takes_the_newest_that_has_its_size(speedrun: Speedrun) -> None:
    assert speedrun("recipes", "show", "--track", "short").out.startswith(f"{DEFAULT} at short size")
    assert speedrun("recipes", "show", "--track", "medium").out.startswith("medium at medium size")


def test_a_recipe_is_shown_with_every_field_and_its_meaning(speedrun: Speedrun) -> None:
    done = speedrun("recipes", "show", "adamw")
    assert done.code == 0
    text = " ".join(done.out.split())
    for name, meaning in meanings(Recipe).items():
        if "." in name:
            assert name in text
            assert meaning.split()[0] in text


def test_the_short_track_s_gpt2_has_the_size_of_the_record(speedrun: Speedrun) -> None:
    done = speedrun("recipes", "show", "gpt2", "--track", "short")
    assert (
        "123.53 M parameters (embedding 38.60 M, blocks 84.93 M)\n4,999.61 M training tokens in 9,536 steps\n"
        in done.out
    )


def test_the_help_of_train_explains_every_field(speedrun: Speedrun) -> None:
    done = speedrun("train", "--help")
    assert done.code == 0
    text = re.sub(r"[│\s]+", " ", done.out)
    explained = meanings(Recipe)
    assert set(explained) == set(fields_of(get_recipe("adamw", "pocket")))
    for name, meaning in explained.items():
        if "." in name:
            assert f"--{name.replace('_', '-')} " in text
            assert " ".join(meaning.split()) in text
    hints = get_type_hints(Train)
    nested = [name for name in hints if dataclasses.is_dataclass(hints[name]) and name not in PARTS]
    flags = {field.name for name in nested for field in dataclasses.fields(hints[name])}
    for name in (flags | {*hints}) - {*nested, *PARTS}:
        assert f"--{name.replace('_', '-')} " in text
    assert "None" not in text.partition(" --model.")[0], "of a recipe's fields it is a value with a meaning"


def test_the_doctor_lists_what_is_there_and_what_is_not(speedrun: Speedrun) -> None:
    done = speedrun("doctor", "--threads", "1")
    assert done.code == 0
    assert re.search(r"^ok  threads +1 \(as asked\)$", done.out, re.MULTILINE)
    assert re.search(r"^--  data: pocket +missing: .*speedrun data prepare", done.out, re.MULTILINE)


def test_version_and_help(speedrun: Speedrun) -> None:
    assert speedrun("--version") == Done(0, f"speedrun {__version__}\n", "")
    for args in (["--help"], ["-h"], ["data", "--help"]):
        done = speedrun(*args)
        assert (done.code, done.err) == (0, "")
        assert done.out.startswith("usage: speedrun")
    assert all(f"\n  {name} " in speedrun("--help").out for name in cli.COMMANDS)


@pytest.mark.parametrize("command", ["--help", "train --help", "recipes show adamw"])
def test_a_reader_who_leaves_early_gets_no_traceback(tmp_path: Path, command: str) -> None:
    """What `| head -1` does, without the race: the reading end is closed from the beginning."""
    reading, writing = os.pipe()
    os.close(reading)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    asked = [sys.executable, "-m", "speedrun", *command.split()]
    done = subprocess.run(asked, stdout=writing, stderr=-1, text=True, cwd=tmp_path, env=buffered)
    os.close(writing)
    assert done.stderr == ""


# -------------------------------------------------------------------- sample


def test_a_trained_model_writes_text(speedrun: Speedrun, whole: Path) -> None:
    texts = [speedrun("sample", whole, "--prompt", "It was", "--tokens", "9", "--seed", seed).out for seed in "112"]
    assert texts[0].startswith("It was")
    assert texts[0] == texts[1] != texts[2]
    ways = ("--temperature 0", "--top-k 1 --seed 7")
    greedy = [speedrun("sample", whole, "--tokens", "9", *way.split()).out for way in ways]
    assert greedy[0] == greedy[1]
    assert speedrun("sample", whole, "--tokens", "9", "--top-k", "None").code == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--temperature -1", "--temperature is -1.0; it must be at least 0."),
        ("--temperature nan", "--temperature is nan"),
        ("--top-k 0", "--top-k is 0; it must be at least 1."),
        ("--tokens -1", "--tokens is -1; it must be at least 0."),
        ("--seed -1", "--seed is -1"),
        ("--device tpu", "Unknown device 'tpu'"),
    ],
)
def test_impossible_samples_are_refused(speedrun: Speedrun, whole: Path, flags: str, words: str) -> None:
    done = speedrun("sample", whole, *flags.split())
    assert (done.code, done.out) == (2, "")
    assert words in done.said


def test_a_run_without_what_a_sample_needs_says_what_is_missing(speedrun: Speedrun, stopped: Path) -> None:
    about = json.loads((stopped / "run.json").read_text())
    changed = json.loads(json.dumps(about))
    changed["recipe"]["model"]["num_layers"] = 2
    (stopped / "run.json").write_text(json.dumps(changed))
    assert "step-000005 does not fit the model" in speedrun("sample", stopped).said
    (stopped / "run.json").write_text(json.dumps(about))
    (stopped / "tokenizer.json").rename(stopped / "elsewhere.json")
    assert "has no tokenizer.json" in speedrun("sample", stopped).said
    shutil.rmtree(stopped / "checkpoints")
    done = speedrun("sample", stopped)
    assert done.code == 2
    assert f"{stopped} has no checkpoint; train on with `speedrun train --resume {stopped}`" in done.said


def test_the_schedules_of_a_recipe_are_drawn(speedrun: Speedrun) -> None:
    done = speedrun("recipes", "show", "interleaved", "--plot", "picture.svg")
    assert done.code == 0
    assert "schedules drawn in picture.svg" in done.out
    assert Path("picture.svg").read_text().startswith("<svg")
    assert speedrun("recipes", "show", "adamw", "--plot", "picture.svg/inside.svg").code == 2


# -------------------------------------------------------------------- quickly

QUICK = [*TINY, "--save", "False", "--sample", "False"]


def test_help_is_there_before_torch() -> None:
    slow = "sys.modules.keys() & {'torch', 'huggingface_hub'}"
    script = f"import sys; from speedrun.cli import main; sys.exit(main(['--help']) or bool({slow}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "train one model to a track's target" in done.stdout


def test_every_command_that_help_names_is_there() -> None:
    for name in cli.COMMANDS:
        assert callable(importlib.import_module(f"speedrun.cli.{name}").main)


def test_a_process_says_something_before_it_has_loaded_torch(tokens: TokenFolder, tmp_path: Path) -> None:
    with process("train", "--data", tokens.path, *QUICK, "--steps", "2", "--dtype", "float32", cwd=tmp_path) as running:
        out, errors = running.communicate()
    assert running.returncode == 0, errors
    assert out.startswith("loading torch\n")


def test_steps_scales_the_whole_schedule(speedrun: Speedrun, tokens: TokenFolder) -> None:
    flags = ["train", "--data", tokens.path, "--recipe", "normuon", "--model.dim", "32", "--model.num-heads", "2"]
    flags += ["--threads", "1", "--save", "False", "--sample", "False", "--out", "run"]
    done = speedrun(*flags, "--steps", "5", "--schedule.steps", "7")
    assert done.code == 2
    assert "--steps 5 scales the whole schedule; drop --schedule.steps." in done.err
    assert speedrun(*flags, "--steps", "5").code == 0
    assert read_result(Path("run")).steps == 5
    assert len(read_metrics(Path("run"), "train")) == 5


@pytest.mark.parametrize(
    ("flags", "compiled"),
    [
        ([], False),
        (["--no-compile"], False),
        (["--compile", "False"], False),
        (["--compile"], True),
        (["--schedule.steps", "100"], True),
    ],
)
def test_a_short_run_on_a_cpu_is_not_compiled_unless_asked(
    flags: list[str], compiled: bool, speedrun: Speedrun, tokens: TokenFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(
        "speedrun.training.step.compiled", lambda model, wanted, *_: asked.append(wanted) or (model, None)
    )
    undecided = shlex.split(shlex.join(QUICK).replace("--compile False", ""))
    steps = [] if "--schedule.steps" in flags else ["--schedule.steps", "2"]
    done = speedrun("train", "--data", tokens.path, *undecided, *steps, *flags, "--out", "run")
    assert done.code == 0, done.err
    assert asked == [compiled]
    assert ("sooner done without it; --compile uses it" in done.out) == (flags == [])


def test_a_loss_on_some_validation_tokens_is_not_compared_with_the_target(
    speedrun: Speedrun, tokens: TokenFolder
) -> None:
    flags = ["train", "--data", tokens.path, *EIGHT, "--target", "9"]
    done = speedrun(*flags, "--val-tokens", "64", "--out", "few")
    assert done.code == 0
    assert "on the first 64 tokens of the validation split (no target)" in done.out
    whole = speedrun(*flags, "--out", "all")
    assert "target       9 reached" in whole.out
    assert read_result(Path("few")).val_loss != read_result(Path("all")).val_loss
    for flag, says in (("0", "--val-tokens is 0; it must be at least 1."), ("99999", "Validation on 99999 predicted")):
        done = speedrun(*flags, "--val-tokens", flag, "--out", "bad")
        assert done.code == 2
        assert says in done.err
        assert not Path("bad").exists()
