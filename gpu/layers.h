// gpu/layers.h - what any transformer has around its GEMMs, attention and norms: RoPE, the loss, the
// embedding's backward pass, and qk_norms (kernels: gpu/layers.cu). The rules of gpu/tensors.h hold here.
#pragma once
#include <vector>

#include "../common/architecture.h"
#include "tensors.h"

namespace coat::gpu {

// ===========================================================================================================
// 1. RoPE

struct Rope {
    const float2* table;  // (positions, HS/2) {cos, sin}, from fill_rope_table()
    // The position of a row is row % T. Columns from rotated_cols on (v) are not rotated.
    int64_t T, HS, rotated_cols;
};
void fill_rope_table(const ModelConfig& config, int64_t positions, float2* table, cudaStream_t stream);
// Rotates qkv (B*T, qkv_cols) in place. (In backward gpu/attention.cu calls rope() with `inverse`: qkv is
// then the gradient, which is rotated by the opposite angles. The amax is that of all columns, those of v
// included. gpu/attention_sm90.cu makes no such call: its own kernel rotates the gradient.)
void rope(const Rope& r, const TensorRef& qkv, bool inverse, float* qkv_amax_to_raise, cudaStream_t stream);

// ===========================================================================================================
// 2. Loss

// Computes the losses alone, for evaluation.
//   losses    (rows), FP32: -log softmax(logits)[target], or 0 where the target is NO_TARGET
//   logits    (rows, padded_V); the columns from V on may be anything
//   targets   (rows)
void cross_entropy_forward(const TensorRef& logits, int64_t V, const int32_t* targets, float* losses,
                           cudaStream_t stream);
// Computes the losses, and writes gradients over the logits: those of *loss_weight * sum(losses). They are 0
// from column V on, and 0 where the target is NO_TARGET. The weight is on the device, because it may differ
// each time that a CUDA graph replays the launch.
void cross_entropy_forward_and_backward(const TensorRef& logits, int64_t V, const int32_t* targets,
                                        const double* loss_weight, float* losses, cudaStream_t stream);
// *total += *loss_weight * the sum of losses (n), in a fixed order, in double.
void add_loss_sum(const float* losses, int64_t n, const double* loss_weight, double* total,
                  cudaStream_t stream);

// ===========================================================================================================
// 3. The embedding's backward pass

// Which rows of a gradient belong to a token. The host sorts the rows, so that sums have a fixed order.
struct TokenRows {
    int32_t token, first, count;  // rows row_order[first .. first + count)
};
struct EmbeddingOrder {
    std::vector<int32_t> row_order;     // (N) row numbers by token, ascending within a token
    std::vector<TokenRows> token_rows;  // at most N; those with the most rows come first
    // How many tokens, at the beginning of token_rows, have more than 32 rows. These are added up by several
    // warps.
    int64_t frequent_count = 0;
};
EmbeddingOrder embedding_order(const int32_t* tokens, int64_t N);
// An EmbeddingOrder whose vectors are on the device; `count` is the length of token_rows.
struct EmbeddingOrderRef {
    const int32_t* row_order;
    const TokenRows* token_rows;
    int64_t count, frequent_count;
};
// gradient (padded_V, C): row[token] += the sum of the token's rows of g (N, C), for each token of the order.
void embedding_backward(const TensorRef& g, const EmbeddingOrderRef& order, const TensorRef& gradient,
                        cudaStream_t stream);
// gradient (max_T, C): row[t] += the sum over the sequences b of g's rows b*T + t.
void positions_backward(const TensorRef& g, int64_t T, const TensorRef& gradient, cudaStream_t stream);

// ===========================================================================================================
// 4. Qwen3's norms of heads: qk_norms

// Qwen3 has an RMSNorm of each head of q and of k.
struct QkNorms {
    const void* weight;  // [of q | of k], (2 HS), compute format
    float eps;
    int64_t HS, q_cols, k_cols;
};
// Writes to `out` what attention reads: qkv = [q | k | v] (N, qkv_cols), with q and k normed and then
// rotated.
void qk_norms_and_rope(const QkNorms& n, const Rope& rope, const TensorRef& qkv, const TensorRef& out,
                       cudaStream_t stream);
// The backward pass of the norms alone, without that of RoPE.
//   dqkv        on entry the gradient of the norms' outputs; on return that of their inputs, qkv
//   dweight     (2 HS), is added to
//   workspace   (COLUMN_PARTIALS, q_cols + k_cols) floats (COLUMN_PARTIALS: gpu/column_sums.h)
void qk_norms_backward(const QkNorms& n, const TensorRef& qkv, const TensorRef& dqkv,
                       const TensorRef& dweight, float* workspace, cudaStream_t stream);

}  // namespace coat::gpu
