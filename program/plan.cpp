// plan.cpp - the tables of plan.h, computed from those of coat.h and model.h: a new recipe or model is a new
// row there.
#include "plan.h"

#include <algorithm>

namespace coat {

// It ends at a tenth of the peak, as in the paper's runs (alpha_f = 0.1). The first step already has a
// learning rate above 0, so no step of the warm-up is lost.
float learning_rate(double peak, int64_t warmup, int64_t steps, int64_t step) {
    constexpr double FLOOR = 0.1, PI = 3.14159265358979323846;
    if (step < warmup) return float(peak * (step + 1) / warmup);
    const double progress = std::min(1.0, double(step - warmup) / std::max<int64_t>(1, steps - warmup));
    return float(peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + std::cos(progress * PI))));
}

double flops_per_token(const ModelConfig& c, int64_t T) {
    double weights = 0;
    for (const Param& p : parameters(c))
        if (p.role.linear || p.name == (c.tied ? "embedding" : "head"))
            weights += double(used_elements(c, p));
    return 6 * (weights + double(c.L * c.q_cols() * T));
}

double peak_tflops(const std::string& gpu, bool fp8) {
    const struct {
        const char* name;
        double bf16, fp8;
    } table[] = {{"H100 PCIe", 756, 1513},  // and GH200 as H200
                 {"H100", 989, 1979},
                 {"H200", 989, 1979},
                 {"L40S", 362, 733},
                 {"RTX 4090", 165, 330}};
    for (const auto& row : table)
        if (gpu.find(row.name) != gpu.npos) return fp8 ? row.fp8 : row.bf16;
    return 0;
}

// The messages below name the flag that is at fault and the values that would do.
void validate(const Setup& s) {
    validate(s.config);
    if (s.T > s.config.longest())
        throw Error("--seq ", s.T, " is too long for the positions or the sliding window of ", s.config.name,
                    "; use at most --seq ", s.config.longest(), ".");
    // Two dimensions of a GPU's grid have at most 65,535 blocks: of sequences, and of tiles of 128 tokens.
    constexpr int64_t MOST = 65535;
    if (s.B > MOST || s.B * s.T > 128 * MOST)
        throw Error("--batch ", s.B, " with --seq ", s.T, " is more than ", MOST, " sequences or ",
                    128 * MOST, " tokens; use a smaller --batch and more --accumulate.");
    const bool groups = s.recipe.attention.fp8(), fp32 = s.recipe.compute == Format::F32;
    if (fp32 && (groups || !s.master))
        throw Error(groups ? "--attention groups" : "--master none", " needs BF16, but --recipe ",
                    s.recipe.name, " computes in FP32; leave the flag out, or choose --recipe coat.");
    if (!s.keep_gradients && s.accumulate > 1)
        throw Error("--gradients none keeps nothing to add to; use --accumulate 1 and a larger --batch.");
    if (s.ranks > 1 && s.optimizer.group == 0)
        throw Error("--optimizer ", s.optimizer.name, " has one scale per tensor, of which ", s.ranks,
                    " ranks cannot keep parts; use one rank, or another --optimizer.");
}

