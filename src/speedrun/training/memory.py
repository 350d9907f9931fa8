"""What a run needs in memory, before it runs, and how many rows fit into a forward pass.

Weights, gradients and optimizer state are counted. What a row keeps for its backward pass comes from the compiled graph
where that was measured (gpus.json), otherwise from a forward pass on fake tensors, which keeps what autograd would keep
without torch.compile: an upper bound.
"""

import functools
import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from speedrun.errors import UserError, plural
from speedrun.model import GPT, Documents, GPTConfig, piece_rows, row_cu_seqlens
from speedrun.optim import Snoo, TrainerOptimizer, param_refs, plan_buckets
from speedrun.training import gpus, telemetry
from speedrun.training.config import Options, Recipe, fields_of
from speedrun.training.device import Machine
from speedrun.training.optimizers import build_optimizer
from speedrun.training.schedule import Stage

LOGIT_COPIES = 3  # live at once in a forward pass without gradients: before, within and after the cap on the logits
GRADIENT_COPIES = 2  # of the logits, when the backward pass begins
USABLE = 0.86
"""Of a GPU's memory. The rest is for CUDA's context, NCCL's buffers and the gaps that the allocator leaves."""


@dataclass(frozen=True)
class Memory:
    """Bytes, of one process."""

    weights: int
    """With the tables of rotary positions."""
    gradients: int
    optimizer: int
    transfers: int
    """Where the gradients of several processes are put together."""
    warm_up: int
    """The copies of weights that the warm-up puts back, Snoo's among them."""
    process: int
    """What this program has already."""
    row: int
    """What a training row keeps until its backward pass, in the stage that needs most."""
    rows: int
    """Rows of a micro-batch there."""
    measured: bool | None
    """Whether `row` is of the compiled graph, or an estimate without torch.compile; None: neither is known."""
    validation: int
    """Estimate, or measured: what a validation batch takes."""
    usable: int | None
    """What there is; None: not known."""
    micro_batch_sizes: dict[tuple[object, ...], int]
    """Rows of a micro-batch by the shape of a stage, on a GPU."""

    @property
    def fixed(self) -> int:
        """What does not depend on the rows."""
        return self.weights + self.gradients + self.optimizer + self.transfers + self.warm_up + self.process

    @property
    def activations(self) -> int:
        return self.row * self.rows

    @property
    def total(self) -> int:
        return self.fixed + max(self.activations, self.validation)


def skeleton(recipe: Recipe) -> tuple[GPT, TrainerOptimizer, dict[Any, int]]:
    """Model and optimizer on the meta device, and the bytes of state of each parameter at its fullest."""
    with torch.device("meta"):
        model = GPT(recipe.model, recipe.context)
        if recipe.optim.weights != "float32":
            model.store_matrices(torch.bfloat16)
        optimizer = build_optimizer(model.named_parameters(), model.param_roles(), recipe.optim)
    return model, optimizer, optimizer.state_bytes()


