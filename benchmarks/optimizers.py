"""One step of our optimizers against their peers, against a plain version, and against the machine.

    python -m benchmarks.optimizers                    # all of it, up to an hour on two cores
    python -m benchmarks.optimizers --part steps       # optimizer steps alone
    python -m benchmarks.optimizers --part training    # NorMuon + Adam against fused AdamW in whole training steps
    python -m benchmarks.optimizers --part fsdp        # four processes: matrices spread over them, or all done by each

Everything that is compared runs interleaved in one process; ratios of medians are printed. `limit` is the step's matrix
products alone, counted as executed, at the speed that a large matrix product reached in the same run. Peers that are
not installed are named and left out (pip install pytorch-optimizer heavyball).
"""

import argparse
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from speedrun.model.config import HeadConfig
from speedrun.model.gpt import GPT, GPTConfig
from speedrun.optim import Adam, Combined, Muon, NorMuon, orthogonalize, route
from speedrun.optim.polynomial import multiplications
from speedrun.training import telemetry
from speedrun.training.device import choose, compiled

Step = Callable[[], object]


def matrices(layers: int, width: int) -> list[nn.Parameter]:
    """QKV, O, MLP up and down of each layer, with gradients."""
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers
    params = [nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def unbatched(params: list[nn.Parameter], lr: float = 0.02, mu: float = 0.95) -> Step:
    """Muon as a person would first write it in float32: one block after the other, three products an iteration."""
    from speedrun.optim import POLAR_EXPRESS

    momentum = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step() -> None:
        for p, m in zip(params, momentum, strict=True):
            assert p.grad is not None
            m.lerp_(p.grad, 1 - mu)
            u = p.grad.lerp(m, mu)
            blocks = u.chunk(3) if u.shape[0] == 3 * u.shape[1] else (u,)
            done = []
            for block in blocks:
                tall = block.shape[0] > block.shape[1]
                x = block.T if tall else block
                x = x / (x.norm() * 1.02 + 1e-7)
                for a, b, c in POLAR_EXPRESS:
                    s = x @ x.T
                    x = a * x + (b * s + c * s @ s) @ x
                done.append(x.T if tall else x)
            p.sub_(torch.cat(done), alpha=lr)

    return step


def executed_flops(rows: int, cols: int, dtype: torch.dtype) -> float:
    """Of the matrix products that `orthogonalize` makes for one block on this CPU."""
    return 2.0 * multiplications(rows, cols, 5, dtype, torch.device("cpu"))


def peak(size: int, dtype: torch.dtype) -> float:
    """FLOP/s of one large matrix product, now."""
    a, b = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
    out = torch.empty(size, size, dtype=dtype)
    start = time.perf_counter()
    torch.mm(a, b, out=out)
    return 2.0 * size**3 / (time.perf_counter() - start)


def medians(steps: dict[str, Step], rounds: int, patience: float = 60.0) -> dict[str, float]:
    """Round after round, interleaved, the first one uncounted.

    Who has used up its `patience` in counted seconds sits out the rest of the rounds.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(1 + rounds):
        for name, step in steps.items():
            if sum(times[name][1:]) > patience:
                continue
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def peers(layers: int, width: int) -> dict[str, Step]:
    found: dict[str, Step] = {"torch.optim.Muon": torch.optim.Muon(matrices(layers, width), lr=0.02).step}
    if importlib.util.find_spec("pytorch_optimizer"):
        from pytorch_optimizer import Muon as TheirMuon

        found["pytorch_optimizer Muon"] = TheirMuon(
            [{"params": matrices(layers, width), "use_muon": True}], lr=0.02
        ).step
    else:
        print("pytorch_optimizer is not installed: left out")
    if importlib.util.find_spec("heavyball"):
        import heavyball

        params = matrices(layers, width)
        grads = [p.grad for p in params]
        optimizer = heavyball.Muon(params, lr=0.02)

        def heavyball_step() -> None:
            for p, g in zip(params, grads, strict=True):  # it takes the gradients away
                p.grad = g
            optimizer.step()

        found["heavyball Muon"] = heavyball_step
    else:
        print("heavyball is not installed: left out")
    return found


def compare_steps(layers: int, width: int, rounds: int, with_peers: bool = True) -> None:
    """Ours in the arithmetic that training would choose here for a model of this width."""
    machine = choose("cpu", model=GPTConfig(num_layers=layers, dim=width, num_heads=width // 64), tokens=2048)
    dtype = machine.dtype
    blocks = [3, 1, 1, 1] * layers
    split: list[float] = []

    def speed() -> None:
        split.append(peak(1024, dtype))

    def apart() -> list[dict[str, object]]:
        return [{"params": matrices(layers, width), "blocks": blocks}]

    ours = {
        "Muon, QKV apart": Muon(apart(), lr=0.02, dtype=dtype).step,
        "Muon, QKV as one": Muon(matrices(layers, width), lr=0.02, dtype=dtype).step,
        "NorMuon, QKV apart": NorMuon(apart(), lr=0.02, dtype=dtype).step,
    }
    if dtype != torch.float32:
        ours["Muon, QKV apart, float32"] = Muon(apart(), lr=0.02, dtype=torch.float32).step
    steps: dict[str, Step] = {**ours, "unbatched float32": unbatched(matrices(layers, width))}
    if with_peers:
        steps |= peers(layers, width)
    stack = (
        torch.randn(4 * layers, width, width),
        torch.randn(layers, 4 * width, width),
        torch.randn(layers, width, 4 * width),
    )
    steps["orthogonalize alone"] = lambda: [orthogonalize(x, dtype=dtype) for x in stack]
    steps["machine speed"] = speed
    times = medians(steps, rounds)
    flops = layers * (4 * executed_flops(width, width, dtype) + 2 * executed_flops(4 * width, width, dtype))
    best = statistics.median(split)
    base = times["Muon, QKV apart"]
    count = sum(p.numel() for p in matrices(layers, width))
    print(f"\n{layers} layers of width {width}: {count / 1e6:.1f} M parameters, matmul speed {best / 1e9:.0f} GFLOP/s")
    print(f"  ours in {machine.dtype_name}: {machine.dtype_reason}")
    for name in steps:
        if name != "machine speed":
            print(f"  {name:24} {1e3 * times[name]:9.1f} ms   {times[name] / base:6.2f}x of ours")
    print(f"  {'limit':24} {1e3 * flops / best:9.1f} ms   {flops / best / base:6.2f} of our step (FLOPs as executed)")


@dataclass
class Trainer:
    """A model with its optimizer, and the seconds that each of their steps took."""

    call: Callable[..., Tensor]
    optimizer: torch.optim.Optimizer
    model: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)


def compare_training(config: GPTConfig, rows: int, length: int, micro: int, rounds: int) -> None:
    """Whole steps: forward and backward over `rows`, `micro` at a time and taking turns, then the optimizers."""
    ids = torch.randint(0, config.vocab_size, (rows, length))
    targets = ids.roll(-1, 1)

    def normuon(model: nn.Module, split: bool) -> torch.optim.Optimizer:
        plan = route(model)
        (group,) = plan.muon
        group["blocks"] = [3 if split and "qkv" in name else 1 for name, _ in group["params"]]
        return Combined(NorMuon([group], lr=0.02), Adam(plan.adam, lr=0.003))

    builders: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
        "AdamW, fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.001, fused=True),
        "NorMuon + Adam": lambda model: normuon(model, True),
        "  QKV as one": lambda model: normuon(model, False),
    }
    trainers = {}
    for name, build in builders.items():
        torch.manual_seed(0)
        model = GPT(config, length)
        call, why_not = compiled(model, True, ids.device)
        if why_not:
            print(f"not compiled: {why_not}")
        trainers[name] = Trainer(call, build(model))

    def one_round(count: int) -> None:
        spent = dict.fromkeys(trainers, 0.0)
        for i in range(0, count, micro):
            for name, trainer in trainers.items():
                start = time.perf_counter()
                (trainer.call(ids[i : i + micro], targets[i : i + micro], None) / ids.numel()).backward()
                spent[name] += time.perf_counter() - start
        for name, trainer in trainers.items():
            start = time.perf_counter()
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            trainer.update.append(time.perf_counter() - start)
            trainer.model.append(spent[name])

    for _ in range(2):  # compiles, and makes the optimizers' memory
        one_round(micro)
    for trainer in trainers.values():
        trainer.model.clear()
        trainer.update.clear()
    for _ in range(rounds):
        one_round(rows)
    shape = f"{config.num_layers} layers of width {config.dim}"
    print(f"\ntraining: {shape}, {rows * length:,} tokens a step, {micro} rows at a time, {rounds} steps each")
    common = statistics.median(x for trainer in trainers.values() for x in trainer.model)
    base = trainers["AdamW, fused"]
    for name, trainer in trainers.items():
        steps = [a + b for a, b in zip(trainer.model, trainer.update, strict=True)]
        ratios = [step / (a + b) for step, a, b in zip(steps, base.model, base.update, strict=True)]
        update = statistics.median(trainer.update)
        parts = (common + update) / (common + statistics.median(base.update))
        print(
            f"  {name:16} {1e3 * statistics.median(steps):9.1f} ms   {statistics.median(ratios):.3f}x   "
            f"optimizer alone {1e3 * update:8.1f} ms, with the models' common median {parts:.3f}x"
        )


def flops_of(step: Step) -> int:
    """Of all matrix products; torch's own table lacks the one that works in place."""
    flop_registry[torch.ops.aten.baddbmm_] = flop_registry[torch.ops.aten.baddbmm]
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


def fsdp_worker(rank: int, ranks: int, layers: int, width: int, rounds: int, meeting: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    whole = matrices(layers, width)
    parts = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in whole]
    for p, part in zip(whole, parts, strict=True):
        assert p.grad is not None
        part.grad = distribute_tensor(p.grad, mesh, [Shard(0)])
    blocks = [3, 1, 1, 1] * layers
    names = "every rank does all", "spread over the ranks"
    alone, spread = (NorMuon([{"params": params, "blocks": blocks}], lr=0.02).step for params in (whole, parts))
    counted = torch.tensor([flops_of(alone), flops_of(spread)])
    dist.all_reduce(counted, dist.ReduceOp.MAX)

    def all_of_them(step: Step) -> Step:
        return lambda: (step(), dist.barrier())

    times = medians({name: all_of_them(step) for name, step in zip(names, (alone, spread), strict=True)}, rounds, 1e9)
    if rank == 0:
        print(
            f"\nFSDP2, NorMuon: {layers} layers of width {width}, {ranks} processes of one thread, until all are done"
        )
        for name, flops in zip(names, counted.tolist(), strict=True):
            print(
                f"  {name:24} {1e3 * times[name]:9.1f} ms   {times[name] / times[names[0]]:6.3f}x   "
                f"FLOPs of the rank with most {flops / int(counted[0]):6.3f}"
            )
    dist.destroy_process_group()


def compare_fsdp(ranks: int, layers: int, width: int, rounds: int) -> None:
    """The step on rows of all matrices beside that of ranks which have and orthogonalise every matrix, as under DDP."""
    with tempfile.TemporaryDirectory() as folder:
        args = ranks, layers, width, rounds, f"{folder}/meet"
        multiprocessing.start_processes(fsdp_worker, args, ranks, start_method="spawn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["all", "steps", "training", "fsdp"], default="all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--large", action=argparse.BooleanOptionalAction, default=True, help="also 12 layers of width 768"
    )
    parser.add_argument(
        "--peers", action=argparse.BooleanOptionalAction, default=True, help="also other people's Muon, some minutes"
    )
    args = parser.parse_args()
    print(telemetry.summary(telemetry.snapshot()))
    if args.part in ("all", "steps"):
        compare_steps(6, 384, args.rounds, args.peers)
        if args.large:
            compare_steps(12, 768, max(2, args.rounds // 3), with_peers=False)
            if args.peers:
                compare_steps(1, 768, 2)  # peers that multiply bfloat16 take minutes for twelve layers on many CPUs
    if args.part in ("all", "training"):
        pocket = GPTConfig(num_layers=3, dim=192, num_heads=3, head=HeadConfig(tied=True))
        compare_training(pocket, 32, 128, 32, 6 * args.rounds)
        compare_training(pocket, 8, 128, 8, 12 * args.rounds)
        if args.large:
            gpt2 = GPTConfig(num_layers=12, dim=768, num_heads=12, vocab_size=50_304, head=HeadConfig(tied=True))
            compare_training(gpt2, 128, 256, 8, 2)
    if args.part in ("all", "fsdp"):
        compare_fsdp(4, 6, 384, args.rounds)


if __name__ == "__main__":
    main()
