"""Numbers on a command line, with errors that name the value and the fix."""

from __future__ import annotations

import argparse
from collections.abc import Callable


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


def _checked(text: str, low: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
    if value < low:
        raise argparse.ArgumentTypeError(f"{value} is too small; use {low} or more")
    return value
