// test_reference_quantize.cpp - quantize and dequantize in reference.cpp, for every format, granularity, kind
// of data and incomplete last block.
//
// The error bounds follow from the formats. A value is code * s with code = encode(x * (1 / s)). 1 / s and
// both products round by 2^-24 each, relative. A normal code rounds by 2^-(mantissa+1), relative; a subnormal
// code by half of FMIN.
#include <doctest/doctest.h>

#include <algorithm>

#include "../reference.h"
#include "oracle.h"
#include "random.h"

using namespace coat;
using namespace coat::test;
using namespace coat::reference;

namespace {

std::vector<Quant> fp8_quants() {
    std::vector<Quant> table;
    for (Format f : {Format::E4M3, Format::E5M2})
        for (Format scale : {Format::F32, Format::BF16})
            for (Granularity g : {PER_TENSOR, PER_GROUP, Granularity{1, 128}, Granularity{128, 128},
                                  Granularity{1, 0}, Granularity{0, 1}})
                table.push_back({f, g, scale});
    return table;
}

struct Shape {
    int64_t rows, cols;
};
constexpr Shape SHAPES[] = {{1, 1},   {1, 15},  {1, 16},    {3, 17},  {5, 33},
                            {2, 129}, {7, 127}, {130, 257}, {129, 48}};

template <class Check>
void for_every_quant(Random& rng, Check check) {
    for (const Quant& q : fp8_quants())
        for (Shape shape : SHAPES)
            for (const Distribution& d : distributions()) {
                INFO(q.text(), ", ", std::string(info(q.scale_format).name), " scales, ", shape.rows, "x",
                     shape.cols, ", ", d.name);
                check(q, shape.rows, shape.cols, sample(d, rng, shape.rows * shape.cols));
            }
}

// The amax of each element's block, by its definition.
std::vector<float> amax_of_blocks(const Quant& q, int64_t rows, int64_t cols, const std::vector<float>& x) {
    auto block = [&](int64_t i) {
        const int64_t r = q.granularity.rows ? i / cols / q.granularity.rows : 0,
                      c = q.granularity.cols ? i % cols / q.granularity.cols : 0;
        return static_cast<size_t>(r * q.scale_cols(cols) + c);
    };
    std::vector<float> amaxes(static_cast<size_t>(q.scales(rows, cols))), result(x.size());
    for (int64_t i = 0; i < rows * cols; i++)
        amaxes[block(i)] = std::max(amaxes[block(i)], std::fabs(x[size_t(i)]));
    for (int64_t i = 0; i < rows * cols; i++) result[size_t(i)] = amaxes[block(i)];
    return result;
}

}  // namespace

TEST_CASE("scale_of: is amax / FMAX, rounded to the nearest BF16 where it is stored so") {
    FRESH_RANDOM(rng);
    for (const Quant& q : fp8_quants())
        for (int64_t i = 0; i < count(20000, 1000); i++) {
            const float a = float(std::exp2(-149 + 277 * rng.uniform())) * 0.999f, s = scale_of(q, a);
            const float exact = std::max(a / info(q.format).max, 0x1p-126f);
            INFO(q.text(), " amax ", a);
            REQUIRE(s == round_to(q.scale_format, exact));
            REQUIRE(std::isfinite(1 / s));
            // Never saturates: the next code would begin at 1 + 1/28 of FMAX, in E5M2 at 1 + 1/14.
            REQUIRE(double(a) / double(s) <= double(info(q.format).max) * (1 + 0x1p-8));
        }
}

TEST_CASE("scale_of: amax 0 gives 1; an amax that is not finite gives 1 for a tensor and NaN for a block") {
    for (const Quant& q : fp8_quants()) {
        CHECK(scale_of(q, 0.0f) == 1.0f);
        for (float a : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
            if (q.granularity == PER_TENSOR) CHECK(scale_of(q, a) == 1.0f);
            else CHECK(std::isnan(scale_of(q, a)));
        }
    }
}

