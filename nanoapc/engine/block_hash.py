"""What identifies a full block: the key chain.

    key(block i) = H( key(block i-1) or root,  tokens of block i,  extra keys )

so a key stands for the whole prefix up to and including its block. Invariant: equal content under equal extra keys
has an equal key. The converse is not relied on: a key finds candidates, `block_pool.Prefix` proves them.

The root comes from PYTHONHASHSEED when that is set. Otherwise it is fixed for sha256 (keys can be shared
between processes) and random for xxhash, so that nobody can prepare prompts whose keys collide.
Keys never come from Python's hash().

The cbor variants follow vLLM's layout (H over canonical CBOR of [parent, tokens, extra or null], root = H over
CBOR of the seed string), so tools that know vLLM's keys know these.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

logger = logging.getLogger(__name__)

ExtraKey = tuple[str | int | bytes, ...]
"""A tagged reason why equal tokens are not equal content: ("salt", s)."""


def encode_tokens(token_ids: Sequence[int] | np.ndarray) -> bytes:
    """Token ids as big-endian uint32: compact, and byte order is token order (so bytes sort like token lists)."""
    return np.asarray(token_ids).astype(">u4").tobytes()


def decode_tokens(tokens: bytes) -> list[int]:
    """The inverse of `encode_tokens`."""
    return np.frombuffer(tokens, ">u4").tolist()


def encode_extra_keys(extra_keys: Sequence[ExtraKey]) -> bytes:
    """Extra keys as bytes; every part carries its type and length.

    So no two different lists encode alike, and the labels of blocks with equal extra keys sort together.
    """
    parts = []
    for extra_key in extra_keys:
        parts.append(b"(" + struct.pack(">I", len(extra_key)))
        for value in extra_key:
            kind, data = _typed(value)
            parts.append(kind + struct.pack(">I", len(data)) + data)
    return b"".join(parts)


def _typed(value: str | int | bytes) -> tuple[bytes, bytes]:
    if isinstance(value, str):
        return b"s", value.encode("utf-8", "surrogatepass")
    if isinstance(value, int):
        return b"i", str(int(value)).encode()
    return b"b", value


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


class BlockHasher:
    """Makes the keys of one engine.

    Args:
        algorithm: "xxhash", "xxhash_cbor" (both xxh3-128), "sha256" or "sha256_cbor".
        seed: overrides PYTHONHASHSEED.
    Attributes:
        root: the parent key of a first block.
    Raises:
        ValueError: the algorithm is unknown, or a cbor variant without the package cbor2.
    """

    def __init__(self, algorithm: str, seed: str | None = None):
        name, _, encoding = algorithm.partition("_")
        if name not in ("xxhash", "sha256") or encoding not in ("", "cbor"):
            raise ValueError(f"unknown hash algorithm {algorithm!r}; use xxhash, xxhash_cbor, sha256 or sha256_cbor")
        self._digest: Callable[[bytes], bytes] = xxhash.xxh3_128_digest if name == "xxhash" else _sha256
        self._cbor: Callable[..., bytes] | None = _cbor_dumps(algorithm) if encoding else None
        self.root = self._root(name, _environment_seed() if seed is None else seed)

    def _root(self, name: str, seed: str | None) -> bytes:
        if seed is None and name == "xxhash":
            logger.info("block keys are random per process; set PYTHONHASHSEED to make them repeatable")
            return self._digest(os.urandom(32))
        seed = "0" if seed is None else seed
        return self._digest(self._cbor(seed) if self._cbor else b"nanoapc root " + seed.encode())

    def keys(self, parent: bytes, extra: bytes, blocks: list[bytes]) -> list[bytes]:
        """The keys of consecutive blocks.

        Args:
            parent: the key before the first of them (or `root`).
            extra: encoded extra keys of the first of them.
            blocks: their tokens, each from `encode_tokens`. Parent and tokens have fixed lengths in an engine, so
                joining them is unambiguous.
        """
        digest, cbor = self._digest, self._cbor
        keys = []
        for tokens in blocks:
            if cbor is None:
                parent = digest(parent + tokens + extra)
            else:
                parent = digest(cbor([parent, decode_tokens(tokens), extra or None], canonical=True))
            keys.append(parent)
            extra = b""
        return keys


def _environment_seed() -> str | None:
    """PYTHONHASHSEED, unless it asks Python for a random one."""
    seed = os.environ.get("PYTHONHASHSEED")
    return None if seed in (None, "", "random") else seed


def _cbor_dumps(algorithm: str) -> Callable[..., bytes]:
    try:
        import cbor2
    except ImportError:
        raise ValueError(
            f"prefix_caching_hash_algo={algorithm!r} needs the package cbor2: pip install 'nanoapc[cbor]'"
        ) from None
    return cbor2.dumps
