// earlier_adamw_run.h - one AdamW step on the GPU over parameters of several sizes, and the check of its
// moments, for the tests of adamw.
#pragma once
#include <cmath>
#include <memory>

#include "../../gpu/adamw.cuh"
#include "earlier_tensors.h"
#include "earlier_gpu.h"
#include "random.h"

namespace coat::test::adamw_run {

using gpu::AmaxAndScale;
using namespace coat::test::device_tensors;

// A parameter on the host: its place in the flat array of all parameters, and its moments.
struct HostParam {
    int64_t size, offset;
    bool decays;
    Format m_format, v_format;
    reference::Moment m, v;
    int64_t padded() const { return round_up(size, MOMENT_GROUP); }
};

// The codes and scales of one moment on the device.
struct DeviceMoment {
    Buffer<uint8_t> codes;
    Buffer<float> max, k;
    Format format;
    bool expand, per_tensor;
    DeviceMoment(const reference::Moment& m, int64_t padded)
        : codes(padded * info(m.format).bytes),
          // With one scale per tensor, a second element receives the maximum of the new moment.
          max(static_cast<int64_t>(m.max.size()) * (m.group == 0 ? 2 : 1)),
          k(static_cast<int64_t>(m.k.size())), format(m.format), expand(m.expands), per_tensor(m.group == 0) {
        codes.zero();
        codes.write(m.codes);
        max.write(m.max);
        k.write(m.k);
    }
    gpu::MomentView view() const { return {codes.get(), max.get(), expand ? k.get() : nullptr, format}; }
    Floats maxima() const {  // that belong to the codes
        Floats values = max.read();
        if (per_tensor && !values.empty()) values.resize(1);
        return values;
    }
    // How many elements share a scale.
    int64_t group_size(int64_t n) const { return per_tensor ? n : MOMENT_GROUP; }
    bool intact() const { return codes.intact() && max.intact() && k.intact(); }
};

inline int code_at(Format f, const Bytes& codes, int64_t i) {
    return f == Format::F16 ? codes[2 * i] | codes[2 * i + 1] << 8 : codes[i];
}

// The values x of a moment in double, and the error that decoding in FP32 may have. With expansion, x = max *
// (code / FMAX)^(1/k) (paper section 4). The logarithm of code / FMAX, up to log2(FMAX / FMIN), and 1/k are
// each good to two units in the last place. ex2.approx is good to 2^-22, and a multiplication follows.
inline void decode_exactly(const reference::Moment& m, int64_t n, Doubles& x, Doubles& error) {
    Floats stored(n);
    x.resize(n), error.assign(n, 0.0);
    if (!is_scaled(m.format)) {
        m.load(stored.data());
        x = doubles(stored);
        return;
    }
    const double fmax = info(m.format).max, range = std::log2(fmax / info(m.format).min);
    for (int64_t i = 0; i < n; i++) {
        const int64_t g = m.group == 0 ? 0 : i / MOMENT_GROUP;
        const double k = m.expands ? m.k[g] : 1, code = decode_any(m.format, code_at(m.format, m.codes, i));
        const double magnitude = m.max[g] * std::pow(std::abs(code) / fmax, 1 / k);
        x[i] = code == 0 || m.max[g] == 0 ? 0.0 : std::copysign(magnitude, code);
        const double relative = m.expands ? range / k * 0x1p-21 + 0x1p-20 : 8 * U;
        error[i] = std::abs(x[i]) * relative + (x[i] != 0 ? 0x1p-147 : 0);
    }
}

inline int sign_of(Format f) { return f == Format::F16 ? 0x8000 : 0x80; }

// Checks the new codes and scales of one moment. Before it is rounded to its format it is `exact` +- `error`.
inline void check_moment(const DeviceMoment& d, const Doubles& exact, const Doubles& error, bool second,
                         bool keep_positive) {
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
            else {
                got[i] = reference::from_bf16(bits);
                bound[i] += half_ulp(Format::BF16) * (std::abs(exact[i]) + error[i]) + 0x1p-134;
            }
        }
        return check_close(got, exact, bound);
    }
    const Floats max = d.maxima(), k = d.expand ? d.k.read() : Floats(max.size(), 1.0f);
    const double fmax = info(d.format).max, range = std::log2(fmax / info(d.format).min);
    const int sign = sign_of(d.format);
    int64_t bad_max = 0, bad_k = 0, bad_codes = 0, vanished = 0;
    for (int64_t g = 0; g < static_cast<int64_t>(max.size()); g++) {
        const int64_t first = g * d.group_size(n), last = std::min<int64_t>(n, first + d.group_size(n));
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
        // k = log(FMAX / FMIN) / log(top / low), rounded to a multiple of 1/256 (paper section 4). log2
        // is good to two units of 2^-23 of a value up to 149. `low` is off by its error; if that is half of
        // `low` or more, another element may be the smallest, or this one may be zero, and k has no lower
        // bound.
        const double ratio = std::log2(top) - std::log2(low);
        const double low_relative = low_error < low / 2 ? 2 * low_error / low : INFINITY;
        const double ratio_error = 2 * 150 * 0x1p-22 + (top_error / top + low_relative);
        const bool bounded = ratio - ratio_error > 0;
        const double most = bounded ? 256 * range / (ratio - ratio_error) * (1 + 8 * U) : INFINITY;
        const double least = 256 * range / (ratio + ratio_error) * (1 - 8 * U);
        auto rounded_k = [](double k256) { return std::min(64.0, std::max(16.0, std::rint(k256)) / 256); };
        const bool in_steps = k[g] * 256 == std::floor(k[g] * 256);
        if (d.expand) bad_k += k[g] < rounded_k(least) || k[g] > rounded_k(most) || !in_steps;
        // The relative error of (x / max)^k = exp2(k log2(x / max)). lg2.approx is good to 2^-22 where its
        // result is below 1, and to two units of 2^-23 relative elsewhere. The division before it is good to
        // 2 u, the multiplication by k to u, ex2.approx to 2^-22. Where x / max could underflow, the kernel
        // subtracts two logarithms of up to 149 instead.
        const bool subtracts_logs = range > 120 * k[g] || max[g] < 0x1p-100f;
        const double log_error = subtracts_logs ? 2 * 150 * 0x1p-23 : 0x1p-21;
        const double power_error = d.expand ? k[g] * log_error + range * 0x1p-21 + 0x1p-21 : 4 * U;
        auto encoded = [&](double magnitude, double factor) {
            const double power = std::pow(std::max(0.0, magnitude) / max[g], double(k[g]));
            return reference::encode(d.format, static_cast<float>(std::min(fmax, fmax * power * factor)));
        };
        for (int64_t i = first; i < last; i++) {
            const int code = code_at(d.format, codes, i), magnitude = code & (sign - 1);
            const int lowest = encoded(std::abs(exact[i]) - error[i], 1 - power_error);
            const int highest = encoded(std::abs(exact[i]) + error[i], 1 + power_error);
            const bool positive = second && keep_positive && exact[i] > 0;
            const bool kept_positive = positive && magnitude == 1 && lowest == 0;
            bad_codes += !kept_positive && (magnitude < lowest || magnitude > highest);
            const bool sign_is_certain = std::abs(exact[i]) > error[i] && magnitude > 0;
            bad_codes += sign_is_certain && (code & sign) != (exact[i] < 0 ? sign : 0);
            vanished += second && keep_positive && exact[i] - error[i] > 0 && magnitude == 0;
        }
    }
    CHECK(bad_max == 0);
    CHECK(bad_k == 0);
    CHECK(bad_codes == 0);
    CHECK(vanished == 0);
}

