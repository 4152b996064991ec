// adamw.cu - a ladder: one AdamW step whose moments are E4M3 codes with dynamic range expansion (paper,
// section 4), from the equations as they read to what the kernel that trains does: adamw.cu at the top of
// the repository, which has more cases. Each rung makes one change to the rung before it. Its text says what
// changes and why, which numbers were counted, and asks you to predict. The answer to each rung is at the end
// of this file: what limits it, what we predicted, what was measured, and why. `make read` shows each answer,
// folded, below its question. If you have never seen CUDA, read README.md in this folder first: one page.
//
//   make build/ladder_adamw && build/ladder_adamw       all rungs: each is compared with the CPU reference
//   build/ladder_adamw 5                                rung 5 alone, for instance under a profiler
//
// The program prints the time of each rung for 2^28 parameters, and compares codes with the CPU reference.
//
// What a step computes. A *moment* is m or v of AdamW. 128 neighbouring parameters are a *span*, and their m,
// or their v, a *moment group*:
//
//   contract   a code becomes a number             sign(y) max (|y| / 448)^(1/k), y its value in E4M3
//   update     AdamW changes m, v and the weight
//   max and k  of a moment group's new moments     max, the largest magnitude, and k (equation 4)
//   expand     a number becomes a code             sign(x) 448 (|x| / max)^k, rounded to E4M3
//
// What is stored. All but the gradient is read and written, so these are 14.25 bytes a parameter:
//
//   s.weight[i]                  BF16                                       2 bytes
//   s.remainder[i]               what the weight lacks of its FP32 master   2
//   s.gradient[i]                BF16                                       2
//   s.m.codes[i], s.v.codes[i]   E4M3                                       1 each
//   s.m.max_and_k(span), s.v...  max and k of m and of v, in FP32           16 for 128 parameters
//
// max and k of m and of v are the four fields of a span. A kernel's arguments have these types, which
// adamw_data.h defines:
//
//   State s         n; weight, remainder and gradient; s.m and s.v, each a Moment
//   Moment          codes, max and k. moment.max_and_k(span) reads max and k of a span, and
//                   moment.set_max_and_k(span, max_and_k) stores them
//   MaxAndK         max and k of one moment group
//   Constants c     lr, beta1, beta2, eps and decay; one_minus_beta1 and one_minus_beta2;
//                   bias_correction1, 1 - beta1^t; bias_correction2_sqrt, the root of 1 - beta2^t
//
// Who owns what. This is what most rungs change:
//
//   rung      a span belongs to                 a thread has       max and min are found through
//   1         a block of 128 threads            1 parameter        shared memory, in 7 rounds
//   2, 3, 4   a warp                            4                  5 shuffles
//   5, 6      half a warp                       8                  4 shuffles
//   7         half a warp, one after another    8 at a time        4 shuffles
//   8         the same; a warp has 8 spans      8 at a time        4 shuffles
//
// What limits a rung. It uses three resources at the same time, and that which takes longest decides. Here is
// how long each takes for 2^28 parameters. An H200 has 132 multiprocessors at about 1.8 GHz; "a clock" is one
// cycle of these:
//
//   memory               14.25 bytes a parameter at about 4.27 TB/s, the rate of a copy           900 us
//   instructions         a multiprocessor starts (issues) 4 a clock, each for 32 lanes:  8.8 us for each that
//                        every parameter takes. Within 900 us there is room for 102
//   special functions    16 lanes a clock (logarithm, exponential, reciprocal, root):  71 us for each that
//                        every parameter takes. Within 900 us there is room for 12
//
// To do the sums again: 2^28 x 14.25 bytes / 4.27e12 = 900 us; 2^28 / (132 x 4 x 32 x 1.8e9) = 8.8 us;
// 2^28 / (132 x 16 x 1.8e9) = 71 us. So a rung takes at least the largest of three times: that of memory, its
// instructions times 8.8 us, its special functions times 71 us. But 1.8 GHz is a round number. An H200's
// clock goes up to 1.98 GHz, and down where its power would exceed 700 W. At 1.98 GHz the last two times are
// 9% less.
//
// How many instructions a rung has was counted in its machine code, which cuobjdump -sass build/ladder_adamw
// prints: one follows a thread from the first line of a kernel to EXIT, along the branches that nearly every
// thread takes, counts a loop as often as it runs, and divides by the elements of the thread. An *element* is
// what the thread has of one parameter. The counts are those of nvcc 12.9; the measured program was built by
// 13.0, whose count is known to be another in rung 1, and stands there, too.
//
// Words that README.md does not explain, because no other ladder uses them:
//
//   copysignf(a, b)                       the magnitude of a with the sign of b
//   fabsf(a), rintf(a)                    the magnitude of a; the nearest integer
//   fast_exp2, fast_reciprocal,           one instruction each for the special function unit, with errors of
//   fast_sqrt, fast_log2_of_normal        about 2^-22. The last one takes a subnormal number (below 2^-126)
//                                         as 0
//   fast_log2                             is right for such a number, too: for this the compiler adds a
//                                         comparison, a multiplication and an addition
//   struct Table : Reciprocals            Table has all that Reciprocals has, but for what it defines itself
//   explicit FieldOfLane(const State& s)  how a FieldOfLane is made from s: by FieldOfLane(s)
#include "../../gpu/device.cuh"
#include "adamw_data.h"
#include "neighbours.h"

using namespace ladder;
using gpu::fast_exp2, gpu::fast_log2, gpu::fast_log2_of_normal, gpu::fast_reciprocal, gpu::fast_sqrt;

namespace {

constexpr float FMAX = 448.0f;  // the largest number of E4M3
constexpr float LOG2_FMAX = 8.807355f;
constexpr float LOG2_RANGE = 17.807355f;  // log2(FMAX / FMIN): 448 / 2^-9
constexpr uint32_t ALL_LANES = 0xFFFFFFFFu;
constexpr unsigned THREADS = 256;  // of a block, from rung 2 on

__device__ float decode(uint8_t code) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}
__device__ uint8_t encode(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }
// The FP32 master is the weight, with 16 zeros after its bits, plus the remainder.
__device__ float master_of(uint16_t weight, int16_t remainder) {
    const uint32_t upper = uint32_t(weight) << 16;
    return __uint_as_float(upper + uint32_t(int32_t(remainder)));
}
__device__ uint16_t weight_of(float master) { return uint16_t((__float_as_uint(master) + 0x8000u) >> 16); }
__device__ int16_t remainder_of(float master) { return int16_t(__float_as_uint(master) & 0xFFFFu); }

