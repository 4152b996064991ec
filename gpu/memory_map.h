// gpu/memory_map.h - where everything lies in the memory of a GPU, and what the host and the GPU exchange in
// a step. How large the parts are follows from the settings of the run: gpu/memory_layout.h.
//
// N is the number of tokens that are computed at a time: those of a micro-batch, B * T, or of a prompt.
#pragma once
#include "../adamw.h"
#include "context.h"
#include "extra_buffers.h"
#include "layers.h"

namespace coat::gpu {

// What a step finds out, on the device. The host clears it before the step and fetches it at the end.
struct StepOutcome {
    double loss;                   // the sum of the losses so far, times StepExchange::loss_weight
    double loss_or_nan;            // `loss`; or NaN, if an amax was not finite. Then the step is skipped
    GradientState gradient_state;  // sum_of_squares, norm, clip_factor, skip
    uint32_t empty_histories;      // delayed scaling: how many operands have had no amax yet
};
// The few numbers that the host and the GPU exchange in a step, on the device.
struct StepExchange {
    StepOutcome outcome;
    // From the host: 1 / the number of targets that count, because the loss of a step is a mean. Losses and
    // gradients are multiplied by it.
    double loss_weight;
    // The errors of quantization, while they are measured: one for each MeasuredKind but the two moments,
    // which are the last in that enum.
    QuantStats quant_stats[int(MeasuredKind::Moment1)];
};

// The map: where everything is that lasts for the run. The members have the order of the memory. After the
// last of them comes what a step allocates where it uses it (Arena::Scope): the operands of one linear layer,
// gradients of activations, logits. (If a run caches the FP8 codes of all weights, these come before that.)
//
// Gradients of weights. Backward writes them where the update reads them. Usually they lie over the saved
// activations. Forward writes the layers from left to right, and backward needs them from right to left. The
// drawing, which is not to scale, shows Llama-2-7B with 8 x 2048 tokens. The activations of a layer take
// 1.1 GB, and its gradients 0.4 GB. 0 GB is where saved_activations begins:
//
//   0 GB                                 22.3 GB                      35.1 GB
//   +---------+---------+-------------+----------+---------+----------+
//   | layer 0 | layer 1 |     ...     | layer 20 |   ...   | layer 31 |  activations
//   +---------+---------+-------------+----------+---------+----------+
//                                        +-----------+---------+------+----------+------------+------+
//                                        | embedding | layer 0 | ...  | layer 31 | final norm | head |
//                                        +-----------+---------+------+----------+------------+------+
//                                        ^ gradients_offset()         ^ the end of all activations, where
//                                                                       the gradients of layer 31 begin
//
// The gradients begin as far left as possible. There are these conditions:
//   - The gradients of layer l begin after the activations of the layers 0 to l, or later. Backward still
//     needs these activations when it writes the gradients.
//   - The gradients of the final norm and of the head begin after all activations, or later.
//   - The gradient of the embedding may begin anywhere, because backward writes it last.
// In the drawing layer 31 decides. Its gradients cannot begin before the end of all activations, and the
// gradients of all earlier layers lie before its own.
//
// (This can wait: gpu/memory_map.cpp says where gradients lie with several micro-batches in a step, with a
// tied head, with --gradients none, and with several ranks.)
struct MemoryMap {
    StepExchange* step_exchange;
    StepOutcome* outcome() const { return &step_exchange->outcome; }  // on the device
    void* gemm_scratch;                                               // CublasGemms::SCRATCH_BYTES
    // What decides whether a step is skipped, (ranks, 1 + units). A row has loss_or_nan, and then sums
    // of squares of gradients, one for each unit. With one GPU there is one row.
    double* loss_and_squares;
    PlacesOfReceived received;  // several GPUs: where the other ranks write (gpu/extra_buffers.h)

    // In memory order (adamw.h)
    Weights owned_weights;
    AdamWParam* adamw_params;    // AdamW's table of parameters
    TensorScale* scale_entries;  // (scale_entry_count): gpu/scale_table.h
    int64_t scale_entry_count;
    float* histories;       // with delayed scaling: (scale_entry_count, Recipe::history_steps)
    void* moments_begin;    // where all moments begin, with their max and k
    int64_t moments_bytes;  // how many bytes they take together
    std::vector<MomentRef> first_moments, second_moments;  // by parameter, whose m and v lie together

    uint8_t* saved_activations;                 // L layers of saved_layer_bytes(), and mostly the gradients
    std::vector<uint8_t*> owned_gradient_sums;  // by bucket: what the update reads
    std::vector<uint8_t*> gradients_to_write;   // by bucket: what backward writes; with one rank the same

    // For the micro-batch that runs, or for a prompt, which is at most as long
    int32_t *tokens, *targets;  // (N)
    int32_t* row_order;         // (N) for the embedding's gradient: row numbers, sorted by token
    TokenRows* token_rows;      // (N at most) for each token that occurs: its rows in row_order
    // (N, C): in forward the residual stream after the last layer; in backward its gradient (model.cu)
    void* final_norm_input_or_dresidual;
    float* norm_backward_workspace;  // norm_backward_workspace_floats()
    RowStatistics* row_statistics;   // (N) of the norm that ran last
    float* losses;                   // (N)
    float2* rope_table;              // (T, HS / 2) {cos, sin}, for the whole run; of models with RoPE
};

// Allocates all members, in the order of the struct.
MemoryMap allocate_memory(GpuContext& context);

}  // namespace coat::gpu
