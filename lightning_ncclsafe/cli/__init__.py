"""The command line, ``ncclsafe``: one module for each of its commands, none of which needs torch or Lightning."""

from collections.abc import Sequence

from jsonargparse import ArgumentParser

from lightning_ncclsafe.cli import logs, preflight

_COMMANDS = {"logs": logs, "preflight": preflight}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: What follows ``ncclsafe`` on the command line; None for that of this process.

    Returns:
        The exit code: 0 if all is well, 1 if something is not, 2 if the command cannot be understood or done.
    """
    parser = ArgumentParser(prog="ncclsafe", description="Tools of lightning-ncclsafe.")
    commands = parser.add_subcommands()
    for command in _COMMANDS.values():
        command.add_to(commands)
    config = parser.parse_args(arguments)
    command = _COMMANDS[config.subcommand]
    try:
        return int(command.run(config[config.subcommand]))
    except KeyboardInterrupt:
        return 130
