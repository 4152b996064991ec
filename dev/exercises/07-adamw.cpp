// 7 - A step of AdamW with FP8 moments (section 4)
//
// n <= 128 parameters share max and k of each moment. For each of them:
//   load both moments:  contract(decode(code), max, k)
//   m = beta1 m + (1 - beta1) g            v = beta2 v + (1 - beta2) g^2
//   w -= lr ((m / bias1) / (sqrt(v / bias2) + eps) + decay w)
// Then store each moment: max, the largest |x| of the group; k, from max and the smallest |x| that is not
// zero; and the codes encode(expand(x, max, k)).
//
// Watch for:
//   The weight is updated before m and v are quantized. Their codes belong to the new max and k.
//   Zeros do not count in the smallest magnitude. A group of zeros has max = 0, k = 1 and codes 0.
//
// m.codes[i], *m.max and *m.k are read, then overwritten. given:: has encode, decode and those of exercise 6.
#include "judge.h"

void adamw(const Step& s, int n, const float* g, float* w, Moment m, Moment v) {
    // your code
}

int main() { return judge::adamw(adamw); }
