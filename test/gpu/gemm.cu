// gemm.cu - the GEMMs (fprop, dgrad, wgrad) of every format and scaling against the CPU reference.
#include <cmath>
#include <string>

#include "../../gpu/attention.cuh"
#include "../../gpu/gemm.cuh"
#include "../../program/plan.h"
#include "../help/gpu.h"
#include "../help/random.h"
#include "../help/model.h"

using namespace coat;
using namespace coat::test;
using gpu::Gemm;
using gpu::Operand;
using gpu::View;

namespace {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

std::vector<uint8_t> bytes_of(const Floats& x, Format f) {
    return reference::quantize(x.data(), 1, static_cast<int64_t>(x.size()), Quant{f}).codes;
}

// An operand on the device: quantized in row-major order, and transposed and then quantized.
struct DeviceOperand {
    reference::Quantized row_major, transpose;
    Buffer<uint8_t> codes, transposed_codes;
    Buffer<float> scales, transposed_scales;

    DeviceOperand(const Floats& x, int64_t rows, int64_t cols, Quant q)
        : row_major(reference::quantize(x.data(), rows, cols, q)),
          transpose(reference::quantize(transposed(x, rows, cols).data(), cols, rows, q)),
          codes(row_major.codes), transposed_codes(transpose.codes), scales(device_scales(row_major)),
          transposed_scales(device_scales(transpose)) {}
    Operand operand() const {
        const View view{codes.get(), scales.get(), row_major.rows, row_major.cols, row_major.quant};
        return {view, transposed_codes.get(), transposed_scales.get()};
    }
    // The (rows, cols) values that a GEMM multiplies. If it reduces over the rows, it reads the transpose.
    Doubles values(bool reduces_over_rows) const {
        Floats x = reference::dequantize(reduces_over_rows ? transpose : row_major);
        if (reduces_over_rows) x = transposed(x, transpose.rows, transpose.cols);
        return Doubles(x.begin(), x.end());
    }

private:
    static Floats device_scales(const reference::Quantized& q) {
        if (q.quant.fp8() && !(q.quant.granularity == PER_TENSOR)) return scales_for_gemm(q);
        return {q.scale(0, 0), 0, 0, 0};  // a AmaxAndScale
    }
};

// One of the three GEMMs of a linear layer: out (M, N) = a b, reduced over K.
struct GemmCase {
    Gemm kind;
    const char* name;
    int64_t a_rows, a_cols, b_rows, b_cols;  // as stored
    int64_t M, N, K;
    int64_t a_row, a_col, b_row, b_col;  // strides for reference::matmul
};

std::vector<GemmCase> gemm_cases(int64_t tokens, int64_t out, int64_t in) {
    return {{Gemm::Fprop, "fprop", tokens, in, out, in, tokens, out, in, in, 1, 1, in},
            {Gemm::Dgrad, "dgrad", tokens, out, out, in, tokens, in, out, out, 1, in, 1},
            {Gemm::Wgrad, "wgrad", tokens, out, tokens, in, out, in, tokens, 1, out, in, 1}};
}

// Checks out = a b (+ out) (+ bias). The allowed error of an element is that of the sum, in FP32 or, for FP8
// operands, in the 14 bits of Hopper's tensor cores, and of the rounding of the result.
void check_gemm(gpu::Gemms& gemms, Random& rng, const GemmCase& p, Quant qa, Quant qb, Format out_format,
                bool accumulate, bool with_bias) {
    const DeviceOperand a(rng.normals<float>(p.a_rows * p.a_cols), p.a_rows, p.a_cols, qa);
    const DeviceOperand b(rng.normals<float>(p.b_rows * p.b_cols), p.b_rows, p.b_cols, qb);
    const Floats before = rounded(out_format, rng.normals<float>(p.M * p.N));
    const Floats bias = rounded(out_format, rng.normals<float>(p.N));
    Buffer<uint8_t> out(p.M * p.N * info(out_format).bytes), device_bias(bytes_of(bias, out_format));
    if (accumulate) out.write(bytes_of(before, out_format));
    gemms.run(p.kind, a.operand(), b.operand(), {out.get(), nullptr, p.M, p.N, Quant{out_format}}, accumulate,
              with_bias ? device_bias.get() : nullptr, nullptr);
    succeeded(cudaDeviceSynchronize());

    Doubles av = a.values(p.kind == Gemm::Wgrad), bv = b.values(p.kind != Gemm::Fprop);
    auto matmul = [&] {
        Doubles c(p.M * p.N);
        reference::matmul<double>(p.M, p.N, p.K, {av.data(), p.a_row, p.a_col}, {bv.data(), p.b_row, p.b_col},
                                  c.data());
        return c;
    };
    const Doubles wanted = matmul();
    for (Doubles* x : {&av, &bv})
        for (double& v : *x) v = std::fabs(v);
    const Doubles magnitude = matmul();
    // The relative error of a sum. FP32: K additions. Hopper's FP8 tensor cores keep 14 bits of the sum of 32
    // products each (DeepSeek-V3, section 3.3.2).
    const bool fp8 = qa.fp8();
    const double sum_error = fp8 ? (double(p.K) / 32 + 1) * 0x1p-13 : (double(p.K) + 2) * 0x1p-24;
    const int mantissa = info(out_format).mantissa;
    reference::Quantized stored_out;
    stored_out.codes = out.read(), stored_out.rows = p.M, stored_out.cols = p.N,
    stored_out.quant = Quant{out_format};
    const Floats got = reference::dequantize(stored_out);
    double worst = 0;
    for (int64_t i = 0; i < p.M * p.N; i++) {
        const double extra = (accumulate ? before[i] : 0.0) + (with_bias ? bias[i % p.N] : 0.0);
        const double exact = wanted[i] + extra, error = std::fabs(got[i] - exact);
        const double rounding = std::ldexp(std::fabs(exact), -mantissa - 1);
        // cuBLAS may accumulate into BF16 memory. Then a b is rounded before it is added.
        double ab_rounding = 0;
        if (accumulate) ab_rounding = std::ldexp(std::fabs(wanted[i]) * (1 + sum_error), -mantissa - 1);
        const double of_sum = sum_error * (magnitude[i] + std::fabs(extra));
        const double bound = of_sum + (rounding + ab_rounding) * (1 + sum_error);
        worst = std::isnan(error) ? HUGE_VAL : std::max(worst, error / (bound + 1e-30));
    }
    CHECK(worst <= 1);
}

}  // namespace

