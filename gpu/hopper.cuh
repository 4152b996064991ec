// gpu/hopper.cuh - Hopper's instructions, for attention_sm90.cu: mbarriers, TMA copies, and wgmma, each as a
// function of one PTX instruction (PTX ISA: mbarrier, cp.async.bulk, wgmma). The top of attention_sm90.cu
// says what they are for. Addresses in shared memory are 32 bits.
#pragma once
#include <cuda.h>

#include "attention_common.cuh"

namespace coat::flash {

// wgmma and setmaxnreg exist on sm_90a only; for other targets the kernels are compiled as traps.
// attention.cu launches them on Hopper GPUs only. There a program built for sm_90 without the "a" stops with
// an error.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool HOPPER = true;
#else
constexpr bool HOPPER = false;
#endif

constexpr int WARPGROUP = 128;
// The number of this thread's warpgroup. It is taken from lane 0, so that the compiler knows that all lanes
// of a warp agree, and computes addresses once for the warp.
inline __device__ int this_warpgroup() { return __shfl_sync(ALL_LANES, threadIdx.x / WARPGROUP, 0); }

// An mbarrier, which lies at an address in shared memory.
struct Barrier {
    uint32_t address;
    __device__ void init(int arrivals) const {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(arrivals));
    }
    __device__ void arrive() const {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
    }
    __device__ void arrive_and_expect(int bytes) const {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes)
                     : "memory");
    }
    __device__ void wait(uint32_t parity) const {
        asm volatile(
            "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
            "@p bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(address),
            "r"(parity)
            : "memory");
    }
};

// The accesses of TMA and wgmma go through what PTX calls the "async proxy". These fences make them wait for
// ordinary accesses that come before.
inline __device__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
inline __device__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
inline __device__ void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
// A named barrier is a __syncthreads() for n threads of a block. arrive_named() counts as one of them, but
// does not wait.
inline __device__ void sync_named(int id, int n) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n) : "memory");
}
inline __device__ void arrive_named(int id, int n) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(n) : "memory");
}
// A warpgroup has N registers for each of its threads from here on.
template <int N> __device__ void increase_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ void decrease_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// TMA copies that need no tensor map, because their bytes are contiguous: to shared memory, to global memory,
// and from shared memory to be added to global memory.
inline __device__ void bulk_load(uint32_t to, const void* from, int bytes, Barrier full) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(full.address)
        : "memory");
}
inline __device__ void bulk_store(void* to, uint32_t from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}
inline __device__ void bulk_add(float* to, uint32_t from, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                 "r"(from), "r"(bytes)
                 : "memory");
}
inline __device__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// The first waits until the shared memory of this thread's stores may be used again; the second, until their
// global memory is written.
inline __device__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
inline __device__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// What describes a swizzled matrix in shared memory to wgmma. descriptor() is the lower half: the address in
// units of 16 bytes, to which a distance in these units may be added, and panel_stride, the bytes from one
// panel of 64 columns to the next, which is needed if the GEMM reduces over rows. whole() adds the upper
// half, which says that eight rows take 1024 bytes, and which swizzle is used.
inline __device__ uint32_t descriptor(uint32_t address, int panel_stride = 16) {
    return address >> 4 | uint32_t(panel_stride >> 4) << 16;
}
inline __device__ uint64_t whole(uint32_t descriptor) {
    return uint64_t(1024 >> 4 | 1 << 30) << 32 | descriptor;
}

inline __device__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
inline __device__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// The compiler does not know that wgmma uses registers after the instruction. pin() is an empty statement
// that "changes" registers, which keeps the compiler from moving their uses above the wait.
template <int N> __device__ void pin(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}
template <int N> __device__ void pin(uint32_t (&x)[N][4]) {
#pragma unroll
    for (int i = 0; i < 4 * N; i++) asm volatile("" : "+r"(x[i / 4][i % 4])::"memory");
}
// Waits until at most PENDING groups are in flight. `used` are the registers of those that have ended.
template <int PENDING, class... Registers> __device__ void wgmma_wait(Registers&... used) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
    (pin(used), ...);
}

// wgmma(d, a, b, add): d (64, N) = a (64, 16) b (16, N), plus d if `add`. Two shapes of wgmma are used, N =
// 64 and N = 128; d takes N / 2 registers of each thread. b is a descriptor. a is a descriptor, or it is in
// registers in the layout of accumulators. TA and TB say that a and b are contiguous along the dimension that
// is not reduced.
#define EIGHT(d, i)                                                                             \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
template <bool TA, bool TB> __device__ void wgmma(float (&d)[32], uint32_t a, uint32_t b, bool add) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, p, 1, 1, %35, %36;\n"
        "}"
        : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16), EIGHT(d, 24)
        : "l"(whole(a)), "l"(whole(b)), "r"(int(add)), "n"(int(TA)), "n"(int(TB)));
}

template <bool TB> __device__ void wgmma(float (&d)[32], const uint32_t (&a)[4], uint32_t b, bool add) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, %38;\n"
        "}"
        : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16), EIGHT(d, 24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(whole(b)), "r"(int(add)), "n"(int(TB)));
}

template <bool TA, bool TB> __device__ void wgmma(float (&d)[64], uint32_t a, uint32_t b, bool add) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, p, 1, 1, %67, %68;\n"
        "}"
        : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16), EIGHT(d, 24), EIGHT(d, 32), EIGHT(d, 40), EIGHT(d, 48),
          EIGHT(d, 56)
        : "l"(whole(a)), "l"(whole(b)), "r"(int(add)), "n"(int(TA)), "n"(int(TB)));
}

template <bool TB> __device__ void wgmma(float (&d)[64], const uint32_t (&a)[4], uint32_t b, bool add) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, p, 1, 1, %70;\n"
        "}"
        : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16), EIGHT(d, 24), EIGHT(d, 32), EIGHT(d, 40), EIGHT(d, 48),
          EIGHT(d, 56)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(whole(b)), "r"(int(add)), "n"(int(TB)));
}
#undef EIGHT

// TMA copies of a box of a (B, T, cols) tensor, by a tensor map: to shared memory, and from it. (row, col) of
// sequence b is the first element of the box.
inline __device__ void tma_load(uint32_t to, const CUtensorMap& map, Barrier full, int col, int row, int b) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
        "l"(&map), "r"(full.address), "r"(col), "r"(row), "r"(b)
        : "memory");
}
inline __device__ void tma_store(const CUtensorMap& map, uint32_t from, int col, int row, int b) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
        "r"(from), "r"(col), "r"(row), "r"(b)
        : "memory");
}

// A warp stores four 8 x 8 matrices of BF16 values, which lie in its registers as a tensor core leaves them:
// each lane gives the address of a row.
inline __device__ void stmatrix(uint32_t to, const uint32_t (&a)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(a[0]),
                 "r"(a[1]), "r"(a[2]), "r"(a[3]));
}

}  // namespace coat::flash
