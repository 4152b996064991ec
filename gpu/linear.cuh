// gpu/linear.cuh - a linear layer y = x w^T + bias on a GPU: its three GEMMs, and the operands that they
// read. For model.cu.
//
// x8, w8 and g8 are the input, the weight and the gradient of the output as a GEMM reads them: FP8 codes, or
// BF16 and FP32 in recipes without FP8. x8, and w8 unless it is cached, are made anew for each GEMM: backward
// needs them transposed, and keeping them takes memory. g8 serves two: the caller decides how long it lives.
#pragma once
#include "exchange.cuh"
#include "gemm.cuh"
#include "layers.cuh"

namespace coat::gpu {

// What the linear layers of a model share.
struct LinearContext {
    Device& device;
    State& state;
    Exchange& exchange;
    Gemms& gemms;
    const LinearFormats formats;
    const bool caches_weights;  // FP8 weights are made once a step; else when they are needed
    bool assigns = true;        // in the pass that runs, gradients are assigned, not added
};

class LinearLayer {
public:
    // param: number of the weight (out, in). A bias (out) is the parameter that follows it.
    LinearLayer(LinearContext& context, size_t param)
        : bucket(context.state.params[param].bucket), c_(context), param_(param),
          biased_(c_.state.params[param + 1].name == c_.state.params[param].name + ".bias"),
          out_(c_.state.params[param].rows), in_(c_.state.params[param].cols),
          cached_(c_.caches_weights ? arena().take(c_.formats.w.operand_bytes(out_, in_) +
                                                   c_.formats.w.operand_bytes(in_, out_))
                                    : nullptr),
          x_scale_(c_.state.operand_scales(LinearOperand::X) + bucket - 1),
          w_scale_(c_.state.weight_scale(param)),
          g_scale_(c_.state.operand_scales(LinearOperand::G) + bucket - 1) {}

    const int64_t bucket;  // of its gradients (0: embeddings); the stage in which its weight is gathered

    // Where the producers of the input and of the output's gradient must put their amaxes; null if nobody
    // needs them.
    AmaxAndScale* x_amax() const { return if_needed(x_scale_); }
    AmaxAndScale* g_amax() const { return if_needed(g_scale_); }
    void measure_x_amax(const Lazy& x) const { measure_amax(x, x_amax()); }

    // y = x w^T + bias
    void forward(const Lazy& x, const View& y) {
        const Arena::Scope scope(arena());
        const Operand x8 = input_operand(x, Gemm::Fprop), w8 = weight_operand(Gemm::Fprop);
        const void* const bias = biased_ ? c_.state.weight(param_ + 1).data : nullptr;
        c_.gemms.run(Gemm::Fprop, x8, w8, gemm_rows(y), false, bias, stream());
    }
    void dgrad(const Operand& g8, const View& dx) {
        const Arena::Scope scope(arena());
        c_.gemms.run(Gemm::Dgrad, g8, weight_operand(Gemm::Dgrad), dx, false, nullptr, stream());
    }
    void wgrad(const Operand& g8, const Lazy& x) {
        const Arena::Scope scope(arena());
        c_.gemms.run(Gemm::Wgrad, g8, input_operand(x, Gemm::Wgrad), c_.state.gradient(param_), !c_.assigns,
                     nullptr, stream());
    }

    // Memory for g8 (n, out), in the caller's scope. place: of the codes for dgrad, if they go elsewhere.
    Operand take_gradient(int64_t n, void* place = nullptr) {
        const Quant& q = c_.formats.g;
        void* const codes = place ? place : arena().take(q.operand_bytes(n, out_));
        void* const transposed = q.fp8() ? arena().take(q.operand_bytes(out_, n)) : nullptr;
        return operand_at(n, out_, q, codes, transposed, g_scale_);
    }
    // g8, for dgrad (which reduces over its columns) and wgrad (over its rows), in memory that was taken for
    // it or is taken now; and the gradient of the bias. The amax of g is taken here, into *amax, unless that
    // is null: then the kernel that made g has taken it, or nobody needs it. A bias sums the unrounded
    // gradient of an FP8 operand, in a pass that takes the amax too; it sums the stored values of any other.
    Operand gradient_operand(const Lazy& g, AmaxAndScale* amax, const Operand* taken = nullptr) {
        const bool fp8 = c_.formats.g.fp8(), in_place = !fp8 && stored_dense(g);
        const Operand g8 = in_place ? Operand{g.input} : taken ? *taken : take_gradient(g.rows);
        if (fp8 && biased_) bias_gradient(g, amax);
        else measure_amax(g, amax);
        if (!in_place) quantize(g, g8, c_.state.stats_of(Kind::Gradient), stream());
        if (!fp8 && biased_) bias_gradient(stored(g8.view), nullptr);
        return g8;
    }

    void make_cached_weight() {
        measure_weight_amax();
        quantize(stored(c_.state.weight(param_)), cached_operand(), c_.state.stats_of(Kind::Weight),
                 stream());
    }

private:
    LinearContext& c_;
    const size_t param_;
    const bool biased_;
    const int64_t out_, in_;
    uint8_t* const cached_;  // codes and scales of the weight, and behind them the transposed ones; or null
    AmaxAndScale *const x_scale_, *const w_scale_, *const g_scale_;

