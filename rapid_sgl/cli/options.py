"""What the subcommands share: a parser with one-line errors, and flags made from RapidConfig."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any, NoReturn

from rapid_sgl.config import (
    PRESETS,
    RapidConfig,
    RapidOptionError,
    env_name,
    flag_name,
    preset_values,
    public_name,
)

RAPID_FLAG_PREFIX = "--rapid-"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and exit with status 2."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see `{self.prog} --help`)\n")


def add_rapid_flags(parser: argparse.ArgumentParser) -> None:
    """One ``--rapid-*`` flag per field of ``RapidConfig``; a flag not given stays None."""
    group = parser.add_argument_group(
        "RAPID options", f"each is also an environment variable, for example {env_name('budget')}"
    )
    group.add_argument(
        flag_name("preset"), dest=_dest("preset"), choices=list(PRESETS), help="set several at once"
    )
    for spec in fields(RapidConfig):
        kind, word = spec.metadata["kind"], spec.metadata["word"]
        choices = spec.metadata["choices"] or None
        group.add_argument(
            flag_name(spec.name),
            dest=_dest(spec.name),
            type=number_or(kind, word) if word else kind,
            choices=choices,
            metavar=None
            if choices
            else {int: "N", float: "X"}.get(kind, "TEXT") + (f"|{word}" if word else ""),
            help=f"{spec.metadata['help']} (default: {spec.default})".replace("%", "%%"),
        )


def number_or(kind: type, word: str) -> Callable[[str], Any]:
    """An argparse type: a number, or the word."""

    def parse(text: str) -> Any:
        try:
            return word if text == word else kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is neither an integer nor {word}") from None

    return parse


def given_rapid_options(args: argparse.Namespace) -> dict[str, Any]:
    """The ``RapidConfig`` fields that were set on the command line."""
    values = {spec.name: getattr(args, _dest(spec.name)) for spec in fields(RapidConfig)}
    given = {name: value for name, value in values.items() if value is not None}
    return {**preset_values(getattr(args, _dest("preset")), flag_name("preset")), **given}


def rapid_config(given: dict[str, Any]) -> RapidConfig:
    """Environment defaults with the command line's options on top.

    Raises:
        RapidOptionError: a bad variable or value; flags are named as they are typed.
    """
    base = RapidConfig.from_env()
    try:
        return replace(base, **given)
    except RapidOptionError as error:
        text = str(error)
        for spec in fields(RapidConfig):
            text = text.replace(f"rapid_{public_name(spec.name)}=", f"{flag_name(spec.name)} ")
        raise RapidOptionError(text) from error


def rapid_flags(given: dict[str, Any]) -> list[str]:
    """Options as a command line of ``rapid-sgl serve``."""
    return [f"{flag_name(name)}={value}" for name, value in given.items()]


def refuse_unknown_rapid_flags(parser: argparse.ArgumentParser, extra: Iterable[str]) -> None:
    """End with a one-line error if ``extra`` has a ``--rapid-*`` flag that does not exist."""
    names = [*(spec.name for spec in fields(RapidConfig)), "preset"]
    known = [flag_name(name).removeprefix(RAPID_FLAG_PREFIX) for name in names]
    for argument in extra:
        name = argument.split("=", 1)[0]
        if name.startswith(RAPID_FLAG_PREFIX):
            close = difflib.get_close_matches(name.removeprefix(RAPID_FLAG_PREFIX), known, n=1)
            hint = "did you mean " if close else "known: "
            flags = ", ".join(RAPID_FLAG_PREFIX + text for text in close or known)
            parser.error(f"unknown option {name}; {hint}{flags}{'?' if close else ''}")


def has_flag(arguments: Iterable[str], *names: str) -> bool:
    """True when one of ``names`` is among the arguments, as ``--x value`` or ``--x=value``."""
    return any(argument.split("=", 1)[0] in names for argument in arguments)


def _dest(field_name: str) -> str:
    return f"rapid_{field_name}"


def parse_with_server_args(
    parser: argparse.ArgumentParser, argv: Iterable[str], command: str
) -> tuple[argparse.Namespace, list[str]]:
    """A command line as its own part, parsed, and what follows ``--`` for a server that ``command`` starts.

    Exits with status 2 on an unknown flag, or on flags for a server that is not started because of ``--server``.
    """
    own, server_args = split_server_args(list(argv))
    args, extra = parser.parse_known_args(own)
    refuse_unknown_rapid_flags(parser, extra)
    if extra:
        parser.error(f"unknown option {extra[0]}; flags for the server go behind `--`")
    if args.server and server_args:
        parser.error(
            f"flags behind `--` are for a server that {command} starts; leave out --server or the flags"
        )
    return args, server_args


def split_server_args(argv: list[str]) -> tuple[list[str], list[str]]:
    """A command line as its own part and what follows ``--``, which is meant for the server."""
    if "--" not in argv:
        return argv, []
    return argv[: argv.index("--")], argv[argv.index("--") + 1 :]
