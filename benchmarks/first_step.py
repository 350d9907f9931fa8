"""Where the time of `speedrun train` goes, from the command to the result, the first time on a machine and the second.

    python -m benchmarks.first_step [--times 2] [-- flags of speedrun train]

Caches of compiled code and of trials are in a folder of their own, empty at the first time; the corpus is there.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from speedrun.files import home
from speedrun.training.runlog import read_metrics, read_result

# What a command does, in a process of its own that says at the end what it has measured.
COMMAND = """
import json, sys, time
start = time.perf_counter()
import torch
torch_there = time.perf_counter()
import speedrun.cli.train
imported = time.perf_counter()
from speedrun import cli
from speedrun.training.loop import Loop
checked = []
def check_data(self, check=Loop.check_data):
    began = time.perf_counter()
    check(self)
    checked.append(time.perf_counter() - began)
Loop.check_data = check_data
code = cli.main(["train", *sys.argv[2:]])
import torch._dynamo.utils as dynamo
graphs = dynamo.compilation_time_metrics.get("_compile.compile_inner", [])
found = {"torch": torch_there - start, "rest of the imports": imported - torch_there, "check of the data": sum(checked)}
found["graphs"] = list(graphs)
open(sys.argv[1], "w").write(json.dumps(found))
sys.exit(code)
"""


def one(cache: Path, number: int, flags: list[str]) -> dict[str, float]:
    """Seconds of every part of a run."""
    out, said = cache / f"run{number}", cache / f"said{number}.json"
    environment = {
        **os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "SPEEDRUN_HOME": str(cache / "home"),
    }  # fmt: skip
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, str(said), *flags, "--out", str(out)],
        env=environment,
        stdout=subprocess.DEVNULL,
        check=False,
    )
    total = time.perf_counter() - start
    if done.returncode not in (0, 1):
        raise SystemExit(f"the run ended with exit code {done.returncode}")
    result, told = read_result(out), json.loads(said.read_text())
    graphs = told.pop("graphs")
    validated = sum(m["val_seconds"] for m in read_metrics(out, "val"))
    found = {"total": total, "clock": result.train_time, "validation": validated}
    found |= {f"import {name}" if name == "torch" else name: seconds for name, seconds in told.items()}
    compiling = f"compile {len(graphs)} graph{'s' * (len(graphs) != 1)} ({', '.join(f'{s:.1f}' for s in graphs)} s)"
    found |= {compiling: sum(graphs), "rest of the warm-up": result.warmup_seconds - sum(graphs)}
    found["neither clock nor validation"] = total - result.train_time - validated
    known = sum(told.values()) + result.warmup_seconds
    found["start of Python, trial, sample, result"] = found["neither clock nor validation"] - known
    tokens = sum(1 for _ in read_metrics(out, "val")) * (read_tokens(out) or 1)
    found["validation over step, per token"] = validated / tokens / (result.train_time / result.tokens)
    return found


def read_tokens(out: Path) -> int:
    """Predicted tokens of a validation."""
    about = json.loads((out / "run.json").read_text())
    if about["options"]["val_tokens"]:
        return int(about["options"]["val_tokens"])
    described = json.loads((Path(about["data"]["folder"]) / "tokens.json").read_text())
    return sum(f["tokens"] for name, f in described["files"].items() if name.startswith("val")) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("flags", nargs="*", help="of speedrun train, after --")
    given = parser.parse_args()
    corpus = home() / "pocket"
    if not corpus.is_dir():
        raise SystemExit("the corpus is missing: run `speedrun data prepare`")
    with tempfile.TemporaryDirectory() as temporary:
        cache = Path(temporary)
        (cache / "home").mkdir()
        (cache / "home" / "pocket").symlink_to(corpus)
        for number in range(given.times):
            found = one(cache, number, given.flags)
            print(f"\n{'the first time' if number == 0 else 'once more'}: {found.pop('total'):.1f} s")
            ratio = found.pop("validation over step, per token")
            for name, seconds in found.items():
                print(f"  {name:46} {seconds:8.2f} s")
            print(f"  a validated token costs {ratio:.2f} of a trained one", flush=True)


if __name__ == "__main__":
    main()
