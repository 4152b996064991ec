// exercises.cpp - dev/exercises: what the judge says of an empty body, of three typical mistakes in each
// exercise, and of a solution.
#include <doctest/doctest.h>

#include <sstream>

#include "../../dev/exercises/judge.h"
#include "../../reference.h"
#include "../help/files.h"

// The exercises as they are in the repository, each with its own main().
namespace e1 {
#include "../../dev/exercises/01-decode.cpp"
}
namespace e2 {
#include "../../dev/exercises/02-encode.cpp"
}
namespace e3 {
#include "../../dev/exercises/03-quantize-tensor.cpp"
}
namespace e4 {
#include "../../dev/exercises/04-quantize-groups.cpp"
}
namespace e5 {
#include "../../dev/exercises/05-amax.cpp"
}
namespace e6 {
#include "../../dev/exercises/06-expansion.cpp"
}
namespace e7 {
#include "../../dev/exercises/07-adamw.cpp"
}
namespace e8 {
#include "../../dev/exercises/08-linear.cpp"
}
namespace e9 {
#include "../../dev/exercises/09-norm-backward.cpp"
}
namespace e10 {
#include "../../dev/exercises/10-swiglu-backward.cpp"
}

using namespace coat;
using namespace coat::test;
using given::contract, given::expand, given::product, given::transposed;

namespace {

template <class Judge, class... F> void fails(const char* hint, Judge judge, F... mine) {
    std::ostringstream out;
    CHECK(judge(mine..., out) == 1);
    CHECK_MESSAGE(contains(out.str(), hint), out.str());
}
template <class Judge, class... F> void empty(Judge judge, F... mine) {
    if (exercises_are_solved()) return;
    fails("nothing is computed yet: write the body of the function.", judge, mine...);
}
template <class Judge, class... F> void passes(Judge judge, F... mine) {
    std::ostringstream out;
    CHECK(judge(mine..., out) == 0);
    CHECK_MESSAGE(contains(out.str(), "passed, "), out.str());
}

Format format_of(const Fp8& f) { return f.mantissa == 3 ? Format::E4M3 : Format::E5M2; }

// Encodes with another rounding and, for fields that are OR-ed, without a carry.
template <class Round> uint8_t encoded(const Fp8& f, float x, Round round, bool carries) {
    const float magnitude = std::min(f.max, std::abs(x));
    const int e = magnitude == 0 ? 1 - f.bias : std::max(std::ilogb(magnitude), 1 - f.bias);
    const int steps = int(round(std::ldexp(magnitude, f.mantissa - e))), one = 1 << f.mantissa;
    const int field = (e + f.bias) << f.mantissa;
    const int code = steps < one ? steps : carries ? field + steps - one : field | (steps - one) % one;
    return uint8_t((std::isnan(x) ? 0x7F : code) | (std::signbit(x) ? 0x80 : 0));
}

float scale_of(int n, const float* x, uint8_t* codes, float fmax, bool divide) {
    const float s = std::max(reference::amax(x, n) / fmax, 0x1p-126f), scale = reference::amax(x, n) ? s : 1;
    for (int i = 0; i < n; i++) codes[i] = given::encode(divide ? x[i] / scale : x[i] * (1 / scale));
    return scale;
}

// One group of moments, with the mistakes that the table below names.
struct Mistakes {
    bool quantized_first = false, zeros_count = false, uncorrected = false;
};
void adamw(const Step& s, int n, const float* g, float* w, Moment m, Moment v, Mistakes mistakes) {
    std::vector<float> x[2] = {std::vector<float>(n), std::vector<float>(n)};
    for (int i = 0; i < n; i++) {
        x[0][i] = s.beta1 * contract(given::decode(m.codes[i]), *m.max, *m.k) + (1 - s.beta1) * g[i];
        x[1][i] = s.beta2 * contract(given::decode(v.codes[i]), *v.max, *v.k) + (1 - s.beta2) * g[i] * g[i];
    }
    auto update = [&] {
        const float bias1 = mistakes.uncorrected ? 1 : s.bias1, bias2 = mistakes.uncorrected ? 1 : s.bias2;
        for (int i = 0; i < n; i++)
            w[i] -= s.lr * (x[0][i] / bias1 / (std::sqrt(x[1][i] / bias2) + s.eps) + s.decay * w[i]);
    };
    if (!mistakes.quantized_first) update();
    for (Moment* moment : {&m, &v}) {
        std::vector<float>& values = x[moment == &v];
        float max = 0, min = INFINITY;
        for (float y : values) {
            max = std::max(max, std::abs(y));
            if (y != 0 || mistakes.zeros_count) min = std::min(min, std::max(std::abs(y), 1e-30f));
        }
        const float k = max > 0 ? given::expansion_factor(max, min) : 1;
        *moment->max = max, *moment->k = k;
        for (int i = 0; i < n; i++) {
            moment->codes[i] = max > 0 ? given::encode(expand(values[i], max, k)) : 0;
            values[i] = contract(given::decode(moment->codes[i]), max, k);
        }
    }
    if (mistakes.quantized_first) update();
}
auto adamw_with(Mistakes mistakes) {
    return [=](const Step& s, int n, const float* g, float* w, Moment m, Moment v) {
        adamw(s, n, g, w, m, v, mistakes);
    };
}

std::vector<float> decoded(int rows, int cols, const uint8_t* codes, const float* scales) {
    std::vector<float> x(rows * cols);
    for (int i = 0; i < rows * cols; i++) x[i] = given::decode(codes[i]) * scales[i / 16];
    return x;
}

}  // namespace

