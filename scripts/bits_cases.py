"""The trainings that scripts/same_bits.py compares, in the words of this version of the program.

    python scripts/bits_cases.py --out losses.json                   every case, one process
    python scripts/bits_cases.py --out losses.json --processes 3     the same in three gloo ranks

`same_bits.py` runs this file of each of two commits with that commit's own code, so when a field or a class is renamed,
this file is renamed with it. What must stay is the command line above and the JSON it writes:

    {case: {"losses": [hex float, ...], "final": float, "weights": [sha256 of a tensor, ...] (sorted)}}

Every pocket recipe is a case, with its schedule shortened so that every transition still happens. MORE turns on what no
pocket recipe uses; a test holds that no value of any field is left out.
"""

import argparse
import dataclasses
import datetime
import hashlib
import json
import math
import os
import shutil
import tempfile
import typing
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import multiprocessing

import speedrun.data
from speedrun.data.shards import TokenFolder, write_shard
from speedrun.optim.sharded import Comm
from speedrun.recipes import LINEAGE, get_recipe
from speedrun.training.config import Options, Recipe, fields_of, with_fields
from speedrun.training.device import choose
from speedrun.training.job import Job
from speedrun.training.loop import Loop
from speedrun.training.optimizers import PARTS
from speedrun.training.progress import Progress
from speedrun.training.runlog import NullRunFolder, RunFolder, read_metrics
from speedrun.training.state import exact
from speedrun.training.step import Trainer

COMPILED = ("normuon", "interleaved")
STEPS, QUICK = 24, 8  # the extra ones included
SECONDS = 600  # how long a rank waits for another

OWN = {"lr": 0.9, "beta1": 0.85, "beta2": 0.97, "decay": 0.5}
# Name of a case: the recipe it starts from, changed fields, changed options.
MORE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fp8 clip discard": (
        "interleaved",
        {
            "model.head.fp8": True, "model.head.fp8_scales": (0.1, 0.01, 0.001), "optim.clip": 0.5,
            "loader.shuffle": None, "loader.tail": "discard",
            "optim.muon.nesterov": False, "optim.muon.steps": 4, "optim.muon.beta2": 0.9, "optim.muon.momentum": 0.9,
            "schedule.momentum_warmup": 0, "schedule.momentum_cooldown": 0, "compiler.coordinate_descent": True,
            "model.head.softcap_temperature": 5.0,
            "optim.muon.up_lr": 1.5,
        },
        {"order": "interleaved", "micro_batch_size": 3, "val_tokens": 2000, "shadow": True},
    ),
    "svd bf16 tanh": (
        "normuon",
        {
            "optim.muon.method": "svd", "optim.weights": "bf16", "model.head.softcap": "tanh",
            "loader.shuffle": "documents", "optim.muon.scale": "match-rms-adamw", "model.no_mlp": (1,),
            "model.mlp_ratio": 3.0, "model.head.tied": True, "model.across_documents": False, "optim.snoo.k": 3,
            "optim.snoo.lr": 0.5, "optim.snoo.momentum": 0.5, "optim.blocks.lr": 0.5, "optim.embed2.beta1": 0.7,
            "optim.muon.gates_lr": 0.5, "schedule.momentum_low": 0.8, "schedule.momentum_high": 0.9,
            "validation.first": False,
        },
        {"order": "sequential"},
    ),
    # Long rows and wide matrices are computed in blocks, which the pocket sizes are too small for.
    "long and wide": (
        "normuon",
        {
            "model.dim": 192, "model.num_heads": 6, "schedule.seq_len": 512, "schedule.batch_size": 3,
            "validation.seq_len": 512, "validation.batch_size": 2, "loader.max_doc_len": 384,
            "schedule.window_ramp": (48, 96, 192), "schedule.window_extra": 208, "schedule.window_final": 320,
        },
        {},
    ),
    "sum whole documents": (
        "interleaved",
        {
            "optim.reference_ranks": 8, "optim.eps": 1e-3, "optim.clip": 0.5, "model.head.fp8": True,
            "validation.cut_documents": False, "validation.seq_len": 384, "validation.batch_size": 2,
            "optim.muon.gates": True, "optim.muon.smear_gate": False, "optim.muon.mlp_decay": 2.0,
            "schedule.yarn_until": 64,
        },
        {},
    ),
    "every part its own": (
        "medium",
        {
            **{f"optim.{part}.{name}": value for part in PARTS for name, value in OWN.items()},
            "optim.weight_decay": 0.1, "optim.matrices": "adam",
            "schedule.momentum_warmup": 0, "model.vocab_size": 4160,
            "schedule.momentum_cooldown": 0, "schedule.seq_len": 160, "validation.seq_len": 192,
        },
        {},
    ),
    "bigrams, update floor": (
        "normuon",
        {
            "model.embeddings.bigram_vocab_size": 5000, "model.embeddings.bigram_dim": 32, "optim.bigram.lr": 40.0,
            "optim.muon.update_floor": 0.35,
        },
        {},
    ),
}  # fmt: skip