TEST_CASE("amax: equals the largest magnitude for any size; NaN and infinity give infinity") {
    FRESH_RANDOM(rng);
    for (const Distribution& d : distributions())
        for (int64_t n : {0, 1, 2, 15, 16, 17, 31, 100, 4097, 16385, 100001}) {
            std::vector<float> x = sample(d, rng, n);
            float expected = 0;
            for (float v : x) expected = std::max(expected, std::fabs(v));
            INFO(d.name, " n ", n);
            CHECK(amax(x.data(), n) == expected);
            for (uint32_t bits : {0x7FC00000u, 0xFFC00000u, 0x7F800001u, 0x7F800000u, 0xFF800000u}) {
                if (n == 0) continue;
                const size_t at = size_t(rng.below(n));
                const float kept = x[at];
                x[at] = float_of(bits);
                CHECK(std::isinf(amax(x.data(), n)));
                x[at] = kept;
            }
        }
}

TEST_CASE("quantize: sizes of codes and scales; a tail has its own scale") {
    FRESH_RANDOM(rng);
    for_every_quant(rng, [](const Quant& q, int64_t rows, int64_t cols, const std::vector<float>& x) {
        const Quantized z = quantize(x.data(), rows, cols, q);
        const int64_t down = q.granularity.rows ? ceil_div(rows, q.granularity.rows) : 1;
        const int64_t across = q.granularity.cols ? ceil_div(cols, q.granularity.cols) : 1;
        CHECK(int64_t(z.codes.size()) == rows * cols);
        CHECK(int64_t(z.scales.size()) == down * across * info(q.scale_format).bytes);
        CHECK((z.rows == rows && z.cols == cols));
    });
}

TEST_CASE("quantize: scale, code and value of every element are correct, for every kind of data and tail") {
    FRESH_RANDOM(rng);
    const NearestCode oracles[] = {NearestCode(Format::E4M3), NearestCode(Format::E5M2)};
    for_every_quant(rng, [&](const Quant& q, int64_t rows, int64_t cols, const std::vector<float>& x) {
        const NearestCode& oracle = oracles[q.format == Format::E5M2];
        const std::vector<float> amaxes = amax_of_blocks(q, rows, cols, x);
        const Quantized z = quantize(x.data(), rows, cols, q);
        const std::vector<float> values = dequantize(z);
        REQUIRE(values.size() == x.size());
        for (int64_t i = 0; i < rows * cols; i++) {
            const size_t at = size_t(i);
            const float s = z.scale(i / cols, i % cols), inverse = 1.0f / s;
            INFO("element ", i, " = ", x[at], " scale ", s, " value ", values[at]);
            REQUIRE(s == scale_of(q, amaxes[at]));
            REQUIRE(z.codes[at] == oracle.of(x[at] * inverse));
            REQUIRE(values[at] == float(fp8_value(q.format, z.codes[at]) * double(s)));
            REQUIRE(values[at] == z.value(i / cols, i % cols));
            REQUIRE(std::fabs(double(values[at]) - double(x[at])) <=
                    error_bound(q.format, double(x[at]), double(s)));
        }
    });
}

TEST_CASE("quantize: statistics count saturated and flushed elements, and add up") {
    FRESH_RANDOM(rng);
    for_every_quant(rng, [](const Quant& q, int64_t rows, int64_t cols, const std::vector<float>& x) {
        QuantStats stats;
        stats.elements = 5;
        const Quantized z = quantize(x.data(), rows, cols, q, &stats);
        const std::vector<float> values = dequantize(z);
        double signal = 0, noise = 0;
        int64_t flushed = 0;
        for (size_t i = 0; i < x.size(); i++) {
            signal += double(x[i]) * double(x[i]);
            noise += (double(x[i]) - double(values[i])) * (double(x[i]) - double(values[i]));
            flushed += x[i] != 0 && values[i] == 0;
        }
        CHECK(stats.elements == 5 + rows * cols);
        CHECK(stats.flushed == flushed);
        CHECK(stats.saturated == 0);  // a just-in-time scale saturates no finite value
        CHECK(std::fabs(stats.signal - signal) <= 1e-12 * signal);
        CHECK(std::fabs(stats.noise - noise) <= 1e-12 * noise);
    });
}

TEST_CASE("quantize: a BF16 scale below amax / 448 does not saturate the largest value, nor count it") {
    // 449.75 / 448 lies half-way between two values of BF16; the nearest with an even mantissa is 1.
    const std::vector<float> x(16, 449.75f), y(16, 450.0f);
    QuantStats stats;
    const Quantized lower = quantize(x.data(), 1, 16, Q_GROUP, &stats);
    CHECK(lower.scale(0, 0) == 1.0f);
    CHECK(lower.value(0, 0) == 448.0f);
    CHECK(quantize(y.data(), 1, 16, Q_GROUP, &stats).scale(0, 0) == 1 + 0x1p-7f);
    CHECK(stats.elements == 32);
    CHECK(stats.saturated == 0);
}

