// gpu/device.cuh - how a thread loads, converts and stores values: what all kernels share. (How a block of
// threads goes through a tensor, tile by tile, is in gpu/lazy_tensor.cuh.)
//
//   1. launching a kernel
//   2. values in registers: the largest magnitude, sums, FP8 codes and scales, fast functions
//   3. views: how a thread loads and stores eight neighbouring elements of a tensor
//
// A thread handles a chunk of 8 consecutive elements of a row at a time, as FP32 values. As BF16 a chunk is
// 16 bytes: one instruction loads or stores it.
//
// A grid consists of whole blocks, so its edge may lie beyond that of the tensor. A chunk beyond the tensor
// is not live:
//
//   +------------------+ - - - - - -
//   | tensor           |           :    a block at the corner of a tensor
//   |   live = true    |           :
//   +------------------+           :
//   :            live = false      :
//    - - - - - - - - - - - - - - - -
//
// A chunk that is not live is not stored. Otherwise most kernels compute it like any other, from a copy of a
// live chunk, so that few instructions need a condition. (What says whether a chunk is live is called live if
// it is a bool, and is_live if it is a function.)
//
// For example, this kernel stores half of every element of x in y. It uses all three parts of this file. (It
// is not in the program.)
//
//   __global__ void halve_kernel(PlainView<bf16> x, PlainView<bf16> y, int64_t n) {
//       const int64_t i = thread_of_grid() * CHUNK_SIZE;  // the first of the thread's eight elements
//       const bool live = i < n;
//       ChunkValues v;                                    // eight FP32 values in registers
//       x.load_values(live ? i : 0, v);                   // loads 16 bytes, and converts them
//       for (int j = 0; j < CHUNK_SIZE; j++) v[j] *= 0.5f;
//       y.store(i, v, live);                              // rounds to BF16, and stores 16 bytes
//   }
//
//   void halve(const TensorRef& x, const TensorRef& y, cudaStream_t stream) {
//       const int64_t n = x.rows * x.cols;             // a multiple of eight
//       launch("halve", halve_kernel, /*grid=*/block_count(n, 256 * CHUNK_SIZE), /*block=*/256,
//              /*shared_bytes=*/0, stream, plain_view<bf16>(x.data), plain_view<bf16>(y.data), n);
//   }
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "tensors.h"

namespace coat::gpu {

// ===========================================================================================================
// 1. Launching a kernel

// The number of blocks of a grid if n elements are shared out and a block has `per_block` of them.
inline unsigned block_count(int64_t n, int64_t per_block) { return unsigned(ceil_div(n, per_block)); }

// Every kernel is launched here.
//   what           the kernel's name in errors and dry runs
//   shared_bytes   the shared memory that a block needs besides the arrays that the kernel declares with a
//                  fixed size. Most kernels need none
//   arguments      are converted to the types of the kernel's parameters. (type_identity_t lets the kernel
//                  alone decide these types.)
template <class... Parameters>
void launch(const char* what, void (*kernel)(Parameters...), dim3 grid, dim3 block, int shared_bytes,
            cudaStream_t stream, std::type_identity_t<Parameters>... arguments) {
    // CUDA's limits. They are checked in a dry run, too.
    require(grid.y <= 65535 && grid.z <= 65535, "a grid is too large");
    if (grid.x == 0 || grid.y == 0) return;  // a rank may have no part of a tensor
    unless_dry_run(stream, what, [&] {
        // CUDA allows a block 48 KiB of shared memory, and more only after this call. A kernel that asks for
        // shared_bytes has at most 8 KiB in arrays of a fixed size.
        if (shared_bytes > 40 << 10)
            check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
                  "This GPU has too little shared memory");
        kernel<<<grid, block, shared_bytes, stream>>>(arguments...);
        const cudaError_t error = cudaGetLastError();
        if (error != cudaSuccess) check(error, concat("Launching ", what, " failed").c_str());
    });
}

// The number of this thread among all of a grid with one dimension.
inline __device__ int64_t thread_of_grid() { return int64_t(blockIdx.x) * blockDim.x + threadIdx.x; }

// ===========================================================================================================
// 2. Values in registers

