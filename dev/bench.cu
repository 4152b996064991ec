// bench.cu - where the time of a training step goes. It measures the ceilings of this GPU, then each operator
// of the step by itself at the shapes of a model, then the whole step.
//
//   make bench                                                                     the runs in the table RUNS
//   make bench BENCH_ARGS="--model llama-2-7b --recipe bf16 --batch 4 --seq 2048"  another run
//   build/bench --model gpt2 --only norm                                           operators named *norm*
//   build/bench --only sizes                                                       FP8 GEMMs against BF16's
//
// The floor of an operator is the longer of two times: its bytes (every input read once, every output written
// once) at copy bandwidth, and its FLOPs at the rate of a large GEMM in the same formats. Percentages are
// floor / time. They can exceed 100%: a copy also writes, and small gradients draw less power than random
// values.
//
// Times are medians between CUDA events, on random values, after the L2 cache was filled with other data. The
// operators are those that model.cu launches, with the same shapes and formats, and as often. The step
// differs from their sum by small launches (clearing and adding sums, checks), by gaps between launches, by
// data that one operator leaves in the cache for the next, and by the clock, which is lower when the GPU is
// hot.
#include <cuda_bf16.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>

#include "../gpu/attention.h"
#include "../gpu/gemm.h"
#include "../gpu/layers.h"
#include "../coat.h"
#include "../gpu/column_sums.h"
#include "../gpu/norm.h"
#include "../program/plan.h"
#include "../common/random.h"
#include "gpu_tools.h"

namespace {

using namespace coat;
using namespace coat::gpu;
using nlohmann::ordered_json;

constexpr int REST = 300, STEPS = 20;

struct Run {
    const char* model;
    int64_t batch, seq, accumulate;
};
constexpr Run RUNS[] = {{"llama-2-7b", 8, 2048, 1}, {"tinyllama-1.1b", 16, 2048, 1}, {"gpt2", 64, 1024, 8}};

void copy(void* to, const void* from, int64_t bytes) {
    check(cudaMemcpyAsync(to, from, size_t(bytes), cudaMemcpyDefault), "Copying memory failed");
}
int capability() {
    return 10 * device_attribute(cudaDevAttrComputeCapabilityMajor) +
           device_attribute(cudaDevAttrComputeCapabilityMinor);
}

// -----------------------------------------------------------------------------------------------------------
// Memory with random values, and the clock

template <class T> __global__ void fill_kernel(T* x, int64_t n, uint64_t seed, float std) {
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n;
         i += int64_t(gridDim.x) * blockDim.x)
        x[i] = static_cast<T>(random_weight(seed, 0, uint64_t(i), std));
}

class Memory {
public:
    template <class T = void> T* take(int64_t bytes) {
        dev::Buffer<uint8_t>& taken = taken_.emplace_back(size_t(bytes));
        taken.fill(0);
        return reinterpret_cast<T*>(taken.get());
    }
    TensorRef random(int64_t rows, int64_t cols, Format format, float std = 1.0f) {
        const TensorRef tensor{take(rows * cols * format_info(format).bytes), rows, cols,
                               TensorFormat{format}};
        if (format == Format::FP32)
            fill_kernel<<<4096, 256>>>(static_cast<float*>(tensor.data), rows * cols, taken_.size(), std);
        else
            fill_kernel<<<4096, 256>>>(static_cast<__nv_bfloat16*>(tensor.data), rows * cols, taken_.size(),
                                       std);
        check(cudaGetLastError(), "Filling memory failed");
        return tensor;
    }
    // Room for a tensor in any format, in the forms that are asked for.
    Operand allocate_operand(int64_t rows, int64_t cols, const TensorFormat& q, bool row_major,
                             bool transposed) {
        const int64_t bytes = q.bytes_without_scales(rows, cols);
        Operand out{.tensor = {.data = row_major ? take(bytes) : nullptr,
                               .rows = rows,
                               .cols = cols,
                               .format = q,
                               .tensor_scale = take<TensorScale>(sizeof(TensorScale))},
                    .transposed = transposed ? take(bytes) : nullptr};
        if (q == E4M3_PER_1x16) {
            out.tensor.group_scales = take<uint16_t>(q.scale_count(rows, cols) * 2);
        } else if (q.granularity != PER_TENSOR) {
            out.block_scales = take<float>(operand_scale_count(q, rows, cols) * 4);
            if (transposed) out.transposed_block_scales = take<float>(operand_scale_count(q, cols, rows) * 4);
        }
        return out;
    }
    void release() { taken_.clear(); }

private:
    std::deque<dev::Buffer<uint8_t>> taken_;
};

class Clock {
public:
    // Zero at the beginning of every timed operation.
    float* amax_out() const { return amax_out_.get(); }

    // The median time of an operation that does not wait for the GPU.
    double seconds(const std::function<void()>& run) const {
        // A GPU is slower after long GEMMs: all operations start after the same light work.
        for (int i = 0; i < REST; i++) dev::flush_cache();
        return dev::median_seconds(run, [&] { clear_async(amax_out(), sizeof(float), nullptr); });
    }

private:
    dev::Buffer<float> amax_out_{1};
};

// -----------------------------------------------------------------------------------------------------------
// Ceilings of this GPU

using Ceilings = std::map<std::string, double>;  // name -> bytes or FLOPs per second
constexpr const char *COPY = "copy", *FAST = "fp8 GEMM, fast accumulation",
                     *EXACT = "fp8 GEMM, exact accumulation";

