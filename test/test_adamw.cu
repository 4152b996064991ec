// test_adamw.cu - adamw on the GPU, against double and the CPU reference.
#include <cmath>

#include "../gpu/adamw.cuh"
#include "help/earlier_adamw_run.h"
#include "help/earlier_tensors.h"
#include "help/earlier_gpu.h"
#include "help/random.h"

using namespace coat;
using namespace coat::test;
using namespace coat::test::adamw_run;
using namespace coat::test::device_tensors;

namespace {

// Checks that each element is a value within w +- ew after stochastic rounding to BF16 (model.h,
// rounding_bits). Rounding with the same random bits is monotone, so the results for w - ew and w + ew are
// the limits.
void check_stochastic(const Floats& got, const Doubles& w, const Doubles& ew, int64_t offset) {
    int64_t bad = 0;
    for (size_t e = 0; e < got.size(); e++) {
        const uint64_t at = static_cast<uint64_t>(offset) + e;
        auto rounded_down = [&](double x) {
            const float value = static_cast<float>(x);
            uint32_t bits;
            std::memcpy(&bits, &value, 4);
            bits += rounding_bits(AdamRun::ROUNDING, at / 4) >> 16 * (at % 4) & 0xFFFF;
            return reference::from_bf16(static_cast<uint16_t>(bits >> 16));
        };
        bad += !(got[e] >= rounded_down(w[e] - ew[e]) && got[e] <= rounded_down(w[e] + ew[e]));
    }
    CHECK(bad == 0);
}

}  // namespace

GPU_TEST_CASE("adamw: several launches are bit-identical to one") {
    FRESH_RANDOM(rng);
    for (const auto& [o, has_master] : {std::pair{OPTIMIZERS[0], true}, std::pair{OPTIMIZERS[0], false},
                                        std::pair{FP8LM, true}, std::pair{FP8LM, false}}) {
        AdamRun run(rng, Format::BF16, o, distributions()[0], true);
        run.has_master = has_master;
        CAPTURE(run.optimizer.name);
        const AdamRun::Result one_launch = run.step({3, 1e-3f}, 0.25f, false);
        run.cuts = {2, 3, 8};
        const AdamRun::Result four_launches = run.step({3, 1e-3f}, 0.25f, false);
        CHECK(same_bytes(one_launch.master, four_launches.master));
        for (size_t i = 0; i < run.params.size(); i++) {
            CHECK(same_bytes(one_launch.m[i]->codes.read(), four_launches.m[i]->codes.read()));
            CHECK(same_bytes(one_launch.v[i]->codes.read(), four_launches.v[i]->codes.read()));
            CHECK(same_bytes(one_launch.m[i]->maxima(), four_launches.m[i]->maxima()));
            CHECK(same_bytes(one_launch.v[i]->maxima(), four_launches.v[i]->maxima()));
            CHECK(one_launch.amax[i].amax == four_launches.amax[i].amax);
        }
    }
}

GPU_TEST_CASE("adamw: FP32 gradients of BF16 weights are used with all their bits") {
    FRESH_RANDOM(rng);
    for (const OptimizerFormat& o : OPTIMIZERS)
        for (const bool has_master : {true, false}) {
            AdamRun run(rng, Format::BF16, o, distributions()[0], true);
            run.has_master = has_master;
            CAPTURE(run.optimizer.name);
            CAPTURE(has_master);
            const AdamRun::Result bf16 = run.step({3, 1e-3f}, 0.25f, false);
            run.gradients = Format::F32;
            const AdamRun::Result fp32 = run.step({3, 1e-3f}, 0.25f, false);
            for (float& g : run.gradient) g *= 1 + 0x1p-9f;  // a change that BF16 would round away
            const AdamRun::Result finer = run.step({3, 1e-3f}, 0.25f, false);
            CHECK(fp32.intact);
            CHECK(same_bytes(bf16.master, fp32.master));
            CHECK((!has_master || !same_bytes(finer.master, fp32.master)));
            for (size_t i = 0; i < run.params.size(); i++) {
                CHECK(same_bytes(bf16.m[i]->codes.read(), fp32.m[i]->codes.read()));
                CHECK(same_bytes(bf16.v[i]->codes.read(), fp32.v[i]->codes.read()));
                CHECK(bf16.amax[i].amax == fp32.amax[i].amax);
            }
        }
}

