// setups.h - recipes and small models that the tests of training share.
#pragma once
#include "../../program/plan.h"
#include "../../reference.h"
#include "tiny.h"

namespace coat::test::setups {

using namespace coat::reference;

inline constexpr const char* RECIPES[] = {"fp32", "bf16", "coat"};

inline Setup setup_of(const std::string& recipe, const Architecture& arch = LLAMA, int64_t B = 4,
                      int64_t T = 16) {
    return tiny_setup(tiny_config(arch, true), recipe, optimizer_of(recipe), B, T);
}

}  // namespace coat::test::setups
