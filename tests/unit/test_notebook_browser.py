"""The saved page in headless Chromium: what a reader would see. Skipped where there is no Chromium."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess

import pytest
from test_notebook import CONFIG, TEXTS, TRACE, reply

from rapid_sgl.notebook import COLOURS, traced

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Asks the browser for computed styles and for what lies under the pointer, which is where a hover text comes from.
PROBE = """<pre id="probe"></pre><script>
const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.width, r.height] }
const under = e => { const [x, y, w, h] = box(e); return document.elementFromPoint(x + w / 2, y + h / 2)?.title }
const seen = e => ({ text: e.textContent, title: e.title, under: under(e), box: box(e),
                     background: getComputedStyle(e).backgroundColor })
document.getElementById("probe").textContent = JSON.stringify({
  tokens: [...document.querySelectorAll(".answer span")].map(seen),
  legend: [...document.querySelectorAll(".legend b")].map(seen),
  map: box(document.querySelector(".map")), bars: [...document.querySelectorAll(".map i")].map(seen) })
</script>"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    folder = tmp_path_factory.mktemp("page")
    page = traced(reply(), 400, [100, 130], CONFIG).save(folder / "answer.html")
    page.write_text(page.read_text(encoding="utf-8").replace("</html>", f"{PROBE}</html>"), encoding="utf-8")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}")
    command = [CHROMIUM, *flags, "--window-size=900,700", "--dump-dom", page.as_uri()]
    dump = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout
    (found,) = re.findall(r'<pre id="probe">(.*?)</pre>', dump, re.DOTALL)
    return json.loads(html.unescape(found))


def rgb(colour: str) -> str:
    return ", ".join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))


def test_every_token_is_painted_in_the_colour_of_its_origin(seen):
    assert [token["text"] for token in seen["tokens"]] == TEXTS
    for token, origin in zip(seen["tokens"], ["first", *(record[0] for record in TRACE)], strict=True):
        assert re.fullmatch(rf"rgba\({rgb(COLOURS[origin])}, 0\.5\d*\)", token["background"])
    assert {f"rgb({rgb(COLOURS[record[0]])})" for record in TRACE} <= {
        b["background"] for b in seen["legend"]
    }


def test_the_pointer_finds_the_numbers_of_a_token(seen):
    for token in seen["tokens"]:
        if token["text"].strip():  # a line break has no area
            assert token["under"] == token["title"]
    assert "p = 0.9\nq = 0.8\np̂ = 0.9" in seen["tokens"][1]["under"]


def test_the_span_map_lies_where_the_spans_do(seen):
    left, _, width, height = seen["map"]
    assert width > 300 and height > 4
    (retrieved,) = [bar for bar in seen["bars"] if bar["title"].startswith("retrieved")]
    assert retrieved["box"][0] == pytest.approx(left + width * 100 / 400, abs=2)
    assert retrieved["box"][2] == pytest.approx(width * 30 / 400, abs=2)
    assert retrieved["under"] == retrieved["title"], "nothing covers it"