Operand random_operand(Memory& memory, int64_t rows, int64_t cols, const TensorFormat& q, Format compute) {
    const TensorRef x = memory.random(rows, cols, compute);
    if (!q.is_fp8()) return {x};
    const bool groups = q == E4M3_PER_1x16;
    const Operand out = memory.allocate_operand(rows, cols, q, /*row_major=*/true, /*transposed=*/!groups);
    if (groups) {
        quantize_groups(x, out.tensor, /*write_back=*/false, nullptr, nullptr);
        return out;
    }
    if (q.granularity == PER_TENSOR) compute_amax(lazy_stored(x), &out.tensor.tensor_scale->amax, nullptr);
    quantize_operand(lazy_stored(x), out, nullptr, nullptr);
    return out;
}

double copy_rate(Clock& clock) {
    constexpr int64_t BYTES = 1 << 30;
    Memory memory;
    const TensorRef from = memory.random(1, BYTES / 2, Format::BF16);
    void* to = memory.take(BYTES);
    return 2 * BYTES / clock.seconds([&] { copy(to, from.data, BYTES); });
}
const char* gemm_ceiling(GemmKind kind, const TensorFormat& operand, const Recipe& r) {
    if (operand.is_fp8()) return r.fast_accumulation[int(kind)] ? FAST : EXACT;
    return operand.element_format == Format::FP32 ? "fp32 GEMM" : "bf16 GEMM";
}
double gemm_rate(Clock& clock, const std::string& name) {
    constexpr int64_t SIDE = 8192;
    Memory memory;
    CublasGemms gemms(memory.take(CublasGemms::SCRATCH), {true, false, false});  // fast sums in fprop alone
    const Format compute = name == "fp32 GEMM" ? Format::FP32 : Format::BF16;
    const TensorFormat a = name == FAST    ? E4M3_PER_TENSOR
                           : name == EXACT ? E5M2_PER_TENSOR
                                           : TensorFormat{compute};
    const Operand x = random_operand(memory, SIDE, SIDE, a, compute),
                  w = random_operand(memory, SIDE, SIDE, a.is_fp8() ? E4M3_PER_TENSOR : a, compute);
    const TensorRef out = memory.random(SIDE, SIDE, compute);
    const GemmKind kind = name == EXACT ? GemmKind::Dgrad : GemmKind::Fprop;
    return 2.0 * SIDE * SIDE * SIDE / clock.seconds([&] { gemms.run(kind, x, w, out, nullptr); });
}
Ceilings measure_ceilings(Clock& clock, const Recipe& r) {
    Ceilings rates{{COPY, copy_rate(clock)}};
    for (GemmKind kind : {GemmKind::Fprop, GemmKind::Dgrad, GemmKind::Wgrad})
        for (const TensorFormat& q : {TensorFormat{r.compute_format}, r.x}) {
            const char* name = gemm_ceiling(kind, q, r);
            if (!rates.count(name)) rates[name] = gemm_rate(clock, name);
        }
    return rates;
}

// Square GEMMs x w^T in BF16 and, as Colossal-AI has them, in FP8 with fast sums: alone, with x quantized
// each time (amax, then codes), and with x and w.
ordered_json measure_sizes(Clock& clock) {
    ordered_json rows;
    for (const int64_t side : {1024, 2048, 3072, 4096, 8192, 12288}) {
        Memory memory;
        CublasGemms gemms(memory.take(CublasGemms::SCRATCH), {true, true, true});
        const TensorRef x = memory.random(side, side, Format::BF16),
                        w = memory.random(side, side, Format::BF16),
                        out = memory.random(side, side, Format::BF16);
        const Operand x8 = memory.allocate_operand(side, side, E4M3_PER_TENSOR, true, false),
                      w8 = memory.allocate_operand(side, side, E4M3_PER_TENSOR, true, false);
        auto quantized = [&](const TensorRef& from, const Operand& to) {
            compute_amax(lazy_stored(from), &to.tensor.tensor_scale->amax, nullptr);
            quantize_operand(lazy_stored(from), to, nullptr, nullptr);
        };
        auto gemm = [&](const Operand& a, const Operand& b) {
            gemms.run(GemmKind::Fprop, a, b, out, nullptr);
        };
        quantized(x, x8), quantized(w, w8);
        const double bf16 = clock.seconds([&] { gemm({x}, {w}); }),
                     alone = clock.seconds([&] { gemm(x8, w8); }),
                     with_x = clock.seconds([&] { quantized(x, x8), gemm(x8, w8); }),
                     with_both = clock.seconds([&] { quantized(x, x8), quantized(w, w8), gemm(x8, w8); });
        std::printf("%6ld: BF16 %.1f us; FP8 %.2f times as fast, with x quantized %.2f, with x and w %.2f\n",
                    side, bf16 * 1e6, bf16 / alone, bf16 / with_x, bf16 / with_both);
        rows.push_back(
            {{"side", side}, {"bf16", bf16}, {"alone", alone}, {"x", with_x}, {"both", with_both}});
    }
    return rows;
}

// -----------------------------------------------------------------------------------------------------------
// The operators of a step

struct Row {
    const char* group;
    std::string name;
    double count, seconds;  // count: per step
    double floor;           // seconds
    double bytes, flops;    // flops: 0 for operators that only move data
};
constexpr const char *LINEAR_LAYERS = "linear layers", *ATTENTION = "attention",
                     *ATTENTION_ALONE = "attention alone", *BETWEEN = "between the GEMMs",
                     *HEAD = "embedding, head, loss", *OPTIMIZER = "optimizer";

