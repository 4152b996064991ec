// adamw.cu - section 4 of the paper on the GPU: a step of AdamW whose moments m and v are stored in FP8, with
// dynamic range expansion (interface: adamw.h; the same on the CPU: reference/optimizer.cpp).
//
// One kernel clips the gradients, decodes m and v, updates m, v and the weights in FP32 by the equations of
// gpu/adamw.cuh, and encodes the new m and v.
//
//   1. dynamic range expansion of one element of a moment
//   2. a thread's eight elements of m, and its eight of v
//   3. max and k of new moments, and how a warp keeps those of its elements
//   4. the kernel
//   5. the launch
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
// A power a^b is computed as 2^(b log2 a). Each logarithm and each exponential is one instruction
// (gpu/device.cuh).

// Of a moment group (common/formats.h).
struct MaxAndK {
    float max, k;
};

enum class MomentKind : uint8_t { First, Second };  // m has signs, v has none

// How the codes of a moment are made. It is known when a kernel is compiled, so no code branches on it.
// Below, Traits is a MomentTraits.
//   FMAX   the largest value of the format: 448 in E4M3, 57,344 in E5M2
//   FMIN   the smallest value above zero: 2^-9 in E4M3, 2^-16 in E5M2
template <MomentKind KIND, Format FORMAT, bool EXPANSION> struct MomentTraits {
    static constexpr bool E5M2 = FORMAT == Format::E5M2;
    static constexpr bool EXPANDS = EXPANSION;
    static constexpr bool SIGNED = KIND == MomentKind::First;
    static constexpr float FMAX = format_info(FORMAT).fmax;
    static constexpr float FMIN = format_info(FORMAT).fmin;
    static constexpr float LOG2_FMAX = E5M2 ? 15.80735492f : 8.80735492f;    // log2(FMAX)
    static constexpr float LOG2_RANGE = E5M2 ? 31.80735492f : 17.80735492f;  // log2(FMAX / FMIN)
};

// Equation 4: k = log(R) / log(R_X).
//   R     the range of the format: FMAX / FMIN
//   R_X   the range of the moment group: its largest magnitude over its smallest that is not zero
// k is rounded to a multiple of 1/256, from 1/16 to 64. If all magnitudes are equal, log2(R_X) is 0, and its
// reciprocal is infinite: k is 64. In a moment group of zeros k is 1. (There the difference of the logarithms
// is NaN. fmaxf() makes it 0, and the result is not used.)
template <class Traits> __device__ float expansion_exponent(float max_magnitude, float min_magnitude) {
    const float log2_r_x = fmaxf(fast_log2(max_magnitude) - fast_log2(min_magnitude), 0.0f);
    const float rounded = rintf(256.0f * Traits::LOG2_RANGE * fast_reciprocal(log2_r_x)) * 0x1p-8f;
    const float k = fminf(fmaxf(rounded, 0.0625f), 64.0f);
    return max_magnitude == 0 ? 1.0f : k;  // a select, not a branch
}

// Expand: |y| = FMAX (|x| / max)^k. For x = 0 the logarithm is -infinity, and y is 0. (The CPU's expand()
// returns y with its sign.)
template <class Traits> __device__ float expand_magnitude(float k, float inverse_max, float x) {
    return fast_exp2(__fmaf_rn(k, fast_log2_of_normal(fabsf(x) * inverse_max), Traits::LOG2_FMAX));
}
// 1 / max: the fast reciprocal, and one iteration of Newton's method. For a moment group of zeros r is 2^126,
// and the result is r + r (1 - 0 r) = 2^127, not infinity. Then |x| / max is 0, as it must be, and not NaN.
__device__ float inverse_of_max(float max) {
    const float r = fast_reciprocal(fmaxf(max, 0x1p-126f));
    return __fmaf_rn(r, __fmaf_rn(-max, r, 1.0f), r);
}

// Contract: |x| / max = (|y| / FMAX)^(1/k). log2_ratio is log2(|y| / FMAX), from a table. (The CPU's
// contract() returns x. Here the factor max is left out: FactoredMoments in gpu/adamw.cuh.)
__device__ float contract_to_ratio(float inverse_k, float log2_ratio) {
    return fast_exp2(log2_ratio * inverse_k);
}

