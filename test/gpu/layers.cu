// layers.cu - gpu/norm.cu and gpu/norm_backward.cu (norms, residual) and gpu/layers.cu (RoPE, embedding,
// loss) against the reference.
#include <array>

#include "../help/gpu.h"

using namespace coat;
using namespace coat::test;

namespace {

constexpr float EPS = 1e-5f;

// A norm with random parameters: what it reads, and its results in double or float.
struct NormCase {
    const int64_t N, C;
    const bool rms;
    const Tensor in, weight, bias;
    const Buffer<gpu::RowStatistics> stats;

    NormCase(Random& rng, RecipeFormats f, bool rms, Shape s)
        : N(s.rows), C(s.cols), rms(rms), in(s, f.saved_inputs),
          weight(normals(rng, f.compute, C), f.compute), bias(normals(rng, f.compute, C), f.compute),
          stats(N) {}
    gpu::Norm norm(const TensorRef& x) const {
        return {x, weight.codes.get(), rms ? nullptr : bias.codes.get(), stats.get(), rms, EPS};
    }
    template <class Real> std::vector<Real> forward(const Tensor& x) const {
        std::vector<Real> y(N * C);
        reference::norm_forward<Real>(rms, EPS, N, C, x.as<Real>().data(), weight.as<Real>().data(),
                                      rms ? nullptr : bias.as<Real>().data(), y.data());
        return y;
    }
    // dx + g, dweight and dbias. These two start from `before`.
    template <class Real>
    std::array<std::vector<Real>, 3> backward(const Tensor& x, const Tensor& dy, const Floats& g,
                                              const Floats& before) const {
        std::vector<Real> dx(g.size()), dw(before.begin(), before.end()), db = dw;
        reference::norm_backward<Real>(rms, EPS, N, C, x.as<Real>().data(), weight.as<Real>().data(),
                                       dy.as<Real>().data(), dx.data(), dw.data(), rms ? nullptr : db.data());
        for (size_t i = 0; i < dx.size(); i++) dx[i] += Real(g[i]);
        return {dx, dw, db};
    }
    // The statistics that a kernel has left: the norm that is computed with them.
    void check_statistics(const Tensor& read) const {
        const Tensor y({N, C}, PLAIN_FP32);
        gpu::write_values(gpu::lazy_norm(norm(read.ref())), y.ref(), 0);
        check_as_float(y.values(), forward<double>(read), forward<float>(read), C);
    }
};

// The gradient of a row of logits. Away from the target it is loss_weight * probability. A probability is
// exp(logit - lse), and FP32 rounds lse, log(sum(exp(logits))), and its product with log2(e), each by up to
// U |lse|: the probability is wrong by that part of itself. The reference in float does not show this: it
// subtracts the largest logit, which mostly is exact.
void check_loss_gradient(Floats got, Doubles exact, Floats in_float, int32_t target, double loss_weight,
                         double lse, Format compute) {
    if (target != NO_TARGET) {  // loss_weight * (probability - 1), where the two cancel
        check_as_float({got[target]}, {exact[target]}, {in_float[target]}, 1, compute,
                       {loss_weight + (exact[target] + loss_weight) * std::abs(lse)});
        got[target] = in_float[target] = 0;
        exact[target] = 0;
    }
    const double largest = *std::max_element(exact.begin(), exact.end());
    check_as_float(got, exact, in_float, int64_t(got.size()), compute,
                   Doubles(got.size(), largest * std::abs(lse)));
}

}  // namespace

GPU_TEST_CASE("residual_add and norm: the sum and its statistics and the norm that follows") {
    SEEDED_RANDOM(rng);
    const auto all = shapes(
        {{1, 16}, {5, 48}, {48, 128}, {19, 768}, {16, 1040}, {6, 2064}, {9, 4096}, {3, 6656}, {2, 16384}});
    for (RecipeFormats f : RECIPE_FORMATS)
        for (bool rms : {true, false})
            for (Shape s : all) {
                INFO(s.cols, rms ? " RMSNorm" : " LayerNorm");
                const TensorFormat compute{f.compute};
                const Tensor x(heavy(rng, f.compute, s.n()), s, compute), plain_sum(s, compute),
                    branch(heavy(rng, f.compute, s.n()), s, compute), y(s, E4M3_PER_TENSOR),
                    values(s, PLAIN_FP32);
                const NormCase c(rng, f, rms, s);
                gpu::residual_add(x.ref(), branch.ref(), c.norm(c.in.ref()), plain_sum.ref(),
                                  y.amax_to_raise(), 0);
                Floats sum = x.values();
                const Floats added = branch.values();
                for (int64_t i = 0; i < s.n(); i++) sum[i] += added[i];
                check_quantized(plain_sum, sum);
                check_quantized(c.in, sum);
                const LazyTensor norm = gpu::lazy_norm(c.norm(c.in.ref()));
                check_lazy(norm, f.compute, c.forward<double>(c.in), c.forward<float>(c.in));
                gpu::write_values(norm, values.ref(), 0);
                CHECK(y.amax() == reference::compute_amax(values.values().data(), s.n()));
            }
}

