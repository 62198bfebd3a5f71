"""Read a document from a file as text: plain text, Markdown or PDF."""

from __future__ import annotations

import os
import re
from pathlib import Path

SUPPORTED = "text, Markdown (UTF-8) and PDF"
# Bytes that no text in any common encoding has in numbers.
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")


class DocumentError(ValueError):
    """A document cannot be used; the text names the file, what is wrong with it and the fix."""


def load_document(path: str | os.PathLike[str]) -> str:
    """The text of one document, with ``\\n`` line ends.

    A PDF is recognised by its content, everything else is read as UTF-8 text.

    Raises:
        DocumentError: missing, unreadable, empty, binary, not UTF-8, or a PDF that is
            encrypted, damaged or holds no text.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise DocumentError(f"{path}: no such file; check the path") from error
    except IsADirectoryError as error:
        raise DocumentError(f"{path}: is a folder; name the files in it, one by one") from error
    except OSError as error:
        raise DocumentError(f"{path}: cannot be read: {error.strerror or error}") from error
    text = _pdf_text(path) if data.startswith(b"%PDF-") else _plain_text(path, data)
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise DocumentError(f"{path}: is empty; name a document with text in it")
    return text


def _plain_text(path: Path, data: bytes) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DocumentError(f"{path}: is UTF-16; convert it with `iconv -f UTF-16 -t UTF-8`")
    zero = data.find(b"\0")
    if zero >= 0:
        raise DocumentError(
            f"{path}: is a binary file (zero byte at offset {zero}); supported are {SUPPORTED}, "
            "so export it as one of these first"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        control = _CONTROL.findall(data[:4096])
        if 100 * len(control) > min(len(data), 4096):
            raise DocumentError(
                f"{path}: is a binary file (control byte 0x{control[0][0]:02x} in it); supported are {SUPPORTED}, "
                "so export it as one of these first"
            ) from error
        raise DocumentError(
            f"{path}: is not UTF-8 (byte 0x{error.object[error.start]:02x} at offset {error.start}); "
            "convert it, for example with `iconv -f WINDOWS-1252 -t UTF-8`"
        ) from error


def _pdf_text(path: Path) -> str:
    from pypdf import PdfReader

    try:
        pages = [page.extract_text() for page in PdfReader(path).pages]
    # pypdf answers damaged files with whatever its parser trips over, not only with PyPdfError.
    except Exception as error:
        raise DocumentError(
            f"{path}: cannot be read as PDF: {error}; if it opens in a viewer, print it to a new PDF first"
        ) from error
    text = "\n\n".join(pages)
    if not text.strip():
        raise DocumentError(
            f"{path}: this PDF of {len(pages)} pages holds no text (a scan?); run OCR over it first, "
            "for example with `ocrmypdf`"
        )
    # Broken font tables can yield lone surrogates, which no tokenizer takes.
    return text.encode("utf-8", "replace").decode("utf-8")
