// bench_operators.h - the operators of a training step, at the shapes of a model: what each computes, reads
// and writes, and how often a step runs it. bench.cu measures them. A test (test/dev/bench.cu) counts what
// they launch in a dry run, and compares it with a step of model.cu.
#pragma once
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "../coat.h"
#include "../gpu/attention.h"
#include "../gpu/column_sums.h"
#include "../gpu/gemm.h"
#include "../gpu/layers.h"
#include "../gpu/memory_layout.h"
#include "../gpu/norm.h"
#include "../gpu/other_scaling.h"
#include "../gpu/gradient_norm.h"
#include "../gpu/initialize.h"
#include "../common/random.h"
#include "gpu_tools.h"

namespace coat::dev {

using namespace coat::gpu;

// -----------------------------------------------------------------------------------------------------------
// Memory with random values

// In a dry run nothing is allocated, and addresses are never used.
class Memory {
public:
    explicit Memory(cudaStream_t stream = nullptr) : stream_(stream) {}

    template <class T = void> T* take(int64_t bytes) {
        if (stream_ == DRY_RUN) return reinterpret_cast<T*>(GPU_ALIGNMENT * ++dry_count_);
        dev::Buffer<uint8_t>& taken = taken_.emplace_back(size_t(bytes));
        taken.fill(0);
        return reinterpret_cast<T*>(taken.get());
    }
    // Random values, as first weights are made.
    TensorRef random(int64_t rows, int64_t cols, Format format, float std = 1.0f) {
        const Range all{.first = 0, .count = rows * cols};
        const TensorRef tensor{take(padded_count(all) * format_info(format).bytes), rows, cols,
                               TensorFormat{format}};
        Param param{};
        param.init_std = std;
        initialize({.values = tensor.data, .remainders = nullptr, .format = format}, /*memory_offset=*/0,
                   param, {.owned = all, .param_index = 0, .used = all.count, .seed = taken_.size()},
                   stream_);
        return tensor;
    }
    template <class T> T* upload(const std::vector<T>& host) {
        const int64_t bytes = int64_t(host.size() * sizeof(T));
        T* device = take<T>(bytes);
        copy_async(device, host.data(), bytes, stream_);
        return device;
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
            out.block_scales = take<float>(block_scale_count(q, rows, cols) * 4);
            if (transposed) out.transposed_block_scales = take<float>(block_scale_count(q, cols, rows) * 4);
        }
        return out;
    }
    void release() { taken_.clear(); }

private:
    const cudaStream_t stream_;
    int64_t dry_count_ = 0;
    std::deque<dev::Buffer<uint8_t>> taken_;
};

inline Operand random_operand(Memory& memory, int64_t rows, int64_t cols, const TensorFormat& q,
                              Format compute, cudaStream_t stream = nullptr) {
    const TensorRef x = memory.random(rows, cols, compute);
    if (!q.is_fp8()) return {x};
    const bool groups = q == E4M3_PER_1x16;
    const Operand out = memory.allocate_operand(rows, cols, q, /*row_major=*/true, /*transposed=*/!groups);
    if (groups) {
        quantize_to_groups(x, out.tensor, /*write_back=*/false, nullptr, stream);
        return out;
    }
    if (q.granularity == PER_TENSOR) compute_amax(lazy_load(x), &out.tensor.tensor_scale->amax, stream);
    quantize_operand(lazy_load(x), out, nullptr, stream);
    return out;
}

// -----------------------------------------------------------------------------------------------------------
// The operators

// The ceilings of a GPU by name: the copy bandwidth, and the rates of large GEMMs.
inline constexpr const char *COPY = "copy", *FAST = "fp8 GEMM, fast accumulation",
                            *EXACT = "fp8 GEMM, exact accumulation";

inline const char* gemm_ceiling(GemmKind kind, const TensorFormat& operand, const Recipe& r) {
    if (operand.is_fp8()) return r.fast_accumulation[int(kind)] ? FAST : EXACT;
    return operand.element_format == Format::FP32 ? "fp32 GEMM" : "bf16 GEMM";
}

struct StepOperator {
    const char* group;
    std::string name;
    double count;         // how often a step runs it
    double bytes, flops;  // flops: 0 for operators that only move data
    const char* ceiling;  // the name of the rate that limits flops
};
// What is done with an operator. run() launches it once.
using Measure = std::function<void(const StepOperator&, const std::function<void()>& run)>;