// -----------------------------------------------------------------------------------------------------------
// The careful path. A few moment groups are so wide or so small that an intermediate result of the equations
// above is not a normal number of FP32. The fast path computes all moment groups, these among them: so it has
// no branch, and the compiler can interleave what m and v need. Then the careful path computes these few
// again, and its results replace those of the fast path.
//
// nvcc inlines the careful path by itself. It should stay so: in a __noinline__ function the careful path
// makes the fast path up to 24% slower.
enum class Path : uint8_t { Fast, Careful };

// A moment group is wide if R_X may exceed about 2^120. Then decoding and encoding need care. (log2(R_X) is
// LOG2_RANGE / k.)
template <class Traits> __device__ bool is_wide(const MaxAndK& max_and_k) {
    return Traits::EXPANDS && Traits::LOG2_RANGE > 120.0f * max_and_k.k;
}
// Encoding divides by max, so it needs care also if max is very small.
template <class Traits> __device__ bool is_wide_or_small(const MaxAndK& max_and_k) {
    const bool normal = max_and_k.max >= 0x1p-100f || max_and_k.max == 0;
    return Traits::EXPANDS && (is_wide<Traits>(max_and_k) || !normal);
}
// expand_magnitude() with intermediate results that stay normal: the difference of two logarithms takes the
// place of the logarithm of a ratio.
template <class Traits> __device__ float expand_carefully(const MaxAndK& max_and_k, float x) {
    return Traits::FMAX * fast_exp2(max_and_k.k * (log2f(fabsf(x)) - log2f(max_and_k.max)));
}
// Returns |x|, not |x| / max as contract_to_ratio() does: the power alone may underflow where its product
// with max does not. If the product underflows, too, the result is 0, where the CPU's contract() returns
// 2^-149. For v this is harmless: beside eps = 1e-8 the root of 2^-149 vanishes, so the update is the same.
__device__ float contract_carefully(const MaxAndK& max_and_k, float inverse_k, float log2_ratio) {
    const float root = exp2f(0.5f * (log2_ratio * inverse_k));
    return root * max_and_k.max * root;
}

// ===========================================================================================================
// 2. A thread's eight elements of m, and its eight of v

// y, the magnitude that is encoded for x; but at least FMIN for an element of v above zero. Such an element
// must stay above zero, because the update divides by its root.
template <class Traits> __device__ float at_least_fmin(float y, float x) {
    return !Traits::SIGNED && x > 0 && y < Traits::FMIN ? Traits::FMIN : y;
}
template <class Traits> __device__ uint2 encode_with_signs(ChunkValues& y, const ChunkValues& x) {
    if (Traits::SIGNED)
        for (int j = 0; j < CHUNK; j++) y[j] = copysignf(y[j], x[j]);
    return encode(Traits::E5M2, y, 1.0f);
}

// The codes of eight elements x of a moment.
//
// With expansion, the fast path needs no at_least_fmin(), because the smallest element of a moment group,
// max / R_X, gets the code of FMIN anyway:
//   - With the exact k of equation 4, y would be FMAX (1 / R_X)^k = FMIN.
//   - k is rounded to a multiple of 1/256, so k may be larger by 1/512. Then y is FMIN R_X^(-1/512).
//   - On the fast path R_X is at most about 2^120, so R_X^(-1/512) is at least 2^(-120/512) = 0.85.
//   - 0.85 FMIN is nearer to FMIN than to 0, so y is rounded to FMIN.
template <class Traits, Path PATH>
__device__ uint2 encode_moments(const MaxAndK& max_and_k, const ChunkValues& x) {
    const float inverse_max = inverse_of_max(max_and_k.max);
    const float inverse_scale = __frcp_rn(scale_of(Traits::FMAX, max_and_k.max));  // used without expansion
    ChunkValues y;
    for (int j = 0; j < CHUNK; j++) {
        if (PATH == Path::Careful)
            y[j] = at_least_fmin<Traits>(expand_carefully<Traits>(max_and_k, x[j]), x[j]);
        else if (Traits::EXPANDS) y[j] = expand_magnitude<Traits>(max_and_k.k, inverse_max, x[j]);
        else y[j] = at_least_fmin<Traits>(fabsf(x[j]) * inverse_scale, x[j]);
    }
    return encode_with_signs<Traits>(y, x);
}

__device__ uint32_t code_of(uint2 codes, int j) {  // code j of eight: byte j % 4 of one of two words
    return ((j < 4 ? codes.x : codes.y) >> (8 * (j % 4))) & 0xFFu;
}

