// test_gradients.cpp - every backward against finite differences in double, and the recipes' gradients against each other.
//
// The operators are templates, so their formulas are tested in double, where a central difference with step h = 1e-5 is wrong by
// about h^2 |f'''| / 6 = 1e-10 and eps |f| / h = 1e-11: the tolerance of 1e-7 leaves room for third derivatives of 1000.
#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <limits>

#include "../reference.h"
#include "random.h"
#include "tiny.h"

using namespace coat;
using namespace coat::test;
using namespace coat::reference;

namespace {

using Vector = std::vector<double>;
constexpr double STEP = 1e-5, TOLERANCE = 1e-7;
const double NOT_WRITTEN = std::numeric_limits<double>::quiet_NaN();

double dot(const Vector& a, const Vector& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); i++) sum += a[i] * b[i];
    return sum;
}

// Slope of f at x along a direction.
double slope(const std::function<double(const Vector&)>& f, const Vector& x, const Vector& direction) {
    Vector ahead = x, behind = x;
    for (size_t i = 0; i < x.size(); i++) ahead[i] += STEP * direction[i], behind[i] -= STEP * direction[i];
    return (f(ahead) - f(behind)) / (2 * STEP);
}

// Every entry of the gradient of f at x.
void check_gradient(const char* what, const std::function<double(const Vector&)>& f, const Vector& x, const Vector& gradient) {
    REQUIRE(gradient.size() == x.size());
    const double size = std::max(1.0, norm(gradient));
    for (size_t i = 0; i < x.size(); i++) {
        Vector unit(x.size());
        unit[i] = 1;
        INFO(std::string(what), ", entry ", i);
        REQUIRE(std::fabs(slope(f, x, unit) - gradient[i]) <= TOLERANCE * size);
    }
}

ModelConfig attention_config(int64_t NH, int64_t NKV, int64_t HS) {
    ModelConfig c{"test", LLAMA, 1, NH * HS, NH, NKV, 16, 16, 64, true};
    return c;
}

// Causal attention from its definition: softmax(q k / sqrt(HS)) v, query heads in turn sharing NH / NKV to a key head.
void attention_by_definition(const ModelConfig& c, int64_t B, int64_t T, const Vector& qkv, Vector& out, Vector& lse) {
    const int64_t HS = c.HS(), row = c.qkv_cols();
    auto at = [&](int64_t b, int64_t t, int64_t column) { return qkv[size_t((b * T + t) * row + column)]; };
    for (int64_t b = 0; b < B; b++)
        for (int64_t h = 0; h < c.NH; h++)
            for (int64_t t = 0; t < T; t++) {
                const int64_t q = h * HS, k = c.q_cols() + h / (c.NH / c.NKV) * HS, v = k + c.kv_cols();
                Vector weight;
                double sum = 0;
                for (int64_t s = 0; s <= t; s++) {
                    double score = 0;
                    for (int64_t i = 0; i < HS; i++) score += at(b, t, q + i) * at(b, s, k + i);
                    weight.push_back(std::exp(score / std::sqrt(double(HS))));
                    sum += weight.back();
                }
                lse[size_t((b * c.NH + h) * T + t)] = std::log(sum);
                for (int64_t i = 0; i < HS; i++) {
                    double o = 0;
                    for (int64_t s = 0; s <= t; s++) o += weight[size_t(s)] / sum * at(b, s, v + i);
                    out[size_t((b * T + t) * c.q_cols() + h * HS + i)] = o;
                }
            }
}

struct HeadShape {
    int64_t B, T, NH, NKV, HS;
};
constexpr HeadShape HEADS[] = {{1, 1, 1, 1, 8}, {2, 5, 4, 2, 8}, {1, 7, 4, 1, 8}, {2, 3, 2, 2, 16}, {1, 9, 6, 3, 8}};

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Operators

