"""Text from a trained model: temperature, top-k and a prompt.

speedrun sample runs/<folder> --prompt "It was a dark"
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from speedrun.data import Tokenizer
from speedrun.errors import UserError
from speedrun.model import GPT
from speedrun.training import checkpoint, runlog


def load_model(run: Path, device: torch.device) -> tuple[GPT, Tokenizer]:
    """The model of a run folder, from its newest good checkpoint."""
    recipe = runlog.read_run(run).recipe
    saved = checkpoint.newest_good(run / "checkpoints", notice=lambda line: print(line, file=sys.stderr))
    if saved is None:
        raise UserError(
            f"{run} has no checkpoint; train on with `speedrun train --resume {run}`, or without --save False."
        )
    if not (run / "tokenizer.json").exists():
        raise UserError(
            f"{run} has no tokenizer.json, which turns tokens into text; copy the one beside its tokens there."
        )
    model = GPT(recipe.model, recipe.context)
    try:
        model.load_state_dict(saved.weights)
    except RuntimeError as e:
        raise UserError(
            f"{saved.path} does not fit the model that {run / 'run.json'} describes; restore that file from a copy."
        ) from e
    stage = recipe.schedule.after(saved.step)
    model.as_trained(stage.windows, stage.window_history, stage.tied)
    return model.to(device), Tokenizer.load(run / "tokenizer.json")


@torch.no_grad()
def generate(
    model: GPT,
    prompt_T: list[int],
    *,
    tokens: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
    stop: int | None = None,
) -> Iterator[int]:
    """Yield up to `tokens` new ids, seeing at most as far back as the model did in training."""
    device = model.embed.device
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt_T)
    for _ in range(tokens):
        seen = torch.tensor([ids[-model.context :]], device=device)
        token = pick(model.logits(seen)[0].cpu(), temperature, top_k, generator)
        if token == stop:
            return
        yield token
        ids.append(token)


def pick(logits_V: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k is not None and top_k < len(logits_V):
        logits_V = logits_V.masked_fill(logits_V < logits_V.topk(top_k).values[-1], -torch.inf)
    return int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator))


def sample_text(
    model: GPT, tokenizer: Tokenizer, prompt: str, *, tokens: int, temperature: float, top_k: int | None, seed: int
) -> str:
    """The prompt and its continuation, up to the end of the document."""
    ids = [tokenizer.bos, *tokenizer.encode(prompt)]
    new = generate(model, ids, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed, stop=tokenizer.bos)
    return prompt + tokenizer.decode(list(new))