// Tables in shared memory, one for the codes of m and one for those of v. The entry for a code of the value
// y, without its sign, is log2(y / FMAX). (Without expansion it is y.) The tables save a thread the 16
// logarithms of its 8 + 8 elements.
constexpr int CODES_WITHOUT_SIGN = 128;  // a code has 8 bits, one of them the sign
struct Tables {
    float m[CODES_WITHOUT_SIGN], v[CODES_WITHOUT_SIGN];
};
template <class Traits> __device__ void fill_table(float (&table)[CODES_WITHOUT_SIGN]) {
    for (uint32_t code = threadIdx.x; code < CODES_WITHOUT_SIGN; code += blockDim.x) {
        const float y = decode_two(Traits::E5M2, code).x;
        table[code] = Traits::EXPANDS ? log2f(y) - log2f(Traits::FMAX) : y;
    }
}

// The magnitude with the sign of its FP8 code, whose sign bit is moved to where FP32 has its sign bit.
template <class Traits> __device__ float with_sign(float magnitude, uint32_t code) {
    return Traits::SIGNED ? copysignf(magnitude, __uint_as_float(code << 24)) : magnitude;
}

// Decodes eight elements of a moment. FactoredMoments (gpu/adamw.cuh) says why there is a factor. It is
//   max          with expansion, on the fast path
//   1            with expansion, on the careful path
//   max / FMAX   without expansion: the scale
template <class Traits, Path PATH>
__device__ FactoredMoments decode_moments(const MaxAndK& max_and_k, uint2 codes,
                                          const float (&table)[CODES_WITHOUT_SIGN]) {
    const float inverse_k = fast_reciprocal(max_and_k.k);
    FactoredMoments moments;
    for (int j = 0; j < CHUNK; j++) {
        const uint32_t code = code_of(codes, j);
        float magnitude = table[code % CODES_WITHOUT_SIGN];
        if (PATH == Path::Careful) magnitude = contract_carefully(max_and_k, inverse_k, magnitude);
        else if (Traits::EXPANDS) magnitude = contract_to_ratio(inverse_k, magnitude);
        moments.multiples[j] = with_sign<Traits>(magnitude, code);
    }
    if (PATH == Path::Careful) moments.factor = 1.0f;
    else moments.factor = Traits::EXPANDS ? max_and_k.max : scale_of(Traits::FMAX, max_and_k.max);
    return moments;
}

// -----------------------------------------------------------------------------------------------------------
// Both moments. First the fast path computes both, without a branch. Then the careful path replaces what
// needs care.

// A span is 128 consecutive elements. Their first moments are one moment group, and their second moments
// another. So a span has four fields: max and k of m, and max and k of v.
struct SpanFields {
    MaxAndK m, v;
};
struct Codes {  // of the thread's eight elements of m, and of its eight of v
    uint2 m, v;
};
struct DecodedMoments {
    FactoredMoments m, v;
};

template <class MTraits, class VTraits>
__device__ DecodedMoments decode_both(const SpanFields& fields, const Codes& codes, const Tables& tables) {
    DecodedMoments decoded{.m = decode_moments<MTraits, Path::Fast>(fields.m, codes.m, tables.m),
                           .v = decode_moments<VTraits, Path::Fast>(fields.v, codes.v, tables.v)};
    if (is_wide<MTraits>(fields.m))
        decoded.m = decode_moments<MTraits, Path::Careful>(fields.m, codes.m, tables.m);
    if (is_wide<VTraits>(fields.v))
        decoded.v = decode_moments<VTraits, Path::Careful>(fields.v, codes.v, tables.v);
    return decoded;
}
template <class MTraits, class VTraits>
__device__ Codes encode_both(const SpanFields& fields, const NewMoments& moments) {
    Codes codes{.m = encode_moments<MTraits, Path::Fast>(fields.m, moments.m),
                .v = encode_moments<VTraits, Path::Fast>(fields.v, moments.v)};
    if (is_wide_or_small<MTraits>(fields.m))
        codes.m = encode_moments<MTraits, Path::Careful>(fields.m, moments.m);
    if (is_wide_or_small<VTraits>(fields.v))
        codes.v = encode_moments<VTraits, Path::Careful>(fields.v, moments.v);
    return codes;
}

