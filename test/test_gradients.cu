// test_gradients.cu - initialize, split_master, join_master, gradient_norm and add_gradients on the GPU,
// against double and the CPU reference.
#include <cmath>

#include "../gpu/gradients.cuh"
#include "device_tensors.h"
#include "gpu.h"
#include "random.h"

using namespace coat;
using namespace coat::test;
using namespace coat::test::device_tensors;

namespace {

ShardPlace whole(const Param& p) { return {{0, p.size()}, {0, p.size()}, p.offset, p.offset, 0}; }

}  // namespace

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
            gpu::initialize({values.get(), f == Format::F32 ? nullptr : remainder.get(), f}, params[i],
                            whole(params[i]), i, used_elements(c, params[i]), 7, 0);
        const Bytes got = values.read();
        const auto remainders = remainder.read();
        int64_t wrong = 0;
        for (size_t i = 0; i < params.size(); i++)
            for (int64_t e = 0; e < params[i].padded_size(); e++) {
                const Param& p = params[i];
                float expected = 0;
                if (e < p.size()) expected = initial(p.init_std, p.role.weight, used_elements(c, p), 7, i, e);
                uint16_t weight;
                int16_t rest;
                reference::split_master(expected, &weight, &rest);
                const int64_t at = p.offset + e;
                if (f == Format::F32) wrong += std::memcmp(&got[4 * at], &expected, 4) != 0;
                else wrong += std::memcmp(&got[2 * at], &weight, 2) != 0 || remainders[at] != rest;
            }
        CHECK(wrong == 0);
        CHECK(values.intact());
    }
    // All lower halves of an FP32 value, and then random values below 2 in magnitude.
    Floats masters(100001);
    for (size_t i = 0; i < masters.size(); i++) {
        uint32_t bits = 0x3F800000u + static_cast<uint32_t>(i);
        if (i >= 65536) bits = static_cast<uint32_t>(rng.bits()) & 0xBFFFFFFFu;
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
        uint16_t expected_weight;
        int16_t expected_remainder;
        reference::split_master(masters[i], &expected_weight, &expected_remainder);
        wrong += expected_weight != w[i] || expected_remainder != r[i];
    }
    CHECK(wrong == 0);
}

GPU_TEST_CASE("gradient_norm: norm, clipping, and steps to skip") {
    FRESH_RANDOM(rng);
    auto state_of = [&](const Floats& g, Format f, double loss, const gpu::Clipping& clip) {
        const Tensor x(g, f);
        Buffer<gpu::GradientState> state(1);
        state.zero();
        const int64_t n = static_cast<int64_t>(g.size()), chunks = ceil_div(n, SHARD_CHUNK);
        Buffer<double> sums(1 + chunks), dloss(1);
        dloss.write({loss});
        const Buffer<gpu::Segment> segment({gpu::Segment{0, n, {}, {}, true, nullptr}});
        gpu::gradient_squares(segment.get(), 1, x.codes.get(), f, 0, 0, chunks, {}, dloss.get(), sums.get(),
                              0);
        gpu::gradient_norm(sums.get(), chunks, 1, clip, state.get(), 0);
        CHECK(sums.intact());
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
                // 8 squares at a time are summed in FP32, the rest in double.
                CHECK(s.norm == doctest::Approx(std::sqrt(sum)).epsilon(8 * U));
                CHECK(s.clip_factor == (s.norm > 1 ? static_cast<float>(1 / s.norm) : 1.0f));
                CHECK(s.skip == 0);
                const gpu::GradientState unclipped = state_of(g, f, 1.0, {0.0f});
                CHECK(unclipped.clip_factor == 1.0f);
                CHECK(unclipped.skip == (s.norm >= 0x1p62));
                for (double norm_correction : {1.0, 2.5, 1e3}) {
                    const double norm = s.norm * norm_correction;
                    const float expected = norm > 1 ? static_cast<float>(1 / norm) : 1.0f;
                    CHECK(state_of(g, f, 1.0, {1.0f, norm_correction}).clip_factor == expected);
                }
                CHECK(state_of(g, f, 1.0, {1.0f, INFINITY}).clip_factor == 0);
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
                                       {rank, ranks}, 0);
                    const Floats got = sum.values();
                    int64_t wrong = 0;
                    for (int64_t i = 0; i < N; i++) {
                        float expected = assign ? 0 : before[size_t(i)];
                        for (const Floats& part : parts) expected += part[size_t(i)];
                        wrong += got[size_t(i)] != reference::round_to(f, expected);
                    }
                    CHECK(wrong == 0);
                    CHECK(sum.intact());
                }
}
