"""Overlapping chunks, where text and code are cut, selection from overlaps, ids decoded in place."""

import os
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_sgl.cli.asking import load_builder
from rapid_sgl.models import embedded_model_path
from rapid_sgl.retrieval.chunking import TokenizedText, chunk, tokenize
from rapid_sgl.retrieval.decoding import TokenDecoder
from rapid_sgl.retrieval.spans import retrieved_tokens, select_spans

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read when torch is first imported


@pytest.fixture(scope="module")
def tokenizer():
    return load_builder(str(embedded_model_path())).tokenizer


@pytest.mark.parametrize(
    ("length", "tokens"), [(1000, 4096), (98_304, 4096), (128_000, 5333), (393_216, 16_384), (10**6, 16_384)]
)
def test_retrieved_length_rule(length, tokens):
    assert retrieved_tokens(length) == tokens


def test_retrieved_length_rule_refuses_nonsense():
    with pytest.raises(ValueError, match="least=5, most=4"):
        retrieved_tokens(100, least=5, most=4)


TEXT = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"], max_codepoint=0x3FFFF), max_size=12),
        st.sampled_from(
            ["A word. ", "Next!\n\n", "第一句。第二句！", "👩‍👩‍👧", "שלום ", "مرحبا ", "\x00", "<|im_end|>"]
        ),
        st.sampled_from(
            ["def f(x):\n    return x\n\n\n", "# A heading\n\nIts text.\n", "if (a) {\n  b();\n}\n", "x" * 50]
        ),
    ),
    max_size=30,
).map("".join)


@settings(max_examples=100, deadline=None)
@given(text=TEXT, size=st.integers(1, 40), offset=st.integers(0, 50), data=st.data())
def test_overlapping_chunks_cover_the_document_exactly(tokenizer, text, size, offset, data):
    overlap = data.draw(st.integers(0, (size - 1) // 2))
    document = tokenize(text, tokenizer)
    chunks = chunk(document, size=size, offset=offset, overlap=overlap)
    covered = {token for piece in chunks for token in range(piece.start, piece.end)}
    assert covered == set(range(offset, offset + len(document.ids)))
    assert all(1 <= piece.end - piece.start <= size for piece in chunks)
    for before, after in pairwise(chunks):
        assert before.start < after.start <= before.end < after.end
        assert overlap // 2 <= before.end - after.start <= overlap
    assert all(piece.text == document.slice(piece.start - offset, piece.end - offset) for piece in chunks)


def test_overlap_must_leave_room(tokenizer):
    for overlap in (-1, 4, 100):
        with pytest.raises(ValueError, match=rf"overlap {overlap} .*0 to 3 for chunks of 8"):
            chunk(tokenize("some text", tokenizer), size=8, overlap=overlap)


def test_a_common_prefix_has_common_chunks(tokenizer):
    one = "".join(f"Sentence {number} of the document.\n" for number in range(200))
    chunks = [chunk(tokenize(text, tokenizer), size=64) for text in (one, one + "And a question at its end?")]
    assert chunks[0][:-2] == chunks[1][: len(chunks[0]) - 2]


CODE = '''\
import os


class Reader:
    """Reads."""

    def first(self, path):
        with open(path) as handle:
            return handle.readline()

    # The second method.
    @staticmethod
    def second(values):
        for value in values:
            print(value)


def main():
    pass
'''


def test_code_is_cut_between_blocks(tokenizer):
    document = tokenize(CODE, tokenizer)
    main = next(
        token for token, start in enumerate(document.char_starts) if CODE[start:].startswith("def main")
    )
    for size in range(main, len(document.ids)):
        assert chunk(document, size=size)[1].text.startswith("def main"), "a top-level block begins"
    for size in range(40, 80):
        for piece in chunk(document, size=size)[:-1]:
            line = piece.text.rstrip().split("\n")[-1].strip()
            assert not line.startswith(("#", "@")) and not line.endswith(":"), "what follows belongs to it"


@pytest.mark.parametrize(
    ("before", "after", "strength"),
    [
        ("return x\n\n\n", "def f():", 5),
        ("    return x\n\n\n", "def f():", 6),
        ("    return x\n\n", "    def f():", 5),
        ("def f():\n", "    return x", 2),
        ("if (a) {\n", "  b();", 2),
        ("  b();\n", "}", 2),
        ("# A heading\n\n", "Its text.", 2),
        ("@decorator\n", "def f():", 2),
        ("a = 1\n", "b = 2", 3),
        ("The end.\n", "A start.", 4),
        ("The end. ", "A start.", 4),
        ("some ", "words", 1),
        ("wo", "rd", 0),
        ("第一句。", "第二句", 4),
        ("x" * 1000 + "\n\n", "y", 5),
    ],
)
def test_boundary_strengths(before, after, strength):
    from rapid_sgl.retrieval.chunking import _boundary_strength

    document = TokenizedText(before + after, [0, 1], [0, len(before)], [True, True])
    assert _boundary_strength(document, 1) == strength


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_selection_from_overlapping_chunks(data):
    starts = sorted(data.draw(st.sets(st.integers(0, 300), min_size=1, max_size=20)))
    chunks = []
    for start in starts:
        end = max([start + data.draw(st.integers(1, 60)), *[end + 1 for _, end in chunks[-1:]]])
        chunks.append((start, end))
    scores = data.draw(
        st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), min_size=len(chunks), max_size=len(chunks))
    )
    head, recent, room = (data.draw(st.integers(0, 60)) for _ in range(3))
    prompt_len = chunks[-1][1] + recent
    view = {"budget": head + recent + room, "prompt_len": prompt_len, "head": head, "recent": recent}
    spans = select_spans(chunks, scores, **view, overlapping=True)
    if prompt_len <= view["budget"]:
        assert spans == []
        return
    chosen = [token for start, end in spans for token in range(start, end)]
    assert len(chosen) == len(set(chosen)) <= room
    assert all(end < start for (_, end), (start, _) in pairwise(spans))
    inside = [set(range(max(start, head), min(end, prompt_len - recent))) for start, end in chunks]
    assert set(chosen) <= set().union(*inside)
    wanted = [tokens for tokens, score in zip(inside, scores, strict=True) if score > 0]
    assert len(chosen) == min(room, len(set().union(set(), *wanted))), (
        "room is used as far as there is evidence"
    )
    best = max(range(len(chunks)), key=lambda index: (scores[index], -index))
    if scores[best] > 0 and len(inside[best]) <= room:
        assert inside[best] <= set(chosen)


@settings(max_examples=100, deadline=None)
@given(text=TEXT)
def test_decoded_ids_have_the_tokenizers_own_places(tokenizer, text):
    document = tokenize(text, tokenizer)
    decoded = TokenDecoder(tokenizer).decode(document.ids)
    assert decoded.ids == document.ids
    if decoded.text != text:
        assert set(text) - set(decoded.text), "only what the vocabulary lacks is not decoded"
        return
    for index, whole in enumerate(decoded.whole):
        if whole and "\ufffd" not in text:
            assert document.whole[index] and decoded.char_starts[index] == document.char_starts[index]


def test_special_tokens_are_decoded_in_place(tokenizer):
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "你好 there"}], return_dict=False)
    decoded = TokenDecoder(tokenizer).decode(ids)
    assert decoded.text == tokenizer.decode(ids)
    for index, token in enumerate(ids):
        if token in tokenizer.all_special_ids:
            assert decoded.slice(index, index + 1) == tokenizer.decode([token])
