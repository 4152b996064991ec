// test_reference_formats.cpp - encoding and decoding of FP8, FP16 and BF16 in reference.cpp, against the
// definition of the formats (oracle.h). Both sides are exact, so every check is an equality.
#include <doctest/doctest.h>

#include <atomic>

#include "../reference.h"
#include "oracle.h"
#include "random.h"

using namespace coat;
using namespace coat::test;
using namespace coat::reference;

namespace {

constexpr Format FP8[] = {Format::E4M3, Format::E5M2};

bool encodes_nearest(Format f, const NearestCode& oracle, float x) {
    const int code = encode(f, x), expected = oracle.of(x);
    return expected == NearestCode::NOT_A_NUMBER ? (code & 0x7F) == 0x7F : code == expected;
}

// Calls check(bits) for so many FP32 bit patterns, spread over all 2^32, and reports one that failed.
template <class Check>
void over_all_floats(uint32_t first, int64_t number, Check check) {
    // Odd, so that the lower bits take every value.
    const uint64_t step = (uint64_t(1) << 32) / uint64_t(number) | 1;
    std::atomic<int64_t> failures{0};
    std::atomic<uint32_t> failed{0};
#pragma omp parallel for
    for (int64_t i = 0; i < number; i++) {
        const uint32_t bits = uint32_t(first + uint64_t(i) * step);
        if (check(bits)) continue;
        failures++;
        failed = bits;
    }
    INFO("one that failed: bits ", failed.load(), " = ", float_of(failed));
    CHECK(failures == 0);
}

// The value of a BF16 code by its definition. The code after the largest finite one counts as 2^128.
double bf16_value(uint32_t upper) {
    if ((upper & 0x7FFF) == 0x7F80) return (upper & 0x8000 ? -1 : 1) * 0x1p128;
    return double(float_of(upper << 16));
}

uint32_t nearest_bf16(uint32_t bits, bool ties_to_even) {
    const uint32_t upper = bits >> 16;
    const double x = float_of(bits), down = std::fabs(x - bf16_value(upper)),
                 up = std::fabs(bf16_value(upper + 1) - x);
    if (down == up) return ties_to_even ? upper + (upper & 1) : upper + 1;
    return down < up ? upper : upper + 1;
}

// Whether encode gives the nearest FP16 value, and of two equally near ones the even code. It is compared
// with the values of the codes before and after it.
bool rounds_to_f16(uint32_t bits) {
    const float x = float_of(bits);
    const int got = encode(Format::F16, x), magnitude = got & 0x7FFF;
    if (std::isnan(x)) return std::isnan(fp16_value(got));
    if (std::signbit(x) != (got >= 0x8000) || magnitude > 0x7BFF) return false;
    const double a = std::fabs(double(x)), distance = std::fabs(a - fp16_value(magnitude));
    if (a >= fp16_value(0x7BFF))
        return magnitude == 0x7BFF;  // saturated; the differences below would not be exact
    for (int other : {magnitude - 1, magnitude + 1}) {
        if (other < 0 || other > 0x7BFF) continue;
        const double there = std::fabs(a - fp16_value(other));
        if (there < distance || (there == distance && magnitude % 2)) return false;
    }
    return true;
}

bool not_finite(uint32_t bits) { return (bits & 0x7F800000) == 0x7F800000; }

bool rounds_to_bf16(uint32_t bits) {
    const float x = float_of(bits);
    const uint16_t got = to_bf16(x);
    if (std::isnan(x)) return std::isnan(from_bf16(got));
    return got == (not_finite(bits) ? bits >> 16 : nearest_bf16(bits, true));
}

bool splits_exactly(uint32_t bits) {
    uint16_t weight;
    int16_t remainder;
    split_master(float_of(bits), &weight, &remainder);
    const bool exact = bits_of(join_master(weight, remainder)) == bits;
    return exact && (not_finite(bits) || weight == uint16_t(nearest_bf16(bits, false)));
}

}  // namespace

TEST_CASE("decode: all 256 FP8 codes match the definition") {
    for (Format f : FP8)
        for (int code = 0; code < 256; code++) {
            INFO(std::string(info(f).name), " code ", code);
            const double expected = fp8_value(f, code);
            const float got = decode(f, uint8_t(code));
            if (std::isnan(expected)) CHECK(std::isnan(got));
            else CHECK(double(got) == expected);
            if (!std::isnan(expected)) CHECK(std::signbit(got) == (code >= 128));
        }
}

