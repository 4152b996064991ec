// judge.cpp - the inputs of each exercise, what the reference makes of them, and what typical mistakes do.
#include "judge.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cfloat>
#include <iomanip>
#include <iostream>
#include <map>
#include <random>
#include <sstream>
#include <tuple>
#include <utility>

using namespace coat;
using reference::StoredMatrix;
using Floats = std::vector<float>;
using Codes = std::vector<uint8_t>;

namespace {

template <class... Parts> std::string text(const Parts&... parts) {
    std::ostringstream out;
    out.precision(9);
    (out << ... << parts);
    return out.str();
}
std::string hex(int code) { return text("0x", std::hex, std::setw(2), std::setfill('0'), code); }

// What may be wrong. With values, it is a mistake and the results that it makes of the inputs; without, it is
// a property of the input of a wrong value. An empty text is no hint.
struct Hint {
    std::string text;
    Floats values = {};
    double tolerance = 0;  // of values, at least
};
// A property of inputs, with what holds for them
Hint where(bool here, const std::string& text) { return {here ? text : ""}; }
Hint about(const std::string& special, bool here = true) {
    return where(here && !special.empty(),
                 "This is about " + special + ": what do the lesson and the text above say of them?");
}

// Results are filled with these before the call, and have GUARDS more of them behind their ends. Inputs have
// GUARDS values behind their ends that change any result.
constexpr uint8_t UNWRITTEN = 0xFF;
constexpr float UNDEFINED = 1000;
constexpr size_t GUARDS = 128;
constexpr float GUARD = 1e9f;
constexpr uint8_t GUARD_CODE = 0x7E;

Floats undefined(size_t n) { return Floats(n + GUARDS, UNDEFINED); }
Codes unwritten(size_t n) { return Codes(n + GUARDS, UNWRITTEN); }
bool untouched(float x) { return x == UNDEFINED; }
bool untouched(uint8_t code) { return code == UNWRITTEN; }
Floats guarded(Floats x, float guard = GUARD) {
    x.resize(x.size() + GUARDS, guard);
    return x;
}
Codes guarded(Codes codes) {
    codes.resize(codes.size() + GUARDS, GUARD_CODE);
    return codes;
}

// Codes are equal, those of NaN and of zero with their signs, too. A value that is NaN has no sign.
bool agree(float expected, float got, double tolerance) {
    if (expected == 0 && got == 0) return std::signbit(expected) == std::signbit(got);
    if (std::isnan(expected)) return std::isnan(got);
    return got == expected || std::abs(got - expected) <= tolerance;
}

// A mistake makes this of value i. What it makes may be much larger than what is expected, and the reader
// rounds it otherwise; so its own size counts, too.
bool fits(const Hint& mistake, size_t i, float got, double tolerance, double relative) {
    const double value = mistake.values[i];
    if (relative > 0) tolerance = std::max(tolerance, std::max(relative, 1e-3) * std::abs(value));
    tolerance = std::max(tolerance, mistake.tolerance);
    const bool near = tolerance > 0 && std::abs(got - value) <= tolerance;
    return near || agree(mistake.values[i], got, tolerance);
}

// What is compared of one exercise.
class Comparison {
public:
    Format format = Format::E4M3;  // of codes, which are compared as uint8_t
    std::string special, of;       // about the input of what is compared; may be empty

    explicit Comparison(int number) : number_(number) {}

    // Normal values, the same in every run; spread: of the logarithms of their magnitudes
    Floats normal(int n, float spread = 0) {
        std::normal_distribution<float> distribution;
        Floats x(n);
        for (float& v : x) v = distribution(random_) * std::exp(spread * distribution(random_));
        return x;
    }

    // Of a result: its name, the values expected, and the reader's. What the latter have behind the expected
    // ones must still be undefined. tolerance: relative to the largest expected magnitude; from: the inputs
    // of its values
    template <class T>
    void operator()(const std::string& name, const std::vector<T>& expected, const std::vector<T>& got,
                    std::vector<Hint> hints = {}, double tolerance = 0, const Floats& from = {}) {
        double largest = 0;
        for (T v : expected) largest = std::max(largest, std::abs(double(v)));
        const double relative = tolerance;
        tolerance *= largest;
        if (sizeof(T) == sizeof(float)) hints.push_back(added_to(name, expected));
        hints.push_back(about(special));
        Result& result = results_[name];
        for (size_t i = 0; i < expected.size(); i++) {
            const double y = value(expected[i]), mine = value(got[i]);
            count_++;
            if (mine != 0 && !std::isnan(mine) && !untouched(got[i])) result.written = true;
            const bool right = agree(expected[i], got[i], tolerance);
            if (!right) result.wrong++;
            for (const Hint& h : hints)
                if (!h.values.empty())
                    result.predicted(h.text, fits(h, i, got[i], tolerance, relative), right);
            if (right) continue;
            for (const Hint& h : hints)
                if (h.values.empty()) result.has_in_common(h.text, true);
            if (sizeof(T) == 1 && std::abs(got[i] - expected[i]) == 1)
                result.has_in_common("Every wrong code is one off: round to the nearest, not up or down.",
                                     false);
            if (mine * y != 0 && std::isfinite(mine / y))
                result.has_in_common(
                    text("Every wrong value is off by the factor ", std::setprecision(3), mine / y,
                         ": look at the scale, at a mean, or at the exponent's bias."),
                    false);
            const std::string index = expected.size() > 1 ? text(" ", i) : "";
            const std::string source = from.empty() ? "" : text(" from ", from[i]);
            show(name, index + source + of, shown(expected[i]), shown(got[i]));
        }
        for (size_t i = expected.size(); i < got.size(); i++) {
            if (untouched(got[i])) continue;
            result.past_the_end = true;
            show(name, text(" ", i, of), "nothing, for it ends before", shown(got[i]));
        }
    }

    int finish() const {
        const std::string failure = std::exchange(judge::failure, "");
        size_t wrong = 0;
        bool written = false, right = true;
        for (const auto& [name, result] : results_) {
            wrong += result.wrong;
            written = written || result.written;
            right = right && result.wrong == 0 && !result.past_the_end;
        }
        std::cout << "exercise " << number_ << ": ";
        if (!failure.empty()) std::cout << failure << "\n";
        else if (right) std::cout << "passed, " << count_ << " values agree with the reference.\n";
        else if (!written) std::cout << "nothing is computed yet: write the body of the function.\n";
        else
            std::cout << wrong << " of " << count_ << " values differ. The first:" << shown_
                      << "\n  hint      " << hint(results_.at(first_)) << "\n";
        return !right || !failure.empty();
    }

private:
    struct Explanation {
        std::string text;
        bool predicts;           // it says each value, not only what the wrong ones have in common
        bool of_input;           // what they have in common is a property of their inputs
        bool everywhere = true;  // it predicts the right values, too
        bool of_shown = false;   // it predicts the first wrong value, which is shown
        size_t wrong = 0;        // so many wrong values
    };
    struct Result {
        bool written = false, past_the_end = false;
        size_t wrong = 0;
        std::vector<Explanation> explanations = {};

        void predicted(const std::string& text, bool so, bool right) {
            Explanation* e = find(text);
            if (!e) e = &explanations.emplace_back(Explanation{text, true, false});
            if (!so) e->everywhere = false;
            if (!so || right) return;
            e->wrong++;
            if (wrong == 1) e->of_shown = true;
        }
        // What the first wrong value does not have is not common to all.
        void has_in_common(const std::string& text, bool of_input) {
            Explanation* e = find(text);
            if (!e && wrong == 1 && !text.empty())
                e = &explanations.emplace_back(Explanation{text, false, of_input});
            if (e) e->wrong++;
        }
        Explanation* find(const std::string& text) {
            for (Explanation& e : explanations)
                if (e.text == text) return &e;
            return nullptr;
        }
    };

    double value(float x) const { return x; }
    double value(uint8_t code) const { return reference::decode(format, code); }
    std::string shown(float x) const { return untouched(x) ? "undefined, as before the call" : text(x); }
    std::string shown(uint8_t code) const { return hex(code) + " = " + text(value(code)); }

