// plan.h - what can be said of a run before it starts: the learning rate of every step, the format of every tensor and the
// bytes of every category (the paper's table of memory, for any model). Nothing here allocates or trains.
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

// Sizes of a run that cannot work, told before anything is allocated. The model's own sizes have their validate in coat.h.
void validate(const Setup& s);

// The precision flow (paper figure 2): format and granularity of what every operator reads, writes and keeps for backward.
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
    const char* unit;  // what the figure beside the bytes is per
    int64_t units;     // how many of those there are
    double per_unit() const { return static_cast<double>(bytes) / static_cast<double>(units); }
};
std::vector<MemoryRow> memory_plan(const Setup& s);

int64_t total_bytes(const std::vector<MemoryRow>& plan);
int64_t total_bytes(const std::vector<MemoryRow>& plan, Category category);
double optimizer_bytes_per_parameter(const Setup& s);
double saved_bytes_per_token_and_layer(const Setup& s);  // without the final norm's input, which is not a layer's

Setup bf16_beside(Setup s);  // the same run in the bf16 recipe with FP32 moments, which the plan is printed beside

void print_precision_plan(const Setup& s);
void print_memory_plan(const Setup& s);

}  // namespace coat
