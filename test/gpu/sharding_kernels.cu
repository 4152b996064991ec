// sharding_kernels.cu - sums of the gradients of several ranks (../../gpu/sharding_kernels.cu).
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
