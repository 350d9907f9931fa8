"""How much of the machine's matmul speed a training step gets, and how it compares with a peer.

    python benchmarks/throughput.py [--rounds 30] [--recipe adamw]

One process, interleaved, so that a noisy machine is noisy for everybody alike:
  - the pocket recipe's training step (forward, backward, optimizer), compiled;
  - the bare matmuls of that step, at the same shapes, forward and both gradients;
  - `transformers`' GPT-2 of the same layers, width, heads and vocabulary, with torch's fused AdamW, eager and compiled.
Ratios of medians are what counts; absolute times belong to the machine of the day.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from speedrun.model.gpt import GPT, GPTConfig, flops_per_token
from speedrun.recipes import get_recipe
from speedrun.training.config import Recipe
from speedrun.training.device import choose, compiled
from speedrun.training.optimizers import build_optimizer


def our_step(recipe: Recipe, ids: torch.Tensor) -> Callable[[], None]:
    model = GPT(recipe.model, recipe.context)
    optimizer = build_optimizer(model.named_parameters(), model.param_roles(), recipe.optim)
    call, why_not = compiled(model, True, ids.device)
    if why_not:
        print(f"not compiled: {why_not}")
    targets = ids.roll(-1, 1)

    def step() -> None:
        loss = call(ids, targets, None) / ids.numel()
        loss.backward()
        loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def bare_matmuls(config: GPTConfig, rows: int, length: int) -> Callable[[], None]:
    """Every matmul of a step and nothing else: y = x W^T, dx = g W, dW = g^T x, and those of attention."""
    tokens, d = rows * length, config.dim
    shapes = [(3 * d, d), (d, d), (config.mlp_dim, d), (d, config.mlp_dim)] * config.num_layers + [
        (config.vocab_size, d)
    ]
    linear = [(torch.randn(tokens, i), torch.randn(o, i), torch.randn(tokens, o)) for o, i in shapes]
    heads = rows * config.num_heads
    q, k, v = (torch.randn(heads, length, config.head_dim) for _ in range(3))
    scores = torch.randn(heads, length, length)

    def step() -> None:
        for x, w, g in linear:
            x @ w.t()
            g @ w
            g.t() @ x
        for _ in range(config.num_layers):
            q @ k.transpose(1, 2)
            scores @ v
            scores @ k
            scores.transpose(1, 2) @ q
            scores.transpose(1, 2) @ v
            v @ k.transpose(1, 2)

    return step


def peer_step(config: GPTConfig, ids: torch.Tensor, lr: float, compile_it: bool) -> Callable[[], None]:
    from transformers import GPT2Config, GPT2LMHeadModel

    peer = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=ids.shape[1],
            n_embd=config.dim,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            n_inner=config.mlp_dim,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
    )
    optimizer = torch.optim.AdamW(peer.parameters(), lr=lr, fused=True)
    call = torch.compile(peer, dynamic=False) if compile_it else peer

    def step() -> None:
        loss = call(input_ids=ids, labels=ids).loss
        loss.backward()
        loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--recipe", default="adamw")
    given = parser.parse_args()
    machine = choose("cpu")
    recipe = get_recipe(given.recipe, "pocket")
    rows, length = recipe.schedule.batch_size, recipe.schedule.seq_len
    ids = torch.randint(recipe.model.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    steps = {
        "speedrun": our_step(recipe, ids),
        "bare matmuls": bare_matmuls(recipe.model, rows, length),
        "transformers GPT-2": peer_step(recipe.model, ids, recipe.optim.lr, compile_it=False),
        "transformers GPT-2, compiled": peer_step(recipe.model, ids, recipe.optim.lr, compile_it=True),
    }
    for step in steps.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(given.rounds):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - began)
    median = {name: statistics.median(t) for name, t in times.items()}
    tokens = rows * length
    flops = flops_per_token(recipe.model, length) * tokens
    print(f"{recipe.name} on pocket: {rows} rows of {length}, {machine.threads} threads, {given.rounds} rounds")
    for name, seconds in median.items():
        print(f"  {name:30} {1000 * seconds:7.1f} ms  {tokens / seconds:9,.0f} tokens/s")
    # The bare matmuls compute attention without its causal half; count what each really multiplies.
    d, full = recipe.model, 12 * recipe.model.num_layers * recipe.model.dim * length * tokens
    executed = flops_per_token(d, 0) * tokens + full
    bare = executed / median["bare matmuls"]
    print(f"model FLOP/s: {flops / median['speedrun'] / 1e9:.0f} G; matmul FLOP/s at these shapes: {bare / 1e9:.0f} G")
    print(f"model FLOP/s / matmul FLOP/s: {flops / median['speedrun'] / bare:.2f}")
    for peer in ("transformers GPT-2", "transformers GPT-2, compiled"):
        print(f"tokens/s against {peer}: {median[peer] / median['speedrun']:.2f}x")


if __name__ == "__main__":
    main()
