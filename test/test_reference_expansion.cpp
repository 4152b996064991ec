// test_reference_expansion.cpp - dynamic range expansion (paper, section 4) in reference.cpp: the expansion
// factor k, and every kind of group with its error bound.
#include <doctest/doctest.h>

#include <algorithm>

#include "../reference.h"
#include "moments.h"
#include "oracle.h"
#include "random.h"
#include "tiny.h"

using namespace coat;
using namespace coat::test;
using namespace coat::reference;
using namespace coat::test::moments;

namespace {

constexpr Format FP8[] = {Format::E4M3, Format::E5M2};

double log2_range(Format f) { return std::log2(double(info(f).max) / double(info(f).min)); }

template <class Check>
void for_every_group(Random& rng, Check check) {
    for (Format f : FP8)
        for (int64_t n : LENGTHS)
            for (const Distribution& d : distributions()) {
                INFO(std::string(info(f).name), ", ", n, " elements, ", d.name);
                check(f, sample(d, rng, n));
            }
}

// Error of y = FMAX 2^(k (log2 |x| - log2 max)) in FP32, and back. The logarithm of an FP32 value is below
// 150 and rounds by 2^-17, so the exponent is wrong by at most 2^-15. This is its relative effect on the
// value; on y it is k times as large.
constexpr double EXPONENT_ERROR = 0x1p-15 * 0.6931;

// Largest relative error of a value that is encoded with exponent k and has the magnitude max * ratio. The
// code is wrong by half a step relative to y, and value = max (code / FMAX)^(1/k).
double expansion_bound(Format f, double ratio, double k) {
    const double y = info(f).max * std::pow(ratio, k);
    const double step = std::max(std::ldexp(1.0, -info(f).mantissa - 1), info(f).min / 2 / y);
    const double up = std::pow(1 + step, 1 / k) - 1, down = step < 1 ? 1 - std::pow(1 - step, 1 / k) : 1.0;
    return std::max(up, down) + 2 * EXPONENT_ERROR * (1 + 1 / k);
}

}  // namespace

TEST_CASE("expansion_factor: k = log(range of the format) / log(range of the group), rounded down, clamped") {
    FRESH_RANDOM(rng);
    for (Format f : FP8)
        for (int64_t i = 0; i < count(100000, 5000); i++) {
            const float min = float(std::exp2(-148 + 200 * rng.uniform()));
            const float max = float(min * std::exp2(std::pow(rng.uniform(), 3) * 70));
            if (max == min) continue;  // see the test of the limits
            const double exact = 16 * log2_range(f) / (std::log2(double(max)) - std::log2(double(min)));
            const float k = expansion_factor(f, max, min);
            INFO(std::string(info(f).name), " max ", max, " min ", min, " k ", k);
            // The error of a quotient whose divisor is wrong by EXPONENT_ERROR.
            const double slack = exact * exact * EXPONENT_ERROR;
            const double low = std::floor(exact - slack) / 16, high = std::floor(exact + slack) / 16;
            REQUIRE(k >= std::clamp(low, 1.0 / 16, 64.0));
            REQUIRE(k <= std::clamp(high, 1.0 / 16, 64.0));
            REQUIRE(k * 16 == std::floor(k * 16));
        }
}

TEST_CASE("expansion_factor: k at its limits") {
    for (Format f : FP8) {
        // For equal magnitudes the released code gives infinity.
        CHECK(expansion_factor(f, 1.0f, 1.0f) == 64.0f);
        CHECK(expansion_factor(f, 1.0f, std::nextafter(1.0f, 0.0f)) == 64.0f);
        const float k =
            expansion_factor(f, std::numeric_limits<float>::max(), std::numeric_limits<float>::denorm_min());
        CHECK(k == float(std::floor(16 * log2_range(f) / 277) / 16));  // the widest possible group
        CHECK(k >= 1.0f / 16);
    }
    CHECK(expansion_factor(Format::E4M3, 448.0f, 0x1p-9f) == 1.0f);  // a group with the range of the format
    CHECK(expansion_factor(Format::E5M2, 57344.0f, 0x1p-16f) == 1.0f);
}

