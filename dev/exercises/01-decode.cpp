// 1 - Decode: the value of a code in 8 bits (the paper's preliminaries)
//
// An FP8 code has a sign (bit 7), an exponent, and a mantissa of M = f.mantissa bits (the lowest ones).
//   exponent > 0:  value = 2^(exponent - bias) (1 + mantissa / 2^M)
//   exponent = 0:  value = 2^(1 - bias) mantissa / 2^M               (a subnormal value)
// E4M3 has M = 3, bias 7 and 4 bits of exponent. E5M2 has M = 2, bias 15 and 5 bits.
//
// Watch for the largest exponent:
//   In E5M2 its mantissa 0 is infinity, and others are NaN. In E4M3 only mantissa 7 is NaN; no infinity.
//
// std::ldexp(x, e) is x 2^e; INFINITY and NAN are in <cmath>.
#include "judge.h"

float decode(const Fp8& f, uint8_t code) {
    return 0;  // your code
}

int main() { return judge::decode(decode); }
