"""Every way to compute attention against the definition."""

import importlib.util
import itertools
import math
import sys
import types
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from speedrun.errors import UserError
from speedrun.model import attention, flash
from speedrun.model.attention import (
    MIN_BLOCK,
    WIDE,
    Backend,
    attend,
    attend_locally,
    choose_backend,
    document_mask,
    plain_mask,
    reference_attend,
)
from speedrun.model.flash import edges_of, row_edges
from speedrun.model.flex import BLOCK, block_mask
from speedrun.model.gpt import GPT, GPTConfig, Windows


def some(B: int, T: int, H: int, K: int, seed: int, grad: bool = False) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(B, T, H, K, generator=gen).requires_grad_(grad) for _ in range(3)]


def numbered(B: int, T: int, seed: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return (torch.rand(B, T, generator=gen) < 0.08).long().cumsum(1)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 2), st.integers(1, 200), st.integers(0, 90), st.booleans(), st.sampled_from([None, 0.1]),
    st.integers(0, 999),
)  # fmt: skip
def test_attention_is_its_definition(B, T, window, packed, scale, seed) -> None:
    q, k, v = some(B, T, 2, 8, seed)
    documents = numbered(B, T, seed) if packed else None
    expected = reference_attend(q, k, v, documents_BT=documents, window=window, scale=scale)
    torch.testing.assert_close(attend(q, k, v, documents_BT=documents, window=window, scale=scale), expected)
    torch.testing.assert_close(attend_locally(q, k, v, documents_BT=documents, window=window, scale=scale), expected)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [WIDE, WIDE + 1])
def test_a_wide_window_in_blocks_of_half_its_width_is_the_definition(window, packed) -> None:
    T = 3 * WIDE + 30
    q, k, v = some(2, T, 1, 4, window)
    documents = (torch.arange(2 * T).view(2, T) % T > 300).long() if packed else None
    expected = reference_attend(q, k, v, documents_BT=documents, window=window)
    torch.testing.assert_close(attend_locally(q, k, v, documents_BT=documents, window=window), expected)
    torch.testing.assert_close(attend(q, k, v, documents_BT=documents, window=window), expected)


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_block_by_block_are_those_of_the_definition(packed) -> None:
    T, window = 3 * MIN_BLOCK + 5, 20
    documents = numbered(2, T, 1) if packed else None
    weights = torch.randn(2, T, 2, 8, generator=torch.Generator().manual_seed(9))
    grads = []
    for function in (attend, reference_attend):
        q, k, v = some(2, T, 2, 8, 5, grad=True)
        (function(q, k, v, documents_BT=documents, window=window) * weights).sum().backward()
        grads.append((q.grad, k.grad, v.grad))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("B", "T", "window"), [(1, 700, 20), (2, 333, 70), (3, 5 * WIDE, 2 * WIDE), (1, 40, 0)])