// ===========================================================================================================
// 3. max and k of new moments, and how a warp keeps the fields of a bundle
//
// Words for parts of a parameter, from small to large:
//   span     128 consecutive elements, which have four fields
//   pair     two neighbouring spans: what a warp updates at a time
//   bundle   eight neighbouring spans, which are four pairs and have 32 fields: what a warp owns
//   shard    on one GPU, the whole parameter (adamw.h). The rank's order is then the order of all parameters
//
// Who owns what. A warp updates the pairs of its bundle one after the other. Half a warp (16 lanes) has one
// span of the pair, and a thread eight consecutive elements of this span:
//
//   pair p      span 2 p of the bundle               span 2 p + 1
//   lane        0       1        ...   15            16      17       ...   31
//   elements    0 - 7   8 - 15         120 - 127     0 - 7   8 - 15         120 - 127
//
// Each lane keeps one of the 32 fields of the bundle. It loads and stores this field alone, and passes it to
// other lanes by shuffles. Lanes 0 - 15 keep the fields of the even spans, which they update. Lanes 16 - 31
// keep those of the odd spans:
//
//   lane        0      1      2      3      4 - 7   8 - 11  12 - 15   16 - 19  20 - 23  24 - 27  28 - 31
//   field       m.max  m.k    v.max  v.k    the same four of each of these spans:
//   span        0      0      0      0      2       4       6         1        3        5        7
//
// Why there are bundles, and in part 4 loads ahead of their use. With bundles a warp moves all 32 fields of
// eight spans by one load and one store instruction: each lane moves one field. Loads ahead of their use hide
// the time that memory takes to answer. Together they save 15%: on an H200 this kernel updates Llama-2-7B in
// 26.0 ms, and the best kernel without them in 30.6 ms.

constexpr int LANES_PER_SPAN = MOMENT_GROUP_SIZE / CHUNK;  // 16: half a warp
constexpr int SPANS_PER_PAIR = 32 / LANES_PER_SPAN;        // 2: one for each half of the warp
constexpr int PAIRS_PER_BUNDLE = 4;
constexpr int SPANS_PER_BUNDLE = PAIRS_PER_BUNDLE * SPANS_PER_PAIR;  // 8
constexpr int FIELDS_PER_SPAN = 4;                                   // m.max, m.k, v.max, v.k, in this order
static_assert(SPANS_PER_BUNDLE * FIELDS_PER_SPAN == 32, "each lane keeps one field of a bundle");

constexpr uint32_t ALL_LANES = 0xFFFFFFFFu;

// Loads with ld.global, the instruction for global memory. The compiler cannot know that a pointer which was
// read from a table points to global memory, so it would use the slower generic instruction.
template <class Value> __device__ Value load_global(const void* from) {
    return __ldca(static_cast<const Value*>(from));
}

