// coat.cu - the method on the GPU: formats, quantizers, the precision flow's fused kernels, the ends of
// the network, and the FP8 optimizer (interface and rules: coat.cuh; the same operators on the CPU: reference.cpp).
//
// All of it is bound by memory bandwidth, so three shapes of kernel do nearly everything:
//   tile kernels   a block takes 128 rows x 128 columns, a thread 8 x 8 of them: every access of a warp covers whole 128-byte lines, also that
//                  of the transpose, which goes through registers (bytes) and then shared memory (words of 4 rows, swizzled).
//   row kernels    a team of warps holds a whole row in registers: norms forward and backward, the residual pair.
//   the optimizer  half a warp a group of 128 elements, eight a lane, the next group's loads in flight while this one is computed.
// What a tile or a row reads is a Source: it loads a chunk of 8 columns and computes FP32 values. What a tensor is held in (compute dtype or
// FP8 groups) is a Held type inside of it. Sources are to kernels what Lazy is to launchers.
//
// Determinism: every sum has a fixed order; the only atomics are maxima (and a report's counters and sums, whose last bits may differ).
#include "coat.cuh"

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <algorithm>

namespace coat::gpu {

void check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // clears it: else the next launch would report it as its own
    throw Error(std::string(what) + ": " + cudaGetErrorString(error) + ".");
}

namespace {

using bf16 = __nv_bfloat16;
constexpr int CHUNK = 8;  // elements that a thread handles at once: 16 bytes of BF16
using Values = float[CHUNK];

#define CHECK_LAUNCH(kernel) check(cudaGetLastError(), "Launching " kernel " failed")

void require(bool ok, const char* what) {
    if (!ok) throw Error(std::string("A GPU kernel was called wrongly: ") + what + ".");
}

bool in_groups(const Quant& q) { return q.format == Format::E4M3 && q.granularity == PER_GROUP && q.scale == Format::BF16; }

unsigned blocks(int64_t n, int64_t each) { return static_cast<unsigned>(ceil_div(n, each)); }

// =====================================================================================================================
// Formats (the paper's preliminaries)

struct Fp8 {  // what kernels need of a format, as an argument
    bool e5m2;
    float max;
};
Fp8 fp8(Format f) { return {f == Format::E5M2, info(f).max}; }

__device__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }
__device__ float larger(float top, float x) {  // max(top, |x|), NaN if one of them is
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(top), "f"(fabsf(x)));
    return y;
}
template <int LANES>
__device__ float largest_of(float top) {  // of so many neighbouring lanes
    if constexpr (LANES > 1) top = largest_of<LANES / 2>(larger(top, __shfl_xor_sync(0xFFFFFFFFu, top, LANES / 2)));
    return top;
}

__device__ uint32_t encode2(bool e5m2, float lo, float hi) {
    return __nv_cvt_float2_to_fp8x2(make_float2(lo, hi), __NV_SATFINITE, e5m2 ? __NV_E5M2 : __NV_E4M3);
}
__device__ float2 decode2(bool e5m2, uint32_t codes) {
    const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), e5m2 ? __NV_E5M2 : __NV_E4M3);
    return __half22float2(__half2(h));
}

__device__ uint2 encode(bool e5m2, const Values& v, float inverse) {
    uint32_t half[4];
    if (e5m2) {
#pragma unroll
        for (int i = 0; i < 4; i++) half[i] = encode2(true, v[2 * i] * inverse, v[2 * i + 1] * inverse);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) half[i] = encode2(false, v[2 * i] * inverse, v[2 * i + 1] * inverse);
    }
    return {half[0] | half[1] << 16, half[2] | half[3] << 16};
}
__device__ void decode(bool e5m2, uint2 codes, float scale, Values& v) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 two = decode2(e5m2, (i < 2 ? codes.x : codes.y) >> (i & 1) * 16 & 0xFFFFu);
        v[2 * i] = two.x * scale;
        v[2 * i + 1] = two.y * scale;
    }
}

// s = amax / FMAX; 1 for nothing and for what is not finite (NaN and infinity fail the comparison). 1 / s stays finite.
__device__ float scale_of(float fp8_max, float amax) {
    return amax > 0 && amax < INFINITY ? fmaxf(__fdiv_rn(amax, fp8_max), 0x1p-126f) : 1.0f;
}
// amax / 448 as a division rounds it: a product with the rounded reciprocal, mended by its remainder, which is exact from 2^-123 on; what is below
// becomes 2^-126 anyway.
__device__ float over_448(float amax) {
    const float q = __fmul_rn(amax, 1 / 448.0f);
    return __fmaf_rn(__fmaf_rn(-448.0f, q, amax), 1 / 448.0f, q);
}
__device__ float bf16_up(float x) { return __uint_as_float((__float_as_uint(x) + 0xFFFFu) & 0xFFFF0000u); }

__device__ float bf16_nearest(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

// One instruction each, good to a unit or two of the last place; ftz: a subnormal counts as 0.
__device__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ float fast_log2(float x) {  // subnormals too
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ float fast_log2_normal(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ float fast_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ float fast_sqrt(float x) {
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// =====================================================================================================================
// Held: how a tensor lies in memory. load() fetches a chunk of 8 as it is, values() makes numbers of it.

__device__ uint32_t pack(float lo, float hi) {
    const __nv_bfloat162 two = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<const uint32_t*>(&two);
}
__device__ float2 unpack(uint32_t two) { return {__uint_as_float(two << 16), __uint_as_float(two & 0xFFFF0000u)}; }

// One store of 8 or 16 bytes; an assignment through a cast pointer may come out as four small ones.
template <class V>
__device__ void put(void* to, V value) {
    __stwb(static_cast<V*>(to), value);
}

template <class T>
struct Plain;

template <>
struct Plain<bf16> {
    using Stream = bf16;
    using Raw = uint4;
    bf16* data;

    __device__ Plain from(int64_t i) const { return {data + i}; }  // the same, counted from element i on
    __device__ Raw load(int64_t i) const { return *reinterpret_cast<const uint4*>(data + i); }
    __device__ void values(const Raw& raw, Values& v) const {
        const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 two = unpack(words[j]);
            v[2 * j] = two.x, v[2 * j + 1] = two.y;
        }
    }
    // Rounds v to what is held and, if live, stores it.
    __device__ void store(int64_t i, Values& v, bool live) const {
        const uint4 raw{pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7])};
        if (live) put(data + i, raw);
        values(raw, v);
    }
};

template <>
struct Plain<float> {
    using Stream = float;
    struct Raw {
        float4 lo, hi;
    };
    float* data;

    __device__ Plain from(int64_t i) const { return {data + i}; }
    __device__ Raw load(int64_t i) const {
        const float4* p = reinterpret_cast<const float4*>(data + i);
        return {p[0], p[1]};
    }
    __device__ void values(const Raw& r, Values& v) const {
        v[0] = r.lo.x, v[1] = r.lo.y, v[2] = r.lo.z, v[3] = r.lo.w, v[4] = r.hi.x, v[5] = r.hi.y, v[6] = r.hi.z, v[7] = r.hi.w;
    }
    __device__ void store(int64_t i, Values& v, bool live) const {
        if (!live) return;
        put(data + i, make_float4(v[0], v[1], v[2], v[3]));
        put(data + i + 4, make_float4(v[4], v[5], v[6], v[7]));
    }
};

// E4M3 in 1xGROUP groups (16) with BF16 scales. Columns are a multiple of GROUP, so the group of element i is i / GROUP, and two neighbouring
// lanes, or however many it takes, hold one group: they must all call store(), and the first one stores the scale.
constexpr int GROUP = PER_GROUP.cols, GROUP_LANES = GROUP / CHUNK;
struct Grouped {
    using Stream = bf16;
    struct Raw {
        uint2 codes;
        uint16_t scale;
    };
    uint8_t* codes;
    uint16_t* scales;

    __device__ Grouped from(int64_t i) const { return {codes + i, scales + i / GROUP}; }
    __device__ Raw load(int64_t i) const { return {*reinterpret_cast<const uint2*>(codes + i), scales[i / GROUP]}; }
    __device__ void values(const Raw& r, Values& v) const { decode(false, r.codes, __uint_as_float(uint32_t(r.scale) << 16), v); }
    static __device__ float group_scale(const Values& v) {
        float amax = 0;
#pragma unroll
        for (int j = 0; j < CHUNK; j++) amax = larger(amax, v[j]);
        amax = largest_of<GROUP_LANES>(amax);
        // NaN, and so are the numbers that are read from the group: what a code would hide comes to light.
        if (!(amax < INFINITY)) return __uint_as_float(0x7FC00000u);
        return amax > 0 ? bf16_up(fmaxf(over_448(amax), 0x1p-126f)) : 1.0f;
    }
    // 1 / scale as a division rounds it: with a scale of 8 bits the remainder is exact, and the mended reciprocal is never near a tie.
    static __device__ float inverse_of(float scale) {
        const float r = fast_reciprocal(scale);
        return __fmaf_rn(__fmaf_rn(-scale, r, 1.0f), r, r);
    }
    __device__ void store(int64_t i, Values& v, bool live) const {
        const float scale = group_scale(v);
        const uint2 c = encode(false, v, inverse_of(scale));
        if (live) {
            put(codes + i, c);
            if (threadIdx.x % GROUP_LANES == 0) scales[i / GROUP] = static_cast<uint16_t>(__float_as_uint(scale) >> 16);
        }
        decode(false, c, scale, v);
    }
};

// To groups, and what those then hold to BF16.
struct Through {
    Grouped groups;
    Plain<bf16> held;

    __device__ void store(int64_t i, Values& v, bool live) const {
        groups.store(i, v, live);
        held.store(i, v, live);
    }
};

// FP8 with one scale for the whole tensor, to read.
struct WholeFp8 {
    using Raw = uint2;
    const uint8_t* codes;
    const TensorScale* slot;
    bool e5m2;

    __device__ WholeFp8 from(int64_t i) const { return {codes + i, slot, e5m2}; }
    __device__ Raw load(int64_t i) const { return *reinterpret_cast<const uint2*>(codes + i); }
    __device__ void values(const Raw& r, Values& v) const { decode(e5m2, r, slot->scale, v); }
};

// =====================================================================================================================
// Sources: start(row, col) is what a thread keeps of its place, load(start, i) fetches what 8 columns of row + i need, and compute() makes FP32
// values of it. A source with two PLANES makes [plane 0 | plane 1] side by side, each `width` columns wide.
// Multiplications and additions are spelled out, so that every kernel that computes a tensor computes the same bits.

// Elements between a thread's first row and its row i: so few that 32 bits hold them, which makes an address one instruction.
__device__ uint32_t rows_of(int i, int64_t width) { return static_cast<uint32_t>(i) * static_cast<uint32_t>(width); }

template <class Held>
struct StoredSource {
    static constexpr int PLANES = 1;
    using Start = Held;
    using Raw = typename Held::Raw;
    Held x;
    int64_t width;

    __device__ Start start(int64_t row, int64_t col) const { return x.from(row * width + col); }
    __device__ Raw load(const Start& at, int i) const { return at.load(rows_of(i, width)); }
    __device__ void compute(const Raw& raw, const Start& at, int, Values (&v)[1]) const { at.values(raw, v[0]); }
};

template <class Held, int HALVES>
struct Halves {  // how [gate | up] is read by its two halves, or u as it is
    struct Start {
        Held half[HALVES];
    };
    struct Raw {
        typename Held::Raw half[HALVES];
    };
    Held up;
    int64_t width;

    __device__ Start start(int64_t row, int64_t col) const {
        Start at;
#pragma unroll
        for (int h = 0; h < HALVES; h++) at.half[h] = up.from((row * HALVES + h) * width + col);
        return at;
    }
    __device__ Raw load(const Start& at, int i) const {
        Raw raw;
#pragma unroll
        for (int h = 0; h < HALVES; h++) raw.half[h] = at.half[h].load(rows_of(i, HALVES * width));
        return raw;
    }
};

template <class T, int HALVES>
struct HalvesSource : Halves<Plain<T>, HALVES> {  // the halves side by side
    static constexpr int PLANES = HALVES;
    using typename Halves<Plain<T>, HALVES>::Start;
    using typename Halves<Plain<T>, HALVES>::Raw;

    __device__ void compute(const Raw& raw, const Start&, int, Values (&v)[HALVES]) const {
#pragma unroll
        for (int h = 0; h < HALVES; h++) this->up.values(raw.half[h], v[h]);
    }
};

template <class T>
struct SumSource {  // x + a
    static constexpr int PLANES = 1;
    struct Start {
        Plain<T> x, a;
    };
    struct Raw {
        typename Plain<T>::Raw x, a;
    };
    Plain<T> x, a;
    int64_t width;

    __device__ Start start(int64_t row, int64_t col) const { return {x.from(row * width + col), a.from(row * width + col)}; }
    __device__ Raw load(const Start& at, int i) const { return {at.x.load(rows_of(i, width)), at.a.load(rows_of(i, width))}; }
    __device__ void compute(const Raw& raw, const Start&, int, Values (&v)[1]) const {
        Values other;
        x.values(raw.x, v[0]);
        a.values(raw.a, other);
#pragma unroll
        for (int j = 0; j < CHUNK; j++) v[0][j] = __fadd_rn(v[0][j], other[j]);
    }
};

template <class T>
struct EmbeddingSource {  // embedding[token] (+ positions[row % period])
    static constexpr int PLANES = 1;
    struct Start {
        int64_t row, col;
    };
    struct Raw {
        typename Plain<T>::Raw e, p;
    };
    const int32_t* tokens;
    Plain<T> embedding, positions;
    int64_t period, width;

    __device__ Start start(int64_t row, int64_t col) const { return {row, col}; }
    __device__ Raw load(const Start& at, int i) const {
        Raw raw{};
        raw.e = embedding.load(tokens[at.row + i] * width + at.col);
        if (positions.data) raw.p = positions.load((at.row + i) % period * width + at.col);
        return raw;
    }
    __device__ void compute(const Raw& raw, const Start&, int, Values (&v)[1]) const {
        Values p;
        embedding.values(raw.e, v[0]);
        if (!positions.data) return;
        positions.values(raw.p, p);
#pragma unroll
        for (int j = 0; j < CHUNK; j++) v[0][j] = __fadd_rn(v[0][j], p[j]);
    }
};

// y = (x - mean) / std * weight + bias, where no bias is 0
__device__ float normalized(float x, float2 stats, float weight, float bias) {
    return __fmaf_rn(__fmul_rn(__fsub_rn(x, stats.x), stats.y), weight, bias);
}

template <class T>
struct Affine {
    Plain<T> weight, bias;

    __device__ void load(int64_t col, Values& g, Values& b) const {
        weight.values(weight.load(col), g);
#pragma unroll
        for (int j = 0; j < CHUNK; j++) b[j] = 0;
        if (bias.data) bias.values(bias.load(col), b);
    }
};

template <class Held>
struct NormSource {
    static constexpr int PLANES = 1;
    using T = typename Held::Stream;
    struct Start {
        Held in;
        const float2* stats;
        Values weight, bias;
    };
    struct Raw {
        typename Held::Raw x;
        float2 stats;
    };
    Held in;
    Affine<T> affine;
    const float2* stats;
    int64_t width;

    __device__ Start start(int64_t row, int64_t col) const {
        Start at;
        at.in = in.from(row * width + col);
        at.stats = stats + row;
        affine.load(col, at.weight, at.bias);
        return at;
    }
    __device__ Raw load(const Start& at, int i) const { return {at.in.load(rows_of(i, width)), at.stats[i]}; }
    __device__ void compute(const Raw& raw, const Start& at, int, Values (&v)[1]) const {
        Values x;
        in.values(raw.x, x);
#pragma unroll
        for (int j = 0; j < CHUNK; j++) v[0][j] = normalized(x[j], raw.stats, at.weight[j], at.bias[j]);
    }
};

constexpr float LOG2_E = 1.4426950408889634f;
__device__ float sigmoid_of_exp2(float z) { return fast_reciprocal(__fadd_rn(1.0f, fast_exp2(z))); }  // 1 / (1 + 2^z)
__device__ float sigmoid(float x) { return sigmoid_of_exp2(__fmul_rn(-LOG2_E, x)); }

// GELU in its tanh form is u sigmoid(2z), z = sqrt(2/pi) (u + 0.044715 u^3): 1 + tanh(z) = 2 sigmoid(2z), without the cancellation.
constexpr float GELU_2A = 2 * 0.7978845608028654f, GELU_2AB = 2 * 0.7978845608028654f * 0.044715f;
__device__ float gelu_sigmoid(float u) {
    const float uu = __fmul_rn(u, u);
    return sigmoid_of_exp2(__fmul_rn(u, __fmaf_rn(-LOG2_E * GELU_2AB, uu, -LOG2_E * GELU_2A)));
}

// silu(first) * second, or gelu(first)
template <bool GATED>
__device__ float activated(float first, float second) {
    return GATED ? __fmul_rn(__fmul_rn(first, sigmoid(first)), second) : __fmul_rn(first, gelu_sigmoid(first));
}

template <class Held, bool GATED>
struct ActivationSource : Halves<Held, GATED ? 2 : 1> {  // silu(gate) * up, or gelu(up)
    static constexpr int PLANES = 1, HALVES = GATED ? 2 : 1;
    using typename Halves<Held, HALVES>::Start;
    using typename Halves<Held, HALVES>::Raw;

    __device__ void compute(const Raw& raw, const Start&, int, Values (&v)[1]) const {
        Values first, second = {};
        this->up.values(raw.half[0], first);
        if (GATED) this->up.values(raw.half[HALVES - 1], second);
#pragma unroll
        for (int j = 0; j < CHUNK; j++) v[0][j] = activated<GATED>(first[j], second[j]);
    }
};

template <class Held, bool GATED>
struct ActivationBackwardSource {
    static constexpr int PLANES = GATED ? 2 : 1;
    using T = typename Held::Stream;
    struct Start {
        Held half[PLANES];
        Plain<T> dh;
    };
    struct Raw {
        typename Held::Raw half[PLANES];
        typename Plain<T>::Raw dh;
    };
    Held up;
    Plain<T> dh;
    int64_t width;

    __device__ Start start(int64_t row, int64_t col) const {
        Start at;
#pragma unroll
        for (int h = 0; h < PLANES; h++) at.half[h] = up.from((row * PLANES + h) * width + col);
        at.dh = dh.from(row * width + col);
        return at;
    }
    __device__ Raw load(const Start& at, int i) const {
        Raw raw;
#pragma unroll
        for (int h = 0; h < PLANES; h++) raw.half[h] = at.half[h].load(rows_of(i, PLANES * width));
        raw.dh = at.dh.load(rows_of(i, width));
        return raw;
    }
    __device__ void compute(const Raw& raw, const Start&, int, Values (&v)[PLANES]) const {
        Values first, second, d;
        up.values(raw.half[0], first);
        if (GATED) up.values(raw.half[PLANES - 1], second);
        dh.values(raw.dh, d);
#pragma unroll
        for (int j = 0; j < CHUNK; j++) {
            const float x = first[j];
            if (GATED) {  // silu' = s + x s (1 - s)
                const float s = sigmoid(x), silu = __fmul_rn(x, s);
                v[0][j] = __fmul_rn(__fmul_rn(d[j], second[j]), __fmaf_rn(silu, __fsub_rn(1.0f, s), s));
                v[PLANES - 1][j] = __fmul_rn(d[j], silu);
            } else {  // gelu' = s + x s (1 - s) 2z'. From |x| = 11 on, s or 1 - s is zero: any finite slope will do
                const float s = gelu_sigmoid(x), square = fminf(__fmul_rn(x, x), 128.0f);
                const float slope = __fmaf_rn(3 * GELU_2AB, square, GELU_2A);
                const float bend = __fmul_rn(__fmul_rn(x, s), __fsub_rn(1.0f, s));
                v[0][j] = __fmul_rn(d[j], __fmaf_rn(bend, slope, s));
            }
        }
    }
};

// Four stream elements, for rotations: half a head may be a multiple of four only.
__device__ uint2 load4(const bf16* p) { return *reinterpret_cast<const uint2*>(p); }
__device__ float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ float4 values4(uint2 raw) {
    const float2 lo = unpack(raw.x), hi = unpack(raw.y);
    return {lo.x, lo.y, hi.x, hi.y};
}
__device__ float4 values4(float4 raw) { return raw; }
__device__ void store4(bf16* p, float4 v) { put(p, make_uint2(pack(v.x, v.y), pack(v.z, v.w))); }
__device__ void store4(float* p, float4 v) { put(p, v); }

// Four pairs of (own, partner) turned by four angles.
__device__ float rotated(float own, float partner, float cosine, float sine) { return __fmaf_rn(own, cosine, __fmul_rn(partner, sine)); }
__device__ float4 rotated(float4 own, float4 partner, const float2* table, float sign) {
    const float4 a = reinterpret_cast<const float4*>(table)[0], b = reinterpret_cast<const float4*>(table)[1];
    return {rotated(own.x, partner.x, a.x, sign * a.y), rotated(own.y, partner.y, a.z, sign * a.w), rotated(own.z, partner.z, b.x, sign * b.y),
            rotated(own.w, partner.w, b.z, sign * b.w)};
}

template <class T>
struct RopeBackwardSource {  // the inverse rotation: x1 cos + x2 sin, x2 cos - x1 sin
    static constexpr int PLANES = 1;
    struct Start {
        Plain<T> x;
        uint32_t position;
        int partner[2];    // of each four columns: how far the other element of the pair lies; 0: not rotated
        int angle[2];      // column of the table
    };
    struct Raw {
        typename Plain<T>::Raw own;
        decltype(load4(static_cast<const T*>(nullptr))) partner[2];
    };
    Plain<T> x;
    Rope rope;
    int64_t width;

    __device__ Start start(int64_t row, int64_t col) const {
        Start at{x.from(row * width + col), static_cast<uint32_t>(row) % static_cast<uint32_t>(rope.T), {}, {}};
        const int half = static_cast<int>(rope.HS) / 2;
#pragma unroll
        for (int q = 0; q < 2; q++) {
            const int inside = static_cast<int>(col + 4 * q) % static_cast<int>(rope.HS);
            at.partner[q] = col + 4 * q >= rope.rotated_cols ? 0 : inside < half ? half : -half;
            at.angle[q] = inside < half ? inside : inside - half;
        }
        return at;
    }
    __device__ Raw load(const Start& at, int i) const {
        Raw raw;
        raw.own = at.x.load(rows_of(i, width));
#pragma unroll
        for (int q = 0; q < 2; q++) raw.partner[q] = load4(at.x.data + rows_of(i, width) + 4 * q + at.partner[q]);
        return raw;
    }
    __device__ void compute(const Raw& raw, const Start& at, int i, Values (&v)[1]) const {
        const float2* angles = rope.table + (at.position + i) % static_cast<uint32_t>(rope.T) * (rope.HS / 2);
        x.values(raw.own, v[0]);
#pragma unroll
        for (int q = 0; q < 2; q++) {
            if (at.partner[q] == 0) continue;
            float* own = v[0] + 4 * q;
            const float sign = at.partner[q] > 0 ? 1.0f : -1.0f;
            const float4 r = rotated({own[0], own[1], own[2], own[3]}, values4(raw.partner[q]), angles + at.angle[q], sign);
            own[0] = r.x, own[1] = r.y, own[2] = r.z, own[3] = r.w;
        }
    }
};

// The same for heads of a multiple of 32: both halves of a head at once, so that each element and each angle is fetched once. Column c of
// the pairs is element c % half of head c / half; columns that are not rotated are pairs too.
template <class T>
struct RopePairSource {
    static constexpr int PLANES = 2;
    struct Start {
        Plain<T> x;           // plane 0
        const float2* angles; // null: not rotated
        uint32_t position;
    };
    struct Raw {
        typename Plain<T>::Raw half[2];
        float4 angles[CHUNK / 2];  // cos, sin, cos, sin
    };
    Plain<T> x;
    Rope rope;  // T at least ROWS
    int half;
    int64_t width;

    __device__ int64_t place(int plane, int64_t col) const { return col + (static_cast<int>(col) / half + plane) * half; }
    __device__ Start start(int64_t row, int64_t col) const {
        const int64_t at = place(0, col);
        return {x.from(row * 2 * width + at), at < rope.rotated_cols ? rope.table + static_cast<int>(col) % half : nullptr,
                static_cast<uint32_t>(row) % static_cast<uint32_t>(rope.T)};
    }
    __device__ Raw load(const Start& at, int i) const {
        Raw raw{};
#pragma unroll
        for (int h = 0; h < 2; h++) raw.half[h] = at.x.load(rows_of(i, 2 * width) + h * half);
        if (!at.angles) return raw;
        const uint32_t T_ = static_cast<uint32_t>(rope.T), sum = at.position + i, position = sum < T_ ? sum : sum - T_;
        const float4* angles = reinterpret_cast<const float4*>(at.angles + position * static_cast<uint32_t>(half));
#pragma unroll
        for (int j = 0; j < CHUNK / 2; j++) raw.angles[j] = angles[j];
        return raw;
    }
    __device__ void compute(const Raw& raw, const Start& at, int, Values (&v)[2]) const {
        Values a, b;
        x.values(raw.half[0], a);
        x.values(raw.half[1], b);
#pragma unroll
        for (int j = 0; j < CHUNK; j++) {
            const float4 q = raw.angles[j / 2];
            const float cosine = j % 2 ? q.z : q.x, sine = j % 2 ? q.w : q.y;
            v[0][j] = at.angles ? rotated(a[j], b[j], cosine, sine) : a[j];
            v[1][j] = at.angles ? rotated(b[j], a[j], cosine, -sine) : b[j];
        }
    }
};

// Where a plane's column lies in a row of the result.
template <class Source>
__device__ int64_t place(const Source& x, int plane, int64_t col) {
    return plane * x.width + col;
}
template <class T>
__device__ int64_t place(const RopePairSource<T>& x, int plane, int64_t col) {
    return x.place(plane, col);
}

// =====================================================================================================================
// Tile kernels

constexpr int TILE = 128;                  // rows and columns
constexpr int ACROSS = TILE / CHUNK;       // chunks across a tile, and groups of 8 rows down
constexpr int TILE_THREADS = ACROSS * ACROSS;
constexpr int ROWS = 8;                    // of one thread
constexpr int TILE_BLOCKS = 4;             // a multiprocessor: 64 registers a thread; most kernels were slower with 3 and with 5

struct TilePlace {
    int across, down;
    int64_t row, col;  // the thread's first
    __device__ explicit TilePlace(int64_t tile_row = blockIdx.y)
        : across(threadIdx.x % ACROSS), down(threadIdx.x / ACROSS), row(tile_row * TILE + down * ROWS),
          col(int64_t(blockIdx.x) * TILE + across * CHUNK) {}
};
dim3 tile_grid(int64_t rows, int64_t width) { return {blocks(width, TILE), blocks(rows, TILE)}; }

// Calls use(i, values, live) for the thread's 8 rows in turn, with several rows' loads in flight. All lanes call it, live or not: a place outside
// reads the last row or chunk again, so that no load has a condition.
template <class Source, class Use>
__device__ void for_tile_rows(const Source& x, const TilePlace& at, int64_t rows, Use use) {
    constexpr int BYTES = sizeof(typename Source::Raw), BATCH = BYTES <= 16 ? 8 : BYTES <= 32 ? 4 : 2;
    const auto start = x.start(min(at.row, rows - 1), min(at.col, x.width - CHUNK));
    const int inside = static_cast<int>(min(max(rows - at.row, int64_t(0)), int64_t(ROWS))), live = at.col < x.width ? inside : 0;
#pragma unroll
    for (int first = 0; first < ROWS; first += BATCH) {
        typename Source::Raw raw[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) raw[i] = x.load(start, min(first + i, max(inside - 1, 0)));
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            Values v[Source::PLANES];
            x.compute(raw[i], start, min(first + i, max(inside - 1, 0)), v);
            use(first + i, v, first + i < live);
        }
    }
}

