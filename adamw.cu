// adamw.cu - the paper's section 4 on the GPU: AdamW with moments in FP8 and dynamic range expansion
// (interface, and AdamW of one element: gpu/adamw.cuh; the same operators on the CPU: reference.cpp).
#include "gpu/adamw.cuh"

namespace coat::gpu {
namespace {

// ===========================================================================================================
// 1. Dynamic range expansion (paper section 4.2, equation 4)
//
// The magnitudes of a group of 128 moments span R_X = max / smallest non-zero. A power stretches them to the
// range of E4M3, R = 448 / 2^-9:
//   k = log(R) / log(R_X)
//   expand:    y  = sign(x) E4M3(448 (|x| / max)^k), which a code stores
//   contract:  x' = sign(y) max (|y| / 448)^(1/k)
//
// A group belongs to half a warp, eight consecutive elements to a lane. For 85% of an H200's copy bandwidth
// an element may take 15 special functions (log2, exp2, roots, reciprocals) and 120 instructions: hence the
// fast functions, and a table of log2(|y| / 448) in shared memory. Rare cases branch off once for all
// eight.

constexpr int GROUP_LANES = MOMENT_GROUP / CHUNK;  // lanes that share one group of moments
constexpr int WARP_GROUPS = 32 / GROUP_LANES;      // groups that a warp works on at once
static_assert(GROUP_LANES >= 4, "group_scales() shares four maxima among the lanes of a group");
__device__ int group_of_lane() { return threadIdx.x / GROUP_LANES % WARP_GROUPS; }
__device__ int first_of_lane() { return threadIdx.x % GROUP_LANES * CHUNK; }  // its elements in the group

MomentFormat moment_format(Format f, const OptimizerFormat& o) {
    if (!is_scaled(f)) return {};
    const double max = info(f).max;
    const float log_max = float(std::log2(max)), log_range = float(std::log2(max / info(f).min));
    return {f == Format::E5M2, o.expands(f), o.group == 0, info(f).max, log_max, log_range};
}

// Equation 4: k = log(R) / log(R_X) with R = FMAX / FMIN of the format and R_X = max / min of the group. It
// is rounded to a multiple of 1/256, from 1/16 to 64. A group of zeros has k = 1; one of equal magnitudes 64.
__device__ float expansion_factor(float log_range, float max, float min_nonzero) {
    if (max == 0) return 1.0f;
    const float log_ratio = fmaxf(fast_log2(max) - fast_log2(min_nonzero), 0.0f);
    return fminf(fmaxf(rintf(256.0f * log_range * fast_reciprocal(log_ratio)) * 0x1p-8f, 0.0625f), 64.0f);
}

struct GroupScale {  // what the elements of a group share
    float max, k;
    float inverse = 0;  // for encoding: 1 / max with expansion, else 1 / scale
};

// A group is wide if its magnitudes may differ by more than about 2^120. Values relative to its maximum may
// then leave the normal range of FP32: such a group takes the careful path.
__device__ bool wide(const MomentFormat& f, float k) { return f.log_range > 120.0f * k; }
// To encode fast, 1 / max must be a normal number too.
__device__ bool encodes_fast(const MomentFormat& f, const GroupScale& g) {
    return !wide(f, g.k) && (g.max >= 0x1p-100f || g.max == 0);
}

// Eight magnitudes FMAX (|x| / max)^k, before they are rounded to codes. encode_moment() adds the signs.
__device__ void expand(const MomentFormat& f, const GroupScale& g, const Values& x, Values& y) {
    if (encodes_fast(f, g)) {
        for (int j = 0; j < CHUNK; j++)  // x = 0: log2 is -infinity, the result 0
            y[j] = fast_exp2(__fmaf_rn(g.k, fast_log2_of_normal(fabsf(x[j]) * g.inverse), f.log_max));
        return;
    }
    const float log_max = log2f(g.max);
#pragma unroll 1
    for (int j = 0; j < CHUNK; j++) {  // one at a time; the inner loops keep x and y in registers
        float from = 0;
#pragma unroll
        for (int at = 0; at < CHUNK; at++) from = at == j ? fabsf(x[at]) : from;
        const float to = f.max * fast_exp2(g.k * (log2f(from) - log_max));
#pragma unroll
        for (int at = 0; at < CHUNK; at++) y[at] = at == j ? to : y[at];
    }
}

// Writes (|code| / FMAX)^(1/k) of eight codes to x and returns the factor that is still missing: max, or 1 in
// the careful path. adamw_element() multiplies by it (gpu/adamw.cuh); decode_moment() adds the signs. `table`
// has log2(|code| / FMAX).
__device__ float contract(const MomentFormat& f, const GroupScale& g, uint2 codes, const float* table,
                          Values& x) {
    const float inverse_k = fast_reciprocal(g.k);
    auto log_of = [&](int j) { return table[code_of(codes, j) & 0x7Fu]; };
    if (!wide(f, g.k)) {
        for (int j = 0; j < CHUNK; j++) x[j] = fast_exp2(log_of(j) * inverse_k);
        return g.max;
    }
#pragma unroll 1
    for (int j = 0; j < CHUNK; j++) {  // the power alone may underflow where its product with max does not
        const float root = exp2f(0.5f * (log_of(j) * inverse_k)), value = root * g.max * root;
#pragma unroll
        for (int to = 0; to < CHUNK; to++) x[to] = to == j ? value : x[to];
    }
    return 1.0f;
}

// Codes of eight moments. SECOND: a second moment is never negative, and what is above zero stays above zero.
template <bool SECOND>
__device__ uint2 encode_moment(const MomentFormat& f, const GroupScale& g, const Values& x) {
    Values y;
    if (f.expand) expand(f, g, x, y);
    else
        for (int j = 0; j < CHUNK; j++) y[j] = fabsf(x[j]) * g.inverse;
    if (!SECOND)
        for (int j = 0; j < CHUNK; j++) y[j] = copysignf(y[j], x[j]);
    uint2 codes = encode(f.e5m2, y, 1.0f);
    // Not needed in expand()'s fast way. There max / min is below 2^120, and k at most 1/512 too large: that
    // leaves the smallest value at (min / max)^(1/512) > 0.85 of the smallest code, to which it is rounded.
    if (SECOND && !(f.expand && encodes_fast(f, g)))
        for (int j = 0; j < CHUNK; j++)
            if (x[j] > 0 && code_of(codes, j) == 0) (j < 4 ? codes.x : codes.y) |= 1u << 8 * (j % 4);
    return codes;
}
// Writes the values of eight codes to x, but for a factor that it returns. Without expansion `table` has
// |code|.
template <bool SECOND>
__device__ float decode_moment(const MomentFormat& f, const GroupScale& g, uint2 codes, const float* table,
                               Values& x) {
    float scale;
    if (f.expand) {
        scale = contract(f, g, codes, table, x);
    } else {
        scale = scale_of(f.max, g.max);
        for (int j = 0; j < CHUNK; j++) x[j] = table[code_of(codes, j) & 0x7Fu];
    }
    if (!SECOND)
        for (int j = 0; j < CHUNK; j++)
            x[j] = __uint_as_float(__float_as_uint(x[j]) | (code_of(codes, j) << 24 & 0x80000000u));
    return scale;
}
__device__ void fill_table(const MomentFormat& f, float* table) {
    for (uint32_t code = threadIdx.x; code < 128; code += blockDim.x) {
        const float value = decode2(f.e5m2, code).x;
        table[code] = f.expand ? log2f(value) - log2f(f.max) : value;
    }
}

// The scales of both moments of a group, from its new values: max = max |x|, min = min |x| without zeros, and
// k = expansion_factor(max, min). These are four reductions over the group's 16 lanes: max and min, of m and
// of v. One after the other they would take 16 exchanges between lanes. Here a lane passes on half of what it
// has in each of the first two rounds, and goes on with the other half, so that six exchanges do (and three
// more at the end). What a lane goes on with, by its number mod 4:
//   after the exchange with lane    0              1              2              3
//   ^ 1                             m: max, min    v: max, min    m: max, min    v: max, min   of 2 lanes
//   ^ 2                             m: max         v: max         m: min         v: min        of 4 lanes
//   ^ 4, ^ 8                        the same, of all 16 lanes
//   ^ 2 again                       m: max, min    v: max, min    m: max, min    v: max, min
// Then each lane computes (max, k, inverse) of its moment, and gets those of the other one from lane ^ 1. A
// minimum is the maximum of ~(bits - 1): for a zero, bits - 1 is the largest integer, so zeros do not count.
__device__ void group_scales(const MomentFormat& fm, const MomentFormat& fv, const Values& m, const Values& v,
                             GroupScale& gm, GroupScale& gv) {
    const bool has_v = threadIdx.x & 1, has_min = threadIdx.x & 2;  // the lane's column of the table
    auto exchange = [](auto x, int lanes) { return __shfl_xor_sync(0xFFFFFFFFu, x, lanes); };
    uint32_t tops[2] = {0, 0}, lows[2] = {0xFFFFFFFFu, 0xFFFFFFFFu};
    for (int j = 0; j < CHUNK; j++) {
        const uint32_t bits[2] = {magnitude(m[j]), __float_as_uint(v[j])};  // v is not negative
        for (int i = 0; i < 2; i++) tops[i] = max(tops[i], bits[i]), lows[i] = min(lows[i], bits[i] - 1);
    }
    const uint32_t top = max(has_v ? tops[1] : tops[0], exchange(has_v ? tops[0] : tops[1], 1));
    const uint32_t inverted = ~min(has_v ? lows[1] : lows[0], exchange(has_v ? lows[0] : lows[1], 1));
    uint32_t largest = max(has_min ? inverted : top, exchange(has_min ? top : inverted, 2));
    for (int lanes = 4; lanes < GROUP_LANES; lanes *= 2) largest = max(largest, exchange(largest, lanes));
    const uint32_t other = exchange(largest, 2);
    const float group_max = __uint_as_float(has_min ? other : largest),
                group_min = __uint_as_float(~(has_min ? largest : other) + 1);

    const bool expands = has_v ? fv.expand : fm.expand;
    const float k =
        expands ? expansion_factor(has_v ? fv.log_range : fm.log_range, group_max, group_min) : 1.0f;
    float inverse = fast_reciprocal(fmaxf(group_max, 0x1p-126f));
    if (expands)
        inverse = __fmaf_rn(inverse, __fmaf_rn(-group_max, inverse, 1.0f), inverse);  // one Newton step
    else inverse = __frcp_rn(scale_of(has_v ? fv.max : fm.max, group_max));
    const GroupScale mine{group_max, k, inverse};
    const GroupScale theirs{exchange(group_max, 1), exchange(k, 1), exchange(inverse, 1)};
    gm = has_v ? theirs : mine;
    gv = has_v ? mine : theirs;
}
// ===========================================================================================================
// 2. AdamW with both moments in FP8 groups: the kernel of training with COAT
//
// Two things make it fast (dev/ladders/adamw.cu). The next groups are being loaded while these are computed.
// And the scales (max, k) of eight groups are loaded and stored together: 32 bytes, a whole sector of memory.

// One load. (The compiler does not know that a pointer from a table in memory points to global memory.)
template <class V> __device__ V get(const void* from) { return __ldca(static_cast<const V*>(from)); }

constexpr int FP8_WARPS = 8, FP8_GROUPS = FP8_WARPS * WARP_GROUPS, FP8_BLOCKS_PER_SM = 2;
constexpr int64_t FP8_GROUPS_PER_BLOCK = 16384;  // or more, so that a block's start and end do not count

// A window is 8 consecutive groups. A warp works on two of them at once, WARP_GROUPS: first on groups 0 and
// 1, then on 2 and 3, and so on. Two things are divided among its 32 lanes. Of the scales of the window, each
// lane has one value: max or k, of m or of v, of one group (WindowScales). Of the two groups at hand, each
// lane has eight elements (update_segment):
//   lane l          0 ... 7        8 ... 15       16 ... 23      24 ... 31
//   scale           max of m       k of m         max of v       k of v        of group l % 8
//   elements        0 ... 63       64 ... 127     0 ... 63       64 ... 127    eight, from 8 (l % 16) on
//                   of the first group            of the second group
constexpr int WINDOW = 8, SCALE_VALUES = 4;
static_assert(WINDOW * SCALE_VALUES == 32 && WINDOW % WARP_GROUPS == 0, "a lane has one value of one group");

struct WindowScales {
    float* mine;  // this lane's value of the segment's group g is mine[g]; null where there is none
    int lane, groups;

