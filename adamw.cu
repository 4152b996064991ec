// adamw.cu - section 4 of the paper on the GPU: a step of AdamW whose moments m and v are stored in FP8, with
// dynamic range expansion (interface: gpu/operators.h; the same on the CPU: part 3 of reference.cpp).
//
//   m = b1 m + (1 - b1) g
//   v = b2 v + (1 - b2) g^2
//   w = w - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay w)
//
// g is the clipped gradient of the weight w, and t the number of the step. One kernel clips g, decodes m and
// v, updates m, v and w in FP32, and encodes the new m and v.
//
// What is stored. 128 consecutive elements of a parameter are a span. Their first moments are one moment
// group, and their second moments another. A moment is a byte, its FP8 code. Two FP32 values, the moment
// scaling, say how the codes of a moment group are decoded: max, the largest magnitude in the moment group,
// and k, the expansion factor (part 1). The paper's scale follows from max, so it is not stored. A span has
// four fields: max and k of m, and max and k of v.
//
// Who owns what. A warp owns a bundle of eight spans, which it updates as four pairs, one pair after the
// other. Half a warp (16 lanes) has one span of the pair, and a thread eight consecutive elements of it:
//
//   pair p      span 2 p of the bundle               span 2 p + 1
//   lane        0       1        ...   15            16      17       ...   31
//   elements    0 - 7   8 - 15         120 - 127     0 - 7   8 - 15         120 - 127
//
// A bundle has 32 fields, four for each span, and each lane keeps one of them. Half a warp keeps the fields
// of the spans that it updates itself (lanes 0 to 15 those of the even spans, the others those of the odd
// ones), so its 16 lanes can pass them to each other by shuffles:
//
//   lane        0      1      2      3      4 - 7   8 - 11  12 - 15   16 - 19  20 - 23  24 - 27  28 - 31
//   field       m.max  m.k    v.max  v.k    the same four of each of these spans:
//   span        0      0      0      0      2       4       6         1        3        5        7
//
// That is lane 16 (span % 2) + 4 (span / 2) + the number of the field, 0 to 3.
//
// Which bytes move. An element takes 14.25 bytes. These are read and written: its BF16 weight (2 bytes), the
// remainder of the FP32 master (2), m (1), v (1) and its part of the fields of its span (0.125), together
// 2 x 6.125. The gradient is only read: 2 bytes if it is in BF16. An H200 moves these bytes at 87% of its
// copy bandwidth.
//
// Why bundles, and loads ahead of their use (part 4). They save 15% of the time: on an H200 this kernel
// updates Llama-2-7B in 26.0 ms. The best of 15 kernels without the two, with blocks of 128 to 512 threads
// and 16 to 16,384 spans each, took 30.6 ms, with the same bits. (dev/ladders/adamw.cu builds a simpler
// kernel up, idea by idea: for a single parameter, and without the careful path of part 1. There the two save
// nothing: rung 6 has neither, and is as fast as rung 8, which has both. Why it differs here is known only in
// part: a block of this kernel first finds its parameter and fills its tables, so a kernel with many short
// blocks loses time. The rest of the cause was not measured; the answer to rung 8 says more.)
#include "gpu/adamw.cuh"

