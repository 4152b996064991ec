// gpu/device.cuh - how kernels read, compute and write tensors.
//
//   1. launching a kernel
//   2. values in registers: the largest magnitude, sums, FP8 codes and scales, fast functions
//   3. layouts: how a thread loads and stores eight neighbouring elements
//   4. producers: a tensor that is not stored, computed on the fly (LazyTensor in operators.h)
//   5. tiles: how the threads of a block share out a tensor; sums over its columns
//
// A thread handles a chunk of 8 consecutive elements of a row at a time, as FP32 values. As BF16 a chunk is
// 16 bytes: one instruction loads or stores it.
//
// The grid covers whole blocks, so it may reach beyond the tensor. A chunk there is not live:
//
//   +------------------+ - - - - - -
//   | tensor           |           :    a block at the corner of a tensor
//   |   live = true    |           :
//   +------------------+           :
//   :            live = false      :
//    - - - - - - - - - - - - - - - -
//
// For a chunk that is not live, a thread does what it does for others, with a copy of values from inside the
// tensor or with zeros, so that few instructions need a condition. But it stores nothing for such a chunk.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "operators.h"

namespace coat::gpu {

// ===========================================================================================================
// 1. Launching a kernel

// The number of blocks of a grid if n elements are shared out and a block has `each` of them.
inline unsigned blocks(int64_t n, int64_t each) { return static_cast<unsigned>(ceil_div(n, each)); }

// Every kernel is launched here. what: its name in an error.
template <class... Parameters>
void launch(const char* what, void (*kernel)(Parameters...), dim3 grid, dim3 block, int shared,
            cudaStream_t stream, std::common_type_t<Parameters>... arguments) {
    require(grid.y <= 65535 && grid.z <= 65535, "a grid is too large");  // CUDA's limits: in a dry run, too
    if (grid.x == 0 || grid.y == 0) return;  // a rank may have no part of a tensor
    enqueue(stream, [&] {
        // Without this call a block may have at most 48 KiB of shared memory. `shared` does not count the
        // arrays that a kernel declares with a fixed size: 8 KiB are left for these.
        if (shared > 40 << 10)
            check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
                  "This GPU has too little shared memory");
        kernel<<<grid, block, shared, stream>>>(arguments...);
        const cudaError_t error = cudaGetLastError();
        if (error != cudaSuccess) check(error, concat("Launching ", what, " failed").c_str());
    });
}

// The number of this thread among all of a grid with one dimension.
inline __device__ int64_t thread_of_grid() {
    return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

// ===========================================================================================================
// 2. Values in registers

using bf16 = __nv_bfloat16;
constexpr int CHUNK = 8;
using Values = float[CHUNK];  // the FP32 values of a chunk
// (nvcc unrolls loops over a chunk by itself; a pragma stands where it would not.)

// The largest magnitude so far is kept as an FP32 value, `largest`, or as its bits, `largest_bits`. The bits
// of |x|, read as an integer, have the same order as |x|, with NaN above infinity.

inline __device__ uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }
// max(largest, |x|); NaN if either is NaN
inline __device__ float larger_magnitude(float largest, float x) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(largest), "f"(fabsf(x)));
    return y;
}
template <int N> __device__ float larger_magnitude(float largest, const float (&v)[N]) {
    for (int j = 0; j < N; j++) largest = larger_magnitude(largest, v[j]);
    return largest;
}

// *amax = max(*amax, the value with these bits). Most blocks find it large enough already and skip the
// atomic. update_amax_by_warp() takes the largest bits of a warp's lanes. Every lane that has not ended calls
// it, and lane 0 must be one of these.
inline __device__ void update_amax(float* amax, uint32_t bits) {
    uint32_t* word = reinterpret_cast<uint32_t*>(amax);
    if (bits > *static_cast<volatile uint32_t*>(word)) atomicMax(word, bits);
}
inline __device__ void update_amax_by_warp(float* amax, uint32_t bits) {
    bits = __reduce_max_sync(0xFFFFFFFFu, bits);
    if (threadIdx.x % 32 == 0) update_amax(amax, bits);
}