// The largest of the block's magnitudes goes to *slot. Most blocks find it large enough already and leave it alone.
__device__ void raise(float* slot, uint32_t bits) {
    uint32_t* word = reinterpret_cast<uint32_t*>(slot);
    if (bits > *static_cast<volatile uint32_t*>(word)) atomicMax(word, bits);
}
__device__ void raise_by_warp(float* slot, uint32_t top) {
    top = __reduce_max_sync(0xFFFFFFFFu, top);
    if (threadIdx.x % 32 == 0) raise(slot, top);
}

__device__ void raise_by_tile(float* slot, uint32_t top) {
    __shared__ uint32_t warps[TILE_THREADS / 32];
    top = __reduce_max_sync(0xFFFFFFFFu, top);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = top;
    __syncthreads();
    if (threadIdx.x < 32) raise_by_warp(slot, threadIdx.x < TILE_THREADS / 32 ? warps[threadIdx.x] : 0);
}

template <class Source>
__global__ void __launch_bounds__(TILE_THREADS, TILE_BLOCKS) amax_kernel(Source x, int64_t rows, TensorScale* slot) {
    float top = 0;
    for_tile_rows(x, TilePlace(), rows, [&](int, const Values(&v)[Source::PLANES], bool) {
#pragma unroll
        for (int p = 0; p < Source::PLANES; p++)
#pragma unroll
            for (int j = 0; j < CHUNK; j++) top = larger(top, v[p][j]);
    });
    raise_by_tile(&slot->amax, magnitude(top));
}

// Four rows of four bytes become four columns of four bytes.
__device__ void transpose4(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t (&out)[4]) {
    const uint32_t ab01 = __byte_perm(a, b, 0x5140), cd01 = __byte_perm(c, d, 0x5140);
    const uint32_t ab23 = __byte_perm(a, b, 0x7362), cd23 = __byte_perm(c, d, 0x7362);
    out[0] = __byte_perm(ab01, cd01, 0x5410), out[1] = __byte_perm(ab01, cd01, 0x7632);
    out[2] = __byte_perm(ab23, cd23, 0x5410), out[3] = __byte_perm(ab23, cd23, 0x7632);
}

// A tile's codes in shared memory, a column's 128 rows together, in words of 4 rows. Word w of a column lies at w ^ (twice the column's chunk) ^
// (1 in every other unit of 8 rows): so both the writes (a word of 16 chunks and 2 units) and the reads (8 lanes, 16 bytes each of one column)
// meet every bank once.
struct TransposeTile {
    uint32_t words[TILE * TILE / 4];

    // The thread's rows 4 h ... 4 h + 3.
    __device__ void write(const TilePlace& at, int h, const uint2 (&codes)[4]) {
        uint32_t columns[CHUNK / 4][4];
        transpose4(codes[0].x, codes[1].x, codes[2].x, codes[3].x, columns[0]);
        transpose4(codes[0].y, codes[1].y, codes[2].y, codes[3].y, columns[1]);
        uint32_t* to = words + at.across * CHUNK * (TILE / 4) + ((2 * at.down + h) ^ 2 * at.across ^ (at.down & 1));
#pragma unroll
        for (int j = 0; j < CHUNK; j++) to[j * (TILE / 4)] = columns[j / 4][j % 4];
    }
    __device__ uint4 rows16(int col, int piece) const {  // rows piece * 16 ... + 15 of one column
        const int chunk = col / CHUNK;
        const uint4 q = *reinterpret_cast<const uint4*>(&words[col * (TILE / 4) + 4 * (piece ^ chunk >> 1)]);
        return chunk & 1 ? uint4{q.z, q.w, q.y, q.x} : uint4{q.x, q.y, q.w, q.z};
    }
    // To (columns, rows); place(c) is where the tile's column c lies.
    template <class Place>
    __device__ void flush(uint8_t* out, int64_t rows, int64_t row0, int live_cols, Place place) const {
        constexpr int PIECES = TILE / 16;
#pragma unroll
        for (int i = threadIdx.x; i < TILE * PIECES; i += TILE_THREADS) {
            const int col = i / PIECES, piece = i % PIECES;
            const int64_t row = row0 + piece * 16;
            if (col >= live_cols || row >= rows) continue;
            const uint4 q = rows16(col, piece);
            uint8_t* to = out + place(col) * rows + row;
            if (rows % 16 == 0) {
                put(to, q);
            } else {
                const uint32_t words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
                for (int j = 0; j < 16; j++)
                    if (row + j < rows) to[j] = static_cast<uint8_t>(words[j / 4] >> j % 4 * 8);
            }
        }
    }
};

// Codes of a tile, transposed, to (cols, rows). All threads of the block call it.
template <int PLANES, class Place>
__device__ void flush(const TransposeTile (&tiles)[PLANES], int64_t rows, int64_t width, uint8_t* transposed, Place place) {
    __syncthreads();
    const int64_t col0 = int64_t(blockIdx.x) * TILE;
#pragma unroll
    for (int p = 0; p < PLANES; p++)
        tiles[p].flush(transposed, rows, int64_t(blockIdx.y) * TILE, static_cast<int>(min(int64_t(TILE), width - col0)),
                       [&](int c) { return place(p, col0 + c); });
}

static_assert(info(Format::E5M2).max == 128 * info(Format::E4M3).max, "amax / 57344 is amax / 448 / 128, and the second division is exact");

// Pass two of per-tensor scaling: values again, codes with the scale that pass one's amax implies. With a delayed scale it is the only pass, and
// updates the amax.
template <class Source, bool E5M2, bool TRANSPOSED>
__global__ void __launch_bounds__(TILE_THREADS, TILE_BLOCKS) quantize_kernel(Source x, int64_t rows, TensorScale* slot, uint8_t* codes,
                                                                             uint8_t* transposed) {
    constexpr int PLANES = Source::PLANES;
    __shared__ __align__(16) TransposeTile tiles[PLANES];
    __shared__ uint32_t most;  // the amax of the block, with a delayed scale: just in time it costs no register
    const TilePlace at;
    const float amax = slot->amax, due = amax > 0 && amax < INFINITY ? fmaxf(over_448(amax) * (E5M2 ? 1 / 128.0f : 1.0f), 0x1p-126f) : 1.0f;
    const bool delayed = slot->delayed > 0;
    const float scale = delayed ? slot->delayed : due, inverse = __frcp_rn(scale);
    if (delayed) {
        if (threadIdx.x == 0) most = 0;
        __syncthreads();
    }
    uint8_t* to[PLANES];
#pragma unroll
    for (int p = 0; p < PLANES; p++) to[p] = codes + at.row * PLANES * x.width + place(x, p, at.col);
    uint2 kept[PLANES][4];
    for_tile_rows(x, at, rows, [&](int i, const Values(&v)[PLANES], bool live) {
#pragma unroll
        for (int p = 0; p < PLANES; p++) {
            if (delayed) {
                float top = 0;
                for (int j = 0; j < CHUNK; j++) top = larger(top, v[p][j]);
                // Outside there may be codes already, where they are written over x.
                const uint32_t row_top = __reduce_max_sync(0xFFFFFFFFu, live ? magnitude(top) : 0);
                if (threadIdx.x % 32 == 0) atomicMax(&most, row_top);
            }
            kept[p][i % 4] = encode(E5M2, v[p], inverse);
            if (live && codes) put(to[p] + rows_of(i, PLANES * x.width), kept[p][i % 4]);
            if (TRANSPOSED && i % 4 == 3) tiles[p].write(at, i / 4, kept[p]);
        }
    });
    if (TRANSPOSED) flush(tiles, rows, x.width, transposed, [&](int p, int64_t col) { return place(x, p, col); });
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) slot->scale = scale;  // last, for no load of x is moved above a store
    if (!delayed) return;
    __syncthreads();
    if (threadIdx.x == 0) raise(&slot->amax, most);
}

// Where an element finds the scale that it shares with the others of its row, vector or square, as its product wants them (coat.cuh, Operand).
struct ScaleGrid {
    float* scales;               // null: this way is not wanted
    int row_shift, col_shift;    // log2 of a block's sides
    int64_t down, across;        // from one block's scale to the next one's
    __device__ float* at(int64_t row, int64_t col) const { return scales + (row >> row_shift) * down + (col >> col_shift) * across; }
};

