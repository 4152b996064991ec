// adamw.cu - a ladder of four kernels: one AdamW step whose moments are E4M3 with dynamic range expansion
// (paper section 4) in groups of 128. Weights are BF16 with the 16-bit remainder of their FP32 master. Kernel
// 4 is the one that trains.
//
//   make build/ladder_adamw && build/ladder_adamw
//
// 1  As the paper reads: one block per group, one thread per element, powf to expand and to contract, maximum
//    and minimum through shared memory. It is bound by powf (hundreds of instructions, four times per
//    element), by barriers, and by accesses of one or two bytes.
// 2  One warp per group, four elements per lane: accesses of 4 and 8 bytes, and no barriers. Maximum and
//    minimum take one instruction each (redux) on the bits of the magnitudes, which are ordered like the
//    values.
// 3  x^y = 2^(y log2 x) on the special function unit (ex2.approx, lg2.approx). Its error is a few parts in
//    10^7, while a code has 4 significant bits.
// 4  log2(|code| / FMAX) comes from a table of 128 entries. The group's scales are computed once: one
//    moment's by the even lanes, the other's by the odd lanes. There is no division. The next group is loaded
//    while this one is computed, and the grid fills the GPU exactly once. No branch per element, and eight
//    elements per lane with half a warp per group.
//
// H200, 2^28 parameters; copy bandwidth 4.29 TB/s:   kernel                   1      2      3      4
//                                                    ms                    7.78   5.14   2.33   1.06
//                                                    % of copy bandwidth    11%    17%    38%    84%
//
// How kernel 4 was found, a billion parameters, microseconds and % of copy bandwidth:
//   one warp per group, 4 elements per lane                                          5791, 57%
//   half a warp per group, 8 elements per lane, 16 warps per multiprocessor          4662, 71%
//   a warp takes 8 consecutive groups, whose scales fill whole sectors of memory     3879, 86%
//   the same, and groups of zeros take the fast path through a special case          4295, 78%
//   the same without the special case: they use the reciprocal of another value      3878, 86%
// The scales showed the way: loads and stores without arithmetic reached 66%, and 89% without the scales.
// Groups of zeros matter because most rows of an embedding belong to tokens that do not occur. The special
// case did not add work: it changed the allocation of registers, so that the loop waited for a load too
// early.
//
// What the code that trains pays to read like the paper, in the same units:
//   the scales of m and v found together, by even and odd lanes; careful path inlined      4011, 83%
//   first those of m, then those of v, as equation 4 reads; careful path inlined           4134, 81%
//   the same, and the careful path is a function that is called, which it almost never is  4870, 68%
//
// Codes are compared with the CPU reference. A power that differs in its last bits may move a code to its
// neighbour, and k, which is rounded to a multiple of 1/256, by 1/256. Minimum traffic: 14.25 bytes per
// parameter (weight, remainder and moments in and out, gradient in, (max, k) in and out).
#include "ladder.h"

using namespace ladder;

namespace {

constexpr int64_t G = MOMENT_GROUP;
constexpr float FMAX = 448.0f, RANGE = 17.807355f;  // of E4M3, and log2(FMAX / FMIN)
const AdamW SETTINGS{10, 1e-2f};                    // step, learning rate

struct Moment {
    uint8_t* codes;
    float *max, *k;  // one each per group
};
struct State {
    int64_t n;
    uint16_t* weight;
    int16_t* remainder;
    const bf16* gradient;
    Moment m, v;
};

__device__ float decode(uint8_t code) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}
__device__ uint8_t encode(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }

struct Exact {
    static __device__ float power(float x, float y) { return powf(x, y); }
};
struct Fast {
    static __device__ float power(float x, float y) {
        float log, result;
        asm("lg2.approx.f32 %0, %1;" : "=f"(log) : "f"(x));
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(y * log));
        return result;
    }
};

