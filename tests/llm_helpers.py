"""What the tests of the LLM share: short names for common calls, and an observer that checks every step.

    log = observe(llm)                  from now on each step is checked, and recorded in log.steps
    run(llm, [ids, ...], max_tokens=8)

What the observer checks stands at `StepLog`.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import transformers
from tiny_models import tiny_tokenizer
from tokenizers import Tokenizer, processors

from nanoapc import LLM, RequestOutput, SamplingParams
from nanoapc.engine.block_pool import Block
from nanoapc.engine.model_runner import InFlight
from nanoapc.engine.sequence import Sequence as EngineSequence
from nanoapc.engine.step_batch import StepBatch
from nanoapc.layers.sampler import SampledTokens, SamplingRows

B = 4
"""Block size of the test LLMs."""
DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "block_size": B,
    "num_kv_blocks": 256,
    "max_model_len": 128,
    "max_num_seqs": 64,
}


def memory_mib(field: str) -> float:
    """VmRSS or VmHWM (the peak) of this process."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]


def greedy(max_tokens: int = 6, **changes: Any) -> SamplingParams:
    """Greedy, always max_tokens long."""
    return SamplingParams(**{"temperature": 0, "ignore_eos": True, "max_tokens": max_tokens, **changes})


def run(llm: LLM, prompts: Sequence[Any], params: Any = None, **options: Any) -> list[RequestOutput]:
    """generate without a progress bar; `options` are those of `greedy`."""
    return llm.generate(prompts, params or greedy(**options), use_tqdm=False)


def token_ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """The ids of each request's first output."""
    return [output.outputs[0].token_ids for output in outputs]


def cached(outputs: Sequence[RequestOutput]) -> list[int]:
    """num_cached_tokens of each request."""
    return [output.num_cached_tokens for output in outputs]


