// gemm.cu - the GEMMs (fprop, dgrad, wgrad) of every format and scaling against the CPU reference.
#include "../../gpu/gemm.h"

#include "../help/files.h"
#include "../help/gpu.h"

using namespace coat;
using namespace coat::test;
using gpu::GemmKind;

namespace {

// One of the three GEMMs of a linear layer: out (M, N) = a b, summed over K.
struct GemmCase {
    GemmKind kind;
    const char* name;
    Shape a, b;  // as stored

    int64_t M() const { return kind == GemmKind::Wgrad ? a.cols : a.rows; }
    int64_t N() const { return kind == GemmKind::Fprop ? b.rows : b.cols; }
    int64_t K() const { return kind == GemmKind::Wgrad ? a.rows : a.cols; }
};

std::vector<GemmCase> gemm_cases(int64_t tokens, int64_t out, int64_t in) {
    return {{GemmKind::Fprop, "fprop", {tokens, in}, {out, in}},
            {GemmKind::Dgrad, "dgrad", {tokens, out}, {out, in}},
            {GemmKind::Wgrad, "wgrad", {tokens, out}, {tokens, in}}};
}

// The operands of a GEMM: on the device, and the exact values that it multiplies.
struct Operands {
    const GemmCase& of;
    const Tensor a, b;
    Doubles left, right;  // (M, K) and (K, N)

    Operands(const GemmCase& p, const Floats& x, TensorFormat qa, const Floats& y, TensorFormat qb)
        : of(p), a(x, p.a, qa), b(y, p.b, qb),
          left(values(x, p.a, qa, p.kind == GemmKind::Wgrad ? SumAlong::Column : SumAlong::Row)),
          right(values(y, p.b, qb, p.kind == GemmKind::Fprop ? SumAlong::Row : SumAlong::Column)) {
        if (p.kind == GemmKind::Wgrad) left = transposed(left, p.a.rows, p.a.cols);
        if (p.kind == GemmKind::Fprop) right = transposed(right, p.b.rows, p.b.cols);
    }
    static Doubles values(const Floats& x, Shape s, TensorFormat q, SumAlong sum_along) {
        return doubles(reference::gemm_operand(x, s.rows, s.cols, q, sum_along).values);
    }
    Doubles product() const {
        Doubles c(of.M() * of.N());
        reference::matmul<double>(of.M(), of.N(), of.K(), {left.data(), of.K(), 1}, {right.data(), of.N(), 1},
                                  c.data());
        return c;
    }
};

// Checks out = a b (+ out) (+ bias). The allowed error of an element is that of the sum, in FP32 or, for FP8
// operands, in the 14 bits of Hopper's tensor cores, and of the rounding of the result.
void check_gemm(gpu::CublasGemms& gemms, Random& rng, const GemmCase& p, TensorFormat qa, TensorFormat qb,
                Format out_format, bool accumulate, bool with_bias) {
    Operands operands(p, rng.normals<float>(p.a.n()), qa, rng.normals<float>(p.b.n()), qb);
    const Floats before = normals(rng, out_format, p.M() * p.N()), bias = normals(rng, out_format, p.N());
    const Tensor device_bias(bias, out_format);
    Tensor out({p.M(), p.N()}, TensorFormat{out_format});
    if (accumulate) out.codes.write(reference::quantize(before.data(), p.M(), p.N(), out.format).elements);
    gemms.run(p.kind, operands.a.operand(), operands.b.operand(), out.ref(), nullptr,
              {.overwrite = !accumulate, .bias = with_bias ? device_bias.codes.get() : nullptr});

    Doubles exact = operands.product();
    for (Doubles* x : {&operands.left, &operands.right})
        for (double& v : *x) v = std::fabs(v);
    Doubles bounds = operands.product();  // so far, the magnitudes of the sums
    // A sum's relative error. FP32: K additions. Hopper's FP8: an instruction adds 32 products and rounds to
    // 14 bits (DeepSeek-V3, 3.3.2), also the last instruction, whose products may be fewer.
    const double K = double(p.K()), instructions = double(ceil_div(p.K(), 32));
    const double sum_error = qa.is_fp8() ? (instructions + 1) * 0x1p-13 : (K + 2) * 0x1p-24;
    for (int64_t i = 0; i < p.M() * p.N(); i++) {
        const double extra = (accumulate ? before[i] : 0.0) + (with_bias ? bias[i % p.N()] : 0.0);
        double rounded = std::fabs(exact[i] + extra);
        // cuBLAS may accumulate into BF16 memory. Then a b is rounded before it is added.
        if (accumulate) rounded += std::fabs(exact[i]) * (1 + sum_error);
        exact[i] += extra;
        bounds[i] = sum_error * (bounds[i] + std::fabs(extra)) + 1e-30 +
                    std::ldexp(rounded, -format_info(out_format).mantissa_bits - 1) * (1 + sum_error);
    }
    check_within(out.values(), exact, bounds);
}

}  // namespace

