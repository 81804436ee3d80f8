"""BatchPlan: where the lines of a batch file are, whose they are, and in which order they are best run.

    input --parse--> temporary SQLite database: one row a line --ORDER BY prefix--> lines, read again by offset

Memory is constant: SQLite keeps PLAN_MEMORY_BYTES and spills the rest to temporary files, sorts included. The order by
prefix is coarse (it compares the text of the prompts in chunks, by hash); `LLM.stream` orders each window exactly.

Invariant: lines keep their numbers (from 1, blank lines counted), and two lines never have one custom_id.
"""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
from tqdm import tqdm

from nanoapc.batch_format import MAX_LINE_BYTES, parse_line
from nanoapc.batch_io import open_input
from nanoapc.engine.block_hash import encode_tokens

PLAN_MEMORY_BYTES = 64 * 2**20
"""What SQLite may hold in memory; a line takes about 100 bytes and a 32nd of its text."""
ORDERED_WINDOW = 8192
"""Lines that are sorted by prefix together where results come in input order: a result waits for at most as many."""
PREFIX_CHUNK = 128
PREFIX_FIELDS = ("cache_salt", "chat_template", "chat_template_kwargs", "tools", "prompt", "messages")
MAX_MODELS = 100
TABLES = """
CREATE TABLE line (
    number INTEGER PRIMARY KEY, offset INTEGER, length INTEGER, checksum INTEGER, id BLOB, digest TEXT, prefix BLOB,
    done INTEGER
);
CREATE TABLE waiting (number INTEGER PRIMARY KEY, result BLOB, failed INTEGER);
"""


class BatchPlan:
    """The lines of one file (see `open_input`). total: those that are not blank; num_left: those without a result;
    models: what they ask for.

    Raises:
        ValueError: the file is no UTF-8 text file, or custom_ids are not unique. OSError: it cannot be read.
    """

    def __init__(self, path: str, quiet: bool = True):
        self.path = path
        self._file = open_input(path)
        self._database = open_database(TABLES)
        self.models: set[str | None] = set()  # None: a line that names none, or more models than are kept
        size = os.fstat(self._file.fileno()).st_size
        with tqdm(total=size, desc="Reading", unit="B", unit_scale=True, disable=quiet, leave=False) as bar:
            self._database.executemany("INSERT INTO line VALUES (?, ?, ?, ?, ?, ?, ?, 0)", self._rows(bar.update))
        self._database.execute("CREATE INDEX by_id ON line (id)")
        self.total: int = self._database.execute("SELECT count(*) FROM line").fetchone()[0]
        self.num_left = self.total
        query = "SELECT min(number), max(number) FROM line GROUP BY id HAVING count(*) > 1 LIMIT 1"
        for first, last in self._database.execute(query).fetchall():
            custom_id = str(parse_line(*next(self._read("WHERE number = ?", first))).custom_id)
            where = f"lines {first} and {last} of {path}"
            raise ValueError(f"{where} have the same custom_id {custom_id[:100]!r}; give each its own")

    def _rows(self, progress: Callable[[int], object]) -> Iterator[tuple[Any, ...]]:
        offset = number = 0
        while data := self._file.readline(MAX_LINE_BYTES + 1):
            number, start, offset = number + 1, offset, offset + len(data)
            rest = data
            while not rest.endswith(b"\n") and (rest := self._file.readline(MAX_LINE_BYTES)):
                offset += len(rest)  # the rest of a line that is too long
            progress(offset - start)
            if data.strip().removeprefix(BOM_UTF8):
                line = parse_line(number, data)
                if line.error is None:
                    model = line.body.get("model")
                    self.models.add(model if isinstance(model, str) and len(self.models) < MAX_MODELS else None)
                key = prefix_key(line.url, *(line.body.get(name) for name in PREFIX_FIELDS))
                identity = line_id(line.custom_id, line.digest)
                yield number, start, len(data), zlib.crc32(data), identity, line.digest, key

    def mark_done(self, custom_id: str | None, digest: str) -> bool | None:
        """Says that a line has its result. True; False if it now asks for something else; None if no line lacks it."""
        identity = line_id(custom_id, digest)
        row = self._database.execute("SELECT digest FROM line WHERE id = ? AND NOT done", (identity,)).fetchone()
        if row is None:
            return None
        self._database.execute("UPDATE line SET done = 1 WHERE id = ?", (identity,))
        self.num_left -= 1
        return bool(row[0] == digest)

    def in_order_so_far(self) -> bool:
        """Whether no line with a result follows one without."""
        query = "SELECT (SELECT max(number) FROM line WHERE done) > (SELECT min(number) FROM line WHERE NOT done)"
        return not self._database.execute(query).fetchone()[0]

    def lines(self, ordered: bool = False) -> Iterator[tuple[int, bytes]]:
        """(number, line) of what is left, in the order of the prefixes (ordered: inside windows of the input)."""
        return self._read(f"WHERE NOT done ORDER BY {f'number / {ORDERED_WINDOW},' if ordered else ''} prefix, number")

    def _read(self, condition: str, *values: int) -> Iterator[tuple[int, bytes]]:
        rows = self._database.execute(f"SELECT number, offset, length, checksum FROM line {condition}", values)
        for number, offset, length, checksum in rows:
            data = os.pread(self._file.fileno(), length, offset)
            if zlib.crc32(data) != checksum:
                raise ValueError(f"{self.path} was changed while the run read it (line {number})")
            yield number, data

    def in_input_order(self, write: Callable[[int, bytes, bool], None]) -> Callable[[int, bytes, bool], None]:
        """A function that takes (number, result, failed) in any order and gives them to `write` in input order."""
        numbers = self._database.execute("SELECT number FROM line WHERE NOT done ORDER BY number")
        expected = numbers.fetchone()

        def take(*result: Any) -> None:
            nonlocal expected
            self._database.execute("INSERT INTO waiting VALUES (?, ?, ?)", result)
            query = "SELECT * FROM waiting WHERE number = ?"
            while expected and (row := self._database.execute(query, expected).fetchone()):
                self._database.execute("DELETE FROM waiting WHERE number = ?", expected)
                expected = numbers.fetchone()
                write(*row)

        return take

    def close(self) -> None:
        """Removes everything temporary."""
        self._database.close()
        self._file.close()


