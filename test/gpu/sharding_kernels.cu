// sharding_kernels.cu - what several ranks combine: sums of gradients, and amaxes of weights; and weights that
// arrive as codes (../../gpu/sharding_kernels.cu).
#include "../../gpu/sharding_kernels.h"
#include "../help/gpu.h"

using namespace coat;
using namespace coat::test;

GPU_TEST_CASE("add_gradients: FP32 sums in the order of the ranks are rounded once") {
    SEEDED_RANDOM(rng);
    constexpr int64_t N = 128 * 77;
    for (Format f : {Format::FP32, Format::BF16})
        for (int64_t ranks : {2, 3, 8})
            for (int64_t rank : {int64_t(0), int64_t(1), ranks - 1})
                for (bool assign : {true, false}) {
                    const Floats before = normals(rng, f, N);
                    Floats expected = assign ? Floats(N) : before, own, received;
                    for (int64_t r = 0; r < ranks; r++) {
                        const Floats part = normals(rng, f, N);
                        for (int64_t i = 0; i < N; i++) expected[i] += part[i];
                        Floats& place = r == rank ? own : received;
                        place.insert(place.end(), part.begin(), part.end());
                    }
                    const Tensor sum(before, f), device_own(own, f), others(received, f);
                    gpu::add_gradients(sum.codes.get(), assign,
                                       {.mine = device_own.codes.get(),
                                        .received = others.codes.get(),
                                        .format = f,
                                        .n = N,
                                        .rank = rank,
                                        .ranks = ranks},
                                       0);
                    CHECK(sum.values() == rounded(f, expected));
                }
}

GPU_TEST_CASE("combine_amaxes: the largest amax of the ranks and its scale or the delayed one") {
    SEEDED_RANDOM(rng);
    constexpr int64_t N = 300;
    for (int64_t ranks : {2, 3, 8})
        for (float delayed : {0.0f, 0.25f}) {
            const Floats amaxes = normals(rng, Format::FP32, ranks * N);
            std::vector<TensorScale> of_ranks, before(N, TensorScale{0, 0, delayed});
            for (float x : amaxes) of_ranks.push_back({0, std::abs(x), 0});
            of_ranks[N + 7].amax = NAN;   // rank 1 found a weight that is not finite
            of_ranks[8].amax = INFINITY;  // rank 0 did
            for (int64_t r = 0; r < ranks; r++) of_ranks[r * N + 9].amax = 0;  // a weight of zeros
            const Buffer<TensorScale> mine(before), all(of_ranks);
            gpu::combine_amaxes(mine.get(), all.get(), N, ranks, Format::E4M3, 0);
            const std::vector<TensorScale> combined = mine.read();
            for (int64_t i = 0; i < N; i++) {
                float largest = 0;
                for (int64_t r = 0; r < ranks; r++) largest = std::max(largest, of_ranks[r * N + i].amax);
                INFO("weight ", i, " of ", ranks, " ranks");
                if (i == 7) CHECK(std::isnan(combined[i].amax));
                else CHECK(combined[i].amax == largest);
                CHECK(combined[i].scale ==
                      (delayed ? delayed : reference::scale_of(E4M3_PER_TENSOR, combined[i].amax)));
                CHECK(combined[i].delayed_scale == delayed);
            }
        }
}

GPU_TEST_CASE("transpose_codes: equals the transpose byte for byte") {
    SEEDED_RANDOM(rng);
    for (Shape s : shapes({{16, 16}, {48, 80}, {128, 128}, {272, 144}, {1008, 1040}})) {
        CAPTURE(s.rows);
        const Tensor codes(normals(rng, Format::FP32, s.n()), s, E4M3_PER_TENSOR);
        const Buffer<uint8_t> column_major(s.n());
        gpu::transpose_codes(codes.ref(), column_major.get(), 0);
        CHECK(same_bytes(column_major.read(), transposed(codes.codes.read(), s.rows, s.cols)));
    }
}
