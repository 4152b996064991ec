// test_coat_fused.cu - the fused kernels of coat.cu (quantize_and_dequantize, quantize_gate_up, activation) against double
// and the CPU reference.
#include <cmath>

#include "../coat.cuh"
#include "device_tensors.h"
#include "gpu.h"
#include "quantized_outputs.h"
#include "random.h"

using namespace coat;
using namespace coat::test;
using gpu::Operand;
using gpu::TensorScale;
using namespace coat::test::device_tensors;
using namespace coat::test::quantized_outputs;

GPU_TEST_CASE("quantize: rows of padding do not change the codes and scales of the other rows") {
    FRESH_RANDOM(rng);
    const int64_t rows = 21, all = 32, cols = 272;
    const Floats x = heavy(rng, Format::BF16, rows * cols);
    const Tensor in(x, rows, cols, Q_BF16);
    for (Quant q : {Q_E4M3, Q_ROW, Q_1x128, Q_128x128}) {
        CAPTURE(q.text());
        const bool one = q.granularity == PER_TENSOR;
        Buffer<uint8_t> codes(all * cols);
        Buffer<float> scales(one ? 4 : q.operand_scales(all, cols));
        Buffer<TensorScale> slot(1);
        scales.zero(), slot.zero();
        const Operand out{{codes.get(), scales.get(), all, cols, q}, nullptr, nullptr, slot.get()};
        if (one) gpu::amax(gpu::stored(in.view()), gpu::tensor_scale(out.view), 0);
        gpu::quantize(gpu::stored(in.view()), out, nullptr, 0);
        const reference::Quantized wanted = reference::quantize(x.data(), rows, cols, q);
        const Bytes got = codes.read();
        CHECK(same_codes(q.format, Bytes(got.begin(), got.begin() + rows * cols), wanted.codes));
        CHECK(std::all_of(got.begin() + rows * cols, got.end(), [](uint8_t c) { return c == 0xFF; }));  // nobody writes there
        const Floats laid_out = scales.read();
        const int64_t padded = q.granularity == PER_128x128 ? round_up(q.scale_cols(cols), 4) : 0;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < cols; c++) {
                const int64_t at = one ? 0 : q.granularity == PER_ROW ? r : q.granularity == PER_1x128 ? c / 128 * all + r : r / 128 * padded + c / 128;
                REQUIRE(laid_out[at] == wanted.scale(r, c));
            }
        CHECK(codes.intact());
        CHECK(scales.intact());
    }
}

GPU_TEST_CASE("quantize_and_dequantize: the groups equal those of quantize, and the BF16 output their values") {
    FRESH_RANDOM(rng);
    for (Shape s : SHAPES) {
        if (too_long(s.rows * s.cols)) continue;
        Floats x = heavy(rng, Format::BF16, s.rows * s.cols);
        x[rng.below(s.rows * s.cols)] = INFINITY;
        const Tensor in(x, s.rows, s.cols, Q_BF16);
        Tensor groups(s.rows, s.cols, Q_GROUP), wide(s.rows, s.cols, Q_BF16), again(s.rows, s.cols, Q_BF16);
        gpu::quantize_and_dequantize(in.view(), groups.view(), nullptr, 0);
        check_quantized(groups, x, s.rows, s.cols, Q_GROUP);
        gpu::dequantize(groups.view(), again.view(), 0);
        CHECK(same_bytes(in.codes.read(), again.codes.read()));
        // A per-tensor operand made from groups is made from the numbers that they hold, not from their BF16 roundings.
        Tensor operand(s.rows, s.cols, Q_E4M3);
        gpu::amax(gpu::stored(groups.view()), operand.slot(), 0);
        gpu::quantize(gpu::stored(groups.view()), operand.operand(), nullptr, 0);
        check_quantized(operand, reference::dequantize(reference::quantize(x.data(), s.rows, s.cols, Q_GROUP)), s.rows, s.cols, Q_E4M3);
        CHECK(!std::isfinite(operand.amax()));  // what is not finite is not hidden by a group's codes
        CHECK(in.intact());
    }
}

