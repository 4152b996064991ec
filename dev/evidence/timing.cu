// timing.cu - three measurements on a GPU: the time of an amax (paper section 5, figure 4b), the speed of
// GEMMs by size and scaling, and the memory of saved activations (table 2).
//
//   build/evidence_timing [amax] [gemms] [memory] > timing.json      default: all three
//
// Times are medians of 21 runs between CUDA events, on random values, after the L2 cache was filled with
// other data.
#include <cstring>
#include <iostream>
#include <nlohmann/json.hpp>

#include "../../coat.cuh"
#include "../../gpu/gemm.cuh"
#include "../../gpu/layers.cuh"
#include "../../plan.h"
#include "../ladders/ladder.h"

namespace {

using namespace coat;
using namespace coat::gpu;
using ladder::Buffer;
using Json = nlohmann::ordered_json;

double milliseconds(const std::function<void()>& run) {
    const double ms = ladder::milliseconds(21, run);
    check(cudaGetLastError(), "A timed operation failed");
    return ms;
}

struct Tensor {  // a BF16 tensor gets random values
    Buffer<uint8_t> codes, scales;
    Operand operand;
    Tensor(int64_t rows, int64_t cols, const Quant& q)
        : codes(q.code_bytes(rows, cols)),
          scales(std::max({sizeof(AmaxAndScale), size_t(q.scales(rows, cols) * info(q.scale_format).bytes),
                           size_t(q.operand_scales(rows, cols) * 4)})),
          operand{{codes.get(), scales.get(), rows, cols, q}} {
        static uint64_t made = 0;
        const Param all{"", LINEAR, rows, cols, 1.0f, 0, 0};
        if (!q.fp8())
            initialize({codes.get(), nullptr, q.format}, all, {{0, rows * cols}, {}, 0, 0, 0}, made++,
                       rows * cols, 1, nullptr);
    }
    const View& view() const { return operand.view; }
};

void clear(AmaxAndScale* slot) { check(cudaMemsetAsync(slot, 0, sizeof *slot), "Clearing a scale failed"); }

// -----------------------------------------------------------------------------------------------------------
// Figure 4b: the paper's four shapes. Just-in-time scaling reads the whole tensor. The paper's group scaling
// reads the maxima of 1x16 groups, in BF16, that the producer of the tensor wrote. Here the producer updates
// the amax itself; the cost is its time with the amax minus its time without. The producer is the residual
// addition with the next norm.

struct Shape {
    int64_t cols, tokens;
};
constexpr Shape SHAPES[] = {{11008, 16384}, {11008, 8192}, {4096, 16384}, {4096, 8192}};

Json amax_times() {
    Json rows = Json::array();
    for (const Shape& shape : SHAPES) {
        const int64_t N = shape.tokens, C = shape.cols;
        const Tensor x(N, C, Q_BF16), a(N, C, Q_BF16), sum(N, C, Q_BF16), maxima(N, C / 16, Q_BF16),
            weight(1, C, Q_BF16), input(N, C, Q_GROUP);
        Buffer<float2> stats(N);
        Buffer<AmaxAndScale> slot(1);
        const Norm next{input.view(), weight.view().data, nullptr, stats.get(), true, 1e-5f};
        auto amax_of = [&](const Tensor& t) {
            return milliseconds([&] {
                clear(slot.get());
                amax(stored(t.view()), slot.get(), nullptr);
            });
        };
        auto producer = [&](AmaxAndScale* left) {
            return milliseconds([&] {
                clear(slot.get());
                residual_add(x.view(), a.view(), sum.view(), next, true, left, nullptr);
            });
        };
        rows.push_back({{"columns", C},
                        {"tokens", N},
                        {"whole_tensor_ms", amax_of(x)},
                        {"group_maxima_ms", amax_of(maxima)},
                        {"producer_without_ms", producer(nullptr)},
                        {"producer_with_ms", producer(slot.get())}});
    }
    return rows;
}

// -----------------------------------------------------------------------------------------------------------
// GEMM: y = x w^T with M = N = K = n

struct Scaling {
    const char* name;
    Quant x, w;
    bool fast_accumulation;
};
const Scaling SCALINGS[] = {
    {"bf16", Q_BF16, Q_BF16, false},
    {"fp8 per tensor, fast accumulation", Q_E4M3, Q_E4M3, true},
    {"fp8 per tensor, exact accumulation", Q_E4M3, Q_E4M3, false},
    {"fp8 per row, fast accumulation", Q_ROW, Q_ROW, true},
    {"fp8 1x128 and 128x128", Q_1x128, Q_128x128, false},
};
constexpr int64_t SIDES[] = {512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384};

void quantize_just_in_time(const Tensor& from, const Tensor& to) {
    const bool whole = to.view().quant.granularity == PER_TENSOR;
    if (whole) clear(amax_and_scale(to.view())), amax(stored(from.view()), amax_and_scale(to.view()), nullptr);
    quantize(stored(from.view()), to.operand, nullptr, nullptr);
}

Json gemm_times() {
    Json rows = Json::array();
    Buffer<uint8_t> scratch(Gemms::SCRATCH);
    for (const Scaling& scaling : SCALINGS) {
        Gemms gemms(scratch.get(),
                    {scaling.fast_accumulation, scaling.fast_accumulation, scaling.fast_accumulation});
        gemms.tune(true);
        for (const int64_t n : SIDES) {
            const Tensor x(n, n, Q_BF16), w(n, n, Q_BF16), y(n, n, Q_BF16);
            const bool fp8 = scaling.x.fp8();
            const Tensor x8(n, n, fp8 ? scaling.x : Q_E4M3), w8(n, n, fp8 ? scaling.w : Q_E4M3);
            if (fp8) quantize_just_in_time(x, x8), quantize_just_in_time(w, w8);
            const Operand &a = fp8 ? x8.operand : x.operand, &b = fp8 ? w8.operand : w.operand;
            auto gemm = [&] { gemms.run(Gemm::Fprop, a, b, y.view(), false, nullptr, nullptr); };
            Json row = {{"scaling", scaling.name}, {"side", n}, {"gemm_ms", milliseconds(gemm)}};
            if (fp8) {
                row["with_x_ms"] = milliseconds([&] { quantize_just_in_time(x, x8), gemm(); });
                row["with_x_and_w_ms"] =
                    milliseconds([&] { quantize_just_in_time(x, x8), quantize_just_in_time(w, w8), gemm(); });
            }
            rows.push_back(row);
        }
    }
    return rows;
}

// -----------------------------------------------------------------------------------------------------------
// Table 2, measured. Let f(L, B) be the memory that a model of L layers and B sequences takes. Then f(2, 2B)
// - f(1, 2B) - f(2, B) + f(1, B) is what one layer saves for B sequences: weights, optimizer state and
// workspace cancel. There are two micro-batches a step, since with one, gradients are stored where
// activations were.

double taken(const Setup& setup) {
    size_t before = 0, after = 0, total = 0;
    check(cudaMemGetInfo(&before, &total), "Asking for free memory failed");
    const auto model = make_gpu(setup);
    check(cudaMemGetInfo(&after, &total), "Asking for free memory failed");
    return static_cast<double>(before) - static_cast<double>(after);
}

Json saved_memory() {
    constexpr int64_t B = 4, T = 2048;
    Json rows = Json::array();
    for (const char* name : {"bf16", "te", "colossal", "rowwise", "deepseek", "coat"})
        for (const bool recompute : {false, true})
            for (const bool groups : {false, true}) {
                const Recipe recipe = find_row(recipes(), name, "--recipe");
                if (groups && !recipe.nonlinear.fp8()) continue;
                Setup setup{find_row(models(), "llama-2-7b", "--model"),
                            recipe,
                            find_row(optimizers(), "coat", "--optimizer"),
                            B,
                            T,
                            2};
                setup.recompute = recompute;
                if (groups) setup.recipe.attention = Q_GROUP;
                auto f = [&](int64_t layers, int64_t sequences) {
                    setup.config.L = layers, setup.B = sequences;
                    return taken(setup);
                };
                try {
                    f(1, B), f(1, 2 * B);  // the first model of a shape also loads its kernels
                    const double bytes = f(2, 2 * B) - f(1, 2 * B) - f(2, B) + f(1, B),
                                 unit = 2.0 * static_cast<double>(B * T * setup.config.C);
                    rows.push_back({{"name", std::string(name) + (groups ? ", attention in groups" : "")},
                                    {"recompute", recompute},
                                    {"bytes", bytes},
                                    {"total", bytes / unit}});
                } catch (const Error& refusal) {  // a recipe that this GPU does not support gets no row
                    std::cerr << name << ": " << refusal.what() << "\n";
                }
            }
    return rows;
}

constexpr std::pair<const char*, Json (*)()> PARTS[] = {
    {"amax", amax_times}, {"gemms", gemm_times}, {"memory", saved_memory}};

}  // namespace

int main(int argc, char** argv) {
    try {
        const std::string reason = why_no_gpu();
        if (!reason.empty()) throw Error("This measures a GPU: " + reason + ".");
        cudaDeviceProp device;
        check(cudaGetDeviceProperties(&device, 0), "Asking for the GPU's name failed");
        Json report = {{"device", device.name}};
        for (const auto& [name, measure] : PARTS) {
            bool wanted = argc == 1;
            for (int i = 1; i < argc; i++) wanted |= std::strcmp(argv[i], name) == 0;
            if (wanted) report[name] = measure();
        }
        std::cout << report.dump(1) << "\n";
    } catch (const std::exception& e) {
        std::cerr << e.what() << "\n";
        return 1;
    }
}