TEST_CASE("Moment: a group of zeros stays exactly zero") {
    for (Format f : FP8)
        for (bool expand : {false, true})
            for (int64_t n : LENGTHS) {
                std::vector<float> zeros(static_cast<size_t>(n));
                if (n > 1) zeros[1] = -0.0f;
                const Encoded e = encode_all(f, expand, true, zeros);
                for (float max : e.max) CHECK(max == 0);
                for (float k : e.k) CHECK(k == 1);
                for (float v : e.values) CHECK(v == 0);
            }
}

TEST_CASE("Moment: a single non-zero element, and equal magnitudes with their signs, are exact") {
    FRESH_RANDOM(rng);
    for (Format f : FP8)
        for (int64_t n : {1, 2, 77, 127, 128, 129})  // 129: the last group has one element
            for (double exponent : {-149.0, -140.5, -126.0, -30.3, 0.0, 5.7, 127.9}) {
                const float a = float(std::exp2(exponent));
                std::vector<float> one(size_t(n), 0.0f), equal(static_cast<size_t>(n));
                one[size_t(rng.below(n))] = -a;
                for (float& v : equal) v = float(a * rng.sign());
                INFO(std::string(info(f).name), " n ", n, " magnitude ", a);
                CHECK(encode_all(f, true, false, one).values == one);
                CHECK(encode_all(f, true, false, equal).values == equal);
            }
}

TEST_CASE("Moment: zeros do not affect k, wherever they are") {
    FRESH_RANDOM(rng);
    for (Format f : FP8)
        for (int64_t zeros : {1, 5, 60}) {
            std::vector<float> x = rng.normals<float>(MOMENT_GROUP - zeros);
            const Encoded without = encode_all(f, true, false, x);
            for (int64_t i = 0; i < zeros; i++)
                x.insert(x.begin() + (i == 0 ? 0 : rng.below(int64_t(x.size()))), 0.0f);
            const Encoded with = encode_all(f, true, false, x);
            CHECK(with.k == without.k);
            CHECK(with.max == without.max);
            for (size_t i = 0; i < x.size(); i++) CHECK((with.values[i] == 0) == (x[i] == 0));
        }
}

TEST_CASE("Moment: every value is within the error bound; signs stay; the largest value is exact") {
    FRESH_RANDOM(rng);
    for_every_group(rng, [](Format f, const std::vector<float>& x) {
        const Encoded e = encode_all(f, true, false, x);
        for (size_t i = 0; i < x.size(); i++) {
            const float max = e.max[i / MOMENT_GROUP], k = e.k[i / MOMENT_GROUP], value = e.values[i];
            INFO("element ", i, " = ", x[i], " value ", value, " max ", max, " k ", k);
            if (x[i] == 0) REQUIRE(value == 0);
            if (std::fabs(x[i]) == max) REQUIRE(value == x[i]);
            const double bound = x[i] == 0 ? 0 : expansion_bound(f, std::fabs(double(x[i])) / double(max), k);
            // 2^-149: a denormal value
            REQUIRE(std::fabs(double(value) - double(x[i])) <= bound * std::fabs(double(x[i])) + 0x1p-149);
            REQUIRE(double(value) * double(x[i]) >= 0);
        }
    });
}

TEST_CASE("Moment: no non-zero second moment becomes zero, with and without expansion") {
    FRESH_RANDOM(rng);
    for_every_group(rng, [](Format f, const std::vector<float>& x) {
        const std::vector<float> v = magnitudes(x);
        for (bool expand : {false, true}) {
            QuantStats stats;
            const Encoded e = encode_all(f, expand, true, v, &stats);
            CHECK(stats.flushed == 0);
            for (size_t i = 0; i < v.size(); i++) {
                INFO("element ", i, " = ", v[i], " expand ", expand);
                REQUIRE((e.values[i] > 0) == (v[i] > 0));
                REQUIRE(e.codes[i] < 0x80);
            }
        }
    });
}

