// test_reference_adamw.cpp - adamw and stochastic rounding in reference.cpp. AdamW is compared with the same
// method in double over 1000 steps, for every format of the optimizer state.
#include <doctest/doctest.h>

#include <algorithm>

#include "../reference.h"
#include "oracle.h"
#include "random.h"
#include "tiny.h"

using namespace coat;
using namespace coat::test;
using namespace coat::reference;

namespace {

// torch.optim.AdamW in double, with the FP32 constants of AdamW.
struct AdamInDouble {
    std::vector<double> w, m, v;
    explicit AdamInDouble(const std::vector<float>& start)
        : w(start.begin(), start.end()), m(w.size()), v(w.size()) {}
    void step(const AdamW& a, bool decays, const std::vector<float>& gradient) {
        const double b1 = a.beta1, b2 = a.beta2;
        for (size_t i = 0; i < w.size(); i++) {
            const double g = gradient[i];
            m[i] = b1 * m[i] + (1 - b1) * g;
            v[i] = b2 * v[i] + (1 - b2) * g * g;
            const double mean = m[i] / (1 - std::pow(b1, double(a.step))),
                         variance = v[i] / (1 - std::pow(b2, double(a.step)));
            w[i] -= double(a.lr) * (decays ? double(a.weight_decay) * w[i] : 0.0);
            w[i] -= double(a.lr) * mean / (std::sqrt(variance) + double(a.eps));
        }
    }
};

// The state of one parameter as a Model stores it: a BF16 weight with its remainder, and two moments.
struct State {
    std::vector<uint16_t> weight;
    std::vector<int16_t> remainder;
    Moment m, v;
    bool keep_positive;

    State(const OptimizerFormat& o, const std::vector<float>& start)
        : weight(start.size()), remainder(start.size()), keep_positive(o.keep_positive) {
        m.init(o.m, o.expand, int64_t(start.size()), o.group);
        v.init(o.v, o.expand, int64_t(start.size()), o.group);
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
        of.load(x.data());
        return x;
    }
    void step(const AdamW& a, bool decays, const std::vector<float>& gradient, double grad_norm) {
        std::vector<float> w = master(), m32 = moment(m), v32 = moment(v);
        adamw(adamw_factors(a, decays, grad_norm), int64_t(w.size()), gradient.data(), w.data(), m32.data(),
              v32.data());
        m.store(m32.data(), false);
        v.store(v32.data(), keep_positive);
        put(w);
    }
};

AdamW plain(int64_t step) {
    AdamW a{step, 1e-2f};
    a.clip = 0;
    return a;
}

const std::vector<OptimizerFormat>& optimizer_rows() {  // those of the table, and other second moments
    static const std::vector<OptimizerFormat> rows = [] {
        std::vector<OptimizerFormat> r = optimizers();
        r.push_back({"coat, E5M2", Format::E4M3, Format::E5M2, true, ""});
        r.push_back({"fp8, E5M2", Format::E4M3, Format::E5M2, false, ""});
        r.push_back({"coat, FP16", Format::E4M3, Format::F16, true, ""});
        r.push_back({"fp8lm, FP16 both", Format::F16, Format::F16, false, "", 0, false});
        return r;
    }();
    return rows;
}

double mean_k(const Moment& moment) {
    if (moment.k.empty()) return 1;
    double sum = 0;
    for (float k : moment.k) sum += k;
    return sum / double(moment.k.size());
}

}  // namespace

TEST_CASE("adamw_factors: bias corrections, decay and gradient scale") {
    AdamW a{3, 2e-3f};
    const AdamWFactors f = adamw_factors(a, true, 4.0);
    CHECK(f.lr == 2e-3f);
    CHECK(f.decay == a.weight_decay);
    CHECK(adamw_factors(a, false, 4.0).decay == 0);
    CHECK(f.one_minus_beta1 == 1 - a.beta1);
    CHECK(f.one_minus_beta2 == 1 - a.beta2);
    CHECK(f.bias1 == float(1 - std::pow(double(a.beta1), 3)));
    CHECK(f.bias2_root == float(std::sqrt(1 - std::pow(double(a.beta2), 3))));
    CHECK(f.gradient_scale == 0.25f);  // clip 1 / norm 4
    CHECK(adamw_factors(a, true, 0.999).gradient_scale == 1.0f);  // a norm below clip: not scaled
    CHECK(adamw_factors(a, true, 0.0).gradient_scale == 1.0f);
    a.clip = 0;
    CHECK(adamw_factors(a, true, 1e6).gradient_scale == 1.0f);          // no clipping
    a.step = 1'000'000'000;
    CHECK(adamw_factors(a, true, 1).bias1 == 1.0f);
}

