// gpu/operators.h - what the kernels do, for those who call them: the tensors that they are given, and COAT's
// operators (quantizers, column sums, the optimizer, norms), each with the shapes and formats that it
// accepts. Other operators are in gpu/layers.h, gpu/attention.h, gpu/gemm.h and gpu/parameter_kernels.h.
//
// What is said here of scales holds for COAT. The recipes te, rowwise and deepseek, with which COAT is
// compared, have other scales: gpu/other_scaling.h.
//
// Rules for all operators:
//   - An operator is put on the given CUDA stream. It does not wait, and it allocates no memory.
//   - The rows of an activation or a gradient are tokens; those of a weight are its outputs.
//   - The number of columns is a multiple of 16. So is the number of rows where transposed codes are made.
//     Pointers are 16-byte aligned.
//   - Tensors are in the compute format unless a comment says otherwise: BF16; in the recipe fp32, FP32.
//   - An operator that computes a parameter's gradient adds to it. It is in BF16 or FP32 (gradient_format()
//     of common/model.h). (A GEMM can also overwrite it: gpu/gemm.h.)
//   - An argument whose name ends with amax_out is the place of an amax: usually the field `amax` of a
//     TensorScale (below). The rest of the name says of which tensor. The operator sets the amax to the
//     larger of its old value and the tensor's largest |x|. If the argument is null, nobody needs this amax.
//   - `workspace` is temporary memory, which the caller provides. Afterwards it may be used for anything.
//   - A TensorRef refers to a tensor, as a pointer does. A `const TensorRef&` therefore does not say that the
//     tensor is only read: the comment of the operator says what is written.
//   - The same input gives the same bits every time on the same kind of GPU, because every sum has a fixed
//     order. (The order may depend on the number of multiprocessors. Atomics are used only where order does
//     not matter.)
//   - Shapes, pointers and formats are the caller's duty. Of wrong formats some are noticed, with an Error.
//
// The words group, moment group, scale and scale block are those of common/formats.h.
#pragma once
#include "../common/ranks.h"
#include "cuda.h"