TEST_CASE("gradients: matmul is the triple loop for every layout, and adds where asked to") {
    FRESH_RANDOM(rng);
    struct Size { int64_t M, N, K; };
    for (Size z : {Size{1, 1, 1}, {3, 5, 7}, {16, 16, 16}, {17, 33, 65}, {64, 48, 130}, {1, 100, 3}, {129, 1, 20}, {5, 70, 300}})
        for (int layout = 0; layout < 8; layout++) {
            const bool a_transposed = layout & 1, b_transposed = layout & 2, accumulate = layout & 4;
            const Vector a = rng.normals<double>(z.M * z.K), b = rng.normals<double>(z.K * z.N), before = rng.normals<double>(z.M * z.N);
            const std::vector<float> a32(a.begin(), a.end()), b32(b.begin(), b.end());
            const Matrix<double> A{a.data(), a_transposed ? 1 : z.K, a_transposed ? z.M : 1}, B{b.data(), b_transposed ? 1 : z.N, b_transposed ? z.K : 1};
            const Matrix<float> A32{a32.data(), A.row, A.col}, B32{b32.data(), B.row, B.col};
            Vector c = accumulate ? before : Vector(before.size(), NOT_WRITTEN);
            std::vector<float> c32(c.begin(), c.end());
            matmul(z.M, z.N, z.K, A, B, c.data(), accumulate);
            matmul(z.M, z.N, z.K, A32, B32, c32.data(), accumulate);
            for (int64_t m = 0; m < z.M; m++)
                for (int64_t n = 0; n < z.N; n++) {
                    double sum = accumulate ? before[size_t(m * z.N + n)] : 0, size = std::fabs(sum);
                    for (int64_t k = 0; k < z.K; k++) {
                        const double term = a[size_t(m * A.row + k * A.col)] * b[size_t(k * B.row + n * B.col)];
                        sum += term, size += std::fabs(term);
                    }
                    INFO(z.M, "x", z.N, "x", z.K, " layout ", layout);
                    // K + 1 roundings of partial sums, each at most the sum of magnitudes; inputs and products round in FP32 as well
                    REQUIRE(std::fabs(c[size_t(m * z.N + n)] - sum) <= double(z.K + 2) * 0x1p-53 * size);
                    REQUIRE(std::fabs(double(c32[size_t(m * z.N + n)]) - sum) <= double(z.K + 5) * 0x1p-24 * size);
                }
        }
}

TEST_CASE("gradients: RMSNorm and LayerNorm") {
    FRESH_RANDOM(rng);
    for (bool rms : {true, false})
        for (int64_t C : {1, 2, 7, 16, 33}) {
            if (!rms && C < 3) continue;  // LayerNorm of one or two numbers is a step function
            const int64_t N = 3;
            const Vector x = rng.normals<double>(N * C, 2), gain = rng.normals<double>(C), bias = rng.normals<double>(C), dy = rng.normals<double>(N * C);
            const double eps = 1e-2;  // large, so that a backward that forgets it fails
            auto loss = [&](const Vector& x_, const Vector& gain_, const Vector& bias_) {
                Vector y(x_.size(), NOT_WRITTEN);
                norm_forward(rms, eps, N, C, x_.data(), gain_.data(), rms ? nullptr : bias_.data(), y.data());
                return dot(y, dy);
            };
            Vector dx(x.size(), NOT_WRITTEN), dgain(gain.size(), 10), dbias(gain.size(), 20);  // added to, not assigned
            norm_backward(rms, eps, N, C, x.data(), gain.data(), dy.data(), dx.data(), dgain.data(), rms ? nullptr : dbias.data());
            for (double& v : dgain) v -= 10;
            for (double& v : dbias) v -= 20;
            check_gradient("x", [&](const Vector& z) { return loss(z, gain, bias); }, x, dx);
            check_gradient("gain", [&](const Vector& z) { return loss(x, z, bias); }, gain, dgain);
            check_gradient("bias", [&](const Vector& z) { return loss(x, gain, z); }, bias, rms ? Vector(gain.size()) : dbias);
        }
}

