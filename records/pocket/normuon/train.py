"""`normuon`: a small GPT trained by one file.

    python train.py --data TOKENS                # a folder with train_000000.bin, val_000000.bin ...
    python train.py --data TOKENS --steps 100    # a short run: the whole schedule in 100 steps

NorMuon with Polar Express, on a model with value embeddings, gates, skips and windows.

Written by `speedrun export --recipe normuon --track pocket`; needs torch and numpy alone.
With the same seed and the same number of threads it has the losses of `speedrun train`, bit for bit, compiled or not.
On a GPU attention is PyTorch's own, so there the last bits may differ. What the recipe does not use was left out.

Shapes: B rows, T positions, D width, H heads, K head width, V vocabulary, N = B * T, s = the shorter side of a matrix.
"""

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.adamw import adamw

# ------------------------------------------------------------------------------------------------------- the recipe

STEPS = 660  # fixed beforehand: no run stops on its validation loss
EXTENSION = 40  # more steps after those, all at the lowest learning rate
LENGTH = 128  # tokens in a row
ROWS = 16  # in a step
COOLDOWN = 1.0  # share of the steps, at the end, over which the learning rate falls
FLOOR = 0.1  # the factor of all learning rates where the fall ends
VAL_EVERY, VAL_ROWS, VAL_LENGTH = 200, 64, 128  # steps between validations, and their batches

VOCAB, BOS = 4096, 0  # entries of the tokenizer, and the one in front of each document; tokens.json knows better
LAYERS, WIDTH, HEADS = 3, 128, 4
HEAD_WIDTH, MLP_WIDTH = WIDTH // HEADS, 512
NORM_EPS = 2.0**-23
ROTARY_BASE = 256.0  # the slowest channels turn by about 1 / base per token
ATTENTION_SCALE = 0.1  # of the scores: normalised queries and keys are not what 1 / sqrt(K) is made for
NO_ATTENTION = (1,)  # layers that do without: their MLP is worth more than their attention
LONG_LAYERS = (2,)  # these look far back, the others half as far
WINDOW_RAMP = (32, 64, 96)  # how many tokens, in equal parts of the run: near things are learned first
WINDOW_EXTENSION = 112  # the same during the extension
WINDOW_FINAL = 128  # and in the last validation: a wider view costs nothing there
WINDOW_BLOCK = 16  # windows are whole blocks of so many tokens
VALUE_LAYERS = {0: 0, 2: 1}  # {layer: table}: token tables that are added to the values of attention
GATE_INPUTS = 12  # channels that a gate reads; a few are enough to decide
SKIPS = ((0, 2),)  # (from, to): early outputs also reach a later layer directly, and gradients find them
BACKOUT = 1  # a share of this layer's output is taken out of the result again
SOFTCAP = 30.0  # logits stay below it
SOFTCAP_SHIFT, SOFTCAP_TEMPERATURE = 0.0, 7.5
EMBED_STD = 1.0  # of the initial token table
INIT_SCALE = 0.8660254037844386  # matrices start uniform within this / sqrt(inputs)


class Rates(NamedTuple):
    lr: float
    beta1: float
    beta2: float
    decay: float


# What Adam trains, as products of the recipe's own rate or decay and the factor of a part.
ADAM = {
    "embed": Rates(0.016 * 40.0, 0.65, 0.95, 0.0),
    "head": Rates(0.016, 0.65, 0.95, 0.0),
    "values": Rates(0.016 * 40.0, 0.65, 0.95, 0.0),
    "x0": Rates(0.016 * 5.0, 0.65, 0.95, 0.0),
    "scalars": Rates(0.016 * 5.0, 0.65, 0.95, 0.0),
}
ADAM_EPS = 1e-08
MUON_LR = 0.03
MUON_BETA2 = 0.95
MOMENTUM_LOW, MOMENTUM_HIGH = 0.85, 0.95
MOMENTUM_WARMUP = 200  # steps
MOMENTUM_COOLDOWN = 50  # steps

# ------------------------------------------------------------------------------------------------------------- data
# A shard is 256 little-endian int32 (magic number, version, number of tokens), then the tokens as uint16.

MAGIC, VERSION, HEADER = 20240520, 1, 1024
IGNORED = -1  # the target of a position that does not count


def stop(sentence: str) -> NoReturn:
    """A person's mistake needs no traceback."""
    print(f"train.py: {sentence}", file=sys.stderr)
    sys.exit(2)


class Batch(NamedTuple):
    inputs: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64
    documents: Tensor  # (B, T) int64: which document a token is in, for attention stays inside


class Tokens(NamedTuple):
    train: list[np.ndarray]  # shards, each (N,) uint16
    val: np.ndarray
    vocab: int
    bos: int


def read_tokens(folder: Path) -> Tokens:
    """What a folder of shards holds, memory-mapped. A tokens.json beside them knows vocabulary and separator."""
    if not folder.is_dir():
        stop(f"There is no folder {folder}; name one with .bin token shards.")
    described = folder / "tokens.json"
    try:
        about = json.loads(described.read_text()) if described.exists() else {}
        vocab, bos = int(about.get("vocab_size", VOCAB)), int(about.get("bos", BOS))
    except (ValueError, TypeError, AttributeError):
        stop(f"{described} is damaged; make the folder again.")

    def shards(split: str) -> list[np.ndarray]:
        name = re.compile(rf"(?:.+_)?{split}_\d{{6}}\.bin")
        found = [path for path in sorted(folder.iterdir()) if name.fullmatch(path.name)]
        found = [path for path in found if path.name in about.get("files", [path.name])]
        if not found:
            stop(f"{folder} has no shard named like {split}_000000.bin.")
        return [open_shard(path, vocab) for path in found]

    tokens = Tokens(shards("train"), np.concatenate(shards("val")), vocab, bos)
    if all(len(shard) <= LENGTH for shard in tokens.train) or len(tokens.val) < 2:
        stop(f"{folder} is too small: a row takes {LENGTH + 1} tokens of one shard.")
    return tokens


