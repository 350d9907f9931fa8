"""`speedrun sample`: write text with a trained model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from speedrun.checks import Count, NotNegative, Positive
from speedrun.cli.common import parse
from speedrun.sample import load_model, sample_text
from speedrun.training import choose


@dataclass(frozen=True)
class Sample:
    """Write text with a trained model."""

    run: Annotated[Path, tyro.conf.Positional]
    """A run folder."""
    prompt: str = ""
    """How the text begins."""
    tokens: Count = 200
    """Longest continuation, in tokens; it ends earlier where the model ends the document."""
    temperature: NotNegative = 0.8
    """Randomness of the choice; 0 always takes the likeliest token."""
    top_k: Annotated[Positive | None, tyro.conf.arg(metavar="INT|None")] = 50
    """Choose among the k likeliest tokens; None: all."""
    seed: Count = 0
    """Another seed, another text."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    threads: int | None = None
    """CPU threads; default: all usable cores."""


def main(args: Sequence[str]) -> int:
    given: Sample = parse(Sample, "sample", args)
    machine = choose(given.device, "float32", given.threads, "sdpa")
    model, tokenizer = load_model(given.run, machine.device)
    text = sample_text(
        model,
        tokenizer,
        given.prompt,
        tokens=given.tokens,
        temperature=given.temperature,
        top_k=given.top_k,
        seed=given.seed,
    )
    print(text)
    return 0