TEST_CASE("gradients: norms by their definition") {
    FRESH_RANDOM(rng);
    const int64_t C = 37;
    const Vector x = rng.normals<double>(C, 3), gain = rng.normals<double>(C), bias = rng.normals<double>(C);
    double mean = 0, square = 0, variance = 0;
    for (double v : x) mean += v / C, square += v * v / C;
    for (double v : x) variance += (v - mean) * (v - mean) / C;
    Vector rms(size_t(C), NOT_WRITTEN), layer(size_t(C), NOT_WRITTEN);
    norm_forward<double>(true, 1e-5, 1, C, x.data(), gain.data(), nullptr, rms.data());
    norm_forward<double>(false, 1e-5, 1, C, x.data(), gain.data(), bias.data(), layer.data());
    for (size_t i = 0; i < x.size(); i++) {
        CHECK(std::fabs(rms[i] - x[i] / std::sqrt(square + 1e-5) * gain[i]) < 1e-13);
        CHECK(std::fabs(layer[i] - ((x[i] - mean) / std::sqrt(variance + 1e-5) * gain[i] + bias[i])) < 1e-13);
    }
}

TEST_CASE("gradients: SiLU(gate) * up and GELU, by their definition and by differences") {
    FRESH_RANDOM(rng);
    const int64_t N = 3, F = 11;
    for (bool gated : {true, false}) {
        Vector up = rng.normals<double>(N * F * (gated ? 2 : 1), 3), dh = rng.normals<double>(N * F);
        up[0] = 0, up[1] = 30, up[2] = -30;
        Vector h(dh.size(), NOT_WRITTEN), dup(up.size(), NOT_WRITTEN);
        activation_forward(gated, N, F, up.data(), h.data());
        for (int64_t i = 0; i < N * F; i++) {
            const double a = up[size_t(gated ? i / F * 2 * F + i % F : i)], b = gated ? up[size_t(i / F * 2 * F + F + i % F)] : 0;
            const double wanted = gated ? a / (1 + std::exp(-a)) * b : 0.5 * a * (1 + std::tanh(std::sqrt(2 / M_PI) * (a + 0.044715 * a * a * a)));
            CHECK(std::fabs(h[size_t(i)] - wanted) <= 1e-12 * (1 + std::fabs(wanted)));
        }
        activation_backward(gated, N, F, up.data(), dh.data(), dup.data());
        auto loss = [&](const Vector& z) {
            Vector y(dh.size());
            activation_forward(gated, N, F, z.data(), y.data());
            return dot(y, dh);
        };
        check_gradient(gated ? "gate, up" : "GELU", loss, up, dup);
    }
}

TEST_CASE("gradients: activations in FP32 stay finite for inputs of any size") {
    for (bool gated : {true, false})
        for (float x : {-3e38f, -1e20f, -1e10f, -1e3f, -90.0f, -88.0f, 88.0f, 90.0f, 1e3f, 1e10f, 1e20f, 3e38f}) {
            float up[2] = {x, 1.0f}, dh = 1, h, dup[2] = {0, 0};
            activation_forward(gated, 1, 1, up, &h);
            activation_backward(gated, 1, 1, up, &dh, dup);
            INFO("x ", x, " gated ", gated);
            CHECK(double(h) == doctest::Approx(x > 0 ? double(x) : 0).epsilon(1e-6));
            CHECK(double(dup[0]) == doctest::Approx(x > 0 ? 1 : 0).epsilon(1e-6));
        }
}

TEST_CASE("gradients: RoPE rotates pairs (i, i + HS/2) by t theta^(-2i/HS), and its backward turns them back") {
    FRESH_RANDOM(rng);
    for (HeadShape z : HEADS) {
        const ModelConfig c = attention_config(z.NH, z.NKV, z.HS);
        const Vector x = rng.normals<double>(z.B * z.T * c.qkv_cols());
        Vector y = x;
        rope(c, z.B, z.T, y.data(), false);
        for (int64_t n = 0; n < z.B * z.T; n++)
            for (int64_t j = 0; j < c.qkv_cols(); j++) {
                const size_t row = size_t(n * c.qkv_cols());
                const int64_t i = j % z.HS, half = z.HS / 2;
                const double angle = double(n % z.T) * std::pow(double(c.rope_theta), -2.0 * double(i % half) / double(z.HS));
                const double other = x[row + size_t(i < half ? j + half : j - half)];
                const double rotated = x[row + size_t(j)] * std::cos(angle) + (i < half ? -1 : 1) * other * std::sin(angle);
                const bool turns = j < c.q_cols() + c.kv_cols();  // v stays
                REQUIRE(std::fabs(y[row + size_t(j)] - (turns ? rotated : x[row + size_t(j)])) < 1e-6);  // angles may be FP32
            }
        rope(c, z.B, z.T, y.data(), true);
        CHECK(relative_error(y, x) < 1e-6);
        // A rotation's backward is its inverse: <rope(a), b> = <a, inverse(b)>.
        Vector a = x, b = rng.normals<double>(int64_t(x.size())), inverse = b;
        rope(c, z.B, z.T, a.data(), false);
        rope(c, z.B, z.T, inverse.data(), true);
        CHECK(std::fabs(dot(a, b) - dot(x, inverse)) < 1e-12 * norm(x) * norm(b));
    }
}

