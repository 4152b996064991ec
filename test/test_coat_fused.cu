// test_coat_fused.cu - the fused kernels of coat.cu (quantize_groups, quantize_gate_up, activation)
// against double, the CPU reference and quantize().
#include <cmath>

#include "../coat.cuh"
#include "device_tensors.h"
#include "gpu.h"
#include "quantized_outputs.h"
#include "random.h"

using namespace coat;
using namespace coat::test;
using gpu::Operand;
using gpu::AmaxAndScale;
using namespace coat::test::device_tensors;
using namespace coat::test::quantized_outputs;

GPU_TEST_CASE("quantize: padding rows do not change the codes and scales of the other rows") {
    FRESH_RANDOM(rng);
    const int64_t rows = 21, padded_rows = 32, cols = 272;
    const Floats x = heavy(rng, Format::BF16, rows * cols);
    const Tensor in(x, rows, cols, Q_BF16);
    for (Quant q : {Q_E4M3, Q_ROW, Q_1x128, Q_128x128}) {
        CAPTURE(q.text());
        const bool per_tensor = q.granularity == PER_TENSOR;
        Buffer<uint8_t> codes(padded_rows * cols);
        Buffer<float> scales(per_tensor ? 4 : q.operand_scales(padded_rows, cols));
        Buffer<AmaxAndScale> amax(1);
        scales.zero(), amax.zero();
        const Operand out{{codes.get(), scales.get(), padded_rows, cols, q}, nullptr, nullptr, amax.get()};
        if (per_tensor) gpu::amax(gpu::stored(in.view()), gpu::amax_and_scale(out.view), 0);
        gpu::quantize(gpu::stored(in.view()), out, nullptr, 0);
        const reference::Quantized wanted = reference::quantize(x.data(), rows, cols, q);
        const Bytes got = codes.read();
        CHECK(same_codes(q.format, Bytes(got.begin(), got.begin() + rows * cols), wanted.codes));
        // The padding has not been written.
        CHECK(std::all_of(got.begin() + rows * cols, got.end(), [](uint8_t c) { return c == 0xFF; }));
        const Floats laid_out = scales.read();
        // The layout of cuBLASLt, as in scales_for_gemm (gpu.h).
        auto scale_index = [&](int64_t r, int64_t c) -> int64_t {
            if (q.granularity == PER_ROW) return r;
            if (q.granularity == PER_1x128) return c / 128 * padded_rows + r;
            if (q.granularity == PER_128x128) return r / 128 * round_up(q.scale_cols(cols), 4) + c / 128;
            return 0;
        };
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < cols; c++) REQUIRE(laid_out[scale_index(r, c)] == wanted.scale(r, c));
        CHECK(codes.intact());
        CHECK(scales.intact());
    }
}

GPU_TEST_CASE("quantize_groups: they equal those of quantize; the BF16 tensor gets their values") {
    FRESH_RANDOM(rng);
    for (Shape s : SHAPES) {
        if (too_long(s.rows * s.cols)) continue;
        Floats x = heavy(rng, Format::BF16, s.rows * s.cols);
        x[rng.below(s.rows * s.cols)] = INFINITY;
        const Tensor in(x, s.rows, s.cols, Q_BF16);
        Tensor groups(s.rows, s.cols, Q_GROUP), again(s.rows, s.cols, Q_BF16);
        gpu::quantize_groups(in.view(), groups.view(), true, nullptr, 0);
        check_quantized(groups, x, s.rows, s.cols, Q_GROUP);
        gpu::convert(groups.view(), again.view(), 0);
        CHECK(same_bytes(in.codes.read(), again.codes.read()));
        // A per-tensor operand is quantized from the groups' values, not from these values rounded to BF16.
        Tensor operand(s.rows, s.cols, Q_E4M3);
        gpu::amax(gpu::stored(groups.view()), operand.amax_and_scale(), 0);
        gpu::quantize(gpu::stored(groups.view()), operand.operand(), nullptr, 0);
        const Floats values = reference::dequantize(reference::quantize(x.data(), s.rows, s.cols, Q_GROUP));
        check_quantized(operand, values, s.rows, s.cols, Q_E4M3);
        CHECK(!std::isfinite(operand.amax()));  // the infinity has not become a finite code
        CHECK(in.intact());
    }
}

