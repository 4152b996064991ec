// model.h - what a training run is made of: its settings, what each rank keeps, the state that a checkpoint
// holds, and the Model that train.cpp drives. reference.cpp implements it on the CPU and model.cu on the GPU,
// independently, so that a test that compares the two can fail. First weights and random bits are shared.
#pragma once
#include <algorithm>
#include <memory>
#include <numeric>

#include "coat.h"

#ifdef __CUDACC__
#define COAT_HD __host__ __device__
#else
#define COAT_HD
#endif

namespace coat {

// -----------------------------------------------------------------------------------------------------------
// First weights and random bits, the same on the CPU and the GPU

// A random first value with standard deviation std: four uniform integers add up to nearly a normal variate.
COAT_HD inline float init_value(uint64_t seed, uint64_t param, uint64_t i, float std) {
    uint64_t z = seed * 0x9E3779B97F4A7C15ull + (param << 40) + i;  // after splitmix64, mixed once more
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull + 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z = (z ^ (z >> 31)) * 0xBF58476D1CE4E5B9ull;
    z ^= z >> 32;
    const uint64_t sum = (z & 0xFFFF) + (z >> 16 & 0xFFFF) + (z >> 32 & 0xFFFF) + (z >> 48);
    return float(int64_t(sum) - 2 * 65535) * (std * (1.7320508f / 65536.0f));  // variance 1/3
}

// Stochastic rounding of a weight to BF16 (without a master): bf16 = (FP32 bits + 16 random bits) >> 16, so
// that the expected value is the FP32 value, and updates below half a step count on average.
// rounding_bits(key, q) are those of elements 4q .. 4q+3 of the flat order, from the lowest 16 bits on.
COAT_HD inline uint64_t rounding_bits(uint64_t key, uint64_t q) {
    uint64_t z = (key + q) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 32)) * 0x94D049BB133111EBull;
    return z ^ (z >> 29);
}
inline uint64_t rounding_key(uint64_t seed, int64_t step) {  // AdamW::step + skipped
    return rounding_bits(seed * 0x9E3779B97F4A7C15ull, static_cast<uint64_t>(step)) << 32;
}

// The first value of element i of parameter number `index`. Padding of the vocabulary is 0.
COAT_HD inline float initial(float std, bool ones, int64_t used, uint64_t seed, uint64_t index, int64_t i) {
    if (ones) return 1.0f;
    return std == 0 || i >= used ? 0.0f : init_value(seed, index, static_cast<uint64_t>(i), std);
}

// -----------------------------------------------------------------------------------------------------------
// One training run. It has one or more ranks: processes with a GPU each, or with a part of the CPU.

class ProcessGroup;  // ranks.h: the processes of a run, and how they exchange bytes

struct Setup {
    ModelConfig config;
    Recipe recipe;
    OptimizerFormat optimizer;
    int64_t B, T;            // one micro-batch
    int64_t accumulate = 1;  // micro-batches a step, on each rank
    uint64_t seed = 1;
    bool master = true;          // FP32 master weights; else BF16 weights only, rounded stochastically
    bool keep_gradients = true;  // --gradients none: a GPU updates each bucket within backward
    int64_t rank = 0, ranks = 1;
    ProcessGroup* processes = nullptr;  // of `ranks` processes; null if there is one, or for a plan
};

inline int64_t micro_batches(const Setup& s) { return s.accumulate * s.ranks; }  // of a step, on all ranks

inline LinearFormats linear_formats(const Setup& s) { return linear_formats(s.recipe, s.B * s.T); }
inline std::vector<SavedTensor> saved_per_layer(const Setup& s) {
    return saved_per_layer(s.config, s.recipe);
}

// The elements of a parameter that a rank owns: it adds all ranks' gradients of these, and keeps and updates
// their weights, masters and moments. Of a matrix each rank owns a part, and the matrix is gathered just
// before it is used (as ZeRO-3). The parts are whole shard units: no group of moments is cut, and sums over
// shard units are the same for any number of ranks. A matrix that is smaller than a shard unit belongs to the
// last rank. Of a vector, which is small, every rank owns the whole, and computes the same.
inline constexpr int64_t SHARD_UNIT = 64 * MOMENT_GROUP;
struct Slice {
    int64_t first, count;  // consecutive elements
};
inline Slice owned(const Param& p, int64_t rank, int64_t ranks) {
    const int64_t size = p.size(), units = ceil_div(size, SHARD_UNIT);
    if (p.rows == 1) return {0, size};
    const int64_t begin = std::min(size, units * rank / ranks * SHARD_UNIT),
                  end = std::min(size, units * (rank + 1) / ranks * SHARD_UNIT);
    return {begin, end - begin};
}
inline Slice owned(const Setup& s, const Param& p) { return owned(p, s.rank, s.ranks); }
inline int64_t padded(const Slice& s) { return round_up(s.count, MOMENT_GROUP); }

