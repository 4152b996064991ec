// test_coat_quantize.cu - the quantizers of coat.cu (amax, quantize, dequantize, delayed scales)
// against the CPU reference, byte for byte.
#include <cmath>

#include "../adamw.cuh"
#include "../coat.cuh"
#include "device_tensors.h"
#include "gpu.h"
#include "quantized_outputs.h"
#include "random.h"

using namespace coat;
using namespace coat::test;
using gpu::Lazy;
using gpu::Operand;
using gpu::TensorScale;
using namespace coat::test::device_tensors;
using namespace coat::test::quantized_outputs;

GPU_TEST_CASE("quantize and dequantize: codes, scales and transposes equal the reference byte for byte") {
    FRESH_RANDOM(rng);
    for (const Distribution& d : distributions())
        for (Shape s : SHAPES) {
            if (too_long(s.rows * s.cols)) continue;
            CAPTURE(d.name);
            CAPTURE(s.rows);
            const Floats x = rounded(Format::BF16, sample(d, rng, s.rows * s.cols));
            const Tensor in(x, s.rows, s.cols, Q_BF16);
            for (Quant q : {Q_E4M3, Q_E5M2, Q_GROUP}) {
                Tensor out(s.rows, s.cols, q);
                const bool groups = q.granularity == PER_GROUP;
                if (!groups) gpu::amax(gpu::stored(in.view()), out.slot(), 0);
                gpu::quantize(gpu::stored(in.view()), out.operand(), nullptr, 0);
                check_quantized(out, x, s.rows, s.cols, q);
                if (!groups) CHECK(out.amax() == reference::amax(x.data(), s.rows * s.cols));
                if (!groups) continue;
                Tensor back(s.rows, s.cols, Q_F32), half(s.rows, s.cols, Q_BF16);
                gpu::dequantize(out.view(), back.view(), 0);
                gpu::dequantize(out.view(), half.view(), 0);
                CHECK(same_bytes(back.values(), out.values()));
                CHECK(same_bytes(half.values(), rounded(Format::BF16, out.values())));
                CHECK(back.intact());
            }
            for (Quant q : BLOCK_OUTPUTS) {
                CAPTURE(q.text());
                const BlockOperand out(s.rows, s.cols, q);
                gpu::quantize(gpu::stored(in.view()), out.operand(), nullptr, 0);
                check_blocks(out, x);
            }
        }
}

GPU_TEST_CASE("quantize: FP32 values to FP32 and BF16; what no kernel does is an error") {
    FRESH_RANDOM(rng);
    for (Shape s : SHAPES) {
        if (too_long(s.rows * s.cols)) continue;
        const Floats x = heavy(rng, Format::F32, s.rows * s.cols);
        const Tensor in(x, s.rows, s.cols, Q_F32), same(s.rows, s.cols, Q_F32), half(s.rows, s.cols, Q_BF16);
        gpu::quantize(gpu::stored(in.view()), same.operand(), nullptr, 0);
        gpu::quantize(gpu::stored(in.view()), half.operand(), nullptr, 0);
        CHECK(same_bytes(same.values(), x));
        CHECK(same_bytes(half.values(), rounded(Format::BF16, x)));
        for (Quant q : {Q_E4M3, Q_GROUP, Q_ROW}) {
            const Tensor out(s.rows, s.cols, q);
            CHECK_THROWS_AS(gpu::quantize(gpu::stored(in.view()), out.operand(), nullptr, 0), Error);
        }
    }
}

GPU_TEST_CASE("quantize: every BF16 value up to 448 has the reference's E4M3 code") {
    Floats x;
    for (uint32_t bits = 0; bits < 65536; bits++)
        if (std::abs(reference::from_bf16(static_cast<uint16_t>(bits))) <= 448) x.push_back(reference::from_bf16(static_cast<uint16_t>(bits)));
    x.resize(round_up(x.size(), 16), 0.0f);
    const int64_t n = static_cast<int64_t>(x.size());
    const Tensor in(x, 1, n, Q_BF16);
    Tensor out(1, n, Q_E4M3);
    gpu::amax(gpu::stored(in.view()), out.slot(), 0);
    gpu::quantize(gpu::stored(in.view()), out.operand(), nullptr, 0);
    CHECK(out.scale() == 1.0f);
    check_quantized(out, x, 1, n, Q_E4M3);
}

