// parameters.cu - first values of weights on the GPU (gpu/parameters.cu) against the CPU reference.
#include "../../gpu/parameters.cuh"
#include "../help/gpu.h"

using namespace coat;
using namespace coat::test;

GPU_TEST_CASE("initialize: weights and remainders of masters equal the reference") {
    ModelConfig c = find_row(models(), "gpt2-tiny", "--model");
    c.V = 65, c.L = 1;
    const std::vector<Param> params = parameters(c);
    const int64_t total = params.back().offset + params.back().padded_size();
    for (Format f : {Format::F32, Format::BF16}) {
        Buffer<uint8_t> values(total * info(f).bytes);
        Buffer<int16_t> remainder(total);
        for (size_t i = 0; i < params.size(); i++)
            gpu::initialize({values.get(), f == Format::F32 ? nullptr : remainder.get(), f}, params[i],
                            {{0, params[i].size()}, params[i].offset, 0}, i, used_elements(c, params[i]), 7,
                            0);
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
    }
}
