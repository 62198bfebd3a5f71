"""Measurements behind ``rapid-sgl bench`` and ``rapid-sgl bench steps``."""

METHODS = ("target", "rag-only", "view", "recent", "rag", "copy", "ngram", "standalone", "torch_native")
# Those that RAPID drafts; the same answers as the target's, by other means.
DRAFTING = ("view", "recent", "rag", "copy")
# Those of SGLang's own, each on a server of its own.
OWN_SERVER = ("ngram", "standalone", "torch_native")
# Those that the choice of spans makes a difference to.
RETRIEVING = ("view", "rag", "rag-only")
WORKLOADS = ("answer", "quote", "extract", "rewrite")
RETRIEVALS = ("oracle", "bm25", "dense", "hybrid", "random")


class BenchError(RuntimeError):
    """A measurement cannot be made as asked; the text says why and what to do."""