GPU_TEST_CASE("norm_backward: gradients of input and weight and bias; amax and statistics; always the same") {
    SEEDED_RANDOM(rng);
    const auto all =
        shapes({{1, 16}, {50, 48}, {700, 128}, {2500, 768}, {37, 1040}, {40, 4096}, {9, 6656}, {3, 16384}});
    for (RecipeFormats f : RECIPE_FORMATS)
        for (bool rms : {true, false})
            for (Shape s : all) {
                INFO(s.rows, " x ", s.cols, rms ? " RMSNorm" : " LayerNorm");
                const int64_t n = s.n();
                const TensorFormat compute{f.compute};
                const NormCase c(rng, f, rms, s);
                const Tensor in(heavy(rng, f.compute, n), s, f.saved_inputs),
                    dy(heavy(rng, f.compute, n), s, compute), g(normals(rng, f.compute, n), s, compute);
                const Floats before = normals(rng, f.compute, s.cols);
                const Buffer<float> workspace(gpu::norm_backward_workspace_floats(s.cols));
                Bytes first;
                for (bool add : {true, false, true}) {
                    const Tensor out(s, compute), dweight(before, f.compute), dbias(before, f.compute);
                    gpu::norm_backward(c.norm(in.ref()),
                                       {.dnorm_output = dy.ref(),
                                        .dresidual_in = add ? g.ref() : TensorRef{},
                                        .dresidual_out = out.ref(),
                                        .dresidual_amax_to_raise = out.amax_to_raise(),
                                        .dweight = dweight.ref(),
                                        .dbias = rms ? TensorRef{} : dbias.ref()},
                                       workspace.get(), 0);
                    c.check_statistics(in);
                    const Floats got = out.values(), around = add ? g.values() : Floats(n);
                    CHECK(out.amax() == reference::compute_amax(got.data(), n));
                    const auto exact = c.backward<double>(in, dy, around, before);
                    const auto in_float = c.backward<float>(in, dy, around, before);
                    check_as_float(got, exact[0], in_float[0], s.cols, f.compute);
                    check_as_float(dweight.values(), exact[1], in_float[1], s.cols, f.compute);
                    check_as_float(dbias.values(), exact[2], in_float[2], s.cols, f.compute);
                    if (add && !first.empty()) CHECK(same_bytes(first, out.codes.read()));
                    if (add) first = out.codes.read();
                }
            }
}

GPU_TEST_CASE("embed and embedding_backward: tokens and positions") {
    SEEDED_RANDOM(rng);
    for (RecipeFormats f : RECIPE_FORMATS)
        for (bool positions : {true, false}) {
            const int64_t B = 3, T = 111, N = B * T, C = 272, V = 128, live = 100;
            const TensorFormat compute{f.compute};
            const Floats e = normals(rng, f.compute, V * C), p = normals(rng, f.compute, T * C),
                         g = heavy(rng, f.compute, N * C);
            std::vector<int32_t> tokens(N);  // three of them are frequent
            for (int32_t& t : tokens) t = int32_t(rng.below(3) ? rng.below(3) : rng.below(live));
            const Buffer<int32_t> device_tokens(tokens);
            const Tensor device_e(e, {V, C}, compute), device_p(p, {T, C}, compute),
                device_g(g, {N, C}, compute), x({N, C}, compute);
            const NormCase c(rng, f, true, {N, C});
            gpu::embed(device_e.ref(), positions ? device_p.ref() : TensorRef{}, device_tokens.get(), T,
                       c.norm(c.in.ref()), x.ref(), /*norm_output_amax_to_raise=*/nullptr, 0);
            Floats sum(N * C);
            for (int64_t i = 0; i < N * C; i++)
                sum[i] = e[tokens[i / C] * C + i % C] + (positions ? p[i / C % T * C + i % C] : 0);
            check_quantized(x, sum);
            check_quantized(c.in, sum);
            c.check_statistics(c.in);

            const gpu::EmbeddingOrder order = gpu::embedding_order(tokens.data(), N);
            const int64_t distinct = int64_t(order.token_rows.size());
            REQUIRE(distinct <= live);
            CHECK((0 < order.frequent_count && order.frequent_count < distinct));  // both kernels have tokens
            for (const gpu::TokenRows& t : order.token_rows)  // a token's rows are in order
                CHECK(std::is_sorted(&order.row_order[t.first], &order.row_order[t.first] + t.count));
            const Buffer<int32_t> device_order(order.row_order);
            const Buffer<gpu::TokenRows> token_rows(order.token_rows);
            for (Format format : {f.compute, Format::FP32}) {  // of the gradients
                const Tensor de(e, {V, C}, TensorFormat{format}), dp(p, {T, C}, TensorFormat{format});
                gpu::embedding_backward(device_g.ref(),
                                        {.row_order = device_order.get(),
                                         .token_rows = token_rows.get(),
                                         .count = distinct,
                                         .frequent_count = order.frequent_count},
                                        de.ref(), 0);
                gpu::positions_backward(device_g.ref(), T, dp.ref(), 0);
                check_row_sums(de, e, g, [&](int64_t n) { return tokens[n]; });
                check_row_sums(dp, p, g, [&](int64_t n) { return n % T; });
            }
        }
}

