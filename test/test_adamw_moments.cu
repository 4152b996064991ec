// test_adamw_moments.cu - the codes of FP8 moments on the GPU, and their measured errors, against the CPU
// reference.
#include <cmath>

#include "../gpu/adamw.cuh"
#include "../gpu/report.cuh"
#include "help/earlier_adamw_run.h"
#include "help/earlier_tensors.h"
#include "help/earlier_gpu.h"
#include "help/random.h"

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
                            too_far += std::abs(k[group] - k_expected) > 1.0f / 256;
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
            // k may round differently where it is within k^2 / log2(FMAX / FMIN) times the logarithms' error,
            // 2^-15, of the middle between two multiples of 1/256.
            CHECK(other_k <= groups / 50 + 2);
        }
    }
}

// On the GPU are the old moments and the gradient. The errors are exactly the reference's, because it is the
// reference that measures; of a large parameter it has 128 pieces of 2048 elements, evenly spread.
GPU_TEST_CASE("measure_moments: errors of the moments equal the reference's") {
    FRESH_RANDOM(rng);
    for (const OptimizerFormat& o : {OPTIMIZERS[0], OPTIMIZERS[1], FP8LM}) {
        for (int64_t n : {50000, 600077}) {
            CAPTURE(o.name);
            CAPTURE(n);
            Floats m(n), v(n), weights(n);
            for (int64_t i = 0; i < n; i++) {
                v[i] = static_cast<float>(1e-6 * std::exp(2 * rng.normal()));
                m[i] = static_cast<float>(std::sqrt(v[i]) * 0.3 * rng.normal());
            }
            const Floats gradient = normals(rng, Format::BF16, n, 1e-3);
            reference::Moment old_m, old_v;
            old_m.init(o.m, o.expand, n, o.group), old_v.init(o.v, o.expand, n, o.group);
            old_m.store(m.data(), false), old_v.store(v.data(), o.keep_positive);
            const DeviceMoment on_gpu_m(old_m, round_up(n, MOMENT_GROUP)),
                on_gpu_v(old_v, round_up(n, MOMENT_GROUP));
            const Tensor g(gradient, Format::BF16);
            QuantReport report;
            gpu::measure_moments(o, on_gpu_m.view(), on_gpu_v.view(), g.codes.get(), Format::BF16, n, report,
                                 0);

            old_m.load(m.data()), old_v.load(v.data());
            reference::adamw(reference::adamw_factors({1, 0.0f}, false, 0), n, gradient.data(),
                             weights.data(), m.data(), v.data());
            const bool in_part = n > 1 << 18;
            Floats measured[2];
            for (int64_t i = 0; i < n; i++) {
                const int64_t apart = n / 128 / MOMENT_GROUP * MOMENT_GROUP;
                if (in_part && (i / apart >= 128 || i % apart >= 2048)) continue;
                measured[0].push_back(m[i]), measured[1].push_back(v[i]);
            }
            CHECK(report.part_of_moments == in_part);
            for (bool second : {false, true}) {
                const auto count = static_cast<int64_t>(measured[second].size());
                reference::Moment expected;
                expected.init(second ? o.v : o.m, o.expand, count, o.group);
                QuantStats stats;
                expected.store(measured[second].data(), second && o.keep_positive, &stats);
                const Kind kind = second ? Kind::Moment2 : Kind::Moment1;
                const QuantStats& got = report.kinds[static_cast<int>(kind)];
                CHECK(got.elements == (in_part ? 1 << 18 : n));
                CHECK(got.elements == stats.elements);
                CHECK(got.flushed == stats.flushed);
                CHECK(got.signal == stats.signal);
                CHECK(got.noise == stats.noise);
            }
        }
    }
}