// max and k of a moment group, from its new elements x in 16 lanes. Magnitudes are compared by their bits,
// which have the same order as integers. For a zero, bits - 1 is the largest integer, so the minimum leaves
// zeros out. (In a moment group of zeros max_magnitude and min_magnitude are 0.)
template <class Traits> __device__ MaxAndK max_and_k_of_new_moments(const ChunkValues& x) {
    uint32_t largest_bits = 0, smallest_bits_minus_1 = 0xFFFFFFFFu;
    for (int j = 0; j < CHUNK; j++) {
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
    return {.max = max_magnitude,
            .k = Traits::EXPANDS ? expansion_exponent<Traits>(max_magnitude, min_magnitude) : 1.0f};
}

// Which field of a bundle this lane keeps (the drawing of lanes, fields and spans above), and where this
// field is in memory. Spans are numbered from the beginning of the shard. bundle_begin is the number of a
// bundle's first span.
struct FieldOfLane {
    bool is_of_v, is_k;
    int pair_in_bundle;      // the number of the field's pair, 0 to 3
    int span_in_bundle;      // the number of the field's span, 0 to 7
    float* fields_in_shard;  // this field of all spans of the shard; null if the moment has no k
    int shard_spans;         // how many spans the shard has

    __device__ FieldOfLane(const Shard& shard, int number_of_spans) : shard_spans(number_of_spans) {
        const int lane = threadIdx.x % 32;
        is_of_v = lane % FIELDS_PER_SPAN >= 2;
        is_k = lane % 2 == 1;
        pair_in_bundle = lane % LANES_PER_SPAN / FIELDS_PER_SPAN;
        span_in_bundle = pair_in_bundle * SPANS_PER_PAIR + lane / LANES_PER_SPAN;
        const MomentRef moment = is_of_v ? shard.v : shard.m;
        fields_in_shard = is_k ? moment.k : moment.max;
    }
    // If the field's span is past the last one of the shard, load() reads the field of the last span, and
    // store() does nothing.
    __device__ float load(int bundle_begin) const {
        if (!fields_in_shard) return 1.0f;
        return load_global<float>(fields_in_shard + min(bundle_begin + span_in_bundle, shard_spans - 1));
    }
    __device__ void store(int bundle_begin, float value) const {
        if (fields_in_shard && bundle_begin + span_in_bundle < shard_spans)
            store_at_once(fields_in_shard + bundle_begin + span_in_bundle, value);
    }
    // The field of a span that this lane keeps.
    __device__ float choose_from(const SpanFields& fields) const {
        const MaxAndK max_and_k = is_of_v ? fields.v : fields.m;
        return is_k ? max_and_k.k : max_and_k.max;
    }
};

// The four fields of the span that this half of the warp updates in a pair. They come from the lanes that
// keep them. kept: the field that this lane keeps.
__device__ SpanFields fields_from_lanes(float kept, int pair) {
    auto field_of_span = [&](int field) {
        return __shfl_sync(ALL_LANES, kept, pair * FIELDS_PER_SPAN + field, LANES_PER_SPAN);
    };
    const MaxAndK m{.max = field_of_span(0), .k = field_of_span(1)};
    const MaxAndK v{.max = field_of_span(2), .k = field_of_span(3)};
    return {.m = m, .v = v};
}

// ===========================================================================================================
// 4. The kernel
//
// It is compiled for each WeightsKind (gpu/adamw.cuh, part 2), and for the MomentTraits of each optimizer's
// first and second moments.

constexpr int WARPS_PER_BLOCK = 8;
constexpr int BLOCKS_PER_SM = 2;  // on a multiprocessor at once: a thread may then have 128 registers

// What a thread loads of a span: its eight elements, as they are stored.
template <class WeightsKind> struct LoadedElements {
    Codes codes;
    typename WeightsKind::LoadedChunk w;
    Bf16OrFp32::LoadedChunk g;
};

// A thread's eight elements of each span of a shard: where they are, and the numbers with which they are
// updated. Elements are counted in four ways:
//   from the shard's first element           the codes of m and v
//   in the rank's order                      weights and remainders
//   from the first element of this update    gradients
//   in the flat order of all parameters      the random bits of rounding
// From a span to the next, all four counts go on by 128.
template <class WeightsKind> struct ElementsOfThread {
    const AdamWArguments& arguments;
    const Shard& shard;
    const float clip_factor, decay;
    const int shard_spans;  // how many spans the shard has
    const int64_t start;    // the thread's first element of the shard's first span, in the rank's order
    const WeightsKind weights;
    uint8_t *const codes_m, *const codes_v;

    __device__ ElementsOfThread(const AdamWArguments& a, const Shard& s)
        : arguments(a), shard(s), clip_factor(a.state->clip_factor),
          decay(s.decays ? a.constants.weight_decay : 0.0f),
          shard_spans(static_cast<int>(ceil_div(s.size, MOMENT_GROUP_SIZE))),
          start(s.rank_offset + threadIdx.x % LANES_PER_SPAN * CHUNK), weights(a.weights, start),
          codes_m(static_cast<uint8_t*>(s.m.data) + start - s.rank_offset),
          codes_v(static_cast<uint8_t*>(s.v.data) + start - s.rank_offset) {}

    // span * 128: the distance, in elements, from the thread's elements in the shard's first span to those in
    // `span`. A span past the last one counts as the last span.
    __device__ int64_t clamped_offset(int span) const {
        return static_cast<int64_t>(min(span, shard_spans - 1)) * MOMENT_GROUP_SIZE;
    }
    __device__ LoadedElements<WeightsKind> load(int span) const {
        const int64_t i = clamped_offset(span);
        return {.codes = {load_global<uint2>(codes_m + i), load_global<uint2>(codes_v + i)},
                .w = weights.load(i),
                .g = arguments.gradients.load(start - arguments.elements.first + i)};
    }
    // Stores nothing for a span past the last one.
    __device__ void store(int span, ChunkValues& w, const Codes& codes, uint32_t& largest_bits) const {
        const bool live = span < shard_spans;
        const int64_t i = clamped_offset(span);
        const int64_t element = start + shard.flat_minus_rank_offset + i;
        weights.store(i, w, arguments.rounding_key, element, live, largest_bits);
        if (!live) return;
        store_at_once(codes_m + i, codes.m);
        store_at_once(codes_v + i, codes.v);
    }
};

// Updates a thread's eight elements of a span, and stores them. Returns the new fields of the span.
//   loaded         what was loaded of these elements
//   old_fields     of the span
//   largest_bits   is raised: the bits of the largest magnitude of the thread's new weights
template <class WeightsKind, class MTraits, class VTraits>
__device__ SpanFields update_span(const ElementsOfThread<WeightsKind>& elements, int span,
                                  const LoadedElements<WeightsKind>& loaded, const SpanFields& old_fields,
                                  const Tables& tables, uint32_t& largest_bits) {
    const AdamWArguments& a = elements.arguments;
    ChunkValues w, g;
    elements.weights.unpack(loaded.w, w);
    a.gradients.unpack(loaded.g, g);
    const DecodedMoments old = decode_both<MTraits, VTraits>(old_fields, loaded.codes, tables);
    const NewMoments moments =
        adamw_of_chunk(a.constants, elements.clip_factor, elements.decay, g, old.m, old.v, w);
    const SpanFields new_fields{.m = max_and_k_of_new_moments<MTraits>(moments.m),
                                .v = max_and_k_of_new_moments<VTraits>(moments.v)};
    const Codes codes = encode_both<MTraits, VTraits>(new_fields, moments);
    elements.store(span, w, codes, largest_bits);
    return new_fields;
}

// A warp updates those bundles of a shard whose first spans are begin, begin + 64, begin + 128, and so on,
// below `end`. (A bundle has 8 spans, and the 8 warps of a block take bundles by turns.) Returns the bits of
// the largest magnitude of this lane's new weights.
//
// If the number of spans is odd, the last span has no partner in its pair. Then the second half of the warp
// computes the last span, too, and stores nothing.
//
// While a pair is updated, the loads of the next pair are already on their way. For a bundle of four pairs:
//
//   iteration before them    | 0                            | 1      | 2      | 3
//   load      fields, pair 0 | next bundle's fields, pair 1 | pair 2 | pair 3 | next bundle's pair 0
//   update                   | pair 0                       | pair 1 | pair 2 | pair 3
//   store                    | pair 0                       | pair 1 | pair 2 | pair 3, then the fields
template <class WeightsKind, class MTraits, class VTraits>
__device__ uint32_t update_bundles(const AdamWArguments& a, const Shard& shard, int begin, int end,
                                   const Tables& tables) {
    constexpr int STRIDE = WARPS_PER_BLOCK * SPANS_PER_BUNDLE;  // spans from a warp's bundle to its next one
    if (begin >= end) return 0;
    const ElementsOfThread<WeightsKind> elements(a, shard);
    // The field that this lane keeps, and below its values: of the bundle before and after the update, and of
    // the next bundle.
    const FieldOfLane field(shard, elements.shard_spans);
    // 0 or 1: which half of the warp, and which span of the pair.
    const int half = threadIdx.x % 32 / LANES_PER_SPAN;
    uint32_t largest_bits = 0;
    LoadedElements<WeightsKind> next_loaded = elements.load(begin + half);
    float next_field_value = field.load(begin);
    for (int bundle_begin = begin; bundle_begin < end; bundle_begin += STRIDE) {
        const float old_field_value = next_field_value;
        next_field_value = field.load(bundle_begin + STRIDE);
        float new_field_value = 0;
        // The last bundle of the shard may have fewer than four pairs.
        const int pairs = min(PAIRS_PER_BUNDLE, (elements.shard_spans - bundle_begin + 1) / SPANS_PER_PAIR);
#pragma unroll 1  // one copy of this long body
        for (int pair = 0; pair < pairs; pair++) {
            const int span = bundle_begin + pair * SPANS_PER_PAIR + half;
            const LoadedElements<WeightsKind> loaded = next_loaded;
            // After the last pair of the warp this loads some other span, which nobody uses.
            next_loaded =
                elements.load(pair + 1 < pairs ? span + SPANS_PER_PAIR : bundle_begin + STRIDE + half);
            const SpanFields old_fields = fields_from_lanes(old_field_value, pair);
            const SpanFields new_fields = update_span<WeightsKind, MTraits, VTraits>(
                elements, span, loaded, old_fields, tables, largest_bits);
            if (pair == field.pair_in_bundle) new_field_value = field.choose_from(new_fields);
        }
        field.store(bundle_begin, new_field_value);
    }
    return largest_bits;
}

// The number of the last shard that begins at or before an element. The shards are in order, and the first
// begins at the first element of the update.
__device__ int last_shard_beginning_by(const AdamWArguments& a, int64_t element) {
    int low = 0, high = a.shard_count - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (a.shards[middle].rank_offset <= element) low = middle;
        else high = middle - 1;
    }
    return low;
}

