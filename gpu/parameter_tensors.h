// gpu/parameter_tensors.h - what one GPU keeps of each parameter: weights, gradients and moments. model.cu
// updates them (Network::update_buckets()). How a checkpoint reads and writes them is in gpu/named_memory.h.
//
// What a rank owns has its own names (gpu/memory_layout.h). With one GPU they are second names. Read the left
// one as the one beside it:
//
//   what a rank owns            with one GPU             where it is
//   owned_weights               all weights              gpu/memory_map.h
//   gradient_sums_by_bucket     gradients_by_bucket      gpu/memory_map.h
//   owned_weight_data(i)        weights[i].data          here
//   owned_gradient_sum(i)       gradients[i].data        here
//
// What several GPUs change is said at the end of this file.
#pragma once
#include <map>
#include <optional>

#include "scale_table.h"

namespace coat::gpu {

// Weights, gradients and moments, by parameter. `i` is the index of a parameter in params, the table of
// common/architecture.h in the order of forward. The memory is allocated elsewhere (gpu/memory_map.h): this
// class finds what belongs to a parameter.
class ParameterTensors {
public:
    // Copies AdamW's table of parameters to the GPU. (The weights, moments and scales get their first values
    // by NamedMemory::initialize().)
    ParameterTensors(const GpuContext& context, const MemoryMap& memory, const ScaleTable& scale_table);

    const RunSettings& settings;
    const std::vector<Param>& params;
    const std::vector<BucketRange> buckets;  // by bucket (gpu/memory_layout.h): its parameters
    // By parameter: where it is. One more entry says where the last parameter ends.
    const std::vector<ParamPlace> places;
    const TensorFormat format_of_weights, format_of_gradients;
    const int64_t bytes_per_weight, bytes_per_gradient;  // the bytes of one element

    // By parameter, (rows, cols): the weight that forward and backward read, and the gradient that backward
    // writes.
    std::vector<TensorRef> weights, gradients;

    // The index of the parameter with this name.
    size_t param_index(const std::string& name) const;
    // The bias that belongs to the weight of a linear layer or of a norm, if there is one.
    std::optional<size_t> bias_index(size_t weight_index) const;
    // The number, in the order of forward, of the linear layer whose weight is parameter i; -1 if there is
    // none.
    int64_t linear_layer_index(size_t i) const { return linear_layer_indices_[i]; }

    // What the update is given: the parameters and gradients of the buckets [first_bucket, end_bucket); and
    // the numbers of their units (gpu/gradient_norm.h).
    ParamsToUpdate params_of_buckets(int64_t first_bucket, int64_t end_bucket) const;
    Range units_of_buckets(int64_t first_bucket, int64_t end_bucket) const;

    // Where this rank's part of parameter i begins: its weights; and the sums of its gradients, which the
    // update reads.
    uint8_t* owned_weight_data(size_t i) const {
        return static_cast<uint8_t*>(memory_.owned_weights.values) +
               places[i].memory_offset * bytes_per_weight;
    }
    uint8_t* owned_gradient_sum(size_t i) const;

    // Where the update leaves the amax of the weight that is parameter i. Null unless parameter i is the
    // weight of a linear layer; and null with delayed scaling, where a weight's amax is found when its
    // operand is made.
    // (Recipes that need no amaxes for scales have this amax, too, because write_loss_or_nan() looks at the
    // amaxes of all weights.)
    float* weight_amax(size_t i) const;

    // --- The rest can wait. First values, and several GPUs

    // What this rank owns of the weight of a linear layer, as a tensor: with one rank the weight itself.
    // (With several ranks a part may end within a row of the weight. So its shape is made up: rows of 256
    // elements. A linear layer has multiples of 16 inputs and outputs, so the part has a multiple of 256
    // elements. A grid is large enough for two billion elements.)
    TensorRef owned_weight(size_t i) const;

    // --- The quantization report

    // Adds to the report what storing the moments of a bucket would lose.
    void measure_moment_errors_of(int64_t bucket, QuantReport& report) const;
    // The expansion exponents of all moment groups of `moments`: MemoryMap::first_moments or second_moments.
    std::vector<float> expansion_exponents(const std::vector<MomentRef>& moments) const;

private:
    const GpuContext& context_;
    const MemoryMap& memory_;
    const ScaleTable& scale_table_;
    const cudaStream_t stream_;
    std::vector<int64_t> linear_layer_indices_;  // by parameter
    std::map<std::string, size_t> indices_;      // of parameters, by name

    void list_weights_and_gradients();
    void upload_adamw_params();
};

// -----------------------------------------------------------------------------------------------------------
// With several GPUs (this can wait)
//
// Each of them is a rank, which owns a part of each matrix. A matrix has no data in `weights` until it is
// gathered. Then Sharding writes its address and its format there. Backward writes gradients to buffers, and
// the update reads the sums of the step. So the names in the table at the top of this file differ.

}  // namespace coat::gpu