class Step {
public:
    std::vector<Row> rows;

    Step(const RunSettings& s, const Recipe& r, Clock& clock, const Ceilings& ceilings,
         const std::string& only)
        : settings_(s), r_(r), clock_(clock), ceilings_(ceilings), only_(only) {
        for (auto part :
             {&Step::linear_layers, &Step::attention, &Step::norms, &Step::attention_operands,
              &Step::feed_forward, &Step::weights, &Step::embedding, &Step::head, &Step::optimizer}) {
            (this->*part)();
            memory_.release();
        }
    }

private:
    enum class Use { Fprop, Wgrad, Both };
    const RunSettings& settings_;
    const Recipe& r_;
    Clock& clock_;
    const Ceilings& ceilings_;
    const std::string only_;
    const ModelConfig& c_ = settings_.config;
    const Format compute_ = r_.compute_format;
    const bool fp8_ = r_.x.is_fp8(), groups_ = r_.saved_inputs.is_fp8();
    const int64_t N_ = settings_.B * settings_.T;
    const double batches_ = double(settings_.micro_batches_per_rank);  // micro-batches per step
    const double layers_ = batches_ * double(c_.L);                    // layer passes per step
    const bool needs_amax_ =
        fp8_ && r_.x.granularity == PER_TENSOR && r_.scale_source == ScaleSource::JustInTime;
    float* const amax_out_ = needs_amax_ ? clock_.amax_out() : nullptr;
    Memory scratch_, memory_;
    CublasGemms gemms_{scratch_.take(CublasGemms::SCRATCH), r_.fast_accumulation};

    bool wanted(const char* group, const std::string& name) const {
        return (group + (": " + name)).find(only_) != std::string::npos;
    }
    void add(const char* group, const std::string& name, double count, double bytes, double flops,
             const char* ceiling, const std::function<void()>& run) {
        if (!wanted(group, name)) return;
        const double floor = std::max(flops / ceilings_.at(ceiling), bytes / ceilings_.at(COPY));
        rows.push_back({group, name, count, clock_.seconds(run), floor, bytes, flops});
    }
    void pass(const char* group, const std::string& name, double count, double bytes,
              const std::function<void()>& run) {
        add(group, name, count, bytes, 0, COPY, run);
    }

    static double size(const TensorRef& t) { return t.data ? double(t.format.bytes(t.rows, t.cols)) : 0; }
    static double reads(const LazyTensor& x) {
        return size(x.input) + size(x.dact) + 8.0 * double(x.norm.in.rows);
    }
    TensorRef random(int64_t rows, int64_t cols) { return memory_.random(rows, cols, compute_); }
    TensorRef random(int64_t rows, int64_t cols, const TensorFormat& q) {
        return random_operand(memory_, rows, cols, q, compute_).tensor;
    }
    float* floats(int64_t n) { return memory_.take<float>(n * 4); }

    // --- amax, quantize and column sums of coat.cu ---------------------------------------------------------
    void amax_pass(const std::string& name, double count, const LazyTensor& x) {
        if (amax_out_)
            pass(BETWEEN, name + ": amax", count, reads(x), [&] { compute_amax(x, amax_out_, nullptr); });
    }
    // amax: no earlier kernel has computed the amax of x
    void bias_pass(const std::string& name, double count, const LazyTensor& x, bool bias, bool amax) {
        if (!bias) return amax ? amax_pass(name, count, x) : void();
        const TensorRef gradient = random(1, x.cols);
        float* workspace = floats(COLUMN_PARTIALS * x.cols);
        float* amax_out = amax ? amax_out_ : nullptr;
        pass(BETWEEN, name + (amax_out ? ": bias gradient and amax" : ": bias gradient"), count, reads(x),
             [&] { add_column_sums(x, gradient, workspace, amax_out, nullptr); });
    }
    // Before what is timed: the amax that it takes for granted, or the delayed scale.
    void find_scale(const LazyTensor& x, const Operand& out) const {
        if (!out.tensor.format.is_fp8() || out.tensor.format.granularity != PER_TENSOR) return;
        TensorScale* tensor_scale = out.tensor.tensor_scale;
        compute_amax(x, &tensor_scale->amax, nullptr);
        quantize_operand(x, out, nullptr, nullptr);
        if (r_.scale_source == ScaleSource::Delayed)
            check(cudaMemcpyAsync(&tensor_scale->delayed_scale, &tensor_scale->scale, sizeof(float),
                                  cudaMemcpyDeviceToDevice),
                  "Copying a scale failed");
    }
    void quantize_pass(const std::string& name, double count, const LazyTensor& x, const TensorFormat& q,
                       Use use) {
        if (x.op == LazyOp::Stored && !q.is_fp8()) return;  // used without a copy
        const bool transposed = q.is_fp8() && q.granularity != PER_1x16 && use != Use::Fprop;
        const bool row_major = !transposed || use == Use::Both;
        Operand out = memory_.allocate_operand(x.rows, x.cols, q, row_major, transposed);
        out.delayed = r_.scale_source == ScaleSource::Delayed;
        find_scale(x, out);
        const double bytes = reads(x) + (row_major + transposed) * double(q.bytes(x.rows, x.cols));
        const char* what = row_major && transposed ? ", and transposed" : transposed ? ", transposed" : "";
        pass(BETWEEN, name + ": to " + q.text() + what, count, bytes,
             [&] { write_operand(x, out, nullptr, nullptr); });
    }

