"""``rapid-sgl serve``: SGLang's server with RAPID decoding switched on."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from rapid_sgl.cli import options
from rapid_sgl.cli.model import prepared_path
from rapid_sgl.config import RapidConfig, RapidOptionError, env_name
from rapid_sgl.models import ModelError, embedded_checkpoint, offline_env

DESCRIPTION = """\
Start an SGLang server with RAPID decoding. Every flag that is not listed here goes to
`python -m sglang.launch_server` as it is. Without --model-path the embedded model is served.

examples:
  rapid-sgl serve
  rapid-sgl serve --model-path Qwen/Qwen2.5-7B-Instruct --port 30000 --rapid-budget 4096
  curl localhost:30000/v1/chat/completions -H 'Content-Type: application/json' -d \\
    '{"model": "default", "messages": [{"role": "user", "content": "Hello"}]}'
"""

# Those that name something which may not be there.
AUTO_OPTIONS = ("auto_spans", "store", "embedder", "min_recall", "recall_report")


def main(argv: Sequence[str]) -> NoReturn:
    """Replace this process by the server; returns only by exiting with an error (2: usage, 1: model)."""
    command, env = plan(argv)
    try:
        if not has_model(argv):
            prepared_path()
    except ModelError as error:
        sys.exit(f"rapid-sgl serve: {error}")
    os.execve(command[0], command, {**os.environ, **env})


def plan(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The server's command line and the environment variables to add to this process's own.

    Exits with status 2 on a wrong ``--rapid-*`` flag, before anything is started.
    """
    parser = _parser()
    args, extra = parser.parse_known_args(list(argv))
    options.refuse_unknown_rapid_flags(parser, extra)
    given = options.given_rapid_options(args)
    try:
        config = options.rapid_config(given)
        if any(getattr(config, name) != getattr(RapidConfig, name) for name in AUTO_OPTIONS):
            from rapid_sgl.auto import check_auto  # brings numpy, which no other server needs here

            check_auto(config)
    except RapidOptionError as error:
        parser.error(str(error))
    command = [sys.executable, "-m", "sglang.launch_server"]
    model = None if has_model(argv) else str(embedded_checkpoint())
    if model:
        command += ["--model-path", model]
    command += extra
    algorithm = _value(extra, "--speculative-algorithm")
    if algorithm is None:
        command += ["--speculative-algorithm", "RAPID"]
    elif algorithm.upper() != "RAPID" and given:
        parser.error(
            f"{options.rapid_flags(given)[0].split('=')[0]} has no effect with "
            f"--speculative-algorithm {algorithm}; leave one of them out"
        )
    if (algorithm or "RAPID").upper() == "RAPID" and not options.has_flag(
        extra, "--speculative-num-draft-tokens"
    ):
        command += ["--speculative-num-draft-tokens", str(config.reserved_length + 1)]
    env = config.to_env()
    if "draft_tokens" not in given:
        env.pop(env_name("draft_tokens"))  # unless it was asked for, the server decides by device
    return command, {**env, **(offline_env(model) if model else {})}


def has_model(arguments: Sequence[str]) -> bool:
    """True when the arguments name a model, themselves or through SGLang's ``--config`` file."""
    return options.has_flag(arguments, "--model-path", "--model", "--config")


def _value(arguments: Sequence[str], name: str) -> str | None:
    """The value of the last ``name VALUE`` or ``name=VALUE``; None when it is not given."""
    found = None
    for index, argument in enumerate(arguments):
        if argument.startswith(f"{name}="):
            found = argument.split("=", 1)[1]
        elif argument == name and index + 1 < len(arguments):
            found = arguments[index + 1]
    return found


def _parser() -> options.Parser:
    parser = options.Parser(
        prog="rapid-sgl serve",
        usage="rapid-sgl serve [--model-path MODEL] [--rapid-* VALUE ...] [any sglang.launch_server flag ...]",
        description=DESCRIPTION,
    )
    options.add_rapid_flags(parser)
    return parser