using bf16 = __nv_bfloat16;
constexpr int CHUNK_SIZE = 8;
using ChunkValues = float[CHUNK_SIZE];       // the FP32 values of a chunk
constexpr uint32_t ALL_LANES = 0xFFFFFFFFu;  // of a warp, for instructions that exchange their values
// (nvcc unrolls loops over a chunk by itself; a pragma stands where it would not.)

// The largest magnitude so far is kept in one of two forms:
//   largest        an FP32 value: faster in loops over values
//   largest_bits   the bits of this value: for atomicMax() and __reduce_max_sync(), which compare integers
// Both give the same result: the bits of |x|, read as an integer, have the same order as |x|, with NaN above
// infinity.

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

// *amax = max(*amax, the value with these bits). Mostly *amax is large enough already, and no atomicMax() is
// needed.
inline __device__ void raise_amax(float* amax, uint32_t bits) {
    uint32_t* word = reinterpret_cast<uint32_t*>(amax);
    if (bits > *static_cast<volatile uint32_t*>(word)) atomicMax(word, bits);
}
// The same with the largest bits of all lanes of a warp. All lanes that have not exited call it. Lane 0 must
// be one of them: it raises *amax.
inline __device__ void raise_amax_by_warp(float* amax, uint32_t bits) {
    bits = __reduce_max_sync(ALL_LANES, bits);
    if (threadIdx.x % 32 == 0) raise_amax(amax, bits);
}

// The sum of x over the lanes of a warp. The order of additions is fixed, and all lanes get the same bits.
template <class Real> __device__ Real sum_of_warp(Real x) {
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(ALL_LANES, x, distance);
    return x;
}

// -----------------------------------------------------------------------------------------------------------
// FP8 codes and scales (the paper's preliminaries):
//   s = amax / FMAX,  code = encode(x / s),  x' = s * decode(code)

// FORMAT is E4M3 or E5M2, known when a kernel is compiled.
template <Format FORMAT>
constexpr __nv_fp8_interpretation_t CUDA_FORMAT = FORMAT == Format::E5M2 ? __NV_E5M2 : __NV_E4M3;
template <Format FORMAT> constexpr float FMAX = format_info(FORMAT).fmax;  // 448; 57,344

template <Format FORMAT> __device__ uint32_t encode_two(float lo, float hi) {  // two codes; saturates
    return __nv_cvt_float2_to_fp8x2(make_float2(lo, hi), __NV_SATFINITE, CUDA_FORMAT<FORMAT>);
}
template <Format FORMAT> __device__ float2 decode_two(uint32_t codes) {
    const __half2_raw h =
        __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), CUDA_FORMAT<FORMAT>);
    return __half22float2(__half2(h));
}
// Eight codes of v * inverse_scale.
template <Format FORMAT> __device__ uint2 encode(const ChunkValues& v, float inverse_scale) {
    uint32_t two_codes[4];
    for (int i = 0; i < 4; i++)
        two_codes[i] = encode_two<FORMAT>(v[2 * i] * inverse_scale, v[2 * i + 1] * inverse_scale);
    return {two_codes[0] | two_codes[1] << 16, two_codes[2] | two_codes[3] << 16};
}
// Eight values, code * scale.
template <Format FORMAT> __device__ void decode(uint2 codes, float scale, ChunkValues& v) {
    for (int i = 0; i < 4; i++) {
        const float2 two = decode_two<FORMAT>(((i < 2 ? codes.x : codes.y) >> (16 * (i & 1))) & 0xFFFFu);
        v[2 * i] = two.x * scale;
        v[2 * i + 1] = two.y * scale;
    }
}

// s = amax / FMAX, at least 2^-126 so that 1 / s is finite; 1 where amax is 0, infinite or NaN. (If amax is
// infinite or NaN, the codes do not matter: the amax itself shows it, and the step is skipped.)
inline __device__ float scale_of(float fmax, float amax) {
    if (!(amax > 0 && amax < INFINITY)) return 1.0f;
    return fmaxf(__fdiv_rn(amax, fmax), 0x1p-126f);
}
inline __device__ float round_to_bf16(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }
constexpr uint32_t NAN_BITS = 0x7FC00000u;  // a NaN in FP32. Its upper 16 bits are a NaN in BF16

