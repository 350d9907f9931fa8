"""What the training step becomes on a GPU, on a machine that has none: `python -m benchmarks.gpu`.

Every stage of every recipe with a native size goes through Dynamo, AOTAutograd and Inductor on fake tensors, as one GPU
of eight has it: kernels, bytes that they touch, bytes kept for the backward pass, and the most that is alive at once.
Nothing is run, so nothing here is a time.

    python -m benchmarks.gpu                          all of it, for an H100 and a 4090: about ten minutes
    python -m benchmarks.gpu --only loss              what contains this word
    python -m benchmarks.gpu --kernels --only loss    also compile the Triton kernels to machine code, with ptxas
    python -m benchmarks.gpu --write                  keep the numbers in numbers.json, beside this file

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

NUMBERS = Path(__file__).with_name("numbers.json")
BACKENDS = {"h100": "fa3", "a100": "varlen", "4090": "varlen"}
GROWTH = 1.001  # bytes that are more than this are worse; kernels must not become more at all


def measure(device: str, only: list[str], kernels: bool) -> None:
    """In a process with the guard: a line of JSON per case."""
    limit = pretend.start(device).shared_memory_per_block_optin
    from benchmarks.gpu import stages
    from benchmarks.gpu.lower import Lowered, compile_kernels

    stages.install_stand_in()
    work = {f"loss of {n} token{'s' * (n > 1)}": (lambda n=n: stages.lower_loss(n)) for n in (1, 3)}
    work |= {case.name: (lambda case=case: stages.lower_stage(case, BACKENDS[device])) for case in stages.cases()}
    for name, function in work.items():
        if only and not any(word in name for word in only):
            continue
        row: dict[str, Any] = {"device": device, "name": name}
        try:
            graphs: list[Lowered] = function()
            for graph in graphs:
                row[graph.name] = {"kernels": graph.kernels, "products": graph.products, "bytes": graph.bytes}
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


def worse(row: dict[str, Any], kept: dict[str, Any]) -> list[str]:
    """What has grown since the numbers were kept."""
    found = []
    for part in ("forward", "backward"):
        for what in ("kernels", "products", "bytes"):
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
    f, b = row["forward"], row["backward"]
    text = (
        f"{row['name']:34} {f['kernels']:4} + {f['products']:3} {f['bytes'] / 1e9:7.2f}   "
        f"{b['kernels']:4} + {b['products']:3} {b['bytes'] / 1e9:7.2f}   "
        f"{row['saved'] / 1e9:6.2f} {row['peak'] / 1e9:6.2f}"
    )
    return text + (f"   {row['compiled']} compiled, shared {row['shared']:,}" if "compiled" in row else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", choices=list(pretend.DEVICES), default=["h100", "4090"])
    parser.add_argument("--only", nargs="*", default=[], help="words, one of which is in the name of a case")
    parser.add_argument("--kernels", action="store_true", help="compile the Triton kernels to machine code")
    parser.add_argument("--write", action="store_true", help="keep the numbers")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        measure(args.inside, args.only, args.kernels)
        return 0
    kept = {(row["device"], row["name"]): row for row in json.loads(NUMBERS.read_text())} if NUMBERS.exists() else {}
    failed = False
    try:
        environment = pretend.preloaded_environment(Path(tempfile.gettempdir()) / "speedrun-gpu-bench")
    except pretend.Absent as e:
        print(f"The bench cannot run here: {e}.", file=sys.stderr)
        return 2
    for device in args.devices:
        print(f"\n{pretend.DEVICES[device].name}, {BACKENDS[device]}; Triton kernels + other operators, GB")
        print(f"{'':34} {'forward':>18}   {'backward':>18}   {'saved':>6} {'peak':>6}")
        command = [sys.executable, "-m", "benchmarks.gpu", "--inside", device, *["--kernels"] * args.kernels]
        command += ["--only", *args.only] if args.only else []
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as p:
            assert p.stdout is not None
            for text in p.stdout:
                row = json.loads(text)
                print(line(row), flush=True)
                before = kept.get((device, row["name"]))
                if "failure" in row:
                    failed = True
                elif args.write:
                    kept[device, row["name"]] = {k: v for k, v in row.items() if k not in ("compiled", "shared")}
                elif before is None:
                    failed = True
                    print("  not in numbers.json; --write keeps it")
                else:
                    for problem in worse(row, before):
                        failed = True
                        print(f"  worse: {problem}; --write keeps the new numbers")
        if p.returncode:
            print(f"The process for {device} ended with {p.returncode}.", file=sys.stderr)
            return 1
    if args.write:
        NUMBERS.write_text("[\n" + ",\n".join(json.dumps(row) for row in kept.values()) + "\n]\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
