// gemm.cuh - matrix products through cuBLASLt, behind one function that takes views: a scale travels with its codes.
//
// A linear layer has three products (row-major; N tokens; w is (out, in)):
//   Fprop   y  (N, out)  = x (N, in)    w^T        (+ bias)
//   Dgrad   dx (N, in)   = dy (N, out)  w
//   Wgrad   dw (out, in) = dy^T         x (N, in)
// In FP32 and BF16 each operand is used as it lies. Hopper's FP8 product contracts contiguous dimensions only ("TN"), so Dgrad reads
// w.transposed, and Wgrad dy.transposed and x.transposed, and the codes themselves may be missing. Scales of rows, vectors and squares
// belong to the orientation that is read, along what the product contracts.
#pragma once
#include <cublasLt.h>

#include <map>
#include <memory>
#include <tuple>

#include "tensor.cuh"

namespace coat::gpu {

bool kernels_fit();  // whether this program was compiled for the GPU in use

enum class Gemm : uint8_t { Fprop, Dgrad, Wgrad };

class Gemms {
public:
    static constexpr size_t SCRATCH = 32 << 20;  // what cuBLAS asks for on Hopper
    // scratch: SCRATCH bytes of device memory; between products others may use it. fast_accumulation: by kind, as in Recipe.
    Gemms(void* scratch, const bool (&fast_accumulation)[3]);
    ~Gemms();
    Gemms(const Gemms&) = delete;
    Gemms& operator=(const Gemms&) = delete;

    // a, b: (x, w), (g, w) or (g, x), by kind. out: F32 or BF16; accumulate adds to it. Shapes or formats that do not fit: Error.
    // bias (out) in out's format, or null; for Fprop.
    void run(Gemm kind, const Operand& a, const Operand& b, const View& out, bool accumulate, const void* bias, cudaStream_t s);

    // While this is on, the first GEMM of each shape that does not accumulate times cuBLASLt's algorithms on its own
    // operands. Only those count whose output has the same bits as the first one's, so that the clock decides on speed
    // and on nothing else. An output with many zeros cannot tell algorithms apart: then the next GEMM of this shape
    // tries again.
    void tune(bool on) { tuning_ = on; }
    int64_t tuned() const;  // shapes whose algorithm was chosen by the clock

private:
    struct Problem;
    struct Call;
    using Key = std::tuple<Gemm, Format, Format, Format, int, int, int64_t, int64_t, int64_t, bool>;  // formats of a, b, out; scale modes of a, b

    cublasStatus_t launch(const Problem& p, const cublasLtMatmulAlgo_t& algorithm, const Call& call) const;
    Problem& launch_first(const Key& key, const Call& call);
    void choose_fastest(Problem& p, const Call& call);

    cublasLtHandle_t handle_ = nullptr;
    void* scratch_;
    bool fast_accumulation_[3], tuning_ = false;
    std::map<Key, std::unique_ptr<Problem>> problems_;
};

}  // namespace coat::gpu
