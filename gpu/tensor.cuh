// gpu/tensor.cuh - how kernels read and write tensors: eight elements at a time, as FP32 values.
//
// A thread handles a chunk of 8 consecutive elements, which is 16 bytes of BF16, the widest access of a GPU.
// How elements lie in memory is a Storage: Dense<bf16>, Dense<float>, or Groups (E4M3 codes with one BF16
// scale per 16 elements).
//   load()             fetches a chunk as it is, so that several are in flight before the first is used;
//   values()           converts a fetched chunk to FP32;
//   round_and_store()  rounds the values in the caller's registers, and writes what these then hold.
//
// Determinism: every sum has a fixed order, but for those of the quantization report. Atomics are maxima and
// integers, whose order does not matter; attention's blocks add up dq in turn.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "../coat.h"
#include "cuda.h"

namespace coat::gpu {

// A tensor on the GPU: value(r, c) = data(r, c) * the scale of its block. Null data means "no tensor" (but
// see Operand).
struct View {
    void* data;  // (rows, cols) of quant.format: FP8 codes, or values in BF16 or FP32
    // (scale_rows, scale_cols) of quant.scale_format; per tensor one AmaxAndScale; unused unless quant.fp8().
    void* scales;
    int64_t rows, cols;
    Quant quant;
};

// The rows [first, first + n) of a view without scales.
inline View rows(const View& v, int64_t first, int64_t n) {
    return {static_cast<uint8_t*>(v.data) + v.quant.code_bytes(first, v.cols), nullptr, n, v.cols, v.quant};
}

// The scale of a per-tensor FP8 tensor, on the device: View::scales points to one. It is 16 bytes because the
// GEMM wants scales aligned to that. A kernel that has the values updates amax (coat.cu, part 2);
// quantize() derives the scale from it.
struct alignas(16) AmaxAndScale {
    float scale;  // what codes are multiplied by: written by quantize(), combine_amaxes(), end_delayed_step()
    float amax;   // largest |x| so far: an atomicMax of |x|'s bits, in which infinity and then NaN come last
    float from_history;  // delayed scaling: the scale from earlier amaxes; 0 while that history is empty
    float unused;
};
inline AmaxAndScale* amax_and_scale(const View& v) { return static_cast<AmaxAndScale*>(v.scales); }

// A tensor as a GEMM wants it. Hopper's FP8 GEMM reads both operands along the reduction dimension, so an
// operand that is reduced over its rows is needed transposed, with codes (cols, rows). Either form, row-major
// (view.data) or transposed, may be null. With per-tensor scaling both have the same scale, view.scales.
// Other granularities have scales for each, in the layout that cuBLASLt reads:
//   per row    (rows)
//   1x128      (cols / 128, rows)
//   128x128    (rows / 128, cols / 128), each row padded to a multiple of four
struct Operand {
    View view;
    void* transposed = nullptr;
    void* transposed_scales = nullptr;
    // Updated by quantize() where the granularity is not per tensor; may be null.
    AmaxAndScale* amax = nullptr;
    bool delayed = false;  // per tensor: the scale comes from the history (te), once there is one
};

// A norm layer. Backward recomputes its output from `in` and `stats` instead of saving it.
struct Norm {
    View in;             // (N, C) in the compute dtype, or in groups
    const void* weight;  // (C) compute dtype
    const void* bias;    // (C) compute dtype; null for RMSNorm
    float2* stats;       // (N) {mean, 1 / std}, or {0, 1 / rms}
    bool rms;
    float eps;
};

inline unsigned blocks(int64_t n, int64_t each) { return static_cast<unsigned>(ceil_div(n, each)); }

#ifdef __CUDACC__

// Every kernel is launched here. what: its name in an error.
template <class... P>
void launch(const char* what, void (*kernel)(P...), dim3 grid, dim3 block, int shared, cudaStream_t s,
            std::common_type_t<P>... arguments) {
    require(grid.y <= 65535 && grid.z <= 65535, "a grid is too large");  // CUDA's limits: in a dry run, too
    if (grid.x == 0 || grid.y == 0) return;  // a rank may have no part of a tensor
    enqueue(s, [&] {
        if (shared > 40 << 10)  // 48 KiB, with static ones, need no permission
            check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
                  "This GPU has too little shared memory");
        kernel<<<grid, block, shared, s>>>(arguments...);
        const cudaError_t error = cudaGetLastError();
        if (error != cudaSuccess) check(error, concat("Launching ", what, " failed").c_str());
    });
}

