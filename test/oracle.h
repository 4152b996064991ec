// oracle.h - number formats by their definition, in double, to test the encoders of the CPU reference and the
// GPU.
//
// A value is computed from sign, exponent and mantissa; a code is found by a search for the nearest value. No
// arithmetic is shared with the encoders, which work on bits.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "../coat.h"

namespace coat::test {

inline uint32_t bits_of(float x) {
    uint32_t b;
    std::memcpy(&b, &x, 4);
    return b;
}
inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// OCP 8-bit floating point, section 5: (-1)^s 2^(e - bias) (1 + m / 2^M); for e = 0, (-1)^s 2^(1 - bias) m /
// 2^M.
inline double fp8_value(Format f, int code) {
    const bool e4m3 = f == Format::E4M3;
    const int M = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15, top = e4m3 ? 15 : 31;
    const int s = code >> 7, e = (code & 0x7F) >> M, m = code & ((1 << M) - 1);
    const double sign = s ? -1 : 1;
    if (e4m3 && e == top && m == 7) return std::numeric_limits<double>::quiet_NaN();  // only S.1111.111
    if (!e4m3 && e == top) return m ? std::numeric_limits<double>::quiet_NaN() : sign * HUGE_VAL;
    return sign * std::ldexp(e ? 1 + std::ldexp(m, -M) : std::ldexp(m, -M), (e ? e : 1) - bias);
}

// IEEE 754 binary16: 5 bits of exponent and 10 of mantissa. The top exponent encodes infinities and NaN.
inline double fp16_value(int code) {
    const int e = (code & 0x7FFF) >> 10, m = code & 0x3FF;
    const double sign = code >> 15 ? -1 : 1;
    if (e == 31) return m ? std::numeric_limits<double>::quiet_NaN() : sign * HUGE_VAL;
    return sign * std::ldexp(e ? 1024 + m : m, (e ? e : 1) - 25);
}

// Root mean square of a format's relative rounding error. The error is uniform within half a step, and a step
// is at most 2^-mantissa of the value.
inline double rms_error(Format f) { return std::ldexp(1.0, -info(f).mantissa - 1) / std::sqrt(3.0); }

// The largest error of x that is stored as a code with scale s: half a step of the format, with room for four
// roundings of FP32 (and their products), and for a denormal result.
inline double error_bound(Format f, double x, double s) {
    const double code = std::max(std::ldexp(std::fabs(x), -info(f).mantissa - 1), s * info(f).min / 2);
    return code * (1 + 0x1p-20) + std::ldexp(std::fabs(x), -21) + 0x1p-149;
}

// The code of the nearest finite value; of two equally near, the even code; beyond the largest value, its
// code.
class NearestCode {
public:
    explicit NearestCode(Format f) {
        for (int code = 0; code < 128 && std::isfinite(fp8_value(f, code)); code++)
            values_.push_back(fp8_value(f, code));
    }
    int of(float x) const {
        if (std::isnan(x)) return NOT_A_NUMBER;
        const double magnitude = std::fabs(double(x));
        const size_t above = std::lower_bound(values_.begin(), values_.end(), magnitude) - values_.begin();
        return (std::signbit(x) ? 0x80 : 0) | int(nearest(magnitude, above));
    }
    const std::vector<double>& values() const { return values_; }  // of the codes from 0, ascending
    static constexpr int NOT_A_NUMBER = -1;

private:
    size_t nearest(double magnitude, size_t above) const {
        if (above == values_.size()) return above - 1;
        if (above == 0 || values_[above] == magnitude) return above;
        // Exact in double.
        const double down = magnitude - values_[above - 1], up = values_[above] - magnitude;
        return down < up || (down == up && above % 2 == 1) ? above - 1 : above;
    }
    std::vector<double> values_;
};

}  // namespace coat::test
