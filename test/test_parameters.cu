// test_parameters.cu - first values of weights, and masters split and joined, on the GPU (gpu/parameters.cu)
// against the CPU reference.
#include "../gpu/parameters.cuh"
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