// -----------------------------------------------------------------------------------------------------------
// Fast mathematics: one instruction each, with a relative error of about 2^-22. (Near 1, log2 has an absolute
// error of that size.) An instruction with ftz in its name takes subnormals as 0. fast_log2() takes them as
// they are; for this the compiler adds three instructions.

#define FAST_FUNCTION(name, instruction)                \
    inline __device__ float name(float x) {             \
        float y;                                        \
        asm(instruction " %0, %1;" : "=f"(y) : "f"(x)); \
        return y;                                       \
    }
FAST_FUNCTION(fast_exp2, "ex2.approx.ftz.f32")
FAST_FUNCTION(fast_log2, "lg2.approx.f32")
FAST_FUNCTION(fast_log2_of_normal, "lg2.approx.ftz.f32")
FAST_FUNCTION(fast_reciprocal, "rcp.approx.ftz.f32")
FAST_FUNCTION(fast_sqrt, "sqrt.approx.ftz.f32")
#undef FAST_FUNCTION

constexpr float LOG2_E = 1.4426950408889634f;
inline __device__ float one_over_1_plus_exp2(float z) {  // 1 / (1 + 2^z)
    return fast_reciprocal(__fadd_rn(1.0f, fast_exp2(z)));
}
inline __device__ float sigmoid(float x) { return one_over_1_plus_exp2(__fmul_rn(-LOG2_E, x)); }

// ===========================================================================================================
// 3. Views of stored tensors
//
// A view is a tensor's pointers, with functions that load, convert and store its elements. There are four
// types of views:
//
//   PlainView<bf16>    elements in BF16, without scales
//   PlainView<float>   elements in FP32, without scales
//   GroupsView         E4M3 codes, with one BF16 scale for 16 elements (gpu/groups.cuh)
//   Bf16OrFp32View     elements in BF16 or FP32, without scales: a kernel learns at run time in which
//
// A kernel is compiled for each of the first three types that it reads. StoredView is the template parameter
// that stands for this type. Whatever it is, a StoredView has two types and four functions:
//
//   ComputeElement                a type: the compute format that goes with the view. What is read together
//                                 with the tensor, such as a norm's weight, is in it
//   StoredChunk                   a type: a chunk in registers, as it is stored
//   starting_at(i)                the same tensor, counted from element i on
//   load(i)                       returns the StoredChunk at element i. It only loads, so several loads can
//                                 be on their way at once
//   unpack(loaded, v)             converts a StoredChunk to FP32: v
//   round_and_store(i, v, live)   rounds v itself to what can be stored, and stores it at element i if live
//
// A PlainView has two functions more. Bf16OrFp32View has these two, and of the others load() and unpack().
//   load_values(i, v)             load() and unpack()
//   store(i, v, live)             stores v rounded, but leaves v as it is

inline __device__ uint32_t pack_bf16(float lo, float hi) {  // two BF16 in 32 bits
    const __nv_bfloat162 two = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<const uint32_t*>(&two);
}
inline __device__ float2 unpack_bf16(uint32_t two) {
    return {__uint_as_float(two << 16), __uint_as_float(two & 0xFFFF0000u)};
}

// Stores a value of 4, 8 or 16 bytes with one instruction. (An assignment through a cast pointer may become
// several smaller stores.)
template <class Value> __device__ void store_in_one_instruction(void* to, Value value) {
    __stwb(static_cast<Value*>(to), value);
}