// The sum of x over the lanes of a warp, and below over the threads of a block. The order of additions is
// fixed, and all lanes or threads get the same bits. A kernel calls sum_of_block() only once: in a second
// call some threads would write `parts` while others still read the result of the first.
template <class Real> __device__ Real sum_of_warp(Real x) {
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, lanes);
    return x;
}
template <int THREADS> __device__ double sum_of_block(double x) {
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
// FP8 codes and scales (the paper's preliminaries):
//   s = amax / FMAX,  code = encode(x / s),  x' = s * decode(code)

inline __device__ uint32_t encode2(bool e5m2, float lo, float hi) {  // two codes; saturates
    return __nv_cvt_float2_to_fp8x2(make_float2(lo, hi), __NV_SATFINITE, e5m2 ? __NV_E5M2 : __NV_E4M3);
}
inline __device__ float2 decode2(bool e5m2, uint32_t codes) {
    const auto format = e5m2 ? __NV_E5M2 : __NV_E4M3;
    const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), format);
    return __half22float2(__half2(h));
}
// Eight codes of v * inverse; the format is known when the kernel is compiled, or (below) when it runs.
template <Format FP8> __device__ uint2 encode(const Values& v, float inverse) {
    constexpr bool E5M2 = FP8 == Format::E5M2;
    uint32_t two[4];
    for (int i = 0; i < 4; i++) two[i] = encode2(E5M2, v[2 * i] * inverse, v[2 * i + 1] * inverse);
    return {two[0] | two[1] << 16, two[2] | two[3] << 16};
}
inline __device__ uint2 encode(bool e5m2, const Values& v, float inverse) {
    if (e5m2) return encode<Format::E5M2>(v, inverse);
    return encode<Format::E4M3>(v, inverse);
}
// Eight values, code * scale.
inline __device__ void decode(bool e5m2, uint2 codes, float scale, Values& v) {
    for (int i = 0; i < 4; i++) {
        const float2 two = decode2(e5m2, ((i < 2 ? codes.x : codes.y) >> (16 * (i & 1))) & 0xFFFFu);
        v[2 * i] = two.x * scale;
        v[2 * i + 1] = two.y * scale;
    }
}

// s = amax / FMAX, at least 2^-126 so that 1 / s is finite; 1 where amax is 0, infinite or NaN.
inline __device__ float scale_of(float fmax, float amax) {
    if (!(amax > 0 && amax < INFINITY)) return 1.0f;
    return fmaxf(__fdiv_rn(amax, fmax), 0x1p-126f);
}
// amax / 448, with the bits that a division gives: the product with the rounded reciprocal, corrected by its
// remainder. The bits are right for every normal result; the caller raises smaller ones to 2^-126. (With a
// division, a kernel that makes groups has a quarter to a half more instructions.)
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
FAST_FUNCTION(fast_log2, "lg2.approx.f32")  // takes subnormals, too
FAST_FUNCTION(fast_log2_of_normal, "lg2.approx.ftz.f32")
FAST_FUNCTION(fast_reciprocal, "rcp.approx.ftz.f32")
FAST_FUNCTION(fast_sqrt, "sqrt.approx.ftz.f32")
#undef FAST_FUNCTION

// RoPE (layers.cu): turns a pair of elements of a head by the angle that has this sine and cosine.
inline __device__ void rotate(float& x, float& y, float cosine, float sine) {
    const float own = x;
    x = __fmaf_rn(own, cosine, __fmul_rn(y, -sine));
    y = __fmaf_rn(y, cosine, __fmul_rn(own, sine));
}

constexpr float LOG2_E = 1.4426950408889634f;
inline __device__ float one_over_1_plus_exp2(float z) {  // 1 / (1 + 2^z)
    return fast_reciprocal(__fadd_rn(1.0f, fast_exp2(z)));
}
inline __device__ float sigmoid(float x) { return one_over_1_plus_exp2(__fmul_rn(-LOG2_E, x)); }

