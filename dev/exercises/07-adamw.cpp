// 7 - A step of AdamW with FP8 moments (lessons 8 and 9; about 30 minutes)
//
// n <= 128 parameters form a moment group: they share max and k of the moment m, and max and k of v. Load
// both moments of each parameter, and update them and the weight as lesson 8 says. s has the constants: s.lr,
// s.beta1, s.beta2, s.eps, s.decay, s.bias1 = 1 - beta1^t and s.bias2 = 1 - beta2^t. Then store both moments
// again: max, the largest magnitude of the moment group; k, by equation 4 of lesson 9; and the codes.
//
// Find out: does the weight move by the moments before or after they are quantized again?
//
// Watch for:
//   The codes belong to the new max and k.
//   Zeros do not count in the smallest magnitude. A moment group of zeros has max = 0, k = 1 and codes 0.
//   You need no rule for a second moment that would become code 0: with equation 4's k there is none.
//
// You read m.codes[i], *m.max and *m.k, and then overwrite them. given:: has encode(x), decode(code),
// expansion_exponent(max, min), expand(x, max, k) and contract(y, max, k).
#include "judge.h"

void adamw(const Step& s, int n, const float* g, float* w, Moment m, Moment v) {
    // your code
}

int main() { return judge::adamw(adamw); }