// How many blocks it takes if each has this many parameters. ceil_div(a, b) is a / b, rounded up.
unsigned blocks_with(int64_t n, int64_t parameters_of_block) {
    return unsigned(ceil_div(n, parameters_of_block));
}

// ===========================================================================================================
// Rung 1: a block for a span, a thread for an element, powf
//
// The equations, one after the other. A block of 128 threads has a span, and each thread an element of it.
// Maximum and minimum go through shared memory: in each of seven rounds half of the threads combine two
// numbers.
//
// Memory: a thread loads its code of m, one byte. A load is one instruction for the 32 lanes of a warp, and
// memory answers in sectors of 32 bytes:
//
//   codes of m     byte   0    1    2    ...  31  |  32   33   ...
//   warp 0, lane          0    1    2    ...  31  |               one load: 32 bytes, one sector
//
// A load could bring 16 bytes to each lane, 16 sectors. Here 17 instructions of a warp access memory for only
// 32 elements: 5 loads and 4 stores of elements, and 4 + 4 of fields.
//
// Counted: 940 instructions for an element. powf is correct to the last bits for any arguments, which takes
// more than a hundred, four times. The four reductions (the largest and the smallest magnitude of m, and of
// v) take 340: each has seven rounds, and a round has a comparison, three accesses to shared memory, its
// loop, and a barrier, __syncthreads(), at which the threads of the block wait for each other. nvcc 13.0
// unrolls this loop, so that the reductions take 170: the program that was measured has 770.
//
// Predict: with the 940, which of the three resources decides, and what is the time?

// The equations. Later rungs have structs of their own, with the same functions.
struct AsWritten {
    // sign max (|y| / FMAX)^(1/k).
    static __device__ float contract(const MaxAndK& s, uint8_t code) {
        const float y = decode(code);
        if (y == 0) return 0.0f;
        return copysignf(s.max * powf(fabsf(y) / FMAX, 1 / s.k), y);
    }
    // sign FMAX (|x| / max)^k.
    static __device__ uint8_t expand(const MaxAndK& s, float x) {
        if (x == 0) return 0;
        return encode(copysignf(FMAX * powf(fabsf(x) / s.max, s.k), x));
    }
    // Equation 4: k = log(FMAX / FMIN) / log(max / min), rounded to a multiple of 1/256 from 1/16 to 64.
    // min_magnitude is the smallest magnitude that is not 0.
    static __device__ MaxAndK max_and_k(float max_magnitude, float min_magnitude) {
        if (max_magnitude == 0) return {max_magnitude, 1.0f};
        const float log_ratio = log2f(max_magnitude) - log2f(min_magnitude);
        if (!(log_ratio * 64.0f > LOG2_RANGE)) return {max_magnitude, 64.0f};  // also if log_ratio is 0
        return {max_magnitude, fmaxf(rintf(256.0f * LOG2_RANGE / log_ratio) / 256.0f, 1 / 16.0f)};
    }
    static __device__ void update(const Constants& c, float g, float& m, float& v, float& w) {
        m = c.beta1 * m + c.one_minus_beta1 * g;
        v = c.beta2 * v + c.one_minus_beta2 * (g * g);
        w -= c.lr * (m / c.bias_correction1 / (sqrtf(v) / c.bias_correction2_sqrt + c.eps) + c.decay * w);
    }
};

// The largest, or the smallest, of a number from each of the block's 128 threads.
__device__ float extreme_of_block(float x, bool largest) {
    __shared__ float all[SPAN];
    all[threadIdx.x] = x;
    __syncthreads();
    for (int half = SPAN / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            const float a = all[threadIdx.x];
            const float b = all[threadIdx.x + half];
            all[threadIdx.x] = largest ? fmaxf(a, b) : fminf(a, b);
        }
        __syncthreads();
    }
    const float result = all[0];
    __syncthreads();  // nobody overwrites it before all have read it
    return result;
}
__device__ void store_moment(const Moment& moment, int64_t i, int64_t span, float x) {
    const float max_magnitude = extreme_of_block(fabsf(x), true);
    const float min_magnitude = extreme_of_block(x == 0 ? INFINITY : fabsf(x), false);
    const MaxAndK s = AsWritten::max_and_k(max_magnitude, min_magnitude);
    moment.codes[i] = AsWritten::expand(s, x);
    if (threadIdx.x == 0) moment.set_max_and_k(span, s);
}
__global__ void rung1(State s, Constants c) {
    const int64_t span = blockIdx.x;
    const int64_t i = span * SPAN + threadIdx.x;
    float m = AsWritten::contract(s.m.max_and_k(span), s.m.codes[i]);
    float v = AsWritten::contract(s.v.max_and_k(span), s.v.codes[i]);
    float w = master_of(s.weight[i], s.remainder[i]);
    __syncthreads();  // all threads have read the fields, which thread 0 will overwrite
    AsWritten::update(c, __bfloat162float(s.gradient[i]), m, v, w);
    s.weight[i] = weight_of(w);
    s.remainder[i] = remainder_of(w);
    store_moment(s.m, i, span, m);
    store_moment(s.v, i, span, v);
}
void launch_rung1(const State& s, const Constants& c) { rung1<<<blocks_with(s.n, SPAN), SPAN>>>(s, c); }

// ===========================================================================================================
// Rung 2: a warp for a span, four elements a lane
//
// What changes: who owns what. A lane has four elements, which it loads with one instruction. A span lies in
// one warp, so maximum and minimum need neither shared memory nor barriers: lanes exchange registers
// (shuffles), first with their neighbour, then with the lane 2, 4, 8 and 16 away.
//
//   codes of m     byte   0 - 3   4 - 7   8 - 11   ...  124 - 127     one load: 128 bytes, four sectors
//   lane                    0       1       2      ...     31
//   weights        byte   0 - 7   8 - 15  16 - 23  ...  248 - 255     one load: 256 bytes, eight sectors
//
// The same 17 accesses are now for 128 elements. Magnitudes are compared as bits: read as integers, they have
// the same order. The minimum is to leave zeros out. It is taken of bits - 1, which for a zero is the largest
// integer.
//
// `Arithmetic` is a blank (README.md, "What the compiler is told"), which is filled in where the kernel is
// launched: with AsWritten here, and with another struct in rung 3.
//
// Counted: 600 instructions for an element, nearly all of them of powf and of divisions.
//
// Predict: the time. Does it matter now how many bytes a load has?

