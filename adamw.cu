// adamw.cu - section 4 of the paper on the GPU: a step of AdamW whose moments m and v are stored in FP8, with
// dynamic range expansion (interface: adamw.h; the same on the CPU: reference/optimizer.cpp).
//
// One kernel clips the gradients, decodes m and v, updates m, v and the weights in FP32 by the equations of
// gpu/adamw.cuh, and encodes the new m and v.
//
// This file goes from small to large. Its words for the pieces of a parameter:
//
//   part   word           what it is                                       updated by
//   1      element        a weight, with its m and v
//   2      chunk          eight consecutive elements                       a thread
//   3      span           128 consecutive elements                         half a warp: 16 lanes
//          moment group   the m of a span, or its v
//          field          max or k of a moment group: a span has four
//   4      pair           two neighbouring spans                           a warp
//          bundle         eight consecutive spans                          a warp, one pair after the other
//   5      the bundles of all parameters                                   thread blocks of eight warps
//   6      moments without expansion (this can wait)
//   7      the launch
//
// Elements, spans and bundles are counted from the beginning of their parameter. Part 5 also numbers the
// bundles of all parameters.
//
// Which bytes move. An update moves 14.25 bytes for each element:
//   2 x 6.125   read and written: the BF16 weight (2), the remainder of its FP32 master (2), m (1), v (1),
//               and its part of max and k of two moment groups (16 bytes for 128 elements: 0.125)
//   2           only read: the gradient in BF16
// An H200 moves these bytes at 87% of its copy bandwidth.
//
// If this is too steep, dev/ladders/adamw.cu builds up the ideas of this kernel one by one, in kernels that
// have fewer cases.
#include "gpu/adamw.cuh"

