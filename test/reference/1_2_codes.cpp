// 1_2_codes.cpp - reference/rounding.h and quantize.cpp: codes, and scales and blocks of every granularity, on every
// kind of data, by the definition of the formats (oracle.h). Both sides are exact: the checks are equalities.

#include "../../reference/operators.h"
#include "../../reference/optimizer.h"
#include "../help/oracle.h"
#include "../help/random.h"

using namespace coat;
using namespace coat::test;
using namespace coat::reference;

static int code_of(Format f, float x) { return f == Format::BF16 ? to_bf16(x) : encode(f, x); }
static float value_of(Format f, int code) {
    return f == Format::BF16 ? from_bf16(uint16_t(code)) : decode(f, uint16_t(code));
}
static bool encodes(const Definition& d, float x) {
    const int code = code_of(d.format, x);
    return std::isnan(x) ? std::isnan(value_of(d.format, code)) : code == d.nearest(x);
}

// Calls check(bits) for many FP32 bit patterns, spread over all 2^32.
template <class Check> static void over_all_floats(Random& rng, Check check) {
    const int64_t number = cases(20'000'000, 500'000);
    const uint64_t first = rng.bits();
    const uint64_t step = (uint64_t(1) << 32) / uint64_t(number) | 1;  // odd: the lower bits take every value
    uint64_t failed = 0;                                               // the bits of one, plus 1
#pragma omp parallel for reduction(max : failed)
    for (int64_t i = 0; i < number; i++) {
        const uint32_t bits = uint32_t(first + uint64_t(i) * step);
        if (!check(bits)) failed = uint64_t(bits) + 1;
    }
    CHECK_MESSAGE(failed == 0, "the bits ", failed - 1);
}

static std::vector<TensorFormat> fp8_tensor_formats() {
    std::vector<TensorFormat> table;
    for (Format f : {Format::E4M3, Format::E5M2})
        for (Format scale : {Format::FP32, Format::BF16})
            for (Granularity g :
                 {PER_TENSOR, PER_1x16, PER_1x128, PER_128x128, PER_ROW, Granularity{0, 1}, {16, 16}})
                table.push_back({f, g, scale});
    return table;
}

// The largest magnitude of the block that each element belongs to. If the GEMM sums along columns, it reads the
// transpose: there a granularity's columns are rows of x.
static Floats amaxes_of_blocks(const Floats& x, int64_t cols, Granularity g, SumAlong sum_along) {
    if (sum_along == SumAlong::Column) std::swap(g.rows, g.cols);
    Floats largest(x.size());  // of the block in row r and column c: at r * cols + c
    auto of = [&](size_t i) -> float& {
        const int64_t row = int64_t(i) / cols, col = int64_t(i) % cols;
        return largest[size_t((g.rows ? row / g.rows : 0) * cols + (g.cols ? col / g.cols : 0))];
    };
    for (size_t i = 0; i < x.size(); i++) of(i) = std::max(of(i), std::fabs(x[i]));
    Floats result;
    for (size_t i = 0; i < x.size(); i++) result.push_back(of(i));
    return result;
}

static float scale_by_definition(const TensorFormat& tensor_format, float amax) {
    if (amax == 0) return 1;
    const float s = std::max(amax / format_info(tensor_format.element_format).fmax,
                             0x1p-126f);  // so that 1 / s is finite
    const Definition& bf16 = definition(Format::BF16);
    return tensor_format.scale_format == Format::FP32 ? s : float(bf16.value(bf16.nearest(s)));
}

TEST_CASE("decode: every code has the value of its definition and encode gives the code back") {
    for (const Definition& d : DEFINITIONS) {
        const FormatInfo& f = format_info(d.format);
        INFO(std::string(f.name));
        int wrong = 0;
        for (int code = 0; code < 2 * d.sign; code++) {
            const float got = value_of(d.format, code);
            const int magnitude = code & (d.sign - 1);
            if (magnitude <= d.top)
                wrong += double(got) != d.value(code) || std::signbit(got) != (code >= d.sign) ||
                         code_of(d.format, got) != code;
            else if (magnitude == d.top + 1 && d.format != Format::E4M3)  // which has no infinity
                wrong += got != (code < d.sign ? INFINITY : -INFINITY);
            else wrong += !std::isnan(got);
        }
        CHECK(wrong == 0);
        CHECK(f.fmax == d.value(d.top));
        CHECK(f.fmin == d.value(1));
        CHECK(f.mantissa_bits == d.M);
    }
    CHECK(format_info(Format::FP32).fmax == float_of(0x7F7FFFFF));
    CHECK(format_info(Format::FP32).fmin == float_of(1));
}

TEST_CASE("encode and to_bf16: nearest code; ties to even; large values saturate; NaN stays") {
    SEEDED_RANDOM(rng);
    for (const Definition& d : DEFINITIONS) {
        const float top = format_info(d.format).fmax;
        INFO(std::string(format_info(d.format).name));
        int wrong = 0;
        auto check = [&](float x) { wrong += !encodes(d, x) + !encodes(d, -x); };
        for (float x : {INFINITY, format_info(Format::FP32).fmax, top, std::nextafter(top, INFINITY)})
            check(x);
        for (uint32_t nan : {0x7FC00000u, 0x7F800001u, 0x7F80FFFFu, 0x7FFFFFFFu}) check(float_of(nan));
        for (int code = 0; code < d.top; code++) {
            const float tie = float((d.value(code) + d.value(code + 1)) / 2);  // exact: one more bit
            for (float x : {tie, std::nextafter(tie, 0.0f), std::nextafter(tie, INFINITY)}) check(x);
        }
        CHECK(wrong == 0);
        over_all_floats(rng, [&](uint32_t bits) { return encodes(d, float_of(bits)); });
    }
}

TEST_CASE("split_master and join_master: exact; the weight is the master rounded to BF16") {
    SEEDED_RANDOM(rng);
    over_all_floats(rng, [](uint32_t bits) {
        uint16_t weight;
        int16_t remainder;
        split_master(float_of(bits), &weight, &remainder);
        const bool tie = (bits & 0xFFFF) == 0x8000;
        const uint16_t rounded = tie ? uint16_t((bits >> 16) + 1) : to_bf16(float_of(bits));
        return bits_of(join_master(weight, remainder)) == bits &&
               (!std::isfinite(float_of(bits)) || weight == rounded);
    });
}

TEST_CASE("scale_of: amax / FMAX rounded to the nearest BF16 where it is stored so; 1 for zeros") {
    SEEDED_RANDOM(rng);
    for (const TensorFormat& tensor_format : fp8_tensor_formats()) {
        INFO(tensor_format.text());
        for (int64_t i = 0; i < cases(20000, 1000); i++) {
            float a = float(std::exp2(-149 + 277 * rng.uniform())) * 0.999f;
            // Every fourth scale is a power of two, or next to one.
            if (i % 4 == 0)
                a = std::ldexp(format_info(tensor_format.element_format).fmax, int(rng.below(200)) - 100);
            if (i % 8 == 0) a = std::nextafter(a, INFINITY);
            const float s = scale_of(tensor_format, a);
            REQUIRE((s == scale_by_definition(tensor_format, a) && std::isfinite(1 / s)));
        }
        CHECK(scale_of(tensor_format, 0.0f) == 1.0f);
        // For a whole tensor the caller has to skip the step; of a smaller block all values become NaN.
        for (float a : {INFINITY, NAN})
            CHECK((tensor_format.granularity == PER_TENSOR ? scale_of(tensor_format, a) == 1.0f
                                                           : std::isnan(scale_of(tensor_format, a))));
    }
}

TEST_CASE("amax: the largest magnitude for any size; NaN and infinity give infinity") {
    SEEDED_RANDOM(rng);
    for (int64_t n : {0, 1, 2, 15, 16, 17, 31, 100, 4097, 16385, 100001}) {
        CAPTURE(n);
        const Floats x = rng.normals<float>(n);
        float expected = 0;
        for (float v : x) expected = std::max(expected, std::fabs(v));
        CHECK(compute_amax(x.data(), n) == expected);
        for (uint32_t bits : {0x7FC00000u, 0xFFC00000u, 0x7F800001u, 0x7F800000u, 0xFF800000u}) {
            if (n == 0) continue;
            Floats bad = x;
            bad[size_t(rng.below(n))] = float_of(bits);
            CHECK(compute_amax(bad.data(), n) == INFINITY);
        }
    }
}

TEST_CASE(
    "quantize and gemm_operand: scale and code and value of every element along rows and along columns") {
    SEEDED_RANDOM(rng);
    const std::pair<int64_t, int64_t> shapes[] = {{1, 1},   {1, 15},  {1, 16},  {3, 17},    {5, 33},
                                                  {2, 129}, {7, 127}, {140, 3}, {130, 131}, {129, 48}};
    for (const TensorFormat& tensor_format : fp8_tensor_formats())
        for (const auto& [rows, cols] : shapes)
            for (const Distribution& d : distributions()) {
                INFO(tensor_format.text(), " ", rows, "x", cols, ", ", d.name);
                const Definition& format = definition(tensor_format.element_format);
                const Floats x = sample(d, rng, rows * cols);
                QuantStats stats;
                const StoredMatrix stored = quantize(x.data(), rows, cols, tensor_format, {.stats = &stats});
                check_stats(stats, x, dequantize(stored));
                CHECK(int64_t(stored.elements.size()) == rows * cols);
                CHECK(int64_t(stored.scales.size()) ==
                      tensor_format.scale_count(rows, cols) * format_info(tensor_format.scale_format).bytes);
                for (SumAlong sum_along : {SumAlong::Row, SumAlong::Column}) {
                    const Floats amaxes = amaxes_of_blocks(x, cols, tensor_format.granularity, sum_along),
                                 got =
                                     gemm_operand(x, rows, cols, tensor_format, sum_along, {.stats = &stats})
                                         .values;
                    for (size_t i = 0; i < x.size(); i++) {
                        const float s = scale_by_definition(tensor_format, amaxes[i]);
                        const int code = format.nearest(x[i] * (1.0f / s));
                        const int64_t r = int64_t(i) / cols, c = int64_t(i) % cols;
                        bool right = got[i] == float(format.value(code) * double(s));
                        if (sum_along == SumAlong::Row)
                            right &= stored.scale(r, c) == s && stored.elements[i] == code &&
                                     stored.value(r, c) == got[i];
                        if (!right) FAIL("element " << i << " = " << x[i] << " became " << got[i]);
                    }
                }
                CHECK(stats.elements == 3 * rows * cols);
                CHECK(stats.saturated == 0);  // the largest may exceed FMAX by 2^-8: no code more
            }
}

TEST_CASE("quantize: NaN stays NaN; infinity saturates or makes its block NaN; other blocks do not change") {
    SEEDED_RANDOM(rng);
    for (const TensorFormat& tensor_format : fp8_tensor_formats()) {
        INFO(tensor_format.text());
        Floats x = rng.normals<float>(4 * 32);
        const StoredMatrix before = quantize(x.data(), 4, 32, tensor_format);
        x[37] = NAN;
        x[38] = -INFINITY;  // row 1, columns 5 and 6
        QuantStats stats;
        const StoredMatrix after = quantize(x.data(), 4, 32, tensor_format, {.stats = &stats});
        CHECK(std::isnan(after.value(1, 5)));
        if (tensor_format.granularity == PER_TENSOR) {
            CHECK(after.value(1, 6) == -format_info(tensor_format.element_format).fmax * after.scale(1, 6));
            CHECK(stats.saturated == 1);
        } else CHECK(std::isnan(after.value(1, 6)));
        // No error crosses tokens (paper, figure 4a).
        for (int64_t i = 0; tensor_format.granularity.rows == 1 && i < 4 * 32; i++)
            if (i / 32 != 1) CHECK(after.value(i / 32, i % 32) == before.value(i / 32, i % 32));
    }
}

TEST_CASE("quantize: a given scale is used as it is; values beyond it saturate and are counted") {
    for (Format f : {Format::E4M3, Format::E5M2}) {
        const float scale = 0.25f, edge = format_info(f).fmax * scale,
                    half_step = std::ldexp(edge / 1.75f,
                                           -1 - format_info(f).mantissa_bits);  // edge / scale = 1.75 x 2^e
        const Floats x = {0.3f, 2 * edge, -3 * edge, edge, edge + half_step, edge + 1.01f * half_step};
        QuantStats stats;
        const StoredMatrix stored = quantize(x.data(), 2, 3, {f}, {.stats = &stats, .scale = scale});
        for (size_t i = 0; i < x.size(); i++)
            CHECK(stored.elements[i] == definition(f).nearest(x[i] / scale));
        CHECK(stored.scale(1, 2) == scale);
        CHECK(stored.value(1, 0) == edge);
        CHECK(gemm_operand(x, 2, 3, {f}, SumAlong::Column, {.scale = scale}).values == dequantize(stored));
        CHECK(stats.saturated == 3);  // not what rounds to the largest value
    }
}

// If the largest amax is 0 or not finite, the scale stays.
TEST_CASE("update_history_and_scale: the scale is the largest amax of the history / FMAX") {
    SEEDED_RANDOM(rng);
    for (Format f : {Format::E4M3, Format::E5M2})
        for (size_t length : {1u, 3u, 16u}) {
            DelayedScale d;
            d.history.resize(length);
            Floats seen(length);  // the newest first
            float expected = 0;
            for (int step = 0; step < 60; step++) {
                const float draws[] = {INFINITY, NAN, 0, 0, 0, float(std::exp(5 * rng.normal()))};
                d.amax = draws[std::min<int64_t>(5, rng.below(12))];
                seen.insert(seen.begin(), d.amax);
                seen.pop_back();
                const float top = compute_amax(seen.data(), int64_t(length));  // infinity if one is NaN
                if (std::isfinite(top) && top > 0) expected = top / format_info(f).fmax;
                d.update_history_and_scale(f);
                REQUIRE((d.scale == expected && d.amax == 0));
                for (size_t i = 0; i < length; i++) REQUIRE(bits_of(d.history[i]) == bits_of(seen[i]));
            }
        }
}