inline constexpr const char *LINEAR_LAYERS = "linear layers", *ATTENTION = "attention",
                            *ATTENTION_ALONE = "attention alone", *BETWEEN = "between the GEMMs",
                            *HEAD = "embedding, head, loss", *OPTIMIZER = "optimizer";

// A few tokens are frequent and many are rare, as in text.
inline std::vector<int32_t> made_up_tokens(int64_t n, int64_t V) {
    std::vector<int32_t> tokens(n);
    for (size_t i = 0; i < tokens.size(); i++) {
        // u < 1: the largest initial value is 2 sqrt(3) times its standard deviation.
        const double u = std::abs(random_weight(1, 0, i, 1.0f)) / 3.465;
        tokens[i] = std::min(int32_t(V - 1), int32_t(double(V) * u * u * u));
    }
    return tokens;
}

// The operators of a step: the constructor makes the tensors of each in turn, and hands it to `measure`.
class StepOperators {
public:
    StepOperators(const RunSettings& s, cudaStream_t stream, float* amax_to_raise, const Measure& measure,
                  const std::string& only = "")
        : settings_(s), stream_(stream), amax_place_(amax_to_raise), measure_(measure), only_(only) {
        for (auto part :
             {&StepOperators::linear_layers, &StepOperators::attention, &StepOperators::norms,
              &StepOperators::attention_operands, &StepOperators::feed_forward, &StepOperators::weights,
              &StepOperators::embedding, &StepOperators::head, &StepOperators::optimizer}) {
            (this->*part)();
            memory_.release();
        }
    }

private:
    enum class Use { Fprop, Wgrad, Both };
    const RunSettings& settings_;
    const cudaStream_t stream_;
    float* const amax_place_;
    const Measure& measure_;
    const std::string only_;
    const Recipe& r_ = settings_.recipe;
    const ModelConfig& c_ = settings_.config;
    const Format compute_ = r_.compute_format;
    const bool fp8_ = r_.x.is_fp8(), groups_ = r_.saved_inputs.is_fp8();
    const int64_t N_ = settings_.B * settings_.T;
    const double batches_ = double(settings_.micro_batches_per_rank);  // micro-batches per step
    const double layers_ = batches_ * double(c_.L);                    // layer passes per step
    const bool needs_amax_ =
        fp8_ && r_.x.granularity == PER_TENSOR && r_.scale_source == ScaleSource::JustInTime;
    float* const amax_to_raise_ = needs_amax_ ? amax_place_ : nullptr;
    Memory scratch_{stream_}, memory_{stream_};
    CublasGemms gemms_{scratch_.take(CublasGemms::SCRATCH_BYTES), r_.fast_accumulation};

    bool wanted(const char* group, const std::string& name) const {
        return (group + (": " + name)).find(only_) != std::string::npos;
    }
    void add(const char* group, const std::string& name, double count, double bytes, double flops,
             const char* ceiling, const std::function<void()>& run) {
        if (wanted(group, name)) measure_({group, name, count, bytes, flops, ceiling}, run);
    }
    void pass(const char* group, const std::string& name, double count, double bytes,
              const std::function<void()>& run) {
        add(group, name, count, bytes, 0, COPY, run);
    }

    static double size(const TensorRef& t) { return t.data ? double(t.format.bytes(t.rows, t.cols)) : 0; }
    static double reads(const LazyTensor& x) {
        const double row_statistics = x.op == LazyOp::Norm ? 8.0 * double(x.rows) : 0;
        return size(x.input) + size(x.dact) + row_statistics;
    }
    TensorRef random(int64_t rows, int64_t cols) { return memory_.random(rows, cols, compute_); }
    TensorRef random(int64_t rows, int64_t cols, const TensorFormat& q) {
        return random_operand(memory_, rows, cols, q, compute_, stream_).tensor;
    }
    float* floats(int64_t n) { return memory_.take<float>(n * 4); }

