// test_reference_expansion.cpp - dynamic range expansion (paper section 4) in reference.cpp: every kind of
// group, its error bound, and the paper's table 1 on the moments of a real run.
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

// Codes, (max, k) and decoded values of n elements; what lies behind the end must not be written.
struct Encoded {
    std::vector<uint8_t> codes;
    std::vector<float> max, k, values;
};

Encoded encode_all(Format f, bool expand, bool positive, const std::vector<float>& x,
                   QuantStats* stats = nullptr) {
    const int64_t n = int64_t(x.size()), groups = ceil_div(n, MOMENT_GROUP);
    Encoded e{std::vector<uint8_t>(size_t(n) + 1, 0xA5), std::vector<float>(size_t(groups) + 1, -7),
              std::vector<float>(size_t(groups) + 1, 1), std::vector<float>(size_t(n) + 1, -7)};
    e.k.back() = -7;
    encode_moment(f, expand, positive, x.data(), n, e.codes.data(), e.max.data(), e.k.data(), stats);
    decode_moment(f, expand, e.codes.data(), e.max.data(), e.k.data(), n, e.values.data());
    CHECK((e.codes.back() == 0xA5 && e.max.back() == -7 && e.k.back() == -7 && e.values.back() == -7));
    e.codes.pop_back(), e.max.pop_back(), e.k.pop_back(), e.values.pop_back();
    return e;
}

template <class Check>
void for_every_group(Random& rng, Check check) {
    for (Format f : FP8)
        for (int64_t n : LENGTHS)
            for (const Distribution& d : distributions()) {
                INFO(std::string(info(f).name), ", ", n, " elements, ", d.name);
                check(f, sample(d, rng, n));
            }
}

// FP32 arithmetic of y = FMAX 2^(k (log2 |x| - log2 max)) and back. A logarithm of an FP32 number is below
// 150 and rounds by 2^-17, so the exponent is wrong by at most 2^-15 in all; times ln 2, and for y times k.
constexpr double EXPONENT_ERROR = 0x1p-15 * 0.6931;

// Largest relative error of a value that was encoded with exponent k and magnitude x = max * ratio: the code
// is wrong by half of its step, relative to y, and value = max (code / FMAX)^(1/k).
double expansion_bound(Format f, double ratio, double k) {
    const double y = info(f).max * std::pow(ratio, k);
    const double step = std::max(std::ldexp(1.0, -info(f).mantissa - 1), info(f).min / 2 / y);
    const double up = std::pow(1 + step, 1 / k) - 1, down = step < 1 ? 1 - std::pow(1 - step, 1 / k) : 1.0;
    return std::max(up, down) + 2 * EXPONENT_ERROR * (1 + 1 / k);
}

}  // namespace

TEST_CASE(
    "expansion_factor: k = log(range of the format) / log(range of the group), in sixteenths, clamped") {
    FRESH_RANDOM(rng);
    for (Format f : FP8)
        for (int64_t i = 0; i < count(100000, 5000); i++) {
            const float min = float(std::exp2(-148 + 200 * rng.uniform()));
            const float max = float(min * std::exp2(std::pow(rng.uniform(), 3) * 70));
            if (max == min) continue;  // the test of the limits has it
            const double exact = 16 * log2_range(f) / (std::log2(double(max)) - std::log2(double(min)));
            const float k = expansion_factor(f, max, min);
            INFO(std::string(info(f).name), " max ", max, " min ", min, " k ", k);
            const double slack =
                exact * exact * EXPONENT_ERROR;  // of a quotient whose divisor is wrong by EXPONENT_ERROR
            const double low = std::floor(exact - slack) / 16, high = std::floor(exact + slack) / 16;
            REQUIRE(k >= std::clamp(low, 1.0 / 16, 64.0));
            REQUIRE(k <= std::clamp(high, 1.0 / 16, 64.0));
            REQUIRE(k * 16 == std::floor(k * 16));
        }
}

TEST_CASE("expansion_factor: k at its limits") {
    for (Format f : FP8) {
        CHECK(expansion_factor(f, 1.0f, 1.0f) == 64.0f);  // equal magnitudes: the release gives infinity
        CHECK(expansion_factor(f, 1.0f, std::nextafter(1.0f, 0.0f)) == 64.0f);
        const float k =
            expansion_factor(f, std::numeric_limits<float>::max(), std::numeric_limits<float>::denorm_min());
        CHECK(k == float(std::floor(16 * log2_range(f) / 277) / 16));  // the widest group there is
        CHECK(k >= 1.0f / 16);
    }
    CHECK(expansion_factor(Format::E4M3, 448.0f, 0x1p-9f) == 1.0f);  // a group as wide as the format
    CHECK(expansion_factor(Format::E5M2, 57344.0f, 0x1p-16f) == 1.0f);
}