def shortened(recipe: Recipe, steps: int) -> Recipe:
    """The recipe in `steps` steps, each of its transitions where it was, as a share of the run."""
    s = recipe.schedule
    extra = max(2, steps // 8) if s.extra_steps else 0
    changes: dict[str, Any] = {"schedule.extra_steps": extra, "schedule.steps": steps - extra}
    for name in ("momentum_warmup", "momentum_cooldown"):
        if getattr(s, name):
            changes[f"schedule.{name}"] = max(2, round(getattr(s, name) * steps / s.total))
    if recipe.optim.snoo.k:
        changes["optim.snoo.k"] = 3
    if s.warmup:
        changes["schedule.warmup"] = max(s.warmup, 3 / (steps - extra))
    if s.mtp_tokens > 1:
        changes["schedule.mtp_until"] = max(s.mtp_until, 3 / (steps - extra))
    changes["validation.every"] = steps // 2
    return with_fields(recipe, changes)


def cases(steps: int) -> dict[str, tuple[Recipe, Options]]:
    found = {}
    for name in LINEAGE:
        found[name] = shortened(get_recipe(name, "pocket"), steps), Options(compile=False, save=False)
    for name, (base, fields, options) in MORE.items():
        recipe = with_fields(shortened(get_recipe(base, "pocket"), steps), fields)
        found[name] = recipe, Options(**{"compile": False, "save": False, **options})
    return found


def unused() -> list[str]:
    """Fields of a recipe, or words that one may have, that no case uses: `model.head.softcap=tanh`, `optim.clip`."""
    recipes = [recipe for recipe, _ in cases(STEPS).values()]
    values = [fields_of(recipe) for recipe in recipes]
    usual, found = fields_of(Recipe("", "", "")), []
    for name, hint in hints(Recipe).items():
        taken = {v[name] for v in values}
        words: list[Any] = [w for each in (hint, *typing.get_args(hint)) for w in typing.get_args(each)]
        words = [w for w in words if isinstance(w, str)] or ([True, False] if hint is bool else [])
        words += [None] if words and type(None) in typing.get_args(hint) else []
        found += [f"{name}={w}" for w in words if w not in taken]
        found += [name] if not words and taken == {usual[name]} else []
    return found


def hints(kind: type, prefix: str = "") -> dict[str, Any]:
    """The type of every leaf under its dotted name."""
    found: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(kind).items():
        found |= hints(hint, f"{prefix}{name}.") if dataclasses.is_dataclass(hint) else {prefix + name: hint}
    return found


def make_tokens(path: Path) -> TokenFolder:
    """Documents of learnable nonsense over the whole pocket vocabulary, in two shards: a run sees several epochs."""
    rng = np.random.default_rng(0)
    after = np.random.default_rng(1).integers(1, 4096, size=4096)

    def stream(count: int) -> np.ndarray:
        tokens = np.zeros(count, dtype=np.int64)
        fresh = np.minimum(4095, (1 + rng.pareto(0.7, size=count)).astype(np.int64))
        for i, surprise in enumerate(rng.random(count) < 0.3):
            tokens[i] = fresh[i] if surprise else after[tokens[i - 1]]
        starts = np.cumsum(rng.integers(2, 400, size=count))
        tokens[starts[starts < count]] = 0
        tokens[0] = 0
        return tokens

    path.mkdir()
    for name, count in (
        ("train_000000", 12_000),
        ("train_000001", 9_000),
        ("val_000000", 3_000),
        ("shadow_000000", 2_500),
    ):
        write_shard(path / f"{name}.bin", stream(count))
    shutil.copyfile(Path(speedrun.data.__file__).parent / "pocket_bpe.json", path / "tokenizer.json")
    return TokenFolder.describe(path, tokenizer="pocket", vocab_size=4096, bos=0)


def train(recipe: Recipe, options: Options, tokens: TokenFolder, folder: Path, comm: Comm) -> dict[str, Any]:
    """One run as `speedrun train` does it, warm-up included."""
    torch._dynamo.reset()
    here: RunFolder | NullRunFolder = NullRunFolder(folder)
    if comm.rank == 0:
        here = RunFolder.create(folder, {"recipe": recipe.name}, lambda line: None)
    machine = choose("cpu", "float32", threads=1)
    trainer = Trainer(Job(recipe, tokens, machine, options, here, Progress(recipe.schedule.total, quiet=True), comm))
    result = Loop(trainer).run()
    assert result.status == "ok", result.reason
    weights = sorted(digest(exact(trainer, p)) for p in trainer.model.parameters())  # all ranks: it may be a collective
    if comm.rank:
        return {}
    losses = [m["loss"] for m in read_metrics(folder) if m["kind"] in ("train", "val")]
    return {"losses": [x.hex() for x in losses], "final": result.val_loss, "weights": weights}


def digest(tensor: torch.Tensor) -> str:
    content = tensor.detach().cpu().contiguous()
    text = f"{content.dtype} {tuple(content.shape)} ".encode()
    return hashlib.sha256(text + content.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def run(rank: int, folder: str, args: argparse.Namespace) -> None:
    """Every case, on one of several ranks or alone."""
    place = Path(folder)
    if args.processes > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        limit = datetime.timedelta(seconds=SECONDS)
        meet = f"file://{place}/meeting-point"
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=args.processes, timeout=limit)
    comm = Comm.of(None) if args.processes > 1 else Comm()
    tokens = TokenFolder.read(place / "tokens")
    found = {}
    for name, (recipe, options) in cases(args.steps).items():
        if (args.only and name not in args.only) or (args.compiled and name not in COMPILED):
            continue
        if args.compiled:
            options = dataclasses.replace(options, compile=True)
        found[name] = train(recipe, options, tokens, place / name, comm)
        if rank == 0:
            print(name, flush=True)
            assert math.isfinite(found[name]["final"])
    if rank == 0:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    if args.processes > 1:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--compiled", action="store_true", help=f"{' and '.join(COMPILED)} with torch.compile")
    parser.add_argument("--only", nargs="*", default=[])
    args = parser.parse_args()
    for name in args.only:
        if name not in cases(args.steps):
            parser.error(f"there is no case {name!r}; there are {', '.join(cases(args.steps))}.")
    with tempfile.TemporaryDirectory() as folder:
        make_tokens(Path(folder) / "tokens")
        if args.processes > 1:
            multiprocessing.start_processes(run, (folder, args), args.processes, start_method="spawn")
        else:
            run(0, folder, args)


if __name__ == "__main__":
    main()