TEST_CASE("gradients: attention by its definition, with grouped queries and any length") {
    FRESH_RANDOM(rng);
    for (HeadShape z : HEADS) {
        const ModelConfig c = attention_config(z.NH, z.NKV, z.HS);
        const Vector qkv = rng.normals<double>(z.B * z.T * c.qkv_cols());
        Vector out(size_t(z.B * z.T * c.q_cols()), NOT_WRITTEN), lse(size_t(z.B * c.NH * z.T), NOT_WRITTEN), wanted = out, wanted_lse = lse;
        attention_forward(c, z.B, z.T, qkv.data(), out.data(), lse.data());
        attention_by_definition(c, z.B, z.T, qkv, wanted, wanted_lse);
        CHECK(relative_error(out, wanted) < 1e-13);
        CHECK(relative_error(lse, wanted_lse) < 1e-13);
    }
}

TEST_CASE("gradients: attention backward, with grouped queries and any length") {
    FRESH_RANDOM(rng);
    for (HeadShape z : HEADS) {
        const ModelConfig c = attention_config(z.NH, z.NKV, z.HS);
        const Vector qkv = rng.normals<double>(z.B * z.T * c.qkv_cols());
        Vector out(size_t(z.B * z.T * c.q_cols())), lse(size_t(z.B * c.NH * z.T)), dqkv(qkv.size(), NOT_WRITTEN);
        const Vector dout = rng.normals<double>(int64_t(out.size()));
        attention_forward(c, z.B, z.T, qkv.data(), out.data(), lse.data());
        attention_backward(c, z.B, z.T, qkv.data(), out.data(), lse.data(), dout.data(), dqkv.data());
        auto loss = [&](const Vector& x) {
            Vector o(out.size()), l(lse.size());
            attention_forward(c, z.B, z.T, x.data(), o.data(), l.data());
            return dot(o, dout);
        };
        INFO("B ", z.B, " T ", z.T, " heads ", z.NH, "/", z.NKV);
        check_gradient("qkv", loss, qkv, dqkv);
    }
}

TEST_CASE("gradients: attention does not see the future and does not overflow") {
    FRESH_RANDOM(rng);
    const ModelConfig c = attention_config(4, 2, 8);
    const int64_t T = 9, row = c.qkv_cols();
    std::vector<float> qkv = rng.normals<float>(T * row), out(size_t(T * c.q_cols())), lse(size_t(c.NH * T)), later = out;
    attention_forward(c, 1, T, qkv.data(), out.data(), lse.data());
    for (size_t i = size_t(6 * row); i < qkv.size(); i++) qkv[i] = 1e10f;  // scores of 3e20, tokens 6 to 8
    attention_forward(c, 1, T, qkv.data(), later.data(), lse.data());
    CHECK(std::equal(out.begin(), out.begin() + 6 * c.q_cols(), later.begin()));
    for (float v : later) REQUIRE(std::isfinite(v));
}