// ===========================================================================================================
// 3. Layouts
//
// A Layout says how the elements of a tensor lie in memory. There are three: Plain<bf16> and Plain<float>,
// without scales, and Groups, E4M3 codes with one BF16 scale for 16 elements. Each has two types and four
// functions:
//   Compute                     the compute dtype that goes with it;
//   StoredChunk                 a chunk as it is stored, in registers;
//   starting_at()               the same tensor, counted from element i on;
//   load()                      fetches a chunk, so that several are in flight before the first is used;
//   unpack()                    converts a fetched chunk to FP32;
//   round_in_place_and_store()  rounds the values in the caller's registers, and writes those that are live.

inline __device__ uint32_t pack_bf16(float lo, float hi) {  // two BF16 in 32 bits
    const __nv_bfloat162 two = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<const uint32_t*>(&two);
}
inline __device__ float2 unpack_bf16(uint32_t two) {
    return {__uint_as_float(two << 16), __uint_as_float(two & 0xFFFF0000u)};
}

// Stores a value of 4, 8 or 16 bytes with one instruction. (An assignment through a cast pointer may become
// four small stores. In all other places a word is 32 bits.)
template <class Word> __device__ void store_word(void* to, Word value) {
    __stwb(static_cast<Word*>(to), value);
}

// Values in BF16 or FP32, without scales. N of them are loaded and stored at once: a chunk, or (layers.cu)
// half a chunk.
template <class Element, int N = CHUNK> struct Plain {
    static constexpr bool IS_F32 = sizeof(Element) == 4;
    static constexpr int WORDS = IS_F32 ? N : N / 2;
    using Compute = Element;
    using Access = std::conditional_t<WORDS % 4 == 0, uint4, uint2>;  // what one instruction loads or stores
    struct alignas(sizeof(Access)) StoredChunk {
        uint32_t words[WORDS];
    };
    Element* data;

    __device__ Plain starting_at(int64_t i) const { return {data + i}; }
    __device__ StoredChunk load(int64_t i) const { return *reinterpret_cast<const StoredChunk*>(data + i); }
    static __device__ void unpack(const uint32_t* words, float (&v)[N]) {
        for (int j = 0; j < WORDS; j++) {
            if constexpr (IS_F32) {
                v[j] = __uint_as_float(words[j]);
            } else {
                v[2 * j] = unpack_bf16(words[j]).x;
                v[2 * j + 1] = unpack_bf16(words[j]).y;
            }
        }
    }
    __device__ void unpack(const StoredChunk& raw, float (&v)[N]) const { unpack(raw.words, v); }
    __device__ void round_in_place_and_store(int64_t i, float (&v)[N], bool live) const {
        StoredChunk raw;
        for (int j = 0; j < WORDS; j++)
            if constexpr (IS_F32) raw.words[j] = __float_as_uint(v[j]);
            else raw.words[j] = pack_bf16(v[2 * j], v[2 * j + 1]);
        for (int j = 0; j < sizeof(StoredChunk) / sizeof(Access); j++)
            if (live)
                store_word(reinterpret_cast<Access*>(data + i) + j,
                           reinterpret_cast<const Access*>(raw.words)[j]);
        unpack(raw, v);
    }
};

// E4M3 codes in scale groups of 1 x 16 with BF16 scales (paper, section 5). The number of columns is a
// multiple of the group size, so the group of element i is i / GROUP_SIZE. Two neighbouring lanes hold one
// group: both must call round_in_place_and_store(), the first writes the scale.
constexpr int GROUP_SIZE = PER_1x16.cols;
static_assert(GROUP_SIZE == 2 * CHUNK);
struct Groups {
    using Compute = bf16;
    struct StoredChunk {
        uint2 codes;
        uint16_t scale;
    };
    uint8_t* codes;
    uint16_t* scales;