@torch.inference_mode()
def hf_greedy(model: transformers.PreTrainedModel, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Transformers' greedy continuation, each token from a forward pass over everything before it."""
    ids = list(prompt)
    for _ in range(max_tokens):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def bos_tokenizer(directory: Path) -> Path:
    """Saves the tiny tokenizer changed so that every text begins with <|endoftext|> (id 0); returns the directory."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tiny_tokenizer().backend_tokenizer.to_str()),
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.chat_template = "{{ bos_token }}" + str(tiny_tokenizer().chat_template)
    tokenizer.save_pretrained(directory)
    return directory


def assert_idle(llm: LLM) -> None:
    """Nothing waits or runs, every block is free, and pool and index agree."""
    scheduler, pool = llm.engine.scheduler, llm.engine.manager.pool
    assert not scheduler.waiting and not scheduler.running
    assert pool.num_free_blocks == len(pool.blocks)
    assert not pool.wanted
    pool.check_invariants([])
    assert not llm._calls and not llm._steps.unfinished


@dataclass(frozen=True)
class Step:
    """What one step ran."""

    counts: dict[int, int]  # seq_id -> rows
    positions: dict[int, int]  # seq_id -> position of its first row
    copies: list[tuple[int, int, int]]
    num_blocks: dict[int, int]  # seq_id -> blocks held while it ran

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return sum(self.counts.values())


class StepLog:
    """Records the steps of an LLM and checks each of them.

    - K/V is written only to blocks that the writer holds, and to each slot once until its block is taken anew;
    - K/V is read only where it has been written (in this step at the latest), so no garbage is ever seen;
    - rows stay within the token budget;
    - after the step the pool's invariants hold.

    victims: (seq_id of the preempted, seq_ids of those that ran, oldest first), for each preemption;
    preempted: the place of its prompt in its call.
    """

    def __init__(self, llm: LLM):
        self.steps: list[Step] = []
        self.victims: list[tuple[int, list[int]]] = []
        self.preempted: list[int] = []
        self._engine = engine = llm.engine
        pool = engine.manager.pool
        self._written = np.zeros((len(pool.blocks), engine.config.block_size), bool)
        for prefix in pool.prefixes():
            for block in prefix.blocks:
                self._written[block.block_id] = True
        self._take, self._launch = pool.take, engine.runner.launch
        self._step, self._preempt = engine.step, engine.scheduler._preempt
        pool.take = self._checked_take  # type: ignore[method-assign]
        engine.runner.launch = self._checked_launch  # type: ignore[method-assign]
        engine.step = self._checked_step  # type: ignore[method-assign]
        engine.scheduler._preempt = self._checked_preempt  # type: ignore[method-assign]

    def _checked_take(self, num_blocks: int) -> list[Block]:
        blocks = self._take(num_blocks)
        for block in blocks:
            self._written[block.block_id] = False
        return blocks

    def _checked_launch(self, batch: StepBatch) -> InFlight:
        assert batch.num_tokens <= self._engine.scheduler.max_num_batched_tokens
        before = self._written.copy()
        for source, destination, num_tokens in batch.copies:
            assert self._written[source, :num_tokens].all(), "a copy of K/V that nobody has computed"
            assert not self._written[destination].any()
            self._written[destination, :num_tokens] = True
        self._check_writes(batch)
        self._check_reads(batch)
        try:
            in_flight = self._launch(batch)
        except BaseException:
            self._written = before
            raise
        ids = [seq.seq_id for seq in batch.sequences]
        self.steps.append(
            Step(
                counts=dict(zip(ids, batch.counts.tolist(), strict=True)),
                positions=dict(zip(ids, batch.starts.tolist(), strict=True)),
                copies=list(batch.copies),
                num_blocks={seq.seq_id: len(seq.blocks) for seq in batch.sequences},
            )
        )
        return in_flight

    def _check_writes(self, batch: StepBatch) -> None:
        size = self._engine.config.block_size
        first = 0
        for seq, count in zip(batch.sequences, batch.counts.tolist(), strict=True):
            for row in range(first, first + count):
                position, slot = int(batch.positions[row]), int(batch.slots[row])
                if slot < 0:
                    continue
                block = seq.blocks[position // size]
                assert slot == block.block_id * size + position % size, "a write outside the block table"
                assert not self._written[block.block_id, position % size], "K/V is written twice"
                self._written[block.block_id, position % size] = True
            first += count

    def _check_reads(self, batch: StepBatch) -> None:
        ends = (batch.starts + batch.counts).tolist()
        for seq, table, end in zip(batch.sequences, batch.block_tables, ends, strict=True):
            num_blocks = -(-end // self._engine.config.block_size)
            assert table[:num_blocks].tolist() == [block.block_id for block in seq.blocks[:num_blocks]]
            assert self._written[table[:num_blocks]].reshape(-1)[:end].all(), "K/V that nobody has computed is read"

    def _checked_step(self) -> list[Any]:
        finished = self._step()
        scheduler = self._engine.scheduler
        self._engine.manager.pool.check_invariants([seq.blocks for seq in scheduler.running])
        assert all(not seq.blocks for seq in scheduler.waiting)
        return finished

    def _checked_preempt(self, seq: EngineSequence) -> None:
        self.victims.append((seq.seq_id, [other.seq_id for other in self._engine.scheduler.running]))
        self.preempted.append(seq.request.index)
        self._preempt(seq)


def observe(llm: LLM) -> StepLog:
    """Checks and records every step from now on."""
    return StepLog(llm)


def script_tokens(llm: LLM, script: Sequence[int]) -> None:
    """From now on every sequence gets the ids of `script`, whatever the logits are."""
    runner = llm.engine.runner
    sampling_rows, sample, prompt_lengths = runner._sampling_rows, runner.sampler.forward, [0]

    def remember(batch: StepBatch) -> SamplingRows:
        prompt_lengths[:] = [seq.num_prompt_tokens for seq in batch.sampled]
        return sampling_rows(batch)

    def forward(logits: torch.Tensor, rows: SamplingRows) -> SampledTokens:
        token_ids = torch.tensor(script)[rows.positions - torch.tensor(prompt_lengths)]
        scripted = logits.scatter(1, token_ids.clamp(min=0)[:, None], 99.0)
        return SampledTokens(token_ids, sample(scripted, rows).logprobs)

    runner._sampling_rows = remember  # type: ignore[method-assign]
    runner.sampler.forward = forward  # type: ignore[method-assign]


def load_script(path: Path) -> ModuleType:
    """A file that lies in no package, as a module."""
    spec = importlib.util.spec_from_file_location(f"script {path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module