// What a block's threads each have of their eight columns becomes one number a column, in the order of the threads' rows: take(column, number).
template <class Source, class T, class Fold, class Take>
__device__ void fold_columns(const Source& x, const TilePlace& at, const T (&mine)[Source::PLANES][CHUNK], T (&columns)[ACROSS][TILE + 1], Fold fold,
                             Take take) {
#pragma unroll
    for (int p = 0; p < Source::PLANES; p++) {
        __syncthreads();
#pragma unroll
        for (int j = 0; j < CHUNK; j++) columns[at.down][at.across * CHUNK + j] = mine[p][j];
        __syncthreads();
        const int64_t col = int64_t(blockIdx.x) * TILE + threadIdx.x;
        if (threadIdx.x >= TILE || col >= x.width) continue;
        T all = 0;
        for (int i = 0; i < ACROSS; i++) all = fold(all, columns[i][threadIdx.x]);
        take(place(x, p, col), all);
    }
}

// Half a warp's lanes, which hold neighbouring columns, raise the slots that they are each given: mostly one and the same.
__device__ void raise_by_half_warp(float* slot, uint32_t top, bool live) {
    const uint32_t half = 0xFFFFu << (threadIdx.x & 16);
    const unsigned long long mine = reinterpret_cast<unsigned long long>(slot), first = __shfl_sync(half, mine, 0, 16);
    if (__all_sync(half, !live || mine == first)) {  // where the first is not live, none is
        top = __reduce_max_sync(half, live ? top : 0);
        live = live && threadIdx.x % 16 == 0;
    }
    if (live) raise(slot, top);
}

// Pass one where scales are of blocks: their amaxes, in the places of their scales. For the transpose a tile has 128 rows of its columns, a thread 8.
template <class Source>
__global__ void __launch_bounds__(TILE_THREADS, 2) block_amaxes_kernel(Source x, int64_t rows, ScaleGrid lying, ScaleGrid turned) {
    constexpr int PLANES = Source::PLANES;
    __shared__ uint32_t columns[ACROSS][TILE + 1];
    const TilePlace at;
    uint32_t tops[PLANES][CHUNK] = {};
    for_tile_rows(x, at, rows, [&](int i, const Values(&v)[PLANES], bool live) {
#pragma unroll
        for (int p = 0; p < PLANES; p++) {
            uint32_t top = 0;
#pragma unroll
            for (int j = 0; j < CHUNK; j++) {
                const uint32_t bits = live ? magnitude(v[p][j]) : 0;
                top = max(top, bits);
                tops[p][j] = max(tops[p][j], bits);
            }
            if (lying.scales) raise_by_half_warp(lying.at(at.row + i, place(x, p, at.col)), top, live);
        }
    });
    if (!turned.scales) return;
    fold_columns(x, at, tops, columns, [](uint32_t a, uint32_t b) { return max(a, b); },
                 [&](int64_t col, uint32_t top) { raise(turned.at(int64_t(blockIdx.y) * TILE, col), top); });
}

// Amaxes become scales where they lie; a block that has a number that is not finite gets NaN, so that no code hides it.
__global__ void block_scales_kernel(float* scales, int64_t n, float fp8_max, TensorScale* slot) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const float amax = i < n ? scales[i] : 0.0f;
    if (i < n) scales[i] = amax < INFINITY ? scale_of(fp8_max, amax) : __uint_as_float(0x7FC00000u);
    if (slot) raise_by_warp(&slot->amax, magnitude(amax));
}

// Pass two: values again, and codes of either way with the scales of that way.
template <class Source>
__global__ void __launch_bounds__(TILE_THREADS, 2) quantize_blocks_kernel(Source x, int64_t rows, bool e5m2, ScaleGrid lying, ScaleGrid turned,
                                                                         uint8_t* codes, uint8_t* transposed) {
    constexpr int PLANES = Source::PLANES;
    __shared__ __align__(16) TransposeTile tiles[PLANES];
    const TilePlace at;
    Values inverse[PLANES] = {};  // of the transpose's scales
#pragma unroll
    for (int p = 0; p < PLANES; p++)
#pragma unroll
        for (int j = 0; j < CHUNK; j++)
            if (transposed && at.col < x.width) inverse[p][j] = __frcp_rn(*turned.at(int64_t(blockIdx.y) * TILE, place(x, p, at.col) + j));
    uint2 kept[PLANES][4];
    for_tile_rows(x, at, rows, [&](int i, const Values(&v)[PLANES], bool live) {
#pragma unroll
        for (int p = 0; p < PLANES; p++) {
            const int64_t row = at.row + i, col = place(x, p, at.col);
            if (codes && live) put(codes + row * PLANES * x.width + col, encode(e5m2, v[p], __frcp_rn(*lying.at(row, col))));
            if (!transposed) continue;
            Values scaled;
#pragma unroll
            for (int j = 0; j < CHUNK; j++) scaled[j] = __fmul_rn(v[p][j], inverse[p][j]);
            kept[p][i % 4] = encode(e5m2, scaled, 1.0f);
            if (i % 4 == 3) tiles[p].write(at, i / 4, kept[p]);
        }
    });
    if (transposed) flush(tiles, rows, x.width, transposed, [&](int p, int64_t col) { return place(x, p, col); });
}

__global__ void __launch_bounds__(TILE_THREADS) transpose_kernel(const uint8_t* codes, int64_t rows, int64_t cols, uint8_t* transposed) {
    __shared__ __align__(16) TransposeTile tiles[1];
    const TilePlace at;
    uint2 kept[2][4] = {};
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        if (at.col < cols && at.row + i < rows) kept[i / 4][i % 4] = *reinterpret_cast<const uint2*>(codes + (at.row + i) * cols + at.col);
#pragma unroll
    for (int h = 0; h < 2; h++) tiles[0].write(at, h, kept[h]);
    flush(tiles, rows, cols, transposed, [](int, int64_t col) { return col; });
}

// Values rounded to the compute dtype, or in groups.
template <class Source, class Held>
__global__ void __launch_bounds__(TILE_THREADS, 2) write_kernel(Source x, int64_t rows, Held out) {
    const TilePlace at;
    for_tile_rows(x, at, rows, [&](int i, Values(&v)[Source::PLANES], bool live) {
#pragma unroll
        for (int p = 0; p < Source::PLANES; p++) out.store((at.row + i) * Source::PLANES * x.width + place(x, p, at.col), v[p], live);
    });
}

// u in groups, and the amax of the activation of what they hold, as long as both halves are at hand.
template <class Source>
__global__ void __launch_bounds__(TILE_THREADS, TILE_BLOCKS) quantize_up_kernel(Source u, int64_t rows, Grouped up, TensorScale* slot) {
    constexpr int PLANES = Source::PLANES;
    const TilePlace at;
    Grouped to[PLANES];
#pragma unroll
    for (int p = 0; p < PLANES; p++) to[p] = up.from((at.row * PLANES + p) * u.width + at.col);
    float top = 0;
    for_tile_rows(u, at, rows, [&](int i, Values(&v)[PLANES], bool live) {
#pragma unroll
        for (int p = 0; p < PLANES; p++) to[p].store(rows_of(i, PLANES * u.width), v[p], live);
#pragma unroll
        for (int j = 0; j < CHUNK; j++) top = larger(top, activated<PLANES == 2>(v[0][j], v[PLANES - 1][j]));
    });
    raise_by_tile(&slot->amax, at.col < u.width ? magnitude(top) : 0);  // outside, two lanes that hold no group have rounded with a wrong scale
}

// What one thread has counted, added up by warps first: the totals are a single address for the whole GPU. All lanes must call.
struct Counts {
    double signal = 0, noise = 0;
    unsigned elements = 0, saturated = 0, flushed = 0;

    __device__ void add(float value, float back) {
        const double error = double(value) - double(back);
        signal += double(value) * value;
        noise += error * error;
        elements++;
    }
    __device__ void add_to(QuantStats* stats) const {
        double sums[2] = {signal, noise};
        unsigned counts[3] = {elements, saturated, flushed};
        for (int lanes = 16; lanes > 0; lanes /= 2)
            for (double& sum : sums) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
        for (unsigned& n : counts) n = __reduce_add_sync(0xFFFFFFFFu, n);
        if ((threadIdx.y * blockDim.x + threadIdx.x) % 32 != 0) return;
        atomicAdd(&stats->signal, sums[0]);
        atomicAdd(&stats->noise, sums[1]);
        int64_t* const totals[3] = {&stats->elements, &stats->saturated, &stats->flushed};
        for (int i = 0; i < 3; i++) atomicAdd(reinterpret_cast<unsigned long long*>(totals[i]), counts[i]);
    }
};

// What scales are to be: a tensor's, just in time or from before; those of blocks; or, where neither is given, each group's own.
struct Scales {
    const TensorScale* slot;
    ScaleGrid blocks;

    __device__ bool of_groups() const { return !slot && !blocks.scales; }
    __device__ float at(const Fp8& format, int64_t row, int64_t col) const {
        if (blocks.scales) return *blocks.at(row, col);
        return slot->delayed > 0 ? slot->delayed : scale_of(format.max, slot->amax);
    }
};
constexpr Scales OF_GROUPS{};

// What quantizing does to a tensor: a kernel of its own, so that training pays nothing for the report.
template <class Source>
__global__ void __launch_bounds__(TILE_THREADS) measure_kernel(Source x, int64_t rows, Scales scales, Fp8 format, QuantStats* stats) {
    const TilePlace at;
    Counts counts;
    for_tile_rows(x, at, rows, [&](int i, const Values(&v)[Source::PLANES], bool live) {
        for (int p = 0; p < Source::PLANES; p++) {
            const int64_t col = place(x, p, at.col);
            const float group = scales.of_groups() ? Grouped::group_scale(v[p]) : 0.0f;  // here, where both of its lanes are
            for (int j = 0; live && j < CHUNK; j++) {
                const float scale = scales.of_groups() ? group : scales.at(format, at.row + i, col + j);
                const float limit = format.max * scale * (1 + (format.e5m2 ? 0x1p-4f : 0x1p-5f));  // a little below half a step beyond
                const float back = decode2(format.e5m2, encode2(format.e5m2, v[p][j] * __frcp_rn(scale), 0)).x * scale;
                counts.add(v[p][j], back);
                counts.saturated += fabsf(v[p][j]) > limit;
                counts.flushed += v[p][j] != 0 && back == 0;
            }
        }
    });
    counts.add_to(stats);
}

template <class Source>
void measure(const Source& x, int64_t rows, const Scales& scales, Format format, QuantStats* stats, cudaStream_t s) {
    if (!stats || !is_fp8(format) || rows == 0) return;
    measure_kernel<<<tile_grid(rows, x.width), TILE_THREADS, 0, s>>>(x, rows, scales, fp8(format), stats);
    CHECK_LAUNCH("measure");
}

constexpr int COLUMN_BLOCKS = 3;  // a multiprocessor: the sums take registers beside what a tile's rows take

// Column sums in two stages. One: every COLUMN_PARTIALS-th tile of 128 columns; with the amax, as long as the numbers are at hand. Two: the
// partial sums, in order.
template <class Source>
__global__ void __launch_bounds__(TILE_THREADS, COLUMN_BLOCKS)
    column_sums_kernel(Source x, int64_t rows, bool round_to_bf16, float* partials, TensorScale* slot) {
    constexpr int PLANES = Source::PLANES;
    __shared__ float sums[ACROSS][TILE + 1];
    const TilePlace at;
    Values sum[PLANES] = {};
    float top = 0;
    for (int64_t tile = blockIdx.y; tile * TILE < rows; tile += COLUMN_PARTIALS)
        for_tile_rows(x, TilePlace(tile), rows, [&](int, const Values(&v)[PLANES], bool live) {
#pragma unroll
            for (int p = 0; p < PLANES; p++)
#pragma unroll
                for (int j = 0; j < CHUNK; j++) {
                    if (live) sum[p][j] += round_to_bf16 ? bf16_nearest(v[p][j]) : v[p][j];
                    top = larger(top, v[p][j]);
                }
        });
    if (slot) raise_by_tile(&slot->amax, magnitude(top));
    fold_columns(x, at, sum, sums, [](float a, float b) { return a + b; },
                 [&](int64_t col, float total) { partials[int64_t(blockIdx.y) * PLANES * x.width + col] = total; });
}

constexpr int REDUCE_ROWS = 16;
template <class T>
__global__ void __launch_bounds__(32 * REDUCE_ROWS) reduce_partials_kernel(const float* partials, int64_t n, int64_t cols, T* gradient) {
    __shared__ float sums[REDUCE_ROWS][32];
    const int64_t col = int64_t(blockIdx.x) * 32 + threadIdx.x;
    float sum = 0;
    if (col < cols)
#pragma unroll 8
        for (int64_t i = threadIdx.y; i < n; i += REDUCE_ROWS) sum += partials[i * cols + col];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || col >= cols) return;
    float total = 0;
    for (int i = 0; i < REDUCE_ROWS; i++) total += sums[i][threadIdx.x];
    gradient[col] = static_cast<T>(static_cast<float>(gradient[col]) + total);
}

void reduce_partials(const float* partials, int64_t n, const View& gradient, cudaStream_t s) {
    const int64_t cols = gradient.rows * gradient.cols;
    const dim3 block(32, REDUCE_ROWS);
    if (gradient.quant.format == Format::F32)
        reduce_partials_kernel<<<blocks(cols, 32), block, 0, s>>>(partials, n, cols, static_cast<float*>(gradient.codes));
    else
        reduce_partials_kernel<<<blocks(cols, 32), block, 0, s>>>(partials, n, cols, static_cast<bf16*>(gradient.codes));
    CHECK_LAUNCH("reduce_partials");
}

// ---------------------------------------------------------------------------------------------------------------------
// From what a launcher is told to the types of a kernel

template <class T>
Plain<T> plain(const void* p) {
    return {static_cast<T*>(const_cast<void*>(p))};
}
Grouped grouped(const View& v) { return {static_cast<uint8_t*>(v.codes), static_cast<uint16_t*>(v.scales)}; }

// Calls f with the Held type of a view: the compute dtype or FP8 groups.
template <class F>
void with_held(const View& v, F f) {
    require(v.cols % 16 == 0 && (!in_groups(v.quant) || v.cols % GROUP == 0), "columns are not a multiple of 16, or of a group");
    if (in_groups(v.quant)) return f(grouped(v));
    require(!v.quant.fp8(), "this input cannot be FP8 other than E4M3 in groups with BF16 scales");
    if (v.quant.format == Format::F32) return f(plain<float>(v.codes));
    f(plain<bf16>(v.codes));
}

template <class F>
void with_stream(const View& v, F f) {
    require(!v.quant.fp8() && v.cols % 8 == 0, "a stream tensor is F32 or BF16 and has a multiple of 8 columns");
    if (v.quant.format == Format::F32) return f(plain<float>(v.codes));
    f(plain<bf16>(v.codes));
}

template <bool GATED, class F>
void with_activation(const Lazy& x, F f) {
    with_held(x.a, [&](auto up) {
        using Held = decltype(up);
        const int64_t width = x.a.cols / (GATED ? 2 : 1);
        if (x.rule == Rule::Activation) return f(ActivationSource<Held, GATED>{up, width});
        f(ActivationBackwardSource<Held, GATED>{up, plain<typename Held::Stream>(x.b.codes), width});
    });
}

template <class Held>
NormSource<Held> norm_source(const Norm& n, Held in) {
    using T = typename Held::Stream;
    return {in, {plain<T>(n.weight), plain<T>(n.bias)}, n.stats, n.in.cols};
}

template <class F>
void with_source(const Lazy& x, F f) {
    switch (x.rule) {
        case Rule::Stored:
            if (in_groups(x.a.quant)) return f(StoredSource<Grouped>{grouped(x.a), x.cols});
            return with_stream(x.a, [&](auto held) { f(StoredSource<decltype(held)>{held, x.cols}); });
        case Rule::Norm: return with_held(x.norm.in, [&](auto held) { f(norm_source(x.norm, held)); });
        case Rule::RopeBackward:
            return with_stream(x.a, [&](auto held) {
                using T = typename decltype(held)::Stream;
                if (x.rope.HS % 32 == 0 && x.cols % x.rope.HS == 0 && x.rope.T >= ROWS)
                    return f(RopePairSource<T>{held, x.rope, static_cast<int>(x.rope.HS) / 2, x.cols / 2});
                f(RopeBackwardSource<T>{held, x.rope, x.cols});
            });
        default: return x.gated ? with_activation<true>(x, f) : with_activation<false>(x, f);
    }
}

template <class Source>
void quantize_per_tensor(const Source& x, int64_t rows, const Operand& out, QuantStats* stats, cudaStream_t s) {
    require(out.view.scales, "a per-tensor FP8 output needs its TensorScale");
    measure(x, rows, {tensor_scale(out.view), {}}, out.view.quant.format, stats, s);
    const bool e5m2 = out.view.quant.format == Format::E5M2;
    const auto kernel = out.transposed ? (e5m2 ? quantize_kernel<Source, true, true> : quantize_kernel<Source, false, true>)
                                       : (e5m2 ? quantize_kernel<Source, true, false> : quantize_kernel<Source, false, false>);
    kernel<<<tile_grid(rows, x.width), TILE_THREADS, 0, s>>>(x, rows, tensor_scale(out.view), static_cast<uint8_t*>(out.view.codes),
                                                             static_cast<uint8_t*>(out.transposed));
    CHECK_LAUNCH("quantize");
}

// Where the scales of x (rows, cols) lie, or of its transpose, by the row and column of an element of x.
ScaleGrid scale_grid(const Granularity& g, void* scales, int64_t rows, int64_t cols, bool transposed) {
    constexpr int SQUARE = 7, ALL = 62;
    static_assert(PER_1x128.cols == 1 << SQUARE && PER_128x128.rows == 1 << SQUARE && PER_128x128.cols == 1 << SQUARE);
    float* const p = static_cast<float*>(scales);
    const int64_t wide = transposed ? cols : rows, deep = transposed ? rows : cols;
    const int deep_shift = g == PER_ROW ? ALL : SQUARE, wide_shift = g == PER_128x128 ? SQUARE : 0;
    const int64_t along_deep = g == PER_ROW ? 0 : g == PER_1x128 ? wide : 1;
    const int64_t along_wide = g == PER_128x128 ? round_up(ceil_div(deep, 1 << SQUARE), 4) : 1;
    if (transposed) return {p, deep_shift, wide_shift, along_deep, along_wide};
    return {p, wide_shift, deep_shift, along_wide, along_deep};
}