    // Both in one pass: a gradient whose amax is known.
    void write_operand_and_add_column_sums_pass(const std::string& name, double count, const LazyTensor& x,
                                                const TensorFormat& q) {
        const Operand out = memory_.allocate_operand(x.rows, x.cols, q, true, true);
        const TensorRef gradient = random(1, x.cols);
        float* workspace = floats(COLUMN_PARTIALS * x.cols);
        find_scale(x, out);
        pass(BETWEEN, name + ": bias gradient, to " + q.text() + ", and transposed", count,
             reads(x) + 2 * double(q.bytes(x.rows, x.cols)),
             [&] { write_operand_and_add_column_sums(x, out, gradient, workspace, nullptr, nullptr); });
    }

    // --- GEMMs ---------------------------------------------------------------------------------------------
    void gemm(const char* group, const std::string& name, double count, GemmKind kind, const Operand& a,
              const Operand& b, const TensorRef& out, double flops, const void* bias, bool accumulate) {
        if (!wanted(group, name)) return;
        gemms_.run(kind, a, b, out, nullptr, {.bias = bias});  // selects the algorithm
        const double bytes = size(a.tensor) + size(b.tensor) + (accumulate ? 2 : 1) * size(out);
        add(group, name, count, bytes, flops, gemm_ceiling(kind, a.tensor.format, r_),
            [&] { gemms_.run(kind, a, b, out, nullptr, {.overwrite = !accumulate, .bias = bias}); });
    }
    void linear(const std::string& name, int64_t out, int64_t in, bool biased) {
        RunSettings run = settings_;
        run.recipe = r_;
        const LinearFormats q = linear_formats(run);
        const double flops = 2.0 * double(N_ * out * in);
        const Operand w = random_operand(memory_, out, in, q.w, compute_),
                      x = random_operand(memory_, N_, in, q.x, compute_),
                      g = random_operand(memory_, N_, out, q.g, compute_);
        const void* bias = biased ? random(1, out).data : nullptr;
        gemm(LINEAR_LAYERS, name + " fprop", layers_, GemmKind::Fprop, x, w, random(N_, out), flops, bias,
             false);
        gemm(LINEAR_LAYERS, name + " dgrad", layers_, GemmKind::Dgrad, g, w, random(N_, in), flops, nullptr,
             false);
        gemm(LINEAR_LAYERS, name + " wgrad", layers_, GemmKind::Wgrad, g, x, random(out, in), flops, nullptr,
             settings_.micro_batches_per_rank > 1);
        memory_.release();
    }
    void linear_layers() {
        linear("qkv", c_.qkv_cols(), c_.C, c_.arch.qkv_bias);
        linear("attention out", c_.C, c_.q_cols(), c_.arch.other_biases);
        linear("up", c_.gate_up_cols(), c_.C, c_.arch.other_biases);
        linear("down", c_.C, c_.F, c_.arch.other_biases);
    }

    Rope rope_of_model() {
        auto* const table = memory_.take<float2>(settings_.T * c_.HS() * 4);
        fill_rope_table(c_, settings_.T, table, nullptr);
        return {table, settings_.T, c_.HS(), c_.q_cols() + c_.kv_cols()};
    }
    void attention() {
        const AttentionShape shape = attention_shape(c_, settings_.B, settings_.T, compute_);
        const TensorRef qkv = random(N_, c_.qkv_cols()), dqkv = random(N_, c_.qkv_cols());
        const TensorRef out = random(N_, c_.q_cols()), dout = random(N_, c_.q_cols());
        float* lse = floats(N_ * c_.NH);
        void* workspace = memory_.take(std::max<int64_t>(16, int64_t(attention_workspace(shape))));
        // 4 N T C, half of which is masked
        const double flops = 2.0 * double(N_ * settings_.T * c_.q_cols());
        const double logs = 4.0 * double(N_ * c_.NH);
        const char* ceiling = gemm_ceiling(GemmKind::Fprop, TensorFormat{compute_}, r_);
        auto both_passes = [&](const char* group, double count, const float2* rope_table, float* amax_out) {
            add(group, "attention forward", count, size(qkv) + size(out) + logs, flops, ceiling,
                [&] { attention_forward(shape, qkv.data, out.data, lse, amax_out, nullptr); });
            const AttentionBackward tensors{.qkv = qkv.data,
                                            .out = out.data,
                                            .lse = lse,
                                            .dout = dout.data,
                                            .dqkv = dqkv.data,
                                            .workspace = workspace,
                                            .rope_table = rope_table,
                                            .dqkv_amax_out = amax_out};
            add(group, "attention backward", count, 2 * size(qkv) + 2 * size(out) + logs, 2.5 * flops,
                ceiling, [&] { attention_backward(shape, tensors, nullptr); });
        };
        // In a step attention takes amaxes, and undoes RoPE. What other libraries call attention does not
        // (dev/attention_peers.py compares it); its rows count for nothing in a step.
        both_passes(ATTENTION, layers_, c_.arch.rope ? rope_of_model().table : nullptr, amax_out_);
        both_passes(ATTENTION_ALONE, 0, nullptr, nullptr);
    }