def test_long_rows_in_pieces_are_the_same_rows(B, T, window, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = numbered(B, T, 3)
    results = []
    for limit in (2**40, 2**10):  # whole, and as many pieces as there can be
        monkeypatch.setattr(attention, "PIECE_BYTES", limit)
        q, k, v = some(B, T, 2, 4, 7, grad=True)
        y = attend_locally(q, k, v, documents_BT=documents, window=window)
        y.square().sum().backward()
        results.append((y, q.grad, k.grad, v.grad))
    for whole, pieced in zip(*results, strict=True):
        torch.testing.assert_close(pieced, whole)


def test_a_window_of_one_sees_the_token_and_the_one_before() -> None:
    q, k, v = some(1, 100, 1, 4, 0)
    one = attend(q, k, v, window=1)
    v2 = v.clone()
    v2[:, 50] += 1
    changed = (attend(q, k, v2, window=1) - one).abs().sum((0, 2, 3)) > 1e-6
    assert changed.nonzero().flatten().tolist() == [50, 51]


# -------------------------------------------------------------------------------------------- FlexAttention

CASES = [
    (B, T, window, packed)
    for B, T in ((2, 70), (1, 300))
    for window in (None, 0, 1, 33, 128, 200)
    for packed in (False, True)
]


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("scale", [None, 0.1])
@pytest.mark.parametrize(("B", "T", "window", "packed"), CASES)
def test_flex_attention_is_the_definition(B, T, window, packed, scale) -> None:
    q, k, v = some(B, T, 2, 8, T)
    documents = numbered(B, T, 3) if packed else None
    expected = reference_attend(q, k, v, documents_BT=documents, window=window, scale=scale)
    found = attend(q, k, v, documents_BT=documents, window=window, scale=scale, backend="flex")
    torch.testing.assert_close(found, expected)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 2), st.integers(1, 700), st.none() | st.integers(0, 500), st.sampled_from([0, 0.001, 0.01, 0.3]),
    st.integers(0, 999),
)  # fmt: skip
def test_the_blocks_of_flex_attention_are_those_somebody_sees(B, T, window, ends, seed) -> None:
    """Eager FlexAttention reads the mask alone; a GPU trusts these lists."""
    gen = torch.Generator().manual_seed(seed)
    documents = (torch.rand(B, T, generator=gen) < ends).long().cumsum(1) if ends else None
    n = math.ceil(T / BLOCK)
    exact = document_mask(torch.zeros(B, T) if documents is None else documents, window)
    pad = n * BLOCK - T
    tiles = F.pad(exact, (0, pad, 0, pad)).view(B, 1, n, BLOCK, n, BLOCK)
    real = F.pad(torch.ones(T, T), (0, pad, 0, pad)).view(n, BLOCK, n, BLOCK).sum((1, 3))
    seen = tiles.sum((3, 5))
    mask = block_mask(B, T, exact.device, documents, window)
    lists = (mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)
    partial, whole = (torch.zeros(B, 1, n, n, dtype=torch.bool) for _ in range(2))
    for table, (count, which) in zip((partial, whole), lists, strict=True):
        for b in range(B):
            for row in range(n):
                table[b, 0, row, which[b, 0, row, : count[b, 0, row]].long()] = True
    assert torch.equal(whole, (seen == real) & torch.ones(n, n, dtype=torch.bool).tril(-1))
    assert torch.equal(partial | whole, seen > 0)
    assert not (partial & whole).any()


# -------------------------------------------------------------------------------------------- Flash Attention 3


@torch.library.custom_op("tests::varlen", mutates_args=())
def varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, edges: torch.Tensor, longest: int, scale: float, back: int
) -> torch.Tensor:
    """Each document alone, by the definition."""
    parts = []
    for a, b in itertools.pairwise(edges.tolist()):
        assert 0 < b - a <= longest
        alone = (x[None, a:b] for x in (q, k, v))
        parts.append(reference_attend(*alone, window=None if back < 0 else back, scale=scale)[0])
    return torch.cat(parts)


@varlen.register_fake
def _(q, k, v, edges, longest, scale, back):
    return torch.empty_like(q)


def remember(ctx, inputs, output) -> None:
    *tensors, ctx.longest, ctx.scale, ctx.back = inputs
    ctx.save_for_backward(*tensors)


def backward(ctx, g):
    *qkv, edges = ctx.saved_tensors
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in qkv]
        parts = [
            reference_attend(
                *(x[None, a:b] for x in leaves), window=None if ctx.back < 0 else ctx.back, scale=ctx.scale
            )
            for a, b in itertools.pairwise(edges.tolist())
        ]
        grads = torch.autograd.grad(torch.cat(parts, 1)[0], leaves, g)
    return *grads, None, None, None, None


varlen.register_autograd(backward, setup_context=remember)