    __device__ Groups starting_at(int64_t i) const { return {codes + i, scales + i / GROUP_SIZE}; }
    __device__ StoredChunk load(int64_t i) const {
        return {*reinterpret_cast<const uint2*>(codes + i), scales[i / GROUP_SIZE]};
    }
    __device__ void unpack(const StoredChunk& raw, Values& v) const {
        decode(/*e5m2=*/false, raw.codes, __uint_as_float(static_cast<uint32_t>(raw.scale) << 16), v);
    }
    // The scale of the group that this lane and its neighbour hold, amax / 448 rounded to BF16. Where that
    // rounds down, amax / scale is larger than 448, at most 448 (1 + 2^-8) = 449.75. It gets the code of 448
    // nevertheless: an error of less than 2, where any value above 256 may have an error of 16. A group with
    // NaN or infinity gets the scale NaN, because a code would hide what is not finite.
    static __device__ float group_scale(const Values& v) {
        float amax = larger_magnitude(0, v);
        amax = larger_magnitude(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, 1));  // with the other lane
        if (!(amax < INFINITY)) return __uint_as_float(0x7FC00000u);
        return amax > 0 ? round_to_bf16(fmaxf(divide_by_448(amax), 0x1p-126f)) : 1.0f;
    }
    // 1 / scale with the bits of a division. (A BF16 scale has 8 significant bits, so that the inner fused
    // multiply-add is exact.)
    static __device__ float inverse_of_scale(float scale) {
        const float r = fast_reciprocal(scale);
        return __fmaf_rn(__fmaf_rn(-scale, r, 1.0f), r, r);
    }
    __device__ void round_in_place_and_store(int64_t i, Values& v, bool live) const {
        const float scale = group_scale(v);
        const uint2 c = encode<Format::E4M3>(v, inverse_of_scale(scale));
        if (live) {
            store_word(codes + i, c);
            if (threadIdx.x % 2 == 0)
                scales[i / GROUP_SIZE] = static_cast<uint16_t>(__float_as_uint(scale) >> 16);
        }
        decode(/*e5m2=*/false, c, scale, v);
    }
};

template <class Element> __host__ __device__ Plain<Element> plain(const void* p) {
    return {static_cast<Element*>(const_cast<void*>(p))};
}
inline Groups groups_of(const TensorRef& t) { return {static_cast<uint8_t*>(t.data), t.group_scales}; }

// Calls f with the Layout of a tensor in BF16 or FP32.
template <class F> void with_plain(const TensorRef& t, F f) {
    if (t.storage.format == Format::FP32) return f(plain<float>(t.data));
    f(plain<bf16>(t.data));
}
// The same for a tensor that may also be in groups.
template <class F> void with_layout(const TensorRef& t, F f) {
    if (t.storage != E4M3_1x16) return with_plain(t, f);
    f(groups_of(t));
}

// A tensor in BF16 or FP32, for instance a gradient (model.h, gradient_format). The kernel learns at run time
// which of the two: all threads take the same branch, and a kernel exists once, not twice.
struct Bf16OrFloat {
    void* data;
    bool f32;

    template <class F> __device__ void with(F f) const {
        if (f32) f(plain<float>(data));
        else f(plain<bf16>(data));
    }
    using StoredChunk = Plain<float>::StoredChunk;  // BF16 elements fill its first half
    __device__ StoredChunk load(int64_t i) const {
        if (f32) return plain<float>(data).load(i);
        const auto half = plain<bf16>(data).load(i);
        return {half.words[0], half.words[1], half.words[2], half.words[3]};
    }
    __device__ void unpack(const StoredChunk& raw, Values& v) const {
        if (f32) Plain<float>::unpack(raw.words, v);
        else Plain<bf16>::unpack(raw.words, v);
    }
    __device__ void load_values(int64_t i, Values& v) const { unpack(load(i), v); }
    __device__ void round_in_place_and_store(int64_t i, Values& v, bool live) const {
        with([&](auto x) { x.round_in_place_and_store(i, v, live); });
    }
};
inline Bf16OrFloat bf16_or_float(const void* data, Format f) {
    return {const_cast<void*>(data), f == Format::FP32};
}
inline Bf16OrFloat bf16_or_float(const TensorRef& t) { return bf16_or_float(t.data, t.storage.format); }

