"""Attention behind one function, whatever computes it.

`attend(q, k, v, doc_ids_BT=..., window=...)` is causal, never crosses a document boundary, and looks at most `window`
tokens back. Three backends: Flash Attention 3 and torch's `varlen_attn` (flash.py), and SDPA, which
computes short windows block by block, so that its cost grows with tokens * window. `choose_backend` decides.
`reference_attend` is the slow, obvious version that tests compare everything with.
"""

import functools
import math
from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from speedrun.errors import UserError
from speedrun.model import flash
from speedrun.model.flash import attend_flash, cu_seqlens_of, row_cu_seqlens

Backend = Literal["fa3", "varlen", "sdpa"]  # in order of preference; training/gpus.py says which a named GPU takes
NAMES = {"fa3": "Flash Attention 3", "varlen": "torch's varlen_attn"}
CURES = {
    "fa3": "to get it, pip install 'speedrun[gpu]' and let this machine reach the Hugging Face hub",
    "varlen": "to get it, install a build of torch that has Flash Attention for this GPU",
}
MIN_BLOCK = 32  # shorter blocks cost more in small matrix products than they save
DENSE_LENGTH = 256  # up to here a window saves too little to be worth compiled code of its own
WIDE = 256  # from this window on, blocks of half a window: fewer scores that the mask throws away


# -------------------------------------------------------------------------------------------- which one


def takes_cu_seqlens(backend: Backend) -> bool:
    """Whether it takes the offsets of documents; SDPA takes masks."""
    return backend != "sdpa"


class Choice(NamedTuple):
    name: Backend
    reason: str
    warning: str | None = None
    """A better one suits this GPU, but does not work."""


def choose_backend(
    asked: str, device: torch.device, dtype: torch.dtype = torch.float32, head_dim: int | None = None
) -> Choice:
    """What computes attention: the best there is, or the one asked for, or a refusal."""
    if asked not in ("auto", *get_args(Backend)):
        raise UserError(f"Unknown attention {asked!r}; choose auto, {', '.join(get_args(Backend))}.")
    lacks: dict[str, str] = {}
    broken = ""
    for name in (n for n in get_args(Backend) if asked in ("auto", n)):
        unfit = obstacle(name, device, dtype, head_dim)
        fails = unfit or failure(name, device, dtype, head_dim)
        if fails is None:
            warning = f"WARNING: {broken}attention is computed by {name} instead" if broken else None
            return Choice(name, "as asked" if asked == name else reason(name, device, lacks), warning)
        lacks[name] = unfit or "does not work here"
        if unfit is None:
            broken += f"{NAMES[name]} is made for this GPU, but {fails}; {CURES[name]}; "
    there = [name for name in get_args(Backend) if name != asked and not obstacle(name, device, dtype, head_dim)]
    raise UserError(
        f"Attention {asked!r} was asked for, but {broken or f'{NAMES[asked]} {lacks[asked]}; '}here there is "
        f"{', '.join(there)}: choose that, or leave the choice to --attention auto."
    )


def obstacle(name: Backend, device: torch.device, dtype: torch.dtype, head_dim: int | None) -> str | None:
    """Why a backend is not made for this device, arithmetic or model, as the end of a sentence; None: it is."""
    if name == "sdpa":
        return None
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    fits = capability[0] == 9 if name == "fa3" else capability >= (8, 0)
    if not fits or torch.version.cuda is None:
        wanted = "Hopper GPU, compute capability 9.x" if name == "fa3" else "GPU, compute capability 8.0 or later"
        here = "torch is no CUDA build" if torch.version.cuda is None else f"{'.'.join(map(str, capability))} here"
        here = here if device.type == "cuda" else f"the device is {device}"
        return f"needs an NVIDIA {wanted} ({here})"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bfloat16 or float16, not in {str(dtype).removeprefix('torch.')}"
    if head_dim is not None and (head_dim % 8 or head_dim > 256):
        return f"needs heads of 8n up to 256 channels, not {head_dim}"
    return None