template <class Math>
__device__ float contract(uint8_t code, float max, float k) {  // sign max (|code| / FMAX)^(1/k)
    const float x = decode(code);
    return x == 0 ? 0.0f : copysignf(max * Math::power(fabsf(x) / FMAX, 1 / k), x);
}
template <class Math>
__device__ uint8_t expand(float x, float max, float k) {  // sign encode(FMAX (|x| / max)^k)
    return x == 0 ? 0 : encode(copysignf(FMAX * Math::power(fabsf(x) / max, k), x));
}
__device__ float expansion_factor(float max, float min_nonzero) {  // (paper eq. 4)
    const float ratio = log2f(max) - log2f(min_nonzero);
    if (max == 0) return 1.0f;
    return ratio * 64.0f > RANGE ? fmaxf(rintf(256.0f * RANGE / ratio) / 256.0f, 1 / 16.0f) : 64.0f;
}

__device__ void update(const reference::AdamWFactors& f, float g, float& m, float& v, uint16_t& weight,
                       int16_t& remainder) {
    m = f.beta1 * m + f.one_minus_beta1 * g;
    v = f.beta2 * v + f.one_minus_beta2 * (g * g);
    float w =
        __uint_as_float((uint32_t(weight) << 16) + static_cast<uint32_t>(static_cast<int32_t>(remainder)));
    w -= f.lr * (m / f.bias1 / (sqrtf(v) / f.bias2_root + f.eps) + f.decay * w);
    const uint32_t bits = __float_as_uint(w);
    weight = static_cast<uint16_t>((bits + 0x8000u) >> 16);
    remainder = static_cast<int16_t>(bits & 0xFFFFu);
}

// --- 1: one block per group --------------------------------------------------------------------------------

__device__ float block_extreme(float x, bool largest) {  // of 128 threads
    __shared__ float all[G];
    all[threadIdx.x] = x;
    __syncthreads();
    for (int half = G / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            const float other = all[threadIdx.x + half];
            all[threadIdx.x] = largest ? fmaxf(all[threadIdx.x], other) : fminf(all[threadIdx.x], other);
        }
        __syncthreads();
    }
    const float result = all[0];
    __syncthreads();
    return result;
}
__device__ void store1(const Moment& moment, int64_t i, int64_t group, float x) {
    const float max = block_extreme(fabsf(x), true), min = block_extreme(x == 0 ? INFINITY : fabsf(x), false),
                k = expansion_factor(max, min);
    moment.codes[i] = expand<Exact>(x, max, k);
    if (threadIdx.x == 0) moment.max[group] = max, moment.k[group] = k;
}
__global__ void kernel1(State s, reference::AdamWFactors f) {
    const int64_t group = blockIdx.x, i = group * G + threadIdx.x;
    float m = contract<Exact>(s.m.codes[i], s.m.max[group], s.m.k[group]),
          v = contract<Exact>(s.v.codes[i], s.v.max[group], s.v.k[group]);
    __syncthreads();  // all threads have read max and k
    update(f, __bfloat162float(s.gradient[i]), m, v, s.weight[i], s.remainder[i]);
    store1(s.m, i, group, m);
    store1(s.v, i, group, v);
}

// --- 2 and 3: one warp per group, four elements per lane ---------------------------------------------------