class StandIn:
    """What the hub's kernel looks like from outside, with its habits: keywords, rows laid end to end, int32 edges."""

    def __init__(self) -> None:
        self.calls: list[dict] = []
        self.flash_attn_interface = self

    def flash_attn_varlen_func(
        self, q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size
    ):
        if not torch.compiler.is_compiling():
            self.calls.append({"edges": cu_seqlens_q.tolist(), "longest": max_seqlen_q, "window": window_size})
            assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q, "the kernel would not look at what is beyond"
        assert q.ndim == 3
        assert cu_seqlens_q.dtype == torch.int32
        assert cu_seqlens_q is cu_seqlens_k
        assert max_seqlen_q == max_seqlen_k
        assert causal
        assert window_size[1] == 0
        return varlen(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, window_size[0])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """A package `kernels` whose hub has the kernel."""
    kernel, package = StandIn(), types.ModuleType("kernels")
    package.get_kernel = lambda repo, version: kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernels", package)
    monkeypatch.setattr(flash, "_varlen", None)
    return kernel


@pytest.mark.parametrize("scale", [None, 0.1])
@pytest.mark.parametrize(("B", "T", "window", "packed"), CASES)
def test_flash_attention_is_the_definition(hub: StandIn, B, T, window, packed, scale) -> None:
    flash.load()
    q, k, v = some(B, T, 2, 8, T)
    documents = numbered(B, T, 3) if packed else None
    expected = reference_attend(q, k, v, documents_BT=documents, window=window, scale=scale)
    found = attend(q, k, v, documents_BT=documents, window=window, scale=scale, backend="fa3")
    torch.testing.assert_close(found, expected)
    assert hub.calls[0]["window"] == (-1 if window is None else window, 0)
    assert hub.calls[0]["longest"] == T


def test_edges_are_where_documents_begin_in_rows_laid_end_to_end() -> None:
    assert edges_of(torch.tensor([[0, 0, 1, 2], [2, 2, 2, 2]])).tolist() == [0, 2, 3, 4, 8]
    assert edges_of(torch.tensor([[5]])).tolist() == [0, 1]
    assert edges_of(torch.zeros(3, 4)).tolist() == row_edges(3, 4, torch.device("cpu")).tolist() == [0, 4, 8, 12]


def test_the_other_build_is_taken_when_the_first_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, package, asked = StandIn(), types.ModuleType("kernels"), []

    def get_kernel(repo: str, version: int, trust_remote_code: object = False) -> StandIn:
        asked.append((repo, version, trust_remote_code))
        if len(asked) == 1:
            raise ValueError("untrusted")
        return kernel

    package.get_kernel = get_kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernels", package)
    monkeypatch.setattr(flash, "_varlen", None)
    assert flash.load() == flash.HUB[1]
    assert asked == [(name, 1, [name]) for name in flash.HUB]

    def offline(repo: str, version: int) -> StandIn:
        raise ConnectionError

    package.get_kernel = offline  # type: ignore[attr-defined]
    with pytest.raises(flash.Unavailable, match="no kernel could be loaded from the hub"):
        flash.load()


# -------------------------------------------------------------------------------------------- in a model

MODEL = GPTConfig(vocab=61, layers=3, width=32, heads=2, long_layers=(0, 2), zero_init=False, no_attention=(1,))