namespace coat::gpu {
namespace {

constexpr int SPAN_LANES = MOMENT_GROUP_SIZE / CHUNK;  // lanes that own a span: 16
constexpr int PAIR = 32 / SPAN_LANES;             // spans that a warp updates at a time: 2
constexpr int PAIRS = 4;                          // pairs of a bundle
constexpr int BUNDLE = PAIRS * PAIR;              // spans of a bundle: 8
enum { M_MAX, M_K, V_MAX, V_K, FIELDS };          // the fields of a span, and how many there are
static_assert(PAIRS * FIELDS == SPAN_LANES, "a lane keeps one field of a bundle");
constexpr uint32_t ALL_LANES = 0xFFFFFFFFu;

// A load by an instruction for global memory. Through a pointer from a table in memory the compiler would
// use the generic one, because it does not know where such a pointer points to.
template <class V> __device__ V load_global(const void* from) { return __ldca(static_cast<const V*>(from)); }

// ===========================================================================================================
// 1. Dynamic range expansion of one moment (paper, section 4.2)
//
// x^y is 2^(y log2 x), with one instruction for each logarithm and exponential (gpu/device.cuh).

// The moment scaling of a moment group (formats.h).
struct MomentScaling {
    float max, k;
};

enum class WhichMoment : uint8_t { First, Second };

// How the codes of a moment are made. This is known when a kernel is compiled, so that no code branches on
// it. Below, Traits is a MomentTraits.
template <WhichMoment WHICH, Format FORMAT, bool EXPANSION> struct MomentTraits {
    static constexpr bool E5M2 = FORMAT == Format::E5M2;
    static constexpr bool EXPANDS = EXPANSION;
    static constexpr bool SIGNED = WHICH == WhichMoment::First;
    static constexpr float FMAX = info(FORMAT).fmax;  // the largest value of the format: 448 for E4M3
    static constexpr float FMIN = info(FORMAT).fmin;  // the smallest positive one: 2^-9
    static constexpr float LOG_FMAX = E5M2 ? 15.80735492f : 8.80735492f;    // log2(FMAX)
    static constexpr float LOG_RANGE = E5M2 ? 31.80735492f : 17.80735492f;  // log2(FMAX / FMIN)
};

// Equation 4: k = log(R) / log(R_X). R = FMAX / FMIN is the range of the format, and R_X that of the moment
// group: its largest magnitude over its smallest that is not zero. k is rounded to a multiple of 1/256, from
// 1/16 to 64. If all magnitudes are equal, k is 64; in a moment group of zeros k is 1.
template <class Traits> __device__ float expansion_factor(float largest, float smallest) {
    const float log_ratio = fmaxf(fast_log2(largest) - fast_log2(smallest), 0.0f);  // log2(R_X)
    const float rounded = rintf(256.0f * Traits::LOG_RANGE * fast_reciprocal(log_ratio)) * 0x1p-8f;
    const float k = fminf(fmaxf(rounded, 0.0625f), 64.0f);
    return largest == 0 ? 1.0f : k;  // a select, not a branch
}

// Expand: |y| = FMAX (|x| / max)^k, where max is that of the moment group. For x = 0 the logarithm is
// -infinity, and y is 0. (The CPU's expand() returns y with its sign.)
template <class Traits> __device__ float expand_magnitude(float k, float inverse_max, float x) {
    return fast_exp2(__fmaf_rn(k, fast_log2_of_normal(fabsf(x) * inverse_max), Traits::LOG_FMAX));
}
// 1 / max: the fast reciprocal, and one iteration of Newton's method. For max = 0, in a moment group of
// zeros, the result is 2^127, not infinity: so 0 * 2^127 is 0, its logarithm -infinity, and the code 0.
__device__ float inverse_of_max(float max) {
    const float r = fast_reciprocal(fmaxf(max, 0x1p-126f));
    return __fmaf_rn(r, __fmaf_rn(-max, r, 1.0f), r);
}

// Contract: |x| / max = (|y| / FMAX)^(1/k), where log_y = log2(|y| / FMAX) comes from a table. (The CPU's
// contract() takes y and returns x. Here the product with max is left to adamw_element().)
__device__ float contract_to_ratio(float inverse_k, float log_y) { return fast_exp2(log_y * inverse_k); }

// -----------------------------------------------------------------------------------------------------------
// The careful path is for the few moment groups that are so wide or so small that an intermediate result of
// the equations above is not a normal number of FP32. The fast path computes these moment groups like all
// others, so that it has no branch, and the compiler can interleave what m and v need. Then the careful path
// computes them again, and its results replace those of the fast path. (As a function that is called, or in a
// loop that is not unrolled, the careful path would make the fast one up to 24% slower.)
enum class Path : uint8_t { Fast, Careful };

// A moment group is wide if R_X may exceed about 2^120. (log2(R_X) is LOG_RANGE / k.) Then decoding needs
// care, and encoding too.
template <class Traits> __device__ bool is_wide(const MomentScaling& scaling) {
    return Traits::EXPANDS && Traits::LOG_RANGE > 120.0f * scaling.k;
}
// Encoding divides by max, so it also needs care if max is very small.
template <class Traits> __device__ bool is_wide_or_small(const MomentScaling& scaling) {
    const bool normal = scaling.max >= 0x1p-100f || scaling.max == 0;
    return Traits::EXPANDS && (is_wide<Traits>(scaling) || !normal);
}
template <class Traits> __device__ float expand_carefully(const MomentScaling& scaling, float x) {
    return Traits::FMAX * fast_exp2(scaling.k * (log2f(fabsf(x)) - log2f(scaling.max)));
}
// Returns |x|, not |x| / max: the power alone may underflow where its product with max does not.
__device__ float contract_carefully(const MomentScaling& scaling, float inverse_k, float log_y) {
    const float root = exp2f(0.5f * (log_y * inverse_k));
    return root * scaling.max * root;
}

// ===========================================================================================================
// 2. The eight moments of a thread

// A second moment above zero must stay above zero, because the update divides by its root. y: the magnitude
// that is encoded for x.
template <class Traits> __device__ float at_least_fmin(float y, float x) {
    return !Traits::SIGNED && x > 0 && y < Traits::FMIN ? Traits::FMIN : y;
}
template <class Traits> __device__ uint2 encode_with_signs(Values& y, const Values& x) {
    if (Traits::SIGNED)
        for (int j = 0; j < CHUNK; j++) y[j] = copysignf(y[j], x[j]);
    return encode(Traits::E5M2, y, 1.0f);
}

// The codes of eight moments x. With expansion, the fast path needs no at_least_fmin(): what it expands is at
// least 0.85 FMIN, and the code of that is the code of FMIN. The reason: with the exact k of equation 4 the
// smallest moment of a moment group, max / R_X, would become FMIN. As k is rounded, it may be 1/512 too
// large, and then that moment becomes FMIN R_X^(-1/512). On the fast path R_X is at most 2^120 or so, which
// makes R_X^(-1/512) at least 0.85.
template <class Traits, Path PATH>
__device__ uint2 encode_moments(const MomentScaling& scaling, const Values& x) {
    const float inverse_max = inverse_of_max(scaling.max);
    const float inverse_scale = __frcp_rn(scale_of(Traits::FMAX, scaling.max));  // without expansion
    Values y;
    for (int j = 0; j < CHUNK; j++) {
        if (PATH == Path::Careful)
            y[j] = at_least_fmin<Traits>(expand_carefully<Traits>(scaling, x[j]), x[j]);
        else if (Traits::EXPANDS) y[j] = expand_magnitude<Traits>(scaling.k, inverse_max, x[j]);
        else y[j] = at_least_fmin<Traits>(fabsf(x[j]) * inverse_scale, x[j]);
    }
    return encode_with_signs<Traits>(y, x);
}

__device__ uint32_t code_of(uint2 codes, int j) {  // code j of eight
    return (j < 4 ? codes.x : codes.y) >> 8 * (j % 4) & 0xFFu;
}

// Fills the table of a moment's codes. Its entry for a code without a sign, whose value is y, is
// log2(y / FMAX); or y where nothing is expanded. The table saves a thread 16 logarithms for each span, one
// for each of its eight m and eight v.
constexpr int MAGNITUDES = 128;  // codes without a sign
template <class Traits> __device__ void fill_table(float* table) {
    for (uint32_t code = threadIdx.x; code < MAGNITUDES; code += blockDim.x) {
        const float y = decode2(Traits::E5M2, code).x;
        table[code] = Traits::EXPANDS ? log2f(y) - log2f(Traits::FMAX) : y;
    }
}

// The magnitude, with the sign of its FP8 code: the code's sign bit is moved to where FP32 has its sign bit.
template <class Traits> __device__ float with_sign(float magnitude, uint32_t code) {
    return Traits::SIGNED ? copysignf(magnitude, __uint_as_float(code << 24)) : magnitude;
}

// Decodes eight moments in two parts: ratios, and the factor that is returned. Moment j is factor times
// ratios[j], a product that adamw_element() computes (gpu/adamw.cuh says why). With expansion the factor is
// max on the fast path, and 1 on the careful one. Without expansion it is the scale, max / FMAX.
template <class Traits, Path PATH>
__device__ float decode_moments(const MomentScaling& scaling, uint2 codes, const float* table,
                                Values& ratios) {
    const float inverse_k = fast_reciprocal(scaling.k);
    for (int j = 0; j < CHUNK; j++) {
        const uint32_t code = code_of(codes, j);
        float magnitude = table[code % MAGNITUDES];
        if (PATH == Path::Careful) magnitude = contract_carefully(scaling, inverse_k, magnitude);
        else if (Traits::EXPANDS) magnitude = contract_to_ratio(inverse_k, magnitude);
        ratios[j] = with_sign<Traits>(magnitude, code);
    }
    if (PATH == Path::Careful) return 1.0f;
    return Traits::EXPANDS ? scaling.max : scale_of(Traits::FMAX, scaling.max);
}

// ===========================================================================================================
// 3. The moment scaling of a moment group, and the fields of a bundle

// The moment scaling of a moment group, from its new moments in 16 lanes. Magnitudes are compared as bits: as
// integers the bits have the same order. For a zero, bits - 1 is the largest integer, so that the minimum
// leaves it out. (In a moment group of zeros both magnitudes become 0.)
template <class Traits> __device__ MomentScaling scaling_of_new_moments(const Values& x) {
    uint32_t largest_bits = 0, smallest_bits_minus_1 = 0xFFFFFFFFu;
    for (int j = 0; j < CHUNK; j++) {
        const uint32_t bits = magnitude_bits(x[j]);
        largest_bits = max(largest_bits, bits);
        smallest_bits_minus_1 = min(smallest_bits_minus_1, bits - 1);
    }
    for (int lanes = 1; lanes < SPAN_LANES; lanes *= 2) {
        largest_bits = max(largest_bits, __shfl_xor_sync(ALL_LANES, largest_bits, lanes));
        smallest_bits_minus_1 =
            min(smallest_bits_minus_1, __shfl_xor_sync(ALL_LANES, smallest_bits_minus_1, lanes));
    }
    const float largest = __uint_as_float(largest_bits);
    const float smallest = __uint_as_float(smallest_bits_minus_1 + 1);
    return {.max = largest, .k = Traits::EXPANDS ? expansion_factor<Traits>(largest, smallest) : 1.0f};
}

// Which field of a bundle this lane keeps (the second drawing), and where it is in memory. (A Shard,
// gpu/operators.h, is what this rank has of one parameter.)
struct FieldOfLane {
    int which;         // M_MAX ... V_K
    int span;          // the number of the field's span in the bundle
    int pair;          // the number of the pair to which that span belongs
    float* in_memory;  // this field of all spans of the shard; null if the moment has no k
    int shard_spans;   // how many spans the shard has

