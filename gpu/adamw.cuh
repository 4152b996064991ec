// gpu/adamw.cuh - what the kernels of an update share: those of adamw.cu, for moments as COAT stores them,
// and those of other_optimizers.cu.
//
//   1. AdamW of one element
//   2. eight weights in registers, and how they are rounded when they are stored
//   3. the arguments of the kernels
#pragma once
#include "device.cuh"

namespace coat::gpu {

// ===========================================================================================================
// 1. AdamW of one element
//
//   m = b1 m + (1 - b1) g
//   v = b2 v + (1 - b2) g^2
//   w = w - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay w)
//
// m needs no division by c1 = 1 - b1^t, because with c2 = 1 - b2^t
//   m / c1 / (sqrt(v / c2) + eps) = m / (sqrt(v) root_factor + scaled_eps)
//   root_factor = c1 / sqrt(c2),  scaled_eps = c1 eps

// The constants of a step. Bias corrections are computed in double on the host.
struct AdamWKernelConstants {
    float lr, beta1, beta2, one_minus_beta1, one_minus_beta2, weight_decay;
    float root_factor, scaled_eps;
};

// An element after its update.
struct UpdatedElement {
    float m, v, w;
};

// Updates an element, of which w is the weight and g the gradient. decay is weight_decay, or 0 for a
// parameter that does not decay.
//
// The old moments come as products that are not computed yet: m is factor_m * ratio_m, and v is
// factor_v * ratio_v. A factor (the scale of codes, the max of a moment group, or 1) is the same for all
// elements that a thread decodes at a time, so the compiler multiplies it by b1 or b2 once for all of them.
// Then one multiplication decodes an old moment and lets it decay.
inline __device__ UpdatedElement adamw_element(const AdamWKernelConstants& constants, float decay, float w,
                                               float g, float factor_m, float ratio_m, float factor_v,
                                               float ratio_v) {
    // The added 0 turns -0 into 0: a moment that is zero has the code 0, as on the CPU, never that of -0.
    const float m =
        __fmaf_rn(constants.beta1 * factor_m, ratio_m, __fmaf_rn(constants.one_minus_beta1, g, 0.0f));
    const float v = __fmaf_rn(constants.beta2 * factor_v, ratio_v, constants.one_minus_beta2 * (g * g));
    const float update =
        m * fast_reciprocal(__fmaf_rn(fast_sqrt(v), constants.root_factor, constants.scaled_eps));
    return {.m = m, .v = v, .w = __fmaf_rn(-constants.lr, __fmaf_rn(decay, w, update), w)};
}

// ===========================================================================================================
// 2. Eight weights in registers, and how they are rounded when they are stored
//
// A kernel is compiled for each kind of weights: Bf16Weights<true> with masters, Bf16Weights<false> without,
// and FloatWeights. An object of these classes counts elements from `first`, the element of the rank's order
// for which it is constructed. store() rounds eight weights, writes them if they are live, and raises
// largest_bits, the bits of the largest magnitude so far. The random bits follow from key, the rounding_key()
// of the step, and from element, the first element's number in the flat order.

// BF16 weights. A number is added to the bits of an FP32 value, and the upper half of the sum is the weight.
// With a master the number is 0x8000, which rounds to nearest. What the weight lacks is its remainder:
// bits = (weight << 16) + signed remainder. Without a master, rounding to nearest would lose every update
// below half the distance to the next BF16 value: 16 random bits are added instead, so that the update is
// kept on average.
template <bool MASTER> struct Bf16Weights {
    struct StoredChunk {
        Plain<bf16>::StoredChunk weights, remainders;  // 16 bits each
    };
    bf16* weights;
    int16_t* remainders;  // null without a master

    __device__ Bf16Weights(const Weights& w, int64_t first)
        : weights(static_cast<bf16*>(w.values) + first), remainders(MASTER ? w.remainders + first : nullptr) {
    }

    // The lower or the upper 16 bits of two words, or of eight. Each digit of LOWER and UPPER is the number
    // of a byte among the eight of two words; the last digit names the lowest byte of the result.
    static constexpr uint32_t LOWER = 0x5410, UPPER = 0x7632;
    static __device__ uint4 sixteen_bits_of(const uint32_t (&words)[CHUNK], uint32_t which) {
        return {__byte_perm(words[0], words[1], which), __byte_perm(words[2], words[3], which),
                __byte_perm(words[4], words[5], which), __byte_perm(words[6], words[7], which)};
    }

    __device__ StoredChunk load(int64_t i) const {
        StoredChunk raw{};
        raw.weights = *reinterpret_cast<const Plain<bf16>::StoredChunk*>(weights + i);
        if (MASTER) raw.remainders = *reinterpret_cast<const Plain<bf16>::StoredChunk*>(remainders + i);
        return raw;
    }
    __device__ void unpack(const StoredChunk& raw, Values& v) const {
        if constexpr (!MASTER) {
            Plain<bf16>::unpack(raw.weights.words, v);
        } else {
            // The inverse of store(), which says why 0x8000 is flipped and then subtracted.
            for (int j = 0; j < CHUNK; j++) {
                const uint32_t remainders = raw.remainders.words[j / 2] ^ 0x80008000u;
                const uint32_t sum = __byte_perm(remainders, raw.weights.words[j / 2], j % 2 ? UPPER : LOWER);
                v[j] = __uint_as_float(sum - 0x8000u);
            }
        }
    }
    __device__ void store(int64_t i, const Values& v, uint64_t key, uint64_t element, bool live,
                          uint32_t& largest_bits) const {
        // With a master nobody uses the random bits, so the compiler leaves them out.
        const uint64_t random[2] = {rounding_bits(key, element / 4), rounding_bits(key, element / 4 + 1)};
        uint32_t sums[CHUNK];
        for (int j = 0; j < CHUNK; j++) {
            const uint32_t sixteen = static_cast<uint32_t>(random[j / 4] >> 16 * (j % 4) & 0xFFFF);
            sums[j] = __float_as_uint(v[j]) + (MASTER ? 0x8000u : sixteen);
            largest_bits = max(largest_bits, sums[j] & 0x7FFF0000u);
        }
        if (!live) return;
        store_word(weights + i, sixteen_bits_of(sums, UPPER));
        if (!MASTER) return;
        // sum = bits + 0x8000, of which the weight is the upper half. So the remainder, which is bits minus
        // the weight << 16, is the lower half minus 0x8000. In 16 bits that only flips the highest bit.
        const uint4 lower = sixteen_bits_of(sums, LOWER);
        store_word(remainders + i, make_uint4(lower.x ^ 0x80008000u, lower.y ^ 0x80008000u,
                                              lower.z ^ 0x80008000u, lower.w ^ 0x80008000u));
    }
};

// FP32 weights, which are their own masters: the fp32 recipe.
struct FloatWeights {
    using StoredChunk = Plain<float>::StoredChunk;
    Plain<float> weights;