GPU_TEST_CASE("Gemms::run: fprop, dgrad and wgrad in every format equal the reference") {
    FRESH_RANDOM(rng);
    Buffer<uint8_t> scratch(gpu::Gemms::SCRATCH);
    gpu::Gemms fast_fprop(scratch.get(), find_row(recipes(), "coat", "recipe").sums.fast);
    gpu::Gemms exact(scratch.get(), {false, false, false});  // no fast accumulation
    const struct {
        const char* name;
        Quant x, w, g;
        Format out;
    } formats[] = {{"fp32", Q_F32, Q_F32, Q_F32, Format::F32},
                   {"bf16", Q_BF16, Q_BF16, Q_BF16, Format::BF16},
                   {"bf16 to fp32", Q_BF16, Q_BF16, Q_BF16, Format::F32},
                   {"fp8", Q_E4M3, Q_E4M3, Q_E5M2, Format::BF16},
                   {"fp8 to fp32", Q_E4M3, Q_E4M3, Q_E5M2, Format::F32},
                   {"fp8 per row to fp32", Q_ROW, Q_ROW, Q_ROW, Format::F32},
                   {"fp8 1x128 and 128x128 to fp32", Q_1x128, Q_128x128, Q_1x128, Format::F32},
                   {"fp8 per row", Q_ROW, Q_ROW, Q_ROW, Format::BF16},
                   {"fp8 per row, gradients e5m2", Q_ROW, Q_ROW, {Format::E5M2, PER_ROW}, Format::BF16},
                   {"fp8 1x128 and 128x128", Q_1x128, Q_128x128, Q_1x128, Format::BF16},
                   {"fp8 1x128", Q_1x128, Q_1x128, Q_1x128, Format::BF16}};
    const struct {
        int64_t tokens, out, in;
    } sizes[] = {{16, 16, 16}, {64, 48, 208}, {37, 64, 32}, {1, 128, 64}, {528, 400, 272}, {130, 50, 24}};
    for (const auto& f : formats)
        for (const auto& size : sizes) {
            const bool fits = size.tokens % 16 == 0 && size.out % 16 == 0 && size.in % 16 == 0;
            if (f.x.fp8() && !fits) continue;
            gpu::Gemms& gemms = f.x.granularity == PER_1x128 ? exact : fast_fprop;
            for (const GemmCase& p : gemm_cases(size.tokens, size.out, size.in)) {
                const Quant qa = p.kind == Gemm::Fprop ? f.x : f.g, qb = p.kind == Gemm::Wgrad ? f.x : f.w;
                INFO(std::string(f.name), " ", std::string(p.name), " ", size.tokens, " tokens, ", size.out,
                     " x ", size.in);
                check_gemm(gemms, rng, p, qa, qb, f.out, false, false);
                if (p.kind == Gemm::Wgrad) check_gemm(gemms, rng, p, qa, qb, f.out, true, false);
                const Format compute = f.x.format == Format::F32 ? Format::F32 : Format::BF16;
                if (p.kind == Gemm::Fprop && f.out == compute)
                    check_gemm(gemms, rng, p, qa, qb, f.out, false, true);
            }
        }
}

