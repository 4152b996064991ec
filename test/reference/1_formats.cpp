// 1_formats.cpp - part 1 of reference.cpp: encoding and decoding of FP8, FP16 and BF16, against the
// definition of the formats (oracle.h). Both sides are exact, so every check is an equality.
#include <doctest/doctest.h>

#include <atomic>

#include "../../reference.h"
#include "../help/oracle.h"
#include "../help/random.h"

using namespace coat;
using namespace coat::test;
using namespace coat::reference;

namespace {

int code_of(Format f, float x) { return f == Format::BF16 ? to_bf16(x) : encode(f, x); }
float value_of(Format f, int code) {
    return f == Format::BF16 ? from_bf16(uint16_t(code)) : decode(f, uint16_t(code));
}
bool encodes(const Definition& d, float x) {
    const int code = code_of(d.format, x);
    return std::isnan(x) ? std::isnan(value_of(d.format, code)) : code == d.nearest(x);
}

// Calls check(bits) for so many FP32 bit patterns, spread over all 2^32, and reports one that failed.
template <class Check> void over_all_floats(uint32_t first, int64_t number, Check check) {
    const uint64_t step = (uint64_t(1) << 32) / uint64_t(number) | 1;  // odd: the lower bits take every value
    std::atomic<int64_t> failures{0};
    std::atomic<uint32_t> failed{0};
#pragma omp parallel for
    for (int64_t i = 0; i < number; i++) {
        const uint32_t bits = uint32_t(first + uint64_t(i) * step);
        if (!check(bits)) failures++, failed = bits;
    }
    INFO("one that failed: bits ", failed.load(), " = ", float_of(failed));
    CHECK(failures == 0);
}

bool not_finite(uint32_t bits) { return (bits & 0x7F800000) == 0x7F800000; }

}  // namespace

TEST_CASE("decode: every code has the value of its definition, and encode gives the code back") {
    for (const Definition& d : DEFINITIONS) {
        INFO(std::string(info(d.format).name));
        int wrong = 0;
        for (int code = 0; code < 2 * d.sign; code++) {
            const float got = value_of(d.format, code);
            const int magnitude = code & (d.sign - 1);
            if (magnitude <= d.top) {
                wrong += double(got) != d.value(code) || std::signbit(got) != (code >= d.sign);
                wrong += code_of(d.format, got) != code;
            } else if (magnitude == d.top + 1 && d.format != Format::E4M3) {  // which has no infinity
                wrong += !std::isinf(got) || std::signbit(got) != (code >= d.sign);
            } else {
                wrong += !std::isnan(got);
            }
        }
        CHECK(wrong == 0);
        CHECK(double(info(d.format).max) == d.value(d.top));
        CHECK(double(info(d.format).min) == d.value(1));
        CHECK(info(d.format).mantissa == d.M);
    }
    CHECK(info(Format::F32).max == std::numeric_limits<float>::max());
    CHECK(info(Format::F32).min == std::numeric_limits<float>::denorm_min());
}

TEST_CASE(
    "encode, to_bf16: the nearest code; ties to even; large values saturate (BF16: infinity); NaN stays") {
    FRESH_RANDOM(rng);
    const float inf = std::numeric_limits<float>::infinity(), largest = std::numeric_limits<float>::max();
    for (const Definition& d : DEFINITIONS) {
        INFO(std::string(info(d.format).name));
        int wrong = 0;
        auto check = [&](float x) { wrong += !encodes(d, x) + !encodes(d, -x); };
        for (float x : {inf, largest, info(d.format).max, std::nextafter(info(d.format).max, inf)}) check(x);
        for (uint32_t nan : {0x7FC00000u, 0xFFC00000u, 0x7F800001u, 0x7F80FFFFu, 0x7FFFFFFFu})
            check(float_of(nan));
        for (int code = 0; code < d.top; code++) {
            const float tie = float((d.value(code) + d.value(code + 1)) / 2);  // exact: one more bit
            for (float x : {tie, std::nextafter(tie, 0.0f), std::nextafter(tie, inf)}) check(x);
        }
        CHECK(wrong == 0);
        over_all_floats(uint32_t(rng.bits()), count(10'000'000, 200'000),
                        [&](uint32_t bits) { return encodes(d, float_of(bits)); });
        const uint32_t low = bits_of(info(d.format).min / 8),
                       high = bits_of(std::min(info(d.format).max, 0x1p120f) * 2);
        over_all_floats(
            uint32_t(rng.bits()), count(10'000'000, 200'000), [&](uint32_t bits) {  // where codes differ
                return encodes(d, float_of((low + (bits & 0x7FFFFFFF) % (high - low)) | (bits & 0x80000000)));
            });
    }
}

TEST_CASE("round_to: FP32 stays, BF16 is rounded") {
    FRESH_RANDOM(rng);
    over_all_floats(uint32_t(rng.bits()), count(1'000'000, 200'000), [](uint32_t bits) {
        const float x = float_of(bits);
        return std::isnan(x) ? std::isnan(round_to(Format::BF16, x))
                             : bits_of(round_to(Format::F32, x)) == bits &&
                                   bits_of(round_to(Format::BF16, x)) == uint32_t(to_bf16(x)) << 16;
    });
}

TEST_CASE("split_master, join_master: exact; the weight is the master rounded to BF16, ties away from zero") {
    FRESH_RANDOM(rng);
    auto splits = [](uint32_t bits) {
        uint16_t weight;
        int16_t remainder;
        split_master(float_of(bits), &weight, &remainder);
        const bool tie = (bits & 0xFFFF) == 0x8000;
        const uint16_t rounded = tie ? uint16_t((bits >> 16) + 1) : to_bf16(float_of(bits));
        return bits_of(join_master(weight, remainder)) == bits && (not_finite(bits) || weight == rounded);
    };
    over_all_floats(uint32_t(rng.bits()), count(20'000'000, 500'000), splits);
    std::vector<uint32_t> uppers = {0, 1, 0x7F, 0x80, 0x3F7F, 0x3F80, 0x7F7E, 0x7F7F, 0x8000, 0xBF80, 0xFF7F};
    for (int64_t i = 0; i < count(50, 2); i++) uppers.push_back(uint32_t(rng.below(65536)));
    for (uint32_t upper : uppers)
        for (uint32_t lower = 0; lower < 65536; lower++)
            if (!splits(upper << 16 | lower)) FAIL("bits " << (upper << 16 | lower));
}