    // --- amax, quantize and column sums of coat.cu ---------------------------------------------------------
    void amax_pass(const std::string& name, double count, const LazyTensor& x) {
        if (amax_to_raise_)
            pass(BETWEEN, name + ": amax", count, reads(x),
                 [&] { compute_amax(x, amax_to_raise_, stream_); });
    }
    // amax: no earlier kernel has computed the amax of x
    void bias_pass(const std::string& name, double count, const LazyTensor& x, bool bias, bool amax) {
        if (!bias) return amax ? amax_pass(name, count, x) : void();
        const TensorRef gradient = random(1, x.cols);
        float* workspace = floats(COLUMN_PARTIALS * x.cols);
        float* amax_to_raise = amax ? amax_to_raise_ : nullptr;
        pass(BETWEEN, name + (amax_to_raise ? ": bias gradient and amax" : ": bias gradient"), count,
             reads(x), [&] { add_column_sums(x, gradient, workspace, amax_to_raise, stream_); });
    }
    // Before what is timed: the amax that it takes for granted, or the delayed scale.
    void find_scale(const LazyTensor& x, const Operand& out) const {
        if (!out.tensor.format.is_fp8() || out.tensor.format.granularity != PER_TENSOR) return;
        TensorScale* tensor_scale = out.tensor.tensor_scale;
        compute_amax(x, &tensor_scale->amax, stream_);
        quantize_operand(x, out, nullptr, stream_);
        if (r_.scale_source == ScaleSource::Delayed)
            copy_async(&tensor_scale->delayed_scale, &tensor_scale->scale, sizeof(float), stream_);
    }
    void quantize_pass(const std::string& name, double count, const LazyTensor& x, const TensorFormat& q,
                       Use use) {
        if (x.op == LazyOp::Load && !q.is_fp8()) return;  // used without a copy
        const bool transposed = q.is_fp8() && q.granularity != PER_1x16 && use != Use::Fprop;
        const bool row_major = !transposed || use == Use::Both;
        Operand out = memory_.allocate_operand(x.rows, x.cols, q, row_major, transposed);
        out.delayed = r_.scale_source == ScaleSource::Delayed;
        find_scale(x, out);
        const double bytes = reads(x) + (row_major + transposed) * double(q.bytes(x.rows, x.cols));
        const char* what = row_major && transposed ? ", and transposed" : transposed ? ", transposed" : "";
        pass(BETWEEN, name + ": to " + q.text() + what, count, bytes,
             [&] { write_operand(x, out, nullptr, stream_); });
    }

    // The gradient of a linear layer's output, of which an earlier kernel has computed the amax: its operand,
    // and the gradient of the bias. In FP8 with one scale for the tensor, both take one pass.
    void gradient_with_amax(const std::string& name, double count, const LazyTensor& x, bool bias) {
        if (!bias || !needs_amax_) {
            bias_pass(name, count, x, bias, /*amax=*/false);
            return quantize_pass(name, count, x, r_.g, Use::Both);
        }
        const Operand out = memory_.allocate_operand(x.rows, x.cols, r_.g, true, true);
        const TensorRef gradient = random(1, x.cols);
        float* workspace = floats(COLUMN_PARTIALS * x.cols);
        find_scale(x, out);
        pass(BETWEEN, name + ": bias gradient, to " + r_.g.text() + ", and transposed", count,
             reads(x) + 2 * double(r_.g.bytes(x.rows, x.cols)),
             [&] { write_operand_and_add_column_sums(x, out, gradient, workspace, nullptr, stream_); });
    }