template <class Math>
__device__ void store3(const Moment& moment, int64_t i, int64_t group, const float (&x)[4]) {
    uint32_t top = 0, low = 0xFFFFFFFFu;
    for (float value : x) {
        const uint32_t bits = __float_as_uint(fabsf(value));
        top = max(top, bits), low = min(low, bits - 1);  // zero becomes the largest, so it is not the minimum
    }
    const float max = __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, top)),
                min = __uint_as_float(__reduce_min_sync(0xFFFFFFFFu, low) + 1);
    const float k = expansion_factor(max, min);
    uchar4 codes{expand<Math>(x[0], max, k), expand<Math>(x[1], max, k), expand<Math>(x[2], max, k),
                 expand<Math>(x[3], max, k)};
    *reinterpret_cast<uchar4*>(moment.codes + i) = codes;
    if (threadIdx.x % 32 == 0) moment.max[group] = max, moment.k[group] = k;
}
template <class Math> __device__ void load3(const Moment& moment, int64_t i, int64_t group, float (&x)[4]) {
    const uchar4 codes = *reinterpret_cast<const uchar4*>(moment.codes + i);
    const float max = moment.max[group], k = moment.k[group];
    x[0] = contract<Math>(codes.x, max, k), x[1] = contract<Math>(codes.y, max, k);
    x[2] = contract<Math>(codes.z, max, k), x[3] = contract<Math>(codes.w, max, k);
}
template <class Math> __global__ void kernel3(State s, reference::AdamWFactors f) {
    const int64_t group = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32,
                  i = group * G + threadIdx.x % 32 * 4;
    if (i >= s.n) return;
    uint2 weights = *reinterpret_cast<const uint2*>(s.weight + i),
          remainders = *reinterpret_cast<const uint2*>(s.remainder + i);
    const uint2 gradients = *reinterpret_cast<const uint2*>(s.gradient + i);
    float m[4], v[4];
    load3<Math>(s.m, i, group, m);
    load3<Math>(s.v, i, group, v);
    for (int j = 0; j < 4; j++)
        update(f, __bfloat162float(reinterpret_cast<const bf16*>(&gradients)[j]), m[j], v[j],
               reinterpret_cast<uint16_t*>(&weights)[j], reinterpret_cast<int16_t*>(&remainders)[j]);
    *reinterpret_cast<uint2*>(s.weight + i) = weights;
    *reinterpret_cast<uint2*>(s.remainder + i) = remainders;
    store3<Math>(s.m, i, group, m);
    store3<Math>(s.v, i, group, v);
}

// --- The ladder --------------------------------------------------------------------------------------------

class Optimizer {
public:
    explicit Optimizer(int64_t n)
        : n_(n), weight_(n), gradient_(n), m_(n), v_(n), remainder_(n), scales_(4 * n / G), segment_(1),
          state_(1) {
        const gpu::MomentView m{m_.get(), scales(0), scales(1), Format::E4M3},
            v{v_.get(), scales(2), scales(3), Format::E4M3};
        segment_.write({{0, n, m, v, true, nullptr}});
        state_.write({{0, 0, 1.0f, 0}});
        reset();
    }
    void reset() {  // random weights and gradients; the moments after three steps from zero
        const Param p{"", LINEAR, 1, n_, 0.02f, 0, 0, -1};
        const ShardPlace all{{0, n_}, 0, 0};
        gpu::initialize({gradient_.get(), remainder_.get(), Format::BF16}, p, all, 1, n_, 1, nullptr);
        gpu::initialize({weight_.get(), remainder_.get(), Format::BF16}, p, all, 0, n_, 1, nullptr);
        m_.fill(0), v_.fill(0);
        scales_.write(std::vector<float>(scales_.size, 0.0f));
        for (int which : {1, 3})
            gpu::check(cudaMemcpy(scales(which), std::vector<float>(n_ / G, 1.0f).data(), n_ / G * 4,
                                  cudaMemcpyHostToDevice),
                       "Copying failed");
        for (int step = 0; step < 3; step++) run(4);
    }
    void run(int kernel) {
        const State s{n_,
                      weight_.get(),
                      remainder_.get(),
                      reinterpret_cast<bf16*>(gradient_.get()),
                      {m_.get(), scales(0), scales(1)},
                      {v_.get(), scales(2), scales(3)}};
        const unsigned groups = static_cast<unsigned>(n_ / G), blocks = (groups + 7) / 8;
        const reference::AdamWFactors f = reference::adamw_factors(SETTINGS, true, 0);
        switch (kernel) {
            case 1: kernel1<<<groups, G>>>(s, f); break;
            case 2: kernel3<Exact><<<blocks, 256>>>(s, f); break;
            case 3: kernel3<Fast><<<blocks, 256>>>(s, f); break;
            case 4:
                gpu::adamw(SETTINGS, optimizers()[0], segment_.get(), 1, {0, n_},
                           {weight_.get(), remainder_.get(), Format::BF16}, 0, gradient_.get(), Format::BF16,
                           state_.get(), nullptr);
                break;
        }
        gpu::check(cudaGetLastError(), "Launching a kernel failed");
    }

