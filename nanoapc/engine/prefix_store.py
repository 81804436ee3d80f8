"""PrefixStore: cached prefixes in a file, so that the next process begins with what this one has computed.

    chains in the cache                      the file (safetensors), most recently used chains first
        [the cat sat on] [the mat . It]          lengths  [chains] blocks of each chain        2 2 1
        [the cat sat on] [a chair , so]          tokens   the chains one after the other
        [the cat ran to]                         kv       a row for each block that no chain before it has:
                                                          the cat sat on | the mat . It | a chair , so | the cat ran to
                                                 hashes   of these rows

Keys are not stored but made anew, so a random root (see block_hash.py) is no obstacle. A chain that is read goes
through the block manager like a sequence that has run: looked up, admitted, indexed, freed.

Invariants: K/V is taken only from a file made with the same weights, config, kernels, dtype and block size, and only as
it was written (a damaged file is refused), so results are the same bits as without it. The file is replaced as a whole:
what was there stays until the new one is complete.

Whether it pays: K/V is read at the disk's speed, some 20 us a token for a model of 0.6B parameters. Computing it takes
25 times as long on two CPU cores, but less than that on a large GPU.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import struct
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanoapc.engine.block_manager import TOKEN_BYTES, BlockManager
from nanoapc.engine.block_pool import Block, BlockPool
from nanoapc.engine.output_file import output_file, replace_file
from nanoapc.engine.sequence import Sequence
from nanoapc.inputs import groups
from nanoapc.kernels import Kernels
from nanoapc.models.checkpoint import DTYPES
from nanoapc.models.config import ModelConfig
from nanoapc.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

FORMAT = "nanoapc prefixes 2"
CHUNK_BYTES = 64 * 2**20
"""K/V that is on its way between cache and file at once."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.int64: "I64", torch.int32: "I32"}
"""Safetensors' names, as a file's header has them."""


class PrefixStore:
    """The file of one engine.

    Args:
        path: it need not exist, its folder must.
        manager, kv_memory: the engine's cache; kv_memory is [NB, L, 2, Hkv, B, D].
        origin: what the bits of K/V depend on besides the tokens, see `kv_origin`.
    Raises:
        ValueError: see `output_file`.
    """

    def __init__(self, path: str, manager: BlockManager, kv_memory: Tensor, origin: dict[str, str]):
        self.path = output_file("prefix_cache_file", path)
        self.manager = manager
        self.kv_memory = kv_memory
        self.origin = origin
        self._rows_at_once = max(1, CHUNK_BYTES // kv_memory[0].nbytes)

    # -- writing -----------------------------------------------------------------------------------------

    def save(self, step: int) -> int:
        """Replaces the file by all prefixes whose blocks were filled before `step`; returns the number of blocks.

        If there are none the file stays as it is.

        Raises:
            OSError: it cannot be written; the old one stays.
        """
        chains = _chains(self.manager.pool, step)
        blocks = list({block.prefix: block for chain in chains for block in chain}.values())
        if blocks:
            with replace_file(self.path, mode=0o600) as file:  # prompts and salts are in it
                self._write(file, chains, blocks)
        logger.info("%d cached blocks are in %s", len(blocks), self.path)
        return len(blocks)

    def _write(self, file: Any, chains: list[list[Block]], blocks: list[Block]) -> None:
        size = self.manager.block_size * TOKEN_BYTES
        labels = [[block.prefix.label for block in chain if block.prefix] for chain in chains]
        # What a first block's label has before its tokens.
        extra_keys = json.dumps([chain[0][:-size].hex() for chain in labels])
        tokens = b"".join(label[-size:] for chain in labels for label in chain)
        lengths = torch.tensor([len(chain) for chain in chains], device="cpu")
        token_ids = torch.from_numpy(np.frombuffer(tokens, ">u4").astype(np.int32))
        metadata = {"format": FORMAT, **self.origin, "extra_keys": extra_keys}
        header = _header(
            metadata | {"hash": _hash_of_chains(extra_keys, lengths, token_ids)},
            {
                "lengths": (lengths.dtype, lengths.shape),
                "tokens": (token_ids.dtype, token_ids.shape),
                "kv": (self.kv_memory.dtype, (len(blocks), *self.kv_memory.shape[1:])),
                "hashes": (torch.int64, (len(blocks),)),
            },
        )
        file.write(header)
        for tensor in (lengths, token_ids):
            file.write(tensor.numpy().data)
        hashes: list[np.ndarray] = []
        for rows in groups((block.block_id for block in blocks), self._rows_at_once):
            kv = self.kv_memory[rows].cpu()
            file.write(_bytes(kv).data)
            hashes.append(_hashes_of_rows(kv))
        file.write(np.concatenate(hashes).data)

    # -- reading -----------------------------------------------------------------------------------------

    def load(self) -> int:
        """Takes as much of the file as fits into the empty cache; returns the number of blocks (0: no file).

        Raises:
            ValueError: the file is damaged, or its K/V has another origin.
        """
        if not self.path.exists():
            return 0
        try:
            with safe_open(self.path, framework="pt") as file:
                metadata = file.metadata() or {}
                self._check_origin(metadata)
                num_blocks = self._read(file, metadata)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"prefix_cache_file {self.path}: {error}; delete it, or name another") from error
        logger.info("%d cached blocks are taken from %s", num_blocks, self.path)
        return num_blocks

    def _check_origin(self, metadata: dict[str, str]) -> None:
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{self.path} is no prefix_cache_file that this version reads; name another")
        for name, value in self.origin.items():
            if metadata.get(name) != value:
                raise ValueError(
                    f"prefix_cache_file {self.path} was made with other {name} ({metadata.get(name)}, now {value}); "
                    "name another file, or delete it"
                )

    def _read(self, file: Any, metadata: dict[str, str]) -> int:
        extra_keys = metadata.get("extra_keys", "")
        lengths, token_ids, hashes = (
            file.get_tensor(name) if name in file.keys() else torch.zeros(0)  # noqa: SIM118  # it is no dict
            for name in ("lengths", "tokens", "hashes")
        )
        if metadata.get("hash") != _hash_of_chains(extra_keys, lengths, token_ids):
            raise SafetensorError("it is damaged")
        ends = np.cumsum(lengths.numpy()) * self.manager.block_size
        prompts = np.split(token_ids.numpy(), ends[:-1])
        sequences: list[Sequence] = []
        blocks: list[Block] = []
        for tokens, extra in zip(prompts, json.loads(extra_keys), strict=True):
            if self.manager.num_free_blocks == 0:
                break
            seq = Sequence(-1 - len(sequences), tokens, SamplingParams(), max_tokens=1, extra=bytes.fromhex(extra))
            blocks += self._admit(seq)
            sequences.append(seq)
        kv = file.get_slice("kv")
        first = 0
        for rows in groups((block.block_id for block in blocks), self._rows_at_once):
            end = first + len(rows)
            read = kv[first:end]
            if not np.array_equal(_hashes_of_rows(read), hashes.numpy()[first:end]):
                raise SafetensorError("it is damaged")
            self.kv_memory[rows] = read.to(self.kv_memory.device)
            first = end
        self.manager.begin_step()  # what was to be filled is
        for seq in reversed(sequences):  # so that the most recently used are evicted last
            self.manager.free(seq)
        return len(blocks)

    def _admit(self, seq: Sequence) -> list[Block]:
        """Gives a chain, cut to what fits, its place in the index; returns the blocks that hold nothing yet."""
        manager = self.manager
        manager.extend_keys(seq, seq.prompt)
        match = manager.without_copy(manager.match(seq))
        most = len(match.shared) + manager.num_free_blocks
        seq.prompt = seq.prompt[: most * manager.block_size]
        manager.admit(seq, match)
        manager.index_blocks(seq, seq.prompt, len(seq.prompt))
        return seq.blocks[len(match.shared) :]


