// gpu/recipe_on_gpu.cpp - which recipes a GPU can run, whether it caches weights, and which flags would save
// memory (gpu/gpu_model.h).
#include "gpu_model.h"

namespace coat {

bool should_cache_weights(const RunSettings& s) {
    return s.micro_batches_per_rank > 1 && linear_formats(s).w.is_fp8() && s.ranks == 1;
}

std::string flags_that_save_memory(const RunSettings& s) {
    std::string flags;
    auto add = [&](const char* flag) { flags += (flags.empty() ? "" : ", ") + std::string(flag); };
    const bool fp32 = s.recipe.compute_format == Format::FP32;
    if (s.keep_masters && !fp32) add("--master none");
    if (!s.recipe.saved_attention.is_fp8() && !fp32) add("--attention groups");
    if (s.keep_gradients && micro_batches_of_step(s) == 1) add("--gradients none --clip 0");
    return flags;
}

// Whether cuBLASLt has a GEMM of two such operands.
static bool has_gemm(const TensorFormat& a, const TensorFormat& b) {
    if (!a.is_fp8() || !b.is_fp8()) return a == b;
    if (a.element_format == Format::E5M2 && b.element_format == Format::E5M2) return false;
    const auto in_blocks = [](const TensorFormat& operand) {
        return operand.granularity == PER_1x128 || operand.granularity == PER_128x128;
    };
    if (in_blocks(a) && in_blocks(b)) return a.granularity == PER_1x128 || b.granularity == PER_1x128;
    return a.granularity == b.granularity && (a.granularity == PER_TENSOR || a.granularity == PER_ROW);
}

Recipe recipe_on_gpu(const Recipe& r, int capability) {
    if (!has_gemm(r.x, r.w) || !has_gemm(r.g, r.w) || !has_gemm(r.g, r.x))
        throw Error("--recipe ", r.name, " has x in ", r.x.text(), ", w in ", r.w.text(), " and g in ",
                    r.g.text(),
                    ", which no GEMM of a GPU multiplies; give all of them one scale per tensor, ",
                    "per row or per 128 elements, at most one of them E5M2.");
    Recipe changed = r;
    if (capability < 89 && r.x.is_fp8()) changed.x = changed.w = changed.g = TensorFormat{r.compute_format};
    if (changed.x.is_fp8() && r.x.granularity != PER_TENSOR && capability != 90)
        throw Error("--recipe ", r.name,
                    " scales operands in rows or blocks, which needs a GPU of compute capability 9.0 "
                    "(Hopper); use --recipe tensorwise, or --device cpu.");
    for (const TensorFormat& saved : {r.saved_inputs, r.saved_attention})
        if (saved.is_fp8() && saved != E4M3_PER_1x16)
            throw Error("--recipe ", r.name, " saves ", saved.text(),
                        "; GPUs save e4m3 1x16: use --device cpu.");
    return changed;
}

}  // namespace coat
