// 4_operators.cpp - the forward operators in reference/operators.cpp, by definition. Backward: 5_gradients.cpp.
#include <array>

#include "../help/model.h"

using namespace coat;
using namespace coat::test;
using namespace coat::reference;

const double NOT_WRITTEN = std::numeric_limits<double>::quiet_NaN();

// Heads whose frequencies are scaled, if there are several.
static ModelConfig heads(int64_t NH, int64_t NKV, int64_t HS) {
    ModelConfig c{.name = "test",
                  .arch = LLAMA,
                  .L = 1,
                  .C = NH * HS,
                  .NH = NH,
                  .NKV = NKV,
                  .F = 16,
                  .V = 16,
                  .max_T = 64,
                  .tied = true};
    if (NH > 1) c.rope_scaling = {RopeScaling::Llama3, 8, 0.5f, 2, 16};
    return c;
}
const std::tuple<int64_t, int64_t, ModelConfig> HEADS[] = {{1, 1, heads(1, 1, 8)},
                                                           {2, 5, heads(4, 2, 8)},
                                                           {1, 7, heads(4, 1, 8)},
                                                           {2, 3, heads(2, 2, 16)},
                                                           {1, 9, heads(6, 3, 8)}};  // B, T, and such heads

// Causal attention by its definition: softmax(q k / sqrt(HS)) v. NH / NKV query heads share a key head.
void attention_by_definition(const ModelConfig& c, int64_t B, int64_t T, const Doubles& qkv, Doubles& out,
                             Doubles& lse) {
    const int64_t HS = c.HS();
    for (int64_t n = 0; n < B * T; n++)
        for (int64_t h = 0; h < c.NH; h++) {
            const double* q = &qkv[size_t(n * c.qkv_cols() + h * HS)];
            double sum = 0;
            Doubles weighted(size_t(HS), 0.0);
            for (int64_t key = n - n % T; key <= n; key++) {  // from the first token of the sequence on
                const double* k = &qkv[size_t(key * c.qkv_cols() + c.q_cols() + h / (c.NH / c.NKV) * HS)];
                const double* v = k + c.kv_cols();
                const double weight = std::exp(std::inner_product(q, q + HS, k, 0.0) / std::sqrt(double(HS)));
                sum += weight;
                for (int64_t i = 0; i < HS; i++) weighted[size_t(i)] += weight * v[i];
            }
            lse[size_t((n / T * c.NH + h) * T + n % T)] = std::log(sum);
            for (int64_t i = 0; i < HS; i++) out[size_t((n * c.NH + h) * HS + i)] = weighted[size_t(i)] / sum;
        }
}

TEST_CASE("matmul: adds the product of the triple loop for every layout") {
    SEEDED_RANDOM(rng);
    const std::array<int64_t, 3> sizes[] = {{1, 1, 1},   {3, 5, 7},    {16, 16, 16}, {17, 33, 65},
                                            {1, 100, 3}, {129, 1, 20}, {5, 70, 600}};
    for (const auto& [M, N, K] : sizes)
        for (int layout = 0; layout < 4; layout++) {
            const auto a = rng.normals<float>(M * K), b = rng.normals<float>(K * N),
                       before = rng.normals<float>(M * N);
            const bool a_transposed = layout & 1, b_transposed = layout & 2;
            const MatrixView<float> A{a.data(), a_transposed ? 1 : K, a_transposed ? M : 1},
                B{b.data(), b_transposed ? 1 : N, b_transposed ? K : 1};
            Floats c = before;
            matmul(M, N, K, A, B, c.data());
            for (int64_t i = 0; i < M * N; i++) {
                double sum = before[size_t(i)], size = std::fabs(sum);
                for (int64_t k = 0; k < K; k++) {
                    const double term = double(a[size_t(i / N * A.row_stride + k * A.col_stride)]) *
                                        double(b[size_t(k * B.row_stride + i % N * B.col_stride)]);
                    sum += term;
                    size += std::fabs(term);
                }
                INFO(M, "x", N, "x", K, " layout ", layout);
                // K products and K + 1 partial sums are rounded, each at most the sum of magnitudes.
                REQUIRE(std::fabs(double(c[size_t(i)]) - sum) <= double(K + 5) * 0x1p-24 * size);
            }
        }
}