using bf16 = __nv_bfloat16;
constexpr int CHUNK = 8;
using Values = float[CHUNK];  // nvcc unrolls short loops by itself; a pragma stands where it would not.

// -----------------------------------------------------------------------------------------------------------
// The largest magnitude. The bits of |x|, read as an integer, have the same order as |x|, with NaN above
// infinity.

inline __device__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }
inline __device__ float larger_magnitude(float top, float x) {  // max(top, |x|); NaN if either is NaN
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(top), "f"(fabsf(x)));
    return y;
}
template <int N> __device__ float larger_magnitude(float top, const float (&v)[N]) {
    for (int j = 0; j < N; j++) top = larger_magnitude(top, v[j]);
    return top;
}

// *amax = max(*amax, value with these bits). Most blocks find it large enough already and skip the atomic.
inline __device__ void update_amax(float* amax, uint32_t bits) {
    uint32_t* word = reinterpret_cast<uint32_t*>(amax);
    if (bits > *static_cast<volatile uint32_t*>(word)) atomicMax(word, bits);
}
inline __device__ void update_amax_by_warp(float* amax, uint32_t bits) {
    bits = __reduce_max_sync(0xFFFFFFFFu, bits);
    if (threadIdx.x % 32 == 0) update_amax(amax, bits);
}

// Sums in the same order every time: over the lanes of a warp, each of which gets it; over a block's threads.
template <class T> __device__ T sum_of_warp(T x) {
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, lanes);
    return x;
}
template <int THREADS> __device__ double block_sum(double x) {
    __shared__ double parts[THREADS];
    parts[threadIdx.x] = x;
    for (int n = THREADS / 2; n > 0; n /= 2) {
        __syncthreads();
        if (threadIdx.x < n) parts[threadIdx.x] += parts[threadIdx.x + n];
    }
    __syncthreads();
    return parts[0];
}

// -----------------------------------------------------------------------------------------------------------
// FP8 codes and scales (the paper's preliminaries): s = amax / FMAX, code = encode(x / s), x' = s * code

inline __device__ uint32_t encode2(bool e5m2, float lo, float hi) {  // two codes; saturates
    return __nv_cvt_float2_to_fp8x2(make_float2(lo, hi), __NV_SATFINITE, e5m2 ? __NV_E5M2 : __NV_E4M3);
}
inline __device__ float2 decode2(bool e5m2, uint32_t codes) {
    const auto format = e5m2 ? __NV_E5M2 : __NV_E4M3;
    const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), format);
    return __half22float2(__half2(h));
}
template <Format FP8> __device__ uint2 encode(const Values& v, float inverse) {  // eight codes of v * inverse
    constexpr bool E5M2 = FP8 == Format::E5M2;
    uint32_t two[4];
    for (int i = 0; i < 4; i++) two[i] = encode2(E5M2, v[2 * i] * inverse, v[2 * i + 1] * inverse);
    return {two[0] | two[1] << 16, two[2] | two[3] << 16};
}
inline __device__ uint2 encode(bool e5m2, const Values& v, float inverse) {  // the format of run time
    if (e5m2) return encode<Format::E5M2>(v, inverse);
    return encode<Format::E4M3>(v, inverse);
}
inline __device__ void decode(bool e5m2, uint2 codes, float scale, Values& v) {
    for (int i = 0; i < 4; i++) {
        const float2 two = decode2(e5m2, (i < 2 ? codes.x : codes.y) >> (i & 1) * 16 & 0xFFFFu);
        v[2 * i] = two.x * scale;
        v[2 * i + 1] = two.y * scale;
    }
}