def failure(name: Backend, device: torch.device, dtype: torch.dtype, head_dim: int | None) -> str | None:
    """Why a backend that is made for this device does not work, found out by trying; None: it works."""
    if name == "sdpa":
        return None
    trial = functools.partial(try_out, name, device, dtype, head_dim or 128)
    try:
        flash.load(trial) if name == "fa3" else trial()
    except flash.Unavailable as e:
        return f"cannot be used: {e}"
    except Exception as e:  # whatever a kernel may raise: another backend
        return f"cannot be used: {flash.brief(e)}"
    return None


def try_out(name: Backend, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """A few tokens forward and backward, with documents and a window; raises what the kernel raises."""
    gen = torch.Generator().manual_seed(0)  # the process's own stays as it is
    q, k, v, g = (torch.randn(2, 16, 1, head_dim, generator=gen).to(device, dtype) for _ in range(4))
    doc_ids_BT = (torch.arange(32, device=device) >= 5).long().view(2, 16)
    results = []
    with torch.enable_grad():
        for function in (functools.partial(attend, backend=name), reference_attend):
            qkv = [x.detach().requires_grad_() for x in (q, k, v)]
            y = function(*qkv, doc_ids_BT=doc_ids_BT, window=3)
            results.append((y, *torch.autograd.grad(y, qkv, g)))
    if not all(torch.allclose(x, y, atol=0.1, rtol=0.1) for x, y in zip(*results, strict=True)):
        raise ArithmeticError("its results are not those of attention")


def reason(name: Backend, device: torch.device, lacks: dict[str, str]) -> str:
    instead = "; ".join(f"{NAMES[other]} {why}" for other, why in lacks.items())
    if name == "sdpa" and device.type == "cpu":
        return f"{instead}; short windows are computed block by block"
    return instead or "this GPU has it"


# -------------------------------------------------------------------------------------------- masks


class Documents(NamedTuple):
    """Which positions belong together: attention stays inside a document. A sequence begins a document."""

    ids_BT: Tensor
    """The number of each position's document; numbers rise along a sequence."""
    cu_seqlens: Tensor | None = None
    """int32: where documents begin in the sequences laid end to end, then where the last one ends, once or several
    times.

    Some backends ask for it (`takes_cu_seqlens`). None: it is counted, which a compiled graph cannot do."""
    max_seqlen: int | None = None
    """No document has more tokens; None: a sequence's."""


class AttentionMask(NamedTuple):
    """Which keys a query may look at, in one forward pass: made once, and shared by all layers."""

    backend: Backend
    masks: dict[int | Tensor | None, Tensor | None]  # by window; None: causal
    cu_seqlens: Tensor | None = None  # of the documents, in place of masks
    max_seqlen: int = 0  # no document has more tokens


def attention_mask(
    backend: Backend,
    B: int,
    T: int,
    device: torch.device,
    windows: Iterable[int | Tensor | None],
    documents: Documents | None = None,
) -> AttentionMask:
    """Without `documents` every sequence is one."""
    if takes_cu_seqlens(backend):
        if documents is None:
            return AttentionMask(backend, {}, row_cu_seqlens(B, T, device), T)
        cu_seqlens = cu_seqlens_of(documents.ids_BT) if documents.cu_seqlens is None else documents.cu_seqlens
        return AttentionMask(backend, {}, cu_seqlens, min(T, documents.max_seqlen or T))
    doc_ids_BT = None if documents is None else documents.ids_BT
    return AttentionMask(backend, {window: plain_mask(T, device, doc_ids_BT, window) for window in windows})


def plain_mask(T: int, device: torch.device, doc_ids_BT: Tensor | None, window: int | Tensor | None) -> Tensor | None:
    """For SDPA: bool, by blocks where the window is short; None is causal."""
    if isinstance(window, int) and local(T, window):
        return local_mask(T, device, doc_ids_BT, window)
    if doc_ids_BT is not None:
        return document_mask(doc_ids_BT, window)
    if window is None or (isinstance(window, int) and window >= T - 1):
        return None
    t = torch.arange(T, device=device)
    return visible(t, t, window)[None, None]


def window_is_data(device: torch.device, length: int) -> bool:
    """Whether windows are best passed as tensors: in short rows on a CPU one compiled graph then serves all of them."""
    return device.type == "cpu" and length <= DENSE_LENGTH


def visible(query_positions: Tensor, key_positions: Tensor, window: int | Tensor | None) -> Tensor:
    """(..., T, S) bool: True where a query may look at a key: not ahead, at most `window` tokens back."""
    back = query_positions[..., :, None] - key_positions[..., None, :]
    return back >= 0 if window is None else (back >= 0) & (back <= window)


def document_mask(doc_ids_BT: Tensor, window: int | Tensor | None = None) -> Tensor:
    """(B, 1, T, T) bool: True where query t may look at key s, i.e. s <= t in the same document and window."""
    t = torch.arange(doc_ids_BT.shape[1], device=doc_ids_BT.device)
    same = doc_ids_BT[:, :, None] == doc_ids_BT[:, None, :]
    return (same & visible(t, t, window))[:, None]


# -------------------------------------------------------------------------------------------- attention


def attend(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHK: Tensor,
    *,
    doc_ids_BT: Tensor | None = None,
    window: int | Tensor | None = None,
    scale: float | None = None,
    backend: Backend = "sdpa",
    shared: AttentionMask | None = None,
) -> Tensor:
    """Causal attention over heads, (B, T, H, K). Document numbers rise along a sequence.

    A window that is a tensor is one that compiled code does not depend on; only SDPA takes it.
    `shared` is what other layers use, too; it takes the place of `doc_ids_BT` and `backend`.
    """
    B, T = q_BTHK.shape[:2]
    if shared is None:
        documents = None if doc_ids_BT is None else Documents(doc_ids_BT)
        shared = attention_mask(backend, B, T, q_BTHK.device, [window], documents)
    if shared.backend == "sdpa":
        mask = shared.masks[window]
        if isinstance(window, int) and local(T, window):
            assert mask is not None
            return attend_locally(q_BTHK, k_BTHK, v_BTHK, window=window, mask=mask, scale=scale)
        return attend_masked(q_BTHK, k_BTHK, v_BTHK, mask=mask, scale=scale)
    assert not isinstance(window, Tensor)
    kind = q_BTHK.device.type
    if torch.is_autocast_enabled(kind):  # SDPA does so by itself
        q_BTHK, k_BTHK, v_BTHK = (x.to(torch.get_autocast_dtype(kind)) for x in (q_BTHK, k_BTHK, v_BTHK))
    assert shared.cu_seqlens is not None
    return attend_flash(
        shared.backend, q_BTHK, k_BTHK, v_BTHK,
        cu_seqlens=shared.cu_seqlens, max_seqlen=shared.max_seqlen, window=window, scale=scale,
    )  # fmt: skip


def attend_masked(
    q_BTHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, *, mask: Tensor | None, scale: float | None = None
) -> Tensor:
    """Every query against every key, (B, T, H, K); `mask` is True where a query may look; None: causal."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BSHK, v_BSHK))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    return y.transpose(1, 2)


def blocks_of(window: int) -> tuple[int, int]:
    """(block, before): queries in blocks of `block` tokens, each with its own keys and those of the blocks before."""
    block = max(MIN_BLOCK, window if window < WIDE else math.ceil(window / 2))
    return block, max(1, math.ceil(window / block))


def local(T: int, window: int) -> bool:
    """Whether computing by blocks is worth its copies: rows of more than three blocks, of which each query sees two."""
    return 3 * max(window, MIN_BLOCK) < T


# Blocks are attended in pieces whose mask, as floats, has at most this many bytes: larger ones do not stay in the
# allocator, and touching fresh memory every time is slow.
PIECE_BYTES = 2**24


def to_blocks(x: Tensor, block: int) -> Tensor:
    """(B, T, ...) -> (B, n, block, ...), filled up at the end."""
    n = math.ceil(x.shape[1] / block)
    filled = F.pad(x, (0, 0) * (x.ndim - 2) + (0, n * block - x.shape[1]))
    return filled.view(x.shape[0], n, block, *x.shape[2:])


def with_blocks_before(x: Tensor, before: int) -> Tensor:
    """(B, n, block, ...) -> (B, n, (before + 1) * block, ...): each block after those before it."""
    n = x.shape[1]
    longer = F.pad(x, (0, 0) * (x.ndim - 2) + (before, 0))
    return torch.cat([longer[:, i : i + n] for i in range(before + 1)], dim=2)


def local_mask(T: int, device: torch.device, doc_ids_BT: Tensor | None, window: int) -> Tensor:
    """(B * n, 1, block, keys) bool, or (n, 1, block, keys) where all rows are alike."""
    block, before = blocks_of(window)
    n, keys = math.ceil(T / block), (before + 1) * block
    query, key = torch.arange(block, device=device) + before * block, torch.arange(keys, device=device)
    start = (torch.arange(n, device=device) - before) * block  # of a block's keys; negative: there are none
    mask = visible(query, key, window) & (start[:, None, None] + key >= 0)  # (n, block, keys)
    if doc_ids_BT is not None:
        number = to_blocks(doc_ids_BT, block)
        mask = mask & (number[..., :, None] == with_blocks_before(number, before)[..., None, :])
    # A filled-up query may see nothing at all; its row is cut off later, but must not become NaN on the way.
    return (mask | (query[:, None] == key)).view(-1, 1, block, keys)


def attend_locally(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, *, window: int, mask: Tensor, scale: float | None = None
) -> Tensor:
    """The same for a short window, block by block: tokens * (window + block) scores instead of tokens * tokens."""
    B, T, H, K = q_BTHK.shape
    block, before = blocks_of(window)
    q, k, v = (to_blocks(x, block) for x in (q_BTHK, k_BTHK, v_BTHK))
    n = q.shape[1]
    if len(mask) != B * n:
        mask = mask.repeat(B, 1, 1, 1)
    mask = mask.view(B, n, *mask.shape[1:])
    pieces = max(1, min(n // max(1, before), -(-4 * mask.numel() // PIECE_BYTES)))
    parts = [x.tensor_split(pieces, dim=1) for x in (q, k, v, mask)]
    found = []
    for i, (here, *near, seen) in enumerate(zip(*parts, strict=True)):
        # The first blocks of a piece also see the last ones of the piece before.
        ends = [parts[j][i - 1][:, -before:] for j in (1, 2)] if i and before else []
        longer = [torch.cat(pair, dim=1) for pair in zip(ends, near, strict=True)] if ends else near
        keys, values = (with_blocks_before(x, before)[:, before if ends else 0 :].flatten(0, 1) for x in longer)
        y = attend_masked(here.flatten(0, 1), keys, values, mask=seen.flatten(0, 1), scale=scale)
        found.append(y.unflatten(0, here.shape[:2]))
    y = found[0] if pieces == 1 else torch.cat(found, dim=1)
    return y.reshape(B, n * block, H, K)[:, :T]


def reference_attend(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHK: Tensor,
    *,
    doc_ids_BT: Tensor | None = None,
    window: int | Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The definition, one score matrix at a time, in float64."""
    B, T, _, K = q_BTHK.shape
    q, k, v = (x.double().transpose(1, 2) for x in (q_BTHK, k_BTHK, v_BTHK))
    scores = q @ k.transpose(-1, -2) * (scale if scale is not None else 1 / math.sqrt(K))  # (B, H, T, T)
    if doc_ids_BT is None:
        doc_ids_BT = torch.zeros(B, T, dtype=torch.long, device=q.device)
    scores = scores.masked_fill(~document_mask(doc_ids_BT, window), -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).to(q_BTHK.dtype)
