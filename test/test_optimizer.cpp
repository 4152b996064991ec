// test_optimizer.cpp - dynamic range expansion and the FP8 AdamW (paper section 4).
//
// First the moments' encoding on every kind of group, then AdamW against Adam in double over a thousand steps, then the
// paper's ordering of errors (table 1) on the moments of a real run.
#include <doctest/doctest.h>

#include <algorithm>
#include <set>

#include "../reference.h"
#include "oracle.h"
#include "random.h"
#include "tiny.h"

using namespace coat;
using namespace coat::test;
using namespace coat::reference;

namespace {

constexpr Format FP8[] = {Format::E4M3, Format::E5M2};
constexpr int64_t LENGTHS[] = {1, 2, 3, 5, 31, 64, 100, 127, 128, 129, 255, 256, 128 * 40 + 77};

double log2_range(Format f) { return std::log2(double(info(f).max) / double(info(f).min)); }

// Codes, (max, k) and decoded values of n elements; what lies behind the end must not be written.
struct Encoded {
    std::vector<uint8_t> codes;
    std::vector<float> max, k, values;
};

Encoded encode_all(Format f, bool expand, bool positive, const std::vector<float>& x, QuantStats* stats = nullptr) {
    const int64_t n = int64_t(x.size()), groups = ceil_div(n, MOMENT_GROUP);
    Encoded e{std::vector<uint8_t>(size_t(n) + 1, 0xA5), std::vector<float>(size_t(groups) + 1, -7), std::vector<float>(size_t(groups) + 1, 1),
              std::vector<float>(size_t(n) + 1, -7)};
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

std::vector<float> magnitudes(std::vector<float> x) {
    for (float& v : x) v = std::fabs(v);
    return x;
}

// FP32 arithmetic of y = FMAX 2^(k (log2 |x| - log2 max)) and back. A logarithm of an FP32 number is below 150 and rounds by
// 2^-17, so the exponent is wrong by at most 2^-15 in all; times ln 2, and for y times k.
constexpr double EXPONENT_ERROR = 0x1p-15 * 0.6931;

// Largest relative error of a value that was encoded with exponent k and magnitude x = max * ratio: the code is wrong by half of
// its step, relative to y, and value = max (code / FMAX)^(1/k).
double expansion_bound(Format f, double ratio, double k) {
    const double y = info(f).max * std::pow(ratio, k);
    const double step = std::max(std::ldexp(1.0, -info(f).mantissa - 1), info(f).min / 2 / y);
    const double up = std::pow(1 + step, 1 / k) - 1, down = step < 1 ? 1 - std::pow(1 - step, 1 / k) : 1.0;
    return std::max(up, down) + 2 * EXPONENT_ERROR * (1 + 1 / k);
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Expansion

TEST_CASE("expansion: k is the logarithm of the format's range to the base of the group's, in sixteenths, clamped") {
    FRESH_RANDOM(rng);
    for (Format f : FP8)
        for (int64_t i = 0; i < count(100000, 5000); i++) {
            const float min = float(std::exp2(-148 + 200 * rng.uniform()));
            const float max = float(min * std::exp2(std::pow(rng.uniform(), 3) * 70));
            if (max == min) continue;  // the test of the limits has it
            const double exact = 16 * log2_range(f) / (std::log2(double(max)) - std::log2(double(min)));
            const float k = expansion_factor(f, max, min);
            INFO(std::string(info(f).name), " max ", max, " min ", min, " k ", k);
            const double slack = exact * exact * EXPONENT_ERROR;  // of a quotient whose divisor is wrong by EXPONENT_ERROR
            const double low = std::floor(exact - slack) / 16, high = std::floor(exact + slack) / 16;
            REQUIRE(k >= std::clamp(low, 1.0 / 16, 64.0));
            REQUIRE(k <= std::clamp(high, 1.0 / 16, 64.0));
            REQUIRE(k * 16 == std::floor(k * 16));
        }
}

TEST_CASE("expansion: k at its limits") {
    for (Format f : FP8) {
        CHECK(expansion_factor(f, 1.0f, 1.0f) == 64.0f);                             // equal magnitudes: the release gives infinity
        CHECK(expansion_factor(f, 1.0f, std::nextafter(1.0f, 0.0f)) == 64.0f);
        const float k = expansion_factor(f, std::numeric_limits<float>::max(), std::numeric_limits<float>::denorm_min());
        CHECK(k == float(std::floor(16 * log2_range(f) / 277) / 16));                // the widest group there is
        CHECK(k >= 1.0f / 16);
    }
    CHECK(expansion_factor(Format::E4M3, 448.0f, 0x1p-9f) == 1.0f);                  // a group as wide as the format
    CHECK(expansion_factor(Format::E5M2, 57344.0f, 0x1p-16f) == 1.0f);
}

TEST_CASE("expansion: a group of zeros is exactly zero") {
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

TEST_CASE("expansion: one element that is not zero, and equal magnitudes with their signs, are exact") {
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

TEST_CASE("expansion: zeros do not take part in the range, wherever they stand") {
    FRESH_RANDOM(rng);
    for (Format f : FP8)
        for (int64_t zeros : {1, 5, 60}) {
            std::vector<float> x = rng.normals<float>(MOMENT_GROUP - zeros);
            const Encoded without = encode_all(f, true, false, x);
            for (int64_t i = 0; i < zeros; i++) x.insert(x.begin() + (i == 0 ? 0 : rng.below(int64_t(x.size()))), 0.0f);
            const Encoded with = encode_all(f, true, false, x);
            CHECK(with.k == without.k);
            CHECK(with.max == without.max);
            for (size_t i = 0; i < x.size(); i++) CHECK((with.values[i] == 0) == (x[i] == 0));
        }
}

TEST_CASE("expansion: every value is within the bound that k and the format give, signs kept, the largest exact") {
    FRESH_RANDOM(rng);
    for_every_group(rng, [](Format f, const std::vector<float>& x) {
        const Encoded e = encode_all(f, true, false, x);
        for (size_t i = 0; i < x.size(); i++) {
            const float max = e.max[i / MOMENT_GROUP], k = e.k[i / MOMENT_GROUP], value = e.values[i];
            INFO("element ", i, " = ", x[i], " value ", value, " max ", max, " k ", k);
            if (x[i] == 0) REQUIRE(value == 0);
            if (std::fabs(x[i]) == max) REQUIRE(value == x[i]);
            const double bound = x[i] == 0 ? 0 : expansion_bound(f, std::fabs(double(x[i])) / double(max), k);
            REQUIRE(std::fabs(double(value) - double(x[i])) <= bound * std::fabs(double(x[i])) + 0x1p-149);  // denormal values
            REQUIRE(double(value) * double(x[i]) >= 0);
        }
    });
}

TEST_CASE("expansion: no second moment that is not zero becomes zero, with and without expansion") {
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

TEST_CASE("expansion: groups do not touch each other, and a tail is a group of its own") {
    FRESH_RANDOM(rng);
    for_every_group(rng, [](Format f, const std::vector<float>& x) {
        for (bool expand : {false, true}) {
            const Encoded whole = encode_all(f, expand, false, x);
            for (size_t g = 0; g < whole.max.size(); g++) {
                const size_t first = g * MOMENT_GROUP, last = std::min(x.size(), first + MOMENT_GROUP);
                const Encoded part = encode_all(f, expand, false, std::vector<float>(x.begin() + first, x.begin() + last));
                REQUIRE((part.max[0] == whole.max[g] && part.k[0] == whole.k[g]));
                REQUIRE(std::equal(part.codes.begin(), part.codes.end(), whole.codes.begin() + first));
                REQUIRE(std::equal(part.values.begin(), part.values.end(), whole.values.begin() + first));
            }
        }
    });
}

TEST_CASE("expansion: encoding what was decoded gives the same codes wherever k comes out the same") {
    // The largest magnitude survives exactly, the smallest does not, so k may move by a sixteenth or a few. Where it stays, y is the
    // code again up to the arithmetic's error, far below half a step.
    FRESH_RANDOM(rng);
    int64_t same = 0, groups = 0;
    for (Format f : FP8)
        for (int64_t i = 0; i < count(500, 50); i++) {
            const Encoded once = encode_all(f, true, false, rng.normals<float>(MOMENT_GROUP, std::exp(5 * rng.normal())));
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

TEST_CASE("expansion: without it, value = code max / FMAX within the format's bound, and only first moments flush to zero") {
    FRESH_RANDOM(rng);
    for_every_group(rng, [](Format f, const std::vector<float>& x) {
        const Encoded m = encode_all(f, false, false, x), v = encode_all(f, false, true, magnitudes(x));
        for (size_t i = 0; i < x.size(); i++) {
            const float max = m.max[i / MOMENT_GROUP];
            const double s = double(scale_of({f}, max)), a = std::fabs(double(x[i]));
            INFO("element ", i, " = ", x[i], " max ", max);
            const double bound = std::max(std::ldexp(a, -info(f).mantissa - 1), s * info(f).min / 2) * (1 + 0x1p-20) + a * 0x1p-21 + 0x1p-149;
            REQUIRE(std::fabs(double(m.values[i]) - double(x[i])) <= bound);
            const bool flushes = a > 0 && m.values[i] == 0;
            REQUIRE(v.values[i] == (flushes ? float(s * info(f).min) : std::fabs(m.values[i])));
        }
    });
}

TEST_CASE("expansion: halves the worst error of a normal group and more of a narrow one (paper section 4.2)") {
    FRESH_RANDOM(rng);
    auto error = [](bool expand, bool positive, const std::vector<float>& x) {
        return relative_error(encode_all(Format::E4M3, expand, positive, x).values, x);
    };
    std::vector<float> narrow(128 * 100);  // a factor of ten between the smallest and the largest: typical of second moments
    for (float& v : narrow) v = float(std::pow(10, rng.uniform()));
    const std::vector<float> wide = rng.normals<float>(128 * 100);
    CHECK(error(true, false, wide) < error(false, false, wide));
    // Range 10: k = log2(229376) / log2(10) = 5.3, and the relative step shrinks by as much.
    CHECK(error(true, true, narrow) < error(false, true, narrow) / 4);
}

TEST_CASE("expansion: statistics count elements, signal, noise and what was flushed") {
    FRESH_RANDOM(rng);
    std::vector<float> x = rng.normals<float>(300);
    x[7] = 1e-9f;  // flushed without expansion: 1e-9 / max < FMIN / FMAX / 2
    x[8] = 0;
    for (bool expand : {false, true}) {
        QuantStats stats;
        const Encoded e = encode_all(Format::E4M3, expand, false, x, &stats);
        double noise = 0;
        for (size_t i = 0; i < x.size(); i++) noise += double(e.values[i] - x[i]) * double(e.values[i] - x[i]);
        CHECK(stats.elements == 300);
        CHECK(stats.flushed >= (expand ? 0 : 1));
        CHECK(stats.flushed == std::count(e.values.begin(), e.values.end(), 0.0f) - 1);
        CHECK(std::fabs(stats.noise - noise) < 1e-5 * noise);  // the differences above are FP32's
        CHECK(std::fabs(stats.signal - norm(x) * norm(x)) < 1e-12 * stats.signal);
    }
}

TEST_CASE("moments: every format stores and loads ranges cut at group boundaries, and starts at zero") {
    FRESH_RANDOM(rng);
    const int64_t n = 5 * MOMENT_GROUP + 19;
    const std::vector<float> x = magnitudes(rng.normals<float>(n));
    for (Format f : {Format::F32, Format::BF16, Format::F16, Format::E4M3, Format::E5M2})
        for (bool expand : {false, true}) {
            Moment whole, parts;
            whole.init(f, expand, n);
            parts.init(f, expand, n);
            std::vector<float> a(x.size(), -1), b(x.size(), -1);
            whole.load(0, n, a.data());
            CHECK(norm(a) == 0);
            whole.store(0, n, x.data(), true);
            for (int64_t first = 0; first < n; first += 2 * MOMENT_GROUP)
                parts.store(first, std::min<int64_t>(2 * MOMENT_GROUP, n - first), x.data() + first, true);
            whole.load(0, n, a.data());
            for (int64_t first = 0; first < n; first += MOMENT_GROUP)
                parts.load(first, std::min<int64_t>(MOMENT_GROUP, n - first), b.data() + first);
            CHECK(a == b);
            CHECK(whole.codes == parts.codes);
            CHECK(relative_error(a, x) <= std::ldexp(1.0, -info(f).mantissa - 1));
            if (f == Format::F32) CHECK(a == x);
        }
}

namespace {

// FP8-LM's moments: n elements with one scale, value = code * max / FMAX.
Moment per_tensor(Format f, bool positive, const std::vector<float>& x, QuantStats* stats = nullptr) {
    Moment moment;
    moment.init(f, false, int64_t(x.size()), PER_TENSOR);
    moment.fit_tensor(int64_t(x.size()), x.data());
    moment.store(0, int64_t(x.size()), x.data(), positive, stats);
    return moment;
}

std::vector<float> loaded(const Moment& moment, size_t n) {
    std::vector<float> x(n, -7);
    moment.load(0, int64_t(n), x.data());
    return x;
}

}  // namespace

TEST_CASE("moments: with one scale a tensor, every value is within the format's bound of that scale, plainly rounded; what flushes is counted") {
    FRESH_RANDOM(rng);
    for (Format f : {Format::F16, Format::E4M3, Format::E5M2})
        for (int64_t n : LENGTHS)
            for (const Distribution& d : distributions()) {
                INFO(std::string(info(f).name), ", ", n, " elements, ", d.name);
                const std::vector<float> x = sample(d, rng, n);
                QuantStats stats;
                const Moment moment = per_tensor(f, false, x, &stats);
                const std::vector<float> values = loaded(moment, x.size());
                REQUIRE((moment.max.size() == 1 && moment.k.empty()));
                REQUIRE(moment.max[0] == amax(x.data(), n));
                const double s = double(scale_of({f}, moment.max[0]));
                int64_t flushed = 0;
                for (size_t i = 0; i < x.size(); i++) {
                    const double a = std::fabs(double(x[i]));
                    const double bound = std::max(std::ldexp(a, -info(f).mantissa - 1), s * info(f).min / 2) * (1 + 0x1p-20) + a * 0x1p-21 + 0x1p-149;
                    REQUIRE(std::fabs(double(values[i]) - double(x[i])) <= bound);
                    if (x[i] != 0 && a < s * info(f).min * 0.499) REQUIRE(values[i] == 0);
                    flushed += x[i] != 0 && values[i] == 0;
                }
                if (s * info(f).min > 0x1p-126) REQUIRE(stats.flushed == flushed);  // else a code's value may lie below FP32
                REQUIRE(stats.elements == n);
            }
}

TEST_CASE("moments: with one scale a tensor, ranges load and store as the whole does, and fit_tensor leaves groups alone") {
    FRESH_RANDOM(rng);
    const int64_t n = 5 * MOMENT_GROUP + 19;
    std::vector<float> x = magnitudes(rng.normals<float>(n));
    x[700 % n] = 300;  // in one range alone
    x[3] = 1e-11f;
    for (Format f : {Format::F32, Format::BF16, Format::F16, Format::E4M3})
        for (bool positive : {false, true}) {
            const Moment whole = per_tensor(f, positive, x);
            Moment parts;
            parts.init(f, false, n, PER_TENSOR);
            CHECK(norm(loaded(parts, x.size())) == 0);
            parts.fit_tensor(n, x.data());
            for (int64_t first = 0; first < n; first += 2 * MOMENT_GROUP)
                parts.store(first, std::min<int64_t>(2 * MOMENT_GROUP, n - first), x.data() + first, positive);
            CHECK((whole.codes == parts.codes && whole.max == parts.max));
            std::vector<float> values(x.size());
            for (int64_t first = 0; first < n; first += MOMENT_GROUP)
                parts.load(first, std::min<int64_t>(MOMENT_GROUP, n - first), values.data() + first);
            CHECK(values == loaded(whole, x.size()));
            if (is_scaled(f)) CHECK((values[3] > 0) == positive);  // 1e-11 of 300 is below what either format reaches
        }
    Moment groups;
    groups.init(Format::E4M3, true, n);
    const Moment before = groups;
    groups.fit_tensor(n, x.data());
    CHECK((groups.max == before.max && groups.k == before.k));
}

TEST_CASE("moments: FP16 reaches 2^-41 of a tensor's largest second moment, E4M3 with one scale 2^-18") {
    const std::pair<Format, int> reach[] = {{Format::F16, 41}, {Format::E4M3, 18}};
    for (const auto& [f, power] : reach) {
        std::vector<float> v(300, 0.0f);
        v[0] = 3.0f;
        v[1] = 3.0f * std::ldexp(1.0f, -power + 1), v[2] = 3.0f * std::ldexp(1.0f, -power - 1);
        QuantStats stats;
        const std::vector<float> values = loaded(per_tensor(f, false, v, &stats), v.size());
        INFO(std::string(info(f).name));
        CHECK(values[0] == doctest::Approx(3.0f).epsilon(1e-6));
        CHECK(values[1] > 0);
        CHECK(values[2] == 0);
        CHECK(stats.flushed == 1);
    }
}

TEST_CASE("moments: the state's tensors follow the formats and the granularity") {
    const ModelConfig config = tiny_config(LLAMA, true);
    auto shape_of = [&](const OptimizerFormat& o, const std::string& name) -> std::string {
        Setup s = tiny_setup(config, "bf16", "fp32");
        s.optimizer = o;
        for (const StateTensor& t : optimizer_tensors(s))
            if (t.name == name) return std::string(t.dtype) + " " + std::to_string(t.size());
        return "none";
    };
    const OptimizerFormat fp8lm = find_row(optimizers(), "fp8lm", "");
    const std::string n = std::to_string(64 * 64), groups = std::to_string(64 * 64 / MOMENT_GROUP);
    CHECK(shape_of(fp8lm, "layers.0.attention_out.m") == "F8_E4M3 " + n);
    CHECK(shape_of(fp8lm, "layers.0.attention_out.v") == "F16 " + n);
    for (const char* scale : {".m.max", ".v.max"}) CHECK(shape_of(fp8lm, std::string("layers.0.attention_out") + scale) == "F32 1");
    for (const char* none : {".m.k", ".v.k"}) CHECK(shape_of(fp8lm, std::string("layers.0.attention_out") + none) == "none");
    CHECK(shape_of(fp8lm, "layers.0.norm1.gain.v") == "F32 64");  // gains and biases stay in FP32
    CHECK(shape_of(fp8lm, "layers.0.norm1.gain.v.max") == "none");
    const OptimizerFormat mixed{"coat", Format::E4M3, Format::F16, true, ""};  // --optimizer coat --v-format fp16
    CHECK(shape_of(mixed, "layers.0.attention_out.m.k") == "F32 " + groups);
    CHECK(shape_of(mixed, "layers.0.attention_out.v.max") == "F32 " + groups);
    CHECK(shape_of(mixed, "layers.0.attention_out.v.k") == "none");
}

TEST_CASE("moments: fp8lm trains, tells its scale in the state, and its report counts what is lost") {
    const Setup setup = tiny_setup(tiny_config(LLAMA, true), "bf16", "fp8lm");
    Training training(setup), exact(tiny_setup(tiny_config(LLAMA, true), "bf16", "fp32"));
    double loss = 0, wanted = 0, first = 0;
    for (int64_t i = 0; i < count(60, 10); i++) {
        loss = training.step().loss, wanted = exact.step().loss;
        if (i == 0) first = loss;
    }
    CHECK(std::fabs(loss - wanted) < 0.02 * wanted);
    CHECK(loss < first);
    const int64_t n = 64 * 64;
    const std::string name = "layers.0.attention_out";
    const float max = read_as<float>(*training.model, name + ".v.max", 1)[0];
    const std::vector<uint16_t> v = read_as<uint16_t>(*training.model, name + ".v", n);
    const uint16_t top = *std::max_element(v.begin(), v.end());
    CHECK(top == 0x7BFF);  // the whole range is in use
    CHECK(max > 0);
    const QuantReport report = training.model->quantization(training.tokens.data(), training.targets.data());
    const QuantStats& m = report.kinds[static_cast<int>(Kind::Moment1)];
    const QuantStats& second = report.kinds[static_cast<int>(Kind::Moment2)];
    int64_t elements = 0;
    for (const Param& p : parameters(setup.config)) elements += p.role.fp8_state ? p.size() : 0;
    CHECK((m.elements == elements && second.elements == elements));
    CHECK(m.flushed > 0);  // E4M3 with one scale a tensor reaches 2^-18 of the largest
    CHECK(second.flushed < m.flushed);
    CHECK(second.snr_db() > m.snr_db());
    CHECK((report.k_m.empty() && report.k_v.empty()));
}

// ---------------------------------------------------------------------------------------------------------------------
// AdamW

namespace {

// torch.optim.AdamW in double, with the same FP32 constants.
struct AdamInDouble {
    std::vector<double> w, m, v;
    void step(const AdamW& a, bool decays, const std::vector<float>& gradient) {
        const double b1 = a.beta1, b2 = a.beta2;
        for (size_t i = 0; i < w.size(); i++) {
            const double g = gradient[i];
            m[i] = b1 * m[i] + (1 - b1) * g;
            v[i] = b2 * v[i] + (1 - b2) * g * g;
            const double mean = m[i] / (1 - std::pow(b1, double(a.step))), variance = v[i] / (1 - std::pow(b2, double(a.step)));
            w[i] -= double(a.lr) * (decays ? double(a.weight_decay) * w[i] : 0.0);
            w[i] -= double(a.lr) * mean / (std::sqrt(variance) + double(a.eps));
        }
    }
};

// One parameter's state as a Model keeps it: a BF16 weight with its remainder, and two moments.
struct State {
    std::vector<uint16_t> weight;
    std::vector<int16_t> remainder;
    Moment m, v;
    bool keep_positive;

    State(const OptimizerFormat& o, const std::vector<float>& start) : weight(start.size()), remainder(start.size()), keep_positive(o.keep_positive) {
        m.init(o.m, o.expand, int64_t(start.size()), o.granularity);
        v.init(o.v, o.expand, int64_t(start.size()), o.granularity);
        put(start);
    }
    void put(const std::vector<float>& w) {
        for (size_t i = 0; i < w.size(); i++) split_master(w[i], &weight[i], &remainder[i]);
    }
    std::vector<float> master() const {
        std::vector<float> w(weight.size());
        for (size_t i = 0; i < w.size(); i++) w[i] = join_master(weight[i], remainder[i]);
        return w;
    }
    std::vector<float> moment(const Moment& of) const {
        std::vector<float> x(weight.size());
        of.load(0, int64_t(x.size()), x.data());
        return x;
    }
    void step(const AdamW& a, bool decays, const std::vector<float>& gradient, double grad_norm) {
        std::vector<float> w = master(), m32 = moment(m), v32 = moment(v);
        adamw(adamw_factors(a, decays, grad_norm), int64_t(w.size()), gradient.data(), w.data(), m32.data(), v32.data());
        m.fit_tensor(int64_t(w.size()), m32.data());
        v.fit_tensor(int64_t(w.size()), v32.data());
        m.store(0, int64_t(w.size()), m32.data(), false);
        v.store(0, int64_t(w.size()), v32.data(), keep_positive);
        put(w);
    }
};

AdamW plain(int64_t step) {
    AdamW a{step, 1e-2f};
    a.clip = 0;
    return a;
}

const std::vector<OptimizerFormat>& optimizer_rows() {  // the table's, and E5M2 for the second moment
    static const std::vector<OptimizerFormat> rows = [] {
        std::vector<OptimizerFormat> r = optimizers();
        r.push_back({"coat, E5M2", Format::E4M3, Format::E5M2, true, ""});
        r.push_back({"fp8, E5M2", Format::E4M3, Format::E5M2, false, ""});
        r.push_back({"coat, FP16", Format::E4M3, Format::F16, true, ""});
        r.push_back({"fp8lm, FP16 both", Format::F16, Format::F16, false, "", PER_TENSOR, false});
        return r;
    }();
    return rows;
}

// Root mean square of the relative rounding error of a format: uniform within half a step, and a step is at most 2^-mantissa
// of the value. Expansion divides it by k.
double rms_error(Format f) { return std::ldexp(1.0, -info(f).mantissa - 1) / std::sqrt(3.0); }

double mean_k(const Moment& moment) {
    if (moment.k.empty()) return 1;
    double sum = 0;
    for (float k : moment.k) sum += k;
    return sum / double(moment.k.size());
}

}  // namespace

TEST_CASE("adamw: factors") {
    AdamW a{3, 2e-3f};
    const AdamWFactors f = adamw_factors(a, true, 4.0);
    CHECK(f.lr == 2e-3f);
    CHECK(f.decay == a.weight_decay);
    CHECK(adamw_factors(a, false, 4.0).decay == 0);
    CHECK(f.one_minus_beta1 == 1 - a.beta1);
    CHECK(f.one_minus_beta2 == 1 - a.beta2);
    CHECK(f.bias1 == float(1 - std::pow(double(a.beta1), 3)));
    CHECK(f.bias2_root == float(std::sqrt(1 - std::pow(double(a.beta2), 3))));
    CHECK(f.gradient_scale == 0.25f);                                   // clip 1 over a norm of 4
    CHECK(adamw_factors(a, true, 0.999).gradient_scale == 1.0f);        // shorter than clip: as it is
    CHECK(adamw_factors(a, true, 0.0).gradient_scale == 1.0f);
    a.clip = 0;
    CHECK(adamw_factors(a, true, 1e6).gradient_scale == 1.0f);          // no clipping
    a.step = 1'000'000'000;
    CHECK(adamw_factors(a, true, 1).bias1 == 1.0f);
}

TEST_CASE("adamw: bias correction makes the first step lr long, with eps outside the root") {
    for (float g : {3.0f, -0.02f, 1e-4f, 1e-8f, -1e-9f, 0.0f}) {
        float w = 0, m = 0, v = 0;
        adamw(adamw_factors(plain(1), false, 0), 1, &g, &w, &m, &v);
        // m / (1 - b1) = g and sqrt(v / (1 - b2)) = |g|, so the step is lr g / (|g| + eps): half of lr where |g| = eps.
        const double wanted = -1e-2 * double(g) / (std::fabs(double(g)) + 1e-8);
        INFO("gradient ", g);
        CHECK(std::fabs(w - wanted) <= std::fabs(wanted) * 1e-6);
    }
}

TEST_CASE("adamw: weight decay is decoupled from the moments, and only where the factors say so") {
    float w = 2, m = 0, v = 0, zero = 0;
    adamw(adamw_factors(plain(1), true, 0), 1, &zero, &w, &m, &v);
    CHECK(double(w) == doctest::Approx(2 * (1 - 1e-2 * 0.1)).epsilon(1e-7));
    CHECK((m == 0 && v == 0));
    adamw(adamw_factors(plain(2), false, 0), 1, &zero, &w, &m, &v);
    CHECK(double(w) == doctest::Approx(2 * (1 - 1e-2 * 0.1)).epsilon(1e-7));
}

TEST_CASE("adamw: clipping is the same as a gradient already shortened") {
    FRESH_RANDOM(rng);
    const std::vector<float> g = rng.normals<float>(1000, 3);
    std::vector<float> shorter = g, w1(1000, 1.0f), w2 = w1, m1(1000), v1(1000), m2(1000), v2(1000);
    for (float& x : shorter) x *= 0.125f;  // a power of two, so that equality is exact
    AdamW clipped{1, 1e-2f}, free{1, 1e-2f};
    free.clip = 0;
    adamw(adamw_factors(clipped, true, 8.0), 1000, g.data(), w1.data(), m1.data(), v1.data());
    adamw(adamw_factors(free, true, 8.0), 1000, shorter.data(), w2.data(), m2.data(), v2.data());
    CHECK(w1 == w2);
    CHECK(m1 == m2);
    CHECK(v1 == v2);
}

namespace {

// The error that a moment in few bits has gathered, as a vector: each step stores it with a relative error of rms / k, and the
// next keeps beta of what is there. Independent errors add in squares. FP32's arithmetic makes 3 roundings of 2^-24 a step,
// which may all point one way: they stay for 1 / (1 - beta) steps.
struct ExpectedError {
    double beta, square = 0;
    double step(const Moment& moment, const std::vector<double>& exact) {
        const double stored = rms_error(moment.format) / mean_k(moment) * norm(exact);
        square = beta * beta * square + stored * stored;
        return std::sqrt(square) / norm(exact) + 3 * 0x1p-24 / (1 - beta);
    }
};

}  // namespace

TEST_CASE("adamw: a thousand steps in every state format stay as close to Adam in double as the format allows") {
    // Gradients do not depend on the weights, so errors do not feed back. An update m / sqrt(v) is wrong by the root of m's square and
    // that of half of v's, relative; by the triangle inequality |w - exact| is at most the sum of these errors times |update|.
    // FP32 weights round by 2^-24 |w| a step. Twice the moments' derived errors is allowed: elements near zero lie in the
    // subnormal codes, where a step is a larger part of them, and rounding errors of slowly moving values are not quite independent.
    FRESH_RANDOM(rng);
    const int64_t n = 8 * MOMENT_GROUP + 50, steps = count(1000, 30);
    const std::vector<float> start = rng.normals<float>(n, 0.5), mean = rng.normals<float>(n, 0.5);
    std::vector<float> spread(static_cast<size_t>(n));
    for (float& s : spread) s = float(std::exp(0.3 * rng.normal()));  // so that no element dominates a norm
    for (const OptimizerFormat& o : optimizer_rows()) {
        State state(o, start);
        AdamInDouble exact{std::vector<double>(start.begin(), start.end()), std::vector<double>(size_t(n)), std::vector<double>(size_t(n))};
        ExpectedError expected_m{double(0.9f)}, expected_v{double(0.95f)};
        double bound_w = 0, worst_m = 0, worst_v = 0;  // the worst are relative to what is expected
        for (int64_t t = 1; t <= steps; t++) {
            AdamW a = plain(t);
            a.lr = 1e-3f;
            std::vector<float> g(static_cast<size_t>(n));
            for (size_t i = 0; i < g.size(); i++) g[i] = spread[i] * float(double(mean[i]) + rng.normal());
            const std::vector<double> before = exact.w;
            exact.step(a, true, g);
            state.step(a, true, g, 0);
            const double m = expected_m.step(state.m, exact.m), v = expected_v.step(state.v, exact.v);
            worst_m = std::max(worst_m, relative_error(state.moment(state.m), exact.m) / m);
            worst_v = std::max(worst_v, relative_error(state.moment(state.v), exact.v) / v);
            bound_w += 2 * std::hypot(m, v / 2) * relative_error(before, exact.w) * norm(exact.w) + 0x1p-24 * norm(exact.w);
        }
        const double error_w = relative_error(state.master(), exact.w) * norm(exact.w);
        INFO(std::string(o.name), ": errors over expected ones: m ", worst_m, ", v ", worst_v, "; error of w ", error_w, ", bound ", bound_w);
        CHECK(worst_m <= 2);
        CHECK(worst_v <= 2);
        CHECK(error_w <= bound_w);
        if (is_scaled(o.m)) CHECK(worst_m > 0.25);  // the format is really in use
    }
}

TEST_CASE("adamw: on a noisy quadratic every state format ends where Adam in double ends") {
    // The loss 1/2 sum c w^2 with gradient noise of 1 settles at a level that noise and lr set, not the format: moments
    // wrong by a few per cent move it by a few per cent.
    FRESH_RANDOM(rng);
    const int64_t n = 4 * MOMENT_GROUP, steps = count(1000, 60), window = steps / 5;
    const std::vector<float> start = rng.normals<float>(n);
    std::vector<double> curvature(static_cast<size_t>(n));
    for (double& c : curvature) c = std::exp(rng.normal());
    auto loss = [&](const auto& w) {
        double sum = 0;
        for (size_t i = 0; i < w.size(); i++) sum += 0.5 * curvature[i] * double(w[i]) * double(w[i]);
        return sum / double(n);
    };
    for (const OptimizerFormat& o : optimizer_rows()) {
        State state(o, start);
        AdamInDouble exact{std::vector<double>(start.begin(), start.end()), std::vector<double>(size_t(n)), std::vector<double>(size_t(n))};
        double ours = 0, wanted = 0;
        for (int64_t t = 1; t <= steps; t++) {
            const std::vector<float> w = state.master();
            std::vector<float> g(size_t(n), 0), h(size_t(n), 0);
            for (size_t i = 0; i < g.size(); i++) {
                const double noise = rng.normal();
                g[i] = float(curvature[i] * double(w[i]) + noise);
                h[i] = float(curvature[i] * exact.w[i] + noise);
            }
            state.step(plain(t), false, g, 0);
            exact.step(plain(t), false, h);
            if (t > steps - window) ours += loss(state.master()) / double(window), wanted += loss(exact.w) / double(window);
        }
        INFO(std::string(o.name), ": loss ", ours, " against ", wanted, " from ", loss(start));
        CHECK(std::fabs(ours - wanted) < 0.05 * wanted);
        if (!quick()) CHECK(wanted < 0.2 * loss(start));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Weights without a master

TEST_CASE("stochastic rounding: to a neighbour, exactly by the table's rule, and exact numbers stay") {
    FRESH_RANDOM(rng);
    for (int64_t i = 0; i < count(200000, 10000); i++) {
        const uint64_t key = rng.bits();
        const int64_t at = int64_t(rng.bits() >> 24);
        const float x = float(rng.sign() * std::exp2(-140 + 260 * rng.uniform()));
        const uint32_t bits = bits_of(x), low = bits & 0xFFFF;
        const uint32_t random = uint32_t(rounding_bits(key, uint64_t(at) / 4) >> (16 * (at % 4))) & 0xFFFF;
        const uint16_t got = round_stochastically(x, key, at);
        REQUIRE(got == (bits >> 16) + (low + random > 0xFFFF));
        REQUIRE(round_stochastically(from_bf16(got), key, at) == got);
    }
}

TEST_CASE("stochastic rounding: over elements, over steps and over seeds the mean is the value") {
    // n draws of a step h that is taken with probability p: their mean has the deviation h sqrt(p (1 - p) / n), at most h / 2 sqrt(n). Five of
    // them are passed once in two million: there are 3 x 6 checks.
    const int64_t n = count(1 << 20, 1 << 14);
    const float step = 0x1p-7f;
    for (float part : {0.0f, 0x1p-16f, 0.03f, 0.25f, 0.5f, 0.99f}) {
        const float x = -(1 + part * step);
        double by_element = 0, by_step = 0, by_seed = 0;
        for (int64_t i = 0; i < n; i++) {
            by_element += double(from_bf16(round_stochastically(x, rounding_key(1, 7), i)));
            by_step += double(from_bf16(round_stochastically(x, rounding_key(1, i), 12345)));
            by_seed += double(from_bf16(round_stochastically(x, rounding_key(uint64_t(i), 7), 12345)));
        }
        INFO("part of a step ", part);
        const double bound = part == 0 ? 0 : 5 * double(step) / 2 / std::sqrt(double(n));
        for (double sum : {by_element, by_step, by_seed}) CHECK(std::fabs(sum / double(n) - double(x)) <= bound);
    }
}

TEST_CASE("stochastic rounding: a weight moves by what is far below its step, where rounding to nearest holds it") {
    // 1000 updates of step / 50 each: 20 steps in all. The sum of n independent roundings has a deviation of at most step sqrt(n) / 2 = 16 steps,
    // and over many weights the mean is right: 16 / sqrt(2048) = 0.35 steps; five of them are allowed.
    const int64_t n = 2048, updates = 1000;
    const float step = 0x1p-7f, move = step / 50;
    double sum = 0;
    uint16_t held = to_bf16(1.25f);
    for (int64_t i = 0; i < n; i++) {
        uint16_t w = to_bf16(1.25f);
        for (int64_t t = 1; t <= updates; t++) w = round_stochastically(from_bf16(w) + move, rounding_key(3, t), i);
        sum += double(from_bf16(w)) - 1.25;
    }
    for (int64_t t = 1; t <= updates; t++) held = to_bf16(from_bf16(held) + move);
    CHECK(from_bf16(held) == 1.25f);
    CHECK(std::fabs(sum / double(n) - double(move) * double(updates)) <= 5 * double(step) * std::sqrt(double(updates)) / 2 / std::sqrt(double(n)));
}

// ---------------------------------------------------------------------------------------------------------------------
// The paper's table 1: errors of the moments and of the update m / sqrt(v), on the moments of a real run

namespace {

struct Storage {
    std::string name;
    Format format;
    bool expand;
};
const Storage STORAGES[] = {{"E4M3", Format::E4M3, false}, {"E4M3+Exp", Format::E4M3, true}, {"E5M2", Format::E5M2, false}, {"E5M2+Exp", Format::E5M2, true}};

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

std::vector<std::vector<float>> stored(const Storage& s, bool positive, const std::vector<std::vector<float>>& moments) {
    std::vector<std::vector<float>> result;
    for (const auto& x : moments) result.push_back(encode_all(s.format, s.expand, positive, x).values);
    return result;
}

double update(float m, float v) { return v > 0 ? double(m) / (std::sqrt(double(v)) + 1e-8) : 0.0; }

double update_mse(const RealMoments& exact, const std::vector<std::vector<float>>& m, const std::vector<std::vector<float>>& v) {
    double sum = 0, n = 0;
    for (size_t p = 0; p < m.size(); p++)
        for (size_t i = 0; i < m[p].size(); i++, n++) {
            const double error = update(m[p][i], v[p][i]) - update(exact.m[p][i], exact.v[p][i]);
            sum += error * error;
        }
    return sum / n;
}

// Mean square of the error relative to each group's root mean square, so that every group counts the same.
double relative_mse(const std::vector<std::vector<float>>& exact, const std::vector<std::vector<float>>& decoded) {
    double sum = 0, n = 0;
    for (size_t p = 0; p < exact.size(); p++)
        for (size_t first = 0; first < exact[p].size(); first += MOMENT_GROUP) {
            const size_t last = std::min(exact[p].size(), first + MOMENT_GROUP);
            const std::vector<float> a(decoded[p].begin() + first, decoded[p].begin() + last), b(exact[p].begin() + first, exact[p].begin() + last);
            sum += relative_error(a, b) * relative_error(a, b) * double(last - first), n += double(last - first);
        }
    return sum / n;
}

}  // namespace

TEST_CASE("expansion: on moments of a real run it lowers the errors of m, of v and of m / sqrt(v) (paper table 1)") {
    // Table 1 (MSE of m / sqrt(v), first moment down, second across):    E4M3   E4M3+Exp  E5M2   E5M2+Exp
    //                                                          E4M3      20.10  18.08     25.65  18.16
    //                                                          E4M3+Exp  15.13  12.31     21.96  12.43
    //                                                          E5M2      37.02  35.96     40.30  36.00
    //                                                          E5M2+Exp  17.79  15.48     23.84  15.57
    // What holds there in every row and column is what is asked for here: expansion helps either moment whatever the other has;
    // without it E4M3 beats E5M2; and E4M3+Exp is the best first moment, with the second in E4M3+Exp or E5M2+Exp, equal within 10%.
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
        CHECK(relative_mse(exact.m, stored(STORAGES[format + 1], false, exact.m)) < relative_mse(exact.m, stored(STORAGES[format], false, exact.m)));
        CHECK(relative_mse(exact.v, stored(STORAGES[format + 1], true, exact.v)) < relative_mse(exact.v, stored(STORAGES[format], true, exact.v)));
    }
}
