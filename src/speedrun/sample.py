"""Text from a trained model: temperature, top-k, a prompt, and a key-value cache.

speedrun sample runs/<folder> --prompt "It was a dark"
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from speedrun.data.tokenizer import Tokenizer
from speedrun.errors import UserError
from speedrun.model.gpt import GPT, Cache
from speedrun.train import checkpoint
from speedrun.train.config import recipe_from_dict
from speedrun.train.runlog import RunFolder


def load_model(run: Path, device: torch.device) -> tuple[GPT, Tokenizer, checkpoint.Checkpoint]:
    """The model of a run folder, from its newest good checkpoint."""
    folder = RunFolder.open(run)
    saved = checkpoint.newest_good(folder.checkpoints, notice=lambda line: print(line, file=sys.stderr))
    if saved is None:
        raise UserError(f"{run} has no checkpoint yet; train longer, or with --checkpoint-every.")
    recipe = recipe_from_dict(folder.description["recipe"])
    model = GPT(recipe.model, recipe.context)
    weights = {n.removeprefix("model."): t for n, t in saved.tensors.items() if n.startswith("model.")}
    model.load_state_dict(weights)
    return model.to(device), Tokenizer.load(run / "tokenizer.json"), saved


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
    if temperature < 0:
        raise UserError(f"The temperature is {temperature}; it must not be negative (0 picks the likeliest token).")
    if top_k is not None and top_k < 1:
        raise UserError(f"top-k is {top_k}; it must be at least 1.")
    if tokens < 0:
        raise UserError(f"{tokens} tokens cannot be generated; ask for 0 or more.")
    device = model.embed.device
    generator = torch.Generator().manual_seed(seed)
    window = model.context
    model.grow(len(prompt_T) + tokens)
    cache = Cache(window)
    new = torch.tensor([prompt_T], device=device)
    for _ in range(tokens):
        token = pick(model.logits(new, cache)[0].cpu(), temperature, top_k, generator)
        if token == stop:
            return
        yield token
        new = torch.tensor([[token]], device=device)


def pick(logits_V: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k is not None and top_k < len(logits_V):
        logits_V = logits_V.masked_fill(logits_V < logits_V.topk(top_k).values[-1], -torch.inf)
    return int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator))


def sample_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
) -> str:
    """The prompt and its continuation, up to the end of the document."""
    ids = [tokenizer.bos, *tokenizer.encode(prompt)]
    new = generate(model, ids, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed, stop=tokenizer.bos)
    return prompt + tokenizer.decode(list(new))
