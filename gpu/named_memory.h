// gpu/named_memory.h - what a GPU keeps of a run: its first values, and how a checkpoint reads and writes
// it, tensor by tensor, each with a name (common/state_tensors.h).
#pragma once
#include <map>

#include "parameter_tensors.h"

namespace coat::gpu {

class NamedMemory {
public:
    NamedMemory(const GpuContext& context, const MemoryMap& memory, const ParameterTensors& parameter_tensors,
                ScaleTable& scale_table);

    // Gives all weights, moments and scales the values that a new run begins with. (A run that continues
    // then overwrites them by write().)
    void initialize();
    // These are for Model::read() and write(). They copy what this rank owns of the tensor with this name to
    // the host, or from it. read() also copies gradients, whose names end with ".gradient". write() also
    // computes the amax of the parameter's weight anew, even if the tensor is a moment, which does not
    // change this amax.
    void read(const std::string& name, void* out) const;
    void write(const std::string& name, const void* in);

private:
    // The fp32 recipe stores FP32 masters, where files have two tensors: the BF16 weight, which is the
    // master rounded, and the remainder, which is its lower half.
    enum class HalfOfMaster : uint8_t { None, Rounded, Remainder };
    struct Entry {
        size_t param_index;  // the parameter to which the tensor belongs
        void* data;
        int64_t bytes;
        // Which half of FP32 masters the tensor is. None: it is on the GPU as in the file, and data and
        // bytes are used.
        HalfOfMaster half = HalfOfMaster::None;
    };
    const GpuContext& context_;
    const MemoryMap& memory_;
    const ParameterTensors& parameter_tensors_;
    ScaleTable& scale_table_;
    std::map<std::string, Entry> entries_;  // by name

    void list_tensors();
    void list_delayed_scales(size_t i);
    void compute_weight_amax(size_t i) const;
    const Entry& find(const std::string& name) const;
    std::vector<uint32_t> read_masters(size_t i) const;
    void read_half_of_masters(const Entry& entry, uint16_t* out) const;
    void write_half_of_masters(const Entry& entry, const uint16_t* in) const;
    void read_gradient(size_t i, float* out) const;
};

}  // namespace coat::gpu