// Values in BF16 or FP32, without scales. N of them are loaded and stored at once: a chunk, or (layers.cu)
// half a chunk.
template <class Element, int N = CHUNK_SIZE> struct PlainView {
    static constexpr bool IS_FP32 = sizeof(Element) == 4;
    static constexpr int WORDS = IS_FP32 ? N : N / 2;
    using ComputeElement = Element;
    using Access = std::conditional_t<WORDS % 4 == 0, uint4, uint2>;  // what one instruction loads or stores
    struct alignas(sizeof(Access)) StoredChunk {
        uint32_t words[WORDS];
    };
    Element* data;

    __device__ PlainView starting_at(int64_t i) const { return {data + i}; }
    __device__ StoredChunk load(int64_t i) const { return *reinterpret_cast<const StoredChunk*>(data + i); }
    static __device__ void unpack(const StoredChunk& loaded, float (&v)[N]) {
        for (int j = 0; j < WORDS; j++) {
            if constexpr (IS_FP32) {
                v[j] = __uint_as_float(loaded.words[j]);
            } else {
                v[2 * j] = unpack_bf16(loaded.words[j]).x;
                v[2 * j + 1] = unpack_bf16(loaded.words[j]).y;
            }
        }
    }
    __device__ void load_values(int64_t i, float (&v)[N]) const { unpack(load(i), v); }
    // Returns v as it is stored: rounded.
    __device__ StoredChunk store(int64_t i, const float (&v)[N], bool live) const {
        StoredChunk rounded;
        for (int j = 0; j < WORDS; j++)
            if constexpr (IS_FP32) rounded.words[j] = __float_as_uint(v[j]);
            else rounded.words[j] = pack_bf16(v[2 * j], v[2 * j + 1]);
        for (int j = 0; j < sizeof(StoredChunk) / sizeof(Access); j++)
            if (live)
                store_in_one_instruction(reinterpret_cast<Access*>(data + i) + j,
                                         reinterpret_cast<const Access*>(rounded.words)[j]);
        return rounded;
    }
    __device__ void round_and_store(int64_t i, float (&v)[N], bool live) const {
        unpack(store(i, v, live), v);
    }
};

// The view of a tensor in BF16 or FP32. (A view can load and store, so its pointer is not const, even where a
// kernel only loads.)
template <class Element> __host__ __device__ PlainView<Element> plain_view(const void* p) {
    return {static_cast<Element*>(const_cast<void*>(p))};
}

// How the host chooses among kernels. A function whose name begins with with_ turns what is known at run time
// into a type: it calls f with an object of this type. f, which launches a kernel, is compiled for each type.
// (Where there are only a few kernels, the function that launches them chooses itself: `auto kernel =
// k<false>; if (flag) kernel = k<true>;`)

// Calls f with the view of a tensor in BF16 or FP32.
template <class F> void with_plain_view(const TensorRef& t, F f) {
    if (t.format.element_format == Format::FP32) return f(plain_view<float>(t.data));
    f(plain_view<bf16>(t.data));
}

// A tensor in BF16 or FP32. The kernel learns at run time which of the two it is. All threads take the same
// branch, so this costs little. This view is for a tensor whose format does not follow from the compute
// format, above all a gradient of parameters (gradient_format() in common/model.h). With a PlainView of it, a
// kernel would be compiled for each pair of formats.
struct Bf16OrFp32View {
    void* data;
    bool is_fp32;

    template <class F> __device__ void with(F f) const {
        if (is_fp32) f(plain_view<float>(data));
        else f(plain_view<bf16>(data));
    }
    using StoredChunk = PlainView<float>::StoredChunk;  // BF16 elements fill its first half
    __device__ StoredChunk load(int64_t i) const {
        if (is_fp32) return plain_view<float>(data).load(i);
        const auto bf16_chunk = plain_view<bf16>(data).load(i);
        return {bf16_chunk.words[0], bf16_chunk.words[1], bf16_chunk.words[2], bf16_chunk.words[3]};
    }
    __device__ void unpack(const StoredChunk& loaded, ChunkValues& v) const {
        const auto& words = loaded.words;
        if (is_fp32) PlainView<float>::unpack(loaded, v);
        else PlainView<bf16>::unpack({words[0], words[1], words[2], words[3]}, v);
    }
    __device__ void load_values(int64_t i, ChunkValues& v) const { unpack(load(i), v); }
    __device__ void store(int64_t i, const ChunkValues& v, bool live) const {
        with([&](auto x) { x.store(i, v, live); });
    }
};
inline Bf16OrFp32View bf16_or_fp32(const void* data, Format f) {
    return {const_cast<void*>(data), f == Format::FP32};
}
inline Bf16OrFp32View bf16_or_fp32(const TensorRef& t) {
    return bf16_or_fp32(t.data, t.format.element_format);
}

}  // namespace coat::gpu
