"""Arguments of vLLM's `LLM` that this one lacks: scripts pass them all the same, mostly with their defaults.

Invariant: such an argument passes if it changes no result here, or asks for nothing; for any other the error says what
to do instead. A name that vLLM does not have either is not known here.
"""

from __future__ import annotations

from typing import Any

HOW_VLLM_RUNS = """
    additional_config aggregate_engine_logging all2all_backend allow_deprecated_quantization allowed_local_media_path
    allowed_media_domains attention_backend attention_config collect_detailed_traces compilation_config
    cp_kv_cache_interleave_size cpu_distributed_timeout_seconds cuda_graph_sizes cudagraph_capture_sizes
    cudagraph_metrics custom_histogram_buckets data_parallel_address data_parallel_backend data_parallel_external_lb
    data_parallel_hybrid_lb data_parallel_multi_port_external_lb data_parallel_rpc_port dbo_decode_token_threshold
    dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size dcp_q_replicate disable_async_output_proc
    disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce disable_hybrid_kv_cache_manager
    disable_log_requests disable_log_stats disable_mm_preprocessor_cache disable_nccl_for_dp_synchronization
    disable_sliding_window distributed_executor_backend distributed_timeout_seconds dp_sync_interval ec_manager_config
    ec_transfer_config elastic_ep_max_dp_size enable_batch_sharded_sampling enable_chunked_prefill
    enable_cumem_allocator enable_dbo enable_elastic_ep enable_ep_weight_filter enable_eplb enable_expert_parallel
    enable_fault_tolerance enable_flashinfer_autotune enable_hc_sp enable_layerwise_nvtx_tracing enable_log_requests
    enable_logging_iteration_details enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint
    enable_mfu_metrics enable_mixed_moe_lora_format enable_mm_processor_stats enable_moe_shared_loras
    enable_nccl_comm_suspend enable_shm_tensor_arena enable_tower_connector_lora engram_config eplb_config
    expert_placement_strategy fail_on_environ_validation fault_tolerance_config fully_sharded_loras gdn_prefill_backend
    guided_decoding_backend ignore_patterns interleave_mm_strings ir_op_priority jit_monitor_mode jit_monitor_verbose
    kda_decode_backend kda_prefill_backend kernel_config kv_cache_dtype_skip_layers kv_cache_metrics
    kv_cache_metrics_sample kv_offloading_backend kv_sharing_fast_prefill language_model_only limit_mm_per_prompt
    linear_backend log_config_file log_level logging_config long_prefill_token_threshold
    long_prefill_token_threshold_adaptive lora_dtype lora_target_modules mamba_backend mamba_block_size
    mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds mamba_config mamba_ssm_cache_dtype mamba_ssu_algorithm
    master_addr master_port max_context_len_to_capture max_cpu_loras max_cudagraph_capture_size max_logprobs
    max_long_partial_prefills max_lora_cls_labels max_lora_rank max_loras max_num_active_seqs max_num_partial_prefills
    max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens max_parallel_loading_workers
    max_seq_len_to_capture media_io_kwargs mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype
    mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_only
    mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type
    mm_processor_device mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc model_loader_extra_config
    model_weights moe_backend node_rank num_scheduler_steps numa_bind numa_bind_cpus numa_bind_nodes offload_backend
    offload_num_in_group offload_prefetch_step optimization_level per_request_spec_decode_metrics performance_mode
    preemption_mode prefill_schedule_interval prefix_cache_retention_interval prefix_match_unit pt_load_map_location
    ray_workers_use_nsight reasoning_config reasoning_parser reasoning_parser_plugin renderer_num_workers
    replayssm_buffer_len safetensors_load_strategy safetensors_prefetch_block_size safetensors_prefetch_num_threads
    scheduler_reserve_full_isl served_model_name show_hidden_metrics_for_version shutdown_timeout skip_mm_profiling
    sleep_mode_offload_cudagraph sleep_preserve_parameter_names sparse_indexer_topk_backend specialize_active_lora
    stream_interval structured_outputs_config swa_bounded_replay swap_space tokenizer_pool_size tokens_only ubatch_size
    use_fp64_gumbel use_replayssm use_tqdm_on_load use_v2_block_manager video_pruning_method video_pruning_rate
    watermark
    """