namespace {

struct Exact {  // in double, and the error that a result in FP32 may have
    Doubles value, error;
};
struct ExactStep {
    Exact m, v, w;
};

// One AdamW step of parameter p, with gradients times `scale`, by the equations of section 3 of the paper.
ExactStep exact_step(const AdamRun& run, const HostParam& p, const AdamW& a, double scale) {
    ExactStep r;
    decode_exactly(p.m, p.size, r.m.value, r.m.error);
    decode_exactly(p.v, p.size, r.v.value, r.v.error);
    r.w.value.resize(p.size), r.w.error.resize(p.size);
    const double b1 = a.beta1, c1 = 1 - a.beta1, b2 = a.beta2, c2 = 1 - a.beta2;
    const double bias1 = 1 - std::pow(b1, 3), bias2 = std::sqrt(1 - std::pow(b2, 3));
    for (int64_t e = 0; e < p.size; e++) {
        double &m = r.m.value[e], &em = r.m.error[e], &v = r.v.value[e], &ev = r.v.error[e];
        const double g = double(run.gradient[p.offset + e]) * scale, old = run.master[p.offset + e];
        em = b1 * em + 4 * U * (std::abs(b1 * m) + std::abs(c1 * g)) + (m != 0 || g != 0 ? 0x1p-147 : 0);
        m = b1 * m + c1 * g;
        ev = b2 * ev + 6 * U * (b2 * v + c2 * g * g) + (v != 0 || g != 0 ? 0x1p-147 : 0);
        v = b2 * v + c2 * g * g;
        const double root = std::sqrt(v), largest = std::sqrt(ev);
        const double root_error = v > 0 ? std::min(ev / root, largest) : largest;
        const double divisor = root / bias2 + a.eps, update = m / bias1 / divisor;
        const double decay = p.decays ? a.weight_decay : 0;
        const double relative = root_error / bias2 / divisor + 32 * U;
        const double update_error = em / bias1 / divisor + std::abs(update) * relative;
        const double w = old - a.lr * (update + decay * old), decay_error = 8 * U * std::abs(decay * old);
        r.w.value[e] = w;
        r.w.error[e] = a.lr * (update_error + decay_error) + 4 * U * std::abs(w) + 2 * U * std::abs(old);
    }
    return r;
}

void check_adamw(Random& rng, Format compute, bool has_master, const OptimizerFormat& o,
                 const Distribution& d) {
    CAPTURE(o.name);
    CAPTURE(d.name);
    CAPTURE(has_master);
    AdamRun run(rng, compute, o, d, true);
    run.has_master = has_master;
    if (!has_master) run.master = rounded(Format::BF16, run.master);
    const AdamW a{3, 1e-3f};
    const float scale = 0.25f;
    const AdamRun::Result r = run.step(a, scale, false), again = run.step(a, scale, false);
    CHECK(r.intact);
    CHECK(same_bytes(r.master, again.master));
    for (size_t i = 0; i < run.params.size(); i++) {
        const HostParam& p = run.params[i];
        CAPTURE(p.size);
        const ExactStep exact = exact_step(run, p, a, scale);
        const Floats got(r.master.begin() + p.offset, r.master.begin() + p.offset + p.size);
        float amax = 0;
        for (int64_t e = 0; e < p.size; e++) {
            const float bf16 = reference::from_bf16(r.weight[p.offset + e]);
            const float stored = compute == Format::F32 ? got[e] : bf16;
            amax = std::max(amax, std::abs(stored));
        }
        if (has_master) check_close(got, exact.w.value, exact.w.error);
        else check_stochastic(got, exact.w.value, exact.w.error, p.offset);
        for (int64_t e = p.size; e < p.padded(); e++) REQUIRE(r.master[p.offset + e] == 0);
        CHECK(r.amax[i].amax == amax);
        check_moment(*r.m[i], exact.m.value, exact.m.error, false, false);
        check_moment(*r.v[i], exact.v.value, exact.v.error, true, o.keep_positive);
        CHECK(same_bytes(r.m[i]->codes.read(), again.m[i]->codes.read()));
        CHECK(same_bytes(r.v[i]->codes.read(), again.v[i]->codes.read()));
    }
}

}  // namespace

