// judge_codes.cpp - exercises 1 to 6 and 13, codes and scales: their inputs, what the reference makes of
// them, and what typical mistakes do.
#include <array>
#include <tuple>

#include "comparison.h"

using namespace judge;
using reference::StoredMatrix;

// --- 1 ---

namespace {

enum class DecodeSlip {
    Bias,
    OneAlways,
    NoOne,
    SubnormalExponent,
    WholeMantissa,
    IntegerDivision,
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
    if (slip == DecodeSlip::IntegerDivision) significand = 0;
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
        {IntegerDivision,
         "m / 8 of two integers is an integer in C++, here 0: divide by 8.0f, or use std::ldexp."},
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
            c.input = [=](size_t) { return "code " + hex(code); };
            c(text("decode in ", format_info(format_of(f)).name),
              Floats{reference::decode(format_of(f), uint8_t(code))}, Floats{decode(f, uint8_t(code))},
              hints);
        }
    return c.finish(
        "E4M3 has two NaN, 0x7F and 0xFF, and no infinity. E5M2 has infinity, 0x7C and 0xFC, and "
        "six NaN.");
}

// --- 2 to 4 ---

namespace {

// Exercises 2 to 4: compare(c, rows, x) for the first of these tensors
template <class F> int on_tensors(int number, int count, F compare, const std::string& answer = "") {
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
    return c.finish(answer);
}

constexpr const char* WRONG_FMAX = "448 is the largest value of E4M3; 57344 is that of E5M2.";
constexpr const char* INVERSE = "A few codes are one off: multiply by 1 / s, in FP32; do not divide by s.";
constexpr const char* ABS_OF_INT = "abs() takes an int, and drops what is after the point: std::abs.";
constexpr const char* LEAST_SCALE = "The scale of tiny values is at least 2^-126, so that 1 / s is finite.";
constexpr const char* ZERO_SCALE = "A scale of 0 cannot be divided by: where all values are zero, it is 1.";

}  // namespace

int judge::quantize_tensor(const Function<float(int, const float*, uint8_t*)>& quantize) {
    return on_tensors(2, 7, [&](Comparison& c, int, const Floats& x) {
        const int n = int(x.size());
        const StoredMatrix q = reference::quantize(x.data(), 1, n, {Format::E4M3});
        const float amax = reference::compute_amax(x.data(), n), s = q.scale(0, 0);
        const float above_zero = largest_signed(x.data(), n);
        Codes codes = unwritten(n);
        const float got = quantize(n, guarded(x).data(), codes.data());
        auto code = [](float v) { return float(given::encode(v)); };
        c.of = text(" of a tensor of ", n, " values");
        c.input = [=](size_t) { return text("x[0..", n - 1, "], the largest |x| is ", amax); };
        c("scale", Floats{s}, Floats{got},
          {{SIGNED, {reference::scale_of({Format::E4M3}, above_zero)}},
           {WRONG_FMAX, {reference::scale_of({Format::E5M2}, amax)}},
           {ZERO_SCALE, {amax == 0 ? 0 : s}},
           {LEAST_SCALE, {amax == 0 ? 1 : amax / 448}},
           {"Return s, not 1 / s.", {1 / s}},
           {"This is amax itself: s maps it onto 448.", {amax}},
           {"240 is the largest value of AMD's E4M3: here it is 448.",
            {reference::scale_of({Format::E4M3}, amax * 448 / 240)}},
           {ABS_OF_INT, {reference::scale_of({Format::E4M3}, std::floor(amax))}},
           {"Values are not clamped before they are scaled: the scale is there to make them fit.",
            {reference::scale_of({Format::E4M3}, std::min(amax, 448.0f))}},
           {"amax has no least value: only s has, 2^-126. Zeros have s = 1.", {std::max(amax, 1e-12f) / 448}},
           {"max - min is for integers with a zero point. FP8 has a sign: take the largest |x|.",
            {(*std::max_element(x.begin(), x.end()) - *std::min_element(x.begin(), x.end())) / 448}},
           {"Not all n values are looked at, or more: read x[0] to x[n - 1].", {GUARD / 448}}},
          1e-7);
        c.input = [=](size_t i) { return text("x[", i, "] = ", x[i], ", s = ", s); };
        c("code", q.elements, codes,
          {{INVERSE, each(x, [=](float v) { return code(v / s); })},
           {"This is the code of x, without the scale.", each(x, code)},
           {"Multiply by 1 / s, not by s.", each(x, [=](float v) { return code(v * s); })},
           // Truncated or rounded, it differs by 1 at most.
           {"This is the number x / s, cast to 8 bits. A code is made by given::encode.",
            each(x, [=](float v) { return float(uint8_t(int(v / s))); }), 1}});
    });
}