    template <class T> Hint added_to(const std::string& name, const std::vector<T>& expected) {
        Hint hint{"This is undefined before the call: set " + name + " to zero before you add to it."};
        for (T v : expected) hint.values.push_back(float(v) + UNDEFINED);
        return hint;
    }
    void show(const std::string& name, const std::string& which, const std::string& expected,
              const std::string& mine) {
        if (!first_.empty()) return;
        first_ = name;
        shown_ = "\n  input     " + name + which + "\n  expected  " + expected + "\n  yours     " + mine;
    }

    // A mistake that makes all the reader's values is certain. Then comes what the wrong values have in
    // common. A mistake that makes only the wrong values may be chance: where a value is extreme, many
    // mistakes look alike.
    std::string hint(const Result& result) const {
        if (result.past_the_end) return "You write past the end of " + first_ + ".";
        if (!result.written) return "This is not computed yet: " + first_ + ".";
        std::string perhaps, partly;
        for (const Explanation& e : result.explanations) {
            const bool all = e.wrong == result.wrong;
            if (e.predicts && all && e.everywhere) return e.text;
        }
        for (const Explanation& e : result.explanations) {
            const bool all = e.wrong == result.wrong;
            if (!e.predicts && all) return e.text;
            if (e.predicts && all && perhaps.empty()) perhaps = "Perhaps: " + e.text;
            if (e.of_input && partly.empty())
                partly = "Not all wrong values are alike. Of the first: " + e.text;
        }
        if (!perhaps.empty()) return perhaps;
        if (!partly.empty()) return partly;
        // Where there are several mistakes, none makes all wrong values: the value that is shown tells of
        // one.
        const Explanation* shown = nullptr;
        for (const Explanation& e : result.explanations)
            if (e.of_shown && (!shown || e.wrong > shown->wrong)) shown = &e;
        if (shown)
            return "Perhaps there are several mistakes. This one makes the value above: " + shown->text;
        return "Compare " + first_ + " and its operands with what stands above the function.";
    }

    int number_;
    std::mt19937 random_{1};
    size_t count_ = 0;
    std::string first_, shown_;  // the result that has the first wrong value, and what is printed of this
    std::map<std::string, Result> results_;
};

Format format_of(const Fp8& f) { return f.mantissa == 3 ? Format::E4M3 : Format::E5M2; }

template <class T, class F> Floats each(const std::vector<T>& x, F f) {
    Floats y;
    for (T v : x) y.push_back(f(v));
    return y;
}
// The largest magnitudes of groups of 16, row by row. largest: of how many values at x
template <class F> Floats maxima(const Floats& x, int rows, F largest) {
    Floats result;
    const int cols = int(x.size()) / rows;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < cols; c += 16)
            result.push_back(largest(&x[r * cols + c], std::min(16, cols - c)));
    return result;
}
Floats amaxes(const Floats& x, int rows) { return maxima(x, rows, reference::compute_amax); }
float largest_signed(const float* x, int64_t n) {
    float largest = 0;
    for (int64_t i = 0; i < n; i++) largest = std::isnan(x[i]) ? INFINITY : std::max(largest, x[i]);
    return largest;
}
Floats scales(const Floats& x, int rows) {
    return each(amaxes(x, rows), [](float amax) { return reference::scale_of(E4M3_GROUP, amax); });
}

// Exercises 2 to 4: compare(c, rows, x) for the first of these tensors
template <class F> int on_tensors(int number, int count, F compare) {
    Comparison c(number);
    Floats negative = c.normal(64), nan = each(c.normal(80), fabsf), last = each(c.normal(120), fabsf);
    for (int i = 5; i < 64; i += 16) negative[i] = float(-9 - i);
    nan[20] = NAN;
    nan[35] = 100;
    nan[79] = -NAN;
    // Values midway between two codes, whose scale is a BF16 number: x / s is a tie, and x (1 / s) is near
    // one.
    Floats ties;
    const float s = 0x1.FEp-7f;
    for (uint8_t code = 8; code < 0x78; code++) {
        if (ties.size() % 16 == 0) ties.push_back(448 * s);
        ties.push_back((given::decode(code) + given::decode(code + 1)) / 2 * s);
    }
    ties.resize(ties.size() / 16 * 16);
    const std::vector<std::tuple<const char*, int, Floats>> tensors = {
        {"", 25, each(c.normal(2000, 1), fabsf)},
        {"", 31, each(c.normal(496, 9), fabsf)},
        {"", 7, ties},
        {"negative values", 4, negative},
        {"zeros", 3, Floats(48)},
        {"a last, shorter group", 3, last},
        {"tiny values", 1, Floats(16, 1e-39f)},
        {"NaN", 5, nan}};
    for (const auto& [special, rows, x] : tensors) {
        c.special = special;
        if (count-- > 0) compare(c, rows, x);
    }
    return c.finish();
}

constexpr const char* SIGNED = "The largest magnitude may be that of a negative value: take |x|.";
constexpr const char* WRONG_FMAX = "448 is the largest value of E4M3; 57344 is that of E5M2.";
constexpr const char* INVERSE = "A few codes are one off: multiply by 1 / s, in FP32; do not divide by s.";
constexpr const char* LEAST_SCALE = "The scale of tiny values is at least 2^-126, so that 1 / s is finite.";
constexpr const char* ZERO_SCALE = "A scale of 0 cannot be divided by: where all values are zero, it is 1.";

}  // namespace

static Matrix quantized_as(const Matrix& x, const Storage& q) {
    return {x.rows, x.cols, dequantize(reference::quantize(x.values.data(), x.rows, x.cols, q))};
}
Matrix given::quantized(const Matrix& x) { return quantized_as(x, {Format::E4M3}); }
Matrix given::quantized_e5m2(const Matrix& x) { return quantized_as(x, {Format::E5M2}); }
Matrix given::quantized(const Matrix& x, int block_rows, int block_cols) {
    return quantized_as(x, {Format::E4M3, {block_rows, block_cols}});
}
Matrix given::transposed(const Matrix& x) {
    Matrix y{x.cols, x.rows, Floats(x.values.size())};
    for (int r = 0; r < x.rows; r++)
        for (int c = 0; c < x.cols; c++) y.values[c * x.rows + r] = x.values[r * x.cols + c];
    return y;
}
Matrix given::product(const Matrix& a, const Matrix& b) {
    if (a.cols != b.rows)
        judge::failure = text("given::product: a has ", a.cols, " columns and b ", b.rows,
                              " rows: it sums over both. Is one of them to be transposed?");
    if (!judge::failure.empty()) return {};
    Matrix c{a.rows, b.cols, Floats(size_t(a.rows) * b.cols)};
    reference::matmul<float>(a.rows, b.cols, a.cols, {a.values.data(), a.cols, 1},
                             {b.values.data(), b.cols, 1}, c.values.data());
    return c;
}

// --- 1 ---

namespace {

enum class DecodeSlip {
    Bias,
    OneAlways,
    NoOne,
    SubnormalExponent,
    WholeMantissa,
    NoSign,
    Infinity,
    No_NaN,
    E5M2Finite
};

float decode_with(DecodeSlip slip, const Fp8& f, uint8_t code) {
    const int ones = (1 << f.mantissa) - 1, top = 0x7F >> f.mantissa;
    const int field = (code & 0x7F) >> f.mantissa, mantissa = code & ones;
    const float sign = (code & 0x80) && slip != DecodeSlip::NoSign ? -1.0f : 1.0f;
    const bool like_fp32 = f.mantissa == 2 ? slip != DecodeSlip::E5M2Finite : slip == DecodeSlip::Infinity;
    if (field == top && like_fp32) return mantissa == 0 ? sign * INFINITY : NAN;
    if (f.mantissa == 3 && field == top && mantissa == ones && slip != DecodeSlip::No_NaN) return NAN;
    bool one = field > 0;
    if (slip == DecodeSlip::OneAlways) one = true;
    if (slip == DecodeSlip::NoOne) one = false;
    float significand = std::ldexp(float(mantissa), slip == DecodeSlip::WholeMantissa ? 0 : -f.mantissa);
    if (one) significand += 1;
    int exponent = std::max(field, 1) - f.bias;
    if (slip == DecodeSlip::SubnormalExponent) exponent = field - f.bias;
    if (slip == DecodeSlip::Bias) exponent--;
    return sign * std::ldexp(significand, exponent);
}

}  // namespace