    __device__ FloatWeights(const Weights& w, int64_t first)
        : weights{static_cast<float*>(w.values) + first} {}
    __device__ StoredChunk load(int64_t i) const { return weights.load(i); }
    __device__ void unpack(const StoredChunk& raw, Values& v) const { weights.unpack(raw, v); }
    __device__ void store(int64_t i, Values& v, uint64_t, uint64_t, bool live, uint32_t& largest_bits) const {
        weights.round_in_place_and_store(i, v, live);
        for (int j = 0; j < CHUNK; j++) largest_bits = max(largest_bits, magnitude_bits(v[j]));
    }
};

// Calls f<Kind>() with the kind of these weights.
template <class F> void with_weights(const Weights& w, F f) {
    if (w.format == Format::FP32) f.template operator()<FloatWeights>();
    else if (w.remainders) f.template operator()<Bf16Weights<true>>();
    else f.template operator()<Bf16Weights<false>>();
}

// ===========================================================================================================
// 3. The arguments of the kernels

// The number of spans that these elements of a parameter form. A span is 128 consecutive elements: where
// moments are in FP8 moment groups, one of m and one of v.
inline __device__ int64_t spans_of(int64_t elements) { return ceil_div(elements, MOMENT_GROUP_SIZE); }

struct AdamWArguments {
    AdamWKernelConstants constants;
    float fmax_m, fmax_v;    // FMAX of the formats of m and v, where they are scaled
    bool per_tensor;         // the optimizer has one scale for each moment of a parameter
    bool fp8_moment_groups;  // or its moments are in FP8 moment groups
    const Shard* shards;
    int shard_count;
    int64_t first_element;  // the first element of these shards in the rank's order
    int64_t spans;          // how many spans the shards have together
    Weights weights;
    uint64_t rounding_key;
    Bf16OrFloat gradients;  // the gradients of these shards, from first_element on
    const GradientState* state;

    // v is in moment groups where m is (formats.h, Optimizer::has_fp8_moment_groups).
    __device__ bool in_fp8_moment_groups(const Shard& shard) const {
        return moments_need_scaling(shard.m.format) && !per_tensor;
    }
};

// Updates the shards whose moments are not in FP8 moment groups (other_optimizers.cu): with an optimizer that
// has FP8 moment groups these are norm weights and biases, with any other optimizer all.
void update_shards_without_moment_groups(const AdamWArguments& a, cudaStream_t stream);

}  // namespace coat::gpu
