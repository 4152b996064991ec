// adamw.h - what test/adamw.cu needs: parameters with random values and moments, one step of AdamW with them
// on the GPU, and the same step in double and in the CPU reference.
//
// How far the reference, in float, is from the exact step shows what FP32 loses. From that follow the limits
// of a weight, and of what becomes a moment's code: the code must lie between the codes of these limits.
#pragma once
#include <deque>

#include "gpu.h"

namespace coat::test {

using reference::Moment;

constexpr uint64_t ROUNDING = 0x123456789ABCDEF;
constexpr float OLD_AMAX = 1e30f;  // of the weights before the step

// A moment group: the elements [first, last) of a moment.
struct MomentGroup {
    int64_t first, last;
    size_t number;
};
inline std::vector<MomentGroup> moment_groups(const Moment& m) {
    std::vector<MomentGroup> all;
    for (int64_t first = 0; first < m.n; first += MOMENT_GROUP_SIZE)
        all.push_back({first, std::min<int64_t>(m.n, first + MOMENT_GROUP_SIZE), all.size()});
    return all;
}

inline Floats load(const Moment& m) {
    Floats x(m.n);
    m.load(x.data());
    return x;
}
inline Doubles load_exactly(const Moment& m) {
    Doubles x = doubles(load(m));
    if (!is_fp8(m.format)) return x;
    const double fmax = format_info(m.format).fmax;
    for (const MomentGroup& g : moment_groups(m))
        for (int64_t i = g.first; i < g.last; i++) {
            const double y = reference::decode(m.format, m.elements[i]);
            const double k = m.uses_expansion ? m.expansion_exponents[g.number] : 1;
            x[i] = std::copysign(m.max_magnitudes[g.number] * std::pow(std::abs(y) / fmax, 1 / k), y);
        }
    return x;
}

struct HostParam {
    int64_t size, offset;
    bool decays;
    Moment m, v;
    int64_t padded() const { return round_up(size, MOMENT_GROUP_SIZE); }
};

struct DeviceMoment {
    const Moment& of;
    Buffer<uint8_t> codes;
    Buffer<float> max, k;
    DeviceMoment(const Moment& m, int64_t padded)
        : of(m), codes(padded * format_info(m.format).bytes), max(int64_t(m.max_magnitudes.size())),
          k(int64_t(m.expansion_exponents.size())) {
        codes.zero();
        codes.write(m.elements);
        max.write(m.max_magnitudes);
        k.write(m.expansion_exponents);
    }
    gpu::MomentRef ref() const {
        return {codes.get(), max.get(), of.uses_expansion ? k.get() : nullptr, of.format};
    }
    Moment read() const {
        Moment m = of;
        m.elements = codes.read();
        m.max_magnitudes = max.read();
        m.expansion_exponents = k.read();
        CHECK(std::none_of(m.elements.begin() + of.elements.size(), m.elements.end(),
                           [](auto c) { return c; }));
        m.elements.resize(of.elements.size());
        m.max_magnitudes.resize(of.max_magnitudes.size());
        return m;
    }
};
inline bool same_moment(const Moment& a, const Moment& b) {
    return a.elements == b.elements && same_bytes(a.max_magnitudes, b.max_magnitudes) &&
           same_bytes(a.expansion_exponents, b.expansion_exponents);
}

// Parameters, gradients and moments with random values, and one step of AdamW with them on the GPU.
struct AdamWRun {
    std::vector<HostParam> params;
    OptimizerFormats optimizer;
    Format compute, gradients;  // formats of the weights and of the gradients
    bool has_master;
    Floats master, gradient;   // flat, padded
    std::vector<size_t> cuts;  // parameters at which a new launch starts
    float clip = 0.25f;