// The named optimizers (coat, fp8, bf16, fp8lm, fp32), and combinations of formats that reach the other
// kernels.
inline const OptimizerFormat OPTIMIZERS[] = {
    {"coat", Format::E4M3, Format::E4M3, true, ""},
    {"fp8", Format::E4M3, Format::E4M3, false, ""},
    {"e4m3 and e5m2, expanded", Format::E4M3, Format::E5M2, true, ""},
    {"e5m2 and e4m3", Format::E5M2, Format::E4M3, false, ""},
    {"e5m2, expanded", Format::E5M2, Format::E5M2, true, ""},
    {"bf16", Format::BF16, Format::BF16, false, ""},
    {"fp8lm", Format::E4M3, Format::F16, false, "", 0, false},
    {"per-tensor e5m2 and e4m3", Format::E5M2, Format::E4M3, false, "", 0, false},
    {"per-tensor fp16, and fp32", Format::F16, Format::F32, false, "", 0, false},
    {"bf16, and per-tensor fp16", Format::BF16, Format::F16, false, "", 0, false},
    {"fp32", Format::F32, Format::F32, false, ""},
};

inline const OptimizerFormat& FP8LM = OPTIMIZERS[6];

// Parameters, gradients and moments with random values, and one AdamW step of them on the GPU.
struct AdamRun {
    static constexpr uint64_t ROUNDING = 0x123456789ABCDEF;
    static constexpr float OLD_AMAX = 1e30f;  // of the weights before the step
    std::vector<HostParam> params;
    int64_t total = 0;
    Floats master, gradient;    // flat, padded
    Format compute, gradients;  // formats of the weights and of the gradients
    OptimizerFormat optimizer;
    bool has_master = true;
    // Indices of parameters at which a new launch starts: the step takes cuts.size() + 1 launches.
    std::vector<size_t> cuts;