int judge::decode(const Function<float(const Fp8&, uint8_t)>& decode) {
    using enum DecodeSlip;
    const std::vector<std::pair<DecodeSlip, const char*>> slips = {
        {OneAlways, "Where the exponent field is 0, the mantissa has no 1 in front."},
        {NoOne, "The mantissa has a 1 in front, except where the exponent field is 0: 1 + m / 2^M."},
        {SubnormalExponent, "Where the exponent field is 0, the exponent is that of field 1: 1 - bias."},
        {WholeMantissa, "The mantissa m is a fraction: m / 2^M."},
        {NoSign, "Bit 7 is the sign."},
        {Infinity, "E4M3 has no infinity: of its largest exponent, only mantissa 7 is NaN."},
        {No_NaN, "In E4M3 the largest mantissa of the largest exponent is NaN."},
        {E5M2Finite, "In E5M2 the largest exponent is for infinity (mantissa 0) and NaN."}};
    Comparison c(1);
    for (const Fp8& f : {E4M3, E5M2})
        for (int code = 0; code < 256; code++) {
            const int field = (code & 0x7F) >> f.mantissa, top = 0x7F >> f.mantissa;
            std::vector<Hint> hints;
            for (const auto& [slip, text] : slips)
                hints.push_back({text, {decode_with(slip, f, uint8_t(code))}});
            hints.push_back(about("codes whose sign bit is set", code & 0x80));
            hints.push_back(about("codes with exponent 0", field == 0));
            hints.push_back(about("the largest exponent", field == top));
            c.of = " code " + hex(code);
            c(info(format_of(f)).name, Floats{reference::decode(format_of(f), uint8_t(code))},
              Floats{decode(f, uint8_t(code))}, hints);
        }
    return c.finish();
}

// --- 2 to 4 ---

int judge::quantize_tensor(const Function<float(int, const float*, uint8_t*)>& quantize) {
    return on_tensors(2, 7, [&](Comparison& c, int, const Floats& x) {
        const int n = int(x.size());
        const StoredMatrix q = reference::quantize(x.data(), 1, n, {Format::E4M3});
        const float amax = reference::compute_amax(x.data(), n), s = q.scale(0, 0);
        const float above_zero = largest_signed(x.data(), n);
        Codes codes = unwritten(n);
        const float got = quantize(n, guarded(x).data(), codes.data());
        auto code = [](float v) { return float(given::encode(v)); };
        c.of = text(" of a tensor with amax ", amax);
        c("scale", Floats{s}, Floats{got},
          {{SIGNED, {reference::scale_of({Format::E4M3}, above_zero)}},
           {WRONG_FMAX, {reference::scale_of({Format::E5M2}, amax)}},
           {ZERO_SCALE, {amax == 0 ? 0 : s}},
           {LEAST_SCALE, {amax == 0 ? 1 : amax / 448}},
           {"Return s, not 1 / s.", {1 / s}},
           {"This is amax itself: s maps it onto 448.", {amax}},
           {"Not all n values are looked at, or more: read x[0] to x[n - 1].", {GUARD / 448}}},
          1e-7);
        c("code", q.codes, codes,
          {{INVERSE, each(x, [=](float v) { return code(v / s); })},
           {"This is the code of x, without the scale.", each(x, code)},
           {"Multiply by 1 / s, not by s.", each(x, [=](float v) { return code(v * s); })}},
          0, x);
    });
}

int judge::quantize_groups(const Function<void(int, int, const float*, uint8_t*, float*)>& quantize) {
    return on_tensors(3, 7, [&](Comparison& c, int rows, const Floats& x) {
        const int n = int(x.size()), cols = n / rows;
        const Floats amax = amaxes(x, rows), expected = scales(x, rows), behind = guarded(x);
        Codes codes = unwritten(n);
        Floats got = undefined(amax.size());
        quantize(rows, cols, behind.data(), codes.data(), got.data());
        auto scale = [](float amax) { return reference::scale_of(E4M3_GROUP, amax); };
        auto unrounded = [](float amax) { return reference::scale_of({Format::E4M3}, amax); };
        Floats flat = each(amaxes(x, 1), scale), whole, wide, inexact, divided,
               unscaled = each(x, given::encode);
        flat.resize(amax.size(), UNDEFINED);
        for (int i = 0; i < n; i++) {
            const int group = i / cols * ((cols + 15) / 16) + i % cols / 16;
            if (i % cols % 16 == 0) wide.push_back(scale(reference::compute_amax(&behind[i], 16)));
            inexact.push_back(given::encode(x[i] * (1 / unrounded(amax[group]))));
            divided.push_back(given::encode(x[i] / expected[group]));
        }
        whole.assign(amax.size(), scale(reference::compute_amax(x.data(), n)));
        c.of = text(" of ", rows, " x ", cols, " values");
        c("scale", expected, got,
          {{"Scales are stored in BF16, not in FP32.", each(amax, unrounded)},
           {"BF16 is rounded to the nearest, not cut off: given::to_bf16.",
            each(amax,
                 [=](float a) {
                     return std::bit_cast<float>(std::bit_cast<uint32_t>(unrounded(a)) & 0xFFFF0000);
                 })},
           {SIGNED, each(maxima(x, rows, largest_signed), scale)},
           {WRONG_FMAX, each(amax, [=](float a) { return scale(a * 448 / 57344); })},
           {ZERO_SCALE, each(amax, [=](float a) { return a == 0 ? 0 : scale(a); })},
           {LEAST_SCALE, each(amax, [=](float a) { return a == 0 ? 1 : given::to_bf16(a / 448); })},
           {"A group does not cross to the next row: each row begins a new one.", flat},
           {"The last group of a row may be shorter: it ends with the row.", wide},
           {"Each group has a scale of its own, not the tensor's.", whole}},
          0, amax);
        c("code", reference::quantize(x.data(), rows, cols, E4M3_GROUP).codes, codes,
          {{INVERSE, divided},
           {"Scales are right: use the scale after it is rounded to BF16; multiply by 1 / s.", inexact},
           {"This is the code of x, without the scale.", unscaled}},
          0, x);
    });
}

int judge::amax(const Function<float(int, const float*, float*)>& amax) {
    return on_tensors(4, 8, [&](Comparison& c, int, const Floats& x) {
        const int n = int(x.size());
        const Floats expected = amaxes(x, 1), behind = guarded(x, -GUARD);
        Floats got = undefined(expected.size());
        const float returned = amax(n, behind.data(), got.data());
        auto without_nan = [](const float* x, int64_t n) {
            float largest = 0;
            for (int i = 0; i < n; i++) largest = std::max(largest, std::abs(x[i]));
            return largest;
        };
        auto nan_until_next = [](const float* x, int64_t n) {
            float largest = 0;
            for (int i = 0; i < n; i++) largest = std::max(std::abs(x[i]), largest);
            return largest;
        };
        auto nan_stays = [](const float* x, int64_t n) {
            const float largest = reference::compute_amax(x, n);
            return std::isinf(largest) ? NAN : largest;
        };
        Floats wide = expected, cut = expected, largest_of_undefined;
        if (n % 16) {
            wide.back() = GUARD;
            cut.back() = UNDEFINED;
        }
        for (float v : expected) largest_of_undefined.push_back(std::max(v, UNDEFINED));
        c.of = text(" of ", n, " values");
        c("maximum", expected, got,
          {{"You read past the end of x: the last group is shorter, it ends at n.", wide},
           {"The last, shorter group is missing: there are (n + 15) / 16 groups.", cut},
           {SIGNED, maxima(x, 1, largest_signed)},
           {"NaN gets lost: a comparison with it is false. Ask std::isnan.", maxima(x, 1, without_nan)},
           {"NaN gets lost at the next value: a comparison with it is false.", maxima(x, 1, nan_until_next)},
           {"The maximum of a group with a NaN is infinity here, not NaN.", maxima(x, 1, nan_stays)},
           {"maxima is undefined before: begin each group with 0.", largest_of_undefined}});
        c("amax", Floats{reference::compute_amax(x.data(), n)}, Floats{returned},
          {{"This is the maximum of the last group: return the largest of all.", {expected.back()}},
           {"This is the maximum of the first group: return the largest of all.", {expected[0]}}});
    });
}

