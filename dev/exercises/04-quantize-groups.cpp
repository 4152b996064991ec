// 4 - Quantize in 1x16 groups with BF16 scales (section 5, mixed granularity)
//
// Inputs of norms and activation functions have a scale for each 16 neighbouring values of a row:
//   amax = the largest |x| of the group        s = to_bf16(amax / 448)        code = encode(x (1 / s))
// An outlier costs precision in its group only. Write codes (rows, cols) and scales (rows, groups in a row).
//
// Watch for:
//   Round the scale first, and divide by the rounded one: it is the scale that decoding will use.
//   Round it to the nearest. It may become 0.4% too small: amax / s, up to 449.75, still rounds to 448.
//   The last group of a row may be shorter: none crosses to the next row. A group of zeros has s = 1.
//
// given::to_bf16(s) is s rounded to BF16, as a float; given::encode(x) is an E4M3 code.
#include "judge.h"

void quantize_groups(int rows, int cols, const float* x, uint8_t* codes, float* scales) {
    // your code
}

int main() { return judge::quantize_groups(quantize_groups); }
