"""How commands are read and how they speak."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import tyro
from rich.console import Console

from speedrun.checks import check_options
from speedrun.errors import UserError, nearest

console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
say = console.print


def parse(kind: type, command: str, args: Sequence[str], default: Any = None, about: str | None = None) -> Any:
    """tyro's parser with our manners: exit code 2 and a named way out for every mistake.

    A switch may be given as `--name True`, as `--name`, and turned off as `--no-name`.
    """
    extra = {} if default is None else {"default": default}
    for name, hint in get_type_hints(kind).items():
        if hint in (bool, bool | None):
            flag = name.replace("_", "-")
            args = with_value(args, flag)
            args = [word for arg in args for word in ((f"--{flag}", "False") if arg == f"--no-{flag}" else (arg,))]
    given = tyro.cli(
        kind,
        prog=f"speedrun {command}",
        args=list(args),
        description=about,
        config=(tyro.conf.FlagConversionOff,),
        **extra,
    )
    check_options(given)
    return given


def option(args: Sequence[str], name: str) -> str | None:
    """The value of --name before the real parse, which needs it to know the defaults. The last one counts."""
    value = None
    for i, arg in enumerate(args):
        if arg == f"--{name}" and i + 1 < len(args):
            value = args[i + 1]
        elif arg.startswith(f"--{name}="):
            value = arg.partition("=")[2]
    return value


def with_value(args: Sequence[str], name: str, value: str = "True") -> list[str]:
    """A switch given alone means this value: the parser wants one after every option."""
    flag = f"--{name}"
    given = list(args)
    for i in reversed(range(len(given))):
        if given[i] == flag and (i + 1 == len(given) or given[i + 1].startswith("-")):
            given.insert(i + 1, value)
    return given


def grid(rows: Sequence[Sequence[str]]) -> None:
    """Rows in columns, never folded: a table that is cut at the width of the terminal cannot be read or searched."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def dispatch(prog: str, actions: dict[str, Callable[[Sequence[str]], int]], args: Sequence[str], about: str) -> int:
    if not args or args[0] in ("-h", "--help"):
        usage = f"usage: {prog} {{{','.join(actions)}}} ...\n\n{about}\n`{prog} COMMAND --help` explains one."
        print(usage, file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    if args[0] not in actions:
        raise UserError(f"Unknown command {args[0]!r}.{nearest(args[0], actions)}")
    return actions[args[0]](args[1:])
