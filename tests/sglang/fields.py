"""What this house relies on of SGLang's HTTP API, in one table: the stand-in refuses any other field, and
test_fields.py compares each with io_struct.py of the newest release."""

# path: (class of io_struct.py, members that are sent)
REQUESTS = {
    "/generate": ("GenerateReqInput", {"text", "input_ids", "sampling_params", "return_logprob", "logprob_start_len",
                                       "return_prompt_token_ids", "stream"}),
    "/pause_generation": ("PauseGenerationReqInput", {"mode"}),
    "/continue_generation": ("ContinueGenerationReqInput", set()),
    "/release_memory_occupation": ("ReleaseMemoryOccupationReqInput", {"tags"}),
    "/resume_memory_occupation": ("ResumeMemoryOccupationReqInput", {"tags"}),
    "/update_weights_from_disk": ("UpdateWeightFromDiskReqInput",
                                  {"model_path", "load_format", "flush_cache", "weight_version"}),
    "/update_weights_from_tensor": ("UpdateWeightsFromTensorReqInput",
                                    {"serialized_named_tensors", "load_format", "flush_cache", "weight_version"}),
    "/init_weights_update_group": ("InitWeightsUpdateGroupReqInput",
                                   {"master_address", "master_port", "rank_offset", "world_size", "group_name", "backend"}),
    "/destroy_weights_update_group": ("DestroyWeightsUpdateGroupReqInput", {"group_name"}),
    "/update_weights_from_distributed": ("UpdateWeightsFromDistributedReqInput",
                                         {"names", "dtypes", "shapes", "group_name", "flush_cache", "weight_version"}),
}
# answers with success and message, by their class
ANSWERS = {
    "/update_weights_from_disk": ("UpdateWeightFromDiskReqOutput", {"success", "message", "num_paused_requests"}),
    "/update_weights_from_tensor": ("UpdateWeightsFromTensorReqOutput", {"success", "message"}),
    "/init_weights_update_group": ("InitWeightsUpdateGroupReqOutput", {"success", "message"}),
    "/destroy_weights_update_group": ("DestroyWeightsUpdateGroupReqOutput", {"success", "message"}),
    "/update_weights_from_distributed": ("UpdateWeightsFromDistributedReqOutput", {"success", "message"}),
}
SAMPLING = {"max_new_tokens", "temperature", "sampling_seed"}  # of sampling_params.py
PAUSES = {"abort", "retract", "in_place"}                      # of PauseGenerationReqInput.mode
TAGS = {"weights", "kv_cache", "cuda_graph"}                   # of constants.py
# members of generate's answer, of /model_info and of /server_info, as quoted words in the file that makes them
META = {"finish_reason", "weight_version", "prompt_tokens", "completion_tokens", "weight_versions"}
MODEL_INFO = {"model_path", "weight_version"}
SERVER_INFO = {"version"}
SERVER_ARGS = {"tp_size", "pp_size", "dp_size", "enable_memory_saver", "custom_weight_loader", "enable_dp_attention"}
GET = {"/health", "/model_info", "/server_info"}