// max and k of a moment group, of which each lane of the warp has four elements: all get it.
template <class Arithmetic> __device__ MaxAndK max_and_k_of_warp(const float (&x)[4]) {
    uint32_t top = 0, smallest_bits_minus_1 = 0xFFFFFFFFu;
    for (float value : x) {
        const uint32_t bits = __float_as_uint(fabsf(value));
        top = max(top, bits);
        smallest_bits_minus_1 = min(smallest_bits_minus_1, bits - 1);
    }
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        top = max(top, __shfl_xor_sync(ALL_LANES, top, lanes));
        smallest_bits_minus_1 =
            min(smallest_bits_minus_1, __shfl_xor_sync(ALL_LANES, smallest_bits_minus_1, lanes));
    }
    return Arithmetic::max_and_k(__uint_as_float(top), __uint_as_float(smallest_bits_minus_1 + 1));
}

template <class Arithmetic> __global__ void rungs2_and_3(State s, Constants c) {
    const int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
    if (i >= s.n) return;  // with all the lanes of its span
    const int64_t span = i / SPAN;
    const MaxAndK old_m = s.m.max_and_k(span);
    const MaxAndK old_v = s.v.max_and_k(span);
    // Four elements of 2 bytes are loaded as one uint2 (two words of 32 bits), four codes as one word.
    uint2 weights = *reinterpret_cast<const uint2*>(s.weight + i);
    uint2 remainders = *reinterpret_cast<const uint2*>(s.remainder + i);
    const uint2 gradients = *reinterpret_cast<const uint2*>(s.gradient + i);
    uint32_t words_m = *reinterpret_cast<const uint32_t*>(s.m.codes + i);
    uint32_t words_v = *reinterpret_cast<const uint32_t*>(s.v.codes + i);
    uint16_t* weight = reinterpret_cast<uint16_t*>(&weights);  // weight[0] to weight[3], in registers
    int16_t* remainder = reinterpret_cast<int16_t*>(&remainders);
    const bf16* gradient = reinterpret_cast<const bf16*>(&gradients);
    uint8_t* codes_m = reinterpret_cast<uint8_t*>(&words_m);
    uint8_t* codes_v = reinterpret_cast<uint8_t*>(&words_v);
    float m[4], v[4];
    for (int j = 0; j < 4; j++) m[j] = Arithmetic::contract(old_m, codes_m[j]);
    for (int j = 0; j < 4; j++) v[j] = Arithmetic::contract(old_v, codes_v[j]);
    for (int j = 0; j < 4; j++) {
        float w = master_of(weight[j], remainder[j]);
        Arithmetic::update(c, __bfloat162float(gradient[j]), m[j], v[j], w);
        weight[j] = weight_of(w);
        remainder[j] = remainder_of(w);
    }
    const MaxAndK new_m = max_and_k_of_warp<Arithmetic>(m);
    const MaxAndK new_v = max_and_k_of_warp<Arithmetic>(v);
    for (int j = 0; j < 4; j++) codes_m[j] = Arithmetic::expand(new_m, m[j]);
    for (int j = 0; j < 4; j++) codes_v[j] = Arithmetic::expand(new_v, v[j]);
    *reinterpret_cast<uint2*>(s.weight + i) = weights;
    *reinterpret_cast<uint2*>(s.remainder + i) = remainders;
    *reinterpret_cast<uint32_t*>(s.m.codes + i) = words_m;
    *reinterpret_cast<uint32_t*>(s.v.codes + i) = words_v;
    if (i % SPAN != 0) return;  // the span's first lane stores the fields
    s.m.set_max_and_k(span, new_m);
    s.v.set_max_and_k(span, new_v);
}
void launch_rung2(const State& s, const Constants& c) {
    rungs2_and_3<AsWritten><<<blocks_with(s.n, 4 * THREADS), THREADS>>>(s, c);
}

// ===========================================================================================================
// Rung 3: powers on the special function unit
//
// What changes: powf(x, y) becomes fast_exp2(y * fast_log2(x)), for x^y = 2^(y log2 x). This is one line of
// contract and one of expand. The kernel is that of rung 2, with another struct in its blank:
//
//   contract   rung 2   s.max * powf(fabsf(y) / FMAX, 1 / s.k)
//              rung 3   s.max * power(fabsf(y) / FMAX, 1 / s.k)
//   expand     rung 2   FMAX * powf(fabsf(x) / s.max, s.k)
//              rung 3   FMAX * power(fabsf(x) / s.max, s.k)
//
// fast_log2 and fast_exp2 are the instructions lg2.approx and ex2.approx. Their relative error is about
// 2^-22. A code has four significant bits, so it notices only if a value lies on the edge between two codes:
// see the last column of the table that the program prints.
//
// Counted: 260 instructions for an element, and 15 special functions (N = 4 elements of a lane):
//
//   for each element   logarithms         4     m and v, when they are loaded and when they are stored
//                      exponentials       4     likewise
//                      divisions          5     a reciprocal each: three in the update, m and v by their max
//                      root               1     of v
//   once for a lane    divisions      4 / N     1 / k and equation 4, for each of m and v
//                      together  14 + 4 / N
//
// Two things need no special function: y / 448, for the reciprocal of a constant is known; and equation 4's
// log2f, which consists of multiplications and additions.
//
// Predict: how many times faster does it become?
struct SpecialFunctions : AsWritten {  // max_and_k() and update() are those of AsWritten
    static __device__ float power(float x, float y) { return fast_exp2(y * fast_log2(x)); }
    static __device__ float contract(const MaxAndK& s, uint8_t code) {
        const float y = decode(code);
        if (y == 0) return 0.0f;
        return copysignf(s.max * power(fabsf(y) / FMAX, 1 / s.k), y);
    }
    static __device__ uint8_t expand(const MaxAndK& s, float x) {
        if (x == 0) return 0;
        return encode(copysignf(FMAX * power(fabsf(x) / s.max, s.k), x));
    }
};
void launch_rung3(const State& s, const Constants& c) {
    rungs2_and_3<SpecialFunctions><<<blocks_with(s.n, 4 * THREADS), THREADS>>>(s, c);
}

// ===========================================================================================================
// Between rungs 3 and 4: the same kernel for N elements a lane
//
// Nothing is computed in another way here, and nothing is to be predicted. Rungs 4 to 8 differ in N, the
// elements of a lane, and in their arithmetic. So rung 2's kernel is cut into parts with these two as blanks:
//
//   rungs 2 and 3                                      from here on
//   uint2 weights, ..., uint32_t words_v               Elements<N> e: Neighbours<uint16_t, N> weight, ..., v
//   the five loads; the four stores                    Elements<N>::load(s, i); e.store(s, i)
//   contract(old_m, codes_m[j]) for each j             contract(old.m, e.m, m): all N at once
//   max_and_k_of_warp: 32 lanes have a span            max_and_k_of_span: SPAN / N lanes have one
//   what stands between the loads and the stores       update_elements(arithmetic, c, old, e)
//   the kernel around it                               rungs4_to_6
//
// Neighbours<uint8_t, N> (neighbours.h) is N neighbouring elements in registers of a lane. load() and store()
// move them with one instruction. contract() and expand() now have all elements of a lane, so that they can
// compute once what is the same for all of them: that is rung 4.

