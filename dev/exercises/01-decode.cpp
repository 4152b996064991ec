// 1 - Decode: the value of a code in 8 bits (lesson 1; about 10 minutes)
//
// An FP8 code has a sign (bit 7), an exponent, and a mantissa of M = f.mantissa bits (the lowest ones).
// Lesson 1 says what value the three stand for, and how that differs where the exponent field is 0. E4M3 has
// M = 3, bias 7 and 4 bits of exponent. E5M2 has M = 2, bias 15 and 5 bits.
//
// Find out: which codes are NaN, and which infinite? The two formats differ here.
//
// std::ldexp(x, e) is x 2^e; INFINITY and NAN are in <cmath>.
#include "judge.h"

float decode(const Fp8& f, uint8_t code) {
    return 0;  // your code
}

int main() { return judge::decode(decode); }
