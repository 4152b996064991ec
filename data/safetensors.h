// data/safetensors.h - safetensors files in and out (safetensors.cpp).
//
// The format: an 8-byte little-endian length n, n bytes of JSON {name: {dtype, shape, data_offsets}}, the tensors' bytes without
// a gap (https://huggingface.co/docs/safetensors). What a header says is believed only after it has been checked.
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
    const uint8_t* data;  // in the mapped file, which may put it on any address: copy it with memcpy
    int64_t bytes;
};

std::string shape_text(const std::vector<int64_t>& shape);  // "[50257, 768]"

// A file, mapped. Copies share the mapping.
class Safetensors {
public:
    explicit Safetensors(const std::string& path);  // Error where the header is not true of the file
    const std::string& path() const { return file_.path; }
    const std::vector<Tensor>& tensors() const { return tensors_; }  // in the order of their bytes
    const std::map<std::string, std::string>& metadata() const { return metadata_; }
    const Tensor* find(const std::string& name) const;  // null if there is none

private:
    MappedFile file_;
    std::vector<Tensor> tensors_;
    std::map<std::string, size_t> index_;
    std::map<std::string, std::string> metadata_;
};

// Tensors lie in the file in the order of the table. Their bytes are streamed in that order, in pieces of any size, so that no
// more than a piece need be in memory.
class SafetensorsWriter {
public:
    SafetensorsWriter(const std::string& path, const std::vector<TensorInfo>& tensors, const std::map<std::string, std::string>& metadata);
    void write(const void* data, int64_t bytes);
    void finish();  // throws std::logic_error unless all that the header promises was written

private:
    OutputFile file_;
    int64_t left_ = 0;
};

}  // namespace coat
