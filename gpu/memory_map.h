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
    double loss;  // the sum of the losses so far, times loss_weight: see StepExchange
    // `loss`; or NaN, if an amax was not finite: FP8 codes hide infinity and NaN, but the amax shows them. If
    // loss_or_nan is infinite or NaN, the step is skipped.
    double loss_or_nan;
    GradientState gradient_state;  // the norm of the gradients, and whether the step is skipped
    uint32_t empty_histories;      // delayed scaling: how many operands have had no amax yet
};
// The few numbers that the host and the GPU exchange in a step, on the device.
struct StepExchange {
    StepOutcome outcome;
    // From the host: 1 / the number of scored targets, because the loss of a step is a mean. Losses and
    // gradients are multiplied by it.
    double loss_weight;
    // The errors of quantization, while they are measured: one for each MeasuredKind but the two moments,
    // which are the last in that enum.
    QuantStats quant_stats[int(MeasuredKind::Moment1)];
};

// The map: where everything is that lasts for the run. All pointers are addresses on the GPU, which the host
// passes on and never reads. The members have the order of the memory. Behind them lies the stack: what a
// step allocates where it uses it (Arena::Scope), such as the operands of one linear layer, gradients of
// activations, and logits. (The FP8 codes of all weights lie in between, if a run caches them.)
//
// Backward writes the gradients of weights where the update reads them. Usually they lie over the saved
// activations, as in the drawing of gpu/memory_layout.h.
struct MemoryMap {
    StepExchange* step_exchange;
    void* gemm_scratch;  // CublasGemms::SCRATCH_BYTES
    // What decides whether a step is skipped, (ranks, 1 + units). A row has loss_or_nan, and then sums
    // of squares of gradients, one for each unit. With one GPU there is one row.
    double* loss_and_squares;
    PlacesOfReceived received;  // several GPUs: where the other ranks write (gpu/extra_buffers.h)

    // In memory order (adamw.h)
    Weights owned_weights;
    AdamWParam* adamw_params;    // AdamW's table of parameters
    TensorScale* scale_entries;  // (scale_entry_count): the ScaleTable (gpu/scale_table.h)
    int64_t scale_entry_count;   // three for each linear layer
    float* histories;            // with delayed scaling: (scale_entry_count, Recipe::history_steps)
    void* moments_begin;         // where all moments begin, with their max and k
    int64_t moments_bytes;       // how many bytes they take together
    std::vector<MomentRef> first_moments, second_moments;  // by parameter, whose m and v lie together

    uint8_t* saved_activations;                     // L layers of saved_layer_bytes(); usually also gradients
    std::vector<uint8_t*> gradient_sums_by_bucket;  // by bucket: what the update reads
    std::vector<uint8_t*> gradients_by_bucket;      // by bucket: what backward writes; with one rank the same

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

    StepOutcome* outcome_on_gpu() const { return &step_exchange->outcome; }
};

// Allocates all members, in the order of the struct.
MemoryMap allocate_memory(GpuContext& context);

}  // namespace coat::gpu
