// test_adamw.cu - adamw, gradient_norm, initialize, split_master and join_master on the GPU, against double and the
// CPU reference.
#include <cmath>

#include "../adamw.cuh"
#include "adamw_run.h"
#include "device_tensors.h"
#include "gpu.h"
#include "random.h"

using namespace coat;
using namespace coat::test;
using namespace coat::test::adamw_run;
using namespace coat::test::device_tensors;

GPU_TEST_CASE("initialize, split_master and join_master: equal the reference") {
    FRESH_RANDOM(rng);
    ModelConfig c = find_row(models(), "gpt2-tiny", "--model");
    c.V = 65, c.L = 1;
    const std::vector<Param> params = parameters(c);
    const int64_t total = params.back().offset + params.back().padded_size();
    for (Format f : {Format::F32, Format::BF16}) {
        Buffer<uint8_t> values(total * info(f).bytes);
        Buffer<int16_t> remainder(total);
        for (size_t i = 0; i < params.size(); i++)
            gpu::initialize({values.get(), f == Format::F32 ? nullptr : remainder.get(), f}, params[i], i, live_elements(c, params[i]), 7, 0);
        const Bytes got = values.read();
        const auto rest = remainder.read();
        int64_t wrong = 0;
        for (size_t i = 0; i < params.size(); i++)
            for (int64_t e = 0; e < params[i].padded_size(); e++) {
                const Param& p = params[i];
                const float expected = e < p.size() ? initial(p.init_std, p.role.weight, live_elements(c, p), 7, i, e) : 0.0f;
                uint16_t weight;
                int16_t remains;
                reference::split_master(expected, &weight, &remains);
                if (f == Format::F32) wrong += std::memcmp(&got[4 * (p.offset + e)], &expected, 4) != 0;
                else wrong += std::memcmp(&got[2 * (p.offset + e)], &weight, 2) != 0 || rest[p.offset + e] != remains;
            }
        CHECK(wrong == 0);
        CHECK(values.intact());
    }
    Floats masters(100001);
    for (size_t i = 0; i < masters.size(); i++) {
        const uint32_t bits = i < 65536 ? 0x3F800000u + static_cast<uint32_t>(i) : static_cast<uint32_t>(rng.bits()) & 0xBFFFFFFFu;
        std::memcpy(&masters[i], &bits, 4);
    }
    const int64_t n = static_cast<int64_t>(masters.size());
    const Buffer<float> in(masters);
    Buffer<float> out(n);
    Buffer<uint16_t> weight(n);
    Buffer<int16_t> remainder(n);
    gpu::split_master(in.get(), weight.get(), remainder.get(), n, 0);
    gpu::join_master(weight.get(), remainder.get(), out.get(), n, 0);
    CHECK(same_bytes(out.read(), masters));
    const auto w = weight.read();
    const auto r = remainder.read();
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; i++) {
        uint16_t ew;
        int16_t er;
        reference::split_master(masters[i], &ew, &er);
        wrong += ew != w[i] || er != r[i];
    }
    CHECK(wrong == 0);
}

GPU_TEST_CASE("gradient_norm: norm, clipping, and steps to skip") {
    FRESH_RANDOM(rng);
    auto state_of = [&](const Floats& g, Format f, double loss, const gpu::Clipping& clip) {
        const Tensor x(g, f);
        Buffer<gpu::GradientState> state(1);
        state.zero();
        Buffer<double> workspace(gpu::GRADIENT_PARTIALS), dloss(1);
        dloss.write({loss});
        gpu::gradient_norm(x.codes.get(), f, static_cast<int64_t>(g.size()), dloss.get(), clip, state.get(), workspace.get(), 0);
        CHECK(workspace.intact());
        return state.read()[0];
    };
    for (Format f : {Format::F32, Format::BF16})
        for (int64_t n : {128, 128 * 1001, 128 * 40000})
            for (double size : {1e-25, 1e-6, 1.0, 1e25}) {
                if (too_long(n)) continue;
                const Floats g = normals(rng, f, n, size);
                double sum = 0;
                for (float v : g) sum += double(v) * v;
                const gpu::GradientState s = state_of(g, f, 1.0, {1.0f});
                CHECK(s.norm == doctest::Approx(std::sqrt(sum)).epsilon(8 * U));  // chunks of 8 in FP32, the rest in double
                CHECK(s.scale == (s.norm > 1 ? static_cast<float>(1 / s.norm) : 1.0f));
                CHECK(s.skip == 0);
                const gpu::GradientState whole = state_of(g, f, 1.0, {0.0f});  // not clipped
                CHECK(whole.scale == 1.0f);
                CHECK(whole.skip == (s.norm >= 0x1p62));
                for (double norm_correction : {1.0, 2.5, 1e3}) {
                    const double norm = s.norm * norm_correction;
                    CHECK(state_of(g, f, 1.0, {1.0f, norm_correction}).scale == (norm > 1 ? static_cast<float>(1 / norm) : 1.0f));
                }
                CHECK(state_of(g, f, 1.0, {1.0f, INFINITY}).scale == 0);
                CHECK(state_of(g, f, 1.0, {1.0f}).norm == s.norm);
            }
    for (float bad : {INFINITY, NAN}) {
        Floats g = normals(rng, Format::BF16, 128 * 999);
        CHECK(state_of(g, Format::BF16, bad, {1.0f}).skip == 1);
        g[rng.below(128 * 999)] = bad;
        const gpu::GradientState s = state_of(g, Format::BF16, 1.0, {1.0f});
        CHECK(s.skip == 1);
    }
}

