// parameter_kernels.cu - first values of weights, and norms of gradients (../../gpu/parameter_kernels.cu).
#include "../../common/ranks.h"
#include "../help/gpu.h"

using namespace coat;
using namespace coat::test;

GPU_TEST_CASE("initialize: weights and remainders of masters equal the reference") {
    ModelConfig c = find_row(known_models(), "gpt2-tiny", "--model");
    c.V = 65, c.L = 1;
    const std::vector<Param> params = parameters(c);
    const int64_t total = params.back().flat_offset + params.back().padded_size();
    for (Format f : {Format::FP32, Format::BF16}) {
        const Tensor values({1, total}, TensorFormat{f});
        const Buffer<int16_t> remainder(total);
        int16_t* const rest = f == Format::FP32 ? nullptr : remainder.get();
        Floats expected(total);
        for (size_t i = 0; i < params.size(); i++) {
            const Param& p = params[i];
            const int64_t used = used_elements(c, p);
            gpu::initialize({values.codes.get(), rest, f}, p.flat_offset, p,
                            {.owned = {0, p.size()}, .param_index = i, .used = used, .seed = 7}, 0);
            for (int64_t e = 0; e < p.size(); e++)
                expected[p.flat_offset + e] = initial_value(p.init_std, p.starts_at_one(), used, 7, i, e);
        }
        std::vector<uint16_t> upper(total);
        std::vector<int16_t> lower(total);
        for (int64_t i = 0; i < total; i++) reference::split_master(expected[i], &upper[i], &lower[i]);
        for (int64_t i = 0; f == Format::BF16 && i < total; i++) expected[i] = reference::from_bf16(upper[i]);
        CHECK(same_bytes(values.values(), expected));
        if (rest) CHECK(remainder.read() == lower);
    }
}

GPU_TEST_CASE("gradient_norm: norm and clipping and steps to skip") {
    SEEDED_RANDOM(rng);
    auto state_of = [](const Floats& g, Format f, double loss, float clip) {
        const Tensor x(g, f);
        Buffer<gpu::GradientState> state(1);
        state.zero();
        const int64_t n = int64_t(g.size()), units = ceil_div(n, SHARD_UNIT);
        const Buffer<double> sums(1 + units), losses(Doubles{loss});
        const Buffer<gpu::Shard> shard({gpu::Shard{0, n, {}, {}, true, nullptr}});
        gpu::compute_gradient_squares({shard.get(), 1, {0, n}, x.codes.get(), f}, {0, units}, losses.get(),
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
