// program/plan.cpp - the tables of plan.h, computed from common/recipes.h, common/architecture.h and
// common/model.h. A new recipe or model needs only its row in recipes() or known_models().
#include "plan.h"

#include <map>

#include "../common/state_tensors.h"
#include "../gpu/extra_buffers.h"

namespace coat {

// -----------------------------------------------------------------------------------------------------------
// The precision flow

namespace {

// The formats of a run, as they are printed.
struct FormatTexts {
    std::string compute;          // the compute format
    std::string saved_inputs;     // what norms and activations save, and read in forward and backward
    std::string saved_attention;  // what attention reads, writes and saves
    std::string x, w, g;          // the operands of linear layers
    std::string weight_gradient;  // of a linear layer
    std::string residual;         // the residual stream
    std::string weights;          // as the update reads and writes them
    std::string falls_back;       // follows the name of a linear layer that falls back to the compute format
    // If norm inputs are saved in groups, these follow the names of the last residual add and of the norms'
    // backward pass: the input of the final norm is not in groups.
    std::string last_layer, final_norm;
};

}  // namespace

static FormatTexts format_texts(const RunSettings& s) {
    const Recipe& recipe = s.recipe;
    const LinearFormats linear = linear_formats(s);
    const std::string compute = format_info(recipe.compute_format).name;
    const std::string saved_inputs = recipe.saved_inputs.text();
    const bool has_remainder = s.keep_masters && recipe.compute_format != Format::FP32;
    return {
        .compute = compute,
        .saved_inputs = saved_inputs,
        .saved_attention = recipe.saved_attention.text(),
        .x = linear.x.text(),
        .w = linear.w.text(),
        .g = linear.g.text(),
        .weight_gradient = concat(format_info(gradient_format(s)).name, " gradient"),
        .residual = recipe.saved_inputs.is_fp8() ? compute + " and " + saved_inputs : compute,
        .weights = has_remainder ? compute + " + 16 bits = fp32" : compute,
        .falls_back = linear.fallback ? " (falls back)" : "",
        .last_layer = recipe.saved_inputs.is_fp8() ? concat(" (last layer: ", compute, ")") : "",
        .final_norm = recipe.saved_inputs.is_fp8() ? concat(" (final norm: ", compute, ")") : "",
    };
}

// A saved tensor with its format: "norm 1 input e4m3 1x16".
static std::string saved_text(const RunSettings& s, SavedKind kind) {
    const SavedFormat t = saved_per_layer(s.config, s.recipe)[int(kind)];
    return concat(t.name, " ", t.format.text());
}

static std::vector<Operator> layer_operators(const RunSettings& s, const FormatTexts& f) {
    const Architecture& arch = s.config.arch;
    std::vector<Operator> layer = {
        {.name = "norm 1",
         .reads = f.saved_inputs,
         .weights = f.compute,
         .writes = f.x,
         .saves = saved_text(s, SavedKind::Norm1Input)},
        {.name = "q, k, v projection" + f.falls_back, .reads = f.x, .weights = f.w, .writes = f.compute}};
    if (arch.qk_norms)
        layer.push_back({.name = "norm of each head of q and k",
                         .reads = f.saved_attention,
                         .weights = f.compute,
                         .writes = f.compute});
    if (arch.rope) layer.push_back({.name = "rotary positions", .reads = f.compute, .writes = f.compute});
    // q, k and v are saved as attention reads them. Qwen3 saves what the norms of their heads read.
    Operator& makes_qkv = arch.rope && !arch.qk_norms ? layer.back() : layer[1];
    makes_qkv.writes = f.saved_attention;
    makes_qkv.saves = saved_text(s, SavedKind::Qkv);
    const std::vector<Operator> attention_and_mlp = {
        {.name = "attention",
         .reads = arch.qk_norms ? f.compute : f.saved_attention,
         .writes = f.saved_attention,
         .saves = saved_text(s, SavedKind::AttentionOutput) + "; " + saved_text(s, SavedKind::LogSumExp)},
        {.name = "attention output projection" + f.falls_back,
         .reads = f.x,
         .weights = f.w,
         .writes = f.compute},
        {.name = "residual add", .reads = f.compute, .writes = f.residual},
        {.name = "norm 2",
         .reads = f.saved_inputs,
         .weights = f.compute,
         .writes = f.x,
         .saves = saved_text(s, SavedKind::Norm2Input)},
        {.name = (arch.gated ? "gate and up projection" : "up projection") + f.falls_back,
         .reads = f.x,
         .weights = f.w,
         .writes = f.compute},
        {.name = arch.gated ? "SiLU(gate) x up" : "GELU",
         .reads = f.saved_inputs,
         .writes = f.x,
         .saves = saved_text(s, SavedKind::GateUp)},
        {.name = "down projection" + f.falls_back, .reads = f.x, .weights = f.w, .writes = f.compute},
        {.name = "residual add" + f.last_layer, .reads = f.compute, .writes = f.residual}};
    layer.insert(layer.end(), attention_and_mlp.begin(), attention_and_mlp.end());
    return layer;
}

static std::vector<Operator> head_operators(const FormatTexts& f) {
    const std::string fp32 = format_info(Format::FP32).name;
    return {{.name = "final norm",
             .reads = f.compute,
             .weights = f.compute,
             .writes = f.compute,
             .saves = "its input " + f.compute},
            {.name = "head", .reads = f.compute, .weights = f.compute, .writes = f.compute},
            {.name = "cross-entropy", .reads = f.compute, .writes = fp32}};
}

static std::vector<Operator> backward_operators(const RunSettings& s, const FormatTexts& f) {
    const std::string saved_and_dy = f.saved_inputs + ", " + f.compute;
    const std::string attention_reads =
        (s.recipe.saved_attention.is_fp8() ? f.saved_attention + ", " : "") + f.compute;
    return {
        {.name = "linear layers, dgrad" + f.falls_back, .reads = f.g, .weights = f.w, .writes = f.compute},
        {.name = "linear layers, wgrad" + f.falls_back,
         .reads = f.g + " x " + f.x,
         .writes = f.weight_gradient},
        {.name = s.config.arch.gated ? "SiLU(gate) x up" : "GELU", .reads = saved_and_dy, .writes = f.g},
        {.name = "norms" + f.final_norm, .reads = saved_and_dy, .weights = f.compute, .writes = f.compute},
        {.name = "attention", .reads = attention_reads, .writes = f.compute},
        {.name = "head", .reads = f.compute, .weights = f.compute, .writes = f.compute}};
}

// The update of one moment, whose format is f.
static Operator moment_operator(const RunSettings& s, const char* name, Format f) {
    std::string writes = format_info(f).name;
    if (is_fp8(f))
        writes += concat(s.optimizer.uses_expansion(f) ? ", max and k" : ", max", " per ", MOMENT_GROUP_SIZE);
    return {.name = name, .reads = format_info(f).name, .writes = writes};
}

static std::vector<Operator> update_operators(const RunSettings& s, const FormatTexts& f) {
    return {{.name = "AdamW, weights",
             .reads = f.weights,
             .writes = f.weights + (s.keep_masters ? "" : ", stochastic")},
            moment_operator(s, "AdamW, first moment", s.optimizer.m_format),
            moment_operator(s, "AdamW, second moment", s.optimizer.v_format)};
}

std::vector<PrecisionPart> precision_plan(const RunSettings& s) {
    const FormatTexts f = format_texts(s);
    const Operator embedding{
        .name = "embedding", .reads = "tokens", .weights = f.compute, .writes = f.residual};
    return {{"", {embedding}},
            {concat("each of ", s.config.L, " layers"), layer_operators(s, f)},
            {"", head_operators(f)},
            {"backward", backward_operators(s, f)},
            {"update", update_operators(s, f)}};
}

// -----------------------------------------------------------------------------------------------------------
// Memory

std::vector<MemoryRow> memory_plan(const RunSettings& s) {
    const ModelConfig& config = s.config;
    const int64_t N = s.B * s.T, count = parameter_count(config);
    const Format compute = s.recipe.compute_format, dw = gradient_format(s);
    // The bytes of all tensors that this rank keeps, by the end of their names: ".m", ".m.max", ...; "": the
    // weights.
    std::map<std::string, int64_t> kept_of;
    for (const auto& table : {weight_tensors(config), tensors_besides_weights(s)})
        for (const StateTensor& t : table)
            kept_of[t.name.substr(t.param.name.size())] += owned(s, t).count * t.bytes;
    int64_t scaling = 0;
    for (const StateTensor& t : delayed_scaling_tensors(config, s.recipe)) scaling += t.total_bytes();
    const GradientBufferSizes bucket = gradient_buffer_sizes(s);
    // How many elements of gradients exist at the same time.
    const int64_t gradients =
        s.keep_gradients ? param_places(s).back().memory_offset : bucket.largest + bucket.embedding;
    const bool fp32 = compute == Format::FP32;  // such a weight is its own master
    using enum Category;
    // Each row: its category, its name, its bytes, what an item is, and how many items there are. The names
    // have no formats, because --plan prints two runs with different formats in one row.
    std::vector<MemoryRow> plan = {
        {Weights, "weights", kept_of[""] * (fp32 ? 2 : 1), "parameter", count},
        {Weights, "remainder of the FP32 masters (int16)", fp32 ? 0 : kept_of[".remainder"], "parameter",
         count},
        {Weights, "histories and delayed scales", scaling, "parameter", count},
        {Gradients, "gradients", gradients * format_info(dw).bytes, "parameter", count},
        {Optimizer, "first moments", kept_of[".m"], "parameter", count},
        {Optimizer, "second moments", kept_of[".v"], "parameter", count},
        {Optimizer, "max and k of moments",
         kept_of[".m.max"] + kept_of[".m.k"] + kept_of[".v.max"] + kept_of[".v.k"], "parameter", count},
        {Activations, "final norm input", N * config.C * format_info(compute).bytes, "token", N},
    };
    for (const SavedFormat& t : saved_per_layer(s.config, s.recipe))
        plan.push_back({Activations, t.name, t.bytes(N) * config.L, "token and layer", N * config.L});
    return plan;
}

int64_t cpu_copies_bytes(const RunSettings& s) {
    return 2 * parameter_count(s.config) * format_info(Format::FP32).bytes;
}

int64_t total_bytes(const std::vector<MemoryRow>& plan, Category category) {
    int64_t bytes = 0;
    for (const MemoryRow& row : plan)
        if (category == Category::All || row.category == category) bytes += row.bytes;
    return bytes;
}

double saved_bytes_per_token_and_layer(const RunSettings& s) {
    int64_t bytes = 0;
    for (const SavedFormat& t : saved_per_layer(s.config, s.recipe)) bytes += t.bytes(s.B * s.T);
    return double(bytes) / (s.B * s.T);
}

RunSettings bf16_baseline(RunSettings s) {
    s.recipe = find_row(recipes(), "bf16", "--recipe");
    s.optimizer = find_row(optimizers(), "fp32", "--optimizer");
    s.keep_masters = true;
    s.keep_gradients = true;
    return s;
}

// -----------------------------------------------------------------------------------------------------------
// One GPU

std::vector<MemoryRow> gpu_memory_plan(const RunSettings& s) {
    std::vector<MemoryRow> plan = memory_plan(s);
    const int64_t known = total_bytes(plan), gradients = total_bytes(plan, Category::Gradients);
    // The bytes of gradients that lie where saved activations were. `known` counts them twice.
    int64_t overlap = 0;
    if (s.keep_gradients)
        overlap = std::clamp<int64_t>(s.config.L * saved_layer_bytes(s) - gradients_offset(s), 0, gradients);
    const int64_t arena = arena_bytes(s, should_cache_weights(s));
    const int64_t allocated = arena ? arena : known - overlap;  // without CUDA, no working memory is known
    const auto add = [&](const char* name, int64_t bytes) {
        plan.push_back({Category::Workspace, name, bytes, "", 0});
    };
    plan.push_back({Category::Gradients, "gradients stored over activations", -overlap, "", 0});
    add("operands, one layer's gradients, logits", allocated - (known - overlap));
    add("CUDA context and loaded kernels (about)", GPU_CONTEXT);
    add("page tables of the other GPUs' memory", page_table_bytes(s.ranks, allocated));
    return plan;
}

// -----------------------------------------------------------------------------------------------------------
// Text

std::string recipe_text(const RunSettings& s) {
    std::string text = concat(s.recipe.name, ": ", s.recipe.about);
    const bool wants_fp8 = find_row(recipes(), s.recipe.name, "--recipe").x.is_fp8();
    if (wants_fp8 && !s.recipe.x.is_fp8())
        text +=
            "; but this GPU has no FP8 GEMMs (they need compute capability 8.9), so linear layers run in "
            "BF16";
    if (linear_formats(s).fallback)
        text += "; but --batch x --seq is no multiple of 16, so linear layers run in BF16";
    return text;
}

static void print_precision(const RunSettings& s) {
    std::printf(
        "Formats: what each operator reads and writes, and what it saves for the backward pass\n"
        "  FP8 values share a scale: \"tensor\" is one scale for all, \"1x16\" one for 16 values of a "
        "token.\n"
        "  What one row writes and a later row saves is the same memory: the input that norm 1 saves is what "
        "the\n  residual add wrote.\n\n");
    const char* const format = "  %-34s %-25s %-13s %-23s %s\n";
    std::printf(format, "operator", "reads", "weights", "writes", "saves for backward");
    for (const auto& [part, operators] : precision_plan(s)) {
        if (!part.empty()) std::printf("  %s\n", part.c_str());
        for (const Operator& o : operators)
            std::printf(format, ((part.empty() ? "" : "  ") + o.name).c_str(), o.reads.c_str(),
                        o.weights.c_str(), o.writes.c_str(), o.saves.c_str());
    }
}

std::string gpu_fit_text(int64_t bytes, bool complete) {
    struct Gpu {
        const char* name;
        int64_t mib;  // as nvidia-smi reports it
    };
    constexpr Gpu GPUS[] = {{"24 GB (RTX 4090)", 24564},
                            {"40 GB (A100)", 40960},
                            {"48 GB (L40S)", 46068},
                            {"80 GB (H100)", 81559},
                            {"141 GB (H200)", 143771}};
    std::string fits, too_small;
    for (const Gpu& gpu : GPUS) {
        std::string& list = bytes <= gpu.mib << 20 ? fits : too_small;
        list += (list.empty() ? "" : ", ") + std::string(gpu.name);
    }
    std::string text = concat("On a GPU: ", complete ? "" : "more than ", gigabytes(bytes), " GB.");
    if (!complete) text += " (Only a program that was built with nvcc knows the working memory.)";
    if (complete && !fits.empty()) text += " Fits: " + fits + ".";
    if (!too_small.empty()) text += " Too small: " + too_small + ".";
    return text;
}

// The bytes of one item of a row; empty if it has none.
static std::string bytes_per_item(const MemoryRow& row) {
    char text[32] = "";
    if (row.count > 0) std::snprintf(text, sizeof text, "%.3f", double(row.bytes) / double(row.count));
    return text;
}

// Prints the rows: their memory in GB and the bytes of an item, of the run and of the BF16 run that it is
// compared with; then the sums of the categories. `complete`: the working memory is among them.
static void print_memory_rows(const std::vector<MemoryRow>& plan, const std::vector<MemoryRow>& baseline,
                              bool complete) {
    for (size_t i = 0; i < plan.size(); i++) {
        if (plan[i].bytes == 0 && baseline[i].bytes == 0) continue;
        std::printf("  %-40s %12.3f %19s  %12.3f %19s  %s\n", plan[i].name.c_str(),
                    double(plan[i].bytes) / 1e9, bytes_per_item(plan[i]).c_str(),
                    double(baseline[i].bytes) / 1e9, bytes_per_item(baseline[i]).c_str(), plan[i].per);
    }
    std::printf("\n");
    const char* const total = complete ? "total" : "total without working memory";
    const char* const names[] = {"weights", "gradients", "optimizer", "activations", "workspace", total};
    for (int i = 0; i <= int(Category::All); i++)
        if (const int64_t bytes = total_bytes(plan, Category(i)))
            std::printf("  %-40s %12.3f %19s  %12.3f\n", names[i], double(bytes) / 1e9, "",
                        double(total_bytes(baseline, Category(i))) / 1e9);
}

void print_plan(const RunSettings& s, bool on_gpu) {
    print_precision(s);
    const RunSettings other = bf16_baseline(s);
    const std::vector<MemoryRow> gpu_plan = gpu_memory_plan(s);
    const std::vector<MemoryRow> plan = on_gpu ? gpu_plan : memory_plan(s);
    const std::vector<MemoryRow> baseline = on_gpu ? gpu_memory_plan(other) : memory_plan(other);
    const int64_t C = s.config.C, count = parameter_count(s.config);
    const auto title = [](const RunSettings& t) {
        return concat(t.recipe.name, ", moments ", t.optimizer.name);
    };
    std::printf("\nMemory of %s parameters, %s and %s a micro-batch%s; a GB is 10^9 bytes\n\n",
                with_commas(count).c_str(), with_noun(s.config.L, "layer").c_str(),
                with_noun(s.B * s.T, "token").c_str(), s.ranks > 1 ? ", on the rank that needs most" : "");
    std::printf("  %-40s %32s  %32s\n", "", title(s).c_str(), ("to compare: " + title(other)).c_str());
    std::printf("  %-40s %12s %19s  %12s %19s  item\n", "", "GB", "bytes per item", "GB", "bytes per item");
    print_memory_rows(plan, baseline, on_gpu && built_with_cuda());
    const auto optimizer_bytes = [&](const auto& rows) {  // per parameter
        return double(total_bytes(rows, Category::Optimizer)) / double(count);
    };
    std::printf(
        "\n  saved activations: %.2f C bytes per token and layer (BF16: %.2f C); hidden size C = %ld\n"
        "  optimizer states%s: %.3f bytes per parameter (FP32 moments: %.3f)\n",
        saved_bytes_per_token_and_layer(s) / double(C), saved_bytes_per_token_and_layer(other) / double(C), C,
        s.ranks > 1 ? " of each rank" : "", optimizer_bytes(plan), optimizer_bytes(baseline));
    if (!on_gpu)
        std::printf(
            "\nNot in this table: the FP32 copies of weights and gradients with which the CPU computes.");
    if (total_bytes(gpu_plan) < total_bytes(plan))
        std::printf(
            "\nA GPU stores gradients over saved activations, so its total is below that of this table.");
    std::printf("\n%s\n", gpu_fit_text(total_bytes(gpu_plan), built_with_cuda()).c_str());
}

}  // namespace coat
