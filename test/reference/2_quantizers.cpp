// 2_quantizers.cpp - part 2 of reference.cpp: scales, blocks and codes of every format, granularity, kind of
// data and incomplete last block, against their definition.
//
// The error bounds follow from the formats. A value is code * s with code = encode(x * (1 / s)). 1 / s and
// both products round by 2^-24 each, relative. A normal code rounds by 2^-(mantissa+1), relative; a subnormal
// code by half of FMIN.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>

#include "../../reference.h"
#include "../help/oracle.h"
#include "../help/random.h"

using namespace coat;
using namespace coat::test;
using namespace coat::reference;

namespace {

const float INF = std::numeric_limits<float>::infinity(),
            NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();

std::vector<Quant> fp8_quants() {
    std::vector<Quant> table;
    for (Format f : {Format::E4M3, Format::E5M2})
        for (Format scale : {Format::F32, Format::BF16})
            for (Granularity g :
                 {PER_TENSOR, PER_GROUP, PER_1x128, PER_128x128, PER_ROW, Granularity{0, 1}, {16, 16}})
                table.push_back({f, g, scale});
    return table;
}

// The largest magnitude of the block that each element belongs to. The columns of a granularity run along the
// reduction: if that is over rows, they run down.
std::vector<float> amaxes_of_blocks(const std::vector<float>& x, int64_t cols, Granularity g,
                                    ReduceOver over) {
    const int64_t tall = over == ReduceOver::Columns ? g.rows : g.cols,
                  wide = over == ReduceOver::Columns ? g.cols : g.rows;
    std::map<std::pair<int64_t, int64_t>, float> largest;
    auto of = [&](size_t i) -> float& {
        const int64_t r = int64_t(i) / cols, c = int64_t(i) % cols;
        return largest[{tall ? r / tall : 0, wide ? c / wide : 0}];
    };
    for (size_t i = 0; i < x.size(); i++) of(i) = std::max(of(i), std::fabs(x[i]));
    std::vector<float> result;
    for (size_t i = 0; i < x.size(); i++) result.push_back(of(i));
    return result;
}

float scale_by_definition(const Quant& q, float amax) {
    if (amax == 0) return 1;
    const float s = std::max(amax / info(q.format).max, 0x1p-126f);  // so that 1 / s is finite
    const Definition& bf16 = definition(Format::BF16);
    return q.scale_format == Format::F32 ? s : float(bf16.value(bf16.nearest(s)));
}

}  // namespace

TEST_CASE("scale_of: amax / FMAX, rounded to the nearest BF16 where it is stored so; 1 for zeros") {
    FRESH_RANDOM(rng);
    for (const Quant& q : fp8_quants()) {
        INFO(q.text());
        for (int64_t i = 0; i < count(20000, 1000); i++) {
            float a = float(std::exp2(-149 + 277 * rng.uniform())) * 0.999f;
            // Every fourth scale is a power of two, or next to one.
            if (i % 4 == 0) a = std::ldexp(info(q.format).max, int(rng.below(200)) - 100);
            if (i % 8 == 0) a = std::nextafter(a, INF);
            const float s = scale_of(q, a);
            REQUIRE((s == scale_by_definition(q, a) && std::isfinite(1 / s)));
            // Never saturates: the next code would begin at 1 + 1/28 of FMAX, in E5M2 at 1 + 1/14.
            REQUIRE(double(a) / double(s) <= double(info(q.format).max) * (1 + 0x1p-8));
        }
        CHECK(scale_of(q, 0.0f) == 1.0f);
        for (float a : {INF, NOT_A_NUMBER})  // of a tensor the step is skipped; a block's values are all NaN
            CHECK((q.granularity == PER_TENSOR ? scale_of(q, a) == 1.0f : std::isnan(scale_of(q, a))));
    }
    // 449.75 / 448 lies half-way between two values of BF16; the nearest with an even mantissa is 1. The
    // largest value then exceeds FMAX times the scale, and is not counted as saturated.
    const std::vector<float> x(16, 449.75f);
    QuantStats stats;
    const Quantized lower = quantize(x.data(), 1, 16, Q_GROUP, &stats);
    CHECK((lower.scale(0, 0) == 1.0f && lower.value(0, 0) == 448.0f && stats.saturated == 0));
    CHECK(scale_of(Q_GROUP, 450.0f) == 1 + 0x1p-7f);
}

