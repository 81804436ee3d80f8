"""The files of a batch: compressed or not, standard input, encodings that are refused.

Invariant: an input is a seekable file of plain bytes when it leaves here; what it was before is forgotten.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import IO, Any

MAGIC = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}
"""Names of compressed files, and how these begin."""
ARCHIVES = {b"PK\x03\x04": "a zip archive", b"BZh": "compressed by bzip2", b"\xfd7zX": "compressed by xz"}
CHUNK_BYTES = 2**16


def open_input(path: str) -> IO[bytes]:
    """The decompressed bytes of a file ("-": standard input), as a file that can be read at any place.

    Gzip and zstd are known by their first bytes. What cannot be read at any place is copied to a temporary file.

    Raises:
        OSError: it cannot be read. ValueError: it is damaged, packed or encoded otherwise, or needs a library for zstd.
    """
    file = _opened(path)
    if path == "-" or not os.path.isfile(path):
        file = _copied(file, shutil.copyfileobj)
    begin = os.pread(file.fileno(), 4, 0)
    for suffix, magic in MAGIC.items():
        if begin.startswith(magic):
            with file:
                file = _copied(file, partial(decompress, suffix=suffix, name=path))
            begin = os.pread(file.fileno(), 4, 0)
    encoding = json.detect_encoding(begin).upper().replace("-BE", "BE").replace("-LE", "LE")  # as iconv writes it
    if not encoding.startswith("UTF-8"):
        raise ValueError(f"{path} is {encoding} text; convert it first, for example: iconv -f {encoding} -t UTF-8")
    for magic, what in ARCHIVES.items():
        if begin.startswith(magic):
            raise ValueError(f"{path} is {what}; unpack it first (gzip and zstd are read as they are)")
    return file


def _opened(path: str) -> IO[bytes]:
    if path == "-":
        buffer: IO[bytes] | None = getattr(sys.stdin, "buffer", None)
        if buffer is None:
            raise ValueError("standard input is closed; give the name of a file instead of -")
        return buffer
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
    except OSError:  # of one of the two files: a full disk, say
        raise
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
    with suppress(ImportError):
        from compression import zstd  # type: ignore[import-not-found]  # Python 3.14

        return zstd.ZstdCompressor, zstd.ZstdDecompressor
    with suppress(ImportError):
        import zstandard  # type: ignore[import-not-found]

        return zstandard.ZstdCompressor().compressobj, zstandard.ZstdDecompressor().decompressobj
    raise ValueError("zstd needs Python 3.14 or the package 'zstandard'; install it, or use gzip")
