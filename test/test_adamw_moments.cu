// test_adamw_moments.cu - the codes of FP8 moments on the GPU, and their measured errors, against the CPU
// reference.
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

// With beta = 0 and moments of zero, the new moments are exactly 0 + g and g^2, so the kernel's codes can be
// compared with the reference's. (0 + g is g, but for g = -0, whose moment is 0.) Both take logarithms and
// powers in FP32, so they may differ where a power lies on the border between two codes. Neighbouring codes
// are at least 1/16 of the value apart. If the powers have an error d, then in expectation at most 2 * 16 d
// of the codes differ, each by one step.
GPU_TEST_CASE("adamw: FP8 moments have the reference's codes") {
    FRESH_RANDOM(rng);
    for (const OptimizerFormat& o : OPTIMIZERS) {
        if (!is_scaled(o.m) && !is_scaled(o.v)) continue;
        for (const Distribution& d : distributions()) {
            if (d.name == "huge" || d.name == "any magnitude") continue;  // squares overflow
            CAPTURE(o.name);
            CAPTURE(d.name);
            const AdamRun run(rng, Format::F32, o, d, false);
            const AdamRun::Result r = run.step({1, 1e-3f, 0.0f, 0.0f}, 1.0f, false);
            int64_t groups = 0, other_k = 0, elements = 0, differ = 0, too_far = 0;
            double allowed = 0;
            for (size_t i = 0; i < run.params.size(); i++) {
                const HostParam& p = run.params[i];
                const float* g = &run.gradient[p.offset];
                Floats sum(p.size), square(p.size);
                for (int64_t e = 0; e < p.size; e++) sum[e] = 0.0f + g[e], square[e] = g[e] * g[e];
                for (bool second : {false, true}) {
                    const DeviceMoment& got = second ? *r.v[i] : *r.m[i];
                    if (!is_scaled(got.format)) continue;
                    reference::Moment expected;
                    expected.init(got.format, o.expand, p.size, o.group);
                    expected.store(second ? square.data() : sum.data(), second && o.keep_positive);
                    const Bytes codes = got.codes.read();
                    const Floats max = got.maxima(), k = o.expand ? got.k.read() : Floats(max.size(), 1.0f);
                    CHECK(same_bytes(max, expected.max));
                    for (size_t group = 0; group < max.size(); group++) {
                        groups++;
                        const float k_expected = o.expand ? expected.k[group] : 1.0f;
                        if (k[group] != k_expected) {
                            too_far += std::abs(k[group] - k_expected) > 1.0f / 16;
                            other_k++;
                            continue;
                        }
                        // The reference subtracts two logarithms, each rounded to u of its size.
                        const double size =
                            max[group] > 0 ? std::abs(std::log2(max[group])) + 20 / k[group] : 0;
                        const double error = o.expand ? k[group] * (4 * U * size + 0x1p-20) + 0x1p-18 : 0;
                        const int64_t shared = got.group_size(p.size),
                                      first = static_cast<int64_t>(group) * shared;
                        for (int64_t e = first; e < std::min(p.size, first + shared); e++) {
                            const int code = code_at(got.format, codes, e);
                            const int wanted = code_at(got.format, expected.codes, e);
                            elements++;
                            allowed += 32 * error;
                            differ += code != wanted;
                            too_far += std::abs(code - wanted) > 1;
                        }
                    }
                }
            }
            CAPTURE(elements);
            CAPTURE(differ);
            // Six standard deviations above the expectation. Without expansion no code may differ.
            CHECK(differ <= allowed + 6 * std::sqrt(allowed));
            CHECK(too_far == 0);
            // k may round differently where it is within 16 k^2 / log2(FMAX / FMIN) times the logarithms'
            // error, 2^-16, of a multiple of 1/16.
            CHECK(other_k <= groups / 50 + 2);
        }
    }
}

GPU_TEST_CASE("measure_moments: errors of the moments equal the reference's") {
    FRESH_RANDOM(rng);
    for (const OptimizerFormat& o : {OPTIMIZERS[0], OPTIMIZERS[1], FP8LM}) {
        CAPTURE(o.name);
        const AdamRun run(rng, Format::BF16, o, distributions()[0], true);
        const HostParam& p = run.params.back();
        const DeviceMoment m(p.m, p.padded()), v(p.v, p.padded());
        Buffer<QuantStats> stats(2);
        stats.zero();
        const Tensor g(run.gradient, Format::BF16);
        Buffer<gpu::Segment> segment({gpu::Segment{p.offset, p.size, m.view(), v.view(), true, nullptr}});
        const Tensor weights(Floats(run.gradient.size(), 1.0f), Format::BF16);
        const gpu::Weights w{weights.codes.get(), nullptr, Format::BF16};
        gpu::measure_moments(o, segment.get(), p.size, w, g.codes.get(), Format::BF16, 0, stats.get(),
                             stats.get() + 1, 0);
        QuantStats expected[2];
        Floats host_m(p.size), host_v(p.size), unused_weights(p.size);
        p.m.load(host_m.data());
        p.v.load(host_v.data());
        reference::adamw(reference::adamw_factors({1, 0.0f}, false, 0), p.size, &run.gradient[p.offset],
                         unused_weights.data(), host_m.data(), host_v.data());
        reference::Moment after_m = p.m, after_v = p.v;
        after_m.store(host_m.data(), false, &expected[0]);
        after_v.store(host_v.data(), o.keep_positive, &expected[1]);
        const auto got = stats.read();
        for (int i : {0, 1}) {
            CHECK(got[i].elements == expected[i].elements);
            CHECK(got[i].flushed == expected[i].flushed);
            // Decoded moments differ by a few 1e-6.
            CHECK(got[i].signal == doctest::Approx(expected[i].signal).epsilon(1e-5));
            // Of 50000 elements at most a few in a thousand have another code, which changes their error by
            // up to one step. Another k changes the noise of one group.
            CHECK(got[i].noise == doctest::Approx(expected[i].noise).epsilon(0.02));
        }
        CHECK(same_bytes(m.maxima(), p.m.max));
        CHECK(same_bytes(v.maxima(), p.v.max));
    }
}