namespace {

int sign_of(Format f) { return f == Format::F16 ? 0x8000 : 0x80; }
int encode_any(Format f, float x) { return f == Format::F16 ? reference::to_f16(x) : reference::encode(f, x); }

// The new state of one moment and what it should hold: `exact` +- `error` before it is rounded to its format.
void check_moment(const DeviceMoment& d, const Doubles& exact, const Doubles& error, bool second, bool keep_positive) {
    const int64_t n = static_cast<int64_t>(exact.size());
    const Bytes codes = d.codes.read();
    CHECK(d.intact());
    for (size_t i = n * info(d.format).bytes; i < codes.size(); i++) REQUIRE(codes[i] == 0);  // padding
    if (!is_scaled(d.format)) {
        Floats got(n);
        Doubles bound = error;
        for (int64_t i = 0; i < n; i++) {
            uint16_t bits;
            std::memcpy(&bits, &codes[2 * i], 2);
            if (d.format == Format::F32) std::memcpy(&got[i], &codes[4 * i], 4);
            else got[i] = reference::from_bf16(bits), bound[i] += half_ulp(Format::BF16) * (std::abs(exact[i]) + error[i]) + 0x1p-134;
        }
        return check_close(got, exact, bound);
    }
    const Floats max = d.maxima(), k = d.expand ? d.k.read() : Floats(max.size(), 1.0f);
    const double fmax = info(d.format).max, range = std::log2(fmax / info(d.format).min);
    const int sign = sign_of(d.format);
    int64_t bad_max = 0, bad_k = 0, bad_codes = 0, vanished = 0;
    for (int64_t g = 0; g < static_cast<int64_t>(max.size()); g++) {
        const int64_t first = g * d.group(n), last = std::min<int64_t>(n, first + d.group(n));
        double top = 0, top_error = 0, low = INFINITY, low_error = 0;
        for (int64_t i = first; i < last; i++) {
            const double a = std::abs(exact[i]);
            if (a > top) top = a;
            top_error = std::max(top_error, error[i]);
            if (a > 0 && a < low) low = a, low_error = error[i];
        }
        bad_max += !(std::abs(max[g] - top) <= top_error);
        if (max[g] == 0) {
            for (int64_t i = first; i < last; i++) bad_codes += code_at(d.format, codes, i) != 0;
            bad_k += k[g] != 1;
            continue;
        }
        // log2 is good to two buckets of 2^-23 of a number up to 149; what may be the smallest may also be another by its error, or zero.
        const double ratio = std::log2(top) - std::log2(low);
        const double ratio_error = 2 * 150 * 0x1p-22 + (top_error / top + (low_error < low / 2 ? 2 * low_error / low : INFINITY));
        const double most = ratio - ratio_error > 0 ? 16 * range / (ratio - ratio_error) * (1 + 8 * U) : INFINITY, least = 16 * range / (ratio + ratio_error) * (1 - 8 * U);
        const double k_most = std::min(64.0, std::max(1.0, std::floor(most)) / 16), k_least = std::min(64.0, std::max(1.0, std::floor(least)) / 16);
        if (d.expand) bad_k += k[g] < k_least || k[g] > k_most || k[g] * 16 != std::floor(k[g] * 16);
        // lg2.approx is good to 2^-22 below 1 in size and to 2 buckets of 2^-23 relative beyond, the quotient before it to 2 u, k log2 to u
        // relative; ex2.approx to 2^-22. (The careful path subtracts two logarithms of up to 149.)
        const bool careful = range > 120 * k[g] || max[g] < 0x1p-100f;
        const double log_error = careful ? 2 * 150 * 0x1p-23 : 0x1p-21;
        const double power_error = d.expand ? k[g] * log_error + range * 0x1p-21 + 0x1p-21 : 4 * U;
        for (int64_t i = first; i < last; i++) {
            auto encoded = [&](double a, double with) {
                return encode_any(d.format, static_cast<float>(std::min(fmax, fmax * std::pow(std::max(0.0, a) / max[g], double(k[g])) * with)));
            };
            const int code = code_at(d.format, codes, i), a = code & (sign - 1), lowest = encoded(std::abs(exact[i]) - error[i], 1 - power_error), highest = encoded(std::abs(exact[i]) + error[i], 1 + power_error);
            const bool kept = second && keep_positive && exact[i] > 0 && a == 1 && lowest == 0;
            bad_codes += !kept && (a < lowest || a > highest);
            bad_codes += std::abs(exact[i]) > error[i] && a > 0 && (code & sign) != (exact[i] < 0 ? sign : 0);
            vanished += second && keep_positive && exact[i] - error[i] > 0 && a == 0;
        }
    }
    CHECK(bad_max == 0);
    CHECK(bad_k == 0);
    CHECK(bad_codes == 0);
    CHECK(vanished == 0);
}

// Stochastic rounding of what lies within [w - ew, w + ew], by the rule of coat.h: it is monotone.
void check_stochastic(const Floats& got, const Doubles& w, const Doubles& ew, int64_t offset) {
    int64_t bad = 0;
    for (size_t e = 0; e < got.size(); e++) {
        const uint64_t at = static_cast<uint64_t>(offset) + e;
        auto rounded_down = [&](double x) {
            const float value = static_cast<float>(x);
            uint32_t bits;
            std::memcpy(&bits, &value, 4);
            return reference::from_bf16(static_cast<uint16_t>((bits + (rounding_bits(AdamRun::ROUNDING, at / 4) >> 16 * (at % 4) & 0xFFFF)) >> 16));
        };
        bad += !(got[e] >= rounded_down(w[e] - ew[e]) && got[e] <= rounded_down(w[e] + ew[e]));
    }
    CHECK(bad == 0);
}

}  // namespace

