// coat.cuh - the method on the GPU: quantizers, the precision flow's elementwise kernels and the FP8 optimizer (coat.cu).
//
// The rule of this interface: a tensor that elementwise work can compute again is never stored; it is a `Lazy`, the rule
// that yields its FP32 values, and there are three verbs for it: amax, quantize, column_sums. Per-tensor scaling thus takes two
// passes, amax(t) and quantize(t), without an intermediate in memory; a producer that holds a whole row leaves the next
// norm's amax behind and saves the first. No function allocates or waits; all launch on the given CUDA stream.
//
// Every tensor is a QuantizedView {codes, scales, rows, cols, quant}; with quant F32 or BF16 the codes are the numbers. "stream" in a
// comment means the recipe's compute dtype (F32 or BF16); all views of one call that say so have the same one. A row is a
// token; columns are multiples of 16, rows any number. Pointers are 16-byte aligned. Views without codes are "none".
#pragma once
#include <cuda_runtime.h>

#include "coat.h"

namespace coat::gpu {

using View = QuantizedView;

// A wrong call or a CUDA error becomes coat::Error: "<what>: <CUDA's reason>".
void check(cudaError_t error, const char* what);

// ---------------------------------------------------------------------------------------------------------------------
// Scales. A per-tensor FP8 view's `scales` points to one of these on the device (the GEMM wants scales 16-byte aligned).
// amax is order-free: an atomicMax on the bits of |x|, in which infinity and then NaN come last. Zero the slots (cudaMemsetAsync) before
// their amax is taken. quantize() writes the scale that it used: the delayed one, or where there is none the just-in-time one, reference.h's
// scale_of(amax).

struct alignas(16) TensorScale {
    float scale;    // that the codes were made with: the GEMM reads it
    float amax;     // of the step so far
    float delayed;  // scale from the amaxes of the steps before; 0: none, scale just in time
    float unused;
};
inline TensorScale* tensor_scale(const View& v) { return static_cast<TensorScale*>(v.scales); }

struct GradientState;  // below, with the optimizer

// A tensor as a GEMM wants it: codes (rows, cols) and, for Hopper's FP8 GEMM, which contracts contiguous dimensions
// only, the same transposed (cols, rows). Either may be null; transposed is for FP8 only.
// With one scale a tensor the codes are the same both ways, and view.scales is its TensorScale. Rows, vectors and squares (coat.h, Recipe)
// have scales for each way, Quant::operand_scales() of them, where cuBLAS looks for them: those of rows one after the other; vectors'
// (cols / 128, rows); squares' (rows / 128, cols / 128), each row of these padded to a multiple of four.
struct Operand {
    View view;
    void* transposed = nullptr;
    void* transposed_scales = nullptr;
    TensorScale* slot = nullptr;  // raised to the amax by quantize() if scales are not one a tensor; may be null
};

// ---------------------------------------------------------------------------------------------------------------------
// Tensors that exist only as the rule that computes them

struct Norm {
    View in;           // (N, C) stream, or E4M3 1x16
    const void* weight;  // (C) stream
    const void* bias;  // (C) stream; null for RMSNorm
    float2* stats;     // (N) {mean, 1 / std} ({0, 1 / rms}), left here by residual_add, embedding_forward, norm_statistics and norm_backward
    bool rms;
    float eps;
};

struct Rope {
    const float2* table;         // (max_T, HS/2) {cos, sin}, from rope_table
    int64_t T, HS, rotated_cols; // a row's position is row % T; columns from rotated_cols on (v) pass unchanged
};

enum class Rule : uint8_t { Stored, Norm, Activation, ActivationBackward, RopeBackward };

struct Lazy {
    Rule rule;
    int64_t rows, cols;
    View a{}, b{};  // Stored: a. Activation: a = up. ActivationBackward: a = up, b = dh. RopeBackward: a = dqkv
    bool gated = false;
    gpu::Norm norm{};
    gpu::Rope rope{};
};

Lazy stored(const View& x);              // stream or E4M3 1x16 (rows, cols)
Lazy norm(const Norm& n);                // (N, C); needs n.stats
Lazy activation(bool gated, const View& up);  // up (N, 2F) = [gate | up] or (N, F), stream or E4M3 1x16 -> (N, F)
Lazy activation_backward(bool gated, const View& up, const View& dh);  // dh (N, F) stream -> (N, 2F) or (N, F)
Lazy rope_backward(const Rope& r, const View& dqkv);                   // dqkv (B*T, qkv_cols) stream -> the same shape

// Raises slot->amax to the largest |x|.
void amax(const Lazy& x, TensorScale* slot, cudaStream_t s);
// Writes x: per-tensor FP8 with the amax in tensor_scale(out.view), or with the delayed scale there, and then that amax is updated; FP8 in rows,
// vectors or squares, with their scales, just in time; 1x16 groups; or rounded to the compute dtype. out may have more rows than x, but then no
// transpose: those rows are left as they are, and enter no amax. stats: device memory, added to if not null.
void quantize(const Lazy& x, const Operand& out, QuantStats* stats, cudaStream_t s);
// x (BF16) becomes what `groups` hold of it.
void quantize_and_dequantize(const View& x, const View& groups, QuantStats* stats, cudaStream_t s);
// What an activation reads: up = Q(u) in groups, u (N, 2F) or (N, F) in BF16, and in h_slot the amax of activation(gated, up), which so
// needs no pass of its own.
void quantize_gate_up(bool gated, const View& u, const View& up, TensorScale* h_slot, QuantStats* stats, cudaStream_t s);
// gradient (cols), F32 or BF16, = round(gradient + column sums of x), x first rounded to `rounding` (F32: not). Raises slot->amax as amax() does, if not
// null. Workspace: (COLUMN_PARTIALS, cols) floats.
inline constexpr int COLUMN_PARTIALS = 128;
void column_sums(const Lazy& x, Format rounding, const View& gradient, float* workspace, TensorScale* slot, cudaStream_t s);

void transpose_fp8(const View& x, void* transposed, cudaStream_t s);      // codes (rows, cols) -> (cols, rows)
void dequantize(const View& x, const View& out, cudaStream_t s);          // any view -> F32 or BF16 of the same shape

// Delayed scaling: the amaxes of a step enter the histories, the newest first, and make the next step's scales, max(history) 2^margin / FMAX; one
// stays as it was where that maximum is 0 or not finite. Nothing happens if a part of the step was skipped. slots: n; histories (n, length).
// *without is raised by the number of slots that have no scale yet.
void end_delayed_step(TensorScale* slots, int64_t n, float* histories, int length, int margin, Format fp8, const GradientState* state,
                      uint32_t* without, cudaStream_t s);

// ---------------------------------------------------------------------------------------------------------------------
// The residual pair (paper section 5): the stream x goes on in compute dtype while `next.in` is what the next norm reads and what
// backward gets. These also leave next.stats and, if not null, the amax of the norm's output in y_slot.

// sum = x + a; x_out = round(sum); next.in = Q(sum). x_out may be x; it is none where next.in holds the same numbers.
void residual_add(const View& x, const View& a, const View& x_out, const Norm& next, TensorScale* y_slot, QuantStats* stats, cudaStream_t s);
// sum = embedding[token] (+ positions[row % T])
void embedding_forward(const int32_t* tokens, const View& embedding, const View& positions, int64_t T, const View& x_out, const Norm& next,
                       TensorScale* y_slot, QuantStats* stats, cudaStream_t s);
// From next.in alone, without a sum.
void norm_statistics(const Norm& n, TensorScale* y_slot, cudaStream_t s);

// g_out = round(g_in + norm backward of dy), all (N, C) stream; g_in may be none, g_out may be g_in. Leaves n.stats again, and g_out's amax
// in g_slot if not null. dweight, dbias (C), F32 or BF16, are added to; dbias is none for RMSNorm. Workspace: norm_backward_workspace(C) bytes.
size_t norm_backward_workspace(int64_t C);
void norm_backward(const Norm& n, const View& dy, const View& g_in, const View& g_out, TensorScale* g_slot, const View& dweight, const View& dbias,
                   float* workspace, cudaStream_t s);

// ---------------------------------------------------------------------------------------------------------------------
// The ends of the network

void rope_table(const ModelConfig& c, int64_t T, float2* table, cudaStream_t s);  // (T, HS/2)
void rope_forward(const Rope& r, const View& qkv, cudaStream_t s);                // qkv (B*T, qkv_cols) stream, in place

// logits (rows, V_stride = logits.cols) stream become gradients of sum(loss) * scale, zero from column V on; losses (rows) FP32. With
// scale 0 the logits stay as they are (evaluation).
void cross_entropy(const View& logits, int64_t V, const int32_t* targets, float scale, float* losses, cudaStream_t s);
// *total += scale * sum of losses (n), in a fixed order, in double.
void loss_sum(const float* losses, int64_t n, double scale, double* total, cudaStream_t s);

// Rows of g that belong to the same token, told to the GPU by a counting sort on the host, so that sums have a fixed order.
// A chunk is at most EMBEDDING_CHUNK rows of one token.
inline constexpr int EMBEDDING_CHUNK = 32;
struct EmbeddingChunk {
    int32_t token, first, count;  // rows order[first .. first + count)
    int32_t chunks;               // of this token, consecutive in the table; 0 for all but the first of them
};
struct EmbeddingOrder {
    std::vector<int32_t> order;          // (N) row numbers by token, in order within a token
    std::vector<EmbeddingChunk> chunks;  // at most embedding_chunks(N)
};
int64_t embedding_chunks(int64_t N);     // how large a device buffer for chunks must be
EmbeddingOrder embedding_order(const int32_t* tokens, int64_t N, int64_t V);
// gradient (padded_V, C), F32 or BF16: row[token] = round(row[token] + sum of g's rows). order and chunks are device copies.
// Workspace: (number of chunks, C) floats.
void embedding_backward(const View& g, const int32_t* order, const EmbeddingChunk* chunks, int64_t number_of_chunks, const View& gradient,
                        float* workspace, cudaStream_t s);
// gradient (max_T, C), F32 or BF16: row[t] = round(row[t] + sum over the batch of g's rows b*T + t)
void positions_backward(const View& g, int64_t T, const View& gradient, cudaStream_t s);

// ---------------------------------------------------------------------------------------------------------------------
// Parameters and their optimizer (paper section 4)

// Weights lie in the flat order of parameters(): param p at elements [offset, offset + size) of one array, in compute dtype;
// padding up to a multiple of MOMENT_GROUP stays zero. BF16 weights have the int16 remainder of the FP32 master beside them in the same order;
// without it they are all there is, and the optimizer rounds them stochastically.
struct Weights {
    void* values;        // (total) stream
    int16_t* remainder;  // (total); null if the stream is F32, or where there is no master
    Format format;
};
void initialize(const Weights& w, const Param& p, uint64_t index, int64_t live, uint64_t seed, cudaStream_t s);
void split_master(const float* master, uint16_t* weight, int16_t* remainder, int64_t n, cudaStream_t s);
void join_master(const uint16_t* weight, const int16_t* remainder, float* master, int64_t n, cudaStream_t s);

// One parameter's moments. FP8: codes and a (max, k) a group; with one scale a tensor, of FP8 and FP16, a max and room for the next one; else codes
// alone.
struct MomentView {
    void* codes;      // (padded_size) of format; padding stays zero
    float *max, *k;   // (groups) each, or (2); k is null without expansion
    Format format;
};
struct Segment {       // one row a parameter, in the flat order; a device table
    int64_t offset, size;
    MomentView m, v;
    bool decays;
    TensorScale* amax;  // of the new weights; null if nothing wants it
};

// What one step knows of its gradients, on the device, so that the host need not wait. Cleared before the step; each bucket of gradients that is
// updated by itself adds to it.
struct GradientState {
    double squares, norm;  // of all buckets so far, before clipping
    float scale;           // of this bucket's gradients: clip / (norm_correction norm) or 1
    uint32_t skip;         // 1: the loss is not finite, or a bucket's scaled gradients have no norm below 2^62: neither that bucket
                           // nor a later one of the step is updated
};
// *checked = *loss, or NaN for good if it was NaN before or one of n amaxes is not finite: an FP8 code would hide that a tensor was not.
void checked_loss(const TensorScale* scales, int64_t n, const double* loss, double* checked, cudaStream_t s);
struct Clipping {
    float limit;        // of the norm; 0: none
    double norm_correction = 1;  // by which the norm so far is thought to grow, where buckets are still to come
};
// A bucket of gradients: n elements in the flat order. loss may be null. Workspace: GRADIENT_PARTIALS doubles.
inline constexpr int GRADIENT_PARTIALS = 1024;
void gradient_norm(const void* gradients, Format format, int64_t n, const double* loss, const Clipping& clip, GradientState* state,
                   double* workspace, cudaStream_t s);

// Some consecutive elements of the flat order, whole parameters: all, or one bucket's.
struct Range {
    int64_t first, count;
};
// One launch for all parameters of a range, or four where moments have one scale a tensor; `segments` and gradients are theirs. Every segment's
// m.format is optimizer.m or F32, and v's likewise. rounding: rounding_key() of this step, for weights without a master. Zero the segments' amax
// slots first; they are filled even if nothing is changed. format: of the gradients, F32 or BF16.
void adamw(const AdamW& a, const OptimizerFormat& optimizer, const Segment* segments, int number_of_segments, const Range& range, const Weights& w,
           uint64_t rounding, const void* gradients, Format format, const GradientState* state, cudaStream_t s);

// For the report: adds what encoding the FP8 moments that one parameter's gradients lead to would lose. segment: a host copy of its row.
// first, second: device memory. Nothing else is changed.
void measure_moments(const OptimizerFormat& optimizer, const Segment& segment, const void* gradients, Format format, QuantStats* first,
                     QuantStats* second, cudaStream_t s);

}  // namespace coat::gpu
