// gpu/linear.cpp - the GEMMs of a linear layer and their operands (gpu/linear.h). It goes from large to
// small: the GEMMs come first, then how their operands are made.
#include "linear.h"

#include "../coat.h"
#include "column_sums.h"
#include "other_scaling.h"
#include "sharding_kernels.h"

namespace coat::gpu {

// This serves the recipes rowwise and deepseek. It stands at the end of this file, and can wait.
static Operand with_block_scales(const TensorRef& tensor, void* transposed);

LinearLayer::LinearLayer(SharedByLinearLayers& shared, size_t weight_index, ExtraAmaxPasses extra_amax_passes)
    : shared_(shared), weight_index_(weight_index),
      bias_index_(shared_.parameter_tensors.bias_index(weight_index)),
      out_(shared_.parameter_tensors.params[weight_index].rows),
      in_(shared_.parameter_tensors.params[weight_index].cols),
      linear_layer_index_(shared_.parameter_tensors.linear_layer_index(weight_index)),
      extra_amax_passes_(extra_amax_passes) {
    // The cache is allocated outside of any Arena::Scope, so it lasts for the run.
    if (shared_.caches_weights) cached_w_operand_ = allocate_operand(OperandKind::W, out_, Form::Both);
}

// The rows of an operand, and of y: a multiple of 16 for an FP8 GEMM. A weight and a micro-batch have a
// multiple of 16 rows anyway (linear_formats() of common/recipes.h). But a prompt may have any number of
// tokens. Then x_operand and y have more rows than x, and nobody reads what these further rows hold.
static int64_t rows_of_gemm(const TensorFormat& format, int64_t rows) {
    return format.is_fp8() ? round_up(rows, FP8_GEMM_MULTIPLE) : rows;
}

// -----------------------------------------------------------------------------------------------------------
// The three GEMMs

void LinearLayer::fprop(const LazyTensor& x, const TensorRef& y) {
    const Arena::Scope scope(arena());
    run_extra_amax_pass_if_any(OperandKind::X, x);
    const Operand x_operand = make_operand(OperandKind::X, x, GemmKind::Fprop);
    const Operand w_operand = make_w_operand(GemmKind::Fprop);
    const void* const bias = bias_index_ ? shared_.parameter_tensors.weights[*bias_index_].data : nullptr;
    TensorRef padded_y = y;
    padded_y.rows = rows_of_gemm(shared_.formats.x, y.rows);
    shared_.gemms.run(GemmKind::Fprop, x_operand, w_operand, padded_y, stream(), {.bias = bias});
}

void LinearLayer::dgrad(const Operand& g_operand, const TensorRef& dx) {
    const Arena::Scope scope(arena());
    const Operand w_operand = make_w_operand(GemmKind::Dgrad);
    shared_.gemms.run(GemmKind::Dgrad, g_operand, w_operand, dx, stream());
}

void LinearLayer::wgrad(const Operand& g_operand, const LazyTensor& x, bool overwrite) {
    const Arena::Scope scope(arena());
    // x has the same values as in forward, so the amax from forward is that of this x.
    const Operand x_operand = make_operand(OperandKind::X, x, GemmKind::Wgrad);
    const TensorRef dw = shared_.parameter_tensors.gradients[weight_index_];
    shared_.gemms.run(GemmKind::Wgrad, g_operand, x_operand, dw, stream(), {.overwrite = overwrite});
}

// -----------------------------------------------------------------------------------------------------------
// Operands

bool LinearLayer::is_read_as_stored(OperandKind kind, const LazyTensor& source) const {
    const bool is_stored_plain = source.op == LazyOp::Load && !source.input.format.is_fp8();
    return is_stored_plain && !format_of(shared_.formats, kind).is_fp8();
}

// The bytes of the elements (rows, cols) of an operand, and (rowwise, deepseek) of its block scales.
static int64_t operand_bytes(const TensorFormat& format, int64_t rows, int64_t cols) {
    return format.bytes_without_scales(rows, cols) +
           block_scale_count(format, rows, cols) * format_info(format.scale_format).bytes;
}

// Takes the memory of an operand.
//   needed_rows   the operand's rows, before they are rounded up for an FP8 GEMM
//   row_major     where the row-major elements go; if null, memory is allocated for them
Operand LinearLayer::allocate_operand(OperandKind kind, int64_t needed_rows, Form form,
                                      void* row_major) const {
    const TensorFormat& format = format_of(shared_.formats, kind);
    const int64_t rows = rows_of_gemm(format, needed_rows);
    const int64_t cols = kind == OperandKind::G ? out_ : in_;
    if (!row_major && form != Form::Transposed)
        row_major = arena().allocate(operand_bytes(format, rows, cols));
    void* transposed = nullptr;
    if (form != Form::RowMajor) transposed = arena().allocate(operand_bytes(format, cols, rows));

    const TensorRef tensor{
        .data = row_major, .rows = rows, .cols = cols, .format = format, .tensor_scale = tensor_scale(kind)};
    // Both forms share the one scale of the tensor. (BF16 and FP32 count as PER_TENSOR. They have no scale,
    // and no transposed form.)
    if (format.granularity == PER_TENSOR)
        return {.tensor = tensor, .transposed = transposed, .delayed = shared_.scale_table.delayed()};
    return with_block_scales(tensor, transposed);
}

// The operand of x or of w, in the form that `gemm` reads.
Operand LinearLayer::make_operand(OperandKind kind, const LazyTensor& source, GemmKind gemm) const {
    if (is_read_as_stored(kind, source)) return {source.input};  // not in FP8
    const bool fp8 = format_of(shared_.formats, kind).is_fp8();
    const bool transposed = fp8 && sum_along(gemm, kind) == SumAlong::Column;
    const Operand operand =
        allocate_operand(kind, source.rows, transposed ? Form::Transposed : Form::RowMajor);
    write_operand(source, operand, quant_stats_of(kind), stream());
    return operand;
}

// The operand of w, in the form that `gemm` reads.
Operand LinearLayer::make_w_operand(GemmKind gemm) const {
    // With one GPU this does nothing. (Several ranks: w has to be gathered, and may come as codes)
    shared_.sharding.gather_weights(Sharding::weight_set_of(linear_layer_index_),
                                    gemm == GemmKind::Fprop ? Direction::Forward : Direction::Backward);
    const TensorRef& w = shared_.parameter_tensors.weights[weight_index_];
    // These two conditions are false in coat on one GPU, with one micro-batch in a step
    if (shared_.caches_weights) return cached_w_operand_;
    if (w.format.is_fp8()) return make_w_operand_of_codes(w, gemm);
    run_extra_amax_pass_if_any(OperandKind::W, lazy_load(w));
    return make_operand(OperandKind::W, lazy_load(w), gemm);
}

Operand LinearLayer::make_g_operand(const LazyTensor& g) {
    if (is_read_as_stored(OperandKind::G, g)) {  // not in FP8
        if (bias_index_) add_dbias(g, /*amax_to_compute=*/nullptr);
        return {g.input};
    }
    const Operand g_operand = allocate_g_operand(g.rows, /*row_major=*/nullptr);
    write_g_operand(g, g_operand);
    return g_operand;
}

Operand LinearLayer::allocate_g_operand(int64_t N, void* row_major) const {
    const Form form = shared_.formats.g.is_fp8() ? Form::Both : Form::RowMajor;
    return allocate_operand(OperandKind::G, N, form, row_major);
}

void LinearLayer::write_g_operand(const LazyTensor& g, const Operand& g_operand) {
    if (bias_index_) return write_g_operand_and_add_dbias(g, g_operand);  // this can wait
    run_extra_amax_pass_if_any(OperandKind::G, g);
    write_operand(g, g_operand, quant_stats_of(OperandKind::G), stream());
}

// -----------------------------------------------------------------------------------------------------------
// Amaxes

AmaxFoundBy LinearLayer::amax_found_by(OperandKind kind) const {
    const TensorFormat& format = format_of(shared_.formats, kind);
    if (!format.is_fp8() || format.granularity != PER_TENSOR) return AmaxFoundBy::Nobody;
    // With delayed scaling an amax is needed before codes are made only as long as some history is empty
    const bool delayed = shared_.scale_table.delayed();
    if (delayed && !shared_.scale_table.any_empty_history) return AmaxFoundBy::Nobody;
    bool extra_pass = false;
    if (kind == OperandKind::X) extra_pass = extra_amax_passes_.over_x;
    else if (kind == OperandKind::G) extra_pass = extra_amax_passes_.over_g;
    else extra_pass = delayed;  // of w: with delayed scaling the update leaves no amax
    return extra_pass ? AmaxFoundBy::LinearLayer : AmaxFoundBy::EarlierKernel;
}

void LinearLayer::run_extra_amax_pass_if_any(OperandKind kind, const LazyTensor& source) const {
    if (amax_found_by(kind) == AmaxFoundBy::LinearLayer)
        compute_amax(source, &tensor_scale(kind)->amax, stream());
}

// -----------------------------------------------------------------------------------------------------------
// Layers with a bias: GPT-2, and q, k and v of Qwen2 (this can wait). Their column sums: gpu/column_sums.h

// write_g_operand() of a layer with a bias: also adds the column sums of g to dbias. In FP8, dbias is the sum
// of g before g is rounded to codes. These are the passes over g:
//
//   amax of g        first pass          second pass
//   known            operand and dbias
//   to be computed   amax and dbias      operand
//
// That is COAT. Other recipes:
//
//   te, rowwise, deepseek   where the table says "operand and dbias": dbias in a first pass, the operand in a
//                           second one (write_operand_and_add_column_sums() in gpu/column_sums.cu)
//   in BF16                 first the operand, then dbias, as the sum of the values that were stored
void LinearLayer::write_g_operand_and_add_dbias(const LazyTensor& g, const Operand& g_operand) {
    const bool finds_amax = amax_found_by(OperandKind::G) == AmaxFoundBy::LinearLayer;
    QuantStats* const quant_stats = quant_stats_of(OperandKind::G);
    if (!shared_.formats.g.is_fp8()) {
        write_operand(g, g_operand, quant_stats, stream());
        add_dbias(lazy_load(g_operand.tensor), /*amax_to_compute=*/nullptr);
    } else if (finds_amax) {
        add_dbias(g, &tensor_scale(OperandKind::G)->amax);
        write_operand(g, g_operand, quant_stats, stream());
    } else {
        const Arena::Scope scope(arena());
        float* const workspace = arena().allocate<float>(COLUMN_PARTIALS * g.cols);
        write_operand_and_add_column_sums(g, g_operand, shared_.parameter_tensors.gradients[*bias_index_],
                                          workspace, quant_stats, stream());
    }
}

// Adds the column sums of g to dbias. amax_to_compute: where the amax of g goes, or null.
void LinearLayer::add_dbias(const LazyTensor& g, float* amax_to_compute) const {
    const Arena::Scope scope(arena());
    float* const workspace = arena().allocate<float>(COLUMN_PARTIALS * g.cols);
    add_column_sums(g, shared_.parameter_tensors.gradients[*bias_index_], workspace, amax_to_compute,
                    stream());
}

// -----------------------------------------------------------------------------------------------------------
// Other recipes, weights in a cache, several ranks (this can wait)

// For rowwise and deepseek: an operand whose rows or blocks have scales. These lie right after the codes to
// which they belong.
static Operand with_block_scales(const TensorRef& tensor, void* transposed) {
    const int64_t code_bytes = tensor.format.bytes_without_scales(tensor.rows, tensor.cols);
    auto scales_of = [&](void* codes) {
        return codes ? reinterpret_cast<float*>(static_cast<uint8_t*>(codes) + code_bytes) : nullptr;
    };
    return {.tensor = tensor,
            .transposed = transposed,
            .block_scales = scales_of(tensor.data),
            .transposed_block_scales = scales_of(transposed)};
}

void LinearLayer::write_cached_w_operand() {
    const LazyTensor w = lazy_load(shared_.parameter_tensors.weights[weight_index_]);
    run_extra_amax_pass_if_any(OperandKind::W, w);
    write_operand(w, cached_w_operand_, quant_stats_of(OperandKind::W), stream());
}

// With several ranks, other GPUs may have sent the row-major codes of w. They only have to be transposed, for
// dgrad.
Operand LinearLayer::make_w_operand_of_codes(const TensorRef& codes, GemmKind gemm) const {
    if (gemm == GemmKind::Fprop) return {codes};
    const Operand w_operand = allocate_operand(OperandKind::W, out_, Form::Transposed);
    transpose_codes(codes, w_operand.transposed, stream());
    return w_operand;
}

}  // namespace coat::gpu