template <class Source>
void quantize_blocks(const Source& x, int64_t rows, const Operand& out, QuantStats* stats, cudaStream_t s) {
    const Quant& q = out.view.quant;
    const int64_t all_rows = out.view.rows, cols = out.view.cols;
    require(q.granularity == PER_ROW || q.granularity == PER_1x128 || q.granularity == PER_128x128, "no kernel scales by such blocks");
    require(q.scale == Format::F32, "an operand's scales are FP32");
    const ScaleGrid lying = scale_grid(q.granularity, out.view.codes ? out.view.scales : nullptr, all_rows, cols, false);
    const ScaleGrid turned = scale_grid(q.granularity, out.transposed ? out.transposed_scales : nullptr, all_rows, cols, true);
    require(!out.view.codes == !lying.scales && !out.transposed == !turned.scales, "codes and their scales come together");
    const int64_t counts[2] = {q.operand_scales(all_rows, cols), q.operand_scales(cols, all_rows)};
    const ScaleGrid* const ways[2] = {&lying, &turned};
    for (int way : {0, 1})
        if (ways[way]->scales) check(cudaMemsetAsync(ways[way]->scales, 0, counts[way] * sizeof(float), s), "Clearing scales failed");
    const dim3 grid = tile_grid(rows, x.width);
    block_amaxes_kernel<<<grid, TILE_THREADS, 0, s>>>(x, rows, lying, turned);
    CHECK_LAUNCH("block_amaxes");
    for (int way : {0, 1}) {
        if (!ways[way]->scales) continue;
        block_scales_kernel<<<blocks(counts[way], 256), 256, 0, s>>>(ways[way]->scales, counts[way], info(q.format).max, out.slot);
        CHECK_LAUNCH("block_scales");
        const bool again = way == 1 && lying.scales && q.granularity.symmetric();
        if (!again) measure(x, rows, {nullptr, *ways[way]}, q.format, stats, s);
    }
    quantize_blocks_kernel<<<grid, TILE_THREADS, 0, s>>>(x, rows, q.format == Format::E5M2, lying, turned, static_cast<uint8_t*>(out.view.codes),
                                                         static_cast<uint8_t*>(out.transposed));
    CHECK_LAUNCH("quantize_blocks");
}

template <class Source, class Held>
void write(const Source& x, int64_t rows, const Held& out, cudaStream_t s) {
    write_kernel<<<tile_grid(rows, x.width), TILE_THREADS, 0, s>>>(x, rows, out);
    CHECK_LAUNCH("write");
}

}  // namespace

Lazy stored(const View& x) { return {Rule::Stored, x.rows, x.cols, x}; }
Lazy norm(const Norm& n) {
    Lazy c{Rule::Norm, n.in.rows, n.in.cols};
    c.norm = n;
    return c;
}
Lazy activation(bool gated, const View& up) { return {Rule::Activation, up.rows, up.cols / (gated ? 2 : 1), up, {}, gated}; }
Lazy activation_backward(bool gated, const View& up, const View& dh) {
    require(dh.rows == up.rows && dh.cols * (gated ? 2 : 1) == up.cols, "dh and up differ in shape");
    require(dh.quant.format == (up.quant.fp8() ? Format::BF16 : up.quant.format), "dh is not in the compute dtype of up");
    return {Rule::ActivationBackward, up.rows, up.cols, up, dh, gated};
}
Lazy rope_backward(const Rope& r, const View& dqkv) {
    Lazy c{Rule::RopeBackward, dqkv.rows, dqkv.cols, dqkv};
    c.rope = r;
    return c;
}

void amax(const Lazy& x, TensorScale* slot, cudaStream_t s) {
    if (x.rows == 0) return;
    with_source(x, [&](auto source) {
        amax_kernel<<<tile_grid(x.rows, source.width), TILE_THREADS, 0, s>>>(source, x.rows, slot);
        CHECK_LAUNCH("amax");
    });
}

void quantize(const Lazy& x, const Operand& out, QuantStats* stats, cudaStream_t s) {
    require(x.cols == out.view.cols && (x.rows == out.view.rows || (x.rows < out.view.rows && !out.transposed)),
         "a tensor and its quantized form differ in shape");
    if (x.rows == 0) return;
    const Quant& q = out.view.quant;
    with_source(x, [&](auto source) {
        if (in_groups(q)) {
            measure(source, x.rows, OF_GROUPS, q.format, stats, s);
            write(source, x.rows, grouped(out.view), s);
        } else if (q.fp8() && q.granularity == PER_TENSOR) {
            quantize_per_tensor(source, x.rows, out, stats, s);
        } else if (q.fp8()) {
            quantize_blocks(source, x.rows, out, stats, s);
        } else {
            with_stream(out.view, [&](auto held) { write(source, x.rows, held, s); });
        }
    });
}

void quantize_and_dequantize(const View& x, const View& groups, QuantStats* stats, cudaStream_t s) {
    require(in_groups(groups.quant) && x.quant.format == Format::BF16, "quantize_and_dequantize is from BF16 to groups");
    require(x.rows == groups.rows && x.cols == groups.cols, "a tensor and its quantized form differ in shape");
    if (x.rows == 0) return;
    const StoredSource<Plain<bf16>> source{plain<bf16>(x.codes), x.cols};
    measure(source, x.rows, OF_GROUPS, groups.quant.format, stats, s);
    write(source, x.rows, Through{grouped(groups), plain<bf16>(x.codes)}, s);
}

void quantize_gate_up(bool gated, const View& u, const View& up, TensorScale* h_slot, QuantStats* stats, cudaStream_t s) {
    require(in_groups(up.quant) && u.quant.format == Format::BF16, "quantize_gate_up is from BF16 to groups");
    require(u.rows == up.rows && u.cols == up.cols, "u and up differ in shape");
    if (u.rows == 0) return;
    if (!h_slot) return quantize(stored(u), {up}, stats, s);
    auto launch = [&](auto source) {
        measure(source, u.rows, OF_GROUPS, up.quant.format, stats, s);
        quantize_up_kernel<<<tile_grid(u.rows, source.width), TILE_THREADS, 0, s>>>(source, u.rows, grouped(up), h_slot);
        CHECK_LAUNCH("quantize_gate_up");
    };
    if (gated) launch(HalvesSource<bf16, 2>{plain<bf16>(u.codes), u.cols / 2});
    else launch(HalvesSource<bf16, 1>{plain<bf16>(u.codes), u.cols});
}

void column_sums(const Lazy& x, Format rounding, const View& gradient, float* workspace, TensorScale* slot, cudaStream_t s) {
    require(gradient.rows * gradient.cols == x.cols, "a bias gradient has another length than the rows that it sums");
    with_source(x, [&](auto source) {
        const dim3 grid(blocks(source.width, TILE), COLUMN_PARTIALS);
        column_sums_kernel<<<grid, TILE_THREADS, 0, s>>>(source, x.rows, rounding == Format::BF16, workspace, slot);
        CHECK_LAUNCH("column_sums");
    });
    reduce_partials(workspace, COLUMN_PARTIALS, gradient, s);
}

void transpose_fp8(const View& x, void* transposed, cudaStream_t s) {
    require(x.quant.fp8() && x.cols % 16 == 0, "only FP8 codes with a multiple of 16 columns are transposed");
    if (x.rows == 0) return;
    transpose_kernel<<<tile_grid(x.rows, x.cols), TILE_THREADS, 0, s>>>(static_cast<const uint8_t*>(x.codes), x.rows, x.cols,
                                                                        static_cast<uint8_t*>(transposed));
    CHECK_LAUNCH("transpose_fp8");
}

void dequantize(const View& x, const View& out, cudaStream_t s) {
    require(x.rows == out.rows && x.cols == out.cols, "a tensor and its dequantized form differ in shape");
    if (x.rows == 0) return;
    with_stream(out, [&](auto to) {
        if (x.quant.fp8() && x.quant.granularity == PER_TENSOR) {
            const WholeFp8 from{static_cast<const uint8_t*>(x.codes), tensor_scale(x), x.quant.format == Format::E5M2};
            return write(StoredSource<WholeFp8>{from, x.cols}, x.rows, to, s);
        }
        with_held(x, [&](auto from) { write(StoredSource<decltype(from)>{from, x.cols}, x.rows, to, s); });
    });
}

namespace {

// A block has one operand's history. It moves up by one from the end on, so that what is read has not been written yet.
constexpr int HISTORY_THREADS = 256;
__global__ void __launch_bounds__(HISTORY_THREADS) end_delayed_step_kernel(TensorScale* slots, float* histories, int length, int margin,
                                                                           float fp8_max, const GradientState* state, uint32_t* without) {
    __shared__ uint32_t most;
    if (state->skip) return;
    TensorScale& slot = slots[blockIdx.x];
    float* history = histories + int64_t(blockIdx.x) * length;
    const float amax = slot.amax;
    if (threadIdx.x == 0) most = 0;
    uint32_t top = 0;
    for (int first = (length - 1) / HISTORY_THREADS * HISTORY_THREADS; first >= 0; first -= HISTORY_THREADS) {
        const int i = first + threadIdx.x;
        const float value = i >= length ? 0.0f : i == 0 ? amax : history[i - 1];
        __syncthreads();
        if (i < length) history[i] = value;
        top = max(top, magnitude(value));
    }
    top = __reduce_max_sync(0xFFFFFFFFu, top);
    if (threadIdx.x % 32 == 0) atomicMax(&most, top);
    __syncthreads();
    const float wanted = ldexpf(__uint_as_float(most), margin);
    if (threadIdx.x != 0) return;
    if (wanted > 0 && wanted < INFINITY) slot.delayed = scale_of(fp8_max, wanted);
    if (!(slot.delayed > 0)) atomicAdd(without, 1u);
}

}  // namespace

void end_delayed_step(TensorScale* slots, int64_t n, float* histories, int length, int margin, Format fp8, const GradientState* state,
                      uint32_t* without, cudaStream_t s) {
    if (n == 0) return;
    end_delayed_step_kernel<<<static_cast<unsigned>(n), HISTORY_THREADS, 0, s>>>(slots, histories, length, margin, info(fp8).max, state,
                                                                               without);
    CHECK_LAUNCH("end_delayed_step");
}

// =====================================================================================================================
// Row kernels: a team of warps holds a row, up to ROW_CHUNKS chunks a thread; a block has one team or several.

namespace {

constexpr int ROW_CHUNKS = 4, ROW_WARPS = 16;  // of a block, at most

dim3 row_block(int64_t C) {
    const int64_t warps = ceil_div(C, 32 * CHUNK * ROW_CHUNKS);
    require(C % 16 == 0 && warps <= ROW_WARPS, "a hidden size is not a multiple of 16 or is above 16384");
    return {static_cast<unsigned>(32 * warps), static_cast<unsigned>(std::max<int64_t>(1, 4 / warps))};
}

__device__ int64_t row_column(int chunk) { return (int64_t(chunk) * blockDim.x + threadIdx.x) * CHUNK; }

// Sums over the team in a fixed order; every thread gets the same bits. All threads of the block call it. Two calls in a row want different PLACEs:
// nobody is still reading a place when the next but one is written.
template <int PLACE, int K>
__device__ void team_sum(float (&x)[K]) {
    __shared__ float parts[K][ROW_WARPS];
#pragma unroll
    for (int k = 0; k < K; k++)
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) x[k] += __shfl_xor_sync(0xFFFFFFFFu, x[k], lanes);
    const int warps = blockDim.x / 32, first = threadIdx.y * warps;
    if (warps == 1) return;
    if (threadIdx.x % 32 == 0)
#pragma unroll
        for (int k = 0; k < K; k++) parts[k][first + threadIdx.x / 32] = x[k];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < K; k++) {
        x[k] = 0;
        for (int w = 0; w < warps; w++) x[k] += parts[k][first + w];
    }
}

__device__ float inverse_root(float squares, int64_t C, float eps) {
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(squares, static_cast<float>(C)), eps)));
}

// {mean, 1 / std} of a row ({0, 1 / rms}). Forward and backward call it with the same chunks in the same threads: the same bits.
__device__ float2 row_stats(const Values (&x)[ROW_CHUNKS], int64_t C, bool rms, float eps) {
    float sum[1] = {0};
    if (!rms) {
#pragma unroll
        for (int c = 0; c < ROW_CHUNKS; c++)
#pragma unroll
            for (int j = 0; j < CHUNK; j++) sum[0] += x[c][j];
        team_sum<0>(sum);
    }
    const float mean = __fdiv_rn(sum[0], static_cast<float>(C));
    float square[1] = {0};
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; c++)
#pragma unroll
        for (int j = 0; j < CHUNK; j++) {
            const float d = row_column(c) < C ? __fsub_rn(x[c][j], mean) : 0.0f;
            square[0] = __fmaf_rn(d, d, square[0]);
        }
    team_sum<1>(square);
    return {mean, inverse_root(square[0], C, eps)};
}

// The residual pair and what the next norm's two passes need: sum -> x_out, in, stats, amax of the norm's output.
template <class Source, class Held, bool WRITE>
__global__ void __launch_bounds__(32 * ROW_WARPS) row_kernel(Source sum, int64_t rows, Plain<typename Held::Stream> x_out, Held in,
                                                             Affine<typename Held::Stream> affine, float2* stats, bool rms, float eps,
                                                             TensorScale* slot) {
    const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y, C = sum.width;
    typename Source::Raw raw[ROW_CHUNKS] = {};
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; c++)
        if (row < rows && row_column(c) < C) raw[c] = sum.load(sum.start(row, row_column(c)), 0);
    Values v[ROW_CHUNKS] = {};
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; c++) {
        const int64_t col = row_column(c), i = row * C + col;
        const bool live = row < rows && col < C;
        Values whole[1] = {};
        if (live) sum.compute(raw[c], {}, 0, whole);
#pragma unroll
        for (int j = 0; j < CHUNK; j++) v[c][j] = whole[0][j];
        if (!WRITE) continue;
        if (x_out.data) x_out.store(i, whole[0], live);
        in.store(i, v[c], live);
    }
    const float2 st = row_stats(v, C, rms, eps);
    if (row < rows && threadIdx.x == 0) stats[row] = st;
    if (!slot) return;
    uint32_t top = 0;
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; c++) {
        if (row >= rows || row_column(c) >= C) continue;
        Values weight, bias;
        affine.load(row_column(c), weight, bias);
#pragma unroll
        for (int j = 0; j < CHUNK; j++) top = max(top, magnitude(normalized(v[c][j], st, weight[j], bias[j])));
    }
    raise_by_warp(&slot->amax, top);
}

template <bool WRITE, class Source, class Held>
void row(const Source& sum, const View& x_out, const Norm& n, Held in, TensorScale* slot, QuantStats* stats, cudaStream_t s) {
    using T = typename Held::Stream;
    if (n.in.rows == 0) return;
    if (WRITE) measure(sum, n.in.rows, OF_GROUPS, n.in.quant.format, stats, s);
    const dim3 block = row_block(n.in.cols);
    row_kernel<Source, Held, WRITE><<<blocks(n.in.rows, block.y), block, 0, s>>>(sum, n.in.rows, plain<T>(x_out.codes), in,
                                                                                {plain<T>(n.weight), plain<T>(n.bias)}, n.stats, n.rms, n.eps, slot);
    CHECK_LAUNCH("residual row");
}

// A thread's own columns of a parameter gradient, summed over the rows that its block has seen. In shared memory the
// halves of chunks lie apart, so that neighbouring threads access different banks; in global memory, side by side.
template <bool SHARED>
struct ColumnSums {
    float4* sums;
    int64_t apart;  // from the first half of a chunk to the second
    __device__ ColumnSums(float* sums, int64_t C)
        : sums(reinterpret_cast<float4*>(sums)), apart(SHARED ? C / CHUNK : 1) {}
    __device__ float4* at(int64_t col) const { return sums + col / CHUNK * (SHARED ? 1 : 2); }
    __device__ void zero(int64_t col) const { at(col)[0] = at(col)[apart] = float4{}; }
    __device__ void add(int64_t col, const Values& v) const {
        float4 &a = at(col)[0], &b = at(col)[apart];
        a = {a.x + v[0], a.y + v[1], a.z + v[2], a.w + v[3]};
        b = {b.x + v[4], b.y + v[5], b.z + v[6], b.w + v[7]};
    }
    __device__ void read(int64_t col, Values& v) const {
        const float4 a = at(col)[0], b = at(col)[apart];
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    }
};

// Partial sums of one block: its teams' sums, in order, to row blockIdx.x of (blocks, C).
__device__ void write_partials(const float* sums, int64_t C, Plain<float> partials) {
    for (int64_t col = (threadIdx.y * blockDim.x + threadIdx.x) * CHUNK; col < C; col += blockDim.x * blockDim.y * CHUNK) {
        Values total = {}, one;
        for (int team = 0; team < blockDim.y; team++) {
            ColumnSums<true>(const_cast<float*>(sums) + team * C, C).read(col, one);
#pragma unroll
            for (int j = 0; j < CHUNK; j++) total[j] += one[j];
        }
        partials.store(blockIdx.x * C + col, total, true);
    }
}