GPU_TEST_CASE("adamw: weights, moments, codes and amax in every format of moments") {
    FRESH_RANDOM(rng);
    const std::pair<Format, bool> weights[] = {
        {Format::BF16, true}, {Format::F32, true}, {Format::BF16, false}};
    for (const auto& [compute, has_master] : weights)
        for (const OptimizerFormat& o : OPTIMIZERS)
            for (const char* kind :
                 {"normal", "exp of normal", "mostly zeros", "small normal", "equal magnitudes"}) {
                const auto& d = *std::find_if(distributions().begin(), distributions().end(),
                                              [&](const Distribution& x) { return x.name == kind; });
                check_adamw(rng, compute, has_master, o, d);
            }
}

GPU_TEST_CASE("adamw: one moment in FP8 groups beside another format is an error") {
    FRESH_RANDOM(rng);
    for (const auto& [m, v] : {std::pair{Format::E4M3, Format::BF16}, std::pair{Format::F32, Format::E4M3}}) {
        const AdamRun run(rng, Format::BF16, {"mixed", m, v, true, ""}, distributions()[0], true);
        CHECK_THROWS_AS(run.step({1, 1e-3f}, 1.0f, false), Error);
    }
}

GPU_TEST_CASE("adamw: a rank that has nothing of a bucket sets the amax of its weights to 0") {
    const Buffer<AmaxAndScale> amax(std::vector<AmaxAndScale>{{1, AdamRun::OLD_AMAX, 0, 0}});
    const Buffer<gpu::Segment> segment({gpu::Segment{0, 0, {}, {}, true, amax.get()}});
    for (bool skip : {true, false}) {
        const Buffer<gpu::GradientState> state(std::vector<gpu::GradientState>{{1, 1, 1, skip}});
        gpu::adamw({1, 1e-3f}, OPTIMIZERS[0], segment.get(), 1, {0, 0}, {nullptr, nullptr, Format::BF16}, 0,
                   nullptr, Format::BF16, state.get(), 0);
        CHECK(amax.read()[0].amax == (skip ? AdamRun::OLD_AMAX : 0.0f));
    }
}

GPU_TEST_CASE("adamw: a skipped step changes nothing, and the amax of the weights stays") {
    FRESH_RANDOM(rng);
    for (const auto& [compute, o] : {std::pair{Format::BF16, OPTIMIZERS[0]},
                                     std::pair{Format::F32, OPTIMIZERS[0]}, std::pair{Format::BF16, FP8LM}}) {
        const AdamRun run(rng, compute, o, distributions()[0], true);
        CAPTURE(run.optimizer.name);
        const AdamRun::Result r = run.step({3, 1e-3f}, 1.0f, true);
        CHECK(same_bytes(r.master, run.master));
        for (size_t i = 0; i < run.params.size(); i++) {
            const HostParam& p = run.params[i];
            Bytes m = r.m[i]->codes.read(), v = r.v[i]->codes.read();
            m.resize(p.m.codes.size()), v.resize(p.v.codes.size());
            CHECK(same_bytes(m, p.m.codes));
            CHECK(same_bytes(v, p.v.codes));
            CHECK(same_bytes(r.m[i]->maxima(), p.m.max));
            CHECK(r.amax[i].amax == AdamRun::OLD_AMAX);
        }
    }
}