GPU_TEST_CASE("rope and its inverse: q and k are rotated but not v; backward takes the amax") {
    SEEDED_RANDOM(rng);
    for (Format compute : {Format::BF16, Format::FP32})
        for (int64_t HS : {8, 24, 64, 80, 128}) {
            CAPTURE(HS);
            ModelConfig c{.name = "rope",
                          .arch = LLAMA,
                          .L = 1,
                          .C = 4 * HS,
                          .NH = 4,
                          .NKV = 2,
                          .F = 64,
                          .V = 64,
                          .max_T = 256,
                          .tied = true};
            // A head of 64 has frequencies of each kind: kept, interpolated and divided.
            if (HS == 64) c.rope_scaling = {RopeScaling::Llama3, 8, 0.5f, 2, 16};
            const int64_t B = 2, T = 57, N = B * T, cols = c.qkv_cols();
            const Floats x = heavy(rng, compute, N * cols);
            const Buffer<float2> table(8192 * HS / 2);
            gpu::fill_rope_table(c, 8192, table.get(), 0);  // far on, angles need frequencies in double
            const std::vector<float2> angles = table.read();
            for (int64_t i = 0; i < HS / 2; i++) {
                const double angle = 8191 * reference::rope_frequency(c, i);
                const float2 last = angles[8191 * HS / 2 + i];
                CHECK(std::hypot(last.x - std::cos(angle), last.y - std::sin(angle)) <= U);
            }
            const gpu::Rope rope{table.get(), T, HS, c.q_cols() + c.kv_cols()};
            enum { FORWARD, BACKWARD, BACKWARD_WITHOUT_AMAX };
            for (int direction : {FORWARD, BACKWARD, BACKWARD_WITHOUT_AMAX}) {
                CAPTURE(direction);
                Doubles exact = doubles(x);
                Floats in_float = x;
                reference::rope<double>(c, B, T, exact.data(), direction != FORWARD);
                reference::rope<float>(c, B, T, in_float.data(), direction != FORWARD);
                const Tensor got(x, {N, cols}, TensorFormat{compute});
                float* const amax_to_raise = direction == BACKWARD ? got.amax_to_raise() : nullptr;
                gpu::rope(rope, got.ref(), direction != FORWARD, amax_to_raise, 0);
                const Floats values = got.values();
                check_as_float(values, exact, in_float, HS, compute);
                CHECK(got.amax() == (amax_to_raise ? reference::compute_amax(values.data(), N * cols) : 0));
            }
        }
}

