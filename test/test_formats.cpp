// test_formats.cpp - the encoders and decoders of the reference against the definition of the formats (oracle.h).
//
// Both are exact functions, so every check is an equality.
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

bool encodes_right(Format f, const NearestCode& oracle, float x) {
    const int code = encode(f, x), wanted = oracle.of(x);
    return wanted == NearestCode::NOT_A_NUMBER ? (code & 0x7F) == 0x7F : code == wanted;
}

// Calls check(bits) for count numbers spread over all 2^32 and keeps one that failed.
template <class Check>
void over_all_floats(uint32_t first, int64_t numbers, Check check) {
    const uint64_t step = (uint64_t(1) << 32) / uint64_t(numbers) | 1;  // odd, so that lower bits take every value
    std::atomic<int64_t> failures{0};
    std::atomic<uint32_t> failed{0};
#pragma omp parallel for
    for (int64_t i = 0; i < numbers; i++) {
        const uint32_t bits = uint32_t(first + uint64_t(i) * step);
        if (check(bits)) continue;
        failures++;
        failed = bits;
    }
    INFO("one that failed: bits ", failed.load(), " = ", float_of(failed));
    CHECK(failures == 0);
}

// BF16 by its definition: the value of the upper half, and of the next magnitude (2^128 after the largest).
double bf16_value(uint32_t upper) {
    if ((upper & 0x7FFF) == 0x7F80) return (upper & 0x8000 ? -1 : 1) * 0x1p128;
    return double(float_of(upper << 16));
}

uint32_t nearest_bf16(uint32_t bits, bool ties_to_even) {
    const uint32_t upper = bits >> 16;
    const double x = float_of(bits), down = std::fabs(x - bf16_value(upper)), up = std::fabs(bf16_value(upper + 1) - x);
    if (down == up) return ties_to_even ? upper + (upper & 1) : upper + 1;
    return down < up ? upper : upper + 1;
}

// FP16 by its definition: the nearest of the finite values on both sides, which lie where the exponent says; ties to the even code.
bool encodes_right_to_fp16(uint32_t bits) {
    const float x = float_of(bits);
    const int got = to_f16(x), magnitude = got & 0x7FFF;
    if (std::isnan(x)) return std::isnan(fp16_value(got));
    if (std::signbit(x) != (got >= 0x8000) || magnitude > 0x7BFF) return false;
    const double a = std::fabs(double(x)), distance = std::fabs(a - fp16_value(magnitude));
    if (a >= fp16_value(0x7BFF)) return magnitude == 0x7BFF;  // saturated; the differences below would not be exact
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

bool rounds_up_to_bf16(uint32_t bits) {  // x >= 0
    const float x = float_of(bits);
    const uint16_t got = to_bf16_up(x);
    return from_bf16(got) >= x && (got == 0 || from_bf16(uint16_t(got - 1)) < x);
}

bool splits_exactly(uint32_t bits) {
    uint16_t weight;
    int16_t remainder;
    split_master(float_of(bits), &weight, &remainder);
    const bool exact = bits_of(join_master(weight, remainder)) == bits;
    return exact && (not_finite(bits) || weight == uint16_t(nearest_bf16(bits, false)));
}

}  // namespace

TEST_CASE("formats: all 256 codes decode to their definition") {
    for (Format f : FP8)
        for (int code = 0; code < 256; code++) {
            INFO(std::string(info(f).name), " code ", code);
            const double wanted = fp8_value(f, code);
            const float got = decode(f, uint8_t(code));
            if (std::isnan(wanted)) CHECK(std::isnan(got));
            else CHECK(double(got) == wanted);
            if (!std::isnan(wanted)) CHECK(std::signbit(got) == (code >= 128));
        }
}

TEST_CASE("formats: all 65536 codes of FP16 decode to their definition, and the finite ones encode to themselves") {
    int64_t failures = 0;
    for (int code = 0; code < 65536; code++) {
        const double wanted = fp16_value(code);
        const float got = from_f16(uint16_t(code));
        failures += std::isnan(wanted) ? !std::isnan(got) : double(got) != wanted || std::signbit(got) != (code >= 32768);
        if (std::isfinite(wanted)) failures += to_f16(got) != code;
    }
    CHECK(failures == 0);
}