// ===========================================================================================================
// 4. Producers
//
// A producer gives a kernel the values of a LazyTensor (operators.h): it loads them, or computes them from
// what is stored. For 8 columns of one row,
//   cursor(row, col)              is what a thread remembers of its place: pointers, and a norm's weights;
//   load(cursor, i)               fetches what row + i needs, so that several rows' loads are in flight;
//   compute(raw, cursor, values)  computes the FP32 values of the tensor from what was fetched.
// [gate | up] consists of two planes side by side, each `width` columns wide; a thread has the same 8 columns
// of both. Any other tensor is one plane. SiLU(gate) x up is computed from two planes and has one.
// The code says which multiplications and additions are fused (__fmaf_rn) and which are not (__fmul_rn,
// __fadd_rn). If the compiler chose, it might choose differently in another kernel; so a tensor has the same
// bits wherever it is computed.

// Elements from a thread's first row to its row i: in 32 bits, so that an address is a single instruction.
inline __device__ uint32_t row_offset(int i, int64_t width) {
    return static_cast<uint32_t>(i) * static_cast<uint32_t>(width);
}

// A norm: y = (x - mean) rstd weight + bias.
inline __device__ float norm_output(float x, RowStatistics statistics, float weight, float bias) {
    return __fmaf_rn(__fmul_rn(__fsub_rn(x, statistics.mean), statistics.rstd), weight, bias);
}
template <class Element>
__device__ void load_weight_and_bias(const Norm& n, int64_t col, Values& weight, Values& bias) {
    Plain<Element>::unpack(plain<Element>(n.weight).load(col).words, weight);
    for (int j = 0; j < CHUNK; j++) bias[j] = 0;
    if (n.bias) Plain<Element>::unpack(plain<Element>(n.bias).load(col).words, bias);
}

// GELU in its tanh form is u sigmoid(2z) with z = A (u + B u^3), A = sqrt(2 / pi) and B = 0.044715, since
// 1 + tanh(z) = 2 sigmoid(2z).
constexpr float GELU_2A = 2 * 0.7978845608028654f, GELU_2AB = 2 * 0.7978845608028654f * 0.044715f;
inline __device__ float gelu_sigmoid(float u) {
    const float uu = __fmul_rn(u, u);
    return one_over_1_plus_exp2(__fmul_rn(u, __fmaf_rn(-LOG2_E * GELU_2AB, uu, -LOG2_E * GELU_2A)));
}
inline __device__ float gelu(float u) { return __fmul_rn(u, gelu_sigmoid(u)); }
// The gradient of u, from d, the gradient of gelu(u). gelu'(u) = s + u s (1 - s) 2z'(u). u^2 is limited to
// 128, so that the product of an infinite slope and a zero is no NaN. This changes no result: from |u| = 11
// on, s or 1 - s is zero.
inline __device__ float gelu_backward(float u, float d) {
    const float s = gelu_sigmoid(u);
    const float slope = __fmaf_rn(3 * GELU_2AB, fminf(__fmul_rn(u, u), 128.0f), GELU_2A);
    const float bend = __fmul_rn(__fmul_rn(u, s), __fsub_rn(1.0f, s));
    return __fmul_rn(d, __fmaf_rn(bend, slope, s));
}

// SiLU(gate) x up, where silu(u) = u sigmoid(u).
inline __device__ float gated_silu(float gate, float up) {
    return __fmul_rn(__fmul_rn(gate, sigmoid(gate)), up);
}
// The gradients of gate and up, from d, the gradient of gated_silu(). silu'(u) = s + u s (1 - s).
inline __device__ void gated_silu_backward(float gate, float up, float d, float& dgate, float& dup) {
    const float s = sigmoid(gate), silu = __fmul_rn(gate, s);
    dgate = __fmul_rn(__fmul_rn(d, up), __fmaf_rn(silu, __fsub_rn(1.0f, s), s));
    dup = __fmul_rn(d, silu);
}

