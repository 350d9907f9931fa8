"""What interleaving hides: the sharded step in two orders, and DDP with replicated optimizers, over a slow link.

    python -m benchmarks.overlap                 # two processes of one thread each
    python -m benchmarks.overlap --ranks 4

The processes are real and talk through gloo. The link is modelled on top: transfers of a rank queue, and each takes
bytes / bandwidth once all ranks launched it. Unless --bandwidth says otherwise, communicating in a step takes as long
as its optimizers compute. All three run in the same processes, one step of each in turn. At the end the simulation says
what it expects from the times without a slow link.
"""

import argparse
import datetime
import os
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing
from torch.nn.parallel import DistributedDataParallel

from speedrun.model.gpt import GPT
from speedrun.optim.config import build_optimizer
from speedrun.optim.interleave import Interleaved, Span
from speedrun.optim.pipeline import ORDERS, Team
from speedrun.optim.simulate import Link, measured, simulate
from speedrun.recipes import get_recipe
from speedrun.train.config import Recipe, with_fields

LENGTH = 128


class SlowLink:
    """Transfers one after the other, each taking bytes / bandwidth from when all ranks have launched it."""

    def __init__(self) -> None:
        self.bandwidth = float("inf")
        self.jobs: queue.Queue[tuple[Any, float, Callable[[], object]]] = queue.Queue()
        threading.Thread(target=self._carry, daemon=True).start()

    def _carry(self) -> None:
        while True:
            work, size, arrived = self.jobs.get()
            work.wait()
            time.sleep(size / self.bandwidth)
            arrived()

    def send(self, work: Any, size: float, arrived: Callable[[], object] | None = None) -> threading.Event:
        event = threading.Event()
        self.jobs.put((work, size, arrived or event.set))
        return event


class SlowTeam(Team):
    """Ranks whose bulk transfers pass a slow link."""

    link: SlowLink

    def scatter_sum(self, out: Tensor, whole: Tensor) -> Any:
        return self.link.send(super().scatter_sum(out, whole), whole.nbytes * (self.size - 1) / self.size)

    def gather(self, whole: Tensor, part: Tensor) -> Any:
        return self.link.send(super().gather(whole, part), whole.nbytes * (self.size - 1) / self.size)

    def sum(self, x: Tensor) -> Any:
        return self.link.send(super().sum(x), 2 * x.nbytes * (self.size - 1) / self.size)


