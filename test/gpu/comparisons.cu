// comparisons.cu - the tests' own comparisons find what is wrong (../help/gpu.h, ../../dev/device_buffer.h).
#include "../help/gpu.h"

using namespace coat;
using namespace coat::test;

TEST_CASE("count_outside: a value beyond its bound counts and so does NaN") {
    const Doubles exact = {1, 2, 3}, bounds = {0.5, 0.25, 0};
    const auto as_is = [](size_t, double x) { return x; };
    const auto to_bf16 = [](size_t, double x) { return reference::round_to(Format::BF16, float(x)); };
    CHECK(count_outside({1.5f, 1.75f, 3}, exact, bounds, as_is) == 0);
    CHECK(count_outside({1.5625f, 1.75f, 3}, exact, bounds, as_is) == 1);
    CHECK(count_outside({1.5f, 1.6875f, NAN}, exact, bounds, as_is) == 2);
    // 3 + 2^-10 is rounded to 3.
    CHECK(count_outside({1, 2, 3}, {1, 2, 3 + 0x1p-10}, {0, 0, 0}, to_bf16) == 0);
    CHECK(count_outside({1, 2, 3.015625f}, {1, 2, 3 + 0x1p-10}, {0, 0, 0}, to_bf16) == 1);
}

TEST_CASE("bounds_as_float: what FP32 loses in a row bounds that row alone") {
    const Doubles exact = {1, 2, 4, 8};
    const Doubles bounds = bounds_as_float(exact, {1, 2 + 0x1p-20f, 4, 8}, 2);
    CHECK(bounds[0] == SLACK * (0x1p-20 + U * 2) + 0x1p-126);
    CHECK(bounds[1] == bounds[0]);
    CHECK(bounds[2] == SLACK * U * 8 + 0x1p-126);
    CHECK(bounds_as_float(exact, {1, 2, 4, 8}, 2, {16, 0, 0, 0})[0] == SLACK * U * 16 + 0x1p-126);
}

TEST_CASE("same_codes: another code is noticed but for another NaN") {
    CHECK(same_codes(Format::E4M3, {0x10, 0x7F}, {0x10, 0xFF}));
    CHECK(!same_codes(Format::E4M3, {0x10, 0x7F}, {0x11, 0x7F}));
    CHECK(!same_codes(Format::E4M3, {0x10, 0x7E}, {0x10, 0x7F}));
}

GPU_TEST_CASE("guard_is_unchanged: a byte that is written behind an array is noticed") {
    dev::DeviceBuffer<uint8_t> buffer(3);
    buffer.write({1, 2, 3});
    CHECK(buffer.guard_is_unchanged());
    gpu::check(cudaMemset(buffer.get() + 3, 0, 1), "Writing failed");
    CHECK(!buffer.guard_is_unchanged());
}