// xhat = (x - mean) / std;  dx = (dy weight - mean(dy weight) - xhat mean(dy weight xhat)) / std; RMSNorm has no means of x and of dy weight, so that
// its two sums need only one turn: mean(dy weight xhat) = mean(dy weight x) / rms. dweight += dy xhat, dbias += dy: by a block in shared memory, then
// through partials. Where shared memory is too small, a block is one team and adds to its row of the partials.
template <class Held, bool RMS, bool SHARED>
__global__ void __launch_bounds__(32 * ROW_WARPS) norm_backward_kernel(Held in, Plain<typename Held::Stream> weight, Plain<typename Held::Stream> dy,
                                                                       Plain<typename Held::Stream> g_in, Plain<typename Held::Stream> g_out,
                                                                       int64_t rows, int64_t C, float eps, float2* stats, TensorScale* slot,
                                                                       float* partials) {
    using T = typename Held::Stream;
    constexpr bool EARLY = sizeof(T) < 4;  // FP32 rows leave no registers for g
    extern __shared__ __align__(16) float sums[];  // (RMS ? 1 : 2, teams, C)
    const int64_t row_of_dgain = SHARED ? threadIdx.y : blockIdx.x, teams = SHARED ? blockDim.y : gridDim.x;
    float* const all = SHARED ? sums : partials;
    const ColumnSums<SHARED> dweight(all + row_of_dgain * C, C), dbias(all + (teams + row_of_dgain) * C, C);
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; c++) {
        if (row_column(c) >= C) continue;
        dweight.zero(row_column(c));
        if (!RMS) dbias.zero(row_column(c));
    }
    const float per_column = __fdiv_rn(1.0f, static_cast<float>(C));
    float top = 0;
    int turn = 0;
    for (int64_t first = int64_t(blockIdx.x) * blockDim.y; first < rows; first += int64_t(gridDim.x) * blockDim.y, turn ^= 1) {
        const int64_t row = first + threadIdx.y;
        const uint32_t apart = blockDim.x * CHUNK;  // columns between a thread's chunks
        const int64_t at = row * C + threadIdx.x * CHUNK;
        const Held row_x = in.from(at);
        const Plain<T> row_dy = dy.from(at), row_g = g_in.from(at);
        auto live = [&](int c) { return row < rows && row_column(c) < C; };
        typename Held::Raw raw_x[ROW_CHUNKS] = {};
        typename Plain<T>::Raw raw_dy[ROW_CHUNKS] = {}, raw_g[ROW_CHUNKS] = {};
#pragma unroll
        for (int c = 0; c < ROW_CHUNKS; c++) {
            if (!live(c)) continue;
            raw_x[c] = row_x.load(c * apart);
            raw_dy[c] = row_dy.load(c * apart);
            if (EARLY && g_in.data) raw_g[c] = row_g.load(c * apart);
        }
        Values x[ROW_CHUNKS];
#pragma unroll
        for (int c = 0; c < ROW_CHUNKS; c++) in.values(raw_x[c], x[c]);
        float2 st{};
        if (!RMS) st = row_stats(x, C, false, eps);
        float sum[2] = {0, 0};  // RMS: of x^2 and of dy weight x; else of dy weight and of dy weight xhat
#pragma unroll
        for (int c = 0; c < ROW_CHUNKS; c++) {
            if (!live(c)) continue;
            Values d, w;
            dy.values(raw_dy[c], d);
            weight.values(weight.load(row_column(c)), w);
#pragma unroll
            for (int j = 0; j < CHUNK; j++) {
                if (!RMS) x[c][j] = (x[c][j] - st.x) * st.y;
                const float dw = d[j] * w[j];
                sum[0] = RMS ? __fmaf_rn(x[c][j], x[c][j], sum[0]) : sum[0] + dw;
                sum[1] += dw * x[c][j];
            }
        }
        if (RMS && turn) team_sum<1>(sum);  // RMSNorm's only sum of a row: two places in turn
        else team_sum<2>(sum);
        if (RMS) st = {0, inverse_root(sum[0], C, eps)};
        if (row < rows && threadIdx.x == 0) stats[row] = st;
        const float mean = RMS ? 0.0f : sum[0] * per_column, mean_xhat = sum[1] * per_column * (RMS ? st.y : 1.0f);
#pragma unroll
        for (int c = 0; c < ROW_CHUNKS; c++) {
            if (!live(c)) continue;
            Values d, w, g;
            dy.values(raw_dy[c], d);
            weight.values(weight.load(row_column(c)), w);
            if (!EARLY && g_in.data) raw_g[c] = row_g.load(c * apart);
            g_in.values(raw_g[c], g);
            if (!RMS) dbias.add(row_column(c), d);
#pragma unroll
            for (int j = 0; j < CHUNK; j++) {
                const float xhat = RMS ? x[c][j] * st.y : x[c][j], dw = d[j] * w[j];
                g[j] += st.y * ((RMS ? dw : dw - mean) - xhat * mean_xhat);
                d[j] *= xhat;
            }
            dweight.add(row_column(c), d);
            g_out.store(at + c * apart, g, true);
#pragma unroll
            for (int j = 0; j < CHUNK; j++) top = larger(top, g[j]);
        }
    }
    if (slot) raise_by_warp(&slot->amax, magnitude(top));
    if (!SHARED) return;
    __syncthreads();
    write_partials(sums, C, {partials});
    if (!RMS) write_partials(sums + blockDim.y * C, C, {partials + gridDim.x * C});
}

constexpr int NORM_BLOCKS_PER_SM = 4;
// Of the 99 KiB that a block has on every GPU with BF16; the rest is for sums over a row. Some GPUs have more, but the
// limit is the same for all, so that a test on any of them takes both paths.
constexpr size_t NORM_SHARED = 98 << 10;
int device_attribute(cudaDeviceAttr which) {
    int device = 0, n = 0;
    check(cudaGetDevice(&device), "Asking for the GPU failed");
    check(cudaDeviceGetAttribute(&n, which, device), "Asking for the GPU's properties failed");
    return n;
}
int multiprocessors() {
    static const int count = device_attribute(cudaDevAttrMultiProcessorCount);
    return count;
}
int shared_memory() {  // of a block, at most
    static const int bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    return bytes;
}

template <bool RMS, class Held>
void norm_backward_as(const Norm& n, Held in, const View& dy, const View& g_in, const View& g_out, TensorScale* g_slot, const View& dweight,
                      const View& dbias, float* workspace, cudaStream_t s) {
    using T = typename Held::Stream;
    const int64_t rows = n.in.rows, C = n.in.cols;
    const dim3 block = row_block(C);
    const unsigned grid = std::min(blocks(rows, block.y), static_cast<unsigned>(multiprocessors() * NORM_BLOCKS_PER_SM));
    const size_t sums = (RMS ? 1 : 2) * block.y * C * sizeof(float), shared = sums <= NORM_SHARED ? sums : 0;
    // RMSNorm's sums always fit.
    const auto kernel = shared ? norm_backward_kernel<Held, RMS, true> : norm_backward_kernel<Held, RMS, RMS>;
    if (shared > 40 << 10)
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)), "Shared memory for norm_backward");
    kernel<<<grid, block, shared, s>>>(in, plain<T>(n.weight), plain<T>(dy.codes), plain<T>(g_in.codes), plain<T>(g_out.codes), rows, C, n.eps,
                                       n.stats, g_slot, workspace);
    CHECK_LAUNCH("norm_backward");
    reduce_partials(workspace, grid, dweight, s);
    if (!RMS) reduce_partials(workspace + grid * C, grid, dbias, s);
}

}  // namespace

void residual_add(const View& x, const View& a, const View& x_out, const Norm& next, TensorScale* y_slot, QuantStats* stats, cudaStream_t s) {
    with_held(next.in, [&](auto in) {
        using T = typename decltype(in)::Stream;
        row<true>(SumSource<T>{plain<T>(x.codes), plain<T>(a.codes), x.cols}, x_out, next, in, y_slot, stats, s);
    });
}

void embedding_forward(const int32_t* tokens, const View& embedding, const View& positions, int64_t T, const View& x_out, const Norm& next,
                       TensorScale* y_slot, QuantStats* stats, cudaStream_t s) {
    with_held(next.in, [&](auto in) {
        using S = typename decltype(in)::Stream;
        const EmbeddingSource<S> sum{tokens, plain<S>(embedding.codes), plain<S>(positions.codes), T, embedding.cols};
        row<true>(sum, x_out, next, in, y_slot, stats, s);
    });
}

void norm_statistics(const Norm& n, TensorScale* y_slot, cudaStream_t s) {
    with_held(n.in, [&](auto in) { row<false>(StoredSource<decltype(in)>{in, n.in.cols}, View{}, n, in, y_slot, nullptr, s); });
}

size_t norm_backward_workspace(int64_t C) { return size_t(2) * multiprocessors() * NORM_BLOCKS_PER_SM * C * sizeof(float); }

void norm_backward(const Norm& n, const View& dy, const View& g_in, const View& g_out, TensorScale* g_slot, const View& dweight, const View& dbias,
                   float* workspace, cudaStream_t s) {
    if (n.in.rows == 0) return;
    with_held(n.in, [&](auto in) {
        if (n.rms)
            norm_backward_as<true>(n, in, dy, g_in, g_out, g_slot, dweight, dbias, workspace, s);
        else
            norm_backward_as<false>(n, in, dy, g_in, g_out, g_slot, dweight, dbias, workspace, s);
    });
}

// =====================================================================================================================
// The ends of the network

namespace {

__global__ void rope_table_kernel(int64_t n, int half, double theta, float2* table) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const double angle = static_cast<double>(i / half) * pow(theta, -static_cast<double>(i % half) / half);
    double sine, cosine;
    sincos(angle, &sine, &cosine);
    table[i] = {static_cast<float>(cosine), static_cast<float>(sine)};
}

// Four pairs (i, i + HS/2) a thread, in ROPE_HEADS heads: they turn by the same angles.
constexpr int ROPE_HEADS = 8, ROPE_THREADS = 256;
template <class T>
__global__ void __launch_bounds__(ROPE_THREADS) rope_kernel(T* qkv, Rope rope, uint32_t rows, int64_t cols) {
    using Four = decltype(load4(static_cast<const T*>(nullptr)));
    const uint32_t half = static_cast<uint32_t>(rope.HS) / 2, quads = half / 4, heads = static_cast<uint32_t>(rope.rotated_cols / rope.HS);
    const uint32_t i = blockIdx.x * ROPE_THREADS + threadIdx.x, row = i / quads, angle = i % quads * 4, first = blockIdx.y * ROPE_HEADS;
    if (row >= rows) return;
    T* p = qkv + row * cols + first * rope.HS + angle;
    Four raw[ROPE_HEADS][2] = {};
#pragma unroll
    for (int h = 0; h < ROPE_HEADS; h++)
        if (first + h < heads) raw[h][0] = load4(p + h * rope.HS), raw[h][1] = load4(p + h * rope.HS + half);
    const float2* table = rope.table + row % static_cast<uint32_t>(rope.T) * half + angle;
#pragma unroll
    for (int h = 0; h < ROPE_HEADS; h++) {
        if (first + h >= heads) return;
        const float4 x = values4(raw[h][0]), y = values4(raw[h][1]);
        store4(p + h * rope.HS, rotated(x, y, table, -1));
        store4(p + h * rope.HS + half, rotated(y, x, table, 1));
    }
}

__device__ float fast_exp(float x) { return fast_exp2(x * LOG2_E); }

// A maximum and the sum of exponentials beneath it, as softmax wants them.
struct Softmax {
    float top, sum;
    __device__ Softmax(float top = -INFINITY, float sum = 0) : top(top), sum(sum) {}
    __device__ void merge(const Softmax& o) {
        const float t = fmaxf(top, o.top);
        sum = sum * weight(top, t) + o.sum * weight(o.top, t);
        top = t;
    }
    static __device__ float weight(float from, float to) { return from == to ? 1.0f : fast_exp(from - to); }
};

constexpr int LOSS_THREADS = 512;
__device__ Softmax block_softmax(Softmax mine) {
    __shared__ float tops[LOSS_THREADS / 32], sums[LOSS_THREADS / 32];
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        Softmax other;
        other.top = __shfl_down_sync(0xFFFFFFFFu, mine.top, lanes);
        other.sum = __shfl_down_sync(0xFFFFFFFFu, mine.sum, lanes);
        mine.merge(other);
    }
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = mine.top, sums[threadIdx.x / 32] = mine.sum;
    __syncthreads();
    Softmax all;
    for (int w = 0; w < LOSS_THREADS / 32; w++) all.merge({tops[w], sums[w]});
    return all;
}

// A block a token. The second pass finds the row in shared memory (each thread what it has left there), a row too long for it (not KEPT) in L2.
template <class T, bool KEPT>
__global__ void __launch_bounds__(LOSS_THREADS, sizeof(T) < 4 ? 3 : 2)
    cross_entropy_kernel(Plain<T> logits, int64_t stride, int64_t V, const int32_t* targets, float scale, float* losses) {
    extern __shared__ __align__(16) unsigned char shared[];  // (stride) T
    typename Plain<T>::Raw* const kept = reinterpret_cast<typename Plain<T>::Raw*>(shared);
    const int64_t row = blockIdx.x, first = row * stride;
    const int32_t target = targets[row];
    const float correct = static_cast<float>(logits.data[first + target]);
    constexpr int STEP = LOSS_THREADS * CHUNK;
    const int live = static_cast<int>(V);
    constexpr int AT_ONCE = 4;
    auto hidden = [&](int col, Values& x, float with) {  // beyond the vocabulary
        if (col + CHUNK <= live) return;
#pragma unroll
        for (int j = 0; j < CHUNK; j++) x[j] = col + j < live ? x[j] : with;
    };
    Softmax mine;
    for (int begin = threadIdx.x * CHUNK; begin < live; begin += AT_ONCE * STEP) {
        typename Plain<T>::Raw raw[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (begin + i * STEP < live) raw[i] = logits.load(first + begin + i * STEP);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int col = begin + i * STEP;
            if (col >= live) break;
            if (KEPT) kept[col / CHUNK] = raw[i];
            Values x;
            logits.values(raw[i], x);
            hidden(col, x, -INFINITY);
            float top = x[0];
#pragma unroll
            for (int j = 1; j < CHUNK; j++) top = fmaxf(top, x[j]);
            if (top > mine.top) mine.merge({top, 0.0f});
            const float offset = -mine.top * LOG2_E;
#pragma unroll
            for (int j = 0; j < CHUNK; j++) mine.sum += fast_exp2(__fmaf_rn(x[j], LOG2_E, offset));
        }
    }
    const Softmax all = block_softmax(mine);
    const float lse = all.top + logf(all.sum), offset = -lse * LOG2_E;
    if (threadIdx.x == 0) losses[row] = lse - correct;
    if (scale == 0) return;
#pragma unroll 4
    for (int col = threadIdx.x * CHUNK; col < static_cast<int>(stride); col += STEP) {
        Values x = {};
        if (col < live) logits.values(KEPT ? kept[col / CHUNK] : logits.load(first + col), x);
#pragma unroll
        for (int j = 0; j < CHUNK; j++) x[j] = fast_exp2(__fmaf_rn(x[j], LOG2_E, offset)) * scale;
        if (target >= col && target < col + CHUNK) {
#pragma unroll
            for (int j = 0; j < CHUNK; j++) x[j] -= col + j == target ? scale : 0.0f;
        }
        hidden(col, x, 0.0f);
        logits.store(first + col, x, true);
    }
}

// Sum over a block's threads, the same order every time.
template <int THREADS>
__device__ double block_sum(double x) {
    __shared__ double parts[THREADS];
    parts[threadIdx.x] = x;
    for (int n = THREADS / 2; n > 0; n /= 2) {
        __syncthreads();
        if (threadIdx.x < n) parts[threadIdx.x] += parts[threadIdx.x + n];
    }
    __syncthreads();
    return parts[0];
}

constexpr int SUM_THREADS = 1024;
__global__ void __launch_bounds__(SUM_THREADS) loss_sum_kernel(const float* losses, int64_t n, double scale, double* total) {
    double sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += SUM_THREADS) sum += losses[i];
    sum = block_sum<SUM_THREADS>(sum);
    if (threadIdx.x == 0) *total += scale * sum;
}

// gradient row = round(row + sum), in either format
struct Gradient {
    void* data;
    bool f32;
};
template <class T>
__device__ void add_to(Plain<T> gradient, int64_t i, const Values& sum) {
    Values g;
    gradient.values(gradient.load(i), g);
#pragma unroll
    for (int j = 0; j < CHUNK; j++) g[j] += sum[j];
    gradient.store(i, g, true);
}
__device__ void add_to(const Gradient& gradient, int64_t i, const Values& sum) {
    if (gradient.f32) add_to(Plain<float>{static_cast<float*>(gradient.data)}, i, sum);
    else add_to(Plain<bf16>{static_cast<bf16*>(gradient.data)}, i, sum);
}

constexpr int EMBEDDING_THREADS = 128;
dim3 embedding_grid(int64_t n, int64_t C) { return {static_cast<unsigned>(n), blocks(C, EMBEDDING_THREADS * CHUNK)}; }

// Sum of rows index(0) ... index(n - 1) of x at one chunk, in that order.
template <class Held, class Index>
__device__ void sum_rows(Held x, int64_t C, int64_t col, int n, Index index, Values& sum) {
#pragma unroll 4
    for (int i = 0; i < n; i++) {
        Values v;
        x.values(x.load(index(i) * C + col), v);
#pragma unroll
        for (int j = 0; j < CHUNK; j++) sum[j] += v[j];
    }
}

// Stage one: a chunk's rows. A token with one chunk is done with; others leave their chunks' sums in partials.
template <class T>
__global__ void __launch_bounds__(EMBEDDING_THREADS) embedding_chunks_kernel(Plain<T> g, int64_t C, const int32_t* order,
                                                                             const EmbeddingChunk* chunks, Gradient gradient, Plain<float> partials) {
    const int64_t col = (int64_t(blockIdx.y) * EMBEDDING_THREADS + threadIdx.x) * CHUNK;
    if (col >= C) return;
    const EmbeddingChunk chunk = chunks[blockIdx.x];
    Values sum = {};
    sum_rows(g, C, col, chunk.count, [&](int i) { return int64_t(order[chunk.first + i]); }, sum);
    if (chunk.chunks == 1)
        add_to(gradient, chunk.token * C + col, sum);
    else
        partials.store(blockIdx.x * C + col, sum, true);
}

// Stage two: the chunks of a token that has several, in order.
__global__ void __launch_bounds__(EMBEDDING_THREADS) embedding_tokens_kernel(int64_t C, const EmbeddingChunk* chunks, Gradient gradient,
                                                                             Plain<float> partials) {
    const int64_t col = (int64_t(blockIdx.y) * EMBEDDING_THREADS + threadIdx.x) * CHUNK;
    const EmbeddingChunk chunk = chunks[blockIdx.x];
    if (col >= C || chunk.chunks < 2) return;
    Values sum = {};
    sum_rows(partials, C, col, chunk.chunks, [&](int i) { return int64_t(blockIdx.x) + i; }, sum);
    add_to(gradient, chunk.token * C + col, sum);
}

template <class T>
__global__ void __launch_bounds__(EMBEDDING_THREADS) positions_kernel(Plain<T> g, int64_t rows, int64_t C, int64_t period, Gradient gradient) {
    const int64_t t = blockIdx.x, col = (int64_t(blockIdx.y) * EMBEDDING_THREADS + threadIdx.x) * CHUNK;
    if (col >= C) return;
    Values sum = {};
    sum_rows(g, C, col, static_cast<int>((rows - t + period - 1) / period), [&](int b) { return b * period + t; }, sum);
    add_to(gradient, t * C + col, sum);
}

}  // namespace