// --- 5 ---

namespace {

enum class EncodeSlip { TiesAway, Truncation, Up, OneKept, NoSign, NaNSaturates };

// Of a magnitude that is at most f.max; a NaN is turned into the largest code, as a comparison with it may.
float encode_with(EncodeSlip slip, const Fp8& f, float x) {
    const int sign = std::signbit(x) && slip != EncodeSlip::NoSign ? 0x80 : 0;
    const int largest = f.mantissa == 3 ? 0x7E : 0x7B;
    if (std::isnan(x) && slip != EncodeSlip::NaNSaturates) return float(sign | 0x7F);
    if (!(std::abs(x) <= f.max)) return float(sign | largest);
    const int lowest = 1 - f.bias;
    const int e = x == 0 ? lowest : std::max(std::ilogb(x), lowest);
    const float exact = std::ldexp(std::abs(x), f.mantissa - e);
    float steps = std::nearbyint(exact);
    if (slip == EncodeSlip::TiesAway) steps = std::round(exact);
    if (slip == EncodeSlip::Truncation) steps = std::floor(exact);
    if (slip == EncodeSlip::Up) steps = std::ceil(exact);
    int code = int(steps) + ((e + f.bias - 1) << f.mantissa);
    if (slip == EncodeSlip::OneKept) code += 1 << f.mantissa;
    return float((sign | code) & 0xFF);
}

// A code, and what is known of the input of it
void compare_code(Comparison& c, const Fp8& f, float x, uint8_t mine) {
    using enum EncodeSlip;
    const std::vector<std::pair<EncodeSlip, const char*>> slips = {
        {TiesAway, "A tie goes to the even code, not away from zero: std::nearbyint."},
        {Truncation, "The count is cut off: round it to the nearest."},
        {Up, "The count is rounded up: round it to the nearest."},
        {OneKept, "The count has the 1 in front of the mantissa: it adds 1 to the exponent field."},
        {NoSign, "Bit 7 is the sign: std::signbit."},
        {NaNSaturates, "NaN does not saturate: ask std::isnan first."}};
    std::vector<Hint> hints;
    for (const auto& [slip, text] : slips) hints.push_back({text, {encode_with(slip, f, x)}});
    const uint8_t code = uint8_t(reference::encode(format_of(f), x));
    const bool tie = reference::encode(format_of(f), x * 0.99f) != reference::encode(format_of(f), x * 1.01f);
    const float magnitude = std::abs(x), smallest_normal = std::ldexp(1.0f, 1 - f.bias);
    const bool carries =
        code % (1 << f.mantissa) == 0 && std::abs(reference::decode(format_of(f), code)) > magnitude;
    hints.push_back(
        where(std::signbit(x) && !(x < 0), "Zero and NaN have signs, too: std::signbit(x), not x < 0."));
    hints.push_back(
        where(magnitude > f.max, "Values above f.max, infinity too, saturate: they have the code of f.max."));
    hints.push_back(where(x == 0, "Zero has the codes 0x00 and 0x80: std::ilogb(0) is no exponent."));
    hints.push_back(
        where(magnitude < smallest_normal,
              "Below the smallest normal value, codes stay equally far apart: e is at least 1 - bias."));
    hints.push_back(where(carries,
                          "Rounding reaches the next power of two here: the mantissa's carry belongs to the "
                          "exponent. Do not mask it."));
    hints.push_back(about("ties", tie));
    hints.push_back(about("NaN", std::isnan(x)));
    hints.push_back(about("negative values", std::signbit(x)));
    c(info(format_of(f)).name, Codes{code}, Codes{mine}, hints, 0, {x});
}

}  // namespace

int judge::encode(const Function<uint8_t(const Fp8&, float)>& encode) {
    Comparison c(5);
    for (const Fp8& f : {E4M3, E5M2}) {
        const Format format = c.format = format_of(f);
        Floats inputs;
        for (int code = 0; code < reference::encode(format, f.max); code++)
            for (float part : {0.0f, 0.25f, 0.5f, 0.75f})
                inputs.push_back((1 - part) * reference::decode(format, uint8_t(code)) +
                                 part * reference::decode(format, uint8_t(code + 1)));
        inputs.insert(inputs.end(), {f.max * 1.02f, f.max * 1.1f, 1e30f, INFINITY, NAN, 1e-42f});
        for (float magnitude : inputs)
            for (float x : {magnitude, -magnitude}) compare_code(c, f, x, encode(f, x));
    }
    return c.finish();
}

// --- 6 ---

namespace {

// k, from the logarithms to base 2 of the ratio of the group and of the range of the format
float rounded_k(double range, double ratio, double least = 1.0 / 16, double most = 64) {
    if (!(ratio * most > range)) return float(most);
    return float(std::max(std::rint(256 * range / ratio) / 256, least));
}

void compare_factor(Comparison& c, float max, float min, float got) {
    const double ratio = std::log2(double(max)) - std::log2(double(min)), range = std::log2(448 * 512.0);
    const double exact = 256 * range / ratio, near = 1.01 / 256;
    const bool border = std::abs(exact - std::floor(exact) - 0.5) < 0.01;  // both neighbours are right
    const float k = given::expansion_factor(max, min);
    auto limited = [](double k) { return float(std::clamp(k, 1.0 / 16, 64.0)); };
    const float sixteenths = limited(std::floor(exact / 16) / 16);
    const float nearest_sixteenth = limited(std::rint(exact / 16) / 16);
    c.of = text(", max = ", max, ", min = ", min);
    c("k", Floats{k}, Floats{got},
      {{"The smallest code that is not zero is subnormal: 2^-9, not 2^-6.",
        {rounded_k(std::log2(448 * 64.0), ratio)},
        near},
       {"The range ends at the smallest value, 2^-9: not at 1.", {rounded_k(std::log2(448.0), ratio)}, near},
       {"This is upside down: k is the logarithm of the format's range over that of max / min.",
        {rounded_k(ratio, range)},
        near},
       {"One logarithm is natural and the other to base 2: take the same for both.",
        {rounded_k(range, ratio * std::log(2.0))},
        near},
       {"One logarithm is natural and the other to base 2: take the same for both, here.",
        {rounded_k(range * std::log(2.0), ratio)},
        near},
       {"k may be below 1: the least is 1/16.", {rounded_k(range, ratio, 1)}, near},
       {"k is at most 64, for equal magnitudes, too.", {rounded_k(range, ratio, 1.0 / 16, INFINITY)}, near},
       {"Round to multiples of 1/256, not of 1/16.", {sixteenths}, near},
       {"Round to multiples of 1/256, not of 1/16, which are coarse.", {nearest_sixteenth}, near},
       where(std::abs(got - k) <= near, "k is near: round to the nearest multiple of 1/256."),
       where(std::isinf(max / min), "max / min overflows here: subtract logarithms in place of dividing.")},
      border ? 1.001 / 256 / k : 0);
}

void compare_powers(Comparison& c, float max, float k, float x, const judge::Function<judge::Expand>& expand,
                    const judge::Function<judge::Expand>& contract) {
    const float y = given::expand(x, max, k), back = given::contract(y, max, k);
    const Hint negative = about("negative values", x < 0), zero = about("zero", x == 0);
    const Hint sign = {"The result has the sign of the input: std::copysign.", {std::abs(y)}};
    auto zero_or = [=](double magnitude) {
        return x == 0 ? Floats{0} : Floats{std::copysign(float(magnitude), x)};
    };
    const double from = std::abs(x) / double(max), to = std::abs(y) / 448.0, root = std::pow(to, 1.0 / k);
    c.of = text(", max = ", max, ", k = ", k);
    c("expand", Floats{y}, Floats{expand(x, max, k)},
      {sign,
       {"max becomes 448: multiply the power by it.", zero_or(std::pow(from, double(k)))},
       {"Divide |x| by max before you raise it to the power k.",
        zero_or(448 * std::pow(std::abs(double(x)), double(k)))},
       {"expand raises to the power k, contract to 1 / k.", zero_or(448 * std::pow(from, 1.0 / k))},
       where(x != 0 && from < FLT_MIN,
             "|x| / max underflows here: subtract logarithms in place of dividing."),
       negative,
       zero},
      3e-3, {x});
    c("contract", Floats{back}, Floats{contract(y, max, k)},
      {{sign.text, {std::abs(back)}},
       {"448 becomes max: multiply the power by it.", zero_or(root)},
       {"Divide |y| by 448 before you raise it to the power 1 / k.",
        zero_or(max * std::pow(to * 448, 1.0 / k))},
       {"contract raises to the power 1 / k, expand to k.", zero_or(max * std::pow(to, double(k)))},
       {"This is the power 2 / k: the exponent of r is log2(|y| / 448) / (2 k).", zero_or(max * root * root)},
       {"This is the power 1 / (2 k): the result has r twice, (max r) r.", zero_or(max * std::sqrt(root))},
       where(x != 0 && root < FLT_MIN,
             "The power underflows here: multiply max by its root r, and then once more, (max r) r."),
       negative,
       zero},
      1e-4 + 3e-45 / std::abs(back), {y});
}

}  // namespace

