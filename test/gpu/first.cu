// first.cu - the first test of a kernel to read, with everything in view. For a new kernel, copy it: put the
// input into device memory, call the operator (coat.h), and compare with the reference. How larger
// tests compare, with random values and any format: ../help/gpu.h.
#include "../help/gpu.h"

using namespace coat;
using namespace coat::test;

GPU_TEST_CASE("a first test: sixteen values become one group of E4M3 codes with a scale") {
    // The largest magnitude is 896 = 2 * 448, and 448 is the largest E4M3 value: so the scale is 2.
    const Floats x = {896, -896, 0, 1, -1, 3, 0.3f, 100, -250, 0.01f, 7, 8, 9, 10, 11, 12};
    std::vector<uint16_t> bf16;
    for (float value : x) bf16.push_back(reference::to_bf16(value));

    const Buffer<uint16_t> input(bf16);  // on the device, with a copy of the values
    const Buffer<uint8_t> codes(16);
    const Buffer<uint16_t> scales(1);
    const TensorRef from{.data = input.get(), .rows = 1, .cols = 16, .format = PLAIN_BF16};
    TensorRef to{.data = codes.get(), .rows = 1, .cols = 16, .format = E4M3_PER_1x16};
    to.group_scales = scales.get();
    gpu::quantize_to_groups(from, to, /*write_back=*/false, /*quant_stats=*/nullptr, /*stream=*/nullptr);

    const std::vector<uint8_t> got = codes.read();  // waits for the kernel
    CHECK(scales.read()[0] == reference::to_bf16(2.0f));
    for (int i = 0; i < 16; i++)
        CHECK(got[i] == reference::encode(Format::E4M3, reference::from_bf16(bf16[i]) / 2));
}