    // --- Between the GEMMs ---------------------------------------------------------------------------------
    Norm random_norm(int64_t rows, const TensorFormat& q) {
        const void *weight = random(1, c_.C).data, *bias = c_.arch.rms ? nullptr : random(1, c_.C).data;
        const Norm n{random(rows, c_.C, q), weight,     bias, memory_.take<RowStatistics>(rows * 8),
                     c_.arch.rms,           c_.norm_eps};
        const TensorRef x = random(rows, c_.C), branch = random(rows, c_.C);
        const TensorRef x_out = q.is_fp8() ? random(rows, c_.C) : TensorRef{};
        residual_add(x, branch, {x_out, n, nullptr}, nullptr);  // for statistics
        return n;
    }
    // dresidual_in: no tensor for the final norm, where the residual stream ends.
    void norm_backward_pass(const char* group, const std::string& name, double count, const Norm& n,
                            const TensorRef& dresidual_in) {
        const TensorRef dy = random(N_, c_.C), out = random(N_, c_.C);
        const TensorRef dweight = random(1, c_.C), dbias = c_.arch.rms ? TensorRef{} : random(1, c_.C);
        const NormBackwardTensors gradients{.dy = dy,
                                            .dresidual_in = dresidual_in,
                                            .dresidual_out = out,
                                            .dresidual_amax_out = amax_out_,
                                            .dweight = dweight,
                                            .dbias = dbias};
        float* workspace = floats(norm_backward_workspace_floats(c_.C));
        pass(group, name, count, size(n.in) + size(dy) + size(dresidual_in) + size(out),
             [&] { norm_backward(n, gradients, workspace, nullptr); });
    }
    void norms() {
        const Norm n = random_norm(N_, r_.saved_inputs);
        const TensorRef x = random(N_, c_.C), a = random(N_, c_.C), out = random(N_, c_.C);
        // The last sum of a micro-batch, which the final norm reads, has no groups; here it is as the others.
        pass(BETWEEN, "residual add", 2 * layers_, size(x) + size(a) + size(n.in) + (groups_ ? size(out) : 0),
             [&] {
                 residual_add(x, a, {groups_ ? out : TensorRef{}, n, amax_out_}, nullptr);
             });
        quantize_pass("norm", 2 * layers_, lazy_norm(n), r_.x, Use::Fprop);
        quantize_pass("norm", 2 * layers_, lazy_norm(n), r_.x, Use::Wgrad);
        norm_backward_pass(BETWEEN, "norm backward", 2 * layers_, n, /*dresidual_in=*/a);
        if (c_.arch.other_biases && needs_amax_)
            return write_operand_and_add_column_sums_pass("residual gradient", 2 * layers_, lazy_stored(x),
                                                          r_.g);
        bias_pass("residual gradient", 2 * layers_, lazy_stored(x), c_.arch.other_biases, false);
        quantize_pass("residual gradient", 2 * layers_, lazy_stored(x), r_.g, Use::Both);
    }
    void attention_operands() {
        const TensorRef qkv = random(N_, c_.qkv_cols());
        if (c_.arch.qk_norms) {
            qk_norms(qkv);
        } else if (c_.arch.rope) {
            const Rope angles = rope_of_model();
            const double rotated = size(qkv) * double(angles.rotated_cols) / double(qkv.cols);
            pass(BETWEEN, "RoPE", layers_, 2 * rotated, [&] { rope(angles, qkv, false, nullptr, nullptr); });
        }
        const LazyTensor o = lazy_stored(random(N_, c_.q_cols())), dqkv = lazy_stored(qkv);
        quantize_pass("attention out", layers_, o, r_.x, Use::Fprop);
        quantize_pass("attention out", layers_, o, r_.x, Use::Wgrad);
        bias_pass("q, k, v backward", layers_, dqkv, c_.arch.qkv_bias, c_.arch.qk_norms);
        quantize_pass("q, k, v backward", layers_, dqkv, r_.g, Use::Both);
    }
    // Of Qwen3. Backward computes the norms' results again.
    void qk_norms(const TensorRef& qkv) {
        const Rope angles = rope_of_model();
        const TensorRef weight = random(2, c_.HS()), dweight = random(2, c_.HS());
        const TensorRef out = random(N_, qkv.cols), dqkv = random(N_, qkv.cols);
        const QkNorms norms{weight.data, c_.norm_eps, c_.HS(), c_.q_cols(), c_.kv_cols()};
        float* partials = floats(COLUMN_PARTIALS * angles.rotated_cols);
        const double normed = size(qkv) * double(angles.rotated_cols) / double(qkv.cols);
        pass(BETWEEN, "qk_norms, and RoPE", 2 * layers_, 2 * size(qkv),
             [&] { qk_norms_and_rope(norms, angles, qkv, out, nullptr); });
        pass(BETWEEN, "qk_norms, backward", layers_, 3 * normed,
             [&] { qk_norms_backward(norms, qkv, dqkv, dweight, partials, nullptr); });
    }
    void feed_forward() {
        const std::string name = c_.arch.gated ? "SiLU x up" : "GELU";
        const TensorRef gate_up = random(N_, c_.gate_up_cols(), r_.saved_inputs), dact = random(N_, c_.F);
        const LazyTensor activation = lazy_activation(c_.arch.gated, gate_up);
        const LazyTensor dgate_up = lazy_activation_backward(c_.arch.gated, gate_up, dact);
        if (groups_) {
            const TensorRef values = random(N_, c_.gate_up_cols()),
                            saved =
                                memory_.allocate_operand(N_, c_.gate_up_cols(), r_.saved_inputs, true, false)
                                    .tensor;
            pass(BETWEEN, "up: to " + r_.saved_inputs.text() + ", and the amax of " + name, layers_,
                 size(values) + size(saved), [&] {
                     quantize_activation_input(c_.arch.gated, values, saved, amax_out_, nullptr, nullptr);
                 });
        } else {
            amax_pass(name, layers_, activation);
        }
        quantize_pass(name, layers_, activation, r_.x, Use::Fprop);
        quantize_pass(name, layers_, activation, r_.x, Use::Wgrad);
        // Without FP8 the gradient is already stored
        const LazyTensor gradient = fp8_ ? dgate_up : lazy_stored(random(N_, c_.gate_up_cols()));
        bias_pass(name + " backward", layers_, gradient, c_.arch.other_biases, true);
        quantize_pass(name + " backward", layers_, dgate_up, r_.g, Use::Both);
    }
    // The four weights of a layer. With several micro-batches, a step quantizes them once.
    void weights() {
        if (!fp8_) return;
        const bool keep = settings_.micro_batches_per_rank > 1;
        std::vector<TensorRef> w;
        for (auto [out, in] :
             {std::pair{c_.qkv_cols(), c_.C}, {c_.C, c_.q_cols()}, {c_.gate_up_cols(), c_.C}, {c_.C, c_.F}})
            w.push_back(random(out, in));
        for (const Use use : keep ? std::vector<Use>{Use::Both} : std::vector<Use>{Use::Fprop, Use::Wgrad}) {
            const bool row_major = use != Use::Wgrad, transposed = use != Use::Fprop;
            std::vector<Operand> to;
            double bytes = 0;
            for (const TensorRef& v : w) {
                to.push_back(memory_.allocate_operand(v.rows, v.cols, r_.w, row_major, transposed));
                to.back().delayed = r_.scale_source == ScaleSource::Delayed;
                find_scale(lazy_stored(v), to.back());
                bytes += size(v) + (row_major + transposed) * size({v.data, v.rows, v.cols, r_.w});
            }
            const char* what = keep ? ", and transposed" : transposed ? ", transposed" : "";
            pass(BETWEEN, "a layer's weights: to " + r_.w.text() + what, double(c_.L) * (keep ? 1 : batches_),
                 bytes, [&] {
                     for (size_t i = 0; i < w.size(); i++)
                         quantize_operand(lazy_stored(w[i]), to[i], nullptr, nullptr);
                 });
        }
    }