GPU_TEST_CASE("amax and quantize: NaN and infinity reach the amax; a tensor's scale stays 1 and a group becomes NaN") {
    FRESH_RANDOM(rng);
    for (float bad : {INFINITY, -INFINITY, NAN})
        for (Quant q : {Q_E4M3, Q_E5M2, Q_GROUP}) {
            Floats x = normals(rng, Format::BF16, 200 * 160);
            x[rng.below(200 * 160)] = bad;
            const Tensor in(x, 200, 160, Q_BF16);
            Tensor out(200, 160, q);
            if (q.granularity == PER_TENSOR) gpu::amax(gpu::stored(in.view()), out.slot(), 0);
            gpu::quantize(gpu::stored(in.view()), out.operand(), nullptr, 0);
            check_quantized(out, x, 200, 160, q);
            if (q.granularity == PER_TENSOR) CHECK(!std::isfinite(out.amax()));
        }
    for (float bad : {INFINITY, -INFINITY, NAN})
        for (Quant q : BLOCK_OUTPUTS) {
            CAPTURE(q.text());
            Floats x = normals(rng, Format::BF16, 200 * 160);
            x[rng.below(200 * 160)] = bad;
            const Tensor in(x, 200, 160, Q_BF16);
            const BlockOperand out(200, 160, q);
            gpu::quantize(gpu::stored(in.view()), out.operand(), nullptr, 0);
            check_blocks(out, x);
            CHECK(!std::isfinite(out.slot.read()[0].amax));
        }
}

GPU_TEST_CASE("quantize: in place with a delayed scale, the amax is that of the input values") {
    // A thread whose rows end inside of its eight reads the last one again, after it has written codes there. In groups whose first gate is large the
    // gradients of small gates make large codes, which read as large gates. Both halves: d up = dh silu(gate), d gate = dh up silu'(gate).
    const int64_t F = 64;
    for (int64_t rows : {3, 130, 131, 133}) {
        Floats up(rows * 2 * F), dh(rows * F);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < F; c++) {
                const bool large = c % 16 == 0;
                up[r * 2 * F + c] = large ? 400.0f : 1.0f, up[r * 2 * F + F + c] = 1.0f;
                dh[r * F + c] = large ? 0x1p-14f : 1.0f;
            }
        const Tensor in(up, rows, 2 * F, Q_GROUP), gradient(dh, rows, F, Q_BF16);
        const Lazy x = gpu::activation_backward(true, in.view(), gradient.view());
        Tensor values(rows, 2 * F, Q_F32), out(rows, 2 * F, Q_E5M2);
        gpu::quantize(x, values.operand(), nullptr, 0);
        const Floats exact = values.values();
        const float amax = reference::amax(exact.data(), rows * 2 * F), scale = reference::scale_of(Q_E5M2, amax);
        succeeded(cudaMemcpy(&out.slot()->delayed, &scale, sizeof scale, cudaMemcpyHostToDevice));
        Operand operand = out.operand();
        operand.view.codes = in.codes.get();
        gpu::quantize(x, operand, nullptr, 0);
        INFO(rows);
        CHECK(out.amax() == amax);
        CHECK(same_codes(Format::E5M2, in.codes.read(), reference::quantize(exact.data(), rows, 2 * F, Q_E5M2, nullptr, &scale).codes));
    }
}

GPU_TEST_CASE("quantize: statistics of errors equal the reference's") {
    FRESH_RANDOM(rng);
    for (Quant q : {Q_E4M3, Q_E5M2, Q_GROUP}) {
        const Floats x = heavy(rng, Format::BF16, 300 * 272);
        const Tensor in(x, 300, 272, Q_BF16);
        Tensor out(300, 272, q);
        Buffer<QuantStats> stats(1);
        stats.zero();
        if (q.granularity == PER_TENSOR) gpu::amax(gpu::stored(in.view()), out.slot(), 0);
        gpu::quantize(gpu::stored(in.view()), out.operand(), stats.get(), 0);
        QuantStats expected;
        reference::quantize(x.data(), 300, 272, q, &expected);
        const QuantStats got = stats.read()[0];
        CHECK(got.elements == expected.elements);
        CHECK(got.saturated == expected.saturated);
        CHECK(got.flushed == expected.flushed);
        CHECK(got.signal == doctest::Approx(expected.signal).epsilon(1e-10));  // sums of 81600 doubles in another order
        CHECK(got.noise == doctest::Approx(expected.noise).epsilon(1e-10));
    }
    // Of scales by blocks each way counts that has scales of its own; beyond a delayed scale numbers saturate.
    std::vector<std::pair<Quant, bool>> others;
    for (Quant q : BLOCK_OUTPUTS) others.push_back({q, false});
    for (Quant q : FP8_OUTPUTS) others.push_back({q, true});
    for (const std::pair<Quant, bool>& row : others) {
        const Quant q = row.first;
        const bool delayed = row.second;
        CAPTURE(q.text());
        const Floats x = heavy(rng, Format::BF16, 300 * 272);
        const Tensor in(x, 300, 272, Q_BF16);
        Buffer<QuantStats> stats(1);
        stats.zero();
        QuantStats expected;
        if (delayed) {
            Tensor out(300, 272, q);
            const float scale = reference::scale_of(q, reference::amax(x.data(), 300 * 272) / 3);
            succeeded(cudaMemcpy(&out.slot()->delayed, &scale, sizeof scale, cudaMemcpyHostToDevice));
            gpu::quantize(gpu::stored(in.view()), out.operand(), stats.get(), 0);
            reference::quantize(x.data(), 300, 272, q, &expected, &scale);
            CHECK(expected.saturated > 0);
        } else {
            const BlockOperand out(300, 272, q);
            gpu::quantize(gpu::stored(in.view()), out.operand(), stats.get(), 0);
            reference::quantize(x.data(), 300, 272, q, &expected);
            if (!q.granularity.symmetric()) reference::quantize(transposed(x, 300, 272).data(), 272, 300, q, &expected);
        }
        const QuantStats got = stats.read()[0];
        CHECK(got.elements == expected.elements);
        CHECK(got.saturated == expected.saturated);
        CHECK(got.flushed == expected.flushed);
        CHECK(got.signal == doctest::Approx(expected.signal).epsilon(1e-10));
        CHECK(got.noise == doctest::Approx(expected.noise).epsilon(1e-10));
    }
}

