"""The notebooks of ``examples/`` run from top to bottom against the real server; committed without outputs."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(rapid_server, tmp_path, monkeypatch):
    monkeypatch.setenv("RAPID_SERVER", rapid_server.url)

    def outputs(name):
        book = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
        assert not any(cell.get("outputs") for cell in book.cells), "committed with outputs"
        NotebookClient(book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
        items = [item for cell in book.cells for item in cell.get("outputs", ())]
        html = [item["data"]["text/html"] for item in items if "text/html" in item.get("data", {})]
        images = [item for item in items if "image/png" in item.get("data", {})]
        return html, images, "".join(item["text"] for item in items if item["output_type"] == "stream")

    return outputs


def test_quickstart(run):
    html, _, text = run("quickstart")
    assert len(html) == 1 and 'class="t first"' in html[0] and 'class="map"' in html[0]
    assert "tokens per target pass" in text and "assert" in text


def test_accepted(run, tmp_path):
    html, _, _ = run("accepted")
    drafted, plain, mixed = html
    assert 'class="t model"' in drafted and 'class="t plain"' in plain and 'class="t model"' not in plain
    assert 'class="t model"' in mixed
    assert (tmp_path / "answer.html").read_text().startswith("<!doctype html>")


def test_explorer(run):
    _, images, text = run("explorer")
    assert len(images) == 2 and "λ = 1.0" in text


def test_agent(run):
    _, _, text = run("agent")
    assert "call: search_document" in text and "finished 288" in text