TEST_CASE("exercises 1 and 2: an empty body, typical mistakes, and a solution") {
    empty(judge::decode, e1::decode);
    auto wrong_bias = [](const Fp8& f, uint8_t code) { return reference::decode(format_of(f), code) / 2; };
    auto normal_only = [](const Fp8& f, uint8_t code) {
        if ((code & 0x7F) >> f.mantissa) return reference::decode(format_of(f), code);
        const float x = std::ldexp(1 + std::ldexp(float(code & 0x7F), -f.mantissa), -f.bias);
        return code & 0x80 ? -x : x;
    };
    auto with_infinity = [](const Fp8& f, uint8_t code) {
        const float x = reference::decode(format_of(f), code);
        return f.mantissa == 3 && std::abs(x) >= 256 ? (code & 7 ? NAN : x * INFINITY) : x;
    };
    fails("All are off by the same power of two", judge::decode, wrong_bias);
    fails("Only exponent 0 is wrong", judge::decode, normal_only);
    fails("In E4M3 the largest exponent has values", judge::decode, with_infinity);
    passes(judge::decode, [](const Fp8& f, uint8_t code) { return reference::decode(format_of(f), code); });

    empty(judge::encode, e2::encode);
    auto up = [](float x) { return std::floor(x + 0.5f); };
    auto cut = [](float x) { return std::floor(x); };
    auto even = [](float x) { return std::nearbyint(x); };
    fails("Only ties are wrong", judge::encode,
          [=](const Fp8& f, float x) { return encoded(f, x, up, true); });
    fails("Every wrong code is one off", judge::encode,
          [=](const Fp8& f, float x) { return encoded(f, x, cut, true); });
    fails("round up to a power of two", judge::encode,
          [=](const Fp8& f, float x) { return encoded(f, x, even, false); });
    fails("Only NaN is wrong", judge::encode, [=](const Fp8& f, float x) {
        return encoded(f, std::isnan(x) ? std::copysign(INFINITY, x) : x, even, true);
    });
    fails("Of this one: its code is 0, with the sign in bit 7.", judge::encode, [=](const Fp8& f, float x) {
        return uint8_t(x == 0 || std::isnan(x) ? 0 : encoded(f, x, even, false));  // several mistakes
    });
    passes(judge::encode, [](const Fp8& f, float x) { return uint8_t(reference::encode(format_of(f), x)); });
}

