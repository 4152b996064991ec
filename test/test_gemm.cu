// test_gemm.cu - the GEMMs (fprop, dgrad, wgrad) of every format and scaling against the CPU reference.
#include <cmath>
#include <string>

#include "../gpu/attention.cuh"
#include "../gpu/gemm.cuh"
#include "../plan.h"
#include "gpu.h"
#include "random.h"
#include "tiny.h"

using namespace coat;
using namespace coat::test;
using gpu::Gemm;
using gpu::Operand;
using gpu::View;

namespace {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

// An operand on the device, quantized both ways, and its values as a product sees them that contracts its columns, or its rows.
struct DeviceOperand {
    reference::Quantized quantized, quantized_transpose;
    Buffer<uint8_t> codes, transposed_codes;
    Buffer<float> scales, transposed_scales;

    DeviceOperand(const Floats& x, int64_t rows, int64_t cols, Quant q)
        : quantized(reference::quantize(x.data(), rows, cols, q)),
          quantized_transpose(reference::quantize(transposed(x, rows, cols).data(), cols, rows, q)),
          codes(quantized.codes), transposed_codes(quantized_transpose.codes), scales(device_scales(quantized)), transposed_scales(device_scales(quantized_transpose)) {}
    Operand operand() const {
        return {{codes.get(), scales.get(), quantized.rows, quantized.cols, quantized.quant}, transposed_codes.get(), transposed_scales.get()};
    }
    Doubles values(bool reduces_over_rows) const {
        const Floats x = reduces_over_rows ? transposed(reference::dequantize(quantized_transpose), quantized_transpose.rows, quantized_transpose.cols) : reference::dequantize(quantized);
        return Doubles(x.begin(), x.end());
    }

private:
    static Floats device_scales(const reference::Quantized& q) {
        if (q.quant.fp8() && !(q.quant.granularity == PER_TENSOR)) return scales_for_gemm(q);
        return {q.scale(0, 0), 0, 0, 0};  // a TensorScale
    }
};

struct GemmCase {
    Gemm kind;
    const char* name;
    // of a (rows, cols) and b (rows, cols): the sides of out, what is contracted, and strides for reference::matmul
    int64_t a_rows, a_cols, b_rows, b_cols, M, N, K, a_row, a_col, b_row, b_col;
};

std::vector<GemmCase> gemm_cases(int64_t tokens, int64_t out, int64_t in) {
    return {{Gemm::Fprop, "fprop", tokens, in, out, in, tokens, out, in, in, 1, 1, in},
            {Gemm::Dgrad, "dgrad", tokens, out, out, in, tokens, in, out, out, 1, in, 1},
            {Gemm::Wgrad, "wgrad", tokens, out, tokens, in, out, in, tokens, 1, out, in, 1}};
}

Floats rounded(Format f, Floats x) {
    for (float& v : x) v = reference::round_to(f, v);
    return x;
}

std::vector<uint8_t> bytes_of(const Floats& x, Format f) {
    return reference::quantize(x.data(), 1, static_cast<int64_t>(x.size()), Quant{f}).codes;
}

// out = a b (+ out) (+ bias): every element within what FP32 or, for FP8, 14-bit accumulation and one rounding may do.
void check_gemm(gpu::Gemms& gemms, Random& rng, const GemmCase& p, Quant qa, Quant qb, Format out_format, bool accumulate, bool with_bias) {
    const DeviceOperand a(rng.normals<float>(p.a_rows * p.a_cols), p.a_rows, p.a_cols, qa);
    const DeviceOperand b(rng.normals<float>(p.b_rows * p.b_cols), p.b_rows, p.b_cols, qb);
    const Floats before = rounded(out_format, rng.normals<float>(p.M * p.N)), bias = rounded(out_format, rng.normals<float>(p.N));
    Buffer<uint8_t> out(p.M * p.N * info(out_format).bytes), bias_device(bytes_of(bias, out_format));
    if (accumulate) out.write(bytes_of(before, out_format));
    gemms.run(p.kind, a.operand(), b.operand(), {out.get(), nullptr, p.M, p.N, Quant{out_format}}, accumulate,
              with_bias ? bias_device.get() : nullptr, nullptr);
    succeeded(cudaDeviceSynchronize());
    CHECK(out.intact());

    Doubles wanted(p.M * p.N), size(p.M * p.N), av = a.values(p.kind == Gemm::Wgrad), bv = b.values(p.kind != Gemm::Fprop);
    reference::matmul<double>(p.M, p.N, p.K, {av.data(), p.a_row, p.a_col}, {bv.data(), p.b_row, p.b_col}, wanted.data());
    for (Doubles* x : {&av, &bv})
        for (double& v : *x) v = std::fabs(v);
    reference::matmul<double>(p.M, p.N, p.K, {av.data(), p.a_row, p.a_col}, {bv.data(), p.b_row, p.b_col}, size.data());
    // FP32: K additions. Hopper's FP8 tensor cores keep 14 bits of the sum over each 32 products (DeepSeek-V3, section 3.3.2).
    const double sum_error = qa.fp8() ? (double(p.K) / 32 + 1) * 0x1p-13 : (double(p.K) + 2) * 0x1p-24;
    reference::Quantized stored_out;
    stored_out.codes = out.read(), stored_out.rows = p.M, stored_out.cols = p.N, stored_out.quant = Quant{out_format};
    const Floats got = reference::dequantize(stored_out);
    double worst = 0;
    for (int64_t i = 0; i < p.M * p.N; i++) {
        const double extra = (accumulate ? before[i] : 0.0) + (with_bias ? bias[i % p.N] : 0.0), exact = wanted[i] + extra;
        const double rounding = std::ldexp(std::fabs(exact), -info(out_format).mantissa - 1);
        // cuBLAS may add to BF16 in memory: then the product has been rounded before it meets what it is added to.
        const double product = accumulate ? std::ldexp(std::fabs(wanted[i]) * (1 + sum_error), -info(out_format).mantissa - 1) : 0.0;
        const double bound = sum_error * (size[i] + std::fabs(extra)) + (rounding + product) * (1 + sum_error);
        const double error = std::fabs(got[i] - exact);
        worst = std::isnan(error) ? HUGE_VAL : std::max(worst, error / (bound + 1e-30));
    }
    CHECK(worst <= 1);
}

}  // namespace