int judge::expansion(const Function<float(float, float)>& expansion_factor, const Function<Expand>& expand,
                     const Function<Expand>& contract) {
    Comparison c(6);
    auto check = [&](float max, float min) {
        compare_factor(c, max, min, expansion_factor(max, min));
        const float k = given::expansion_factor(max, min);
        for (float part : {0.0f, 0.2f, 0.7f, 1.0f})
            for (float sign : {1.0f, -1.0f, 0.0f}) {
                const float x = sign * std::exp2((1 - part) * std::log2(min) + part * std::log2(max));
                compare_powers(c, max, k, x, expand, contract);
            }
    };
    for (float magnitude : c.normal(40)) check(std::exp(magnitude), std::exp(-1 - 3 * magnitude * magnitude));
    c.special = "equal magnitudes";
    check(3, 3);
    check(1, 0.999f);
    c.special = "extreme magnitudes";
    check(1e30f, 1e-30f);
    check(1e38f, 1e-44f);
    check(1e-30f, 1e-38f);
    return c.finish();
}

// --- 7 and 14 ---

namespace {

// What a step of AdamW has: the moments as they are loaded, the gradient and the weights before.
struct AdamWInputs {
    Step s;
    Floats m, v, g, w;
};
enum class AdamWSlip {
    None,
    NoCorrection,
    RootBeforeBias,
    EpsInRoot,
    NotSquared,
    NoRoot,
    Coupled,
    NoDecay,
    DecayWithoutRate,
    Uphill,
    WholeGradient,
    OldMoments
};

// The change of each weight: it is small, and a mistake in it even smaller.
Floats change_with(AdamWSlip slip, AdamWInputs in) {
    using enum AdamWSlip;
    const Step& s = in.s;
    Floats change;
    for (size_t i = 0; i < in.g.size(); i++) {
        float g = in.g[i], m = in.m[i], v = in.v[i];
        if (slip == Coupled) g += s.decay * in.w[i];
        if (slip != OldMoments) {
            m = s.beta1 * m + (slip == WholeGradient ? g : (1 - s.beta1) * g);
            v = s.beta2 * v + (1 - s.beta2) * (slip == NotSquared ? g : g * g);
        }
        const float bias1 = slip == NoCorrection ? 1 : s.bias1, bias2 = slip == NoCorrection ? 1 : s.bias2;
        float divisor = std::sqrt(v / bias2) + s.eps;
        if (slip == RootBeforeBias) divisor = std::sqrt(v) / bias2 + s.eps;
        if (slip == EpsInRoot) divisor = std::sqrt(v / bias2 + s.eps);
        if (slip == NoRoot) divisor = v / bias2 + s.eps;
        float update = s.lr * (m / bias1 / divisor);
        if (slip == DecayWithoutRate) update += s.decay * in.w[i];
        else if (slip != NoDecay && slip != Coupled) update += s.lr * s.decay * in.w[i];
        change.push_back(slip == Uphill ? update : -update);
    }
    return change;
}

// Of moments that are loaded without contraction
Floats linear_values(const reference::Moment& m) {
    Floats x;
    for (size_t i = 0; i < m.codes.size(); i++) x.push_back(given::decode(m.codes[i]) / 448 * m.max[i / 128]);
    return x;
}

void compare_change(Comparison& c, const AdamWInputs& in, const Floats (&linear)[2],
                    const Floats (&stored)[2], const Floats& expected, const Floats& mine) {
    using enum AdamWSlip;
    const std::vector<std::pair<AdamWSlip, const char*>> slips = {
        {NoCorrection, "The bias correction is missing: m / bias1 and v / bias2."},
        {RootBeforeBias, "bias2 belongs inside the square root: sqrt(v / bias2)."},
        {EpsInRoot, "eps is added to the square root, not inside it."},
        {NotSquared, "v is a mean of g^2: g is not squared."},
        {NoRoot, "The update is divided by the square root of v."},
        {Coupled, "Weight decay is decoupled: it is added to the update, not to g."},
        {NoDecay, "The weight decay is missing."},
        {DecayWithoutRate, "The learning rate multiplies the weight decay, too."},
        {Uphill, "The update is subtracted from the weight."},
        {WholeGradient, "m is a mean: g is multiplied by 1 - beta1."},
        {OldMoments, "Update the moments before the weight."}};
    std::vector<Hint> hints;
    for (const auto& [slip, text] : slips) hints.push_back({text, change_with(slip, in)});
    AdamWInputs without = in, quantized = in;
    for (int j : {0, 1}) {
        (j == 0 ? without.m : without.v) = linear[j];
        (j == 0 ? quantized.m : quantized.v) = stored[j];
    }
    hints.push_back(
        {"Loading a moment includes the expansion's inverse: given::contract.", change_with(None, without)});
    hints.push_back(
        {"Update the weight before the moments are quantized.", change_with(OldMoments, quantized)});
    c("change of w", expected, mine, hints, 1e-4);
}

// now: the moment before it is stored; before, expected and mine: as it is stored
void compare_moment(Comparison& c, const std::string& of, bool zeros, const Floats& now,
                    const reference::Moment& before, const reference::Moment& expected,
                    const reference::Moment& mine) {
    Codes codes = expected.codes;
    Floats outdated, linear;
    for (size_t i = 0; i < now.size(); i++) {
        const size_t group = i / 128;
        // Logarithms differ in their last bits: at a border, both codes are right.
        const float y = given::expand(now[i], mine.max[group], mine.k[group]);
        for (float near : {y * 0.995f, y * 1.005f})
            if (mine.codes[i] == given::encode(near)) codes[i] = mine.codes[i];
        outdated.push_back(given::encode(given::expand(now[i], before.max[group], before.k[group])));
        linear.push_back(given::encode(now[i] / mine.max[group] * 448));
    }
    for (size_t group = 0; group < expected.max.size(); group++) {
        const int first = int(group) * 128, n = std::min(128, int(now.size()) - first);
        const float k = expected.k[group];
        c("max" + of, Floats{expected.max[group]}, Floats{mine.max[group]},
          {{SIGNED, {largest_signed(&now[first], n)}}, {"max is that before the step.", {before.max[group]}}},
          1e-5);
        c("k" + of, Floats{k}, Floats{mine.k[group]},
          {{"k is 1 everywhere: compute it from max and the smallest magnitude.", {1}},
           {"k is that before the step.", {before.k[group]}},
           where(zeros,
                 "Zeros do not count in the smallest magnitude; a group of zeros has max = 0 and k = 1.")},
          1.001 / 256 / k);
    }
    c("code" + of, codes, mine.codes,
      {{"The codes belong to the new max and k.", outdated},
       {"Storing a moment includes its expansion: given::expand.", linear}});
}

// Gives the moments that are loaded, and stores them; the gradient of a group with zeros has zeros there,
// too.
AdamWInputs adamw_inputs(Comparison& c, int n, int round, bool zeros, reference::Moment (&stored)[2]) {
    const Step step{0.01f, 0.9f, 0.95f, 0.01f, 0.1f, 0.271f, 0.142625f};  // the third step
    AdamWInputs in{step, {}, {}, {}, c.normal(n)};
    in.g = c.normal(n, 1);
    in.m = c.normal(n, float(round % 3) / 2);
    in.v = c.normal(n);
    for (int i = 0; i < n; i++) {
        in.v[i] *= in.v[i];
        if (zeros && (round == 2 || i % 7 == 0)) in.g[i] = in.m[i] = in.v[i] = 0;
    }
    for (int j : {0, 1}) {
        Floats& values = j == 0 ? in.m : in.v;
        stored[j].init(Format::E4M3, true, n);
        stored[j].store(values.data(), j == 1);
        stored[j].load(values.data());
    }
    return in;
}

}  // namespace

