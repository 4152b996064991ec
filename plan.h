// plan.h - what can be said of a run before it starts: the learning rate of every step, the format of every tensor and the
// bytes of every category (the paper's table of memory, for any model). Nothing here allocates or trains; but model.cu allocates by gpu_layout().
#pragma once
#include "coat.h"

namespace coat {

// A schedule is a linear warm-up to the peak, then the peak times a factor of the progress in [0, 1] from there to the end.
struct Schedule {
    const char* name;
    double (*factor)(double progress);
    const char* about;
};
const std::vector<Schedule>& schedules();
float learning_rate(const Schedule& schedule, double peak, int64_t warmup, int64_t steps, int64_t step);  // step counts from 0

// What trades memory beyond a recipe and an optimizer: a flag of two values each, the first of which is the default and loses nothing.
struct Choice {
    const char *name, *about;
};
struct MemoryMode {
    const char* flag;
    bool changes_numbers;  // so that a checkpoint is of one choice
    std::vector<Choice> choices;
    bool (*is_first)(const Setup&);
    void (*choose)(Setup&, bool first);
    const char* chosen(const Setup& s) const { return choices[is_first(s) ? 0 : 1].name; }
};
const std::vector<MemoryMode>& memory_modes();

// Sizes of a run, or modes, that cannot work, told before anything is allocated. The model's own sizes have their validate in coat.h.
void validate(const Setup& s);

// The precision flow (paper section 5): format and granularity of what every operator reads, writes and keeps for backward.
struct PrecisionRow {
    std::string part, name, input, weights, output, saved;
};
std::vector<PrecisionRow> precision_plan(const Setup& s);

// Everything that is held from one operator to the next. What an operator needs only while it runs (one layer's operands in FP8,
// logits, attention's partial sums) is workspace: it differs from device to device, and the device that has it adds the row.
enum class Category : uint8_t { Weights, Gradients, Optimizer, Activations, Workspace };
inline constexpr const char* CATEGORY_NAMES[] = {"weights", "gradients", "optimizer", "activations", "workspace"};

struct MemoryRow {
    Category category;
    std::string name;
    int64_t bytes;
    const char* per;  // what the figure beside the bytes is of one of
    int64_t count;    // how many of those there are
    double of_one() const { return static_cast<double>(bytes) / static_cast<double>(count); }
};
std::vector<MemoryRow> memory_plan(const Setup& s);

int64_t total_bytes(const std::vector<MemoryRow>& plan);
int64_t total_bytes(const std::vector<MemoryRow>& plan, Category category);
double optimizer_bytes_per_parameter(const Setup& s);
double saved_bytes_per_token_and_layer(const Setup& s);  // without the final norm's input, which is not a layer's

Setup bf16_baseline(Setup s);  // the same run in the bf16 recipe with FP32 moments and no mode that saves memory, which the plan is printed beside

// ---------------------------------------------------------------------------------------------------------------------
// One GPU: everything lies in one allocation, laid out here, so that the plan can be printed where there is no GPU.

// What operators need only while they run, in the order of a step. Two of them share memory unless a phase needs both; what a recipe does not need
// has 0 bytes. N here: gpu_tokens(); Q, QKV, U: columns of attention's output, of q, k and v, and of what the up product makes (ModelConfig).
enum class Work : uint8_t {
    // for the whole step
    GemmScratch,         // cuBLASLt's workspace, and between products room for what becomes FP32
    NormPartials,        // (2 x 4 a multiprocessor, C) partial sums of norm weights' and biases' gradients, FP32
    Tokens,              // (N)
    Targets,             // (N)
    EmbeddingOrder,      // (B T) places of the batch in the order of their tokens
    EmbeddingChunks,     // (B T) runs of equal tokens among them
    Losses,              // (N) FP32
    NormStatistics,      // (N, 2) a norm's mean and reciprocal deviation
    RopeTable,           // (T, HS/2) cosine and sine
    Scales,              // TensorScale, of every parameter and then of 12 operands of every layer (max and k of moments: GpuLayout::scales)
    Segments,            // AdamW's table of parameters
    Results,             // numbers that the host reads
    CachedWeights,         // FP8 weights of all layers, and their transposes
    // in some phases of it
    Residual,            // (N, C) residual stream
    Operand,             // (N, C or Q) operand x, or its transpose
    Hidden,              // (N, F) operand x of the down projection, or its transpose
    Weight,              // operand w of one linear layer, or its transpose
    Qkv,                 // (N, QKV) q, k, v of one layer
    AttentionOutput,     // (N, Q) of one layer
    Up,                  // (up to UP_TOKENS, U; all N unless scales are per tensor) what activation functions read, before it goes to groups
    Branch,              // (N, C or Q) a branch's output, or its gradient
    FinalNorm,           // (up to HEAD_TOKENS, C) final norm's output
    Logits,              // (up to HEAD_TOKENS, V)
    HeadGradient,        // (V, C) the head's gradient in FP32, summed over chunks
    Gradient,            // operand g
    GradientTransposed,  // operand g, transposed
    HiddenGradient,      // (N, F) gradient of the activation's output
    QkvGradient,         // (N, QKV) gradient of q, k, v
    Attention,           // what attention's backward needs
    ColumnPartials,      // partial sums of biases' gradients
    EmbeddingPartials,   // (B T, C) partial sums of the embedding's gradient
    Count
};

struct Place {
    int64_t offset = 0, bytes = 0;  // in the allocation; offsets are multiples of GPU_ALIGNMENT
};
inline constexpr int64_t MAX_SEQUENCES = 65535, MAX_TOKENS = 128 * MAX_SEQUENCES;  // of a micro-batch
inline constexpr int64_t GPU_ALIGNMENT = 256;
// What CUDA, cuBLASLt and the loaded kernels take beside it: measured on an H200 with CUDA 13.0; it depends on the driver and the GPU.
inline constexpr int64_t GPU_CONTEXT = int64_t(533) << 20;

struct MomentPlace {
    int64_t codes, max, k;  // offsets
};

struct GpuFacts {
    int64_t multiprocessors = 132;   // an H200 has as many
    bool cache_fp8_weights = false;   // make FP8 weights and their transposes once a step; else whenever they are needed
};

struct GpuLayout {
    int64_t tokens;                  // gpu_tokens()
    Place weights, remainder, moments, scales, saved, final_norm_input;
    Place delayed;                   // histories of delayed scaling, by operand and linear layer; their scales are among Work::Scales
    Place work[static_cast<int>(Work::Count)];
    std::vector<int64_t> gradients;  // offsets, by parameter; where none are kept, one bucket's lie where another's have been
    std::vector<MomentPlace> m, v;   // by parameter
    std::vector<Place> saved_codes;  // in the order of saved_per_layer(), from the layer's first byte; scales lie right behind
    int64_t layer_bytes;             // of saved, for one layer
    int64_t shared;                  // bytes of gradients that lie where activations were
    int64_t total;
};

// The parameters [first, last) of a bucket (Param::bucket), and the elements of the flat order that are theirs.
struct BucketRange {
    size_t first, last;
    int64_t offset, elements;
};
std::vector<BucketRange> bucket_ranges(const std::vector<Param>& params);  // by bucket

int64_t gpu_tokens(const Setup& s);     // rows that buffers are made for: a micro-batch's, up to a multiple of 16, as FP8 GEMMs want them of a prompt
// Kept gradients: a layer's are written when what later layers had saved is no longer needed: with one micro-batch a step they may lie there.
// (With more, the sum over micro-batches has to outlive the next forward pass.)
GpuLayout gpu_layout(const Setup& s, const GpuFacts& facts);
// memory_plan with the rows that a GPU adds; the total less GPU_CONTEXT is the allocation's, byte for byte.
std::vector<MemoryRow> gpu_memory_plan(const Setup& s, const GpuFacts& facts);
// A GPU without FP8 products runs the recipe's linear layers in the compute dtype.
Recipe recipe_on_gpu(const Recipe& r, bool fp8_gemm);
// A batch's logits, and what activation functions read before it is quantized, never exist whole: so many tokens' at a time do.
inline constexpr int64_t HEAD_TOKENS = 4096, UP_TOKENS = 8192;
// The head's gradient is a sum over those pieces, apart in FP32 where a BF16 sum would be rounded more often than four times.
inline bool head_sum_apart(Format gradient, int64_t tokens) { return gradient == Format::BF16 && tokens > 4 * HEAD_TOKENS; }

// Moments that no kernel holds, scales that a GPU's products do not know: one sentence with the cure; empty where it has them. A capability of
// 90 is 9.0.
inline constexpr int HOPPER_CAPABILITY = 90, FP8_CAPABILITY = 89, BF16_CAPABILITY = 80;
std::string why_unsupported(const OptimizerFormat& o);
std::string why_unsupported(const Recipe& r, int capability = HOPPER_CAPABILITY);

// What a machine's CUDA says of itself, and why no GPU of it can be used: one phrase with the cure; empty where one can.
struct GpuFound {
    int driver, runtime;     // CUDA versions, as CUDA tells them: 1000 major + 10 minor; driver 0: there is none
    bool driver_too_old;     // for this runtime
    std::string error;       // of starting CUDA, if any
    int gpus;
    int capability;
    bool kernels_fit;        // this program has code for it
};
std::string why_unsupported(const GpuFound& found);

void print_precision_plan(const Setup& s);
void print_memory_plan(const Setup& s);

}  // namespace coat
