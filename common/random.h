// common/random.h - random numbers that depend on nothing but their arguments: initial values of weights, and
// the random bits with which weights without an FP32 master are rounded. So the CPU and a GPU draw the same
// numbers, and the order in which elements are computed does not matter.
#pragma once
#include "formats.h"

namespace coat {

// -----------------------------------------------------------------------------------------------------------
// Initial values

// A random value with the standard deviation init_std, for element i of parameter number `param`. The sum of
// four uniform integers of 16 bits is nearly a normal variate.
COAT_HD inline float random_weight(uint64_t seed, uint64_t param, uint64_t i, float init_std) {
    uint64_t z = seed * 0x9E3779B97F4A7C15ull + (param << 40) + i;  // after splitmix64, mixed once more
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull + 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z = (z ^ (z >> 31)) * 0xBF58476D1CE4E5B9ull;
    z ^= z >> 32;
    const uint64_t sum = (z & 0xFFFF) + ((z >> 16) & 0xFFFF) + ((z >> 32) & 0xFFFF) + (z >> 48);
    // A sum of four uniform values from 0 to 1 has the variance 4/12, so the standard deviation 1 / sqrt(3).
    return float(int64_t(sum) - 2 * 65535) * (init_std * (1.7320508f / 65536.0f));
}

// The initial value of element i of parameter number `param`:
//   1        in the weights of norms
//   0        in biases, whose init_std is 0, and in padding, which begins at element `used`
//   random   in all other elements
COAT_HD inline float initial_value(float init_std, bool starts_at_one, int64_t used, uint64_t seed,
                                   uint64_t param, int64_t i) {
    if (starts_at_one) return 1.0f;
    if (init_std == 0 || i >= used) return 0.0f;
    return random_weight(seed, param, uint64_t(i), init_std);
}

// -----------------------------------------------------------------------------------------------------------
// Random bits for stochastic rounding

// 64 bits that look random, from a number. Nearby numbers give unrelated bits.
COAT_HD inline uint64_t mixed_bits(uint64_t number) {
    uint64_t z = number * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 32)) * 0x94D049BB133111EBull;
    return z ^ (z >> 29);
}

// Stochastic rounding to BF16: bf16 = (bits of the FP32 value + 16 random bits) >> 16. The expected value of
// bf16 is the FP32 value. So an update of less than half the spacing of BF16 values is not lost: it counts on
// average.
//
// rounding_bits() returns the random bits of four elements of the flat order (Param::flat_offset), from
// element 4 * quad on. The lowest 16 bits are for element 4 * quad. key: rounding_key() of the update.
COAT_HD inline uint64_t rounding_bits(uint64_t key, uint64_t quad) { return mixed_bits(key + quad); }
// The key of an update, which has a number of its own (AdamWOptions).
//
// The lower 32 bits of the key are 0. In a model of at most 2^34 elements `quad` is below 2^32, so key + quad
// has the upper 32 bits of the key. Two updates hardly ever have the same upper 32 bits (on average 5 pairs
// in 200,000 updates).
inline uint64_t rounding_key(uint64_t seed, int64_t update_number) {
    return mixed_bits(seed * 0x9E3779B97F4A7C15ull + uint64_t(update_number)) << 32;
}

}  // namespace coat