namespace coat::gpu {
namespace {

// ===========================================================================================================
// 1. Dynamic range expansion of one element of a moment (paper, section 4.2)
//
// The functions are those of reference/optimizer.cpp: expansion_exponent(), expand() and contract(). But
// expand_magnitude() returns |y|, and contract_to_ratio() returns |x| / max. (Part 2 adds the signs.
// FactoredMoments in gpu/adamw.cuh says why max is left out.)
//
// A power a^b is computed as 2^(b log2 a). Each logarithm and each exponential of an element is one
// instruction (gpu/device.cuh).

// What a moment group stores besides its codes (common/formats.h).
struct MaxAndK {
    float max, k;
};

// All moments of this file are in E4M3. (FMAX is in gpu/device.cuh.)
constexpr float E4M3_FMIN = format_info(Format::E4M3).fmin;  // 2^-9
constexpr float LOG2_FMAX = 8.80735492f;                     // log2(448)
constexpr float LOG2_RANGE = 17.80735492f;                   // log2(448 / 2^-9)

// Equation 4: k = log(R) / log(R_X).
//   R     the range of the format: FMAX / FMIN
//   R_X   the range of the moment group: its largest magnitude over its smallest that is not zero
// k is rounded to a multiple of 1/256, from 1/16 to 64. If all magnitudes are equal, log2(R_X) is 0, and its
// reciprocal is infinite: k is 64. In a moment group of zeros k is 1. (There the difference of the logarithms
// is NaN. fmaxf() makes it 0, and the result is not used.)
__device__ float expansion_exponent(float max_magnitude, float min_magnitude) {
    const float log2_r_x = fmaxf(fast_log2(max_magnitude) - fast_log2(min_magnitude), 0.0f);
    const float rounded = rintf(256.0f * LOG2_RANGE * fast_reciprocal(log2_r_x)) * 0x1p-8f;
    const float k = fminf(fmaxf(rounded, 0.0625f), 64.0f);
    return max_magnitude == 0 ? 1.0f : k;  // a select, not a branch
}

// Expand: |y| = FMAX (|x| / max)^k. For x = 0 the logarithm is -infinity, and y is 0.
__device__ float expand_magnitude(float x, float inverse_max, float k) {
    return fast_exp2(__fmaf_rn(k, fast_log2_of_normal(fabsf(x) * inverse_max), LOG2_FMAX));
}
// 1 / max: the fast reciprocal, and one iteration of Newton's method. For a moment group of zeros r is 2^126,
// and the result is r + r (1 - 0 r) = 2^127, not infinity. Then |x| / max is 0, as it must be, and not NaN.
__device__ float inverse_of_max(float max) {
    const float r = fast_reciprocal(fmaxf(max, 0x1p-126f));
    return __fmaf_rn(r, __fmaf_rn(-max, r, 1.0f), r);
}

// Contract: the ratio |x| / max = (|y| / FMAX)^(1/k). |y| / FMAX is a power of it, ratio^k. log2_of_power is
// the logarithm of this power, from a table.
__device__ float contract_to_ratio(float log2_of_power, float inverse_k) {
    return fast_exp2(log2_of_power * inverse_k);
}

// ===========================================================================================================
// 2. A thread's eight elements of a moment, encoded and decoded
//
// Eight codes are the bytes of a uint2. A code has a sign bit, which is 0 in v: v has no negative elements.
// IS_V says at compile time whether the moment is v.

// The codes of eight magnitudes y, with the signs of x.
template <bool IS_V> __device__ uint2 encode_with_signs(ChunkValues& y, const ChunkValues& x) {
    if (!IS_V)
        for (int j = 0; j < CHUNK_SIZE; j++) y[j] = copysignf(y[j], x[j]);
    return encode<Format::E4M3>(y, /*inverse_scale=*/1.0f);
}

__device__ uint32_t code_of(uint2 codes, int j) {  // code j of eight: byte j % 4 of one of two words
    return ((j < 4 ? codes.x : codes.y) >> (8 * (j % 4))) & 0xFFu;
}

// The magnitude with the sign of its FP8 code, whose sign bit is moved to where FP32 has its sign bit.
template <bool IS_V> __device__ float with_sign(float magnitude, uint32_t code) {
    return IS_V ? magnitude : copysignf(magnitude, __uint_as_float(code << 24));
}

// A table of the codes of a moment, in shared memory: what decoding needs of a code without its sign. With
// expansion it is log2(y / FMAX), where y is the value of the code. So the tables of m and v save a thread
// the 16 logarithms of its 8 + 8 elements.
constexpr int CODES_WITHOUT_SIGN = 128;  // seven bits
using Table = float[CODES_WITHOUT_SIGN];

// A codec says how a moment is encoded and decoded. The kernel is compiled for two of them, those of m and of
// v, which together are its template parameter Codecs. A codec has four functions:
//   k_of()          the k of a moment group
//   decode()        a thread's eight elements, from their codes
//   encode()        the codes of a thread's eight elements
//   table_entry()   what the table has for a code
// In the optimizer coat both are an ExpansionCodec. (Its careful path can wait: an `if` of decode(), one of
// encode(), and all functions after table_entry(). Part 6, another codec, can wait, too.)
template <bool IS_V> struct ExpansionCodec {
    static __device__ float k_of(float max_magnitude, float min_magnitude) {
        return expansion_exponent(max_magnitude, min_magnitude);
    }

    // The factor is max.
    static __device__ FactoredMoments decode(uint2 codes, const MaxAndK& max_and_k, const Table& table) {
        const float inverse_k = fast_reciprocal(max_and_k.k);
        FactoredMoments moments;
        moments.factor = max_and_k.max;
        for (int j = 0; j < CHUNK_SIZE; j++) {
            const uint32_t code = code_of(codes, j);
            const float ratio = contract_to_ratio(table[code % CODES_WITHOUT_SIGN], inverse_k);
            moments.multiples[j] = with_sign<IS_V>(ratio, code);
        }
        if (is_wide(max_and_k)) contract_carefully(codes, max_and_k, table, moments);
        return moments;
    }

    static __device__ uint2 encode(const ChunkValues& x, const MaxAndK& max_and_k) {
        const float inverse_max = inverse_of_max(max_and_k.max);
        ChunkValues y;
        for (int j = 0; j < CHUNK_SIZE; j++) y[j] = expand_magnitude(x[j], inverse_max, max_and_k.k);
        if (is_wide_or_small(max_and_k)) expand_carefully(x, max_and_k, y);
        return encode_with_signs<IS_V>(y, x);
    }

    static __device__ float table_entry(uint32_t code) {
        const float y = decode_two<Format::E4M3>(code).x;
        return log2f(y) - log2f(FMAX<Format::E4M3>);
    }

    // The careful path, for a few moment groups. (This can wait: go on with part 3.) They are so wide or so
    // small that an intermediate result of part 1 is not a normal number of FP32. decode() and encode()
    // compute the eight elements as in any other moment group. Then contract_carefully() and
    // expand_carefully() replace what was computed.
    //
    // nvcc inlines the careful path by itself. It should stay so: in an earlier form of this kernel, a
    // __noinline__ function for it made the rest up to 24% slower.

    // A moment group is wide if R_X may exceed about 2^120. Then decoding and encoding need care. (log2(R_X)
    // is LOG2_RANGE / k.)
    static __device__ bool is_wide(const MaxAndK& max_and_k) { return LOG2_RANGE > 120.0f * max_and_k.k; }
    // Encoding divides by max, so it needs care also if max is very small: inverse_of_max() is wrong below
    // 2^-126, and 2^-100 keeps away from there.
    static __device__ bool is_wide_or_small(const MaxAndK& max_and_k) {
        const bool large_enough = max_and_k.max >= 0x1p-100f || max_and_k.max == 0;
        return is_wide(max_and_k) || !large_enough;
    }

    // The multiples become |x|, not |x| / max, and the factor 1: |x| / max alone may underflow where |x| does
    // not. If |x| underflows, too, the result is 0, where the CPU's contract() returns 2^-149. For v this is
    // harmless: beside eps = 1e-8 the root of 2^-149 vanishes, so the update is the same.
    static __device__ void contract_carefully(uint2 codes, const MaxAndK& max_and_k, const Table& table,
                                              FactoredMoments& moments) {
        const float inverse_k = fast_reciprocal(max_and_k.k);
        moments.factor = 1.0f;
        for (int j = 0; j < CHUNK_SIZE; j++) {
            const uint32_t code = code_of(codes, j);
            const float log2_of_power = table[code % CODES_WITHOUT_SIGN];
            const float sqrt_of_ratio = exp2f(0.5f * (log2_of_power * inverse_k));
            const float magnitude = sqrt_of_ratio * max_and_k.max * sqrt_of_ratio;
            moments.multiples[j] = with_sign<IS_V>(magnitude, code);
        }
    }

    // Here intermediate results stay normal: the difference of two logarithms takes the place of the
    // logarithm of a ratio.
    //
    // An element of v above zero must not get the code 0: the update divides by its root and eps, and eps
    // alone is tiny. So its y is raised to FMIN here. expand_magnitude() need not do so. If R_X is at most
    // about 2^120, the smallest element of the moment group, max / R_X, gets the code of FMIN:
    //   - With the exact k of equation 4, y would be FMAX (1 / R_X)^k = FMIN.
    //   - k is rounded to a multiple of 1/256, so k may be larger by 1/512. Then y is FMIN R_X^(-1/512), at
    //     least 2^(-120/512) = 0.85 FMIN. This is nearer to FMIN than to 0, so y is rounded to FMIN.
    //   - The limit of 64 makes k smaller, and y larger. (The limit of 1/16 concerns wide moment groups.)
    static __device__ void expand_carefully(const ChunkValues& x, const MaxAndK& max_and_k, ChunkValues& y) {
        for (int j = 0; j < CHUNK_SIZE; j++) {
            const float log2_ratio = log2f(fabsf(x[j])) - log2f(max_and_k.max);
            y[j] = FMAX<Format::E4M3> * fast_exp2(max_and_k.k * log2_ratio);
            if (IS_V && x[j] > 0 && y[j] < E4M3_FMIN) y[j] = E4M3_FMIN;
        }
    }
};

// The codecs of the optimizer coat: that of m, and that of v.
struct ExpansionCodecs {
    using M = ExpansionCodec</*IS_V=*/false>;
    using V = ExpansionCodec</*IS_V=*/true>;
};

// ===========================================================================================================
// 3. A span, which half a warp updates
//
// Each of 16 lanes has eight elements of a span. A warp updates two neighbouring spans, a pair, at the same
// time:
//
//   lane        0       1        ...   15            16      17       ...   31
//   elements    0 - 7   8 - 15         120 - 127     0 - 7   8 - 15         120 - 127
//               of one span                          of the next span

constexpr int LANES_PER_SPAN = MOMENT_GROUP_SIZE / CHUNK_SIZE;  // 16

// The four fields of a span.
using SpanFields = MAndV<MaxAndK>;

// max and k of a moment group, from its new elements x in 16 lanes. Magnitudes are compared by their bits,
// which have the same order as integers. For a zero, bits - 1 is the largest integer, so the minimum leaves
// zeros out. (In a moment group of zeros max_magnitude and min_magnitude are 0.)
template <class Codec> __device__ MaxAndK max_and_k_of_new_moments(const ChunkValues& x) {
    uint32_t largest_bits = 0, smallest_bits_minus_1 = 0xFFFFFFFFu;
    for (int j = 0; j < CHUNK_SIZE; j++) {
        const uint32_t bits = magnitude_bits(x[j]);
        largest_bits = max(largest_bits, bits);
        smallest_bits_minus_1 = min(smallest_bits_minus_1, bits - 1);
    }
    for (int distance = 1; distance < LANES_PER_SPAN; distance *= 2) {
        largest_bits = max(largest_bits, __shfl_xor_sync(ALL_LANES, largest_bits, distance));
        smallest_bits_minus_1 =
            min(smallest_bits_minus_1, __shfl_xor_sync(ALL_LANES, smallest_bits_minus_1, distance));
    }
    const float max_magnitude = __uint_as_float(largest_bits);
    const float min_magnitude = __uint_as_float(smallest_bits_minus_1 + 1);
    return {.max = max_magnitude, .k = Codec::k_of(max_magnitude, min_magnitude)};
}

// Loads with ld.global, the instruction for global memory. The compiler cannot know that a pointer which was
// read from a table points to global memory, so it would use the slower generic instruction.
template <class Value> __device__ Value load_global(const void* from) {
    return __ldca(static_cast<const Value*>(from));
}

// What a thread loads of a span: its eight elements, as they are stored.
template <class WeightsKind> struct LoadedElements {
    MAndV<uint2> codes;
    typename WeightsKind::StoredChunk w;
    Bf16OrFp32View::StoredChunk g;
};

// How many spans a parameter has. The last one may have fewer than 128 elements, and then padding.
__device__ int span_count(const AdamWParam& param) { return int(ceil_div(param.size, MOMENT_GROUP_SIZE)); }

// Loads, unpacks and stores a thread's eight elements of any span of a parameter.
template <class WeightsKind> struct ElementsOfThread {
    const AdamWArguments& arguments;
    const AdamWParam& param;
    const WeightsKind weights;  // all of the parameter
    MAndV<uint8_t*> codes;      // all of the parameter
    uint32_t largest_bits = 0;  // of the new weights so far: store() raises it

    __device__ ElementsOfThread(const AdamWArguments& arguments, const AdamWParam& param)
        : arguments(arguments), param(param), weights(arguments.weights, param.memory_offset) {
        codes.m = static_cast<uint8_t*>(param.m.data);
        codes.v = static_cast<uint8_t*>(param.v.data);
    }

    // The first of the eight elements, counted from the beginning of the parameter. A span past the last one
    // counts as the last span.
    __device__ int64_t position_in_param(int span) const {
        const int first_in_span = threadIdx.x % LANES_PER_SPAN * CHUNK_SIZE;
        const int clamped = min(span, span_count(param) - 1);
        return int64_t(clamped) * MOMENT_GROUP_SIZE + first_in_span;
    }
    __device__ LoadedElements<WeightsKind> load(int span) const {
        const int64_t i = position_in_param(span);
        return {.codes = {load_global<uint2>(codes.m + i), load_global<uint2>(codes.v + i)},
                .w = weights.load(i),
                .g = arguments.gradients.load(param.memory_offset - arguments.elements.first + i)};
    }
    // Unpacks weights and gradients. (A codec decodes the moments.)
    __device__ void unpack(const LoadedElements<WeightsKind>& loaded, ChunkValues& w, ChunkValues& g) const {
        weights.unpack(loaded.w, w);
        arguments.gradients.unpack(loaded.g, g);
    }
    // Stores weights and codes, but nothing for a span past the last one.
    __device__ void store(int span, const ChunkValues& w, const MAndV<uint2>& new_codes) {
        const bool live = span < span_count(param);
        const int64_t i = position_in_param(span);
        weights.store(i, w, arguments.rounding_key, param.flat_offset + i, live, largest_bits);
        if (!live) return;
        store_in_one_instruction(codes.m + i, new_codes.m);
        store_in_one_instruction(codes.v + i, new_codes.v);
    }
};

// Updates a thread's eight elements of a span, and stores them. Returns the new fields of the span.
//   loaded       what was loaded of these elements
//   old_fields   of the span, by which its moments are decoded
template <class Codecs, class WeightsKind>
__device__ SpanFields update_span(ElementsOfThread<WeightsKind>& elements, int span,
                                  const LoadedElements<WeightsKind>& loaded, const SpanFields& old_fields,
                                  const AdamWParamConstants& constants, const MAndV<Table>& tables) {
    using MCodec = typename Codecs::M;
    using VCodec = typename Codecs::V;
    ChunkValues w, g;
    elements.unpack(loaded, w, g);
    const MAndV<FactoredMoments> old{.m = MCodec::decode(loaded.codes.m, old_fields.m, tables.m),
                                     .v = VCodec::decode(loaded.codes.v, old_fields.v, tables.v)};
    const MAndV<ChunkValues> moments = adamw_of_chunk(constants, g, old, w);
    const SpanFields new_fields{.m = max_and_k_of_new_moments<MCodec>(moments.m),
                                .v = max_and_k_of_new_moments<VCodec>(moments.v)};
    const MAndV<uint2> codes{.m = MCodec::encode(moments.m, new_fields.m),
                             .v = VCodec::encode(moments.v, new_fields.v)};
    elements.store(span, w, codes);
    return new_fields;
}

// ===========================================================================================================
// 4. A bundle, which a warp updates
//
// Why there are bundles. The fields of a span are few bytes, 2% of those that move. But a warp that loads and
// stores them for each pair of spans spends half of its accesses to memory on fields. With a bundle, eight
// consecutive spans of a parameter, one load instruction and one store instruction of a warp move the fields
// of all eight.
//
// A warp updates a bundle as four pairs of spans, one pair after the other: pair p has the spans 2 p and
// 2 p + 1, one for each half of the warp.
//
// A bundle has 32 fields, one for each lane. Lanes 0 - 15 have the fields of the even spans, which they
// update. Lanes 16 - 31 have those of the odd spans:
//
//   lane        0      1      2      3      4 - 7   8 - 11  12 - 15   16 - 19  20 - 23  24 - 27  28 - 31
//   field       m.max  m.k    v.max  v.k    the same four of each of these spans:
//   span        0      0      0      0      2       4       6         1        3        5        7
//   pair        0      0      0      0      1       2       3         0        1        2        3
//
// A lane loads its field before the bundle is updated. When the field's pair is updated, shuffles pass it to
// all 16 lanes of the span, and afterwards the lane has the new field. After the bundle it stores the field.
//
// While a pair is updated, loads for later ones are already on their way, so that the warp does not wait for
// memory. Elements are loaded one pair ahead, and fields one bundle ahead. What a warp does for a bundle:
//
//   during the update of      pair 0        pair 1    pair 2    pair 3
//   loads the elements of     pair 1        pair 2    pair 3    pair 0 of the next bundle
//   loads the fields of       next bundle
//   stores the elements of    pair 0        pair 1    pair 2    pair 3
//   stores the fields of                                        this bundle, at the end
//
// Before the loop the warp loads the fields of its first bundle, and the elements of pair 0.
//
// On an H200 this kernel updates Llama-2-7B in 26.0 ms. The best kernel without bundles and without loads
// ahead needs 30.6 ms. (The ladder's rung 7 adds the loads ahead, and rung 8 the bundles. In its smaller
// kernel the two win nothing: the answer to rung 8 says why.)

constexpr int SPANS_PER_PAIR = 32 / LANES_PER_SPAN;                  // 2: one for each half of the warp
constexpr int SPANS_PER_BUNDLE = BUNDLE_SIZE / MOMENT_GROUP_SIZE;    // 8
constexpr int PAIRS_PER_BUNDLE = SPANS_PER_BUNDLE / SPANS_PER_PAIR;  // 4
constexpr int FIELDS_PER_SPAN = 4;                                   // m.max, m.k, v.max, v.k, in this order
static_assert(SPANS_PER_BUNDLE * FIELDS_PER_SPAN == 32, "each lane has one field of a bundle");
constexpr int WARPS_PER_BLOCK = 8;

// The field of a bundle that this lane has: the drawing of lanes, fields and spans above.
struct FieldOfLane {
    bool is_of_v, is_k;
    int pair, span_in_bundle;  // counted from the beginning of the bundle
    // This field of each span of the parameter. It is null if the field is a k, and the moment has no k.
    float* in_memory;
    int param_spans;