namespace coat::gpu {

// ===========================================================================================================
// 1. Tensors

// The amax of a tensor, on the device, and the scale that follows from it if the tensor has a single scale.
// Which function writes a field:
//
//   amax    an earlier kernel, or compute_amax()
//   scale   the function that writes the codes, as amax / FMAX: quantize_operand(), and for gradients of
//           linear layers with a bias write_operand_and_add_column_sums()
//
// `scale` is the first member, and the struct has 16 bytes, because a GEMM reads `scale` and wants it aligned
// to 16 bytes.
struct alignas(16) TensorScale {
    float scale;  // codes are multiplied by it
    // The largest |x| so far. atomicMax raises it. It compares the bits of |x| as integers, which have the
    // order of |x|, with NaN above infinity. So amax is NaN if an x is NaN.
    float amax;
    float delayed_scale;  // for the recipe te
    float unused;
};

// Refers to a tensor on the GPU. In BF16 and FP32 its elements are values. In FP8 they are codes, and a value
// is its code times a scale. Where the scale is depends on `format`:
//   one for the tensor   tensor_scale->scale
//   one for each group   group_scales
// Null data means "no tensor", except in an Operand (below): it may have transposed codes alone.
struct TensorRef {
    void* data;  // (rows, cols) elements of format.element_format
    int64_t rows, cols;
    TensorFormat format;
    TensorScale* tensor_scale = nullptr;  // of an FP8 operand of a GEMM; otherwise null
    uint16_t* group_scales = nullptr;     // in groups: (rows, cols / 16) in BF16; otherwise null
};

// The rows [first, first + n) of a tensor.
inline TensorRef row_slice(const TensorRef& t, int64_t first, int64_t n) {
    TensorRef slice = t;
    slice.data = static_cast<uint8_t*>(t.data) + t.format.bytes_without_scales(first, t.cols);
    slice.rows = n;
    if (t.group_scales) slice.group_scales += t.format.scale_count(first, t.cols);
    return slice;
}

// A tensor as a GEMM (matrix multiplication) reads it: x, w or g of a linear layer. FP8 codes have two forms:
//   row-major    tensor.data (rows, cols)
//   transposed   (cols, rows)
// Transposed codes exist because a Hopper GPU's FP8 GEMM wants the dimension that it sums over contiguous in
// memory. So a GEMM that sums along columns of the tensor (common/formats.h, at its end) reads transposed
// codes:
//   fprop   x row-major,   w row-major
//   dgrad   g row-major,   w transposed
//   wgrad   g transposed,  x transposed
// An operand has the forms that its GEMMs read; the pointer of the other one is null. Both forms have the
// same scale, tensor.tensor_scale->scale. (Operands in BF16 and FP32 are always row-major.)
struct Operand {
    TensorRef tensor;
    void* transposed = nullptr;
    // For other recipes than COAT (gpu/other_scaling.h):
    float* block_scales = nullptr;             // rowwise, deepseek: the scales of the row-major codes
    float* transposed_block_scales = nullptr;  // rowwise, deepseek: those of the transposed codes
    bool delayed = false;                      // te: scaling is delayed
};

// The number of block scales of codes (rows, cols), with the padding of 128x128 scales. It is 0 in COAT.
inline int64_t operand_scale_count(const TensorFormat& s, int64_t rows, int64_t cols) {
    if (!s.fp8() || s.granularity == PER_TENSOR) return 0;
    return s.scale_rows(rows) * round_up(s.scale_cols(cols), s.granularity == PER_128x128 ? 4 : 1);
}
inline int64_t operand_bytes(const TensorFormat& s, int64_t rows, int64_t cols) {
    return s.bytes_without_scales(rows, cols) +
           operand_scale_count(s, rows, cols) * info(s.scale_format).bytes;
}

// Statistics of one input row of a norm. RMSNorm takes the mean as 0, so that rstd is 1 / rms.
struct alignas(8) RowStatistics {
    float mean, rstd;  // rstd = 1 / sqrt(variance + eps)
};

// A norm layer. Its output is not stored: a kernel that needs the output computes it from `in` and the row
// statistics. All norms of a model may have the same memory for their row statistics. Forward writes them
// there for the next kernels. norm_backward() writes them again, before backward needs the norm's output.
struct Norm {
    TensorRef in;                   // (N, C) in the compute format, or in groups
    const void* weight;             // (C) compute format
    const void* bias;               // (C) compute format; null for RMSNorm
    RowStatistics* row_statistics;  // (N)
    bool rms;
    float eps;
};

// A tensor that is computed where it is needed: each kernel that reads it computes its elements on the fly
// from stored tensors. For example, the output of a norm is not stored. The kernel that makes its FP8 codes,
// which a GEMM reads, computes the norm:
//
//   const LazyTensor x = lazy_norm(norm);            // computes nothing
//   quantize_operand(x, operand, nullptr, stream);   // launches a kernel. It loads the norm's input,
//                                                    // computes x in registers, and stores the codes of x
//
// A LazyTensor says what is to be computed; a LazyProducer (gpu/lazy_tensor.cuh) computes it. Stored tensors
// are LazyTensors, too, so that an operator needs only one kind of argument.
enum class LazyOp : uint8_t { Stored, Norm, Activation, ActivationBackward };

struct LazyTensor {
    LazyOp op;
    int64_t rows, cols;  // the shape of the result
    TensorRef input{};   // what kernels load: the stored tensor, the norm's input, or gate_up
    TensorRef dact{};    // ActivationBackward: the gradient of the activation's output
    bool gated = false;  // the activation is SiLU(gate) x up, not GELU
    Norm norm{};         // LazyOp::Norm; its field `in` is the same tensor as `input`
};

// A stored tensor (rows, cols), in the compute format or in groups.
inline LazyTensor lazy_stored(const TensorRef& x) {
    return {.op = LazyOp::Stored, .rows = x.rows, .cols = x.cols, .input = x};
}
// The output (N, C) of a norm, whose row statistics are known.
inline LazyTensor lazy_norm(const Norm& n) {
    return {.op = LazyOp::Norm, .rows = n.in.rows, .cols = n.in.cols, .input = n.in, .norm = n};
}
// gate_up (N, 2F) = [gate | up], or (N, F) where nothing is gated, in the compute format or in groups. The
// result is (N, F): SiLU(gate) x up, or GELU.
inline LazyTensor lazy_activation(bool gated, const TensorRef& gate_up) {
    return {.op = LazyOp::Activation,
            .rows = gate_up.rows,
            .cols = gate_up.cols / (gated ? 2 : 1),
            .input = gate_up,
            .gated = gated};
}
// dact (N, F), in the compute format, is the gradient of the activation's output. The result is the gradient
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
// Scaling per tensor takes two passes, compute_amax() and quantize_operand(). A kernel that has the values at
// hand anyway updates the amax itself, which saves the first pass. Each of these functions reads a tensor x:
//
//   function                      what x is                        what the function writes
//   compute_amax()                a LazyTensor of BF16 or groups   the amax of x
//   quantize_operand()            a LazyTensor of BF16 or groups   FP8 codes
//   store_values()                any LazyTensor                   values in BF16 or FP32
//   write_operand()               any LazyTensor; if the operand   FP8 codes, or values in BF16 or FP32
//                                 is in FP8, of BF16 or groups
//   quantize_activation_input()   gate and up, in BF16             groups, and the amax of the activation's
//                                                                  output
//   quantize_groups()             a tensor in BF16                 groups
//
// "Of BF16 or groups" means that x is computed from tensors in BF16 or in groups, not in FP32.
//
// Three rules hold for all of them:
//   - Row-major output may overwrite x.input, the stored tensor from which x is computed, if both have the
//     same bytes per element. For example the codes of dgate_up may overwrite the groups of gate_up. (A
//     thread loads its elements before it stores what it makes of them.)
//   - The output may have more rows than x. The other rows keep what they hold.
//   - What quantizing loses is added to *quant_stats, for the report (gpu/quant_report.h). It may be null.

// *x_amax_out = max(*x_amax_out, |x|). The caller clears the amaxes of activations and gradients
// before every micro-batch; adamw() clears those of weights.
void compute_amax(const LazyTensor& x, float* x_amax_out, cudaStream_t stream);

// Computes x and writes its FP8 codes, the operand of a GEMM: row-major, transposed, or both, whichever
// pointers of `out` are not null. The scale is computed from out.tensor.tensor_scale->amax.
void quantize_operand(const LazyTensor& x, const Operand& out, QuantStats* quant_stats, cudaStream_t stream);

// Computes x and stores its values in out, in FP32, or rounded to BF16.
void store_values(const LazyTensor& x, const TensorRef& out, cudaStream_t stream);

// Computes x and writes it as a GEMM of the recipe reads it: by quantize_operand() if out is FP8, else by
// store_values().
void write_operand(const LazyTensor& x, const Operand& out, QuantStats* quant_stats, cudaStream_t stream);

// Stores the input x of an activation in 1x16 groups: [gate | up] (N, 2F) if it is gated, else (N, F). In the
// same pass it finds the amax of the activation's output, as it is computed from the groups: this output
// becomes an operand of the next GEMM.
void quantize_activation_input(bool gated, const TensorRef& x, const TensorRef& groups,
                               float* activation_amax_out, QuantStats* quant_stats, cudaStream_t stream);
// Stores x (BF16) in 1x16 groups. With `write_back`, x becomes what the groups hold, rounded to BF16. The
// flag --attention groups needs this: attention then computes with the values that backward will read.
void quantize_groups(const TensorRef& x, const TensorRef& groups, bool write_back, QuantStats* quant_stats,
                     cudaStream_t stream);

// ===========================================================================================================
// 3. Column sums, for the gradients of biases and of the weights of norms (gpu/column_sums.cu)
//
// Column sums are taken in two stages. First, thread blocks each add up a part of the rows; their partial
// sums are the rows of the workspace. Then the partial sums are added up.

// The number of partial sums that add_column_sums() takes of a column.
inline constexpr int COLUMN_PARTIALS = 128;

// gradient (cols) += the column sums of x. In the same pass x_amax_out gets the amax of x. workspace:
// (COLUMN_PARTIALS, cols) floats.
void add_column_sums(const LazyTensor& x, const TensorRef& gradient, float* workspace, float* x_amax_out,
                     cudaStream_t stream);

// Does what add_column_sums() and write_operand() do, with the same bits. It needs only one pass over x where
// that is possible (coat.cu, part 5).
void write_operand_and_add_column_sums(const LazyTensor& x, const Operand& out, const TensorRef& gradient,
                                       float* workspace, QuantStats* quant_stats, cudaStream_t stream);

// The second stage alone, for kernels that take partial sums of their own: gradient (n) += the sum of the
// rows of partials (rows, n). `second` is optional: another gradient (n), whose partials (rows, n) lie after
// those of the first.
void reduce_partials(const float* partials, int64_t rows, const TensorRef& gradient, cudaStream_t stream,
                     const TensorRef& second = {});

// ===========================================================================================================
// 4. The optimizer: section 4 of the paper (adamw.cu; other moments than COAT's: gpu/other_optimizers.cu)
//
// Weights, masters, moments and sums of gradients lie in the flat order: all parameters one after the other
// (Param::flat_offset), each padded to whole moment groups. The padding stays zero. The parameters whose
// gradients backward completes at the same time are a bucket (Param::bucket).
//
// On one GPU, read "shard" as "parameter", and "the rank's order" as "the flat order". With several GPUs, or
// ranks, a shard is what one rank owns of a parameter. The rank's order has all shards of a rank one after
// the other, each padded as in the flat order.

// BF16 weights, and beside them the int16 remainders of their FP32 masters, in the same order. Without
// remainders there are no masters, and the optimizer rounds new weights stochastically. In the recipe fp32
// the weights are the masters.
struct Weights {
    void* values;         // BF16 or FP32: all elements of the rank's order
    int16_t* remainders;  // the same elements; null if the weights are FP32, or have no master
    Format format;
};

// One moment, m or v, of one shard. In COAT it is FP8 codes, and `max` and `k` are the moment scalings of its
// moment groups (common/formats.h). In other optimizers:
//   one scale for the tensor   max[0] is the amax that decodes the codes. During an update the amax of the
//                              new moment is found in max[1]
//   FP32, BF16                 max is null
struct MomentRef {
    void* data;  // in `format`, padded to whole moment groups; padding stays zero
    float* max;
    float* k;  // null without expansion
    Format format;
};

// The part of one parameter that this rank updates: on one GPU, the whole parameter. The device has a table
// of shards.
struct Shard {
    int64_t rank_offset, size;  // elements before the shard in the rank's order, and its own elements
    MomentRef m, v;
    bool decays;
    float* weight_amax_out;  // gets the amax of the new weights; null if nobody needs it