GPU_TEST_CASE("activation and activation_backward: values and quantized outputs") {
    FRESH_RANDOM(rng);
    for (Pair p : PAIRS)
        for (bool gated : {true, false})
            for (Shape s : {Shape{1, 16}, {33, 48}, {130, 144}, {256, 352}}) {
                if (too_long(s.rows * s.cols)) continue;
                CAPTURE(s.cols);
                CAPTURE(gated);
                const int64_t N = s.rows, F = s.cols, planes = gated ? 2 : 1;
                const Tensor up(heavy(rng, p.compute, N * F * planes), N, F * planes, p.nonlinear), dh(heavy(rng, p.compute, N * F), N, F, Quant{p.compute});
                const Doubles x = doubles(up.values()), d = doubles(dh.values());
                Doubles h(N * F), dup(N * F * planes), bound(N * F), dbound(N * F * planes);
                reference::activation_forward<double>(gated, N, F, x.data(), h.data());
                reference::activation_backward<double>(gated, N, F, x.data(), d.data(), dup.data());
                // exp's error grows with its argument z: 2 z u and a few units of its own and of the reciprocal. Beyond 2^126 the fast
                // reciprocal gives zero: the absolute term. The reference's 1 + tanh(z), even in double, is only good to 2^-53.
                for (int64_t i = 0; i < N * F; i++) {
                    const int64_t at = gated ? i / F * 2 * F + i % F : i;
                    const double a = x[at], slope = gated ? 1 : 1.5957691216 * (1 + 3 * 0.044715 * a * a), z = gated ? a : 1.5957691216 * (a + 0.044715 * a * a * a);
                    const double sig = 1 / (1 + std::exp(-z)), up_i = gated ? x[at + F] : 1, error = (8 * std::abs(z) + 64) * U, tiny = 0x1p-110 * (1 + std::abs(a * up_i)) + (gated ? 0 : std::abs(a) * 0x1p-51);
                    bound[i] = std::abs(a * sig * up_i) * error + tiny;
                    const double bend = sig * (1 + std::abs(a) * slope * (1 - sig + 8 * U) * (1 + 8));
                    dbound[at] = std::abs(d[i] * up_i) * (bend * error + sig * std::abs(a) * slope * 16 * U) + std::abs(d[i]) * (tiny * slope + (gated ? 0 : 0x1p-51));
                    if (gated) dbound[at + F] = std::abs(d[i] * a * sig) * error + std::abs(d[i]) * tiny;
                }
                check_computed(gpu::activation(gated, up.view()), p.compute, h, bound);
                check_computed(gpu::activation_backward(gated, up.view(), dh.view()), p.compute, dup, dbound);
            }
}

GPU_TEST_CASE("activation and activation_backward: finite for inputs of any size") {
    const Floats sizes = {1, 4, 9, 11, 12, 88, 90, 1e3f, 1e10f, 1e20f, 1e30f, 3e38f};
    for (Pair p : PAIRS)
        for (bool gated : {true, false}) {
            const int64_t N = static_cast<int64_t>(sizes.size()) * 2, F = 16, cols = gated ? 2 * F : F;
            Floats up(N * cols, 1.0f);  // a row for each size and sign; gates' others are 1
            for (int64_t i = 0; i < N; i++)
                for (int64_t j = 0; j < F; j++) up[i * cols + j] = (i % 2 ? -1 : 1) * sizes[i / 2];
            const Tensor x(up, N, cols, p.nonlinear), dh(Floats(N * F, 1.0f), N, F, Quant{p.compute});
            Tensor h(N, F, Q_F32), dup(N, cols, Q_F32);
            gpu::quantize(gpu::activation(gated, x.view()), h.operand(), nullptr, 0);
            gpu::quantize(gpu::activation_backward(gated, x.view(), dh.view()), dup.operand(), nullptr, 0);
            const Floats in = x.values(), forward = h.values(), backward = dup.values();
            for (int64_t i = 0; i < N; i++) {
                CAPTURE(gated);
                CAPTURE(in[i * cols]);
                CHECK(std::isfinite(forward[i * F]));
                for (int64_t j : {int64_t(0), cols - 1}) CHECK(std::isfinite(backward[i * cols + j]));
                const double slope = gated ? in[i * cols + F] : 1;  // the slope of SiLU times up as it is stored
                if (sizes[i / 2] >= 90) CHECK(backward[i * cols] == doctest::Approx(i % 2 ? 0 : slope).epsilon(1e-6));
            }
        }
}