    template <class T> T* upload(const std::vector<T>& host) {
        const int64_t bytes = int64_t(host.size() * sizeof(T));
        T* device = memory_.take<T>(bytes);
        copy(device, host.data(), bytes);
        return device;
    }

    // --- Embedding, head and optimizer ---------------------------------------------------------------------
    void embedding() {
        const Norm first = random_norm(N_, r_.saved_inputs);
        const TensorRef table = random(c_.padded_V(), c_.C),
                        positions = c_.arch.rope ? TensorRef{} : random(c_.max_T, c_.C), x = random(N_, c_.C);
        const std::vector<int32_t> tokens = made_up_tokens(N_, c_.V);
        const EmbeddingOrder order = embedding_order(tokens.data(), N_);
        const int64_t distinct = int64_t(order.tokens.size());
        const int32_t *on_device = upload(tokens), *rows = upload(order.order);
        const TokenRows* token_rows = upload(order.tokens);
        pass(HEAD, "embedding", batches_, size(x) + size(first.in) + (groups_ ? size(x) : 0), [&] {
            embed(table, positions, on_device, settings_.T, {groups_ ? x : TensorRef{}, first, amax_out_},
                  nullptr);
        });
        pass(HEAD, "embedding backward", batches_,
             size(x) + 2.0 * double(distinct * c_.C * format_info(compute_).bytes), [&] {
                 gpu::embedding_backward(x, {rows, token_rows, distinct, order.frequent_count}, table,
                                         nullptr);
             });
        if (!c_.arch.rope)
            pass(HEAD, "positions backward", batches_, size(x),
                 [&] { positions_backward(x, settings_.T, positions, nullptr); });
    }
    void head() {
        const int64_t n = std::min(HEAD_SLICE_TOKENS, N_), V = c_.padded_V();
        const double count = batches_ * double(N_) / double(n), flops = 2.0 * double(n * c_.C * V);
        const int32_t* targets = upload(made_up_tokens(n, c_.V));
        const double* loss_weight = upload(std::vector<double>{1e-4});
        float* losses = floats(n);
        const Operand y{random(n, c_.C)}, w{random(V, c_.C)}, logits{random(n, V)};
        const TensorRef dw = random(V, c_.C), dy = random(n, c_.C);
        const LazyTensor final_norm = lazy_norm(random_norm(n, {compute_}));
        pass(HEAD, "final norm", count, reads(final_norm) + size(y.tensor),
             [&] { store_values(final_norm, y.tensor, nullptr); });
        gemm(HEAD, "head fprop", count, GemmKind::Fprop, y, w, logits.tensor, flops, nullptr, false);
        pass(HEAD, "cross-entropy", count, 2 * size(logits.tensor), [&] {
            cross_entropy_forward_and_backward(logits.tensor, c_.V, targets, loss_weight, losses, nullptr);
        });
        gemm(HEAD, "head wgrad", count, GemmKind::Wgrad, logits, y, dw, flops, nullptr, true);
        gemm(HEAD, "head dgrad", count, GemmKind::Dgrad, logits, w, dy, flops, nullptr, false);
        norm_backward_pass(HEAD, "final norm backward", batches_, random_norm(N_, {compute_}),
                           /*dresidual_in=*/{});
    }