std::vector<PrecisionRow> precision_plan(const Setup& s) {
    const Recipe& r = s.recipe;
    const LinearFormats q = linear_formats(s);
    const bool gated = s.config.arch.gated, remainder = s.master && r.compute != Format::F32;
    const std::string compute = info(r.compute).name, fp32 = info(Format::F32).name, none = "-",
                      nonlinear = r.nonlinear.text() + ", " + compute, x = q.x.text(), g = q.g.text(),
                      attention = (r.attention.fp8() ? r.attention.text() + ", " : "") + compute,
                      sum = compute + (r.nonlinear.fp8() ? " and " + r.nonlinear.text() : ""),
                      falls = q.fallback ? " (falls back)" : "",
                      dw = concat(info(gradient_format(s)).name, " gradient"),
                      weights = remainder ? compute + " + 16 bits = " + fp32 : compute;
    std::vector<PrecisionRow> table;
    auto add = [&](const std::string& part, const std::vector<Operator>& operators) {
        for (const Operator& o : operators) table.push_back({part, o});
    };
    auto moment = [&](const char* name, Format f) {
        const std::string of = s.optimizer.group == 0 ? " per tensor" : " per 128",
                          scale = s.optimizer.expands(f) ? ", max and k" + of
                                  : is_scaled(f)         ? ", max" + of
                                                         : "";
        return Operator{name, info(f).name, none, info(f).name + scale};
    };
    add("", {{"embedding", "tokens", compute, sum}});
    add(concat("each of ", s.config.L, " layers"), block(s.config, r, q));
    add("",
        {{"final norm", compute, compute, compute, {{Saved{}, "its input", s.config.C, Quant{r.compute}}}},
         {"head", compute, compute, compute},
         {"cross-entropy", compute, none, fp32}});
    // Every linear layer has the same pair of GEMMs in backward.
    add("backward", {{"linear layers, dgrad" + falls, g, q.w.text(), compute},
                     {"linear layers, wgrad" + falls, g + " x " + x, none, dw},
                     {gated ? "SiLU(gate) x up" : "GELU", nonlinear, none, g},
                     {"norms", nonlinear, compute, compute},
                     {"attention", attention, none, compute},
                     {"head", compute, compute, compute}});
    add("update", {{"AdamW, weights", weights, none, weights + (s.master ? "" : ", stochastic")},
                   moment("AdamW, first moment", s.optimizer.m),
                   moment("AdamW, second moment", s.optimizer.v)});
    return table;
}

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

// Bytes of one element of the gradients.
static int64_t gradient_bytes(const Setup& s) { return info(gradient_format(s)).bytes; }

BucketElements bucket_elements(const Setup& s) {
    BucketElements e;
    for (const BucketRange& bucket : bucket_ranges(parameters(s.config)))
        if (bucket.first == 0 && s.config.tied) e.embedding = bucket.elements;
        else e.largest = std::max(e.largest, bucket.elements);
    return e;
}

std::vector<BucketRange> bucket_ranges(const std::vector<Param>& params) {
    std::vector<BucketRange> table;
    for (size_t i = 0; i < params.size(); i++) {
        if (i == 0 || params[i].bucket != params[i - 1].bucket) table.push_back({i, i, params[i].offset, 0});
        table.back().last = i + 1;
        table.back().elements += params[i].padded_size();
    }
    return table;
}