    AdamWRun(Random& rng, const OptimizerFormats& o, Format compute, bool has_master, Format gradients,
             const Distribution& d,
             const std::vector<int64_t>& sizes = {1, 127, 128, 129, 1000, 20000, 128, 130, 50000})
        : optimizer(o), compute(compute), gradients(gradients), has_master(has_master) {
        for (int64_t size : sizes) {
            HostParam p{size, int64_t(master.size()), size % 3 != 0, {}, {}};
            const bool fp32 = size == 130 || size == 127;  // as for norm weights
            p.m = Moment(o, fp32 ? Format::FP32 : o.m_format, size, /*second_moment=*/false);
            p.v = Moment(o, fp32 ? Format::FP32 : o.v_format, size, /*second_moment=*/true);
            Floats m(size), v(size);
            for (int64_t i = 0; i < size; i++) {
                v[i] = float(1e-6 * std::exp(2 * rng.normal()));
                m[i] = float(std::sqrt(v[i]) * 0.3 * rng.normal());
                if (size == 20000) make_unusual(rng, i / MOMENT_GROUP_SIZE, &m[i], &v[i]);
            }
            p.m.store(m.data());
            p.v.store(v.data());
            master.resize(p.offset + p.padded());
            gradient.resize(master.size());
            for (int64_t i = p.offset; i < p.offset + size; i++) {
                const float weight = float(0.02 * rng.normal());
                master[i] = has_master ? weight : reference::round_to(Format::BF16, weight);
                gradient[i] = reference::round_to(gradients, float(d.draw(rng, i - p.offset)));
            }
            params.push_back(std::move(p));
        }
    }
    // Zeros, as of tokens that have not occurred; and magnitudes that differ by up to 2^145, of v by 2^185:
    // relative to the maximum some are below FP32's range, and only a careful path (../adamw.cu) keeps them.
    static void make_unusual(Random& rng, int64_t moment_group, float* m, float* v) {
        if (moment_group % 3 == 0) *m = *v = 0;
        if (moment_group % 3 != 1) return;
        *v = float(std::exp2(60 - 185 * rng.uniform()));
        *m = float(rng.sign() * std::exp2(20 - 145 * rng.uniform()));
    }

    struct Result {
        Floats master, stored, amax;  // stored: the weights as they lie in memory
        std::vector<Moment> m, v;
        bool operator==(const Result& o) const {
            return same_bytes(master, o.master) && same_bytes(amax, o.amax) &&
                   std::equal(m.begin(), m.end(), o.m.begin(), o.m.end(), same_moment) &&
                   std::equal(v.begin(), v.end(), o.v.begin(), o.v.end(), same_moment);
        }
    };
    Result on_gpu(const AdamWOptions& a, bool skip = false) const {
        const int64_t total = int64_t(master.size());
        const Buffer<float> amaxes(std::vector<float>(params.size(), OLD_AMAX));
        std::deque<DeviceMoment> m, v;
        std::vector<gpu::AdamWParam> table;
        int64_t bundles = 0;
        for (const HostParam& p : params) {
            m.emplace_back(p.m, p.padded());
            v.emplace_back(p.v, p.padded());
            float* const amax_to_raise = amaxes.get() + table.size();
            table.push_back({.memory_offset = p.offset,
                             .size = p.size,
                             .m = m.back().ref(),
                             .v = v.back().ref(),
                             .decays = p.decays,
                             .weight_amax = amax_to_raise,
                             .bundles_before = bundles,
                             .flat_offset = p.offset});
            bundles += ceil_div(p.size, gpu::BUNDLE_SIZE);
        }
        const Buffer<gpu::AdamWParam> device_table(table);
        const Buffer<gpu::GradientState> state(std::vector<gpu::GradientState>{{1.0, 1.0, clip, skip}});
        const Tensor g(gradient, gradients);
        const bool splits = has_master && compute == Format::BF16;
        Floats values = master;
        std::vector<int16_t> lower(total);
        for (int64_t i = 0; splits && i < total; i++) {
            uint16_t upper;
            reference::split_master(master[i], &upper, &lower[i]);
            values[i] = reference::from_bf16(upper);
        }
        const Tensor stored(values, compute);
        const Buffer<int16_t> remainder(lower);
        const gpu::Weights weights{stored.codes.get(), splits ? remainder.get() : nullptr, compute};
        std::vector<size_t> ends = cuts;
        ends.push_back(params.size());
        size_t first = 0;
        for (size_t end : ends) {
            const int64_t begin = params[first].offset;
            const int64_t n = (end < params.size() ? params[end].offset : total) - begin;
            gpu::adamw(a, optimizer,
                       {.table = device_table.get() + first,
                        .count = int(end - first),
                        .elements = {begin, n},
                        .gradients = g.codes.get() + begin * format_info(gradients).bytes,
                        .gradient_format = gradients},
                       weights, ROUNDING, state.get(), 0);
            first = end;
        }
        Result r;
        r.master = r.stored = stored.values();
        lower = remainder.read();
        for (int64_t i = 0; splits && i < total; i++)
            r.master[i] = reference::join_master(reference::to_bf16(r.stored[i]), lower[i]);
        r.amax = amaxes.read();
        for (const auto& moment : m) r.m.push_back(moment.read());
        for (const auto& moment : v) r.v.push_back(moment.read());
        return r;
    }
};

// What a step gives before anything is stored, exactly and in float. *_terms: for each element the larger
// magnitude of before and after the step. Where a value and its change nearly cancel, FP32 loses parts of
// these, not of the small result.
struct Exact {
    Doubles w, m, v, w_terms, m_terms;
    Floats w_float, m_float, v_float;