template <int N> struct Elements {  // of one lane, as they are stored
    Neighbours<uint16_t, N> weight;
    Neighbours<int16_t, N> remainder;
    Neighbours<bf16, N> gradient;
    Neighbours<uint8_t, N> m, v;  // codes

    static __device__ Elements load(const State& s, int64_t i) {
        return {Neighbours<uint16_t, N>::load(s.weight + i), Neighbours<int16_t, N>::load(s.remainder + i),
                Neighbours<bf16, N>::load(s.gradient + i), Neighbours<uint8_t, N>::load(s.m.codes + i),
                Neighbours<uint8_t, N>::load(s.v.codes + i)};
    }
    __device__ void store(const State& s, int64_t i) const {
        weight.store(s.weight + i);
        remainder.store(s.remainder + i);
        m.store(s.m.codes + i);
        v.store(s.v.codes + i);
    }
};
struct MaxAndKOfBoth {  // of a span
    MaxAndK m, v;
};

// max and k of a moment group whose elements LANES neighbouring lanes have, N each: all of them get it.
// With LANES = 32 and N = 4 it is max_and_k_of_warp.
template <class Arithmetic, int LANES, int N> __device__ MaxAndK max_and_k_of_span(const float (&x)[N]) {
    uint32_t top = 0, smallest_bits_minus_1 = 0xFFFFFFFFu;
    for (float value : x) {
        const uint32_t bits = __float_as_uint(fabsf(value));
        top = max(top, bits);
        smallest_bits_minus_1 = min(smallest_bits_minus_1, bits - 1);
    }
    for (int lanes = 1; lanes < LANES; lanes *= 2) {
        top = max(top, __shfl_xor_sync(ALL_LANES, top, lanes));
        smallest_bits_minus_1 =
            min(smallest_bits_minus_1, __shfl_xor_sync(ALL_LANES, smallest_bits_minus_1, lanes));
    }
    return Arithmetic::max_and_k(__uint_as_float(top), __uint_as_float(smallest_bits_minus_1 + 1));
}

// The step for the N elements that this lane has of a span: they are updated in place, and the span's new
// fields are returned. All lanes of the warp call it.
template <class Arithmetic, int N>
__device__ MaxAndKOfBoth update_elements(const Arithmetic& arithmetic, const Constants& c,
                                         const MaxAndKOfBoth& old, Elements<N>& e) {
    float m[N], v[N];
    arithmetic.contract(old.m, e.m, m);
    arithmetic.contract(old.v, e.v, v);
    for (int j = 0; j < N; j++) {
        float w = master_of(e.weight[j], e.remainder[j]);
        Arithmetic::update(c, __bfloat162float(e.gradient[j]), m[j], v[j], w);
        e.weight[j] = weight_of(w);
        e.remainder[j] = remainder_of(w);
    }
    constexpr int LANES = SPAN / N;
    const MaxAndKOfBoth now{max_and_k_of_span<Arithmetic, LANES>(m), max_and_k_of_span<Arithmetic, LANES>(v)};
    e.m = arithmetic.expand(now.m, m);
    e.v = arithmetic.expand(now.v, v);
    return now;
}

// Rungs 4 to 6: the threads of the grid have N elements each, in order.
template <class Arithmetic, int N> __global__ void rungs4_to_6(State s, Constants c) {
    const Arithmetic arithmetic;
    const int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * N;
    if (i >= s.n) return;  // with all the lanes of its span
    const int64_t span = i / SPAN;
    const MaxAndKOfBoth old{s.m.max_and_k(span), s.v.max_and_k(span)};
    Elements<N> e = Elements<N>::load(s, i);
    const MaxAndKOfBoth now = update_elements(arithmetic, c, old, e);
    e.store(s, i);
    if (i % SPAN != 0) return;  // the span's first lane stores the fields
    s.m.set_max_and_k(span, now.m);
    s.v.set_max_and_k(span, now.v);
}

// ===========================================================================================================
// Rung 4: reciprocals in place of divisions, no branches
//
// What changes: the arithmetic around the powers. A division in FP32 is a reciprocal, some multiplications
// that correct it, and a branch for what is not normal: ten instructions. Rung 3 has five for each element.
//   - 1 / max and 1 / k are computed once for the lane's elements of a span, and then they are multiplied;
//   - AdamW needs one reciprocal in place of three divisions: see below;
//   - zeros need no branch: log2 0 is -infinity, and 2^-infinity is 0;
//   - fast_log2_of_normal takes numbers below 2^-126 as 0. fast_log2 does not, which costs three
//     instructions.
//
// In AdamW's update let c1 be bias_correction1, and c2 the square of bias_correction2_sqrt. Then
//
//   m / c1 / (sqrt(v) / sqrt(c2) + eps)  =  m / (sqrt(v) root_factor + scaled_eps)
//   root_factor = c1 / sqrt(c2),  scaled_eps = c1 eps          computed by the host, once for all parameters
//
// Counted: 100 instructions for an element, and 12.5 special functions:
//
//   for each element   logarithms          4    as before
//                      exponentials        4    as before
//                      reciprocal          1    of the update
//                      root                1
//   once for a lane    logarithms      4 / N    of the largest and the smallest magnitude, for m and v each
//                      reciprocals     6 / N    of the old k, of log_ratio and of max, for m and v each
//                      together  10 + 10 / N
//
// Predict: the times of all three resources. How well do they overlap? And how many special functions will
// rung 5 have, where N is 8, and rung 6, which looks up two of the logarithms?