int judge::adamw(const Function<AdamW>& adamw, int number) {
    Comparison c(number);
    for (int round = 0; round < 24; round++) {
        const bool zeros = round % 4 == 2, small = round % 4 == 3;
        if (zeros) c.special = "groups with zeros";
        else c.special = small ? "groups with fewer than 128 parameters" : "";
        const int n = 128 * (number == 7 ? 1 : 1 + round % 5) - (small ? 91 : 0);
        reference::Moment before[2], mine[2];
        const AdamWInputs in = adamw_inputs(c, n, round, zeros, before);
        Floats my_w = in.w, stored[2] = {in.m, in.m};
        my_w.resize(n + GUARDS, UNDEFINED);
        auto view = [](reference::Moment& m) { return Moment{m.codes.data(), m.max.data(), m.k.data()}; };
        for (int j : {0, 1}) {
            mine[j] = before[j];
            mine[j].codes.resize(n + GUARDS, UNWRITTEN);
        }
        adamw(in.s, n, guarded(in.g).data(), my_w.data(), view(mine[0]), view(mine[1]));
        const bool blank = std::equal(in.w.begin(), in.w.end(), my_w.begin()) &&
                           std::equal(before[0].codes.begin(), before[0].codes.end(), mine[0].codes.begin());

        const reference::AdamWFactors factors{.lr = in.s.lr,
                                              .beta1 = in.s.beta1,
                                              .beta2 = in.s.beta2,
                                              .one_minus_beta1 = 1 - in.s.beta1,
                                              .one_minus_beta2 = 1 - in.s.beta2,
                                              .eps = in.s.eps,
                                              .decay = in.s.decay,
                                              .bias_correction1 = in.s.bias1,
                                              .bias_correction2_sqrt = std::sqrt(in.s.bias2),
                                              .clip_factor = 1.0f};
        Floats w = in.w, now[2] = {in.m, in.v};
        reference::adamw(factors, n, in.g.data(), w.data(), now[0].data(), now[1].data());
        reference::Moment expected[2] = {before[0], before[1]};
        for (int j : {0, 1}) {
            expected[j].store(now[j].data(), j == 1);
            mine[j].load(stored[j].data());
        }
        for (int i = 0; i < n; i++) {
            w[i] -= in.w[i];
            my_w[i] -= in.w[i];
        }
        compare_change(c, in, {linear_values(before[0]), linear_values(before[1])}, stored, w, my_w);
        for (int j : {0, 1})
            if (!blank)
                compare_moment(c, j == 0 ? " of m" : " of v", zeros, now[j], before[j], expected[j], mine[j]);
    }
    return c.finish();
}

// --- 8 and 9 ---

namespace {

using Quantizer = Matrix (*)(const Matrix&);
Matrix one_e4m3(const Matrix& m) { return given::quantized(m); }
Matrix one_e5m2(const Matrix& m) { return given::quantized_e5m2(m); }
Matrix itself(const Matrix& m) { return m; }
Matrix along_row(const Matrix& m) { return given::quantized(m, 1, 128); }
Matrix along_column(const Matrix& m) { return given::quantized(m, 128, 1); }
Matrix square(const Matrix& m) { return given::quantized(m, 128, 128); }

struct LinearInputs {
    Matrix x, w, g;
};
// Of many magnitudes, so that it matters which values share a scale. The sizes are no multiples of 128.
LinearInputs linear_inputs(Comparison& c) {
    auto matrix = [&](int rows, int cols) { return Matrix{rows, cols, c.normal(rows * cols, 1)}; };
    return {matrix(200, 160), matrix(144, 160), matrix(200, 144)};
}
Matrix fprop(const LinearInputs& in, Quantizer x, Quantizer w) {
    return given::product(x(in.x), given::transposed(w(in.w)));
}
Matrix dgrad(const LinearInputs& in, Quantizer g, Quantizer w) { return given::product(g(in.g), w(in.w)); }
Matrix wgrad(const LinearInputs& in, Quantizer g, Quantizer x) {
    return given::product(given::transposed(g(in.g)), x(in.x));
}

void compare_gemm(Comparison& c, const std::string& name, const Matrix& expected, Matrix mine,
                  std::vector<Hint> hints) {
    mine.values.resize(expected.values.size(), UNDEFINED);
    hints.push_back(
        {"This is the transpose: see the shapes above the function.", given::transposed(expected).values});
    c(name, expected.values, mine.values, hints, 1e-4);
}

}  // namespace

int judge::linear(const Function<Linear>& linear) {
    Comparison c(8);
    const LinearInputs in = linear_inputs(c);
    Matrix y, dx, dw;
    linear(in.x, in.w, in.g, y, dx, dw);
    const std::string g_format = "Gradients are quantized in E5M2: given::quantized_e5m2(g).";
    const std::string neither = "This is the product of unquantized matrices: quantize both.";
    const std::string blocks =
        "COAT has one scale for a tensor: given::quantized(x), without sizes of blocks.";
    compare_gemm(c, "y", fprop(in, one_e4m3, one_e4m3), y,
                 {{"x is not quantized in fprop.", fprop(in, itself, one_e4m3).values},
                  {"w is not quantized in fprop.", fprop(in, one_e4m3, itself).values},
                  {"x is in E4M3; only gradients are in E5M2.", fprop(in, one_e5m2, one_e4m3).values},
                  {"w is in E4M3; only gradients are in E5M2.", fprop(in, one_e4m3, one_e5m2).values},
                  {"x and w are in E4M3; only gradients are in E5M2.", fprop(in, one_e5m2, one_e5m2).values},
                  {blocks, fprop(in, along_row, square).values},
                  {neither, fprop(in, itself, itself).values}});
    compare_gemm(
        c, "dx", dgrad(in, one_e5m2, one_e4m3), dx,
        {{"g is not quantized in dgrad.", dgrad(in, itself, one_e4m3).values},
         {"w is not quantized in dgrad: it has the codes of fprop.", dgrad(in, one_e5m2, itself).values},
         {g_format, dgrad(in, one_e4m3, one_e4m3).values},
         {neither, dgrad(in, itself, itself).values}});
    compare_gemm(c, "dw", wgrad(in, one_e5m2, one_e4m3), dw,
                 {{"x is quantized in fprop, but not in wgrad: both take the same codes.",
                   wgrad(in, one_e5m2, itself).values},
                  {"g is quantized in dgrad, but not in wgrad: both take the same codes.",
                   wgrad(in, itself, one_e4m3).values},
                  {g_format, wgrad(in, one_e4m3, one_e4m3).values},
                  {"x is in E4M3; only gradients are in E5M2.", wgrad(in, one_e5m2, one_e5m2).values},
                  {neither, wgrad(in, itself, itself).values}});
    return c.finish();
}