TEST_CASE("amax: the largest magnitude for any size; NaN and infinity give infinity") {
    FRESH_RANDOM(rng);
    for (const Distribution& d : distributions())
        for (int64_t n : {0, 1, 2, 15, 16, 17, 31, 100, 4097, 16385, 100001}) {
            std::vector<float> x = sample(d, rng, n);
            INFO(d.name, " n ", n);
            float expected = 0;
            for (float v : x) expected = std::max(expected, std::fabs(v));
            CHECK(amax(x.data(), n) == expected);
            for (uint32_t bits : {0x7FC00000u, 0xFFC00000u, 0x7F800001u, 0x7F800000u, 0xFF800000u}) {
                if (n == 0) continue;
                std::vector<float> bad = x;
                bad[size_t(rng.below(n))] = float_of(bits);
                CHECK(amax(bad.data(), n) == INF);
            }
        }
}

TEST_CASE(
    "quantize, operand: scale, code, value and statistics of every element, over columns and over rows") {
    FRESH_RANDOM(rng);
    const std::pair<int64_t, int64_t> shapes[] = {{1, 1},   {1, 15},  {1, 16},  {3, 17},    {5, 33},
                                                  {2, 129}, {7, 127}, {140, 3}, {130, 257}, {129, 48}};
    for (const Quant& q : fp8_quants())
        for (const auto& [rows, cols] : shapes)
            for (const Distribution& d : distributions()) {
                INFO(q.text(), " ", rows, "x", cols, ", ", d.name);
                const Definition& format = definition(q.format);
                const std::vector<float> x = sample(d, rng, rows * cols);
                QuantStats stats;
                stats.elements = 5;
                const Quantized z = quantize(x.data(), rows, cols, q, &stats);
                CHECK(int64_t(z.codes.size()) == rows * cols);
                CHECK(int64_t(z.scales.size()) == q.scales(rows, cols) * info(q.scale_format).bytes);
                const std::vector<float> values = dequantize(z),
                                         amaxes =
                                             amaxes_of_blocks(x, cols, q.granularity, ReduceOver::Columns);
                REQUIRE(values.size() == x.size());
                double signal = 0, noise = 0;
                int64_t flushed = 0;
                for (size_t i = 0; i < x.size(); i++) {
                    const float s = z.scale(int64_t(i) / cols, int64_t(i) % cols), value = values[i];
                    const double error = double(value) - double(x[i]);
                    const bool right = s == scale_by_definition(q, amaxes[i]) &&
                                       z.codes[i] == format.nearest(x[i] * (1.0f / s)) &&
                                       value == float(format.value(z.codes[i]) * double(s)) &&
                                       value == z.value(int64_t(i) / cols, int64_t(i) % cols) &&
                                       std::fabs(error) <= error_bound(q.format, double(x[i]), double(s));
                    if (!right)
                        FAIL("element " << i << " = " << x[i] << " scale " << s << " value " << value);
                    signal += double(x[i]) * double(x[i]), noise += error * error;
                    flushed += x[i] != 0 && values[i] == 0;
                }
                CHECK(
                    (stats.elements == 5 + rows * cols && stats.flushed == flushed && stats.saturated == 0));
                CHECK(std::fabs(stats.signal - signal) <= 1e-12 * signal);
                CHECK(std::fabs(stats.noise - noise) <= 1e-12 * noise);

                CHECK(operand(x, rows, cols, q, ReduceOver::Columns) == values);
                QuantStats over_rows;
                const std::vector<float> down = operand(x, rows, cols, q, ReduceOver::Rows, &over_rows),
                                         down_amaxes =
                                             amaxes_of_blocks(x, cols, q.granularity, ReduceOver::Rows);
                for (size_t i = 0; i < x.size(); i++) {
                    const float s = scale_by_definition(q, down_amaxes[i]);
                    if (down[i] != float(format.value(format.nearest(x[i] * (1.0f / s))) * double(s)))
                        FAIL("over rows: element " << i << " = " << x[i] << " value " << down[i]);
                }
                CHECK(over_rows.elements == rows * cols);
            }
}

