// reference/rounding.h - 1. Formats (paper, preliminaries): FP8 and BF16, from FP32 to codes and back;
// and FP32 masters as a BF16 weight and a remainder. encode() and to_bf16() round to nearest, ties to even,
// and keep NaN. Masters and stochastic rounding have other rules, which stand at their functions.
//
// FP8 has a sign, an exponent and a mantissa of M bits. FP32 is built alike, with more bits and a larger
// bias.
//   normal:     value = 2^(exponent - bias) (1 + mantissa / 2^M)        exponent > 0
//   subnormal:  value = 2^(1 - bias) mantissa / 2^M                     exponent = 0
#pragma once
#include <algorithm>
#include <bit>
#include <cassert>
#include <cmath>

#include "../common/formats.h"
#include "../common/random.h"

namespace coat::reference {

// 2^e as an FP32 value, from -126 to 127: e + 127 is the exponent field, and the mantissa is 0.
inline float power_of_two(int e) { return std::bit_cast<float>(uint32_t(127 + e) << 23); }

inline constexpr uint32_t SIGN_BIT = 0x80, NAN_CODE = 0x7F;  // of FP8 codes

// The code of the FP8 value that is nearest to x. Of two values that are equally near, it is the one with an
// even mantissa. A value beyond FMAX becomes FMAX.
//
// Values from 2^e to 2^(e+1) are 2^(e - M) apart, with M mantissa bits. So |x| is counted in steps of
// 2^(e - M). A normal value has 2^M + mantissa steps, and its exponent field is e + bias:
//   code = mantissa + ((e + bias) << M) = steps + ((e + bias - 1) << M)
// For subnormals e is 1 - bias. So the second term is 0, and the code is the number of steps. In E4M3 M is 3
// and the bias 7:
//   x       e    steps of 2^(e - 3)   rounded   code
//   1.1     0    8.8                  9         9 + (6 << 3) = 0x39, which is 1.125
//   1.99    0    15.92                16        16 + (6 << 3) = 0x40, which is 2
//   2^-9   -6    1                    1         1 + (0 << 3) = 0x01, a subnormal
// In the second row rounding gives 2^(M + 1) steps. The sum then has the exponent field of the next power of
// two and the mantissa 0, as it should.
inline uint8_t encode(Format f, float x) {
    const int M = format_info(f).mantissa_bits;
    const int bias = format_info(f).bias;
    // If x is NaN, std::min() returns fmax: NaN is not less. The code of NaN is chosen below.
    const float magnitude = std::min(format_info(f).fmax, std::abs(x));
    const int e = std::max(int(std::bit_cast<uint32_t>(magnitude) >> 23) - 127, 1 - bias);
    const float steps = magnitude * power_of_two(M - e);  // |x| / 2^(e - M)
    const uint32_t code = uint32_t(int(std::nearbyint(steps))) + (uint32_t(e + bias - 1) << M);
    const uint32_t sign = (std::bit_cast<uint32_t>(x) >> 31) * SIGN_BIT;
    return uint8_t((std::isnan(x) ? NAN_CODE : code) | sign);
}

// The value of an FP8 code. The fields of the code are moved to where FP32 has them, and the difference of
// the two biases is added to the exponent field. A code above that of FMAX gets the largest exponent field
// of FP32, which means infinity if the mantissa is 0, and NaN otherwise. In E4M3 only one code lies above
// that of FMAX. Its mantissa is 7, so it is NaN: E4M3 has no infinity.
inline float decode(Format f, uint8_t code) {
    const int M = format_info(f).mantissa_bits;
    const int bias = format_info(f).bias;
    const uint32_t magnitude = code & (SIGN_BIT - 1);
    const uint32_t bits = magnitude << (23 - M);  // exponent and mantissa where FP32 has them
    float value = std::bit_cast<float>(bits + (uint32_t(127 - bias) << 23));
    if (magnitude >> M == 0) value = float(magnitude) * format_info(f).fmin;            // subnormal
    if (value > format_info(f).fmax) value = std::bit_cast<float>(bits | 0x7F800000u);  // infinity or NaN
    return code & SIGN_BIT ? -value : value;
}

// The bits of x rounded to the nearest BF16 value, ties to even. BF16 is the upper half of FP32. Adding
// 0x7FFF, plus 1 if the upper half is odd, carries into the upper half exactly when rounding goes up.
inline uint16_t to_bf16(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return uint16_t(bits >> 16 | 0x40u);  // NaN stays NaN
    return uint16_t((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}
inline float from_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t(bits) << 16); }
// x rounded to BF16; in FP32 x stays as it is. (Not for FP8, which needs a scale: quantize().)
inline float round_to(Format f, float x) {
    if (f == Format::BF16) return from_bf16(to_bf16(x));
    assert(f == Format::FP32);
    return x;
}

// Element i of an array in any format, as an FP32 value.
inline float read_element(Format f, const uint8_t* elements, int64_t i) {
    if (f == Format::FP32) return reinterpret_cast<const float*>(elements)[i];
    if (f == Format::BF16) return from_bf16(reinterpret_cast<const uint16_t*>(elements)[i]);
    return decode(f, elements[i]);
}
// Rounds x to the format and stores it as element i.
inline void write_element(Format f, uint8_t* elements, int64_t i, float x) {
    if (f == Format::FP32) reinterpret_cast<float*>(elements)[i] = x;
    else if (f == Format::BF16) reinterpret_cast<uint16_t*>(elements)[i] = to_bf16(x);
    else elements[i] = encode(f, x);
}

// An FP32 master weight as a BF16 weight and a signed 16-bit remainder: master = (weight << 16) + remainder,
// in bits. The weight is the nearest BF16 value. If two values are equally near, it is the larger one in
// magnitude: with the smaller one the remainder would be +32768, which does not fit. If the weight is larger
// in magnitude than the master, the remainder is negative. For example, the master 0x3F8D9000 is the weight
// 0x3F8E and the remainder -0x7000.
inline void split_master(float master, uint16_t* weight, int16_t* remainder) {
    const uint32_t bits = std::bit_cast<uint32_t>(master);
    *weight = uint16_t((bits + 0x8000u) >> 16);
    *remainder = int16_t(bits & 0xFFFFu);
}
inline float join_master(uint16_t weight, int16_t remainder) {
    return std::bit_cast<float>((uint32_t(weight) << 16) + uint32_t(int32_t(remainder)));  // with its sign
}

// (This can wait: only weights without masters need it.) x rounded to BF16, up or down at random. A random
// integer of 16 bits is added to the bits of x, and the upper half of the sum is the result. If the lower
// half of x is r, then r of the 65536 integers make the sum carry into the upper half. So x is rounded up in
// magnitude with probability r / 65536.
//
// i: the place of the element in the flat order (Param::flat_offset in common/architecture.h). One call of
// rounding_bits() gives 64 bits, for four neighbours.
inline uint16_t round_stochastically(float x, uint64_t key, int64_t i) {
    const uint64_t random = (rounding_bits(key, uint64_t(i) / 4) >> (16 * (i % 4))) & 0xFFFF;
    return uint16_t((std::bit_cast<uint32_t>(x) + uint32_t(random)) >> 16);
}

}  // namespace coat::reference
