"""The files of a batch: compressed or not, standard input, encodings that are refused.

Invariant: an input is a seekable file of plain bytes when it leaves here; what it was before is forgotten.
"""

from __future__ import annotations

import codecs
import os
import shutil
import stat
import sys
import tempfile
import zlib
from collections.abc import Callable
from functools import partial
from typing import IO, Any

MAGIC = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}
"""Names of compressed files, and how these begin."""
OTHER_ENCODINGS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # begins as that of UTF-16-LE does
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
    b"{\0": "UTF-16LE",  # without a byte order mark: JSON has no zeros
    b"\0{": "UTF-16BE",
}
ARCHIVES = {b"PK\x03\x04": "a zip archive", b"BZh": "compressed by bzip2", b"\xfd7zX": "compressed by xz"}
CHUNK_BYTES = 2**16


def open_input(path: str) -> IO[bytes]:
    """The decompressed bytes of a file ("-": standard input), as a file that can be read at any place.

    Gzip and zstd are known by their first bytes. What cannot be read at any place is copied to a temporary file.

    Raises:
        OSError: it cannot be read. ValueError: it is damaged, packed or encoded otherwise, or needs a library for zstd.
    """
    file = _standard_input() if path == "-" else _opened(path)
    if path == "-" or not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file = _copied(file, shutil.copyfileobj)
    begin = os.pread(file.fileno(), 4, 0)
    for suffix, magic in MAGIC.items():
        if begin.startswith(magic):
            with file:
                file = _copied(file, partial(decompress, suffix=suffix, name=path))
    begin = os.pread(file.fileno(), 4, 0)
    for mark, name in OTHER_ENCODINGS.items():
        if begin.startswith(mark) and b"\0" in begin:
            raise ValueError(f"{path} is {name} text; convert it first, for example: iconv -f {name} -t UTF-8")
    for magic, what in ARCHIVES.items():
        if begin.startswith(magic):
            raise ValueError(f"{path} is {what}; unpack it first (gzip and zstd are read as they are)")
    return file


def _standard_input() -> IO[bytes]:
    buffer: IO[bytes] | None = getattr(sys.stdin, "buffer", None)
    if buffer is None:
        raise ValueError("standard input is closed; give the name of a file instead of -")
    return buffer


def _opened(path: str) -> IO[bytes]:
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path!r} to read") from None
    except OSError as error:
        raise OSError(f"{path} cannot be read: {error.strerror}") from None


def _copied(source: IO[bytes], copy: Callable[[IO[bytes], IO[bytes]], None]) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115
    copy(source, file)
    file.seek(0)
    return file


def decompress(source: IO[bytes], target: IO[bytes], suffix: str, name: str) -> None:
    """Unpacks all members (frames) of a file; ValueError, with its name, if it is damaged or cut off."""
    make = _codec(suffix)[1]
    unpacker: Any = None
    try:
        while data := source.read(CHUNK_BYTES):
            while data:
                unpacker = unpacker or make()
                target.write(unpacker.decompress(data))
                data, unpacker = (unpacker.unused_data.lstrip(b"\0"), None) if unpacker.eof else (b"", unpacker)
    except Exception as error:  # each library has errors of its own
        raise ValueError(f"{name} is damaged: {error}") from error
    if unpacker is not None:
        raise ValueError(f"{name} is cut off")


def compress(source: IO[bytes], target: IO[bytes], suffix: str) -> None:
    """Packs a file as one member (frame)."""
    packer = _codec(suffix)[0]()
    while data := source.read(CHUNK_BYTES):
        target.write(packer.compress(data))
    target.write(packer.flush())


def _codec(suffix: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Makers of a compressor and of a decompressor for ".gz" or ".zst"."""
    if suffix == ".gz":
        return partial(zlib.compressobj, wbits=31), partial(zlib.decompressobj, wbits=31)
    zstd: Any
    try:
        from compression import zstd  # type: ignore[import-not-found,no-redef]  # Python 3.14

        return zstd.ZstdCompressor, zstd.ZstdDecompressor
    except ImportError:
        pass
    try:
        import zstandard as zstd  # type: ignore[import-not-found,no-redef]
    except ImportError:
        raise ValueError("zstd needs Python 3.14 or the package 'zstandard'; install it, or use gzip") from None
    return zstd.ZstdCompressor().compressobj, zstd.ZstdDecompressor().decompressobj