TEST_CASE("adamw: the first step has length lr after bias correction, with eps outside the root") {
    for (float g : {3.0f, -0.02f, 1e-4f, 1e-8f, -1e-9f, 0.0f}) {
        float w = 0, m = 0, v = 0;
        adamw(adamw_factors(plain(1), false, 0), 1, &g, &w, &m, &v);
        // m / (1 - b1) = g and sqrt(v / (1 - b2)) = |g|, so the step is lr g / (|g| + eps): half of lr where
        // |g| = eps.
        const double expected = -1e-2 * double(g) / (std::fabs(double(g)) + 1e-8);
        INFO("gradient ", g);
        CHECK(std::fabs(w - expected) <= std::fabs(expected) * 1e-6);
    }
}

TEST_CASE("adamw: weight decay is decoupled from the moments, and off where the factors say so") {
    float w = 2, m = 0, v = 0, zero = 0;
    adamw(adamw_factors(plain(1), true, 0), 1, &zero, &w, &m, &v);
    CHECK(double(w) == doctest::Approx(2 * (1 - 1e-2 * 0.1)).epsilon(1e-7));
    CHECK((m == 0 && v == 0));
    adamw(adamw_factors(plain(2), false, 0), 1, &zero, &w, &m, &v);
    CHECK(double(w) == doctest::Approx(2 * (1 - 1e-2 * 0.1)).epsilon(1e-7));
}

TEST_CASE("adamw: clipping equals a gradient that was scaled before") {
    FRESH_RANDOM(rng);
    const std::vector<float> g = rng.normals<float>(1000, 3);
    std::vector<float> shorter = g, w1(1000, 1.0f), w2 = w1, m1(1000), v1(1000), m2(1000), v2(1000);
    for (float& x : shorter) x *= 0.125f;  // a power of two, so that equality is exact
    AdamW clipped{1, 1e-2f}, unclipped{1, 1e-2f};
    unclipped.clip = 0;
    adamw(adamw_factors(clipped, true, 8.0), 1000, g.data(), w1.data(), m1.data(), v1.data());
    adamw(adamw_factors(unclipped, true, 8.0), 1000, shorter.data(), w2.data(), m2.data(), v2.data());
    CHECK(w1 == w2);
    CHECK(m1 == m2);
    CHECK(v1 == v2);
}

namespace {

// The expected error of a stored moment, as a vector. Each step stores it with a relative error of rms_error,
// which expansion divides by k, and the next step multiplies the moment by beta. Independent errors add in
// squares. FP32 arithmetic adds 3 roundings of 2^-24 a step. They may all have the same sign, and last for
// 1 / (1 - beta) steps.
struct ExpectedError {
    double beta, square = 0;
    double step(const Moment& moment, const std::vector<double>& exact) {
        const double stored = rms_error(moment.format) / mean_k(moment) * norm(exact);
        square = beta * beta * square + stored * stored;
        return std::sqrt(square) / norm(exact) + 3 * 0x1p-24 / (1 - beta);
    }
};

}  // namespace