// The producer of the LazyTensors with the op OP, whose input is stored in the given Layout: in two
// planes if GATED, else in one.
template <LazyOp OP, class Layout, bool GATED = false> struct LazyProducer {
    static constexpr bool NORM = OP == LazyOp::Norm, ACTIVATION = OP == LazyOp::Activation,
                          BACKWARD = OP == LazyOp::ActivationBackward;
    static constexpr int INPUT_PLANES = GATED ? 2 : 1;
    static constexpr int PLANES = ACTIVATION ? 1 : INPUT_PLANES;  // how many planes the result has
    using Compute = typename Layout::Compute;
    struct Cursor {
        Layout in[INPUT_PLANES];
        Plain<Compute> dact;
        const RowStatistics* statistics;
        Values weight, bias;
    };
    // What load() fetches. A producer uses some of the fields, which have BYTES bytes together.
    struct Fetched {
        typename Layout::StoredChunk in[INPUT_PLANES];
        typename Plain<Compute>::StoredChunk dact;
        RowStatistics statistics;
    };
    static constexpr int BYTES =
        sizeof(Fetched::in) + BACKWARD * sizeof(Fetched::dact) + NORM * sizeof(Fetched::statistics);
    Layout in;        // (N, INPUT_PLANES * width)
    int64_t width;    // the columns of a plane
    LazyTensor lazy;  // what is computed

    __device__ Cursor cursor(int64_t row, int64_t col) const {
        Cursor cursor;
        for (int p = 0; p < INPUT_PLANES; p++)
            cursor.in[p] = in.starting_at((row * INPUT_PLANES + p) * width + col);
        if (BACKWARD) cursor.dact = plain<Compute>(lazy.dact.data).starting_at(row * width + col);
        if (NORM) {
            cursor.statistics = lazy.norm.row_statistics + row;
            load_weight_and_bias<Compute>(lazy.norm, col, cursor.weight, cursor.bias);
        }
        return cursor;
    }
    __device__ Fetched load(const Cursor& cursor, int i) const {
        Fetched raw;
        for (int p = 0; p < INPUT_PLANES; p++)
            raw.in[p] = cursor.in[p].load(row_offset(i, INPUT_PLANES * width));
        if (BACKWARD) raw.dact = cursor.dact.load(row_offset(i, width));
        if (NORM) raw.statistics = cursor.statistics[i];
        return raw;
    }
    __device__ void compute(const Fetched& raw, const Cursor& cursor, Values (&v)[PLANES]) const {
        Values x[INPUT_PLANES], d;  // d: of dact
        for (int p = 0; p < INPUT_PLANES; p++) in.unpack(raw.in[p], x[p]);
        if (BACKWARD) cursor.dact.unpack(raw.dact, d);
        for (int j = 0; j < CHUNK; j++) {
            if constexpr (NORM) {
                v[0][j] = norm_output(x[0][j], raw.statistics, cursor.weight[j], cursor.bias[j]);
            } else if constexpr (ACTIVATION && GATED) {
                v[0][j] = gated_silu(x[0][j], x[1][j]);
            } else if constexpr (ACTIVATION) {
                v[0][j] = gelu(x[0][j]);
            } else if constexpr (BACKWARD && GATED) {
                gated_silu_backward(x[0][j], x[1][j], d[j], v[0][j], v[1][j]);
            } else if constexpr (BACKWARD) {
                v[0][j] = gelu_backward(x[0][j], d[j]);
            } else {
                v[0][j] = x[0][j];
                if constexpr (GATED) v[1][j] = x[1][j];
            }
        }
    }
};

// Calls f with the producer of x, whose input is stored as `in`.
template <class Layout, class F> void with_producer_of(const LazyTensor& x, Layout in, F f) {
    const int64_t cols = x.input.cols;
    if (x.op == LazyOp::Stored) f(LazyProducer<LazyOp::Stored, Layout>{in, cols, x});
    else if (x.op == LazyOp::Norm) f(LazyProducer<LazyOp::Norm, Layout>{in, cols, x});
    else if (x.op == LazyOp::Activation && x.gated)
        f(LazyProducer<LazyOp::Activation, Layout, true>{in, cols / 2, x});
    else if (x.op == LazyOp::Activation) f(LazyProducer<LazyOp::Activation, Layout>{in, cols, x});
    else if (x.gated) f(LazyProducer<LazyOp::ActivationBackward, Layout, true>{in, cols / 2, x});
    else f(LazyProducer<LazyOp::ActivationBackward, Layout>{in, cols, x});
}
// Calls f with the producer of a lazily computed tensor.
template <class F> void with_producer(const LazyTensor& x, F f) {
    with_layout(x.input, [&](auto in) { with_producer_of(x, in, f); });
}
// The same for kernels that quantize to FP8. They exist for inputs in BF16 and in groups; FP32 is an Error.
template <class F> void with_producer_for_fp8(const LazyTensor& x, F f) {
    require(x.input.storage.format != Format::FP32, "FP8 goes with the compute dtype BF16, not with FP32");
    if (x.input.storage == E4M3_1x16) with_producer_of(x, groups_of(x.input), f);
    else with_producer_of(x, plain<bf16>(x.input.data), f);
}