void rope_table(const ModelConfig& c, int64_t T, float2* table, cudaStream_t s) {
    const int64_t half = c.HS() / 2;
    rope_table_kernel<<<blocks(T * half, 256), 256, 0, s>>>(T * half, static_cast<int>(half), c.rope_theta, table);
    CHECK_LAUNCH("rope_table");
}

void rope_forward(const Rope& r, const View& qkv, cudaStream_t s) {
    require(r.HS % 8 == 0 && r.rotated_cols % r.HS == 0, "a head size is not a multiple of 8");
    const int64_t quads = qkv.rows * r.HS / 8, heads = r.rotated_cols / r.HS;
    require(quads < int64_t(1) << 32, "so many rows are not counted");
    if (quads == 0 || heads == 0) return;
    const dim3 grid(blocks(quads, ROPE_THREADS), blocks(heads, ROPE_HEADS));
    with_stream(qkv, [&](auto x) {
        rope_kernel<<<grid, ROPE_THREADS, 0, s>>>(x.data, r, static_cast<uint32_t>(qkv.rows), qkv.cols);
        CHECK_LAUNCH("rope_forward");
    });
}

void cross_entropy(const View& logits, int64_t V, const int32_t* targets, float scale, float* losses, cudaStream_t s) {
    require(V >= 1 && V <= logits.cols, "the vocabulary is larger than the logits");
    if (logits.rows == 0) return;
    with_stream(logits, [&](auto x) {
        using T = typename decltype(x)::Stream;
        const int row = static_cast<int>(logits.cols * sizeof(T));
        const bool kept = row <= shared_memory() - 2048;  // beside the block's sums
        const auto kernel = kept ? cross_entropy_kernel<T, true> : cross_entropy_kernel<T, false>;
        if (kept) check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, row), "Shared memory for cross_entropy");
        kernel<<<static_cast<unsigned>(logits.rows), LOSS_THREADS, kept ? row : 0, s>>>(x, logits.cols, V, targets, scale, losses);
        CHECK_LAUNCH("cross_entropy");
    });
}

void loss_sum(const float* losses, int64_t n, double scale, double* total, cudaStream_t s) {
    loss_sum_kernel<<<1, SUM_THREADS, 0, s>>>(losses, n, scale, total);
    CHECK_LAUNCH("loss_sum");
}

namespace {

Gradient gradient_of(const View& v) {
    require(!v.quant.fp8(), "a gradient is F32 or BF16");
    return {v.codes, v.quant.format == Format::F32};
}

}  // namespace

int64_t embedding_chunks(int64_t N) { return N; }

EmbeddingOrder embedding_order(const int32_t* tokens, int64_t N, int64_t V) {
    std::vector<int32_t> first(V + 1, 0);
    for (int64_t i = 0; i < N; i++) first[tokens[i] + 1]++;
    for (int64_t t = 0; t < V; t++) first[t + 1] += first[t];
    EmbeddingOrder out;
    out.order.resize(N);
    std::vector<int32_t> next(first.begin(), first.end() - 1);
    for (int64_t i = 0; i < N; i++) out.order[next[tokens[i]]++] = static_cast<int32_t>(i);
    // Tokens with several chunks come first: only their chunks need partial sums.
    for (const bool several : {true, false})
        for (int64_t t = 0; t < V; t++) {
            const int32_t count = first[t + 1] - first[t], chunks = static_cast<int32_t>(ceil_div(count, EMBEDDING_CHUNK));
            for (int32_t c = 0; c < chunks && several == (chunks > 1); c++)
                out.chunks.push_back({static_cast<int32_t>(t), first[t] + c * EMBEDDING_CHUNK, std::min(EMBEDDING_CHUNK, count - c * EMBEDDING_CHUNK),
                                      c ? 0 : chunks});
        }
    return out;
}

void embedding_backward(const View& g, const int32_t* order, const EmbeddingChunk* chunks, int64_t number_of_chunks, const View& gradient,
                        float* workspace, cudaStream_t s) {
    if (number_of_chunks == 0) return;
    const dim3 grid = embedding_grid(number_of_chunks, g.cols);
    const Gradient out = gradient_of(gradient);
    with_stream(g, [&](auto x) {
        embedding_chunks_kernel<<<grid, EMBEDDING_THREADS, 0, s>>>(x, g.cols, order, chunks, out, Plain<float>{workspace});
        CHECK_LAUNCH("embedding_backward");
        embedding_tokens_kernel<<<grid, EMBEDDING_THREADS, 0, s>>>(g.cols, chunks, out, Plain<float>{workspace});
        CHECK_LAUNCH("embedding_backward, tokens");
    });
}

void positions_backward(const View& g, int64_t T, const View& gradient, cudaStream_t s) {
    if (g.rows == 0) return;
    with_stream(g, [&](auto x) {
        positions_kernel<<<embedding_grid(std::min(T, g.rows), g.cols), EMBEDDING_THREADS, 0, s>>>(x, g.rows, g.cols, T, gradient_of(gradient));
        CHECK_LAUNCH("positions_backward");
    });
}

// =====================================================================================================================
// Parameters

namespace {

__device__ void split(float master, uint16_t& weight, int16_t& remainder) {
    const uint32_t bits = __float_as_uint(master);
    weight = static_cast<uint16_t>((bits + 0x8000u) >> 16);  // nearest; ties away from zero, so that the remainder fits
    remainder = static_cast<int16_t>(bits & 0xFFFFu);
}
__device__ float join(uint16_t weight, int16_t remainder) {
    return __uint_as_float((uint32_t(weight) << 16) + static_cast<uint32_t>(static_cast<int32_t>(remainder)));
}

__global__ void initialize_kernel(float* values, uint16_t* weights, int16_t* remainders, int64_t size, int64_t padded, float std, bool weight,
                                  int64_t live, uint64_t seed, uint64_t index) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= padded) return;
    const float value = i < size ? initial(std, weight, live, seed, index, i) : 0.0f;
    int16_t remainder;
    if (values) values[i] = value;
    else split(value, weights[i], remainder);
    if (remainders) remainders[i] = remainder;
}

__global__ void split_kernel(const float* master, uint16_t* weight, int16_t* remainder, int64_t n) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) split(master[i], weight[i], remainder[i]);
}
__global__ void join_kernel(const uint16_t* weight, const int16_t* remainder, float* master, int64_t n) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) master[i] = join(weight[i], remainder[i]);
}

// Sum of squares of a chunk. In FP32 unless it leaves the middle of FP32's range, where squares would overflow or vanish.
__device__ double sum_of_squares(const Values& v) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < CHUNK; j++) sum += v[j] * v[j];
    if (sum > 0x1p-80f && sum < 0x1p+80f) return sum;
    double exact = 0;
#pragma unroll
    for (int j = 0; j < CHUNK; j++) exact += double(v[j]) * v[j];
    return exact;
}

