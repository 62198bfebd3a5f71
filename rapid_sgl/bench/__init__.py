"""Measurements behind ``rapid-sgl bench`` and ``rapid-sgl bench steps``."""

METHODS = ("target", "view", "torch_native")


class BenchError(RuntimeError):
    """A measurement cannot be made as asked; the text says why and what to do."""