// The spans [begin, end), counted in the rank's order.
struct SpanRange {
    int64_t begin, end;
};
// The spans that this block updates, out of all those of the update.
__device__ SpanRange spans_of_block(const Range& elements) {
    const int64_t first = elements.first / MOMENT_GROUP_SIZE, count = elements.count / MOMENT_GROUP_SIZE;
    return {.begin = first + count * blockIdx.x / gridDim.x,
            .end = first + count * (blockIdx.x + 1) / gridDim.x};
}
__device__ SpanRange spans_of_shard(const Shard& shard) {
    const int64_t begin = shard.rank_offset / MOMENT_GROUP_SIZE;
    return {.begin = begin, .end = begin + ceil_div(shard.size, MOMENT_GROUP_SIZE)};
}

// A thread block goes through the shards to which its spans belong. In each shard warp 0 takes the first
// bundle, warp 1 the second, and so on; after the last warp, warp 0 takes the next bundle.
//
// The range of a block's spans may begin or end within a bundle. A bundle belongs to the block that has its
// first span. So the block begins with the first bundle that begins in its range (its number is begin / 8,
// rounded up), and completes the last bundle that begins there. (So update_bundles() may go past `end`,
// within a bundle.)
template <class WeightsKind, class MTraits, class VTraits>
__global__ void __launch_bounds__(32 * WARPS_PER_BLOCK, BLOCKS_PER_SM) adamw_kernel(const AdamWArguments a) {
    __shared__ Tables tables;
    if (a.state->skip) return;
    fill_table<MTraits>(tables.m);
    fill_table<VTraits>(tables.v);
    __syncthreads();
    const int warp = threadIdx.x / 32;
    const SpanRange spans_in_block = spans_of_block(a.elements);
    for (int i = last_shard_beginning_by(a, spans_in_block.begin * MOMENT_GROUP_SIZE); i < a.shard_count;
         i++) {
        const Shard shard = a.shards[i];
        const SpanRange spans_in_shard = spans_of_shard(shard);
        if (spans_in_shard.begin >= spans_in_block.end) return;
        if (!a.in_fp8_moment_groups(shard)) continue;
        // What the block has of the shard. From here on spans are counted from the beginning of the shard.
        const int64_t begin = max(spans_in_block.begin, spans_in_shard.begin) - spans_in_shard.begin;
        const int64_t end = min(spans_in_block.end, spans_in_shard.end) - spans_in_shard.begin;
        const int64_t first_span_of_warp = (ceil_div(begin, SPANS_PER_BUNDLE) + warp) * SPANS_PER_BUNDLE;
        const uint32_t largest_bits = update_bundles<WeightsKind, MTraits, VTraits>(
            a, shard, static_cast<int>(first_span_of_warp), static_cast<int>(end), tables);
        if (shard.weight_amax_to_raise) update_amax_by_warp(shard.weight_amax_to_raise, largest_bits);
    }
}