// The format in which gradients are accumulated. Adding to a BF16 sum rounds it, so BF16 is used for up to
// four additions: one for each micro-batch, or two if the head is also the embedding. More are summed in
// FP32. The micro-batches of all ranks count, so that the number of ranks does not change the format. What
// the ranks computed of one micro-batch each is added in FP32 and then rounded once.
inline Format gradient_format(const Setup& s) {
    return micro_batches(s) * (s.config.tied ? 2 : 1) > 4 ? Format::F32 : s.recipe.compute;
}

// -----------------------------------------------------------------------------------------------------------
// State: all tensors that a run needs to resume, by name. They are the same on the CPU and on a GPU.

struct StateTensor {
    std::string name;  // "layers.0.qkv" (weight), or with a suffix: .remainder .m .v .m.max .m.k .x.scale ...
    const char* dtype;  // safetensors' name
    int bytes;          // of one element
    std::vector<int64_t> shape;
    Param param;
    int64_t per = 1;  // how many elements of the parameter share one here (128 share a .max); 0: all

    int64_t size() const {
        return std::accumulate(shape.begin(), shape.end(), int64_t(1), std::multiplies<>());
    }
    int64_t total_bytes() const { return size() * bytes; }
};

// "layers.0.qkv.m.max" -> index of "layers.0.qkv", the longest parameter name that begins the tensor's name.
inline size_t param_of(const std::vector<Param>& params, const std::string& tensor) {
    size_t best = params.size();  // a bias follows its weight, so the last match is the longest
    for (size_t i = 0; i < params.size(); i++)
        if ((tensor + ".").compare(0, params[i].name.size() + 1, params[i].name + ".") == 0) best = i;
    if (best == params.size()) throw Error("The model has no tensor " + tensor + ".");
    return best;
}

inline std::vector<StateTensor> weight_tensors(const ModelConfig& c) {
    std::vector<StateTensor> table;
    for (const Param& p : parameters(c)) table.push_back({p.name, "BF16", 2, {p.rows, p.cols}, p});
    return table;
}

// Delayed scaling, for each operand of a linear layer: the amaxes of the last steps, the newest first, and
// the scale of the next step; 0 as long as the history is empty: then it is scaled just in time.
enum class LinearOperand : uint8_t { X, W, G };
inline constexpr int OPERANDS = 3;
inline constexpr const char* OPERAND_NAMES[] = {".x", ".w", ".g"};
inline const Quant& quant_of(const Recipe& r, LinearOperand o) {
    return o == LinearOperand::X ? r.x : o == LinearOperand::W ? r.w : r.g;
}

inline std::vector<StateTensor> scaling_tensors(const ModelConfig& c, const Recipe& r) {
    std::vector<StateTensor> table;
    if (r.scaling != Scaling::Delayed) return table;
    for (const Param& p : parameters(c))
        for (int o = 0; p.role.linear && o < OPERANDS; o++) {
            table.push_back({p.name + OPERAND_NAMES[o] + ".history", "F32", 4, {r.history}, p, 0});
            table.push_back({p.name + OPERAND_NAMES[o] + ".scale", "F32", 4, {1}, p, 0});
        }
    return table;
}

// The state besides the weights: remainders of the masters, moments, delayed scales. A BF16 weight and its
// signed 16-bit remainder are the FP32 master: bits = (bf16 << 16) + remainder.
inline std::vector<StateTensor> optimizer_tensors(const Setup& s) {
    std::vector<StateTensor> table;
    for (const Param& p : parameters(s.config)) {
        if (s.master) table.push_back({p.name + ".remainder", "I16", 2, {p.rows, p.cols}, p});
        for (const auto& [moment, wanted] : {std::pair{".m", s.optimizer.m}, {".v", s.optimizer.v}}) {
            const Format f = p.moment(wanted);
            const int64_t scales = s.optimizer.scales(f, p.size()), per = s.optimizer.group;
            table.push_back({p.name + moment, info(f).safetensors, info(f).bytes, {p.rows, p.cols}, p});
            if (scales) table.push_back({p.name + moment + ".max", "F32", 4, {scales}, p, per});
            if (s.optimizer.expands(f)) table.push_back({p.name + moment + ".k", "F32", 4, {scales}, p, per});
        }
    }
    for (const StateTensor& t : scaling_tensors(s.config, s.recipe)) table.push_back(t);
    return table;
}

