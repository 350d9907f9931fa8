"""The whole training in one file: data, model, optimizers, schedule, loop, validation. Read it first.

    speedrun data prepare                          # once: fetches the corpus of the pocket track
    python examples/minimal.py                     # some minutes on two CPU cores
    python examples/minimal.py --recipe adamw --seed 1

On a CPU, `speedrun train --compile False` has the same losses, bit for bit: tests/test_examples.py holds it to that.
Beside the training it has torch.compile, a clock, run folders, checkpoints, several processes, and halves a batch that
does not fit into memory. Nothing of that is here.

Where to read on, in src/speedrun/:

    recipes/normuon.py       the numbers of the default recipe
    data/loader.py           how a stream of tokens becomes rows
    model/gpt.py             the network
    training/optimizers.py   which optimizer trains which parameter; optim/muon.py and optim/adam.py have the updates
    training/schedule.py     learning rate, batch size, windows and momentum, each as a function of the step
    training/step.py         one step, with everything that several processes and small memories need
    training/loop.py         this loop, with everything that a timed run needs
"""

import argparse
import sys
from dataclasses import replace

import torch
from torch import Tensor, nn

from speedrun.data.loader import Batch, Loader, validation_batches
from speedrun.data.shards import TokenFolder
from speedrun.errors import UserError
from speedrun.model.gpt import GPT, Documents
from speedrun.recipes import DEFAULT, LINEAGE, get_recipe
from speedrun.tracks import get_track
from speedrun.training.config import Recipe
from speedrun.training.device import Machine, choose
from speedrun.training.optimizers import build_optimizer
from speedrun.training.schedule import Stage

PRINT_EVERY = 50  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GPT on the pocket track.")
    parser.add_argument("--recipe", default=DEFAULT, help=f"one of: {', '.join(LINEAGE)} (default: {DEFAULT})")
    parser.add_argument("--seed", type=int, default=0, help="draws the initial weights and the order of the rows")
    parser.add_argument("--steps", type=int, help="steps of a shorter run, with the schedule scaled along")
    args = parser.parse_args()

    # A track is what must be reached: tokens and a target loss. A recipe is how: model, optimizers, schedule.
    track = get_track("pocket")
    recipe = get_recipe(args.recipe, track.name)
    if args.steps is not None:
        recipe = replace(recipe, schedule=recipe.schedule.scaled(args.steps))
    tokens = track.locate()
    # A GPU if there is one, the faster arithmetic on a CPU; this attention works well without torch.compile.
    machine = choose(attention="sdpa", model=recipe.model)

    _, _, val_losses = train(recipe, tokens, machine, args.seed)
    final = val_losses[recipe.schedule.total]
    assert track.target is not None  # only tracks made of your own text may have none
    reached = "reached" if final <= track.target else "not reached"
    print(f"final validation loss {final:.4f}, target {track.target}: {reached}")


def train(
    recipe: Recipe, tokens: TokenFolder, machine: Machine, seed: int
) -> tuple[GPT, list[float], dict[int, float]]:
    """Returns the model, the training loss of every step, and validation losses by the number of steps done."""
    # Data. An endless source of batches; their order follows from the seed.
    loader = Loader(tokens.shards("train"), recipe.loader, bos=tokens.bos, vocab_size=tokens.vocab_size, seed=seed)

    # Model. The weights are drawn on the CPU, so that a seed means the same on every device.
    torch.manual_seed(seed)
    model = GPT(recipe.model, recipe.context, machine.attention).to(machine.device)
    if recipe.optim.weights != "float32":  # half the memory; the optimizer may keep the bits that bfloat16 lacks
        model.store_matrices(torch.bfloat16)

    # Optimizers. Muon or NorMuon for the matrices inside the blocks, Adam for all else; they step as one.
    optimizer = build_optimizer(model.named_parameters(), model.param_roles(), recipe.optim, dtype=machine.dtype)

    # Schedule. All that changes during a run is in schedule.at(step). The number of steps is fixed beforehand: a run
    # that stops as soon as its loss looks good has picked a lucky moment.
    schedule = recipe.schedule
    validations = recipe.validation.moments(schedule.total)

    train_losses: list[float] = []
    val_losses: dict[int, float] = {}
    for step in range(schedule.total + 1):
        if step in validations:
            val_losses[step] = validate(model, recipe, tokens, machine, done=step)
            print(f"step {step}/{schedule.total}  validation loss {val_losses[step]:.4f}", flush=True)
        if step == schedule.total:
            break

        stage = schedule.at(step)
        batch = loader.next(stage.batch_size, stage.seq_len)

        # Forward and backward. The model gives the sum over the tokens; dividing by their number makes it the mean.
        loss = loss_sum(model, batch, stage, machine) / batch.counted
        loss.backward()
        if recipe.optim.clip:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.optim.clip)

        # The schedule gives factors; every group of parameters has a learning rate of its own.
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * stage.lr
            if stage.momentum is not None and "momentum" in group:  # Muon's; Adam's groups have betas
                group["momentum"] = stage.momentum
        optimizer.step()
        optimizer.zero_grad()

        # Some recipes train one table as embedding and head, and part them on the way. The head also gets what the
        # optimizer knows about the table: its averages of earlier gradients.
        if stage.untie and model.head is not None:
            model.untie_head()
            optimizer.copy_state(model.embed, model.head)

        train_losses.append(loss.item())
        if step % PRINT_EVERY == 0:
            print(f"step {step}/{schedule.total}  train loss {train_losses[step]:.4f}", flush=True)
    return model, train_losses, val_losses


@torch.no_grad()
def validate(model: GPT, recipe: Recipe, tokens: TokenFolder, machine: Machine, done: int) -> float:
    """Mean loss over every token of the validation split, after `done` steps."""
    # Whatever training predicts, what counts is the next token.
    stage = replace(recipe.schedule.after(done), mtp_weights=(1.0,))
    batches = validation_batches(
        tokens.shards("val"),
        batch_size=recipe.validation.batch_size,
        seq_len=recipe.validation.seq_len,
        bos=tokens.bos,
        vocab_size=tokens.vocab_size,
        packing=recipe.loader.packing,
        max_doc_len=recipe.loader.max_doc_len,
    )
    total, count = 0.0, 0
    for batch in batches:
        total += loss_sum(model, batch, stage, machine).item()
        count += batch.counted
    return total / count


def loss_sum(model: GPT, batch: Batch, stage: Stage, machine: Machine) -> Tensor:
    """The forward pass: the sum of the losses of all tokens of a batch."""
    device = machine.device
    doc_ids = batch.doc_ids  # the number of each token's document in its row: attention stays inside a document
    # Attention looks only so many tokens back, further and further during a run; YaRN fits the positions to it.
    # `for_rows` puts windows in the form that `speedrun train` computes with, so that the last bits agree.
    windows = None if stage.windows is None else stage.windows.for_rows(batch.inputs.shape[1], device)
    model.apply_yarn(stage.window_history)
    with machine.arithmetic():  # bfloat16 where the chip is fast at it
        loss: Tensor = model(
            batch.inputs.to(device),
            batch.targets.to(device),
            None if doc_ids is None else Documents(doc_ids.to(device)),
            windows=windows,
            mtp_weights_M=torch.tensor(stage.mtp_weights, device=device),  # of the next token, the second next...
            tied=stage.tied,
        )
    return loss


if __name__ == "__main__":
    try:
        main()
    except UserError as e:  # a mistake of the person who started this: one sentence, no traceback
        print(f"minimal.py: {e}", file=sys.stderr)
        sys.exit(2)
