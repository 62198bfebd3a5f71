"""RAPID in SGLang's language: backends for ``sgl.function`` programs, and options for their calls.

    import sglang as sgl
    from rapid_sgl.lang import RapidEndpoint, rapid_options

    @sgl.function
    def answer(s, document, question):
        s += sgl.user(f"{document}\\n\\n{question}")
        with rapid_options(rapid_query=question):  # drafts look at the passages that answer it
            s += sgl.assistant(sgl.gen("answer", max_tokens=64, temperature=0))

    backend = RapidEndpoint("http://127.0.0.1:30000", rapid_draft_length=3)
    state = answer.run(document, "Who signed it?", backend=backend)
    print(state["answer"], state.get_meta_info("answer")["spec_accept_length"])

Options are given per backend (its keyword arguments, or ``backend.with_options``), per run, per branch and per
call (``rapid_options``); ``docs/programs.md`` shows each.
"""

from rapid_sgl.lang.backend import RapidBackend, RapidEndpoint
from rapid_sgl.lang.engine import RapidEngine
from rapid_sgl.lang.options import rapid_options

__all__ = ["RapidBackend", "RapidEndpoint", "RapidEngine", "rapid_options"]