namespace {

// The error that one element of the activation and of its gradients may have. An activation is
//   x sigmoid(z) up, with    SwiGLU: x the gate, z = x    GELU: z = 2 sqrt(2 / pi) (x + 0.044715 x^3), up = 1
// The derivative of x sigmoid(z) is sigmoid(z) (1 + x dz/dx (1 - sigmoid(z))).
struct ActivationError {
    double act, dx, dup;
};
ActivationError activation_error(bool gated, double x, double up, double dact) {
    constexpr double GELU = 1.5957691216, CUBIC = 0.044715;
    const double z = gated ? x : GELU * (x + CUBIC * x * x * x);
    const double dz = gated ? 1 : GELU * (1 + 3 * CUBIC * x * x);
    const double sigmoid = 1 / (1 + std::exp(-z));
    // The relative error of exp(z) is 2 |z| u and a few u more; the reciprocal adds a few u.
    const double relative = (8 * std::abs(z) + 64) * U;
    // The reference computes 1 + tanh(z): even in double that is only good to 2^-53 in absolute terms.
    const double tanh_error = gated ? 0 : 0x1p-51;
    // The fast reciprocal returns zero for values beyond 2^126.
    const double absolute = 0x1p-110 * (1 + std::abs(x * up)) + std::abs(x) * tanh_error;
    // The derivative, with every term positive. The factor 1 + 8 covers the error of 1 - sigmoid.
    const double derivative = sigmoid * (1 + std::abs(x) * dz * (1 - sigmoid + 8 * U) * (1 + 8));
    const double dz_error = sigmoid * std::abs(x) * dz * 16 * U;
    ActivationError error;
    error.act = std::abs(x * sigmoid * up) * relative + absolute;
    error.dx = std::abs(dact * up) * (derivative * relative + dz_error);
    error.dx += std::abs(dact) * (absolute * dz + tanh_error);
    error.dup = std::abs(dact * x * sigmoid) * relative + std::abs(dact) * absolute;
    return error;
}

}  // namespace

GPU_TEST_CASE("activation and activation_backward: values and quantized outputs") {
    FRESH_RANDOM(rng);
    for (RecipeFormats formats : RECIPE_FORMATS)
        for (bool gated : {true, false})
            for (Shape s : {Shape{1, 16}, {33, 48}, {130, 144}, {256, 352}}) {
                if (too_long(s.rows * s.cols)) continue;
                CAPTURE(s.cols);
                CAPTURE(gated);
                const int64_t N = s.rows, F = s.cols, planes = gated ? 2 : 1;
                const int64_t cols = F * planes;
                const Tensor gate_up(heavy(rng, formats.compute, N * cols), N, cols, formats.nonlinear);
                const Tensor dact(heavy(rng, formats.compute, N * F), N, F, Quant{formats.compute});
                const Doubles x = doubles(gate_up.values()), d = doubles(dact.values());
                Doubles act(N * F), dgate_up(N * cols), bound(N * F), dbound(N * cols);
                reference::activation_forward<double>(gated, N, F, x.data(), act.data());
                reference::activation_backward<double>(gated, N, F, x.data(), d.data(), dgate_up.data());
                for (int64_t i = 0; i < N * F; i++) {
                    const int64_t at = gated ? i / F * 2 * F + i % F : i;
                    const ActivationError error = activation_error(gated, x[at], gated ? x[at + F] : 1, d[i]);
                    bound[i] = error.act;
                    dbound[at] = error.dx;
                    if (gated) dbound[at + F] = error.dup;
                }
                const gpu::Lazy forward = gpu::activation(gated, gate_up.view());
                const gpu::Lazy backward = gpu::activation_backward(gated, gate_up.view(), dact.view());
                check_lazy(forward, formats.compute, act, bound);
                check_lazy(backward, formats.compute, dgate_up, dbound);
            }
}