TEST_CASE("gradients: cross-entropy over the live columns") {
    FRESH_RANDOM(rng);
    const int64_t N = 5, V = 7, stride = 16;
    const Vector logits = rng.normals<double>(N * stride, 3);
    const int32_t targets[] = {0, 6, 3, 3, 1};
    auto loss = [&](const Vector& x) {
        Vector z = x;
        return cross_entropy(N, V, stride, z.data(), targets, 1.0);
    };
    double wanted = 0;
    for (int64_t n = 0; n < N; n++) {
        double sum = 0;
        for (int64_t i = 0; i < V; i++) sum += std::exp(logits[size_t(n * stride + i)]);
        wanted += std::log(sum) - logits[size_t(n * stride + targets[n])];
    }
    CHECK(std::fabs(loss(logits) - wanted) < 1e-12 * wanted);
    Vector gradient = logits;
    const double scale = 0.3;
    cross_entropy(N, V, stride, gradient.data(), targets, scale);
    check_gradient("logits", [&](const Vector& x) { return scale * loss(x); }, logits, gradient);
    for (int64_t n = 0; n < N; n++)
        for (int64_t i = V; i < stride; i++) CHECK(gradient[size_t(n * stride + i)] == 0);  // the vocabulary's padding
    std::vector<float> large = {1e30f, -1e30f, 0, 0};
    const int32_t second = 1;
    CHECK(cross_entropy(1, 4, 4, large.data(), &second, 1.0f) == doctest::Approx(2e30));
    CHECK((large[0] == 1 && large[1] == -1 && large[2] == 0));
}

// ---------------------------------------------------------------------------------------------------------------------
// The whole model

namespace {

struct Case {
    const char* name;
    ModelConfig config;
};

std::vector<Case> model_cases() {
    return {{"Llama, untied, grouped queries", {"test", LLAMA, 2, 32, 4, 2, 48, 11, 16, false}},
            {"Llama, tied, one key head, its own head size", {"test", LLAMA, 2, 16, 2, 1, 16, 11, 16, true, 1e-3f, 100.0f, 16}},
            {"GPT-2", {"test", GPT2, 2, 16, 2, 2, 32, 11, 16, true}}};
}

// Weights large enough that every part of the model matters; rows of the vocabulary's padding are zero.
std::vector<Vector> random_weights(const ModelConfig& c, Random& rng) {
    std::vector<Vector> weights;
    for (const Param& p : parameters(c)) {
        Vector w = rng.normals<double>(p.size(), 0.3);
        for (double& v : w) v += p.role.gain ? 1 : 0;
        std::fill(w.begin() + live_elements(c, p), w.end(), 0.0);
        weights.push_back(w);
    }
    return weights;
}

std::vector<int32_t> random_tokens(const ModelConfig& c, Random& rng, int64_t n) {
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < n; i++) tokens.push_back(int32_t(rng.below(c.V)));
    return tokens;
}

}  // namespace

TEST_CASE("gradients: the whole model in double against differences, every parameter") {
    FRESH_RANDOM(rng);
    const int64_t B = 2, T = 5;
    for (const Case& test : model_cases()) {
        const ModelConfig& c = test.config;
        validate(c);
        std::vector<Vector> weights = random_weights(c, rng), gradients;
        const std::vector<int32_t> tokens = random_tokens(c, rng, B * T), targets = random_tokens(c, rng, B * T);
        loss_in_double(c, B, T, weights, tokens.data(), targets.data(), &gradients);
        const std::vector<Param> params = parameters(c);
        REQUIRE(gradients.size() == params.size());
        for (size_t p = 0; p < params.size(); p++) {
            INFO(std::string(test.name), ": ", params[p].name);
            REQUIRE(int64_t(gradients[p].size()) == params[p].size());
            CHECK(norm(gradients[p]) > 0);
            auto loss = [&](const Vector& w) {
                std::vector<Vector> changed = weights;
                changed[p] = w;
                return loss_in_double(c, B, T, changed, tokens.data(), targets.data(), nullptr);
            };
            const int64_t live = live_elements(c, params[p]);
            for (int64_t i = live; i < params[p].size(); i++) REQUIRE(gradients[p][size_t(i)] == 0);
            for (int64_t entry = 0; entry < count(6, 3); entry++) {
                Vector unit(weights[p].size());
                const size_t i = size_t(rng.below(live));
                unit[i] = 1;
                CHECK(std::fabs(slope(loss, weights[p], unit) - gradients[p][i]) <= TOLERANCE * std::max(1.0, norm(gradients[p])));
            }
            for (int direction = 0; direction < 2; direction++) {  // all entries at once
                Vector d = rng.normals<double>(params[p].size());
                std::fill(d.begin() + live, d.end(), 0.0);
                const double length = norm(d);
                for (double& v : d) v /= length;
                CHECK(std::fabs(slope(loss, weights[p], d) - dot(gradients[p], d)) <= TOLERANCE * std::max(1.0, norm(gradients[p])));
            }
        }
    }
}