constexpr int NORM_THREADS = 256, NORM_UNROLL = 4;
template <class T>
__global__ void __launch_bounds__(NORM_THREADS) squares_kernel(Plain<T> gradients, int64_t chunks, double* partials) {
    double sum = 0;
    const int64_t step = int64_t(GRADIENT_PARTIALS) * NORM_THREADS;
    for (int64_t i = int64_t(blockIdx.x) * NORM_THREADS + threadIdx.x; i < chunks; i += step * NORM_UNROLL) {
        typename Plain<T>::Raw raw[NORM_UNROLL] = {};
#pragma unroll
        for (int u = 0; u < NORM_UNROLL; u++)
            if (i + u * step < chunks) raw[u] = gradients.load((i + u * step) * CHUNK);
#pragma unroll
        for (int u = 0; u < NORM_UNROLL; u++) {
            Values v;
            gradients.values(raw[u], v);
            sum += sum_of_squares(v);
        }
    }
    sum = block_sum<NORM_THREADS>(sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

constexpr int CHECK_THREADS = 256;
__global__ void __launch_bounds__(CHECK_THREADS) checked_loss_kernel(const TensorScale* scales, int64_t n, const double* loss, double* checked) {
    bool finite = true;
    for (int64_t i = threadIdx.x; i < n; i += CHECK_THREADS) finite = finite && isfinite(scales[i].amax);
    finite = __syncthreads_and(finite);
    if (threadIdx.x == 0) *checked = finite && !isnan(*checked) ? *loss : NAN;
}

__global__ void __launch_bounds__(GRADIENT_PARTIALS) gradient_state_kernel(const double* partials, const double* loss, Clipping clip,
                                                                           GradientState* state) {
    const double squares = block_sum<GRADIENT_PARTIALS>(partials[threadIdx.x]);
    if (threadIdx.x != 0) return;
    state->squares += squares;
    state->norm = sqrt(state->squares);
    const double norm = state->norm * clip.norm_correction;
    state->scale = static_cast<float>(clip.limit > 0 && norm > clip.limit ? clip.limit / norm : 1.0);
    // Scaled gradients below 2^62 have squares below 2^124, which a second moment of any format can represent: FP32 ends
    // at 2^128. NaN fails too.
    const bool finite = sqrt(squares) * state->scale < 0x1p62 && (!loss || isfinite(*loss));
    state->skip |= !finite;
}

}  // namespace

void initialize(const Weights& w, const Param& p, uint64_t index, int64_t live, uint64_t seed, cudaStream_t s) {
    const bool f32 = w.format == Format::F32;
    const int64_t n = p.padded_size();
    initialize_kernel<<<blocks(n, 256), 256, 0, s>>>(f32 ? static_cast<float*>(w.values) + p.offset : nullptr,
                                                     f32 ? nullptr : static_cast<uint16_t*>(w.values) + p.offset,
                                                     w.remainder ? w.remainder + p.offset : nullptr, p.size(), n, p.init_std, p.role.weight, live,
                                                     seed, index);
    CHECK_LAUNCH("initialize");
}

void split_master(const float* master, uint16_t* weight, int16_t* remainder, int64_t n, cudaStream_t s) {
    if (n == 0) return;
    split_kernel<<<blocks(n, 256), 256, 0, s>>>(master, weight, remainder, n);
    CHECK_LAUNCH("split_master");
}

void join_master(const uint16_t* weight, const int16_t* remainder, float* master, int64_t n, cudaStream_t s) {
    if (n == 0) return;
    join_kernel<<<blocks(n, 256), 256, 0, s>>>(weight, remainder, master, n);
    CHECK_LAUNCH("join_master");
}

void checked_loss(const TensorScale* scales, int64_t n, const double* loss, double* checked, cudaStream_t s) {
    checked_loss_kernel<<<1, CHECK_THREADS, 0, s>>>(scales, n, loss, checked);
    CHECK_LAUNCH("checked_loss");
}

void gradient_norm(const void* gradients, Format format, int64_t n, const double* loss, const Clipping& clip, GradientState* state,
                   double* workspace, cudaStream_t s) {
    require(n % MOMENT_GROUP == 0, "the flat order is not padded to groups");
    if (format == Format::F32)
        squares_kernel<<<GRADIENT_PARTIALS, NORM_THREADS, 0, s>>>(plain<float>(gradients), n / CHUNK, workspace);
    else
        squares_kernel<<<GRADIENT_PARTIALS, NORM_THREADS, 0, s>>>(plain<bf16>(gradients), n / CHUNK, workspace);
    CHECK_LAUNCH("gradient_norm");
    gradient_state_kernel<<<1, GRADIENT_PARTIALS, 0, s>>>(workspace, loss, clip, state);
    CHECK_LAUNCH("gradient_norm, state");
}

// =====================================================================================================================
// FP8 AdamW with dynamic range expansion (paper section 4)
//
// A group of 128 belongs to half a warp, eight consecutive elements to a lane: 16-byte accesses, and what is worked out once a group costs a lane
// little an element. At 85% of an H200's bandwidth a multiprocessor has to finish an element a clock, which leaves 120 instructions and 15 special
// functions (log2, exp2, roots, reciprocals) an element if it never waits: hence the fast ones, and a table of log2(|code| / FMAX) in shared memory
// for decoding. What is rare (no expansion, numbers near the ends of FP32) branches off once for all eight elements.

namespace {

constexpr int TEAM = MOMENT_GROUP / CHUNK, TEAMS = 32 / TEAM;  // lanes of a group; groups that a warp works on at once
static_assert(TEAM >= 4, "four maxima of a group go round its lanes");
constexpr int ADAM_WARPS = 8, ADAM_GROUPS = ADAM_WARPS * TEAMS, ADAM_BLOCKS_PER_SM = 2;
constexpr int64_t ADAM_GROUPS_A_BLOCK = 16384;  // or more, so that a block's start and end do not count

// One moment's format as the kernel's argument.
struct MomentFormat {
    bool e5m2, expand;
    float max, log_max, range;  // FMAX, log2(FMAX) and log2(FMAX / FMIN)
};

// (paper eq. 4) k = log_ratio(FMAX / FMIN), down to a multiple of 1/16, from 1/16 to 64.
__device__ float expansion_factor(float range, float max, float min_nonzero) {
    if (max == 0) return 1.0f;
    const float ratio = fmaxf(fast_log2(max) - fast_log2(min_nonzero), 0.0f);
    return fminf(fmaxf(floorf(16.0f * range * fast_reciprocal(ratio)) * 0.0625f, 0.0625f), 64.0f);
}

// Within such a group magnitudes lie up to 2^(range / k) apart, which may leave FP32's normal range: it takes a careful path.
__device__ bool wide(const MomentFormat& f, float k) { return f.range > 120.0f * k; }

// What a group's lanes share when they encode it.
struct GroupScale {
    float max, k, inverse;  // inverse of max (expanded) or of the scale
};

// decode() yields numbers and returns what they are still to be multiplied with. SECOND: the second moment is never negative, and above zero
// it stays above zero.
template <class T>
struct WholeMoment {  // of formats that hold the numbers themselves
    static constexpr int BYTES = sizeof(T);
    using Raw = typename Plain<T>::Raw;
    static __device__ Plain<T> held(const MomentView& m) { return {static_cast<T*>(m.codes)}; }
    static __device__ Raw load(const MomentView& m, int64_t i) { return held(m).load(i); }
    template <bool SECOND>
    static __device__ float decode(const Raw& r, const GroupScale&, const MomentFormat&, const float*, Values& x) {
        Plain<T>().values(r, x);
        return 1.0f;
    }
    template <bool SECOND>
    static __device__ void store(const MomentView& m, int64_t i, const MomentFormat&, const GroupScale&, Values& x, bool live) {
        held(m).store(i, x, live);
    }
};
template <Format F>
struct MomentIo;
template <>
struct MomentIo<Format::F32> : WholeMoment<float> {};
template <>
struct MomentIo<Format::BF16> : WholeMoment<bf16> {};

// One load; through a pointer that comes from a table in memory an assignment would not know that it goes to global memory.
template <class V>
__device__ V get(const void* from) {
    return __ldca(static_cast<const V*>(from));
}

template <>
struct MomentIo<Format::E4M3> {  // E5M2 too
    static constexpr int BYTES = 1;
    struct Raw {
        uint2 codes;
        __device__ uint32_t byte(int j) const { return (j < 4 ? codes.x : codes.y) >> 8 * (j % 4); }
    };
    static __device__ Raw load(const MomentView& m, int64_t i) { return {get<uint2>(static_cast<uint8_t*>(m.codes) + i)}; }
    // value = sign max (|code| / FMAX)^(1/k); the table has log2(|code| / FMAX), or without expansion |code|.
    template <bool SECOND>
    static __device__ float decode(const Raw& r, const GroupScale& g, const MomentFormat& f, const float* table, Values& x) {
        const float inverse_k = fast_reciprocal(g.k);
        float scale = g.max;
#pragma unroll
        for (int j = 0; j < CHUNK; j++) x[j] = table[r.byte(j) & 0x7Fu];
        if (!f.expand) {
            scale = scale_of(f.max, g.max);
        } else if (!wide(f, g.k)) {
#pragma unroll
            for (int j = 0; j < CHUNK; j++) x[j] = fast_exp2(x[j] * inverse_k);
        } else {  // the power alone may underflow
#pragma unroll 1
            for (int j = 0; j < CHUNK; j++) {
                const float root = exp2f(0.5f * (table[r.byte(j) & 0x7Fu] * inverse_k)), value = root * g.max * root;
#pragma unroll
                for (int to = 0; to < CHUNK; to++) x[to] = to == j ? value : x[to];
            }
            scale = 1.0f;
        }
        if constexpr (!SECOND) {
#pragma unroll
            for (int j = 0; j < CHUNK; j++) x[j] = __uint_as_float(__float_as_uint(x[j]) | (r.byte(j) << 24 & 0x80000000u));
        }
        return scale;
    }
    // code = sign encode(FMAX (|x| / max)^k)
    template <bool SECOND>
    static __device__ uint2 encode(const MomentFormat& f, const GroupScale& g, const Values& x) {
        const bool expand = f.expand && !wide(f, g.k) && (g.max >= 0x1p-100f || g.max == 0);  // of zeros log2(0) makes zeros
        Values y;
        if (expand) {
#pragma unroll
            for (int j = 0; j < CHUNK; j++) y[j] = fast_exp2(__fmaf_rn(g.k, fast_log2_normal(fabsf(x[j]) * g.inverse), f.log_max));
        } else {
            const float log_top = log2f(g.max);
#pragma unroll 1
            for (int j = 0; j < CHUNK; j++) {
                float from = 0;
#pragma unroll
                for (int at = 0; at < CHUNK; at++) from = at == j ? fabsf(x[at]) : from;
                const float to = f.expand ? f.max * fast_exp2(g.k * (log2f(from) - log_top)) : from * g.inverse;
#pragma unroll
                for (int at = 0; at < CHUNK; at++) y[at] = at == j ? to : y[at];
            }
        }
        if constexpr (!SECOND) {
#pragma unroll
            for (int j = 0; j < CHUNK; j++) y[j] = copysignf(y[j], x[j]);
        }
        uint2 codes = gpu::encode(f.e5m2, y, 1.0f);
        if (SECOND && !expand) {  // the fast expansion makes no zeros
            for (int j = 0; j < CHUNK; j++) {
                uint32_t& four = j < 4 ? codes.x : codes.y;
                if (x[j] > 0 && (four >> 8 * (j % 4) & 0xFFu) == 0) four |= 1u << 8 * (j % 4);
            }
        }
        return codes;
    }
    template <bool SECOND>
    static __device__ void store(const MomentView& m, int64_t i, const MomentFormat& f, const GroupScale& g, const Values& x, bool live) {
        const uint2 codes = encode<SECOND>(f, g, x);
        if (live) put(static_cast<uint8_t*>(m.codes) + i, codes);
    }
};

// Both moments' group scales. The largest magnitude and the smallest but zero (as bits, turned over: zero goes last) of two moments are four maxima
// over a team's lanes: with each of the first two exchanges a lane gives away half of those that it has and goes on with the other half, so that in
// the end even lanes know the first moment's and odd lanes the second's. They work out its scale and tell each other.
__device__ void group_scales(const MomentFormat& fm, const MomentFormat& fv, const Values& m, const Values& v, GroupScale& gm, GroupScale& gv) {
    const bool odd = threadIdx.x & 1, low = threadIdx.x & 2;
    auto swap = [](uint32_t x, int lanes) { return __shfl_xor_sync(0xFFFFFFFFu, x, lanes); };
    uint32_t tops[2] = {0, 0}, lows[2] = {0xFFFFFFFFu, 0xFFFFFFFFu};
#pragma unroll
    for (int j = 0; j < CHUNK; j++) {
        const uint32_t bits[2] = {magnitude(m[j]), __float_as_uint(v[j])};  // v is not negative
#pragma unroll
        for (int i = 0; i < 2; i++) tops[i] = max(tops[i], bits[i]), lows[i] = min(lows[i], bits[i] - 1);
    }
    const uint32_t top = max(odd ? tops[1] : tops[0], swap(odd ? tops[0] : tops[1], 1));
    const uint32_t turned = ~min(odd ? lows[1] : lows[0], swap(odd ? lows[0] : lows[1], 1));
    uint32_t largest = max(low ? turned : top, swap(low ? top : turned, 2));
#pragma unroll
    for (int lanes = 4; lanes < TEAM; lanes *= 2) largest = max(largest, swap(largest, lanes));
    const uint32_t other = swap(largest, 2);
    const float group_top = __uint_as_float(low ? other : largest), group_low = __uint_as_float(~(low ? largest : other) + 1);

    const bool expand = odd ? fv.expand : fm.expand;
    const float k = expand ? expansion_factor(odd ? fv.range : fm.range, group_top, group_low) : 1.0f;
    float inverse = fast_reciprocal(fmaxf(group_top, 0x1p-126f));
    if (expand) inverse = __fmaf_rn(inverse, __fmaf_rn(-group_top, inverse, 1.0f), inverse);  // a step of Newton's: as good as rounded
    else inverse = __frcp_rn(scale_of(odd ? fv.max : fm.max, group_top));
    const GroupScale mine{group_top, k, inverse};
    const GroupScale theirs{__shfl_xor_sync(0xFFFFFFFFu, group_top, 1), __shfl_xor_sync(0xFFFFFFFFu, k, 1), __shfl_xor_sync(0xFFFFFFFFu, inverse, 1)};
    gm = {odd ? theirs.max : mine.max, odd ? theirs.k : mine.k, odd ? theirs.inverse : mine.inverse};
    gv = {odd ? mine.max : theirs.max, odd ? mine.k : theirs.k, odd ? mine.inverse : theirs.inverse};
}

// Eight gradients, F32 or BF16: which of them is known only as the kernel runs, and the same for all. BF16 values lie in the first half.
struct RawGradients {
    uint4 lo, hi;
};
template <class T>
__device__ RawGradients load_gradients(const Gradient& gradients, int64_t i) {
    if (sizeof(T) == 4 || gradients.f32) {
        const uint4* p = reinterpret_cast<const uint4*>(static_cast<const float*>(gradients.data) + i);
        return {p[0], p[1]};
    }
    return {*reinterpret_cast<const uint4*>(static_cast<const bf16*>(gradients.data) + i), {}};
}
template <class T>
__device__ void decode_gradients(const Gradient& gradients, const RawGradients& raw, Values& g) {
    if (sizeof(T) == 4 || gradients.f32) {
        const uint32_t words[CHUNK] = {raw.lo.x, raw.lo.y, raw.lo.z, raw.lo.w, raw.hi.x, raw.hi.y, raw.hi.z, raw.hi.w};
#pragma unroll
        for (int j = 0; j < CHUNK; j++) g[j] = __uint_as_float(words[j]);
    } else {
        Plain<bf16>().values(raw.lo, g);
    }
}

// Eight weights, as they are held. store() raises `top` to the largest magnitude of the new weights, which largest() makes FP32
// bits of; `random` are the bits of a stochastic rounding.
__device__ uint32_t larger2(uint32_t top, uint4 pairs) {  // of BF16 in both halves
    const uint32_t mask = 0x7FFF7FFFu;
    return __vimax3_u16x2(__vimax3_u16x2(top, pairs.x & mask, pairs.y & mask), pairs.z & mask, pairs.w & mask);
}
__device__ uint32_t wider(uint32_t top) { return max(top & 0xFFFF0000u, top << 16); }
__device__ uint4 halves(const uint32_t (&b)[CHUNK], uint32_t selector) {
    return {__byte_perm(b[0], b[1], selector), __byte_perm(b[2], b[3], selector), __byte_perm(b[4], b[5], selector),
            __byte_perm(b[6], b[7], selector)};
}
constexpr uint32_t LOWER = 0x5410, UPPER = 0x7632;

struct MasterWeights {  // BF16, and 16 bits more: the exact FP32 master
    using Value = bf16;
    static constexpr bool STOCHASTIC = false;
    struct Raw {
        uint4 w, r;
    };
    static __device__ Raw load(const Weights& w, int64_t i) {
        return {*reinterpret_cast<const uint4*>(static_cast<bf16*>(w.values) + i), *reinterpret_cast<const uint4*>(w.remainder + i)};
    }
    static __device__ void decode(const Raw& raw, Values& master) {
        const uint32_t low[4] = {raw.r.x, raw.r.y, raw.r.z, raw.r.w}, high[4] = {raw.w.x, raw.w.y, raw.w.z, raw.w.w};
#pragma unroll
        for (int j = 0; j < CHUNK; j++)  // store() backwards
            master[j] = __uint_as_float(__byte_perm(low[j / 2] ^ 0x80008000u, high[j / 2], j % 2 ? UPPER : LOWER) - 0x8000u);
    }
    static __device__ void store(const Weights& w, int64_t i, const Values& master, const uint64_t (&)[2], bool live, uint32_t& top) {
        uint32_t b[CHUNK];  // master's bits, rounded in the upper half
#pragma unroll
        for (int j = 0; j < CHUNK; j++) b[j] = __float_as_uint(master[j]) + 0x8000u;
        const uint4 values = halves(b, UPPER), rest = halves(b, LOWER);
        top = larger2(top, values);
        if (!live) return;
        put(static_cast<bf16*>(w.values) + i, values);
        // The lower halves without the 0x8000 again: it only flips their top bits.
        put(w.remainder + i, make_uint4(rest.x ^ 0x80008000u, rest.y ^ 0x80008000u, rest.z ^ 0x80008000u, rest.w ^ 0x80008000u));
    }
    static __device__ uint32_t largest(uint32_t top) { return wider(top); }
};

struct StochasticWeights {  // BF16 alone
    using Value = bf16;
    static constexpr bool STOCHASTIC = true;
    using Raw = Plain<bf16>::Raw;
    static __device__ Raw load(const Weights& w, int64_t i) { return Plain<bf16>{static_cast<bf16*>(w.values)}.load(i); }
    static __device__ void decode(const Raw& raw, Values& weight) { Plain<bf16>().values(raw, weight); }
    static __device__ void store(const Weights& w, int64_t i, const Values& weight, const uint64_t (&random)[2], bool live, uint32_t& top) {
        uint32_t b[CHUNK];
#pragma unroll
        for (int j = 0; j < CHUNK; j++) b[j] = __float_as_uint(weight[j]) + static_cast<uint32_t>(random[j / 4] >> 16 * (j % 4) & 0xFFFFu);
        const uint4 values = halves(b, UPPER);
        top = larger2(top, values);
        if (live) put(static_cast<bf16*>(w.values) + i, values);
    }
    static __device__ uint32_t largest(uint32_t top) { return wider(top); }
};

struct FloatWeights {
    using Value = float;
    static constexpr bool STOCHASTIC = false;
    using Raw = Plain<float>::Raw;
    static __device__ Raw load(const Weights& w, int64_t i) { return Plain<float>{static_cast<float*>(w.values)}.load(i); }
    static __device__ void decode(const Raw& raw, Values& master) { Plain<float>().values(raw, master); }
    static __device__ void store(const Weights& w, int64_t i, Values& master, const uint64_t (&)[2], bool live, uint32_t& top) {
        Plain<float>{static_cast<float*>(w.values)}.store(i, master, live);
#pragma unroll
        for (int j = 0; j < CHUNK; j++) top = max(top, magnitude(master[j]));
    }
    static __device__ uint32_t largest(uint32_t top) { return top; }
};

// One step's numbers, worked out in double on the host.
struct Factors {
    float lr, beta1, beta2, one_minus_beta1, one_minus_beta2, decay;
    float root_factor, eps;  // both times 1 - b1^t, so that nothing is left to multiply m with
};
Factors factors(const AdamW& a) {
    const double bias1 = 1 - std::pow(static_cast<double>(a.beta1), static_cast<double>(a.step));
    const double bias2 = 1 - std::pow(static_cast<double>(a.beta2), static_cast<double>(a.step));
    return {a.lr, a.beta1, a.beta2, 1 - a.beta1, 1 - a.beta2, a.weight_decay, static_cast<float>(bias1 / std::sqrt(bias2)),
            static_cast<float>(bias1 * a.eps)};
}

struct AdamArguments {
    Factors f;
    MomentFormat m, v;
    const Segment* segments;
    int number_of_segments;
    int64_t first, groups;  // of the range: its first element, how many groups it has
    Weights w;
    uint64_t rounding;
    Gradient gradients;     // of the range
    const GradientState* state;
};

// m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  w -= lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay w)
// The old moments come as m and v to be multiplied with keep_m and keep_v: b1 and b2 times what their formats scale by.
__device__ void adamw_element(const Factors& f, float keep_m, float keep_v, float decay, float g, float& m, float& v, float& w) {
    m = __fmaf_rn(keep_m, m, __fmaf_rn(f.one_minus_beta1, g, 0.0f));  // with the 0 no -0 remains
    v = __fmaf_rn(keep_v, v, f.one_minus_beta2 * (g * g));
    const float update = m * fast_reciprocal(__fmaf_rn(fast_sqrt(v), f.root_factor, f.eps));
    w = __fmaf_rn(-f.lr, __fmaf_rn(decay, w, update), w);
}

// The scales of ADAM_RUN consecutive groups as a warp holds them: lane 8 a + g has number a (m's max and k, v's max and k) of group g. So they are
// read and written in whole sectors of memory; four bytes at a time they cost more than the codes.
constexpr int ADAM_RUN = 8, SCALE_NUMBERS = 4;
static_assert(ADAM_RUN * SCALE_NUMBERS == 32 && ADAM_RUN % TEAMS == 0, "a number of every group for each lane");

struct RunOfScales {
    float* mine;  // this lane's number of the segment's group g, at [g]; null where there is none
    int lane, groups;

    __device__ RunOfScales(const Segment& s, int number_of_groups) : lane(threadIdx.x % 32), groups(number_of_groups) {
        const bool second = lane / ADAM_RUN >= 2, is_k = lane / ADAM_RUN % 2;
        const Format format = second ? s.v.format : s.m.format;
        float* const number = second ? (is_k ? s.v.k : s.v.max) : (is_k ? s.m.k : s.m.max);
        mine = format == Format::E4M3 || format == Format::E5M2 ? number : nullptr;
    }
    // Of the run that begins with group `first`. Places beyond the last group hold that one's.
    __device__ float load(int first) const { return mine ? get<float>(mine + min(first + lane % ADAM_RUN, groups - 1)) : 1.0f; }
    __device__ void store(int first, float number) const {
        const int group = first + lane % ADAM_RUN;
        if (mine && group < groups) put(mine + group, number);
    }
    // The scale that this lane's team wants of its moment; the teams have groups `at` to at + TEAMS - 1 of the run.
    static __device__ GroupScale pick(float numbers, bool second, int at) {
        const int group = at + threadIdx.x / TEAM % TEAMS, first = second ? 2 * ADAM_RUN : 0;
        return {__shfl_sync(0xFFFFFFFFu, numbers, first + group), __shfl_sync(0xFFFFFFFFu, numbers, first + ADAM_RUN + group), 0};
    }
    // `numbers` with those of the groups that the teams of the warp have just made.
    __device__ float put_in(float numbers, const GroupScale& m, const GroupScale& v, int at) const {
        const float offered = lane % SCALE_NUMBERS < 2 ? (lane % 2 ? m.k : m.max) : (lane % 2 ? v.k : v.max);
        const float made = __shfl_sync(0xFFFFFFFFu, offered, TEAM * (lane % TEAMS) + lane / ADAM_RUN);
        return lane % ADAM_RUN / TEAMS == at / TEAMS ? made : numbers;
    }
};

// A warp's groups of one segment: runs of ADAM_RUN, the first one at `first`, then every block's length on, as long as they begin before `last`; a
// group for each team at a time. The pointers are moved to the segment and lane beforehand: then an address is one multiplication. A team without a
// group works through the last one again, and stores nothing.
template <class W, Format M, Format V>
__device__ uint32_t update_segment(const AdamArguments& a, const Segment& segment, int first, int last, const float* table_m, const float* table_v) {
    using T = typename W::Value;
    using Im = MomentIo<M>;
    using Iv = MomentIo<V>;
    constexpr bool SCALED = M == Format::E4M3 || V == Format::E4M3;
    if (first >= last) return 0;
    const int groups = static_cast<int>((segment.size + MOMENT_GROUP - 1) / MOMENT_GROUP);
    const int lane = threadIdx.x % TEAM * CHUNK, team = threadIdx.x / TEAM % TEAMS;
    const int64_t start = segment.offset + lane;
    const Weights weights{static_cast<T*>(a.w.values) + start, a.w.remainder ? a.w.remainder + start : nullptr, a.w.format};
    const int64_t to_gradients = start - a.first;
    MomentView moment_m = segment.m, moment_v = segment.v;
    moment_m.codes = static_cast<uint8_t*>(moment_m.codes) + lane * Im::BYTES;
    moment_v.codes = static_cast<uint8_t*>(moment_v.codes) + lane * Iv::BYTES;
    const RunOfScales scales(segment, groups);
    const float scale = a.state->scale, decay = segment.decays ? a.f.decay : 0.0f;
    typename W::Raw next_w;
    RawGradients next_g;
    typename Im::Raw next_m;
    typename Iv::Raw next_v;
    auto fetch = [&](int at) {
        const int64_t inside = int64_t(min(at + team, groups - 1)) * MOMENT_GROUP;
        next_w = W::load(weights, inside);
        next_g = load_gradients<T>(a.gradients, to_gradients + inside);
        next_m = Im::load(moment_m, inside);
        next_v = Iv::load(moment_v, inside);
    };
    uint32_t top = 0;
    fetch(first);
    float next_numbers = SCALED ? scales.load(first) : 0.0f;
    for (int run = first; run < last; run += ADAM_WARPS * ADAM_RUN) {
        const int stop = min(run + ADAM_RUN, groups), next_run = run + ADAM_WARPS * ADAM_RUN;
        const float numbers = next_numbers;
        float made = 0;
        if (SCALED) next_numbers = scales.load(next_run);
#pragma unroll 1
        for (int at = run; at < stop; at += TEAMS) {
            Values w, g, m, v;
            W::decode(next_w, w);
            decode_gradients<T>(a.gradients, next_g, g);
            GroupScale gm{}, gv{};
            if (SCALED) gm = RunOfScales::pick(numbers, false, at - run), gv = RunOfScales::pick(numbers, true, at - run);
            const float keep_m = a.f.beta1 * Im::template decode<false>(next_m, gm, a.m, table_m, m);
            const float keep_v = a.f.beta2 * Iv::template decode<true>(next_v, gv, a.v, table_v, v);
            fetch(at + TEAMS < stop ? at + TEAMS : next_run);
#pragma unroll
            for (int j = 0; j < CHUNK; j++) adamw_element(a.f, keep_m, keep_v, decay, g[j] * scale, m[j], v[j], w[j]);
            const bool live = at + team < groups;
            const int64_t inside = int64_t(min(at + team, groups - 1)) * MOMENT_GROUP;
            uint64_t random[2] = {0, 0};
            if (W::STOCHASTIC)
                for (int q : {0, 1}) random[q] = rounding_bits(a.rounding, static_cast<uint64_t>(start + inside) / 4 + q);
            if (SCALED) {
                group_scales(a.m, a.v, m, v, gm, gv);
                made = scales.put_in(made, gm, gv, at - run);
            }
            W::store(weights, inside, w, random, live, top);
            Im::template store<false>(moment_m, inside, a.m, gm, m, live);
            Iv::template store<true>(moment_v, inside, a.v, gv, v, live);
        }
        if (SCALED) scales.store(run, made);
    }
    return W::largest(top);
}

// A skipped step changes nothing, but the weights' amax is still wanted.
template <class T>
__device__ uint32_t weights_amax(const AdamArguments& a, int64_t first, int64_t last) {
    uint32_t top = 0;
    for (int64_t group = first + threadIdx.x / TEAM % TEAMS; group < last; group += ADAM_GROUPS)
        for (int j = 0; j < CHUNK; j++)
            top = max(top, magnitude(static_cast<float>(static_cast<const T*>(a.w.values)[group * MOMENT_GROUP + threadIdx.x % TEAM * CHUNK + j])));
    return top;
}

// log2(|code| / FMAX) of the 128 magnitudes, or |code| where there is no expansion.
__device__ void fill_table(const MomentFormat& f, float* table) {
    for (uint32_t code = threadIdx.x; code < 128; code += blockDim.x) {
        const float value = decode2(f.e5m2, code).x;
        table[code] = f.expand ? log2f(value) - log2f(f.max) : value;
    }
}

// A block has consecutive groups; within each segment that they meet its warps take turns, with the runs of groups that begin among them.
template <class W, Format M, Format V>
__global__ void __launch_bounds__(32 * ADAM_WARPS, ADAM_BLOCKS_PER_SM) adamw_kernel(const AdamArguments a) {
    __shared__ float table_m[128], table_v[128];
    fill_table(a.m, table_m);
    fill_table(a.v, table_v);
    __syncthreads();
    const bool skip = a.state->skip;
    const int64_t origin = a.first / MOMENT_GROUP;
    const int64_t begin = origin + a.groups * blockIdx.x / gridDim.x, end = origin + a.groups * (blockIdx.x + 1) / gridDim.x;
    int low = 0, high = a.number_of_segments - 1;  // the last segment that starts at or before this run
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (a.segments[middle].offset <= begin * MOMENT_GROUP) low = middle;
        else high = middle - 1;
    }
    for (; low < a.number_of_segments; low++) {
        const Segment segment = a.segments[low];
        const int64_t start = segment.offset / MOMENT_GROUP, stop = start + (segment.size + MOMENT_GROUP - 1) / MOMENT_GROUP;
        if (start >= end) return;
        const int64_t first = max(begin, start), last = min(end, stop);
        const int run = static_cast<int>((first - start + ADAM_RUN - 1) / ADAM_RUN + threadIdx.x / 32) * ADAM_RUN;
        const int runs_end = static_cast<int>(last - start);
        uint32_t top;
        if (skip)
            top = weights_amax<typename W::Value>(a, first + threadIdx.x / 32 * TEAMS, last);
        else if (segment.m.format == Format::F32 && segment.v.format == Format::F32)  // norm weights and biases, in every optimizer
            top = update_segment<W, Format::F32, Format::F32>(a, segment, run, runs_end, table_m, table_v);
        else
            top = update_segment<W, M, V>(a, segment, run, runs_end, table_m, table_v);
        if (segment.amax) raise_by_warp(&segment.amax->amax, top);
    }
}

// For the report: what a moment that one more gradient leads to would lose. Nothing is changed.
template <class T, bool SECOND>
__global__ void __launch_bounds__(32 * ADAM_WARPS) measure_moment_kernel(MomentFormat f, Factors factors, MomentView moment, Plain<T> gradients,
                                                                         int64_t size, QuantStats* stats) {
    using Io = MomentIo<Format::E4M3>;
    __shared__ float table[128];
    fill_table(f, table);
    __syncthreads();
    const int64_t wanted = int64_t(blockIdx.x) * ADAM_GROUPS + threadIdx.x / TEAM, group = min(wanted, (size - 1) / MOMENT_GROUP);
    const int64_t i = group * MOMENT_GROUP + threadIdx.x % TEAM * CHUNK;
    Values x, back, w{}, other{};
    const GroupScale old{moment.max[group], f.expand ? moment.k[group] : 1.0f, 0};
    const float scaled = Io::decode<SECOND>(Io::load(moment, i), old, f, table, x);
    for (int j = 0; j < CHUNK; j++) {
        const float g = static_cast<float>(gradients.data[i + j]);
        if (SECOND) adamw_element(factors, 0, factors.beta2 * scaled, 0, g, other[j], x[j], w[j]);
        else adamw_element(factors, factors.beta1 * scaled, 0, 0, g, x[j], other[j], w[j]);
    }
    GroupScale scale{}, unused{};
    group_scales(f, f, x, x, scale, unused);
    const Io::Raw raw{Io::encode<SECOND>(f, scale, x)};
    const float back_scale = Io::decode<SECOND>(raw, scale, f, table, back);
    Counts counts;
    for (int j = 0; j < CHUNK && wanted == group && i + j < size; j++) {
        counts.add(x[j], back[j] * back_scale);
        counts.flushed += x[j] != 0 && (raw.byte(j) & 0x7Fu) == 0;
    }
    counts.add_to(stats);
}

MomentFormat moment_format(Format f, bool expand) {
    if (!is_scaled(f)) return {false, false, 1, 0, 1};
    const double max = info(f).max;
    return {f == Format::E5M2, expand, info(f).max, static_cast<float>(std::log2(max)), static_cast<float>(std::log2(max / info(f).min))};
}

template <class W, Format M, Format V>
void launch_adamw(const AdamArguments& a, cudaStream_t s) {
    // In as many rounds as blocks are long enough for: groups that take longer lie together (rows of tokens that no longer occur), and whoever has
    // none of them takes more blocks.
    const int64_t at_once = int64_t(multiprocessors()) * ADAM_BLOCKS_PER_SM, rounds = std::max<int64_t>(1, a.groups / (at_once * ADAM_GROUPS_A_BLOCK));
    const unsigned grid = static_cast<unsigned>(std::min(ceil_div(a.groups, ADAM_GROUPS), at_once * rounds));
    adamw_kernel<W, M, V><<<grid, 32 * ADAM_WARPS, 0, s>>>(a);
    CHECK_LAUNCH("adamw");
}

// One scale a tensor (FP8-LM): all new moments have to be known before the first is encoded. So they are computed twice: once for their maxima,
// which go to max[1] while max[0] still decodes, and again to be encoded. Formats are told apart as the kernel runs.
__device__ bool has_scale(const MomentView& m) { return m.format != Format::F32 && m.format != Format::BF16; }
__device__ float whole_scale(const MomentView& m, const MomentFormat& f, int which) { return has_scale(m) ? scale_of(f.max, m.max[which]) : 1.0f; }

__device__ uint32_t half_pair(float lo, float hi, float inverse) {  // saturates
    const __half2 two = __floats2half2_rn(fminf(fmaxf(lo * inverse, -65504.0f), 65504.0f), fminf(fmaxf(hi * inverse, -65504.0f), 65504.0f));
    return *reinterpret_cast<const uint32_t*>(&two);
}
__device__ float2 unpack_half(uint32_t two) { return __half22float2(*reinterpret_cast<const __half2*>(&two)); }

__device__ void load_whole(const MomentView& m, int64_t i, Values& x) {
    if (m.format == Format::F32) {
        const Plain<float> held{static_cast<float*>(m.codes)};
        held.values(held.load(i), x);
    } else if (m.format == Format::BF16) {
        const Plain<bf16> held{static_cast<bf16*>(m.codes)};
        held.values(held.load(i), x);
    } else if (m.format == Format::F16) {
        const uint4 raw = get<uint4>(static_cast<uint16_t*>(m.codes) + i);
        const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 two = unpack_half(words[j]);
            x[2 * j] = two.x, x[2 * j + 1] = two.y;
        }
    } else {
        decode(m.format == Format::E5M2, get<uint2>(static_cast<uint8_t*>(m.codes) + i), 1.0f, x);
    }
}
__device__ void store_whole(const MomentView& m, int64_t i, Values& x, float inverse) {
    if (m.format == Format::F32) {
        Plain<float>{static_cast<float*>(m.codes)}.store(i, x, true);
    } else if (m.format == Format::BF16) {
        Plain<bf16>{static_cast<bf16*>(m.codes)}.store(i, x, true);
    } else if (m.format == Format::F16) {
        put(static_cast<uint16_t*>(m.codes) + i, make_uint4(half_pair(x[0], x[1], inverse), half_pair(x[2], x[3], inverse),
                                                           half_pair(x[4], x[5], inverse), half_pair(x[6], x[7], inverse)));
    } else {
        put(static_cast<uint8_t*>(m.codes) + i, encode(m.format == Format::E5M2, x, inverse));
    }
}

