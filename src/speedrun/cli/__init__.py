"""The `speedrun` command, one module per command: parse, call, print.

speedrun train                      the pocket track with the default recipe
speedrun train --help               every field of the recipe, with its meaning
speedrun train --dry-run            memory, time, and whether it fits
"""

import errno
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence

import speedrun
from speedrun.cli.common import dispatch
from speedrun.errors import Terminated, UserError, speaks
from speedrun.training import status

# Each command with its line of `--help`. speedrun.cli.NAME has the function `main`; it is imported when the command is
# called, since most of them load torch.
COMMANDS = {
    "train": "train one model to a track's target",
    "sample": "write text with a trained model",
    "tracks": "what must be reached, on which tokens",
    "recipes": "list the recipes, or show every field of one",
    "data": "prepare, fetch, verify or make token folders",
    "sweep": "search a recipe's fields within a budget",
    "race": "prove a recipe: plan, interleaved runs, verdict, record",
    "stats": "test losses against a target",
    "verify": "recompute a race or record, and report what does not agree",
    "challenge": "repeat a race or record on this machine",
    "records": "the leaderboard",
    "ablate": "what each switch of a recipe is worth",
    "report": "one HTML page of a run or several, a race, record, ablation or of all records",
    "send": "send a run to tensorboard, wandb or trackio",
    "trace": "what the processes of a run wait for",
    "doctor": "what this machine will use, and what is missing",
}
TRAINING = ("train", "sweep", "race", "challenge", "ablate")


def command(name: str) -> Callable[[Sequence[str]], int]:
    def call(args: Sequence[str]) -> int:
        asks = {"-h", "--help"} & {*args}
        if name in TRAINING and "torch" not in sys.modules and not asks and os.environ.get("RANK", "0") == "0":
            status.at("loading torch")
        module = importlib.import_module(f"speedrun.cli.{name}")
        status.stop()
        code: int = module.main(args)
        return code

    return call


def main(argv: Sequence[str] | None = None) -> int:
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # its older name
        # On a GPU the batch grows during a run; blocks of memory that can grow leave fewer gaps. Read when torch loads.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # torch.profiler prints when it starts and stops; read as above
    args = sys.argv[1:] if argv is None else list(argv)
    lines = "\n".join(f"  {name:9} {text}" for name, text in COMMANDS.items())
    about = f"Train GPTs to a target validation loss as fast as this machine allows, and prove it.\n\n{lines}\n"
    try:
        try:
            if args == ["--version"]:
                print(f"speedrun {speedrun.__version__}")
                return 0
            return dispatch("speedrun", {name: command(name) for name in COMMANDS}, args, about)
        finally:
            status.stop()
            sys.stdout.flush()  # here a closed pipe can still be distinguished from a bug
    except UserError as e:
        if speaks(e):
            print(f"speedrun: {' '.join(str(e).splitlines())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as e:
        print("speedrun: stopped", file=sys.stderr)
        return 128 + (signal.SIGTERM if isinstance(e, Terminated) else signal.SIGINT)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `| head` has closed the pipe
        return 1
    except OSError as e:
        if e.errno not in (errno.ENAMETOOLONG, errno.EACCES) or e.filename is None:
            raise
        print(f"speedrun: {str(e.filename)[:80]} cannot be used: {e.strerror}; choose another.", file=sys.stderr)
        return 2
