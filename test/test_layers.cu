// test_layers.cu - embedding, RoPE and cross-entropy on the GPU against double and the CPU reference.
#include <cmath>

#include "../gpu/layers.cuh"
#include "../gpu/norm.cuh"
#include "device_tensors.h"
#include "gpu.h"
#include "quantized_outputs.h"
#include "random.h"

using namespace coat;
using namespace coat::test;
using gpu::View;
using namespace coat::test::device_tensors;
using namespace coat::test::quantized_outputs;

namespace {

// Checks gradients of rows: got = before + sum over tokens n of g[n], added to row row_of(n).
template <class RowOf>
void check_row_sums(const Floats& got, const Floats& before, const Floats& g, int64_t C, Format format,
                    RowOf row_of) {
    Doubles total = doubles(before), bound(before.size());
    for (size_t i = 0; i < bound.size(); i++) bound[i] = std::abs(before[i]) * U;
    for (int64_t i = 0; i < static_cast<int64_t>(g.size()); i++) {
        const int64_t at = row_of(i / C) * C + i % C;
        total[at] += g[i];
        bound[at] += std::abs(g[i]) * 64 * U;  // 32 tokens in a chunk, up to N / 32 chunks, and `before`
    }
    for (size_t i = 0; i < bound.size(); i++) bound[i] += half_ulp(format) * (std::abs(total[i]) + bound[i]);
    check_close(got, total, bound);
}

}  // namespace

GPU_TEST_CASE("embedding_forward, embedding_backward and positions_backward: against the reference") {
    FRESH_RANDOM(rng);
    for (RecipeFormats formats : RECIPE_FORMATS)
        for (bool positions : {true, false}) {
            const int64_t B = 3, T = 111, N = B * T, C = 272, V = 128, live = 100;
            const Quant compute{formats.compute};
            const Floats e = normals(rng, formats.compute, V * C), p = normals(rng, formats.compute, T * C);
            const Floats g = heavy(rng, formats.compute, N * C);
            std::vector<int32_t> tokens(N);
            for (int32_t& t : tokens)  // three tokens are frequent
                t = static_cast<int32_t>(rng.below(3) ? rng.below(3) : rng.below(live));
            const Buffer<int32_t> device_tokens(tokens);
            const Tensor device_e(e, V, C, compute), device_p(p, T, C, compute), device_g(g, N, C, compute);
            Tensor x(N, C, compute);
            NormCase c(rng, formats, true, N, C);
            gpu::embedding_forward(device_tokens.get(), device_e.view(), positions ? device_p.view() : View{},
                                   T, x.view(), c.norm(), true, nullptr, 0);
            Floats sum(N * C);
            for (int64_t i = 0; i < N * C; i++) {
                const int64_t n = i / C, col = i % C;
                sum[i] = e[tokens[n] * C + col] + (positions ? p[n % T * C + col] : 0);
            }
            CHECK(same_bytes(x.values(), rounded(formats.compute, sum)));
            CHECK(same_bytes(c.in.codes.read(),
                             reference::quantize(sum.data(), N, C, formats.nonlinear).codes));

            auto order = gpu::embedding_order(tokens.data(), N, V);
            const int64_t run_count = static_cast<int64_t>(order.runs.size());
            REQUIRE(run_count <= N);
            const Buffer<int32_t> device_order(order.order);
            const Buffer<gpu::TokenRun> runs(order.runs);
            Buffer<float> workspace(run_count * C);
            for (const Format format : {formats.compute, Format::F32}) {  // of the gradients
                const Tensor de(e, V, C, Quant{format}), dp(p, T, C, Quant{format});
                gpu::embedding_backward(device_g.view(), device_order.get(), runs.get(), run_count,
                                        de.view(), workspace.get(), 0);
                gpu::positions_backward(device_g.view(), T, dp.view(), 0);
                check_row_sums(de.values(), e, g, C, format, [&](int64_t n) { return tokens[n]; });
                check_row_sums(dp.values(), p, g, C, format, [&](int64_t n) { return n % T; });
                CHECK(de.intact());
                CHECK(workspace.intact());
            }
        }
}