TEST_CASE("quantize: NaN stays NaN; infinity saturates or makes its block NaN; other blocks do not change") {
    FRESH_RANDOM(rng);
    for (const Quant& q : fp8_quants()) {
        INFO(q.text());
        std::vector<float> x = rng.normals<float>(4 * 32);
        const Quantized before = quantize(x.data(), 4, 32, q);
        x[37] = NOT_A_NUMBER, x[38] = -INF;  // row 1, columns 5 and 6
        QuantStats stats;
        const Quantized after = quantize(x.data(), 4, 32, q, &stats);
        CHECK(std::isnan(after.value(1, 5)));
        if (q.granularity == PER_TENSOR) {
            CHECK(after.value(1, 6) == -info(q.format).max * after.scale(1, 6));
            CHECK(stats.saturated == 1);
        } else {
            CHECK(std::isnan(after.value(1, 6)));
        }
        for (int64_t i = 0; i < 4 * 32 && q.granularity.rows == 1;
             i++)  // no error crosses tokens (figure 4a)
            if (i / 32 != 1) CHECK(after.value(i / 32, i % 32) == before.value(i / 32, i % 32));
    }
}

TEST_CASE("quantize: a given scale is used as it is; values beyond it saturate and are counted") {
    FRESH_RANDOM(rng);
    for (Format f : {Format::E4M3, Format::E5M2}) {
        const float scale = 0.25f, edge = info(f).max * scale,
                    half_step = edge * std::ldexp(0.5f, -info(f).mantissa);
        std::vector<float> x = rng.normals<float>(64);
        x[3] = 2 * edge, x[40] = -3 * edge, x[41] = edge, x[42] = edge + 0.45f * half_step,
        x[43] = edge + half_step;
        QuantStats stats;
        const Quantized z = quantize(x.data(), 4, 16, {f}, &stats, &scale);
        for (size_t i = 0; i < x.size(); i++) CHECK(z.codes[i] == definition(f).nearest(x[i] / scale));
        CHECK(z.scale(2, 5) == scale);
        CHECK((z.value(0, 3) == edge && z.value(2, 8) == -edge && z.value(2, 9) == edge));
        CHECK(stats.saturated == 3);  // not what rounds to the largest value
    }
}

TEST_CASE("quantize: FP32 and BF16 store the values themselves and have no scales") {
    FRESH_RANDOM(rng);
    for (const Distribution& d : distributions())
        for (const Quant& q : {Q_F32, Q_BF16}) {
            const std::vector<float> x = sample(d, rng, 7 * 19);
            const Quantized z = quantize(x.data(), 7, 19, q);
            const std::vector<float> values = dequantize(z);
            CHECK((z.scales.empty() && int64_t(z.codes.size()) == 7 * 19 * info(q.format).bytes));
            for (size_t i = 0; i < x.size(); i++) CHECK(values[i] == round_to(q.format, x[i]));
        }
}

TEST_CASE("end_step: the scale is the largest amax of the history / FMAX, unless that is 0 or not finite") {
    FRESH_RANDOM(rng);
    for (Format f : {Format::E4M3, Format::E5M2})
        for (int margin : {0, 1, 3})
            for (size_t length : {1u, 3u, 16u}) {
                DelayedScale d;
                d.history.resize(length);
                std::vector<float> seen(length);  // the newest first
                float expected = 0;
                for (int step = 0; step < 60; step++) {
                    const int64_t draw = rng.below(12);
                    d.amax = draw == 0   ? INF
                             : draw == 1 ? NOT_A_NUMBER
                             : draw < 5  ? 0
                                         : float(std::exp(5 * rng.normal()));
                    seen.insert(seen.begin(), d.amax), seen.pop_back();
                    const bool finite =
                        std::all_of(seen.begin(), seen.end(), [](float a) { return std::isfinite(a); });
                    const float top = *std::max_element(seen.begin(), seen.end());
                    if (finite && top > 0) expected = top * float(1 << margin) / info(f).max;
                    d.end_step(f, margin);
                    REQUIRE((d.scale == expected && d.amax == 0));
                    for (size_t i = 0; i < length; i++) REQUIRE(bits_of(d.history[i]) == bits_of(seen[i]));
                }
            }
}
