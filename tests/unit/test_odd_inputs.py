"""Documents that are hard on retrieval: the right spans or one clear error, from `ask` and from a bare prompt."""

import asyncio
import random
from array import array

import pytest
from pypdf import PdfWriter

from rapid_sgl.auto import NO_MATCH, AutoSpans
from rapid_sgl.cli.asking import Question, load_builder, make_plan, read_documents
from rapid_sgl.config import RapidConfig
from rapid_sgl.http_client import ServerInfo
from rapid_sgl.models import embedded_model_path
from rapid_sgl.request import SPANS_KEY, Limits, parse_options, spans_to_wire
from rapid_sgl.retrieval.documents import DocumentError

SCRIPTS = (
    "בכל יום ראשון יצאה הספינה אל הים. ",
    "تسافر القافلة عبر الصحراء كل شتاء. ",
    "港に着いた船は、荷物を降ろした。",
    "商队每年冬天穿过沙漠。",
    "👩‍👩‍👧 👍🏽 🚢🌊 e\u0301tude \u202eabc\u202c ",
)
NEEDLES = {
    "התוכי של שומר המגדלור נקרא בלתזר.": "איך נקרא התוכי של שומר המגדלור?",
    "اسم ببغاء حارس المنارة بلثازار.": "ما اسم ببغاء حارس المنارة؟",
    "灯台守のオウムはバルタザールという。": "灯台守のオウムの名前は？",
    "灯塔看守人的鹦鹉叫巴尔萨泽。": "灯塔看守人的鹦鹉叫什么？",
    "The 🚢 named Balthazar 🦜 sank.": "Which ship named Balthazar sank?",
}
SEPARATED = ";".join(f"v{number}={number % 97}" for number in range(33_000))
HALF = len(SEPARATED) // 2
LINE = f"{SEPARATED[:HALF]};harpsichord=42;{SEPARATED[HALF:]}"


def mixed_text():
    """Paragraphs that change script in the middle, the needles spread among them."""
    chance = random.Random(7)
    paragraphs = ["".join(chance.choices(SCRIPTS, k=4)) for _ in range(80)]
    for number, needle in enumerate(NEEDLES):
        paragraphs.insert(8 + 16 * number, needle)
    return "\n\n".join(paragraphs) + "\n\n"


@pytest.fixture(scope="module")
def builder():
    return load_builder(str(embedded_model_path()))


@pytest.fixture(scope="module")
def auto(builder):
    return AutoSpans(builder.tokenizer, RapidConfig(auto_spans="bm25", auto_deadline=120.0))


def asked(builder, path, text, question):
    """The document's text in the spans that `ask` would send."""
    path.write_text(text, encoding="utf-8")
    config = RapidConfig()
    document = read_documents([str(path)])
    plan = make_plan(
        Question(document, question, "rapid", 16, False, config, {}),
        builder,
        ServerInfo("model", "model", 400_000, "RAPID", False, {}),
    )
    parse_options({SPANS_KEY: spans_to_wire(plan.spans)}, config, Limits(len(plan.ids), 4))
    return [plan.whole.document_text(span) for span in plan.spans]


def chosen(auto, builder, text):
    """The text in the spans that a server would choose for a user message."""
    message = [{"role": "user", "content": text}]
    rendered = builder.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    ids = array("q", builder.tokenizer(rendered, verbose=False)["input_ids"])
    outcome = asyncio.run(auto.choose(ids, auto.config, None))
    assert outcome.missed in ("", NO_MATCH)
    parse_options({SPANS_KEY: spans_to_wire(outcome.spans)}, auto.config, Limits(len(ids), 4))
    return [builder.tokenizer.decode(ids[start:end]) for start, end in outcome.spans]


@pytest.mark.parametrize(("needle", "question"), NEEDLES.items())
def test_mixed_scripts(builder, auto, tmp_path, needle, question):
    text = mixed_text()
    assert any(needle in span for span in asked(builder, tmp_path / "mixed.txt", text, question))
    assert any(needle in span for span in chosen(auto, builder, text + question))


def test_one_line_of_200_thousand_tokens(builder, auto, tmp_path):
    """Without a space in it; words are told apart by punctuation."""
    question = "What is harpsichord?"
    for found in (
        asked(builder, tmp_path / "line.txt", LINE, question),
        chosen(auto, builder, f"{LINE}\n\n{question}"),
    ):
        assert len(found) == 1 and ";harpsichord=42;" in found[0]


@pytest.mark.parametrize(
    "text",
    [
        "The keeper\x00named his parrot Balthazar.\x00\n\n",
        bytes(range(256)).decode("latin-1"),
        random.Random(1).randbytes(700).decode("utf-8", "replace"),
    ],
)
def test_prompts_of_bytes_that_are_no_text(builder, auto, text):
    """A file would be refused; a prompt is whatever was sent."""
    needle = "The lighthouse on the cape was painted red."
    found = chosen(
        auto, builder, f"{text * 8}\n\n{needle}\n\n{text * 100}\n\nHow was the lighthouse painted?"
    )
    assert any(needle in span for span in found)


def test_random_tokens(builder, auto):
    """Special tokens and halves of characters in any order: spans that the server accepts, or none."""
    chance = random.Random(3)
    ids = array("q", (chance.randrange(len(builder.tokenizer)) for _ in range(5000)))
    outcome = asyncio.run(auto.choose(ids, auto.config, None))
    assert outcome.missed in ("", NO_MATCH)
    parse_options({SPANS_KEY: spans_to_wire(outcome.spans)}, auto.config, Limits(len(ids), 4))


def test_an_empty_prompt_is_none_of_auto_modes_business(auto):
    assert auto.config_for(None, Limits(0, 4)) is None
    assert auto.config_for(None, Limits(1, 4)) is None


def scan(path):
    writer = PdfWriter()
    writer.add_blank_page(width=200, height=200)
    writer.write(path)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("empty.txt", b"", "is empty"),
        ("blank.md", b"\xef\xbb\xbf\n \n", "is empty"),
        ("zero.txt", b"a text\0with a zero byte", "zero byte at offset 6"),
        ("program", b"\x7fELF\x02\x01\x01\x03" + bytes(range(1, 256)) * 20, "is a binary file"),
        ("picture.png", b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", "is a binary file"),
        ("scan.pdf", scan, "holds no text"),
        ("cut.pdf", b"%PDF-1.7\n1 0 obj\n<<", "cannot be read as PDF"),
    ],
)
def test_files_that_hold_no_text_are_refused_by_name(tmp_path, name, content, reason):
    fine, path = tmp_path / "fine.txt", tmp_path / name
    fine.write_text("The vault is blue.")
    path.write_bytes(content) if isinstance(content, bytes) else content(path)
    with pytest.raises(DocumentError, match=reason) as caught:
        read_documents([str(fine), str(path)])
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