def memory_of(recipe: Recipe, machine: Machine, options: Options, ranks: int = 1) -> Memory:
    model, optimizer, states = skeleton(recipe)
    weights = sum(p.nbytes for p in model.parameters())
    outer = sum(optimizer.outer_bytes().values()) if isinstance(optimizer, Snoo) else 0
    everywhere = 2 * outer  # every rank has all of Snoo's weights and momenta; the other state is dealt out
    plans = plan_buckets(param_refs(optimizer.members(), {}), ranks) if ranks > 1 else []
    gpu = machine.device.type == "cuda"
    there = machine.memory or telemetry.memory_bytes(machine.device)
    usable = int(USABLE * there) if gpu and there else there
    process = 0 if gpu else int(telemetry.snapshot().get("process_mib", 0) * 2**20)
    fixed = {
        "weights": weights + sum(b.nbytes for b in model.buffers()),
        "gradients": weights,
        "optimizer": everywhere - (everywhere - sum(states.values())) // ranks,
        "transfers": sum(plan.buffer_bytes() for plan in plans),
        "warm_up": weights + outer,
        "process": process,
    }
    visits = recipe.schedule.visits()
    largest = max(visits, key=lambda s: (s.tokens, s.windows or (), len(s.mtp_weights)))
    estimate: int | None = None
    need: list[tuple[int, int, bool | None]] = []  # row, rows, measured
    micro_batch_sizes: dict[tuple[object, ...], int] = {}
    for stage in visits if gpu else [largest]:
        row = bytes_at_once(recipe, stage, 1, machine.kernels) if gpu and options.compile else None
        measured = True if row is not None else False if machine.here else None
        if row is None:
            if estimate is None:
                estimate = row_bytes(recipe, machine, largest) if machine.here else 0
            row = estimate
        mine = -(-stage.batch_size // ranks)
        rows = min(options.micro_batch_size or mine, mine)
        if gpu and usable and not options.micro_batch_size:
            rows = fitting(mine, row, usable - sum(fixed.values()))
            micro_batch_sizes[stage.shape] = rows
        need.append((row, rows, measured))
    row, rows, measured = max(need, key=lambda n: n[0] * n[1])
    return Memory(
        **fixed,
        row=row,
        rows=rows,
        measured=measured,
        validation=validation_bytes(recipe, machine, options),
        usable=usable,
        micro_batch_sizes=micro_batch_sizes,
    )


# -------------------------------------------------------------------- the table of compiled graphs


def graph_of(recipe: Recipe, stage: Stage, kernels: str, *, training: bool = True) -> str:
    """A name of the compiled graph: equal where nothing differs that the memory of a row depends on."""

    usual = fields_of(GPTConfig())
    about = {
        "model": {k: v for k, v in fields_of(recipe.model).items() if v != usual[k]},  # a new field changes no name
        "attention": kernels,
        "weights": recipe.optim.weights,
        "packing": recipe.loader.packing,
        "seq_len": stage.seq_len if training else recipe.validation.seq_len,
        "mtp_tokens": len(stage.mtp_weights) if training else 0,
        "tied": stage.tied,
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


@functools.cache
def table() -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = json.loads(gpus.TABLE.read_text())
    except (OSError, ValueError) as e:
        raise UserError(f"{gpus.TABLE} is missing or damaged ({e}); install speedrun again.") from e
    return rows


def compiled_graph(recipe: Recipe, stage: Stage, kernels: str, *, training: bool = True) -> dict[str, Any] | None:
    """What is known of a compiled graph, of the GPU that needs most memory for it; None: not measured."""
    graph = graph_of(recipe, stage, kernels, training=training)
    found = [row for row in table() if row.get("graph") == graph]
    return max(found, key=lambda row: row["peak"], default=None)


def bytes_at_once(recipe: Recipe, stage: Stage, rows: int, kernels: str, *, training: bool = True) -> int | None:
    """What the compiled passes over this many rows hold at once, weights and their gradients aside; None: not measured.

    Of a graph that was measured with another number of rows, a share of that.
    """
    found = compiled_graph(recipe, stage, kernels, training=training)
    return None if found is None else -(-found["peak"] * rows // found["rows"])


# -------------------------------------------------------------------- rows


def fitting(rows: int, row: int, left: int) -> int:
    """Rows of a micro-batch, of about equal ones, in as few as fit into `left` bytes; 1 if nothing does."""
    return next((size for parts in range(1, rows + 1) if (size := -(-rows // parts)) * row <= left), 1)


def validation_bytes(recipe: Recipe, machine: Machine, options: Options) -> int:
    v, last = recipe.validation, recipe.schedule.after(recipe.schedule.total)
    tokens, vocab = v.batch_size * v.seq_len, recipe.model.vocab_size
    if machine.device.type == "cuda":
        found = bytes_at_once(recipe, last, v.batch_size, machine.kernels, training=False) if options.compile else None
        if found is not None:
            return found
    head = torch.empty(vocab, 0, device="cpu" if machine.device.type == "cpu" else "meta")
    return LOGIT_COPIES * 4 * piece_rows(tokens, head) * vocab


def row_bytes(recipe: Recipe, machine: Machine, stage: Stage) -> int:
    """Bytes that autograd keeps for one row, and the gradients of its logits; from a forward pass on fake tensors."""
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return x

    with FakeTensorMode(), torch.device(machine.device):
        model = GPT(recipe.model, recipe.context, machine.attention)
        if recipe.optim.weights != "float32":
            model.store_matrices(torch.bfloat16)
        ids = torch.zeros(1, stage.seq_len, dtype=torch.long)
        documents = Documents(torch.zeros_like(ids), row_cu_seqlens(1, stage.seq_len, machine.device))
        weights = torch.zeros(len(stage.mtp_weights)) if len(stage.mtp_weights) > 1 else None
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), machine.arithmetic():
            packed = documents if recipe.loader.packing == "documents" else None
            loss = model(ids, ids, packed, windows=stage.windows, mtp_weights_M=weights, tied=stage.tied)
        own = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers()]}
        saved = sum(size for storage, size in kept.items() if storage not in own)
        del loss
    return saved + GRADIENT_COPIES * 4 * stage.seq_len * recipe.model.vocab_size


def problems_of(memory: Memory, recipe: Recipe) -> list[str]:
    """What does not fit, a sentence each, with the way out."""
    there = memory.usable
    if there is None or memory.total <= there:
        return []
    left = there - memory.fixed
    if left <= 0:
        return [
            f"Weights, gradients and optimizer state alone take {gib(memory.fixed)}, but there are {gib(there)} of "
            "memory; choose a smaller model (--model.dim, --model.num-layers) or another machine."
        ]
    found = []
    if memory.activations > left:
        fits = left // memory.row
        way = f"pass --micro-batch-size {fits}" if fits else "shorten the rows (--schedule.seq-len)"
        found.append(
            f"A micro-batch of {plural(memory.rows, 'row')} takes about {gib(memory.activations)} beside "
            f"the {gib(memory.fixed)} of weights, gradients and optimizer state, but there are {gib(there)} of memory; "
            f"{way}, or choose another machine."
        )
    v = recipe.validation
    if memory.validation > left:
        fits = left * v.batch_size * v.seq_len // memory.validation
        way = "choose another machine"
        if fits >= v.seq_len:
            way = f"pass --validation.batch-size {fits // v.seq_len}"
        elif fits:
            way = f"pass --validation.batch-size 1 --validation.seq-len {2 ** int(math.log2(fits))} or less, "
            way += "with which the loss is measured on less context"
        found.append(
            f"A validation batch of {v.batch_size} x {v.seq_len} tokens takes about {gib(memory.validation)}, "
            f"but {gib(left)} of memory are left for it; {way}."
        )
    return found


def check_rows(memory: Memory, recipe: Recipe, there: int) -> None:
    """Refuse a run whose rows cannot fit one by one into the whole of a GPU's memory, before anything is compiled."""
    if memory.measured and memory.fixed + memory.row > there:
        raise UserError(problems_of(memory, recipe)[0])


def checkpoint_bytes(recipe: Recipe, parameters: list[nn.Parameter], states: dict[Any, int]) -> int:
    """A checkpoint holds exact weights as float32, in place of their mantissas."""
    exact = recipe.optim.weights == "exact-bf16"
    total = 0
    for p in parameters:
        joined = exact and p.dtype == torch.bfloat16
        total += states[p] - (2 * p.numel() if joined else 0) + (4 * p.numel() if joined else p.nbytes)
    return total


def gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:,.1f} MiB"
