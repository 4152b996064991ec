// data/safetensors.h - tensors in Hugging Face's safetensors files (safetensors.cpp).
//
// A safetensors file (https://huggingface.co/docs/safetensors) has three parts: 8 bytes with the length n of
// the next part, little-endian; n bytes of JSON, {name: {dtype, shape, data_offsets}}; the tensors' bytes.
// What is wrong in a file is an Error that names it.
#pragma once
#include <cstdint>
#include <list>
#include <map>
#include <string>
#include <vector>

#include "files.h"

namespace coat {

struct HfTensor {
    std::string name;
    std::string dtype;  // as in the file: "BF16", "F8_E4M3", ...
    std::vector<int64_t> shape;
    const uint8_t* data = nullptr;  // in a file that is read, at any alignment: copy values with memcpy
    int64_t bytes = 0;              // of a file that is read
};

// The tensors of one file, or those of a folder: in model.safetensors, or else in the files that
// model.safetensors.index.json names, or else in all files model*.safetensors. Large models come in several.
class Safetensors {
public:
    explicit Safetensors(const std::string& path);  // Error if a header does not describe its file
    const std::string& path() const { return path_; }
    const std::map<std::string, HfTensor>& tensors() const { return tensors_; }  // by name
    // The tensor of this name; Error unless it has this shape and one of these dtypes ("BF16 F16").
    const HfTensor& find_tensor(const std::string& name, const std::vector<int64_t>& shape,
                                const std::string& dtypes) const;

private:
    void add(const std::string& file);
    const std::string path_;
    std::list<MappedFile> files_;
    std::map<std::string, HfTensor> tensors_;
};

// What a safetensors file with these tensors begins with. Their bytes follow in this order.
std::string safetensors_header(const std::vector<HfTensor>& tensors);

}  // namespace coat