    struct Difference {
        double weight = 0;  // largest error of a master weight / learning rate
        // Groups with another k; in the other groups, codes that differ, and by more than one
        int64_t moved_k = 0, codes = 0, far = 0;
    };
    Difference against_reference(int kernel) {
        reset();
        std::vector<float> master(n_), gradient(n_), m(n_), v(n_);
        const auto before_w = weight_.read(), g = gradient_.read();
        const auto before_r = remainder_.read();
        const auto before = scales_.read();
        const auto before_m = m_.read(), before_v = v_.read();
        for (int64_t i = 0; i < n_; i++)
            master[i] = reference::join_master(before_w[i], before_r[i]),
            gradient[i] = reference::from_bf16(g[i]);
        auto load = [&](const std::vector<uint8_t>& codes, int which, float* x) {
            reference::Moment moment;
            moment.init(Format::E4M3, true, n_);
            const auto max = before.begin() + which * (n_ / G), k = max + n_ / G;
            moment.codes = codes, moment.max.assign(max, k), moment.k.assign(k, k + n_ / G);
            moment.load(x);
        };
        load(before_m, 0, m.data());
        load(before_v, 2, v.data());
        reference::adamw(reference::adamw_factors(SETTINGS, true, 0), n_, gradient.data(), master.data(),
                         m.data(), v.data());
        run(kernel);
        Difference d;
        const auto w = weight_.read();
        const auto r = remainder_.read();
        for (int64_t i = 0; i < n_; i++)
            d.weight = std::max(
                d.weight, std::abs(double(reference::join_master(w[i], r[i])) - master[i]) / SETTINGS.lr);
        compare(m, false, m_.read(), 1, d);
        compare(v, true, v_.read(), 3, d);
        return d;
    }

private:
    const int64_t n_;
    Buffer<uint16_t> weight_, gradient_;
    Buffer<uint8_t> m_, v_;
    Buffer<int16_t> remainder_;
    Buffer<float> scales_;  // max and k of m, max and k of v
    Buffer<gpu::Segment> segment_;
    Buffer<gpu::GradientState> state_;

    float* scales(int which) const { return scales_.get() + which * (n_ / G); }
    void compare(const std::vector<float>& moment, bool second, const std::vector<uint8_t>& codes,
                 int which_k, Difference& d) const {
        reference::Moment expected;
        expected.init(Format::E4M3, true, n_);
        expected.store(moment.data(), second);
        const std::vector<float> all = scales_.read();
        for (int64_t i = 0; i < n_; i++) {
            const float off = std::abs(all[which_k * (n_ / G) + i / G] - expected.k[i / G]);
            d.moved_k += off > 0 && i % G == 0;
            d.far += off > 1 / 256.0f;
            if (off > 0) continue;
            const int by = std::abs(codes[i] - expected.codes[i]);  // codes are ordered like magnitudes
            d.codes += by != 0;
            d.far += by > 1;
        }
    }
};

}  // namespace

int main() try {
    constexpr int64_t SMALL = 1 << 20, LARGE = 1 << 28;
    Optimizer small(SMALL), large(LARGE);
    const double copy = copy_rate(), bytes = 14.25 * LARGE;
    printf("FP8 AdamW, 2^28 parameters; copy bandwidth %.2f TB/s\n", copy * 1e-12);
    printf(
        "kernel  weight error / lr  of 2^21 codes: differ, by more than 1  groups with another k       ms    "
        " TB/s   of copy\n");
    bool wrong = false;
    for (int kernel = 1; kernel <= 4; kernel++) {
        const Optimizer::Difference d = small.against_reference(kernel);
        const float ms = milliseconds(20, [&] { large.run(kernel); });
        printf("%d       %.1e            %9lld %22lld %23lld  %9.3f   %5.2f   %4.0f%%\n", kernel, d.weight,
               static_cast<long long>(d.codes), static_cast<long long>(d.far),
               static_cast<long long>(d.moved_k), ms, bytes / ms * 1e-9, 100 * bytes / ms * 1e3 / copy);
        wrong = wrong || d.far > 0 || !(d.weight < 1e-4);
    }
    return wrong;
} catch (const Error& e) {
    fprintf(stderr, "%s\n", e.what());
    return 1;
}
