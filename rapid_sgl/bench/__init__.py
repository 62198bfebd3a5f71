"""Measurements behind ``rapid-sgl bench`` and ``rapid-sgl bench steps``."""

METHODS = ("target", "view", "rag", "torch_native")
# Those that draft; the same answers as the target's, by other means.
DRAFTING = ("view", "rag")


class BenchError(RuntimeError):
    """A measurement cannot be made as asked; the text says why and what to do."""