GPU_TEST_CASE("Gemms::run: fprop, dgrad and wgrad in every format equal the reference") {
    FRESH_RANDOM(rng);
    Buffer<uint8_t> scratch(gpu::Gemms::SCRATCH);
    gpu::Gemms forward_fast(scratch.get(), find_row(recipes(), "coat", "recipe").fast_accumulation), exact(scratch.get(), {false, false, false});
    const struct {
        const char* name;
        Quant x, w, g;
        Format out;
    } formats[] = {{"fp32", Q_F32, Q_F32, Q_F32, Format::F32},
                   {"bf16", Q_BF16, Q_BF16, Q_BF16, Format::BF16},
                   {"bf16 to fp32", Q_BF16, Q_BF16, Q_BF16, Format::F32},
                   {"fp8", Q_E4M3, Q_E4M3, Q_E5M2, Format::BF16},
                   {"fp8 to fp32", Q_E4M3, Q_E4M3, Q_E5M2, Format::F32},
                   {"fp8 by rows to fp32", Q_ROW, Q_ROW, Q_ROW, Format::F32},
                   {"fp8 by vectors and per_128x128 to fp32", Q_1x128, Q_128x128, Q_1x128, Format::F32},
                   {"fp8 by rows", Q_ROW, Q_ROW, Q_ROW, Format::BF16},
                   {"fp8 by rows, gradients e5m2", Q_ROW, Q_ROW, {Format::E5M2, PER_ROW}, Format::BF16},
                   {"fp8 by vectors and per_128x128", Q_1x128, Q_128x128, Q_1x128, Format::BF16},
                   {"fp8 by vectors", Q_1x128, Q_1x128, Q_1x128, Format::BF16}};
    const struct {
        int64_t tokens, out, in;
    } sizes[] = {{16, 16, 16}, {64, 48, 208}, {37, 64, 32}, {1, 128, 64}, {528, 400, 272}, {130, 50, 24}};
    for (const auto& f : formats)
        for (const auto& size : sizes) {
            const bool fits = size.tokens % 16 == 0 && size.out % 16 == 0 && size.in % 16 == 0;
            if (f.x.fp8() && !fits) continue;
            gpu::Gemms& gemms = f.x.granularity == PER_1x128 ? exact : forward_fast;
            for (const GemmCase& p : gemm_cases(size.tokens, size.out, size.in)) {
                const Quant qa = p.kind == Gemm::Fprop ? f.x : f.g, qb = p.kind == Gemm::Wgrad ? f.x : f.w;
                INFO(std::string(f.name), " ", std::string(p.name), " ", size.tokens, " tokens, ", size.out, " x ", size.in);
                check_gemm(gemms, rng, p, qa, qb, f.out, false, false);
                if (p.kind == Gemm::Wgrad) check_gemm(gemms, rng, p, qa, qb, f.out, true, false);
                if (p.kind == Gemm::Fprop && f.out == (f.x.format == Format::F32 ? Format::F32 : Format::BF16))
                    check_gemm(gemms, rng, p, qa, qb, f.out, false, true);
            }
        }
}

