// gpu/tensors.h - the tensors that operators on the GPU are given, and the rules that hold for all operators.
// The operators are declared beside their kernels: coat.h, adamw.h, gpu/norm.h, gpu/column_sums.h,
// gpu/layers.h, gpu/attention.h, gpu/gemm.h and gpu/gradient_norm.h.
//
// What is said here of scales holds for COAT. The recipes te, rowwise and deepseek, with which COAT is
// compared, have other scales: gpu/other_scaling.h.
//
//   1. tensors as they are stored
//   2. tensors that are computed where they are needed
//   3. the rules that hold for all operators
//
// The words group, moment group, scale and scale block are those of common/formats.h.
#pragma once
#include "../common/formats.h"
#include "cuda.h"

namespace coat::gpu {

// ===========================================================================================================
// 1. Tensors as they are stored

// The amax of a tensor, on the device, and the scale that follows from it if the tensor has a single scale.
// First a kernel finds the amax. Then the kernel that makes the codes writes the scale, for the GEMM that
// reads the codes.
//
// A GEMM wants `scale` aligned to 16 bytes. Therefore it is the first member, and the struct has 16 bytes.
struct alignas(16) TensorScale {
    float scale;  // amax / FMAX; codes are multiplied by it
    // The largest |x| so far. atomicMax raises it. It compares the bits of |x| as integers, which have the
    // order of |x|, with NaN above infinity. So amax is NaN if an x is NaN.
    float amax;
    float delayed_scale;  // for the recipe te
};

// Refers to a tensor on the GPU. In BF16 and FP32 its elements are values. In FP8 they are codes, and a value
// is its code times a scale. Where the scale is depends on `format`:
//   one for the tensor   tensor_scale->scale
//   one for each group   group_scales
// Null data means "no tensor".
struct TensorRef {
    void* data;  // (rows, cols) elements of format.element_format
    int64_t rows, cols;
    TensorFormat format;
    TensorScale* tensor_scale = nullptr;  // of an operand of a GEMM; it is read if the format is FP8
    uint16_t* group_scales = nullptr;     // in groups: (rows, cols / 16) in BF16; otherwise null
};

// The rows [first, first + n) of a tensor. (This can wait: model.cu.)
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
// A GEMM that sums along columns of the tensor reads transposed codes (common/formats.h, at its end):
//   fprop   x row-major,   w row-major
//   dgrad   g row-major,   w transposed
//   wgrad   g transposed,  x transposed
// An operand has the forms that its GEMMs read; the pointer of the other one is null. Both forms have the
// same scale, tensor.tensor_scale->scale. (Operands in BF16 and FP32 are always row-major.)
struct Operand {
    TensorRef tensor;
    void* transposed = nullptr;
    // For other recipes than COAT (these can wait: gpu/other_scaling.h):
    float* block_scales = nullptr;             // rowwise, deepseek: the scales of the row-major codes
    float* transposed_block_scales = nullptr;  // rowwise, deepseek: those of the transposed codes
    bool delayed = false;                      // te: scaling is delayed
};

// ===========================================================================================================
// 2. Tensors that are computed where they are needed

// Statistics of one input row of a norm. RMSNorm takes the mean as 0, so that rstd is 1 / rms.
struct alignas(8) RowStatistics {
    float mean, rstd;  // rstd = 1 / sqrt(variance + eps)
};

// A norm layer. Its output is not stored: a kernel that needs the output computes it from `input` and the row
// statistics. The row statistics are temporary. Forward writes them for the kernels that come next, and
// norm_backward() (gpu/norm.h) writes them again. So all norms of a model can share one array of them.
struct Norm {
    TensorRef input;                // (N, C) in the compute format, or in groups
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
// A LazyTensor says what is to be computed; a LazyProducer (gpu/lazy_tensor.cuh) computes it. A stored tensor
// can be a LazyTensor, too, whose elements are loaded. So an operator needs only one kind of argument.
enum class LazyOp : uint8_t { Load, Norm, Activation, ActivationBackward };

struct LazyTensor {
    LazyOp op;
    int64_t rows, cols;  // the shape of the result
    TensorRef input{};   // what kernels load: the stored tensor, the norm's input, or gate_up
    // Norm: these fields are those of struct Norm.
    const RowStatistics* row_statistics = nullptr;
    const void *weight = nullptr, *bias = nullptr;
    // Activation and ActivationBackward:
    bool gated = false;  // the activation is SiLU(gate) x up, not GELU
    TensorRef dact{};    // ActivationBackward: the gradient of the activation's output
};

// The elements of x, as they are stored: (rows, cols), in the compute format or in groups.
inline LazyTensor lazy_load(const TensorRef& x) {
    return {.op = LazyOp::Load, .rows = x.rows, .cols = x.cols, .input = x};
}
// The output (N, C) of a norm, whose row statistics are known.
inline LazyTensor lazy_norm(const Norm& n) {
    return {.op = LazyOp::Norm,
            .rows = n.input.rows,
            .cols = n.input.cols,
            .input = n.input,
            .row_statistics = n.row_statistics,
            .weight = n.weight,
            .bias = n.bias};
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
            .gated = gated,
            .dact = dact};
}

// ===========================================================================================================
// 3. The rules that hold for all operators
//
//   - An operator is put on the given CUDA stream. It does not wait, and it allocates no memory.
//   - The rows of an activation or a gradient are tokens; those of a weight are its outputs.
//   - The number of columns is a multiple of 16. So is the number of rows where transposed codes are made.
//     Pointers are 16-byte aligned.
//   - Tensors are in the compute format unless a comment says otherwise: BF16; in the recipe fp32, FP32.
//   - A parameter's gradient is in BF16 or FP32 (gradient_format() of common/model.h). An operator that
//     computes a gradient adds to what is there. (A GEMM can also overwrite it: gpu/gemm.h.)
//   - An argument whose name ends with amax_to_raise points to an amax: usually the field `amax` of a
//     TensorScale. The rest of the name says of which tensor. The operator raises the amax to the tensor's
//     largest |x|, if that is larger. It does not clear the amax before (coat.h says who does). If the
//     argument is null, nobody needs this amax.
//   - `workspace` is temporary memory, which the caller provides. Afterwards it may be used for anything.
//   - A TensorRef refers to a tensor, as a pointer does. A `const TensorRef&` therefore does not say that the
//     tensor is only read: the comment of the operator says what is written.
//   - The same input gives the same bits every time on the same kind of GPU, because every sum has a fixed
//     order. (The order may depend on the number of multiprocessors. Atomics are used only where order does
//     not matter.)
//   - Shapes, pointers and formats are the caller's duty. Some wrong formats are noticed: then an Error
//     is thrown.

}  // namespace coat::gpu