int judge::quantize_to_groups(const Function<void(int, int, const float*, uint8_t*, float*)>& quantize) {
    return on_tensors(
        3, 7,
        [&](Comparison& c, int rows, const Floats& x) {
            const int n = int(x.size()), cols = n / rows;
            const Floats amax = amaxes(x, rows), expected = scales(x, rows), padded = guarded(x);
            Codes codes = unwritten(n);
            Floats got = undefined(amax.size());
            quantize(rows, cols, padded.data(), codes.data(), got.data());
            auto scale = [](float amax) { return reference::scale_of(E4M3_PER_1x16, amax); };
            auto unrounded = [](float amax) { return reference::scale_of({Format::E4M3}, amax); };
            Floats flat = each(amaxes(x, 1), scale), whole, wide, inexact, divided,
                   unscaled = each(x, given::encode);
            flat.resize(amax.size(), UNDEFINED);
            for (int i = 0; i < n; i++) {
                const int group = i / cols * ((cols + 15) / 16) + i % cols / 16;
                if (i % cols % 16 == 0) wide.push_back(scale(reference::compute_amax(&padded[i], 16)));
                inexact.push_back(given::encode(x[i] * (1 / unrounded(amax[group]))));
                divided.push_back(given::encode(x[i] / expected[group]));
            }
            whole.assign(amax.size(), scale(reference::compute_amax(x.data(), n)));
            const size_t groups = amax.size() / rows;  // of a row
            Floats by_columns;
            for (size_t i = 0; i < amax.size(); i++)
                by_columns.push_back(expected[i % rows * groups + i / rows]);
            c.of = text(" of ", rows, " x ", cols, " values");
            c.place = [=](size_t i) { return text(" of row ", i / groups, ", group ", i % groups, ","); };
            c.input = [=](size_t i) {
                const size_t first = i % groups * 16, last = std::min(first + 16, size_t(cols)) - 1;
                return text("columns ", first, "..", last, " of this row, the largest |x| is ", amax[i]);
            };
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
               {"Each group has a scale of its own, not the tensor's.", whole},
               {"Scales are stored row by row, as codes are: scales[row * groups_in_a_row + group].",
                by_columns}});
            c.place = [=](size_t i) {
                const size_t row = i / cols, column = i % cols;
                return text(" of row ", row, ", column ", column, " (group ", column / 16, "),");
            };
            c.input = [=](size_t i) {
                return text("x = ", x[i], ", the scale is ", expected[i / cols * groups + i % cols / 16]);
            };
            c("code", reference::quantize(x.data(), rows, cols, E4M3_PER_1x16).elements, codes,
              {{INVERSE, divided},
               {"Scales are right. For the codes, use the scale after it is rounded to BF16.", inexact},
               {"This is the code of x, without the scale.", unscaled}});
        },
        "The code is made with the rounded scale. Only that is stored, so decoding multiplies by it; the "
        "unrounded "
        "one would make every value of a group wrong by up to 0.2% more.");
}

int judge::amax(const Function<float(int, const float*, float*)>& amax) {
    return on_tensors(
        4, 8,
        [&](Comparison& c, int, const Floats& x) {
            const int n = int(x.size());
            const Floats expected = amaxes(x, 1), padded = guarded(x, -GUARD);
            Floats got = undefined(expected.size());
            const float returned = amax(n, padded.data(), got.data());
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
            Floats running, strided, of_16_groups(expected.size(), UNDEFINED);
            for (size_t g = 0; g < expected.size(); g++) {
                running.push_back(g == 0 ? expected[0] : std::max(running.back(), expected[g]));
                Floats column;
                for (size_t i = 0; i < 16; i++) column.push_back(padded[i * expected.size() + g]);
                strided.push_back(reference::compute_amax(column.data(), 16));
                const int width = (n + 15) / 16, first = int(g) * width;
                if (g < 16 && first < n)
                    of_16_groups[g] = reference::compute_amax(&x[first], std::min(width, n - first));
            }
            c.of = text(" of ", n, " values");
            c.input = [=](size_t group) {
                const size_t first = group * 16, last = std::min(first + 16, x.size()) - 1;
                size_t largest = first;  // the place of the largest magnitude, or of a NaN
                for (size_t i = first; i <= last; i++)
                    if (std::isnan(x[i]) || std::abs(x[i]) > std::abs(x[largest])) largest = i;
                return text("x[", first, "..", last, "], x[", largest, "] = ", x[largest]);
            };
            c("maximum", expected, got,
              {{"You read past the end of x: the last group is shorter, it ends at n.", wide},
               {"The last, shorter group is missing: there are (n + 15) / 16 groups.", cut},
               {SIGNED, maxima(x, 1, largest_signed)},
               {"NaN gets lost: a comparison with it is false. Ask std::isnan.", maxima(x, 1, without_nan)},
               {"NaN gets lost at the next value: a comparison with it is false.",
                maxima(x, 1, nan_until_next)},
               {"The maximum of a group with a NaN is infinity here, not NaN.", maxima(x, 1, nan_stays)},
               {"maxima is undefined before: begin each group with 0.", largest_of_undefined},
               {"The maximum of the groups before goes on: begin each group with 0.", running},
               {"A group is 16 neighbours: group g has x[16 g] to x[16 g + 15].", strided},
               {"There are (n + 15) / 16 groups of 16 values, not 16 groups.", of_16_groups},
               {"This is a scale, amax / 448: here the magnitude itself is asked for.",
                each(expected, [](float v) { return v / 448; })},
               {ABS_OF_INT, each(expected, [](float v) { return std::floor(v); })}});
            c.input = [=](size_t) { return text("x[0..", n - 1, "]"); };
            c("amax", Floats{reference::compute_amax(x.data(), n)}, Floats{returned},
              {{"This is the maximum of the last group: return the largest of all.", {expected.back()}},
               {"This is the maximum of the first group: return the largest of all.", {expected[0]}},
               {"NaN gets lost on the way to amax: return the largest of maxima.",
                {without_nan(x.data(), n)}}});
        },
        "Neither keeps it: std::max(largest, x) leaves a NaN out, and std::max(x, largest) takes it, but "
        "loses it at "
        "the next value.");
}

