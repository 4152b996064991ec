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

void validate(const Setup& s) {
    validate(s.config);
    if (s.T > s.config.max_T)
        throw Error("--seq " + std::to_string(s.T) + " is longer than the " + std::to_string(s.config.max_T) + " positions of " +
                    s.config.name + "; use at most --seq " + std::to_string(s.config.max_T) + ".");
    // Kernels count the elements of one micro-batch's widest matrix, and that of the logits, in 64 bits, but its rows in 32.
    if (s.B > INT32_MAX / s.T)
        throw Error("--batch " + std::to_string(s.B) + " times --seq " + std::to_string(s.T) +
                    " is more than 2^31 tokens; use a smaller --batch and more --accumulate.");
}

// ---------------------------------------------------------------------------------------------------------------------
// The precision flow, in the order of a step (paper section 5, figure 2)

std::vector<PrecisionRow> precision_plan(const Setup& s) {
    const ModelConfig& c = s.config;
    const Recipe& r = s.recipe;
    const std::string stream = info(r.stream).name, fp32 = info(Format::F32).name;
    const std::string nonlinear = r.nonlinear.text(), pair = r.nonlinear.fp8() ? stream + " and " + nonlinear : stream;
    const std::string layers = "each of " + std::to_string(c.L) + " layers", none = "-";

    std::vector<PrecisionRow> table;
    auto row = [&](const std::string& part, const std::string& name, const std::string& input, const std::string& weights,
                   const std::string& output, const std::string& saved) {
        table.push_back({part, name, input, weights, output, saved});
    };
    auto operands = [&](int64_t out, int64_t in) { return linear_quant(r, s.B * s.T, out, in); };
    auto named = [](const std::string& name, const LinearQuant& q) { return q.fallback ? name + " (falls back)" : name; };
    auto linear = [&](const std::string& name, const std::string& input, int64_t out, int64_t in, const std::string& saved) {
        const LinearQuant q = operands(out, in);
        row(layers, named(name, q), input.empty() ? q.x.text() : input, q.w.text(), stream, saved);
    };
    auto produced = [&](int64_t out, int64_t in) { return operands(out, in).x.text(); };  // what the linear layer after it reads

    row("", "embedding", "tokens", stream, pair, none);
    row(layers, "norm 1", nonlinear, stream, produced(c.qkv_cols(), c.C), nonlinear + " input");
    linear("q, k, v projection", "", c.qkv_cols(), c.C, none);
    if (c.arch.rope) row(layers, "rotary positions", stream, none, stream, none);
    row(layers, "attention", stream, none, stream, stream + " q, k, v, output; fp32 log-sum-exp");
    linear("attention output projection", "", c.C, c.q_cols(), none);
    row(layers, "residual add", stream, none, pair, none);
    row(layers, "norm 2", nonlinear, stream, produced(c.up_cols(), c.C), nonlinear + " input");
    linear(c.arch.gated ? "gate and up projection" : "up projection", "", c.up_cols(), c.C, none);
    row(layers, c.arch.gated ? "SiLU(gate) x up" : "GELU", nonlinear, none, produced(c.C, c.F), nonlinear + " input");
    linear("down projection", "", c.C, c.F, none);
    row(layers, "residual add", stream, none, pair, none);
    row("", "final norm", stream, stream, stream, stream + " input");
    row("", "head", stream, stream, stream, none);
    row("", "cross-entropy", stream, none, fp32, none);

    // Every linear layer has the same pair of GEMMs in backward; those that fall back are told by their row above.
    const LinearQuant q = operands(c.up_cols(), c.C);
    row("backward", named("linear layers, dgrad", q), q.g.text(), q.w.text(), stream, none);
    row("backward", named("linear layers, wgrad", q), q.g.text() + " x " + q.x.text(), none, stream + " gradient", none);
    row("backward", "norms, activations", nonlinear + ", " + stream, stream, stream, none);
    row("backward", "attention, head", stream, stream, stream, none);
    for (const auto& [name, format] : {std::pair{"AdamW, first moment", s.optimizer.m}, std::pair{"AdamW, second moment", s.optimizer.v}})
        row("update", name, info(format).name, none, info(format).name,
            !is_fp8(format) ? none : s.optimizer.expand ? "fp32 max, k each 128" : "fp32 max each 128");
    return table;
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory

std::vector<MemoryRow> memory_plan(const Setup& s) {
    const ModelConfig& c = s.config;
    const int64_t N = s.B * s.T, live = parameter_count(c);
    const Format stream = s.recipe.stream;

    // Flat buffers in the order of parameters(), each parameter padded to whole groups. A weight that is held in FP32 is
    // its own master; a BF16 one has a 16-bit remainder beside it.
    int64_t elements = 0, moment[2] = {0, 0}, group_scales = 0;
    for (const Param& p : parameters(c)) {
        elements += p.padded_size();
        int which = 0;
        for (Format wanted : {s.optimizer.m, s.optimizer.v}) {
            const Format f = p.moment(wanted);
            moment[which++] += p.padded_size() * info(f).bytes;
            if (is_fp8(f)) group_scales += p.groups() * info(Format::F32).bytes * (s.optimizer.expand ? 2 : 1);
        }
    }
    auto format = [](Format f) { return std::string(" (") + info(f).name + ")"; };
    std::vector<MemoryRow> plan = {
        {Category::Weights, "weights" + format(stream), elements * info(stream).bytes, "parameter", live},
        {Category::Weights, "rest of the FP32 master", stream == Format::F32 ? 0 : elements * 2, "parameter", live},
        {Category::Gradients, "gradients" + format(stream), elements * info(stream).bytes, "parameter", live},
        {Category::Optimizer, "first moments" + format(s.optimizer.m), moment[0], "parameter", live},
        {Category::Optimizer, "second moments" + format(s.optimizer.v), moment[1], "parameter", live},
        {Category::Optimizer, s.optimizer.expand ? "max and k of each group" : "max of each group", group_scales, "parameter", live},
    };
    for (const SavedTensor& t : saved_per_layer(c, s.recipe))
        plan.push_back({Category::Activations, std::string(t.name) + " (" + t.quant.text() + ")", t.quant.bytes(N, t.cols) * c.L,
                        "token, layer", N * c.L});
    plan.push_back({Category::Activations, "final norm input" + format(stream), N * c.C * info(stream).bytes, "token", N});
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
    for (const SavedTensor& t : saved_per_layer(s.config, s.recipe)) bytes += t.quant.bytes(s.B * s.T, t.cols);
    return static_cast<double>(bytes) / static_cast<double>(s.B * s.T);
}

Setup bf16_beside(Setup s) {
    s.recipe = find_row(recipes(), "bf16", "--recipe");
    s.optimizer = find_row(optimizers(), "fp32", "--optimizer");
    return s;
}

// ---------------------------------------------------------------------------------------------------------------------
// Printing

namespace {

double mib(int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

void print_memory_line(const char* name, int64_t bytes, double per_unit, int64_t beside, double beside_per_unit, const char* unit) {
    std::printf("  %-38s %11.1f MiB %10.3f   %11.1f MiB %10.3f   %s\n", name, mib(bytes), per_unit, mib(beside), beside_per_unit, unit);
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
    if (falls_back)
        std::printf("  A linear layer falls back to %s where a side of its GEMMs is no multiple of 16; here --batch x --seq is %lld tokens.\n",
                    info(s.recipe.stream).name, static_cast<long long>(s.B * s.T));
}

void print_memory_plan(const Setup& s) {
    const Setup other = bf16_beside(s);
    const std::vector<MemoryRow> plan = memory_plan(s), beside = memory_plan(other);
    auto title = [](const char* which, const Setup& t) {
        return std::string(which) + t.recipe.name + ", moments " + info(t.optimizer.m).name + " " + info(t.optimizer.v).name;
    };
    std::printf("\nMemory plan: %lld parameters, %lld tokens a micro-batch, %lld layers\n",
                static_cast<long long>(parameter_count(s.config)), static_cast<long long>(s.B * s.T), static_cast<long long>(s.config.L));
    std::printf("  %-38s %26s   %26s\n", "", title("", s).c_str(), title("beside ", other).c_str());
    std::printf("  %-38s %26s   %26s   per\n", "", "bytes", "bytes");
    for (size_t i = 0; i < plan.size(); i++)
        print_memory_line(plan[i].name.c_str(), plan[i].bytes, plan[i].per_unit(), beside[i].bytes, beside[i].per_unit(), plan[i].unit);
    std::printf("\n");
    for (int category = 0; category < static_cast<int>(Category::Workspace); category++) {
        const Category which = static_cast<Category>(category);
        std::printf("  %-38s %11.1f MiB %10s   %11.1f MiB\n", CATEGORY_NAMES[category], mib(total_bytes(plan, which)), "",
                    mib(total_bytes(beside, which)));
    }
    std::printf("  %-38s %11.1f MiB %10s   %11.1f MiB   and workspace\n", "total", mib(total_bytes(plan)), "", mib(total_bytes(beside)));
    std::printf("\n  saved activations: %.2f C bytes per token and layer (beside %.2f C)\n",
                saved_bytes_per_token_and_layer(s) / static_cast<double>(s.config.C),
                saved_bytes_per_token_and_layer(other) / static_cast<double>(s.config.C));
    std::printf("  optimizer states: %.3f bytes per parameter (beside %.3f)\n", optimizer_bytes_per_parameter(s),
                optimizer_bytes_per_parameter(other));
}

}  // namespace coat
