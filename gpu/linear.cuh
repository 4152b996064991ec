// gpu/linear.cuh - a linear layer y = x w^T + bias on a GPU: its three GEMMs and their operands.
//
// x8, w8 and g8 are the input, the weight and the gradient of the output as a GEMM reads them: FP8 codes, or
// BF16 and FP32 in recipes without FP8. x8, and w8 unless it is cached, are made anew for each GEMM: backward
// needs them transposed, and keeping them takes memory. g8 serves two: the caller decides how long it lives.
#pragma once
#include "exchange.cuh"
#include "gemm.h"
#include "layers.cuh"

namespace coat::gpu {

// What the linear layers of a model share.
struct LinearContext {
    Device& device;
    State& state;
    Exchange& exchange;
    Gemms& gemms;
    const bool caches_weights;  // FP8 weights are made once a step; else when they are needed
    const LinearFormats formats = linear_formats(device.setup);
    // Whether this pass overwrites gradients: in a step's first micro-batch, and on several ranks in every
    // one, because they sum the gradients of each micro-batch right away. Else it adds to them.
    bool assigns = true;
};

class LinearLayer {
public:
    // param: number of the weight (out, in). A bias (out) is the parameter that follows it.
    LinearLayer(LinearContext& context, size_t param) : c_(context), param_(param) {}

    // Number of the bucket of its gradients, and of the stage that gathers its weight (0: embeddings).
    int64_t bucket() const { return weight().bucket; }

    // Where producers of the input and of the output's gradient put their amaxes; null if nobody needs them.
    AmaxAndScale* x_amax() const { return if_needed(x_scale_); }
    AmaxAndScale* g_amax() const { return if_needed(g_scale_); }
    void measure_x_amax(const Lazy& x) const { measure_amax(x, x_amax()); }

    // y = x w^T + bias
    void forward(const Lazy& x, const View& y) {
        const Arena::Scope scope(arena());
        const Operand x8 = make_operand(x, ReportKind::LinearInput, false), w8 = weight_operand(false);
        const void* const bias = biased_ ? c_.state.weight(param_ + 1).data : nullptr;
        c_.gemms.run(Gemm::Fprop, x8, w8, gemm_rows(y), false, bias, stream());
    }
    void dgrad(const Operand& g8, const View& dx) {
        const Arena::Scope scope(arena());
        c_.gemms.run(Gemm::Dgrad, g8, weight_operand(true), dx, false, nullptr, stream());
    }
    void wgrad(const Operand& g8, const Lazy& x) {
        const Arena::Scope scope(arena());
        c_.gemms.run(Gemm::Wgrad, g8, make_operand(x, ReportKind::LinearInput, true),
                     c_.state.gradient(param_), !c_.assigns, nullptr, stream());
    }

    // Memory for g8 (n, out), in the caller's scope. place: of the codes for dgrad, if they go elsewhere.
    Operand take_gradient(int64_t n, void* place = nullptr) {
        return take_operand(n, out_, c_.formats.g, true, c_.formats.g.fp8(), g_scale_, place);
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
        if (!in_place) quantize(g, g8, c_.state.stats_of(ReportKind::Gradient), stream());
        if (!fp8 && biased_) bias_gradient(stored(g8.view), nullptr);
        return g8;
    }

    void make_cached_weight() {
        measure_weight_amax();
        quantize(stored(c_.state.weight(param_)), cached_, c_.state.stats_of(ReportKind::Weight), stream());
    }

private:
    LinearContext& c_;
    const size_t param_;
    const bool biased_ = c_.state.params[param_ + 1].name == weight().name + ".bias";
    const int64_t out_ = weight().rows, in_ = weight().cols;
    AmaxAndScale* const x_scale_ = c_.state.operand_scales(LinearOperand::X) + bucket() - 1;
    AmaxAndScale* const w_scale_ = c_.state.weight_scale(param_);
    AmaxAndScale* const g_scale_ = c_.state.operand_scales(LinearOperand::G) + bucket() - 1;
    const Operand cached_ =
        c_.caches_weights ? take_operand(out_, in_, c_.formats.w, true, true, w_scale_) : Operand{};

