"""``ray-dcp``: checkpoints from a shell. Starts without Ray and without torch."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Sequence

from ray_dcp.cli.convert import add_convert
from ray_dcp.cli.copy import add_copy
from ray_dcp.cli.list import add_list
from ray_dcp.cli.prune import add_prune
from ray_dcp.cli.show import add_show
from ray_dcp.cli.verify import add_verify
from ray_dcp.errors import RayDcpError, UnsafeDataError
from ray_dcp.version import __version__

_INTERRUPTED = 130
_NO_CODE = (
    "A command runs no code that a file asks for: if you trust whoever wrote it, load it in Python "
    "(torch.load(..., weights_only=False), dcp.load(..., trusted=True)) and save its state_dict(), or leave such "
    "values of a checkpoint out (ray-dcp convert --skip-python, --exclude)"
)

EXIT_CODES = """\
exit codes:
  0    done
  1    failed for a reason that has no code of its own
  2    wrong usage: an argument, or a URL whose scheme is not known
  3    not found: no checkpoint, folder or file is there
  4    the store failed, or refused access
  5    damaged, unsafe to read, or written in a newer format
  130  interrupted
"""
"""The end of each command's help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; an error is one line on stderr."""
    arguments = _parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding lacks is no reason to fail.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logging.basicConfig(format="ray-dcp: %(message)s", level=logging.WARNING)
    try:
        code: int = arguments.command(arguments)
        # A reader that went away is noticed here, not while the interpreter shuts down.
        sys.stdout.flush()
    except RayDcpError as error:
        print("ray-dcp:", " ".join(_for_a_shell(error).split("\n")), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more when it exits, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _for_a_shell(error: RayDcpError) -> str:
    """The text of ``error``, with the way out that a command has in place of a program's."""
    if not isinstance(error, UnsafeDataError) or not error.ways:
        return str(error)
    return str(error).replace(error.ways, _NO_CODE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ray-dcp",
        description="Look at and clean up the checkpoints that ray_dcp and torch.distributed.checkpoint write.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ray-dcp {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_list(commands)
    add_show(commands)
    add_verify(commands)
    add_copy(commands)
    add_convert(commands)
    add_prune(commands)
    for command in commands.choices.values():
        command.epilog = EXIT_CODES
    return parser
