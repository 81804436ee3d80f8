"""Arguments of vLLM's `LLM` that this one lacks: scripts pass them all the same, mostly with their defaults.

Invariant: such an argument passes if it says only how vLLM runs, or asks for nothing; for any other the error says what
to do instead. A name that vLLM does not have either is not known here.
"""

from __future__ import annotations

from typing import Any

HOW_VLLM_RUNS = """
    additional_config allowed_local_media_path attention_backend compilation_config cuda_graph_sizes
    cudagraph_capture_sizes disable_async_output_proc disable_cascade_attn disable_chunked_mm_input
    disable_custom_all_reduce disable_hybrid_kv_cache_manager disable_log_requests disable_log_stats
    disable_mm_preprocessor_cache disable_sliding_window enable_chunked_prefill enable_expert_parallel
    enable_log_requests fully_sharded_loras guided_decoding_backend ignore_patterns kv_sharing_fast_prefill
    limit_mm_per_prompt long_prefill_token_threshold max_context_len_to_capture max_cpu_loras max_logprobs
    max_long_partial_prefills max_lora_rank max_loras max_num_partial_prefills max_parallel_loading_workers
    max_seq_len_to_capture mm_processor_cache_gb mm_processor_kwargs model_loader_extra_config num_scheduler_steps
    optimization_level preemption_mode ray_workers_use_nsight reasoning_parser safetensors_load_strategy
    served_model_name skip_mm_profiling stream_interval structured_outputs_config swap_space tokenizer_pool_size
    use_tqdm_on_load use_v2_block_manager
    """
NO_EFFECT = frozenset(HOW_VLLM_RUNS.split())
"""They change no result here, whatever their value."""
REMEDIES = {
    "an LLM runs on one device; docs/batch_files.md says how to use several": """
        tensor_parallel_size pipeline_parallel_size data_parallel_size distributed_executor_backend worker_cls""",
    "pass an unquantised checkpoint": "quantization",
    "the KV cache has the dtype of the weights": "kv_cache_dtype calculate_kv_scales",
    "the weights must fit the device": "cpu_offload_gb",
    "prefix_cache_file=... keeps what is cached": "kv_transfer_config",
    "trace=... writes every block event": "kv_events_config",
    "merge the adapter into the weights": "enable_lora default_mm_loras",
    "close() gives the memory back, load_weights() replaces the weights": "enable_sleep_mode",
    "leave it out, the outputs are the same": "speculative_config speculative_model num_speculative_tokens",
    "pass the directory that huggingface_hub.snapshot_download(name, revision=...) returns": """
        revision tokenizer_revision code_revision""",
    "set it in the environment, where huggingface_hub looks (HF_TOKEN, HF_HUB_CACHE)": "hf_token download_dir",
    "the tokenizer is the one that transformers loads": "tokenizer_mode",
    "change config.json in a copy of the model's directory": """
        hf_overrides hf_config_path config_format rope_scaling rope_theta""",
    "SamplingParams() has the neutral values": "generation_config override_generation_config",
    "log-probs are those of the raw logits": "logprobs_mode",
    "SamplingParams has logit_bias, allowed_token_ids and bad_words": "logits_processors",
    "each architecture has one implementation": "model_impl",
    "a model generates text and does nothing else": "task runner convert override_pooler_config",
    "prompts are texts or token ids": "enable_prompt_embeds",
    "num_kv_blocks=... says the same": "num_gpu_blocks_override",
    "kv_cache_memory=... says the same": "kv_cache_memory_bytes",
    "schedule_policy is 'prefix' or 'fcfs', there are no priorities": "scheduling_policy",
}
UNSUPPORTED = {name: remedy for remedy, names in REMEDIES.items() for name in names.split()}
"""Arguments of vLLM that are refused, unless they ask for nothing: what to do instead."""
NOTHING = {
    **{name: 1 for name in UNSUPPORTED if name.endswith("_parallel_size")},
    "distributed_executor_backend": "uni",
    "scheduling_policy": "fcfs",
    "logprobs_mode": "raw_logprobs",
    "task": "generate",
    "runner": "generate",
    "convert": "none",
    "config_format": "hf",
    "tokenizer_mode": "hf",
    "hf_token": True,
}
"""A value of theirs that asks for nothing, beside None, False, 0, "auto" and what is empty."""


def changes_nothing(name: str, value: Any) -> bool:
    """Whether it is an argument of vLLM that may be dropped; ValueError for one that would be missed."""
    is_plain = value is None or isinstance(value, bool | int | float | str | list | tuple | dict)
    if name in UNSUPPORTED and not (is_plain and (not value or value in ("auto", NOTHING.get(name)))):
        raise ValueError(f"{name}={value!r} is not supported (only {NOTHING.get(name)!r} is); {UNSUPPORTED[name]}")
    return name in NO_EFFECT or name in UNSUPPORTED
