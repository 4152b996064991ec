// 3_optimizer.cpp - reference/optimizer.cpp (paper, section 4): dynamic range expansion, moments in every
// format, and AdamW, against their definition in double.
#include "../help/model.h"
#include "../help/oracle.h"

using namespace coat;
using namespace coat::test;
using namespace coat::reference;

static double log2_range(Format f) {
    return std::log2(double(format_info(f).fmax) / double(format_info(f).fmin));
}

// The error of y = FMAX 2^(k (log2 |x| - log2 max)) in FP32, and back. Logarithms are below 150 and round by
// 2^-17, so the difference of two is wrong by at most 2^-15. This, times ln 2, is the relative error of the
// value. The relative error of y is k times as large.
constexpr double EXPONENT_ERROR = 0x1p-15 * 0.6931;

// The largest relative error of a value that is encoded with exponent k and has the magnitude max * ratio.
// The code of y is wrong by half a step. The value is max (y / FMAX)^(1/k), so its error is that of y divided
// by about k. For example, a range of 42, the median of second moments in dev/RESULTS.md, gives
// k = log2(229376) / log2(42) = 3.3.
static double expansion_bound(Format f, double ratio, double k) {
    const double y = format_info(f).fmax * std::pow(ratio, k);
    const double step =
        std::max(std::ldexp(1.0, -format_info(f).mantissa_bits - 1), format_info(f).fmin / 2 / y);
    const double up = std::pow(1 + step, 1 / k) - 1, down = step < 1 ? 1 - std::pow(1 - step, 1 / k) : 1.0;
    return std::max(up, down) + 2 * EXPONENT_ERROR * (1 + 1 / k);
}

// Code i of a moment that has scalings.
static int stored_code(const Moment& moment, size_t i) { return moment.elements[i]; }

// Whether `got` may be read back for a positive or negative `exact` that was stored with expansion.
static bool is_expanded_value(Format f, double exact, double got, double max, double k) {
    if (exact == 0) return got == 0;
    if (std::fabs(exact) == max) return got == exact;
    const double bound = expansion_bound(f, std::fabs(exact) / max, k) * std::fabs(exact) + 0x1p-149;
    return got * exact >= 0 && std::fabs(got - exact) <= bound;
}

// Stores x in a moment and checks max, k, codes, values and statistics by their definition. A
// positive second moment must not become 0.
static void check_moment(Format f, bool expansion, bool second, const Floats& x) {
    const int64_t n = int64_t(x.size()), size = MOMENT_GROUP_SIZE;
    const bool scaled = is_fp8(f), expands = expansion && scaled;
    Moment moment({.name = "", .m_format = f, .v_format = f, .expansion = expansion}, f, n, second);
    CHECK(moment.max_magnitudes == Floats(size_t(scaled ? ceil_div(n, size) : 0), 0.0f));
    CHECK(moment.expansion_exponents == Floats(size_t(expands ? ceil_div(n, size) : 0), 1.0f));
    Floats values(x.size(), -7);
    moment.load(values.data());
    CHECK(norm(values) == 0);
    QuantStats stats;
    moment.store(x.data(), &stats);
    moment.load(values.data());
    float max = 0, k = 1, s = 1;  // of the element's moment group
    for (size_t i = 0; i < x.size(); i++) {
        const size_t moment_group = i / size_t(size);
        if (i % size_t(size) == 0) {
            float min = INFINITY;
            max = 0;
            for (size_t e = i; e < std::min(x.size(), i + size_t(size)); e++) {
                max = std::max(max, std::fabs(x[e]));
                if (x[e] != 0) min = std::min(min, std::fabs(x[e]));
            }
            k = expands && max > 0 ? expansion_exponent(f, max, min) : 1;
            s = scaled ? scale_of({f}, max) : 1;
            if (scaled) REQUIRE(moment.max_magnitudes[moment_group] == max);
            if (expands) REQUIRE(moment.expansion_exponents[moment_group] == k);
        }
        INFO(i, ": ", x[i], " became ", values[i], "; max ", max, ", k ", k);
        if (!scaled) {
            REQUIRE(values[i] == round_to(f, x[i]));
            continue;
        }
        const float y = expands ? expand(f, x[i], max, k) : x[i] * (1 / s);
        int code = encode(f, y);
        if (second && x[i] > 0 && decode(f, uint8_t(code)) == 0) code = 1;
        REQUIRE(stored_code(moment, i) == code);
        if (second) REQUIRE((values[i] > 0) == (x[i] > 0));
        if (expands) REQUIRE(is_expanded_value(f, x[i], values[i], max, k));
        else REQUIRE(values[i] == decode(f, uint8_t(code)) * (max > 0 ? s : 0));
    }
    if (scaled) check_stats(stats, x, values);
    else CHECK(stats.elements == 0);
}