// s = amax / FMAX, at least 2^-126 so that 1 / s is finite; 1 where amax is 0, infinite or NaN.
inline __device__ float scale_of(float fmax, float amax) {
    if (!(amax > 0 && amax < INFINITY)) return 1.0f;
    return fmaxf(__fdiv_rn(amax, fmax), 0x1p-126f);
}
// amax / 448 with the bits of a division: the product with the rounded reciprocal, corrected by its
// remainder. It has the right bits for every normal result; the caller raises smaller ones to 2^-126.
inline __device__ float divide_by_448(float amax) {
    const float q = __fmul_rn(amax, 1 / 448.0f);
    return __fmaf_rn(__fmaf_rn(-448.0f, q, amax), 1 / 448.0f, q);
}
inline __device__ float round_to_bf16(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

// -----------------------------------------------------------------------------------------------------------
// Fast mathematics: one instruction each, with a relative error of about 2^-22. (Near 1, log2 has an absolute
// error of that size.) ftz: subnormals count as 0.

#define FAST_FUNCTION(name, instruction)                \
    inline __device__ float name(float x) {             \
        float y;                                        \
        asm(instruction " %0, %1;" : "=f"(y) : "f"(x)); \
        return y;                                       \
    }
FAST_FUNCTION(fast_exp2, "ex2.approx.ftz.f32")
FAST_FUNCTION(fast_log2, "lg2.approx.f32")  // of subnormals too
FAST_FUNCTION(fast_log2_of_normal, "lg2.approx.ftz.f32")
FAST_FUNCTION(fast_reciprocal, "rcp.approx.ftz.f32")
FAST_FUNCTION(fast_sqrt, "sqrt.approx.ftz.f32")
#undef FAST_FUNCTION

constexpr float LOG2_E = 1.4426950408889634f;
inline __device__ float sigmoid_of_exp2(float z) {  // 1 / (1 + 2^z)
    return fast_reciprocal(__fadd_rn(1.0f, fast_exp2(z)));
}
inline __device__ float sigmoid(float x) { return sigmoid_of_exp2(__fmul_rn(-LOG2_E, x)); }

// -----------------------------------------------------------------------------------------------------------
// Storage

inline __device__ uint32_t pack(float lo, float hi) {  // two BF16 in a word
    const __nv_bfloat162 two = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<const uint32_t*>(&two);
}
inline __device__ float2 unpack(uint32_t two) {
    return {__uint_as_float(two << 16), __uint_as_float(two & 0xFFFF0000u)};
}

// One store of 8 or 16 bytes. (An assignment through a cast pointer may become four small stores.)
template <class V> __device__ void put(void* to, V value) { __stwb(static_cast<V*>(to), value); }

// Values in BF16 or FP32, N of which are loaded and stored at once.
template <class T, int N = CHUNK> struct Dense {
    static constexpr bool F32 = sizeof(T) == 4;
    static constexpr int WORDS = F32 ? N : N / 2;
    using Compute = T;
    using Piece = std::conditional_t<WORDS % 4 == 0, uint4, uint2>;  // what one instruction loads or stores
    struct alignas(sizeof(Piece)) Raw {
        uint32_t words[WORDS];
    };
    T* data;

    // The same tensor, counted from element i on.
    __device__ Dense from(int64_t i) const { return {data + i}; }
    __device__ Raw load(int64_t i) const { return *reinterpret_cast<const Raw*>(data + i); }
    static __device__ void values(const uint32_t* words, float (&v)[N]) {
        for (int j = 0; j < WORDS; j++)
            if constexpr (F32) v[j] = __uint_as_float(words[j]);
            else v[2 * j] = unpack(words[j]).x, v[2 * j + 1] = unpack(words[j]).y;
    }
    __device__ void values(const Raw& raw, float (&v)[N]) const { values(raw.words, v); }
    // Writes only if live, rounds in any case.
    __device__ void round_and_store(int64_t i, float (&v)[N], bool live) const {
        Raw raw;
        for (int j = 0; j < WORDS; j++)
            if constexpr (F32) raw.words[j] = __float_as_uint(v[j]);
            else raw.words[j] = pack(v[2 * j], v[2 * j + 1]);
        for (int j = 0; j < sizeof(Raw) / sizeof(Piece); j++)
            if (live)
                put(reinterpret_cast<Piece*>(data + i) + j, reinterpret_cast<const Piece*>(raw.words)[j]);
        values(raw, v);
    }
};

// E4M3 codes in groups of 1 x 16 with BF16 scales (paper section 5). The number of columns is a multiple of
// the group size, so the group of element i is i / GROUP. Two neighbouring lanes hold one group: both must
// call round_and_store(), the first writes the scale.
constexpr int GROUP = PER_GROUP.cols;
static_assert(GROUP == 2 * CHUNK);
struct Groups {
    using Compute = bf16;
    struct Raw {
        uint2 codes;
        uint16_t scale;
    };
    uint8_t* codes;
    uint16_t* scales;

    __device__ Groups from(int64_t i) const { return {codes + i, scales + i / GROUP}; }
    __device__ Raw load(int64_t i) const {
        return {*reinterpret_cast<const uint2*>(codes + i), scales[i / GROUP]};
    }
    __device__ void values(const Raw& r, Values& v) const {
        decode(false, r.codes, __uint_as_float(uint32_t(r.scale) << 16), v);
    }
    // The scale of the group that these lanes hold. It is rounded to BF16 before it is used: amax / scale is
    // then at most 449.75 = 448 (1 + 2^-8), which still rounds to 448, as all below 464 do. A group with NaN
    // or infinity gets the scale NaN: a code would hide what is not finite.
    static __device__ float group_scale(const Values& v) {
        float amax = larger_magnitude(0, v);
        amax = larger_magnitude(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, 1));  // with the other lane
        if (!(amax < INFINITY)) return __uint_as_float(0x7FC00000u);
        return amax > 0 ? round_to_bf16(fmaxf(divide_by_448(amax), 0x1p-126f)) : 1.0f;
    }
    // 1 / scale with the bits of a division: a BF16 scale has 8 bits, so the remainder is exact.
    static __device__ float inverse_of(float scale) {
        const float r = fast_reciprocal(scale);
        return __fmaf_rn(__fmaf_rn(-scale, r, 1.0f), r, r);
    }
    __device__ void round_and_store(int64_t i, Values& v, bool live) const {
        const float scale = group_scale(v);
        const uint2 c = encode(false, v, inverse_of(scale));
        if (live) {
            put(codes + i, c);
            if (threadIdx.x % 2 == 0) scales[i / GROUP] = static_cast<uint16_t>(__float_as_uint(scale) >> 16);
        }
        decode(false, c, scale, v);
    }
};

