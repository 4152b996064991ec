// gpu/layers.cuh - what any transformer has around its GEMMs, attention and norms: RoPE, loss, gradients of
// biases, and the embedding's backward pass (layers.cu). Its forward pass is a residual add (coat.cuh).
//
// Tensors, parameter gradients and launches are as coat.cuh says.
#pragma once
#include "../model.h"
#include "coat.cuh"

namespace coat::gpu {

// --- RoPE

struct Rope {
    const float2* table;  // (positions, HS/2) {cos, sin}, from rope_table
    // The position of a row is row % T. Columns from rotated_cols on (v) are not rotated.
    int64_t T, HS, rotated_cols;
};
void rope_table(const ModelConfig& c, int64_t positions, float2* table, cudaStream_t s);
// Rotates qkv (B*T, qkv_cols) in place, or its gradient by the inverse. Takes the amax of all, if not null.
void rope(const Rope& r, const View& qkv, bool inverse, AmaxAndScale* amax, cudaStream_t s);

// --- Norms of heads (Qwen3): RMSNorm of each head of q and of k in (N, qkv_cols), in place

struct HeadNorm {
    const void* weight;  // [of q | of k], (2 HS), compute dtype
    float eps;
    int64_t HS, q_cols, k_cols;
};
void head_norm_forward(const HeadNorm& n, const View& qkv, cudaStream_t s);
// dqkv: from the gradient of the outputs to that of the inputs qkv, in place. dweight (2 HS) is added to.
// Workspace: (COLUMN_PARTIALS, q_cols + k_cols) floats.
void head_norm_backward(const HeadNorm& n, const View& qkv, const View& dqkv, const View& dweight,
                        float* workspace, cudaStream_t s);

// --- Loss

// logits (rows, V_padded = logits.cols) become the gradients of *scale * sum(losses), zero from column V on;
// losses (rows) FP32 are -log softmax(logits)[target]. Where the target is NO_TARGET both are 0. Without a
// scale the logits stay (evaluation). It is on the device, as it changes between replays of a launch.
void cross_entropy(const View& logits, int64_t V, const int32_t* targets, const double* scale, float* losses,
                   cudaStream_t s);
// *total += *scale * sum of losses (n), in a fixed order, in double.
void loss_sum(const float* losses, int64_t n, const double* scale, double* total, cudaStream_t s);

// --- Sums over rows

// gradient (n) = round(gradient + sums over the rows of partials (rows, n)): the second stage.
void reduce_partials(const float* partials, int64_t rows, const View& gradient, cudaStream_t s);
// gradient (cols) = round(gradient + column sums of x). Takes x's amax in the same pass if out is not null.
// Workspace: (COLUMN_PARTIALS, cols) floats.
inline constexpr int COLUMN_PARTIALS = 128;
void column_sums(const Lazy& x, const View& gradient, float* workspace, AmaxAndScale* out, cudaStream_t s);

// --- Embedding, backward

// The rows of g that belong to the same token, sorted on the host, so that sums have a fixed order.
struct TokenRows {
    int32_t token, first, count;  // rows order[first .. first + count)
};
struct EmbeddingOrder {
    std::vector<int32_t> order;     // (N) row numbers by token, ascending within a token
    std::vector<TokenRows> tokens;  // at most N
};
EmbeddingOrder embedding_order(const int32_t* tokens, int64_t N);
// gradient (padded_V, C): row[token] = round(row[token] + sum of g's rows), of `count` tokens; order and
// tokens are on the device. Without them, gradient (max_T, C): row[t] = round(row[t] + sum over the batch of
// g's rows b*T + t), of T = count positions.
void embedding_backward(const View& g, const int32_t* order, const TokenRows* tokens, int64_t count,
                        const View& gradient, cudaStream_t s);

}  // namespace coat::gpu