GPU_TEST_CASE("adamw: several launches are bit-identical to one") {
    FRESH_RANDOM(rng);
    for (const auto& [o, has_master] : {std::pair{OPTIMIZERS[0], true}, std::pair{OPTIMIZERS[0], false}, std::pair{FP8LM, true}, std::pair{FP8LM, false}}) {
        AdamRun run(rng, Format::BF16, o, distributions()[0], true);
        run.has_master = has_master;
        CAPTURE(run.optimizer.name);
        const AdamRun::Result whole = run.step({3, 1e-3f}, 0.25f, false);
        run.cuts = {2, 3, 8};
        const AdamRun::Result parts = run.step({3, 1e-3f}, 0.25f, false);
        CHECK(same_bytes(whole.master, parts.master));
        for (size_t i = 0; i < run.params.size(); i++) {
            CHECK(same_bytes(whole.m[i]->codes.read(), parts.m[i]->codes.read()));
            CHECK(same_bytes(whole.v[i]->codes.read(), parts.v[i]->codes.read()));
            CHECK(same_bytes(whole.m[i]->maxima(), parts.m[i]->maxima()));
            CHECK(same_bytes(whole.v[i]->maxima(), parts.v[i]->maxima()));
            CHECK(whole.amax[i].amax == parts.amax[i].amax);
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
            for (float& g : run.gradient) g *= 1 + 0x1p-9f;
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

GPU_TEST_CASE("adamw: weights, moments, codes and amax in every format of moments") {
    FRESH_RANDOM(rng);
    const std::pair<Format, bool> weights[] = {{Format::BF16, true}, {Format::F32, true}, {Format::BF16, false}};
    for (const auto& held : weights)
        for (const OptimizerFormat& o : OPTIMIZERS)
            for (const char* kind : {"normal", "exp of normal", "mostly zeros", "small normal", "equal magnitudes"}) {
                const Distribution& d = *std::find_if(distributions().begin(), distributions().end(), [&](auto& x) { return x.name == kind; });
                const bool has_master = held.second;
                CAPTURE(o.name);
                CAPTURE(d.name);
                CAPTURE(has_master);
                AdamRun run(rng, held.first, o, d, true);
                run.has_master = has_master;
                if (!has_master) run.master = rounded(Format::BF16, run.master);
                AdamW a{3, 1e-3f};
                const float scale = 0.25f;
                const AdamRun::Result r = run.step(a, scale, false), again = run.step(a, scale, false);
                CHECK(r.intact);
                CHECK(same_bytes(r.master, again.master));
                const double bias1 = 1 - std::pow(double(a.beta1), 3), bias2 = std::sqrt(1 - std::pow(double(a.beta2), 3));
                for (size_t i = 0; i < run.params.size(); i++) {
                    const HostParam& p = run.params[i];
                    CAPTURE(p.size);
                    Doubles m, v, em, ev, w(p.size), ew(p.size);
                    decode_exactly(p.m, p.size, m, em);
                    decode_exactly(p.v, p.size, v, ev);
                    float top = 0;
                    Floats got(p.size);
                    for (int64_t e = 0; e < p.size; e++) {
                        const double g = double(run.gradient[p.offset + e]) * scale, old = run.master[p.offset + e];
                        const double b1 = a.beta1, c1 = 1 - a.beta1, b2 = a.beta2, c2 = 1 - a.beta2;
                        em[e] = b1 * em[e] + 4 * U * (std::abs(b1 * m[e]) + std::abs(c1 * g)) + (m[e] != 0 || g != 0 ? 0x1p-147 : 0);
                        m[e] = b1 * m[e] + c1 * g;
                        ev[e] = b2 * ev[e] + 6 * U * (b2 * v[e] + c2 * g * g) + (v[e] != 0 || g != 0 ? 0x1p-147 : 0);
                        v[e] = b2 * v[e] + c2 * g * g;
                        const double root = std::sqrt(v[e]), root_error = v[e] > 0 ? std::min(ev[e] / root, std::sqrt(ev[e])) : std::sqrt(ev[e]);
                        const double below = root / bias2 + a.eps, update = m[e] / bias1 / below, decay = p.decays ? a.weight_decay : 0;
                        const double update_error = em[e] / bias1 / below + std::abs(update) * (root_error / bias2 / below + 32 * U);
                        w[e] = old - a.lr * (update + decay * old);
                        ew[e] = a.lr * (update_error + 8 * U * std::abs(decay * old)) + 4 * U * std::abs(w[e]) + 2 * U * std::abs(old);
                        got[e] = r.master[p.offset + e];
                        uint16_t bits = r.weight[p.offset + e];
                        top = std::max(top, std::abs(held.first == Format::F32 ? got[e] : reference::from_bf16(bits)));
                    }
                    if (has_master) check_close(got, w, ew);
                    else check_stochastic(got, w, ew, p.offset);
                    for (int64_t e = p.size; e < p.padded(); e++) REQUIRE(r.master[p.offset + e] == 0);
                    CHECK(r.amax[i].amax == top);
                    check_moment(*r.m[i], m, em, false, false);
                    check_moment(*r.v[i], v, ev, true, o.keep_positive);
                    CHECK(same_bytes(r.m[i]->codes.read(), again.m[i]->codes.read()));
                    CHECK(same_bytes(r.v[i]->codes.read(), again.v[i]->codes.read()));
                }
            }
}

GPU_TEST_CASE("adamw: a skipped step changes nothing and still gives the amax of the weights") {
    FRESH_RANDOM(rng);
    for (const auto& [stream, o] : {std::pair{Format::BF16, OPTIMIZERS[0]}, std::pair{Format::F32, OPTIMIZERS[0]}, std::pair{Format::BF16, FP8LM}}) {
        const AdamRun run(rng, stream, o, distributions()[0], true);
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
            float top = 0;
            for (int64_t e = 0; e < p.size; e++) {
                uint16_t weight;
                int16_t remainder;
                reference::split_master(run.master[p.offset + e], &weight, &remainder);
                top = std::max(top, std::abs(stream == Format::F32 ? run.master[p.offset + e] : reference::from_bf16(weight)));
            }
            CHECK(r.amax[i].amax == top);
        }
    }
}
