// exercises.cpp - dev/exercises: what the judge says of an empty body, of typical mistakes in each exercise,
// and of a solution. Most mistakes are solutions with wrong inputs.
#include "../help/exercises.h"

#define main JOINED(main_, __COUNTER__)  // the exercises as they are in the repository, each with a main()
#define JOINED(name, number) JOINED_(name, number)
#define JOINED_(name, number) name##number
namespace empty {
#include "../../dev/exercises/01-decode.cpp"
#include "../../dev/exercises/02-encode.cpp"
#include "../../dev/exercises/03-quantize-tensor.cpp"
#include "../../dev/exercises/04-quantize-groups.cpp"
#include "../../dev/exercises/05-amax.cpp"
#include "../../dev/exercises/06-expansion.cpp"
#include "../../dev/exercises/07-adamw.cpp"
#include "../../dev/exercises/08-linear.cpp"
#include "../../dev/exercises/09-norm-backward.cpp"
#include "../../dev/exercises/10-swiglu-backward.cpp"
}  // namespace empty
#undef main

using namespace coat;
using namespace coat::test;
using given::contract, given::expand, given::product, given::transposed;
using Floats = std::vector<float>;

TEST_CASE("exercises 1 and 2: an empty body and typical mistakes and a solution") {
    auto format = [](const Fp8& f) { return f.mantissa == 3 ? Format::E4M3 : Format::E5M2; };
    auto right = [=](const Fp8& f, uint8_t code) { return reference::decode(format(f), code); };
    exercise(
        judge::decode, empty::decode, right,
        {{"Every wrong value is off by the factor 0.5:", [=](auto& f, uint8_t c) { return right(f, c) / 2; }},
         {"about codes with exponent 0:",  // subnormal values as if they were normal
          [=](auto& f, uint8_t c) {
              const int one = 1 << f.mantissa;
              return (c & 0x7F) < one ? right(f, uint8_t(c | one)) / 2 : right(f, c);
          }}});

    auto even = [=](const Fp8& f, float x) { return int(reference::encode(format(f), x)); };
    auto is_up = [=](const Fp8& f, float x) { return std::abs(right(f, uint8_t(even(f, x)))) > std::abs(x); };
    exercise(judge::encode, empty::encode, even,
             {{"about ties:",
               [=](auto& f, float x) { return even(f, std::nextafter(x, std::copysign(INFINITY, x))); }},
              {"Every wrong code is one off", [=](auto& f, float x) { return even(f, x) - is_up(f, x); }},
              {"about NaN:",
               [=](auto& f, float x) { return even(f, std::isnan(x) ? std::copysign(INFINITY, x) : x); }},
              {"Not all wrong values are alike. Of this one: This is about zero:",  // several mistakes
               [=](auto& f, float x) { return x == 0 || std::isnan(x) ? 0 : even(f, x); }}});
}

TEST_CASE("exercises 3 to 5: an empty body and typical mistakes and a solution") {
    using Largest = float(const float*, int64_t);
    Largest* const of_signed = [](const float* x, int64_t n) {
        return std::max(0.0f, *std::max_element(x, x + n));
    };
    auto encode = [](int n, const float* x, uint8_t* codes, float s, bool divide = false) {
        for (int i = 0; i < n; i++) codes[i] = given::encode(divide ? x[i] / s : x[i] * (1 / s));
        return s;
    };
    auto scale = [](float amax, float fmax) { return amax == 0 ? 1 : std::max(amax / fmax, 0x1p-126f); };
    auto tensor = [=](float fmax = 448, bool divide = false, Largest* largest = reference::amax) {
        return [=](int n, const float* x, uint8_t* codes) {
            return encode(n, x, codes, scale(largest(x, n), fmax), divide);
        };
    };
    exercise(judge::quantize_tensor, empty::quantize_tensor, tensor(),
             {{"A few codes are one off", tensor(448, true)},
              {"off by the factor 0.00781: look at the scale", tensor(57344)},
              {"about negative values:", tensor(448, false, of_signed)}});

    // The codes are made with the rounded scale, or with that before rounding.
    auto groups = [=](float (*rounded)(float), bool rounded_first = true) {
        return [=](int rows, int cols, const float* x, uint8_t* codes, float* scales) {
            for (int r = 0; r < rows; r++)
                for (int c = 0; c < cols; c += 16, scales++) {
                    const int n = std::min(16, cols - c), first = r * cols + c;
                    const float s = scale(reference::amax(x + first, n), 448);
                    *scales = rounded(s);
                    encode(n, x + first, codes + first, rounded_first ? *scales : s);
                }
        };
    };
    exercise(judge::quantize_groups, empty::quantize_groups, groups(given::to_bf16),
             {{"divide by the scale after it is rounded", groups(given::to_bf16, false)},
              {"Scales are stored in BF16, not in FP32", groups([](float s) { return s; })},
              {"about zeros:", groups([](float s) { return s == 1 ? 0 : given::to_bf16(s); })}});

    auto maxima = [](float (*size)(float)) {
        return [=](int n, const float* x, float* maxima) {
            for (int i = 0; i < n; i++) maxima[i / 16] = std::max(i % 16 ? maxima[i / 16] : 0, size(x[i]));
            return *std::max_element(maxima, maxima + (n + 15) / 16);
        };
    };
    auto magnitude = [](float x) { return std::isnan(x) ? INFINITY : std::abs(x); };
    exercise(judge::amax, empty::amax, maxima(magnitude), {{"about NaN:", maxima(std::abs)}});
}

