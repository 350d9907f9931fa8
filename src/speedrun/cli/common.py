"""What the commands share: reading arguments, printing, and the arguments that several of them have. No torch here."""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import tyro
from rich.console import Console

from speedrun.arguments import MachineArgs, TrackArgs
from speedrun.checks import Positive, check_options
from speedrun.errors import UserError, nearest

if TYPE_CHECKING:
    from speedrun.training import Machine, Recipe

console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
say = console.print
flat: Any = tyro.conf.arg(name="")
"""Annotates a nested dataclass whose fields are arguments without a prefix."""


def unset(kind: str, **more: Any) -> Any:
    """Annotates an optional argument: its help names the kind of value, and states its default itself."""
    return tyro.conf.arg(metavar=kind, help_behavior_hint="", **more)


# -------------------------------------------------------------------- arguments of several commands


@dataclass(frozen=True)
class TargetArgs(TrackArgs):
    data: Annotated[Path | None, unset("PATH")] = None
    target: Annotated[float | None, unset("FLOAT")] = None
    """With --data: the validation loss to reach, in nats per token; default: none."""


@dataclass(frozen=True)
class MachineOptions(MachineArgs):
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps. With --dry-run also a GPU that is not here: h100, a100 or 4090."""
    threads: Annotated[Positive | None, unset("INT")] = None
    memory: Annotated[float | None, unset("GB")] = None
    """GB of a GPU's memory to keep to, of 1e9 bytes; default: all of it."""
    deterministic: bool = False
    """On a GPU, use kernels that give the same bits every time; slower."""

    def choose(self, recipe: "Recipe") -> "Machine":
        from speedrun.training import choose

        return choose(**vars(self), model=recipe.model, tokens=recipe.schedule.max_tokens)


# -------------------------------------------------------------------- reading


def parse(
    kind: type,
    command: str,
    args: Sequence[str],
    *,
    default: Any = None,
    about: str | None = None,
    metavars: Mapping[str, str] = {},
) -> Any:
    """Parse with tyro; every mistake ends with exit code 2 and names a way out.

    A switch is given as `--name True` or `--name`, and turned off as `--no-name`. `metavars` are the kinds of value
    that the help names, where they are not the names of types.
    """
    extra = {} if default is None else {"default": default}
    for name in switches(kind):
        flag = name.replace("_", "-")
        args = with_value(args, flag)
        args = [word for arg in args for word in ((f"--{flag}", "False") if arg == f"--no-{flag}" else (arg,))]
    given = tyro.cli(
        with_metavars(kind, metavars),
        prog=f"speedrun {command}",
        args=list(args),
        description=about,
        config=(tyro.conf.FlagConversionOff,),
        **extra,
    )
    check_options(given)
    return given


def with_metavars(kind: type, metavars: Mapping[str, str]) -> type:
    """`kind`, where the help of an argument whose default is None or empty names the kind of its value alone."""
    hints = get_type_hints(kind, include_extras=True)
    fields = []
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        annotated = any(type(m).__module__.startswith("tyro") for m in getattr(hint, "__metadata__", ()))
        if field.name in metavars or (field.default in (None, ()) and not annotated):
            fields.append((field.name, Annotated[hint, unset(metavars.get(field.name) or metavar(hint))], field))
    return dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,), frozen=True) if fields else kind


def metavar(hint: Any) -> str:
    """'INT' for `int | None`, 'PATH ...' for `tuple[Path, ...]`."""
    if get_origin(hint) is Annotated:
        return metavar(hint.__origin__)
    inner = [each for each in get_args(hint) if each not in (NoneType, ...)]
    if get_origin(hint) is tuple:
        return f"{metavar(inner[0])} ..."
    return metavar(inner[0]) if inner else hint.__name__.upper()


def switches(kind: type) -> Iterator[str]:
    """Names of the boolean arguments, also of nested dataclasses without a prefix."""
    hints = get_type_hints(kind, include_extras=True)
    for name, hint in get_type_hints(kind).items():
        if hint in (bool, bool | None):
            yield name
        elif dataclasses.is_dataclass(hint) and flat in getattr(hints[name], "__metadata__", ()):
            yield from switches(hint)  # type: ignore[arg-type]


def option(args: Sequence[str], name: str) -> str | None:
    """The value of --name, before the parse that needs it to know the defaults. The last one counts."""
    value = None
    for i, arg in enumerate(args):
        if arg == f"--{name}" and i + 1 < len(args):
            value = args[i + 1]
        elif arg.startswith(f"--{name}="):
            value = arg.partition("=")[2]
    return value


def with_value(args: Sequence[str], name: str, value: str = "True") -> list[str]:
    """The arguments, where --name without a value gets this one: the parser expects a value after every flag."""
    flag = f"--{name}"
    given = list(args)
    for i in reversed(range(len(given))):
        if given[i] == flag and (i + 1 == len(given) or given[i + 1].startswith("-")):
            given.insert(i + 1, value)
    return given


def dispatch(prog: str, actions: dict[str, Callable[[Sequence[str]], int]], args: Sequence[str], about: str) -> int:
    if not args or args[0] in ("-h", "--help"):
        usage = f"usage: {prog} {{{','.join(actions)}}} ...\n\n{about}\n`{prog} COMMAND --help` explains one."
        print(usage, file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    if args[0] not in actions:
        raise UserError(f"Unknown command {args[0]!r}.{nearest(args[0], actions)}")
    return actions[args[0]](args[1:])


# -------------------------------------------------------------------- printing


def grid(rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns, without wrapping: a table cut at the terminal's width cannot be searched."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
