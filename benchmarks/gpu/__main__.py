"""What the training step becomes on a GPU, on a machine that has none: `python -m benchmarks.gpu`.

Every stage of every recipe with a native size goes through Dynamo, AOTAutograd and Inductor on fake tensors, as one GPU
of eight has it (recipes for small GPUs: a row): kernels, bytes that they touch, bytes kept for the backward pass, and
the most that is alive at once. Nothing is run, so nothing here is a time.

For an H100 a second part counts what surrounds the compiled passes in a training step, as rank 0 of eight and on one
GPU: kernel launches, how often the host waits for the GPU (syncs) or copies to it from memory that is not pinned
(copies), passes through the compiled model, and bytes that travel between the ranks.

    python -m benchmarks.gpu                          all of it, for an H100, an A100 and a 4090: a quarter of an hour
    python -m benchmarks.gpu --only loss              what contains this word
    python -m benchmarks.gpu --kernels --only loss    also compile the Triton kernels to machine code, with ptxas
    python -m benchmarks.gpu --only "step of" --lines  launches and syncs of a training step, by line of source
    python -m benchmarks.gpu --write            keep the numbers in the package, in training/gpus.json, for dry runs

Without --write the numbers are compared with those that were kept; the exit code is 1 if one is worse or a graph fails.
Needs g++ and the package triton.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu import pretend
from speedrun.training.device import by_name
from speedrun.training.gpus import ATTENTION, GPUS, TABLE

GROWTH = 1.001  # bytes that are more than this are worse; kernels must not become more at all


def measure(device: str, only: list[str], kernels: bool) -> None:
    """In a process with the guard: a line of JSON per case."""
    limit = pretend.start(device).shared_memory_per_block_optin
    from benchmarks.gpu import stages, steps
    from benchmarks.gpu.lower import Lowered, compile_kernels

    stages.install_stand_in()
    work = {f"loss of {n} token{'s' * (n > 1)}": (lambda n=n: stages.lower_loss(n)) for n in (1, 3)}
    known = {case.name: case.key(by_name(device, None, "auto", "auto").kernels) for case in stages.cases()}
    work |= {case.name: (lambda case=case: stages.lower_stage(case, ATTENTION[device])) for case in stages.cases()}
    for name, function in work.items():
        if only and not any(word in name for word in only):
            continue
        row: dict[str, Any] = {"device": device, "name": name, **known.get(name, {})}
        try:
            graphs: list[Lowered] = function()
            for graph in graphs:
                row[graph.name] = {"kernels": graph.kernels, "products": graph.products, "bytes": graph.bytes}
                row[graph.name]["launches"] = graph.launches
            row["saved"], row["peak"] = max(g.saved for g in graphs), max(g.peak for g in graphs)
            if kernels:
                shared = {k: size for graph in graphs for k, size in compile_kernels(graph).items()}
                row["compiled"], row["shared"] = len(shared), max(shared.values())
                too_large = [k for k, size in shared.items() if size > limit]
                if too_large:
                    row["failure"] = f"{too_large[0]} needs {shared[too_large[0]]} bytes of shared memory of {limit}"
        except Exception as e:  # whatever a compiler may raise is the finding
            said = [line for line in str(e).splitlines() if line.strip()]
            row["failure"] = f"{type(e).__name__}: {said[0] if said else ''}"
        print(json.dumps(row), flush=True)
    for step in steps.cases() if device == "h100" else ():
        wanted = [name for name in step.names if not only or any(word in name for word in only)]
        try:
            for row in steps.rows(step, ATTENTION[device]) if wanted else ():
                if row["name"] in wanted:
                    print(json.dumps({"device": device, **row}), flush=True)
        except Exception as e:  # as above
            print(json.dumps({"device": device, "name": wanted[0], "failure": f"{type(e).__name__}: {e}"}), flush=True)


def worse(row: dict[str, Any], kept: dict[str, Any]) -> list[str]:
    """What has grown since the numbers were kept."""
    found = []
    if "collectives" in row:
        for what in ("launches", "syncs", "copies", "messages", "passes"):
            if row[what] > kept[what]:
                found.append(f"{what} {row[what]:,}, were {kept[what]:,}")
        for kind, (count, size) in row["collectives"].items():
            calls, total = kept["collectives"][kind]
            if count > calls or size > GROWTH * total:
                found.append(f"{kind} {count:,} of {size:,} bytes, were {calls:,} of {total:,}")
        return found
    for part in ("forward", "backward") if "backward" in kept else ("forward",):
        for what in kept[part]:
            now, before = row[part][what], kept[part][what]
            if now > before * (GROWTH if what == "bytes" else 1):
                found.append(f"{part} {what} {now:,}, were {before:,}")
    found += [
        f"{what} {row[what]:,} bytes, were {kept[what]:,}"
        for what in ("saved", "peak")
        if row[what] > GROWTH * kept[what]
    ]
    return found


def line(row: dict[str, Any]) -> str:
    if "failure" in row:
        return f"{row['name']:34} {row['failure']}"
    if "collectives" in row:
        return step_line(row)
    parts = [row[part] for part in ("forward", "backward") if part in row]
    passes = "   ".join(f"{p['kernels']:4} + {p['products']:3} {p['bytes'] / 1e9:7.2f}" for p in parts)
    text = f"{row['name']:34} {passes:39}   {row['saved'] / 1e9:6.2f} {row['peak'] / 1e9:6.2f}"
    return text + (f"   {row['compiled']} compiled, shared {row['shared']:,}" if "compiled" in row else "")


STEPS = f"\n{'a training step around the compiled model':44} launches syncs copies passes   between ranks"


def step_line(row: dict[str, Any]) -> str:
    moved = [f"{count} {kind} {size / 1e6:,.1f} MB" for kind, (count, size) in row["collectives"].items() if count]
    moved += [f"{row['messages']} message between CPUs"] * bool(row["messages"])
    counts = f"{row['launches']:8,} {row['syncs']:5} {row['copies']:6} {row['passes']:6}"
    return f"{row['name']:44} {counts}   {', '.join(moved) or '-'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", choices=list(GPUS), default=list(GPUS))
    parser.add_argument("--only", nargs="*", default=[], help="words, one of which is in the name of a case")
    parser.add_argument("--kernels", action="store_true", help="compile the Triton kernels to machine code")
    parser.add_argument("--lines", action="store_true", help="what each line of source does in a training step")
    parser.add_argument("--write", action="store_true", help="keep the numbers")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        measure(args.inside, args.only, args.kernels)
        return 0
    kept = {(row["device"], row["name"]): row for row in json.loads(TABLE.read_text())} if TABLE.exists() else {}
    failed, seen = False, set[tuple[str, str]]()
    try:
        environment = pretend.preloaded_environment(Path(tempfile.gettempdir()) / "speedrun-gpu-bench")
    except pretend.Absent as e:
        print(f"The bench cannot run here: {e}.", file=sys.stderr)
        return 2
    for device in args.devices:
        print(f"\n{GPUS[device].name}, {ATTENTION[device]}; Triton kernels + other operators, GB")
        print(f"{'':34} {'forward':>18}   {'backward':>18}   {'saved':>6} {'peak':>6}")
        command = [sys.executable, "-m", "benchmarks.gpu", "--inside", device, *["--kernels"] * args.kernels]
        command += ["--only", *args.only] if args.only else []
        stepping = False
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as p,
        ):
            assert p.stdout is not None
            for text in p.stdout:
                row = json.loads(text)
                if "collectives" in row and not stepping:
                    stepping = True
                    print(STEPS)
                print(line(row), flush=True)
                for where, launches, syncs, copies in row.pop("lines", []):
                    if args.lines:
                        print(f"    {where:40} {launches:8,} {syncs:5} {copies:6}")
                seen.add((device, row["name"]))
                before = kept.get((device, row["name"]))
                if "failure" in row:
                    failed = True
                elif args.write:
                    kept[device, row["name"]] = {k: v for k, v in row.items() if k not in ("compiled", "shared")}
                elif before is None:
                    failed = True
                    print("  not in gpus.json; --write keeps it")
                else:
                    for problem in worse(row, before):
                        failed = True
                        print(f"  worse: {problem}; --write keeps the new numbers")
            if p.wait():
                errors.seek(0)
                last = (errors.read().strip().splitlines() or ["no message"])[-1]
                print(f"The process for {device} ended with {p.returncode}: {last}", file=sys.stderr)
                return 1
    if not seen:
        print(f"No case has {' or '.join(map(repr, args.only))} in its name.", file=sys.stderr)
        return 2
    gone = [key for key in kept if key[0] in args.devices and key not in seen]
    for device, name in gone if not (args.only or failed) else ():
        failed = not args.write
        print(f"{device}: there is no case {name!r}; --write removes it from the table")
        del kept[device, name]
    if args.write:
        TABLE.write_text("[\n" + ",\n".join(json.dumps(row) for row in kept.values()) + "\n]\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
