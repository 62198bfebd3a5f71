"""The display of a traced answer, read back from its HTML."""

from html.parser import HTMLParser

import pytest

from rapid_sgl.config import RapidConfig
from rapid_sgl.notebook import COLOURS, traced

CONFIG = RapidConfig(budget=100, head=10, recent=40)
TRACE = [
    ["model", 0.9, 0.8, 0.9],
    ["correction", 0.5, 0.1, 0.5],
    ["copy", 0.7, 1.0, 0.7],
    ["bonus", 0.25, None, 0.25],
    ["plain", 0.5, None, 0.5],
]
TEXTS = ["<b>", " &", '"quoted"', "\n", "语", " end"]


def reply(drafter="view"):
    logprobs = [[-0.1, i, text] for i, text in enumerate(TEXTS)]
    info = {"output_token_logprobs": logprobs, "rapid_trace": TRACE, "rapid_drafter": drafter}
    return {"text": "".join(TEXTS), "meta_info": {**info, "spec_accept_length": 2.0}}


class Page(HTMLParser):
    """Token spans and bars of the map, with their attributes and texts."""

    def __init__(self, text):
        super().__init__()
        self.tokens, self.bars, self._open = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag == "span" and attrs.get("class", "").startswith("t "):
            self.tokens.append([attrs["class"][2:], attrs["title"], attrs["style"], ""])
            self._open = True
        elif tag == "i":
            self.bars.append((attrs["class"], attrs["title"], attrs["style"]))

    def handle_data(self, data):
        if self._open:
            self.tokens[-1][3] += data

    def handle_endtag(self, tag):
        if tag == "span":
            self._open = False


@pytest.fixture
def page(tmp_path):
    path = traced(reply(), 400, [100, 130], CONFIG).save(tmp_path / "answer.html")
    return Page(path.read_text(encoding="utf-8"))


def test_every_token_has_its_text_colour_and_numbers(page):
    assert [text for *_, text in page.tokens] == TEXTS
    assert [origin for origin, *_ in page.tokens] == ["first", *(record[0] for record in TRACE)]
    for origin, _, style, _ in page.tokens:
        assert COLOURS[origin] in style
    titles = [title for _, title, *_ in page.tokens]
    assert "p = 0.9\nq = 0.8\np̂ = 0.9" in titles[1] and "accepted" in titles[1]
    assert "q =" not in titles[4] and "p =" not in titles[0]


def test_the_map_shows_windows_and_spans_where_they_lie(page):
    titles = {title for _, title, _ in page.bars}
    assert {"window: tokens 0 to 10", "retrieved: tokens 100 to 130", "window: tokens 340 to 400"} <= titles
    (style,) = [style for kind, _, style in page.bars if kind == "retrieved"]
    assert "left:25.000%" in style and "width:7.500%" in style


def test_copies_alone_have_no_map():
    assert not Page(traced(reply("copy"), 400, [100, 130], CONFIG)._repr_html_()).bars
