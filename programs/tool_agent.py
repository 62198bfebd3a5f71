"""An agent with tools over a document: thought, schema-constrained calls, observation, and again.

    python -m rapid_sgl.programs.tool_agent report.pdf -q "How many crates of 24 were sold?"
    python -m rapid_sgl.programs.tool_agent stock.txt -q "How many lamps does Harbor mill store?" \\
        --plan search_document,calculator,finish --server http://127.0.0.1:30000

The tools are search_document, read_span and calculator. Each step is a thought and a list of calls that SGLang
constrains to the tools' JSON schema; what they return becomes context, and drafts look at the passages of the
prompt that matter to the turn. A small model, such as the embedded one, needs --plan: left free, it picks badly.
Tools of your own need a program: docs/programs.md. Without an answer the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from rapid_sgl.programs.agent_loop import World, agent_program
from rapid_sgl.programs.agent_prompt import Frames
from rapid_sgl.programs.agent_records import FINISH, FINISHED, AgentOptions, AgentResult
from rapid_sgl.programs.common import backend_for, check, command_line, read
from rapid_sgl.programs.tools import Tool, Toolbox, tool
from rapid_sgl.programs.tools_builtin import calculator, document_tools

from rapid_sgl.lang import RapidBackend
from rapid_sgl.retrieval.chunking import tokenize


@tool(name=FINISH)
def finish(answer: str) -> str:
    """Give the answer and end."""
    return answer


def tool_agent(
    backend: RapidBackend,
    document: str,
    question: str,
    tools: Sequence[Tool] = (),
    *,
    options: AgentOptions | None = None,
    builtin: bool = True,
) -> AgentResult:
    """Let an agent answer a question about a document.

    Args:
        document: its text is the start of the prompt, whole.
        tools: of your own, made with ``@tool``. One named ``finish`` replaces the agent's.
        options: limits, plan, worked examples; None for the defaults.
        builtin: offer search_document, read_span and calculator as well.

    Raises:
        ValueError: an empty question.
        ToolError: two tools of one name, or a plan with a tool that does not exist.
        ServerError: the server refused a generation or is gone.
    """
    if not question.strip():
        raise ValueError("the question is empty; say what the agent is to find out")
    options = options or AgentOptions()
    tokenizer = backend.passages.tokenizer
    ready = [*document_tools(tokenize(document, tokenizer)), calculator] if builtin else []
    ending = [] if any(made.name == FINISH for made in tools) else [finish]
    toolbox = Toolbox(
        [*ready, *tools, *ending], max_output_chars=options.max_output_chars, max_calls=options.max_calls
    )
    toolbox.schema(options.plan)  # refuses an unknown tool before the first token
    world = World(document, toolbox, options, Frames(tokenizer), backend)
    state = agent_program.run(question=question, world=world, backend=backend)
    check(state)
    return state.ret_value


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 when there is no answer."""
    common = command_line("tool_agent", __doc__)
    parser = argparse.ArgumentParser(
        prog=common.prog,
        description=common.description,
        formatter_class=common.formatter_class,
        parents=[common],
        add_help=False,
        conflict_handler="resolve",  # --max-tokens: a list of calls is longer than an answer
    )
    add = parser.add_argument
    add("--max-tokens", type=int, default=160, metavar="N", help="of one list of calls (default: 160)")
    add("files", nargs="+", metavar="FILE", help="the document: text, Markdown or PDF")
    add("-q", "--question", required=True, help="what to ask")
    add("--plan", default="", metavar="TOOL,…", help="tools of the first steps; then the model chooses")
    add("--max-steps", type=int, default=8, metavar="N", help="(default: 8)")
    add("--max-new-tokens", type=int, default=1024, metavar="N", help="of all steps together (default: 1024)")
    add("--thought-tokens", type=int, default=32, metavar="N", help="per step; 0: none (default: 32)")
    add("--max-calls", type=int, default=4, metavar="N", help="side by side in one step (default: 4)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    add("--json", action="store_true", help="print one JSON object: answer, transcript, turns")
    args = parser.parse_args(argv)
    try:
        options = AgentOptions(
            max_steps=args.max_steps,
            max_new_tokens=args.max_new_tokens,
            step_tokens=args.max_tokens,
            thought_tokens=args.thought_tokens,
            max_calls=args.max_calls,
            plan=tuple(name.strip() for name in args.plan.split(",") if name.strip()),
            temperature=args.temperature,
        )
    except ValueError as error:
        parser.error(str(error))
    with backend_for(args) as backend:
        result = tool_agent(backend, read(args.files), args.question, options=options)
    if args.json:
        print(json.dumps(result.as_json(), ensure_ascii=False))
    else:
        ending = result.answer if result.status == FINISHED else f"{result.status}: {result.explanation}"
        print("\n".join(result.lines()), ending, sep="\n\n")
    return 0 if result.status == FINISHED else 1


if __name__ == "__main__":
    sys.exit(main())