    __device__ WindowScales(const Segment& s, int number_of_groups)
        : lane(threadIdx.x % 32), groups(number_of_groups) {
        const bool second = lane / WINDOW >= 2, is_k = lane / WINDOW % 2;
        mine = second ? (is_k ? s.v.k : s.v.max) : (is_k ? s.m.k : s.m.max);
    }
    // This lane's value in the window that begins with group `first`. A window may reach beyond the last
    // group; it then has that group's values there.
    __device__ float load(int first) const {
        return mine ? get<float>(mine + min(first + lane % WINDOW, groups - 1)) : 1.0f;
    }
    __device__ void store(int first, float value) const {
        const int group = first + lane % WINDOW;
        if (mine && group < groups) put(mine + group, value);
    }
    // The scale of this lane's group, for m or (second) for v. The warp works on the groups `at` and
    // at + 1, counted from the window's first.
    static __device__ GroupScale pick(float value, bool second, int at) {
        const int group = at + group_of_lane(), first = second ? 2 * WINDOW : 0;
        return {__shfl_sync(0xFFFFFFFFu, value, first + group),
                __shfl_sync(0xFFFFFFFFu, value, first + WINDOW + group)};
    }
    // The inverse of pick(): this lane's value, after groups at and at + 1 got their new scales m and v. The
    // lanes that computed a group know its four values, and each offers one of them. A lane that keeps a
    // value of one of these groups takes it:
    //   offered by     lane 0      1         2         3          16        17        18        19
    //   value          max of m    k of m    max of v  k of v     max of m  k of m    max of v  k of v
    //   of the group   at          at        at        at         at + 1    at + 1    at + 1    at + 1
    //   kept by lane   at          at + 8    at + 16   at + 24    at + 1    at + 9    at + 17   at + 25
    __device__ float insert(float value, const GroupScale& m, const GroupScale& v, int at) const {
        const float offered = lane % SCALE_VALUES < 2 ? (lane % 2 ? m.k : m.max) : (lane % 2 ? v.k : v.max);
        const float made =
            __shfl_sync(0xFFFFFFFFu, offered, GROUP_LANES * (lane % WARP_GROUPS) + lane / WINDOW);
        return lane % WINDOW / WARP_GROUPS == at / WARP_GROUPS ? made : value;
    }
};

// Updates a warp's groups of one segment: the window that begins with group `first`, and every FP8_WARPS-th
// window after it, as long as they begin before group `last`. If the last group has no partner, half of the
// warp computes it a second time and stores nothing.
template <class W>
__device__ uint32_t update_segment(const AdamArguments& a, const Segment& segment, int first, int last,
                                   const float* table_m, const float* table_v) {
    if (first >= last) return 0;
    const int groups = int((segment.size + MOMENT_GROUP - 1) / MOMENT_GROUP);
    const int64_t start = segment.offset + first_of_lane(), to_gradients = start - a.first;
    const Weights weights = a.w.from<typename W::Value>(start);
    uint8_t* const codes_m = static_cast<uint8_t*>(segment.m.data) + first_of_lane();
    uint8_t* const codes_v = static_cast<uint8_t*>(segment.v.data) + first_of_lane();
    const WindowScales scales(segment, groups);
    const float clip = a.state->clip_factor, decay = segment.decays ? a.f.decay : 0.0f;
    typename W::Raw next_w;
    EitherDense::Raw next_g;
    uint2 next_m, next_v;
    auto fetch = [&](int at) {
        const int64_t i = int64_t(min(at + group_of_lane(), groups - 1)) * MOMENT_GROUP;
        next_w = W::load(weights, i);
        next_g = a.gradients.load(to_gradients + i);
        next_m = get<uint2>(codes_m + i);
        next_v = get<uint2>(codes_v + i);
    };
    uint32_t top = 0;
    fetch(first);
    float next_scale = scales.load(first);
    for (int window = first; window < last; window += FP8_WARPS * WINDOW) {
        const int stop = min(window + WINDOW, groups), next_window = window + FP8_WARPS * WINDOW;
        const float scale = next_scale;
        float made = 0;
        next_scale = scales.load(next_window);
#pragma unroll 1
        for (int at = window; at < stop; at += WARP_GROUPS) {
            Values w, g, m, v;
            W::values(next_w, w);
            a.gradients.values(next_g, g);
            GroupScale gm = WindowScales::pick(scale, false, at - window),
                       gv = WindowScales::pick(scale, true, at - window);
            const float keep_m = a.f.beta1 * decode_moment<false>(a.m, gm, next_m, table_m, m);
            const float keep_v = a.f.beta2 * decode_moment<true>(a.v, gv, next_v, table_v, v);
            fetch(at + WARP_GROUPS < stop ? at + WARP_GROUPS : next_window);
            for (int j = 0; j < CHUNK; j++)
                adamw_element(a.f, keep_m, keep_v, decay, g[j] * clip, m[j], v[j], w[j]);
            const bool live = at + group_of_lane() < groups;
            const int64_t i = int64_t(min(at + group_of_lane(), groups - 1)) * MOMENT_GROUP;
            group_scales(a.m, a.v, m, v, gm, gv);
            made = scales.insert(made, gm, gv, at - window);
            W::store(weights, i, w, a.rounding, start + segment.to_flat + i, live, top);
            const uint2 new_m = encode_moment<false>(a.m, gm, m), new_v = encode_moment<true>(a.v, gv, v);
            if (live) put(codes_m + i, new_m), put(codes_v + i, new_v);
        }
        scales.store(window, made);
    }
    return top;
}

// A block has consecutive groups of the range. Within each segment among them its warps take windows in turn.
template <class W>
__global__ void __launch_bounds__(32 * FP8_WARPS, FP8_BLOCKS_PER_SM) adamw_fp8_kernel(const AdamArguments a) {
    __shared__ float table_m[128], table_v[128];
    if (a.state->skip) return;
    fill_table(a.m, table_m);
    fill_table(a.v, table_v);
    __syncthreads();
    const int64_t origin = a.first / MOMENT_GROUP;
    const int64_t begin = origin + a.groups * blockIdx.x / gridDim.x,
                  end = origin + a.groups * (blockIdx.x + 1) / gridDim.x;
    int low = 0, high = a.number_of_segments - 1;  // the last segment that starts at or before `begin`
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (a.segments[middle].offset <= begin * MOMENT_GROUP) low = middle;
        else high = middle - 1;
    }
    for (; low < a.number_of_segments; low++) {
        const Segment segment = a.segments[low];
        const int64_t start = segment.offset / MOMENT_GROUP,
                      stop = start + (segment.size + MOMENT_GROUP - 1) / MOMENT_GROUP;
        if (start >= end) return;
        if (!a.in_fp8_groups(segment)) continue;
        const int64_t first = max(begin, start), last = min(end, stop);
        const int warp = threadIdx.x / 32,
                  window = int((first - start + WINDOW - 1) / WINDOW + warp) * WINDOW;
        const uint32_t top = update_segment<W>(a, segment, window, int(last - start), table_m, table_v);
        if (segment.amax) update_amax_by_warp(&segment.amax->amax, top);
    }
}

// Several blocks for each multiprocessor, if each then has at least FP8_GROUPS_PER_BLOCK groups. Slow groups
// are neighbours (rows of tokens that no longer occur): smaller blocks balance the load.
unsigned fp8_grid(int64_t groups) {
    const int64_t at_once = multiprocessors() * FP8_BLOCKS_PER_SM,
                  rounds = std::max<int64_t>(1, groups / (at_once * FP8_GROUPS_PER_BLOCK));
    return unsigned(std::min(ceil_div(groups, FP8_GROUPS), at_once * rounds));
}

Factors factors(const AdamW& a) {
    const double bias1 = 1 - std::pow(double(a.beta1), double(a.step));
    const double bias2 = 1 - std::pow(double(a.beta2), double(a.step));
    const float root_factor = float(bias1 / std::sqrt(bias2)), scaled_eps = float(bias1 * a.eps);
    return {a.lr, a.beta1, a.beta2, 1 - a.beta1, 1 - a.beta2, a.weight_decay, root_factor, scaled_eps};
}

}  // namespace

void adamw(const AdamW& a, const OptimizerFormat& optimizer, const Segment* segments, int number_of_segments,
           const Slice& range, const Weights& w, uint64_t rounding, const void* gradients, Format format,
           const GradientState* state, cudaStream_t s) {
    const bool fp8_groups = optimizer.group != 0 && is_fp8(optimizer.m);  // and then also optimizer.v
    AdamArguments u{};
    u.f = factors(a), u.m = moment_format(optimizer.m, optimizer),
    u.v = moment_format(optimizer.v, optimizer);
    u.segments = segments, u.number_of_segments = number_of_segments;
    u.first = range.first, u.groups = range.count / MOMENT_GROUP;
    u.w = w, u.rounding = rounding, u.gradients = either_dense(gradients, format), u.state = state;
    update_without_groups(u, fp8_groups, s);
    if (!fp8_groups || range.count == 0) return;
    with_weights(w, [&](auto kind) {
        launch("adamw, FP8", adamw_fp8_kernel<decltype(kind)>, fp8_grid(u.groups), 32 * FP8_WARPS, 0, s, u);
    });
}

}  // namespace coat::gpu
