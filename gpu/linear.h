// gpu/linear.h - a linear layer of the model, y = x w^T + bias, with x (N, in), w (out, in) and y (N, out):
// its three GEMMs (gpu/gemm.h), and how their operands are made.
//
// x8, w8 and g8 are the input, the weight and the gradient of the output as a GEMM reads them. The 8 is that
// of FP8, which is the case that this file is about: in recipes without FP8 they are BF16 or FP32 values. An
// FP8 GEMM reads codes along the dimension that it reduces over, so each operand has two forms:
//
//   GEMM    computes       reads row-major    reads transposed
//   fprop   y = x w^T      x8, w8
//   dgrad   dx = g w       g8                 w8
//   wgrad   dw = g^T x                        g8, x8
//
// How long they live:
//   x8   for one GEMM. Forward keeps what x is computed from (LazyTensor), and the amax of x; wgrad makes x8
//        again from these.
//   w8   for one GEMM; or, in a cache, for a step.
//   g8   for dgrad and wgrad. The caller makes it, with make_g8_and_dbias(), and decides when its memory is
//   given back.
//
// Who computes the amaxes from which the scales follow is a table in model.cu.
#pragma once
#include <optional>

#include "gemm.h"
#include "sharding.h"

namespace coat::gpu {

// What the linear layers of a model share.
struct LinearContext {
    Device& device;
    const Parameters& parameters;
    const Scales& scales;
    Sharding& sharding;
    Gemms& gemms;
    const bool caches_weights;  // whether w8 is FP8 and made once per step, in both forms
    // Whether wgrad writes dw, as in the first micro-batch of a step. In later ones it adds to dw. The model
    // sets this before each micro-batch.
    bool overwrites_gradients = true;
    const LinearFormats formats = linear_formats(device.setup);

    // Whether the amax of an operand is needed before its codes can be made: if x, w and g have one scale per
    // tensor, which comes just in time; or is delayed, and some history of amaxes is still empty.
    bool needs_amax_before_codes() const {
        const bool per_tensor = formats.x.fp8() && formats.x.granularity == PER_TENSOR;
        return per_tensor && (!scales.delayed() || scales.any_empty_history);
    }
};

class LinearLayer {
public:
    // weight_index: of the parameter w, in Parameters::params.
    LinearLayer(LinearContext& context, size_t weight_index);

    // --- The three GEMMs
    // y = x w^T + bias. An FP8 GEMM writes a multiple of 16 rows: y must have memory for these.
    void fprop(const LazyTensor& x, const TensorRef& y);
    void dgrad(const Operand& g8, const TensorRef& dx);  // dx = g w
    void wgrad(const Operand& g8, const LazyTensor& x);  // dw = g^T x, or dw += g^T x

    // --- g8
    // Known: an earlier kernel has left the amax of g in g_amax_out(). Unknown: it is computed here first.
    enum class AmaxIs : uint8_t { Known, Unknown };
    // Makes g8 of g (N, out), in memory that is taken in the caller's scope, and adds the column sums of g to
    // the gradient of the bias. In recipes without FP8, a g that is stored is its own operand and takes no
    // memory.
    Operand make_g8_and_dbias(const LazyTensor& g, AmaxIs amax);
    // The same in two parts, for dgate_up alone: it outlives dact, from which it is computed, and memory is a
    // stack. allocate_g8() takes the memory of g8 before the memory of dact is taken. write_g8_and_dbias()
    // writes g8 when g can be computed. codes: where the row-major codes go; null: into memory that is taken,
    // too.
    Operand allocate_g8(int64_t N, void* codes = nullptr) const;
    void write_g8_and_dbias(const LazyTensor& g, AmaxIs amax, const Operand& g8);

    // --- w8, if weights are cached
    void make_cached_w8();

    // --- Amaxes: where a kernel that has the values of x or g leaves their amax; null if none is needed.
    TensorScale* x_amax_out() const { return context_.needs_amax_before_codes() ? x_scale_ : nullptr; }
    TensorScale* g_amax_out() const { return context_.needs_amax_before_codes() ? g_scale_ : nullptr; }
    // For an x whose amax no earlier kernel has computed.
    void compute_x_amax_if_needed(const LazyTensor& x) const { compute_amax_if_wanted(x, x_amax_out()); }

    // The bucket to which the gradients of w and of the bias belong.
    int64_t bucket() const { return context_.parameters.params[weight_index_].bucket; }

private:
    enum class Form : uint8_t { RowMajor, Transposed, Both };  // what of an operand is made

    LinearContext& context_;
    const size_t weight_index_;               // of the parameter (out, in), in Parameters::params
    const std::optional<size_t> bias_index_;  // of the parameter (out), if there is one
    const int64_t out_, in_;
    const int64_t linear_layer_index_;  // in the order of forward
    // Of each operand the amax and, if it has one scale per tensor, the scale. (In other granularities the
    // amax serves only to notice infinity and NaN.)
    TensorScale* const x_scale_;
    TensorScale* const w_scale_;
    TensorScale* const g_scale_;
    Operand cached_w8_{};  // no tensor, if weights are not cached

    Arena& arena() const { return context_.device.arena; }
    cudaStream_t stream() const { return context_.device.stream; }

    Operand allocate_operand(LinearOperand which, int64_t rows, Form form, void* codes = nullptr) const;
    void fill_operand(LinearOperand which, const LazyTensor& x, const Operand& x8) const;
    Operand make_operand(LinearOperand which, const LazyTensor& x, Gemm reader) const;
    Operand w8_for(Gemm reader) const;
    void compute_amax_if_wanted(const LazyTensor& x, TensorScale* amax_out) const;
    void compute_w_amax_if_needed() const;
    void add_bias_gradient(const LazyTensor& g, TensorScale* amax_out) const;
    void quantize_and_add_bias_gradient(const LazyTensor& g, const Operand& g8) const;
};

}  // namespace coat::gpu