def workload(width: int) -> Recipe:
    """`normuon` at pocket depth, wide enough that its optimizers have something to do."""
    return with_fields(get_recipe("normuon", "pocket"), {"model.width": width, "model.heads": width // 64})


class Entrant:
    """A model with one way to train it in several processes."""

    def __init__(self, name: str, recipe: Recipe, team: SlowTeam, rows: int, buckets: int) -> None:
        self.name, self.team = name, team
        torch.manual_seed(0)
        self.model = GPT(recipe.model, LENGTH)
        self.spans: list[Span] = []
        self.whole: list[float] = []  # seconds of each step
        self.after: list[float] = []  # of what follows its backward pass
        self.waited: list[float] = []
        self.recorded: list[Span] = []  # relative to the end of the backward pass
        ids = torch.randint(recipe.model.vocab, (rows, LENGTH), generator=torch.Generator().manual_seed(team.rank))
        self.batch = ids, ids.roll(-1, 1)
        self.forward: Any = self.model
        if name == "ddp":
            self.optimizer = build_optimizer(self.model.named_parameters(), recipe.optim)
            self.forward = DistributedDataParallel(self.model)
            self.forward.register_comm_hook(None, self.reduce_bucket)
            return

        def together(members: Any) -> Interleaved:
            return Interleaved(self.model, members, order=name, process_group=team, trace=self.spans, buckets=buckets)

        self.optimizer = build_optimizer(self.model.named_parameters(), replace(recipe.optim, every=1), together)

    def reduce_bucket(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        flat = bucket.buffer().div_(self.team.size)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        work = dist.all_reduce(flat, async_op=True)
        size = 2 * flat.nbytes * (self.team.size - 1) / self.team.size
        self.team.link.send(work, size, lambda: done.set_result(flat))
        return done

    def step(self) -> None:
        self.spans.clear()
        dist.barrier()
        start = time.perf_counter()
        self.forward(*self.batch, None, None, None, False, None).backward()
        middle = time.perf_counter()
        self.optimizer.step()
        end = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        self.whole.append(end - start)
        self.after.append(end - middle)
        self.waited.append(sum(s.end - s.start for s in self.spans if s.kind == "wait"))
        self.recorded += [s._replace(start=s.start - middle, end=s.end - middle) for s in self.spans]

    def forget(self) -> None:
        for found in (self.whole, self.after, self.waited, self.recorded):
            found.clear()  # type: ignore[attr-defined]


def worker(rank: int, args: argparse.Namespace, meeting: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = datetime.timedelta(seconds=600)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=args.ranks, timeout=limit)
    team = SlowTeam(None, rank, args.ranks)
    team.link = SlowLink()
    recipe = workload(args.width)
    recipe = replace(recipe, optim=replace(recipe.optim, every=1))  # every table in every step
    entrants = [Entrant(name, recipe, team, args.rows, args.buckets) for name in ("plain", "interleaved", "ddp")]
    plain, interleaved, _ = entrants
    for _ in range(3):
        for entrant in entrants:
            entrant.step()
    interleaved.forget()
    for _ in range(args.rounds):  # without a slow link: what the items cost
        interleaved.step()
    optimizer = interleaved.optimizer
    assert isinstance(optimizer, Interleaved)
    costs = measured(interleaved.recorded, optimizer.items, args.rounds)
    sent = sum(c.reduce + c.gather for c in costs.values())
    computing = sum(c.compute for c in costs.values())
    team.link.bandwidth = team.everybodys(args.bandwidth * 1e6 or sent / computing)[0]
    launched = {
        item.label: statistics.median(s.end for s in interleaved.recorded if s[:3] == ("launch", item.label, "reduce"))
        for item in optimizer.early
    }
    for entrant in entrants:
        entrant.step()
        entrant.forget()
    for _ in range(args.rounds):
        for entrant in entrants:
            entrant.step()
    if rank == 0:
        report(args, entrants, sent, computing, team.link.bandwidth)
        link = Link(team.link.bandwidth)
        print("\nforetold from the times without a slow link, from the end of the backward pass to the last arrival:")
        for entrant in (plain, interleaved):
            begun = {label: min(0.0, when) for label, when in launched.items()}
            spans = simulate(ORDERS[entrant.name](optimizer.items), costs, link, args.ranks, begun)
            expected = max(s.end for s in spans)
            waiting = sum(s.end - s.start for s in spans if s.kind == "wait")
            real = statistics.median(entrant.after)
            waited = statistics.median(entrant.waited)
            print(
                f"  {entrant.name:12} {1e3 * expected:8.1f} ms, measured {1e3 * real:8.1f} ms ({expected / real:.2f})",
                end="",
            )
            print(f"; waiting {1e3 * waiting:.1f} ms, measured {1e3 * waited:.1f} ms")
    dist.barrier()
    dist.destroy_process_group()


def report(args: argparse.Namespace, entrants: list[Entrant], sent: float, computing: float, bandwidth: float) -> None:
    _, interleaved, ddp = entrants
    middle = {e.name: [statistics.median(x) for x in (e.whole, e.after, e.waited)] for e in entrants}
    print(f"{args.ranks} processes, {args.rows} rows of {LENGTH} each, width {args.width}, {args.buckets} buckets")
    print(
        f"a step sends {sent / 1e6:.1f} MB per rank, {1e3 * sent / bandwidth:.0f} ms at {bandwidth / 1e6:.1f} MB/s",
        end="",
    )
    print(f", and computes {1e3 * computing:.0f} ms in the optimizers")
    print("               whole step ms   after backward ms   waiting ms   waiting/after backward")
    for e in entrants:
        whole, after, waited = (1e3 * x for x in middle[e.name])
        share = "" if e is ddp else f"{waited:13.1f} {100 * waited / after:20.1f} %"
        print(f"  {e.name:12} {whole:13.1f} {after:19.1f}{share}")
    gone = 1 - middle["interleaved"][2] / middle["plain"][2]
    print(f"of the plain order's waiting, {100 * gone:.0f} % is gone")
    ratios = [b / a for a, b in zip(interleaved.whole, ddp.whole, strict=True)]
    print(f"against DDP and replicated optimizers, the whole step is {statistics.median(ratios):.2f}x as fast")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rows", type=int, default=2, help="of 128 tokens, for each process")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--buckets", type=int, default=6)
    parser.add_argument("--bandwidth", type=float, default=0, help="MB/s; 0: as long as the optimizers compute")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(worker, (args, f"{folder}/meet"), args.ranks, start_method="spawn")


if __name__ == "__main__":
    main()