TEST_CASE("gradients: the loss of a model that knows nothing is log V") {
    FRESH_RANDOM(rng);
    const ModelConfig c = model_cases()[0].config;
    std::vector<Vector> weights = random_weights(c, rng);
    std::fill(weights.back().begin(), weights.back().end(), 0.0);  // the head, the last of the table
    REQUIRE(parameters(c).back().name == "head");
    const std::vector<int32_t> tokens = random_tokens(c, rng, 10);
    CHECK(std::fabs(loss_in_double(c, 2, 5, weights, tokens.data(), tokens.data(), nullptr) - std::log(11.0)) < 1e-12);
}

namespace {

// A model of a recipe with the given weights, and the gradients of one step.
struct GradientRun {
    std::vector<std::vector<float>> gradients;
    double loss, norm;
};

GradientRun gradients_of(const Setup& setup, const std::vector<std::vector<float>>& weights, const std::vector<int32_t>& tokens,
                         const std::vector<int32_t>& targets) {
    const std::unique_ptr<Model> model = make_reference(setup);
    const std::vector<Param> params = parameters(setup.config);
    for (size_t p = 0; p < params.size(); p++) {
        std::vector<uint16_t> upper(weights[p].size());
        std::vector<int16_t> lower(weights[p].size());
        for (size_t i = 0; i < upper.size(); i++) split_master(weights[p][i], &upper[i], &lower[i]);
        model->write(params[p].name, upper.data());
        model->write(params[p].name + ".remainder", lower.data());
    }
    // Delayed scales come from a step before, which changes nothing but them.
    if (setup.recipe.scaling == Scaling::Delayed) model->step(tokens.data(), targets.data(), AdamW{1, 0.0f});
    const StepResult result = model->step(tokens.data(), targets.data(), AdamW{1, 1e-3f});
    GradientRun run{{}, result.loss, result.grad_norm};
    for (const Param& p : params) run.gradients.push_back(read_as<float>(*model, p.name + ".gradient", p.size()));
    return run;
}

std::vector<std::vector<float>> rounded(const std::vector<Vector>& weights, Format f) {
    std::vector<std::vector<float>> result;
    for (const Vector& w : weights) {
        result.emplace_back(w.begin(), w.end());
        for (float& x : result.back()) x = round_to(f, x);
    }
    return result;
}

// As they start, but for biases, which would be zero; in BF16.
std::vector<std::vector<float>> starting_weights(const ModelConfig& c, Random& rng) {
    std::vector<Vector> weights;
    for (const Param& p : parameters(c)) {
        Vector w = rng.normals<double>(p.size(), p.init_std > 0 ? double(p.init_std) : 0.02);
        for (double& v : w) v += p.role.gain ? 1 : 0;
        std::fill(w.begin() + live_elements(c, p), w.end(), 0.0);
        weights.push_back(w);
    }
    return rounded(weights, Format::BF16);
}

// Root mean square of a format's relative rounding error: uniform within half a step, which is at most 2^-(mantissa+1).
double rms_error(Format f) { return std::ldexp(1.0, -info(f).mantissa - 1) / std::sqrt(3.0); }

}  // namespace