def kv_origin(model: ModelConfig, weights: str, kernels: Kernels, kv_memory: Tensor) -> dict[str, str]:
    """What the bits of K/V depend on besides the tokens; weights: a hash of them."""
    return {
        "block_size": str(kv_memory.shape[4]),
        "dtype": str(kv_memory.dtype).removeprefix("torch."),
        "kernels": kernels.name,
        "config": repr(dataclasses.replace(model, eos_token_ids=())),
        "weights": weights,
    }


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


def _hash_of_chains(extra_keys: str, *tensors: Tensor) -> str:
    """Of what says which block holds what."""
    return xxhash.xxh3_128_hexdigest(extra_keys.encode() + b"".join(_bytes(tensor).tobytes() for tensor in tensors))


def _hashes_of_rows(kv: Tensor) -> np.ndarray:
    """[n] int64, one for each row of K/V."""
    return np.array([xxhash.xxh3_64_intdigest(row.data) for row in _bytes(kv)], np.uint64).view(np.int64)


def _chains(pool: BlockPool, step: int) -> list[list[Block]]:
    """The blocks from the root to each leaf, as far as they were filled before `step`; most recently used first."""
    used = [block for block in pool.blocks if block.queue is None]
    by_use = (*used, *reversed([*pool.free, *pool.spared]))  # the queues' heads were used least recently
    leaves = dict.fromkeys(block.prefix for block in by_use if block.prefix is not None and block.prefix.is_leaf)
    chains = []
    for leaf in leaves:
        path = [leaf]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        chain = []
        for prefix in path[-2::-1]:  # from the root on, which holds nothing
            block = prefix.block_filled_before(step)
            if block is None:
                break
            chain.append(block)
        if chain:
            chains.append(chain)
    return chains


def _header(metadata: dict[str, str], tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> bytes:
    """The head of a safetensors file. (The library writes only tensors that are in memory as a whole.)"""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