TEST_CASE("exercises 3 to 5: an empty body, typical mistakes, and a solution") {
    empty(judge::quantize_tensor, e3::quantize);
    fails("A few codes are one off", judge::quantize_tensor,
          [](int n, const float* x, uint8_t* codes) { return scale_of(n, x, codes, 448, true); });
    fails("The scale is 128 times too small", judge::quantize_tensor,
          [](int n, const float* x, uint8_t* codes) { return scale_of(n, x, codes, 57344, false); });
    fails("Only the tensor whose largest magnitude is negative", judge::quantize_tensor,
          [](int n, const float* x, uint8_t* codes) {
              const float largest = *std::max_element(x, x + n), s = scale_of(n, x, codes, 448, false);
              if (largest == reference::amax(x, n) || n != 200) return s;
              for (int i = 0; i < n; i++) codes[i] = given::encode(x[i] * (448 / largest));
              return largest / 448;
          });
    passes(judge::quantize_tensor,
           [](int n, const float* x, uint8_t* codes) { return scale_of(n, x, codes, 448, false); });

    // Scales: rounded as given; the codes are made with the rounded ones, or with those before.
    auto groups = [](auto rounded, bool rounded_first, int width) {
        return [=](int rows, int cols, const float* x, uint8_t* codes, float* scales) {
            for (int r = 0; r < rows; r++)
                for (int c = 0; c < cols; c += width) {
                    const int n = std::min(width, cols - c), first = r * cols + c;
                    const float exact = scale_of(n, x + first, codes + first, 448, false);
                    const float s = *scales++ = rounded(exact);
                    for (int i = first; rounded_first && i < first + n; i++)
                        codes[i] = given::encode(x[i] * (1 / s));
                }
        };
    };
    auto up = [](float s) { return given::to_bf16(s) < s ? given::to_bf16(s * 1.004f) : given::to_bf16(s); };
    auto none = [](float s) { return s; };
    empty(judge::quantize_groups, e4::quantize);
    fails("divide by the scale after it is rounded", judge::quantize_groups,
          groups(given::to_bf16, false, 16));
    fails("amax / 448 is rounded to the nearest BF16 value", judge::quantize_groups, groups(up, true, 16));
    fails("These are scales in FP32", judge::quantize_groups, groups(none, true, 16));
    passes(judge::quantize_groups, groups(given::to_bf16, true, 16));

    auto maxima = [](auto larger, bool last_group) {
        return [=](int n, const float* x, float* maxima) {
            float result = 0;
            for (int first = 0; first < (last_group ? n : n / 16 * 16); first += 16) {
                float& largest = maxima[first / 16] = 0;
                for (int i = first; i < std::min(n, first + 16); i++) largest = larger(largest, x[i]);
                result = std::max(result, largest);
            }
            return result;
        };
    };
    auto of_group = [](float a, float b) { return std::isnan(b) ? INFINITY : std::max(a, std::abs(b)); };
    empty(judge::amax, e5::amax);
    fails("Only NaN is wrong", judge::amax,
          maxima([](float a, float b) { return std::max(a, std::abs(b)); }, true));
    fails("Only the last, shorter group is wrong", judge::amax, maxima(of_group, false));
    fails("the result is not: it is the largest", judge::amax, [=](int n, const float* x, float* m) {
        maxima(of_group, true)(n, x, m);
        return m[0];
    });
    passes(judge::amax, maxima(of_group, true));
}

TEST_CASE("exercises 6 and 7: an empty body, typical mistakes, and a solution") {
    empty(judge::expansion, e6::expansion_factor, e6::expand, e6::contract);
    auto k_of = [](float parts) {
        return [=](float max, float min) {
            const float k = given::expansion_factor(max, min);
            return std::max(std::floor(k * parts) / parts, 1.0f / 16);
        };
    };
    auto of_release = [](float max, float min) {  // range 448^2 / 2
        const float k = std::log2(100352.0f) / (std::log2(max) - std::log2(min));
        return std::min(std::rint(k * 256) / 256, 64.0f);
    };
    auto divides = [](float x, float max, float k) {
        return std::copysign(448 * std::pow(std::abs(x) / max, k), x);
    };
    auto forgets_sign = [](float y, float max, float k) { return contract(std::abs(y), max, k); };
    fails("rounded to the nearest multiple of 1/256", judge::expansion, k_of(16), expand, contract);
    fails("Only k is wrong: log R", judge::expansion, of_release, expand, contract);
    auto no_limits = [](float max, float min) {
        return std::rint(256 * std::log2(448 * 512.0f) / std::log2(max / min)) / 256;
    };
    fails("at least 1/16 and at most 64", judge::expansion, no_limits, expand, contract);
    fails("Only extreme magnitudes", judge::expansion, given::expansion_factor, divides, contract);
    fails("Only negative values are wrong", judge::expansion, given::expansion_factor, expand, forgets_sign);
    fails("This is not computed yet: contract.", judge::expansion, given::expansion_factor, expand,
          [](float, float, float) { return 0.0f; });
    passes(judge::expansion, given::expansion_factor, expand, contract);

    auto seven = [](auto adamw, std::ostream& out) { return judge::adamw(adamw, out); };
    empty(seven, e7::adamw);
    fails("The weight uses the moments after quantization", seven, adamw_with({true}));
    fails("Only groups with zeros are wrong", seven, adamw_with({false, true}));
    fails("The bias correction is missing", seven, adamw_with({false, false, true}));
    passes(seven, adamw_with({}));
}