    __device__ FieldOfLane(const Shard& shard, int number_of_spans) : shard_spans(number_of_spans) {
        const int lane = threadIdx.x % 32;
        which = lane % FIELDS;
        pair = lane % SPAN_LANES / FIELDS;
        span = pair * PAIR + lane / SPAN_LANES;
        const MomentRef moment = is_of_v() ? shard.v : shard.m;
        in_memory = is_k() ? moment.k : moment.max;
    }
    __device__ bool is_of_v() const { return which == V_MAX || which == V_K; }
    __device__ bool is_k() const { return which == M_K || which == V_K; }
    // This lane's field of the bundle that begins with span `first` of the shard. If the field's span is past
    // the last one, the field of the last span.
    __device__ float load(int first) const {
        return in_memory ? load_global<float>(in_memory + min(first + span, shard_spans - 1)) : 1.0f;
    }
    __device__ void store(int first, float value) const {
        if (in_memory && first + span < shard_spans) store_word(in_memory + first + span, value);
    }
};

// The field `which` of the span that this half of the warp updates in this pair. The lane that keeps this
// field passes it on: `kept` is the field that each lane keeps.
__device__ float shuffle_field(float kept, int pair, int which) {
    return __shfl_sync(ALL_LANES, kept, pair * FIELDS + which, SPAN_LANES);
}

// ===========================================================================================================
// 4. The kernel
//
// It is compiled for each kind of weights W (gpu/adamw.cuh), and for the MomentTraits M and V of each
// optimizer's first and second moments.

constexpr int WARPS = 8;          // warps of a block
constexpr int BLOCKS_PER_SM = 2;  // blocks of a multiprocessor: a thread may then have 128 registers

struct Codes {  // of a thread's eight elements of a span
    uint2 m, v;
};

// What a thread loads of a span: its eight elements, as they are stored.
template <class W> struct Loaded {
    Codes codes;
    typename W::StoredChunk w;
    Bf16OrFloat::StoredChunk g;
};

// Where a thread's eight elements are in the spans of a shard. Elements are counted in four ways:
//   from the shard's first element           the codes of m and v
//   in the rank's order                      weights and remainders
//   from the first element of this update    gradients
//   in the flat order of all parameters      the random bits of rounding
// The distance from a span to the next is the same in all of them.
template <class W> struct ElementsOfThread {
    const AdamWArguments& a;
    const Shard& shard;
    const int shard_spans;  // how many spans the shard has
    const int64_t start;    // the thread's first element of the shard's first span, in the rank's order
    const W weights;
    uint8_t *const codes_m, *const codes_v;

    __device__ ElementsOfThread(const AdamWArguments& arguments, const Shard& this_shard)
        : a(arguments), shard(this_shard), shard_spans(static_cast<int>(spans_of(shard.size))),
          start(shard.rank_offset + threadIdx.x % SPAN_LANES * CHUNK), weights(a.weights, start),
          codes_m(static_cast<uint8_t*>(shard.m.data) + start - shard.rank_offset),
          codes_v(static_cast<uint8_t*>(shard.v.data) + start - shard.rank_offset) {}

    // The distance from the thread's elements in the shard's first span to its elements in `span`; for a span
    // past the last one, to its elements in the last span.
    __device__ int64_t distance(int span) const {
        return static_cast<int64_t>(min(span, shard_spans - 1)) * MOMENT_GROUP_SIZE;
    }
    __device__ Loaded<W> load(int span) const {
        const int64_t i = distance(span);
        return {.codes = {load_global<uint2>(codes_m + i), load_global<uint2>(codes_v + i)},
                .w = weights.load(i),
                .g = a.gradients.load(start - a.first_element + i)};
    }
    // Stores nothing for a span past the last one.
    __device__ void store(int span, Values& w, const Codes& codes, uint32_t& largest_bits) const {
        const bool live = span < shard_spans;
        const int64_t i = distance(span);
        weights.store(i, w, a.rounding_key, start + shard.flat_minus_rank_offset + i, live, largest_bits);
        if (!live) return;
        store_word(codes_m + i, codes.m);
        store_word(codes_v + i, codes.v);
    }
};

// What adamw_element() multiplies the ratios of m and of v by.
struct Factors {
    float m, v;
};

// Decodes and encodes both moments of a span. First the fast path computes m and v, without a branch. Then
// the careful path replaces those that need care.
template <class M, class V>
__device__ Factors decode_both(const MomentScaling& scaling_m, const MomentScaling& scaling_v,
                               const Codes& codes, const float* table_m, const float* table_v,
                               Values& ratios_m, Values& ratios_v) {
    float factor_m = decode_moments<M, Path::Fast>(scaling_m, codes.m, table_m, ratios_m);
    float factor_v = decode_moments<V, Path::Fast>(scaling_v, codes.v, table_v, ratios_v);
    if (is_wide<M>(scaling_m))
        factor_m = decode_moments<M, Path::Careful>(scaling_m, codes.m, table_m, ratios_m);
    if (is_wide<V>(scaling_v))
        factor_v = decode_moments<V, Path::Careful>(scaling_v, codes.v, table_v, ratios_v);
    return {factor_m, factor_v};
}
template <class M, class V>
__device__ Codes encode_both(const MomentScaling& scaling_m, const MomentScaling& scaling_v, const Values& m,
                             const Values& v) {
    Codes codes;
    codes.m = encode_moments<M, Path::Fast>(scaling_m, m);
    codes.v = encode_moments<V, Path::Fast>(scaling_v, v);
    if (is_wide_or_small<M>(scaling_m)) codes.m = encode_moments<M, Path::Careful>(scaling_m, m);
    if (is_wide_or_small<V>(scaling_v)) codes.v = encode_moments<V, Path::Careful>(scaling_v, v);
    return codes;
}

// A warp updates bundles of a shard: the bundle that begins with span `first_span`, and from there on every
// WARPS-th bundle that begins before `end_span`. If the last span of the shard has no partner in its pair,
// the second half of the warp computes the last span, too, and stores nothing. Returns the bits of the
// largest magnitude of this lane's new weights.
//
// When a bundle of four pairs is loaded, computed and stored:
//
//   load      fields, pair 0 | next bundle's fields, pair 1 | pair 2 | pair 3 | next bundle's pair 0
//   compute                  | pair 0                       | pair 1 | pair 2 | pair 3
//   store                    | pair 0                       | pair 1 | pair 2 | pair 3, then the fields
template <class W, class M, class V>
__device__ uint32_t update_bundles(const AdamWArguments& a, const Shard& shard, int first_span, int end_span,
                                   const float* table_m, const float* table_v) {
    if (first_span >= end_span) return 0;
    const ElementsOfThread<W> elements(a, shard);
    const int shard_spans = elements.shard_spans;
    const int half = threadIdx.x % 32 / SPAN_LANES;
    const FieldOfLane mine(shard, shard_spans);
    const float clip = a.state->clip_factor, decay = shard.decays ? a.constants.weight_decay : 0.0f;
    uint32_t largest_bits = 0;
    // `next` is what the next pair needs. It is loaded before this pair is computed, and arrives meanwhile. A
    // bundle is known by the number of its first span. (With the last pair of the warp some other span is
    // loaded, which nobody uses.)
    Loaded<W> next = elements.load(first_span + half);
    float next_field = mine.load(first_span);
    for (int bundle_start = first_span; bundle_start < end_span; bundle_start += WARPS * BUNDLE) {
        const int next_bundle_start = bundle_start + WARPS * BUNDLE;
        const float old_field = next_field;
        float new_field = 0;
        next_field = mine.load(next_bundle_start);
#pragma unroll 1  // one copy of this long body
        for (int pair = 0; pair < PAIRS && bundle_start + pair * PAIR < shard_spans; pair++) {
            // Load: what this pair needs has arrived, and what the next pair needs is asked for.
            const int span = bundle_start + pair * PAIR + half;
            const Loaded<W> now = next;
            // That is this half's span of the next pair in the bundle or, after the last pair, of the first
            // pair of the warp's next bundle.
            const bool more = pair + 1 < PAIRS && bundle_start + (pair + 1) * PAIR < shard_spans;
            next = elements.load(more ? span + PAIR : next_bundle_start + half);

            // Decode.
            auto old = [&](int which) { return shuffle_field(old_field, pair, which); };
            const MomentScaling old_m{old(M_MAX), old(M_K)}, old_v{old(V_MAX), old(V_K)};
            Values w, g, m, v, ratios_m, ratios_v;
            elements.weights.unpack(now.w, w);
            a.gradients.unpack(now.g, g);
            const Factors factors =
                decode_both<M, V>(old_m, old_v, now.codes, table_m, table_v, ratios_m, ratios_v);

            // Update: AdamW.
            for (int j = 0; j < CHUNK; j++) {
                const UpdatedElement updated = adamw_element(a.constants, decay, w[j], g[j] * clip, factors.m,
                                                             ratios_m[j], factors.v, ratios_v[j]);
                m[j] = updated.m;
                v[j] = updated.v;
                w[j] = updated.w;
            }

            // The new fields. They are stored later, with those of the bundle's other spans.
            const MomentScaling new_m = scaling_of_new_moments<M>(m);
            const MomentScaling new_v = scaling_of_new_moments<V>(v);
            if (pair == mine.pair) {
                const MomentScaling new_of_lane = mine.is_of_v() ? new_v : new_m;
                new_field = mine.is_k() ? new_of_lane.k : new_of_lane.max;
            }

            // Encode, and store.
            const Codes codes = encode_both<M, V>(new_m, new_v, m, v);
            elements.store(span, w, codes, largest_bits);
        }
        mine.store(bundle_start, new_field);
    }
    return largest_bits;
}

// The number of the last shard that begins at or before an element. The shards are in order, and the first
// begins at first_element.
__device__ int shard_with(const AdamWArguments& a, int64_t element) {
    int low = 0, high = a.shard_count - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (a.shards[middle].rank_offset <= element) low = middle;
        else high = middle - 1;
    }
    return low;
}

// A block has consecutive spans, [begin, end) in the rank's order, and goes through the shards to which these
// spans belong. In each shard warp 0 takes the first bundle, warp 1 the second, and so on; after the last
// warp, warp 0 takes the next. (Spans and bundles are counted from the beginning of the shard.) A bundle that
// lies in two blocks belongs to the block in which it begins.
template <class W, class M, class V>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS_PER_SM) adamw_kernel(const AdamWArguments a) {
    __shared__ float table_m[MAGNITUDES], table_v[MAGNITUDES];
    if (a.state->skip) return;
    fill_table<M>(table_m);
    fill_table<V>(table_v);
    __syncthreads();
    // The spans of this update begin after `origin` spans of the rank's order; this block has those from
    // `begin` to before `end`, counted in the rank's order, too.
    const int64_t origin = a.first_element / MOMENT_GROUP_SIZE;
    const int64_t begin = origin + a.spans * blockIdx.x / gridDim.x;
    const int64_t end = origin + a.spans * (blockIdx.x + 1) / gridDim.x;
    const int warp = threadIdx.x / 32;
    for (int i = shard_with(a, begin * MOMENT_GROUP_SIZE); i < a.shard_count; i++) {
        const Shard shard = a.shards[i];
        // Where the shard begins and ends: spans, counted in the rank's order
        const int64_t shard_begin = shard.rank_offset / MOMENT_GROUP_SIZE;
        const int64_t shard_end = shard_begin + spans_of(shard.size);
        if (shard_begin >= end) return;
        if (!a.in_fp8_moment_groups(shard)) continue;
        // What the block has of the shard: spans, counted from the beginning of the shard
        const int64_t first = max(begin, shard_begin) - shard_begin;
        const int64_t stop = min(end, shard_end) - shard_begin;
        // The first bundle of this warp: bundles, counted from the beginning of the shard
        const int64_t first_bundle = ceil_div(first, BUNDLE) + warp;
        const uint32_t largest_bits = update_bundles<W, M, V>(
            a, shard, static_cast<int>(first_bundle) * BUNDLE, static_cast<int>(stop), table_m, table_v);
        if (shard.amax_out) update_amax_by_warp(&shard.amax_out->amax, largest_bits);
    }
}

