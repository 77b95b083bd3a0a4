"""The promises of docs/features.md, docs/trust.md and docs/requests.md, and the tests that fail when one is broken.

`tests/test_promises.py` compares the promises with these pages, and looks for the tests.
"""

Tests = dict[str, tuple[str, ...]]
"""Promise -> tests, as pytest names them."""

CAPABILITIES: Tests = {
    "text to image": (
        "tests/model/api/test_serving.py::test_returns_the_image_of_generate",
        "tests/model/api/test_request.py::test_accepts_the_limits_of_every_field",
        "tests/model/api/test_serving.py::test_images_of_a_request_have_successive_seeds",
    ),
    "Playground V2 and V2.5": (
        "tests/model/denoising/test_edm.py::test_image_is_that_of_diffusers",
        "tests/model/denoising/test_edm.py::test_schedule_denoises_like_diffusers",
    ),
    "Stable Diffusion 1.5 and 2.1": (
        "tests/model/pipeline/test_stable_diffusion.py::test_image_is_that_of_diffusers",
        "tests/model/pipeline/test_stable_diffusion.py::test_images_from_an_image_are_those_of_diffusers",
        "tests/model/pipeline/test_stable_diffusion.py::test_refuses_a_mixed_folder",
    ),
    "image to image": (
        "tests/model/pipeline/test_image_parity.py::test_image_to_image_is_that_of_diffusers",
        "tests/model/api/test_image_request.py::test_refuses_what_does_not_fit_together",
        "tests/model/scheduling/test_results.py::test_encoding_does_not_hold_up_running_images",
    ),
    "inpainting": (
        "tests/model/pipeline/test_image_parity.py::test_inpainting_is_that_of_diffusers",
        "tests/model/pipeline/test_image_parity.py::test_three_masks_are_three_chained_calls",
        "tests/model/pipeline/test_image_parity.py::test_tasks_of_a_batch_do_not_affect_each_other",
        "tests/engine_builder/building/test_inpainting_unet.py::test_image_is_that_of_diffusers",
    ),
    "ControlNet": (
        "tests/model/pipeline/test_image_conditions.py::test_images_are_those_of_diffusers",
        "tests/model/pipeline/test_image_conditions.py::test_requests_with_and_without_conditions_share_a_batch",
        "tests/engine_builder/checkpoints/test_controlnets.py::test_refuses_a_folder_that_does_not_fit",
        "tests/model/images/test_canny.py::test_equals_opencv",
    ),
    "IP-Adapter": (
        "tests/model/pipeline/test_image_conditions.py::test_images_are_those_of_diffusers",
        "tests/model/pipeline/test_image_conditions.py::test_requests_with_and_without_conditions_share_a_batch",
        "tests/model/images/test_fit.py::test_a_reference_image_is_the_square_of_clip",
        "tests/engine_builder/checkpoints/test_ip_adapters.py::test_refuses_files_that_do_not_fit",
    ),
    "textual inversion": (
        "tests/model/pipeline/test_embeddings.py::test_images_are_those_of_diffusers",
        "tests/model/pipeline/test_embeddings.py::test_refuses_files_that_are_not_embeddings",
        "tests/model/pipeline/test_embedding_tokens.py::test_finds_whole_tokens_as_the_tokenizer_reads",
        "tests/model/pipeline/test_embedding_tokens.py::test_an_embedding_moves_to_the_next_chunk",
    ),
    "forecasts": (
        "tests/model/pipeline/test_forecasts.py::test_each_sampler",
        "tests/model/pipeline/test_forecasts.py::test_everything_that_a_request_can_contain",
        "tests/model/pipeline/test_combined_features.py::test_images_of_a_batch_with_forecasts",
        "tests/model/scheduling/test_results.py::test_progress_counts_the_sampler_s_steps",
    ),
    "refiner": ("tests/model/pipeline/test_pipeline_parity.py::test_some_requests_of_a_batch_use_the_refiner",),
    "long and weighted prompts": (
        "tests/model/pipeline/test_weighted_prompt.py::test_image_is_that_of_diffusers",
        "tests/model/pipeline/test_weighted_prompt.py::test_image_is_the_same_in_a_batch_of_other_lengths",
        "tests/model/pipeline/test_weighted_prompt.py::test_every_prompt_is_refused_or_gives_an_image",
        "tests/engine_builder/building/test_text_chunks.py::test_static_engines_read_prompts_of_any_length",
    ),
    "conditioning of SDXL": (
        "tests/model/pipeline/test_pipeline_parity.py::test_conditioning_is_that_of_diffusers",
        "tests/model/denoising/test_schedule.py::test_explicit_steps_denoise_like_diffusers",
        "tests/model/denoising/test_schedule.py::test_zero_terminal_snr_denoises_like_diffusers",
        "tests/model/api/test_request.py::test_refuses_conditioning_by_name",
    ),
    "safety checker": (
        "tests/model/pipeline/test_safety_checker.py::test_decides_like_diffusers",
        "tests/model/pipeline/test_safety_checker.py::test_scores_are_those_of_diffusers",
        "tests/model/pipeline/test_safety_checker.py::test_blanks_flagged_images_and_says_so",
        "tests/model/pipeline/test_safety_checker.py::test_flag_changes_no_image",
        "tests/model/pipeline/test_safety_checker.py::test_refuses_a_release_without_a_checker",
    ),
    "few-step models": (
        "tests/model/denoising/test_few_steps.py::test_few_steps_generate_the_image_of_diffusers",
        "tests/model/denoising/test_few_steps.py::test_distilled_model_generates_the_image_of_diffusers",
        "tests/model/denoising/test_few_steps.py::test_serves_the_defaults_of_the_model",
        "tests/engine_builder/checkpoints/test_presets.py::test_images_of_a_preset_are_those_of_diffusers",
    ),
    "previews while it runs": (
        "tests/model/api/test_service.py::test_stream_has_every_step_and_ends_with_the_images",
        "tests/model/api/test_service.py::test_last_preview_resembles_the_image",
    ),
    "many users": (
        "tests/model/scheduling/test_joining.py::test_new_request_joins_after_one_step",
        "tests/model/scheduling/test_results.py::test_image_does_not_depend_on_the_batch",
        "tests/model/api/test_service.py::test_refuses_requests_beyond_the_queue",
        "tests/model/api/test_service.py::test_deadline_ends_requests_and_streams",
        "tests/load/test_many_clients.py::test_each_client_gets_its_own_images",
    ),
    "your own models": (
        "tests/engine_builder/building/test_build.py::test_second_model_of_an_architecture_compiles_nothing",
        "tests/engine_builder/checkpoints/test_model_check.py::test_refuses_before_weights_are_read",
        "tests/engine_builder/checkpoints/test_find_model.py::test_downloads_fp16_weights_where_they_exist",
        "tests/engine_builder/checkpoints/test_presets.py::test_release_has_the_separate_vae",
    ),
    "adapters: LoRA, LoCon, LoHa, LoKr, DoRA, (IA)3": (
        "tests/model/adapters/test_adapter_algorithms.py::test_image_is_that_of_lycoris",
        "tests/model/adapters/test_adapter_algorithms.py::test_three_algorithms_add_up",
        "tests/model/adapters/test_adapter_algorithms.py::test_images_are_those_of_peft",
        "tests/model/adapters/test_adapter_parity.py::test_image_with_one_adapter_is_that_of_diffusers",
        "tests/model/adapters/test_adapter_parity.py::test_image_with_three_adapters_is_that_of_diffusers",
        "tests/model/adapters/test_adapter_parity.py::test_swaps_compile_nothing",
        "tests/model/adapters/test_adapter_batch.py::test_images_of_a_batch_are_those_of_diffusers",
        "tests/model/adapters/test_adapter_batch.py::test_image_does_not_depend_on_the_batch",
        "tests/model/pipeline/test_combined_features.py::test_images_of_a_batch_are_those_of_diffusers",
        "tests/model/adapters/test_adapter_merge.py::test_restores_weights_exactly_after_100_swaps",
        "tests/engine_builder/adapters/test_adapters.py::test_refuses_unusable_tensors",
        "tests/model/scheduling/test_adapter_turns.py::test_equal_adapters_share_a_batch_and_others_wait",
    ),
    "new adapters and embeddings without a restart": (
        "tests/model/api/test_adapter_catalog.py::test_an_added_adapter_is_found_at_its_first_request",
        "tests/model/api/test_adapter_catalog.py::test_a_removed_adapter_is_refused",
        "tests/model/api/test_new_adapters.py::test_adds_and_removes_adapters",
        "tests/model/loading/test_later_embeddings.py::test_takes_over_embeddings_of_later_versions",
        "tests/load/test_new_adapters.py::test_adapters_change_under_load",
    ),
    "many fine-tunes on one GPU": (
        "tests/model/loading/test_several_releases.py::test_any_release_fills_a_slot",
        "tests/model/loading/test_several_releases.py::test_a_swap_that_fails_harms_no_other_release",
        "tests/model/scheduling/test_weight_slots.py::test_images_go_on_during_the_warm_up_of_a_slot",
    ),
    "several GPUs": (
        "tests/engine_builder/releases/test_publish.py::test_drafts_of_two_targets_become_one_release",
        "tests/model/loading/test_runtimes.py::test_targets_of_each_choice",
    ),
    "all GPUs of a replica": (
        "tests/model/workers/test_server.py::test_concurrent_requests_use_both_workers",
        "tests/model/workers/test_server.py::test_another_worker_answers_for_one_that_ends",
        "tests/model/workers/test_server.py::test_stream_has_each_image_once_after_the_end_of_a_worker",
        "tests/model/workers/test_server.py::test_without_workers_requests_are_unavailable_until_one_is_back",
        "tests/model/workers/test_server.py::test_workers_end_with_a_killed_server",
    ),
    "several GPUs for each image": (
        "tests/model/ranks/test_division.py::test_ranks_compute_the_latents_of_one_loop",
        "tests/model/ranks/test_ranks.py::test_two_ranks_make_the_pictures_of_one",
        "tests/model/ranks/test_ranks.py::test_the_end_of_a_rank_is_answered",
        "tests/model/ranks/test_ranks.py::test_a_server_divides_its_batches_and_ends_with_a_rank",
        "tests/model/ranks/test_ranks.py::test_two_bands_make_the_picture_of_one",
        "tests/model/ranks/test_ranks.py::test_ranks_divide_the_halves_of_guidance_and_their_rows",
    ),
    "trust": (
        "tests/model/store/test_signature.py::test_server_with_key_loads_only_signed_releases",
        "tests/attacks/test_blobs.py::test_uses_only_bytes_that_were_verified",
        "tests/attacks/test_blob_contents.py::test_unpickles_nothing",
    ),
    "fast starts": (
        "tests/model/test_serving_process.py::test_serving_imports_no_library_of_the_builder",
        "tests/model/weights/test_staging.py::test_load_streams_weights_and_verifies_them",
        "tests/model/api/test_serving.py::test_measures_the_cold_start",
    ),
    "OpenAI's Images API": (
        "tests/gateway/test_openai.py::test_generates_the_servers_own_images",
        "tests/gateway/test_openai.py::test_edit_changes_only_transparent_parts_of_the_mask",
        "tests/gateway/test_openai.py::test_refuses_in_the_shape_of_openai",
        "tests/gateway/test_openai.py::test_repeats_only_what_was_not_started",
        "tests/gateway/test_history.py::test_each_key_has_its_own_finished_requests",
        "tests/load/test_gateway.py::test_no_request_is_lost_when_a_server_is_killed",
    ),
    "metadata in files": (
        "tests/model/images/test_metadata.py::test_request_of_the_metadata_makes_the_image_again",
        "tests/model/images/test_metadata.py::test_files_state_nothing_by_default",
        "tests/model/images/test_metadata.py::test_input_images_are_digests",
    ),
    "playground page": (
        "tests/gateway/test_playground.py::test_previews_arrive_before_the_image",
        "tests/gateway/test_playground.py::test_cancel_stops_the_server",
        "tests/gateway/test_playground.py::test_painted_mask_changes_only_its_part",
        "tests/gateway/test_playground.py::test_executes_no_script_of_a_prompt",
    ),
    "Docker, Kubernetes": (
        "tests/preheat/test_kubernetes.py::test_every_config_has_valid_manifests",
        "tests/preheat/test_kubernetes.py::test_manifests_have_the_values_of_the_config",
        "tests/load/test_rolling_replacement.py::test_rolling_replacement_loses_no_request",
    ),
    "operations": (
        "tests/truss/test_dashboard.py::test_shows_every_metric",
        "tests/model/api/test_service.py::test_metrics_count_a_request",
        "tests/preheat/replicas/test_replicas.py::test_recommends_the_cheapest_sufficient_setting",
    ),
    "FP8": (
        "tests/engine_builder/quantization/test_calibration.py::test_calibrates_once",
        "tests/engine_builder/quantization/test_quantize.py::test_check_fp8_compares_pictures_and_writes_them",
        "tests/engine_builder/releases/test_publish_validation.py::test_refuses_fp8_engines_without_a_validation",
        "tests/engine_builder/releases/test_publish_validation.py::test_lists_every_violated_limit",
        "tests/engine_builder/building/test_fp8_build.py::test_deployment_chooses_the_precision",
        "tests/engine_builder/building/test_fp8_build.py::test_first_and_last_steps_run_in_fp16",
        "tests/model/scheduling/test_comparison.py::test_compares_one_in_n_images",
        "tests/engine_builder/networks/test_fp8_conv.py::test_quantized_network_predicts_nearly_the_same_noise",
        "tests/engine_builder/networks/test_int8.py::test_product_equals_integers_of_numpy",
    ),
    "TensorRT and ONNX": (
        "tests/engine_builder/backends/onnx/test_onnx_export.py::test_equals_eager_pytorch_at_three_shapes",
        "tests/engine_builder/backends/onnx/test_onnx_export.py::test_pipeline_generates_aot_inductors_image",
        "tests/engine_builder/backends/tensorrt/test_tensorrt_pipeline.py::test_plans_generate_aot_inductors_image",
        "tests/engine_builder/backends/tensorrt/test_tensorrt_rtx.py::test_builds_each_component_for_one_gpu_and_for_three",
    ),
    "Triton Inference Server": (
        "tests/engine_builder/triton_repository/test_triton_loop.py::test_images_are_those_of_the_truss_server",
        "tests/engine_builder/triton_repository/test_triton_loop.py::test_streams_previews_and_every_image",
        "tests/engine_builder/triton_repository/test_triton_loop.py::test_broken_model_names_its_reason",
        "tests/engine_builder/triton_repository/test_triton_loop.py::test_blobs_are_linked",
        "tests/engine_builder/triton_repository/test_triton_unrolled.py::test_images_are_those_of_the_truss_server",
        "tests/engine_builder/triton_repository/test_triton_unrolled.py::test_merges_requests_into_batches",
        "tests/engine_builder/triton_repository/test_triton_unrolled.py::test_two_unets_are_served_side_by_side",
    ),
}
"""By the first column of "What it can do"."""

