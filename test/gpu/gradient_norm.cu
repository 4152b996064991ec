// gradient_norm.cu - norms of gradients, clipping, and steps that are skipped (../../gpu/gradient_norm.cu).
#include "../../common/ranks.h"
#include "../help/gpu.h"

using namespace coat;
using namespace coat::test;

GPU_TEST_CASE("gradient_norm: norm and clipping and steps to skip") {
    SEEDED_RANDOM(rng);
    auto state_of = [](const Floats& g, Format f, double loss, float clip) {
        const Tensor x(g, f);
        Buffer<gpu::GradientState> state(1);
        state.zero();
        const int64_t n = int64_t(g.size()), units = ceil_div(n, UNIT_SIZE);
        const Buffer<double> sums(1 + units), losses(Doubles{loss});
        const Buffer<gpu::AdamWParam> param({gpu::AdamWParam{0, n, {}, {}, true, nullptr}});
        gpu::compute_gradient_squares({param.get(), 1, {0, n}, x.codes.get(), f}, {0, units}, losses.get(),
                                      sums.get(), 0);
        gpu::update_gradient_state(sums.get(), units, 1, clip, state.get(), 0);
        return state.read()[0];
    };
    for (Format f : {Format::FP32, Format::BF16})
        for (Shape shape : shapes({{1, 128}, {1001, 128}, {40000, 128}}))
            for (double size : {1e-25, 1e-6, 1.0, 1e25}) {
                const Floats g = normals(rng, f, shape.n(), size);
                double sum = 0;
                for (float v : g) sum += double(v) * v;
                const gpu::GradientState s = state_of(g, f, 1.0, 1.0f), unclipped = state_of(g, f, 1.0, 0.0f);
                // 8 squares at a time are summed in FP32, the rest in double.
                CHECK(s.norm == doctest::Approx(std::sqrt(sum)).epsilon(8 * U).scale(0));
                CHECK(s.clip_factor == (s.norm > 1 ? float(1 / s.norm) : 1.0f));
                CHECK(s.skip == 0);
                CHECK(unclipped.norm == s.norm);
                CHECK(unclipped.clip_factor == 1.0f);
                CHECK(unclipped.skip == (s.norm >= 0x1p62));
            }
    for (float bad : {INFINITY, NAN}) {
        Floats g = normals(rng, Format::BF16, 128 * 999);
        CHECK(state_of(g, Format::BF16, bad, 1.0f).skip == 1);
        g[rng.below(128 * 999)] = bad;
        CHECK(state_of(g, Format::BF16, 1.0, 1.0f).skip == 1);
        const Buffer<double> loss(Doubles{1}), checked(Doubles{0});
        for (float amax : {1.0f, bad, 1.0f}) {  // of three micro-batches
            const Buffer<TensorScale> scale({TensorScale{1, amax, 0}});
            gpu::write_loss_or_nan(scale.get(), 1, loss.get(), checked.get(), 0);
        }
        CHECK(std::isnan(checked.read()[0]));
    }
}