template <class T> __host__ __device__ Dense<T> dense(const void* p) {
    return {static_cast<T*>(const_cast<void*>(p))};
}
inline Groups groups_of(const View& v) {
    return {static_cast<uint8_t*>(v.data), static_cast<uint16_t*>(v.scales)};
}

// Calls f with the Storage of a tensor: BF16 or FP32.
template <class F> void with_dense(const View& v, F f) {
    if (v.quant.format == Format::F32) return f(dense<float>(v.data));
    f(dense<bf16>(v.data));
}
// The same, or groups.
template <class F> void with_storage(const View& v, F f) {
    if (!(v.quant == E4M3_GROUP)) return with_dense(v, f);
    f(groups_of(v));
}

// A tensor in BF16 or FP32, for instance a gradient (model.h, gradient_format). Which one is known at run
// time: all threads take the same branch, and a kernel exists once, not twice.
struct EitherDense {
    void* data;
    bool f32;

    template <class F> __device__ void with(F f) const {
        if (f32) f(dense<float>(data));
        else f(dense<bf16>(data));
    }
    using Raw = Dense<float>::Raw;  // of BF16 elements the first half
    __device__ Raw load(int64_t i) const {
        if (f32) return dense<float>(data).load(i);
        const auto half = dense<bf16>(data).load(i);
        return {half.words[0], half.words[1], half.words[2], half.words[3]};
    }
    __device__ void values(const Raw& raw, Values& v) const {
        f32 ? Dense<float>::values(raw.words, v) : Dense<bf16>::values(raw.words, v);
    }
    __device__ void load_values(int64_t i, Values& v) const { values(load(i), v); }
    __device__ void round_and_store(int64_t i, Values& v, bool live) const {
        with([&](auto x) { x.round_and_store(i, v, live); });
    }
};
inline EitherDense either_dense(const void* data, Format f) {
    return {const_cast<void*>(data), f == Format::F32};
}
inline EitherDense either_dense(const View& v) { return either_dense(v.data, v.quant.format); }

// -----------------------------------------------------------------------------------------------------------
// Norms: what the forward kernel and the recomputation share

// y = (x - mean) / std * weight + bias. Operations are spelled out so that every kernel computes the same
// bits.
inline __device__ float normalized(float x, float2 stats, float weight, float bias) {
    return __fmaf_rn(__fmul_rn(__fsub_rn(x, stats.x), stats.y), weight, bias);
}
template <class T> __device__ void load_parameters(const Norm& n, int64_t col, Values& weight, Values& bias) {
    Dense<T>::values(dense<T>(n.weight).load(col).words, weight);
    for (int j = 0; j < CHUNK; j++) bias[j] = 0;
    if (n.bias) Dense<T>::values(dense<T>(n.bias).load(col).words, bias);
}

#endif  // __CUDACC__

}  // namespace coat::gpu
