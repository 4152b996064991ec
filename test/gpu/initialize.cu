// initialize.cu - first values of weights (../../gpu/initialize.cu).
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
