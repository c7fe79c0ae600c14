"""The command line, ``ncclsafe``: one module for each of its commands, none of which needs torch or Lightning."""

import os
import re
import sys
from argparse import Action
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import NoReturn, TextIO

from jsonargparse import ArgumentParser, DefaultHelpFormatter

from lightning_ncclsafe.report.lines import safe

# Modules of this package. Each has HELP and DESCRIPTION, add_arguments, which adds those of the command, and run.
COMMANDS = ("diagnose", "explain", "inspect", "logs", "preflight", "render", "run")


class Help(DefaultHelpFormatter):
    """Prints the help of an option as written, without types, and with a default only if the help has one."""

    def _get_help_string(self, action: Action) -> str:
        return action.help or ""


def write_to(stream: TextIO | None, text: str) -> None:
    """Writes text in the stream's encoding. A closed pipe is no error, and Python must not report it at exit."""
    if stream is None:
        return
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say(text: str, stream: TextIO | None) -> None:
    """Prints a line; a stream that cannot be written to is no error."""
    with suppress(OSError):
        write_to(stream, f"{text}\n")


def failed(text: str) -> int:
    """Prints why a command is invalid or has failed; returns its exit code."""
    print(f"error: {safe(text)}", file=sys.stderr)
    return 2


_LACKS = re.compile(r"the following arguments are required: (.+)")
_LACKS_COMMAND = re.compile(r'expected "(?:(\w+)\.)?subcommand" to be one of \{(.+?)\}.*')


class _Parser(ArgumentParser):
    """Says in this package's own words what a command lacks."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Prints what is wrong and ends the program."""
        if found := _LACKS.fullmatch(message):
            *commands, lacks = found[1].partition(",")[0].split(".")
            command = " ".join(["ncclsafe", *commands])
            self.exit(failed(f"{command} needs {lacks.upper()}; for its arguments: {command} --help"))
        if found := _LACKS_COMMAND.fullmatch(message):
            if not found[1]:
                self.print_help(sys.stderr)
            command = f"ncclsafe {found[1] or ''}".rstrip()
            self.exit(failed(f"{command} needs a command{f': {found[2]}' if found[1] else ''}"))
        super().error(message, ex)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: What follows ``ncclsafe`` on the command line; None for that of this process.

    Returns:
        The exit code: 0 if all is well, 1 if there is a problem, 2 if the command is invalid or fails.
    """
    given = sys.argv[1:] if arguments is None else arguments
    # Each takes a while to import: all of them are imported only for the list of commands.
    names = [name for name in COMMANDS if name in given[:1]] or COMMANDS
    modules = {name: import_module(f"{__name__}.{name}") for name in names}
    # The parsers of the commands have the same formatter.
    parser = _Parser(prog="ncclsafe", description="Tools of lightning-ncclsafe.", formatter_class=Help)
    commands = parser.add_subcommands()
    for name, module in modules.items():
        command = ArgumentParser(description=module.DESCRIPTION)
        commands.add_subcommand(name, command, help=module.HELP)
        module.add_arguments(command)
    config = parser.parse_args(given)
    try:
        return int(modules[config.subcommand].run(config[config.subcommand]))
    except KeyboardInterrupt:
        return 130
