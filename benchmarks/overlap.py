"""What interleaving hides: the sharded step in two orders, and DDP with replicated optimizers, over a slow link.

    python -m benchmarks.overlap                 # two processes of one thread each
    python -m benchmarks.overlap --ranks 4

The processes are real and talk through gloo. The link is modelled on top: transfers of a rank queue, but for the few
hundred bytes on which ranks agree in each step, whose packets pass between those of large ones, and each takes
bytes / bandwidth once all ranks launched it. Unless --bandwidth says otherwise, communicating in a step takes as long
as its optimizers compute. All three run in the same processes, one step of each in turn. At the end the simulation says
what it expects from steps without a slow link: each of them, with what every rank needed for every item, is carried out
again on paper with the link added. What a step did comes from torch.profiler, which slows all of them alike.
"""

import argparse
import datetime
import os
import queue
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.simulate import Link, Rank, measured, simulate, traffic
from benchmarks.timeline import timeline_svg
from speedrun.files import write_atomic
from speedrun.model.gpt import GPT
from speedrun.optim.sharded import ORDERS, Comm, Interleaved
from speedrun.recipes import get_recipe
from speedrun.training.config import Recipe, with_fields
from speedrun.training.optimizers import build_optimizer
from speedrun.training.trace import Span, spans

LENGTH = 128


class SlowLink:
    """Transfers one after the other, each taking bytes / bandwidth from when all ranks have launched it."""

    def __init__(self) -> None:
        self.bandwidth = float("inf")
        self.jobs: queue.Queue[tuple[Any, float, float, Callable[[], object]]] = queue.Queue()
        self.carried: list[float] = []  # seconds that gloo itself needed for each transfer
        threading.Thread(target=self._carry, daemon=True).start()

    def _carry(self) -> None:
        done = 0.0
        while True:
            work, size, launched, arrived = self.jobs.get()
            work.wait()
            self.carried.append(time.perf_counter() - max(launched, done))
            if self.bandwidth < float("inf"):
                time.sleep(size / self.bandwidth)
            done = time.perf_counter()
            arrived()

    def send(self, work: Any, size: float, arrived: Callable[[], object] | None = None) -> threading.Event:
        event = threading.Event()
        self.jobs.put((work, size, time.perf_counter(), arrived or event.set))
        return event


class SlowComm(Comm):
    """Ranks whose bulk transfers pass a slow link."""

    link: SlowLink

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Any:
        return self.link.send(super().reduce_scatter(out, whole), whole.nbytes * (self.size - 1) / self.size)

    def all_gather(self, whole: Tensor, part: Tensor) -> Any:
        return self.link.send(super().all_gather(whole, part), whole.nbytes * (self.size - 1) / self.size)

    def all_reduce(self, x: Tensor) -> Any:
        return self.link.send(super().all_reduce(x), 2 * x.nbytes * (self.size - 1) / self.size)


