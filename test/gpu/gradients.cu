// gradients.cu - gradient_norm and add_gradients on the GPU, against double and the CPU reference.
#include <cmath>

#include "../../gpu/gradients.cuh"
#include "../help/gpu.h"
#include "../help/random.h"

using namespace coat;
using namespace coat::test;

GPU_TEST_CASE("gradient_norm: norm, clipping, and steps to skip") {
    FRESH_RANDOM(rng);
    auto state_of = [&](const Floats& g, Format f, double loss, float clip) {
        const Tensor x(g, f);
        Buffer<gpu::GradientState> state(1);
        state.zero();
        const int64_t n = static_cast<int64_t>(g.size()), units = ceil_div(n, SHARD_UNIT);
        Buffer<double> sums(1 + units), dloss(1);
        dloss.write({loss});
        const Buffer<gpu::Segment> segment({gpu::Segment{0, n, {}, {}, true, nullptr}});
        gpu::gradient_squares(segment.get(), 1, x.codes.get(), f, 0, 0, units, dloss.get(), sums.get(), 0);
        gpu::gradient_norm(sums.get(), units, 1, clip, state.get(), 0);
        return state.read()[0];
    };
    for (Format f : {Format::F32, Format::BF16})
        for (int64_t n : {128, 128 * 1001, 128 * 40000})
            for (double size : {1e-25, 1e-6, 1.0, 1e25}) {
                if (too_long(n)) continue;
                const Floats g = normals(rng, f, n, size);
                double sum = 0;
                for (float v : g) sum += double(v) * v;
                const gpu::GradientState s = state_of(g, f, 1.0, 1.0f);
                // 8 squares at a time are summed in FP32, the rest in double.
                CHECK(s.norm == doctest::Approx(std::sqrt(sum)).epsilon(8 * U));
                CHECK(s.clip_factor == (s.norm > 1 ? static_cast<float>(1 / s.norm) : 1.0f));
                CHECK(s.skip == 0);
                const gpu::GradientState unclipped = state_of(g, f, 1.0, 0.0f);
                CHECK(unclipped.clip_factor == 1.0f);
                CHECK(unclipped.skip == (s.norm >= 0x1p62));
                CHECK(state_of(g, f, 1.0, 1.0f).norm == s.norm);
            }
    for (float bad : {INFINITY, NAN}) {
        Floats g = normals(rng, Format::BF16, 128 * 999);
        CHECK(state_of(g, Format::BF16, bad, 1.0f).skip == 1);
        g[rng.below(128 * 999)] = bad;
        const gpu::GradientState s = state_of(g, Format::BF16, 1.0, 1.0f);
        CHECK(s.skip == 1);
    }
}

GPU_TEST_CASE("add_gradients: FP32 sums in the order of the ranks, rounded once") {
    FRESH_RANDOM(rng);
    constexpr int64_t N = 128 * 77;
    for (Format f : {Format::F32, Format::BF16})
        for (int64_t ranks : {2, 3, 8})
            for (int64_t rank : {int64_t(0), int64_t(1), ranks - 1})
                for (bool assign : {true, false}) {
                    std::vector<Floats> parts;
                    Floats received;
                    for (int64_t r = 0; r < ranks; r++) {
                        parts.push_back(normals(rng, f, N));
                        if (r != rank)
                            received.insert(received.end(), parts.back().begin(), parts.back().end());
                    }
                    const Floats before = normals(rng, f, N);
                    const Tensor sum(before, f), own(parts[size_t(rank)], f), others(received, f);
                    gpu::add_gradients(sum.codes.get(), assign, own.codes.get(), others.codes.get(), f, N,
                                       rank, ranks, 0);
                    const Floats got = sum.values();
                    int64_t wrong = 0;
                    for (int64_t i = 0; i < N; i++) {
                        float expected = assign ? 0 : before[size_t(i)];
                        for (const Floats& part : parts) expected += part[size_t(i)];
                        wrong += got[size_t(i)] != reference::round_to(f, expected);
                    }
                    CHECK(wrong == 0);
                }
}
