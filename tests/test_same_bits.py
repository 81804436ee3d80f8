"""The same bits whatever the batch: on the CPU, a request's ids and log-probs do not depend on how it was run.

Needs the C++ kernels (PyTorch's own products depend on the number of rows). Spans are 256 positions long, so prompts
here are long enough to cross one.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_tiny_model

from nanoapc import LLM, RequestOutput, SamplingParams
from nanoapc.kernels.cpu import CpuKernels, cpu_kernels

SMOLLM2 = Path(os.environ.get("NANOAPC_SMOLLM2", ".models/smollm2-135m"))
Result = list[tuple[list[int], list[list[tuple[int, float]]]]]

pytestmark = pytest.mark.skipif(
    not isinstance(cpu_kernels(), CpuKernels), reason="the C++ kernels cannot be built here, see the warning"
)


def results(outputs: Sequence[RequestOutput]) -> Result:
    """Ids, and every reported log-prob exactly as it is."""
    return [
        (o.outputs[0].token_ids, [[(i, e.logprob) for i, e in step.items()] for step in o.outputs[0].logprobs or []])
        for o in outputs
    ]


def sampled(max_tokens: int, seed: int | None = None) -> SamplingParams:
    """Greedy without a seed, else random; always with the two best log-probs."""
    temperature = 0.0 if seed is None else 0.8
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, logprobs=2, ignore_eos=True)


def solo(llm: LLM, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> Result:
    """Each prompt in a call of its own."""
    return [results(llm.generate([p], s, use_tqdm=False))[0] for p, s in zip(prompts, params, strict=True)]


WAYS: dict[str, dict[str, Any]] = {
    "caching off": {"enable_prefix_caching": False},
    "first come first served": {"schedule_policy": "fcfs"},
    "every sequence reads for itself": {"enable_forest_attention": False},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "chunks of 300": {"max_num_batched_tokens": 300},
    "two at a time": {"max_num_seqs": 2},
    "other blocks": {"block_size": 32},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_request_gets_the_same_bits_however_it_is_run(architecture: str, dtype: str, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, architecture, max_position_embeddings=1024)
    rng = random.Random(architecture + dtype)
    ids = [[rng.randrange(3, 290) for _ in range(n)] for n in (270, 300, 40, 9, 600)]
    prompts = [ids[0] + ids[2], ids[0] + ids[3], ids[0] + ids[2][:30] + ids[3], ids[1], ids[3], ids[4], ids[0]]
    params = [sampled(rng.randint(3, 20), rng.choice([None, 1, 2])) for _ in prompts]
    base = {"dtype": dtype, "max_model_len": 700, "num_kv_blocks": 600, "block_size": 8, "max_num_seqs": 8}
    with LLM(tmp_path, **{**base, "enable_prefix_caching": False}) as llm:
        expected = solo(llm, prompts, params)
    for name, options in WAYS.items():
        with LLM(tmp_path, **{**base, **options}) as llm:
            order = rng.sample(range(len(prompts)), len(prompts))
            for state in ("cold", "warm"):
                outputs = llm.generate([prompts[i] for i in order], [params[i] for i in order], use_tqdm=False)
                assert results(outputs) == [expected[i] for i in order], f"{name}, {state}"
            if options.get("enable_prefix_caching", True):
                assert llm.metrics().copied_tokens > 0, name
    with LLM(tmp_path, **{**base, "num_kv_blocks": 100}) as llm:  # 100 blocks: they have to make room for each other
        assert results(llm.generate(prompts * 2, params * 2, use_tqdm=False)) == expected * 2
        assert llm.metrics().num_preemptions + llm.metrics().evictions > 0


@pytest.mark.skipif(not (SMOLLM2 / "config.json").exists(), reason=f"no model in {SMOLLM2}: tools/make_smollm2.py")
def test_a_real_model_gives_the_same_bits_on_real_text_in_bfloat16() -> None:
    text = (Path(__file__).parent.parent / "docs" / "architecture.md").read_text()
    prompts = [text[:start] + text[start : start + 60] for start in (1800, 1200, 1800, 200)] + [text[5000:5600]]
    prompts[2] += " and"
    params = [sampled(8, seed) for seed in (None, None, 3, None, 4)]
    base = {"dtype": "bfloat16", "max_model_len": 1024, "num_kv_blocks": 300}
    with LLM(SMOLLM2, **base, enable_prefix_caching=False) as llm:
        expected = solo(llm, prompts, params)
    for options in ({}, {"enable_forest_attention": False, "max_num_batched_tokens": 100}):
        with LLM(SMOLLM2, **base, **options) as llm:
            cold = llm.generate(prompts, params, use_tqdm=False)
            warm = llm.generate(prompts[::-1], params[::-1], use_tqdm=False)
            assert results(cold) == expected
            assert results(warm) == expected[::-1]
            assert sum(output.num_cached_tokens for output in warm) > 0.9 * sum(
                len(output.prompt_token_ids) for output in warm
            )