int judge::linear_in_blocks(const Function<Linear>& linear) {
    Comparison c(9);
    const LinearInputs in = linear_inputs(c);
    Matrix y, dx, dw;
    linear(in.x, in.w, in.g, y, dx, dw);
    const std::string neither = "This is the product of unquantized matrices: quantize both.";
    const std::string w_blocks = "w has blocks of 128x128, not of 1x128.";
    const std::string per_tensor =
        "This has one scale for a tensor, as in exercise 8: here blocks of values share one.";
    compare_gemm(c, "y", fprop(in, along_row, square), y,
                 {{w_blocks, fprop(in, along_row, along_row).values},
                  {"x is not quantized in fprop.", fprop(in, itself, square).values},
                  {"w is not quantized in fprop.", fprop(in, along_row, itself).values},
                  {"fprop sums over features: blocks of x lie along them, not along tokens.",
                   fprop(in, along_column, square).values},
                  {"x has blocks of 1x128; only w has 128x128.", fprop(in, square, square).values},
                  {per_tensor, fprop(in, one_e4m3, one_e4m3).values},
                  {neither, fprop(in, itself, itself).values}});
    compare_gemm(c, "dx", dgrad(in, along_row, square), dx,
                 {{w_blocks, dgrad(in, along_row, along_row).values},
                  {"w has blocks of 128x128, not of 1x128, transposed or not.",
                   dgrad(in, along_row, along_column).values},
                  {"g is not quantized in dgrad.", dgrad(in, itself, square).values},
                  {"w is not quantized in dgrad.", dgrad(in, along_row, itself).values},
                  {"dgrad sums over features: blocks of g lie along them, not along tokens.",
                   dgrad(in, along_column, square).values},
                  {neither, dgrad(in, itself, itself).values}});
    const std::string tokens =
        "wgrad sums over tokens, the rows of x and g: first transpose both, then quantize.";
    compare_gemm(c, "dw", wgrad(in, along_column, along_column), dw,
                 {{tokens, wgrad(in, along_row, along_row).values},
                  {"wgrad sums over tokens, but the blocks of x lie along features.",
                   wgrad(in, along_column, along_row).values},
                  {"wgrad sums over tokens, but the blocks of g lie along features.",
                   wgrad(in, along_row, along_column).values},
                  {"x is not quantized in wgrad.", wgrad(in, along_column, itself).values},
                  {"g is not quantized in wgrad.", wgrad(in, itself, along_column).values},
                  {neither, wgrad(in, itself, itself).values}});
    return c.finish();
}

// --- 10 ---

namespace {

enum class NormSlip {
    None,
    SumForMean,
    NoMeanTerm,
    Plus,
    SumInRoot,
    NoEps,
    NoWeight,
    SquareOfR,
    WeightInDweight,
    LastToken
};

// dx, and dweight, of N tokens with C values x
std::array<Floats, 2> norm_with(NormSlip slip, int N, int C, const Floats& x, const Floats& weight,
                                const Floats& dy) {
    Floats dx, dweight(C);
    for (int t = 0; t < N * C; t += C) {
        double squares = 0, products = 0;
        for (int i = 0; i < C; i++) {
            const double d = slip == NormSlip::NoWeight ? dy[t + i] : dy[t + i] * weight[i];
            squares += double(x[t + i]) * x[t + i];
            products += d * x[t + i];
        }
        if (slip != NormSlip::SumInRoot) squares /= C;
        const double r = 1 / std::sqrt(squares + (slip == NormSlip::NoEps ? 0 : 1e-5));
        double mean = products / C;
        if (slip == NormSlip::SumForMean) mean = products;
        if (slip == NormSlip::NoMeanTerm) mean = 0;
        if (slip == NormSlip::Plus) mean = -mean;
        const double cube = slip == NormSlip::SquareOfR ? r * r : r * r * r;
        for (int i = 0; i < C; i++) {
            const double d = slip == NormSlip::NoWeight ? dy[t + i] : dy[t + i] * weight[i];
            dx.push_back(float(r * d - cube * x[t + i] * mean));
            if (slip == NormSlip::LastToken) dweight[i] = 0;
            dweight[i] +=
                float(r * x[t + i] * dy[t + i] * (slip == NormSlip::WeightInDweight ? weight[i] : 1.0f));
        }
    }
    return {dx, dweight};
}

}  // namespace

int judge::norm_backward(const Function<Norm>& backward) {
    Comparison c(10);
    const int N = 24, C = 96;
    Floats x = c.normal(N * C, 1);
    const Floats weight = c.normal(C, 0.3f), dy = c.normal(N * C);
    for (int i = 0; i < C; i++) x[3 * C + i] *= 1e-3f;  // a token in which eps counts
    const StoredMatrix q = reference::quantize(x.data(), N, C, E4M3_GROUP);
    const Floats s = scales(x, N);
    Floats dx = undefined(N * C), dweight = undefined(C), expected(N * C), sum(C);
    backward(N, C, guarded(q.codes).data(), guarded(s).data(), guarded(weight).data(), guarded(dy).data(),
             dx.data(), dweight.data());
    x = dequantize(q);
    reference::norm_backward<float>(true, 1e-5f, N, C, x.data(), weight.data(), dy.data(), expected.data(),
                                    sum.data(), nullptr);

    const Floats no_scale = each(q.codes, given::decode);
    Floats wrong_row = no_scale;
    for (int i = 0; i < N * C; i++) wrong_row[i] *= s[i % C / 16];
    using enum NormSlip;
    const std::vector<std::pair<NormSlip, const char*>> slips = {
        {NoMeanTerm, "The term with the mean is missing: r depends on every x of the token."},
        {SumForMean, "The second term has a mean over the token's C values, not their sum."},
        {Plus, "The term with the mean is subtracted: r becomes less when |x| becomes more."},
        {SumInRoot, "r has the mean of x^2, not the sum."},
        {NoEps, "eps is missing: it counts in tokens of small values."},
        {NoWeight, "The gradient of the normalized value is dy * weight: weight is missing."},
        {SquareOfR, "The derivative of r has r^3, not r^2."},
        {WeightInDweight, "dweight is a sum of dy x r, without the weight."},
        {LastToken, "dweight is the sum over all tokens, not of the last."}};
    std::vector<Hint> of_dx, of_dweight;
    auto add = [&](const std::string& text, const std::array<Floats, 2>& results) {
        of_dx.push_back({text, results[0]});
        of_dweight.push_back({text, results[1]});
    };
    for (const auto& [slip, text] : slips) add(text, norm_with(slip, N, C, x, weight, dy));
    add("x is a code's value times its group's scale.", norm_with(None, N, C, no_scale, weight, dy));
    add("Each token has C / 16 scales of its own, behind those of the token before.",
        norm_with(None, N, C, wrong_row, weight, dy));
    c("dx", expected, dx, of_dx, 1e-4);
    c("dweight", sum, dweight, of_dweight, 1e-4);
    return c.finish();
}

// --- 11 ---

namespace {

enum class SwigluSlip {
    None,
    Sigmoid,
    Silu,
    NoUp,
    NoSilu,
    Swapped,
    ShortRowsRead,
    ShortRowsWritten,
    ShortRows,
    Interleaved
};

Floats swiglu_with(SwigluSlip slip, int N, int F, const Floats& x, const Floats& dact) {
    using enum SwigluSlip;
    Floats result(2 * N * F, UNDEFINED);
    for (int i = 0; i < N * F; i++) {
        const int full = i / F * 2 * F + i % F, cut = i;
        int read = slip == ShortRowsRead || slip == ShortRows ? cut : full;
        int write = slip == ShortRowsWritten || slip == ShortRows ? cut : full;
        int distance = F;  // of up from gate
        if (slip == Interleaved) {
            read = write = 2 * i;
            distance = 1;
        }
        const double gate = x[read], up = x[read + distance], s = 1 / (1 + std::exp(-gate));
        double derivative = s * (1 + gate * (1 - s));
        if (slip == Sigmoid) derivative = s * (1 - s);
        if (slip == Silu) derivative = gate * s;
        float dgate = float(dact[i] * derivative * (slip == NoUp ? 1 : up));
        float dup = float(dact[i] * gate * (slip == NoSilu ? 1 : s));
        if (slip == Swapped) std::swap(dgate, dup);
        result[write] = dgate;
        result[write + distance] = dup;
    }
    return result;
}

}  // namespace

