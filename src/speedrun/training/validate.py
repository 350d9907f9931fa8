"""Validation: the mean loss over a split, forward only."""

import hashlib
from collections.abc import Iterator

import torch

from speedrun.data import loader
from speedrun.model import GPT
from speedrun.training.job import Job
from speedrun.training.step import Trainer


def validation_batches(job: Job, split: str) -> Iterator[loader.Batch]:
    v, tokens = job.recipe.validation, job.tokens
    return loader.validation_batches(
        tokens.shards(split),
        batch_size=v.batch_size,
        seq_len=v.seq_len,
        bos=tokens.bos,
        vocab_size=tokens.vocab_size,
        packing=job.recipe.loader.packing,
        max_doc_len=job.recipe.validation_max_doc_len,
        tokens=job.options.val_tokens,
    )


@torch.no_grad()
def validate(trainer: Trainer, split: str, done: int) -> float:
    """Mean loss over the split's tokens after `done` steps, from float32 logits. Ranks take batches in turn."""
    comm, stage = trainer.comm, trainer.recipe.schedule.after(done)
    trainer.model.apply_yarn(stage.window_history)
    total, count = 0.0, 0
    for k, batch in enumerate(validation_batches(trainer.job, split)):
        if k % comm.size == comm.rank:
            total += float(trainer.micro_loss(batch, stage).double())
            count += batch.counted
    if comm.size > 1:
        both = torch.tensor([total, count], dtype=torch.float64, device=trainer.device)
        comm.all_reduce(both).wait()
        total, count = both.tolist()
    return total / count


def fingerprint(model: GPT) -> str:
    """sha256 of all weights, bit by bit."""
    digest = hashlib.sha256()
    for name, p in model.named_parameters():
        digest.update(name.encode())
        digest.update(p.detach().reshape(-1).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()
