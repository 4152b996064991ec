// gpu/adamw.cuh - what the kernels of an update share: that of adamw.cu, for moments in FP8 moment groups,
// and those of other_optimizers.cu, for other moments.
//
// A thread updates eight consecutive elements at a time. It loads their gradients, weights and moments,
// decodes the moments (adamw.cu), computes new moments and new weights in FP32 (part 1), rounds and stores
// the weights (part 2), and encodes and stores the moments (adamw.cu).
//
//   1. the equations of AdamW, for eight elements
//   2. eight weights in registers, and how they are rounded when they are stored
//   3. the arguments of the kernels
#pragma once
#include "../common/random.h"
#include "../adamw.h"
#include "device.cuh"

namespace coat::gpu {

// ===========================================================================================================
// 1. The equations of AdamW, for eight elements
//
//   m = b1 m + (1 - b1) g
//   v = b2 v + (1 - b2) g^2
//   w = w - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay w)
//
// m needs no division by c1 = 1 - b1^t, because with c2 = 1 - b2^t
//   m / c1 / (sqrt(v / c2) + eps) = m / (sqrt(v) root_factor + scaled_eps)
//   root_factor = c1 / sqrt(c2),  scaled_eps = c1 eps

// The constants of a step. Bias corrections are computed in double on the host.
struct AdamWStepConstants {
    float lr, beta1, beta2, one_minus_beta1, one_minus_beta2, weight_decay;
    float root_factor, scaled_eps;
};
// The constants of a parameter in a step.
struct AdamWParamConstants {
    AdamWStepConstants of_step;
    float clip_factor;  // clips the gradients: GradientState::clip_factor
    float decay;        // weight_decay, or 0 for a parameter that does not decay
};

// Eight old elements of a moment, which share a factor: element j is factor * multiples[j]. This saves a
// multiplication for each element. The equations multiply it by b1 or b2, and the product of b1 and factor is
// computed once for all eight. For example, in COAT the magnitude of an element is
// max * (|y| / FMAX)^(1/k), where y is the value of its code. There the factor is max.
struct FactoredMoments {
    float factor;
    ChunkValues multiples;
};

// One T for first moments, and one for second moments.
template <class T> struct MAndV { T m, v; };

// Updates eight elements, and returns their new moments.
//   g     the gradients
//   old   the moments
//   w     the weights, which are replaced by the new ones
inline __device__ MAndV<ChunkValues> adamw_of_chunk(const AdamWParamConstants& of_param, const ChunkValues& g,
                                                    const MAndV<FactoredMoments>& old, ChunkValues& w) {
    const AdamWStepConstants& constants = of_param.of_step;
    MAndV<ChunkValues> moments;
    for (int j = 0; j < CHUNK_SIZE; j++) {
        const float gradient = g[j] * of_param.clip_factor;
        // The added 0 turns -0 into 0: a moment that is zero has the code 0, as on the CPU, never that of -0.
        const float m = __fmaf_rn(constants.beta1 * old.m.factor, old.m.multiples[j],
                                  __fmaf_rn(constants.one_minus_beta1, gradient, 0.0f));
        const float v = __fmaf_rn(constants.beta2 * old.v.factor, old.v.multiples[j],
                                  constants.one_minus_beta2 * (gradient * gradient));
        const float update =
            m * fast_reciprocal(__fmaf_rn(fast_sqrt(v), constants.root_factor, constants.scaled_eps));
        w[j] = __fmaf_rn(-constants.lr, __fmaf_rn(of_param.decay, w[j], update), w[j]);
        moments.m[j] = m;
        moments.v[j] = v;
    }
    return moments;
}

// ===========================================================================================================
// 2. Eight weights in registers, and how they are rounded when they are stored
//
// A kernel is compiled for each kind of weights: COAT's by default are Bf16Weights<true>, with masters. (The
// others can wait: Bf16Weights<false>, without masters, and Fp32Weights.) The template parameter WeightsKind
// stands for one of them. All have the functions of Bf16Weights<true>:
//   constructor   the weights of a parameter, from its memory_offset on
//   load()        loads eight weights and their remainders, from the parameter's element i on
//   unpack()      joins them: eight masters
//   store()       rounds eight masters to weights, and stores weights and remainders if they are live. It
//                 raises largest_bits, the bits of the largest magnitude of rounded weights so far. (Weights
//                 that are not live are copies of live ones, so they do not change it.)

// BF16 weights. Rounding adds a number to the bits of an FP32 value, and the upper half of the sum is the
// weight:
//   with a master      the number is 0x8000, which rounds to nearest, and ties away from zero. What the
//                      weight lacks fits in 16 bits with a sign. It is stored as the remainder:
//                        bits of the master = (weight << 16) + remainder
//                      So the remainder is the lower half of the master's bits, read as a signed number.
//                      For example, the master 0x3F8D9000 has the weight 0x3F8E. The remainder is 0x9000,
//                      read as -0x7000, and 0x3F8E0000 - 0x7000 = 0x3F8D9000
//   without a master   (This can wait.) The number is 16 random bits, so that an update is kept on average.
//                      Rounding to nearest would lose every update below half the distance to the next BF16
//                      value. The bits follow from `key`, the rounding_key() of the update, and from
//                      `element`, the number of the first of the eight weights in the flat order
//                      (common/random.h)
template <bool MASTER> struct Bf16Weights {
    using EightOf16Bits = PlainView<bf16>::StoredChunk;  // two in a word
    struct StoredChunk {
        EightOf16Bits weights, remainders;
    };
    bf16* weights;
    int16_t* remainders;  // null without a master

    __device__ Bf16Weights(const Weights& w, int64_t memory_offset)
        : weights(static_cast<bf16*>(w.values) + memory_offset),
          remainders(MASTER ? w.remainders + memory_offset : nullptr) {}
    __device__ StoredChunk load(int64_t i) const {
        StoredChunk loaded{};
        loaded.weights = *reinterpret_cast<const EightOf16Bits*>(weights + i);
        if (MASTER) loaded.remainders = *reinterpret_cast<const EightOf16Bits*>(remainders + i);
        return loaded;
    }
    __device__ void unpack(const StoredChunk& loaded, ChunkValues& v) const {
        PlainView<bf16>::unpack(loaded.weights, v);
        if constexpr (MASTER) {
            for (int j = 0; j < CHUNK_SIZE; j++) {
                const uint32_t two = loaded.remainders.words[j / 2];
                const int32_t remainder = int32_t(j % 2 ? two : two << 16) >> 16;  // has a sign
                v[j] = __uint_as_float(__float_as_uint(v[j]) + remainder);
            }
        }
    }

    // For __byte_perm(): the lower halves of two words, or their upper halves. Each digit is the number of a
    // byte among the eight of the two words; the last digit names the lowest byte of the result.
    static constexpr uint32_t LOWER = 0x5410, UPPER = 0x7632;
    // The lower or the upper halves of eight words, 16 bits each. selector is LOWER or UPPER.
    static __device__ uint4 halves_of(const uint32_t (&words)[CHUNK_SIZE], uint32_t selector) {
        return {__byte_perm(words[0], words[1], selector), __byte_perm(words[2], words[3], selector),
                __byte_perm(words[4], words[5], selector), __byte_perm(words[6], words[7], selector)};
    }
    __device__ void store(int64_t i, const ChunkValues& v, uint64_t key, uint64_t element, bool live,
                          uint32_t& largest_bits) const {
        // With a master nobody uses the random bits, so the compiler leaves them out.
        const uint64_t random[2] = {rounding_bits(key, element / 4), rounding_bits(key, element / 4 + 1)};
        uint32_t bits[CHUNK_SIZE], sums[CHUNK_SIZE];
        for (int j = 0; j < CHUNK_SIZE; j++) {
            // Each of the two random numbers has 16 bits for each of four weights.
            const uint32_t random_16 = uint32_t((random[j / 4] >> (16 * (j % 4))) & 0xFFFF);
            bits[j] = __float_as_uint(v[j]);
            sums[j] = bits[j] + (MASTER ? 0x8000u : random_16);
            largest_bits = max(largest_bits, sums[j] & 0x7FFF0000u);
        }
        if (!live) return;
        store_in_one_instruction(weights + i, halves_of(sums, UPPER));
        if (MASTER) store_in_one_instruction(remainders + i, halves_of(bits, LOWER));
    }
};

// FP32 weights, which are their own masters: those of the recipe fp32. (This can wait.)
struct Fp32Weights {
    using StoredChunk = PlainView<float>::StoredChunk;
    PlainView<float> weights;

