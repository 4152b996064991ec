// gpu/linear.h - a linear layer of the model, y = x w^T + bias, with x (N, in), w (out, in) and y (N, out):
// its three GEMMs, and how their operands are made.
//
// g (N, out) is the gradient of y. GEMMs do not read x, w and g themselves, but operands that are made of
// them: x_operand, w_operand and g_operand. These are FP8 codes, row-major or transposed. The table at
// Operand in gpu/tensors.h says which GEMM reads which of these two forms. (In recipes without FP8 the
// operands are BF16 or FP32 values, in one form.)
//
// What is quantized when, and how long the operand lives:
//
//   x_operand   made for one GEMM: in forward for fprop, and in backward for wgrad. In between, the tensors
//               are saved from which x is computed, and the amax of x is in the ScaleTable
//   w_operand   made for one GEMM: in forward for fprop, and in backward for dgrad. (If weights are cached,
//               it is made once per step: `caches_weights`, below)
//   g_operand   made once in backward, for dgrad and wgrad. The caller makes it, and decides when its memory
//               is given back
//
// A function whose name begins with allocate_ takes memory from the Arena, one with write_ writes codes to
// it, and one with make_ does both. An operand lives as long as the Arena::Scope in which its memory was
// taken.
//
// Amaxes. In coat a tensor has one scale, so its amax must be known before its codes are made. Usually an
// earlier kernel has the values in registers, and stores their amax: at x_amax_to_raise() of the linear
// layer whose x they are, or at g_amax_to_raise() of the one whose g they are. For example, the residual sum
// (gpu/norm.h) computes the output of the next norm, which is x of the linear layer after this norm; so it
// stores the amax of x. If no earlier kernel has the values, an extra pass over the tensor computes the amax
// just before the codes are made: compute_x_amax_if_needed(), or AmaxFrom::ExtraPass.
//
// (Several GPUs: gather_weights() waits for the weight. It is in gpu/sharding.h, with Direction and
// gather_unit_of(), and with one GPU it does nothing.)
#pragma once
#include <optional>

#include "gemm.h"
#include "sharding.h"

namespace coat::gpu {

// What the linear layers of a model share.
struct LinearLayerContext {
    GpuContext& gpu_context;
    const ParameterState& parameter_state;
    const ScaleTable& scale_table;
    Sharding& sharding;
    CublasGemms& gemms;
    // Whether the FP8 codes of all weights are made once per step, in both forms: on one GPU, if a step has
    // several micro-batches and there is enough memory.
    const bool caches_weights;
    const LinearFormats formats = linear_formats(gpu_context.settings);

    // Whether the amax of an operand must be known before its codes are made: if operands are in FP8 and have
    // one scale. So in coat it must. In every recipe the answer is the same for x, w and g. (This can wait:
    // with delayed scaling the answer is yes only as long as some history of amaxes is empty.)
    bool needs_amax_before_codes() const {
        const bool per_tensor = formats.x.is_fp8() && formats.x.granularity == PER_TENSOR;
        return per_tensor && (!scale_table.delayed() || scale_table.any_empty_history);
    }
};

class LinearLayer {
public:
    // weight_index: the index of w in ParameterState::params.
    LinearLayer(LinearLayerContext& shared, size_t weight_index);

    // --- The three GEMMs
    // y = x w^T + bias. An FP8 GEMM writes a multiple of 16 rows: y must have memory for these.
    void fprop(const LazyTensor& x, const TensorRef& y);
    // dx = g w
    void dgrad(const Operand& g_operand, const TensorRef& dx);
    // dw = g^T x; or, if `overwrite` is false, dw += g^T x.
    void wgrad(const Operand& g_operand, const LazyTensor& x, bool overwrite);

    // --- The operand of g
    // Where the amax of g comes from, if it is needed:
    //   EarlierKernel   an earlier kernel has left it in *g_amax_to_raise()
    //   ExtraPass       an extra pass over g computes it first
    enum class AmaxFrom : uint8_t { EarlierKernel, ExtraPass };
    // Makes the operand of g. (If the layer has a bias, which those of Llama have not, this also adds the
    // column sums of g to dbias, the gradient of the bias.)
    Operand make_g_operand(const LazyTensor& g, AmaxFrom g_amax_from);
    // The two parts of make_g_operand(), for a caller that computes g from a temporary tensor which the
    // operand outlives: mlp_half_backward() in model.cu.
    //   row_major   where the row-major elements go; if null, memory is allocated for them, too
    Operand allocate_g_operand(int64_t N, void* row_major) const;
    void write_g_operand(const LazyTensor& g, AmaxFrom g_amax_from, const Operand& g_operand);

    // --- Amaxes
    // Points to the amax of x, or of g: a kernel that has the values raises it. Null if none is needed.
    float* x_amax_to_raise() const {
        return shared_.needs_amax_before_codes() ? &x_tensor_scale_->amax : nullptr;
    }
    float* g_amax_to_raise() const {
        return shared_.needs_amax_before_codes() ? &g_tensor_scale_->amax : nullptr;
    }
    // Computes the amax of x by an extra pass over x, if the amax is needed. To be called before fprop(), if
    // no earlier kernel had the values of x.
    void compute_x_amax_if_needed(const LazyTensor& x) const;

    // The bucket (gpu/memory_layout.h) to which the gradients of w and of the bias belong.
    int64_t bucket() const { return shared_.parameter_state.params[weight_index_].bucket; }

    // Makes the operand of w, if weights are cached (this can wait).
    void write_cached_w_operand();

private:
    // The forms of an operand (Operand in gpu/tensors.h) that are made.
    enum class Form : uint8_t { RowMajor, Transposed, Both };

    LinearLayerContext& shared_;              // what all linear layers share
    const size_t weight_index_;               // the index of w (out, in) in ParameterState::params
    const std::optional<size_t> bias_index_;  // the index of the bias (out), if there is one
    const int64_t out_, in_;
    const int64_t linear_layer_index_;  // the number of this layer in the order of forward
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

    // Whether a GEMM can read `source` as it is: in recipes without FP8, if it is stored in the compute
    // format.
    bool is_its_own_operand(OperandKind kind, const LazyTensor& source) const;
    Operand allocate_operand(OperandKind kind, int64_t needed_rows, Form form,
                             void* row_major = nullptr) const;
    Operand make_operand(OperandKind kind, const LazyTensor& source, GemmKind gemm) const;
    Operand get_or_make_w_operand(GemmKind gemm) const;

    // These serve layers with a bias, delayed scaling, and several ranks (they can wait).
    void write_g_operand_and_add_dbias(const LazyTensor& g, float* amax_to_compute, const Operand& g_operand);
    void add_dbias(const LazyTensor& g, float* amax_to_compute) const;
    void compute_w_amax_if_needed() const;
    Operand w_operand_of_codes(const TensorRef& codes, GemmKind gemm) const;
};

}  // namespace coat::gpu