// ===========================================================================================================
// 5. The launch

// If a block has this many spans, its start and its end take little of its time.
constexpr int64_t LEAST_SPANS_PER_BLOCK = 16384;

// The number of blocks: those that the GPU runs at once; or several times as many, if each block still has
// LEAST_SPANS_PER_BLOCK spans. Spans that take the careful path are slow, and they are neighbours: the
// embeddings of tokens that no longer occur. More blocks share them out better. A small update has a block
// for each bundle, because a bundle keeps one warp busy, wherever that warp is.
unsigned adamw_blocks(int64_t spans) {
    const int64_t at_once = multiprocessors() * BLOCKS_PER_SM;
    const int64_t rounds = std::max<int64_t>(1, spans / (at_once * LEAST_SPANS_PER_BLOCK));
    const int64_t bundles = ceil_div(spans, BUNDLE);
    return static_cast<unsigned>(std::min(bundles, at_once * rounds));
}

AdamWKernelConstants kernel_constants(const AdamWOptions& options) {
    const double bias1 = 1 - std::pow(static_cast<double>(options.beta1), static_cast<double>(options.step));
    const double bias2 = 1 - std::pow(static_cast<double>(options.beta2), static_cast<double>(options.step));
    return {.lr = options.lr,
            .beta1 = options.beta1,
            .beta2 = options.beta2,
            .one_minus_beta1 = 1 - options.beta1,
            .one_minus_beta2 = 1 - options.beta2,
            .weight_decay = options.weight_decay,
            .root_factor = static_cast<float>(bias1 / std::sqrt(bias2)),
            .scaled_eps = static_cast<float>(bias1 * options.eps)};
}