GPU_TEST_CASE("CublasGemms::run: all three GEMMs in every format equal the reference") {
    SEEDED_RANDOM(rng);
    Buffer<uint8_t> scratch(gpu::CublasGemms::SCRATCH_BYTES);
    gpu::CublasGemms fast_fprop(scratch.get(), find_row(recipes(), "coat", "recipe").fast_accumulation);
    gpu::CublasGemms exact(scratch.get(), {false, false, false});  // no fast accumulation
    const struct {
        const char* name;
        TensorFormat x, w, g;
        Format out;
    } formats[] = {
        {"fp32", PLAIN_FP32, PLAIN_FP32, PLAIN_FP32, Format::FP32},
        {"bf16", PLAIN_BF16, PLAIN_BF16, PLAIN_BF16, Format::BF16},
        {"bf16 to fp32", PLAIN_BF16, PLAIN_BF16, PLAIN_BF16, Format::FP32},
        {"fp8", E4M3_PER_TENSOR, E4M3_PER_TENSOR, E5M2_PER_TENSOR, Format::BF16},
        {"fp8 to fp32", E4M3_PER_TENSOR, E4M3_PER_TENSOR, E5M2_PER_TENSOR, Format::FP32},
        {"fp8 per row to fp32", E4M3_PER_ROW, E4M3_PER_ROW, E4M3_PER_ROW, Format::FP32},
        {"fp8 1x128 and 128x128 to fp32", E4M3_PER_1x128, E4M3_PER_128x128, E4M3_PER_1x128, Format::FP32},
        {"fp8 per row", E4M3_PER_ROW, E4M3_PER_ROW, E4M3_PER_ROW, Format::BF16},
        {"fp8 per row, gradients e5m2", E4M3_PER_ROW, E4M3_PER_ROW, ROW_E5M2, Format::BF16},
        {"fp8 1x128 and 128x128", E4M3_PER_1x128, E4M3_PER_128x128, E4M3_PER_1x128, Format::BF16},
        {"fp8 1x128", E4M3_PER_1x128, E4M3_PER_1x128, E4M3_PER_1x128, Format::BF16}};
    const struct {
        int64_t tokens, out, in;
    } sizes[] = {{16, 16, 16}, {64, 48, 208}, {37, 64, 32}, {1, 128, 64}, {528, 400, 272}, {130, 50, 24}};
    for (const auto& f : formats)
        for (const auto& size : sizes) {
            const bool fits = size.tokens % 16 == 0 && size.out % 16 == 0 && size.in % 16 == 0;
            if (f.x.is_fp8() && !fits) continue;
            gpu::CublasGemms& gemms = f.x.granularity == PER_1x128 ? exact : fast_fprop;
            for (const GemmCase& p : gemm_cases(size.tokens, size.out, size.in)) {
                const TensorFormat qa = p.kind == GemmKind::Fprop ? f.x : f.g,
                                   qb = p.kind == GemmKind::Wgrad ? f.x : f.w;
                INFO(std::string(f.name), " ", std::string(p.name), " ", size.tokens, " tokens, ", size.out,
                     " x ", size.in);
                check_gemm(gemms, rng, p, qa, qb, f.out, false, false);
                if (p.kind == GemmKind::Wgrad) check_gemm(gemms, rng, p, qa, qb, f.out, true, false);
                const Format compute = f.x.element_format == Format::FP32 ? Format::FP32 : Format::BF16;
                if (p.kind == GemmKind::Fprop && f.out == compute)
                    check_gemm(gemms, rng, p, qa, qb, f.out, false, true);
            }
        }
}

