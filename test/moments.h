// moments.h - encoding of moments, shared by the tests of expansion and AdamW.
#pragma once
#include "../reference.h"
#include "random.h"
#include "tiny.h"

namespace coat::test::moments {

using namespace coat::reference;

inline constexpr int64_t LENGTHS[] = {1, 2, 3, 5, 31, 64, 100, 127, 128, 129, 255, 256, 128 * 40 + 77};

inline std::vector<float> magnitudes(std::vector<float> x) {
    for (float& v : x) v = std::fabs(v);
    return x;
}

}  // namespace coat::test::moments