CHECKS: Tests = {
    "Every image": (
        "tests/model/pipeline/test_pipeline_parity.py::test_image_is_that_of_diffusers",
        "tests/model/pipeline/test_pipeline_parity.py::test_requests_of_a_batch_do_not_affect_each_other",
        "tests/model/pipeline/test_image_parity.py::test_inpainting_is_that_of_diffusers",
    ),
    "Every model": (
        "tests/engine_builder/building/test_compare_with_diffusers.py::test_compares_all_networks_of_a_plan",
        "tests/engine_builder/building/test_compare_with_diffusers.py::test_finds_an_entry_that_no_wrapper_reads",
        "tests/engine_builder/building/test_compare_with_diffusers.py::test_finds_a_difference_of_the_pipeline",
    ),
    "Every engine": (
        "tests/engine_builder/building/test_build.py::test_does_not_store_an_engine_that_fails_its_check",
        "tests/engine_builder/networks/test_networks.py::test_validation_runs_pytorchs_own_operations",
    ),
    "Every blob": (
        "tests/attacks/test_blobs.py::test_refuses_changed_blob",
        "tests/attacks/test_blobs.py::test_uses_only_bytes_that_were_verified",
        "tests/model/store/test_signature.py::test_refuses_every_change_after_signing",
    ),
    "Attacks": (
        "tests/attacks/test_thousand_mutations.py::test_a_thousand_mutated_manifests",
        "tests/attacks/test_thousand_mutations.py::test_a_thousand_changed_blobs_in_a_folder",
        "tests/attacks/test_blobs.py::test_refuses_changed_blob_in_a_bucket",
        "tests/load/test_fuzz_images.py::test_every_image_is_decoded_or_refused",
        "tests/load/test_fuzz_images.py::test_memory_is_bounded",
        "tests/preheat/commands/test_commands_fuzz.py::test_no_generated_command_line_ends_in_a_traceback",
    ),
}
"""By the first two words of each point of "What is checked"."""