GPU_TEST_CASE("end_delayed_step: delayed scales equal the reference's") {
    FRESH_RANDOM(rng);
    constexpr int64_t SLOTS = 5;
    for (int length : {1, 3, 256, 257, 1024})
        for (const auto& [format, margin] : {std::pair{Format::E4M3, 0}, std::pair{Format::E5M2, 2}}) {
            CAPTURE(length);
            std::vector<reference::DelayedScale> wanted(SLOTS);
            std::vector<TensorScale> slots(SLOTS);
            Floats histories;
            for (int64_t i = 0; i < SLOTS; i++) {
                wanted[i].history.assign(length, 0.0f);
                for (float& amax : wanted[i].history) amax = rng.below(3) ? static_cast<float>(std::exp(3 * rng.normal())) : 0.0f;
                if (i == 0) wanted[i].history.assign(length, 0.0f);  // no step yet
                histories.insert(histories.end(), wanted[i].history.begin(), wanted[i].history.end());
                slots[i].delayed = wanted[i].scale = i == 0 ? 0.0f : static_cast<float>(rng.uniform());
            }
            Buffer<float> device_histories(histories);
            Buffer<TensorScale> device_slots(slots);
            Buffer<gpu::GradientState> state(1);
            Buffer<uint32_t> without(1);
            for (const bool skipped : {false, true, false, false}) {
                slots = device_slots.read();
                for (int64_t i = 0; i < SLOTS; i++)  // of the first: nothing, and then a number whose power of two overflows
                    slots[i].amax = wanted[i].amax = i == 0 ? 0.0f : i == 1 ? 3e38f : static_cast<float>(std::exp(3 * rng.normal()));
                device_slots.write(slots);
                state.write({gpu::GradientState{1, 1, 1, skipped}});
                without.zero();
                gpu::end_delayed_step(device_slots.get(), SLOTS, device_histories.get(), length, margin, format,
                                      &state.get()->skip, without.get(), 0);
                CHECK(without.read()[0] == (skipped ? 0u : 1u));  // the first has never had an amax
                const auto got = device_slots.read();
                const Floats got_histories = device_histories.read();
                for (int64_t i = 0; i < SLOTS; i++) {
                    if (!skipped) wanted[i].end_step(format, margin);
                    CHECK(got[i].delayed == wanted[i].scale);
                    CHECK(std::equal(wanted[i].history.begin(), wanted[i].history.end(), got_histories.begin() + i * length));
                }
            }
            CHECK(device_histories.intact());
            CHECK(device_slots.intact());
        }
}

GPU_TEST_CASE("quantize_gate_up: 1x16 groups of the activation's input, and the amax of its output") {
    FRESH_RANDOM(rng);
    for (bool gated : {true, false})
        for (Shape s : {Shape{1, 32}, {33, 96}, {130, 288}, {256, 704}}) {
            if (too_long(s.rows * s.cols)) continue;
            CAPTURE(s.cols);
            CAPTURE(gated);
            const Tensor u(heavy(rng, Format::BF16, s.rows * s.cols), s.rows, s.cols, Q_BF16);
            const Tensor up(s.rows, s.cols, Q_GROUP), expected(s.rows, s.cols, Q_GROUP), h(1, 16, Q_E4M3), again(1, 16, Q_E4M3);
            gpu::quantize(gpu::stored(u.view()), expected.operand(), nullptr, 0);
            gpu::amax(gpu::activation(gated, expected.view()), h.slot(), 0);
            gpu::quantize_gate_up(gated, u.view(), up.view(), again.slot(), nullptr, 0);
            CHECK(same_bytes(up.codes.read(), expected.codes.read()));
            CHECK(same_bytes(up.scales.read(), expected.scales.read()));
            CHECK(up.intact());
            CHECK(again.amax() == h.amax());
            CHECK(again.amax() > 0);
        }
}
