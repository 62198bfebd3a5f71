"""Values and lists of them on a command line, with errors that name the value and the fix."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence


def at_least(low: int) -> Callable[[str], int]:
    """An argparse type: an integer of ``low`` or more."""

    def parse(text: str) -> int:
        return _checked(text, low)

    return parse


def int_list(text: str) -> list[int]:
    """An argparse type: positive integers, separated by commas, without repetitions."""
    values = [_checked(part, 1) for part in text.split(",")]
    if len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"{text!r} has a number twice; leave one out")
    return values


def name_list(known: Sequence[str], what: str) -> Callable[[str], list[str]]:
    """An argparse type: some of the ``known`` names, separated by commas, without repetitions.

    Args:
        what: one of them, for the error.
    """

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        if len(set(names)) < len(names):
            raise argparse.ArgumentTypeError(f"{text!r} names a {what} twice")
        return names

    return parse


def _checked(text: str, low: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
    if value < low:
        raise argparse.ArgumentTypeError(f"{value} is too small; use {low} or more")
    return value
