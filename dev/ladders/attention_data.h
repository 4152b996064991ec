// attention_data.h - for the ladder attention.cu: what a kernel is given; and, which a reader of the rungs
// can skip, the data of the program and how they are compared with the CPU reference.
#pragma once
#include "../../gpu/attention.h"
#include "../../reference/operators.h"
#include "ladder.h"

namespace ladder {

constexpr int HEAD = 128;  // size of a head

struct Shape {
    int B, T, heads;
    __host__ __device__ int cols() const { return 3 * heads * HEAD; }
    gpu::AttentionShape attention() const { return {B, T, heads, heads, HEAD, Format::BF16}; }
};
struct Tensors {
    const bf16* qkv;  // (B, T, 3 heads 128)
    bf16* out;        // (B, T, heads 128)
    float* scores;    // (B, heads, T, T), for rung 1
    float* lse;       // (B, heads, T), for the kernels that train: the logarithm of a query's sum
};

using Rung = RungOf<const Shape&, const Tensors&>;

// Random q, k and v, and room for what rungs store.
struct Case {
    const Shape s;
    const size_t rows = size_t(s.B) * s.T;
    const std::vector<uint16_t> host = random_bf16(rows * s.cols(), 1.0f);
    Buffer<uint16_t> qkv{host}, out{rows * s.heads * HEAD};
    Buffer<float> lse{rows * s.heads};
    Buffer<float> scores{rows * s.heads * s.T};

    void run(const Rung& rung) const {
        rung.launch(s, {.qkv = reinterpret_cast<const bf16*>(qkv.get()),
                        .out = reinterpret_cast<bf16*>(out.get()),
                        .scores = scores.get(),
                        .lse = lse.get()});
        gpu::check(cudaGetLastError(), "Launching a kernel failed");
    }
    Verdict against_reference(const Rung& rung) {
        out.poison();
        const std::vector<uint16_t> before = out.read();
        run(rung);
        const std::vector<uint16_t> bits = out.read();
        if (bits == before) return {.written = false};
        std::vector<float> x(host.size()), expected(bits.size()), sums(rows * s.heads);
        for (size_t i = 0; i < x.size(); i++) x[i] = reference::from_bf16(host[i]);
        const ModelConfig c{.name = "ladder",
                            .arch = LLAMA,
                            .L = 1,
                            .C = s.heads * HEAD,
                            .NH = s.heads,
                            .NKV = s.heads,
                            .F = 16,
                            .V = 16,
                            .max_T = s.T,
                            .tied = true};
        reference::attention_forward(c, s.B, s.T, x.data(), expected.data(), sums.data());
        double worst = 0, largest = 0;
        for (size_t i = 0; i < bits.size(); i++) {
            const double difference = std::abs(reference::from_bf16(bits[i]) - double{expected[i]});
            if (!(difference <= worst)) worst = difference;  // also NaN
            largest = std::max(largest, std::abs(double{expected[i]}));
        }
        char text[40];
        snprintf(text, sizeof(text), "%.1e", worst / largest);
        return {.right = worst / largest < 0x1p-7, .text = text};
    }
};

// What main() returns.
inline int climb_attention(int argc, char** argv, const std::vector<Rung>& rungs) {
    return print_error_of([&] {
        Case small{{1, 300, 2}}, large{{4, 2048, 32}};
        const Shape& s = large.s;
        const double operations = 4.0 * s.B * s.heads * s.T * double(s.T) * HEAD / 2;
        const Limit gemm{operations / 823e12, "causal attention forward: 137 GFLOP at 823 TFLOP/s: 167 us",
                         "% of GEMM"};
        return climb(rungs, gemm, argc, argv, small, large);
    });
}

}  // namespace ladder
