// moments.h - lengths, magnitudes and encoding of moments, for the tests of expansion and of Moment.
#pragma once
#include <doctest/doctest.h>

#include "../reference.h"
#include "random.h"

namespace coat::test::moments {

using namespace coat::reference;

inline constexpr int64_t LENGTHS[] = {1, 2, 3, 5, 31, 64, 100, 127, 128, 129, 255, 256, 128 * 40 + 77};

inline std::vector<float> magnitudes(std::vector<float> x) {
    for (float& v : x) v = std::fabs(v);
    return x;
}

// Codes, (max, k) and decoded values of n elements. Checks that nothing is written beyond the end.
struct Encoded {
    std::vector<uint8_t> codes;
    std::vector<float> max, k, values;
};

inline Encoded encode_all(Format f, bool expand, bool positive, const std::vector<float>& x,
                          QuantStats* stats = nullptr) {
    const int64_t n = int64_t(x.size()), groups = ceil_div(n, MOMENT_GROUP);
    Moment moment;
    moment.init(f, expand, n);
    std::vector<float> values(size_t(n) + 1, -7);
    moment.codes.push_back(0xA5), moment.max.push_back(-7), moment.k.resize(size_t(groups) + 1, 1);
    moment.k.back() = -7;
    moment.store(x.data(), positive, stats);
    moment.load(values.data());
    Encoded e{moment.codes, moment.max, moment.k, values};
    CHECK((e.codes.back() == 0xA5 && e.max.back() == -7 && e.k.back() == -7 && e.values.back() == -7));
    e.codes.pop_back(), e.max.pop_back(), e.k.pop_back(), e.values.pop_back();
    return e;
}

}  // namespace coat::test::moments
