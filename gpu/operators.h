// gpu/operators.h - what the kernels do, for those who call them: the tensors that they are given, and COAT's
// operators (quantizers, sums over rows, the optimizer, norms), each with the shapes and formats that it
// accepts. Other operators are in gpu/layers.h, gpu/attention.h, gpu/gemm.h and gpu/parameter_kernels.h; what
// other recipes and the quantization report need, in gpu/other_scaling.h and gpu/quant_report.h.
//
// Rules for all operators:
//   - An operator is put on the given CUDA stream. None allocates memory, and none waits, unless it says so.
//   - The rows of an activation or a gradient are tokens; those of a weight are its outputs. There may be any
//     number of rows; where transposed codes are made, a multiple of 16. Columns are a multiple of 16.
//     Pointers are 16-byte aligned.
//   - Tensors are in the compute dtype unless a comment says otherwise: BF16; in the recipe fp32, FP32.
//   - Operators add to parameters' gradients, which are in BF16 or FP32 (gradient_format() of model.h).
//   - An argument whose name ends with amax_out says where an amax is wanted: the operator raises the field
//     `amax` of this AmaxAndScale to the largest |x| that it has seen. Null means that nobody needs it.
//   - `workspace` is temporary memory, which the caller provides. Afterwards it may be used for anything.
//   - A TensorRef refers to a tensor, as a pointer does. A `const TensorRef&` therefore does not say that the
//     tensor is only read: the comment of the operator says what is written.
//   - The same input gives the same bits every time on the same kind of GPU: every sum has a fixed order,
//     which may depend on the number of multiprocessors. The only atomics are maxima and sums of integers,
//     whose order does not matter, and counters from which thread blocks take their next piece of work.
//     (The sums of the quantization report are the exception.)
//   - A wrong combination of formats is an Error; a wrong shape or pointer is not noticed.
//
// The words group, moment group, scale and scale block are those of formats.h.
#pragma once
#include "../model.h"
#include "cuda.h"

