"""The files of a batch: compressed or not, standard input, encodings that are refused.

Invariant: an input is a seekable file of plain bytes when it leaves here; what it was before is forgotten.
"""

from __future__ import annotations

import codecs
import gzip
import os
import shutil
import stat
import sys
import tempfile
from typing import IO, Any

GZIP_MAGIC, ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
SUFFIXES = (".gz", ".zst")
COPY_BYTES = 2**20
ENCODINGS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)


def open_input(path: str) -> IO[bytes]:
    """The decompressed bytes of a file ("-": standard input), as a file that can be read at any place.

    Gzip and zstd are known by their first bytes. What cannot be read at any place is copied to a temporary file.

    Raises:
        OSError: it cannot be read. ValueError: it is damaged, or a library for zstd is missing.
    """
    file: IO[bytes] = sys.stdin.buffer if path == "-" else open(path, "rb")  # noqa: SIM115
    if path == "-" or not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file = _copy(file, path)
    magic = os.pread(file.fileno(), 4, 0)
    if not magic.startswith((GZIP_MAGIC, ZSTD_MAGIC)):
        return file
    with file:
        return _copy(open_compressed(file, "rb", ".gz" if magic.startswith(GZIP_MAGIC) else ".zst"), path)


def _copy(source: IO[bytes], path: str) -> IO[bytes]:
    copy = tempfile.TemporaryFile()  # noqa: SIM115
    try:
        shutil.copyfileobj(source, copy, COPY_BYTES)
    except Exception as error:  # gzip, zlib and zstd have errors of their own
        copy.close()
        raise ValueError(f"{path} cannot be read to its end: {error}") from error
    copy.seek(0)
    return copy


def open_compressed(file: IO[bytes], mode: str, suffix: str) -> IO[bytes]:
    """Reads ("rb") or writes ("wb") the compressed content of an open file; suffix: ".gz" or ".zst"."""
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=file, mode=mode, filename="", mtime=0)  # type: ignore[return-value]
    zstd: Any
    try:
        from compression import zstd  # type: ignore[import-not-found,no-redef]  # Python 3.14

        return zstd.open(file, mode)
    except ImportError:
        pass
    try:
        import zstandard as zstd  # type: ignore[import-not-found,no-redef]
    except ImportError:
        raise ValueError("zstd needs Python 3.14 or the package 'zstandard'; install it, or use gzip") from None
    if mode == "rb":
        return zstd.ZstdDecompressor().stream_reader(file, read_across_frames=True)
    return zstd.ZstdCompressor().stream_writer(file, closefd=False)


def check_encoding(first_line: bytes, path: str) -> None:
    """ValueError if the file begins as UTF-16 or UTF-32 text does."""
    for mark, name in ENCODINGS:
        if first_line.startswith(mark) and b"\0" in first_line:
            raise ValueError(f"{path} is {name}; convert it to UTF-8 first, for example with: iconv -f {name} -t UTF-8")