TEST_CASE("Moment: groups are independent, and a tail is its own group") {
    FRESH_RANDOM(rng);
    for_every_group(rng, [](Format f, const std::vector<float>& x) {
        for (bool expand : {false, true}) {
            const Encoded whole = encode_all(f, expand, false, x);
            for (size_t g = 0; g < whole.max.size(); g++) {
                const size_t first = g * MOMENT_GROUP, last = std::min(x.size(), first + MOMENT_GROUP);
                const Encoded part =
                    encode_all(f, expand, false, std::vector<float>(x.begin() + first, x.begin() + last));
                REQUIRE((part.max[0] == whole.max[g] && part.k[0] == whole.k[g]));
                REQUIRE(std::equal(part.codes.begin(), part.codes.end(), whole.codes.begin() + first));
                REQUIRE(std::equal(part.values.begin(), part.values.end(), whole.values.begin() + first));
            }
        }
    });
}

TEST_CASE("Moment: encoding decoded values gives the same codes where k is the same") {
    // The largest magnitude is exact and the smallest is not, so k may change slightly. Where k stays, y is
    // the same code again: the error of the arithmetic is far below half a step.
    FRESH_RANDOM(rng);
    int64_t same = 0, groups = 0;
    for (Format f : FP8)
        for (int64_t i = 0; i < count(500, 50); i++) {
            const Encoded once =
                encode_all(f, true, false, rng.normals<float>(MOMENT_GROUP, std::exp(5 * rng.normal())));
            const Encoded twice = encode_all(f, true, false, once.values);
            CHECK(once.max == twice.max);
            groups++;
            if (once.k != twice.k) continue;
            same++;
            CHECK(once.codes == twice.codes);
            CHECK(once.values == twice.values);
        }
    CHECK(same > groups / 10);
}

TEST_CASE("Moment: without expansion, value = code max / FMAX, and only first moments flush to zero") {
    FRESH_RANDOM(rng);
    for_every_group(rng, [](Format f, const std::vector<float>& x) {
        const Encoded m = encode_all(f, false, false, x), v = encode_all(f, false, true, magnitudes(x));
        for (size_t i = 0; i < x.size(); i++) {
            const float max = m.max[i / MOMENT_GROUP];
            const double s = double(scale_of({f}, max)), a = std::fabs(double(x[i]));
            INFO("element ", i, " = ", x[i], " max ", max);
            REQUIRE(std::fabs(double(m.values[i]) - double(x[i])) <= error_bound(f, a, s));
            const bool flushes = a > 0 && m.values[i] == 0;
            REQUIRE(v.values[i] == (flushes ? float(s * info(f).min) : std::fabs(m.values[i])));
        }
    });
}

TEST_CASE("Moment: expansion lowers the error, most in groups of a small range (paper section 4.2)") {
    FRESH_RANDOM(rng);
    auto error = [](bool expand, bool positive, const std::vector<float>& x) {
        return relative_error(encode_all(Format::E4M3, expand, positive, x).values, x);
    };
    // A factor of 10 between smallest and largest is typical of second moments.
    std::vector<float> narrow(128 * 100);
    for (float& v : narrow) v = float(std::pow(10, rng.uniform()));
    const std::vector<float> wide = rng.normals<float>(128 * 100);
    CHECK(error(true, false, wide) < error(false, false, wide));
    // A range of 10 gives k = log2(229376) / log2(10) = 5.3, and divides the relative step by as much.
    CHECK(error(true, true, narrow) < error(false, true, narrow) / 4);
}

TEST_CASE("Moment: statistics count elements, signal, noise and flushed values") {
    FRESH_RANDOM(rng);
    std::vector<float> x = rng.normals<float>(300);
    x[7] = 1e-9f;  // flushed to zero without expansion: 1e-9 / max < FMIN / FMAX / 2
    x[8] = 0;
    for (bool expand : {false, true}) {
        QuantStats stats;
        const Encoded e = encode_all(Format::E4M3, expand, false, x, &stats);
        double noise = 0;
        for (size_t i = 0; i < x.size(); i++)
            noise += double(e.values[i] - x[i]) * double(e.values[i] - x[i]);
        CHECK(stats.elements == 300);
        CHECK(stats.flushed >= (expand ? 0 : 1));
        CHECK(stats.flushed == std::count(e.values.begin(), e.values.end(), 0.0f) - 1);
        CHECK(std::fabs(stats.noise - noise) < 1e-5 * noise);  // the differences above are rounded to FP32
        CHECK(std::fabs(stats.signal - norm(x) * norm(x)) < 1e-12 * stats.signal);
    }
}
