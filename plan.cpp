// plan.cpp - the tables of plan.h, computed from those of coat.h and model.h: a new recipe or model is a new
// row there.
//
// In order: learning rate, memory modes and checks, precision plan, memory plan, layout of a GPU's memory,
// the map of buffers of ./train --plan full, what a GPU does not support, printing.
#include "plan.h"

#include <algorithm>
#include <sstream>

namespace coat {

// -----------------------------------------------------------------------------------------------------------
// The learning rate. Cosine and linear end at a tenth of the peak, as in the paper's runs (alpha_f = 0.1).

// The first step already has a learning rate above 0, so no step of the warm-up is lost.
float learning_rate(double peak, int64_t warmup, int64_t steps, int64_t step) {
    constexpr double FLOOR = 0.1, PI = 3.14159265358979323846;
    if (step < warmup) return float(peak * (step + 1) / warmup);
    const double progress = std::min(1.0, double(step - warmup) / std::max<int64_t>(1, steps - warmup));
    return float(peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + std::cos(progress * PI))));
}

// -----------------------------------------------------------------------------------------------------------
// Memory modes, and what no device supports

const std::vector<MemoryMode>& memory_modes() {
    static const std::vector<MemoryMode> table = {
        {"attention", nullptr,
         {{"compute", "q, k, v and attention's output are saved in the compute dtype"},
          {"groups", "they are saved in FP8 groups of 16, and the forward pass computes with those values"}}},
        {"master", &Setup::master,
         {{"exact", "16 bits beside each BF16 weight make an exact FP32 master weight"},
          {"none", "BF16 weights alone; the update rounds them stochastically"}}},
        {"gradients", &Setup::keep_gradients,
         {{"kept", "all gradients are kept until the update, which follows the backward pass"},
          {"none", "backward updates each layer once its gradient is complete; needs --clip 0"}}},
    };
    return table;
}

namespace {

// Granularities of the two operands of one GEMM: the scale modes of cuBLASLt's FP8 GEMMs on Hopper.
constexpr struct { Granularity a, b; } GEMM_SCALES[] = {
    {PER_TENSOR, PER_TENSOR}, {PER_ROW, PER_ROW}, {PER_1x128, PER_1x128},
    {PER_1x128, PER_128x128}, {PER_128x128, PER_1x128}};

// Hopper's FP8 GEMMs restrict which formats, scales and accumulation go together. A recipe that breaks a rule
// is an error on the CPU too, so that a recipe means the same run everywhere.
void validate_gemm(const Recipe& r, const std::string& gemm, const Quant& a, const Quant& b, bool fast) {
    auto require = [&](bool ok, const char* what) {
        if (!ok)
            throw Error("Recipe ", r.name, " cannot run ", gemm, " with operands ", a.text(), " and ",
                        b.text(), ": ", what, ".");
    };
    require(a.fp8() == b.fp8(), "both operands must be FP8, or neither");
    if (!a.fp8()) return;
    require(a.format != Format::E5M2 || b.format != Format::E5M2,
            "no GPU multiplies two E5M2 matrices; make one of them E4M3");
    const bool known = std::any_of(std::begin(GEMM_SCALES), std::end(GEMM_SCALES), [&](const auto& m) {
        return m.a == a.granularity && m.b == b.granularity;
    });
    const bool delayed = r.scaling == Scaling::Delayed;
    for (const Quant& q : {a, b}) {
        require(known && q.scale_format == Format::F32,
                "choose FP32 scales for tensor by tensor, row by row, 1x128 by 1x128, or 1x128 by 128x128");
        require(!fast || q.granularity.cols != PER_1x128.cols,
                "blocks of 128 need exact accumulation");
        require(!delayed || q.granularity == PER_TENSOR,
                "delayed scaling needs one scale per tensor; use per-tensor operands, or just-in-time "
                "scaling");
    }
}

void validate(const Recipe& r) {
    validate_gemm(r, "fprop", r.x, r.w, r.sums.fast[0]);
    validate_gemm(r, "dgrad", r.g, r.w, r.sums.fast[1]);
    validate_gemm(r, "wgrad", r.g, r.x, r.sums.fast[2]);
    if (r.scaling == Scaling::Delayed && (r.history < 1 || r.margin < 0 || r.margin > 64))
        throw Error("Recipe ", r.name,
                    " has an invalid history or margin; use 1 step or more, and a margin from 0 to 64.");
}

}  // namespace

// The messages below name the flag that is at fault and the values that would do.
void validate(const Setup& s) {
    validate(s.config);
    validate(s.recipe);
    if (s.T > s.config.longest())
        throw Error("--seq ", s.T, " is too long for ", s.config.name,
                    (s.T > s.config.max_T ? "" : ", whose sliding window of attention is not implemented"),
                    "; use at most --seq ", s.config.longest(), ".");
    constexpr int64_t MAX_SEQUENCES = 65535, MAX_TOKENS = 128 * MAX_SEQUENCES;  // of a micro-batch
    // Two dimensions of a GPU's grid have at most 65,535 blocks: of sequences, and of tiles of 128 tokens.
    if (s.B > MAX_SEQUENCES || s.B > MAX_TOKENS / s.T)
        throw Error("--batch ", s.B, " with --seq ", s.T, " is more than ", MAX_SEQUENCES, " sequences or ",
                    MAX_TOKENS, " tokens; use a smaller --batch and more --accumulate.");
    const bool groups = s.recipe.attention.fp8(), fp32 = s.recipe.compute == Format::F32;
    if (fp32 && (groups || !s.master))
        throw Error(groups ? "--attention groups" : "--master none", " needs BF16, but --recipe ",
                    s.recipe.name, " computes in FP32; leave the flag out, or choose --recipe coat.");
    // A kernel takes the amax of the weights that a rank keeps, in such tiles with MOMENT_GROUP columns.
    constexpr int64_t MAX_ELEMENTS = MAX_TOKENS * MOMENT_GROUP;
    Param largest{};
    for (const Param& p : parameters(s.config))
        if (p.role.linear && p.size() > largest.size()) largest = p;
    const int64_t ranks = ceil_div(largest.size(), MAX_ELEMENTS);
    if (!fp32 && ranks > s.ranks)
        throw Error("--model ", s.config.name, " has ", largest.size(), " elements in ", largest.name,
                    ", of which a rank can keep at most ", MAX_ELEMENTS,
                    "; use at least --ranks ", ranks, ".");
    constexpr int64_t MOST_MICRO_BATCHES = 1 << 20;  // of --accumulate: one rank must be able to resume
    if (micro_batches(s) > MOST_MICRO_BATCHES)
        throw Error("--accumulate ", s.accumulate, " on ", s.ranks, " ranks is more than ",
                    MOST_MICRO_BATCHES, " micro-batches a step; use a smaller --accumulate.");
    if (!s.keep_gradients && s.accumulate > 1)
        throw Error("--gradients none keeps no gradients to which --accumulate ", s.accumulate,
                    " could add; use --accumulate 1 with a larger --batch, or --gradients kept.");
    if (s.ranks > 1 && s.optimizer.group == 0)
        throw Error("--optimizer ", s.optimizer.name, " has one scale per tensor, of which ", s.ranks,
                    " ranks cannot keep parts; use one rank, or another --optimizer.");
}

