// gpu/groups.cuh - tensors in groups, for what norms and activation functions save: the view with which a
// thread loads groups, or makes and stores them. (The other views are in gpu/device.cuh, part 3.)
//
// A tensor in groups has E4M3 codes, and a BF16 scale for each group of 1 x 16: 16 neighbouring elements of a
// row. All are of one token, and an outlier costs precision only in its own group. For each group:
//
//   amax    the largest |x|
//   scale   amax / 448, at least 2^-126, rounded to BF16. (448 is the FMAX of E4M3.) It is 1 if amax is 0
//   code    x / scale, rounded to E4M3; what is larger than 448 becomes 448
//   value   code * scale. Forward and backward both compute with it
//
// Two remarks:
//   - Rounding the scale may make it smaller. Then amax / scale is larger than 448, at most 448 (1 + 2^-8) =
//     449.75. Values of E4M3 are 32 apart there, so 448 is the nearest one: nothing is lost.
//   - A group with NaN or infinity gets the scale NaN, because its codes would hide what is not finite.
#pragma once
#include "device.cuh"

namespace coat::gpu {

constexpr int GROUP_SIZE = PER_1x16.cols;
static_assert(GROUP_SIZE == 2 * CHUNK_SIZE);

// Returns amax / 448, rounded to nearest as a division rounds it, if the result is a normal number. (The
// caller replaces smaller results by 2^-126.) A first quotient q is corrected by what it lacks:
//   q = amax * (1 / 448),  result = q + (amax - 448 q) * (1 / 448)
// With a division, a kernel that makes groups would have a quarter to a half more instructions.
inline __device__ float divide_by_448(float amax) {
    const float q = __fmul_rn(amax, 1 / 448.0f);
    return __fmaf_rn(__fmaf_rn(-448.0f, q, amax), 1 / 448.0f, q);
}

// The view of a tensor in groups. The number of columns is a multiple of the group size, so the group of
// element i is i / GROUP_SIZE. Two neighbouring lanes have one group: both must call round_and_store(), and
// the lane with the even number writes the scale.
struct GroupsView {
    using ComputeElement = bf16;
    struct StoredChunk {
        uint2 codes;
        uint16_t scale;
    };
    uint8_t* codes;
    uint16_t* scales;

    __device__ GroupsView starting_at(int64_t i) const { return {codes + i, scales + i / GROUP_SIZE}; }
    __device__ StoredChunk load(int64_t i) const {
        return {*reinterpret_cast<const uint2*>(codes + i), scales[i / GROUP_SIZE]};
    }
    __device__ void unpack(const StoredChunk& loaded, ChunkValues& v) const {
        decode<Format::E4M3>(loaded.codes, __uint_as_float(uint32_t(loaded.scale) << 16), v);
    }
    // The scale of the group that this lane and its neighbour have.
    static __device__ float group_scale(const ChunkValues& v) {
        float amax = larger_magnitude(0, v);
        amax = larger_magnitude(amax, __shfl_xor_sync(ALL_LANES, amax, 1));  // with the other lane
        if (!(amax < INFINITY)) return __uint_as_float(NAN_BITS);
        return amax > 0 ? round_to_bf16(fmaxf(divide_by_448(amax), 0x1p-126f)) : 1.0f;
    }
    // Returns 1 / scale, rounded to nearest as a division rounds it. r is nearly 1 / scale, and the result is
    // r + (1 - scale r) r. (A BF16 scale has 8 significant bits, so 1 - scale r is exact.)
    static __device__ float inverse_of_scale(float scale) {
        const float r = fast_reciprocal(scale);
        return __fmaf_rn(__fmaf_rn(-scale, r, 1.0f), r, r);
    }
    __device__ void round_and_store(int64_t i, ChunkValues& v, bool live) const {
        const float scale = group_scale(v);
        const uint2 c = encode<Format::E4M3>(v, inverse_of_scale(scale));
        if (live) {
            store_in_one_instruction(codes + i, c);
            if (threadIdx.x % 2 == 0) scales[i / GROUP_SIZE] = uint16_t(__float_as_uint(scale) >> 16);
        }
        decode<Format::E4M3>(c, scale, v);
    }
};
inline GroupsView groups_view(const TensorRef& t) { return {static_cast<uint8_t*>(t.data), t.group_scales}; }

// Calls f with the view of a tensor in BF16, in FP32 or in groups.
template <class F> void with_view(const TensorRef& t, F f) {
    if (t.format != E4M3_PER_1x16) return with_plain_view(t, f);
    f(groups_view(t));
}

}  // namespace coat::gpu