TEST_CASE("formats: FP16 rounds to nearest even down to its subnormal numbers, saturates, keeps NaN") {
    FRESH_RANDOM(rng);
    const float inf = std::numeric_limits<float>::infinity();
    for (float x : {inf, std::numeric_limits<float>::max(), 65520.0f, 65536.0f, std::nextafter(65504.0f, inf)}) {
        CHECK(to_f16(x) == 0x7BFF);
        CHECK(to_f16(-x) == 0xFBFF);
    }
    for (uint32_t nan : {0x7FC00000u, 0xFFC00000u, 0x7F800001u, 0x7FFFFFFFu}) CHECK(std::isnan(from_f16(to_f16(float_of(nan)))));
    int64_t failures = 0;
    for (int code = 0; code < 0x7BFF; code++) {  // every tie and its neighbours
        const float tie = float((fp16_value(code) + fp16_value(code + 1)) / 2);  // exact: one more bit than the format
        for (float sign : {1.0f, -1.0f}) {
            const int s = sign < 0 ? 0x8000 : 0;
            failures += to_f16(sign * tie) != (s | (code + code % 2));
            failures += to_f16(sign * std::nextafter(tie, 0.0f)) != (s | code);
            failures += to_f16(sign * std::nextafter(tie, inf)) != (s | (code + 1));
        }
    }
    CHECK(failures == 0);
    over_all_floats(uint32_t(rng.bits()), count(10'000'000, 500'000), encodes_right_to_fp16);
    const uint32_t low = bits_of(0x1p-27f), high = bits_of(0x1p17f);  // where codes differ
    over_all_floats(uint32_t(rng.bits()), count(10'000'000, 500'000), [&](uint32_t bits) {
        return encodes_right_to_fp16((low + (bits & 0x7FFFFFFF) % (high - low)) | (bits & 0x80000000));
    });
}

TEST_CASE("formats: the table's constants are those of the definition") {
    for (Format f : FP8) {
        const NearestCode oracle(f);
        CHECK(double(info(f).max) == oracle.values().back());
        CHECK(double(info(f).min) == oracle.values()[1]);
        CHECK(std::ldexp(1.0, -info(f).mantissa) == fp8_value(f, f == Format::E4M3 ? 0x39 : 0x3D) - 1);  // the number after 1
    }
    CHECK(double(info(Format::BF16).max) == bf16_value(0x7F7F));
    CHECK(double(info(Format::BF16).min) == bf16_value(0x0001));
    CHECK(double(info(Format::F16).max) == fp16_value(0x7BFF));
    CHECK(double(info(Format::F16).min) == fp16_value(0x0001));
    CHECK(std::ldexp(1.0, -info(Format::F16).mantissa) == fp16_value(0x3C01) - 1);  // the number after 1
    CHECK(info(Format::F32).max == std::numeric_limits<float>::max());
    CHECK(info(Format::F32).min == std::numeric_limits<float>::denorm_min());
}

TEST_CASE("formats: every finite code survives decode and encode") {
    for (Format f : FP8)
        for (int code = 0; code < 256; code++)
            if (std::isfinite(fp8_value(f, code))) CHECK(encode(f, decode(f, uint8_t(code))) == code);
}

TEST_CASE("formats: infinities and what is too large saturate, NaN stays NaN") {
    const float inf = std::numeric_limits<float>::infinity(), largest = std::numeric_limits<float>::max();
    for (Format f : FP8) {
        for (float x : {inf, largest, std::nextafter(info(f).max, inf), 2 * info(f).max}) {
            CHECK(decode(f, encode(f, x)) == info(f).max);
            CHECK(decode(f, encode(f, -x)) == -info(f).max);
        }
        for (uint32_t nan : {0x7FC00000u, 0xFFC00000u, 0x7F800001u, 0x7FFFFFFFu}) CHECK(std::isnan(decode(f, encode(f, float_of(nan)))));
    }
}

TEST_CASE("formats: every tie between two codes goes to the even one, its neighbours to the nearest") {
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

TEST_CASE("formats: every BF16 value encodes to the nearest code") {
    for (Format f : FP8) {
        const NearestCode oracle(f);
        int failures = 0;
        for (uint32_t upper = 0; upper < 65536; upper++) failures += !encodes_right(f, oracle, float_of(upper << 16));
        CHECK(failures == 0);
    }
}

TEST_CASE("formats: tens of millions of FP32 values encode to the nearest code") {
    FRESH_RANDOM(rng);
    for (Format f : FP8) {
        const NearestCode oracle(f);
        over_all_floats(uint32_t(rng.bits()), count(20'000'000, 500'000),
                        [&](uint32_t bits) { return encodes_right(f, oracle, float_of(bits)); });
        const uint32_t low = bits_of(info(f).min / 8), high = bits_of(info(f).max * 2);  // where codes differ
        over_all_floats(uint32_t(rng.bits()), count(20'000'000, 500'000), [&](uint32_t bits) {
            return encodes_right(f, oracle, float_of((low + (bits & 0x7FFFFFFF) % (high - low)) | (bits & 0x80000000)));
        });
    }
}

TEST_CASE("formats: BF16 rounds to nearest even, overflows to infinity, keeps NaN") {
    FRESH_RANDOM(rng);
    over_all_floats(uint32_t(rng.bits()), count(20'000'000, 500'000), rounds_to_bf16);
    CHECK(std::isinf(from_bf16(to_bf16(std::numeric_limits<float>::max()))));
    for (uint32_t upper = 0; upper < 65536; upper++) {  // exactly representable, and ties
        const uint32_t bits = upper << 16;
        if (!rounds_to_bf16(bits) || !rounds_to_bf16(bits | 0x8000)) FAIL("upper half " << upper);
    }
    for (uint32_t nan = 0x7F800001; nan < 0x7F810002; nan++)  // the payload in the lower half alone must not vanish
        if (!std::isnan(from_bf16(to_bf16(float_of(nan))))) FAIL("NaN " << nan << " became a number");
}

TEST_CASE("formats: a scale rounds up to the smallest BF16 that is not below it") {
    FRESH_RANDOM(rng);
    const uint32_t infinity = 0x7F800000;
    over_all_floats(uint32_t(rng.bits()), count(10'000'000, 500'000),
                    [=](uint32_t bits) { return rounds_up_to_bf16((bits & 0x7FFFFFFF) % (infinity + 1)); });
    for (uint32_t upper = 0; upper <= 0x7F80; upper++)
        for (uint32_t lower : {0u, 1u, 0x7FFFu, 0x8000u, 0xFFFFu})
            if ((upper << 16 | lower) <= infinity && !rounds_up_to_bf16(upper << 16 | lower)) FAIL("bits " << (upper << 16 | lower));
}

TEST_CASE("formats: round_to is the identity for FP32 and BF16's rounding for BF16") {
    FRESH_RANDOM(rng);
    over_all_floats(uint32_t(rng.bits()), 1'000'000, [](uint32_t bits) {
        const float x = float_of(bits);
        if (std::isnan(x)) return std::isnan(round_to(Format::F32, x)) && std::isnan(round_to(Format::BF16, x));
        return bits_of(round_to(Format::F32, x)) == bits && bits_of(round_to(Format::BF16, x)) == uint32_t(to_bf16(x)) << 16;
    });
}

TEST_CASE("formats: a BF16 weight and its remainder are the exact FP32 master, for all lower halves") {
    FRESH_RANDOM(rng);
    over_all_floats(uint32_t(rng.bits()), count(20'000'000, 500'000), splits_exactly);
    std::vector<uint32_t> uppers = {0, 1, 0x7F, 0x80, 0x3F7F, 0x3F80, 0x7F7E, 0x7F7F, 0x8000, 0xBF80, 0xFF7F};
    for (int64_t i = 0; i < count(200, 5); i++) uppers.push_back(uint32_t(rng.below(65536)));
    for (uint32_t upper : uppers)
        for (uint32_t lower = 0; lower < 65536; lower++)
            if (!splits_exactly(upper << 16 | lower)) FAIL("bits " << (upper << 16 | lower));
}

TEST_CASE("formats: the stored weight is the rounded master, except on ties") {
    FRESH_RANDOM(rng);
    over_all_floats(uint32_t(rng.bits()), count(5'000'000, 500'000), [](uint32_t bits) {
        if (not_finite(bits) || (bits & 0xFFFF) == 0x8000) return true;
        uint16_t weight;
        int16_t remainder;
        split_master(float_of(bits), &weight, &remainder);
        return weight == to_bf16(float_of(bits));
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// The tables, once more and by themselves: a changed row fails here, whatever else it changes.

TEST_CASE("tables: each recipe is what its method is") {
    auto row = [](const Recipe& r) {
        std::string text = std::string(info(r.stream).name) + " | " + r.x.text() + ", " + r.w.text() + ", " + r.g.text() + " | " + r.nonlinear.text() +
                           " | " + r.attention.text() + " | " + (r.scaling == Scaling::Delayed ? "delayed" : "just in time") + " | ";
        for (bool fast : r.fast_accumulation) text += fast ? "fast " : "exact ";
        return text + "| " + r.optimizer;
    };
    const std::vector<std::pair<std::string, std::string>> wanted = {
        {"fp32", "fp32 | fp32, fp32, fp32 | fp32 | fp32 | just in time | exact exact exact | fp32"},
        {"bf16", "bf16 | bf16, bf16, bf16 | bf16 | bf16 | just in time | exact exact exact | fp32"},
        {"coat", "bf16 | e4m3 tensor, e4m3 tensor, e5m2 tensor | e4m3 1x16 | bf16 | just in time | fast exact exact | coat"},
        {"te", "bf16 | e4m3 tensor, e4m3 tensor, e5m2 tensor | bf16 | bf16 | delayed | fast exact exact | fp32"},
        {"colossal", "bf16 | e4m3 tensor, e4m3 tensor, e5m2 tensor | bf16 | bf16 | just in time | fast fast fast | fp32"},
        {"rowwise", "bf16 | e4m3 row, e4m3 row, e4m3 row | bf16 | bf16 | just in time | fast exact exact | fp32"},
        {"deepseek", "bf16 | e4m3 1x128, e4m3 128x128, e4m3 1x128 | bf16 | bf16 | just in time | exact exact exact | fp32"},
    };
    REQUIRE(recipes().size() == wanted.size());
    for (size_t i = 0; i < wanted.size(); i++) {
        const Recipe& r = recipes()[i];
        CHECK(r.name == wanted[i].first);
        CHECK(row(r) == wanted[i].second);
        for (const Quant& operand : {r.x, r.w, r.g}) CHECK(operand.scale == Format::F32);
        CHECK(r.nonlinear.scale == (r.nonlinear.fp8() ? Format::BF16 : Format::F32));
        CHECK(r.history == 1024);
        CHECK(r.margin == 0);
    }
}

TEST_CASE("tables: each named model has the shape and the number of parameters that were published") {
    struct Shape {
        const char *name, *arch;
        int64_t L, C, NH, NKV, F, V, max_T;
        bool tied;
        float norm_eps, rope_theta;
        int64_t count;  // 0: not published
    };
    const std::vector<Shape> wanted = {
        {"llama-tiny", "llama", 4, 128, 4, 2, 352, 0, 256, true, 1e-5f, 1e4f, 0},
        {"gpt2-tiny", "gpt2", 4, 128, 4, 4, 512, 0, 256, true, 1e-5f, 1e4f, 0},
        {"llama-30m", "llama", 8, 512, 8, 4, 1408, 0, 1024, true, 1e-5f, 1e4f, 0},
        {"gpt2", "gpt2", 12, 768, 12, 12, 3072, 50257, 1024, true, 1e-5f, 1e4f, 124439808},
        {"gpt2-medium", "gpt2", 24, 1024, 16, 16, 4096, 50257, 1024, true, 1e-5f, 1e4f, 354823168},
        {"gpt2-large", "gpt2", 36, 1280, 20, 20, 5120, 50257, 1024, true, 1e-5f, 1e4f, 774030080},
        {"gpt2-xl", "gpt2", 48, 1600, 25, 25, 6400, 50257, 1024, true, 1e-5f, 1e4f, 1557611200},
        {"tinyllama-1.1b", "llama", 22, 2048, 32, 4, 5632, 32000, 2048, false, 1e-5f, 1e4f, 1100048384},
        {"llama-2-7b", "llama", 32, 4096, 32, 32, 11008, 32000, 4096, false, 1e-5f, 1e4f, 6738415616},
        {"llama-2-13b", "llama", 40, 5120, 40, 40, 13824, 32000, 4096, false, 1e-5f, 1e4f, 13015864320},
        {"llama-3-8b", "llama", 32, 4096, 32, 8, 14336, 128256, 8192, false, 1e-5f, 5e5f, 8030261248},
        {"llama-30b", "llama", 60, 6656, 52, 52, 17920, 32000, 2048, false, 1e-5f, 1e4f, 32528943616},
    };
    REQUIRE(models().size() == wanted.size());
    for (size_t i = 0; i < wanted.size(); i++) {
        const ModelConfig& c = models()[i];
        const Shape& s = wanted[i];
        CAPTURE(s.name);
        CHECK(c.name == s.name);
        CHECK(std::string(c.arch.name) == s.arch);
        CHECK(std::vector<int64_t>{c.L, c.C, c.NH, c.NKV, c.F, c.V, c.max_T, c.tied, c.head_size} ==
              std::vector<int64_t>{s.L, s.C, s.NH, s.NKV, s.F, s.V, s.max_T, s.tied, 0});
        CHECK(c.norm_eps == s.norm_eps);
        CHECK(c.rope_theta == s.rope_theta);
        if (s.count) CHECK(parameter_count(c) == s.count);
    }
}
