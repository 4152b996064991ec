// gpu_models.h - recipes, small models, and training on the GPU or the CPU, for the tests of the whole model.
#pragma once
#include <cmath>
#include <string>

#include "../../gpu/attention.cuh"
#include "../../gpu/gemm.cuh"
#include "../../program/plan.h"
#include "gpu.h"
#include "tiny.h"

namespace coat::test::gpu_models {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;
using Maker = std::unique_ptr<Model> (*)(const Setup&);

inline const std::vector<const char*> RECIPES = [] {
    std::vector<const char*> names;
    for (const Recipe& r : recipes()) names.push_back(r.name);
    return names;
}();
inline const char* const MODES[] = {"attention", "master", "gradients", "lean"};

inline Setup setup_of(const std::string& recipe, const Architecture& arch = LLAMA, bool tied = true,
                      int64_t B = 4, int64_t T = 16) {
    return tiny_setup(tiny_config(arch, tied), recipe, optimizer_of(recipe), B, T);
}

inline Setup with_optimizer(Setup s, const std::string& name) {
    s.optimizer = find_row(optimizers(), name, "optimizer");
    return s;
}

// A model that uses attention on tensor cores, which needs heads of 64. Two query heads share a key/value
// head.
inline ModelConfig wide_heads(bool tied) { return {"test-wide", LLAMA, 2, 256, 4, 2, 352, 130, 128, tied}; }

inline Training training_on(Maker make, const Setup& setup, uint64_t seed = 1) {
    Training t(setup, seed);
    t.model = make(setup);
    return t;
}

inline Floats gradient(Model& model, const Param& p) {
    return read_as<float>(model, p.name + ".gradient", p.size());
}

// The relative error between two FP32 implementations that sum in different orders. The longest path through
// the network has about 10 sums of up to max(F, C) terms for each layer and direction. Rounding errors are
// random, so a sum of n terms has an error of sqrt(n) roundings. Both sides round, hence the factor 2.
inline double fp32_bound(const ModelConfig& c) {
    return 2 * 0x1p-24 * 10 * 2 * double(c.L) * std::sqrt(double(std::max(c.F, c.C)));
}

}  // namespace coat::test::gpu_models