TEST_CASE("gradients: the fp32 recipe's are those in double, up to FP32's rounding") {
    // A gradient is at the end of L layers forward and backward, about 10 sums each, of K = F or N terms; a sum's independent
    // roundings gather to sqrt(K) 2^-24 of its size.
    FRESH_RANDOM(rng);
    const int64_t B = 2, T = 8;
    for (const Case& test : model_cases()) {
        const ModelConfig& c = test.config;
        const std::vector<std::vector<float>> weights = rounded(random_weights(c, rng), Format::F32);
        const std::vector<int32_t> tokens = random_tokens(c, rng, B * T), targets = random_tokens(c, rng, B * T);
        std::vector<Vector> in_double, gradients;
        for (const auto& w : weights) in_double.emplace_back(w.begin(), w.end());
        const double loss = loss_in_double(c, B, T, in_double, tokens.data(), targets.data(), &gradients);
        const GradientRun run = gradients_of(tiny_setup(c, "fp32", "fp32", B, T), weights, tokens, targets);
        const double bound = 0x1p-24 * 10 * 2 * double(c.L) * std::sqrt(double(c.F));
        CHECK(std::fabs(run.loss - loss) <= bound * loss);
        double square = 0;
        const std::vector<Param> params = parameters(c);
        for (size_t p = 0; p < params.size(); p++) {
            INFO(std::string(test.name), ": ", params[p].name);
            CHECK(relative_error(run.gradients[p], gradients[p]) <= bound);
            square += norm(gradients[p]) * norm(gradients[p]);
        }
        CHECK(std::fabs(run.norm - std::sqrt(square)) <= bound * std::sqrt(square));  // before clipping
    }
}

TEST_CASE("gradients: the bf16 and coat recipes' differ from fp32's by what their formats round off") {
    // Every rounding on the way to a gradient adds an independent relative error of its format's rms; in a product of matrices
    // with such errors the result has the root of the sum of their squares. A layer has, on the longest way:
    //  coat     11 E4M3 roundings forward (two norm inputs, up, four linear inputs, four weights) and 4 E5M2 backward, and bf16's
    //  bf16     forward: 4 weights' and 12 activations', backward: 8
    //  groups   in bf16 with attention in FP8 groups: four more of E4M3 (q, k, v, the output)
    // The way of one gradient does not lead through all of them, and residual connections dilute them, so this is a bound.
    FRESH_RANDOM(rng);
    for (const Architecture& arch : {LLAMA, GPT2}) {
        const ModelConfig c = tiny_config(arch, true);
        const int64_t B = 4, T = 32;
        const std::vector<std::vector<float>> start = starting_weights(c, rng);  // the same for all recipes
        const std::vector<int32_t> tokens = random_tokens(c, rng, B * T), targets = random_tokens(c, rng, B * T);
        const GradientRun exact = gradients_of(tiny_setup(c, "fp32", "fp32", B, T), start, tokens, targets);
        const GradientRun bf16 = gradients_of(tiny_setup(c, "bf16", "fp32", B, T), start, tokens, targets);
        const GradientRun coat = gradients_of(tiny_setup(c, "coat", "fp32", B, T), start, tokens, targets);
        Setup in_groups = tiny_setup(c, "bf16", "fp32", B, T);
        in_groups.recipe.attention = Q_GROUP;
        const GradientRun groups = gradients_of(in_groups, start, tokens, targets);
        in_groups.recipe = find_row(recipes(), "coat", "");
        in_groups.recipe.attention = Q_GROUP;
        const GradientRun coat_groups = gradients_of(in_groups, start, tokens, targets);
        const double e_bf16 = rms_error(Format::BF16), e4m3 = rms_error(Format::E4M3), e5m2 = rms_error(Format::E5M2), L = double(c.L);
        const double bound_bf16 = std::sqrt(24 * L) * e_bf16;
        const double bound_coat = std::sqrt(L * (11 * e4m3 * e4m3 + 4 * e5m2 * e5m2)) + bound_bf16;
        const double four = std::sqrt(4 * L) * e4m3, bound_groups = four + bound_bf16;
        const double bound_coat_groups = std::hypot(bound_coat - bound_bf16, four) + bound_bf16;
        CHECK(std::fabs(bf16.loss - exact.loss) <= bound_bf16 * exact.loss);
        CHECK(std::fabs(groups.loss - exact.loss) <= bound_groups * exact.loss);
        CHECK(std::fabs(coat.loss - exact.loss) <= bound_coat * exact.loss);
        const std::vector<Param> params = parameters(c);
        for (size_t p = 0; p < params.size(); p++) {
            const double of_bf16 = relative_error(bf16.gradients[p], exact.gradients[p]), of_coat = relative_error(coat.gradients[p], exact.gradients[p]);
            INFO(std::string(arch.name), " ", params[p].name, ": bf16 ", of_bf16, " (", bound_bf16, "), coat ", of_coat, " (", bound_coat, ")");
            CHECK(of_bf16 <= bound_bf16);
            CHECK(of_coat <= bound_coat);
            CHECK(of_bf16 > 0);
            CHECK(of_coat > of_bf16);
            if (params[p].role.linear) CHECK(of_coat > e4m3 / 2);  // FP8 is really in use
            const double of_groups = relative_error(groups.gradients[p], exact.gradients[p]);
            const double of_both = relative_error(coat_groups.gradients[p], exact.gradients[p]);
            INFO("bf16 with attention in groups ", of_groups, " (", bound_groups, "), coat ", of_both, " (", bound_coat_groups, ")");
            CHECK(of_groups <= bound_groups);
            CHECK(of_both <= bound_coat_groups);
            CHECK(coat_groups.gradients[p] != coat.gradients[p]);
            const bool reads_groups = params[p].role.linear && params[p].name.find("attention_out") != std::string::npos;
            if (reads_groups) CHECK(of_groups > e4m3 / 2);
        }
    }
}