// Zeros need no branch. This is what a moment group of zeros computes:
//
//   largest magnitude     0
//   smallest magnitude    0            of 0, bits - 1 is the largest integer, and adding 1 wraps around to 0
//   log_ratio             0            -infinity - -infinity is NaN, of which fmaxf takes the other operand
//   within_limits         64           because 1 / log_ratio is infinite
//   k                     1            because max is 0
//   1 / max               2^100        because 2^-100 takes the place of max there
//   codes                 0            2^(k log2 0) is 2^-infinity
//
// A positive second moment must not get code 0: the update divides by its root. With equation 4's k the
// smallest value of a moment group gets code 1 by itself. Only where max / min is beyond 2^126 may
// fast_log2_of_normal make it 0, or where max is below 2^-100, which takes its place. For these cases the
// kernel that trains has a second, careful path; the rungs have none.
struct Reciprocals {
    static __device__ MaxAndK max_and_k(float max_magnitude, float min_magnitude) {
        const float log_ratio = fmaxf(fast_log2(max_magnitude) - fast_log2(min_magnitude), 0.0f);
        const float k = rintf(256.0f * LOG2_RANGE * fast_reciprocal(log_ratio)) * (1 / 256.0f);
        const float within_limits = fminf(fmaxf(k, 1 / 16.0f), 64.0f);
        return {max_magnitude, max_magnitude == 0 ? 1.0f : within_limits};
    }
    static __device__ void update(const Constants& c, float g, float& m, float& v, float& w) {
        m = c.beta1 * m + c.one_minus_beta1 * g;
        v = c.beta2 * v + c.one_minus_beta2 * (g * g);
        const float step = m * fast_reciprocal(fast_sqrt(v) * c.root_factor + c.scaled_eps);
        w -= c.lr * (step + c.decay * w);
    }
    template <int N>
    __device__ void contract(const MaxAndK& s, const Neighbours<uint8_t, N>& codes, float (&x)[N]) const {
        const float inverse_k = fast_reciprocal(s.k);
        for (int j = 0; j < N; j++) {
            const float y = decode(codes[j]);
            const float log_y = fast_log2_of_normal(fabsf(y)) - LOG2_FMAX;
            x[j] = copysignf(s.max * fast_exp2(log_y * inverse_k), y);
        }
    }
    template <int N> __device__ Neighbours<uint8_t, N> expand(const MaxAndK& s, const float (&x)[N]) const {
        const float inverse_max = fast_reciprocal(fmaxf(s.max, 0x1p-100f));
        Neighbours<uint8_t, N> codes;
        for (int j = 0; j < N; j++) {
            const float log_x = fast_log2_of_normal(fabsf(x[j]) * inverse_max);
            codes[j] = encode(copysignf(fast_exp2(s.k * log_x + LOG2_FMAX), x[j]));
        }
        return codes;
    }
};
void launch_rung4(const State& s, const Constants& c) {
    rungs4_to_6<Reciprocals, 4><<<blocks_with(s.n, 4 * THREADS), THREADS>>>(s, c);
}

// ===========================================================================================================
// Rung 5: half a warp for a span, eight elements a lane
//
// What changes: N is 8. There is no other code: rungs4_to_6<Reciprocals, 8>.
//
//   lane              0        1       ...   15           16       17     ...   31
//   element of        0 - 7    8 - 15        120 - 127    0 - 7    8 - 15       120 - 127
//                     span 0                              span 1
//   codes             8 bytes a lane, 256 bytes a load
//   weights           16 bytes a lane, 512 bytes a load: there is no wider one
//
// What a lane does once for its elements is shared by eight in place of four: addresses, k of m and of v with
// their logarithms, 1 / max, 1 / k. A reduction has four shuffles in place of five.
//
// Counted: 78 instructions for an element, and 11.25 special functions. But a thread has 56 registers in
// place of 40. A multiprocessor has 65,536 registers: with 56 a thread 4 blocks of 256 threads fit (57,344);
// with rung 4's 40 it was 6 (61,440).
//
// Predict: how much faster than rung 4? How fast could it be at most?
void launch_rung5(const State& s, const Constants& c) {
    rungs4_to_6<Reciprocals, 8><<<blocks_with(s.n, 8 * THREADS), THREADS>>>(s, c);
}

// ===========================================================================================================
// Rung 6: logarithms of codes from a table
//
// What changes: codes have only 128 different magnitudes. log2(|y| / FMAX) of each comes from a table in
// shared memory, which a block fills when it starts. A look-up replaces the conversion of a code and its
// logarithm.
//
//   bank        0         1         2        ...   31          shared memory answers 32 banks a clock
//   table       code 0    code 1    code 2   ...   code 31
//               code 32   code 33   ...            code 63
//               code 64   ...
//               code 96   ...                      code 127
//
// Lanes that read the same code share the answer. Lanes with different codes in one bank wait for each other,
// which is called a *conflict*: if all 128 codes are equally frequent, a look-up takes a warp nearly always 2
// or 3 clocks, 2.8 on average: python3 dev/ladders/banks.py "random(128)" draws such look-ups. But shared
// memory was idle, and the special function unit was not.
//
// Counted: 9.25 special functions for an element, and 82 instructions, with those that fill the table. For
// all parameters a look-up without conflicts takes 2^28 / (132 x 32 x 1.8e9) = 35 us; two look-ups, of m and
// of v, take 2.8 clocks each: 2 x 2.8 x 35 = 200 us. A block has only 16 spans, and first of all it waits for
// its table.
//
// Predict: faster or slower than rung 5? What limits it now?
struct Table : Reciprocals {
    const float* logarithms;  // of the codes 0 to 127

    __device__ Table() {
        __shared__ float table[128];
        for (unsigned code = threadIdx.x; code < 128; code += blockDim.x)
            table[code] = log2f(decode(uint8_t(code))) - LOG2_FMAX;
        __syncthreads();
        logarithms = table;
    }
    template <int N>
    __device__ void contract(const MaxAndK& s, const Neighbours<uint8_t, N>& codes, float (&x)[N]) const {
        const float inverse_k = fast_reciprocal(s.k);
        for (int j = 0; j < N; j++) {
            const float magnitude = s.max * fast_exp2(logarithms[codes[j] % 128] * inverse_k);
            const float sign = __uint_as_float(uint32_t(codes[j]) << 24);
            x[j] = copysignf(magnitude, sign);
        }
    }
};
void launch_rung6(const State& s, const Constants& c) {
    rungs4_to_6<Table, 8><<<blocks_with(s.n, 8 * THREADS), THREADS>>>(s, c);
}

