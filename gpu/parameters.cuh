// gpu/parameters.cuh - how a parameter lies in a GPU's memory: its weights with their FP32 masters, its
// moments, and its row in the table of an update. What any optimizer needs before its update (gradients.cu):
// first values, gradient norm, clipping, skipped steps, sums over ranks. How kernels read and round weights.
//
// The padding of a parameter up to a multiple of MOMENT_GROUP stays zero. No function allocates or waits; all
// launch on the given CUDA stream.
#pragma once
#include "plan.h"
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

// One moment of one parameter. In groups: codes, and max for each group; with expansion also k. With one
// scale per tensor (FP8, FP16): codes, and max[0] that decodes them; max[1] is room for the next. FP32 and
// BF16: no scale.
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

// Whether this GPU can run the program's kernels; else the reason.
cudaError_t find_kernels();

// FP8 codes (rows, cols) -> transposed (cols, rows), byte by byte (other_scaling.cu).
void transpose_codes(const View& codes, void* transposed, cudaStream_t s);

// -----------------------------------------------------------------------------------------------------------
// Gradients

// What a step knows of its gradients, on the device. Cleared before the step; each bucket adds to it.
struct GradientState {
    double squares, norm;  // of all buckets so far, before clipping
    float clip_factor;     // of the gradients, by clipping: limit / norm, or 1
    // Not 0: something was not finite, on any rank. Then no rank updates anything from this bucket on, and
    // the next step has the same bias correction.
    uint32_t skip;
};

// *checked = *loss; or NaN for the rest of the step if one of n amaxes is not finite, because an FP8 code
// would hide that.
void checked_loss(const AmaxAndScale* scales, int64_t n, const double* loss, double* checked, cudaStream_t s);
// Sums of squares, by shard units: SHARD_UNIT elements of a parameter (model.h). Added in a fixed order, they
// give the same norm for any number of ranks.
//   gradients       begin with the element `first` of the rank's order
//   sums            (1 + shard_units): *loss (0 if it is null), then those of the shard units from
//                   `first_shard_unit` on; 0 where the shard unit is another rank's
void gradient_squares(const Segment* segments, int number_of_segments, const void* gradients, Format format,
                      int64_t first, int64_t first_shard_unit, int64_t shard_units, const double* loss,
                      double* sums, cudaStream_t s);
// Adds them to the state: those of all ranks, (ranks, 1 + shard_units). For a shard unit of a matrix one of
// them at most is not 0, for one of a vector they are equal. clip: the limit of the norm; 0: none.
void gradient_norm(const double* sums, int64_t shard_units, int64_t ranks, float clip, GradientState* state,
                   cudaStream_t s);

// sum[i] = round(sum[i] + g_0[i] + g_1[i] + ...) over the ranks, added in FP32 and rounded once; or without
// the old sum. g_r = received + r * n, without a place for this rank, whose own gradients are at `own`.
void add_gradients(void* sum, bool assign, const void* own, const void* received, Format format, int64_t n,
                   int64_t rank, int64_t ranks, cudaStream_t s);
// amax = the largest of all ranks: theirs are (ranks, n). scale = amax / fmax, or the delayed scale.
void combine_amaxes(AmaxAndScale* scales, const AmaxAndScale* theirs, int64_t n, int64_t ranks, Format fp8,
                    cudaStream_t s);

// -----------------------------------------------------------------------------------------------------------
// Eight weights in registers, and how they are rounded when they are stored

#ifdef __CUDACC__

// The lower or the upper 16 bits of eight words.
constexpr uint32_t LOWER = 0x5410, UPPER = 0x7632;
inline __device__ uint4 halves(const uint32_t (&b)[CHUNK], uint32_t selector) {
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
    static __device__ Raw load(const Weights& w, int64_t i) { return dense<float>(w.values).load(i); }
    static __device__ void values(const Raw& raw, Values& v) { Dense<float>().values(raw, v); }
    static __device__ void store(const Weights& w, int64_t i, Values& v, uint64_t, uint64_t, bool live,
                                 uint32_t& top) {
        dense<float>(w.values).round_and_store(i, v, live);
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