    // Times at most 10^9 parameters, or as many as fit, and scales the time to all parameters.
    void optimizer() {
        const OptimizerFormats& o = settings_.optimizer;
        const Param last = parameters(c_).back();
        const int64_t total = last.flat_offset + last.padded_size();
        size_t free = 0, all = 0;
        check(cudaMemGetInfo(&free, &all), "Asking for the GPU's memory failed");
        const int64_t fitting = int64_t(free) / 32;
        const int64_t moment_groups = std::min<int64_t>({total, 1000000000, fitting}) / MOMENT_GROUP_SIZE,
                      n = moment_groups * MOMENT_GROUP_SIZE;
        const std::vector<float> ones(size_t(moment_groups), 1.0f);
        auto moment = [&](Format f) -> MomentRef {
            void* codes = memory_.take(n * format_info(f).bytes);
            return {codes,
                    moments_need_scaling(f) ? floats(std::max<int64_t>(o.moment_scaling_count(f, n), 2))
                                            : nullptr,
                    o.uses_expansion(f) ? upload(ones) : nullptr, f};
        };
        const bool remainder = compute_ != Format::FP32;
        const Weights w{random(1, n).data, remainder ? memory_.take<int16_t>(n * 2) : nullptr, compute_};
        const TensorRef gradient = random(1, n);
        const Shard* shard = upload(
            std::vector<Shard>{{0, n, moment(o.m_format), moment(o.v_format), true, clock_.amax_out()}});
        GradientState* state = memory_.take<GradientState>(sizeof(GradientState));
        const int64_t units = ceil_div(n, SHARD_UNIT);
        double* sums = memory_.take<double>((1 + units) * 8);

        const double count = double(total) / double(n);
        auto state_bytes = [&](Format f) {
            const double scales = moments_need_scaling(f) && !o.one_moment_group
                                      ? (o.uses_expansion(f) ? 8.0 : 4.0) / double(MOMENT_GROUP_SIZE)
                                      : 0;
            return format_info(f).bytes + scales;
        };
        const double weight = format_info(compute_).bytes + (remainder ? 2 : 0),
                     each = 2 * (weight + state_bytes(o.m_format) + state_bytes(o.v_format)) +
                            format_info(compute_).bytes;
        const ShardsToUpdate g{
            .shards = shard, .count = 1, .elements = {0, n}, .gradients = gradient.data, .format = compute_};
        auto norm = [&] {
            compute_gradient_squares(g, {0, units}, nullptr, sums, nullptr);
            update_gradient_state(sums, units, 1, 1, state, nullptr);
        };
        norm();  // adamw below reads its result
        pass(OPTIMIZER, "gradient norm", count, size(gradient), norm);
        pass(OPTIMIZER, std::string("AdamW, ") + o.name + " moments", count, double(n) * each, [&] {
            adamw({10, 1e-4f}, o, g, w, /*rounding_key=*/0, state, nullptr);
        });
    }

public:
    // A few tokens are frequent and many are rare, as in text.
    static std::vector<int32_t> made_up_tokens(int64_t n, int64_t V) {
        std::vector<int32_t> tokens(n);
        for (size_t i = 0; i < tokens.size(); i++) {
            // u < 1: the largest initial value is 2 sqrt(3) times its standard deviation.
            const double u = std::abs(random_weight(1, 0, i, 1.0f)) / 3.465;
            tokens[i] = std::min(int32_t(V - 1), int32_t(double(V) * u * u * u));
        }
        return tokens;
    }
};

// -----------------------------------------------------------------------------------------------------------
// The whole step

// Sorted. A step waits for the GPU itself.
std::vector<double> step_seconds(const RunSettings& s) {
    const std::unique_ptr<Model> model = make_gpu_model(s);
    std::vector<int32_t> tokens = Step::made_up_tokens(s.micro_batches_per_rank * s.B * s.T + 1, s.config.V);
    std::vector<double> times;
    for (int64_t step = 0; step <= STEPS; step++) {  // the first includes start-up costs
        const auto begin = std::chrono::steady_clock::now();
        if (model->step(tokens.data(), tokens.data() + 1, {step + 1, 1e-4f}).skipped)
            throw Error("A step was skipped, so its time is not valid.");
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        if (step) times.push_back(took.count());
    }
    std::sort(times.begin(), times.end());
    return times;
}

void print_rows(const std::vector<Row>& rows) {
    std::printf("  %-52s %7s %10s %14s %6s %10s %10s\n", "operator", "a step", "us each", "", "floor",
                "ms a step", "floor, ms");
    const char* group = "";
    for (const Row& r : rows) {
        if (r.group != group) std::printf("  %s\n", group = r.group);
        const bool computes = r.flops > 0;
        std::printf("    %-50s %7.5g %10.1f %6.*f %-7s %5.0f%% %10.2f %10.2f\n", r.name.c_str(), r.count,
                    r.seconds * 1e6, computes ? 0 : 2, (computes ? r.flops : r.bytes) / r.seconds * 1e-12,
                    computes ? "TFLOP/s" : "TB/s", 100 * r.floor / r.seconds, r.count * r.seconds * 1e3,
                    r.count * r.floor * 1e3);
    }
}