def open_shard(path: Path, vocab: int) -> np.ndarray:
    header = np.fromfile(path, dtype="<i4", count=3)
    if len(header) < 3 or (header[0], header[1]) != (MAGIC, VERSION):
        stop(f"{path} is not a token shard of version {VERSION}.")
    count = int(header[2])
    if count < 1 or path.stat().st_size != HEADER + 2 * count:
        stop(f"{path} is damaged: its header promises {count} tokens, its size says otherwise; get it again.")
    # As a plain array: every slice of a np.memmap repeats its bookkeeping in Python.
    tokens = np.memmap(path, dtype="<u2", mode="r", offset=HEADER, shape=(count,)).view(np.ndarray)
    if tokens.max() >= vocab:
        stop(f"{path} has token {tokens.max()}, outside the vocabulary of {vocab}.")
    return tokens


def draw(count: int, *entropy: int) -> list[int]:
    """A random order of `count` things. Raw output of a bit generator is what numpy promises never to change."""
    raw = np.random.Philox(np.random.SeedSequence(list(entropy))).random_raw(count)
    return np.argsort(raw, kind="stable").tolist()


Row = tuple[np.ndarray, np.ndarray]  # tokens, and the number of the document that each of them is in


def training_rows(tokens: Tokens, seed: int) -> Iterator[Row]:
    """Endless rows of LENGTH + 1 tokens: the first LENGTH of them are inputs, the last LENGTH are targets.

    In every epoch the documents of a shard are laid end to end in a new order and cut into rows, which are shuffled
    again: so a batch is a mixture of pages, not a few neighbouring ones.
    """
    documents = [np.union1d([0], np.flatnonzero(shard == tokens.bos)) for shard in tokens.train]
    for epoch in itertools.count():
        for place, number in enumerate(draw(len(documents), seed, epoch, len(documents))):
            shard, begins = tokens.train[number], documents[number]
            order = draw(len(begins), seed, epoch, number)
            lengths = np.diff(begins, append=len(shard))[order]
            begins, edges = begins[order], np.concatenate(([0], np.cumsum(lengths)))
            for row in draw((len(shard) - 1) // LENGTH, seed, epoch, place, LENGTH):
                yield read_row(shard, begins, edges, row * LENGTH)


def read_row(shard: np.ndarray, begins: np.ndarray, edges: np.ndarray, start: int) -> Row:
    """The row at `start` of the line of documents: document i begins at edges[i] there, at begins[i] in the shard."""
    end = start + LENGTH + 1
    first = int(edges.searchsorted(start, side="right")) - 1
    last = int(edges.searchsorted(end, side="left"))
    cuts = np.concatenate(([start], edges[first + 1 : last], [end]))
    shift = np.repeat(begins[first:last] - edges[first:last], np.diff(cuts))
    return shard.take(shift + np.arange(start, end)), np.repeat(np.arange(last - first), np.diff(cuts))


def training_batch(rows: Iterator[Row], count: int) -> Batch:
    tokens, documents = (np.stack(x) for x in zip(*itertools.islice(rows, count), strict=True))
    parts = tokens[:, :-1], tokens[:, 1:], documents[:, :-1]
    return Batch(*(torch.from_numpy(x.astype(np.int64)) for x in parts))


def validation_batches(tokens: Tokens) -> Iterator[Batch]:
    """Rows over the whole split, in which each token after the first is predicted once. Padding does not count."""
    size = VAL_ROWS * VAL_LENGTH
    for begin in range(0, len(tokens.val) - 1, size):
        taken = tokens.val[begin : begin + size + 1]
        used = len(taken) - 1
        inputs, targets = np.full(size, tokens.bos, dtype=np.int64), np.full(size, IGNORED, dtype=np.int64)
        inputs[:used], targets[:used] = taken[:-1], taken[1:]
        starts = inputs == tokens.bos
        starts[used:] = False
        starts[used : used + 1] = True  # padding is a document of its own
        parts = inputs, targets, np.cumsum(starts)
        yield Batch(*(torch.from_numpy(x.reshape(VAL_ROWS, VAL_LENGTH)) for x in parts))


# ---------------------------------------------------------------------------------------- lookup with exact gradients
# Compiled code would add the gradients of repeated tokens with atomic additions, in whatever order the threads come.
# Two operators keep torch.compile out of it, so a seed gives the same bits every time.


@torch.library.custom_op("train::lookup", mutates_args=())
def lookup(table_VD: Tensor, ids_BT: Tensor) -> Tensor:
    """Rows of the table, (B, T, D)."""
    return F.embedding(ids_BT, table_VD)


@lookup.register_fake
def _(table_VD: Tensor, ids_BT: Tensor) -> Tensor:
    return table_VD.new_empty(*ids_BT.shape, table_VD.shape[1])


@torch.library.custom_op("train::lookup_gradient", mutates_args=())
def lookup_gradient(grad_BTD: Tensor, ids_BT: Tensor, rows: int) -> Tensor:
    """(V, D): the sum of the gradients of each row's uses."""
    return torch.ops.aten.embedding_dense_backward(grad_BTD, ids_BT, rows, -1, False)


@lookup_gradient.register_fake
def _(grad_BTD: Tensor, ids_BT: Tensor, rows: int) -> Tensor:
    return grad_BTD.new_empty(rows, grad_BTD.shape[-1])


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    table_VD, ids_BT = inputs
    ctx.save_for_backward(ids_BT)
    ctx.rows = table_VD.shape[0]


def _backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor, None]:
    (ids_BT,) = ctx.saved_tensors
    return lookup_gradient(grad_BTD.contiguous(), ids_BT, ctx.rows), None


