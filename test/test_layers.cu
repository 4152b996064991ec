// test_layers.cu - embedding, RoPE and cross-entropy on the GPU against double and the CPU reference.
#include <cmath>

#include "../gpu/layers.cuh"
#include "device_tensors.h"
#include "gpu.h"
#include "quantized_outputs.h"
#include "random.h"

using namespace coat;
using namespace coat::test;
using gpu::View;
using namespace coat::test::device_tensors;
using namespace coat::test::quantized_outputs;

GPU_TEST_CASE("embedding_forward, embedding_backward and positions_backward: against the reference") {
    FRESH_RANDOM(rng);
    for (RecipeFormats formats : RECIPE_FORMATS)
        for (bool positions : {true, false}) {
            const int64_t B = 3, T = 111, N = B * T, C = 272, V = 128, live = 100;
            const Floats e = normals(rng, formats.compute, V * C), w = normals(rng, formats.compute, T * C), g = heavy(rng, formats.compute, N * C);
            std::vector<int32_t> tokens(N);
            for (int32_t& t : tokens) t = static_cast<int32_t>(rng.below(3) ? rng.below(3) : rng.below(live));  // some are frequent
            const Buffer<int32_t> dtokens(tokens);
            const Tensor de(e, V, C, Quant{formats.compute}), dw(w, T, C, Quant{formats.compute}), dg(g, N, C, Quant{formats.compute});
            Tensor x(N, C, Quant{formats.compute});
            NormCase c(rng, formats, true, N, C);
            gpu::embedding_forward(dtokens.get(), de.view(), positions ? dw.view() : View{}, T, x.view(), c.norm(), nullptr, 0);
            Floats sum(N * C);
            for (int64_t i = 0; i < N * C; i++) sum[i] = e[tokens[i / C] * C + i % C] + (positions ? w[i / C % T * C + i % C] : 0);
            CHECK(same_bytes(x.values(), rounded(formats.compute, sum)));
            CHECK(same_bytes(c.in.codes.read(), reference::quantize(sum.data(), N, C, formats.nonlinear).codes));

            auto order = gpu::embedding_order(tokens.data(), N, V);
            REQUIRE(static_cast<int64_t>(order.chunks.size()) <= N);
            const Buffer<int32_t> dorder(order.order);
            const Buffer<gpu::EmbeddingChunk> chunks(order.chunks);
            Buffer<float> workspace(static_cast<int64_t>(order.chunks.size()) * C);
            for (const Format gradient_format : {formats.compute, Format::F32}) {
                const Tensor gradient(e, V, C, Quant{gradient_format}), by_position(w, T, C, Quant{gradient_format});
                gpu::embedding_backward(dg.view(), dorder.get(), chunks.get(), static_cast<int64_t>(order.chunks.size()), gradient.view(), workspace.get(), 0);
                gpu::positions_backward(dg.view(), T, by_position.view(), 0);
                auto check = [&](const Floats& got, const Floats& before, auto row) {
                    Doubles total = doubles(before), bound(before.size());
                    for (size_t i = 0; i < bound.size(); i++) bound[i] = std::abs(before[i]) * U;
                    for (int64_t i = 0; i < N * C; i++) {
                        total[row(i / C) * C + i % C] += g[i];
                        bound[row(i / C) * C + i % C] += std::abs(g[i]) * 64 * U;  // 32 in a chunk, up to N / 32 chunks, the gradient
                    }
                    for (size_t i = 0; i < bound.size(); i++) bound[i] += half_ulp(gradient_format) * (std::abs(total[i]) + bound[i]);
                    check_close(got, total, bound);
                };
                check(gradient.values(), e, [&](int64_t n) { return tokens[n]; });
                check(by_position.values(), w, [&](int64_t n) { return n % T; });
                CHECK(gradient.intact());
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
            const int64_t B = 2, T = 57, N = B * T, cols = c.qkv_cols();
            const Floats x = heavy(rng, compute, N * cols);
            Buffer<float2> table(T * HS / 2);
            gpu::rope_table(c, T, table.get(), 0);
            const gpu::Rope rope{table.get(), T, HS, c.q_cols() + c.kv_cols()};
            Doubles forward = doubles(x), backward = doubles(x), bound(N * cols);
            reference::rope<double>(c, B, T, forward.data(), false);
            reference::rope<double>(c, B, T, backward.data(), true);
            for (int64_t i = 0; i < N * cols; i++) {
                const int64_t col = i % cols, partner = col >= rope.rotated_cols ? 0 : col % HS < HS / 2 ? HS / 2 : -HS / 2;
                bound[i] = partner ? 4 * U * (std::abs(x[i]) + std::abs(x[i + partner])) : 0;  // table, two products, a sum
            }
            auto rounding = [&](const Doubles& exact) {
                Doubles sum = bound;
                for (int64_t i = 0; i < N * cols; i++)
                    if (bound[i] > 0) sum[i] += half_ulp(compute) * (std::abs(exact[i]) + bound[i]);
                return sum;
            };
            for (bool with_amax : {true, false}) {
                const Tensor dx(x, N, cols, Quant{compute}), amax(1, 16, Q_E5M2);
                gpu::rope_backward(rope, dx.view(), with_amax ? amax.tensor_scale() : nullptr, 0);
                check_close(dx.values(), backward, rounding(backward));
                CHECK(amax.amax() == (with_amax ? reference::amax(dx.values().data(), N * cols) : 0));
                CHECK(dx.intact());
            }
            const Tensor dx(x, N, cols, Quant{compute});
            gpu::rope_forward(rope, dx.view(), 0);
            check_close(dx.values(), forward, rounding(forward));
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
                const Buffer<int32_t> dtargets(targets);
                const Tensor x(logits, N, stride, Quant{compute});
                Buffer<float> losses(N), same(N);
                gpu::cross_entropy(x.view(), V, dtargets.get(), 0, same.get(), 0);
                CHECK(same_bytes(x.values(), logits));
                const float scale = 0.125f;
                gpu::cross_entropy(x.view(), V, dtargets.get(), scale, losses.get(), 0);
                CHECK(same_bytes(same.read(), losses.read()));
                Doubles gradient(N * stride, 0.0), bound(N * stride, 0.0), loss(N), loss_bound(N);
                for (int64_t n = 0; n < N; n++) {
                    const float* row = &logits[n * stride];
                    double sum = 0;
                    const double top = *std::max_element(row, row + V);
                    for (int64_t v = 0; v < V; v++) sum += std::exp(row[v] - top);
                    const double lse = top + std::log(sum), correct = row[targets[n]];
                    loss[n] = lse - correct;
                    // exp(x - top) is good to 2 |x - top| u and 8 u, and what is far below the top weighs little: 40 u covers the terms. A
                    // sum of V / 512 terms in a thread and of 512 threads adds its own.
                    const double sum_error = (64 + V / 512.0) * U;
                    loss_bound[n] = sum_error + 4 * U * (std::abs(lse) + std::abs(correct) + std::abs(top));
                    for (int64_t v = 0; v < V; v++) {
                        const double p = std::exp(row[v] - lse), hot = v == targets[n];
                        gradient[n * stride + v] = (p - hot) * scale;
                        const double error = scale * (p * (loss_bound[n] + (2 * std::abs(row[v] - lse) + 16) * U) + 2 * U * hot);
                        bound[n * stride + v] = error + half_ulp(compute) * (std::abs(gradient[n * stride + v]) + error) + 0x1p-126;
                    }
                }
                check_close(losses.read(), loss, loss_bound);
                check_close(x.values(), gradient, bound);
                CHECK(x.intact());
                CHECK(losses.intact());
                Buffer<double> total(1);
                total.write({2.0});
                gpu::loss_sum(losses.get(), N, 0.5, total.get(), 0);
                double expected = 0;
                for (float l : losses.read()) expected += l;
                CHECK(total.read()[0] == doctest::Approx(2 + 0.5 * expected).epsilon(1e-14));
            }
}
