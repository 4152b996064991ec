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
struct SharedByLinearLayers {
    GpuContext& gpu_context;
    const ParameterTensors& parameter_tensors;
    const ScaleTable& scale_table;
    Sharding& sharding;
    CublasGemms& gemms;
    // Whether the FP8 codes of all weights are made once per step, in both forms: on one GPU, if a step has
    // several micro-batches and there is enough memory.
    const bool caches_weights;
    const LinearFormats formats = linear_formats(gpu_context.settings);
};

// Who finds the amax of an operand. It must be known before the codes are made, because their scale follows
// from it. For Llama in coat:
//
//   operand               what it is                       who finds its amax
//   qkv_proj.x            output of norm 1                 residual_add() at the end of the layer before; in
//                                                          the first layer, embed()
//   attention_out_proj.x  output of attention              attention_forward()
//   gate_up_proj.x        output of norm 2                 residual_add() at the end of the attention half
//   down_proj.x           output of the activation         quantize_activation_input()
//   each w                the weight                       adamw() in the step before; for the first step,
//                                                          the initialization
//   down_proj.g           gradient of the residual stream  norm_backward() of norm 1 of the layer after; in
//                         after the layer                  the last layer, that of the final norm
//   gate_up_proj.g        gradient of gate and up          the linear layer: compute_amax(), an extra pass
//   attention_out_proj.g  gradient of the residual stream  norm_backward() of norm 2
//                         before norm 2
//   qkv_proj.g            gradient of q, k, v              attention_backward()
//
// Why the gradient of gate and up takes an extra pass: it is computed from the gradient of the activation's
// output, which a GEMM of cuBLASLt writes, and it exists only as an operand. So no kernel has its values
// before its codes are made.
enum class AmaxFoundBy : uint8_t {
    Nobody,         // it need not be known: no FP8, or scales of rows or blocks
    EarlierKernel,  // the kernel that writes the operand's tensor, or the tensor from which it is computed
    LinearLayer     // by an extra pass over the tensor, just before the codes are made
};
// For which operands a linear layer makes an extra pass, if their amaxes are needed.
struct ExtraAmaxPasses {
    bool over_x = false;  // in fprop()
    bool over_g = false;  // in write_g_operand()
};

class LinearLayer {
public:
    // weight_index: the index of w in ParameterTensors::params.
    LinearLayer(SharedByLinearLayers& shared, size_t weight_index, ExtraAmaxPasses extra_amax_passes);

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
    AmaxFoundBy amax_found_by(OperandKind kind) const;
    // The amax of x or of g, for the earlier kernel that finds it. Null if no earlier kernel does.
    float* amax_to_raise(OperandKind kind) const {
        return amax_found_by(kind) == AmaxFoundBy::EarlierKernel ? &tensor_scale(kind)->amax : nullptr;
    }

    // The bucket (gpu/memory_layout.h) to which the gradients of w and of the bias belong.
    int64_t bucket() const { return shared_.parameter_tensors.params[weight_index_].bucket; }

    // Makes the operand of w, if weights are cached (this can wait).
    void write_cached_w_operand();

private:
    // Which forms of an operand are made (Operand in gpu/tensors.h).
    enum class Form : uint8_t { RowMajor, Transposed, Both };

    SharedByLinearLayers& shared_;            // what all linear layers share
    const size_t weight_index_;               // the index of w (out, in) in ParameterTensors::params
    const std::optional<size_t> bias_index_;  // the index of the bias (out), if there is one
    const int64_t out_, in_;
    const int64_t linear_layer_index_;  // the number of this layer in the order of forward
    const ExtraAmaxPasses extra_amax_passes_;
    Operand cached_w_operand_{};  // null data if weights are not cached

    Arena& arena() const { return shared_.gpu_context.arena; }
    cudaStream_t stream() const { return shared_.gpu_context.stream; }

    // The amax of an operand, and its one scale. (If rows or blocks have scales, these lie elsewhere. The
    // amax, which gpu/other_scaling.cu then writes, serves only to notice infinity and NaN.)
    TensorScale* tensor_scale(OperandKind kind) const {
        return shared_.scale_table.entry(kind, linear_layer_index_);
    }
    // Computes the amax of `source`, if it is this linear layer that finds it.
    void run_extra_amax_pass_if_any(OperandKind kind, const LazyTensor& source) const;

    // Where the errors of quantizing an operand are added up; null if they are not measured.
    QuantStats* quant_stats_of(OperandKind kind) const {
        return shared_.gpu_context.quant_stats_of(measured_kind(kind));
    }

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