// -----------------------------------------------------------------------------------------------------------
// The precision flow, in the order of a step (paper section 5)

std::vector<PrecisionRow> precision_plan(const Setup& s) {
    const ModelConfig& c = s.config;
    const Recipe& r = s.recipe;
    const LinearFormats q = linear_formats(s);
    const std::string compute = info(r.compute).name, fp32 = info(Format::F32).name, none = "-";
    const std::string nonlinear = r.nonlinear.text(), attention = r.attention.text(), x = q.x.text();
    // What residual adds write.
    const std::string sum = compute + (r.nonlinear.fp8() ? " and " + nonlinear : "");
    const std::string read = r.forward_reads_groups ? nonlinear : compute;
    const std::string saved = nonlinear + " input";
    const std::string layers = concat("each of ", c.L, " layers");
    const std::string up = c.arch.gated ? "gate and up" : "up";
    auto linear = [&](const std::string& name) { return name + (q.fallback ? " (falls back)" : ""); };
    const bool remainder = s.master && r.compute != Format::F32;
    const std::string weights = remainder ? compute + " + 16 bits = " + fp32 : compute;
    const std::string dw = concat(info(gradient_format(s)).name, " gradient");

    const std::string activation = c.arch.gated ? "SiLU(gate) x up" : "GELU";
    std::vector<PrecisionRow> table = {
        {"", "embedding", "tokens", compute, sum, none},
        {layers, "norm 1", read, compute, x, saved},
        {layers, linear("q, k, v projection"), x, q.w.text(), c.arch.rope ? compute : attention, none},
        {layers, "rotary positions", compute, none, attention, none},
        {layers, "attention", attention, none, attention, attention + " q, k, v, output; fp32 log-sum-exp"},
        {layers, linear("attention output projection"), x, q.w.text(), compute, none},
        {layers, "residual add", compute, none, sum, none},
        {layers, "norm 2", read, compute, x, saved},
        {layers, linear(up + " projection"), x, q.w.text(), compute, none},
        {layers, activation, read, none, x, saved},
        {layers, linear("down projection"), x, q.w.text(), compute, none},
        {layers, "residual add", compute, none, sum, none},
        {"", "final norm", compute, compute, compute, compute + " input"},
        {"", "head", compute, compute, compute, none},
        {"", "cross-entropy", compute, none, fp32, none},
        // Every linear layer has the same pair of GEMMs in backward.
        {"backward", linear("linear layers, dgrad"), q.g.text(), q.w.text(), compute, none},
        {"backward", linear("linear layers, wgrad"), q.g.text() + " x " + x, none, dw, none},
        {"backward", activation, nonlinear + ", " + compute, none, q.g.text(), none},
        {"backward", "norms", nonlinear + ", " + compute, compute, compute, none},
        {"backward", "attention", (r.attention.fp8() ? attention + ", " : "") + compute, none, compute, none},
        {"backward", "head", compute, compute, compute, none},
        {"update", "AdamW, weights", weights, none, s.master ? weights : weights + ", stochastic", none},
    };
    if (!c.arch.rope) table.erase(table.begin() + 3);
    const OptimizerFormat& o = s.optimizer;
    const std::string of = o.group == 0 ? "tensor" : "group of 128";
    for (const auto& [name, f] : {std::pair{"AdamW, first moment", o.m}, {"AdamW, second moment", o.v}}) {
        const std::string scales = (o.expands(f) ? "keeps fp32 max and k per " : "keeps fp32 max per ") + of;
        table.push_back({"update", name, info(f).name, none, info(f).name, is_scaled(f) ? scales : none});
    }
    return table;
}

// -----------------------------------------------------------------------------------------------------------
// Several ranks: what each keeps, and what travels