GPU_TEST_CASE("rope_forward and rope_backward: against double") {
    FRESH_RANDOM(rng);
    for (Format compute : {Format::BF16, Format::F32})
        for (int64_t HS : {8, 24, 64, 80, 128}) {
            CAPTURE(HS);
            ModelConfig c{"rope", LLAMA, 1, 4 * HS, 4, 2, 64, 64, 256, true};
            // A head of 64 has frequencies of each kind: kept, interpolated and divided.
            if (HS == 64) c.rope_scaling = {RopeScaling::Llama3, 8, 0.5f, 2, 16};
            const int64_t B = 2, T = 57, N = B * T, cols = c.qkv_cols();
            const Floats x = heavy(rng, compute, N * cols);
            Buffer<float2> table(T * HS / 2);
            gpu::rope_table(c, T, table.get(), 0);
            const gpu::Rope rope{table.get(), T, HS, c.q_cols() + c.kv_cols()};
            Doubles forward = doubles(x), backward = doubles(x), bound(N * cols);
            reference::rope<double>(c, B, T, forward.data(), false);
            reference::rope<double>(c, B, T, backward.data(), true);
            // Roundings: of the table, of two products and of their sum.
            for (int64_t i = 0; i < N * cols; i++) {
                const int64_t col = i % cols, partner = col % HS < HS / 2 ? HS / 2 : -HS / 2;
                if (col >= rope.rotated_cols) bound[i] = 0;
                else bound[i] = 4 * U * (std::abs(x[i]) + std::abs(x[i + partner]));
            }
            auto with_rounding = [&](const Doubles& exact) {  // of the result to its format
                Doubles sum = bound;
                for (int64_t i = 0; i < N * cols; i++)
                    if (bound[i] > 0) sum[i] += half_ulp(compute) * (std::abs(exact[i]) + bound[i]);
                return sum;
            };
            for (bool with_amax : {true, false}) {
                const Tensor dx(x, N, cols, Quant{compute}), amax(1, 16, Q_E5M2);
                gpu::rope_backward(rope, dx.view(), with_amax ? amax.amax_and_scale() : nullptr, 0);
                check_close(dx.values(), backward, with_rounding(backward));
                CHECK(amax.amax() == (with_amax ? reference::amax(dx.values().data(), N * cols) : 0));
                CHECK(dx.intact());
            }
            const Tensor dx(x, N, cols, Quant{compute});
            gpu::rope_forward(rope, dx.view(), 0);
            check_close(dx.values(), forward, with_rounding(forward));
            CHECK(dx.intact());
            CHECK(table.intact());
        }
}

GPU_TEST_CASE("cross_entropy and loss_sum: losses, gradients and their sum") {
    FRESH_RANDOM(rng);
    for (Format compute : {Format::BF16, Format::F32})
        for (Shape s : {Shape{3, 1}, {5, 50}, {4, 64}, {6, 1001}, {2, 32000}, {3, 50257}})
            for (double spread : {1.0, 30.0}) {
                const int64_t N = s.rows, V = s.cols, stride = round_up(V, 64);
                CAPTURE(V);
                const Floats logits = normals(rng, compute, N * stride, spread);
                std::vector<int32_t> targets(N);
                for (int32_t& t : targets) t = static_cast<int32_t>(rng.below(V));
                targets[1] = NO_TARGET;
                const Buffer<int32_t> device_targets(targets);
                const Tensor x(logits, N, stride, Quant{compute});
                Buffer<float> losses(N), losses_only(N);
                gpu::cross_entropy(x.view(), V, device_targets.get(), nullptr, losses_only.get(), 0);
                CHECK(same_bytes(x.values(), logits));
                const double scale = 0.125;
                Buffer<double> device_scale(1);
                device_scale.write({scale});
                gpu::cross_entropy(x.view(), V, device_targets.get(), device_scale.get(), losses.get(), 0);
                CHECK(same_bytes(losses_only.read(), losses.read()));
                Doubles gradient(N * stride, 0.0), bound(N * stride, 0.0), loss(N), loss_bound(N);
                for (int64_t n = 0; n < N; n++) {
                    if (targets[n] == NO_TARGET) continue;  // loss and gradient are exactly 0
                    const float* row = &logits[n * stride];
                    double sum = 0;
                    const double top = *std::max_element(row, row + V);
                    for (int64_t v = 0; v < V; v++) sum += std::exp(row[v] - top);
                    const double lse = top + std::log(sum), correct = row[targets[n]];
                    loss[n] = lse - correct;
                    // exp(x - top) is good to 2 |x - top| u + 8 u. Terms far below the top add little, so 40
                    // u covers all terms. A thread sums V / 512 terms, and then 512 threads are summed.
                    const double sum_error = (64 + V / 512.0) * U;
                    loss_bound[n] = sum_error + 4 * U * (std::abs(lse) + std::abs(correct) + std::abs(top));
                    for (int64_t v = 0; v < V; v++) {
                        const int64_t at = n * stride + v;
                        const double p = std::exp(row[v] - lse),
                                     hot = v == targets[n];  // hot: the one-hot target
                        gradient[at] = (p - hot) * scale;
                        const double p_error =
                            loss_bound[n] + (2 * std::abs(row[v] - lse) + 16) * U;  // relative
                        const double error = scale * (p * p_error + 2 * U * hot);
                        bound[at] = error + half_ulp(compute) * (std::abs(gradient[at]) + error) + 0x1p-126;
                    }
                }
                check_close(losses.read(), loss, loss_bound);
                check_close(x.values(), gradient, bound);
                CHECK(x.intact());
                CHECK(losses.intact());
                Buffer<double> total(1);
                total.write({2.0});
                device_scale.write({0.5});
                gpu::loss_sum(losses.get(), N, device_scale.get(), total.get(), 0);
                double expected = 0;
                for (float l : losses.read()) expected += l;
                CHECK(total.read()[0] == doctest::Approx(2 + 0.5 * expected).epsilon(1e-14));
            }
}