constexpr int WHOLE_THREADS = 256;
__device__ int64_t whole_chunk() { return (int64_t(blockIdx.x) * WHOLE_THREADS + threadIdx.x) * CHUNK; }
__device__ int64_t whole_stride() { return int64_t(gridDim.x) * WHOLE_THREADS * CHUNK; }

// blockIdx.y is the segment.
template <class W, bool ENCODE>
__global__ void __launch_bounds__(WHOLE_THREADS) adamw_whole_kernel(const AdamArguments a) {
    using T = typename W::Value;
    const Segment segment = a.segments[blockIdx.y];
    const bool skip = a.state->skip;
    if (!ENCODE && (skip || (!has_scale(segment.m) && !has_scale(segment.v)))) return;
    const int64_t start = segment.offset, size = (segment.size + MOMENT_GROUP - 1) / MOMENT_GROUP * MOMENT_GROUP;
    const Weights weights{static_cast<T*>(a.w.values) + start, a.w.remainder ? a.w.remainder + start : nullptr, a.w.format};
    const float keep_m = a.f.beta1 * whole_scale(segment.m, a.m, 0), keep_v = a.f.beta2 * whole_scale(segment.v, a.v, 0);
    const float inverse_m = __frcp_rn(whole_scale(segment.m, a.m, 1)), inverse_v = __frcp_rn(whole_scale(segment.v, a.v, 1));
    const float scale = a.state->scale, decay = segment.decays ? a.f.decay : 0.0f;
    uint32_t top_w = 0, top_m = 0, top_v = 0;
    for (int64_t i = whole_chunk(); i < size; i += whole_stride()) {
        Values w, g, m, v;
        W::decode(W::load(weights, i), w);
        decode_gradients<T>(a.gradients, load_gradients<T>(a.gradients, start - a.first + i), g);
        if (skip) {  // nothing changes, but the weights' amax is still wanted
            for (int j = 0; j < CHUNK; j++) top_w = max(top_w, magnitude(static_cast<float>(static_cast<const T*>(weights.values)[i + j])));
            continue;
        }
        load_whole(segment.m, i, m);
        load_whole(segment.v, i, v);
#pragma unroll
        for (int j = 0; j < CHUNK; j++) {
            adamw_element(a.f, keep_m, keep_v, decay, g[j] * scale, m[j], v[j], w[j]);
            top_m = max(top_m, magnitude(m[j])), top_v = max(top_v, magnitude(v[j]));
        }
        if (!ENCODE) continue;
        uint64_t random[2] = {0, 0};
        if (W::STOCHASTIC)
            for (int q : {0, 1}) random[q] = rounding_bits(a.rounding, static_cast<uint64_t>(start + i) / 4 + q);
        uint32_t top = 0;
        W::store(weights, i, w, random, true, top);
        top_w = max(top_w, W::largest(top));
        store_whole(segment.m, i, m, inverse_m);
        store_whole(segment.v, i, v, inverse_v);
    }
    if (ENCODE && segment.amax) raise_by_warp(&segment.amax->amax, top_w);
    if (!ENCODE && has_scale(segment.m)) raise_by_warp(segment.m.max + 1, top_m);
    if (!ENCODE && has_scale(segment.v)) raise_by_warp(segment.v.max + 1, top_v);
}

// Before: nothing is known of the new moments. After: they are what the codes were made of.
__global__ void whole_maxima_kernel(const Segment* segments, int number_of_segments, const GradientState* state, bool after) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= number_of_segments || (after && state->skip)) return;
    for (const MomentView& m : {segments[i].m, segments[i].v})
        if (has_scale(m)) m.max[after ? 0 : 1] = after ? m.max[1] : 0.0f;
}

template <class W>
void launch_adamw_whole(const AdamArguments& a, cudaStream_t s) {
    const int64_t each = WHOLE_THREADS * CHUNK, wanted = ceil_div(a.groups * MOMENT_GROUP, each);
    const dim3 grid(static_cast<unsigned>(std::min<int64_t>(wanted, multiprocessors())), static_cast<unsigned>(a.number_of_segments));
    whole_maxima_kernel<<<blocks(a.number_of_segments, 128), 128, 0, s>>>(a.segments, a.number_of_segments, a.state, false);
    CHECK_LAUNCH("adamw, maxima");
    adamw_whole_kernel<W, false><<<grid, WHOLE_THREADS, 0, s>>>(a);
    CHECK_LAUNCH("adamw, pass one");
    adamw_whole_kernel<W, true><<<grid, WHOLE_THREADS, 0, s>>>(a);
    CHECK_LAUNCH("adamw, pass two");
    whole_maxima_kernel<<<blocks(a.number_of_segments, 128), 128, 0, s>>>(a.segments, a.number_of_segments, a.state, true);
    CHECK_LAUNCH("adamw, maxima");
}

// As measure_moment_kernel, in two passes: the maximum, and what is lost.
template <class T, bool SECOND, bool COUNT>
__global__ void __launch_bounds__(WHOLE_THREADS) measure_whole_kernel(MomentFormat f, Factors factors, MomentView moment, Plain<T> gradients,
                                                                      int64_t size, QuantStats* stats) {
    const float old_scale = whole_scale(moment, f, 0), new_scale = whole_scale(moment, f, 1), inverse = __frcp_rn(new_scale);
    uint32_t top = 0;
    Counts counts;
    for (int64_t i = whole_chunk(); i < size; i += whole_stride()) {
        Values x, w{}, other{};
        load_whole(moment, i, x);
        for (int j = 0; j < CHUNK && i + j < size; j++) {
            const float g = static_cast<float>(gradients.data[i + j]);
            if (SECOND) adamw_element(factors, 0, factors.beta2 * old_scale, 0, g, other[j], x[j], w[j]);
            else adamw_element(factors, factors.beta1 * old_scale, 0, 0, g, x[j], other[j], w[j]);
            top = max(top, magnitude(x[j]));
            if (!COUNT) continue;
            const float code = moment.format == Format::F16 ? unpack_half(half_pair(x[j], 0, inverse)).x
                                                           : decode2(f.e5m2, encode2(f.e5m2, x[j] * inverse, 0)).x;
            counts.add(x[j], code * new_scale);
            counts.flushed += x[j] != 0 && code == 0;
        }
    }
    if (COUNT) counts.add_to(stats);
    else raise_by_warp(moment.max + 1, top);
}

template <bool SECOND, class T>
void measure_whole(const MomentFormat& f, const MomentView& moment, Plain<T> gradients, int64_t size, QuantStats* stats, cudaStream_t s) {
    const unsigned grid = static_cast<unsigned>(std::min<int64_t>(blocks(size, WHOLE_THREADS * CHUNK), 4 * multiprocessors()));
    check(cudaMemsetAsync(moment.max + 1, 0, sizeof(float), s), "Clearing a maximum failed");
    measure_whole_kernel<T, SECOND, false><<<grid, WHOLE_THREADS, 0, s>>>(f, factors({1, 0.0f}), moment, gradients, size, stats);
    measure_whole_kernel<T, SECOND, true><<<grid, WHOLE_THREADS, 0, s>>>(f, factors({1, 0.0f}), moment, gradients, size, stats);
    CHECK_LAUNCH("measure_moments, one scale a tensor");
}

// The kernel is compiled for formats by how they are stored: E5M2 goes with E4M3.
template <class F>
void with_format(Format f, F use) {
    require(f != Format::F16, "no kernel holds groups of a moment in FP16");
    switch (f) {
        case Format::F32: return use(std::integral_constant<Format, Format::F32>());
        case Format::BF16: return use(std::integral_constant<Format, Format::BF16>());
        default: return use(std::integral_constant<Format, Format::E4M3>());
    }
}

}  // namespace

void adamw(const AdamW& a, const OptimizerFormat& optimizer, const Segment* segments, int number_of_segments, const Range& range, const Weights& w,
           uint64_t rounding, const void* gradients, Format format, const GradientState* state, cudaStream_t s) {
    require(format == Format::F32 || format == w.format, "gradients are F32, or in the format of the weights");
    require(range.first % MOMENT_GROUP == 0 && range.count % MOMENT_GROUP == 0, "the flat order is not padded to groups");
    if (range.count == 0) return;
    const AdamArguments arguments{factors(a), moment_format(optimizer.m, optimizer.expand), moment_format(optimizer.v, optimizer.expand), segments,
                                  number_of_segments, range.first, range.count / MOMENT_GROUP, w, rounding,
                                  {const_cast<void*>(gradients), format == Format::F32}, state};
    if (optimizer.granularity == PER_TENSOR) {
        require(!optimizer.expand && !optimizer.keep_positive, "whole tensors are rounded plainly");
        if (w.format == Format::F32) return launch_adamw_whole<FloatWeights>(arguments, s);
        return w.remainder ? launch_adamw_whole<MasterWeights>(arguments, s) : launch_adamw_whole<StochasticWeights>(arguments, s);
    }
    with_format(optimizer.m, [&](auto m) {
        with_format(optimizer.v, [&](auto v) {
            constexpr Format M = decltype(m)::value, V = decltype(v)::value;
            if (w.format == Format::F32) launch_adamw<FloatWeights, M, V>(arguments, s);
            else if (w.remainder) launch_adamw<MasterWeights, M, V>(arguments, s);
            else launch_adamw<StochasticWeights, M, V>(arguments, s);
        });
    });
}

void measure_moments(const OptimizerFormat& optimizer, const Segment& segment, const void* gradients, Format format, QuantStats* first,
                     QuantStats* second, cudaStream_t s) {
    const unsigned grid = blocks(segment.size, MOMENT_GROUP * ADAM_GROUPS);
    const Factors f = factors({1, 0.0f});
    auto measure_as = [&](auto held) {
        if (optimizer.granularity == PER_TENSOR) {
            const MomentFormat fm = moment_format(segment.m.format, false), fv = moment_format(segment.v.format, false);
            if (is_scaled(segment.m.format)) measure_whole<false>(fm, segment.m, held, segment.size, first, s);
            if (is_scaled(segment.v.format)) measure_whole<true>(fv, segment.v, held, segment.size, second, s);
            return;
        }
        if (is_fp8(segment.m.format))
            measure_moment_kernel<typename decltype(held)::Stream, false><<<grid, 32 * ADAM_WARPS, 0, s>>>(
                moment_format(segment.m.format, optimizer.expand), f, segment.m, held, segment.size, first);
        if (is_fp8(segment.v.format))
            measure_moment_kernel<typename decltype(held)::Stream, true><<<grid, 32 * ADAM_WARPS, 0, s>>>(
                moment_format(segment.v.format, optimizer.expand), f, segment.v, held, segment.size, second);
        CHECK_LAUNCH("measure_moments");
    };
    if (format == Format::F32) measure_as(plain<float>(gradients));
    else measure_as(plain<bf16>(gradients));
}

}  // namespace coat::gpu