    AdamRun(Random& rng, Format compute, const OptimizerFormat& o, const Distribution& distribution,
            bool old_state)
        : compute(compute), gradients(compute), optimizer(o) {
        for (int64_t size : {1, 127, 128, 129, 1000, 20000, 128, 130, 50000}) {
            HostParam p{size, total, size % 3 != 0, o.m, o.v, {}, {}};
            if (size == 130 || size == 127) p.m_format = p.v_format = Format::F32;  // as for norm weights
            p.m.init(p.m_format, o.expand, size, o.group);
            p.v.init(p.v_format, o.expand, size, o.group);
            if (old_state) {
                Floats m(size), v(size);
                for (int64_t i = 0; i < size; i++) {
                    v[i] = static_cast<float>(1e-6 * std::exp(2 * rng.normal()));
                    m[i] = static_cast<float>(std::sqrt(v[i]) * 0.3 * rng.normal());
                    // Zeros, as in embedding rows of tokens that have not occurred.
                    if (size == 20000 && i / 128 % 3 == 0) m[i] = v[i] = 0;
                    // Magnitudes that differ by more than 2^120: such groups have k below 1 and take the
                    // careful path of expand() and contract(), in which the power and the square root of it
                    // are easily confused.
                    if (o.expand && size == 20000 && i / 128 % 3 == 1) {
                        v[i] = static_cast<float>(std::exp2(-140 * rng.uniform()));
                        m[i] = static_cast<float>(rng.sign() * std::exp2(-140 * rng.uniform()));
                    }
                }
                p.m.store(m.data(), false);
                p.v.store(v.data(), o.keep_positive);
            }
            total += p.padded();
            params.push_back(std::move(p));
        }
        master.assign(total, 0.0f), gradient.assign(total, 0.0f);
        for (const HostParam& p : params)
            for (int64_t i = 0; i < p.size; i++) {
                master[p.offset + i] = static_cast<float>(0.02 * rng.normal());
                gradient[p.offset + i] = reference::round_to(compute, distribution.draw(rng, i));
            }
    }

    struct Result {
        std::vector<std::unique_ptr<DeviceMoment>> m, v;
        Floats master;
        std::vector<uint16_t> weight;
        std::vector<AmaxAndScale> amax;
        bool intact;
    };
    Result step(const AdamW& a, float scale, bool skip) const {
        Result r;
        const int64_t n = static_cast<int64_t>(params.size());
        const Buffer<AmaxAndScale> amaxes(std::vector<AmaxAndScale>(size_t(n), {1, OLD_AMAX, 0, 0}));
        std::vector<gpu::Segment> table;
        for (int64_t i = 0; i < n; i++) {
            r.m.push_back(std::make_unique<DeviceMoment>(params[i].m, params[i].padded()));
            r.v.push_back(std::make_unique<DeviceMoment>(params[i].v, params[i].padded()));
            const HostParam& p = params[i];
            table.push_back({p.offset, p.size, r.m[i]->view(), r.v[i]->view(), p.decays, amaxes.get() + i});
        }
        const Buffer<gpu::Segment> segments(table);
        const Buffer<gpu::GradientState> state(std::vector<gpu::GradientState>{{1.0, 1.0, scale, skip}});
        const Tensor g(gradient, gradients);
        Buffer<float> masters(master);
        std::vector<uint16_t> weights_of(master.size());
        std::vector<int16_t> remainders_of(master.size());
        for (size_t i = 0; i < master.size(); i++)
            reference::split_master(master[i], &weights_of[i], &remainders_of[i]);
        const Buffer<uint16_t> weight(weights_of);
        const Buffer<int16_t> remainder(remainders_of);
        const bool f32 = compute == Format::F32;
        const gpu::Weights weights{f32 ? static_cast<void*>(masters.get()) : weight.get(),
                                   f32 || !has_master ? nullptr : remainder.get(), compute};
        std::vector<size_t> ends = cuts;
        ends.push_back(params.size());
        size_t first = 0;
        for (size_t end : ends) {
            const int64_t offset = params[first].offset;
            const int64_t elements = (end < params.size() ? params[end].offset : total) - offset;
            const uint8_t* from = static_cast<uint8_t*>(g.codes.get()) + offset * info(gradients).bytes;
            gpu::adamw(a, optimizer, segments.get() + first, static_cast<int>(end - first),
                       {offset, elements}, weights, ROUNDING, from, gradients, state.get(), 0);
            first = end;
        }
        r.master = masters.read(), r.weight = weight.read(), r.amax = amaxes.read();
        const std::vector<int16_t> rest = remainder.read();
        for (size_t i = 0; !f32 && i < r.master.size(); i++)
            r.master[i] = reference::join_master(r.weight[i], has_master ? rest[i] : int16_t(0));
        r.intact = masters.intact() && weight.intact() && remainder.intact() && amaxes.intact();
        return r;
    }
};

}  // namespace coat::test::adamw_run
