"""Retrieval-augmented answering over several files, without a framework: Chroma keeps the vectors, RAPID the speed.

rapid-sgl serve --port 30000 &
python examples/rag.py http://localhost:30000 ./chroma "What does make demo do?" README.md docs/benchmark.md

All files are in the prompt, and the answer is the model's own over all of them. What retrieval finds is what
drafts look at. The store embeds a file once: ask again and only the question is embedded.
"""

from __future__ import annotations

import sys

from rapid_sgl.cli.asking import load_builder, read_documents
from rapid_sgl.config import RapidConfig
from rapid_sgl.http_client import Client
from rapid_sgl.request import spans_to_wire
from rapid_sgl.retrieval.pipeline import RetrievalOptions, Retriever

WINDOWS = RapidConfig(budget=768, head=64, recent=256)


def main(server: str, store: str, question: str, *files: str) -> None:
    client = Client(server)
    info = client.info()
    prompt = load_builder(info.tokenizer_path).build(
        read_documents(files), question, info.max_prompt_tokens(64)
    )
    retriever = Retriever(RetrievalOptions("hybrid", store=store))
    spans = retriever.spans(prompt, question, budget=WINDOWS.budget, head=WINDOWS.head, recent=WINDOWS.recent)
    options = {
        "rapid_spans": spans_to_wire(spans),
        "rapid_budget": WINDOWS.budget,
        "rapid_head": WINDOWS.head,
        "rapid_recent": WINDOWS.recent,
    }
    sampling = {"temperature": 0, "max_new_tokens": 64, "custom_params": options}
    reply = client.generate(input_ids=prompt.ids, sampling_params=sampling)
    print(reply["text"].strip())
    for span in spans:
        print(f"  [{span[0]:,}-{span[1]:,}] {' '.join(prompt.document_text(span).split())[:70]}")
    print(f"  {reply['meta_info']['spec_accept_length']:.2f} tokens per target pass")


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
