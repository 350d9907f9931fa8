"""One training step: micro-batches, gradients, clipping, learning rates, update.

Ranks take whole rows of a batch. The gradient does not depend on how the rows are divided into micro-batches; when
memory runs out in a single process, they are halved.
"""

import contextlib
import functools
import itertools
import math

import torch
from torch import Tensor
from torch.profiler import record_function

from speedrun.data import Batch
from speedrun.errors import UserError
from speedrun.model import GPT, Documents, takes_cu_seqlens
from speedrun.optim import Interleaved, NonFiniteGradient
from speedrun.training import scale
from speedrun.training.device import compiled
from speedrun.training.job import Job
from speedrun.training.memory import check_rows, memory_of
from speedrun.training.optimizers import build_optimizer
from speedrun.training.schedule import Stage


class NonFiniteLoss(Exception):
    """The loss became NaN or infinite; the weights are those before the step."""


class Trainer:
    """A model and its optimizer, and what one step does to them."""

    def __init__(self, job: Job) -> None:
        recipe, machine, options = job.recipe, job.machine, job.options
        if job.tokens.vocab_size > recipe.model.vocab_size:
            raise UserError(
                f"The data has {job.tokens.vocab_size} different tokens, the model only {recipe.model.vocab_size}; "
                f"pass --model.vocab-size {job.tokens.vocab_size}."
            )
        self.job, self.recipe, self.comm, self.device = job, recipe, job.comm, machine.device
        self.alone = job.comm.size == 1
        torch.manual_seed(options.seed)
        try:
            self.model = GPT(recipe.model, recipe.context, machine.attention).to(self.device)
        except (torch.OutOfMemoryError, RuntimeError) as e:
            if not out_of_memory(e):
                raise
            raise UserError(
                f"The weights do not fit into the memory of {self.device}; choose a smaller model (--model.dim, "
                "--model.num-layers) or another machine."
            ) from e
        if recipe.optim.weights != "float32":
            self.model.store_matrices(torch.bfloat16)
        divisor = scale.reduced_divisor(recipe)
        shard = functools.partial(
            Interleaved, self.model, order=options.order, average=divisor, process_group=self.comm
        )
        self.optimizer = build_optimizer(
            self.model.named_parameters(),
            self.model.param_roles(),
            recipe.optim,
            None if self.alone else shard,
            machine.dtype,
        )
        self.loss_of, why_not = compiled(self.model, options.compile, self.device, recipe.compiler)
        if why_not:
            job.say(f"torch.compile is not used: {why_not}")
        self.micro_batch_size = options.micro_batch_size
        self.fitting: dict[tuple[object, ...], int] = {}  # rows of a micro-batch by the shape of a stage, on a GPU
        if self.device.type == "cuda":
            memory = memory_of(recipe, machine, options, self.comm.size)
            there = machine.memory or torch.cuda.get_device_properties(self.device).total_memory
            check_rows(memory, recipe, there)
            self.fitting = memory.micro_batch_sizes
        self.asked_to_stop: int | None = None  # the signal that this rank received
        self.stop_signal: int | None = None  # a signal that all ranks know of

    def step(self, stage: Stage, batch: Batch) -> float:
        """Train on one batch. Returns the mean loss of its tokens, over all ranks."""
        self.model.apply_yarn(stage.window_history)
        with record_function("compute: backward model"):
            loss = self.gradients(batch, stage)
        loss = self.agreed(loss)
        if not math.isfinite(loss):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteLoss(f"the loss of step {stage.step} is {loss}")
        if self.alone:  # several ranks divide when they reduce
            self.divide_gradients(scale.reduced_divisor(self.recipe))
        if self.recipe.optim.clip:
            norm = self.recipe.optim.clip * scale.over_mean(self.recipe, batch.counted)
            self.optimizer.clip_grad_norm_(norm, self.model.parameters())  # the norm's last bit depends on the order
        self.set_rates(stage)
        try:
            self.job.doing(f"training the weights in step {stage.step}")
            with record_function("compute: update all") if self.alone else contextlib.nullcontext():
                self.optimizer.step()
        except NonFiniteGradient as e:
            said = str(e).rstrip(".")
            raise NonFiniteLoss(f"the loss of step {stage.step} is finite, but a gradient is not: {said}") from e
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        if stage.untie:
            self.model.untie_head()
            assert self.model.head is not None
            self.optimizer.copy_state(self.model.embed, self.model.head)
        return loss

    def gradients(self, batch: Batch, stage: Stage) -> float:
        """Accumulate the gradient of this rank's share of the batch, in the recipe's scale.

        Returns this rank's share of the mean loss. Leaves no gradient on failure.
        """
        mine = share(len(batch.inputs), self.comm.size)[self.comm.rank]
        counted = batch.counted
        divisor = scale.backward_divisor(self.recipe, counted)
        batch = batch.rows(mine.start, mine.stop)
        rows = len(batch.inputs)
        while True:
            size = max(1, min(self.micro_batch_size or self.fitting.get(stage.shape, rows), rows))
            try:
                return self.accumulate(batch, stage, size, divisor) * (divisor / counted)
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as e:
                self.check_out_of_memory(e, batch, size)
            # Outside the handler: the failed graph is freed before the next attempt.
            self.micro_batch_size = size // 2
            self.release_memory()
            self.job.say(
                f"out of memory: going on with micro-batches of {self.micro_batch_size} rows (same result, more passes)"
            )
            torch.compiler.set_stance("default")

    def accumulate(self, batch: Batch, stage: Stage, size: int, divisor: int) -> float:
        """Backward passes over micro-batches of at most `size` rows. Returns the sum of their losses / divisor.

        Ranks exchange gradients during the last pass only.
        """
        total = torch.zeros((), device=self.device)
        rows = len(batch.inputs)
        parts = share(rows, math.ceil(rows / size)) if rows else []
        for part in parts:
            with self.optimizer.no_sync() if part is not parts[-1] else contextlib.nullcontext():
                loss = self.micro_loss(batch.rows(part.start, part.stop), stage) / divisor
                loss.backward()
            total += loss.detach()
        return total.item()

    def micro_loss(self, batch: Batch, stage: Stage) -> Tensor:
        """Summed loss of some rows. With gradients it weighs the predicted tokens as the stage says."""
        windows = stage.windows and stage.windows.for_rows(batch.inputs.shape[1], self.device)
        mtp_weights = None
        if len(stage.mtp_weights) > 1 and torch.is_grad_enabled():
            mtp_weights = torch.tensor(stage.mtp_weights, device=self.device)
        with self.job.machine.arithmetic():
            return self.loss_of(
                batch.inputs.to(self.device),
                batch.targets.to(self.device),
                self.documents(batch),
                windows=windows,
                mtp_weights_M=mtp_weights,
                tied=stage.tied,
            )

    def documents(self, batch: Batch) -> Documents | None:
        """Where documents lie in the rows, in the form that this machine's attention asks for."""
        doc_ids = batch.doc_ids
        if doc_ids is None:
            return None
        cu_seqlens = batch.cu_seqlens if takes_cu_seqlens(self.job.machine.attention) else None
        if cu_seqlens is not None:
            cu_seqlens = cu_seqlens.to(self.device)
            torch._dynamo.mark_dynamic(cu_seqlens, 0)  # one graph, should documents once be too many
        return Documents(doc_ids.to(self.device), cu_seqlens, batch.max_doc_len)

    def agreed(self, loss: float) -> float:
        """The sum over the ranks, which also learn here that one of them was asked to stop.

        A signal that arrives later in the step waits for the next step: if one rank acted on it alone, the others
        would hang.
        """
        number = self.asked_to_stop or 0
        try:
            total, numbers, asked = self.optimizer.agree([loss, number, float(number > 0)])
        except NonFiniteGradient as e:  # of the last step, on GPUs
            raise NonFiniteLoss(str(e)) from e
        if asked:
            self.stop_signal = int(numbers / asked)
        return total

    def divide_gradients(self, divisor: int) -> None:
        found = [p.grad for p in self.model.parameters() if p.grad is not None]
        if divisor != 1 and found:
            torch._foreach_div_(found, divisor)

    def set_rates(self, stage: Stage) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * stage.lr
            if stage.momentum is not None and "momentum" in group:
                group["momentum"] = stage.momentum

    def check_out_of_memory(self, error: BaseException, batch: Batch, size: int) -> None:
        """Raise unless the step can be tried again with smaller micro-batches than of `size` rows."""
        if not out_of_memory(error):
            raise error
        if self.comm.size > 1:
            raise UserError(
                f"Out of memory on rank {self.comm.rank} with {size} rows at a time; the other ranks are "
                f"waiting, so it cannot try again. Start with --micro-batch-size {max(1, size // 2)}."
            ) from error
        self.optimizer.zero_grad(set_to_none=True)
        if size == 1:
            raise UserError(
                f"Out of memory with a single row of {batch.inputs.shape[1]} tokens; "
                "choose a smaller model, shorter rows or another device."
            ) from error

    def release_memory(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        elif self.device.type == "mps":
            torch.mps.empty_cache()


def share(rows: int, parts: int) -> list[slice]:
    """Divide whole rows into `parts` shares, the first ones one row larger if necessary (8 into 3: 3, 3, 2)."""
    base, extra = divmod(rows, parts)
    edges = [i * base + min(i, extra) for i in range(parts + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


def out_of_memory(error: BaseException) -> bool:
    """CUDA raises its own class; the CPU's allocator and cuBLAS a RuntimeError with one of these texts."""
    texts = ("can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(text in str(error) for text in texts)