    // --- GEMMs ---------------------------------------------------------------------------------------------
    void gemm(const char* group, const std::string& name, double count, GemmKind kind, const Operand& a,
              const Operand& b, const TensorRef& out, double flops, const void* bias, bool accumulate) {
        if (!wanted(group, name)) return;
        gemms_.run(kind, a, b, out, stream_, {.bias = bias});  // selects the algorithm
        const double bytes = size(a.tensor) + size(b.tensor) + (accumulate ? 2 : 1) * size(out);
        add(group, name, count, bytes, flops, gemm_ceiling(kind, a.tensor.format, r_),
            [&] { gemms_.run(kind, a, b, out, stream_, {.overwrite = !accumulate, .bias = bias}); });
    }
    void linear(const std::string& name, int64_t out, int64_t in, bool biased) {
        const LinearFormats q = linear_formats(settings_);
        const double flops = 2.0 * double(N_ * out * in);
        const Operand w = random_operand(memory_, out, in, q.w, compute_, stream_),
                      x = random_operand(memory_, N_, in, q.x, compute_, stream_),
                      g = random_operand(memory_, N_, out, q.g, compute_, stream_);
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
        fill_rope_table(c_, settings_.T, table, stream_);
        return {table, settings_.T, c_.HS(), c_.q_cols() + c_.kv_cols()};
    }
    void attention() {
        const AttentionShape shape = attention_shape(c_, settings_.B, settings_.T, compute_);
        const TensorRef qkv = random(N_, c_.qkv_cols()), dqkv = random(N_, c_.qkv_cols());
        const TensorRef out = random(N_, c_.q_cols()), dout = random(N_, c_.q_cols());
        float* lse = floats(N_ * c_.NH);
        void* workspace = memory_.take(std::max<int64_t>(16, attention_workspace_bytes(shape)));
        // 4 N T C, half of which is masked
        const double flops = 2.0 * double(N_ * settings_.T * c_.q_cols());
        const double logs = 4.0 * double(N_ * c_.NH);
        const char* ceiling = gemm_ceiling(GemmKind::Fprop, TensorFormat{compute_}, r_);
        auto both_passes = [&](const char* group, double count, const float2* rope_table,
                               float* amax_to_raise) {
            add(group, "attention forward", count, size(qkv) + size(out) + logs, flops, ceiling,
                [&] { attention_forward(shape, qkv.data, out.data, lse, amax_to_raise, stream_); });
            const AttentionBackward tensors{.qkv = qkv.data,
                                            .out = out.data,
                                            .lse = lse,
                                            .dout = dout.data,
                                            .dqkv = dqkv.data,
                                            .workspace = workspace,
                                            .rope_table = rope_table,
                                            .dqkv_amax_to_raise = amax_to_raise};
            add(group, "attention backward", count, 2 * size(qkv) + 2 * size(out) + logs, 2.5 * flops,
                ceiling, [&] { attention_backward(shape, tensors, stream_); });
        };
        // In a step attention takes amaxes, and undoes RoPE. What other libraries call attention does not
        // (dev/attention_peers.py compares it); its rows count for nothing in a step.
        both_passes(ATTENTION, layers_, c_.arch.rope ? rope_of_model().table : nullptr, amax_to_raise_);
        both_passes(ATTENTION_ALONE, 0, nullptr, nullptr);
    }