TEST_CASE("expansion_exponent: k = log(R) / log(R of the moment group) is rounded and clamped") {
    SEEDED_RANDOM(rng);
    const auto rounded = [](double k) { return std::clamp(std::rint(k * 256) / 256, 1.0 / 16, 64.0); };
    for (Format f : {Format::E4M3, Format::E5M2}) {
        for (int64_t i = 0; i < cases(100000, 5000); i++) {
            const float min = float(std::exp2(-148 + 200 * rng.uniform()));
            const float max = i % 50 ? float(min * std::exp2(std::pow(rng.uniform(), 3) * 70)) : min;
            const double log_ratio = std::log2(double(max)) - std::log2(double(min));
            const double exact = max > min ? log2_range(f) / log_ratio : 1e9;
            // The divisor, a difference of two logarithms, is off by at most 2^-15; the quotient is rounded.
            const double slack = exact * exact * 0x1p-15 / log2_range(f) + exact * 0x1p-22;
            const float k = expansion_exponent(f, max, min);
            INFO(std::string(format_info(f).name), " max ", max, " min ", min, " k ", k);
            REQUIRE((k >= rounded(exact - slack) && k <= rounded(exact + slack)));
            REQUIRE(k * 256 == std::floor(k * 256));
        }
        CHECK(expansion_exponent(f, format_info(Format::FP32).fmax, 0x1p-149f) ==
              rounded(log2_range(f) / 277));
        CHECK(expansion_exponent(f, format_info(f).fmax, format_info(f).fmin) == 1.0f);
        CHECK(expansion_exponent(f, 1.0f, 1.0f) == 64.0f);  // the released code gives infinity
        CHECK(expansion_exponent(f, 1.0f, std::nextafter(1.0f, 0.0f)) == 64.0f);
        CHECK(reference::expand(f, 0.0f, 1.0f, 2.0f) == 0);
    }
}

TEST_CASE("Moment: max and k and codes of every format with and without expansion in moment groups") {
    SEEDED_RANDOM(rng);
    for (Format f : {Format::FP32, Format::BF16, Format::E4M3, Format::E5M2})
        for (bool expand : {false, true})
            for (int64_t n : {1, 2, 3, 31, 127, 128, 129, 255, 256, 128 * 40 + 77})
                for (const Distribution& d : distributions()) {
                    INFO(std::string(format_info(f).name), " ", expand, " ", n, " ", d.name);
                    Floats x = sample(d, rng, n);
                    check_moment(f, expand, false, x);
                    for (float& v : x) v = std::fabs(v);
                    check_moment(f, expand, true, x);
                }
}

TEST_CASE(
    "tensors_besides_weights: tensors of a matrix follow formats and granularity; a vector's are FP32") {
    const std::string m = ".m F8_E4M3 4096, .m.max F32 32, .m.k F32 32, ", v = ".v.max F32 32, .v.k F32 32, ";
    const std::pair<std::string, std::string> rows[] = {
        {"coat", m + ".v F8_E4M3 4096, " + v},
        {"fp8", ".m F8_E4M3 4096, .m.max F32 32, .v F8_E4M3 4096, .v.max F32 32, "},
        {"bf16", ".m BF16 4096, .v BF16 4096, "},
        {"fp32", ".m F32 4096, .v F32 4096, "}};
    for (const auto& [optimizer, expected] : rows) {
        std::map<std::string, std::string> all;  // tensors by parameter
        for (const StateTensor& t : tensors_besides_weights(settings_of("bf16 master moments " + optimizer)))
            all[t.param.name] +=
                concat(t.name.substr(t.param.name.size()), " ", t.dtype, " ", t.size(), ", ");
        CHECK_MESSAGE(all["layers.0.attention_out"] == expected, optimizer);
        CHECK(all["layers.0.norm1.weight"] == ".m F32 64, .v F32 64, ");
    }
}

