"""Warm-up: visit every shape that a run will have, so that compiling is outside the clock."""

import contextlib
import copy
import dataclasses

import numpy as np
import torch

from speedrun.data import Batch
from speedrun.errors import UserError
from speedrun.training.clock import synchronize
from speedrun.training.job import Job
from speedrun.training.step import NonFiniteLoss, Trainer, out_of_memory
from speedrun.training.watchdog import lost_connection


def made_up(job: Job, batch_size: int, seq_len: int, generator: torch.Generator) -> Batch:
    """A batch of random tokens, two documents in a row."""
    ids = torch.randint(job.tokens.vocab_size, (batch_size, seq_len), generator=generator)
    packed = job.recipe.loader.packing == "documents"
    max_doc_len = job.recipe.loader.max_doc_len if torch.is_grad_enabled() else job.recipe.validation_max_doc_len
    return Batch(ids, ids.clone(), (np.array([0, seq_len // 2]),) * batch_size if packed else None, {}, max_doc_len)


def warm_up(trainer: Trainer) -> None:
    """Train and validate on random tokens, then put weights, optimizer and random state back as they were."""
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    before = copy.deepcopy(trainer.optimizer.state_dict())
    generator = torch.Generator().manual_seed(0)
    try:
        visit_until_it_fits(trainer, generator)
    except UserError:
        raise
    except Exception as e:  # whatever a compiler may raise
        check_compiler(trainer, e)
        trainer.job.say(f"torch.compile failed here ({type(e).__name__}); going on without it, about 1.2x slower")
        trainer.loss_of = trainer.model
        visit_until_it_fits(trainer, generator)
    with torch.no_grad():
        for name, p in trainer.model.named_parameters():
            p.copy_(weights[name])
            p.grad = None
    trainer.optimizer.reset()
    trainer.optimizer.load_state_dict(before)
    synchronize(trainer.device)
    if trainer.loss_of is not trainer.model:
        torch.compiler.set_stance("fail_on_recompile")


def visit_until_it_fits(trainer: Trainer, generator: torch.Generator) -> None:
    """Again from the first shape if memory ran out on the way: those before had larger micro-batches."""
    while True:
        micro_batch_size = trainer.micro_batch_size
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
            visit(trainer, generator)
        if trainer.micro_batch_size == micro_batch_size:
            return


def visit(trainer: Trainer, generator: torch.Generator) -> None:
    """Two steps of each stage of the schedule, and one batch of each kind of validation."""
    job, v, schedule = trainer.job, trainer.recipe.validation, trainer.recipe.schedule
    what = "warming up" if trainer.loss_of is trainer.model else "compiling and warming up"
    visits = schedule.visits()
    for k, stage in enumerate(visits):
        for _ in range(2):
            job.doing(f"{what} the training step, stage {k + 1} of {len(visits)}", compiling=True)
            with contextlib.suppress(NonFiniteLoss):  # an absurd learning rate fails in the run, not here
                gentle = dataclasses.replace(stage, lr=1e-3)
                trainer.step(gentle, made_up(job, stage.batch_size, stage.seq_len, generator))
    for stage in {s.shape: s for s in map(schedule.after, v.moments(schedule.total))}.values():
        job.doing(f"{what} the validation", compiling=True)
        trainer.model.apply_yarn(stage.window_history)
        try:
            with torch.no_grad():
                trainer.micro_loss(made_up(job, v.batch_size, v.seq_len, generator), stage).item()
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as e:
            if not out_of_memory(e):
                raise
            raise UserError(
                f"Out of memory with a validation batch of {v.batch_size} x {v.seq_len} tokens; pass a smaller "
                "--validation.batch-size, or choose another device."
            ) from e


def check_compiler(trainer: Trainer, error: Exception) -> None:
    """Raise unless training can go on without torch.compile after this error."""
    if trainer.loss_of is trainer.model or lost_connection(error):
        raise error
    if trainer.device.type == "cpu":
        return
    if isinstance(error, torch._dynamo.exc.TorchDynamoException):
        raise compile_failure(error, trainer.device) from error
    error.add_note("--compile False shows whether it happens without torch.compile, too.")
    raise error  # perhaps a bug of this program: it keeps its traceback


def compile_failure(error: Exception, device: torch.device) -> UserError:
    said = next((line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()), "no message")
    return UserError(
        f"torch.compile failed on {device} ({type(error).__name__}: {said}). Without it a GPU needs far more memory "
        "and time, so that is not tried unasked: pass --compile False to do so, or try another version of torch."
    )
