// gpu_models.h - recipes, small models and training on either device, for the tests of the whole model.
#pragma once
#include <cmath>
#include <string>

#include "../gpu/attention.cuh"
#include "../gpu/gemm.cuh"
#include "../plan.h"
#include "gpu.h"
#include "tiny.h"

namespace coat::test::gpu_models {

using Floats = std::vector<float>;
using Maker = std::unique_ptr<Model> (*)(const Setup&);

inline constexpr const char* RECIPES[] = {"fp32", "bf16", "coat", "te", "colossal", "rowwise", "deepseek"};
inline const char* const MODES[] = {"attention", "master", "gradients", "recompute", "lean"};

inline Setup setup_of(const std::string& recipe, const Architecture& arch = LLAMA, bool tied = true, int64_t B = 4, int64_t T = 16) {
    return tiny_setup(tiny_config(arch, tied), recipe, optimizer_of(recipe), B, T);
}

inline Setup with_optimizer(Setup s, const std::string& name) {
    s.optimizer = find_row(optimizers(), name, "optimizer");
    return s;
}

// Heads of 64, as tensor cores want them; few key/value heads.
inline ModelConfig wide_heads(bool tied) { return {"test-wide", LLAMA, 2, 256, 4, 2, 352, 130, 128, tied}; }

inline Training training_on(Maker make, const Setup& setup, uint64_t seed = 1) {
    Training t(setup, seed);
    t.model = make(setup);
    return t;
}

inline Floats gradient(Model& model, const Param& p) { return read_as<float>(model, p.name + ".gradient", p.size()); }

// FP32 in two orders of summation: the longest way through the network has about 10 sums of up to F terms a layer and direction, whose
// roundings add up as the root of their number (as in test_gradients.cpp, which compares with double; here both sides round).
inline double fp32_bound(const ModelConfig& c) { return 2 * 0x1p-24 * 10 * 2 * double(c.L) * std::sqrt(double(std::max(c.F, c.C))); }

}  // namespace coat::test::gpu_models
