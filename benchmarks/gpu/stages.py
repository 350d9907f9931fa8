"""What is lowered: the loss alone, and the stages of every recipe with a native size, as one GPU of eight has them."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu.lower import Lowered, lower
from speedrun.model import flash
from speedrun.model.attention import Backend
from speedrun.model.gpt import GPT, Documents
from speedrun.model.head import softcap, surprise, targets_ahead
from speedrun.recipes import PRESETS, get_recipe
from speedrun.training.config import Recipe
from speedrun.training.memory import graph_of
from speedrun.training.schedule import Stage

NATIVE = (
    ("orthogonal-nesterov", "short"),
    ("muon", "short"),
    ("normuon", "short"),
    ("normuon-24gb", "short"),
    ("interleaved", "short"),
    ("medium-before", "medium"),
    ("medium", "medium"),
)
GPUS = 8  # of a record's machine
DOCUMENTS = 40  # in a row, about as many as FineWeb has in 16,384 tokens; the number is not compiled in


@dataclass(frozen=True)
class Case:
    recipe: str
    track: str
    step: int
    """The first one of the stage; for a validation, the number of steps before it."""
    training: bool = True

    @property
    def name(self) -> str:
        return f"{self.recipe} from step {self.step}" if self.training else f"{self.recipe} validation"

    @property
    def whole(self) -> Recipe:
        return get_recipe(self.recipe, self.track)

    @property
    def stage(self) -> Stage:
        schedule = self.whole.schedule
        return schedule.at(self.step) if self.training else schedule.after(self.step)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and length of what one of eight GPUs has at once; a small GPU has a row."""
        v = self.whole.validation
        rows = 1 if self.recipe in PRESETS else -(-self.stage.batch_size // GPUS)
        return (rows, self.stage.seq_len) if self.training else (v.batch_size, v.seq_len)

    def key(self, kernels: str) -> dict[str, Any]:
        """By which the package finds the numbers."""
        return {
            "graph": graph_of(self.whole, self.stage, kernels, training=self.training),
            "rows": self.shape[0],
        }


def cases() -> list[Case]:
    """One stage of each graph. Stages that differ in their windows alone have the same one, with another constant."""
    found: dict[tuple[object, ...], Case] = {}
    for name, track in NATIVE:
        schedule = get_recipe(name, track).schedule
        for stage in schedule.visits():
            graph = name, stage.batch_size, stage.seq_len, len(stage.mtp_weights), stage.tied
            found.setdefault(graph, Case(name, track, stage.step))
        found[name,] = Case(name, track, schedule.total, training=False)
    return list(found.values())


def lower_stage(case: Case, attention: Backend) -> list[Lowered]:
    """Forward and backward pass of the rows that one of eight GPUs has in this stage, or a validation's forward."""
    recipe, stage, (rows, length) = case.whole, case.stage, case.shape
    packed = recipe.loader.packing == "documents"
    max_seqlen = recipe.loader.max_doc_len if case.training else recipe.validation_max_doc_len
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda:0"):
            model = GPT(recipe.model, length, attention)
            if recipe.optim.weights != "float32":
                model.store_matrices(torch.bfloat16)
            ids = torch.zeros(rows, length, dtype=torch.long)
            cu_seqlens = torch.zeros(DOCUMENTS * rows + 1, dtype=torch.int32)
            documents = Documents(torch.zeros_like(ids), cu_seqlens, max_seqlen) if packed else None
            predicted = len(stage.mtp_weights) if case.training else 1
            mtp_weights = torch.zeros(predicted) if predicted > 1 else None
        torch._dynamo.mark_dynamic(cu_seqlens, 0)
        with torch.set_grad_enabled(case.training):
            return lower(model, ids, ids, documents, windows=stage.windows, mtp_weights_M=mtp_weights, tied=stage.tied)


def lower_loss(tokens: int) -> list[Lowered]:
    """From the bfloat16 logits of 16,384 positions to the loss of the next `tokens` tokens, and to their gradient."""
    config = replace(get_recipe("interleaved", "short").model.head, fp8=False)

    def loss(z_NV: Tensor, targets_BT: Tensor, weights_M: Tensor) -> Tensor:
        return surprise(softcap(z_NV.float(), config), targets_ahead(targets_BT, tokens), weights_M, config)

    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda:0"):
        z = torch.empty(16_384, 50_304, dtype=torch.bfloat16, requires_grad=True)
        return lower(loss, z, torch.zeros(1, 16_384, dtype=torch.long), torch.zeros(tokens))


# -------------------------------------------------------------------------------------------- Flash Attention 3
# The hub's kernel is a pair of operators that nobody looks into. These have their shapes and nothing else.


def unavailable(*_: Any) -> Any:
    raise NotImplementedError("there is no GPU")


@torch.library.custom_op("bench::fa3_forward", mutates_args=(), device_types="cuda")
def fa3_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, left: int
) -> tuple[Tensor, Tensor]:
    return unavailable()


@fa3_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, left: int
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.custom_op("bench::fa3_backward", mutates_args=(), device_types="cuda")
def fa3_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    scale: float, left: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return unavailable()


@fa3_backward.register_fake
def _(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    scale: float, left: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)


def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *fa3_backward(g, *ctx.saved_tensors, *ctx.numbers), None, None, None, None


fa3_forward.register_autograd(backward, setup_context=remember)


def stand_in(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, softmax_scale: float, causal: bool, window_size: tuple[int, int],
    deterministic: bool,
) -> Tensor:  # fmt: skip
    return fa3_forward(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, window_size[0])[0]


def install_stand_in() -> None:
    flash._fa3 = stand_in
