// gpu/parameters.cuh - how a parameter lies in a GPU's memory: its weights with their FP32 masters, its
// moments, and its row in the table of an update (gradients.cu: first values); how kernels read and round
// weights.
//
// The padding of a parameter up to a multiple of MOMENT_GROUP stays zero. No function allocates or waits; all
// launch on the given CUDA stream.
#pragma once
#include "../program/plan.h"
#include "tensor.cuh"

namespace coat::gpu {

// BF16 weights have the int16 remainder of their FP32 master beside them in the same order. Without
// remainders they are all there is, and the optimizer rounds them stochastically. In the fp32 recipe the
// weights are the masters.
struct Weights {
    void* values;        // (total) BF16 or FP32
    int16_t* remainder;  // (total); null if the weights are FP32, or have no master
    Format format;

    // Counted from this element on; the weights are T.
    template <class T> __device__ Weights from(int64_t i) const {
        return {static_cast<T*>(values) + i, remainder ? remainder + i : nullptr, format};
    }
};

// One moment of one parameter. FP8 in groups: codes, and (max, k) for each group. FP8 and FP16 with one scale
// per tensor: codes, and max[0] that decodes them; max[1] is room for the next one. FP32 and BF16: no scale.
struct MomentView {
    void* data;      // (padded_size) of format; padding stays zero
    float *max, *k;  // k is null without expansion
    Format format;
};
// What this rank updates of one parameter: a row of a table on the device. With one rank its order is the
// flat order, so to_flat is 0.
struct Segment {
    int64_t offset, size;  // among the rank's weights, masters and gradients; elements
    MomentView m, v;
    bool decays;
    AmaxAndScale* amax;      // of the new weights; may be null
    int64_t to_flat = 0;     // what to add to an offset to find the element in the flat order
    int64_t shard_unit = 0;  // number of its first shard unit among those of all parameters
};

// The first values of what a rank owns of a parameter (model.h, initial()). used: used_elements() of model.h;
// the rest is 0.
void initialize(const Weights& w, const Param& p, const ShardPlace& at, uint64_t index, int64_t used,
                uint64_t seed, cudaStream_t s);

// FP8 codes (rows, cols) -> transposed (cols, rows), byte by byte (other_scaling.cu).
void transpose_codes(const View& codes, void* transposed, cudaStream_t s);

// -----------------------------------------------------------------------------------------------------------
// Eight weights in registers, and how they are rounded when they are stored

#ifdef __CUDACC__

constexpr uint32_t LOWER = 0x5410, UPPER = 0x7632;
inline __device__ uint4 halves(const uint32_t (&b)[CHUNK],
                               uint32_t selector) {  // lower or upper 16 bits of each
    return {__byte_perm(b[0], b[1], selector), __byte_perm(b[2], b[3], selector),
            __byte_perm(b[4], b[5], selector), __byte_perm(b[6], b[7], selector)};
}

// A kernel has Bf16Weights<true>, Bf16Weights<false> or FloatWeights. store() rounds the weights and updates
// `top`, the bits of the largest magnitude so far.

// A number is added to the bits of an FP32 value; the upper half of the sum is the BF16 weight. With a master
// the number is 0x8000: rounding to nearest. What the weight lacks is the remainder: bits = (weight << 16) +
// signed remainder. Without a master, that rounding would lose every update below half a step of BF16: 16
// random bits are added instead, which keeps it on average. They follow from the step's key and the number
// of the element.
template <bool MASTER> struct Bf16Weights {
    using Value = bf16;
    struct Raw {
        Dense<bf16>::Raw w, r;
    };
    static __device__ Raw load(const Weights& w, int64_t i) {
        auto load16 = [&](auto* from) { return *reinterpret_cast<const Dense<bf16>::Raw*>(from + i); };
        return {load16(static_cast<bf16*>(w.values)), MASTER ? load16(w.remainder) : Dense<bf16>::Raw{}};
    }
    static __device__ void values(const Raw& raw, Values& v) {
        if constexpr (!MASTER) Dense<bf16>::values(raw.w.words, v);
        for (int j = 0; MASTER && j < CHUNK; j++)  // the inverse of store()
            v[j] = __uint_as_float(
                __byte_perm(raw.r.words[j / 2] ^ 0x80008000u, raw.w.words[j / 2], j % 2 ? UPPER : LOWER) -
                0x8000u);
    }
    static __device__ void store(const Weights& w, int64_t i, const Values& v, uint64_t key, uint64_t element,
                                 bool live, uint32_t& top) {
        const uint64_t random[2] = {rounding_bits(key, element / 4), rounding_bits(key, element / 4 + 1)};
        uint32_t b[CHUNK];
#pragma unroll
        for (int j = 0; j < CHUNK; j++) {
            b[j] = __float_as_uint(v[j]) +
                   (MASTER ? 0x8000u : static_cast<uint32_t>(random[j / 4] >> 16 * (j % 4) & 0xFFFF));
            top = max(top, b[j] & 0x7FFF0000u);
        }
        const uint4 weights = halves(b, UPPER), rest = halves(b, LOWER);
        if (live) put(static_cast<bf16*>(w.values) + i, weights);
        // Subtracting the 0x8000 again from the lower halves only flips their highest bits.
        if (MASTER && live)
            put(w.remainder + i, make_uint4(rest.x ^ 0x80008000u, rest.y ^ 0x80008000u, rest.z ^ 0x80008000u,
                                            rest.w ^ 0x80008000u));
    }
};

struct FloatWeights {  // the fp32 recipe
    using Value = float;
    using Raw = Dense<float>::Raw;
    static __device__ Raw load(const Weights& w, int64_t i) {
        return Dense<float>{static_cast<float*>(w.values)}.load(i);
    }
    static __device__ void values(const Raw& raw, Values& v) { Dense<float>().values(raw, v); }
    static __device__ void store(const Weights& w, int64_t i, Values& v, uint64_t, uint64_t, bool live,
                                 uint32_t& top) {
        Dense<float>{static_cast<float*>(w.values)}.round_and_store(i, v, live);
#pragma unroll
        for (int j = 0; j < CHUNK; j++) top = max(top, magnitude(v[j]));
    }
};

// Calls f with how these weights are stored.
template <class F> void with_weights(const Weights& w, F f) {
    if (w.format == Format::F32) f(FloatWeights());
    else if (w.remainder) f(Bf16Weights<true>());
    else f(Bf16Weights<false>());
}

#endif  // __CUDACC__

}  // namespace coat::gpu