// ===========================================================================================================
// 5. Tiles
//
//   tensor, tiles side by side        tile, 16 x 16 threads           thread, 8 rows x 1 chunk
//   +-------+-------+-------+         t0   t1   t2  ... t15           row 0  x x x x x x x x
//   |  128  |       |       |         t16  t17  t18 ... t31           row 1  x x x x x x x x
//   | x 128 |       |       |         ...                             ...
//   +-------+-------+-------+         t240 ...          t255          row 7  x x x x x x x x
//
// A block works on a tile of 128 rows x 128 columns, a thread on 8 rows x 8 columns of it: so a warp reads
// BF16 values and writes codes, row-major and transposed, in whole 128-byte lines.

constexpr int TILE = 128;                   // rows and columns of a tile
constexpr int THREAD_ROWS = 8;              // rows of a tile that a thread has
constexpr int SIDE_THREADS = TILE / CHUNK;  // threads along a side of the tile, across as well as down
constexpr int TILE_THREADS = SIDE_THREADS * SIDE_THREADS;
// Blocks that a multiprocessor has at once, which leaves 64 registers a thread. (With 3 or 5 it was slower.)
constexpr int TILE_BLOCKS_PER_SM = 4;

// Where a thread is: its number across and down the block's threads, and its first element in the tensor.
struct TilePlace {
    int across, down;
    int64_t row, col;
    __device__ explicit TilePlace(int64_t tile_row = blockIdx.y)
        : across(threadIdx.x % SIDE_THREADS), down(threadIdx.x / SIDE_THREADS),
          row(tile_row * TILE + down * THREAD_ROWS),
          col(static_cast<int64_t>(blockIdx.x) * TILE + across * CHUNK) {}
    __device__ bool inside(int64_t rows, int64_t width) const { return row < rows && col < width; }
};
inline dim3 tile_grid(int64_t rows, int64_t width) { return {blocks(width, TILE), blocks(rows, TILE)}; }

// How many of a thread's rows are loaded at once, if a row takes this many bytes of registers.
constexpr __host__ __device__ int rows_in_flight(int bytes) {
    if (bytes <= 16) return 8;
    return bytes <= 32 ? 4 : 2;
}