TEST_CASE("norm_forward: RMSNorm and LayerNorm match their definition") {
    SEEDED_RANDOM(rng);
    for (bool rms : {true, false})
        for (int64_t C : {1, 2, 7, 16, 33}) {
            const Doubles x = rng.normals<double>(3 * C, 2), weight = rng.normals<double>(C),
                          bias = rng.normals<double>(C);
            const double eps = 1e-2;  // large, so that it matters
            Doubles y(x.size(), NOT_WRITTEN);
            norm_forward(rms, eps, 3, C, x.data(), weight.data(), rms ? nullptr : bias.data(), y.data());
            for (size_t i = 0; i < y.size(); i++) {
                const double* row = &x[i / size_t(C) * size_t(C)];
                double mean = 0, square = 0;
                for (int64_t c = 0; c < C && !rms; c++) mean += row[c] / double(C);
                for (int64_t c = 0; c < C; c++) square += (row[c] - mean) * (row[c] - mean) / double(C);
                const size_t c = i % size_t(C);
                CHECK(std::fabs(y[i] - (x[i] - mean) / std::sqrt(square + eps) * weight[c] -
                                (rms ? 0 : bias[c])) < 1e-13);
            }
        }
}

TEST_CASE("activation_forward: SwiGLU and GELU match their definition") {
    SEEDED_RANDOM(rng);
    const int64_t N = 3, F = 11;
    for (bool gated : {true, false}) {
        Doubles gate_up = rng.normals<double>(N * F * (gated ? 2 : 1), 3), act(N * F, NOT_WRITTEN);
        gate_up[0] = 0;
        gate_up[1] = 30;
        gate_up[2] = -30;
        activation_forward(gated, N, F, gate_up.data(), act.data());
        for (int64_t i = 0; i < N * F; i++) {
            const double a = gate_up[size_t(gated ? i / F * 2 * F + i % F : i)],
                         b = gated ? gate_up[size_t(i / F * 2 * F + F + i % F)] : 0;
            const double expected =
                gated ? a / (1 + std::exp(-a)) * b
                      : 0.5 * a * (1 + std::tanh(std::sqrt(2 / M_PI) * (a + 0.044715 * a * a * a)));
            CHECK(std::fabs(act[size_t(i)] - expected) <= 1e-12 * (1 + std::fabs(expected)));
        }
    }
}

TEST_CASE("activation_forward and activation_backward: finite in FP32 for inputs of any size") {
    for (bool gated : {true, false})
        for (float x :
             {-3e38f, -1e20f, -1e10f, -1e3f, -90.0f, -88.0f, 88.0f, 90.0f, 1e3f, 1e10f, 1e20f, 3e38f}) {
            float gate_up[2] = {x, 1.0f}, dact = 1, act, dgate_up[2] = {0, 0};
            activation_forward(gated, 1, 1, gate_up, &act);
            activation_backward(gated, 1, 1, gate_up, &dact, dgate_up);
            INFO("x ", x, " gated ", gated);
            CHECK(double(act) == doctest::Approx(x > 0 ? double(x) : 0).epsilon(1e-6));
            CHECK(double(dgate_up[0]) == doctest::Approx(x > 0 ? 1 : 0).epsilon(1e-6));
        }
}

TEST_CASE("rope_frequency: scaling of type llama3 gives the values of transformers") {
    // What transformers 5.17 computes for the published Llama 3.2 (factor 32) and 3.1 (factor 8), in double.
    // In the first, 14 is the last that is kept, and 18 the first that is divided.
    const std::tuple<const char*, int64_t, double> rows[] = {
        {"llama-3.2-1b", 14, 3.211445994753e-03}, {"llama-3.2-1b", 15, 1.290547928209e-03},
        {"llama-3.2-1b", 17, 9.708287802628e-05}, {"llama-3.2-1b", 18, 1.946163818483e-05},
        {"llama-3.1-8b", 29, 2.166570763503e-03}, {"llama-3.1-8b", 63, 3.068925988915e-07}};
    for (const auto& [model, i, frequency] : rows) {
        INFO(model, " ", i);
        CHECK(rope_frequency(find_row(known_models(), model, ""), i) ==
              doctest::Approx(frequency).epsilon(1e-11));
    }
    for (bool scaled : {false, true})
        for (int i = 0; i < 64; i++) {
            const double f = std::pow(1e4, -i / 64.0), rotations = 16 * f / (2 * M_PI);
            const double kept = scaled ? std::clamp((rotations - 0.5) / (2 - 0.5), 0.0, 1.0) : 1;
            CHECK(rope_frequency(heads(scaled ? 2 : 1, 1, 128), i) ==
                  doctest::Approx(f * (kept + (1 - kept) / 8)).epsilon(1e-12));
        }
}