// ===========================================================================================================
// 5. The launch

// If a block has this many spans, its start and its end take little of its time.
constexpr int64_t MIN_SPANS_PER_BLOCK = 16384;

// The number of blocks:
//   - as many as the GPU runs at once;
//   - several times as many, if each block still has MIN_SPANS_PER_BLOCK spans. Spans that take the careful
//     path are slow, and they are neighbours: the embeddings of tokens that no longer occur. More blocks
//     share out the slow spans better;
//   - fewer, one for each bundle, if the update is small. A bundle is the work of one warp, so a block for
//     each bundle spreads the bundles over all multiprocessors.
unsigned adamw_blocks(int64_t spans) {
    const int64_t at_once = multiprocessors() * BLOCKS_PER_SM;
    const int64_t rounds = std::max<int64_t>(1, spans / (at_once * MIN_SPANS_PER_BLOCK));
    const int64_t bundles = ceil_div(spans, SPANS_PER_BUNDLE);
    return static_cast<unsigned>(std::min(bundles, at_once * rounds));
}

MomentGranularity moment_granularity(const OptimizerFormats& o) {
    if (o.has_fp8_moment_groups()) return MomentGranularity::PerMomentGroup;
    if (o.one_moment_group) return MomentGranularity::PerTensor;
    require(!has_moment_groups(o.m_format) && !has_moment_groups(o.v_format),
            "moments in moment groups must both be in FP8");
    return MomentGranularity::Unscaled;
}