    Exact(const AdamWRun& run, const HostParam& p, const AdamWOptions& a)
        : m(load_exactly(p.m)), v(load_exactly(p.v)), m_float(load(p.m)), v_float(load(p.v)) {
        const reference::AdamWConstants f = reference::adamw_constants(a, p.decays, run.clip);
        const float* g = &run.gradient[p.offset];
        w_float.assign(run.master.begin() + p.offset, run.master.begin() + p.offset + p.size);
        w = doubles(w_float);
        const Doubles w_before = w, m_before = m;
        reference::adamw(f, p.size, g, w_float.data(), m_float.data(), v_float.data());
        for (int64_t i = 0; i < p.size; i++) {
            const double scaled = double(g[i]) * run.clip;
            m[i] = f.beta1 * m[i] + f.one_minus_beta1 * scaled;
            v[i] = f.beta2 * v[i] + f.one_minus_beta2 * scaled * scaled;
            for (double* x : {&m[i], &v[i]})
                if (std::abs(*x) < 0x1p-150) *x = 0;  // FP32 has no such numbers
            w[i] -= f.lr * (m[i] / f.bias_correction1 / (std::sqrt(v[i]) / f.bias_correction2_sqrt + f.eps) +
                            f.decay * w[i]);
            w_terms.push_back(std::max(std::abs(w_before[i]), std::abs(w[i])));
            m_terms.push_back(std::max(std::abs(m_before[i]), std::abs(m[i])));
        }
    }
};

// One of the moments after a step, as it is stored: `got`, and what it should be. terms: as above.
struct MomentCheck {
    const Moment& got;
    const Doubles& exact;
    const Floats& in_float;
    const Doubles& terms;

    // The largest relative difference between exact and float values of a moment group, leaving out zeros.
    static double lost_in(const MomentGroup& g, const Doubles& exact, const Floats& in_float) {
        double lost = 0;
        for (int64_t i = g.first; i < g.last; i++)
            if (exact[i] != 0) lost = std::max(lost, std::abs(in_float[i] / exact[i] - 1));
        return lost;
    }
    // How many roundings of its own value the roundings of the terms of element i are.
    double cancellation(int64_t i) const {
        return exact[i] == 0 ? 1 : std::max(1.0, terms[i] / std::abs(exact[i]));
    }

    // max and k of a moment group.
    void check_scale(const MomentGroup& g) const {
        const double lost = lost_in(g, exact, in_float);
        struct Limits {
            double lower, upper;
        } top{0, 0}, low{INFINITY, INFINITY};  // of the largest magnitude, and of the smallest but for zeros
        for (int64_t i = g.first; i < g.last; i++) {
            const double magnitude = std::abs(exact[i]);
            const double error = SLACK * (lost + U * cancellation(i)) * magnitude;
            const Limits limits{std::max(magnitude - error, 0x1p-149), magnitude + error};
            if (magnitude == 0) continue;
            top = {std::max(top.lower, limits.lower), std::max(top.upper, limits.upper)};
            low = {std::min(low.lower, limits.lower), std::min(low.upper, limits.upper)};
        }
        REQUIRE(got.max_magnitudes[g.number] >= top.lower - 0x1p-149);
        REQUIRE(got.max_magnitudes[g.number] <= top.upper + 0x1p-149);
        if (!got.uses_expansion) return;
        const double k = got.expansion_exponents[g.number];
        if (got.max_magnitudes[g.number] == 0) {
            REQUIRE(k == 1);
            return;
        }
        // FP32 has the logarithms of top and low within a few roundings, and k falls as their difference
        // grows: k is between those of the limits of top / low. Nearly always these are the same multiple of
        // its step.
        const double error =
            SLACK * U * (1 + std::abs(std::log2(top.upper)) + std::abs(std::log2(low.lower)));
        const auto k_of = [&](double max, double min) {
            return reference::expansion_exponent(got.format, float(max), float(min));
        };
        REQUIRE(k >= k_of(top.upper * std::exp2(error), low.lower));
        REQUIRE(k <= k_of(top.lower * std::exp2(-error), low.upper));
    }