def workload(width: int) -> Recipe:
    """`normuon`, deep and wide enough that its optimizers have something to do and ranks can share it evenly."""
    size = {"model.num_layers": 6, "model.dim": width, "model.num_heads": width // 64}
    return with_fields(get_recipe("normuon", "pocket"), size)


class Entrant:
    """A model with one way to train it in several processes."""

    def __init__(self, name: str, recipe: Recipe, comm: SlowComm, rows: int, buckets: int) -> None:
        self.name, self.comm = name, comm
        torch.manual_seed(0)
        self.model = GPT(recipe.model, LENGTH)
        self.whole: list[float] = []  # seconds of each step
        self.after: list[float] = []  # of what follows its backward pass
        self.waited: list[float] = []  # for transfers
        self.everybody: list[float] = []  # the median of that on each rank
        self.behind: list[float] = []  # for the slowest rank to end its backward pass
        self.recorded: list[tuple[float, list[Span]]] = []  # of each step: the end of its backward pass, what followed
        ids = torch.randint(recipe.model.vocab_size, (rows, LENGTH), generator=torch.Generator().manual_seed(comm.rank))
        self.batch = ids, ids.roll(-1, 1)
        self.forward: Any = self.model
        if name == "ddp":
            self.optimizer = build_optimizer(self.model.named_parameters(), self.model.param_roles(), recipe.optim)
            self.forward = DistributedDataParallel(self.model)
            self.forward.register_comm_hook(None, self.reduce_bucket)
            return

        def together(members: Any) -> Interleaved:
            return Interleaved(self.model, members, order=name, process_group=comm, buckets=buckets)

        self.optimizer = build_optimizer(
            self.model.named_parameters(), self.model.param_roles(), replace(recipe.optim, every=1), together
        )

    def reduce_bucket(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        flat = bucket.buffer().div_(self.comm.size)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        work = dist.all_reduce(flat, async_op=True)
        size = 2 * flat.nbytes * (self.comm.size - 1) / self.comm.size
        self.comm.link.send(work, size, lambda: done.set_result(flat))
        return done

    def step(self) -> None:
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            dist.barrier()
            start = time.perf_counter()
            with record_function("compute: backward model"):
                self.forward(*self.batch, tied=False).backward()
            middle = time.perf_counter()
            self.optimizer.step()
            end = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        self.whole.append(end - start)
        self.after.append(end - middle)
        found = spans(recorded)
        late = start - next(s.start for s in found if s.item == "model")  # this clock is everybody's
        found = [s._replace(start=s.start + late, end=s.end + late) for s in found]
        waits = [(s.item == "agreement", s.end - s.start) for s in found if s.kind == "wait"]
        self.waited.append(sum(seconds for agreeing, seconds in waits if not agreeing))
        self.behind.append(sum(seconds for agreeing, seconds in waits if agreeing))
        self.recorded.append((middle, found))

    def forget(self) -> None:
        for found in (self.whole, self.after, self.waited, self.behind, self.recorded):
            found.clear()  # type: ignore[attr-defined]


def worker(rank: int, args: argparse.Namespace, meeting: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = datetime.timedelta(seconds=600)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=args.ranks, timeout=limit)
    comm = SlowComm(None, rank, args.ranks)
    comm.link = SlowLink()
    recipe = workload(args.width)
    recipe = replace(recipe, optim=replace(recipe.optim, every=1))  # every table in every step
    entrants = [Entrant(name, recipe, comm, args.rows, args.buckets) for name in (*ORDERS, "ddp")]
    sharded = entrants[:-1]
    for _ in range(3):
        for entrant in entrants:
            entrant.step()
    for entrant in sharded:
        entrant.forget()
    comm.link.carried.clear()
    for _ in range(args.rounds):  # without a slow link: what the items cost, and when reductions begin
        for entrant in sharded:
            entrant.step()
    # A rank that launches early waits for the others, so the fastest one tells how long a transfer takes.
    carried = sum(map(min, zip(*comm.all_gather_object(comm.link.carried), strict=True))) / args.rounds / len(sharded)
    quick = {entrant.name: list(zip(*comm.all_gather_object(entrant.recorded), strict=True)) for entrant in sharded}
    sent = sum(sum(traffic(plan)) for plan in sharded[0].optimizer.plan)  # type: ignore[union-attr]
    computing = statistics.mean(
        sum(s.end - s.start for s in did if s.kind == "compute" and s.item not in ("model", "agreement"))
        for entrant in sharded
        for _, did in entrant.recorded
    )
    comm.link.bandwidth = comm.all_gather_object(args.bandwidth * 1e6 or sent / computing)[0]
    for entrant in entrants:
        entrant.step()
        entrant.forget()
    for _ in range(args.rounds):
        for entrant in entrants:
            entrant.step()
    if args.plot:
        drawn = [(f"{e.name} order", [mine for _, mine in comm.all_gather_object(e.recorded[-1])]) for e in sharded]
        if rank == 0:
            write_atomic(args.plot, timeline_svg(drawn))
    waits = [statistics.median(entrant.waited) for entrant in sharded]
    for entrant, everybody in zip(sharded, zip(*comm.all_gather_object(waits), strict=True), strict=True):
        entrant.everybody = list(everybody)
    if rank == 0:
        report(args, entrants, sent, computing, comm.link.bandwidth)
        link = Link(comm.link.bandwidth, approach=sent / carried)
        print(f"gloo itself takes {1e3 * carried:.0f} ms of a step, while earlier transfers pass the modelled link")
        print("\nsimulated from the steps without a slow link, from the end of the backward pass to the last arrival:")
        for entrant in sharded:
            found = [simulated(entrant, step, link) for step in quick[entrant.name]]
            expected, waiting = (statistics.median(x) for x in zip(*found, strict=True))
            real, waited = statistics.median(entrant.after), statistics.median(entrant.waited)
            print(
                f"  {entrant.name:12} {1e3 * expected:8.1f} ms, measured {1e3 * real:8.1f} ms ({expected / real:.2f})",
                end="",
            )
            print(f"; waiting {1e3 * waiting:.1f} ms, measured {1e3 * waited:.1f} ms")
    dist.barrier()
    dist.destroy_process_group()


def simulated(entrant: Entrant, step: Sequence[tuple[float, list[Span]]], link: Link) -> tuple[float, float]:
    """How long rank 0 would need after its backward pass, and wait in it, had this step had such a link."""
    optimizer = entrant.optimizer
    assert isinstance(optimizer, Interleaved)
    early = {bucket.label for bucket in optimizer.early}
    start = step[0][0]
    ranks = []
    for middle, did in step:
        launched = {s.item: s.end - start for s in did if s.kind == "launch" and s.op == "reduce" and s.item in early}
        agreed = max((s.end for s in did if s.item == "agreement"), default=middle)
        ranks.append(Rank(measured(did, optimizer.plan, 1), launched, agreed - start))
    first = simulate(optimizer.order, ranks, link, len(ranks))[0]
    waiting = sum(s.end - s.start for s in first if s.kind == "wait")
    return max(s.end for s in first), waiting


def report(args: argparse.Namespace, entrants: list[Entrant], sent: float, computing: float, bandwidth: float) -> None:
    ddp = entrants[-1]
    print(f"{args.ranks} processes, {args.rows} rows of {LENGTH} each, width {args.width}, {args.buckets} buckets")
    print(
        f"a step sends {sent / 1e6:.1f} MB per rank, {1e3 * sent / bandwidth:.0f} ms at {bandwidth / 1e6:.1f} MB/s",
        end="",
    )
    print(f", and computes {1e3 * computing:.0f} ms in the optimizers")
    print("               whole step ms   after backward ms   for transfers ms   of it   each rank (most, on rank 0)")
    for e in entrants:
        whole, after, waited = (1e3 * x for x in (statistics.median(e.whole), statistics.median(e.after), mean_wait(e)))
        each = ", ".join(f"{1e3 * x:.0f}" for x in e.everybody)
        share = "" if e is ddp else f"{waited:19.1f} {100 * waited / after:5.1f} %   {each:9} ({longest(e)})"
        print(f"  {e.name:12} {whole:13.1f} {after:19.1f}{share}")
    plain = entrants[0]
    for e in entrants[1:-1]:
        gone = 1 - mean_wait(e) / mean_wait(plain)
        ratio = statistics.median(b / a for a, b in zip(e.whole, ddp.whole, strict=True))
        print(f"{e.name}: {100 * gone:.0f} % of the sequential order's waiting for transfers is gone", end="")
        print(f"; the whole step is {ratio:.2f}x as fast as with DDP and replicated optimizers", end="")
        print(f"; {1e3 * statistics.median(e.behind):.0f} ms more for the slower rank's backward pass")


def mean_wait(entrant: Entrant) -> float:
    return statistics.mean(entrant.everybody) if entrant.everybody else 0.0


def longest(entrant: Entrant) -> str:
    """What was waited for most, with the mean milliseconds of a step."""
    total: dict[str, float] = defaultdict(float)
    for _, did in entrant.recorded:
        for s in did:
            if s.kind == "wait" and s.item != "agreement":
                total[f"{s.item} {s.op}"] += 1e3 * (s.end - s.start) / len(entrant.recorded)
    first = sorted(total.items(), key=lambda pair: -pair[1])[:3]
    return ", ".join(f"{name} {ms:.0f}" for name, ms in first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rows", type=int, default=4, help="of 128 tokens, for each process")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--buckets", type=int, default=6)
    parser.add_argument("--bandwidth", type=float, default=0, help="MB/s; 0: as long as the optimizers compute")
    parser.add_argument("--plot", type=Path, help="draw the last step of each order into this SVG file")
    args = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # for the processes below: the profiler tells whenever it starts
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(worker, (args, f"{folder}/meet"), args.ranks, start_method="spawn")


if __name__ == "__main__":
    main()
