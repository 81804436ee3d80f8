"""Helpers for the tests of the host side: sequences without a model, and an engine whose model is ten lines.

The null model has two layers like a real one's, so that a wrong, unwritten or overwritten slot changes its outputs:

    layer 0   a slot holds its token and its position
    layer 1   a slot holds a digest of all that layer 0 holds at positions 0 .. its own, read through the block table
    output    a digest of all that layer 1 holds at positions 0 .. the last, read through the block table

`solo` is the same model on one plain list of tokens: the oracle.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from nanoapc.engine.block_hash import BlockHasher, encode_extra_keys
from nanoapc.engine.block_manager import BlockManager
from nanoapc.engine.block_pool import Block
from nanoapc.engine.prefix_order import prefix_order
from nanoapc.engine.scheduler import Scheduler
from nanoapc.engine.sequence import Sequence, SequenceTable
from nanoapc.engine.step_batch import StepBatch
from nanoapc.sampling_params import SamplingParams

VOCAB_SIZE = 50
UNWRITTEN = 0
MASK64 = 2**64 - 1
WEIGHTS = np.random.default_rng(0).integers(1, 2**63, 4096).astype(np.uint64) * np.uint64(2) + np.uint64(1)
"""[positions] one odd factor a position, so that the order of what is summed counts."""
INT_WEIGHTS = [int(weight) for weight in WEIGHTS]


def mix(x: Any) -> Any:
    """A bijection of 64-bit integers (splitmix64's finaliser) that scrambles them: Python integers or uint64 arrays."""
    if isinstance(x, int):
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK64
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK64
        return x ^ x >> 31
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def solo(
    prompt: Iterable[int],
    max_tokens: int,
    *,
    eos: Iterable[int] = (),
    stop_token_ids: Iterable[int] = (),
    min_tokens: int = 0,
    vocab_size: int = VOCAB_SIZE,
) -> tuple[list[int], str]:
    """Output ids and finish reason of the null model on a prompt alone, without blocks, batches or a cache."""
    tokens, num_prompt = list(prompt), len(list(prompt))
    ends = {*eos, *stop_token_ids}
    sum0 = sum1 = position = 0
    while True:
        while position < len(tokens):
            sum0 = (sum0 + mix(tokens[position] + (position + 1 << 32)) * INT_WEIGHTS[position]) & MASK64
            sum1 = (sum1 + mix(sum0) * INT_WEIGHTS[position]) & MASK64
            position += 1
        tokens.append(mix(sum1) % vocab_size)
        num_output = len(tokens) - num_prompt
        if tokens[-1] in ends and num_output > min_tokens:
            return tokens[num_prompt:], "stop"
        if num_output >= max_tokens:
            return tokens[num_prompt:], "length"


class NullModel:
    """Runs StepBatches on a cache of numpy slots, and asserts that nothing is read unwritten or written twice.

    layers: [2, slots] uint64; UNWRITTEN since its block was taken last.
    """

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int = VOCAB_SIZE):
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.layers = np.zeros((2, num_blocks * block_size), np.uint64)

    def forget(self, blocks: list[Block]) -> None:
        """The blocks have new owners: whoever still reads them is wrong."""
        for block in blocks:
            self.layers[:, block.block_id * self.block_size : (block.block_id + 1) * self.block_size] = UNWRITTEN

    def run(self, batch: StepBatch) -> np.ndarray:
        """[num_samples] next tokens."""
        for source, destination, num_tokens in batch.copies:
            self._copy(source * self.block_size, destination * self.block_size, num_tokens)
        written = batch.slots >= 0
        slots = batch.slots[written]
        assert len(set(slots.tolist())) == len(slots), "two rows write one slot"
        assert (self.layers[:, slots] == UNWRITTEN).all(), "a slot is overwritten"
        tokens, positions = batch.token_ids.astype(np.uint64), batch.positions.astype(np.uint64)
        self.layers[0, slots] = mix(tokens + (positions + np.uint64(1) << np.uint64(32)))[written]
        self.layers[1, slots] = np.concatenate([mix(sums) for sums in self._attend(batch, 0)])[written]
        sums = np.concatenate(list(self._attend(batch, 1)))
        return (mix(sums[batch.sample_rows]) % np.uint64(self.vocab_size)).astype(np.int64)

    def _copy(self, source: int, destination: int, num_tokens: int) -> None:
        copied = self.layers[:, source : source + num_tokens]
        assert 0 < num_tokens < self.block_size and (copied != UNWRITTEN).all(), "unwritten slots are copied"
        assert (self.layers[:, destination : destination + self.block_size] == UNWRITTEN).all()
        self.layers[:, destination : destination + num_tokens] = copied

    def _attend(self, batch: StepBatch, layer: int) -> Iterable[np.ndarray]:
        """For each sequence [its rows]: the weighted sum over all positions that the row sees."""
        for table, start, count in zip(batch.block_tables, batch.starts, batch.counts, strict=True):
            seen = np.arange(start + count)
            values = self.layers[layer, table[seen // self.block_size] * self.block_size + seen % self.block_size]
            assert (values != UNWRITTEN).all(), "an unwritten slot is read"
            yield np.cumsum(values * WEIGHTS[: len(seen)])[start:]


class ConstantHasher(BlockHasher):
    """Every block has the same key: all that can be wrong about collisions is wrong at once."""

    def keys(self, parent: bytes, extra: bytes, blocks: list[bytes]) -> list[bytes]:
        return [b"collision"] * len(blocks)


def make_sequence(
    prompt: Iterable[int], max_tokens: int = 16, *, seq_id: int = 0, salt: str | None = None, **params: Any
) -> Sequence:
    """A sequence as the engine makes it; params are SamplingParams'."""
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return Sequence(
        seq_id=seq_id,
        prompt=np.asarray(list(prompt), np.int32),
        params=sampling,
        max_tokens=max_tokens,
        extra=b"" if salt is None else encode_extra_keys([("salt", salt)]),
        stop_token_ids=frozenset(sampling.stop_token_ids),
    )


class NullEngine:
    """Scheduler and BlockManager as the engine joins them, with the null model; every step is checked.

    eos: the model's end-of-text ids. constant_hash: all block keys collide.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        *,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 1024,
        max_model_len: int = 256,
        eos: Iterable[int] = (),
        policy: str = "prefix",
        enable_caching: bool = True,
        constant_hash: bool = False,
        vocab_size: int = VOCAB_SIZE,
    ):
        hasher = ConstantHasher("xxhash") if constant_hash else BlockHasher("xxhash")
        self.manager = BlockManager(num_blocks, block_size, hasher, enable_caching)
        self.pool = self.manager.pool
        table = SequenceTable(max_num_seqs, max_model_len, block_size)
        self.scheduler = Scheduler(self.manager, table, max_num_batched_tokens, eos)
        self.policy = policy
        self.stats = self.scheduler.stats
        self.model = NullModel(num_blocks, block_size, vocab_size)
        self.num_steps = 0
        self.seen: Counter[str] = Counter()
        self.num_pending_hits = 0  # blocks shared in the step that fills them
        self._num_sequences = 0
        self._admitted: dict[Sequence, int] = {}  # running sequence -> tokens when it was admitted
        take = self.pool.take

        def take_and_forget(num_blocks: int) -> list[Block]:
            blocks = take(num_blocks)
            self.model.forget(blocks)
            return blocks

        self.pool.take = take_and_forget  # type: ignore[method-assign]

    # -- requests ----------------------------------------------------------------------------------------

    def add(self, prompts: Iterable[Iterable[int]], max_tokens: int | list[int] = 8, **options: Any) -> list[Sequence]:
        """One sequence a prompt, queued in one call; options as for `make_sequence`."""
        prompts = list(prompts)
        limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        sequences = []
        for prompt, limit in zip(prompts, limits, strict=True):
            sequences.append(make_sequence(prompt, limit, seq_id=self._num_sequences, **options))
            self._num_sequences += 1
        self.queue(sequences)
        return sequences

    def queue(self, sequences: list[Sequence]) -> None:
        """Queues sequences in the order of the policy."""
        self.scheduler.add(prefix_order(sequences) if self.policy == "prefix" else sequences)

    def generate(
        self, prompts: Iterable[Iterable[int]], max_tokens: int | list[int] = 8, **options: Any
    ) -> list[list[int]]:
        """Adds prompts, runs everything to its end; their output ids in the order of the prompts."""
        sequences = self.add(prompts, max_tokens, **options)
        self.run()
        return [seq.output_token_ids for seq in sequences]

    def run(self) -> None:
        """Steps until nothing is left; every block is free then."""
        for _ in range(100_000):
            if not self.scheduler.has_unfinished:
                break
            self.step()
        assert not self.scheduler.has_unfinished, "the engine makes no progress"
        assert self.scheduler.schedule() is None
        assert self.manager.num_free_blocks == len(self.pool.blocks)

    def step(self) -> list[Sequence]:
        """One step; returns the sequences that it has ended."""
        batch = self.schedule()
        if batch is None:
            return []
        return self.finish_step(batch)

    def schedule(self) -> StepBatch | None:
        """The first half of a step: decides and checks, runs nothing."""
        batch = self.scheduler.schedule()
        self.num_steps += batch is not None
        if batch is not None:
            self._check_batch(batch)
        return batch

    def finish_step(self, batch: StepBatch) -> list[Sequence]:
        """The second half: runs the model and enters its tokens."""
        token_ids = self.model.run(batch)
        self.scheduler.advance(batch)
        finished = self.scheduler.settle(batch, token_ids)
        self.check()
        return finished

    def fail_step(self) -> None:
        """Instead of the second half: the model has raised."""
        self.scheduler.step_failed()
        self.check()

    def fail(self) -> bool:
        """A step that fails; False if there was none to run."""
        scheduled = self.schedule() is not None
        if scheduled:
            self.fail_step()
        return scheduled

    # -- what must hold ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Between steps: the pool agrees with the block tables, and nobody holds a block without running."""
        self.pool.check_invariants([seq.blocks for seq in self.scheduler.running])
        assert not set(self.scheduler.running) & set(self.scheduler.waiting)
        for seq in self.scheduler.waiting:
            assert not seq.blocks and seq.row == -1

    def _check_batch(self, batch: StepBatch) -> None:
        scheduler, table, size = self.scheduler, self.scheduler.table, self.manager.block_size
        running = set(scheduler.running)
        self._admitted = {seq: n for seq, n in self._admitted.items() if seq in running}
        assert 0 < batch.num_tokens <= scheduler.max_num_batched_tokens
        assert len(running) <= scheduler.table.num_rows
        for seq in scheduler.running:
            if seq not in self._admitted:
                self._admitted[seq] = int(table.num_tokens[seq.row])
                shared = -(-int(table.first_writable[seq.row]) // size)
                self.num_pending_hits += sum(b.filled_step == self.manager.step for b in seq.blocks[:shared])
            # A sequence holds blocks for its whole prompt from admission on, later exactly what it has filled.
            end = table.num_computed_tokens[seq.row] + table.num_scheduled_tokens[seq.row]
            assert len(seq.blocks) == -(-max(self._admitted[seq], int(end)) // size)
            ids = [block.block_id for block in seq.blocks]
            assert table.block_table[seq.row, : len(ids)].tolist() == ids
        row = 0
        for seq, start, count in zip(batch.sequences, batch.starts.tolist(), batch.counts.tolist(), strict=True):
            for position, slot in zip(range(start, start + count), batch.slots[row : row + count], strict=True):
                self._check_slot(seq, position, int(slot))
            row += count
        self._check_neighbours(batch)
        self.seen["a chunk that is not a prompt's last"] += len(batch.samples) < len(batch.counts)
        self.seen["prefill and decode in one step"] += {1} < set(batch.counts.tolist())

    def _check_slot(self, seq: Sequence, position: int, slot: int) -> None:
        block = seq.blocks[position // self.manager.block_size]
        filled_before = block.prefix is not None and block.filled_step < self.manager.step
        if slot == -1:
            # Only the last token of a prompt that was found whole is computed without being written.
            assert block.prefix is not None
            return
        assert slot == block.block_id * self.manager.block_size + position % self.manager.block_size
        assert not filled_before, "a block that others may read is written"
        assert block.ref_count == 1 or block.prefix is not None, "a block that is not full is shared"

    def _check_neighbours(self, batch: StepBatch) -> None:
        """Sequences that share a run of blocks from the first on stand next to each other."""
        tables = [tuple(block.block_id for block in seq.blocks) for seq in batch.sequences]
        for length in range(1, max(map(len, tables)) + 1):
            runs = [table[:length] if len(table) >= length else i for i, table in enumerate(tables)]
            num_groups = 1 + sum(a != b for a, b in itertools.pairwise(runs))
            assert num_groups == len(set(runs)), "sequences that share blocks are apart"