// Calls f<M, V>() with the MomentTraits of first moments in the format OF_M and second moments in OF_V.
template <Format OF_M, Format OF_V, bool EXPANSION, class F> void call_with_traits(F f) {
    using M = MomentTraits<WhichMoment::First, OF_M, EXPANSION>;
    using V = MomentTraits<WhichMoment::Second, OF_V, EXPANSION>;
    f.template operator()<M, V>();
}
// The same for an optimizer whose moments are in FP8 moment groups.
template <class F> void with_moment_traits(const Optimizer& o, F f) {
    constexpr Format E4M3 = Format::E4M3, E5M2 = Format::E5M2;
    const bool both_e4m3 = o.m == E4M3 && o.v == E4M3;
    if (both_e4m3 && o.expansion) call_with_traits<E4M3, E4M3, /*EXPANSION=*/true>(f);
    else if (both_e4m3) call_with_traits<E4M3, E4M3, /*EXPANSION=*/false>(f);
    else if (o.m == E4M3 && o.v == E5M2 && o.expansion) call_with_traits<E4M3, E5M2, /*EXPANSION=*/true>(f);
    else require(false, "adamw.cu has no kernel for moments in these formats");
}

// The amaxes of the weights start at 0, because an update only raises them.
__global__ void clear_weight_amaxes_kernel(const AdamWArguments a) {
    const int64_t i = thread_of_grid();
    if (i >= a.shard_count || a.state->skip) return;
    AmaxAndScale* const amax_out = a.shards[i].amax_out;
    if (amax_out) amax_out->amax = 0;
}

}  // namespace

