// plan.cpp - the tables of plan.h, each computed from the tables of coat.h: a new recipe or model is a new row there.
#include "plan.h"

#include <algorithm>

namespace coat {

// ---------------------------------------------------------------------------------------------------------------------
// The learning rate. Cosine and linear end at a tenth of the peak, as the paper's runs do (alpha_f = 0.1).

const std::vector<Schedule>& schedules() {
    constexpr double FLOOR = 0.1;
    static const std::vector<Schedule> table = {
        {"cosine", [](double p) { return FLOOR + (1 - FLOOR) * 0.5 * (1 + std::cos(p * 3.14159265358979323846)); },
         "down half a cosine to a tenth"},
        {"linear", [](double p) { return 1 - (1 - FLOOR) * p; }, "down a line to a tenth"},
        {"constant", [](double) { return 1.0; }, "stays"},
    };
    return table;
}

float learning_rate(const Schedule& schedule, double peak, int64_t warmup, int64_t steps, int64_t step) {
    if (step < warmup) return static_cast<float>(peak * static_cast<double>(step + 1) / static_cast<double>(warmup));
    const double progress = static_cast<double>(step - warmup) / static_cast<double>(std::max<int64_t>(1, steps - warmup));
    return static_cast<float>(peak * schedule.factor(std::min(1.0, progress)));
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory modes, and what cannot work

const std::vector<MemoryMode>& memory_modes() {
    static const std::vector<MemoryMode> table = {
        {"attention", true,
         {{"stream", "q, k, v and the output are kept for backward in the recipe's compute dtype"},
          {"groups", "in FP8 groups of 16, which the forward pass reads too"}},
         [](const Setup& s) { return !s.recipe.attention.fp8(); },
         [](Setup& s, bool first) { s.recipe.attention = first ? Quant{s.recipe.compute} : Q_GROUP; }},
        {"master", true,
         {{"exact", "16 bits beside each BF16 weight make its FP32 master"},
          {"none", "BF16 weights alone, which the update rounds stochastically"}},
         [](const Setup& s) { return s.master; },
         [](Setup& s, bool first) { s.master = first; }},
        {"gradients", true,
         {{"kept", "all of them, until the update after the backward pass"},
          {"none", "backward updates a linear layer as soon as it has its gradient: one micro-batch a step, clipped by what is known of the norm by then"}},
         [](const Setup& s) { return s.keep_gradients; },
         [](Setup& s, bool first) { s.keep_gradients = first; }},
        {"recompute", false,
         {{"on", "outputs of norms and activation functions are computed again in the backward pass"},
          {"off", "they are kept, on a GPU: the same bits in less time and more memory (a CPU always computes them again)"}},
         [](const Setup& s) { return s.recompute; },
         [](Setup& s, bool first) { s.recompute = first; }},
    };
    return table;
}

namespace {

// What one product of a linear layer may read: the scale modes of Hopper's FP8 products in cuBLASLt. Squares go beside vectors alone.
constexpr struct { Granularity a, b; } MULTIPLIED[] = {
    {PER_TENSOR, PER_TENSOR}, {PER_ROW, PER_ROW}, {PER_1x128, PER_1x128}, {PER_1x128, PER_128x128}, {PER_128x128, PER_1x128}};

void validate_product(const Recipe& r, const std::string& name, const Quant& a, const Quant& b, bool fast) {
    const std::string product = "Recipe " + std::string(r.name) + " cannot have " + name + " multiply " + a.text() + " by " + b.text() + ": ";
    if (a.fp8() != b.fp8()) throw Error(product + "both operands must be FP8, or none.");
    if (!a.fp8()) return;
    if (a.format == Format::E5M2 && b.format == Format::E5M2)
        throw Error(product + "a GPU has no product of two E5M2 matrices; make one of them E4M3.");
    bool known = a.scale == Format::F32 && b.scale == Format::F32;
    known = known && std::any_of(std::begin(MULTIPLIED), std::end(MULTIPLIED),
                                 [&](const auto& m) { return m.a == a.granularity && m.b == b.granularity; });
    if (!known)
        throw Error(product + "Hopper's products know FP32 scales for tensor by tensor, row by row, 1x128 by 1x128 and 1x128 by 128x128; "
                              "choose one of these.");
    if (fast && (a.granularity.cols == PER_1x128.cols || b.granularity.cols == PER_1x128.cols))
        throw Error(product + "groups of 128 go with exact accumulation alone; use --accumulation exact.");
    if (r.scaling == Scaling::Delayed && !(a.granularity == PER_TENSOR))
        throw Error(product + "delayed scaling knows one scale a tensor; make them per tensor, or scale just in time.");
}

void validate(const Recipe& r) {
    validate_product(r, "fprop", r.x, r.w, r.fast_accumulation[0]);
    validate_product(r, "dgrad", r.g, r.w, r.fast_accumulation[1]);
    validate_product(r, "wgrad", r.g, r.x, r.fast_accumulation[2]);
    if (r.scaling == Scaling::Delayed && (r.history < 1 || r.margin < 0 || r.margin > 64))
        throw Error("Recipe " + std::string(r.name) + " cannot scale by its history; give it 1 step or more, and a margin from 0 to 64.");
}

}  // namespace

void validate(const Setup& s) {
    validate(s.config);
    validate(s.recipe);
    if (s.T > s.config.max_T)
        throw Error("--seq " + std::to_string(s.T) + " is longer than the " + std::to_string(s.config.max_T) + " positions of " +
                    s.config.name + "; use at most --seq " + std::to_string(s.config.max_T) + ".");
    // A GPU has 65,535 blocks in the second and third direction of a grid: of sequences, and of tiles of 128 tokens.
    if (s.B > MAX_SEQUENCES || s.B > MAX_TOKENS / s.T)
        throw Error("--batch " + std::to_string(s.B) + " with --seq " + std::to_string(s.T) + " is more than " + std::to_string(MAX_SEQUENCES) +
                    " sequences or " + std::to_string(MAX_TOKENS) + " tokens; use a smaller --batch and more --accumulate.");
    const std::string recipe = s.recipe.name;
    const std::string in_fp32 = " goes with BF16, but --recipe " + recipe + " is all FP32; leave it out, or choose --recipe coat.";
    if (s.recipe.compute == Format::F32 && s.recipe.attention.fp8()) throw Error("--attention groups" + in_fp32);
    if (s.recipe.compute == Format::F32 && !s.master) throw Error("--master none" + in_fp32);
    if (!s.keep_gradients && s.accumulate > 1)
        throw Error("--gradients none spends each gradient at once, so that --accumulate " + std::to_string(s.accumulate) +
                    " has nothing to add up in; use --accumulate 1 with a larger --batch, or --gradients kept.");
}

// ---------------------------------------------------------------------------------------------------------------------
// The precision flow, in the order of a step (paper section 5)

std::vector<PrecisionRow> precision_plan(const Setup& s) {
    const ModelConfig& c = s.config;
    const Recipe& r = s.recipe;
    const std::string stream = info(r.compute).name, fp32 = info(Format::F32).name;
    const std::string nonlinear = r.nonlinear.text(), pair = r.nonlinear.fp8() ? stream + " and " + nonlinear : stream;
    const std::string attention = r.attention.text();
    const std::string layers = "each of " + std::to_string(c.L) + " layers", none = "-";

    std::vector<PrecisionRow> table;
    auto row = [&](const std::string& part, const std::string& name, const std::string& input, const std::string& weights,
                   const std::string& output, const std::string& saved) {
        table.push_back({part, name, input, weights, output, saved});
    };
    const LinearFormats q = linear_formats(s);
    auto named = [&](const std::string& name) { return q.fallback ? name + " (falls back)" : name; };
    auto linear = [&](const std::string& name, const std::string& output) {
        row(layers, named(name), q.x.text(), q.w.text(), output, none);
    };
    auto recomputed = [&](const std::string& name, const std::string& weights) {  // the operand of a linear layer
        const std::string x = q.x.text();
        row(layers, name, nonlinear, weights, x, nonlinear + " input" + (s.recompute ? "" : "; " + x + " output"));
    };

    row("", "embedding", "tokens", stream, pair, none);
    recomputed("norm 1", stream);
    linear("q, k, v projection", c.arch.rope ? stream : attention);
    if (c.arch.rope) row(layers, "rotary positions", stream, none, attention, none);
    row(layers, "attention", attention, none, attention, attention + " q, k, v, output; fp32 log-sum-exp");
    linear("attention output projection", stream);
    row(layers, "residual add", stream, none, pair, none);
    recomputed("norm 2", stream);
    linear(c.arch.gated ? "gate and up projection" : "up projection", stream);
    recomputed(c.arch.gated ? "SiLU(gate) x up" : "GELU", none);
    linear("down projection", stream);
    row(layers, "residual add", stream, none, pair, none);
    row("", "final norm", stream, stream, stream, stream + " input");
    row("", "head", stream, stream, stream, none);
    row("", "cross-entropy", stream, none, fp32, none);

    // Every linear layer has the same pair of GEMMs in backward.
    row("backward", named("linear layers, dgrad"), q.g.text(), q.w.text(), stream, none);
    row("backward", named("linear layers, wgrad"), q.g.text() + " x " + q.x.text(), none, std::string(info(gradient_format(s)).name) + " gradient", none);
    row("backward", "norms, activations", nonlinear + ", " + stream, stream, stream, none);
    row("backward", "attention", r.attention.fp8() ? attention + ", " + stream : stream, none, stream, none);
    row("backward", "head", stream, stream, stream, none);
    const bool halves = s.master && r.compute != Format::F32;
    const std::string held = halves ? stream + " and 16 bits: fp32" : stream;
    row("update", "AdamW, weights", held, none, s.master ? held : held + " stochastically", none);
    for (const auto& [name, format] : {std::pair{"AdamW, first moment", s.optimizer.m}, std::pair{"AdamW, second moment", s.optimizer.v}})
        row("update", name, info(format).name, none, info(format).name,
            !is_scaled(format) ? none : std::string(s.optimizer.expands(format) ? "fp32 max, k" : "fp32 max") + " each " +
                                        (s.optimizer.granularity == PER_TENSOR ? "tensor" : std::to_string(MOMENT_GROUP)));
    return table;
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory

namespace {

// Elements of the flat order that have a gradient at one time. A tied embedding's is added to from the head on, all through backward.
int64_t gradient_elements(const Setup& s) {
    int64_t all = 0, largest = 0;
    const std::vector<BucketRange> buckets = bucket_ranges(parameters(s.config));
    for (size_t u = 0; u < buckets.size(); u++) {
        all += buckets[u].elements;
        if (u > 0 || !s.config.tied) largest = std::max(largest, buckets[u].elements);
    }
    return s.keep_gradients ? all : largest + (s.config.tied ? buckets[0].elements : 0);
}

int64_t scaling_bytes(const Setup& s) {
    int64_t bytes = 0;
    for (const StateTensor& t : scaling_tensors(s.config, s.recipe)) bytes += t.total_bytes();
    return bytes;
}

}  // namespace

// What only a run with a mode has comes last, so that a row has the same place in every plan.
std::vector<MemoryRow> memory_plan(const Setup& s) {
    const ModelConfig& c = s.config;
    const int64_t N = s.B * s.T, live = parameter_count(c);
    const Format stream = s.recipe.compute;

    // Flat buffers in the order of parameters(), each parameter padded to whole groups. A weight that is held in FP32 is
    // its own master; a BF16 one has a 16-bit remainder beside it.
    int64_t elements = 0, moment[2] = {0, 0}, moment_scales = 0;
    for (const Param& p : parameters(c)) {
        elements += p.padded_size();
        int which = 0;
        for (Format wanted : {s.optimizer.m, s.optimizer.v}) {
            const Format f = p.moment(wanted);
            moment[which++] += p.padded_size() * info(f).bytes;
            moment_scales += s.optimizer.scales(f, p.size()) * info(Format::F32).bytes * (s.optimizer.expands(f) ? 2 : 1);
        }
    }
    auto format = [](Format f) { return std::string(" (") + info(f).name + ")"; };
    std::vector<MemoryRow> plan = {
        {Category::Weights, "weights" + format(stream), elements * info(stream).bytes, "parameter", live},
        {Category::Weights, "rest of the FP32 master", stream == Format::F32 || !s.master ? 0 : elements * 2, "parameter", live},
        {Category::Gradients, (s.keep_gradients ? "gradients" : "gradients of the largest bucket") + format(gradient_format(s)),
         gradient_elements(s) * info(gradient_format(s)).bytes, "parameter", live},
        {Category::Optimizer, "first moments" + format(s.optimizer.m), moment[0], "parameter", live},
        {Category::Optimizer, "second moments" + format(s.optimizer.v), moment[1], "parameter", live},
        {Category::Optimizer, std::string(s.optimizer.expand ? "max and k" : "max") + " of each " +
                                  (s.optimizer.granularity == PER_TENSOR ? "tensor" : "group"), moment_scales, "parameter", live},
        {Category::Activations, "final norm input" + format(stream), N * c.C * info(stream).bytes, "token", N},
    };
    for (const SavedTensor& t : saved_per_layer(s))
        plan.push_back({Category::Activations, std::string(t.name) + " (" + t.quant.text() + ")", t.bytes(N) * c.L, "token, layer", N * c.L});
    if (const int64_t scaling = scaling_bytes(s)) plan.push_back({Category::Weights, "amaxes and delayed scales", scaling, "parameter", live});
    return plan;
}

int64_t total_bytes(const std::vector<MemoryRow>& plan) {
    int64_t bytes = 0;
    for (const MemoryRow& row : plan) bytes += row.bytes;
    return bytes;
}

int64_t total_bytes(const std::vector<MemoryRow>& plan, Category category) {
    int64_t bytes = 0;
    for (const MemoryRow& row : plan) bytes += row.category == category ? row.bytes : 0;
    return bytes;
}

double optimizer_bytes_per_parameter(const Setup& s) {
    return static_cast<double>(total_bytes(memory_plan(s), Category::Optimizer)) / static_cast<double>(parameter_count(s.config));
}

double saved_bytes_per_token_and_layer(const Setup& s) {
    int64_t bytes = 0;
    for (const SavedTensor& t : saved_per_layer(s)) bytes += t.bytes(s.B * s.T);
    return static_cast<double>(bytes) / static_cast<double>(s.B * s.T);
}

Setup bf16_baseline(Setup s) {
    s.recipe = find_row(recipes(), "bf16", "--recipe");
    s.optimizer = find_row(optimizers(), "fp32", "--optimizer");
    for (const MemoryMode& mode : memory_modes()) mode.choose(s, true);
    return s;
}

// ---------------------------------------------------------------------------------------------------------------------
// One GPU

namespace {

enum Phase : uint32_t {  // of a step; backward has one for each of a linear layer's two GEMMs
    FORWARD_ATTENTION = 1 << 0, FORWARD_OUT = 1 << 1, FORWARD_UP = 1 << 2, FORWARD_DOWN = 1 << 3, HEAD = 1 << 4,
    DOWN_WGRAD = 1 << 5, DOWN_DGRAD = 1 << 6, ACTIVATION_BACKWARD = 1 << 7, UP_DGRAD = 1 << 8, UP_WGRAD = 1 << 9,
    OUT_WGRAD = 1 << 10, OUT_DGRAD = 1 << 11, ATTENTION_BACKWARD = 1 << 12, ROPE_BACKWARD = 1 << 13, QKV_DGRAD = 1 << 14,
    QKV_WGRAD = 1 << 15, EMBEDDING_BACKWARD = 1 << 16
};
constexpr uint32_t ALWAYS = ~0u;
constexpr uint32_t FORWARD = FORWARD_ATTENTION | FORWARD_OUT | FORWARD_UP | FORWARD_DOWN;
constexpr uint32_t DGRADS = DOWN_DGRAD | UP_DGRAD | OUT_DGRAD | QKV_DGRAD;
constexpr uint32_t UP_BACKWARD = ACTIVATION_BACKWARD | UP_DGRAD | UP_WGRAD, QKV_BACKWARD = ROPE_BACKWARD | QKV_DGRAD | QKV_WGRAD;

struct WorkRow {
    Work work;
    uint32_t phases;
    int64_t bytes;
};

// What attention's backward needs on any GPU (attention.cu): FP32 sums of dq and statistics by tiles of queries, and a counter
// (attention_sm90.cu, Layout), where the tensor cores do it, a number for each query and head elsewhere.
int64_t attention_bytes(const ModelConfig& c, Format stream, int64_t B, int64_t T) {
    const int64_t simple = round_up(B * c.NH * T * 4, GPU_ALIGNMENT), tile = c.HS() == 64 ? 128 : 64, tiles = B * c.NH * ceil_div(T, tile);
    const bool tensor_cores = stream == Format::BF16 && (c.HS() == 64 || c.HS() == 128);
    return tensor_cores ? std::max(simple, round_up((tiles * (2 * tile + tile * c.HS() + 1) + 1) * 4, GPU_ALIGNMENT)) : simple;
}

std::vector<WorkRow> work_rows(const Setup& s, const GpuFacts& facts) {
    const ModelConfig& c = s.config;
    const Recipe& r = s.recipe;
    const int64_t N = gpu_tokens(s);
    const int64_t V = c.padded_V(), C = c.C, Q = c.q_cols(), QKV = c.qkv_cols(), U = c.gate_up_cols(), F = c.F;
    const int64_t stream = info(r.compute).bytes, parameter_rows = static_cast<int64_t>(parameters(c).size());
    const LinearFormats q = linear_formats(s);
    const bool fp8 = q.x.fp8(), per_tensor = r.x.granularity == PER_TENSOR, groups = r.nonlinear.fp8(), attention_groups = r.attention.fp8();
    const bool made_from_o = fp8 || attention_groups;  // else attention's output is the operand as it lies

    // Gradients of what the activation function and attention read take the place of what was saved, where they fit.
    const int64_t up_bytes = r.nonlinear.bytes(N, U);
    const bool du_in_place = info(q.g.format).bytes == info(r.nonlinear.format).bytes && per_tensor, dqkv_in_place = N * QKV * stream <= up_bytes;
    const uint32_t codes_phases = (fp8 ? DOWN_WGRAD | DOWN_DGRAD | OUT_WGRAD | OUT_DGRAD : 0) | (fp8 || c.arch.rope ? QKV_BACKWARD : 0) |
                                  (du_in_place ? 0 : UP_BACKWARD);
    auto either_way = [](const Quant& held, int64_t rows, int64_t cols) {
        return std::max(held.operand_bytes(rows, cols), held.operand_bytes(cols, rows));
    };
    auto operand = [&](int64_t cols) { return either_way(q.x, N, cols); };
    auto gradient = [&](int64_t cols) { return either_way(q.g, N, cols); };
    int64_t weight = 0, weights_both_ways = 0;  // a weight in the compute dtype is used where it lies
    for (const Param& p : parameters(c)) {
        if (!p.role.linear || !q.w.fp8()) continue;
        weight = std::max(weight, either_way(q.w, p.rows, p.cols));
        weights_both_ways += q.w.operand_bytes(p.rows, p.cols) + q.w.operand_bytes(p.cols, p.rows);
    }

    return {
        {Work::GemmScratch, ALWAYS, 32 << 20},
        {Work::NormPartials, ALWAYS, 8 * facts.multiprocessors * C * 4},
        {Work::Tokens, ALWAYS, N * 4},
        {Work::Targets, ALWAYS, N * 4},
        {Work::EmbeddingOrder, ALWAYS, s.B * s.T * 4},
        {Work::EmbeddingChunks, ALWAYS, s.B * s.T * 16},
        {Work::Losses, ALWAYS, N * 4},
        {Work::NormStatistics, ALWAYS, N * 8},
        {Work::RopeTable, ALWAYS, c.arch.rope ? s.T * c.HS() / 2 * 8 : 0},
        {Work::Scales, ALWAYS, (parameter_rows + 12 * c.L) * 16},
        {Work::Segments, ALWAYS, parameter_rows * 128},
        {Work::Results, ALWAYS, 16 << 10},
        {Work::CachedWeights, ALWAYS, facts.cache_fp8_weights ? weights_both_ways : 0},
        {Work::Residual, FORWARD, groups ? N * C * stream : 0},
        // Without recomputation prompts and evaluation still need them.
        {Work::Operand, FORWARD_ATTENTION | FORWARD_OUT | FORWARD_UP | QKV_WGRAD | OUT_WGRAD | UP_WGRAD, operand(std::max(C, made_from_o ? Q : 0))},
        {Work::Hidden, FORWARD_DOWN | DOWN_WGRAD, operand(F)},
        {Work::Weight, FORWARD | DGRADS, facts.cache_fp8_weights ? 0 : weight},
        {Work::Qkv, FORWARD_ATTENTION | ATTENTION_BACKWARD, attention_groups ? N * QKV * stream : 0},
        {Work::AttentionOutput, FORWARD_ATTENTION | ATTENTION_BACKWARD, attention_groups ? N * Q * stream : 0},
        {Work::Up, FORWARD_UP, groups ? (per_tensor ? std::min(N, UP_TOKENS) : N) * U * stream : 0},
        {Work::Branch, FORWARD_OUT | FORWARD_DOWN | HEAD | UP_DGRAD | OUT_DGRAD | ATTENTION_BACKWARD | QKV_DGRAD, N * std::max(C, Q) * stream},
        {Work::FinalNorm, HEAD, std::min(N, HEAD_TOKENS) * C * stream},
        {Work::Logits, HEAD, std::min(N, HEAD_TOKENS) * V * stream},
        {Work::HeadGradient, HEAD, head_sum_apart(gradient_format(s), N) ? V * C * 4 : 0},
        {Work::Gradient, codes_phases, codes_phases ? gradient(std::max({fp8 ? C : 0, QKV, du_in_place ? 0 : U})) : 0},
        {Work::GradientTransposed, DOWN_WGRAD | UP_BACKWARD | OUT_WGRAD | QKV_BACKWARD, fp8 ? gradient(std::max({C, U, QKV})) : 0},
        {Work::HiddenGradient, DOWN_DGRAD | ACTIVATION_BACKWARD, N * F * stream},
        {Work::QkvGradient, ATTENTION_BACKWARD | ROPE_BACKWARD | QKV_DGRAD | QKV_WGRAD,
         dqkv_in_place ? 0 : N * QKV * stream},
        {Work::Attention, ATTENTION_BACKWARD, attention_bytes(c, r.compute, s.B, s.T)},
        {Work::ColumnPartials, DOWN_WGRAD | ACTIVATION_BACKWARD | OUT_WGRAD | ROPE_BACKWARD,
         c.arch.bias ? 128 * std::max({U, QKV, C}) * 4 : 0},
        {Work::EmbeddingPartials, EMBEDDING_BACKWARD, s.B * s.T * C * 4},
    };
}

// Each buffer, large ones first, at the lowest place where nobody is who shares a phase with it. Returns the end of the highest.
int64_t pack(std::vector<WorkRow> rows, Place* places) {
    std::stable_sort(rows.begin(), rows.end(), [](const WorkRow& a, const WorkRow& b) { return a.bytes > b.bytes; });
    int64_t end = 0;
    for (size_t i = 0; i < rows.size(); i++) {
        Place& here = places[static_cast<int>(rows[i].work)];
        here = {0, round_up(rows[i].bytes, GPU_ALIGNMENT)};
        for (size_t j = 0; j < i;) {
            const Place& there = places[static_cast<int>(rows[j].work)];
            const bool overlap = here.offset < there.offset + there.bytes && there.offset < here.offset + here.bytes;
            const bool meet = overlap && (rows[i].phases & rows[j].phases) != 0;
            if (meet) here.offset = there.offset + there.bytes, j = 0;
            else j++;
        }
        end = std::max(end, here.offset + here.bytes);
    }
    return end;
}

// How many layers' saved activations are still wanted when the gradient of this parameter is first written.
int64_t layers_alive(const ModelConfig& c, const Param& p) {
    const std::string prefix = "layers.";
    if (p.name.compare(0, prefix.size(), prefix) == 0) return std::stoll(p.name.substr(prefix.size())) + 1;
    const bool first = p.name == "positions" || (p.name == "embedding" && !c.tied);  // written last
    return first ? 0 : c.L;
}

int64_t padded_elements(const ModelConfig& c) {
    const Param last = parameters(c).back();
    return last.offset + last.padded_size();
}

// The lowest place of all gradients, from the first byte of the saved activations.
int64_t gradients_after(const Setup& s, int64_t layer_bytes) {
    if (s.accumulate > 1) return s.config.L * layer_bytes;
    int64_t place = 0;
    for (const Param& p : parameters(s.config))
        place = std::max(place, layers_alive(s.config, p) * layer_bytes - p.offset * info(gradient_format(s)).bytes);
    return round_up(place, GPU_ALIGNMENT);
}

class Allocation {
public:
    Place take(int64_t bytes) {
        const Place place{end_, bytes};
        end_ += round_up(bytes, GPU_ALIGNMENT);
        return place;
    }
    int64_t end() const { return end_; }

private:
    int64_t end_ = 0;
};

// All buckets' gradients in one place, one after the other; but a tied embedding's are added to from the head on, all through backward.
void place_bucket_gradients(const Setup& s, Allocation& memory, GpuLayout& layout) {
    const int64_t each = info(gradient_format(s)).bytes;
    const std::vector<Param> params = parameters(s.config);
    const std::vector<BucketRange> buckets = bucket_ranges(params);
    int64_t largest = 0;
    for (size_t u = s.config.tied ? 1 : 0; u < buckets.size(); u++) largest = std::max(largest, buckets[u].elements);
    const int64_t shared = memory.take(largest * each).offset;
    const int64_t embedding = s.config.tied ? memory.take(buckets[0].elements * each).offset : shared;
    for (const Param& p : params) layout.gradients.push_back((p.bucket ? shared : embedding) + (p.offset - buckets[p.bucket].offset) * each);
}

void place_moments(const Setup& s, Allocation& memory, GpuLayout& layout) {
    const std::vector<Param> params = parameters(s.config);
    const int64_t first = memory.end();
    for (const auto& [places, wanted] : {std::pair{&layout.m, s.optimizer.m}, std::pair{&layout.v, s.optimizer.v}})
        for (const Param& p : params) places->push_back({memory.take(p.padded_size() * info(p.moment(wanted)).bytes).offset, 0, 0});
    layout.moments = {first, memory.end() - first};
    // Of a whole tensor's maximum there are two: until all is encoded with the new one, the old one decodes.
    const int64_t copies = s.optimizer.granularity == PER_TENSOR ? 2 : 1;
    for (const auto& [places, wanted] : {std::pair{&layout.m, s.optimizer.m}, std::pair{&layout.v, s.optimizer.v}})
        for (size_t i = 0; i < params.size(); i++) {
            const Format format = params[i].moment(wanted);
            const int64_t scales = s.optimizer.scales(format, params[i].size());
            if (scales) (*places)[i].max = memory.take(scales * 4 * copies).offset;
            if (s.optimizer.expands(format)) (*places)[i].k = memory.take(scales * 4).offset;
        }
    layout.scales = {layout.moments.offset + layout.moments.bytes, memory.end() - layout.moments.offset - layout.moments.bytes};
}

}  // namespace

std::vector<BucketRange> bucket_ranges(const std::vector<Param>& params) {
    std::vector<BucketRange> table;
    for (size_t i = 0; i < params.size(); i++) {
        if (i == 0 || params[i].bucket != params[i - 1].bucket) table.push_back({i, i, params[i].offset, 0});
        table.back().last = i + 1;
        table.back().elements += params[i].padded_size();
    }
    return table;
}

int64_t gpu_tokens(const Setup& s) { return round_up(s.B * s.T, 16); }

GpuLayout gpu_layout(const Setup& s, const GpuFacts& facts) {
    const int64_t stream = info(s.recipe.compute).bytes, elements = padded_elements(s.config);
    GpuLayout layout{};
    Allocation memory;
    layout.weights = memory.take(elements * stream);
    layout.remainder = memory.take(s.recipe.compute == Format::F32 || !s.master ? 0 : elements * 2);
    place_moments(s, memory, layout);
    layout.delayed = memory.take(s.recipe.scaling == Scaling::Delayed ? OPERANDS * 4 * s.config.L * s.recipe.history * 4 : 0);
    const int64_t N = layout.tokens = gpu_tokens(s);
    for (const SavedTensor& t : saved_per_layer(s)) {
        layout.saved_codes.push_back({layout.layer_bytes, t.bytes(N)});
        layout.layer_bytes += round_up(t.bytes(N), GPU_ALIGNMENT);
    }
    const int64_t saved = s.config.L * layout.layer_bytes;
    if (s.keep_gradients) {
        const int64_t after = gradients_after(s, layout.layer_bytes), each = info(gradient_format(s)).bytes, gradients = elements * each;
        const Place both = memory.take(std::max(saved, after + gradients));
        layout.saved = {both.offset, saved};
        for (const Param& p : parameters(s.config)) layout.gradients.push_back(both.offset + after + p.offset * each);
        layout.shared = saved + gradients - both.bytes;
    } else {
        layout.saved = memory.take(saved);
        place_bucket_gradients(s, memory, layout);
    }
    layout.final_norm_input = memory.take(N * s.config.C * stream);
    const int64_t work = memory.end(), work_bytes = pack(work_rows(s, facts), layout.work);
    for (Place& place : layout.work) place.offset += work;
    layout.total = memory.take(work_bytes).offset + work_bytes;
    return layout;
}

std::vector<MemoryRow> gpu_memory_plan(const Setup& s, const GpuFacts& facts) {
    std::vector<MemoryRow> plan = memory_plan(s);
    const GpuLayout layout = gpu_layout(s, facts);
    const int64_t tokens = s.B * s.T;
    Place unused[static_cast<int>(Work::Count)];
    int64_t always = 0, kept = 0;
    for (const WorkRow& row : work_rows(s, facts))
        if (row.phases == ALWAYS) (row.work == Work::CachedWeights ? kept : always) += row.bytes;
    const int64_t shifting = pack(work_rows(s, facts), unused) - always - kept;
    if (kept) plan.push_back({Category::Workspace, "FP8 weights and transposes, kept", kept, "parameter", parameter_count(s.config)});
    plan.push_back({Category::Workspace, "operands, gradients of one layer, logits", shifting, "token", tokens});
    plan.push_back({Category::Workspace, "GEMM scratch, scales, tokens", always, "token", tokens});
    if (layout.shared) plan.push_back({Category::Workspace, "gradients where activations were", -layout.shared, "parameter", parameter_count(s.config)});
    const int64_t rest = layout.total - total_bytes(plan);  // alignment; room for a prompt that is longer than the batch
    plan.push_back({Category::Workspace, "alignment", rest, "token", tokens});
    plan.push_back({Category::Workspace, "CUDA context and loaded kernels, about", GPU_CONTEXT, "token", tokens});
    return plan;
}

// ---------------------------------------------------------------------------------------------------------------------
// Why a GPU cannot

namespace {

std::string version_text(int number, int major) { return std::to_string(number / major) + "." + std::to_string(number % major); }

}  // namespace

Recipe recipe_on_gpu(const Recipe& r, bool fp8_gemm) {
    Recipe changed = r;
    if (!fp8_gemm && r.x.fp8()) changed.x = changed.w = changed.g = Quant{r.compute};
    return changed;
}

std::string why_unsupported(const OptimizerFormat& o) {
    const bool whole = o.granularity == PER_TENSOR;
    for (auto [flag, format] : {std::pair{"--m-format ", o.m}, std::pair{"--v-format ", o.v}}) {
        if (format == Format::F16 && !whole)
            return std::string(flag) + info(format).name +
                   " in groups of 128 is told by the CPU reference alone; use --optimizer fp8lm, or --device cpu.";
        if (!whole && is_fp8(format) && !o.expand && !o.keep_positive)
            return "--optimizer " + std::string(o.name) +
                   " lets least numbers in groups of 128 become zero, which the CPU reference alone does; use --device cpu.";
        if (whole && (o.expands(format) || (is_fp8(format) && o.keep_positive)))
            return "--optimizer " + std::string(o.name) +
                   " expands whole tensors or keeps their least numbers, which the CPU reference alone does; use --device cpu.";
    }
    return "";
}

std::string why_unsupported(const Recipe& r, int capability) {
    for (const Quant& q : {r.x, r.w, r.g})
        if (q.fp8() && !(q.granularity == PER_TENSOR) && capability != HOPPER_CAPABILITY)
            return "--recipe " + std::string(r.name) + " multiplies " + q.text() +
                   ", which GPUs of compute capability 9.0 alone do, and this one has " + version_text(capability, 10) + "; use --recipe colossal, or --device cpu.";
    for (const Quant& q : {r.nonlinear, r.attention})
        if (q.fp8() && !(q == Q_GROUP && r.compute == Format::BF16))
            return "--recipe " + std::string(r.name) + " keeps " + q.text() + " beside " + info(r.compute).name +
                   " for backward, which the CPU reference alone does; keep " + Q_GROUP.text() + " beside bf16, or use --device cpu.";
    return "";
}

std::string why_unsupported(const GpuFound& found) {
    auto version = [](int v) { return version_text(v / 10, 100); };
    const std::string capability = version_text(found.capability, 10);
    if (found.driver == 0) return "no NVIDIA driver was found: install one, or run with --device cpu";
    if (found.driver_too_old)
        return "the NVIDIA driver knows CUDA " + version(found.driver) + " and this program needs " + version(found.runtime) +
               ": update the driver, or run make again with an older CUDA toolkit";
    if (!found.error.empty()) return "CUDA does not start (" + found.error + "): check nvidia-smi";
    if (found.gpus == 0) return "no NVIDIA GPU was found: check nvidia-smi and CUDA_VISIBLE_DEVICES";
    if (found.capability < BF16_CAPABILITY)
        return "this GPU has compute capability " + capability + ", and BF16 begins with 8.0: use a newer one, or --device cpu";
    if (!found.kernels_fit)
        return "this program was built for another GPU than this one of compute capability " + capability + ": run make clean, then make GPU_ARCH=" +
               std::to_string(found.capability) + (found.capability >= 90 ? "a" : "");
    return "";
}

// ---------------------------------------------------------------------------------------------------------------------
// Printing

namespace {

double mib(int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

void print_memory_line(const char* name, int64_t bytes, double of_one, int64_t beside, double beside_of_one, const char* per) {
    std::printf("  %-38s %11.1f MiB %10.3f   %11.1f MiB %10.3f   %s\n", name, mib(bytes), of_one, mib(beside), beside_of_one, per);
}

// As far as it can be told without a GPU.
void print_gpu_lines(const Setup& s) {
    GpuFacts facts;
    facts.cache_fp8_weights = s.accumulate > 1 && linear_formats(s).w.fp8();  // where memory allows
    const std::vector<MemoryRow> plan = gpu_memory_plan(s, facts);
    for (const MemoryRow& row : plan)
        if (row.category == Category::Workspace) std::printf("  on one GPU: %-42s %11.1f MiB\n", row.name.c_str(), mib(row.bytes));
    std::printf("  on one GPU: %-42s %11.1f MiB\n", "total", mib(total_bytes(plan)));
}

// What the table has no column for.
void print_scaling(const Setup& s) {
    const Recipe& r = s.recipe;
    if (!linear_formats(s).x.fp8()) return;
    auto adds = [&](int product) { return r.fast_accumulation[product] ? "fast" : "exact"; };
    std::printf("  Products of FP8 on a Hopper GPU accumulate %s in fprop, %s in dgrad, %s in wgrad.\n", adds(0), adds(1), adds(2));
    if (r.scaling == Scaling::Delayed)
        std::printf("  Scales of linear layers are delayed: from the largest amax of the last %d steps, with a margin of %d powers of two;\n"
                    "  just in time as long as there is none, as in the first step.\n", r.history, r.margin);
    if (!r.x.granularity.symmetric() || !r.g.granularity.symmetric())
        std::printf("  Rows and groups of operands lie along what a product contracts; wgrad's are of the same feature of many tokens.\n");
}

}  // namespace

void print_precision_plan(const Setup& s) {
    std::printf("\nPrecision plan: format and granularity of every operator (recipe %s: %s)\n", s.recipe.name, s.recipe.about);
    std::printf("  %-40s %-25s %-12s %-21s %s\n", "operator", "input", "weights", "output", "saved for backward");
    std::string part;
    bool falls_back = false;
    for (const PrecisionRow& row : precision_plan(s)) {
        if (row.part != part && !row.part.empty()) std::printf("  %s\n", row.part.c_str());
        part = row.part;
        const std::string name = (part.empty() ? "" : "  ") + row.name;
        std::printf("  %-40s %-25s %-12s %-21s %s\n", name.c_str(), row.input.c_str(), row.weights.c_str(), row.output.c_str(),
                    row.saved.c_str());
        falls_back |= row.name.find("falls back") != std::string::npos;
    }
    print_scaling(s);
    if (falls_back)
        std::printf("  Linear layers fall back to %s for the whole run, sampling and evaluation included: --batch x --seq is %lld tokens,\n"
                    "  which is no multiple of 16.\n",
                    info(s.recipe.compute).name, static_cast<long long>(s.B * s.T));
    if (!s.keep_gradients)
        std::printf("  Backward updates each linear layer as soon as it has its gradient. The norm of all is not known by then: --clip goes by the\n"
                    "  norm so far, times what it grew by from there on in the last step (the first step is passed through twice for that). Once a\n"
                    "  gradient is not finite, neither its bucket nor any later one of the step is updated; earlier ones were.\n");
}

void print_memory_plan(const Setup& s) {
    const Setup other = bf16_baseline(s);
    const std::vector<MemoryRow> plan = memory_plan(s), beside = memory_plan(other);
    auto title = [](const char* which, const Setup& t) {
        return std::string(which) + t.recipe.name + ", moments " + info(t.optimizer.m).name + " " + info(t.optimizer.v).name;
    };
    std::printf("\nMemory plan: %lld parameters, %lld tokens a micro-batch, %lld layers\n",
                static_cast<long long>(parameter_count(s.config)), static_cast<long long>(s.B * s.T), static_cast<long long>(s.config.L));
    std::printf("  %-38s %26s   %26s\n", "", title("", s).c_str(), title("beside ", other).c_str());
    std::printf("  %-38s %26s   %26s   per\n", "", "bytes", "bytes");
    for (size_t i = 0; i < plan.size(); i++) {
        const MemoryRow& row = plan[i];
        const bool both = i < beside.size();
        print_memory_line(row.name.c_str(), row.bytes, row.of_one(), both ? beside[i].bytes : 0, both ? beside[i].of_one() : 0, row.per);
    }
    std::printf("\n");
    for (int category = 0; category < static_cast<int>(Category::Workspace); category++) {
        const Category which = static_cast<Category>(category);
        std::printf("  %-38s %11.1f MiB %10s   %11.1f MiB\n", CATEGORY_NAMES[category], mib(total_bytes(plan, which)), "",
                    mib(total_bytes(beside, which)));
    }
    std::printf("  %-38s %11.1f MiB %10s   %11.1f MiB   and workspace\n", "total", mib(total_bytes(plan)), "", mib(total_bytes(beside)));
    print_gpu_lines(s);
    std::printf("\n  saved activations: %.2f C bytes per token and layer (beside %.2f C)\n",
                saved_bytes_per_token_and_layer(s) / static_cast<double>(s.config.C),
                saved_bytes_per_token_and_layer(other) / static_cast<double>(s.config.C));
    std::printf("  optimizer states: %.3f bytes per parameter (beside %.3f)\n", optimizer_bytes_per_parameter(s),
                optimizer_bytes_per_parameter(other));
}

}  // namespace coat