    // --- Between the GEMMs ---------------------------------------------------------------------------------
    Norm random_norm(int64_t rows, const TensorFormat& q) {
        const void *weight = random(1, c_.C).data, *bias = c_.arch.rms ? nullptr : random(1, c_.C).data;
        const Norm n{random(rows, c_.C, q), weight,     bias, memory_.take<RowStatistics>(rows * 8),
                     c_.arch.rms,           c_.norm_eps};
        const TensorRef x = random(rows, c_.C), branch = random(rows, c_.C);
        const TensorRef plain_sum = q.is_fp8() ? random(rows, c_.C) : TensorRef{};
        residual_add(x, branch, n, plain_sum, nullptr, stream_);  // for statistics
        return n;
    }
    // dresidual_in: no tensor for the final norm, where the residual stream ends.
    void norm_backward_pass(const char* group, const std::string& name, double count, const Norm& n,
                            const TensorRef& dresidual_in) {
        const TensorRef dy = random(N_, c_.C), out = random(N_, c_.C);
        const TensorRef dweight = random(1, c_.C), dbias = c_.arch.rms ? TensorRef{} : random(1, c_.C);
        const NormBackwardTensors gradients{.dnorm_output = dy,
                                            .dresidual_in = dresidual_in,
                                            .dresidual_out = out,
                                            .dresidual_amax_to_raise = amax_to_raise_,
                                            .dweight = dweight,
                                            .dbias = dbias};
        float* workspace = floats(norm_backward_workspace_floats(c_.C));
        pass(group, name, count, size(n.input) + size(dy) + size(dresidual_in) + size(out),
             [&] { norm_backward(n, gradients, workspace, stream_); });
    }
    void norms() {
        const Norm n = random_norm(N_, r_.saved_inputs);
        const TensorRef x = random(N_, c_.C), a = random(N_, c_.C), out = random(N_, c_.C);
        // The last sum of a micro-batch, which the final norm reads, has no groups; here it is as the others.
        pass(BETWEEN, "residual add", 2 * layers_,
             size(x) + size(a) + size(n.input) + (groups_ ? size(out) : 0),
             [&] { residual_add(x, a, n, groups_ ? out : TensorRef{}, amax_to_raise_, stream_); });
        quantize_pass("norm", 2 * layers_, lazy_norm(n), r_.x, Use::Fprop);
        quantize_pass("norm", 2 * layers_, lazy_norm(n), r_.x, Use::Wgrad);
        norm_backward_pass(BETWEEN, "norm backward", 2 * layers_, n, /*dresidual_in=*/a);
        gradient_with_amax("residual gradient", 2 * layers_, lazy_load(x), c_.arch.other_biases);
    }
    void attention_operands() {
        const TensorRef qkv = random(N_, c_.qkv_cols());
        if (c_.arch.qk_norms) {
            qk_norms(qkv);
        } else if (c_.arch.rope) {
            const Rope angles = rope_of_model();
            const double rotated = size(qkv) * double(angles.rotated_cols) / double(qkv.cols);
            pass(BETWEEN, "RoPE", layers_, 2 * rotated, [&] { rope(angles, qkv, false, nullptr, stream_); });
        }
        const LazyTensor o = lazy_load(random(N_, c_.q_cols())), dqkv = lazy_load(qkv);
        quantize_pass("attention out", layers_, o, r_.x, Use::Fprop);
        quantize_pass("attention out", layers_, o, r_.x, Use::Wgrad);
        if (!c_.arch.qk_norms) return gradient_with_amax("q, k, v backward", layers_, dqkv, c_.arch.qkv_bias);
        bias_pass("q, k, v backward", layers_, dqkv, c_.arch.qkv_bias, true);
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
             [&] { qk_norms_and_rope(norms, angles, qkv, out, stream_); });
        pass(BETWEEN, "qk_norms, backward", layers_, 3 * normed,
             [&] { qk_norms_backward(norms, qkv, dqkv, dweight, partials, stream_); });
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
                     quantize_activation_input(c_.arch.gated, values, saved, amax_to_raise_, nullptr,
                                               stream_);
                 });
        } else {
            amax_pass(name, layers_, activation);
        }
        quantize_pass(name, layers_, activation, r_.x, Use::Fprop);
        quantize_pass(name, layers_, activation, r_.x, Use::Wgrad);
        // Without FP8 the gradient is already stored
        const LazyTensor gradient = fp8_ ? dgate_up : lazy_load(random(N_, c_.gate_up_cols()));
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
                find_scale(lazy_load(v), to.back());
                bytes += size(v) + (row_major + transposed) * size({v.data, v.rows, v.cols, r_.w});
            }
            const char* what = keep ? ", and transposed" : transposed ? ", transposed" : "";
            pass(BETWEEN, "a layer's weights: to " + r_.w.text() + what, double(c_.L) * (keep ? 1 : batches_),
                 bytes, [&] {
                     for (size_t i = 0; i < w.size(); i++)
                         quantize_operand(lazy_load(w[i]), to[i], nullptr, stream_);
                 });
        }
    }

    // --- Embedding, head and optimizer ---------------------------------------------------------------------
    void embedding() {
        const Norm first = random_norm(N_, r_.saved_inputs);
        const TensorRef table = random(c_.padded_V(), c_.C),
                        positions = c_.arch.rope ? TensorRef{} : random(c_.max_T, c_.C), x = random(N_, c_.C);
        const std::vector<int32_t> tokens = made_up_tokens(N_, c_.V);
        const EmbeddingOrder order = embedding_order(tokens.data(), N_);
        const int64_t distinct = int64_t(order.token_rows.size());
        const int32_t *on_device = memory_.upload(tokens), *rows = memory_.upload(order.row_order);
        const TokenRows* token_rows = memory_.upload(order.token_rows);
        pass(HEAD, "embedding", batches_, size(x) + size(first.input) + (groups_ ? size(x) : 0), [&] {
            embed(table, positions, on_device, settings_.T, first, groups_ ? x : TensorRef{}, amax_to_raise_,
                  stream_);
        });
        pass(HEAD, "embedding backward", batches_,
             size(x) + 2.0 * double(distinct * c_.C * format_info(compute_).bytes), [&] {
                 gpu::embedding_backward(x, {rows, token_rows, distinct, order.frequent_count}, table,
                                         stream_);
             });
        if (!c_.arch.rope)
            pass(HEAD, "positions backward", batches_, size(x),
                 [&] { positions_backward(x, settings_.T, positions, stream_); });
    }
    void head() {
        const int64_t n = std::min(HEAD_SLICE_TOKENS, N_), V = c_.padded_V();
        const double count = batches_ * double(N_) / double(n), flops = 2.0 * double(n * c_.C * V);
        const int32_t* targets = memory_.upload(made_up_tokens(n, c_.V));
        const double* loss_weight = memory_.upload(std::vector<double>{1e-4});
        float* losses = floats(n);
        const Operand y{random(n, c_.C)}, w{random(V, c_.C)}, logits{random(n, V)};
        const TensorRef dweight = random(V, c_.C), dy = random(n, c_.C);
        const bool sums_in_fp32 = head_sum_in_fp32(settings_);
        const TensorRef sum = sums_in_fp32 ? memory_.random(V, c_.C, Format::FP32) : dweight;
        const LazyTensor final_norm = lazy_norm(random_norm(n, {compute_}));
        pass(HEAD, "final norm", count, reads(final_norm) + size(y.tensor),
             [&] { write_values(final_norm, y.tensor, stream_); });
        gemm(HEAD, "head fprop", count, GemmKind::Fprop, y, w, logits.tensor, flops, nullptr, false);
        pass(HEAD, "cross-entropy", count, 2 * size(logits.tensor), [&] {
            cross_entropy_forward_and_backward(logits.tensor, c_.V, targets, loss_weight, losses, stream_);
        });
        gemm(HEAD, "head wgrad", count, GemmKind::Wgrad, logits, y, sum, flops, nullptr, true);
        if (sums_in_fp32) {
            pass(HEAD, "gradient of the head: to FP32", batches_ - 1, size(dweight) + size(sum),
                 [&] { write_values(lazy_load(dweight), sum, stream_); });
            pass(HEAD, "gradient of the head: from FP32", batches_, size(dweight) + size(sum),
                 [&] { write_values(lazy_load(sum), dweight, stream_); });
        }
        gemm(HEAD, "head dgrad", count, GemmKind::Dgrad, logits, w, dy, flops, nullptr, false);
        norm_backward_pass(HEAD, "final norm backward", batches_, random_norm(N_, {compute_}),
                           /*dresidual_in=*/{});
    }

    // On a GPU it updates at most 10^9 parameters, or as many as fit; `count` scales the time to all of them.
    void optimizer() {
        const OptimizerFormats& o = settings_.optimizer;
        const Param last = parameters(c_).back();
        const int64_t total = last.flat_offset + last.padded_size();
        int64_t chosen = total;
        if (stream_ != DRY_RUN) {
            size_t free = 0, all = 0;
            check(cudaMemGetInfo(&free, &all), "Asking for the GPU's memory failed");
            chosen = std::min<int64_t>({total, 1000000000, int64_t(free) / 32});
        }
        const int64_t moment_groups = chosen / MOMENT_GROUP_SIZE, n = moment_groups * MOMENT_GROUP_SIZE;
        const std::vector<float> ones(size_t(moment_groups), 1.0f);
        auto moment = [&](Format f) -> MomentRef {
            void* codes = memory_.take(n * format_info(f).bytes);
            return {codes, is_fp8(f) ? floats(moment_group_count(f, n)) : nullptr,
                    o.uses_expansion(f) ? memory_.upload(ones) : nullptr, f};
        };
        const bool remainder = compute_ != Format::FP32;
        const Weights w{random(1, n).data, remainder ? memory_.take<int16_t>(n * 2) : nullptr, compute_};
        const TensorRef gradient = random(1, n);
        const AdamWParam* param = memory_.upload(
            std::vector<AdamWParam>{{0, n, moment(o.m_format), moment(o.v_format), true, amax_place_}});
        GradientState* state = memory_.take<GradientState>(sizeof(GradientState));
        const int64_t units = ceil_div(n, UNIT_SIZE);
        double* sums = memory_.take<double>((1 + units) * 8);
        const double* loss = memory_.take<double>(sizeof(double));

        const double count = double(total) / double(n);
        auto state_bytes = [&](Format f) {
            const double scales =
                is_fp8(f) ? (o.uses_expansion(f) ? 8.0 : 4.0) / double(MOMENT_GROUP_SIZE) : 0;
            return format_info(f).bytes + scales;
        };
        const double weight = format_info(compute_).bytes + (remainder ? 2 : 0),
                     each = 2 * (weight + state_bytes(o.m_format) + state_bytes(o.v_format)) +
                            format_info(compute_).bytes;
        const ParamsToUpdate g{.table = param,
                               .count = 1,
                               .elements = {0, n},
                               .gradients = gradient.data,
                               .gradient_format = compute_};
        auto norm = [&] {
            compute_gradient_squares(g, {0, units}, loss, sums, stream_);
            update_gradient_state(sums, units, 1, 1, state, stream_);
        };
        norm();  // adamw below reads its result
        pass(OPTIMIZER, "gradient norm", count, size(gradient), norm);
        pass(OPTIMIZER, std::string("AdamW, ") + o.name + " moments", count, double(n) * each, [&] {
            adamw({10, 1e-4f}, o, g, w, /*rounding_key=*/0, state, stream_);
        });
    }
};

}  // namespace coat::dev
