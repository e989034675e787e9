// Key and tensor names and constants of extended GGUF. Generated from powerinfer_py/format.py: don't edit, run
// python -m powerinfer_py.format --write-header ggml/src/format-keys.h
#pragma once

namespace powerinfer::format {

inline constexpr unsigned version = 1;
inline constexpr char architecture[] = "powerinfer";
inline constexpr unsigned alignment = 64;
inline constexpr unsigned digest_head_bytes = 4096;
inline constexpr char sidecar_suffix[] = ".powerinfer.gguf";
inline constexpr unsigned max_block_count = 4096;
inline constexpr unsigned max_devices = 16;
inline constexpr unsigned max_placements = 64;
inline constexpr unsigned placement_version = 1;
inline constexpr double placement_slack = 0.01;

inline constexpr char key_architecture[] = "general.architecture";
inline constexpr char key_alignment[] = "general.alignment";
inline constexpr char key_format_version[] = "powerinfer.format_version";
inline constexpr char key_base_architecture[] = "powerinfer.base.architecture";
inline constexpr char key_base_file[] = "powerinfer.base.file";
inline constexpr char key_base_ffn_digest[] = "powerinfer.base.ffn_digest";
inline constexpr char key_block_count[] = "powerinfer.block_count";
inline constexpr char key_embedding_length[] = "powerinfer.embedding_length";
inline constexpr char key_feed_forward_length[] = "powerinfer.feed_forward_length";
inline constexpr char key_ffn_activation[] = "powerinfer.ffn.activation";
inline constexpr char key_ffn_gated[] = "powerinfer.ffn.gated";
inline constexpr char key_ffn_activation_param[] = "powerinfer.ffn.activation_param";
inline constexpr char key_ffn_threshold[] = "powerinfer.ffn.threshold";
inline constexpr char key_ffn_product_threshold[] = "powerinfer.ffn.product_threshold";
inline constexpr char key_ffn_loss[] = "powerinfer.ffn.loss";
inline constexpr char key_predictor_kind[] = "powerinfer.predictor.kind";
inline constexpr char key_predictor_input[] = "powerinfer.predictor.input";
inline constexpr char key_predictor_threshold[] = "powerinfer.predictor.threshold";
inline constexpr char key_predictor_recall[] = "powerinfer.predictor.recall";
inline constexpr char key_predictor_candidate_density[] = "powerinfer.predictor.candidate_density";
inline constexpr char key_profile_tokens[] = "powerinfer.profile.tokens";
inline constexpr char key_profile_density[] = "powerinfer.profile.density";
inline constexpr char key_profile_corpus[] = "powerinfer.profile.corpus";
inline constexpr char key_placement_count[] = "powerinfer.placement.count";
inline constexpr char key_placement_version[] = "powerinfer.placement.%d.version";
inline constexpr char key_placement_budget[] = "powerinfer.placement.%d.budget";
inline constexpr char key_placement_n_ctx[] = "powerinfer.placement.%d.n_ctx";
inline constexpr char key_placement_device[] = "powerinfer.placement.%d.device";
inline constexpr char key_placement_hot_bytes[] = "powerinfer.placement.%d.hot_bytes";
inline constexpr char key_placement_n_hot[] = "powerinfer.placement.%d.n_hot";
inline constexpr char key_placement_i_device[] = "powerinfer.placement.%d.i_device";
inline constexpr char key_placement_token_s[] = "powerinfer.placement.%d.token_s";
inline constexpr char key_placement_gap[] = "powerinfer.placement.%d.gap";
inline constexpr char key_placement_model_hash[] = "powerinfer.placement.%d.model_hash";
inline constexpr char key_placement_statistics_hash[] = "powerinfer.placement.%d.statistics_hash";

inline constexpr char tensor_base[] = "base";
inline constexpr char tensor_neuron_order[] = "blk.%d.neuron_order";
inline constexpr char tensor_neuron_frequency[] = "blk.%d.neuron_frequency";
inline constexpr char tensor_ffn_down_t[] = "blk.%d.ffn_down_t.weight";
inline constexpr char tensor_predictor_fc1[] = "blk.%d.predictor.fc1.weight";
inline constexpr char tensor_predictor_fc2[] = "blk.%d.predictor.fc2.weight";
inline constexpr char tensor_base_gate[] = "blk.%d.ffn_gate.weight";
inline constexpr char tensor_base_up[] = "blk.%d.ffn_up.weight";
inline constexpr char tensor_base_down[] = "blk.%d.ffn_down.weight";

inline constexpr const char * activations[] = {"relu", "relu_sqr", "drelu", "silu", "gelu"};
inline constexpr const char * predictor_kinds[] = {"none", "mlp", "linear"};
inline constexpr const char * predictor_inputs[] = {"ffn_input", "residual"};

}  // namespace powerinfer::format