GPU_TEST_CASE("activation and activation_backward: finite for inputs of any size") {
    const Floats sizes = {1, 4, 9, 11, 12, 88, 90, 1e3f, 1e10f, 1e20f, 1e30f, 3e38f};
    for (RecipeFormats formats : RECIPE_FORMATS)
        for (bool gated : {true, false}) {
            const int64_t N = static_cast<int64_t>(sizes.size()) * 2, F = 16, cols = gated ? 2 * F : F;
            // A row for each size and sign. Where the activation is gated, the other half of the row, `up`,
            // is 1.
            Floats values(N * cols, 1.0f);
            for (int64_t i = 0; i < N; i++)
                for (int64_t j = 0; j < F; j++) values[i * cols + j] = (i % 2 ? -1 : 1) * sizes[i / 2];
            const Tensor gate_up(values, N, cols, formats.nonlinear);
            const Tensor dact(Floats(N * F, 1.0f), N, F, Quant{formats.compute});
            Tensor act(N, F, Q_F32), dgate_up(N, cols, Q_F32);
            const gpu::Lazy gradient = gpu::activation_backward(gated, gate_up.view(), dact.view());
            gpu::quantize(gpu::activation(gated, gate_up.view()), act.operand(), nullptr, 0);
            gpu::quantize(gradient, dgate_up.operand(), nullptr, 0);
            const Floats in = gate_up.values(), forward = act.values(), backward = dgate_up.values();
            for (int64_t i = 0; i < N; i++) {
                CAPTURE(gated);
                CAPTURE(in[i * cols]);
                CHECK(std::isfinite(forward[i * F]));
                for (int64_t j : {int64_t(0), cols - 1}) CHECK(std::isfinite(backward[i * cols + j]));
                // Far from zero the derivative is 0 or 1. With a gate it is multiplied by `up`, as it is
                // stored.
                const double slope = gated ? in[i * cols + F] : 1;
                if (sizes[i / 2] < 90) continue;
                CHECK(backward[i * cols] == doctest::Approx(i % 2 ? 0 : slope).epsilon(1e-6));
            }
        }
}

GPU_TEST_CASE("quantize_gate_up: 1x16 groups of the activation's input, and the amax of its output") {
    FRESH_RANDOM(rng);
    for (bool gated : {true, false})
        for (Shape s : {Shape{1, 32}, {33, 96}, {130, 288}, {256, 704}}) {
            if (too_long(s.rows * s.cols)) continue;
            CAPTURE(s.cols);
            CAPTURE(gated);
            const Tensor gate_up(heavy(rng, Format::BF16, s.rows * s.cols), s.rows, s.cols, Q_BF16);
            const Tensor expected(s.rows, s.cols, Q_GROUP);
            gpu::quantize(gpu::stored(gate_up.view()), expected.operand(), nullptr, 0);
            for (bool reads_saved : {true, false}) {
                const Tensor groups(s.rows, s.cols, Q_GROUP);
                // Only their amax is used, that of the activation's output.
                const Tensor separate(1, 16, Q_E4M3), fused(1, 16, Q_E4M3);
                const View read = reads_saved ? expected.view() : gate_up.view();
                gpu::amax(gpu::activation(gated, read), separate.amax_and_scale(), 0);
                gpu::quantize_gate_up(gated, gate_up.view(), groups.view(), reads_saved,
                                      fused.amax_and_scale(), nullptr, 0);
                CHECK(same_bytes(groups.codes.read(), expected.codes.read()));
                CHECK(same_bytes(groups.scales.read(), expected.scales.read()));
                CHECK(groups.intact());
                CHECK(fused.amax() == separate.amax());
                CHECK(fused.amax() > 0);
            }
        }
}