    // The codes of a moment group. Returns how many are wrong.
    int64_t wrong_codes(const MomentGroup& g, bool keep_positive) const {
        const double fmax = format_info(got.format).fmax;
        const float max = got.max_magnitudes[g.number],
                    k = got.uses_expansion ? got.expansion_exponents[g.number] : 1;
        const float scale = reference::scale_of(TensorFormat{got.format}, max);
        const bool expands = got.uses_expansion && max > 0;
        // Magnitudes as they become codes.
        Doubles y(g.last - g.first);
        Floats y_in_float(g.last - g.first);
        for (int64_t i = g.first; i < g.last; i++) {
            const double magnitude = std::abs(exact[i]);
            const float x = std::abs(in_float[i]);
            y[i - g.first] = expands ? fmax * std::pow(magnitude / max, k) : magnitude / scale;
            y_in_float[i - g.first] = expands ? reference::expand(got.format, x, max, k) : x / scale;
        }
        const double lost = lost_in({0, g.last - g.first, 0}, y, y_in_float);
        int64_t wrong = 0;
        for (int64_t i = g.first; i < g.last; i++) {
            const double error = SLACK * (lost + U * (1 + k * cancellation(i)));
            const auto encoded = [&](double factor) {
                return reference::encode(got.format, float(std::min(fmax, y[i - g.first] * factor)));
            };
            const uint8_t code = got.elements[i];
            const int code_without_sign = code & 0x7F;
            const bool has_sign = code & 0x80;
            const bool positive = keep_positive && exact[i] > 0;
            const int low = encoded(std::max(0.0, 1 - error)), high = encoded(1 + error);
            wrong += code_without_sign < (positive && in_float[i] > 0 ? std::max(low, 1) : low);
            wrong += code_without_sign > (positive ? std::max(high, 1) : high);
            wrong += error < 1 && code_without_sign > 0 && has_sign != (exact[i] < 0);
        }
        return wrong;
    }

    // keep_positive: what is above zero stays above zero.
    void check(bool keep_positive) const {
        if (!is_fp8(got.format)) {
            check_as_float(load(got), exact, in_float, MOMENT_GROUP_SIZE, got.format, terms);
            return;
        }
        int64_t wrong = 0;
        for (const MomentGroup& g : moment_groups(got)) {
            check_scale(g);
            wrong += wrong_codes(g, keep_positive);
        }
        CHECK(wrong == 0);
    }
};

inline void check_adamw(AdamWRun run, const AdamWOptions& a) {
    INFO(std::string(run.optimizer.name), " ", std::string(format_info(run.compute).name), " ",
         run.has_master);
    const AdamWRun::Result r = run.on_gpu(a), skipped = run.on_gpu(a, true);
    run.cuts = {2, 3, 8};
    run.gradients = Format::FP32;
    CHECK(r == run.on_gpu(a));  // in several launches, and with the same gradients in FP32
    CHECK(same_bytes(skipped.master, run.master));
    for (size_t i = 0; i < run.params.size(); i++) {
        const HostParam& p = run.params[i];
        CAPTURE(p.size);
        CHECK(same_moment(skipped.m[i], p.m));
        CHECK(same_moment(skipped.v[i], p.v));
        CHECK(skipped.amax[i] == OLD_AMAX);
        const Exact exact(run, p, a);
        const auto begin = r.master.begin() + p.offset, end = begin + p.size;
        const auto stored = [&](size_t i, float w) {  // without a master: rounded with the same bits
            const auto rounded = reference::round_stochastically(w, ROUNDING, p.offset + int64_t(i));
            return run.has_master ? w : reference::from_bf16(rounded);
        };
        check_limits(Floats(begin, end), exact.w, exact.w_float, MOMENT_GROUP_SIZE, stored, exact.w_terms);
        CHECK(std::all_of(end, begin + p.padded(), [](float padding) { return padding == 0; }));
        CHECK(r.amax[i] == reference::compute_amax(&r.stored[p.offset], p.size));
        MomentCheck{r.m[i], exact.m, exact.m_float, exact.m_terms}.check(false);
        MomentCheck{r.v[i], exact.v, exact.v_float, exact.v}.check(true);
    }
}

}  // namespace coat::test
