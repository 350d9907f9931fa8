"""The `speedrun` command: parses, calls, prints.

speedrun train                      the pocket track with the default recipe
speedrun train --help               every field of the recipe, with its meaning
speedrun train --dry-run            what it would be: memory, time, and whether it fits
"""

import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence

import speedrun
from speedrun.cli.proving import (
    ablate,
    challenge,
    compare,
    race,
    records,
    report,
    send,
    stats,
    sweep,
    trace,
    verify,
)
from speedrun.cli.telling import data, doctor, recipes, sample, tracks
from speedrun.cli.training import train
from speedrun.cli.words import dispatch
from speedrun.errors import UserError
from speedrun.race.children import Terminated
from speedrun.train.distributed import speaks
from speedrun.train.watch import RankLost

COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (train, "train one model to a track's target"),
    "sample": (sample, "write text with a trained model"),
    "tracks": (tracks, "what must be reached, on which tokens"),
    "recipes": (recipes, "how: list them, or show every field of one"),
    "data": (data, "prepare, fetch, verify or make token folders"),
    "sweep": (sweep, "search a recipe's fields within a budget"),
    "race": (race, "prove a recipe: plan, interleaved runs, verdict, record"),
    "stats": (stats, "what some losses prove about a target"),
    "verify": (verify, "recompute a race or record, and say what does not agree"),
    "challenge": (challenge, "race somebody's record again on this machine"),
    "records": (records, "the leaderboard"),
    "ablate": (ablate, "what each switch of a recipe is worth"),
    "compare": (compare, "losses of several runs by step, token and second"),
    "report": (report, "one HTML page of a run, race, record, ablation or of all records"),
    "send": (send, "hand a run to tensorboard, wandb or trackio"),
    "trace": (trace, "what the processes of a run wait for, or would wait for"),
    "doctor": (doctor, "what this machine will use, and what is missing"),
}


def main(argv: Sequence[str] | None = None) -> int:
    args = sys.argv[1:] if argv is None else list(argv)
    lines = "\n".join(f"  {name:9} {text}" for name, (_, text) in COMMANDS.items())
    about = f"Train GPTs to a target validation loss as fast as this machine allows, and prove it.\n\n{lines}\n"
    try:
        try:
            if args == ["--version"]:
                print(f"speedrun {speedrun.__version__}")
                return 0
            return dispatch("speedrun", {name: call for name, (call, _) in COMMANDS.items()}, args, about)
        finally:
            sys.stdout.flush()  # here, where a reader that has left can still be told from a bug
    except UserError as e:
        if speaks(e):
            print(f"speedrun: {' '.join(str(e).splitlines())}", file=sys.stderr)
        return 2
    except RankLost as e:
        if not e.told:
            print(f"speedrun: {e}; all ranks end.", file=sys.stderr)
        return 1
    except KeyboardInterrupt as e:
        print("speedrun: stopped", file=sys.stderr)
        return 128 + (signal.SIGTERM if isinstance(e, Terminated) else signal.SIGINT)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `| head` has seen enough
        return 1
    except OSError as e:
        if e.errno not in (errno.ENAMETOOLONG, errno.EACCES) or e.filename is None:
            raise
        print(f"speedrun: {str(e.filename)[:80]} cannot be used: {e.strerror}; choose another.", file=sys.stderr)
        return 2
