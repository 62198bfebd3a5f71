"""Reading documents: what is accepted, and that every refusal names the file, the fault and the fix."""

import pytest
from pypdf import PdfWriter

from rapid_sgl.retrieval.documents import DocumentError, load_document


def write(folder, name, data):
    path = folder / name
    path.write_bytes(data)
    return path


def pdf_with_text(text):
    """A one-page PDF, written by hand: pypdf reads text but does not lay it out."""
    stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        b"/Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    data, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    start = len(data)
    data += b"xref\n0 6\n0000000000 65535 f \n" + table
    return data + b"trailer\n<< /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % start


@pytest.mark.parametrize("name", ["notes.txt", "notes.md", "no-suffix"])
def test_text_is_read_whatever_its_suffix(tmp_path, name):
    path = write(tmp_path, name, "# Überschrift\n\n你好\n".encode())
    assert load_document(path) == "# Überschrift\n\n你好\n"


def test_byte_order_mark_and_line_ends_are_normalised(tmp_path):
    assert load_document(write(tmp_path, "a.txt", b"\xef\xbb\xbfone\r\ntwo\rthree\n")) == "one\ntwo\nthree\n"


def test_pdf_text_is_extracted(tmp_path):
    assert "The vault is blue" in load_document(write(tmp_path, "a.pdf", pdf_with_text("The vault is blue")))


def test_pdf_is_recognised_by_content(tmp_path):
    assert "blue" in load_document(write(tmp_path, "report", pdf_with_text("The vault is blue")))


@pytest.mark.parametrize(
    ("data", "reason", "fix"),
    [
        (b"", "is empty", "with text"),
        (b" \n\t\n", "is empty", "with text"),
        (b"abc\0def", "zero byte at offset 3", "text, Markdown"),
        (b"caf\xe9 au lait", "byte 0xe9 at offset 3", "iconv"),
        ("text".encode("utf-16"), "UTF-16", "iconv -f UTF-16"),
        (b"%PDF-1.7\nnothing of the kind", "cannot be read as PDF", "new PDF"),
    ],
)
def test_unusable_content_is_refused(tmp_path, data, reason, fix):
    path = write(tmp_path, "document.txt", data)
    with pytest.raises(DocumentError) as caught:
        load_document(path)
    text = str(caught.value)
    assert str(path) in text and reason in text and fix in text
    assert "\n" not in text


def test_pdf_without_text_is_refused(tmp_path):
    writer = PdfWriter()
    writer.add_blank_page(width=200, height=200)
    with (tmp_path / "scan.pdf").open("wb") as handle:
        writer.write(handle)
    with pytest.raises(DocumentError, match=r"1 pages holds no text.*OCR"):
        load_document(tmp_path / "scan.pdf")


def test_encrypted_pdf_is_refused(tmp_path):
    path = write(tmp_path, "plain.pdf", pdf_with_text("secret"))
    writer = PdfWriter(clone_from=path)
    writer.encrypt("password", algorithm="RC4-128")
    with (tmp_path / "locked.pdf").open("wb") as handle:
        writer.write(handle)
    with pytest.raises(DocumentError, match="cannot be read as PDF"):
        load_document(tmp_path / "locked.pdf")


def test_missing_file_and_folder_are_refused(tmp_path):
    with pytest.raises(DocumentError, match="no such file"):
        load_document(tmp_path / "missing.txt")
    with pytest.raises(DocumentError, match="is a folder"):
        load_document(tmp_path)