def count_forest(prompts: Iterable[Mapping[str, Any]], block_size: int) -> tuple[int, int, int]:
    """(prompt tokens, nodes of the prefix tree, prompt tokens that an endless cache finds in whole blocks) of dicts
    with "prompt_token_ids" [n] and "cache_salt", in constant memory.

    Parts of blocks are not counted: only blocks that an earlier step filled can be copied, which depends on the steps.
    """
    database = open_database("CREATE TABLE prompt (salt TEXT, tokens BLOB)")
    rows = ((repr(prompt["cache_salt"]), encode_tokens(prompt["prompt_token_ids"])) for prompt in prompts)
    database.executemany("INSERT INTO prompt VALUES (?, ?)", rows)
    total = unique = hits = 0
    last: tuple[str, np.ndarray] = ("", np.empty(0, np.uint32))
    for salt, data in database.execute("SELECT salt, tokens FROM prompt ORDER BY salt, tokens"):
        tokens = np.frombuffer(data, np.uint32)  # compared, never read: the byte order does not matter
        size = min(len(tokens), len(last[1])) if salt == last[0] else 0
        common = int(np.logical_and.accumulate(tokens[:size] == last[1][:size]).sum())
        total, unique = total + len(tokens), unique + len(tokens) - common
        found = min(common, len(tokens) - 1)  # of a prompt that is found whole, one token is computed
        hits += found // block_size * block_size
        last = salt, tokens
    return total, unique, hits


def line_id(custom_id: str | None, digest: str) -> bytes:
    """What makes a line itself: its custom_id, or without one its content and place."""
    name = f"line {digest}" if custom_id is None else f"id {custom_id}"
    return blake2b(name.encode(errors="surrogatepass"), digest_size=16).digest()


def prefix_key(*parts: Any) -> bytes:
    """Bytes whose order puts prompts next to each other that begin alike. parts: JSON or arrays, the prompt last."""
    data = json.dumps(parts, default=lambda array: array.tolist()).encode()
    rest = len(data) - len(data) % PREFIX_CHUNK
    hashes = [zlib.crc32(data[start : start + PREFIX_CHUNK]) for start in range(0, rest, PREFIX_CHUNK)]
    return struct.pack(f"{len(hashes)}I", *hashes) + data[rest:]


def open_database(tables: str) -> sqlite3.Connection:
    """A new temporary database with the given tables; it lives in files that vanish with the connection."""
    database = sqlite3.connect("", isolation_level=None)
    database.executescript(
        f"PRAGMA cache_size = -{PLAN_MEMORY_BYTES >> 10}; PRAGMA temp_store = FILE; PRAGMA journal_mode = OFF;"
        f"{tables}; BEGIN;"
    )
    return database