    Arena& arena() const { return c_.device.arena; }
    cudaStream_t stream() const { return c_.device.stream; }

    // --- Operands
    // A dense tensor that is stored in the wanted format is used in place.
    static bool stored_dense(const Lazy& x) { return x.op == LazyOp::Stored && !x.input.quant.fp8(); }
    // A per-tensor scale is in its AmaxAndScale; other scales lie right behind the codes.
    static Operand operand_at(int64_t rows, int64_t cols, const Quant& q, void* codes, void* transposed,
                              AmaxAndScale* scale) {
        if (q.granularity == PER_TENSOR) return {{codes, scale, rows, cols, q}, transposed};
        auto behind = [&](void* p) {
            return p ? static_cast<uint8_t*>(p) + q.code_bytes(rows, cols) : nullptr;
        };
        return {{codes, behind(codes), rows, cols, q}, transposed, behind(transposed), scale};
    }
    // x as an operand for a GEMM that reduces over its columns or (transposed) its rows.
    Operand make_operand(const Lazy& x, const Quant& q, bool transposed, AmaxAndScale* scale, Kind kind) {
        if (!q.fp8() && stored_dense(x)) return {x.input};
        const int64_t n = transposed ? x.rows : round_up(x.rows, 16);
        const int64_t bytes = transposed ? q.operand_bytes(x.cols, n) : q.operand_bytes(n, x.cols);
        void* const place = arena().take(bytes);
        const Operand made = operand_at(q.fp8() ? n : x.rows, x.cols, q, transposed ? nullptr : place,
                                        transposed ? place : nullptr, scale);
        quantize(x, made, c_.state.stats_of(kind), stream());
        return made;
    }
    // FP8 GEMMs want a multiple of 16 rows, which a prompt may not have: they read and write a few rows more,
    // whose values are undefined and never used.
    View gemm_rows(View v) const { return v.rows = c_.formats.x.fp8() ? round_up(v.rows, 16) : v.rows, v; }

    // The input: fprop reduces over its columns, wgrad over its rows.
    Operand input_operand(const Lazy& x, Gemm use) {
        const bool transposed = c_.formats.x.fp8() && use == Gemm::Wgrad;
        return make_operand(x, c_.formats.x, transposed, x_scale_, Kind::LinearInput);
    }
    // The weight: fprop reduces over its columns, dgrad over its rows. It may be in the cache; it may have
    // been gathered from other GPUs as codes; otherwise its codes are made here.
    Operand weight_operand(Gemm use) {
        const Quant& q = c_.formats.w;
        if (q.fp8() && cached_) return cached_operand();
        const bool transposed = use == Gemm::Dgrad;
        // Waits for the weight, if other GPUs send it, and asks for the one that this pass needs next.
        const int64_t before = bucket > 1 ? bucket - 1 : Exchange::NONE;
        c_.exchange.make_ready(bucket, transposed ? before : bucket + 1);
        const View whole = c_.state.weight(param_);
        if (whole.quant.fp8() && !transposed) return {whole};
        if (whole.quant.fp8()) {
            void* const codes = arena().take(q.operand_bytes(in_, out_));
            transpose_codes(whole, codes, stream());
            return operand_at(out_, in_, q, nullptr, codes, w_scale_);
        }
        measure_weight_amax();
        return make_operand(stored(whole), q, q.fp8() && transposed, w_scale_, Kind::Weight);
    }
    Operand cached_operand() const {
        const Quant& q = c_.formats.w;
        return operand_at(out_, in_, q, cached_, cached_ + q.operand_bytes(out_, in_), w_scale_);
    }
    void bias_gradient(const Lazy& g, AmaxAndScale* amax) {
        const Arena::Scope scope(arena());
        column_sums(g, c_.state.gradient(param_ + 1), arena().take<float>(COLUMN_PARTIALS * g.cols), amax,
                    stream());
    }

    // --- Amaxes
    // Per-tensor scaling just in time needs the amax before the codes. Delayed scaling needs it only while a
    // history is empty. The operands x, w and g are all per tensor, or none is.
    AmaxAndScale* if_needed(AmaxAndScale* scale) const {
        const bool just_in_time = !c_.state.delayed_scaling() || c_.state.some_without_history;
        return c_.formats.x.fp8() && c_.formats.x.granularity == PER_TENSOR && just_in_time ? scale : nullptr;
    }
    void measure_amax(const Lazy& x, AmaxAndScale* scale) const {
        if (scale) amax(x, scale, stream());
    }
    // adamw() leaves the amax of a weight in State::scale(). Delayed scaling reads another AmaxAndScale, so
    // it takes the amax here.
    void measure_weight_amax() const {
        if (c_.state.delayed_scaling()) measure_amax(stored(c_.state.weight(param_)), if_needed(w_scale_));
    }
};

}  // namespace coat::gpu
