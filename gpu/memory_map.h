// gpu/memory_map.h - where everything lies in the memory of a GPU, and what the host and the GPU exchange in
// a step. How large the parts are follows from the settings of the run: gpu/memory_layout.h.
//
// N is the number of tokens that are computed at a time: those of a micro-batch, B * T, or of a prompt. What
// the map uses of other files:
//
//   gpu/tensors.h     what is in the memory: TensorScale and RowStatistics
//   adamw.h           Weights, Shard, MomentRef and GradientState; and the words shard, bucket and rank's
//                     order
//   gpu/layers.h      TokenRows, for the gradient of the embedding
//
// With one rank, a shard is a whole parameter, and the rank's order is the order of the parameters. What only
// several ranks and other recipes need is at the end of each struct.
#pragma once
#include "../adamw.h"
#include "context.h"
#include "layers.h"
#include "memory_layout.h"

namespace coat::gpu {

// What a step finds out, on the device. The host clears it before the step and fetches it at the end.
struct StepOutcome {
    double loss;         // the sum of the losses so far, times StepExchange::loss_weight
    double loss_or_nan;  // `loss`; or NaN, if FP8 codes have hidden a value that is not finite
    GradientState gradient_state;
    uint32_t empty_histories;  // delayed scaling: how many operands have had no amax yet
};
// The few numbers that the host and the GPU exchange in a step, on the device.
struct StepExchange {
    StepOutcome outcome;
    // From the host: 1 / the number of targets that count, because the loss of a step is a mean.
    double loss_weight;
    // The errors of quantization, while they are measured: one for each ReportKind that comes before moments.
    QuantStats quant_stats[int(ReportKind::Moment1)];
};

// The map: where everything is that lasts for the run. In the allocation, from its beginning (what is in
// brackets only in some runs):
//
//   step_exchange | cuBLASLt's scratch | sums of squares and [what else other ranks write] |
//   weights | remainders of masters | AdamW's table | table of scales | [histories of amaxes] | moments |
//   saved activations and gradients | tokens, targets, token order | end of the residual stream |
//   memory of norms | losses | cos, sin | [FP8 weights, if they are cached]
//
// After that comes what a step allocates where it uses it (Arena::Scope): the operands of one linear layer,
// gradients of activations, logits.
//
// Gradients of weights. Backward writes them where the update reads them. Usually they lie over the saved
// activations:
//
//     forward writes the layers from left to right, backward needs them from right to left
//   +---------+---------+-- ... --+-----------+
//   | layer 0 | layer 1 |         | layer L-1 |  activations
//   +---------+---------+-- ... --+-----------+
//             | embedding | layer 0 | layer 1 | ... | layer L-1 | head |  gradients
//             +-----------+---------+---------+-----+-----------+------+
//             ^ gradients_offset()
//
// The gradients begin as far left as possible. Two conditions limit this: the gradients of layer l begin
// after the activations of the layers 0 to l, which backward still needs when it writes these gradients; and
// those of the head begin after all activations. (Where gradients lie in other runs: gpu/memory_map.cpp.)
struct MemoryMap {
    StepExchange* step_exchange;
    StepOutcome* outcome() const { return &step_exchange->outcome; }  // on the device
    void* gemm_scratch;                                               // CublasGemms::SCRATCH bytes

    // What this rank owns, in the rank's order
    Weights weights;
    Shard* shards;                                         // AdamW's table of parameters
    std::vector<MomentRef> first_moments, second_moments;  // by parameter
    void* moments_begin;    // where all moments and their moment scalings begin
    int64_t moments_bytes;  // how many bytes they take together

    TensorScale* scale_table;  // (scale_table_size): see ScaleTable
    int64_t scale_table_size;

    uint8_t* saved_activations;                 // L layers of saved_layer_bytes() each
    std::vector<uint8_t*> owned_gradient_sums;  // by bucket: what the update reads
    std::vector<uint8_t*> gradients_to_write;   // by bucket: what backward writes; with one rank the same

    // For the micro-batch that runs, or for a prompt, which is at most as long
    int32_t *tokens, *targets;  // (N)
    int32_t* token_order;       // (N) for the embedding's gradient: row numbers, sorted by token
    TokenRows* token_rows;      // (N at most) for each token that occurs: its rows in token_order
    // (N, C): after forward the residual stream at its end, which is the input of the final norm; in backward
    // the gradient of the residual stream
    void* residual_end;
    float* norm_backward_workspace;  // norm_backward_workspace_floats()
    RowStatistics* row_statistics;   // (N) of the norm that ran last
    float* losses;                   // (N)

    float2* rope_table;  // (T, HS / 2) {cos, sin}, for the whole run

    // For the norm of gradients, (ranks, 1 + shard units): the row of a rank has the rank's loss, and then
    // the sums of squares of what the rank owns.
    double* loss_and_squares;

    // The rest can wait. Delayed scaling (see ScaleTable): (operands, linear layers, Recipe::history_steps)
    float* histories;
    // What else other ranks write here, if there are several. (They find these places and loss_and_squares,
    // because on all ranks they are equally far from the beginning of the allocation.)
    struct Received {
        uint32_t* flags;            // two for each rank (gpu/transport.h)
        uint8_t* gradients;         // the other ranks' gradients of the part of a bucket that this rank owns
        uint8_t* weights[2];        // the matrices of an even gather unit, and of an odd one
        TensorScale* scale_tables;  // (ranks, scale_table_size): the tables of all ranks
    } received;
};

// Allocates all that is in the map.
MemoryMap allocate_memory(GpuContext& context);

}  // namespace coat::gpu