    explicit __device__ FieldOfLane(const AdamWParam& param) {
        const int lane = threadIdx.x % 32;
        is_of_v = lane % FIELDS_PER_SPAN >= 2;
        is_k = lane % 2 == 1;
        pair = lane % LANES_PER_SPAN / FIELDS_PER_SPAN;
        span_in_bundle = pair * SPANS_PER_PAIR + lane / LANES_PER_SPAN;
        const MomentRef moment = is_of_v ? param.v : param.m;
        in_memory = is_k ? moment.k : moment.max;
        param_spans = span_count(param);
    }

    // If the span is past the last one of the parameter, load() reads the field of the last span, and store()
    // does nothing.
    __device__ float load(int bundle) const {
        if (!in_memory) return 1.0f;
        const int span = bundle * SPANS_PER_BUNDLE + span_in_bundle;
        return load_global<float>(in_memory + min(span, param_spans - 1));
    }
    __device__ void store(int bundle, float field) const {
        const int span = bundle * SPANS_PER_BUNDLE + span_in_bundle;
        if (in_memory && span < param_spans) store_in_one_instruction(in_memory + span, field);
    }
    // This lane's field, out of the four of its span.
    __device__ float own_field_of(const SpanFields& fields) const {
        const MaxAndK max_and_k = is_of_v ? fields.v : fields.m;
        return is_k ? max_and_k.k : max_and_k.max;
    }
};

// The four fields of the span that this half of the warp updates in a pair, from the lanes that have them.
// `field` is what this lane has.
__device__ SpanFields fields_from_lanes(float field, int pair) {
    auto shuffle = [&](int number) {  // field `number` of the span
        return __shfl_sync(ALL_LANES, field, pair * FIELDS_PER_SPAN + number, LANES_PER_SPAN);
    };
    const MaxAndK m{.max = shuffle(0), .k = shuffle(1)};
    const MaxAndK v{.max = shuffle(2), .k = shuffle(3)};
    return {.m = m, .v = v};
}

// A warp updates bundles of a parameter: first_in_param, first_in_param + 8, and so on, below end_in_param.
// (The other seven warps of the block update those between.) Returns the bits of the largest magnitude of
// this lane's new weights.
//
// If the parameter has an odd number of spans, the last span has no partner in its pair. Then the second half
// of the warp computes the last span, too, and stores nothing.
template <class WeightsKind, class Codecs>
__device__ uint32_t update_bundles(const AdamWArguments& arguments, const AdamWParam& param,
                                   int first_in_param, int end_in_param, const MAndV<Table>& tables) {
    if (first_in_param >= end_in_param) return 0;
    ElementsOfThread<WeightsKind> elements(arguments, param);
    const FieldOfLane field_of_lane(param);
    const AdamWParamConstants constants = constants_of(arguments, param);

    // The span that this half of the warp updates in a pair.
    const int half_of_warp = threadIdx.x % 32 / LANES_PER_SPAN;  // 0 or 1
    auto span_of = [&](int bundle, int pair) {
        return bundle * SPANS_PER_BUNDLE + pair * SPANS_PER_PAIR + half_of_warp;
    };
    LoadedElements<WeightsKind> next_loaded = elements.load(span_of(first_in_param, 0));
    float next_field = field_of_lane.load(first_in_param);
    for (int bundle = first_in_param; bundle < end_in_param; bundle += WARPS_PER_BLOCK) {
        const int next_bundle = bundle + WARPS_PER_BLOCK;
        float field = next_field;
        next_field = field_of_lane.load(next_bundle);
        // The last bundle of the parameter may have fewer than four pairs.
        const int spans = span_count(param) - bundle * SPANS_PER_BUNDLE;
        const int pairs = min(PAIRS_PER_BUNDLE, int(ceil_div(spans, SPANS_PER_PAIR)));
#pragma unroll 1  // one copy of this long body
        for (int pair = 0; pair < pairs; pair++) {
            const LoadedElements<WeightsKind> loaded = next_loaded;
            // After the warp's last pair of all, this is some other span, whose elements nobody uses.
            const int next_span = pair + 1 < pairs ? span_of(bundle, pair + 1) : span_of(next_bundle, 0);
            next_loaded = elements.load(next_span);
            const SpanFields old_fields = fields_from_lanes(field, pair);
            const SpanFields new_fields =
                update_span<Codecs>(elements, span_of(bundle, pair), loaded, old_fields, constants, tables);
            if (pair == field_of_lane.pair) field = field_of_lane.own_field_of(new_fields);
        }
        field_of_lane.store(bundle, field);
    }
    return elements.largest_bits;
}

// ===========================================================================================================
// 5. The kernel: the bundles that a thread block updates
//
// The bundles of all parameters are numbered (AdamWParam::bundles_before). Each block has a range of those of
// the update, and the ranges are equally long, but for one bundle. So a block may have the end of one
// parameter and the beginning of the next:
//
//   parameters | 0                   | 1 | 2                                 | 3     |
//   blocks     | 0           | 1           | 2           | 3           | 4           |
//
// The block goes through the parameters to which its bundles belong. In each parameter warp 0 takes the first
// of these bundles, warp 1 the second, and so on; after the last warp, warp 0 takes the next one. (Parameters
// with FP32 moments, those of norms and biases, are passed over.)

constexpr int BLOCKS_PER_SM = 2;  // on a multiprocessor at once: a thread may then have 128 registers

// The bundles [begin, end) of all that are numbered.
struct BundleRange {
    int64_t begin, end;
};
__device__ BundleRange bundles_of(const AdamWParam& param) {
    const int64_t begin = param.bundles_before;
    return {.begin = begin, .end = begin + ceil_div(param.size, BUNDLE_SIZE)};
}
__device__ BundleRange bundles_of_block(const AdamWArguments& arguments) {
    const int64_t first = bundles_of(arguments.params[0]).begin;
    const int64_t count = bundles_of(arguments.params[arguments.param_count - 1]).end - first;
    return {.begin = first + count * blockIdx.x / gridDim.x,
            .end = first + count * (blockIdx.x + 1) / gridDim.x};
}
// The number of the parameter that has this bundle: the last one that begins with it or before it.
__device__ int param_of_bundle(const AdamWArguments& arguments, int64_t bundle) {
    int low = 0, high = arguments.param_count - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (arguments.params[middle].bundles_before <= bundle) low = middle;
        else high = middle - 1;
    }
    return low;
}

template <class Codec> __device__ void fill_table(Table& table) {
    for (uint32_t code = threadIdx.x; code < CODES_WITHOUT_SIGN; code += blockDim.x)
        table[code] = Codec::table_entry(code);
}

// The kernel is compiled for each WeightsKind (gpu/adamw.cuh, part 2), and for the Codecs of each optimizer.
template <class WeightsKind, class Codecs>
__global__ void __launch_bounds__(32 * WARPS_PER_BLOCK, BLOCKS_PER_SM)
    adamw_kernel(const AdamWArguments arguments) {
    __shared__ MAndV<Table> tables;
    if (arguments.state->skip) return;
    fill_table<typename Codecs::M>(tables.m);
    fill_table<typename Codecs::V>(tables.v);
    __syncthreads();
    const int warp = threadIdx.x / 32;
    const BundleRange of_block = bundles_of_block(arguments);
    for (int i = param_of_bundle(arguments, of_block.begin); i < arguments.param_count; i++) {
        const AdamWParam param = arguments.params[i];
        const BundleRange of_param = bundles_of(param);
        if (of_param.begin >= of_block.end) return;
        if (!param.has_fp8_moment_groups()) continue;
        // What the block has of the parameter.
        const int first_in_param = int(max(of_block.begin, of_param.begin) - of_param.begin);
        const int end_in_param = int(min(of_block.end, of_param.end) - of_param.begin);
        const uint32_t largest_bits = update_bundles<WeightsKind, Codecs>(
            arguments, param, first_in_param + warp, end_in_param, tables);
        if (param.weight_amax) raise_amax_by_warp(param.weight_amax, largest_bits);
    }
}

// ===========================================================================================================
// 6. Moments without expansion: the optimizer fp8 (this can wait)

// A moment group has one scale, max / FMAX, and no k.
template <bool IS_V> struct CodecWithoutExpansion {
    static __device__ float k_of(float, float) { return 1.0f; }  // nobody stores or reads it

    // The factor is the scale.
    static __device__ FactoredMoments decode(uint2 codes, const MaxAndK& max_and_k, const Table& table) {
        FactoredMoments moments;
        moments.factor = scale_of(FMAX<Format::E4M3>, max_and_k.max);
        for (int j = 0; j < CHUNK_SIZE; j++) {
            const uint32_t code = code_of(codes, j);
            moments.multiples[j] = with_sign<IS_V>(table[code % CODES_WITHOUT_SIGN], code);
        }
        return moments;
    }

    static __device__ uint2 encode(const ChunkValues& x, const MaxAndK& max_and_k) {
        const float inverse_scale = __frcp_rn(scale_of(FMAX<Format::E4M3>, max_and_k.max));
        ChunkValues y;
        for (int j = 0; j < CHUNK_SIZE; j++) {
            y[j] = fabsf(x[j]) * inverse_scale;
            // As with expansion, an element of v above zero must not get the code 0.
            if (IS_V && x[j] > 0 && y[j] < E4M3_FMIN) y[j] = E4M3_FMIN;
        }
        return encode_with_signs<IS_V>(y, x);
    }

    static __device__ float table_entry(uint32_t code) { return decode_two<Format::E4M3>(code).x; }
};

// The codecs of the optimizer fp8.
struct CodecsWithoutExpansion {
    using M = CodecWithoutExpansion</*IS_V=*/false>;
    using V = CodecWithoutExpansion</*IS_V=*/true>;
};

// ===========================================================================================================
// 7. The launch

// If a block has this many bundles, its start and its end take little of its time.
constexpr int64_t MIN_BUNDLES_PER_BLOCK = 2048;

// The number of blocks for an update: as many as the GPU runs at once, times `rounds`. This is the largest
// number with which each block has at least MIN_BUNDLES_PER_BLOCK: 12 for Llama-2-7B. In small updates, such
// as that of GPT-2, it is 1.
//   - Why there are several rounds. The bundles that take the careful path (part 2) are slow, and they are
//     neighbours: the embeddings of tokens that no longer occur. More blocks share out the slow bundles
//     better.
//   - If there are fewer bundles than the GPU runs blocks at once, each bundle has a block. A bundle is the
//     work of one warp, so the bundles are spread over all multiprocessors.
// `bundles` is nearly the number of the update's bundles: as many as its elements would fill, if no parameter
// had a short last bundle.
unsigned adamw_blocks(int64_t bundles) {
    const int64_t at_once = multiprocessors() * BLOCKS_PER_SM;
    const int64_t rounds = std::max<int64_t>(1, bundles / (at_once * MIN_BUNDLES_PER_BLOCK));
    return unsigned(std::min(bundles, at_once * rounds));
}

AdamWStepConstants step_constants(const AdamWOptions& options) {
    const double t = double(options.update_number);
    const double bias1 = 1 - std::pow(double(options.beta1), t);
    const double bias2 = 1 - std::pow(double(options.beta2), t);
    return {.lr = options.lr,
            .beta1 = options.beta1,
            .beta2 = options.beta2,
            .one_minus_beta1 = 1 - options.beta1,
            .one_minus_beta2 = 1 - options.beta2,
            .weight_decay = options.weight_decay,
            .root_factor = float(bias1 / std::sqrt(bias2)),
            .scaled_eps = float(bias1 * options.eps)};
}

// Calls f<Codecs>() with the codecs of an optimizer whose moments are in FP8 moment groups.
template <class F> void with_codecs(const OptimizerFormats& o, F f) {
    require(o.m_format == Format::E4M3 && o.v_format == Format::E4M3,
            "adamw.cu has no kernel for FP8 moments in another format than E4M3");
    if (o.expansion) f.template operator()<ExpansionCodecs>();
    else f.template operator()<CodecsWithoutExpansion>();
}

// The amaxes of the weights start at 0, because an update only raises them.
__global__ void clear_weight_amaxes_kernel(const AdamWArguments arguments) {
    const int64_t i = thread_of_grid();
    if (i >= arguments.param_count || arguments.state->skip) return;
    float* const weight_amax = arguments.params[i].weight_amax;
    if (weight_amax) *weight_amax = 0;
}

}  // namespace

