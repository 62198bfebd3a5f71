"""Quality suites behind ``rapid-sgl eval``: the official tasks, prompts and scores, over any decoding method."""

SUITES = ("ruler", "infinitebench", "longbench", "longbench2")
# Raise when prompts, generators or scores change: predictions made before are then not continued.
EVAL_VERSION = 1


class EvalError(RuntimeError):
    """A suite cannot be run as asked; the text says why and what to do."""
