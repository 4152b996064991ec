// kernel_on_cpu.h - runs the kernel of an exercise without a GPU, where there is no nvcc: to g++ a kernel is
// a function, and the CPU calls it for each thread of a block in turn. A thread runs until it waits at a
// barrier, or for its warp; then the next thread runs. All blocks run twice, in the second run with the last
// thread first: so a barrier that is missing makes wrong results in one of the two orders at least. If the
// results of the two differ, that is said, and the results are not compared. To solve an exercise, nobody
// needs to read this.
#pragma once
#include <math.h>
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <list>
#include <string>
#include <utility>
#include <vector>

#include "judge.h"

// Words of CUDA that the compiler is told

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static  // blocks run one after the other, so one array is enough

inline namespace kernel_on_cpu {  // in a build with nvcc, tests have CUDA's own functions of these names, too

struct Index {
    unsigned x = 0, y = 0, z = 0;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;  // of the thread that runs

enum class Waits { Nothing, Warp, Block, HasEnded };

constexpr unsigned WARP = 32;
constexpr size_t STACK = 64 * 1024;  // bytes of a thread

struct Thread {
    Index index;
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(STACK);
    Waits waits = Waits::Nothing;
    unsigned lanes = 0;    // bits of those for which it waits in a warp
    uint64_t offered = 0;  // what the lanes of its warp can read
};

// The threads of a block.
class Block {
public:
    // Calls body for every thread. Returns what went wrong, or an empty text.
    std::string run(const std::function<void()>& body, bool last_thread_first) {
        body_ = &body;
        threads_.resize(size_t(blockDim.x) * blockDim.y);
        for (size_t i = 0; i < threads_.size(); i++) {
            Thread& t = threads_[i];
            t.index = {unsigned(i) % blockDim.x, unsigned(i) / blockDim.x, 0};
            t.waits = Waits::Nothing;
            getcontext(&t.context);
            t.context.uc_stack.ss_sp = t.stack.data();
            t.context.uc_stack.ss_size = t.stack.size();
            t.context.uc_link = &scheduler_;
            makecontext(&t.context, begin, 0);
        }
        while (runs_all_that_can(last_thread_first)) release();
        for (const Thread& t : threads_) {
            if (t.waits == Waits::Block)
                return "a thread waits in __syncthreads(), and another one of its block has ended without "
                       "it, "
                       "or waits elsewhere: all threads of a block must call it.";
            if (t.waits == Waits::Warp)
                return "a lane waits for its warp in a shuffle, and another lane never gets there: all lanes "
                       "that the mask names must call it.";
        }
        return "";
    }
    void wait(Waits what, unsigned lanes = 0) {
        Thread& t = threads_[current_];
        t.waits = what;
        t.lanes = lanes;
        swapcontext(&t.context, &scheduler_);
    }
    // The x that another lane of the warp gives. All lanes in `lanes` call it.
    template <class T> T exchange(unsigned lanes, T x, unsigned from_lane) {
        static_assert(sizeof(T) <= sizeof(uint64_t));
        std::memcpy(&threads_[current_].offered, &x, sizeof(T));
        wait(Waits::Warp, lanes);
        const size_t from = std::min(current_ / WARP * WARP + from_lane % WARP, threads_.size() - 1);
        std::memcpy(&x, &threads_[from].offered, sizeof(T));
        wait(Waits::Warp, lanes);  // nobody gives another x before all have read this one
        return x;
    }
    unsigned lane() const { return unsigned(current_) % WARP; }

private:
    std::vector<Thread> threads_;
    size_t current_ = 0;
    ucontext_t scheduler_;
    const std::function<void()>* body_ = nullptr;

    static void begin();
    // Lets each thread that waits for nothing run until it does. Returns whether there was one.
    bool runs_all_that_can(bool last_first) {
        bool ran = false;
        for (size_t i = 0; i < threads_.size(); i++) {
            current_ = last_first ? threads_.size() - 1 - i : i;
            Thread& t = threads_[current_];
            if (t.waits != Waits::Nothing) continue;
            threadIdx = t.index;
            swapcontext(&scheduler_, &t.context);
            ran = true;
        }
        return ran;
    }
    // A barrier opens when all threads of the block are there; a shuffle, when all lanes that it names are.
    void release() {
        auto waits_for_block = [](const Thread& t) { return t.waits == Waits::Block; };
        if (std::all_of(threads_.begin(), threads_.end(), waits_for_block))
            for (Thread& t : threads_) t.waits = Waits::Nothing;
        for (size_t first = 0; first < threads_.size(); first += WARP) {
            unsigned waiting = 0;
            const size_t lanes = std::min<size_t>(WARP, threads_.size() - first);
            for (size_t lane = 0; lane < lanes; lane++)
                waiting |= unsigned(threads_[first + lane].waits == Waits::Warp) << lane;
            for (size_t lane = 0; lane < lanes; lane++) {
                Thread& t = threads_[first + lane];
                if (t.waits == Waits::Warp && (t.lanes & ~waiting) == 0) t.waits = Waits::Nothing;
            }
        }
    }
};
inline Block block;

inline void Block::begin() {
    (*block.body_)();
    block.threads_[block.current_].waits = Waits::HasEnded;
}

// Arrays of the judge, copied for a kernel between two guards, and back when it has ended.
class Arrays {
public:
    template <class T> T* operator()(const std::string& name, const T* given, size_t n) {
        Array& a = arrays_.emplace_back();
        a.name = name;
        a.given = const_cast<T*>(given);
        a.element = long(sizeof(T));
        a.bytes.assign(n * sizeof(T) + 2 * GUARD, GUARD_BYTE);
        std::memcpy(a.bytes.data() + GUARD, given, n * sizeof(T));
        return reinterpret_cast<T*>(a.bytes.data() + GUARD);
    }
    ~Arrays() {
        for (const Array& a : arrays_)
            std::memcpy(a.given, a.bytes.data() + GUARD, a.bytes.size() - 2 * GUARD);
    }
    // A sentence about a guard that has been overwritten, or an empty text.
    std::string written_outside() const {
        for (const Array& a : arrays_) {
            const long end = long(a.bytes.size() - GUARD);
            for (long i = 0; i < long(a.bytes.size()); i++) {
                if ((i >= long(GUARD) && i < end) || a.bytes[i] == GUARD_BYTE) continue;
                const long index = (i - long(GUARD) - (i < long(GUARD) ? a.element - 1 : 0)) / a.element;
                return "a thread writes outside an array: " + a.name + "[" + std::to_string(index) +
                       "], but the size of " + a.name + " is " +
                       std::to_string((end - long(GUARD)) / a.element) + ". Check its indices.";
            }
        }
        return "";
    }
    // The bytes of all arrays
    std::vector<std::vector<unsigned char>> contents() const {
        std::vector<std::vector<unsigned char>> result;
        for (const Array& a : arrays_) result.push_back(a.bytes);
        return result;
    }
    // Gives the arrays these bytes, at the addresses that they have.
    void restore(const std::vector<std::vector<unsigned char>>& contents) {
        size_t i = 0;
        for (Array& a : arrays_) {
            std::copy(contents[i].begin(), contents[i].end(), a.bytes.begin());
            i++;
        }
    }

private:
    static constexpr size_t GUARD = 4096;
    static constexpr unsigned char GUARD_BYTE = 0xA5;
    struct Array {
        std::string name;
        void* given;
        long element;  // bytes of one
        std::vector<unsigned char> bytes;
    };
    std::list<Array> arrays_;
};

// Runs a kernel, which body calls with its arguments, for all blocks. Returns what went wrong, or an empty
// text.
inline std::string run_blocks(Index blocks, Index threads, const std::function<void()>& body,
                              bool last_thread_first) {
    gridDim = blocks;
    blockDim = threads;
    for (unsigned i = 0; i < blocks.x * blocks.y; i++) {
        blockIdx = {i % blocks.x, i / blocks.x, 0};
        const std::string wrong = block.run(body, last_thread_first);
        if (!wrong.empty()) return "the kernel never ends: " + wrong;
    }
    return "";
}

// Runs a kernel on these arrays, with the threads of a block in one order and in the other. The results are
// those of the second run.
inline void launch(Arrays& arrays, Index blocks, Index threads, const std::function<void()>& body) {
    const auto before = arrays.contents();
    std::string wrong = run_blocks(blocks, threads, body, false);
    const auto first_run = arrays.contents();
    if (wrong.empty()) {
        arrays.restore(before);
        wrong = run_blocks(blocks, threads, body, true);
    }
    if (wrong.empty()) wrong = arrays.written_outside();
    if (wrong.empty() && arrays.contents() != first_run)
        wrong =
            "a race: if the last thread of a block runs first, the results are others. One thread reads or "
            "overwrites what another one writes, and does not wait for it. Most likely a __syncthreads() is "
            "missing: all threads must have written before one reads, and all must have read before one "
            "writes there again.";
    if (judge::failure.empty()) judge::failure = wrong;
}

// What a kernel calls

using std::max, std::min;

inline void __syncthreads() { block.wait(Waits::Block); }
inline void __syncwarp(unsigned lanes = ~0u) { block.wait(Waits::Warp, lanes); }
// The lane that is asked is counted in one's own `width` neighbours.
template <class T> T __shfl_sync(unsigned lanes, T x, int lane, int width = 32) {
    const unsigned first = block.lane() / width * width;
    return block.exchange(lanes, x, first + lane % width);
}
template <class T> T __shfl_xor_sync(unsigned lanes, T x, int d) {
    return block.exchange(lanes, x, block.lane() ^ d);
}
template <class T> T __shfl_down_sync(unsigned lanes, T x, unsigned d) {
    const unsigned lane = block.lane();
    return block.exchange(lanes, x, lane + d < 32 ? lane + d : lane);
}
template <class T> T __reduce_max_sync(unsigned lanes, T x) {
    for (unsigned lane = 0; lane < 32; lane++)
        if (lanes >> lane & 1) x = std::max(x, block.exchange(lanes, x, lane));
    return x;
}
template <class T> T __reduce_min_sync(unsigned lanes, T x) {
    for (unsigned lane = 0; lane < 32; lane++)
        if (lanes >> lane & 1) x = std::min(x, block.exchange(lanes, x, lane));
    return x;
}

// No other thread runs before such a function returns.
template <class T, class U> T atomicMax(T* at, U x) { return std::exchange(*at, std::max(*at, T(x))); }
template <class T, class U> T atomicMin(T* at, U x) { return std::exchange(*at, std::min(*at, T(x))); }

inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }

enum Saturation { __NV_SATFINITE };
enum Fp8Format { __NV_E4M3 };
inline uint8_t __nv_cvt_float_to_fp8(float x, Saturation, Fp8Format) { return given::encode(x); }
struct __nv_fp8_e4m3 {
    uint8_t __x;
    explicit operator float() const { return given::decode(__x); }
};

inline auto launched(judge::Transpose* kernel) {
    return [kernel](int rows, int cols, float inverse, const float* x, uint8_t* codes, uint8_t* transposed) {
        Arrays array;
        const size_t n = size_t(rows) * cols;
        const float* const my_x = array("x", x, n);
        uint8_t* const my_codes = array("codes", codes, n);
        uint8_t* const my_transposed = array("transposed", transposed, n);
        launch(array, {unsigned(cols + 31) / 32, unsigned(rows + 31) / 32, 1}, {32, 8, 1},
               [&] { kernel(rows, cols, inverse, my_x, my_codes, my_transposed); });
    };
}

inline auto launched(void (*kernel)(Step, int, const float*, float*, Moment, Moment)) {
    return [kernel](const Step& s, int n, const float* g, float* w, const Moment& m, const Moment& v) {
        Arrays array;
        const size_t groups = (n + 127) / 128;
        auto moment = [&](const std::string& name, const Moment& m) {
            return Moment{array(name + ".codes", m.codes, n), array(name + ".max", m.max, groups),
                          array(name + ".k", m.k, groups)};
        };
        const float* const my_g = array("g", g, n);
        float* const my_w = array("w", w, n);
        const Moment my_m = moment("m", m), my_v = moment("v", v);
        launch(array, {unsigned(groups), 1, 1}, {128, 1, 1}, [&] { kernel(s, n, my_g, my_w, my_m, my_v); });
    };
}

}  // namespace kernel_on_cpu