namespace {

// A rank's weights lie one after the other, as do its masters, moments and sums of gradients. Each slice is
// padded to whole groups of moments.
std::vector<ShardPlace> shard_places(const Setup& s) {
    std::vector<ShardPlace> table;
    int64_t weight = 0, state = 0, unit = 0;
    for (const Param& p : parameters(s.config)) {
        table.push_back({kept_weight(s, p), owned(s, p), weight, state, unit});
        weight += padded(table.back().weight);
        state += padded(table.back().state);
        unit += ceil_div(p.size(), SHARD_UNIT);
    }
    return table;
}

// All elements that a rank keeps, with padding. kept: kept_weight or owned.
int64_t kept_elements(const Setup& s, Slice (*kept)(const Setup&, const Param&)) {
    int64_t elements = 0;
    for (const Param& p : parameters(s.config)) elements += padded(kept(s, p));
    return elements;
}

// Bytes of one element of the gradients.
int64_t gradient_bytes(const Setup& s) { return info(gradient_format(s)).bytes; }

// Elements of the largest bucket; and of a tied embedding, which has its own place, because the head adds to
// its gradient first and the embedding last.
struct BucketElements {
    int64_t largest = 0, embedding = 0;
};
BucketElements bucket_elements(const Setup& s) {
    BucketElements e;
    for (const BucketRange& bucket : bucket_ranges(parameters(s.config)))
        if (bucket.first == 0 && s.config.tied) e.embedding = bucket.elements;
        else e.largest = std::max(e.largest, bucket.elements);
    return e;
}

// Elements whose gradients, or sums of gradients over the ranks, exist at the same time.
int64_t gradient_elements(const Setup& s) {
    if (s.keep_gradients) return kept_elements(s, owned);
    const BucketElements e = bucket_elements(s);
    return s.ranks > 1 ? std::max(e.largest, e.embedding) : e.largest + e.embedding;
}

// Gradients of several ranks that are not summed yet: one bucket travels while the next is computed.
int64_t unsummed_bytes(const Setup& s) {
    const BucketElements e = bucket_elements(s);
    return s.ranks > 1 ? (2 * e.largest + e.embedding) * gradient_bytes(s) : 0;
}

// What a rank receives of a bucket: from each of the others, the gradients that it owns.
int64_t received_bytes(const Setup& s) {
    const std::vector<Param> params = parameters(s.config);
    std::vector<int64_t> owned_of(size_t(params.back().bucket) + 1);
    for (const Param& p : params) owned_of[p.bucket] += padded(owned(s, p));
    return (s.ranks - 1) * *std::max_element(owned_of.begin(), owned_of.end()) * gradient_bytes(s);
}

// Bytes of each stage's matrices. as_codes: whether weights of linear layers travel as FP8 codes.
std::vector<int64_t> stage_bytes(const Setup& s, bool as_codes) {
    const std::vector<Param> params = parameters(s.config);
    std::vector<int64_t> table;
    for (const std::vector<size_t>& stage : weight_stages(s.config)) {
        table.push_back(0);
        for (size_t i : stage) {
            const int64_t each = params[i].role.linear && as_codes ? 1 : info(s.recipe.compute).bytes;
            table.back() += round_up(params[i].padded_size() * each, GPU_ALIGNMENT);
        }
    }
    return table;
}

// Bytes that one rank sends in a step; it receives as many.
struct Traffic {
    int64_t gradients, weights;
};
Traffic traffic(const Setup& s) {
    int64_t all = 0, gathered = 0;
    for (const Param& p : parameters(s.config)) all += p.size();
    const std::vector<int64_t> stages = stage_bytes(s, gathers_codes(s));
    for (size_t i = 0; i < stages.size(); i++) {
        // Linear layers are gathered for backward once more; the last one is still there. (In later
        // micro-batches so is the first.) Norms, biases, amaxes and sums of squares are small and not
        // counted.
        const bool linear = i > 0 && i + 2 < stages.size();
        gathered += stages[i] * (linear ? 2 : 1);
    }
    auto others = [&](int64_t bytes) { return bytes * (s.ranks - 1) / s.ranks * s.accumulate; };
    return {others(all * gradient_bytes(s)), others(gathered)};
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

std::vector<std::vector<size_t>> weight_stages(const ModelConfig& c) {
    const std::vector<Param> params = parameters(c);
    std::vector<std::vector<size_t>> stages(1);
    for (size_t i = 0; i < params.size(); i++) {
        if (params[i].rows == 1) continue;
        if (params[i].bucket > 0) stages.push_back({i});
        else stages[0].push_back(i);
    }
    if (c.tied) stages.push_back({0});
    return stages;
}

bool gathers_codes(const Setup& s) {
    const Quant w = linear_formats(s).w;
    return w.fp8() && w.granularity == PER_TENSOR;
}

// -----------------------------------------------------------------------------------------------------------
// Memory

// A row that only some runs have comes last, so that the others have the same place in every plan.
std::vector<MemoryRow> memory_plan(const Setup& s) {
    const ModelConfig& c = s.config;
    const int64_t N = s.B * s.T, params = parameter_count(c);
    const Format compute = s.recipe.compute;

    // Flat buffers in the order of parameters(), each parameter padded to whole groups. A weight that is
    // stored in FP32 is its own master; a BF16 weight has a 16-bit remainder beside it.
    int64_t m = 0, v = 0, moment_scales = 0, scaling = 0;
    for (const Param& p : parameters(c))
        for (const auto& [bytes, wanted] : {std::pair{&m, s.optimizer.m}, {&v, s.optimizer.v}}) {
            const Format f = p.moment(wanted);
            const Slice slice = owned(s, p);
            *bytes += padded(slice) * info(f).bytes;
            moment_scales += s.optimizer.scales(f, slice.count) * 4 * (s.optimizer.expands(f) ? 2 : 1);
        }
    for (const StateTensor& t : scaling_tensors(c, s.recipe)) scaling += t.total_bytes();
    auto format = [](const char* name, Format f) { return concat(name, " (", info(f).name, ")"); };
    const std::string scales = concat(s.optimizer.expand ? "max and k" : "max",
                                      s.optimizer.group == 0 ? " per tensor" : " per group");
    const char* const kept = s.keep_gradients ? "gradients" : "gradients of the largest bucket";
    const int64_t weights = kept_elements(s, kept_weight) * info(compute).bytes,
                  gradients = gradient_elements(s) * gradient_bytes(s);
    const int64_t remainder = compute == Format::F32 || !s.master ? 0 : kept_elements(s, owned) * 2;
    using C = Category;
    std::vector<MemoryRow> plan = {
        {C::Weights, format("weights", compute), weights, "parameter", params},
        {C::Weights, "remainder of the FP32 masters (int16)", remainder, "parameter", params},
        {C::Gradients, format(kept, gradient_format(s)), gradients, "parameter", params},
        {C::Optimizer, format("first moments", s.optimizer.m), m, "parameter", params},
        {C::Optimizer, format("second moments", s.optimizer.v), v, "parameter", params},
        {C::Optimizer, scales, moment_scales, "parameter", params},
        {C::Activations, format("final norm input", compute), N * c.C * info(compute).bytes, "token", N},
    };
    for (const SavedTensor& t : saved_per_layer(s))
        plan.push_back({C::Activations, concat(t.name, " (", t.quant.text(), ")"), t.bytes(N) * c.L,
                        "token and layer", N * c.L});
    if (scaling) plan.push_back({C::Weights, "amaxes and delayed scales", scaling, "parameter", params});
    return plan;
}

int64_t total_bytes(const std::vector<MemoryRow>& plan, Category category) {
    int64_t bytes = 0;
    for (const MemoryRow& row : plan)
        if (category == Category::All || row.category == category) bytes += row.bytes;
    return bytes;
}

double saved_bytes_per_token_and_layer(const Setup& s) {
    int64_t bytes = 0;
    for (const SavedTensor& t : saved_per_layer(s)) bytes += t.bytes(s.B * s.T);
    return double(bytes) / (s.B * s.T);
}

Setup bf16_baseline(Setup s) {
    s.recipe = find_row(recipes(), "bf16", "--recipe");
    s.optimizer = find_row(optimizers(), "fp32", "--optimizer");
    for (const MemoryMode& mode : memory_modes()) mode.choose(s, true);
    return s;
}

// -----------------------------------------------------------------------------------------------------------
// The workspace of a GPU: buffers that operators need only while they run.
//
// A step is cut into phases. A phase is a few operators that run one after the other and use the same
// buffers, such as "backward: down projection, wgrad". What a buffer contains is needed only in its phases.
// So two buffers may lie in the same memory if they have no phase in common: for example, the logits and the
// FP32 sums of attention's backward. All layers go through the same phases. pack() gives each buffer its
// place.

const char* const PHASE_NAMES[19] = {
    "forward: norm 1, q, k, v projection, attention",
    "forward: attention output projection, residual add",
    "forward: norm 2, gate and up projection",
    "forward: activation",
    "forward: down projection, residual add",
    "head and loss, forward and backward",
    "backward: down projection, wgrad",
    "backward: down projection, dgrad",
    "backward: activation",
    "backward: gate and up projection, dgrad; norm 2",
    "backward: gate and up projection, wgrad",
    "backward: attention output projection, wgrad",
    "backward: attention output projection, dgrad",
    "backward: attention",
    "backward: rotary positions",
    "backward: q, k, v projection, dgrad; norm 1",
    "backward: q, k, v projection, wgrad",
    "backward: embedding",
    "update: gradient norm, AdamW",
};

namespace {

enum Phase : uint32_t {  // in the order of PHASE_NAMES
    FORWARD_ATTENTION = 1 << 0, FORWARD_OUT = 1 << 1, FORWARD_GATE_UP = 1 << 2,
    FORWARD_ACTIVATION = 1 << 3, FORWARD_DOWN = 1 << 4,
    HEAD = 1 << 5,
    DOWN_WGRAD = 1 << 6, DOWN_DGRAD = 1 << 7,
    ACTIVATION_BACKWARD = 1 << 8, GATE_UP_DGRAD = 1 << 9, GATE_UP_WGRAD = 1 << 10,
    OUT_WGRAD = 1 << 11, OUT_DGRAD = 1 << 12,
    ATTENTION_BACKWARD = 1 << 13, ROPE_BACKWARD = 1 << 14, QKV_DGRAD = 1 << 15, QKV_WGRAD = 1 << 16,
    EMBEDDING_BACKWARD = 1 << 17, UPDATE = 1 << 18
};
constexpr uint32_t ALWAYS = (1u << std::size(PHASE_NAMES)) - 1;
constexpr uint32_t FORWARD =
    FORWARD_ATTENTION | FORWARD_OUT | FORWARD_GATE_UP | FORWARD_ACTIVATION | FORWARD_DOWN;
constexpr uint32_t DGRADS = DOWN_DGRAD | GATE_UP_DGRAD | OUT_DGRAD | QKV_DGRAD;
constexpr uint32_t GATE_UP_BACKWARD = ACTIVATION_BACKWARD | GATE_UP_DGRAD | GATE_UP_WGRAD;
constexpr uint32_t QKV_BACKWARD = ROPE_BACKWARD | QKV_DGRAD | QKV_WGRAD;

struct Use {
    uint32_t phases;
    std::string contents;
};
struct WorkRow {
    Work work;
    const char* name;
    int64_t bytes;
    std::vector<Use> uses;
    uint32_t phases() const {
        uint32_t all = 0;
        for (const Use& use : uses) all |= use.phases;
        return all;
    }
};

// Rows that buffers are made for: FP8 GEMMs need a multiple of 16.
int64_t gpu_tokens(const Setup& s) { return round_up(s.B * s.T, 16); }

// The gradient of q, k, v is written over the layer's saved gate and up if it is no larger: by then nothing
// reads those any more.
bool qkv_gradient_in_place(const Setup& s) {
    const int64_t N = gpu_tokens(s), bytes = N * s.config.qkv_cols() * info(s.recipe.compute).bytes;
    return bytes <= s.recipe.nonlinear.bytes(N, s.config.gate_up_cols());
}

// What attention's backward needs on any GPU: a value for each query and head (attention.cu). For shapes that
// the Hopper kernels take (attention_sm90.cu, Scratch), also FP32 sums of dq, statistics by tiles of queries,
// and counters.
int64_t attention_bytes(const ModelConfig& c, Format compute, int64_t B, int64_t T) {
    const int64_t simple = round_up(B * c.NH * T * 4, GPU_ALIGNMENT), tile = c.HS() == 64 ? 128 : 64;
    const int64_t tiles = B * c.NH * ceil_div(T, tile);
    const bool tensor_cores = compute == Format::BF16 && (c.HS() == 64 || c.HS() == 128);
    if (!tensor_cores) return simple;
    return std::max(simple, round_up((tiles * (2 * tile + tile * c.HS() + 1) + 1) * 4, GPU_ALIGNMENT));
}

// N: gpu_tokens(); Q, QKV, U: columns of attention's output, of q, k and v, and of gate and up (ModelConfig).
std::vector<WorkRow> work_rows(const Setup& s, const GpuFacts& facts) {
    const ModelConfig& c = s.config;
    const Recipe& r = s.recipe;
    const int64_t N = gpu_tokens(s), V = c.padded_V(), C = c.C, F = c.F;
    const int64_t Q = c.q_cols(), QKV = c.qkv_cols(), U = c.gate_up_cols();
    const int64_t compute = info(r.compute).bytes, params = int64_t(parameters(c).size());
    const LinearFormats q = linear_formats(s);
    const bool fp8 = q.x.fp8(), pieces = r.x.granularity == PER_TENSOR && r.forward_reads_groups;
    const bool groups = r.nonlinear.fp8(), attention_groups = r.attention.fp8();
    const bool gate_up_in_place = gate_up_gradient_in_place(s), cached = facts.cache_fp8_weights;
    const std::string transposed = fp8 ? ", transposed" : "";

    auto either_way = [](const Quant& format, int64_t rows, int64_t cols) {  // row-major or transposed
        return std::max(format.operand_bytes(rows, cols), format.operand_bytes(cols, rows));
    };
    int64_t weight = 0, all_weights = 0;  // FP8 operands; a weight in the compute dtype is used in place
    int64_t units = 0;
    for (const Param& p : parameters(c)) {
        units += ceil_div(p.size(), SHARD_UNIT);
        if (!p.role.linear || !q.w.fp8()) continue;
        weight = std::max(weight, either_way(q.w, p.rows, p.cols));
        all_weights += q.w.operand_bytes(p.rows, p.cols) + q.w.operand_bytes(p.cols, p.rows);
    }
    // Attention's output is an operand in place if both are in the compute dtype.
    const int64_t operand_cols = std::max(C, fp8 || attention_groups ? Q : 0);
    // A gradient in the compute dtype is an operand in place. In FP8, it has codes for dgrad and for wgrad.
    const uint32_t residual_gradients = fp8 ? DOWN_WGRAD | DOWN_DGRAD | OUT_WGRAD | OUT_DGRAD : 0;
    const uint32_t qkv_gradient = fp8 ? QKV_BACKWARD : 0;
    const uint32_t gate_up_gradient = gate_up_in_place ? 0 : GATE_UP_BACKWARD;
    const int64_t gradient_cols = std::max({fp8 ? C : 0, QKV, gate_up_in_place ? 0 : U});
    const bool gradient = residual_gradients | qkv_gradient | gate_up_gradient;

    const bool codes = gathers_codes(s) && r.scaling == Scaling::JustInTime;  // delayed scales: not at first
    const std::vector<int64_t> stages = stage_bytes(s, codes);
    const int64_t stage = *std::max_element(stages.begin(), stages.end());
    const bool several = s.ranks > 1;
    const uint32_t norm = s.keep_gradients ? uint32_t(UPDATE) : ALWAYS;

    // W(name) is the buffer and its name in the print-out.
#define W(name) Work::name, #name
    return {
        {W(GemmScratch), 32 << 20, {{ALWAYS, "cuBLASLt's workspace; FP32 logits of a sample"}}},
        {W(NormPartials), 8 * facts.multiprocessors * C * 4, {{ALWAYS, "partial sums of norms' gradients"}}},
        {W(Tokens), N * 4, {{ALWAYS, "tokens"}}},
        {W(Targets), N * 4, {{ALWAYS, "targets"}}},
        {W(EmbeddingOrder), s.B * s.T * 4, {{ALWAYS, "the batch's positions, sorted by token"}}},
        {W(TokenRuns), s.B * s.T * 16, {{ALWAYS, "runs of equal tokens among them"}}},
        {W(Losses), N * 4, {{ALWAYS, "loss of each token, FP32"}}},
        {W(NormStatistics), N * 8, {{ALWAYS, "mean and 1 / standard deviation of a norm's rows"}}},
        {W(RopeTable), c.arch.rope ? s.T * c.HS() / 2 * 8 : 0, {{ALWAYS, "cosines and sines of RoPE"}}},
        {W(Scales), (params + 12 * c.L) * 16, {{ALWAYS, "AmaxAndScale of weights and operands"}}},
        {W(Segments), params * 128, {{ALWAYS, "AdamW's table of parameters"}}},
        {W(Results), 16 << 10, {{ALWAYS, "loss, gradient norm and report, for the host"}}},
        {W(CachedWeights), cached ? all_weights : 0, {{ALWAYS, "FP8 weights of all layers, and transposes"}}},

        {W(GatheredWeights), several ? 2 * stage : 0,
         {{ALWAYS, "whole weights of a linear layer, and of the next one"}}},
        {W(ReceivedGradients), received_bytes(s), {{ALWAYS, "gradients of a bucket, from the other ranks"}}},
        {W(RankScales), several ? s.ranks * (params + 12 * c.L) * 16 : 0, {{ALWAYS, "amaxes of all ranks"}}},

        {W(Residual), groups ? N * C * compute : 0, {{FORWARD, "residual stream in the compute dtype"}}},
        {W(InputOperand), either_way(q.x, N, operand_cols),
         {{FORWARD_ATTENTION | FORWARD_GATE_UP, "operand x: output of norm 1 or 2"},
          {FORWARD_OUT, "operand x: attention's output"},
          {QKV_WGRAD | OUT_WGRAD | GATE_UP_WGRAD, "the same operands again" + transposed + " for wgrad"}}},
        {W(ActivationOperand), either_way(q.x, N, F),
         {{FORWARD_ACTIVATION | FORWARD_DOWN, "operand x: the activation's output"},
          {DOWN_WGRAD, "the same operand again" + transposed + " for wgrad"}}},
        {W(WeightOperand), cached ? 0 : weight,
         {{FORWARD & ~FORWARD_ACTIVATION, "operand w of one GEMM"},
          {DGRADS, "operand w, transposed for dgrad"}}},
        {W(Qkv), attention_groups ? N * QKV * compute : 0,
         {{FORWARD_ATTENTION | ATTENTION_BACKWARD, "q, k, v"}}},
        {W(AttentionOutput), attention_groups ? N * Q * compute : 0,
         {{FORWARD_ATTENTION | ATTENTION_BACKWARD, "attention's output"}}},
        {W(GateUp), groups ? (pieces ? std::min(N, GATE_UP_TOKENS) : N) * U * compute : 0,
         {{FORWARD_GATE_UP | (r.forward_reads_groups ? 0u : FORWARD_ACTIVATION),
           "gate and up, before they are quantized in groups"}}},
        {W(Branch), N * std::max(C, Q) * compute,
         {{FORWARD_OUT | FORWARD_DOWN, "what is added to the residual stream"},
          {HEAD, "gradient of the final norm's output"},
          {GATE_UP_DGRAD, "gradient of norm 2's output"},
          {OUT_DGRAD | ATTENTION_BACKWARD, "gradient of attention's output"},
          {QKV_DGRAD, "gradient of norm 1's output"}}},
        {W(FinalNorm), std::min(N, HEAD_TOKENS) * C * compute,
         {{HEAD, "final norm's output, a piece of it"}}},
        {W(Logits), std::min(N, HEAD_TOKENS) * V * compute,
         {{HEAD, "logits of that piece, then their gradients"}}},
        {W(HeadGradient), head_sum_apart(s) ? V * C * 4 : 0,
         {{HEAD, "gradient of the head's weight, summed in FP32"}}},
        {W(GradientOperand), gradient ? either_way(q.g, N, gradient_cols) : 0,
         {{residual_gradients, "operand g: gradient of the residual stream"},
          {gate_up_gradient, "operand g: gradient of gate and up"},
          {qkv_gradient, "operand g: gradient of q, k, v"}}},
        {W(GradientOperandTransposed),
         fp8 ? either_way(q.g, N, std::max({C, U, QKV})) : 0,
         {{DOWN_WGRAD | GATE_UP_BACKWARD | OUT_WGRAD | QKV_BACKWARD, "operand g, transposed for wgrad"}}},
        {W(ActivationGradient), N * F * compute,
         {{DOWN_DGRAD | ACTIVATION_BACKWARD, "gradient of the activation's output"}}},
        {W(QkvGradient), qkv_gradient_in_place(s) ? 0 : N * QKV * compute,
         {{ATTENTION_BACKWARD | QKV_BACKWARD, "gradient of q, k, v"}}},
        {W(AttentionScratch), attention_bytes(c, r.compute, s.B, s.T),
         {{ATTENTION_BACKWARD, "FP32 sums of dq, and statistics"}}},
        {W(ColumnPartials),
         128 * std::max(c.arch.bias ? std::max(U, C) : 0, c.arch.qkv_bias ? QKV : 0) * 4,
         {{ROPE_BACKWARD | (c.arch.bias ? DOWN_WGRAD | ACTIVATION_BACKWARD | OUT_WGRAD : 0),
           "partial sums of bias gradients"}}},
        {W(EmbeddingPartials), s.B * s.T * C * 4,
         {{EMBEDDING_BACKWARD, "partial sums of the embedding's gradient"}}},
        {W(GradientSquares), s.ranks * (units + 1) * 8,
         {{norm, "sums of squared gradients, by shard units and ranks"}}},
    };
#undef W
}

// Gives each buffer in turn the lowest offset where it overlaps no buffer that is used in one of its phases.
// Returns the size of the whole.
int64_t place_in_order(const std::vector<WorkRow>& rows, Place* places) {
    int64_t end = 0;
    for (size_t i = 0; i < rows.size(); i++) {
        Place& here = places[int(rows[i].work)];
        here = {0, round_up(rows[i].bytes, GPU_ALIGNMENT)};
        for (size_t j = 0; j < i;) {
            const Place& there = places[int(rows[j].work)];
            const int64_t end_of_there = there.offset + there.bytes;
            const bool overlap = here.offset < end_of_there && there.offset < here.offset + here.bytes;
            if (overlap && (rows[i].phases() & rows[j].phases())) here.offset = end_of_there, j = 0;
            else j++;
        }
        end = std::max(end, here.offset + here.bytes);
    }
    return end;
}

// Packs the buffers, large ones first. That leaves gaps. So each buffer in turn is tried as the first one,
// and stays there if the whole becomes smaller.
int64_t pack(std::vector<WorkRow> rows, Place* places) {
    std::stable_sort(rows.begin(), rows.end(), [](auto& a, auto& b) { return a.bytes > b.bytes; });
    int64_t smallest = place_in_order(rows, places);
    for (size_t i = 1; i < rows.size(); i++) {
        std::vector<WorkRow> other = rows;
        std::rotate(other.begin(), other.begin() + int64_t(i), other.begin() + int64_t(i) + 1);
        const int64_t bytes = place_in_order(other, places);
        if (bytes < smallest) smallest = bytes, rows = other, i = 0;
    }
    return place_in_order(rows, places);
}

// -----------------------------------------------------------------------------------------------------------
// The whole allocation of a GPU

// The lowest offset from the first saved activation at which all gradients may begin. The gradients of a
// parameter are first written when later layers need no saved activations any more. A layer has four buckets;
// the tied embedding's gradient is written first by the head.
int64_t gradients_offset(const Setup& s, int64_t layer_bytes) {
    const ModelConfig& c = s.config;
    if (s.accumulate > 1) return c.L * layer_bytes;
    const std::vector<Param> params = parameters(c);
    const std::vector<ShardPlace> shards = shard_places(s);
    int64_t offset = 0;
    for (size_t i = 0; i < params.size(); i++) {
        const bool by_head = params[i].name == "embedding" && c.tied;
        const int64_t layers_alive = by_head ? c.L : std::min(c.L, ceil_div(params[i].bucket, 4));
        offset = std::max(offset, layers_alive * layer_bytes - shards[i].state_at * gradient_bytes(s));
    }
    return round_up(offset, GPU_ALIGNMENT);
}

}  // namespace

bool gate_up_gradient_in_place(const Setup& s) {
    const bool same_size = info(linear_formats(s).g.format).bytes == info(s.recipe.nonlinear.format).bytes;
    return same_size && s.recipe.x.granularity == PER_TENSOR;
}

bool caches_weights(const Setup& s) {
    return s.accumulate > 1 && linear_formats(s).w.fp8() && s.ranks == 1;
}

// In the order of the allocation: the state of the run, saved activations and gradients, then the workspace.
GpuLayout gpu_layout(const Setup& s, const GpuFacts& facts) {
    const OptimizerFormat& o = s.optimizer;
    const std::vector<Param> params = parameters(s.config);
    const std::vector<BucketRange> buckets = bucket_ranges(params);
    const int64_t N = gpu_tokens(s), compute = info(s.recipe.compute).bytes, each = gradient_bytes(s);
    const int64_t elements = kept_elements(s, owned);
    const bool several = s.ranks > 1;
    GpuLayout layout{};
    layout.tokens = N;
    int64_t end = 0;
    auto take = [&](int64_t bytes) {
        const Place place{end, bytes};
        end += round_up(bytes, GPU_ALIGNMENT);
        return place;
    };
    layout.shards = shard_places(s);
    layout.weights = take(kept_elements(s, kept_weight) * compute);
    layout.remainder = take(s.recipe.compute == Format::F32 || !s.master ? 0 : elements * 2);

    // Moments: all codes first, then all scales, so that each is one buffer. One scale per tensor has two
    // places: the old one decodes until everything is encoded with the new one.
    const std::pair<std::vector<MomentPlace>*, Format> moments[] = {{&layout.m, o.m}, {&layout.v, o.v}};
    const int64_t first_code = end;
    for (const auto& [places, wanted] : moments)
        for (const Param& p : params)
            places->push_back({take(padded(owned(s, p)) * info(p.moment(wanted)).bytes).offset, 0, 0});
    const int64_t first_scale = end, copies = o.group == 0 ? 2 : 1;
    for (const auto& [places, wanted] : moments)
        for (size_t i = 0; i < params.size(); i++) {
            const Format format = params[i].moment(wanted);
            const int64_t scales = o.scales(format, owned(s, params[i]).count);
            if (scales) (*places)[i].max = take(scales * 4 * copies).offset;
            if (o.expands(format)) (*places)[i].k = take(scales * 4).offset;
        }
    layout.moments = {first_code, first_scale - first_code};
    layout.scales = {first_scale, end - first_scale};
    const bool delayed = s.recipe.scaling == Scaling::Delayed;
    layout.delayed = take(delayed ? OPERANDS * 4 * s.config.L * s.recipe.history * 4 : 0);

    for (const SavedTensor& t : saved_per_layer(s)) {
        layout.saved_tensors.push_back({layout.layer_bytes, t.bytes(N)});
        layout.layer_bytes += round_up(t.bytes(N), GPU_ALIGNMENT);
    }
    const int64_t saved = s.config.L * layout.layer_bytes;
    if (s.keep_gradients) {
        const int64_t first = gradients_offset(s, layout.layer_bytes);
        const Place both = take(std::max(saved, first + elements * each));
        layout.saved = {both.offset, saved};
        layout.gradients_over_saved = saved + elements * each - both.bytes;
        for (const BucketRange& b : buckets)
            layout.sums.push_back(both.offset + first + layout.shards[b.first].state_at * each);
        for (const Param& p : params)
            if (!several) layout.gradients.push_back(both.offset + first + p.offset * each);
    } else {
        layout.saved = take(saved);
    }
    // Gradients that are not kept. All buckets share one place; with several ranks they alternate between
    // two, so that one travels while the next is computed. Those of a tied embedding have their own.
    if (several || !s.keep_gradients) {
        const BucketElements e = bucket_elements(s);
        const int64_t even = take(e.largest * each).offset,
                      odd = several ? take(e.largest * each).offset : even;
        const int64_t embedding = s.config.tied ? take(e.embedding * each).offset : even;
        for (const Param& p : params) {
            const int64_t place = p.bucket == 0 ? embedding : p.bucket % 2 ? odd : even;
            layout.gradients.push_back(place + (p.offset - buckets[p.bucket].offset) * each);
        }
    }
    if (!s.keep_gradients) {
        const int64_t sum = several ? take(gradient_elements(s) * each).offset : 0;
        for (const BucketRange& b : buckets) layout.sums.push_back(several ? sum : layout.gradients[b.first]);
    }
    layout.final_norm_input = take(N * s.config.C * compute);

    const int64_t work_bytes = pack(work_rows(s, facts), layout.work), work = take(work_bytes).offset;
    for (Place& place : layout.work) place.offset += work;
    layout.total = work + work_bytes;
    return layout;
}

// The workspace in a few rows. What is used in all phases is added up. The other buffers share memory, so
// they have one size together.
std::vector<MemoryRow> gpu_memory_plan(const Setup& s, const GpuFacts& facts) {
    std::vector<MemoryRow> plan = memory_plan(s);
    const GpuLayout layout = gpu_layout(s, facts);
    const std::vector<WorkRow> work = work_rows(s, facts);
    Place unused[int(Work::Count)];
    int64_t always = 0, cached = 0;
    for (const WorkRow& row : work)
        if (row.phases() == ALWAYS) (row.work == Work::CachedWeights ? cached : always) += row.bytes;
    auto add = [&](const char* name, int64_t bytes) { plan.push_back({Category::Workspace, name, bytes}); };
    if (cached) add("cached FP8 weights and their transposes", cached);
    if (s.ranks > 1) add("gradients of two buckets, not yet summed", unsummed_bytes(s));
    add("operands, one layer's gradients, logits", pack(work, unused) - always - cached);
    add("GEMM scratch, scales, tokens", always);
    if (layout.gradients_over_saved) add("gradients stored over activations", -layout.gradients_over_saved);
    add("alignment", layout.total - total_bytes(plan));  // and room for padding tokens
    add("CUDA context and loaded kernels (about)", GPU_CONTEXT);
    if (s.ranks > 1) add("page tables of the other GPUs' memory", page_tables(s.ranks, layout.total));
    return plan;
}

// -----------------------------------------------------------------------------------------------------------
// The map of buffers of ./train --plan full

// The named parts of the allocation first, then the workspace. Where gate and up were saved, there is
// something else when backward is done with them.
std::vector<BufferRow> buffer_plan(const Setup& s, const GpuFacts& facts) {
    const GpuLayout layout = gpu_layout(s, facts);
    const uint32_t backward = ALWAYS & ~FORWARD & ~HEAD;
    const Place gate_up = gate_up_gradient_in_place(s) ? layout.saved : Place{};
    const Place qkv = qkv_gradient_in_place(s) ? layout.saved : Place{};
    const Place gradients{*std::min_element(layout.sums.begin(), layout.sums.end()),
                          gradient_elements(s) * gradient_bytes(s)};
    const Place unsummed{*std::min_element(layout.gradients.begin(), layout.gradients.end()),
                         unsummed_bytes(s)};
    const std::vector<BufferRow> all = {
        {"weights", "weights", layout.weights, ALWAYS},
        {"remainder", "remainder of the FP32 master weights", layout.remainder, ALWAYS},
        {"moments", "first and second moments", layout.moments, ALWAYS},
        {"moment_scales", "max and k of the moments", layout.scales, ALWAYS},
        {"delayed", "amaxes of earlier steps", layout.delayed, ALWAYS},
        {"saved", "what all layers save for backward", layout.saved, ALWAYS & ~EMBEDDING_BACKWARD & ~UPDATE},
        {"saved", "over the saved gate and up: operand g, their gradient", gate_up, GATE_UP_BACKWARD},
        {"saved", "over the saved gate and up: gradient of q, k, v", qkv, ATTENTION_BACKWARD | QKV_BACKWARD},
        {"gradients",
         layout.gradients_over_saved ? "gradients, over activations that are no longer needed" : "gradients",
         gradients, backward | HEAD},
        {"gradients", "gradients of two buckets, before they are summed over the ranks", unsummed,
         backward | HEAD},
        {"final_norm_input", "input of the final norm", layout.final_norm_input, FORWARD_DOWN | HEAD},
        {"final_norm_input", "gradient of the residual stream", layout.final_norm_input,
         (backward | HEAD) & ~UPDATE}};
    std::vector<BufferRow> table;
    for (const BufferRow& row : all)
        if (row.place.bytes) table.push_back(row);
    for (const WorkRow& row : work_rows(s, facts))
        for (const Use& use : row.uses)
            if (const Place& place = layout.work[int(row.work)]; row.bytes && use.phases)
                table.push_back({row.name, use.contents, place, use.phases});
    return table;
}

// -----------------------------------------------------------------------------------------------------------
// What a GPU does not support

static std::string version_text(int number, int major) {
    return concat(number / major, ".", number % major);
}

Recipe recipe_on_gpu(const Recipe& r, bool fp8_gemm) {
    Recipe changed = r;
    if (!fp8_gemm && r.x.fp8()) changed.x = changed.w = changed.g = Quant{r.compute};
    return changed;
}

// Each why_unsupported() returns the problem, then a remedy; "" if there is no problem.
std::string why_unsupported(const OptimizerFormat& o) {
    const bool per_tensor = o.group == 0;
    for (Format format : {o.m, o.v}) {
        if (format == Format::F16 && !per_tensor)
            return concat("--optimizer ", o.name, " has fp16 moments in groups of 128, which only the CPU "
                          "supports; use --optimizer fp8lm, or --device cpu.");
        if (!per_tensor && is_fp8(format) && !o.expand && !o.keep_positive)
            return concat("--optimizer ", o.name, " rounds small second moments to zero, which only the CPU "
                          "supports; use --device cpu.");
        if (per_tensor && (o.expands(format) || (is_fp8(format) && o.keep_positive)))
            return concat("--optimizer ", o.name, " has one scale per tensor with expansion or a smallest "
                          "positive code, which only the CPU supports; use --device cpu.");
    }
    return "";
}

std::string why_unsupported(const Recipe& r, int capability) {
    const std::string recipe = concat("--recipe ", r.name), compute = info(r.compute).name;
    const bool bf16 = r.compute == Format::BF16;
    for (const Quant& q : {r.x, r.w, r.g}) {
        if (q.fp8() && !bf16)
            return concat(recipe, " has ", q.text(), " operands with compute dtype ", compute,
                          ", which only the CPU supports; use compute dtype bf16, or --device cpu.");
        if (q.fp8() && !(q.granularity == PER_TENSOR) && capability != HOPPER_CAPABILITY)
            return concat(recipe, " has ", q.text(), " operands, which need a GPU of compute capability 9.0, "
                          "but this one has ", version_text(capability, 10), "; use --recipe colossal, or "
                          "--device cpu.");
    }
    for (const Quant& q : {r.nonlinear, r.attention})
        if (!(q == Quant{r.compute}) && !(q == Q_GROUP && bf16))
            return concat(recipe, " saves ", q.text(), " tensors with compute dtype ", compute,
                          ", which only the CPU supports; save ", Q_GROUP.text(),
                          " with compute dtype bf16, or the compute dtype, or use --device cpu.");
    return "";
}

// From the outermost cause to the innermost: without a driver, nothing else can be asked.
std::string why_unsupported(const GpuFound& found) {
    auto version = [](int v) { return version_text(v / 10, 100); };
    const std::string capability = version_text(found.capability, 10);
    if (found.driver == 0) return "no NVIDIA driver was found: install one, or run with --device cpu";
    if (found.driver_too_old)
        return concat("the NVIDIA driver supports CUDA ", version(found.driver), ", but this program needs ",
                      version(found.runtime),
                      ": update the driver, or run make again with an older CUDA toolkit");
    if (!found.error.empty()) return concat("CUDA does not start (", found.error, "): check nvidia-smi");
    if (found.gpus == 0) return "no NVIDIA GPU was found: check nvidia-smi and CUDA_VISIBLE_DEVICES";
    if (found.capability < BF16_CAPABILITY)
        return concat("this GPU has compute capability ", capability,
                      ", but BF16 needs 8.0: use a newer one, or --device cpu");
    if (!found.kernels_fit)  // from Hopper on, kernels for one architecture have an "a" in its name
        return concat("this program was built for another GPU, not for compute capability ", capability,
                      ": run make clean, then make GPU_ARCH=", found.capability,
                      found.capability >= 90 ? "a" : "");
    return "";
}

// -----------------------------------------------------------------------------------------------------------
// Printing

namespace {

double mib(int64_t bytes) { return bytes / double(1 << 20); }

// Without a GPU the plan assumes that the cached weights fit. (On a GPU, facts_for in gpu/this_gpu.cu asks
// for its memory.)
GpuFacts facts_of(const Setup& s) { return {GpuFacts().multiprocessors, caches_weights(s)}; }

// A paragraph, in lines that fit 110 columns.
template <class... Parts>
void print_note(const Parts&... parts) {
    std::string line = " ";
    std::istringstream words(concat(parts...));
    for (std::string word; words >> word; line += " " + word)
        if (line.size() + word.size() > 107) std::printf("%s\n", line.c_str()), line = " ";
    std::printf("%s\n", line.c_str());
}

}  // namespace

// The table, then notes about what its cells cannot say.
void print_precision_plan(const Setup& s) {
    const Recipe& r = s.recipe;
    const LinearFormats q = linear_formats(s);
    const bool fp8 = q.x.fp8();
    std::printf("Precision plan: formats and scales of what operators read, write and save for backward\n");
    std::printf("  recipe %s: %s\n", r.name, r.about);
    if (fp8 || r.nonlinear.fp8() || r.attention.fp8())
        print_note("FP8 scales: one per tensor (\"tensor\"), per row (\"row\"), or per block: 1x16 are 16 "
                   "values of a token.");
    const char* const format = "  %-34s %-25s %-13s %-23s %s\n";
    std::printf("\n");
    std::printf(format, "operator", "reads", "weights", "writes", "saves for backward");
    std::string part;
    for (const PrecisionRow& row : precision_plan(s)) {
        if (row.part != part && !row.part.empty()) std::printf("  %s\n", row.part.c_str());
        part = row.part;
        const std::string name = (part.empty() ? "" : "  ") + row.name;
        std::printf(format, name.c_str(), row.input.c_str(), row.weights.c_str(), row.output.c_str(),
                    row.saved.c_str());
    }
    std::printf("\n");
    auto adds = [&](int gemm) { return r.sums.fast[gemm] ? "fast" : "exact"; };
    if (fp8)
        print_note("FP8 GEMMs on Hopper accumulate: ", adds(0), " in fprop, ", adds(1), " in dgrad, ",
                   adds(2), " in wgrad.");
    if (fp8 && r.scaling == Scaling::Delayed)
        print_note("Linear layers use delayed scaling: a scale comes from the largest amax of the last ",
                   r.history, " steps, with a margin of ", r.margin, " powers of two. Without any amax, as "
                   "in the first step, they are scaled just in time.");
    if (fp8 && (!r.x.granularity.symmetric() || !r.g.granularity.symmetric()))
        print_note("Rows and blocks of an operand lie along the dimension that its GEMM reduces over: in "
                   "wgrad, along the tokens.");
    if (q.fallback)
        print_note("Linear layers fall back to ", info(r.compute).name, " for the whole run, also for "
                   "samples and evaluation: --batch x --seq is ", s.B * s.T,
                   " tokens, which is not a multiple of 16.");
    if (!s.keep_gradients)
        print_note("Backward updates each linear layer once its gradient is complete, before the norm of all "
                   "gradients is known: so --clip must be 0. If a gradient is not finite, its bucket and all "
                   "later ones of the step are not updated.");
}

// The run beside the BF16 baseline, row by row and by category; then what a GPU adds, and what ranks send.
void print_memory_plan(const Setup& s) {
    const Setup other = bf16_baseline(s);
    const std::vector<MemoryRow> plan = memory_plan(s), beside = memory_plan(other);
    auto title = [](const Setup& t) {
        const OptimizerFormat& o = t.optimizer;
        return concat("recipe ", t.recipe.name, ", moments ", info(o.m).name, " ", info(o.v).name);
    };
    std::printf("\nMemory plan: %ld parameters, %ld layers, %ld tokens per micro-batch\n\n",
                parameter_count(s.config), s.config.L, s.B * s.T);
    std::printf("  %-37s %35s  %35s\n", "", title(s).c_str(), title(other).c_str());
    std::printf("  %-37s %15s %19s  %15s %19s  item\n", "", "MiB", "bytes per item", "MiB",
                "bytes per item");
    for (size_t i = 0; i < plan.size(); i++) {
        const MemoryRow &row = plan[i], same = i < beside.size() ? beside[i] : MemoryRow{row.category, "", 0};
        std::printf("  %-37s %15.1f %19.3f  %15.1f %19.3f  %s\n", row.name.c_str(), mib(row.bytes),
                    row.of_one(), mib(same.bytes), same.of_one(), row.per);
    }
    std::printf("\n");
    for (const auto& [name, category] :
         {std::pair{"weights", Category::Weights}, {"gradients", Category::Gradients},
          {"optimizer", Category::Optimizer}, {"activations", Category::Activations},
          {"total without workspace", Category::All}})
        std::printf("  %-37s %15.1f %19s  %15.1f\n", name, mib(total_bytes(plan, category)), "",
                    mib(total_bytes(beside, category)));

    const std::vector<MemoryRow> gpu = gpu_memory_plan(s, facts_of(s));
    auto line = [](const std::string& name, int64_t bytes) {
        std::printf("  %-40s %8.1f\n", name.c_str(), mib(bytes));
    };
    auto heading = [](const std::string& text) { std::printf("\n  %-45s MiB\n", text.c_str()); };
    heading(s.ranks > 1 ? concat("On the GPU of each of ", s.ranks, " ranks, at most") : "On one GPU");
    line("total without workspace", total_bytes(plan));
    for (const MemoryRow& row : gpu)
        if (row.category == Category::Workspace) line(row.name, row.bytes);
    line("total", total_bytes(gpu));
    line("total of " + title(other), total_bytes(gpu_memory_plan(other, facts_of(other))));
    if (s.ranks > 1) {
        const Traffic bytes = traffic(s);
        heading(concat("Each of ", s.ranks, " ranks sends and receives per step"));
        line("gradients", bytes.gradients);
        line("weights", bytes.weights);
    }
    const int64_t C = s.config.C, count = parameter_count(s.config);
    auto moments = [&](const auto& rows) { return double(total_bytes(rows, Category::Optimizer)) / count; };
    std::printf(
        "\n  saved activations: %.2f C bytes per token and layer (BF16: %.2f C); hidden size C = %ld\n"
        "  optimizer states%s: %.3f bytes per parameter (FP32 moments: %.3f)\n",
        saved_bytes_per_token_and_layer(s) / C, saved_bytes_per_token_and_layer(other) / C, C,
        s.ranks > 1 ? " of each rank" : "", moments(plan), moments(beside));
}

// A buffer with several contents prints its place once.
void print_buffers(const Setup& s) {
    std::printf("\nBuffers of one GPU, in one allocation. Two may share memory if no phase uses both.\n\n");
    for (size_t i = 0; i < std::size(PHASE_NAMES); i++)
        std::printf("  phase %2zu  %s\n", i + 1, PHASE_NAMES[i]);
    std::printf("\n");
    print_note("A phase that uses a buffer stands in its row, with the last digit of its number.");
    std::printf("  %-25s %10s %12s  %-18s  %s\n", "buffer", "MiB", "offset, MiB", "phases", "contents");
    std::string last;
    for (const BufferRow& row : buffer_plan(s, facts_of(s))) {
        const double size = mib(row.place.bytes), offset = mib(row.place.offset);
        if (row.name == last) std::printf("  %-25s %10s %12s  ", "", "", "");
        else std::printf("  %-25s %10.1f %12.1f  ", row.name.c_str(), size, offset);
        for (size_t i = 0; i < std::size(PHASE_NAMES); i++)
            std::putchar(row.phases >> i & 1 ? "1234567890"[i % 10] : '.');
        std::printf("  %s\n", row.contents.c_str());
        last = row.name;
    }
}

}  // namespace coat
