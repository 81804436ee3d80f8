"""SmolLM2-135M-Instruct: a real model gives transformers' tokens, however the batch is run.

The model directory is that of tools/make_smollm2.py; NANOAPC_SMOLLM2 says where it is.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from llm_helpers import StepLog, cached, observe, token_ids

from nanoapc import LLM, RequestOutput, SamplingParams

DIRECTORY = Path(os.environ.get("NANOAPC_SMOLLM2", ".models/smollm2-135m"))
MAX_TOKENS = 48
SYSTEM = {"role": "system", "content": "You are a patient teacher. You answer in a few short, plain sentences."}
QUESTIONS = [
    "What is the capital of France?",
    "What is the capital of France, and which river runs through it?",
    "Name three colours of the rainbow.",
    "Why is the sky blue?",
    "Write a short poem about the sea.",
    "How do I boil an egg?",
    "Translate 'good morning' into Spanish.",
    "What is 17 plus 25?",
]
CONVERSATIONS = [[{"role": "user", "content": question}] for question in QUESTIONS]
CONVERSATIONS += [[SYSTEM, {"role": "user", "content": question}] for question in QUESTIONS]

pytestmark = pytest.mark.skipif(
    not (DIRECTORY / "config.json").exists(),
    reason=f"no model in {DIRECTORY}: make it with tools/make_smollm2.py, or set NANOAPC_SMOLLM2",
)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Transformers' greedy continuation of each conversation in float32, without what follows the end."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(DIRECTORY, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32).eval()
    texts = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in CONVERSATIONS]
    inputs = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    with torch.inference_mode():
        outputs = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)
    ends = model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends)
    continuations = []
    for row in outputs[:, inputs["input_ids"].shape[1] :].tolist():
        end = next((i + 1 for i, token_id in enumerate(row) if token_id in ends), len(row))
        continuations.append(row[:end])
    return continuations


def chat(llm: LLM) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    return llm.chat(CONVERSATIONS, params, use_tqdm=False)


def make(**options: Any) -> LLM:
    return LLM(DIRECTORY, dtype="float32", **{"max_model_len": 256, "num_kv_blocks": 256, **options})


def reused_after_preemption(log: StepLog) -> bool:
    """Whether a preempted sequence went on from what was still cached."""
    return any(step.positions.get(victim, 0) > 0 for victim, _ in log.victims for step in log.steps)


def test_in_prefix_order_cold_and_warm(expected: list[list[int]]) -> None:
    with make() as llm:
        cold = chat(llm)
        assert token_ids(cold) == expected
        assert sum(count > 0 for count in cached(cold)) >= 14  # one template and one system prompt for all
        assert {output.outputs[0].finish_reason for output in cold} == {"stop", "length"}
        warm = chat(llm)
        assert token_ids(warm) == expected
        for output in warm:  # all whole blocks; and what came after, where the answer has filled the next one
            assert (len(output.prompt_token_ids) - 1) // 16 * 16 <= output.num_cached_tokens
        assert sum(cached(warm)) > 0.9 * sum(len(output.prompt_token_ids) for output in warm)
        assert "Paris" in warm[0].outputs[0].text
        assert [output.outputs[0].text for output in warm] == [output.outputs[0].text for output in cold]


def test_without_a_cache(expected: list[list[int]]) -> None:
    with make(enable_prefix_caching=False, schedule_policy="fcfs") as llm:
        outputs = chat(llm)
        assert token_ids(outputs) == expected and cached(outputs) == [0] * 16


def test_chunked_and_preempted(expected: list[list[int]]) -> None:
    with make(max_num_batched_tokens=32, num_kv_blocks=32, max_model_len=128, schedule_policy="fcfs") as llm:
        log = observe(llm)
        outputs = chat(llm)
        assert token_ids(outputs) == expected
        assert max(step.num_tokens for step in log.steps) == 32
        assert any(1 < count < 32 for step in log.steps for count in step.counts.values())
        assert len(log.victims) >= 3 and reused_after_preemption(log)
        assert llm.metrics().evictions > 0