TEST_CASE("gradients: recipes whose linear layers alone are FP8 differ from fp32's by what the formats of the operands round off") {
    // As above: on the longest way through a layer lie four linear layers. Each rounds x and w forward, and g and w (or x) backward: what is one
    // rounding of w where the scale is of the whole tensor or of a square is another in each product where it is of a row or a group.
    FRESH_RANDOM(rng);
    for (const Architecture& arch : {LLAMA, GPT2}) {
        const ModelConfig c = tiny_config(arch, true);
        const int64_t B = 5, T = 32;  // 160 tokens: groups of 128 with a tail
        const std::vector<std::vector<float>> start = starting_weights(c, rng);
        const std::vector<int32_t> tokens = random_tokens(c, rng, B * T), targets = random_tokens(c, rng, B * T);
        const GradientRun exact = gradients_of(tiny_setup(c, "fp32", "fp32", B, T), start, tokens, targets);
        const GradientRun bf16 = gradients_of(tiny_setup(c, "bf16", "fp32", B, T), start, tokens, targets);
        const double L = double(c.L), bound_bf16 = std::sqrt(24 * L) * rms_error(Format::BF16);
        std::vector<GradientRun> runs;
        for (const char* name : {"te", "colossal", "rowwise", "deepseek"}) {
            const Recipe r = find_row(recipes(), name, "");
            runs.push_back(gradients_of(tiny_setup(c, name, "fp32", B, T), start, tokens, targets));
            const double x = rms_error(r.x.format), w = rms_error(r.w.format), g = rms_error(r.g.format);
            const double bound = std::sqrt(4 * L * (x * x + w * w + g * g + w * w)) + bound_bf16;
            CHECK(std::fabs(runs.back().loss - exact.loss) <= bound * exact.loss);
            const std::vector<Param> params = parameters(c);
            for (size_t p = 0; p < params.size(); p++) {
                const double error = relative_error(runs.back().gradients[p], exact.gradients[p]);
                INFO(std::string(arch.name), " ", std::string(name), " ", params[p].name, ": ", error, " (", bound, ")");
                CHECK(error <= bound);
                CHECK(error > relative_error(bf16.gradients[p], exact.gradients[p]));
                if (params[p].role.linear) CHECK(error > rms_error(Format::E4M3) / 2);  // FP8 is really in use
            }
        }
        for (size_t a = 0; a < runs.size(); a++)
            for (size_t b = 0; b < a; b++) {
                const bool alike = b == 0 && a == 1;  // the same step again: te's scales from its history are colossal's just-in-time ones
                CHECK((runs[a].gradients == runs[b].gradients) == alike);
            }
    }
}
