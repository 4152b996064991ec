// data/safetensors.h - safetensors files, read and written (safetensors.cpp).
//
// The format (https://huggingface.co/docs/safetensors): an 8-byte little-endian length n; n bytes of JSON
// {name: {dtype, shape, data_offsets}}; then the bytes of all tensors without gaps.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "file.h"

namespace coat {

struct TensorInfo {
    std::string name, dtype;  // dtype as in the file: "BF16", "F8_E4M3", ...
    std::vector<int64_t> shape;
};

struct Tensor : TensorInfo {
    const uint8_t* data;  // in the mapped file, at any alignment: copy values with memcpy
    int64_t bytes;
};

// A safetensors file, mapped.
class Safetensors {
public:
    explicit Safetensors(const std::string& path);  // Error if the header does not describe the file
    const std::string& path() const { return file_.path(); }
    const std::vector<Tensor>& tensors() const { return tensors_; }  // in the order of their bytes
    const Tensor* find(const std::string& name) const;  // null if there is none
    // The tensor of this name; Error unless the file has it with this dtype and shape.
    const Tensor& require(const std::string& name, const std::string& dtype,
                          const std::vector<int64_t>& shape) const;

private:
    MappedFile file_;
    std::vector<Tensor> tensors_;
    std::map<std::string, size_t> index_;
};

// Writes the header for a table of tensors with different names; write() then takes their bytes in the order
// of the table, in pieces of any size, so that memory holds no more than a piece.
class SafetensorsWriter {
public:
    SafetensorsWriter(const std::string& path, const std::vector<TensorInfo>& tensors);
    void write(const void* data, int64_t bytes);
    void finish();  // std::logic_error unless exactly the bytes of the table were written

private:
    OutputFile file_;
    int64_t left_ = 0;
};

}  // namespace coat
