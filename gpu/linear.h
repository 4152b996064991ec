// gpu/linear.h - a linear layer of the model, y = x w^T + bias, with x (N, in), w (out, in) and y (N, out):
// its three GEMMs, and how their operands are made.
//
// g (N, out) is the gradient of y. GEMMs do not read x, w and g themselves, but operands that are made of
// them: x_operand, w_operand and g_operand. These are FP8 codes, row-major or transposed: Operand in
// gpu/tensors.h says which GEMM reads which form. (In recipes without FP8 the operands are BF16 or FP32
// values, in one form.)
//
// When each operand is made:
//
//   x_operand   in forward for fprop, and again in backward for wgrad. In between, what x is computed from is
//               saved, and the amax of x stays in the ScaleTable
//   w_operand   in forward for fprop, and again in backward for dgrad
//   g_operand   once in backward, for dgrad and wgrad. The caller makes it, and decides when its memory is
//               given back
//
// (This can wait: if weights are cached, w_operand is made once per step. With several GPUs, the weight is
// gathered first: gpu/sharding.h.)
//
// Names of functions: allocate_..._operand() takes the memory of an operand from the Arena,
// write_..._operand() writes its elements, and make_..._operand() does both. (Without FP8 it may return the
// stored tensor itself.) An operand lives as long as the Arena::Scope in which its memory was taken.
#pragma once
#include <optional>

#include "gemm.h"
#include "sharding.h"

namespace coat::gpu {

// What the linear layers of a model share.
struct LinearLayerContext {
    GpuContext& gpu_context;
    const ParameterTensors& parameter_tensors;
    const ScaleTable& scale_table;
    Sharding& sharding;
    CublasGemms& gemms;
    // Whether the FP8 codes of all weights are made once per step, in both forms: on one GPU, if a step has
    // several micro-batches and there is enough memory.
    const bool caches_weights;
    const LinearFormats formats = linear_formats(gpu_context.settings);

    // Whether the amaxes of x, w and g must be known before codes are made: if operands are in FP8 and have
    // one scale for the tensor, as in coat. (This can wait: with delayed scaling the answer is yes only as
    // long as some history of amaxes is empty.)
    bool needs_amax_before_codes() const {
        const bool per_tensor = formats.x.is_fp8() && formats.x.granularity == PER_TENSOR;
        return per_tensor && (!scale_table.delayed() || scale_table.any_empty_history);
    }
};

// If a linear layer needs an amax, and no earlier kernel finds it, the linear layer computes it by an extra
// pass over the tensor, just before it makes the codes. This says for which operands. In Llama in coat only
// gate_up_proj makes such a pass, over g. (Two tables in model.cu say which kernel finds which amax.)
struct ExtraAmaxPasses {
    bool over_x = false;  // in fprop()
    bool over_g = false;  // in write_g_operand()
};

class LinearLayer {
public:
    // weight_index: the index of w in ParameterTensors::params.
    LinearLayer(LinearLayerContext& shared, size_t weight_index, ExtraAmaxPasses extra_amax_passes);

    // --- The three GEMMs
    // y = x w^T + bias. An FP8 GEMM writes a multiple of 16 rows: y must have memory for these.
    void fprop(const LazyTensor& x, const TensorRef& y);
    // dx = g w
    void dgrad(const Operand& g_operand, const TensorRef& dx);
    // dw = g^T x; or, if `overwrite` is false, dw += g^T x.
    void wgrad(const Operand& g_operand, const LazyTensor& x, bool overwrite);

    // --- The operand of g
    // Makes the operand of g. (If the layer has a bias, which those of Llama have not, this also adds the
    // column sums of g to dbias, the gradient of the bias.)
    Operand make_g_operand(const LazyTensor& g);
    // The two parts of make_g_operand(), for a caller that computes g from a temporary tensor which the
    // operand outlives: mlp_half_backward() in model.cu.
    //   row_major   where the row-major elements go; if null, memory is allocated for them
    Operand allocate_g_operand(int64_t N, void* row_major) const;
    void write_g_operand(const LazyTensor& g, const Operand& g_operand);

    // --- Amaxes
    // The amax of x, or of g, for the earlier kernel that finds it. Null if there is no such kernel, because
    // the amax is not needed or an extra pass finds it.
    float* x_amax_to_raise() const {
        return extra_amax_passes_.over_x ? nullptr : amax_if_needed(x_tensor_scale_);
    }
    float* g_amax_to_raise() const {
        return extra_amax_passes_.over_g ? nullptr : amax_if_needed(g_tensor_scale_);
    }

    // The bucket (gpu/memory_layout.h) to which the gradients of w and of the bias belong.
    int64_t bucket() const { return shared_.parameter_tensors.params[weight_index_].bucket; }

    // Makes the operand of w, if weights are cached (this can wait).
    void write_cached_w_operand();

private:
    // Which forms of an operand are made (Operand in gpu/tensors.h).
    enum class Form : uint8_t { RowMajor, Transposed, Both };

    LinearLayerContext& shared_;              // what all linear layers share
    const size_t weight_index_;               // the index of w (out, in) in ParameterTensors::params
    const std::optional<size_t> bias_index_;  // the index of the bias (out), if there is one
    const int64_t out_, in_;
    const int64_t linear_layer_index_;  // the number of this layer in the order of forward
    const ExtraAmaxPasses extra_amax_passes_;
    // The amax of each operand, and its one scale. (If rows or blocks have scales, these lie elsewhere. The
    // amax, which gpu/other_scaling.cu then writes, serves only to notice infinity and NaN.)
    TensorScale* const x_tensor_scale_;
    TensorScale* const w_tensor_scale_;
    TensorScale* const g_tensor_scale_;
    Operand cached_w_operand_{};  // null data if weights are not cached

    Arena& arena() const { return shared_.gpu_context.arena; }
    cudaStream_t stream() const { return shared_.gpu_context.stream; }

    // Where the errors of quantizing an operand are added up; null if they are not measured.
    QuantStats* quant_stats_of(OperandKind kind) const {
        return shared_.gpu_context.quant_stats_of(measured_kind(kind));
    }

    // An amax in the ScaleTable; null if it need not be known before codes are made.
    float* amax_if_needed(TensorScale* tensor_scale) const {
        return shared_.needs_amax_before_codes() ? &tensor_scale->amax : nullptr;
    }
    void compute_amax_if_needed(const LazyTensor& source, TensorScale* tensor_scale) const;

    // Whether GEMMs read the stored tensor `source` itself: in recipes without FP8, if it is stored in the
    // compute format.
    bool is_read_as_stored(OperandKind kind, const LazyTensor& source) const;
    Operand allocate_operand(OperandKind kind, int64_t needed_rows, Form form,
                             void* row_major = nullptr) const;
    Operand make_operand(OperandKind kind, const LazyTensor& source, GemmKind gemm) const;
    Operand make_w_operand(GemmKind gemm) const;

    // These serve layers with a bias, and several ranks (they can wait).
    void write_g_operand_and_add_dbias(const LazyTensor& g, const Operand& g_operand);
    void add_dbias(const LazyTensor& g, float* amax_to_compute) const;
    Operand make_w_operand_of_codes(const TensorRef& codes, GemmKind gemm) const;
};

}  // namespace coat::gpu