TEST_CASE("decode: all 65536 codes of FP16 match the definition, and encode returns the finite ones") {
    int64_t failures = 0;
    for (int code = 0; code < 65536; code++) {
        const double expected = fp16_value(code);
        const float got = decode(Format::F16, uint16_t(code));
        failures += std::isnan(expected) ? !std::isnan(got)
                                       : double(got) != expected || std::signbit(got) != (code >= 32768);
        if (std::isfinite(expected)) failures += encode(Format::F16, got) != code;
    }
    CHECK(failures == 0);
}

TEST_CASE("encode: FP16 rounds to nearest even, also subnormals; saturates; NaN stays NaN") {
    FRESH_RANDOM(rng);
    const float inf = std::numeric_limits<float>::infinity();
    for (float x :
         {inf, std::numeric_limits<float>::max(), 65520.0f, 65536.0f, std::nextafter(65504.0f, inf)}) {
        CHECK(encode(Format::F16, x) == 0x7BFF);
        CHECK(encode(Format::F16, -x) == 0xFBFF);
    }
    for (uint32_t nan : {0x7FC00000u, 0xFFC00000u, 0x7F800001u, 0x7FFFFFFFu})
        CHECK(std::isnan(decode(Format::F16, encode(Format::F16, float_of(nan)))));
    int64_t failures = 0;
    for (int code = 0; code < 0x7BFF; code++) {  // every tie and its two neighbours
        // exact: one more bit than the format
        const float tie = float((fp16_value(code) + fp16_value(code + 1)) / 2);
        for (float sign : {1.0f, -1.0f}) {
            const int s = sign < 0 ? 0x8000 : 0;
            failures += encode(Format::F16, sign * tie) != (s | (code + code % 2));
            failures += encode(Format::F16, sign * std::nextafter(tie, 0.0f)) != (s | code);
            failures += encode(Format::F16, sign * std::nextafter(tie, inf)) != (s | (code + 1));
        }
    }
    CHECK(failures == 0);
    over_all_floats(uint32_t(rng.bits()), count(10'000'000, 500'000), rounds_to_f16);
    const uint32_t low = bits_of(0x1p-27f), high = bits_of(0x1p17f);  // where codes differ
    over_all_floats(uint32_t(rng.bits()), count(10'000'000, 500'000), [&](uint32_t bits) {
        return rounds_to_f16((low + (bits & 0x7FFFFFFF) % (high - low)) | (bits & 0x80000000));
    });
}

TEST_CASE("formats table: its constants match the definition") {
    for (Format f : FP8) {
        const NearestCode oracle(f);
        CHECK(double(info(f).max) == oracle.values().back());
        CHECK(double(info(f).min) == oracle.values()[1]);
        // The value after 1.
        CHECK(std::ldexp(1.0, -info(f).mantissa) == fp8_value(f, f == Format::E4M3 ? 0x39 : 0x3D) - 1);
    }
    CHECK(double(info(Format::BF16).max) == bf16_value(0x7F7F));
    CHECK(double(info(Format::BF16).min) == bf16_value(0x0001));
    CHECK(double(info(Format::F16).max) == fp16_value(0x7BFF));
    CHECK(double(info(Format::F16).min) == fp16_value(0x0001));
    CHECK(std::ldexp(1.0, -info(Format::F16).mantissa) == fp16_value(0x3C01) - 1);  // The value after 1.
    CHECK(info(Format::F32).max == std::numeric_limits<float>::max());
    CHECK(info(Format::F32).min == std::numeric_limits<float>::denorm_min());
}

TEST_CASE("encode: returns every finite code that decode was given") {
    for (Format f : FP8)
        for (int code = 0; code < 256; code++)
            if (std::isfinite(fp8_value(f, code))) CHECK(encode(f, decode(f, uint8_t(code))) == code);
}

TEST_CASE("encode: infinity and large values saturate; NaN stays NaN") {
    const float inf = std::numeric_limits<float>::infinity(), largest = std::numeric_limits<float>::max();
    for (Format f : FP8) {
        for (float x : {inf, largest, std::nextafter(info(f).max, inf), 2 * info(f).max}) {
            CHECK(decode(f, encode(f, x)) == info(f).max);
            CHECK(decode(f, encode(f, -x)) == -info(f).max);
        }
        for (uint32_t nan : {0x7FC00000u, 0xFFC00000u, 0x7F800001u, 0x7FFFFFFFu})
            CHECK(std::isnan(decode(f, encode(f, float_of(nan)))));
    }
}

TEST_CASE("encode: a tie rounds to the even code, its neighbours to the nearest") {
    for (Format f : FP8) {
        const NearestCode oracle(f);
        const std::vector<double>& v = oracle.values();
        for (size_t i = 0; i + 1 < v.size(); i++) {
            const float tie = float((v[i] + v[i + 1]) / 2);  // exact: one more bit than the format
            for (float sign : {1.0f, -1.0f}) {
                const int s = sign < 0 ? 0x80 : 0;
                CHECK(encode(f, sign * tie) == (s | int(i + i % 2)));
                CHECK(encode(f, sign * std::nextafter(tie, 0.0f)) == (s | int(i)));
                CHECK(encode(f, sign * std::nextafter(tie, HUGE_VALF)) == (s | int(i + 1)));
            }
        }
    }
}

TEST_CASE("encode: every BF16 value gives the nearest code") {
    for (Format f : FP8) {
        const NearestCode oracle(f);
        int failures = 0;
        for (uint32_t upper = 0; upper < 65536; upper++)
            failures += !encodes_nearest(f, oracle, float_of(upper << 16));
        CHECK(failures == 0);
    }
}

TEST_CASE("encode: tens of millions of FP32 values give the nearest code") {
    FRESH_RANDOM(rng);
    for (Format f : FP8) {
        const NearestCode oracle(f);
        over_all_floats(uint32_t(rng.bits()), count(20'000'000, 500'000),
                        [&](uint32_t bits) { return encodes_nearest(f, oracle, float_of(bits)); });
        const uint32_t low = bits_of(info(f).min / 8), high = bits_of(info(f).max * 2);  // where codes differ
        over_all_floats(uint32_t(rng.bits()), count(20'000'000, 500'000), [&](uint32_t bits) {
            return encodes_nearest(f, oracle,
                                 float_of((low + (bits & 0x7FFFFFFF) % (high - low)) | (bits & 0x80000000)));
        });
    }
}

TEST_CASE("to_bf16: rounds to nearest even; overflows to infinity; NaN stays NaN") {
    FRESH_RANDOM(rng);
    over_all_floats(uint32_t(rng.bits()), count(20'000'000, 500'000), rounds_to_bf16);
    CHECK(std::isinf(from_bf16(to_bf16(std::numeric_limits<float>::max()))));
    for (uint32_t upper = 0; upper < 65536; upper++) {  // BF16 values and ties
        const uint32_t bits = upper << 16;
        if (!rounds_to_bf16(bits) || !rounds_to_bf16(bits | 0x8000)) FAIL("upper half " << upper);
    }
    for (uint32_t nan = 0x7F800001; nan < 0x7F810002;
         nan++)  // a NaN whose payload is only in the lower half
        if (!std::isnan(from_bf16(to_bf16(float_of(nan))))) FAIL("NaN " << nan << " is no NaN any more");
}

TEST_CASE("round_to: is the identity for FP32 and rounds to BF16") {
    FRESH_RANDOM(rng);
    over_all_floats(uint32_t(rng.bits()), 1'000'000, [](uint32_t bits) {
        const float x = float_of(bits);
        if (std::isnan(x))
            return std::isnan(round_to(Format::F32, x)) && std::isnan(round_to(Format::BF16, x));
        return bits_of(round_to(Format::F32, x)) == bits &&
               bits_of(round_to(Format::BF16, x)) == uint32_t(to_bf16(x)) << 16;
    });
}

TEST_CASE("split_master, join_master: weight and remainder give the exact FP32 master") {
    FRESH_RANDOM(rng);
    over_all_floats(uint32_t(rng.bits()), count(20'000'000, 500'000), splits_exactly);
    std::vector<uint32_t> uppers = {0, 1, 0x7F, 0x80, 0x3F7F, 0x3F80, 0x7F7E, 0x7F7F, 0x8000, 0xBF80, 0xFF7F};
    for (int64_t i = 0; i < count(200, 5); i++) uppers.push_back(uint32_t(rng.below(65536)));
    for (uint32_t upper : uppers)
        for (uint32_t lower = 0; lower < 65536; lower++)
            if (!splits_exactly(upper << 16 | lower)) FAIL("bits " << (upper << 16 | lower));
}

TEST_CASE("split_master: the weight is the master rounded to BF16, except on ties") {
    FRESH_RANDOM(rng);
    over_all_floats(uint32_t(rng.bits()), count(5'000'000, 500'000), [](uint32_t bits) {
        if (not_finite(bits) || (bits & 0xFFFF) == 0x8000) return true;
        uint16_t weight;
        int16_t remainder;
        split_master(float_of(bits), &weight, &remainder);
        return weight == to_bf16(float_of(bits));
    });
}