GPU_TEST_CASE("qk_norms_and_rope and qk_norms_backward: heads of q and of k have norms; those of v do not") {
    SEEDED_RANDOM(rng);
    for (Format compute : {Format::BF16, Format::FP32})
        for (int64_t HS : {8, 24, 64, 80, 128}) {
            CAPTURE(HS);
            const ModelConfig c{.name = "heads",
                                .arch = QWEN3,
                                .L = 1,
                                .C = 64,
                                .NH = 4,
                                .NKV = 2,
                                .F = 64,
                                .V = 64,
                                .max_T = 256,
                                .tied = true,
                                .head_size = HS};
            const int64_t T = 157, N = 2 * T, cols = c.qkv_cols(), normed = c.q_cols() + c.kv_cols();
            const TensorFormat dense{compute};
            const Floats x = normals(rng, compute, N * cols), dy = normals(rng, compute, N * cols),
                         w = normals(rng, compute, 2 * HS), before = normals(rng, compute, 2 * HS);
            const Buffer<float> workspace(gpu::COLUMN_PARTIALS * normed);
            const Tensor in(x, {N, cols}, dense), out({N, cols}, dense), rotated({N, cols}, dense);
            const Tensor weight(w, compute);
            const gpu::QkNorms n{weight.codes.get(), c.norm_eps, HS, c.q_cols(), c.kv_cols()};
            auto forward = [&](auto y, const auto& weights) {
                reference::qk_norms_forward(c, N, weights.data(), y.data());
                return y;
            };
            // With all angles 0 the result is that of the norms. Else it is what rope() makes of that.
            const Buffer<float2> no_angles(std::vector<float2>(T * HS / 2, float2{1, 0})), angles(T * HS / 2);
            gpu::fill_rope_table(c, T, angles.get(), 0);
            const gpu::Rope rope{angles.get(), T, HS, normed}, no_rope{no_angles.get(), T, HS, normed};
            gpu::qk_norms_and_rope(n, no_rope, in.ref(), out.ref(), 0);
            check_as_float(out.values(), forward(doubles(x), doubles(w)), forward(x, w), HS, compute);
            gpu::qk_norms_and_rope(n, rope, in.ref(), rotated.ref(), 0);
            gpu::rope(rope, out.ref(), /*inverse=*/false, /*amax_to_raise=*/nullptr, 0);
            CHECK(same_bytes(rotated.codes.read(), out.codes.read()));
            auto backward = [&](const auto& xs, const auto& weights, auto dx, auto dw) {
                reference::qk_norms_backward(c, N, xs.data(), weights.data(), dx.data(), dw.data());
                return std::pair(dx, dw);
            };
            const auto exact = backward(doubles(x), doubles(w), doubles(dy), doubles(before));
            const auto in_float = backward(x, w, dy, before);
            Bytes first;
            for (int again : {0, 1}) {
                const Tensor dx(dy, {N, cols}, dense), dweight(before, Format::FP32);
                gpu::qk_norms_backward(n, in.ref(), dx.ref(), dweight.ref(), workspace.get(), 0);
                check_as_float(dx.values(), exact.first, in_float.first, HS, compute);
                check_as_float(dweight.values(), exact.second, in_float.second, HS, Format::FP32);
                if (again) CHECK(same_bytes(first, dweight.codes.read()));
                first = dweight.codes.read();
            }
        }
}

// Columns from V on are NaN: the GEMM that makes the logits may leave anything there.
GPU_TEST_CASE("cross_entropy and add_loss_sum: losses and gradients and their sum") {
    SEEDED_RANDOM(rng);
    // A row of the last one does not fit the shared memory of a block.
    const auto all = shapes({{3, 1}, {5, 50}, {4, 64}, {6, 1001}, {2, 32000}, {3, 50257}, {2, 152064}});
    for (Format compute : {Format::BF16, Format::FP32})
        for (Shape s : all)
            for (double spread : {1.0, 30.0}) {
                const int64_t N = s.rows, V = s.cols, stride = round_up(V, 64);
                CAPTURE(V);
                Floats logits = normals(rng, compute, N * stride, spread);
                for (int64_t i = 0; i < N * stride; i++)
                    if (i % stride >= V) logits[i] = NAN;
                std::vector<int32_t> targets(N);
                for (int32_t& t : targets) t = int32_t(rng.below(V));
                targets[1] = NO_TARGET;
                const Buffer<int32_t> device_targets(targets);
                const Tensor x(logits, {N, stride}, TensorFormat{compute});
                const Bytes unchanged = x.codes.read();
                const Buffer<float> losses(N), losses_only(N);
                Buffer<double> loss_weight(Doubles{0.125});
                gpu::cross_entropy_forward(x.ref(), V, device_targets.get(), losses_only.get(), 0);
                CHECK(same_bytes(x.codes.read(), unchanged));
                gpu::cross_entropy_forward_and_backward(x.ref(), V, device_targets.get(), loss_weight.get(),
                                                        losses.get(), 0);
                const Floats got = losses.read();
                CHECK(same_bytes(losses_only.read(), got));
                CHECK(got[1] == 0);
                const Floats gradient = x.values();
                for (int64_t n = 0; n < N; n++) {
                    const int32_t target = targets[n];
                    const float *const first = &logits[n * stride], *const row = &gradient[n * stride];
                    Floats in_float(first, first + stride);
                    Doubles exact = doubles(in_float);
                    const double loss = reference::cross_entropy_forward_and_backward<double>(
                        1, V, stride, exact.data(), &target, 0.125);
                    const float loss_in_float = float(reference::cross_entropy_forward_and_backward(
                        1, V, stride, in_float.data(), &target, 0.125f));
                    const double lse = target == NO_TARGET ? 0 : loss + first[target];
                    // lse is the largest logit plus log(sum), which is wrong by what part of itself sum is.
                    check_as_float({got[n]}, {loss}, {loss_in_float}, 1, Format::FP32, {1 + std::abs(lse)});
                    check_loss_gradient({row, row + stride}, exact, in_float, target, 0.125, lse, compute);
                }
                const Buffer<double> total(Doubles{2});
                loss_weight.write({0.5});
                gpu::add_loss_sum(losses.get(), N, loss_weight.get(), total.get(), 0);
                double wanted = 2;
                for (float l : got) wanted += 0.5 * l;
                CHECK(total.read()[0] == doctest::Approx(wanted).epsilon(1e-14));
            }
}