TEST_CASE("rope: rotates the pairs of a head by t rope_frequency(i) and the inverse undoes it") {
    SEEDED_RANDOM(rng);
    for (const auto& [B, T, c] : HEADS) {
        const Doubles x = rng.normals<double>(B * T * c.qkv_cols());
        Doubles y = x;
        rope(c, B, T, y.data(), false);
        for (int64_t at = 0; at < int64_t(x.size()); at++) {
            const int64_t n = at / c.qkv_cols(), column = at % c.qkv_cols();
            const int64_t i = column % c.HS(), half = c.HS() / 2, sign = i < half ? -1 : 1;
            const double angle = double(n % T) * rope_frequency(c, i % half);
            const double rotated = x[size_t(at)] * std::cos(angle) +
                                   double(sign) * x[size_t(at - sign * half)] * std::sin(angle);
            const bool rotates = column < c.q_cols() + c.kv_cols();  // v is not rotated
            // Angles may be computed in FP32.
            REQUIRE(std::fabs(y[size_t(at)] - (rotates ? rotated : x[size_t(at)])) < 1e-6);
        }
        rope(c, B, T, y.data(), true);
        CHECK(relative_error(y, x) < 1e-6);
    }
}

TEST_CASE("attention_forward: matches its definition and does not overflow") {
    SEEDED_RANDOM(rng);
    for (const auto& [B, T, c] : HEADS) {
        INFO(c.NH, " heads");
        const Doubles qkv = rng.normals<double>(B * T * c.qkv_cols());
        Doubles out(size_t(B * T * c.q_cols()), NOT_WRITTEN), lse(size_t(B * c.NH * T), NOT_WRITTEN);
        Doubles expected = out, expected_lse = lse;
        attention_forward(c, B, T, qkv.data(), out.data(), lse.data());
        attention_by_definition(c, B, T, qkv, expected, expected_lse);
        CHECK(relative_error(out, expected) < 1e-13);
        CHECK(relative_error(lse, expected_lse) < 1e-13);
    }
    Floats qkv, out(3 * 8), lse(3);
    for (int64_t i = 0; i < 3 * 24; i++) qkv.push_back(1e10f * float(i / 24));  // scores up to 1e21
    attention_forward(heads(1, 1, 8), 1, 3, qkv.data(), out.data(), lse.data());
    for (size_t i = 0; i < out.size(); i++) CHECK(out[i] == 1e10f * float(i / 8));  // the last score wins
}

TEST_CASE("cross_entropy: loss and gradient over the live columns and none where a target is not scored") {
    SEEDED_RANDOM(rng);
    const int64_t N = 6, V = 7, stride = 16;
    const int32_t targets[] = {0, 6, NO_TARGET, 3, 3, 1};
    const Doubles logits = rng.normals<double>(N * stride, 3);
    Doubles gradient = logits;
    const double loss_weight = 0.3;
    const double loss =
        cross_entropy_forward_and_backward(N, V, stride, gradient.data(), targets, loss_weight);
    double expected = 0;
    for (int64_t n = 0; n < N; n++) {
        const double* row = &logits[size_t(n * stride)];
        double sum = 0;
        for (int64_t v = 0; v < V; v++) sum += std::exp(row[v]);
        const bool counts = targets[n] != NO_TARGET;
        if (counts) expected += std::log(sum) - row[targets[n]];
        for (int64_t v = 0; v < stride; v++) {  // columns from V on are padding of the vocabulary
            const double gradient_of_loss = std::exp(row[v]) / sum - (v == targets[n]);
            const double wanted = counts && v < V ? loss_weight * gradient_of_loss : 0;
            CHECK(std::fabs(gradient[size_t(n * stride + v)] - wanted) <= 1e-15);
        }
    }
    CHECK(loss == doctest::Approx(expected).epsilon(1e-12));
    Floats large = {-1e30f, 1e30f, 0, 0};
    const int32_t first = 0;
    CHECK(cross_entropy_forward_and_backward(1, 4, 4, large.data(), &first, 1.0f) == doctest::Approx(2e30));
    CHECK(large[0] == -1);
    CHECK(large[1] == 1);
    CHECK(large[2] == 0);
}