TEST_CASE("encode_moment: a group of zeros stays exactly zero") {
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

TEST_CASE("encode_moment: a single non-zero element, and equal magnitudes with their signs, are exact") {
    FRESH_RANDOM(rng);
    for (Format f : FP8)
        for (int64_t n : {1, 2, 77, 127, 128, 129})  // 129: a tail of a single element
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

TEST_CASE("encode_moment: zeros do not affect k, wherever they are") {
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

TEST_CASE(
    "encode_moment: every value is within the bound from k and the format; signs kept; the largest exact") {
    FRESH_RANDOM(rng);
    for_every_group(rng, [](Format f, const std::vector<float>& x) {
        const Encoded e = encode_all(f, true, false, x);
        for (size_t i = 0; i < x.size(); i++) {
            const float max = e.max[i / MOMENT_GROUP], k = e.k[i / MOMENT_GROUP], value = e.values[i];
            INFO("element ", i, " = ", x[i], " value ", value, " max ", max, " k ", k);
            if (x[i] == 0) REQUIRE(value == 0);
            if (std::fabs(x[i]) == max) REQUIRE(value == x[i]);
            const double bound = x[i] == 0 ? 0 : expansion_bound(f, std::fabs(double(x[i])) / double(max), k);
            REQUIRE(std::fabs(double(value) - double(x[i])) <=
                    bound * std::fabs(double(x[i])) + 0x1p-149);  // denormal values
            REQUIRE(double(value) * double(x[i]) >= 0);
        }
    });
}

TEST_CASE("encode_moment: no non-zero second moment becomes zero, with and without expansion") {
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

TEST_CASE("encode_moment: groups are independent, and a tail is its own group") {
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

TEST_CASE("encode_moment: encoding decoded values gives the same codes where k is the same") {
    // The largest magnitude survives exactly, the smallest does not, so k may move by a sixteenth or a few.
    // Where it stays, y is the code again up to the arithmetic's error, far below half a step.
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

TEST_CASE("encode_moment: without expansion, value = code max / FMAX, and only first moments flush to zero") {
    FRESH_RANDOM(rng);
    for_every_group(rng, [](Format f, const std::vector<float>& x) {
        const Encoded m = encode_all(f, false, false, x), v = encode_all(f, false, true, magnitudes(x));
        for (size_t i = 0; i < x.size(); i++) {
            const float max = m.max[i / MOMENT_GROUP];
            const double s = double(scale_of({f}, max)), a = std::fabs(double(x[i]));
            INFO("element ", i, " = ", x[i], " max ", max);
            const double bound =
                std::max(std::ldexp(a, -info(f).mantissa - 1), s * info(f).min / 2) * (1 + 0x1p-20) +
                a * 0x1p-21 + 0x1p-149;
            REQUIRE(std::fabs(double(m.values[i]) - double(x[i])) <= bound);
            const bool flushes = a > 0 && m.values[i] == 0;
            REQUIRE(v.values[i] == (flushes ? float(s * info(f).min) : std::fabs(m.values[i])));
        }
    });
}

TEST_CASE(
    "encode_moment: expansion halves the largest error of a normal group, and more of a narrow one (paper "
    "section 4.2)") {
    FRESH_RANDOM(rng);
    auto error = [](bool expand, bool positive, const std::vector<float>& x) {
        return relative_error(encode_all(Format::E4M3, expand, positive, x).values, x);
    };
    std::vector<float> narrow(
        128 * 100);  // a factor of ten between the smallest and the largest: typical of second moments
    for (float& v : narrow) v = float(std::pow(10, rng.uniform()));
    const std::vector<float> wide = rng.normals<float>(128 * 100);
    CHECK(error(true, false, wide) < error(false, false, wide));
    // Range 10: k = log2(229376) / log2(10) = 5.3, and the relative step shrinks by as much.
    CHECK(error(true, true, narrow) < error(false, true, narrow) / 4);
}

TEST_CASE("encode_moment: statistics count elements, signal, noise and flushed values") {
    FRESH_RANDOM(rng);
    std::vector<float> x = rng.normals<float>(300);
    x[7] = 1e-9f;  // flushed without expansion: 1e-9 / max < FMIN / FMAX / 2
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
        CHECK(std::fabs(stats.noise - noise) < 1e-5 * noise);  // the differences above are FP32's
        CHECK(std::fabs(stats.signal - norm(x) * norm(x)) < 1e-12 * stats.signal);
    }
}

namespace {

struct Storage {
    std::string name;
    Format format;
    bool expand;
};
const Storage STORAGES[] = {{"E4M3", Format::E4M3, false},
                            {"E4M3+Exp", Format::E4M3, true},
                            {"E5M2", Format::E5M2, false},
                            {"E5M2+Exp", Format::E5M2, true}};

struct RealMoments {
    std::vector<std::vector<float>> m, v;  // of each parameter that may have FP8 moments
};

const RealMoments& real_moments() {
    static const RealMoments moments = [] {
        Training training(tiny_setup(tiny_config(LLAMA, true), "fp32", "fp32"));
        for (int64_t i = 0; i < count(60, 5); i++) training.step();
        RealMoments r;
        for (const Param& p : parameters(training.model->setup().config)) {
            if (!p.role.fp8_state) continue;
            r.m.push_back(read_as<float>(*training.model, p.name + ".m", p.size()));
            r.v.push_back(read_as<float>(*training.model, p.name + ".v", p.size()));
        }
        return r;
    }();
    return moments;
}

std::vector<std::vector<float>> stored(const Storage& s, bool positive,
                                       const std::vector<std::vector<float>>& moments) {
    std::vector<std::vector<float>> result;
    for (const auto& x : moments) result.push_back(encode_all(s.format, s.expand, positive, x).values);
    return result;
}

double update(float m, float v) { return v > 0 ? double(m) / (std::sqrt(double(v)) + 1e-8) : 0.0; }

double update_mse(const RealMoments& exact, const std::vector<std::vector<float>>& m,
                  const std::vector<std::vector<float>>& v) {
    double sum = 0, n = 0;
    for (size_t p = 0; p < m.size(); p++)
        for (size_t i = 0; i < m[p].size(); i++, n++) {
            const double error = update(m[p][i], v[p][i]) - update(exact.m[p][i], exact.v[p][i]);
            sum += error * error;
        }
    return sum / n;
}

// Mean square of the error relative to each group's root mean square, so that every group counts the same.
double relative_mse(const std::vector<std::vector<float>>& exact,
                    const std::vector<std::vector<float>>& decoded) {
    double sum = 0, n = 0;
    for (size_t p = 0; p < exact.size(); p++)
        for (size_t first = 0; first < exact[p].size(); first += MOMENT_GROUP) {
            const size_t last = std::min(exact[p].size(), first + MOMENT_GROUP);
            const std::vector<float> a(decoded[p].begin() + first, decoded[p].begin() + last),
                b(exact[p].begin() + first, exact[p].begin() + last);
            sum += relative_error(a, b) * relative_error(a, b) * double(last - first),
                n += double(last - first);
        }
    return sum / n;
}

}  // namespace

TEST_CASE(
    "encode_moment: expansion lowers the errors of m, v and m / sqrt(v) of a real run (paper table 1)") {
    // Table 1 (MSE of m / sqrt(v), first moment down, second across):    E4M3   E4M3+Exp  E5M2   E5M2+Exp
    //                                                          E4M3      20.10  18.08     25.65  18.16
    //                                                          E4M3+Exp  15.13  12.31     21.96  12.43
    //                                                          E5M2      37.02  35.96     40.30  36.00
    //                                                          E5M2+Exp  17.79  15.48     23.84  15.57
    // What holds there in every row and column is what is asked for here: expansion helps either moment
    // whatever the other has; without it E4M3 beats E5M2; and E4M3+Exp is the best first moment, with the
    // second in E4M3+Exp or E5M2+Exp, equal within 10%.
    const RealMoments& exact = real_moments();
    double mse[4][4];
    std::string table;
    for (int i = 0; i < 4; i++) {
        const auto m = stored(STORAGES[i], false, exact.m);
        for (int j = 0; j < 4; j++) {
            mse[i][j] = update_mse(exact, m, stored(STORAGES[j], true, exact.v));
            table += std::to_string(1e5 * mse[i][j]) + (j == 3 ? "\n" : " ");
        }
    }
    INFO("MSE x 1e5, in the paper's order:\n", table);
    for (int other = 0; other < 4; other++) {
        CHECK(mse[1][other] < mse[0][other]);  // first moment: expansion, in E4M3
        CHECK(mse[3][other] < mse[2][other]);  // and in E5M2
        CHECK(mse[other][1] < mse[other][0]);  // second moment
        CHECK(mse[other][3] < mse[other][2]);
        CHECK(mse[0][other] < mse[2][other]);  // without expansion, three bits of mantissa beat two
        CHECK(mse[other][0] < mse[other][2]);
    }
    CHECK(std::fabs(mse[1][3] / mse[1][1] - 1) < 0.1);
    for (int i : {0, 2, 3}) CHECK(mse[1][1] < mse[i][1]);
    CHECK(mse[0][0] / mse[1][1] > 1.63);  // the paper's headline
    for (int format = 0; format < 4; format += 2) {
        CHECK(relative_mse(exact.m, stored(STORAGES[format + 1], false, exact.m)) <
              relative_mse(exact.m, stored(STORAGES[format], false, exact.m)));
        CHECK(relative_mse(exact.v, stored(STORAGES[format + 1], true, exact.v)) <
              relative_mse(exact.v, stored(STORAGES[format], true, exact.v)));
    }
}
