// 1 - Decode: the value of a code in 8 bits (lesson 1; about 10 minutes)
//
// An FP8 code has a sign (bit 7), an exponent field, and a mantissa (the lowest bits). Lesson 1 says what
// value the three stand for, and how the value differs where the exponent field is 0. f is the format:
//   f.mantissa   bits of the mantissa: 3 in E4M3, 2 in E5M2. The exponent field has the other 4 or 5 bits.
//   f.bias       7 in E4M3, 15 in E5M2
//   f.max        the largest finite value: 448 in E4M3, 57344 in E5M2
//
// Find out: which codes are NaN, and which are infinite? The two formats differ here; f.mantissa tells which
// of them f is.
//
// std::ldexp(x, e) is x 2^e; INFINITY and NAN are in <cmath>.
#include "judge.h"

float decode(const Fp8& f, uint8_t code) {
    return 0;  // your code
}

int main() { return judge::decode(decode); }