NO_EFFECT = frozenset(HOW_VLLM_RUNS.split())
"""They change no result here, whatever their value."""
REMEDIES = {
    "an LLM runs on one device; docs/batch_files.md says how to use several": """
        tensor_parallel_size pipeline_parallel_size data_parallel_size worker_cls
        prefill_context_parallel_size decode_context_parallel_size data_parallel_size_local data_parallel_rank
        data_parallel_start_rank nnodes worker_extension_cls""",
    "device='cuda:N' says which": "device_ids",
    "pass an unquantised checkpoint": "quantization quantization_config",
    "the KV cache has the dtype of the weights": "kv_cache_dtype calculate_kv_scales",
    "the weights must fit the device": "cpu_offload_gb cpu_offload_params offload_group_size offload_params",
    "prefix_cache_file=... keeps what is cached": "kv_transfer_config kv_offloading_size",
    "trace=... writes every block event": "kv_events_config otlp_traces_endpoint",
    "use torch.profiler around generate(): all runs in this process": "profiler_config",
    "merge the adapter into the weights": "enable_lora default_mm_loras",
    "close() gives the memory back, load_weights() replaces the weights": "enable_sleep_mode weight_transfer_config",
    "leave it out, the outputs are the same": """
        speculative_config speculative_model num_speculative_tokens spec_method spec_model spec_tokens""",
    "pass the directory that huggingface_hub.snapshot_download(name, revision=...) returns": """
        revision tokenizer_revision code_revision""",
    "set it in the environment, where huggingface_hub looks (HF_TOKEN, HF_HUB_CACHE)": "hf_token download_dir",
    "the tokenizer is the one that transformers loads": "tokenizer_mode",
    "change config.json in a copy of the model's directory": """
        hf_overrides hf_config_path config_format rope_scaling rope_theta""",
    "SamplingParams() has the neutral values": "generation_config override_generation_config",
    "log-probs are those of the raw logits": "logprobs_mode",
    "SamplingParams has logit_bias, allowed_token_ids and bad_words": """
        logits_processors watermark_config enable_trace_replay""",
    "pass chat_template to chat()": "chat_template",
    "an output has token ids, text and log-probs": """
        enable_return_routed_experts return_sampling_mask aux_output_config""",
    "each architecture has one implementation": "model_impl model_class_overrides",
    "a model generates text and does nothing else": """
        task runner convert pooler_config override_pooler_config diffusion_config""",
    "prompts are texts or token ids": "enable_prompt_embeds enable_mm_embeds io_processor_plugin",
    "num_kv_blocks=... says the same": "num_gpu_blocks_override",
    "schedule_policy is 'prefix' or 'fcfs', there are no priorities": "scheduling_policy scheduler_cls",
}
UNSUPPORTED = {name: remedy for remedy, names in REMEDIES.items() for name in names.split()}
"""Arguments of vLLM that are refused, unless they ask for nothing: what to do instead."""
NOTHING = {
    **{name: 1 for name in UNSUPPORTED if name.endswith("_parallel_size")},
    **dict.fromkeys(("data_parallel_size_local", "nnodes"), 1),
    "scheduling_policy": "fcfs",
    "logprobs_mode": "raw_logprobs",
    "task": "generate",
    "runner": "generate",
    "convert": "none",
    "config_format": "hf",
    "tokenizer_mode": "hf",
    "hf_token": True,
    **dict.fromkeys(("revision", "tokenizer_revision", "code_revision"), "main"),
}
"""A value of theirs that asks for nothing, beside None, False, 0, "auto" and what is empty."""


def changes_nothing(name: str, value: Any) -> bool:
    """Whether it is an argument of vLLM that may be dropped; ValueError for one that would be missed."""
    is_plain = value is None or isinstance(value, bool | int | float | str | list | tuple | dict | set)
    if name in UNSUPPORTED and not (is_plain and (not value or value in ("auto", NOTHING.get(name)))):
        raise ValueError(f"{name}={value!r} is not supported (only {NOTHING.get(name)!r} is); {UNSUPPORTED[name]}")
    return name in NO_EFFECT or name in UNSUPPORTED