    // Two numbers make results independent of the number of ranks. (They can wait.)
    //   flat_minus_rank_offset   for random bits: an element's number in the flat order minus its number in
    //                            the rank's order. On one GPU it is 0
    //   units_before_shard       for the order in which squares of gradients are summed: the number of shard
    //                            units (common/ranks.h, SHARD_UNIT) before this shard in the flat order
    int64_t flat_minus_rank_offset = 0;
    int64_t units_before_shard = 0;
};

// What a step knows of its gradients, on the device. It is cleared before the step.
struct GradientState {
    double sum_of_squares;  // of all buckets so far, before clipping
    double norm;            // the root of sum_of_squares
    float clip_factor;      // what clipping multiplies the gradients by: limit / norm, or 1
    // Not 0: the step is skipped (StepResult::skipped of common/step.h says when). Then nothing is updated,
    // and the next step has the same bias correction.
    uint32_t skip;
};

// Whole shards, and their gradients: all shards of this rank, or those of a bucket.
struct ShardsToUpdate {
    const Shard* shards;  // (count), on the device
    int count;
    Range elements;         // the elements of these shards, in the rank's order
    const void* gradients;  // the gradients of these elements
    Format format;          // the format of the gradients: FP32, or that of the weights
};

// Updates shards by AdamW, and finds the amaxes of the new weights. If state->skip is set, everything stays
// as it was. The format of a shard's m is optimizer.m_format or FP32, and that of its v is optimizer.v_format
// or FP32. rounding_key: that of this update, for weights without a master.
void adamw(const AdamWOptions& options, const OptimizerFormats& optimizer, const ShardsToUpdate& update,
           const Weights& weights, uint64_t rounding_key, const GradientState* state, cudaStream_t stream);

// ===========================================================================================================
// 5. Residual stream and norms (gpu/norm.cu)

// A layer has two halves, attention and MLP. What a half adds to the residual stream is its branch: the
// output of its last linear layer.
//
// residual_add() and embed() make a sum in FP32: the new residual stream. ResidualSumOutputs says where they
// store the sum, and which norm reads it next. The norm will read next_norm.in. So its row statistics, and
// the amax of its output, are computed from what is stored there. What is written:
//
//   field                      norms 1 and 2 in coat           final norm; in bf16, all norms
//   x_out                      the sum, in BF16                null: next_norm.in has the same values
//   next_norm.in               the sum, in groups              the sum, in BF16
//   next_norm.row_statistics   written                         written
//   norm_output_amax_out       the amax of the norm's output   null: the output is not quantized
struct ResidualSumOutputs {
    TensorRef x_out;              // (N, C) the sum, rounded. It may be the memory of an operand of the sum
    Norm next_norm;               // the norm that reads the sum
    float* norm_output_amax_out;  // the amax of the norm's output
};
// Adds a branch to the residual stream: x + branch, both (N, C).
void residual_add(const TensorRef& x, const TensorRef& branch, const ResidualSumOutputs& out,
                  cudaStream_t stream);
// The embedding, where the residual stream begins: row r is embedding[tokens[r]] + positions[r % T].
//   tokens      (N)
//   positions   the learned positions (max_T, C), or no tensor
void embed(const TensorRef& embedding, const TensorRef& positions, const int32_t* tokens, int64_t T,
           const ResidualSumOutputs& out, cudaStream_t stream);

// What the backward pass of a norm is given besides the norm.
struct NormBackwardTensors {
    // It reads:
    TensorRef dy;            // (N, C) the gradient of the norm's output
    TensorRef dresidual_in;  // (N, C) the gradient of the residual stream, or no tensor
    // It writes:
    TensorRef dresidual_out;    // (N, C) dresidual_in + the gradient of the norm's input, rounded
    float* dresidual_amax_out;  // the amax of dresidual_out
    // It adds to:
    TensorRef dweight, dbias;  // (C); dbias is no tensor for RMSNorm
};
// The backward pass of a norm, and of the residual sum before it. dresidual_out may be the memory of
// dresidual_in, or of n.in if that is in the compute format. workspace:
// norm_backward_workspace_floats(n.in.cols) floats.
//
// The function also writes the row statistics of the norm again. Afterwards lazy_norm(n) may be read, until
// another norm writes its row statistics to the same memory or n.in is overwritten.
void norm_backward(const Norm& n, const NormBackwardTensors& g, float* workspace, cudaStream_t stream);
int64_t norm_backward_workspace_floats(int64_t C);

}  // namespace coat::gpu
