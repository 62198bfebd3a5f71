"""``rapid-sgl model``: prepare the embedded checkpoint and print where it is."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rapid_sgl import models
from rapid_sgl.cli import options

DESCRIPTION = """\
Print the path of the embedded model (SmolLM2-135M-Instruct), converting it first if this
is the first use. Nothing else is written to stdout, so it can be used in a command line:

  python -m sglang.launch_server --model-path "$(rapid-sgl model)" --speculative-algorithm RAPID
"""


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 1 when the model cannot be prepared."""
    options.Parser(prog="rapid-sgl model", description=DESCRIPTION).parse_args(list(argv))
    try:
        print(prepared_path())
    except models.ModelError as error:
        print(f"rapid-sgl model: {error}", file=sys.stderr)
        return 1
    return 0


def prepared_path() -> str:
    """The embedded checkpoint's path; progress is shown only when it has to be converted."""
    checkpoint = models.embedded_checkpoint()
    if not models.is_prepared(checkpoint):
        from rapid_sgl.cli.progress import Status

        with Status("preparing the embedded model") as status:
            models.embedded_model_path(status.update)
    return str(checkpoint)