TEST_CASE("quantize: NaN stays NaN; infinity saturates or makes its block NaN; other blocks do not change") {
    FRESH_RANDOM(rng);
    for (const Quant& q : fp8_quants()) {
        INFO(q.text());
        std::vector<float> x = rng.normals<float>(4 * 32);
        const Quantized before = quantize(x.data(), 4, 32, q);
        x[37] = std::numeric_limits<float>::quiet_NaN();  // row 1, column 5
        x[38] = -std::numeric_limits<float>::infinity();
        QuantStats stats;
        const Quantized after = quantize(x.data(), 4, 32, q, &stats);
        CHECK(std::isnan(after.value(1, 5)));
        if (q.granularity == PER_TENSOR) {
            CHECK(after.value(1, 6) == -info(q.format).max * after.scale(1, 6));
            CHECK(stats.saturated == 1);
        } else {
            CHECK(std::isnan(after.value(1, 6)));
        }
        if (q.granularity.rows != 1) continue;
        for (int64_t r : {0, 2, 3})
            for (int64_t c = 0; c < 32; c++)
                CHECK(after.value(r, c) == before.value(r, c));  // no error crosses tokens (paper, figure 4a)
    }
}

TEST_CASE("quantize: -x gives the opposite codes, and x times a power of two the same codes") {
    FRESH_RANDOM(rng);
    for (const Quant& q : fp8_quants()) {
        std::vector<float> x = rng.normals<float>(9 * 50), opposite(x), larger(x);
        for (float& v : opposite) v = -v;
        for (float& v : larger) v *= 0x1p20f;
        const Quantized a = quantize(x.data(), 9, 50, q), b = quantize(opposite.data(), 9, 50, q),
                        c = quantize(larger.data(), 9, 50, q);
        CHECK(a.codes == c.codes);
        CHECK(a.scales == b.scales);
        for (size_t i = 0; i < a.codes.size(); i++) REQUIRE(a.codes[i] == (b.codes[i] ^ 0x80));
    }
}

TEST_CASE("quantize: quantizing dequantized values changes nothing") {
    // With an FP32 scale the largest code of a block is FMAX, so quantizing again gives the same scale up to
    // rounding. A larger scale than that leaves the largest code below FMAX; quantizing again may give
    // another scale.
    FRESH_RANDOM(rng);
    for_every_quant(rng, [](const Quant& q, int64_t rows, int64_t cols, const std::vector<float>& x) {
        if (q.scale_format != Format::F32) return;
        const Quantized once = quantize(x.data(), rows, cols, q);
        const Quantized twice = quantize(dequantize(once).data(), rows, cols, q);
        for (size_t i = 0; i < x.size(); i++) {
            INFO("element ", i, " = ", x[i]);
            const int64_t r = int64_t(i) / cols, c = int64_t(i) % cols;
            if (once.scale(r, c) > 0x1p-110f)
                REQUIRE(once.codes[i] == twice.codes[i]);  // below it values are denormal
        }
    });
}

TEST_CASE("quantize: FP32 and BF16 store the values themselves and have no scales") {
    FRESH_RANDOM(rng);
    for (const Distribution& d : distributions())
        for (const Quant& q : {Q_F32, Q_BF16}) {
            const std::vector<float> x = sample(d, rng, 7 * 19);
            const Quantized z = quantize(x.data(), 7, 19, q);
            const std::vector<float> values = dequantize(z);
            CHECK(z.scales.empty());
            CHECK(int64_t(z.codes.size()) == 7 * 19 * info(q.format).bytes);
            for (size_t i = 0; i < x.size(); i++) CHECK(values[i] == round_to(q.format, x[i]));
        }
}

