"""``ncclsafe run``: runs a program with the guard in each of its Trainers."""

import os
import re
import site
import sys
from argparse import REMAINDER
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lightning_ncclsafe.cli import failed
from lightning_ncclsafe.running.variables import ON, OPTIONS, SWITCH, shown, wanted

HELP = "run a program with the guard in each of its Trainers, without changing its code"
DESCRIPTION = (
    "Runs a program as 'python PROGRAM' does. Each of its Trainers gets the guard if the strategy is DDP, FSDP or"
    " ModelParallelStrategy, under any name, also in the ranks that a launcher starts. A Trainer that cannot be guarded"
    " runs unchanged, and one line says so. Options of this command come before PROGRAM; each has an environment"
    " variable (NCCLSAFE_TIMEOUT for --timeout). NCCLSAFE=1 in the environment makes 'python PROGRAM' do the same. Exit"
    " code: that of the program, or 2 if this command is invalid or fails."
)
_AT_START = "lightning_ncclsafe.pth"
# Options of Python that take no argument, and the one that takes the name of a module.
_MODULE = re.compile("-([bBdEiIOPqsSuvx]*)m")


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    for option in OPTIONS:
        parser.add_argument(option.flag, type=str, default=None, metavar=option.metavar, help=option.help)
    parser.add_argument("-m", dest="is_module", action="store_true", help="PROGRAM is the name of a module")
    parser.add_argument("program", metavar="PROGRAM", type=str, help="a file, or with -m a module")
    parser.add_argument("arguments", metavar="...", nargs=REMAINDER, help="its arguments")


def run(config: Namespace) -> int:
    """Runs ``ncclsafe run``: replaces this process by the program, or returns the exit code."""
    asked = {option: text for option in OPTIONS if (text := config[option.name]) is not None}
    for option, text in asked.items():
        try:
            option.read(text)
        except ValueError as error:
            return failed(f"{option.flag} {shown(text)}: {error}")
    environment = {**os.environ, SWITCH: ON, **{option.variable: text for option, text in asked.items()}}
    try:
        wanted(environment)
    except ValueError as error:
        return failed(str(error))
    folders = _site_folders()
    if not any((folder / _AT_START).is_file() for folder in folders):
        return failed(
            f"{sys.executable} does not load the guard at start-up: {_AT_START} is in none of its site-packages folders"
            f" ({', '.join(map(str, folders)) or 'it has none'}). Install lightning-ncclsafe there with pip;"
            " PYTHONPATH is not enough."
        )
    program = [*(["-m"] if config.is_module else []), config.program, *(config.arguments or [])]
    os.execve(sys.executable, [sys.executable, *_interpreter_options(sys.orig_argv, sys.argv), *program], environment)


def _site_folders() -> list[Path]:
    """The folders whose ``.pth`` files Python loads as it starts."""
    if sys.flags.no_site:
        return []
    own = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [Path(name) for name in (*own, *site.getsitepackages())]


def _interpreter_options(words: Sequence[str], argv: Sequence[str]) -> list[str]:
    """Options of Python itself: torchrun gives it ``-u``.

    Args:
        words: The whole command line of this process.
        argv: The part for the program, after its own name.
    """
    *options, program = words[1 : len(words) - len(argv) + 1]
    if options and _MODULE.fullmatch(options[-1]):
        program = options.pop()
    # "-m", which may have other letters before it, and the name after it; else the path of a script.
    if (found := _MODULE.match(program)) and found[1]:
        options.append(f"-{found[1]}")
    return options