// Calls use(i, values, live) for each of the thread's 8 rows of x, a producer, one after the other. The loads
// of several rows are in flight (what that gains: rung 6 of dev/ladders/quantize_transpose.cu). For example
// thread 17, with four rows in flight, and x of two planes, such as [gate | up]:
//
//                 plane 0, `width` columns     plane 1, `width` columns
//   column        0..7  8..15  16..23  ...     0..7  8..15  16..23  ...
//   rows 0..7      t0    t1     t2              t0    t1     t2
//   row  8         t16  [t17]   t18             t16  [t17]   t18         | four loads of both planes, and
//   row  9         t16  [t17]   t18             t16  [t17]   t18         | then use(0, ...) to use(3)
//   row 10         t16  [t17]   t18             t16  [t17]   t18         |
//   row 11         t16  [t17]   t18             t16  [t17]   t18         |
//   rows 12..15    t16  [t17]   t18             t16  [t17]   t18         | the same: use(4, ...) to use(7)
//                       values[0]                    values[1]
//
// The rule: a kernel that writes over x calls this only for a thread that lies inside the tensor, at least
// with its first row (TilePlace::inside()). A kernel that only reads x may call it for every thread.
//
// The reason: so that no load has a condition, a copy of something inside the tensor is read in place of what
// lies outside, with `live` false. In place of a row past the last one this is the last row, and in place of
// a chunk past the last column the last chunk. If the kernel writes over x, it makes a difference who owns
// what is read:
//   - A thread inside reads its own last row again. It may have overwritten this row already. Then `values`
//     are wrong, but nobody uses them.
//   - A thread wholly outside reads the row or the chunk of another thread, which may be writing it: a race.
template <class Producer, class Use>
__device__ void for_each_row(const Producer& x, const TilePlace& place, int64_t rows, Use use) {
    constexpr int IN_FLIGHT = rows_in_flight(Producer::BYTES);
    const int64_t row = place.row < rows ? place.row : rows - 1;
    const int64_t col = place.col < x.width ? place.col : x.width - CHUNK;
    const auto cursor = x.cursor(row, col);
    const int64_t rows_left = max(rows - place.row, static_cast<int64_t>(0));
    const int rows_inside = static_cast<int>(min(rows_left, static_cast<int64_t>(THREAD_ROWS)));
    const int live_rows = place.col < x.width ? rows_inside : 0;
#pragma unroll
    for (int first = 0; first < THREAD_ROWS; first += IN_FLIGHT) {
        typename Producer::Fetched raw[IN_FLIGHT];
        for (int i = 0; i < IN_FLIGHT; i++) raw[i] = x.load(cursor, min(first + i, max(rows_inside - 1, 0)));
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            Values v[Producer::PLANES];
            x.compute(raw[i], cursor, v);
            use(first + i, v, first + i < live_rows);
        }
    }
}

// Each thread has a number for each of its 8 columns of each plane, `mine`. The 16 numbers that a column has
// in the block are combined in the order of the rows, beginning with 0. Then take(column, result) is called
// once for each column that the block has of each plane. `columns` is shared memory.
template <class Producer, class Number, class Combine, class Take>
__device__ void combine_columns(const Producer& x, const TilePlace& place,
                                const Number (&mine)[Producer::PLANES][CHUNK],
                                Number (&columns)[SIDE_THREADS][TILE + 1], Combine combine, Take take) {
    for (int p = 0; p < Producer::PLANES; p++) {
        __syncthreads();
        for (int j = 0; j < CHUNK; j++) columns[place.down][place.across * CHUNK + j] = mine[p][j];
        __syncthreads();
        const int64_t col = static_cast<int64_t>(blockIdx.x) * TILE + threadIdx.x;
        if (threadIdx.x >= TILE || col >= x.width) continue;
        Number all = 0;
        for (int i = 0; i < SIDE_THREADS; i++) all = combine(all, columns[i][threadIdx.x]);
        take(p * x.width + col, all);
    }
}

// Sums over rows. Each 128 columns have COLUMN_PARTIALS = 128 blocks; block y adds up the tiles y, y + 128,
// y + 256, and so on down these columns. A thread adds up its own rows of these tiles: `mine`. Then
// store_column_sums() adds the threads' sums and writes row y of partials (COLUMN_PARTIALS, PLANES * width).
// A multiprocessor has three such blocks, not four: the sums need registers, too.
constexpr int COLUMN_BLOCKS_PER_SM = 3;
inline dim3 column_grid(int64_t width) { return {blocks(width, TILE), COLUMN_PARTIALS}; }
// In shared memory; a column is padding, against bank conflicts.
using ColumnSums = float[SIDE_THREADS][TILE + 1];
template <class Producer>
__device__ void store_column_sums(const Producer& x, const Values (&mine)[Producer::PLANES],
                                  ColumnSums& columns, float* partials) {
    combine_columns(
        x, TilePlace(), mine, columns, [](float a, float b) { return a + b; },
        [&](int64_t col, float total) {
            partials[static_cast<int64_t>(blockIdx.y) * Producer::PLANES * x.width + col] = total;
        });
}

}  // namespace coat::gpu