int judge::swiglu_backward(const Function<SwiGLU>& backward) {
    Comparison c(11);
    const int N = 20, F = 48, row = 2 * F;
    Floats gate_up = c.normal(N * row, 0.7f), got = undefined(N * row), expected(N * row);
    const Floats dact = c.normal(N * F);
    gate_up[(N - 1) * row] = 60;  // last: many mistakes look alike there
    gate_up[(N - 1) * row + 1] = -60;
    const StoredMatrix q = reference::quantize(gate_up.data(), N, row, E4M3_GROUP);
    const Floats s = scales(gate_up, N);
    backward(N, F, guarded(q.codes).data(), guarded(s).data(), guarded(dact).data(), got.data());
    const Floats x = dequantize(q), no_scale = each(q.codes, given::decode);
    reference::activation_backward<float>(true, N, F, x.data(), dact.data(), expected.data());

    Floats gate_scales = no_scale, short_rows = no_scale, first_row = no_scale;
    for (int i = 0; i < N * row; i++) {
        const int group = i / 16, groups = row / 16, of_row = group % groups;
        gate_scales[i] *= s[of_row < F / 16 ? group : group - F / 16];
        short_rows[i] *= s[group / groups * (F / 16) + of_row];
        first_row[i] *= s[of_row];
    }
    using enum SwigluSlip;
    const std::vector<std::pair<SwigluSlip, const char*>> slips = {
        {Sigmoid, "This is the derivative of sigmoid; that of silu is s (1 + a (1 - s))."},
        {Silu, "This has silu itself in place of its derivative."},
        {NoUp, "dgate is multiplied by up, too."},
        {NoSilu, "dup has silu(gate), not gate."},
        {Swapped, "gate and up are exchanged in the result: a row has dgate, then dup."},
        {ShortRows,
         "A row has 2 F values, in the input and in the result: the next one begins 2 F further on."},
        {ShortRowsRead, "A row of codes has 2 F values: the next one begins 2 F further on."},
        {ShortRowsWritten, "A row of the result has 2 F values: the next one begins 2 F further on."},
        {Interleaved, "A row has F values of gate, then F of up: they do not alternate."}};
    std::vector<Hint> hints;
    for (const auto& [slip, text] : slips) hints.push_back({text, swiglu_with(slip, N, F, x, dact)});
    auto with = [&](const Floats& x) { return swiglu_with(None, N, F, x, dact); };
    hints.push_back({"A value is a code's value times its group's scale.", with(no_scale)});
    hints.push_back({"up has scales of its own, behind those of gate.", with(gate_scales)});
    hints.push_back({"A row of scales has 2 F / 16, not F / 16.", with(short_rows)});
    hints.push_back({"Each row has scales of its own, behind those of the row before.", with(first_row)});
    c("dgate_up", expected, got, hints, 1e-4);
    return c.finish();
}

// --- 13 ---

int judge::quantize_transpose(const Function<Transpose>& quantize) {
    Comparison c(13);
    for (const auto& [rows, cols] : {std::pair{64, 64}, {32, 96}, {1, 1}, {100, 37}, {33, 160}}) {
        const Floats x = c.normal(rows * cols, 1);
        const float inverse = 448 / reference::compute_amax(x.data(), rows * cols);
        auto codes_of = [=](const Floats& values) {
            Codes codes;
            for (float v : values) codes.push_back(given::encode(v * inverse));
            return codes;
        };
        Codes codes(x.size(), UNWRITTEN), transposed = codes;
        quantize(rows, cols, inverse, x.data(), codes.data(), transposed.data());
        const Hint cut = about("matrices with cut tiles", rows % 32 || cols % 32);
        const Hint oblong = about("oblong matrices", rows != cols);
        c.of = text(" of ", rows, " x ", cols);
        c("code", codes_of(x), codes, {cut});
        c("transposed code", codes_of(given::transposed({rows, cols, x}).values), transposed,
          {cut, oblong, {"The transpose is wrong: a __syncthreads(), or blockIdx.x and y exchanged?"}});
    }
    return c.finish();
}

// --- 15 ---

namespace {

// Tensors A to F of the exercise, of 64 tokens and 256 features.
std::array<Floats, 6> tensors_to_store() {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> uniform;
    std::array<Floats, 6> tensors;
    for (int i = 0; i < 64 * 256; i++) {
        const int token = i / 256, feature = i % 256;
        auto of_powers = [&](float powers) {
            return std::copysign(std::exp2(-powers * uniform(random)), normal(random));
        };
        tensors[0].push_back(normal(random));
        tensors[1].push_back(of_powers(20));
        tensors[2].push_back(of_powers(10));
        tensors[3].push_back(normal(random) * (feature == 39 ? 1e3f : 1));
        tensors[4].push_back(normal(random) * std::exp2(-20.0f * float(token) / 64));
        tensors[5].push_back(normal(random) * (feature == 39 ? 1e5f : 1));
    }
    return tensors;
}

// The RMS of the relative errors of x when it is stored so.
double error_of(const Floats& x, const judge::Choice& choice) {
    const Format format = format_of(*choice.format);
    const Storage storage = choice.groups ? Storage{format, PER_GROUP, Format::BF16} : Storage{format};
    const Floats stored = dequantize(reference::quantize(x.data(), 64, 256, storage));
    double sum = 0;
    for (size_t i = 0; i < x.size(); i++) sum += std::pow(stored[i] / double(x[i]) - 1, 2);
    return std::sqrt(sum / double(x.size()));
}

std::string name_of(const judge::Choice& choice) {
    const std::string format = choice.format->mantissa == 3 ? "E4M3" : "E5M2";
    return format + (choice.groups ? " in groups" : " with one scale");
}

std::string why(const judge::Choice& mine, const judge::Choice& best) {
    const bool same_format = mine.format->mantissa == best.format->mantissa;
    if (same_format && mine.groups)
        return "Groups win little here. Do values differ in size from group to group, or inside each group?";
    if (same_format) return "Groups win here: what is large shares its scale with all that is small.";
    if (best.format->mantissa == 2)
        return "In E4M3 values below 1 / 28,672 of the amax of their scale block lose precision: how many "
               "are there?";
    return "E4M3 has a bit more precision, and with the right scales its range suffices here.";
}

}  // namespace

int judge::choose(const Choice (&choices)[6]) {
    const std::array<Floats, 6> tensors = tensors_to_store();
    const Choice all[] = {{&E4M3, false}, {&E4M3, true}, {&E5M2, false}, {&E5M2, true}};
    const bool chosen = std::any_of(choices, choices + 6, [](const Choice& c) { return c.format; });
    if (!chosen) {
        std::cout << "exercise 15: nothing is computed yet: write your choices.\n";
        return 1;
    }
    for (int t = 0; t < 6; t++) {
        const Choice& mine = choices[t];
        Choice best = all[0];
        std::ostringstream errors;
        for (const Choice& way : all) {
            const double error = error_of(tensors[t], way);
            if (error < 0.9 * error_of(tensors[t], best)) best = way;
            errors << "\n  " << name_of(way) << ": " << std::setprecision(3) << 100 * error << "%";
        }
        const std::string tensor = std::string("tensor ") + char('A' + t);
        if (!mine.format) {
            std::cout << "exercise 15: " << tensor << " has no format yet.\n";
            return 1;
        }
        if (mine.format->mantissa == best.format->mantissa && mine.groups == best.groups) continue;
        std::cout << "exercise 15: " << tensor << " is stored better in another way than " << name_of(mine)
                  << ". RMS of the relative errors:" << errors.str() << "\n  hint      " << why(mine, best)
                  << "\n";
        return 1;
    }
    std::cout
        << "exercise 15: passed, each tensor is stored in the best way. E5M2 has the range for F, but where "
           "outliers are smaller, as in D, it loses a bit of every value.\n";
    return 0;
}
