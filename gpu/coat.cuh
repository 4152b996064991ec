// coat.cuh - the paper's section 5 on the GPU: quantizers, group scaling, FP8 precision flow (coat.cu).
//
// Rules of this interface:
//   - A Lazy describes how to compute a tensor elementwise from what is stored; the simplest is what is
//     stored. Each kernel that needs the tensor computes it on the fly, and stores it only as an operand.
//   - Per-tensor scaling takes two passes: amax(x) and quantize(x). A kernel that has the values at hand
//     updates the amax itself, which saves the first pass. Either way the amax is taken in two stages (group
//     scaling): a maximum for each warp, then an atomicMax.
//   - No function allocates or waits; all launch on the given CUDA stream. Rows are tokens, any number of
//     them, but a multiple of 16 for transposed codes; columns are a multiple of 16. Pointers are 16-byte
//     aligned. Views are in the compute dtype unless a comment says otherwise: BF16, or FP32 where nothing
//     is FP8. Gradients of parameters are added to, in their own format (BF16 or FP32).
#pragma once
#include "tensor.cuh"

namespace coat::gpu {

enum class LazyOp : uint8_t { Stored, Norm, Activation, ActivationBackward };

struct Lazy {
    LazyOp op;
    int64_t rows, cols;  // of the result
    View input{};        // of the norm; gate_up of the activation
    View dact{};         // ActivationBackward: the gradient of the activation's output
    bool gated = false;
    gpu::Norm norm{};
};

// A stored tensor (rows, cols), compute dtype or groups.
inline Lazy stored(const View& x) { return {LazyOp::Stored, x.rows, x.cols, x}; }
// The output of a norm (N, C); needs n.stats.
inline Lazy norm(const Norm& n) { return {LazyOp::Norm, n.in.rows, n.in.cols, n.in, {}, false, n}; }
// gate_up (N, 2F) = [gate | up], or (N, F) where nothing is gated; compute dtype or groups. Result (N, F):
// SiLU(gate) x up or GELU.
inline Lazy activation(bool gated, const View& gate_up) {
    return {LazyOp::Activation, gate_up.rows, gate_up.cols / (gated ? 2 : 1), gate_up, {}, gated};
}
// dact (N, F) is the gradient of the activation's output, in the compute dtype. Result: the gradient of
// gate_up, same shape.
inline Lazy activation_backward(bool gated, const View& gate_up, const View& dact) {
    return {LazyOp::ActivationBackward, gate_up.rows, gate_up.cols, gate_up, dact, gated};
}

// Group scaling (paper section 5): out->amax = max(out->amax, |x|). Amaxes start at 0 in every micro-batch;
// with delayed scaling, in every step.
void amax(const Lazy& x, AmaxAndScale* out, cudaStream_t s);

// Writes x as out says: FP8 per tensor (just in time from the amax in amax_and_scale(out.view), or with the
// delayed scale there); FP8 per row, 1x128 or 128x128, with their scales, just in time; E4M3 in 1x16 groups,
// if x is stored in BF16; BF16 or FP32. Codes may take the place of the stored elements they are computed
// from, where an element's code is as large as the element. What quantizing loses is added to *stats if that
// is not null. Codes may have rows beyond x's, which are left as they are.
void quantize(const Lazy& x, const Operand& out, QuantStats* stats, cudaStream_t s);

// x (BF16) goes to 1x16 groups. With `write_back`, x becomes what they hold: so attention computes with the
// very values that backward will read. If x (N, 2F) or (N, F) is the input of an activation, whose output is
// the next GEMM's operand, the amax of that output is taken in the same pass; the activation reads the
// groups, or x (coat.h, forward_reads_groups).
struct ActivationAmax {
    AmaxAndScale* place = nullptr;  // null: no amax
    bool gated = false, reads_saved = false;
};
void quantize_groups(const View& x, const View& groups, bool write_back, const ActivationAmax& activation,
                     QuantStats* stats, cudaStream_t s);

// Groups, BF16 or FP32 -> BF16 or FP32, the same shape. Groups are dequantized.
void convert(const View& x, const View& out, cudaStream_t s);

// --- Residual add and norm (gpu/norm.cu)

// sum = x + branch; x_out = round(sum); next.in = sum, quantized in groups or rounded. x_out may be x, and it
// is no tensor where next.in holds the same values. Writes next.stats and, if y_amax is not null, the amax of
// the norm's output. Both are computed from next.in if reads_saved, else from x_out
// (coat.h, forward_reads_groups). With tokens (N), x is the embedding and branch the positions, if they are a
// tensor: sum = x[token] + branch[row % T].
void residual_add(const View& x, const View& branch, const View& x_out, const Norm& next, bool reads_saved,
                  AmaxAndScale* y_amax, cudaStream_t s, const int32_t* tokens = nullptr, int64_t T = 1);

// g_out = round(g_in + dx), where dy is the gradient of the norm's output and dx that of its input; all (N,
// C). g_in may be no tensor, g_out may be g_in. Leaves n.stats again and, if g_amax is not null, the amax of
// g_out. dbias is no tensor for RMSNorm. Workspace: norm_backward_workspace(C) bytes.
size_t norm_backward_workspace(int64_t C);
void norm_backward(const Norm& n, const View& dy, const View& g_in, const View& g_out, AmaxAndScale* g_amax,
                   const View& dweight, const View& dbias, float* workspace, cudaStream_t s);

// --- Scales of te, rowwise and deepseek: delayed, per row, and in blocks (gpu/other_scaling.cu)

// Maps (row, col) of the tensor to its scale, in the layout that cuBLASLt expects (gpu/tensor.cuh, Operand).
struct ScaleGrid {
    float* scales;             // null: not wanted
    int row_shift, col_shift;  // log2 of a block's sides
    int64_t down, across;      // from one block's scale to the next one's
    int64_t count;             // of all scales
    __device__ float* at(int64_t row, int64_t col) const {
        return scales + (row >> row_shift) * down + (col >> col_shift) * across;
    }
};
// The scales of an operand's row-major or transposed codes, (N, K) with K the GEMM's reduction dimension.
ScaleGrid scale_grid(const Operand& out, bool transposed);

// What quantize() calls for these recipes: codes per row, 1x128 or 128x128, with scales of their own, just in
// time (*out.amax is updated); and codes per tensor with a delayed scale, while the amax is taken for later.
void quantize_in_blocks(const Lazy& x, const Operand& out, QuantStats* stats, cudaStream_t s);
void quantize_delayed(const Lazy& x, const Operand& out, QuantStats* stats, cudaStream_t s);

// Delayed scaling. After a step the amaxes enter the histories, the newest first, and the next step's scale
// is from_history = max(history) / FMAX. A maximum that is 0 or not finite leaves it as it was, and
// *skipped all. scales (n); histories (n, length). *empty: + the number of scales that are still 0.
void end_delayed_step(AmaxAndScale* scales, int64_t n, float* histories, int length, Format fp8,
                      const uint32_t* skipped, uint32_t* empty, cudaStream_t s);

}  // namespace coat::gpu