// The elements of a tensor that this rank keeps; Model::read() and write() pass these. Those of all ranks,
// one after the other, are the whole tensor, unless every rank keeps all of it.
inline Slice kept(const Setup& s, const StateTensor& t) {
    if (t.per == 0) return {0, t.size()};
    const Slice of = owned(s, t.param);
    const int64_t first = ceil_div(of.first, t.per);
    return {first, ceil_div(of.first + of.count, t.per) - first};
}

// -----------------------------------------------------------------------------------------------------------
// Model: the weights, gradients, moments and activations of one training run on one device.

struct AdamW {     // the arguments of one step
    int64_t step;  // counts from 1, for the bias correction
    float lr, beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f, weight_decay = 0.1f;
    // Largest global norm of the gradients; 0: no clipping. Without keep_gradients it is 0, because a bucket
    // may be updated before the norm of all gradients is known.
    float clip = 1.0f;
    // Steps before this one that were skipped. Without keep_gradients they may have updated buckets, so
    // stochastic rounding counts them too: else it would use their random bits again.
    int64_t skipped = 0;
};

struct StepResult {
    double loss;       // nats per token, mean over all targets of the step that count
    double grad_norm;  // before clipping
    // Nothing was updated, because the loss, a gradient or a tensor that was quantized to FP8 was not finite,
    // a clipped norm was 2^62 or more, or no target counts. Without keep_gradients, what a GPU has updated
    // before that stays updated.
    bool skipped;
    int64_t targets = 0;  // that count, in all micro-batches of all ranks
};

// A target that does not count, say a token of a user's question: its loss and its gradient are 0. The loss
// is the mean over all targets of the step that count, also those of other micro-batches and ranks.
inline constexpr int32_t NO_TARGET = -1;
inline int64_t counted_targets(const int32_t* targets, int64_t n) {
    return n - std::count(targets, targets + n, NO_TARGET);
}
// What the mean loss of one micro-batch divides by.
inline double divisor_of_mean(const int32_t* targets, int64_t n) {
    return static_cast<double>(std::max<int64_t>(1, counted_targets(targets, n)));
}

// Tokens are in [0, V), targets too, or they are NO_TARGET; nothing checks it again. A tensor's name that is
// unknown is an Error. Every rank calls step(), evaluate(), next_logits(), quantization() and write() at the
// same time; step() and evaluate() with its own tokens. The result of step() is that of all ranks.
class Model {
public:
    virtual ~Model() = default;
    // Forward, backward and update. tokens and targets: (accumulate, B, T).
    virtual StepResult step(const int32_t* tokens, const int32_t* targets, const AdamW& adamw) = 0;
    // Mean loss of one micro-batch (B, T) without gradients, 0 if no target counts; NaN if a tensor that was
    // quantized to FP8 was not finite.
    virtual double evaluate(const int32_t* tokens, const int32_t* targets) = 0;
    // Logits (V) of the token that follows these n, 1 <= n <= T.
    virtual void next_logits(const int32_t* tokens, int64_t n, float* logits) = 0;
    // Measures every quantization in forward and backward of one micro-batch, without an update.
    virtual QuantReport quantization(const int32_t* tokens, const int32_t* targets) = 0;
    // What this rank keeps (kept()) of a tensor of weight_tensors() or optimizer_tensors(), contiguous.
    // "<param>.gradient" (FP32) is the gradient of the last step, as owned(), until the next forward
    // pass; it is read-only and exists only with keep_gradients.
    virtual void read(const std::string& name, void* out) = 0;
    virtual void write(const std::string& name, const void* in) = 0;
    virtual const Setup& setup() const = 0;
};

std::unique_ptr<Model> make_reference(const Setup& setup);  // reference.cpp: the CPU
std::unique_ptr<Model> make_gpu(const Setup& setup);        // gpu/this_gpu.cu; Error if no GPU can run it
// gpu/this_gpu.cu; empty if this GPU can be used, else the reason and what to do. It starts no other GPU.
std::string why_no_gpu(int gpu = 0);
int gpu_capability();  // of the GPU that why_no_gpu() was asked for: 90 is 9.0; 0 in a program without CUDA

}  // namespace coat
