"""Answer several questions about one document in process, without a server.

python examples/offline_engine.py README.md "What is a view?" "Which Python versions work?"
"""

from __future__ import annotations

import sys
from pathlib import Path

import sglang as sgl

from rapid_sgl.models import embedded_model_path


def main(document: str, *questions: str) -> None:
    engine = sgl.Engine(
        model_path=str(embedded_model_path()), speculative_algorithm="RAPID", log_level="error"
    )
    tokenizer = engine.tokenizer_manager.tokenizer
    text = Path(document).read_text()
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{text}\n\n{question}"}], tokenize=False, add_generation_prompt=True
        )
        for question in questions
    ]
    # head, a retrieved passage and the recent window, instead of the whole prompt, are what drafts look at
    view = {"rapid_budget": 512, "rapid_recent": 256, "rapid_spans": [128, 256]}
    answers = engine.generate(prompts, {"temperature": 0, "max_new_tokens": 48, "custom_params": view})
    for question, answer in zip(questions, answers, strict=True):
        accept = answer["meta_info"]["spec_accept_length"]
        print(f"{question}\n  {answer['text'].strip()}\n  [{accept:.2f} tokens per target pass]")
    engine.shutdown()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