// ===========================================================================================================
// Rung 7: loads of the next span while this one is computed
//
// What changes: a warp does not end after its two spans, one for each half of it. It takes two spans after
// another, and issues the loads of the next two before it computes the current ones. Two neighbouring spans
// that a warp has at a time are called a *pair*. As many blocks are launched as run at once.
//
//   rung 6   load 0 ...wait... compute 0, store 0           (a new warp) load 1 ...wait... compute 1
//   rung 7   load 0 ...wait... load 1, compute 0, store 0   load 2, compute 1, store 1   load 3, ...
//
// Why: a load takes about 0.8 us. 8 of the 14.25 bytes are loaded, at 4.27 x 8 / 14.25 = 2.4 TB/s. So 2.4e12
// x 0.8e-6 = 1.9 MB must be on their way at any moment, or memory is idle in between. Rung 6 has that while
// its warps start, and little while they compute. Here each of 132 x 512 = 67,584 threads always has its
// eight elements of 8 bytes under way: 67,584 x 64 = 4.3 MB.
//
// The price is registers, 96 a thread, so that only two blocks fit; __launch_bounds__(256, 2) tells the
// compiler that it may use 65,536 / 512 = 128. In return, the table is filled once for hundreds of spans.
//
// Counted: nothing new. The arithmetic is that of rung 6, and its times stay where they were. What changes
// is how they overlap with memory, which no count tells. At best the time is the longest of the three alone,
// memory's 900 us. Against it: 16 warps on a multiprocessor, of the 64 that it can hold.
//
// Predict: the time. What does this rung win, and what does it lose?
constexpr int CHUNK_SIZE = 8;    // elements of a lane
constexpr unsigned ON_EACH = 2;  // blocks that a multiprocessor has at once

__global__ void __launch_bounds__(THREADS, ON_EACH) rung7(State s, Constants c) {
    const Table arithmetic;
    const int64_t spans = s.n / SPAN;
    const int half = threadIdx.x % 32 / 16;
    const int lane_of_span = threadIdx.x % 16;
    const int64_t halves = int64_t(gridDim.x) * THREADS / 16;  // of warps, in the grid
    // After the last span a half reads that one again, and stores nothing.
    auto inside = [&](int64_t span) { return min(span, spans - 1); };
    auto load = [&](int64_t span) {
        return Elements<CHUNK_SIZE>::load(s, inside(span) * SPAN + lane_of_span * CHUNK_SIZE);
    };
    auto load_max_and_k = [&](int64_t span) -> MaxAndKOfBoth {
        return {s.m.max_and_k(inside(span)), s.v.max_and_k(inside(span))};
    };

    int64_t span = (int64_t(blockIdx.x) * THREADS + threadIdx.x) / 16;
    Elements<CHUNK_SIZE> next = load(span);
    MaxAndKOfBoth next_max_and_k = load_max_and_k(span);
    for (; span - half < spans; span += halves) {  // both halves of a warp, or none
        Elements<CHUNK_SIZE> e = next;
        const MaxAndKOfBoth old = next_max_and_k;
        next = load(span + halves);
        next_max_and_k = load_max_and_k(span + halves);
        const MaxAndKOfBoth now = update_elements(arithmetic, c, old, e);
        if (span >= spans) continue;
        e.store(s, span * SPAN + lane_of_span * CHUNK_SIZE);
        if (lane_of_span != 0) continue;
        s.m.set_max_and_k(span, now.m);
        s.v.set_max_and_k(span, now.v);
    }
}
// Blocks that run at once.
unsigned blocks_at_once() { return unsigned(gpu::multiprocessors()) * ON_EACH; }
void launch_rung7(const State& s, const Constants& c) { rung7<<<blocks_at_once(), THREADS>>>(s, c); }

// ===========================================================================================================
// Rung 8: eight spans a warp, whose fields fill whole sectors
//
// What changes: who loads and stores the fields. In rung 7 half of the 17 accesses of a warp are for fields,
// which are 2% of the bytes: two spans' max of m are 8 bytes of a sector of 32.
//
//   m.max, rung 7    | span 0, 1 | span 2, 3 | span 4, 5 | span 6, 7 |     one sector, four warps
//   m.max, rung 8    | spans 0 to 7                                  |     one sector, one warp
//
// A warp takes eight consecutive spans, a *bundle*, in four pairs: one span of a pair for each half of the
// warp. A span has four fields, a bundle 32: one for each lane. With one instruction for the warp, each lane
// loads its own field. It passes the field on by a shuffle when the field's span is at work, and keeps the
// new one until the bundle is done. Four lanes have the fields of a span, in this order: m.max, m.k, v.max,
// v.k.
//
//   pair             0               1               2               3
//   lower half       span 0          span 2          span 4          span 6
//                    lanes 0 - 3     lanes 4 - 7     lanes 8 - 11    lanes 12 - 15
//   upper half       span 1          span 3          span 5          span 7
//                    lanes 16 - 19   lanes 20 - 23   lanes 24 - 27   lanes 28 - 31
//
// So a lane keeps a field of a span that its own half of the warp updates. (The function field_of_lane() of
// layouts.py asks for this table as a formula.) Accesses of a warp for a pair:
//
//             elements       fields                       together
//   rung 7    5 + 4          4 + 4                        17           loads + stores
//   rung 8    5 + 4          (1 + 1) / 4 pairs            9.5
//
// Counted: only these accesses, and four shuffles for a lane's eight elements: half an instruction for an
// element. The arithmetic is that of rung 6 again.
//
// Predict: the time, and whether rung 6 is beaten.
constexpr int PAIRS = 4;           // of a bundle
constexpr int BUNDLE = 2 * PAIRS;  // spans

// The field of a bundle that this lane keeps. (adamw.cu has a FieldOfLane, too.)
struct FieldOfLane {
    bool is_of_v, is_k;
    int pair, span;    // of the bundle
    float* in_memory;  // (spans)

    explicit __device__ FieldOfLane(const State& s) {
        const int lane = threadIdx.x % 32;
        is_of_v = lane % 4 >= 2;
        is_k = lane % 2 == 1;
        pair = lane % 16 / 4;
        span = 2 * pair + lane / 16;
        const Moment moment = is_of_v ? s.v : s.m;
        in_memory = is_k ? moment.k : moment.max;
    }
    __device__ float among(const MaxAndKOfBoth& both) const {
        const MaxAndK max_and_k = is_of_v ? both.v : both.m;
        return is_k ? max_and_k.k : max_and_k.max;
    }
};

// The fields of the span that this half of the warp has of a pair, from the lanes that keep them.
__device__ MaxAndKOfBoth max_and_k_of_pair(float kept, int pair) {
    auto field_of_span = [&](int field) { return __shfl_sync(ALL_LANES, kept, pair * 4 + field, 16); };
    const MaxAndK m{field_of_span(0), field_of_span(1)};
    const MaxAndK v{field_of_span(2), field_of_span(3)};
    return {m, v};
}