TEST_CASE("adamw: steps follow torch.optim.AdamW in double") {
    SEEDED_RANDOM(rng);
    for (int round = 0; round < 200; round++) {
        AdamWOptions a{1 + rng.below(round % 2 ? 5 : 1000), float(std::exp(rng.normal() - 5))};
        a.clip = round % 3 ? 0.7f : 0;
        a.weight_decay = round % 5 ? 0.1f : 0;
        const bool decays = round % 4;
        const double gradient_norm = std::exp(rng.normal());
        const AdamWConstants f = adamw_constants(a, decays, compute_clip_factor(a, gradient_norm));
        const double clip = a.clip > 0 && gradient_norm > double(a.clip) ? double(a.clip) / gradient_norm : 1,
                     b1 = a.beta1, b2 = a.beta2, bias1 = 1 - std::pow(b1, double(a.update_number)),
                     bias2 = 1 - std::pow(b2, double(a.update_number));
        auto g = rng.normals<float>(100, std::exp(3 * rng.normal())), w = rng.normals<float>(100),
             m = rng.normals<float>(100), v = rng.normals<float>(100);
        if (round % 7 == 0) {
            g[0] = m[0] = v[0] = 0;
            g[1] = 1e-8f;  // shows that eps is outside of the root
            m[1] = v[1] = 0;
        }
        for (float& x : v) x = x * x;
        const Floats w0 = w, m0 = m, v0 = v;
        adamw(f, 100, g.data(), w.data(), m.data(), v.data());
        for (size_t i = 0; i < g.size(); i++) {
            const double x = clip * g[i], mi = b1 * m0[i] + (1 - b1) * x, vi = b2 * v0[i] + (1 - b2) * x * x;
            const double update = mi / bias1 / (std::sqrt(vi / bias2) + double(a.eps));
            const double decay = decays ? double(a.weight_decay) * double(w0[i]) : 0;
            const double size =
                std::fabs(update) + std::fabs(m0[i]) / (std::sqrt(vi) + 1e-8) + std::fabs(decay);
            const double wi = w0[i] - double(a.lr) * (update + decay);
            INFO("round ", round, " element ", i, " update ", a.update_number);
            REQUIRE(std::fabs(m[i] - mi) <= 0x1p-21 * (std::fabs(m0[i]) + std::fabs(x)));
            REQUIRE(std::fabs(v[i] - vi) <= 0x1p-21 * vi);
            REQUIRE(std::fabs(w[i] - wi) <= 0x1p-18 * a.lr * size / bias1 + 0x1p-23 * std::fabs(w0[i]));
        }
    }
}

TEST_CASE("round_stochastically: by the rule of common/random.h; exact values stay; the mean is the value") {
    SEEDED_RANDOM(rng);
    for (int64_t i = 0; i < cases(200000, 10000); i++) {
        const uint64_t key = rng.bits();
        const int64_t at = int64_t(rng.bits() >> 24);
        const float x = float(rng.sign() * std::exp2(-140 + 260 * rng.uniform()));
        const uint32_t bits = bits_of(x), low = bits & 0xFFFF;
        const uint32_t random = uint32_t(rounding_bits(key, uint64_t(at) / 4) >> (16 * (at % 4))) & 0xFFFF;
        const uint16_t got = round_stochastically(x, key, at);
        REQUIRE(got == (bits >> 16) + (low + random > 0xFFFF));
        REQUIRE(round_stochastically(from_bf16(got), key, at) == got);
    }
    // n roundings go up by a step h with probability p. Their mean has the standard deviation h sqrt(p (1 -
    // p) / n), at most h / (2 sqrt(n)). Five standard deviations are exceeded once in two million draws.
    const int64_t n = cases(1 << 20, 1 << 14);
    const float step = 0x1p-7f;
    for (float part : {0.0f, 0x1p-16f, 0.03f, 0.25f, 0.5f, 0.99f}) {
        const float x = -(1 + part * step);
        double by_element = 0, by_step = 0, by_seed = 0;  // sums of the differences from x
        for (int64_t i = 0; i < n; i++) {
            by_element += double(from_bf16(round_stochastically(x, rounding_key(1, 7), i)) - x);
            by_step += double(from_bf16(round_stochastically(x, rounding_key(1, i), 12345)) - x);
            by_seed += double(from_bf16(round_stochastically(x, rounding_key(uint64_t(i), 7), 12345)) - x);
        }
        INFO("part of a step ", part);
        const double bound = part == 0 ? 0 : 5 * double(step) / 2 * std::sqrt(double(n));
        for (double sum : {by_element, by_step, by_seed}) CHECK(std::fabs(sum) <= bound);
    }
}

TEST_CASE("random_weight and rounding_bits have not changed: old runs can be repeated") {
    CHECK(random_weight(1, 2, 3, 0.02f) == 0x1.96d2f8p-9f);
    CHECK(rounding_bits(1, 2) == 0x35922aeb41da4b73);
    CHECK(rounding_key(3, 4) == 0xbb275bd800000000);
}