def batch(B: int, T: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(61, (B, T), generator=torch.Generator().manual_seed(seed)), numbered(B, T, seed)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_model_has_the_same_loss_with_every_backend(hub: StandIn) -> None:
    flash.load()
    ids, documents = batch(2, 150, 4)
    found = []
    for backend in get_args(Backend):
        torch.manual_seed(0)
        model = GPT(MODEL, 150, backend)
        with torch.no_grad():
            found.append(model(ids, ids.roll(-1, 1), documents, Windows(8, 40)).item())
    assert found == pytest.approx([found[-1]] * 3, rel=1e-6)


def test_layers_share_one_mask_per_window(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(attention, "plain_mask", lambda *a: made.append(a[-1]) or plain_mask(*a))
    ids, documents = batch(2, 150, 4)
    GPT(MODEL, 150)(ids, ids.roll(-1, 1), documents, Windows(8, 40))
    assert made == [8, 40]


@pytest.mark.parametrize("arithmetic", [torch.float32, torch.bfloat16])
def test_one_graph_serves_any_number_of_documents(hub: StandIn, arithmetic: torch.dtype) -> None:
    flash.load()
    torch._dynamo.reset()
    plain, model = GPT(MODEL, 150), GPT(MODEL, 150, "fa3")
    model.load_state_dict(plain.state_dict())
    call = torch.compile(model, backend="eager", dynamic=False, fullgraph=True)
    try:
        for seed in range(4):
            ids, documents = batch(2, 150, seed)
            edges = edges_of(documents)
            torch._dynamo.mark_dynamic(edges, 0)
            with torch.autocast("cpu", arithmetic, enabled=arithmetic != torch.float32):
                loss = call(ids, ids.roll(-1, 1), documents, Windows(8, 40), None, True, edges)
                expected = plain(ids, ids.roll(-1, 1), documents, Windows(8, 40))
            loss.backward()
            assert loss.item() == pytest.approx(expected.item(), rel=1e-5 if arithmetic == torch.float32 else 2e-3)
            torch.compiler.set_stance("fail_on_recompile")
    finally:
        torch.compiler.set_stance("default")


def test_the_blocks_of_flex_attention_can_be_made_inside_a_graph() -> None:
    torch._dynamo.reset()
    plain, model = GPT(MODEL, 150), GPT(MODEL, 150, "flex")
    model.load_state_dict(plain.state_dict())
    call = torch.compile(model, backend="eager", dynamic=False, fullgraph=True)
    try:
        for seed in range(2):
            ids, documents = batch(2, 150, seed)
            with torch.no_grad():
                loss = call(ids, ids.roll(-1, 1), documents, Windows(8, 40))
                expected = plain(ids, ids.roll(-1, 1), documents, Windows(8, 40))
            assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
            torch.compiler.set_stance("fail_on_recompile")
    finally:
        torch.compiler.set_stance("default")


# -------------------------------------------------------------------------------------------- which one


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> torch.device:
    """As if torch saw an NVIDIA GPU, with Triton."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return torch.device("cuda")


def test_hopper_takes_flash_attention_where_the_package_is(hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    device = gpu(monkeypatch, (9, 0))
    assert choose_backend("auto", device, torch.bfloat16, 128) == ("fa3", "this GPU has it")
    assert choose_backend("fa3", device, torch.bfloat16, 128) == ("fa3", "as asked")
    for dtype, width, why in (
        (torch.float32, 128, "computes in bfloat16, not in float32"),
        (torch.bfloat16, 36, "needs heads of 8n up to 256 channels, not 36"),
    ):
        assert choose_backend("auto", device, dtype, width) == ("flex", f"Flash Attention 3 {why}")
        with pytest.raises(UserError, match=why):
            choose_backend("fa3", device, dtype, width)


def test_other_gpus_take_flex_attention_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kernels", None)
    name, why = choose_backend("auto", gpu(monkeypatch, (9, 0)), torch.bfloat16, 128)
    assert name == "flex"
    assert "the package `kernels` is not installed (pip install 'speedrun[gpu]')" in why
    name, why = choose_backend("auto", gpu(monkeypatch, (8, 6)), torch.bfloat16, 128)
    assert (name, why) == ("flex", "Flash Attention 3 needs an NVIDIA Hopper GPU, compute capability 9.x (8.6 here)")
    name, why = choose_backend("auto", gpu(monkeypatch, (8, 6)), torch.bfloat16, 8)
    assert name == "sdpa"
    assert "FlexAttention needs heads of 16 or wider, not 8" in why


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_without_a_gpu_of_nvidia_it_is_sdpa(kind: str) -> None:
    device = torch.device(kind)
    name, why = choose_backend("auto", device)
    assert name == "sdpa"
    assert f"FlexAttention has no backward pass on {kind}" in why
    for asked in ("fa3", "flex"):
        with pytest.raises(UserError, match=f"Attention '{asked}' was asked for, but .*; here there is sdpa: choose"):
            choose_backend(asked, device)
    with pytest.raises(UserError, match="Unknown attention 'flash'"):
        choose_backend("flash", device)
