"""The ``speedkit`` command. One file per subcommand; each has ``add_parser(subparsers)`` and sets ``run``.

Exit codes: 0 done, 1 a fault that the message names, 2 a wrong command line, 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from lightning_speedkit.cli import data, demo, pack, presets, verify
from lightning_speedkit.errors import SpeedkitError, nearest_names
from lightning_speedkit.version import __version__

__all__ = ["main"]

_SUBCOMMANDS = (demo, presets, pack, verify, data)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code.

    >>> main(["--version"])
    Traceback (most recent call last):
        ...
    SystemExit: 0
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser, commands = _parser()
    _suggest(parser, commands, words)
    with _any_character():
        return _run(_parsed(parser, words))


class _Parser(argparse.ArgumentParser):
    """When something is missing, its commands are told, or the example of one that has none."""

    def error(self, message: str) -> NoReturn:
        if "arguments are required" in message:
            if commands := _choices(self):
                message = f"a command is missing: {', '.join(commands)}."
            elif (self.epilog or "").startswith("for example"):
                message += f" ({self.epilog})"
        super().error(message)


def _run(args: argparse.Namespace) -> int:
    try:
        code = args.run(args)
        sys.stdout.flush()
    except SpeedkitError as error:
        if args.debug:
            raise
        print(f"speedkit {args.command}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # as in `speedkit presets | head`
        _drop_output()
        return 0
    except SystemExit as end:
        if not _is_of_a_pipe(end):
            raise
        _drop_output()
        return 0
    except OSError as error:
        if args.debug or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        try:
            sys.stdout.flush()
        except OSError:
            _drop_output()
        print(f"speedkit {args.command}: {error.strerror}: not all of it was written.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if args.debug:
            raise
        print("Stopped.", file=sys.stderr)
        return 130
    return int(code or 0)


def _is_of_a_pipe(end: BaseException) -> bool:
    """Whether the process is to end because its reader went away: rich makes a SystemExit(1) of that."""
    cause: BaseException | None = end
    while cause is not None and not isinstance(cause, BrokenPipeError):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


@contextlib.contextmanager
def _any_character() -> Iterator[None]:
    """A stream that cannot encode a character, such as one in ASCII, shows its escape as the error stream does."""
    stream = sys.stdout
    errors = getattr(stream, "errors", None)
    if not isinstance(stream, io.TextIOWrapper) or errors is None:
        yield
        return
    stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it flushes, and that the disk is full was said
            stream.reconfigure(errors=errors)


def _drop_output() -> None:
    """Let what was not written go to nowhere, so that the end of the process does not try again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> tuple[argparse.ArgumentParser, list[str]]:
    parser = _Parser(
        prog="speedkit",
        description="Training-efficiency techniques for PyTorch Lightning.",
        epilog="speedkit COMMAND --help tells more about a command.",
    )
    parser.add_argument("--version", action="version", version=f"lightning-speedkit {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of a fault")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in _SUBCOMMANDS:
        module.add_parser(subparsers)
    for subparser in subparsers.choices.values():
        subparser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser, list(subparsers.choices)


def _parsed(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """The arguments; an unknown option ends with the nearest one of its command."""
    args, left = parser.parse_known_args(words)
    if left:
        wrong = next((word.partition("=")[0] for word in left if word.startswith("--")), "")
        near = nearest_names(wrong, _options(parser, words), most=1) if wrong else []
        hint = f" (did you mean {near[0]}?)" if near else ""
        _named_parser(parser, words).error(f"unrecognized arguments: {' '.join(left)}{hint}")
    return args


def _named_parser(parser: argparse.ArgumentParser, words: list[str]) -> argparse.ArgumentParser:
    """That of the command that the words name, whose usage is the one to show."""
    commands = _choices(parser)
    named = next((word for word in words if word in commands), None)
    return parser if named is None else _named_parser(commands[named], words[words.index(named) + 1 :])


def _options(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """The options of the parser, and of the commands that the words name."""
    names: list[str] = []
    for action in parser._actions:
        names += [option for option in action.option_strings if action.help != argparse.SUPPRESS]
        if isinstance(action, argparse._SubParsersAction):
            for word in words:
                names += _options(action.choices[word], words) if word in action.choices else []
    return names


def _choices(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands of a parser."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= action.choices
    return found


def _suggest(parser: argparse.ArgumentParser, commands: list[str], words: list[str]) -> None:
    """An unknown subcommand ends with the nearest one, as argparse does by itself only from Python 3.14 on."""
    first = next((word for word in words if not word.startswith("-")), None)
    if first is None or first in commands:
        return
    names = {name: name for name in commands}
    for command, subparser in _choices(parser).items():
        names |= {below: f"speedkit {command} {below}" for below in _choices(subparser) if below not in names}
    near = nearest_names(first, names, most=1, cutoff=0.5)
    hint = f" Did you mean {names[near[0]]!r}?" if near else ""
    parser.error(f"there is no command {first!r}.{hint} Commands: {', '.join(commands)}.")