TEST_CASE("exercise 6: an empty body and typical mistakes and a solution") {
    auto six = [](const char* sentence, auto factor, auto expand, auto contract) {
        says(sentence, [=] { return judge::expansion(factor, expand, contract); });
    };
    const auto k = given::expansion_factor;
    auto sixteenths = [=](float max, float min) {
        return std::max(std::floor(k(max, min) * 16) / 16, 1.0f / 16);
    };
    auto of_release = [](float max, float min) {  // range 448^2 / 2
        const float k = std::log2(100352.0f) / (std::log2(max) - std::log2(min));
        return std::min(std::rint(k * 256) / 256, 64.0f);
    };
    auto no_limits = [](float max, float min) {
        return std::rint(256 * std::log2(448 * 512.0f) / std::log2(max / min)) / 256;
    };
    auto forgets_sign = [](float y, float max, float k) { return contract(std::abs(y), max, k); };
    if (!exercises_are_solved())
        six("nothing is computed yet", empty::expansion_factor, empty::expand, empty::contract);
    six("k is near: round to the nearest multiple of 1/256", sixteenths, expand, contract);
    six("Compare k and its operands", of_release, expand, contract);  // no hint is better than a wrong one
    six("about equal magnitudes:", no_limits, expand, contract);
    six("about negative values:", k, expand, forgets_sign);
    six("This is not computed yet: contract.", k, expand, [](float, float, float) { return 0.0f; });
    six("passed, ", k, expand, contract);
}

TEST_CASE("exercise 7: an empty body and typical mistakes and a solution") {
    auto load = [](Moment from, int i) { return contract(given::decode(from.codes[i]), *from.max, *from.k); };
    auto store = [](Moment to, const Floats& x, bool zeros_count) {
        float max = 0, min = INFINITY;
        for (float value : x) {
            max = std::max(max, std::abs(value));
            if (value != 0 || zeros_count) min = std::min(min, value == 0 ? 1e-30f : std::abs(value));
        }
        *to.max = max, *to.k = max == 0 ? 1 : given::expansion_factor(max, min);
        for (size_t i = 0; i < x.size(); i++) to.codes[i] = given::encode(expand(x[i], max, *to.k));
    };
    enum Mistake { NONE, QUANTIZES_FIRST, ZEROS_COUNT, UNCORRECTED };
    auto adamw = [=](Mistake mistake) {
        return [=](Step s, int n, const float* g, float* w, Moment m, Moment v) {
            Floats new_m(n), new_v(n);
            for (int i = 0; i < n; i++) {
                new_m[i] = s.beta1 * load(m, i) + (1 - s.beta1) * g[i];
                new_v[i] = s.beta2 * load(v, i) + (1 - s.beta2) * g[i] * g[i];
            }
            store(m, new_m, mistake == ZEROS_COUNT), store(v, new_v, mistake == ZEROS_COUNT);
            if (mistake == UNCORRECTED) s.bias1 = s.bias2 = 1;
            for (int i = 0; i < n; i++) {
                if (mistake == QUANTIZES_FIRST) new_m[i] = load(m, i), new_v[i] = load(v, i);
                w[i] -=
                    s.lr * (new_m[i] / s.bias1 / (std::sqrt(new_v[i] / s.bias2) + s.eps) + s.decay * w[i]);
            }
        };
    };
    exercise([](auto& body) { return judge::adamw(body); }, empty::adamw, adamw(NONE),
             {{"Update the weight before the moments are quantized", adamw(QUANTIZES_FIRST)},
              {"about groups with zeros:", adamw(ZEROS_COUNT)},
              {"The bias correction is missing", adamw(UNCORRECTED)}});
}