    __device__ Fp32Weights(const Weights& w, int64_t memory_offset)
        : weights{static_cast<float*>(w.values) + memory_offset} {}
    __device__ StoredChunk load(int64_t i) const { return weights.load(i); }
    __device__ void unpack(const StoredChunk& loaded, ChunkValues& v) const { weights.unpack(loaded, v); }
    __device__ void store(int64_t i, const ChunkValues& v, uint64_t, uint64_t, bool live,
                          uint32_t& largest_bits) const {
        weights.store(i, v, live);
        for (int j = 0; j < CHUNK_SIZE; j++) largest_bits = max(largest_bits, magnitude_bits(v[j]));
    }
};

// Calls f<WeightsKind>() with the kind of these weights.
template <class F> void with_weights(const Weights& w, F f) {
    if (w.format == Format::FP32) f.template operator()<Fp32Weights>();
    else if (w.remainders) f.template operator()<Bf16Weights<true>>();
    else f.template operator()<Bf16Weights<false>>();
}

// ===========================================================================================================
// 3. The arguments of the kernels

struct AdamWArguments {
    AdamWStepConstants constants;
    const AdamWParam* params;
    int param_count;
    Range elements;  // of these parameters, in memory order: whole moment groups
    Weights weights;
    uint64_t rounding_key;
    Bf16OrFp32View gradients;  // the gradients of these parameters, from elements.first on
    const GradientState* state;
};

inline __device__ AdamWParamConstants constants_of(const AdamWArguments& arguments, const AdamWParam& param) {
    return {.of_step = arguments.constants,
            .clip_factor = arguments.state->clip_factor,
            .decay = param.decays ? arguments.constants.weight_decay : 0.0f};
}

// Updates the parameters without FP8 moment groups (other_optimizers.cu). With the optimizer coat these are
// norm weights and biases.
void update_other_params(const OptimizerFormats& optimizer, const AdamWArguments& arguments,
                         cudaStream_t stream);

}  // namespace coat::gpu