TEST_CASE("quantize: smaller blocks limit the error that outliers cause (paper section 5)") {
    FRESH_RANDOM(rng);
    std::vector<float> x = rng.normals<float>(64 * 256);
    for (int i = 0; i < 8; i++) x[size_t(rng.below(int64_t(x.size())))] = 3e4f;
    auto noise_of_others = [&](Granularity g) {
        const std::vector<float> values = dequantize(quantize(x.data(), 64, 256, {Format::E4M3, g}));
        double noise = 0;
        for (size_t i = 0; i < x.size(); i++)
            noise += x[i] < 1e4f ? double(x[i] - values[i]) * double(x[i] - values[i]) : 0;
        return noise;
    };
    const double tensor = noise_of_others(PER_TENSOR), row = noise_of_others({1, 0}),
                 group = noise_of_others(PER_GROUP);
    CHECK(group < row);
    CHECK(row < tensor);
    // Outliers are in 8 of 1024 groups. Nearly all elements are normal codes with a relative error below
    // 2^-4, which is 2^-8 of the signal of 1.
    CHECK(group / double(x.size()) < 0x1p-8 + 8 * 16.0 / double(x.size()) * 2);
}

namespace {

// An operand by its definition, element by element in double. Elements with the same group share a scale. A
// group has `along` elements in the reduction dimension and `across` in the other; 0 stands for all.
std::vector<float> operand_by_definition(const std::vector<float>& x, int64_t rows, int64_t cols,
                                         const Quant& q, bool by_rows) {
    const NearestCode nearest(q.format);
    const int64_t across = q.granularity.rows, along = q.granularity.cols;
    auto group = [](int64_t i, int64_t size) { return size ? i / size : 0; };
    std::vector<float> y;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) {
            float largest = 0;
            for (int64_t i = 0; i < rows; i++)
                for (int64_t j = 0; j < cols; j++) {
                    const bool same =
                        by_rows ? group(i, along) == group(r, along) && group(j, across) == group(c, across)
                                : group(i, across) == group(r, across) && group(j, along) == group(c, along);
                    if (same) largest = std::max(largest, std::fabs(x[size_t(i * cols + j)]));
                }
            const float s = largest == 0 ? 1.0f : std::max(largest / info(q.format).max, 0x1p-126f);
            y.push_back(
                float(fp8_value(q.format, nearest.of(x[size_t(r * cols + c)] * (1.0f / s))) * double(s)));
        }
    return y;
}

}  // namespace

TEST_CASE("operand: scales are taken along the reduction dimension; a tail has its own scale") {
    FRESH_RANDOM(rng);
    for (Granularity g : {PER_TENSOR, PER_ROW, Granularity{1, 16}, Granularity{16, 16},
                          Granularity{1, 128}, Granularity{128, 128}})
        for (Format f : {Format::E4M3, Format::E5M2})
            for (Shape shape : {Shape{1, 1}, Shape{5, 33}, Shape{20, 17}, Shape{1, 140}, Shape{140, 3}}) {
                std::vector<float> x = rng.normals<float>(shape.rows * shape.cols);
                for (float& v : x) v *= float(std::exp(2 * rng.normal()));
                const Quant q{f, g};
                INFO(q.text(), ", ", shape.rows, "x", shape.cols);
                const std::vector<float> columns = operand(x, shape.rows, shape.cols, q, ReduceOver::Columns);
                const std::vector<float> rows = operand(x, shape.rows, shape.cols, q, ReduceOver::Rows);
                CHECK(columns == operand_by_definition(x, shape.rows, shape.cols, q, false));
                CHECK(rows == operand_by_definition(x, shape.rows, shape.cols, q, true));
                if (g.symmetric()) CHECK(rows == columns);
            }
}

TEST_CASE("quantize: a given scale is used as it is; values beyond it saturate and are counted") {
    FRESH_RANDOM(rng);
    for (Format f : {Format::E4M3, Format::E5M2}) {
        const float scale = 0.25f, edge = info(f).max * scale;
        std::vector<float> x = rng.normals<float>(64);
        x[3] = 2 * edge, x[40] = -3 * edge, x[41] = edge;
        QuantStats stats;
        const Quantized z = quantize(x.data(), 4, 16, {f}, &stats, &scale);
        const NearestCode nearest(f);
        for (size_t i = 0; i < x.size(); i++)
            CHECK(z.codes[i] == nearest.of(x[i] / scale));  // a power of two: exact
        CHECK(z.scale(2, 5) == scale);
        CHECK((z.value(0, 3) == edge && z.value(2, 8) == -edge && z.value(2, 9) == edge));
        CHECK(stats.saturated == 2);
    }
}