TEST_CASE("exercises 8 to 10: an empty body, typical mistakes, and a solution") {
    auto quantized = [](const Matrix& x) { return given::quantized(x, 1, 128); };
    auto along_rows = [=](const Matrix& x) { return transposed(quantized(transposed(x))); };
    auto itself = [](const Matrix& x) { return x; };
    auto linear = [](auto x_dw, auto g_dw, int block) {
        return [=](const Matrix& x, const Matrix& w, const Matrix& g, Matrix& y, Matrix& dx, Matrix& dw) {
            const Matrix w8 = given::quantized(w, block, 128);
            y = product(given::quantized(x, 1, 128), transposed(w8));
            dx = product(given::quantized(g, 1, 128), w8);
            dw = product(transposed(g_dw(g)), x_dw(x));
        };
    };
    empty(judge::linear, e8::linear);
    fails("transpose both before quantizing them", judge::linear, linear(quantized, quantized, 128));
    fails("its g has blocks along the features", judge::linear, linear(along_rows, quantized, 128));
    auto twice = [=](const Matrix& x) { return along_rows(quantized(x)); };
    fails("quantized twice", judge::linear, linear(twice, twice, 128));
    fails("w has blocks of 128x128", judge::linear, linear(along_rows, along_rows, 1));
    fails("quantize both operands first", judge::linear, linear(itself, itself, 128));
    fails("the inner dimensions differ", judge::linear,
          [](const Matrix& x, const Matrix& w, const Matrix&, Matrix& y, Matrix&, Matrix&) {
              y = product(x, w);
          });
    passes(judge::linear, linear(along_rows, along_rows, 128));

    struct Norm {
        bool mean = true, weight = true, scales = true, sum = true;
    };
    auto norm = [](Norm has) {
        return [=](int N, int C, const uint8_t* codes, const float* scales, const float* weight,
                   const float* dy, float* dx, float* dweight) {
            const std::vector<float> ones(std::max(C, N * C / 16), 1.0f);
            const std::vector<float> x = decoded(N, C, codes, has.scales ? scales : ones.data());
            std::fill(dweight, dweight + C, 0.0f);
            for (int n = 0; n < N; n++) {
                double square = 0, mean = 0;
                for (int i = n * C; i < n * C + C; i++) square += x[i] * x[i];
                const double r = 1 / std::sqrt(square / C + 1e-5);
                auto d = [&](int i) { return dy[i] * (has.weight ? weight[i % C] : 1); };
                for (int i = n * C; has.mean && i < n * C + C; i++) mean += d(i) * x[i] * r / C;
                for (int i = n * C; i < n * C + C; i++) {
                    dx[i] = float((d(i) - x[i] * r * mean) * r);
                    dweight[i % C] = float((has.sum ? dweight[i % C] : 0) + dy[i] * x[i] * r);
                }
            }
        };
    };
    empty(judge::norm_backward, e9::norm_backward);
    fails("The term with the mean is missing", judge::norm_backward, norm({false}));
    fails("The weight is missing", judge::norm_backward, norm({true, false}));
    fails("times the scale of its group", judge::norm_backward, norm({true, true, false}));
    fails("not that of the last one", judge::norm_backward, norm({true, true, true, false}));
    passes(judge::norm_backward, norm({}));

    struct SwiGLU {
        bool silu = true, gate_first = true, own_scales = true;
    };
    auto swiglu = [](SwiGLU has) {
        return [=](int N, int F, const uint8_t* codes, const float* scales, const float* dact, float* dx) {
            std::vector<float> x = decoded(N, 2 * F, codes, scales);
            for (int i = 0; i < N * F; i++) {
                const int first = i / F * 2 * F + i % F, second = first + F;
                if (!has.own_scales) x[second] = given::decode(codes[second]) * scales[first / 16];
                const int gate = has.gate_first ? first : second, up = has.gate_first ? second : first;
                const float a = x[gate], s = 1 / (1 + std::exp(-a));
                dx[up] = dact[i] * a * s;
                dx[gate] = dact[i] * x[up] * (has.silu ? s * (1 + a * (1 - s)) : s * (1 - s));
            }
        };
    };
    empty(judge::swiglu_backward, e10::swiglu_backward);
    fails("This is the derivative of sigmoid", judge::swiglu_backward, swiglu({false}));
    fails("a row has gate, then up", judge::swiglu_backward, swiglu({true, false}));
    fails("up is decoded with the scales of gate", judge::swiglu_backward, swiglu({true, true, false}));
    passes(judge::swiglu_backward, swiglu({}));
}