AdamWKernelConstants kernel_constants(const AdamWOptions& options) {
    const double t = static_cast<double>(options.update_number);
    const double bias1 = 1 - std::pow(static_cast<double>(options.beta1), t);
    const double bias2 = 1 - std::pow(static_cast<double>(options.beta2), t);
    return {.lr = options.lr,
            .beta1 = options.beta1,
            .beta2 = options.beta2,
            .one_minus_beta1 = 1 - options.beta1,
            .one_minus_beta2 = 1 - options.beta2,
            .weight_decay = options.weight_decay,
            .root_factor = static_cast<float>(bias1 / std::sqrt(bias2)),
            .scaled_eps = static_cast<float>(bias1 * options.eps)};
}

// Calls f<MTraits, VTraits>() with the MomentTraits of first moments in the format OF_M and of second moments
// in OF_V.
template <Format OF_M, Format OF_V, bool EXPANSION, class F> void call_with_traits(F f) {
    using MTraits = MomentTraits<MomentKind::First, OF_M, EXPANSION>;
    using VTraits = MomentTraits<MomentKind::Second, OF_V, EXPANSION>;
    f.template operator()<MTraits, VTraits>();
}
// The same for an optimizer whose moments are in FP8 moment groups.
template <class F> void with_moment_traits(const OptimizerFormats& o, F f) {
    constexpr Format E4M3 = Format::E4M3, E5M2 = Format::E5M2;
    const bool both_e4m3 = o.m_format == E4M3 && o.v_format == E4M3;
    if (both_e4m3 && o.expansion) call_with_traits<E4M3, E4M3, /*EXPANSION=*/true>(f);
    else if (both_e4m3) call_with_traits<E4M3, E4M3, /*EXPANSION=*/false>(f);
    else if (o.m_format == E4M3 && o.v_format == E5M2 && o.expansion)
        call_with_traits<E4M3, E5M2, /*EXPANSION=*/true>(f);
    else require(false, "adamw.cu has no kernel for moments in these formats");
}

// The amaxes of the weights start at 0, because an update only raises them.
__global__ void clear_weight_amaxes_kernel(const AdamWArguments a) {
    const int64_t i = thread_of_grid();
    if (i >= a.shard_count || a.state->skip) return;
    float* const weight_amax_to_raise = a.shards[i].weight_amax_to_raise;
    if (weight_amax_to_raise) *weight_amax_to_raise = 0;
}

}  // namespace

void adamw(const AdamWOptions& options, const OptimizerFormats& optimizer, const ShardsToUpdate& shards,
           const Weights& weights, uint64_t rounding_key, const GradientState* state, cudaStream_t stream) {
    const AdamWArguments arguments{.constants = kernel_constants(options),
                                   .granularity = moment_granularity(optimizer),
                                   .fmax_m = format_info(optimizer.m_format).fmax,
                                   .fmax_v = format_info(optimizer.v_format).fmax,
                                   .shards = shards.shards,
                                   .shard_count = shards.count,
                                   .elements = shards.elements,
                                   .weights = weights,
                                   .rounding_key = rounding_key,
                                   .gradients = bf16_or_fp32(shards.gradients, shards.gradient_format),
                                   .state = state};
    launch("clear_weight_amaxes", clear_weight_amaxes_kernel, block_count(shards.count, 128), 128,
           /*shared_bytes=*/0, stream, arguments);
    update_shards_without_moment_groups(arguments, stream);
    if (arguments.granularity != MomentGranularity::PerMomentGroup || shards.elements.count == 0) return;
    with_weights(weights, [&]<class WeightsKind>() {
        with_moment_traits(optimizer, [&]<class MTraits, class VTraits>() {
            launch("adamw", adamw_kernel<WeightsKind, MTraits, VTraits>,
                   adamw_blocks(shards.elements.count / MOMENT_GROUP_SIZE), 32 * WARPS_PER_BLOCK,
                   /*shared_bytes=*/0, stream, arguments);
        });
    });
}

}  // namespace coat::gpu