__global__ void __launch_bounds__(THREADS, ON_EACH) rung8(State s, Constants c) {
    const Table arithmetic;
    const FieldOfLane mine(s);
    const int64_t spans = s.n / SPAN;
    const int half = threadIdx.x % 32 / 16;
    const int lane_of_span = threadIdx.x % 16;
    const int64_t spans_of_grid = int64_t(gridDim.x) * (THREADS / 32) * BUNDLE;
    auto inside = [&](int64_t span) { return min(span, spans - 1); };
    auto load = [&](int64_t span) {
        return Elements<CHUNK_SIZE>::load(s, inside(span) * SPAN + lane_of_span * CHUNK_SIZE);
    };

    int64_t bundle = (int64_t(blockIdx.x) * THREADS + threadIdx.x) / 32 * BUNDLE;  // first span
    Elements<CHUNK_SIZE> next = load(bundle + half);
    float next_kept = mine.in_memory[inside(bundle + mine.span)];
    for (; bundle < spans; bundle += spans_of_grid) {
        const int64_t next_bundle = bundle + spans_of_grid;
        const float old_kept = next_kept;
        float new_kept = 0;
        next_kept = mine.in_memory[inside(next_bundle + mine.span)];
        for (int pair = 0; pair < PAIRS && bundle + 2 * pair < spans; pair++) {
            const int64_t span = bundle + 2 * pair + half;
            Elements<CHUNK_SIZE> e = next;
            next = load(pair + 1 < PAIRS ? span + 2 : next_bundle + half);
            const MaxAndKOfBoth now = update_elements(arithmetic, c, max_and_k_of_pair(old_kept, pair), e);
            if (pair == mine.pair) new_kept = mine.among(now);
            if (span < spans) e.store(s, span * SPAN + lane_of_span * CHUNK_SIZE);
        }
        if (bundle + mine.span < spans) mine.in_memory[bundle + mine.span] = new_kept;
    }
}
void launch_rung8(const State& s, const Constants& c) { rung8<<<blocks_at_once(), THREADS>>>(s, c); }

// ===========================================================================================================
// Your rung
//
// Cover rungs 4 to 8, and write a kernel that does the step at 60% of the copy bandwidth or more; then one at
// 80%. Begin with a copy of rung 2's kernel with rung 3's power(), and launch it in launch_my_kernel(). You
// may call every function above. s.n is a multiple of 128, but not of more than that.
//
//   make build/ladder_adamw && build/ladder_adamw 3 10
//
// compares it with the reference and measures it beside rung 3. Hints stand at the end of this file. Without
// a GPU: layouts.py, in this folder, asks which lane has what in rungs 5 and 8, and checks your answers.
[[maybe_unused]] __global__ void my_kernel([[maybe_unused]] State s, [[maybe_unused]] Constants c) {}

void launch_my_kernel([[maybe_unused]] const State& s, [[maybe_unused]] const Constants& c) {
    // my_kernel<<<blocks, threads>>>(s, c);
}

}  // namespace

int main(int argc, char** argv) {
    return climb_adamw(argc, argv,
                       {{"a block for a span, a thread for an element, powf", launch_rung1},
                        {"a warp for a span, four elements a lane", launch_rung2},
                        {"powers on the special function unit", launch_rung3},
                        {"reciprocals in place of divisions, no branches", launch_rung4},
                        {"half a warp for a span, eight elements a lane", launch_rung5},
                        {"logarithms of codes from a table", launch_rung6},
                        {"loads of the next span while this one is computed", launch_rung7},
                        {"eight spans a warp: fields fill whole sectors", launch_rung8},
                        {"adamw.cu, which trains", AS_IN_TRAINING},
                        {"my_kernel", launch_my_kernel}});
}

// ===========================================================================================================
// Hints for your rung
//
// Read one, and try it, before you read the next.
//
// 1. What limits rung 3? Compare its three times.
// 2. Which divisions have a divisor that is the same for all elements of a span? Which can the host do?
// 3. 60% is reached without any division. Then memory: how wide is the widest load, and how many elements
//    of 2 bytes is that? How many lanes does a span have then?
// 4. The logarithm of a code has 128 possible values.
// 5. Which loads could be issued before the arithmetic of another span begins? Launch as many blocks as
//    run at once, let each thread loop, and keep what the next turn needs in registers.
// 6. Look at the instructions that load and store fields: how many bytes does each move?
// 7. Beyond rung 8 there is something left: two values become two codes with one instruction
//    (gpu/device.cuh, encode_two), and one instruction finds the maximum of a warp
//    (__reduce_max_sync).

// ===========================================================================================================
// Measured on an H200
//
// For 2^28 parameters:
//
//   rung                                                           us  % of copy  speed-up  codes
//    1  a block for a span, a thread for an element, powf       7759.3        12%         -  6 by one
//    2  a warp for a span, four elements a lane                 5110.2        17%     1.52x  5 by one
//    3  powers on the special function unit                     2288.5        39%     2.23x  5 by one
//    4  reciprocals in place of divisions, no branches          1104.7        81%     2.07x  4 by one
//    5  half a warp for a span, eight elements a lane           1024.6        87%     1.08x  4 by one
//    6  logarithms of codes from a table                         977.7        91%     1.05x  4 by one
//    7  loads of the next span while this one is computed       1106.4        81%     0.88x  4 by one
//    8  eight spans a warp: fields fill whole sectors            987.9        90%     1.12x  4 by one
//    9  adamw.cu, which trains                                  1030.5        87%     0.96x  7 by one
//
// In the last column: how many of the 2 x 2^20 codes of m and v are neighbours of the reference's code,
// because a power differs in its last bits, and in how many moment groups k differs by 1/256 (here in none).
// More than that is called WRONG.
//
// In the answers below, instructions and special functions are those counted above times 8.8 and 71 us. They
// were not counted again in rungs 7 and 8, whose arithmetic is that of rung 6.

// ===========================================================================================================
// Answer to rung 1
//
//   limits      instructions 770 x 8.8 = 6,780 us (the 770 of the measured program), memory 900 us
//   predicted   940 x 8.8 = 8,300 us, from the instructions of nvcc 12.9
//   measured    7,759 us
//
// One resource decides by far. That the prediction is only 7% off is luck: it counts instructions that the
// measured program does not have. The GPU runs this rung at 1.98 GHz (measured). At this clock the 770 take
// 6,780 x 1.8 / 1.98 = 6,160 us, and the rung takes 26% longer. What does a count not see? There are 37
// barriers, nine in each of four reductions and one before, and at each of them warps wait and issue nothing.
// Rung 2, which has none, takes only 6% longer than its count.

// ===========================================================================================================
// Answer to rung 2
//
//   limits      instructions 600 x 8.8 = 5,280 us, memory 900 us
//   predicted   5,300 us
//   measured    5,110 us
//
// Instructions decide again, so how wide a load is does not matter yet. It will once they no longer do. This
// rung, too, runs at 1.98 GHz, where its count is 5,280 x 1.8 / 1.98 = 4,800 us.