void adamw(const AdamWOptions& options, const OptimizerFormats& optimizer, const ParamsToUpdate& params,
           const Weights& weights, uint64_t rounding_key, const GradientState* state, cudaStream_t stream) {
    require(is_fp8(optimizer.m_format) == is_fp8(optimizer.v_format),
            "first and second moments must both be in FP8, or neither");
    const AdamWArguments arguments{.constants = step_constants(options),
                                   .params = params.table,
                                   .param_count = params.count,
                                   .elements = params.elements,
                                   .weights = weights,
                                   .rounding_key = rounding_key,
                                   .gradients = bf16_or_fp32(params.gradients, params.gradient_format),
                                   .state = state};
    launch("clear_weight_amaxes", clear_weight_amaxes_kernel, block_count(params.count, 128), 128,
           /*shared_bytes=*/0, stream, arguments);
    update_other_params(optimizer, arguments, stream);
    if (!optimizer.has_fp8_moment_groups() || params.elements.count == 0) return;
    with_weights(weights, [&]<class WeightsKind>() {
        with_codecs(optimizer, [&]<class Codecs>() {
            launch("adamw", adamw_kernel<WeightsKind, Codecs>,
                   adamw_blocks(/*bundles=*/ceil_div(params.elements.count, BUNDLE_SIZE)),
                   32 * WARPS_PER_BLOCK,
                   /*shared_bytes=*/0, stream, arguments);
        });
    });
}

}  // namespace coat::gpu