// --- 5 ---

namespace {

enum class EncodeSlip {
    TiesAway,
    Truncation,
    Up,
    OneKept,
    OneMasked,
    OneSubtracted,
    LogarithmCutOff,
    ThreeBits,
    NoBias,
    NoSign,
    NaNSaturates
};

// Of a magnitude that is at most f.max; a NaN is turned into the largest code, as a comparison with it may.
float encode_with(EncodeSlip slip, const Fp8& f, float x) {
    const int sign = std::signbit(x) && slip != EncodeSlip::NoSign ? 0x80 : 0;
    const int largest = f.mantissa == 3 ? 0x7E : 0x7B;
    if (std::isnan(x) && slip != EncodeSlip::NaNSaturates) return float(sign | 0x7F);
    if (!(std::abs(x) <= f.max)) return float(sign | largest);
    const int lowest = 1 - f.bias, M = slip == EncodeSlip::ThreeBits ? 3 : f.mantissa;
    int e = x == 0 ? lowest : std::max(std::ilogb(x), lowest);
    if (slip == EncodeSlip::LogarithmCutOff && x != 0) e = std::max(int(std::log2(std::abs(x))), lowest);
    float exact = std::ldexp(std::abs(x), M - e);
    if (slip == EncodeSlip::OneSubtracted && std::abs(x) < std::ldexp(1.0f, lowest)) exact -= float(1 << M);
    float steps = std::nearbyint(exact);
    if (slip == EncodeSlip::TiesAway) steps = std::round(exact);
    if (slip == EncodeSlip::Truncation) steps = std::floor(exact);
    if (slip == EncodeSlip::Up) steps = std::ceil(exact);
    int code = int(steps) + (e - 1 + (slip == EncodeSlip::NoBias ? 0 : f.bias)) * (1 << M);
    if (slip == EncodeSlip::OneKept) code += 1 << M;
    if (slip == EncodeSlip::OneMasked) code = (e + f.bias) * (1 << M) + int(steps) % (1 << M);
    return float((sign | code) & 0xFF);
}

// A code, and what is known of the input of it
void compare_code(Comparison& c, const Fp8& f, float x, uint8_t mine) {
    using enum EncodeSlip;
    const std::vector<std::pair<EncodeSlip, const char*>> slips = {
        {TiesAway, "A tie goes to the even code, not away from zero: std::nearbyint."},
        {Truncation, "The count is cut off: round it to the nearest."},
        {OneMasked,
         "The mask takes the 1 in front away, and more: a carry is lost, and a subnormal value, which has no "
         "1 in front, gets exponent field 1. Do not mask: begin with field e + bias - 1, and add the whole "
         "count."},
        {Up, "The count is rounded up: round it to the nearest."},
        {OneKept, "The count has the 1 in front of the mantissa: it adds 1 to the exponent field."},
        {OneSubtracted, "A subnormal value has no 1 in front of its mantissa: none is subtracted there."},
        {LogarithmCutOff,
         "The logarithm is cut off towards zero, which is wrong below 1: std::ilogb, or std::floor."},
        {ThreeBits, "E5M2 has two bits of mantissa: use f.mantissa."},
        {NoBias, "The exponent field is e + bias."},
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
    c.input = [=](size_t) { return text("x = ", x); };
    c(text("encode in ", format_info(format_of(f)).name), Codes{code}, Codes{mine}, hints);
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
    return c.finish(
        "Codes between 2^e and 2^(e + 1) are 2^(e - M) apart; subnormal values, below e = 1 - bias, are "
        "as far apart as those just above. A carry makes the mantissa 0 and the exponent larger by 1.");
}

// --- 6 ---

namespace {

// k, from the logarithms to base 2 of the ratio max / min of the moment group, and of the range of the format
float rounded_k(double range, double ratio, double least = 1.0 / 16, double most = 64) {
    if (!(ratio * most > range)) return float(most);
    return float(std::max(std::rint(256 * range / ratio) / 256, least));
}

void compare_exponent(Comparison& c, float max, float min, float got) {
    const double ratio = std::log2(double(max)) - std::log2(double(min)), range = std::log2(448 * 512.0);
    const double exact = 256 * range / ratio, near = 1.01 / 256;
    const bool border = std::abs(exact - std::floor(exact) - 0.5) < 0.01;  // both neighbours are right
    const float k = given::expansion_exponent(max, min);
    auto limited = [](double k) { return float(std::clamp(k, 1.0 / 16, 64.0)); };
    const float sixteenths = limited(std::floor(exact / 16) / 16);
    const float nearest_sixteenth = limited(std::rint(exact / 16) / 16);
    c.input = [=](size_t) { return text("max = ", max, ", min = ", min); };
    c("k", Floats{k}, Floats{got},
      {{"k is neither rounded to a multiple of 1/256 nor limited: the least is 1/16, the most 64.",
        {float(range / ratio)},
        1e-3},
       {"The smallest code that is not zero is subnormal: 2^-9, not 2^-6.",
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
       {"448 has its natural logarithm here: take log2 of both ends of the range.",
        {rounded_k(std::log(448.0) + 9, ratio)},
        near},
       {"2^-9 has its natural logarithm here: take log2 of both ends of the range.",
        {rounded_k(std::log2(448.0) + std::log(512.0), ratio)},
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
    c.input = [=](size_t) { return text("x = ", x, ", max = ", max, ", k = ", k); };
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
      3e-3);
    c.input = [=](size_t) { return text("y = ", y, ", max = ", max, ", k = ", k); };
    c("contract", Floats{back}, Floats{contract(y, max, k)},
      {{sign.text, {std::abs(back)}},
       {"448 becomes max: multiply the power by it.", zero_or(root)},
       {"Divide |y| by 448 before you raise it to the power 1 / k.",
        zero_or(max * std::pow(to * 448, 1.0 / k))},
       {"contract raises to the power 1 / k, expand to k.", zero_or(max * std::pow(to, double(k)))},
       {"This is the power 2 / k: the exponent of r is log2(|y| / 448) / (2 k).", zero_or(max * root * root)},
       {"This is the power 1 / (2 k): the result has r twice, (max r) r.", zero_or(max * std::sqrt(root))},
       where(x != 0 && root < FLT_MIN,
             "The power underflows here: multiply max by the square root r of the power, twice: (max r) r."),
       negative,
       zero},
      1e-4 + 3e-45 / std::abs(back));
}

}  // namespace

int judge::expansion(const Function<float(float, float)>& expansion_exponent, const Function<Expand>& expand,
                     const Function<Expand>& contract) {
    Comparison c(6);
    c.independent = true;  // contract is given codes that the judge's expand makes
    auto check = [&](float max, float min) {
        compare_exponent(c, max, min, expansion_exponent(max, min));
        const float k = given::expansion_exponent(max, min);
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
    return c.finish(
        "The k of 100, 10 and 229,376 are 2.680, 5.359 and 1. A rounding error is divided by k: the "
        "moment group with 10 gains most, and the last one nothing. max / min may overflow, and |x| / max"
        " become 0: one way is to subtract logarithms. In contract the power may become 0 although max "
        "times the power does not: one way is to multiply max by the square root of the power, twice.");
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
        c.place = row_and_column(cols);
        c.input = [=](size_t i) { return text("x", row_and_column(cols)(i), " = ", x[i]); };
        c("code", codes_of(x), codes, {cut});
        c.place = row_and_column(rows);
        c.input = [=](size_t i) {
            const size_t place = i % rows * cols + i / rows;
            return text("x", row_and_column(cols)(place), " = ", x[place]);
        };
        c("transposed code", codes_of(given::transposed({rows, cols, x}).values), transposed,
          {cut, oblong, {"The transpose is wrong: a __syncthreads(), or blockIdx.x and y exchanged?"}});
    }
    return c.finish();
}