lookup.register_autograd(_backward, setup_context=_remember)

# --------------------------------------------------------------------------------------------- positions and attention
# Rotary positions: channel c of a head is paired with channel c + K/2 and turned by position * frequency, so that the
# product of a query and a key depends on their distance.


def frequencies() -> Tensor:
    """Radians per token of each channel pair, (K/2,)."""
    # Half of the pairs stand still: they carry what does not depend on distance.
    turning = HEAD_WIDTH // 4
    exponents = torch.linspace(0, 1, turning, dtype=torch.float64)
    return torch.cat([(1 / ROTARY_BASE) ** exponents, torch.zeros(HEAD_WIDTH // 2 - turning, dtype=torch.float64)])


# YaRN: when the long window grows from `old` to `new` tokens, frequencies that turn less than once within the old one
# are slowed by old / new, so that no distance turns further than it ever did; the scores are sharpened a little.
SLOW_TURNS, FAST_TURNS = 1.0, 32.0
SHARPEN = 0.2


def stretch(frequency_K: Tensor, old: int, new: int) -> tuple[Tensor, float]:
    """Frequencies after the window grew from `old` to `new` tokens, and the factor of the scores."""
    turns = old * frequency_K / (2 * math.pi)
    keep = ((turns - SLOW_TURNS) / (FAST_TURNS - SLOW_TURNS)).clamp(0, 1)
    ratio = old / new
    return frequency_K * (ratio + keep * (1 - ratio)), 1 + SHARPEN * math.log(new / old)


def stretched(frequency_K: Tensor, windows: tuple[int, ...]) -> tuple[Tensor, float]:
    """After all changes of the long window so far."""
    scale = 1.0
    for old, new in itertools.pairwise(windows):
        frequency_K, factor = stretch(frequency_K, old, new)
        scale *= factor
    return frequency_K, scale


def rotary_tables(length: int, frequency_K: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, each (length, 1, K/2), float32."""
    angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency_K)  # (T, K/2)
    return angle.cos().float()[:, None, :], angle.sin().float()[:, None, :]


def rotate(x_BTHK: Tensor, cos_T1K: Tensor, sin_T1K: Tensor) -> Tensor:
    x1, x2 = x_BTHK.chunk(2, dim=-1)
    cos, sin = cos_T1K.to(x1.dtype), sin_T1K.to(x1.dtype)
    return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1)


def visible(query_positions: Tensor, key_positions: Tensor, window: int | Tensor | None) -> Tensor:
    """(..., T, S) bool: True where a query may look at a key: not ahead, at most `window` tokens back."""
    back = query_positions[..., :, None] - key_positions[..., None, :]
    return back >= 0 if window is None else (back >= 0) & (back <= window)


def document_mask(documents_BT: Tensor, window: int | Tensor | None = None) -> Tensor:
    """(B, 1, T, T) bool: True where query t may look at key s, i.e. s <= t in the same document and window."""
    t = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    same = documents_BT[:, :, None] == documents_BT[:, None, :]
    return (same & visible(t, t, window))[:, None]


def norm(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=eps)


def previous(x: Tensor, first: Tensor) -> Tensor:
    """Along axis 1, what stood one position earlier; `first` comes before the first."""
    return torch.cat([first, x[:, :-1]], dim=1)


# ----------------------------------------------------------------------------------------------------------- the model


class Matrix(nn.Module):
    """A weight (out, in) without bias; `reset` draws it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def reset(self, scale: float) -> None:
        bound = scale / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Attention(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.qkv = Matrix(WIDTH, 3 * WIDTH)
        self.out = Matrix(WIDTH, WIDTH)
        self.long = layer in LONG_LAYERS
        self.value_table = VALUE_LAYERS.get(layer)
        self.gate = nn.Parameter(torch.zeros(HEADS, GATE_INPUTS))
        self.value_lambdas = nn.Parameter(torch.tensor([0.5, 0.5]))

    def forward(self, x_BTD: Tensor, value_BTD: Tensor, cos: Tensor, sin: Tensor, masks: list[Tensor]) -> Tensor:
        B, T, D = x_BTD.shape
        q, k, v = self.qkv(x_BTD).view(B, T, 3, HEADS, HEAD_WIDTH).unbind(2)  # each (B, T, H, K)
        q, k = norm(q, NORM_EPS), norm(k, NORM_EPS)  # scores stay bounded, so the learning rate can be high
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        v = self.mix_values(v, x_BTD, value_BTD)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = masks[int(self.long)]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=ATTENTION_SCALE).transpose(1, 2)
        # A head must attend to something; its gate lets it say nothing.
        y = y * torch.sigmoid(F.linear(x_BTD[..., :GATE_INPUTS], self.gate))[..., None]
        return self.out(y.reshape(B, T, D))

    def mix_values(self, v_BTHK: Tensor, x_BTD: Tensor, value_BTD: Tensor) -> Tensor:
        """Values plus a row of a table looked up by token: much memory for no arithmetic."""
        v_BTHK = self.value_lambdas[0] * v_BTHK
        extra = value_BTD.view_as(v_BTHK)
        return v_BTHK + self.value_lambdas[1] * extra


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = Matrix(WIDTH, MLP_WIDTH)
        self.down = Matrix(MLP_WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(F.relu(h).square())  # cheaper than GELU, and learns a little better


class Block(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.attention = None if layer in NO_ATTENTION else Attention(layer)
        self.mlp = MLP()


class GPT(nn.Module):
    """Token ids in, summed loss of the next tokens out."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.empty(vocab, WIDTH))
        self.blocks = nn.ModuleList(Block(layer) for layer in range(LAYERS))
        self.head = nn.Parameter(torch.empty(vocab, WIDTH))
        self.value_embeds = nn.ParameterList(torch.empty(vocab, WIDTH) for _ in set(VALUE_LAYERS.values()))
        self.residual_lambdas = nn.Parameter(torch.full((LAYERS,), 1.0))
        self.x0_lambdas = nn.Parameter(torch.zeros(LAYERS, 1))
        self.smear_lambda = nn.Parameter(torch.zeros(1))
        self.smear_gate = nn.Parameter(torch.zeros(1, GATE_INPUTS))
        self.skip_lambdas = nn.Parameter(torch.full((len(SKIPS),), -1.5))
        self.backout_lambdas = nn.Parameter(torch.tensor([0.5]))
        cos, sin = rotary_tables(max(LENGTH, VAL_LENGTH), frequencies())
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.stretched_by: tuple[int, ...] = ()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial weights. Those that end a branch become zero after all: blocks begin by adding nothing."""
        for table in (self.embed, self.head):
            nn.init.normal_(table, std=EMBED_STD)
        for block in self.blocks:
            if block.attention is not None:
                block.attention.qkv.reset(INIT_SCALE)
                block.attention.out.reset(INIT_SCALE)
                nn.init.zeros_(block.attention.out.weight)
            block.mlp.up.reset(INIT_SCALE)
            block.mlp.down.reset(INIT_SCALE)
            nn.init.zeros_(block.mlp.down.weight)
        for values in self.value_embeds:
            nn.init.normal_(values, std=1.0)
        nn.init.zeros_(self.head)

    def stretch(self, windows: tuple[int, ...]) -> None:
        """Positions as YaRN leaves them after these long windows; in place, as a compiled graph holds on to them."""
        if windows == self.stretched_by:
            return
        self.stretched_by = windows
        frequency, factor = stretched(frequencies(), windows)
        for buffer, table in zip((self.cos, self.sin), rotary_tables(len(self.cos), frequency), strict=True):
            buffer.copy_(table * math.sqrt(factor))  # in queries and in keys, so that the scores get all of it

    def features(self, ids_BT: Tensor, documents_BT: Tensor, windows: tuple[Tensor, Tensor]) -> Tensor:
        """What the head reads, (B, T, D)."""
        T = ids_BT.shape[1]
        masks = [document_mask(documents_BT, window) for window in windows]
        cos, sin = self.cos[:T], self.sin[:T]
        x = lookup(self.embed, ids_BT)
        values = [lookup(table, ids_BT) for table in self.value_embeds]
        # Each embedding takes a gated share of the one before: pairs of tokens, without attention.
        gate = torch.sigmoid(F.linear(x[..., :GATE_INPUTS], self.smear_gate))
        x = x + self.smear_lambda * gate * previous(x, torch.zeros_like(x[:, :1]))
        x = norm(x, NORM_EPS)  # frequent and rare tokens enter equally loud
        x0 = x
        outputs: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            for n, (source, target) in enumerate(SKIPS):
                if target == i:
                    x = x + torch.sigmoid(self.skip_lambdas[n]) * outputs[source]
            x = self.residual_lambdas[i] * x  # how much of what came before counts is learned
            x = x + self.x0_lambdas[i, 0] * x0  # late layers still see which token it is
            if block.attention is not None:
                x = x + block.attention(norm(x, NORM_EPS), values[block.attention.value_table], cos, sin, masks)
            x = x + block.mlp(norm(x, NORM_EPS))
            outputs.append(x)
        # What a middle layer had made for those after it is not what the head should read.
        x = x - self.backout_lambdas[0] * outputs[BACKOUT]
        return norm(x, NORM_EPS)

    def forward(
        self,
        ids_BT: Tensor,
        targets_BT: Tensor,
        documents_BT: Tensor,
        windows: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Sum of the losses of all targets that count: a sum, as only the batch's tokens together make a mean."""
        x_BTD = self.features(ids_BT, documents_BT, windows)
        weight = self.head
        return cross_entropy_sum(x_BTD.flatten(0, 1), weight, targets_BT.flatten())


# ----------------------------------------------------------------------------------------------------- head and losses

# Logits are made in pieces of at most so many bytes. On a CPU: larger blocks do not stay in the allocator, and touching
# fresh memory in every step is slow. On a GPU: the logits of a quarter of a million tokens fit nowhere.
CPU_BYTES, GPU_BYTES = 2**23, 2**34
MOST_PIECES = 8  # each one is compiled


def pieces(rows: int, tokens: int, weight_VD: Tensor) -> int:
    """Into how many parts `rows` of `tokens` positions are cut for the head."""
    limit = CPU_BYTES if weight_VD.device.type == "cpu" else GPU_BYTES
    wanted = -(-4 * rows * tokens * weight_VD.shape[0] // limit)
    return max(1, min(rows, wanted, MOST_PIECES))


def logits_of(x_ND: Tensor, weight_VD: Tensor) -> Tensor:
    """Float32 logits."""
    z = F.linear(x_ND, weight_VD).float()
    # Bounded: no token can be made so unlikely that its one appearance ruins a step.
    return SOFTCAP * torch.sigmoid((z + SOFTCAP_SHIFT) / SOFTCAP_TEMPERATURE)


def log_total(logits: Tensor) -> Tensor:
    """Logarithm of the sum of exponentials over the last axis."""
    return logits.exp().sum(-1).log()  # of bounded logits, so nothing overflows and no pass must find the largest


def cross_entropy_sum(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Sum of the losses of the next tokens, made in pieces so that the logits are never all in memory."""
    n = pieces(len(x_ND), 1, weight_VD)
    losses = []
    for x, targets in zip(x_ND.tensor_split(n), targets_N.tensor_split(n), strict=True):
        logits = logits_of(x, weight_VD)
        chosen = logits.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
        losses.append(torch.where(targets >= 0, log_total(logits) - chosen, 0).sum())
    return sum(losses[1:], losses[0])


# ---------------------------------------------------------------------------------------------------------------- Adam


def part_of(name: str) -> str:
    """Which part of the model a parameter belongs to, by its name."""
    if name in ("embed", "head", "smear_gate"):
        return name
    if name.startswith("value_embeds"):
        return "values"
    if name.endswith(("attention.gate", "attention.value_gate")):
        return "gates"
    if name == "x0_lambdas":
        return "x0"
    return "blocks" if name.endswith(".weight") else "scalars"


@dataclass
class Moments:
    """What Adam knows of a parameter."""

    mean: Tensor
    square: Tensor
    steps: int = 0
    waiting: Tensor | None = None  # a gradient, until the next one joins it


class Adam:
    def __init__(self, parameters: list[tuple[nn.Parameter, Rates]]) -> None:
        self.parameters = parameters
        self.moments: dict[nn.Parameter, Moments] = {}

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """`factor` is the schedule's, of every learning rate."""
        for p, rates in self.parameters:
            if p.grad is None:  # a head that is still tied
                continue
            if p not in self.moments:
                self.moments[p] = Moments(torch.zeros_like(p), torch.zeros_like(p))
            state = self.moments[p]
            # Every second step, on two gradients: half the work, and calmer tables.
            if state.waiting is None:
                state.waiting = p.grad.clone()
            else:
                self.update(p, state.waiting.add_(p.grad), state, rates, rates.lr * factor)
                state.waiting = None

    def update(self, p: nn.Parameter, g: Tensor, state: Moments, rates: Rates, lr: float) -> None:
        # Epsilon joins the root of the second moment before its bias correction; torch's kernel adds it after that.
        eps = ADAM_EPS / math.sqrt(1 - rates.beta2 ** (state.steps + 1))
        adamw(
            [p],
            [g],
            [state.mean],
            [state.square],
            [],
            [torch.tensor(float(state.steps), device=p.device)],
            fused=True,
            amsgrad=False,
            beta1=rates.beta1,
            beta2=rates.beta2,
            lr=lr,
            weight_decay=rates.decay,
            eps=eps,
            maximize=False,
        )
        state.steps += 1


# ---------------------------------------------------------------------------------------------------- orthogonalisation
# Muon's idea: replace a matrix of momentum by the nearest orthogonal one, so that all directions are learned equally
# fast. A polynomial X <- a X + b (X X^T) X + c (X X^T)^2 X, applied a few times, takes every singular value towards 1.

Coefficients = Sequence[tuple[float, float, float]]
Shifts = list[tuple[float, float]]

# Polar Express: minimax-optimal for five iterations, with a safety factor of 2e-2, which the margin makes room for.
COEFFICIENTS: Coefficients = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
MARGIN = 1.02  # how far below 1 the norm is brought first
GRAM_RATIO = 1.5  # above this ratio of the sides, iterating on the Gram matrix needs fewer operations


def orthogonalize(g_Nmn: Tensor) -> Tensor:
    """The orthogonal factor of each matrix of a stack."""
    if g_Nmn.is_cuda:  # bfloat16 is fast there, and has no bits to spare for completed squares
        return iterate_plain(_unit_norm(g_Nmn, MARGIN).to(torch.bfloat16), COEFFICIENTS).float()
    first, shifts = complete_squares(COEFFICIENTS)
    x_Nmn = _unit_norm(g_Nmn, MARGIN / first)
    m, n = x_Nmn.shape[-2:]
    return iterate_gram(x_Nmn, shifts) if max(m, n) > GRAM_RATIO * min(m, n) else iterate_direct(x_Nmn, shifts)


def _unit_norm(x_Nmn: Tensor, margin: float) -> Tensor:
    """Each matrix over (its Frobenius norm * margin), without overflow or underflow on the way. Zeros stay zeros."""
    sum_N11 = torch.linalg.vector_norm(x_Nmn, 1, dim=(-2, -1), keepdim=True)
    x_Nmn = x_Nmn / torch.where(sum_N11 > 0, sum_N11 / x_Nmn[0].numel(), 1)
    norm_N11 = torch.linalg.vector_norm(x_Nmn, dim=(-2, -1), keepdim=True)  # at least 1, unless the matrix is zero
    return x_Nmn.mul_(norm_N11.clamp_(min=1).mul_(margin).reciprocal_())


def iterate_plain(x_Nmn: Tensor, triples: Coefficients) -> Tensor:
    """X <- a X + (b S + c S^2) X with S = X X^T, or the mirror image for tall matrices: three products an iteration."""
    tall = x_Nmn.shape[-2] > x_Nmn.shape[-1]
    for a, b, c in triples:
        s_Nss = x_Nmn.mT @ x_Nmn if tall else x_Nmn @ x_Nmn.mT
        s_Nss = torch.baddbmm(s_Nss, s_Nss, s_Nss, beta=b, alpha=c)
        x_Nmn = torch.baddbmm(x_Nmn, *((x_Nmn, s_Nss) if tall else (s_Nss, x_Nmn)), beta=a)
    return x_Nmn


def complete_squares(triples: Coefficients) -> tuple[float, Shifts]:
    """The same polynomials as (S + beta I)^2 + gamma I: products and two changes of a diagonal, no sums of matrices.

    With t X in place of X the polynomial becomes r (a + b S + c S^2), where r = t^4 / c makes the coefficient of the
    square 1; the next X comes out as r t times what it was. Going backwards from 1, every t follows, and the first one
    is all that has to be multiplied.
    """
    t, shifts = 1.0, []
    for a, b, c in reversed(triples):
        t = (c * t) ** 0.2
        r = t**4 / c
        beta = r * b / (2 * t * t)
        shifts.append((beta, r * a - beta * beta))
    return t, shifts[::-1]


def iterate_direct(x_Nmn: Tensor, shifts: Shifts) -> Tensor:
    """What `iterate_plain` does, from an X that has been multiplied by the first factor of `complete_squares`.

    X is used up: products go to and fro between a few buffers, since fresh memory is slow memory.
    """
    tall = x_Nmn.shape[-2] > x_Nmn.shape[-1]
    side = min(x_Nmn.shape[-2:])
    s_Nss, p_Nss = (x_Nmn.new_empty(len(x_Nmn), side, side) for _ in range(2))
    other_Nmn = torch.empty_like(x_Nmn, memory_format=torch.contiguous_format)
    for beta, gamma in shifts:
        _symmetric(x_Nmn.mT, x_Nmn, s_Nss) if tall else _symmetric(x_Nmn, x_Nmn.mT, s_Nss)
        _diagonal(s_Nss).add_(beta)
        _symmetric(s_Nss, s_Nss, p_Nss)
        _diagonal(p_Nss).add_(gamma)
        torch.bmm(*((x_Nmn, p_Nss) if tall else (p_Nss, x_Nmn)), out=other_Nmn)
        x_Nmn, other_Nmn = other_Nmn, x_Nmn
    return x_Nmn


def iterate_gram(x_Nmn: Tensor, shifts: Shifts) -> Tensor:
    """The same, with all iterations on S = X X^T and one product with X at the end.

    One iteration multiplies X by P = (S + beta I)^2 + gamma I. P and S commute, so S becomes P S P, and the product of
    all P is applied to X once. All of these are symmetric.
    """
    tall = x_Nmn.shape[-2] > x_Nmn.shape[-1]
    side = min(x_Nmn.shape[-2:])
    spare = [x_Nmn.new_empty(len(x_Nmn), side, side) for _ in range(4)]
    s_Nss = _symmetric(x_Nmn.mT, x_Nmn, spare.pop()) if tall else _symmetric(x_Nmn, x_Nmn.mT, spare.pop())
    product_Nss: Tensor | None = None
    for k, (beta, gamma) in enumerate(shifts):
        diagonal_Ns = _diagonal(s_Nss).clone()
        _diagonal(s_Nss).add_(beta)
        p_Nss = _symmetric(s_Nss, s_Nss, spare.pop())
        _diagonal(p_Nss).add_(gamma)
        _diagonal(s_Nss).copy_(diagonal_Ns)
        if k + 1 < len(shifts):
            half_Nss = _symmetric(s_Nss, p_Nss, spare.pop())
            _symmetric(p_Nss, half_Nss, s_Nss)
            spare.append(half_Nss)
        if product_Nss is None:
            product_Nss = p_Nss
        else:
            longer_Nss = _symmetric(product_Nss, p_Nss, spare.pop())
            spare += [product_Nss, p_Nss]
            product_Nss = longer_Nss
    assert product_Nss is not None
    return x_Nmn @ product_Nss if tall else product_Nss @ x_Nmn


def _diagonal(x_Nss: Tensor) -> Tensor:
    return x_Nss.diagonal(dim1=-2, dim2=-1)


def _symmetric(a_Nsk: Tensor, b_Nks: Tensor, out_Nss: Tensor) -> Tensor:
    """A product that is known to be symmetric: with sides of 512 or more, half of it could be mirrored."""
    return torch.bmm(a_Nsk, b_Nks, out=out_Nss)


# ---------------------------------------------------------------------------------------------------------------- Muon


@dataclass
class Slot:
    """A matrix that Muon trains."""

    weight: nn.Parameter
    blocks: int  # 3 where query, key and value are one matrix: they are orthogonalised apart
    momentum: Tensor


class Muon:
    def __init__(self, named: list[tuple[str, nn.Parameter]]) -> None:
        """Matrices whose blocks have the same shape are stacked and orthogonalised together."""
        self.stacks: dict[tuple[int, int, int], list[Slot]] = {}
        for name, p in named:
            blocks = 3 if name.endswith("qkv.weight") else 1
            rows, cols = len(p) // blocks, p.shape[1]
            slot = Slot(
                p,
                blocks,
                torch.zeros_like(p, dtype=torch.float32),
            )
            axis = -2 if name.endswith(".weight") and rows < cols else -1  # gates: one number per head
            self.stacks.setdefault((rows, cols, axis), []).append(slot)
        self.second: dict[tuple[int, int, int], Tensor] = {}

    @torch.no_grad()
    def step(self, factor: float, momentum: float) -> None:
        for (rows, cols, axis), slots in self.stacks.items():
            counts = [slot.blocks for slot in slots]
            stack_Nrc = torch.empty(sum(counts), rows, cols, device=slots[0].momentum.device)
            for slot, part in zip(slots, stack_Nrc.split(counts), strict=True):
                g, m = slot.weight.grad.float(), slot.momentum
                m.lerp_(g, 1 - momentum)
                torch.lerp(g.reshape(part.shape), m.view(part.shape), momentum, out=part)  # Nesterov's look ahead
            out_Nrc = self.even_out(orthogonalize(stack_Nrc), (rows, cols, axis))
            # Tall matrices get larger steps, so that a step changes all outputs by the same amount.
            scale = math.sqrt(max(1.0, rows / cols))
            for slot, part in zip(slots, out_Nrc.split(counts), strict=True):
                self.update(slot, part.reshape(slot.weight.shape), MUON_LR * factor, scale)

    def even_out(self, out_Nrc: Tensor, key: tuple[int, int, int]) -> Tensor:
        """NorMuon: rows (or columns) whose updates were always large get smaller ones. The norm stays what it was."""
        axis = key[2]
        size = out_Nrc.shape[axis]
        mean_square = torch.linalg.vector_norm(out_Nrc, dim=axis, keepdim=True).square_().div_(size)
        second = self.second.setdefault(key, torch.zeros_like(mean_square))
        second.lerp_(mean_square, 1 - MUON_BETA2)
        factor = second.clamp(min=1e-10).rsqrt_()
        # Norms before and after, from the means alone: the update itself is touched once.
        before = mean_square.sum((-2, -1), keepdim=True).mul_(size).sqrt_()
        after = mean_square.mul(factor.square()).sum((-2, -1), keepdim=True).mul_(size).sqrt_()
        return out_Nrc.mul_(factor.mul_(before / after.clamp(min=1e-10)))

    def update(self, slot: Slot, update: Tensor, lr: float, scale: float) -> None:
        size = lr * scale
        x = slot.weight
        x.add_(update, alpha=-size)


# ------------------------------------------------------------------------------------------------------------ schedule


class Stage(NamedTuple):
    """What one step does, a pure function of its number."""

    lr: float  # factor of all learning rates
    rows: int
    momentum: float
    windows: tuple[int, int]  # how far back short and long layers look
    windows_so_far: tuple[int, ...]  # of long layers, for YaRN


class Schedule:
    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.total = steps + EXTENSION

    def at(self, step: int) -> Stage:
        return Stage(
            lr=self.lr(step),
            rows=ROWS,
            momentum=self.momentum(step),
            windows=self.windows(step),
            windows_so_far=self.windows_so_far(step),
        )

    def after(self, done: int) -> Stage:
        """What a validation after `done` steps sees."""
        stage = self.at(max(0, done - 1))
        if done == self.total:
            stage = stage._replace(windows=(stage.windows[0], WINDOW_FINAL))
        return stage

    def slot(self, step: int, slots: int) -> int:
        """Which of `slots` equal parts of the steps a step is in."""
        return min(slots - 1, slots * step // self.steps)

    def lr(self, step: int) -> float:
        """Flat, then a long way down."""
        if step >= self.steps:
            return FLOOR
        fall = COOLDOWN * self.steps
        if step < self.steps - fall:
            return 1.0
        left = (self.steps - step) / fall
        return left + FLOOR * (1 - left)

    def momentum(self, step: int) -> float:
        """Low while gradients change quickly, and again at the very end, when there is little left to average."""
        span = MOMENTUM_HIGH - MOMENTUM_LOW
        if step < MOMENTUM_WARMUP:
            return MOMENTUM_LOW + span * (step / MOMENTUM_WARMUP)
        begin = self.total - MOMENTUM_COOLDOWN
        if step > begin:
            return MOMENTUM_HIGH - span * ((step - begin) / MOMENTUM_COOLDOWN)
        return MOMENTUM_HIGH

    def long_window(self, step: int) -> int:
        if step >= self.steps:
            return WINDOW_EXTENSION
        return WINDOW_RAMP[self.slot(step, len(WINDOW_RAMP))]

    def windows(self, step: int) -> tuple[int, int]:
        long = self.long_window(step)
        short = max(1, long // WINDOW_BLOCK // 2) * WINDOW_BLOCK
        return short, long

    def windows_so_far(self, step: int) -> tuple[int, ...]:
        found = list(WINDOW_RAMP[: self.slot(min(step, self.steps - 1), len(WINDOW_RAMP)) + 1])
        if step >= self.steps:
            found.append(WINDOW_EXTENSION)
        return tuple(window for window, _ in itertools.groupby(found))


# ------------------------------------------------------------------------------------------------------------- machine


def cpu_flags() -> set[str]:
    """Instruction-set flags as Linux reports them; empty where it cannot be known."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    for line in text.splitlines():
        if line.startswith(("flags", "Features")):
            return set(line.partition(":")[2].split())
    return set()


ONEDNN_LIMIT = "ONEDNN_MAX_CPU_ISA"


@functools.cache
def amx_works() -> bool:
    """Whether a CPU that lists AMX can use it. Call before the first bf16 matmul.

    Some virtual machines list AMX, even grant it, and then kill the process that uses it, so it is tried in a child
    process. When the child dies, torch's bf16 matmuls are kept off AMX in this process and in those it starts.
    """
    if ONEDNN_LIMIT in os.environ:  # somebody has chosen already, perhaps this function in a parent process
        return os.environ[ONEDNN_LIMIT].upper() in ("ALL", "DEFAULT", "AVX512_CORE_AMX", "AVX512_CORE_AMX_FP16")
    trial = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); (a @ a).sum().item()"
    if subprocess.run([sys.executable, "-c", trial], capture_output=True, check=False).returncode >= 0:
        return True
    os.environ[ONEDNN_LIMIT] = "AVX512_CORE_FP16"  # the widest without AMX
    return False


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def choose_dtype(device: torch.device, asked: str) -> torch.dtype:
    """bfloat16 where there are units for it, else it would be slower."""
    if asked == "float32":
        return torch.float32
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        fast = "amx_bf16" in cpu_flags() and amx_works()
    return torch.bfloat16 if fast or asked == "bfloat16" else torch.float32


# ------------------------------------------------------------------------------------------------------------ training


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.device = torch.device(args.device)
        self.dtype = choose_dtype(self.device, args.dtype)
        torch.set_num_threads(args.threads)
        self.tokens = read_tokens(args.data)
        self.rows = training_rows(self.tokens, args.seed)
        self.schedule = Schedule(args.steps)
        self.digits = "" if args.exact else ".4f"
        torch.manual_seed(args.seed)
        self.model = GPT(self.tokens.vocab).to(self.device)
        named = list(self.model.named_parameters())
        inside = [(name, p) for name, p in named if part_of(name) == "blocks"]
        inside += [(name, p) for part in ("gates", "smear_gate") for name, p in named if part_of(name) == part]
        self.muon = Muon(inside)
        self.adam = Adam([(p, ADAM[part_of(name)]) for name, p in named if part_of(name) in ADAM])
        self.loss_of: Any = self.model
        if args.compile == "True":
            torch._dynamo.config.recompile_limit = 64  # a graph for each shape of the schedule
            self.loss_of = torch.compile(self.model, dynamic=False, fullgraph=True)
        self.seconds, self.started = 0.0, 0.0

    def loss(self, batch: Batch, stage: Stage) -> Tensor:
        """Summed over the batch, in the arithmetic that the machine is fast at."""
        given: list[Any] = [x.to(self.device) for x in batch]
        # As tensors, so that one compiled graph serves all windows.
        given.append(tuple(torch.tensor(window) for window in stage.windows))
        wide = self.dtype == torch.float32
        with contextlib.nullcontext() if wide else torch.autocast(self.device.type, self.dtype):
            return self.loss_of(*given)

    def step(self, stage: Stage, batch: Batch) -> float:
        self.model.stretch(stage.windows_so_far)
        loss = self.loss(batch, stage) / batch.targets.numel()
        loss.backward()
        if not math.isfinite(loss.item()):
            sys.exit(f"The loss is {loss.item()}; a lower learning rate may help.")
        self.muon.step(stage.lr, stage.momentum)
        self.adam.step(stage.lr)
        self.model.zero_grad(set_to_none=True)
        return loss.item()

    @torch.no_grad()
    def validate(self, done: int) -> float:
        """Mean loss over the validation tokens."""
        stage = self.schedule.after(done)
        self.model.stretch(stage.windows_so_far)
        total, count = 0.0, 0
        for batch in validation_batches(self.tokens):
            total += float(self.loss(batch, stage).double())
            count += int((batch.targets >= 0).sum())
        return total / count

    def warm_up(self) -> None:
        """Compile for every shape the run will see, outside the clock, on tokens made up for it."""
        generator = torch.Generator().manual_seed(0)

        def made_up(rows: int, length: int) -> Batch:
            ids = torch.randint(self.tokens.vocab, (rows, length), generator=generator)
            return Batch(ids, ids.clone(), torch.zeros_like(ids))

        stages = [self.schedule.at(step) for step in range(self.schedule.total)]
        for stage in {s.rows: s for s in stages}.values():
            self.loss(made_up(stage.rows, LENGTH), stage).backward()
        with torch.no_grad():
            self.loss(made_up(VAL_ROWS, VAL_LENGTH), stages[0])
        self.model.zero_grad(set_to_none=True)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def say(self, kind: str, done: int, loss: float) -> None:
        """One greppable line."""
        running = time.perf_counter() - self.started if self.started else 0.0
        ms = 1000 * (self.seconds + running)
        average = ms / done if done else math.nan
        times = f"train_time:{ms:.0f}ms step_avg:{average:.2f}ms"
        print(f"step:{done}/{self.schedule.total} {kind}:{loss:{self.digits}} {times}", flush=True)

    def pause(self, done: int) -> None:
        """Validate, while the clock stands still."""
        self.synchronize()
        self.seconds += time.perf_counter() - self.started if self.started else 0.0
        self.started = 0.0
        self.say("val_loss", done, self.validate(done))
        self.synchronize()
        self.started = time.perf_counter()

    def run(self) -> None:
        if self.loss_of is not self.model:
            try:
                self.warm_up()
            except Exception as e:  # whatever a compiler may meet, the model runs without it
                print(f"torch.compile failed here ({type(e).__name__}); going on without it, more slowly", flush=True)
                self.loss_of = self.model
                self.model.zero_grad(set_to_none=True)
        self.pause(0)
        for step in range(self.schedule.total):
            stage = self.schedule.at(step)
            loss = self.step(stage, training_batch(self.rows, stage.rows))
            done = step + 1
            self.say("train_loss", done, loss)
            if done % VAL_EVERY == 0 or done == self.schedule.total:
                self.pause(done)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="train.py", description="`normuon`, trained by one file.")
    parser.add_argument("--data", type=Path, required=True, help="folder of .bin token shards")
    parser.add_argument("--seed", type=int, default=0, help="draws the initial weights and the order of rows")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"the schedule in so many steps; default: {STEPS}")
    parser.add_argument("--compile", choices=["True", "False"], default="True", help="use torch.compile if it works")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="CPU threads; default: all usable cores")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of matrix products")
    parser.add_argument("--exact", action="store_true", help="print losses with all their digits")
    args = parser.parse_args(given)
    if not re.fullmatch(r"cpu|cuda(:\d+)?", args.device) or (args.device != "cpu" and not torch.cuda.is_available()):
        parser.error(f"--device is {args.device}, which is not to be had here; try cpu")
    for name, least in (("seed", 0), ("steps", 1), ("threads", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} is {getattr(args, name)}; it must be at least {least}")
    Trainer(args).run()


if __name__ == "__main__":
    main()