// ===========================================================================================================
// Answer to rung 3
//
//   limits      instructions 260 x 8.8 = 2,290 us, special functions 15 x 71 = 1,060 us, memory 900 us
//   predicted   2,300 us
//   measured    2,289 us, 2.2 times as fast as rung 2
//
// Eight special functions in place of four powf: 340 instructions less for an element. Instructions still
// decide, and most of the 260 that are left are divisions and what prepares them.

// ===========================================================================================================
// Answer to rung 4
//
//   limits      memory 900 us, special functions 12.5 x 71 = 890 us, instructions 100 x 8.8 = 880 us
//   predicted   between 1,100 and 1,500 us: longer than each of the three, and far less than their sum
//   measured    1,105 us
//
// From here on the three times are alike, and how they overlap decides. To see it, copies of rungs 4 to 6
// were measured in which all spans use the memory of the first 2^20 parameters. These stay in the L2 cache,
// so what is left is the arithmetic. (This was another run than that of the table above, so "as it is"
// differs from it by 1%.)
//
//   rung   as it is    arithmetic alone    slowest of its counts
//    4     1,115 us    969 us              890 us
//    5     1,037       875                 800
//    6       987       793                 720
//
// Alone, too, it takes a tenth longer than the longest of its counts.
//
// Rung 5 will have 10 + 10 / 8 = 11.25 special functions, and rung 6 two less, 9.25.

// ===========================================================================================================
// Answer to rung 5
//
//   limits      memory 900 us, special functions 11.25 x 71 = 800 us, instructions 78 x 8.8 = 690 us
//   predicted   15% less time than rung 4
//   measured    1,025 us, 7% less
//
// The prediction was made from the instructions that this rung saves, and these it does save: a tenth of the
// arithmetic (see the table of answer 4). But 15% less than 1,105 us would be 940 us, or 96% of the rate of a
// copy, while no kernel here has more than 91%. Once the time is near that of memory, a prediction must begin
// with memory.

// ===========================================================================================================
// Answer to rung 6
//
//   limits      memory 900 us, instructions 82 x 8.8 = 720 us, special functions 9.25 x 71 = 660 us, shared
//               memory 200 us
//   predicted   as fast as rung 5
//   measured    978 us, 5% less time
//
// We thought that memory limited both, and that look-ups would cost what the logarithms had cost. But their
// conflicts are hidden, for shared memory was idle. The arithmetic becomes 82 us shorter (see the table of
// answer 4). 50 of these arrive, because arithmetic never overlaps fully with memory: warps begin with a wait
// and end with stores.

// ===========================================================================================================
// Answer to rung 7
//
//   limits      as rung 6
//   predicted   1,000 to 1,050 us
//   measured    1,106 us, 13% slower than rung 6
//
// The prediction had two premises: that rung 6 leaves memory idle while its warps compute, and that 16 warps
// on a multiprocessor are enough if each has asked for its next spans. At least one of them is wrong. Rung
// 6 has 32 warps there, of four blocks, and while some of them compute, others load: it reaches 91% of the
// rate of a copy without our help. And 16 warps hide less of the waiting inside the arithmetic, for instance
// for a shuffle or a look-up. This rung changed both at once, so its time cannot tell which of them costs how
// much. (On a GPU you could find out: run rung 6 with 16 warps on a multiprocessor, by giving its blocks so
// much shared memory that only two fit.)
//
// In both rungs half of the accesses are for fields. So these do not explain why rung 7 is slower, but rung
// 8 shows that they cost a tenth. Rung 8 needs a warp that goes through many spans, so the change stayed.

// ===========================================================================================================
// Answer to rung 8
//
//   limits      as rung 6
//   predicted   a tenth less time than rung 7
//   measured    988 us, 11% less than rung 7, 1% more than rung 6
//
// This rung wins back what rung 7 lost, and no more: rung 6 takes 978 us, and is much simpler. Its 32 warps,
// each of which loads, computes and stores at its own time, keep memory as busy as 16 warps do that load
// ahead: the GPU does by itself what these two rungs write down. So more warps are the first thing to try,
// and for this task one would stop at rung 6.
//
// The kernel that trains has more to do: several parameters in one launch, moment groups that are extremely
// wide or small, other formats, the amax of the new weights. It goes through bundles as this rung does, and
// takes 1,031 us. Is it, too, as fast in the manner of rung 6? We wrote 15 variants, with the same bits, and
// predicted yes. For the parameters of Llama-2-7B the best of them took 30.6 ms in place of 26.0. One cause
// is the start of a block, which finds its parameter and fills its tables before it loads: the same kernel
// took 39.9 ms with 128 spans a block, and 31.3 with 16,384. So what a rung wins in a small kernel has to be
// measured again in the one that uses it.

// ===========================================================================================================
// On paper: for those without a GPU
//
// The answers follow below. Cover them.
//
//   a   How many sectors of weights does a load of a warp want in rungs 1, 2 and 5?
//   b   Moments in FP32, without codes and fields: how many bytes a parameter, and how long does memory take?
//   c   Spans of 64: how many bytes a parameter? How many lanes has a span in rung 5, and how many shuffles
//       does each of its reductions take then?
//   d   How many special functions has rung 4's arithmetic with N = 16, and how long do they take? Which
//       resource decides? What speaks against it?
//   e   A kernel has 72 registers a thread. How many blocks of 256 threads fit on a multiprocessor?
//   f   How many registers may a thread of rung 7 have if three blocks are to fit? It has 96: what happens?
//   g   On a GPU with 8 lanes for special functions in place of 16, which resource decides in rung 6?

// ===========================================================================================================
// Answers on paper
//
//   a   2 (32 x 2 bytes), 8 (32 x 8) and 16 (32 x 16).
//   b   Weight, remainder and gradient move 4 + 4 + 2 bytes, and two moments 2 x (4 + 4): 26 bytes. Memory
//       takes 2^28 x 26 / 4.27e12 = 1,630 us.
//   c   Fields take 0.5 bytes in place of 0.25: 14.5. Then 8 lanes have a span, and 3 shuffles reduce it.
//   d   10 + 10 / 16 = 10.6, 750 us: memory decides, with 900 us. But a lane's 32 bytes of weights take two
//       loads, and its values take more registers, so fewer threads fit.
//   e   65,536 / (256 x 72) = 3.6: three.
//   f   65,536 / 768 = 85, and the compiler takes a multiple of 8: 80. So some values lie in memory.
//   g   Special functions take twice 660 us, 1,320 us: more than memory's 900.