TRUST: Tests = {
    "the checkpoint's files": (
        "tests/engine_builder/checkpoints/test_model_check.py::test_refuses_before_weights_are_read",
        "tests/engine_builder/checkpoints/test_model_check.py::test_refuses_what_is_not_a_regular_file",
        "tests/engine_builder/checkpoints/test_single_file.py::test_pickled_checkpoint_is_refused_unopened",
    ),
    "each network, the tokenizers and an image": CHECKS["Every model"],
    "every engine against eager PyTorch": CHECKS["Every engine"],
    "each manifest": (
        "tests/engine_builder/releases/test_publish.py::test_drafts_of_two_targets_become_one_release",
        "tests/model/store/test_manifest.py::test_written_manifest_is_read_again",
    ),
    "the manifest against its schema": (
        "tests/model/store/test_manifest.py::test_refuses_every_unknown_key",
        "tests/model/store/test_manifest.py::test_refuses_bad_values",
        "tests/model/store/test_signature.py::test_refuses_unsigned_release_and_another_key",
    ),
    "every blob": CHECKS["Every blob"],
    "names and paths of a manifest": (
        "tests/attacks/test_manifests.py::test_refuses_unsafe_entries",
        "tests/attacks/test_blob_contents.py::test_refuses_entry_outside_the_folder",
    ),
    "weights": (
        "tests/attacks/test_blob_contents.py::test_refuses_invalid_weights",
        "tests/attacks/test_blob_contents.py::test_unpickles_nothing",
    ),
    "memory needed": (
        "tests/model/loading/test_load_release.py::test_refuses_weights_beyond_the_memory_of_a_gpu",
        "tests/model/loading/test_load_release.py::test_refuses_weights_beyond_the_memory_of_a_cpu",
    ),
    "types, ranges": (
        "tests/model/api/test_request.py::test_refusal_has_field_value_and_what_is_accepted",
        "tests/model/api/test_request.py::test_refuses_a_size_that_is_not_served",
    ),
    "each image for NaN": (
        "tests/model/api/test_service.py::test_broken_image_is_an_error_with_its_seed",
        "tests/model/images/test_image.py::test_one_nan_or_infinite_value_breaks_an_image",
    ),
}
"""By the beginning of the column "what" in docs/trust.md, "What is checked"."""

