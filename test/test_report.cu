// test_report.cu - the quantization report (gpu/report.cu): statistics of errors against the reference.
#include "../coat.cuh"
#include "device_tensors.h"
#include "gpu.h"
#include "quantized_outputs.h"
#include "random.h"

using namespace coat;
using namespace coat::test;
using namespace coat::test::device_tensors;
using namespace coat::test::quantized_outputs;

namespace {

void check_statistics(const QuantStats& got, const QuantStats& expected) {
    CHECK(got.elements == expected.elements);
    CHECK(got.saturated == expected.saturated);
    CHECK(got.flushed == expected.flushed);
    // Sums of 81600 doubles in another order.
    CHECK(got.signal == doctest::Approx(expected.signal).epsilon(1e-10));
    CHECK(got.noise == doctest::Approx(expected.noise).epsilon(1e-10));
}

}  // namespace

GPU_TEST_CASE("quantize: statistics of errors equal the reference's") {
    FRESH_RANDOM(rng);
    for (Quant q : {Q_E4M3, Q_E5M2, Q_GROUP}) {
        const Floats x = heavy(rng, Format::BF16, 300 * 272);
        const Tensor in(x, 300, 272, Q_BF16);
        Tensor out(300, 272, q);
        Buffer<QuantStats> stats(1);
        stats.zero();
        if (q.granularity == PER_TENSOR) gpu::amax(gpu::stored(in.view()), out.amax_and_scale(), 0);
        gpu::quantize(gpu::stored(in.view()), out.operand(), stats.get(), 0);
        QuantStats expected;
        reference::quantize(x.data(), 300, 272, q, &expected);
        check_statistics(stats.read()[0], expected);
    }
    // If the transpose has its own scales, its errors count too. With a delayed scale that is too small,
    // values saturate.
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
            succeeded(cudaMemcpy(&out.amax_and_scale()->from_history, &scale, sizeof scale,
                                 cudaMemcpyHostToDevice));
            gpu::quantize(gpu::stored(in.view()), out.operand(), stats.get(), 0);
            reference::quantize(x.data(), 300, 272, q, &expected, &scale);
            CHECK(expected.saturated > 0);
        } else {
            const BlockOperand out(300, 272, q);
            gpu::quantize(gpu::stored(in.view()), out.operand(), stats.get(), 0);
            reference::quantize(x.data(), 300, 272, q, &expected);
            const Floats transpose = transposed(x, 300, 272);
            if (!q.granularity.symmetric()) reference::quantize(transpose.data(), 272, 300, q, &expected);
        }
        check_statistics(stats.read()[0], expected);
    }
}
