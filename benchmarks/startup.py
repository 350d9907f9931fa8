"""How long it takes until something happens: `speedrun --help`, and `import speedrun.optim` beside torch alone.

    python -m benchmarks.startup [--times 5]

Each in a process of its own, in turns; printed is the best of them. `speedrun --help` must stay below half a second,
and `import speedrun.optim` within 0.2 seconds of `import torch`.
"""

import argparse
import subprocess
import sys
import time

COMMANDS = {
    "speedrun --help": [sys.executable, "-m", "speedrun", "--help"],
    "import torch": [sys.executable, "-c", "import torch"],
    "import speedrun.optim": [sys.executable, "-c", "import speedrun.optim"],
}
HELP_LIMIT, IMPORT_LIMIT = 0.5, 0.2  # seconds


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=5)
    times = parser.parse_args().times
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(times):
        for name, command in COMMANDS.items():
            taken[name].append(seconds(command))
    best = {name: min(found) for name, found in taken.items()}
    for name, found in best.items():
        print(f"{name:24}{found:6.2f} s")
    more = best["import speedrun.optim"] - best["import torch"]
    print(f"{'beside torch':24}{more:6.2f} s")
    return int(best["speedrun --help"] >= HELP_LIMIT or more >= IMPORT_LIMIT)


if __name__ == "__main__":
    sys.exit(main())