// All terms lie between 1 and 3.1 and have four binary places. So the sum of 128 of them is exact in the 14
// bits of Hopper's tensor cores; then a GEMM without fast accumulation adds it to an FP32 sum. The sum of all
// K terms is not exact in 14 bits: with fast accumulation it loses some percent.
GPU_TEST_CASE("CublasGemms::run: dgrad and wgrad of recipe coat add without fast accumulation at a large K") {
    SEEDED_RANDOM(rng);
    Buffer<uint8_t> scratch(gpu::CublasGemms::SCRATCH_BYTES);
    gpu::CublasGemms gemms(scratch.get(), find_row(recipes(), "coat", "recipe").fast_accumulation);
    auto random_values = [&](int64_t n) {
        Floats x(n);
        for (float& v : x) v = 1 + 0.25f * float(rng.below(4));
        x[0] = 1.75f;  // the amax, so that the scales are powers of two and the codes are exact
        return x;
    };
    constexpr int64_t K = 8192, SIDE = 512;
    for (const GemmCase& p : {gemm_cases(SIDE, K, SIDE)[1], gemm_cases(K, SIDE, SIDE)[2]}) {
        CAPTURE(std::string(p.name));
        REQUIRE(p.K() == K);
        const Operands operands(p, random_values(p.a.n()), E5M2_PER_TENSOR, random_values(p.b.n()),
                                E4M3_PER_TENSOR);
        const Tensor out({p.M(), p.N()}, PLAIN_FP32);
        gemms.run(p.kind, operands.a.operand(), operands.b.operand(), out.ref(), nullptr);
        const Doubles exact = operands.product();
        Doubles bounds = exact;  // which are positive
        for (double& bound : bounds) bound *= (K / 128 + 2) * 0x1p-24;
        check_within(out.values(), exact, bounds);
    }
}

// Of so many outputs, a Hopper GPU's algorithm is chosen by its tile.
GPU_TEST_CASE("CublasGemms::run: fprop and dgrad of 2^23 outputs equal the reference") {
    SEEDED_RANDOM(rng);
    Buffer<uint8_t> scratch(gpu::CublasGemms::SCRATCH_BYTES);
    gpu::CublasGemms gemms(scratch.get(), find_row(recipes(), "coat", "recipe").fast_accumulation);
    const GemmCase fprop = gemm_cases(8192, 1024, 64)[0], dgrad = gemm_cases(8192, 64, 1024)[1];
    check_gemm(gemms, rng, fprop, E4M3_PER_TENSOR, E4M3_PER_TENSOR, Format::BF16, false, true);
    check_gemm(gemms, rng, fprop, PLAIN_BF16, PLAIN_BF16, Format::BF16, false, true);
    check_gemm(gemms, rng, dgrad, PLAIN_BF16, PLAIN_BF16, Format::BF16, false, false);
}

GPU_TEST_CASE("CublasGemms::run: unsupported operands are rejected also the second time") {
    const Buffer<uint8_t> scratch(gpu::CublasGemms::SCRATCH_BYTES);
    gpu::CublasGemms gemms(scratch.get(), {false, false, false});
    const Shape s{64, 64};
    const Floats ones(s.n(), 1.0f);
    const Tensor e5m2(ones, s, E5M2_PER_TENSOR), bf16(ones, s, PLAIN_BF16), e4m3(ones, s, E4M3_PER_TENSOR),
        blocks(ones, s, E4M3_PER_128x128), out(s, PLAIN_BF16), narrow({64, 32}, PLAIN_BF16);
    const gpu::Operand row_major{e4m3.ref()};
    gpu::Operand groups = e4m3.operand();
    groups.tensor.format = E4M3_PER_1x16;
    const struct {
        const char* why;
        GemmKind kind;
        gpu::Operand a, b;
        const Tensor& out;
    } rows[] = {{"both are E5M2", GemmKind::Fprop, e5m2.operand(), e5m2.operand(), out},
                {"one is BF16", GemmKind::Fprop, e4m3.operand(), bf16.operand(), out},
                {"the transposed codes are missing", GemmKind::Dgrad, e5m2.operand(), row_major, out},
                {"out has too few columns", GemmKind::Fprop, bf16.operand(), bf16.operand(), narrow},
                {"neither has 1x128 scales", GemmKind::Fprop, blocks.operand(), blocks.operand(), out},
                {"groups", GemmKind::Fprop, groups, groups, out}};
    for (const auto& row : rows) {
        CAPTURE(std::string(row.why));
        auto run = [&] { gemms.run(row.kind, row.a, row.b, row.out.ref(), nullptr); };
        const std::string first = error_of(run);
        CHECK(first != "");
        CHECK(error_of(run) == first);  // the failed GEMM has not been cached
    }
}
