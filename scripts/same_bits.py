"""Do two versions of the program train with the same bits?

    python scripts/same_bits.py OLD NEW [--quick]      commits; or folders: `HEAD .` compares what is not committed

Each commit runs its own code in a checkout of its own: the cases of its `scripts/bits_cases.py`, in 1, 2 and 3 gloo
processes, eagerly, and some of them compiled. Compared are the losses of every step and validation as hex floats, and
the hashes of the exact weights at the end, sorted, since names and order may change. A commit from before the cases
existed is given their first version; a case that only the new version has is named, and not compared.

Compiled code may change its bits without being wrong: when torch.compile was handed other graphs, both final losses are
printed and must agree within 1e-3; with the same graphs the bits must be the same. Exit code 0: equal, 1: not, 2: a
commit or case that does not exist.
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CASES = "scripts/bits_cases.py"
COMPILED = ("normuon", "interleaved")
LOWERING = 1e-3  # how far apart the final losses of two lowerings may be
Found = dict[str, dict[str, Any]]


def git(*args: str) -> bytes:
    done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, check=False)
    if done.returncode:
        raise Mistake(f"git {' '.join(args)} failed: {done.stderr.decode().strip()}")
    return done.stdout


class Mistake(Exception):
    """Told in one sentence, exit code 2."""


def check_out(version: str, place: Path) -> Path:
    """A folder with the files of a commit; a folder that is named is used as it is."""
    if version and Path(version).is_dir():
        folder = Path(version).resolve()
    else:
        try:
            commit = git("rev-parse", "--verify", "--quiet", f"{version}^{{commit}}").decode().strip()
        except Mistake as e:
            raise Mistake(f"there is no commit or folder {version!r}; `git log --oneline` shows the commits.") from e
        folder = place
        folder.mkdir()
        archive = git("archive", commit)
        subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    if not (folder / "src" / "speedrun").is_dir():
        raise Mistake(f"{version} has no src/speedrun; name a commit of this repository, or a checkout.")
    return folder


def cases_of(folder: Path, place: Path) -> Path:
    """The cases that a checkout brings, or the first version of them."""
    if (folder / CASES).exists():
        return folder / CASES
    added = git("log", "--diff-filter=A", "--format=%H", "--", CASES).decode().split()
    if not added:
        raise Mistake(f"{CASES} is in neither version, nor in the history of this branch.")
    place.write_bytes(git("show", f"{added[-1]}:{CASES}"))
    return place


@contextlib.contextmanager
def started(folder: Path, cases: Path, out: Path, cache: Path, options: list[str]) -> Iterator[subprocess.Popen[str]]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder / "src"),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
    }
    command = [sys.executable, str(cases), "--out", str(out), *options]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that its ranks end with it
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def finish(process: subprocess.Popen[str], version: str, out: Path) -> Found:
    _, errors = process.communicate()
    if process.returncode == 2:
        raise Mistake(f"{version}: {errors.strip().splitlines()[-1]}")
    if process.returncode:
        raise Mistake(f"{version} could not run its cases (exit code {process.returncode}):\n{errors[-3000:]}")
    return dict(json.loads(out.read_text()))


def difference(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    """Where two runs of a case part, or None."""
    pairs = itertools.zip_longest(old["losses"], new["losses"], fillvalue="nothing")
    for number, (a, b) in enumerate(pairs, start=1):
        if a != b:
            return f"loss {number} of {len(old['losses'])} is {a} and {b}"
    lost = set(old["weights"]).symmetric_difference(new["weights"])
    if lost or len(old["weights"]) != len(new["weights"]):
        return f"losses agree, but {len(lost)} weight tensors differ"
    return None


def graphs(cache: Path) -> set[str]:
    """Names of the graphs that torch.compile has lowered into this cache; a name is the hash of a graph."""
    return {path.name for path in (cache / "fxgraph").glob("*/*")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--quick", action="store_true", help="one process, 8 steps, nothing compiled")
    parser.add_argument("--only", nargs="*", default=[], metavar="CASE", help="these cases alone")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # end the trainings, remove the folder
    with tempfile.TemporaryDirectory(prefix="same-bits-") as temporary:
        try:
            return compare(args, Path(temporary))
        except Mistake as e:
            print(f"same_bits: {e}", file=sys.stderr)
            return 2


def compare(args: argparse.Namespace, place: Path) -> int:
    sides = {}
    for side in ("old", "new"):
        version = getattr(args, side)
        folder = check_out(version, place / side)
        sides[side] = version, folder, cases_of(folder, place / f"{side}-cases.py"), place / f"{side}.json"
    only = ["--only", *args.only] if args.only else []
    bad = 0
    for processes in (1,) if args.quick else (1, 2, 3):
        options = ["--processes", str(processes), *(["--steps", "8"] if args.quick else []), *only]
        begin = time.monotonic()
        with contextlib.ExitStack() as stack:  # side by side: a core each
            running = {}
            for side, (_, folder, cases, out) in sides.items():
                running[side] = stack.enter_context(started(folder, cases, out, place / "cache", options))
            found = {side: finish(running[side], sides[side][0], sides[side][3]) for side in sides}
        bad += tell(found["old"], found["new"], f"{processes} process{'es' * (processes > 1)}")
        print(f"  ({time.monotonic() - begin:.0f} s)")
    for name in () if args.quick else COMPILED:
        if not args.only or name in args.only:
            bad += compare_compiled(sides, place / "cache", name)
    print("same bits" if not bad else f"NOT the same bits: {bad} difference{'s' * (bad > 1)}")
    return int(bad > 0)


def tell(old: Found, new: Found, how: str) -> int:
    """One line for each case; the number of those that differ."""
    if not old or not new:
        raise Mistake("neither version has such a case.")
    bad = 0
    for name in dict.fromkeys([*old, *new]):
        if name not in old:
            print(f"{how}, {name}: a new case, which the old version lacks", flush=True)
            continue
        why = difference(old[name], new[name]) if name in new else "the new version lacks this case"
        bad += why is not None
        print(f"{how}, {name}: {why or 'equal'}", flush=True)
    return bad


def compare_compiled(sides: dict[str, tuple[str, Path, Path, Path]], cache: Path, name: str) -> int:
    """One after the other: what the old version compiled is in the cache when the new one runs."""
    found, lowered = {}, {}
    for side, (version, folder, cases, out) in sides.items():
        before = graphs(cache)
        with started(folder, cases, out, cache, ["--compiled", "--only", name]) as process:
            found[side] = finish(process, version, out)[name]
        lowered[side] = graphs(cache) - before
    old, new = found["old"], found["new"]
    why = difference(old, new)
    if why is None:
        print(f"compiled, {name}: equal", flush=True)
        return 0
    losses = f"final losses {old['final']:.6f} and {new['final']:.6f}"
    if lowered["new"] and abs(old["final"] - new["final"]) <= LOWERING * abs(old["final"]):
        print(
            f"compiled, {name}: {losses}; torch.compile was handed {len(lowered['new'])} graphs that differ from the "
            f"{len(lowered['old'])} of the old version, so the code it made rounds differently ({why})"
        )
        return 0
    reason = "the final losses are too far apart" if lowered["new"] else "the compiled graphs are the same"
    print(f"compiled, {name}: {why}; {losses}; {reason}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