    const Param& weight() const { return c_.state.params[param_]; }
    Arena& arena() const { return c_.device.arena; }
    cudaStream_t stream() const { return c_.device.stream; }

    // --- Operands
    // A dense tensor that is stored in the wanted format is used in place.
    static bool stored_dense(const Lazy& x) { return x.op == LazyOp::Stored && !x.input.quant.fp8(); }
    // Memory for an operand's codes, at `place` if that is not null, and for its transposed codes, or for one
    // of these. A per-tensor scale is in its AmaxAndScale; other scales lie right behind the codes.
    Operand take_operand(int64_t rows, int64_t cols, const Quant& q, bool plain, bool transposed,
                         AmaxAndScale* scale, void* place = nullptr) const {
        void* const codes = place || !plain ? place : arena().take(q.operand_bytes(rows, cols));
        void* const others = transposed ? arena().take(q.operand_bytes(cols, rows)) : nullptr;
        if (q.granularity == PER_TENSOR)
            return {.view = {codes, scale, rows, cols, q},
                    .transposed = others,
                    .delayed = c_.state.delayed_scaling()};
        auto behind = [&](void* p) {
            return p ? static_cast<uint8_t*>(p) + q.code_bytes(rows, cols) : nullptr;
        };
        return {{codes, behind(codes), rows, cols, q}, others, behind(others), scale};
    }
    // The input or the weight for a GEMM that reduces over its columns, or (transposed) its rows.
    Operand make_operand(const Lazy& x, ReportKind kind, bool over_rows) {
        const bool input = kind == ReportKind::LinearInput;
        const Quant& q = input ? c_.formats.x : c_.formats.w;
        if (!q.fp8() && stored_dense(x)) return {x.input};
        const bool transposed = q.fp8() && over_rows;
        const int64_t n = q.fp8() ? round_up(x.rows, 16) : x.rows;
        const Operand made = take_operand(n, x.cols, q, !transposed, transposed, input ? x_scale_ : w_scale_);
        quantize(x, made, c_.state.stats_of(kind), stream());
        return made;
    }
    // FP8 GEMMs want a multiple of 16 rows. What they read and write beyond those of a prompt is never used.
    View gemm_rows(View v) const { return v.rows = c_.formats.x.fp8() ? round_up(v.rows, 16) : v.rows, v; }

    // The weight: fprop reduces over its columns, dgrad over its rows. It may be in the cache; it may have
    // been gathered from other GPUs as codes; otherwise its codes are made here.
    Operand weight_operand(bool over_rows) {
        const Quant& q = c_.formats.w;
        if (q.fp8() && c_.caches_weights) return cached_;
        // Waits for the weight, if other GPUs send it, and asks for the one that this pass needs next.
        const int64_t stage = bucket(), before = stage > 1 ? stage - 1 : Exchange::NONE;
        c_.exchange.make_ready(stage, over_rows ? before : stage + 1);
        const View whole = c_.state.weight(param_);
        if (whole.quant.fp8() && !over_rows) return {whole};
        if (whole.quant.fp8()) {
            const Operand made = take_operand(out_, in_, q, false, true, w_scale_);
            transpose_codes(whole, made.transposed, stream());
            return made;
        }
        measure_weight_amax();
        return make_operand(stored(whole), ReportKind::Weight, over_rows);
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
    // adamw() leaves a weight's amax in State::scale(). Delayed scaling reads another one, and takes it here.
    void measure_weight_amax() const {
        if (c_.state.delayed_scaling()) measure_amax(stored(c_.state.weight(param_)), if_needed(w_scale_));
    }
};

}  // namespace coat::gpu