// All terms lie between 1 and 3.1 and have four binary places. So the sum of 128 of them is exact in the 14
// bits of Hopper's tensor cores; then a GEMM without fast accumulation adds it to an FP32 sum. The sum of all
// K terms is not exact in 14 bits: with fast accumulation it loses some percent.
GPU_TEST_CASE("Gemms::run: dgrad and wgrad of recipe coat add without fast accumulation, at a large K") {
    FRESH_RANDOM(rng);
    Buffer<uint8_t> scratch(gpu::Gemms::SCRATCH);
    gpu::Gemms gemms(scratch.get(), find_row(recipes(), "coat", "recipe").sums.fast);
    auto random_values = [&](int64_t n) {
        Floats x(n);
        for (float& v : x) v = 1 + 0.25f * float(rng.below(4));
        x[0] = 1.75f;  // the amax, so that the scales are powers of two and the codes are exact
        return x;
    };
    constexpr int64_t K = 8192, SIDE = 512;
    for (const GemmCase& p : {gemm_cases(SIDE, K, SIDE)[1], gemm_cases(K, SIDE, SIDE)[2]}) {
        CAPTURE(std::string(p.name));
        REQUIRE(p.K == K);
        const DeviceOperand a(random_values(p.a_rows * p.a_cols), p.a_rows, p.a_cols, Q_E5M2);
        const DeviceOperand b(random_values(p.b_rows * p.b_cols), p.b_rows, p.b_cols, Q_E4M3);
        Buffer<float> out(p.M * p.N);
        gemms.run(p.kind, a.operand(), b.operand(), {out.get(), nullptr, p.M, p.N, Q_F32}, false, nullptr,
                  nullptr);
        const Floats got = out.read();
        const Doubles av = a.values(p.kind == Gemm::Wgrad), bv = b.values(true);
        double worst = 0;
        for (int64_t sample = 0; sample < 256; sample++) {
            const int64_t m = rng.below(p.M), n = rng.below(p.N);
            double exact = 0;
            for (int64_t k = 0; k < K; k++)
                exact += av[m * p.a_row + k * p.a_col] * bv[k * p.b_row + n * p.b_col];
            worst = std::max(worst, std::fabs(got[m * p.N + n] / exact - 1));
        }
        CHECK(worst <= (K / 128 + 2) * 0x1p-24);
    }
}

// Of so many outputs, a Hopper GPU's algorithm is chosen by its tile.
GPU_TEST_CASE("Gemms::run: fprop and dgrad of 2^23 outputs equal the reference") {
    FRESH_RANDOM(rng);
    Buffer<uint8_t> scratch(gpu::Gemms::SCRATCH);
    gpu::Gemms gemms(scratch.get(), find_row(recipes(), "coat", "recipe").sums.fast);
    const GemmCase fprop = gemm_cases(8192, 1024, 64)[0], dgrad = gemm_cases(8192, 64, 1024)[1];
    check_gemm(gemms, rng, fprop, Q_E4M3, Q_E4M3, Format::BF16, false, true);
    check_gemm(gemms, rng, fprop, Q_BF16, Q_BF16, Format::BF16, false, true);
    check_gemm(gemms, rng, dgrad, Q_BF16, Q_BF16, Format::BF16, false, false);
}

GPU_TEST_CASE("Gemms::run: unsupported operands are rejected") {
    Buffer<uint8_t> scratch(gpu::Gemms::SCRATCH), y(64 * 64 * 2);
    gpu::Gemms gemms(scratch.get(), {false, false, false});
    const Floats ones(64 * 64, 1.0f);
    const DeviceOperand e5m2(ones, 64, 64, Q_E5M2), bf16(ones, 64, 64, Q_BF16), e4m3(ones, 64, 64, Q_E4M3);
    const View out{y.get(), nullptr, 64, 64, Q_BF16}, narrow{y.get(), nullptr, 64, 32, Q_BF16};
    CHECK_THROWS_AS(gemms.run(Gemm::Fprop, e5m2.operand(), e5m2.operand(), out, false, nullptr, nullptr),
                    Error);
    CHECK_THROWS_AS(gemms.run(Gemm::Fprop, e4m3.operand(), bf16.operand(), out, false, nullptr, nullptr),
                    Error);
    const Operand not_transposed{e4m3.operand().view};
    CHECK_THROWS_AS(gemms.run(Gemm::Dgrad, e5m2.operand(), not_transposed, out, false, nullptr, nullptr),
                    Error);
    CHECK_THROWS_AS(gemms.run(Gemm::Fprop, bf16.operand(), bf16.operand(), narrow, false, nullptr, nullptr),
                    Error);
    const DeviceOperand per_128x128(ones, 64, 64, Q_128x128);
    Operand groups = e4m3.operand();
    groups.view.quant = Q_GROUP;
    auto error_of_two_128x128 = [&] {  // one of the two operands must have 1x128 scaling
        try {
            gemms.run(Gemm::Fprop, per_128x128.operand(), per_128x128.operand(), out, false, nullptr,
                      nullptr);
        } catch (const Error& e) {
            return std::string(e.what());
        }
        return std::string();
    };
    const std::string reason = error_of_two_128x128();
    CHECK(reason != "");
    CHECK(error_of_two_128x128() == reason);  // the failed GEMM has not been cached
    CHECK_THROWS_AS(gemms.run(Gemm::Fprop, groups, groups, out, false, nullptr, nullptr), Error);
}