GPU_TEST_CASE("Gemms::run: a tuned algorithm is bit-identical to one that is not tuned") {
    FRESH_RANDOM(rng);
    const int64_t tokens = 1024, out = 1536, in = 1040;
    for (const auto& [qx, qw] : {std::pair{Q_BF16, Q_BF16}, std::pair{Q_E4M3, Q_E4M3}, std::pair{Q_ROW, Q_ROW}, std::pair{Q_1x128, Q_128x128}}) {
        const DeviceOperand x(rng.normals<float>(tokens * in), tokens, in, qx), w(rng.normals<float>(out * in), out, in, qw);
        std::vector<std::vector<uint8_t>> results;
        for (bool tune : {false, true}) {
            Buffer<uint8_t> scratch(gpu::Gemms::SCRATCH), y(tokens * out * 2);
            gpu::Gemms gemms(scratch.get(), {!(qx.granularity == PER_1x128), false, false});
            gemms.tune(tune);
            gemms.run(Gemm::Fprop, x.operand(), w.operand(), {y.get(), nullptr, tokens, out, Q_BF16}, false, nullptr, nullptr);
            succeeded(cudaDeviceSynchronize());
            results.push_back(y.read());
        }
        CHECK(same_bytes(results[0], results[1]));
    }
}

GPU_TEST_CASE("Gemms::run: no algorithm is chosen for an output of zeros, and the next GEMM of that shape is tuned") {
    FRESH_RANDOM(rng);
    const int64_t tokens = 1024, out = 1024, in = 8192;
    for (const Quant& q : {Q_BF16, Q_E4M3}) {
        const DeviceOperand zeros(Floats(tokens * in), tokens, in, q), x(rng.normals<float>(tokens * in), tokens, in, q);
        const DeviceOperand w(rng.normals<float>(out * in), out, in, q);
        std::vector<std::vector<uint8_t>> results;
        for (bool tune : {false, true}) {
            Buffer<uint8_t> scratch(gpu::Gemms::SCRATCH), y(tokens * out * 2);
            gpu::Gemms gemms(scratch.get(), {false, false, false});
            gemms.tune(tune);
            auto run = [&](const DeviceOperand& a) {
                gemms.run(Gemm::Fprop, a.operand(), w.operand(), {y.get(), nullptr, tokens, out, Q_BF16}, false, nullptr, nullptr);
                succeeded(cudaDeviceSynchronize());
            };
            run(zeros);
            CHECK(gemms.tuned() == 0);
            for (int turn : {0, 1}) {  // the clock chooses in the first; the second uses its choice
                run(x);
                CHECK(gemms.tuned() == (tune ? 1 : 0));
                results.push_back(y.read());
            }
        }
        for (const auto& result : results) CHECK(same_bytes(results[0], result));
    }
}

GPU_TEST_CASE("Gemms::run: unsupported operands are rejected") {
    Buffer<uint8_t> scratch(gpu::Gemms::SCRATCH), y(64 * 64 * 2);
    gpu::Gemms gemms(scratch.get(), {false, false, false});
    const Floats ones(64 * 64, 1.0f);
    const DeviceOperand e5m2(ones, 64, 64, Q_E5M2), bf16(ones, 64, 64, Q_BF16), e4m3(ones, 64, 64, Q_E4M3);
    const View out{y.get(), nullptr, 64, 64, Q_BF16}, narrow{y.get(), nullptr, 64, 32, Q_BF16};
    CHECK_THROWS_AS(gemms.run(Gemm::Fprop, e5m2.operand(), e5m2.operand(), out, false, nullptr, nullptr), Error);
    CHECK_THROWS_AS(gemms.run(Gemm::Fprop, e4m3.operand(), bf16.operand(), out, false, nullptr, nullptr), Error);
    const Operand not_transposed{e4m3.operand().view};
    CHECK_THROWS_AS(gemms.run(Gemm::Dgrad, e5m2.operand(), not_transposed, out, false, nullptr, nullptr), Error);
    CHECK_THROWS_AS(gemms.run(Gemm::Fprop, bf16.operand(), bf16.operand(), narrow, false, nullptr, nullptr), Error);
    const DeviceOperand per_128x128(ones, 64, 64, Q_128x128);
    Operand groups = e4m3.operand();
    groups.view.quant = Q_GROUP;
    auto why = [&] {  // one side has to be vectors
        try {
            gemms.run(Gemm::Fprop, per_128x128.operand(), per_128x128.operand(), out, false, nullptr, nullptr);
        } catch (const Error& e) {
            return std::string(e.what());
        }
        return std::string();
    };
    const std::string reason = why();
    CHECK(reason != "");
    CHECK(why() == reason);  // nothing half-built is left to be launched
    CHECK_THROWS_AS(gemms.run(Gemm::Fprop, groups, groups, out, false, nullptr, nullptr), Error);
}