REQUESTS: Tests = {
    "Fields": (
        "tests/model/api/test_request.py::test_accepts_the_limits_of_every_field",
        "tests/model/api/test_request.py::test_schema_describes_every_field",
        "tests/model/api/test_request.py::test_null_is_the_default_of_every_field",
        "tests/model/api/test_request.py::test_refusal_has_field_value_and_what_is_accepted",
        "tests/model/pipeline/test_pipeline_parity.py::test_each_setting_changes_the_image",
    ),
    "Input images": (
        "tests/model/images/test_inputs.py::test_decodes_what_pillow_decodes",
        "tests/model/images/test_inputs.py::test_turns_images_upright",
        "tests/model/images/test_inputs.py::test_refuses_sizes_by_their_header",
        "tests/model/images/test_fit.py::test_resizes_as_diffusers",
        "tests/model/images/test_postprocess.py::test_matches_the_ring_and_not_the_whole_image",
        "tests/model/api/test_image_serving.py::test_composite_keeps_the_pixels_outside_the_masks",
    ),
    "Metadata in files": CAPABILITIES["metadata in files"],
    "Weighted prompts": CAPABILITIES["long and weighted prompts"]
    + (
        "tests/model/pipeline/test_weighted_prompt.py::test_grammar",
        "tests/model/pipeline/test_weighted_prompt.py::test_refuses_a_weight_by_value",
    ),
    "Other prompt syntaxes": (
        "tests/model/pipeline/test_prompt_warnings.py::test_names_constructs_without_a_meaning",
        "tests/model/pipeline/test_prompt_warnings.py::test_ordinary_text_has_no_warning",
    ),
    "Conditioning": CAPABILITIES["conditioning of SDXL"],
    "Samplers": (
        "tests/model/denoising/test_schedule.py::test_explicit_steps_denoise_like_diffusers",
        "tests/model/pipeline/test_pipeline_parity.py::test_image_is_that_of_diffusers",
    ),
    "Response": (
        "tests/model/api/test_serving.py::test_returns_the_image_of_generate",
        "tests/model/api/test_serving.py::test_returned_seed_gives_the_same_image",
        "tests/model/api/test_service.py::test_request_id_is_in_response_and_log",
    ),
    "Streams": (
        "tests/model/api/test_service.py::test_stream_has_every_step_and_ends_with_the_images",
        "tests/model/api/test_service.py::test_waiting_stream_has_heartbeats",
        "tests/model/workers/test_pool.py::test_steps_never_go_back_when_a_request_moves",
    ),
    "Status codes": (
        "tests/model/api/test_request.py::test_any_json_is_accepted_or_refused_in_sentences",
        "tests/model/api/test_body_limit.py::test_limits_the_size_of_a_body",
        "tests/model/api/test_body_limit.py::test_ends_a_body_that_does_not_arrive",
        "tests/model/api/test_service.py::test_refuses_requests_beyond_the_queue",
        "tests/model/api/test_service.py::test_deadline_ends_requests_and_streams",
        "tests/model/api/test_service.py::test_client_that_leaves_ends_its_request",
        "tests/model/api/test_service.py::test_overflowing_request_is_no_fault_of_the_server",
        "tests/model/api/test_service.py::test_terminated_server_answers_accepted_requests",
    ),
}
"""By the sections of docs/requests.md."""