// A row that only some runs have comes last, so that the others have the same place in every plan.
std::vector<MemoryRow> memory_plan(const Setup& s) {
    const ModelConfig& c = s.config;
    const int64_t N = s.B * s.T, params = parameter_count(c);
    const Format compute = s.recipe.compute;

    // Flat buffers in the order of parameters(), each parameter padded to whole groups. A weight that is
    // stored in FP32 is its own master; a BF16 weight has a 16-bit remainder beside it.
    int64_t weights = 0, state = 0, m = 0, v = 0, moment_scales = 0, scaling = 0;
    for (const Param& p : parameters(c)) {
        const Slice slice = owned(s, p);
        weights += padded(kept_weight(s, p)), state += padded(slice);
        for (const auto& [bytes, wanted] : {std::pair{&m, s.optimizer.m}, {&v, s.optimizer.v}}) {
            const Format f = p.moment(wanted);
            *bytes += padded(slice) * info(f).bytes;
            moment_scales += s.optimizer.scales(f, slice.count) * 4 * (s.optimizer.expands(f) ? 2 : 1);
        }
    }
    for (const StateTensor& t : scaling_tensors(c, s.recipe)) scaling += t.total_bytes();
    // Elements whose gradients, or sums of gradients over the ranks, exist at the same time.
    const BucketElements e = bucket_elements(s);
    const int64_t gradients = s.keep_gradients ? state
                              : s.ranks > 1    ? std::max(e.largest, e.embedding)
                                               : e.largest + e.embedding;
    auto format = [](const char* name, Format f) { return concat(name, " (", info(f).name, ")"); };
    const std::string scales = concat(s.optimizer.expand ? "max and k" : "max",
                                      s.optimizer.group == 0 ? " per tensor" : " per group");
    const char* const kept = s.keep_gradients ? "gradients" : "gradients of the largest bucket";
    const int64_t remainder = compute == Format::F32 || !s.master ? 0 : state * 2;
    using C = Category;
    std::vector<MemoryRow> plan = {
        {C::Weights, format("weights", compute), weights * info(compute).bytes, "parameter", params},
        {C::Weights, "remainder of the FP32 masters (int16)", remainder, "parameter", params},
        {C::Gradients, format(kept, gradient_format(s)), gradients * gradient_bytes(s), "parameter", params},
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
    s.master = s.keep_gradients = true;
    return s;
}

// -----------------------------------------------------------------------------------------------------------
// One GPU

// The lowest offset from the first saved activation at which all gradients may begin. The gradients of a
// parameter are first written when later layers need no saved activations any more. A layer has four buckets;
// the tied embedding's gradient is written first by the head.
int64_t gradients_offset(const Setup& s) {
    const ModelConfig& c = s.config;
    const int64_t layer_bytes = saved_layer_bytes(s);
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

int64_t saved_layer_bytes(const Setup& s) {
    int64_t bytes = 0;
    for (const SavedTensor& t : saved_per_layer(s)) bytes += round_up(t.bytes(gpu_tokens(s)), GPU_ALIGNMENT);
    return bytes;
}

bool caches_weights(const Setup& s) { return s.accumulate > 1 && linear_formats(s).w.fp8() && s.ranks == 1; }

std::vector<MemoryRow> gpu_memory_plan(const Setup& s) {
    std::vector<MemoryRow> plan = memory_plan(s);
    const int64_t allocated = arena_bytes(s, caches_weights(s));
    if (!allocated) return plan;
    auto add = [&](const char* name, int64_t bytes) { plan.push_back({Category::Workspace, name, bytes}); };
    const int64_t saved = s.config.L * saved_layer_bytes(s), all = total_bytes(plan, Category::Gradients),
                  over = s.keep_gradients ? std::min(saved - gradients_offset(s), all) : 0;
    if (over > 0) add("gradients stored over activations", -over);
    add("operands, one layer's gradients, logits", allocated - total_bytes(plan));
    add("CUDA context and loaded kernels (about)", GPU_CONTEXT);
    if (s.ranks > 1) add("page tables of the other GPUs' memory", page_tables(s.ranks, allocated));
    return plan;
}

Recipe recipe_on_gpu(const Recipe& r, bool fp8_gemm) {
    Recipe changed = r;
    if (!fp8_gemm && r.x.fp8()) changed.x = changed.w = changed.g = Quant{r.compute};
    return changed;
}

// -----------------------------------------------------------------------------------------------------------
// Printing

static double mib(int64_t bytes) { return double(bytes) / (1 << 20); }

// The table, then what its cells cannot say.
void print_precision_plan(const Setup& s) {
    const Recipe& r = s.recipe;
    const LinearFormats q = linear_formats(s);
    std::printf(
        "Precision plan: formats and scales of what operators read, write and save for backward\n"
        "  recipe %s: %s\n"
        "  A scale for each tensor, row, or block: 1x16 are 16 values of a token.\n\n",
        r.name, r.about);
    const char* const format = "  %-34s %-25s %-13s %-23s %s\n";
    std::printf(format, "operator", "reads", "weights", "writes", "saves for backward");
    std::string before;
    for (const auto& [part, o] : precision_plan(s)) {
        if (part != before && !part.empty()) std::printf("  %s\n", part.c_str());
        before = part;
        std::string saves;
        for (const SavedTensor& t : o.saves)
            saves += concat(saves.empty() ? "" : "; ", t.name, " ", t.quant.text());
        std::printf(format, ((part.empty() ? "" : "  ") + o.name).c_str(), o.reads.c_str(), o.weights.c_str(),
                    o.writes.c_str(), saves.empty() ? "-" : saves.c_str());
    }
    auto sums = [&](int gemm) { return r.sums.fast[gemm] ? "fast" : "exact"; };
    if (q.x.fp8())
        std::printf("\n  FP8 GEMMs on Hopper accumulate: %s in fprop, %s in dgrad, %s in wgrad.\n", sums(0),
                    sums(1), sums(2));
    if (q.x.fp8() && r.scaling == Scaling::Delayed)
        std::printf("  Delayed scaling: a scale comes from the largest amax of the last %d steps.\n",
                    r.history);
    if (q.fallback)
        std::printf("\n  Linear layers fall back to %s: --batch x --seq is %ld tokens, no multiple of 16.\n",
                    info(r.compute).name, s.B * s.T);
}

// The run beside the BF16 baseline, row by row and by category; then what a GPU adds.
void print_memory_plan(const Setup& s) {
    const Setup other = bf16_baseline(s);
    const std::vector<MemoryRow> plan = memory_plan(s), gpu = gpu_memory_plan(s);
    std::vector<MemoryRow> beside = memory_plan(other);
    beside.resize(plan.size(), {Category::Weights, "", 0});  // it has fewer rows, or as many
    auto title = [](const Setup& t) {
        const OptimizerFormat& o = t.optimizer;
        return concat("recipe ", t.recipe.name, ", moments ", info(o.m).name, " ", info(o.v).name);
    };
    const int64_t C = s.config.C, count = parameter_count(s.config);
    std::printf("\nMemory plan: %ld parameters, %ld layers, %ld tokens per micro-batch\n\n", count,
                s.config.L, s.B * s.T);
    std::printf("  %-37s %35s  %35s\n", "", title(s).c_str(), title(other).c_str());
    std::printf("  %-37s %15s %19s  %15s %19s  item\n", "", "MiB", "bytes per item", "MiB", "bytes per item");
    for (size_t i = 0; i < plan.size(); i++)
        std::printf("  %-37s %15.1f %19.3f  %15.1f %19.3f  %s\n", plan[i].name.c_str(), mib(plan[i].bytes),
                    plan[i].of_one(), mib(beside[i].bytes), beside[i].of_one(), plan[i].per);
    std::printf("\n");
    for (const auto& [name, category] : {std::pair{"weights", Category::Weights},
                                         {"gradients", Category::Gradients},
                                         {"optimizer", Category::Optimizer},
                                         {"activations", Category::Activations},
                                         {"total without workspace", Category::All}})
        std::printf("  %-37s %15.1f %19s  %15.1f\n", name, mib(total_bytes(plan, category)), "",
                    mib(total_bytes(beside, category)));
    auto line = [](const std::string& name, int64_t bytes) {
        std::printf("  %-40s %8.1f\n", name.c_str(), mib(bytes));
    };
    if (gpu.size() > plan.size()) {
        std::printf("\n  %-45s MiB\n", s.ranks > 1 ? "On the GPU of each rank, at most" : "On one GPU");
        line("total without workspace", total_bytes(plan));
        for (size_t i = plan.size(); i < gpu.size(); i++) line(gpu[i].name, gpu[i].bytes);
        line("total", total_bytes(gpu));
        line("total of " + title(other), total_bytes(gpu_memory_plan(other)));
    }
    auto moments = [&](const auto& rows) { return double(total_bytes(rows, Category::Optimizer)) / count; };
    std::printf(
        "\n  saved activations: %.2f C bytes per token and layer (BF16: %.2f C); hidden size C = %ld\n"
        "  optimizer states%s: %.3f bytes per parameter (FP32 moments: %.3f)\n",
        saved_bytes_per_token_and_layer(s) / C, saved_bytes_per_token_and_layer(other) / C, C,
        s.ranks > 1 ? " of each rank" : "", moments(plan), moments(beside));
}

}  // namespace coat