ordered_json bench(const RunSettings& s, Clock& clock, const Ceilings& ceilings, const std::string& only) {
    const auto [micro_batches, B, T] = std::array<long long, 3>{s.micro_batches_per_rank, s.B, s.T};
    std::printf("\n%s, recipe %s, %lld x %lld x %lld tokens a step\n", s.config.name.c_str(), s.recipe.name,
                micro_batches, B, T);
    const std::vector<Row> rows = Step(s, recipe_on_gpu(s.recipe, capability()), clock, ceilings, only).rows;
    print_rows(rows);
    ordered_json report{{"model", s.config.name}, {"recipe", s.recipe.name}, {"batch", B}, {"seq", T}};
    report["accumulate"] = micro_batches;
    double sum = 0, floors = 0;
    for (const Row& r : rows) {
        ordered_json row{{"group", r.group}, {"name", r.name}, {"count", r.count}};
        row.update({{"seconds", r.seconds}, {"floor", r.floor}});
        report["operators"].push_back(row);
        sum += r.count * r.seconds;
        floors += r.count * r.floor;
    }
    if (!only.empty()) return report;
    const std::vector<double> times = step_seconds(s);
    const double step = times[times.size() / 2], speed = double(micro_batches * B * T) / step;
    std::printf("\n  sum of the operators %.2f ms, of their floors %.2f ms\n", sum * 1e3, floors * 1e3);
    std::printf("  whole step, median of %zu: %.2f ms (%.2f to %.2f), %.0f tokens/s, %.3f times the floors\n",
                times.size(), step * 1e3, times.front() * 1e3, times.back() * 1e3, speed, step / floors);
    report["step"] = {{"seconds", step}, {"tokens_per_second", speed}, {"floors", floors}};
    return report;
}

// -----------------------------------------------------------------------------------------------------------
// The program

using Flags = std::map<std::string, std::string>;

Flags parse(int argc, char** argv) {
    Flags flags{{"--model", ""},      {"--recipe", "coat"}, {"--batch", ""}, {"--seq", ""},
                {"--accumulate", ""}, {"--kv-heads", ""},   {"--json", ""},  {"--only", ""}};
    for (int i = 1; i < argc; i += 2) {
        if (!flags.count(argv[i]) || i + 1 == argc)
            throw Error(argv[i], " is not a flag with a value; there are --model, --recipe, --batch, --seq, ",
                        "--accumulate, --kv-heads, --json and --only.");
        flags[argv[i]] = argv[i + 1];
    }
    return flags;
}

std::vector<RunSettings> all_settings(const Flags& flags) {
    auto number = [&](const char* flag, int64_t otherwise) {
        const int64_t n = flags.at(flag).empty() ? otherwise : std::atoll(flags.at(flag).c_str());
        if (n < 1) throw Error(flag, " must be a number from 1.");
        return n;
    };
    std::vector<RunSettings> list;
    const std::string& wanted = flags.at("--model");
    const Recipe& recipe = find_row(recipes(), flags.at("--recipe"), "--recipe");
    auto add = [&](const Run& r) {
        RunSettings s{find_row(known_models(), r.model, "--model"),
                      recipe,
                      find_row(optimizers(), recipe.default_optimizer, "--optimizer"),
                      number("--batch", r.batch),
                      number("--seq", r.seq),
                      number("--accumulate", r.accumulate)};
        if (s.config.V == 0) s.config.V = 256;  // bytes
        s.config.NKV = number("--kv-heads", s.config.NKV);
        require_supported(s);
        list.push_back(s);
    };
    for (const Run& r : RUNS)
        if (wanted.empty() || wanted == r.model) add(r);
    if (list.empty())
        add({wanted.c_str(), 8, std::min<int64_t>(2048, find_row(known_models(), wanted, "--model").max_T),
             1});
    return list;
}

}  // namespace

int main(int argc, char** argv) try {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    const Flags flags = parse(argc, argv);
    const std::vector<RunSettings> runs = all_settings(flags);
    const std::string missing = select_gpu();
    if (!missing.empty()) throw Error("The bench measures a GPU: " + missing + ".");
    cudaDeviceProp device;
    check(cudaGetDeviceProperties(&device, 0), "Asking for the GPU's properties failed");
    Clock clock;
    ordered_json report{{"device", device.name}, {"runs", ordered_json::array()}};
    if (flags.at("--only") == "sizes") {
        report["sizes"] = measure_sizes(clock);
    } else {
        const Ceilings ceilings = measure_ceilings(clock, recipe_on_gpu(runs[0].recipe, capability()));
        std::printf("%s; measured ceilings:\n", device.name);
        for (const auto& [name, rate] : ceilings)
            std::printf("  %-34s %8.*f %s\n", name.c_str(), name == COPY ? 2 : 0, rate * 1e-12,
                        name == COPY ? "TB/s" : "TFLOP/s");
        for (const RunSettings& s : runs)
            report["runs"].push_back(bench(s, clock, ceilings, flags.at("--only")));
    }
    if (flags.at("--json").empty()) return 0;
    std::ofstream file(flags.at("--json"));
    if (!(file << report.dump(1) << "\n"))
        throw Error(flags.at("--json") + " cannot be written; choose another --json.");
} catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
}