void adamw(const AdamWOptions& options, const Optimizer& optimizer, const ShardGradients& g,
           const Weights& weights, uint64_t rounding_key, const GradientState* state, cudaStream_t stream) {
    const bool fp8_moment_groups = optimizer.has_fp8_moment_groups();
    const bool any_scales = moments_need_scaling(optimizer.m) || moments_need_scaling(optimizer.v);
    require(fp8_moment_groups || optimizer.per_tensor || !any_scales,
            "moments in moment groups must both be in FP8");
    const AdamWArguments arguments{.constants = kernel_constants(options),
                                   .fmax_m = info(optimizer.m).fmax,
                                   .fmax_v = info(optimizer.v).fmax,
                                   .per_tensor = optimizer.per_tensor,
                                   .fp8_moment_groups = fp8_moment_groups,
                                   .shards = g.shards,
                                   .shard_count = g.count,
                                   .first_element = g.elements.first,
                                   .spans = g.elements.count / MOMENT_GROUP_SIZE,
                                   .weights = weights,
                                   .rounding_key = rounding_key,
                                   .gradients = bf16_or_float(g.gradients, g.format),
                                   .state = state};
    launch("clear_weight_amaxes", clear_weight_amaxes_kernel, blocks(g.count, 128), 128, 0, stream,
           arguments);
    update_shards_without_moment_groups(arguments, stream);
    if (!fp8_moment_groups || g.elements.count == 0) return;
    with_weights(weights, [&]<class W>() {
        with_moment_traits(optimizer, [&]<class M, class V>() {
            launch("adamw", adamw_kernel<W, M, V>, adamw_blocks(arguments.spans), 32 * WARPS, 0, stream,
                   arguments);
        });
    });
}

}  // namespace coat::gpu