TEST_CASE("exercises 8 to 10: an empty body and typical mistakes and a solution") {
    using Quantizer = Matrix (*)(const Matrix&);
    Quantizer by_row = [](const Matrix& x) { return given::quantized(x, 1, 128); };
    Quantizer by_col = [](const Matrix& x) { return transposed(given::quantized(transposed(x), 1, 128)); };
    Quantizer itself = [](const Matrix& x) { return x; };
    auto linear = [=](Quantizer in_wgrad) {
        return [=](auto& x, auto& w, auto& g, auto& y, auto& dx, auto& dw) {
            const Matrix w8 = given::quantized(w, 128, 128);
            y = product(by_row(x), transposed(w8));
            dx = product(by_row(g), w8);
            dw = product(transposed(in_wgrad(g)), in_wgrad(x));
        };
    };
    exercise(judge::linear, empty::linear, linear(by_col),
             {{"first transpose both", linear(by_row)},
              {"quantize both.", linear(itself)},
              {"the inner dimensions 160 and 144 differ",
               [](auto& x, auto& w, auto&, auto& y, auto&, auto&) { y = product(x, w); }}});

    using Bytes = const uint8_t*;
    using Vector = const float*;
    using Norm = std::function<judge::Norm>;
    auto norm = [](bool has_mean = true) -> Norm {
        return [=](int N, int C, Bytes codes, Vector scales, Vector w, Vector dy, float* dx, float* dw) {
            std::fill_n(dw, C, 0.0f);
            for (int first = 0; first < N * C; first += C) {
                Floats x(C);
                float square = 0, term = 0;
                for (int c = 0; c < C; c++) {
                    x[c] = given::decode(codes[first + c]) * scales[(first + c) / 16];
                    square += x[c] * x[c], term += dy[first + c] * w[c] * x[c];
                }
                const float rstd = 1 / std::sqrt(square / float(C) + 1e-5f);
                const float mean = has_mean ? term / float(C) : 0;
                for (int c = 0; c < C; c++) {
                    dx[first + c] = rstd * dy[first + c] * w[c] - x[c] * rstd * rstd * rstd * mean;
                    dw[c] += dy[first + c] * x[c] * rstd;
                }
            }
        };
    };
    auto no_scales = [=](int N, int C, Bytes codes, Vector, Vector w, Vector dy, float* dx, float* dw) {
        norm()(N, C, codes, Floats(N * C / 16, 1.0f).data(), w, dy, dx, dw);
    };
    auto last = [=](int N, int C, Bytes codes, Vector scales, Vector w, Vector dy, float* dx, float* dw) {
        for (int i = 0; i < N * C; i += C) norm()(1, C, codes + i, scales + i / 16, w, dy + i, dx + i, dw);
    };
    exercise(judge::norm_backward, empty::norm_backward, norm(),
             {{"The term with the mean is missing", norm(false)},
              {"times its group", no_scales},
              {"not of the last", last}});

    enum Mistake { NONE, SIGMOID, SWAPPED, SCALES_OF_GATE };
    auto swiglu = [](Mistake mistake) {
        return [=](int N, int F, Bytes codes, Vector scales, Vector dact, float* dx) {
            for (int i = 0; i < N * F; i++) {
                const int g = i / F * 2 * F + i % F, u = g + F;  // places of gate and up
                const float gate = given::decode(codes[g]) * scales[g / 16];
                const float up = given::decode(codes[u]) * scales[(mistake == SCALES_OF_GATE ? g : u) / 16];
                const float s = 1 / (1 + std::exp(-gate)), derivative = s * (1 - s);
                dx[g] = dact[i] * up * (mistake == SIGMOID ? derivative : s + gate * derivative);
                dx[u] = dact[i] * gate * s;
                if (mistake == SWAPPED) std::swap(dx[g], dx[u]);
            }
        };
    };
    exercise(judge::swiglu_backward, empty::swiglu_backward, swiglu(NONE),
             {{"This is the derivative of sigmoid", swiglu(SIGMOID)},
              {"a row has dgate, then dup", swiglu(SWAPPED)},
              {"up has scales of its own", swiglu(SCALES_OF_GATE)}});
}
