// data/safetensors.h - what everything in data/ stands on: files that are read as memory, or written and
// synced; JSON; and tensors in Hugging Face's safetensors files (safetensors.cpp).
//
// A file may come from anywhere and be wrong about everything. What is wrong is an Error that names the file
// and, in JSON, the field and what was expected.
//
// A safetensors file (https://huggingface.co/docs/safetensors) has three parts: 8 bytes with the length n of
// the next part, little-endian; n bytes of JSON, {name: {dtype, shape, data_offsets}}; the tensors' bytes.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <vector>
#include <nlohmann/json.hpp>

#include "../error.h"

namespace coat {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;  // its fields keep their order

// -----------------------------------------------------------------------------------------------------------
// Files

inline std::string path_in(const std::string& folder, const std::string& file) {
    return (fs::path(folder) / file).string();
}

// A whole file as memory, read only. Pages are read when they are touched, so it may be larger than memory.
// The file is not kept open: there may be thousands. To touch a page that is no longer there, because the
// file became shorter, ends the program.
class MappedFile {
public:
    // Error if it cannot be read; std::bad_alloc if there is no room for it among the addresses.
    explicit MappedFile(const std::string& path);
    MappedFile(const MappedFile&) = delete;
    ~MappedFile();
    const uint8_t* data() const { return static_cast<const uint8_t*>(memory_); }  // null if the file is empty
    int64_t bytes() const { return bytes_; }
    std::string_view text() const { return {static_cast<const char*>(memory_), static_cast<size_t>(bytes_)}; }
    void require_whole() const;  // Error if the file has become shorter

private:
    const std::string path_;
    void* memory_ = nullptr;
    int64_t bytes_ = 0;
    uint64_t device_ = 0, number_ = 0;  // what the file is, also when another takes its name
};

// The hash of some bytes, which follow bytes that have the given hash. A change in one word of 8 bytes always
// changes the result.
uint64_t hash_bytes(const void* data, int64_t bytes, uint64_t hash);
uint64_t hash_of(const MappedFile& file);
std::string hash_file(const std::string& path);  // likewise, as a decimal number

// Closes a file and waits until it is on the disk. Error if this or an earlier write has failed: nobody else
// has to check that.
void finish(std::ofstream& file, const std::string& path);
void save_file(const std::string& path, const std::string& bytes);

// Waits until a file, or the names in a folder, are on the disk: a new name survives a power failure then.
void sync(const std::string& path);

// -----------------------------------------------------------------------------------------------------------
// JSON

// One JSON object of a file, whose fields are checked as they are read. A field that is null counts as
// missing, as in Hugging Face's config.json.
struct Fields {
    std::string path;  // of the file, for errors
    json object;

    bool has(const std::string& field) const { return object.contains(field) && !object[field].is_null(); }

    // The field as a T: int64_t is a whole number up to 10^15, so that sums do not overflow; float is a
    // positive number; double, bool, std::string, std::vector<int64_t>; Fields is an object. A missing field
    // has the value `otherwise`; without one it is an Error.
    template <class T> T get(const std::string& field, const std::optional<T>& otherwise = {}) const;

    // Throws the Error that the field is not what is expected.
    [[noreturn]] void reject(const std::string& field, const std::string& expected) const;
};

// Error if the text is not an object, is nested too deep, or takes too much memory.
Fields read_json(const std::string& path);

template <class T> T Fields::get(const std::string& field, const std::optional<T>& otherwise) const {
    if (otherwise && !has(field)) return *otherwise;
    const json value = has(field) ? object[field] : json();
    const auto require = [&](bool ok, const char* expected) {
        if (!ok) reject(field, expected);
    };
    const auto is_natural = [](const json& number) {
        return number.is_number_unsigned() && number.get<double>() <= 1e15;
    };
    if constexpr (std::is_same_v<T, int64_t>) {
        require(is_natural(value), "a whole number up to 10^15");
    } else if constexpr (std::is_same_v<T, float>) {
        require(value.is_number(), "a positive number");
        require(value.get<float>() > 0 && value.get<float>() < INFINITY, "a positive number");
    } else if constexpr (std::is_same_v<T, double>) {
        require(value.is_number(), "a number");
    } else if constexpr (std::is_same_v<T, bool>) {
        require(value.is_boolean(), "true or false");
    } else if constexpr (std::is_same_v<T, std::string>) {
        require(value.is_string(), "text");
    } else if constexpr (std::is_same_v<T, std::vector<int64_t>>) {
        require(value.is_array() && std::all_of(value.begin(), value.end(), is_natural),
                "a list of whole numbers up to 10^15");
    } else {
        static_assert(std::is_same_v<T, Fields>);
        require(value.is_object(), "an object");
        return Fields{path, value};
    }
    if constexpr (!std::is_same_v<T, Fields>) return value.get<T>();
}

// -----------------------------------------------------------------------------------------------------------
// Tensors of Hugging Face's files

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
    const HfTensor& require(const std::string& name, const std::vector<int64_t>& shape,
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