TEST_CASE("adamw: 1000 steps in every state format stay as close to Adam in double as the format allows") {
    // Gradients do not depend on the weights, so errors do not feed back. The relative error of an update m /
    // sqrt(v) is the root of the square of m's error and the square of half of v's. By the triangle
    // inequality |w - exact| is at most the sum of these errors times |update|, and 2^-24 |w| a step for the
    // FP32 weight.
    //
    // The moments may have twice their expected error. Elements near zero are subnormal codes, with larger
    // relative steps, and rounding errors of slowly moving values are not quite independent.
    FRESH_RANDOM(rng);
    const int64_t n = 8 * MOMENT_GROUP + 50, steps = count(1000, 30);
    const std::vector<float> start = rng.normals<float>(n, 0.5), mean = rng.normals<float>(n, 0.5);
    std::vector<float> spread(static_cast<size_t>(n));
    for (float& s : spread) s = float(std::exp(0.3 * rng.normal()));  // no element dominates a norm
    for (const OptimizerFormat& o : optimizer_rows()) {
        State state(o, start);
        AdamInDouble exact(start);
        ExpectedError expected_m{double(0.9f)}, expected_v{double(0.95f)};
        // The largest errors of m and v are relative to the expected ones.
        double bound_w = 0, worst_m = 0, worst_v = 0;
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
            bound_w += 2 * std::hypot(m, v / 2) * relative_error(before, exact.w) * norm(exact.w) +
                       0x1p-24 * norm(exact.w);
        }
        const double error_w = relative_error(state.master(), exact.w) * norm(exact.w);
        INFO(std::string(o.name), ": errors over expected ones: m ", worst_m, ", v ", worst_v,
             "; error of w ", error_w, ", bound ", bound_w);
        CHECK(worst_m <= 2);
        CHECK(worst_v <= 2);
        CHECK(error_w <= bound_w);
        if (is_scaled(o.m)) CHECK(worst_m > 0.25);  // the format is in use
    }
}

TEST_CASE("adamw: on a noisy quadratic every state format ends where Adam in double ends") {
    // The loss is 1/2 sum c w^2, and its gradients have noise of 1. The level at which it settles depends on
    // noise and learning rate. Moments that are wrong by a few per cent change it by a few per cent.
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
        AdamInDouble exact(start);
        double ours = 0, expected = 0;
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
            if (t > steps - window)
                ours += loss(state.master()) / double(window), expected += loss(exact.w) / double(window);
        }
        INFO(std::string(o.name), ": loss ", ours, " against ", expected, " from ", loss(start));
        CHECK(std::fabs(ours - expected) < 0.05 * expected);
        if (!quick()) CHECK(expected < 0.2 * loss(start));
    }
}

TEST_CASE("round_stochastically: rounds to a neighbour by the rule of model.h, and exact values stay") {
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

TEST_CASE("round_stochastically: the mean over elements, steps and seeds is the value") {
    // n roundings go up by a step h with probability p. Their mean has the standard deviation h sqrt(p (1 -
    // p) / n), at most h / (2 sqrt(n)). Five standard deviations are exceeded once in two million draws;
    // there are 3 x 6 checks.
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
        for (double sum : {by_element, by_step, by_seed})
            CHECK(std::fabs(sum / double(n) - double(x)) <= bound);
    }
}

TEST_CASE("round_stochastically: tiny updates move a weight that rounding to nearest would not move") {
    // 1000 updates of step / 50 move a weight by 20 steps. Independent roundings add a standard deviation of
    // at most step sqrt(1000) / 2 = 16 steps. The mean of 2048 weights has 16 / sqrt(2048) = 0.35 steps; five
    // times that is allowed.
    const int64_t n = 2048, updates = 1000;
    const float step = 0x1p-7f, move = step / 50;
    double sum = 0;
    uint16_t nearest = to_bf16(1.25f);
    for (int64_t i = 0; i < n; i++) {
        uint16_t w = to_bf16(1.25f);
        for (int64_t t = 1; t <= updates; t++)
            w = round_stochastically(from_bf16(w) + move, rounding_key(3, t), i);
        sum += double(from_bf16(w)) - 1.25;
    }
    for (int64_t t = 1; t <= updates; t++) nearest = to_bf16(from_bf16(nearest) + move);
    CHECK(from_bf16(nearest) == 1.25f);
    CHECK(std::fabs(sum / double(n) - double(move) * double(updates)) <=
          5 * double(step) * std::sqrt(double(updates)) / 2 / std::sqrt(double(n)));
}