namespace coat::gpu {

// ===========================================================================================================
// 1. Tensors

// The amax of a tensor, on the device, and the scale that follows from it if the tensor has a single scale.
// (The struct has 16 bytes, because a GEMM reads `scale`, and wants it aligned to 16 bytes.) Which function
// writes a field, where scaling is just in time:
//
//   amax    an earlier kernel, or compute_amax()
//   scale   quantize(), as amax / FMAX
//
// With several ranks: combine_amaxes() (gpu/parameter_kernels.h) writes both fields of a weight on all of
// them. With delayed scaling (te): gpu/other_scaling.h has such a table.
struct alignas(16) AmaxAndScale {
    float scale;  // codes are multiplied by it
    // The largest |x| so far. atomicMax raises it, on the bits of |x|: as integers, those of infinity are
    // above those of all numbers, and those of NaN are above those of infinity. So amax is NaN if an x is.
    // (The CPU's compute_amax() returns infinity then. Both say only that a value is not finite.)
    float amax;
    float delayed_scale;  // delayed scaling: the scale from earlier amaxes; 0 while there is none
    float unused;
};

// Refers to a tensor on the GPU. In BF16 and FP32 its elements are values. In FP8 they are codes, and a value
// is its code times a scale. `storage` says where the scale is:
//   one for the tensor   amax_and_scale->scale
//   one for each group   group_scales
//   other scale blocks   in the Operand to which this tensor belongs: block_scales
// Null data means "no tensor". (In an Operand it can also mean that only the transposed codes exist.)
struct TensorRef {
    void* data;  // (rows, cols) elements of storage.format
    int64_t rows, cols;
    Storage storage;
    AmaxAndScale* amax_and_scale = nullptr;  // of an FP8 operand of a GEMM; otherwise null
    uint16_t* group_scales = nullptr;        // in groups: (rows, cols / 16) in BF16; otherwise null
};

// The rows [first, first + n) of a tensor.
inline TensorRef row_slice(const TensorRef& t, int64_t first, int64_t n) {
    TensorRef slice = t;
    slice.data = static_cast<uint8_t*>(t.data) + t.storage.code_bytes(first, t.cols);
    slice.rows = n;
    if (t.group_scales) slice.group_scales += t.storage.scale_count(first, t.cols);
    return slice;
}

// A tensor as a GEMM (matrix multiplication) reads it: x, w or g of a linear layer. The recipes in formats.h
// begin with the three GEMMs fprop, dgrad and wgrad, and with which FP8 operands they read row-major and
// which transposed, with codes (cols, rows). Either form, row-major (tensor.data) or transposed, may be null:
// an operand has the forms that its GEMMs read. (Operands in FP32 and BF16 are always row-major.) With
// per-tensor scaling both forms have the same scale, tensor.amax_and_scale->scale. In other granularities
// (per row, 1x128, 128x128) each form has scales of its own, one for each scale block. They have the layout
// that cuBLASLt reads (for row-major codes):
//   per row    (rows)
//   1x128      (cols / 128, rows)
//   128x128    (rows / 128, cols / 128), each row padded to a multiple of four
// There tensor.amax_and_scale serves only for its amax, which shows whether a value was not finite.
struct Operand {
    TensorRef tensor;
    void* transposed = nullptr;                // codes (cols, rows)
    float* block_scales = nullptr;             // of the row-major codes, if the granularity is not per tensor
    float* transposed_block_scales = nullptr;  // likewise, of the transposed codes
    bool delayed = false;  // per tensor: the scale comes from the history (te), once there is one
};

// The number of scales of an operand's codes (rows, cols), with the padding of 128x128 scales. A per-tensor
// scale does not count: it lies elsewhere, beside its amax.
inline int64_t operand_scale_count(const Storage& s, int64_t rows, int64_t cols) {
    if (!s.fp8() || s.granularity == PER_TENSOR) return 0;
    return s.scale_rows(rows) * round_up(s.scale_cols(cols), s.granularity == PER_128x128 ? 4 : 1);
}
inline int64_t operand_bytes(const Storage& s, int64_t rows, int64_t cols) {
    return s.code_bytes(rows, cols) + operand_scale_count(s, rows, cols) * info(s.scale_format).bytes;
}

// Statistics of one input row of a norm. RMSNorm takes the mean as 0, so that rstd is 1 / rms.
struct alignas(8) RowStatistics {
    float mean, rstd;  // rstd = 1 / sqrt(variance + eps)
};

// A norm layer. Its output is not stored: whatever reads the output computes it from `in` and the row
// statistics. Forward does not save the row statistics for backward either: norm_backward() computes them
// anew before backward needs the norm's output. So all norms of a model may write them to one place.
struct Norm {
    TensorRef in;                   // (N, C) in the compute dtype, or in groups
    const void* weight;             // (C) compute dtype
    const void* bias;               // (C) compute dtype; null for RMSNorm
    RowStatistics* row_statistics;  // (N)
    bool rms;
    float eps;
};

// A tensor that is computed where it is needed: each kernel that reads it computes its elements on the fly
// from stored tensors. So the tensor itself is stored only as the operand of a GEMM. A LazyTensor says what
// is to be computed; a LazyProducer (gpu/lazy_tensor.cuh) computes it. The simplest LazyTensor is a stored
// tensor.
enum class LazyOp : uint8_t { Stored, Norm, Activation, ActivationBackward };

struct LazyTensor {
    LazyOp op;
    int64_t rows, cols;  // the shape of the result
    TensorRef input{};   // what it is computed from: the stored tensor, the norm's input norm.in, or gate_up
    TensorRef dact{};    // ActivationBackward: the gradient of the activation's output
    bool gated = false;  // the activation is SiLU(gate) x up, not GELU
    Norm norm{};         // LazyOp::Norm
};

// A stored tensor (rows, cols), in the compute dtype or in groups.
inline LazyTensor lazy_stored(const TensorRef& x) {
    return {.op = LazyOp::Stored, .rows = x.rows, .cols = x.cols, .input = x};
}
// The output (N, C) of a norm, whose row statistics are known.
inline LazyTensor lazy_norm(const Norm& n) {
    return {.op = LazyOp::Norm, .rows = n.in.rows, .cols = n.in.cols, .input = n.in, .norm = n};
}
// gate_up (N, 2F) = [gate | up], or (N, F) where nothing is gated, in the compute dtype or in groups. The
// result is (N, F): SiLU(gate) x up, or GELU.
inline LazyTensor lazy_activation(bool gated, const TensorRef& gate_up) {
    return {.op = LazyOp::Activation,
            .rows = gate_up.rows,
            .cols = gate_up.cols / (gated ? 2 : 1),
            .input = gate_up,
            .gated = gated};
}
// dact (N, F), in the compute dtype, is the gradient of the activation's output. The result is the gradient
// of gate_up, in the same shape.
inline LazyTensor lazy_activation_backward(bool gated, const TensorRef& gate_up, const TensorRef& dact) {
    return {.op = LazyOp::ActivationBackward,
            .rows = gate_up.rows,
            .cols = gate_up.cols,
            .input = gate_up,
            .dact = dact,
            .gated = gated};
}

// ===========================================================================================================
// 2. Quantizers: section 5 of the paper (coat.cu)
//
// Scaling per tensor takes two passes, compute_amax() and quantize(). A kernel that has the values at hand
// anyway updates the amax itself, which saves the first pass. Each function below reads x; "any" is any
// LazyTensor. "Codes" are row-major, transposed, or both: those whose pointers in the Operand are not null.
//
//   function                      x                       writes
//   compute_amax()                any                     the amax of x
//   quantize()                    any                     FP8 codes
//   store_values()                any                     values in BF16 or FP32
//   write_operand()               any                     what quantize() or store_values() writes
//   quantize_groups()             in BF16                 groups; with write_back also x
//   quantize_activation_input()   gate and up, in BF16    groups, and the amax of the activation's output
//
// In place: row-major output may be written over the stored tensor from which x is computed (x.input), if
// elements have as many bytes in both. For example the codes of dgate_up may be written over the groups of
// gate_up. (A thread loads its elements before it stores what it makes of them.) The output may also have
// more rows than x: the other rows keep what they hold.
// quant_stats: what quantizing loses is added to it; it may be null.

// x_amax_out->amax = max(x_amax_out->amax, |x|). x must not be in FP32. The caller clears the amaxes of
// activations and gradients before every micro-batch; adamw() clears those of weights. With delayed scaling
// (te): the caller clears the former before every step, not before every micro-batch.
void compute_amax(const LazyTensor& x, AmaxAndScale* x_amax_out, cudaStream_t stream);

// Computes x and writes its FP8 codes, the operand of a GEMM, as out says. x may be computed from BF16
// tensors and from groups, but not from FP32 tensors. (quantize_groups() writes groups.)
//   per tensor               The scale is computed from out.tensor.amax_and_scale->amax.
//   per row, 1x128, 128x128  The scales are computed first, from x. They are stored in out.block_scales and
//                            out.transposed_block_scales, and the amax of x in out.tensor.amax_and_scale.
// With delayed scaling (te), which out.delayed says: the scale per tensor is that of the history.
void quantize(const LazyTensor& x, const Operand& out, QuantStats* quant_stats, cudaStream_t stream);

// Computes x and stores its values in out, in FP32, or rounded to BF16.
void store_values(const LazyTensor& x, const TensorRef& out, cudaStream_t stream);

// Computes x and writes it as a GEMM of the recipe reads it: by quantize() if out is FP8, else by
// store_values().
void write_operand(const LazyTensor& x, const Operand& out, QuantStats* quant_stats, cudaStream_t stream);

// Stores x (BF16) in 1x16 groups. With `write_back`, x becomes what the groups hold, rounded to BF16:
// attention then computes with these values, as backward does.
void quantize_groups(const TensorRef& x, const TensorRef& groups, bool write_back, QuantStats* quant_stats,
                     cudaStream_t stream);
// Stores the input x of an activation in 1x16 groups: [gate | up] (N, 2F), or (N, F). The activation's
// output, computed from the groups, becomes an operand of the next GEMM. amax_out gets its amax, which is
// found in the same pass.
void quantize_activation_input(bool gated, const TensorRef& x, const TensorRef& groups,
                               AmaxAndScale* amax_out, QuantStats* quant_stats, cudaStream_t stream);

// ===========================================================================================================
// 3. Sums over rows, for the gradients of biases and of the weights of norms (gpu/column_sums.cu)
//
// Such a sum is taken in two stages. First some blocks each add up a part of the rows: these are the partial
// sums, one row of the workspace for each part. Then the partial sums are added up.

// The number of partial sums that add_column_sums() takes of a column.
inline constexpr int COLUMN_PARTIALS = 128;

// gradient (cols) += the column sums of x. amax_out gets the amax of x in the same pass. workspace:
// (COLUMN_PARTIALS, cols) floats.
void add_column_sums(const LazyTensor& x, const TensorRef& gradient, float* workspace, AmaxAndScale* amax_out,
                     cudaStream_t stream);

// add_column_sums() and write_operand(), in one pass over x if that is possible (coat.cu, part 5). The bits
// are the same as those of the two.
void write_operand_and_add_column_sums(const LazyTensor& x, const Operand& out, const TensorRef& gradient,
                                       float* workspace, QuantStats* quant_stats, cudaStream_t stream);

// The second stage alone, for kernels that take partial sums of their own: gradient (n) += the sum of the
// rows of partials (rows, n). `second` is another gradient (n), whose partials (rows, n) lie after those of
// the first, or no tensor.
void reduce_partials(const float* partials, int64_t rows, const TensorRef& gradient, cudaStream_t stream,
                     const TensorRef& second = {});

// ===========================================================================================================
// 4. The optimizer: section 4 of the paper (adamw.cu; other moments than COAT's: gpu/other_optimizers.cu)
//
// Words for parts of the parameters, from small to large. With one rank, a shard is a whole parameter, and
// the rank's order is the flat order. (A related part, the module, is explained in gpu/memory_layout.h.)
//   shard unit    64 moment groups of a parameter, which is cut only between shard units (model.h)
//   shard         what this rank owns of one parameter
//   bucket        the parameters whose gradients backward completes at the same time (Param::bucket)
//   flat order    all parameters one after the other (Param::flat_offset), each padded to whole moment
//                 groups; the padding stays zero
//   rank's order  all shards of this rank, one after the other, each padded in the same way. In this order
//                 lie its weights, masters, moments and sums of gradients

// BF16 weights have the int16 remainders of their FP32 masters beside them, in the same order. Without
// remainders there are no masters, and the optimizer rounds new weights stochastically. In the fp32 recipe
// the weights are the masters.
struct Weights {
    void* values;         // BF16 or FP32: all elements of the rank's order
    int16_t* remainders;  // the same elements; null if the weights are FP32, or have no master
    Format format;
};

// One moment of one parameter. What `max` and `k` point to depends on how the moment is stored:
//   FP8 in moment groups              the moment scaling of each moment group (formats.h)
//   FP8 or FP16, one scale a tensor   max[0] is the amax that decodes the codes. During an update the
//                                     amax of the new moment is found in max[1]
//   FP32, BF16                        both are null
struct MomentRef {
    void* data;  // the shard's moments, padded to whole moment groups, in `format`; padding stays zero
    float* max;
    float* k;  // null without expansion
    Format format;
};

// The part of one parameter that this rank updates. With one rank it is the whole parameter. The device has a
// table of these.
struct Shard {
    int64_t rank_offset, size;  // elements before the shard in the rank's order, and its own elements
    MomentRef m, v;
    bool decays;
    AmaxAndScale* amax_out;  // gets the amax of the new weights; may be null
    // Two numbers that make results independent of the number of ranks. The first is for random bits: an
    // element's number in the flat order minus its number in the rank's order.
    int64_t flat_minus_rank_offset = 0;
    // The second is for the order in which squares of gradients are summed: the number of shard units that
    // come before this shard in the flat order.
    int64_t units_before_shard = 0;
};

// What a step knows of its gradients, on the device. It is cleared before the step.
struct GradientState {
    double sum_of_squares;  // of all buckets so far, before clipping
    double norm;            // the root of sum_of_squares
    float clip_factor;      // what clipping multiplies the gradients by: limit / norm, or 1
    // Not 0: the step is skipped (StepResult::skipped of model.h says when). Then nothing is updated, and the
    // next step has the same bias correction. With --gradients none: earlier buckets already were updated.
    uint32_t skip;
};

// Whole shards, with their gradients: all shards of this rank, or those of a bucket.
struct ShardGradients {
    const Shard* shards;  // (count), on the device
    int count;
    Range elements;         // the elements of these shards, in the rank's order
    const void* gradients;  // the gradients of these elements
    Format format;          // the format of the gradients: FP32, or that of the weights
};

// Updates shards by AdamW. Every shard's m.format is optimizer.m or FP32, and v's likewise. rounding_key is
// that of this step (step.h), for weights without a master. The shards' amaxes become those of the new
// weights. Where state->skip is set, everything stays as it was.
void adamw(const AdamWOptions& options, const Optimizer& optimizer, const ShardGradients& g,
           const Weights& weights, uint64_t rounding_key, const GradientState* state, cudaStream_t stream);

// ===========================================================================================================
// 5. Residual stream and norms (gpu/norm.cu)

// A layer has two halves, attention and MLP. What a half adds to the residual stream is its branch: the
// output of its last linear layer.
//
// What residual_add() and embed() write: the sum, which is the new residual stream (x_out); the input of the
// norm that reads this stream next, in groups or rounded (next_norm.in); the row statistics of this norm
// (next_norm.row_statistics); and the amax of its output (norm_output_amax_out). The norm reads next_norm.in,
// so the row statistics and the amax are computed from what is stored there. How the fields are set:
//
//   field                  norms 1 and 2 in coat   norms 1 and 2 in bf16         final norm, in all recipes
//   x_out                  the sum                 null, because next_norm.in    null, likewise
//                                                  holds the same values
//   next_norm.in           groups                  the sum                       the sum
//   norm_output_amax_out   an amax                 null: nothing is quantized    null, likewise
struct ResidualOutput {
    TensorRef x_out;  // (N, C) the sum, rounded. It may be the memory of an operand of the sum
    Norm next_norm;   // the norm that reads the sum
    AmaxAndScale* norm_output_amax_out;  // the amax of the norm's output
};
// The residual sum x + branch, both (N, C). x is the residual stream.
void residual_add(const TensorRef& x, const TensorRef& branch, const ResidualOutput& out,
                  cudaStream_t stream);
// The embedding, where the residual stream begins: row r is embedding[tokens[r]] + positions[r % T]. tokens:
// (N). positions: the learned positions (max_T, C), or no tensor.
void embed(const TensorRef& embedding, const TensorRef& positions, const int32_t* tokens, int64_t T,
           const ResidualOutput& out, cudaStream_t stream);

// The gradients that the backward pass of a norm reads (dy and dresidual_in), writes (dresidual_out and its
// amax) and adds to (dweight and dbias).
struct NormGradients {
    TensorRef dy;                      // (N, C) the gradient of the norm's output
    TensorRef dresidual_in;            // (N, C) the gradient of the residual stream, or no tensor
    TensorRef dresidual_out;           // (N, C) dresidual_in + the gradient of the norm's input, rounded
    AmaxAndScale* dresidual_amax_out;  // the amax of dresidual_out
    TensorRef dweight, dbias;          // (C); dbias is no tensor for RMSNorm
};
// The backward pass of a norm, and of the residual sum before it. dresidual_out may be the memory of
// dresidual_in, or of n.in if that is in the compute dtype. workspace:
// norm_backward_workspace_floats(n.in.cols) floats. The function computes the row statistics of the norm
// anew. So afterwards lazy_norm(n) may be read (unless dresidual_out has overwritten n.in), until another
// norm writes its statistics to the same place.
void norm_backward(const Norm& n, const NormGradients& g, float* workspace, cudaStream_t stream);
int64_t norm_backward_workspace_floats(int64_t C);

}  // namespace coat::gpu
